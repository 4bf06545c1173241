"""What tests share: a tiny model, a small text, and scripts run as real processes."""

import atexit
import gc
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

from lm.config import HEAD_SETTINGS, HeadConfig, ModelConfig, user_classes
from lm.config import HEADS as KINDS
from lm.training import result

ROOT = Path(__file__).resolve().parent.parent
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


TINY = ModelConfig(n_layers=2, d_model=32, n_heads=4, d_ff=64, ffn="relu2")
TIED = HeadConfig(embedding_std=0.02)
UNTIED = HeadConfig(name="untied", kind="untied", embedding_std=1.0, head_std=0.01, head_lr_multiplier=1.0)
HEADS = {
    "tied": TIED,
    "untied": UNTIED,
    "tied_scaled": HeadConfig(name="tied_scaled", embedding_std=0.02, embedding_multiplier=None),
    **{
        kind: HeadConfig(name=kind, kind=kind, embedding_std=0.02, head_lr_multiplier=1.0)
        for kind in ("tied_projected", "untied_from_embedding")
    },
    "untied_midtraining": HeadConfig(
        name="untied_midtraining", kind="untied_midtraining", embedding_std=0.02, head_lr_multiplier=1.0, untie_at=0.5
    ),
}
EVERY_HEAD = HEADS | {  # with any further kind of HEAD_SETTINGS in lm/config.py
    kind: HeadConfig(name=kind, kind=kind, embedding_std=0.02, **dict.fromkeys(HEAD_SETTINGS[kind], 0.5))
    for kind in KINDS
    if kind not in HEADS
}
VOCAB, SEQ = 97, 16

# a run of seconds; tests add words to it
TINY_RUN = [
    *("experiment=none", "data=text", "data.seq_len=32", "data.batch_size=4", "tokenizer=byte"),
    *("model.n_layers=2", "model.d_model=32", "model.n_heads=2", "model.d_ff=64"),
    *("trainer=cpu", "trainer.max_steps=20", "trainer.log_every_n_steps=1", "threads=1", "prompts=[]"),
    *("checkpoint.every=5", "validation.every=10", "validation.batches=2"),
]


# about nine kilobytes
TEXT = "".join(f"def f{i}(x, y):\n    return x * {i * 7 % 31} + y  # {i:x}\n" for i in range(200))


WHOLE_RESULT = {  # the keys of a result.json
    **dict.fromkeys(("val_loss", "val_bpb", "val_top1", "seconds", "tokens_per_second"), 1.0),
    **dict.fromkeys(("n_params", "n_params_trained", "flops_per_token", "steps", "tokens", "seed", "threads"), 1),
    **dict.fromkeys(("head", "config_hash", "data_hash", "tokenizer_hash"), "x"),
    **dict.fromkeys(("device", "cpu", "precision", "python"), "x"),
    **dict.fromkeys(("val_tokens", "val_bytes", "train_text_tokens"), 1),
    "n_params_by_role": {"embedding": 1},
    "baselines_bpb": {"ngram": 2.0},
    "resumed_from": [],
    "ended_by": "steps",
    "best": None,
    "versions": {"torch": "2"},
    "samples": [],
    "copied": 0.0,
}


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


def some(cases, every):
    """Cases of a test: one of `every` in the fast tests, the others nightly. A tuple is several arguments."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.nightly] * (i % every > 0))
        for i, case in enumerate(cases)
    ]


def tiny(**changes):
    return replace(TINY, **changes)


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


@contextmanager
def as_nobody():
    """Permissions do not bind root, as which tests may run."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def small_disk(n_bytes=4096):
    """No file can grow beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


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
