"""Fixtures that tests share: a small text, a finished run, and commands as a user starts them."""

import atexit
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

from lm.config import user_classes
from lm.training import result
from tests.helpers import ROOT
from tests.helpers.tiny import TEXT, TINY_RUN

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts in the background
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers share the cache of this process, which keeps other caches
    os.environ["MPLCONFIGDIR"] = os.environ.get("MPLCONFIGDIR") or os.path.expanduser("~/.cache/matplotlib")
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lm-tests-cache-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


settings.register_profile("lm", deadline=None, max_examples=25)
settings.load_profile("lm")


def pytest_collection_finish():
    """What is imported stays: a garbage collector that looks through it takes a sixth of the time of the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _models_are_counted_once():
    """FLOPs are a pure function of the configuration, but for classes of a test's own. Counting takes a while."""
    counted = {}

    def count(net):
        model = repr((net.config, net.head_config, net.vocab_size, net.seq_len))
        if model not in counted or user_classes(net.config):
            counted[model] = count_flops(net)
        return counted[model]

    count_flops = result.flops_per_token
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result, "flops_per_token", count)
        yield


@pytest.fixture(autouse=True)
def one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """The same text for many tests, which leave it as it is."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="session")
def finished_run(text_file):
    """A finished run on that text, which tests leave as it is."""
    from lm.training.train import train
    from tests.helpers.runs import composed

    return train(composed(*TINY_RUN, f"data.path={text_file}", f"run_dir={text_file.parent}/a run"))[0]


@pytest.fixture
def open_folder():
    """A folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def script(tmp_path):
    """Run scripts/NAME.py as a user would, in an empty directory."""

    def run(name, *words, env=None, timeout=300):
        return subprocess.run(
            [sys.executable, ROOT / "scripts" / f"{name}.py", *words],
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            text=True,
            capture_output=True,
            timeout=timeout,
        )

    return run


@pytest.fixture
def command(monkeypatch, capsys):
    """Run scripts/NAME.py in this process: its exit code, standard output and standard error."""
    import lm.cli.main

    def run(name, *args):
        monkeypatch.setattr(sys, "argv", [f"scripts/{name}.py" if name else "lm-lab", *args])
        monkeypatch.setattr(sys, "orig_argv", ["python", *sys.argv])
        with pytest.raises(SystemExit) as left:
            lm.cli.main.main(name)
        return (int(left.value.code or 0), *capsys.readouterr())

    logger = logging.getLogger("lm")
    handlers, level = logger.handlers.copy(), logger.level
    signals = {signum: signal.getsignal(signum) for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    yield run
    logger.handlers[:] = handlers
    logger.setLevel(level)
    for signum, handler in signals.items():
        signal.signal(signum, handler)
    for name in logging.root.manager.loggerDict:  # Hydra disables those that exist
        logging.getLogger(name).disabled = False


@pytest.fixture
def lab(command):
    """Run lm-lab as `command` runs a script."""
    return partial(command, None)
