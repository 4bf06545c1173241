"""Threads that wait for each other sleep beside other programs; the number of threads is kept, or measured once."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from conftest import SEQ, TIED, VOCAB, tiny
from test_resume import a_run

import lm.benchmark.busy as benchmark
import lm.system.waiting as waiting
import lm.training.threads as probe
from lm.benchmark.shapes import Shape
from lm.config import BadInput
from lm.model.transformer import Transformer
from lm.system.device import MOST_THREADS, cores, set_threads
from lm.system.waiting import SET_BY_USER, STAT, IdleThreads, OtherPrograms, adaptive_waiting
from lm.training.train import train

only_linux = pytest.mark.skipif(not STAT.exists(), reason="the load is read from /proc/stat")
gnu = pytest.mark.skipif("libgomp" not in Path("/proc/self/maps").read_text() if STAT.exists() else True, reason="GNU")


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in SET_BY_USER:
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def cpu_seconds_of_waiting() -> float:
    """CPU seconds of this process in pauses that follow on work of two threads."""
    torch.zeros(2**17).add_(1)
    spent = 0.0
    for _ in range(20):
        torch.zeros(2**17).add_(1)
        before = time.process_time()
        time.sleep(0.02)
        spent += time.process_time() - before
    return spent


@gnu
@pytest.mark.skipif(cores() < 2, reason="on one core, two threads never spin")
def test_threads_that_wait_sleep_beside_idle_threads() -> None:
    spinning = cpu_seconds_of_waiting()
    idle = IdleThreads(2)
    time.sleep(0.2)
    asleep = cpu_seconds_of_waiting()
    idle.end()
    again = cpu_seconds_of_waiting()
    assert asleep < 0.3 * min(spinning, again)


def test_idle_threads_change_no_bit() -> None:
    def gradient() -> torch.Tensor:
        net = Transformer(tiny(d_model=128), TIED, vocab_size=VOCAB, seq_len=SEQ, seed=0)
        tokens = torch.arange(64 * SEQ).view(64, SEQ) % VOCAB
        net(tokens).square().mean().backward()
        found = net.embed.weight.grad
        assert found is not None
        return found

    without = gradient()
    idle = IdleThreads(2)
    beside = gradient()
    idle.end()
    assert torch.equal(without, beside)


@only_linux
def test_what_other_programs_use_is_seen() -> None:
    others = OtherPrograms()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.4: pass"], check=True)
    assert others.cores_used() > 0.4


def watchers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if getattr(one, "_target", None) is waiting.keep_watch]


def becomes(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@only_linux
def test_idle_threads_come_and_go_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PERIOD", 0.01)
    monkeypatch.setattr(waiting, "ABOVE", -100.0)  # always too few cores
    monkeypatch.setattr(waiting, "BELOW", -100.0)
    alone = threading.active_count()
    with adaptive_waiting(2):
        assert becomes(lambda: threading.active_count() > alone + 1)
        monkeypatch.setattr(waiting, "ABOVE", 100.0)
        monkeypatch.setattr(waiting, "BELOW", 100.0)
        assert becomes(lambda: threading.active_count() == alone + 1)
        monkeypatch.setattr(waiting, "ABOVE", -100.0)
        monkeypatch.setattr(waiting, "BELOW", -100.0)
        assert becomes(lambda: threading.active_count() > alone + 1)
    assert threading.active_count() == alone


@pytest.mark.parametrize("name", SET_BY_USER)
def test_a_user_who_says_how_threads_wait_is_obeyed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with adaptive_waiting(2):
        assert len(watchers()) == STAT.exists()
        monkeypatch.setenv(name, "passive")
        with adaptive_waiting(2):
            assert len(watchers()) == STAT.exists()


@pytest.mark.slow
def test_a_run_and_its_evaluation_wait_adaptively(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm.config import EvaluateConfig
    from lm.inference.evaluate import evaluate_run

    seen: list[int] = []
    monkeypatch.setattr(waiting, "keep_watch", lambda threads, ended: seen.append(threads))
    train(a_run(corpus, tmp_path / "run", steps=1, threads=2))
    assert seen == [2] * STAT.exists()
    evaluate_run(EvaluateConfig(run_dir=str(tmp_path / "run"), threads=2))
    assert seen == [2, 2] * STAT.exists()


def test_auto_records_what_it_chose(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probe, "TURN", 0.0)
    monkeypatch.setattr(probe, "SETTLING", 0.0)
    caplog.set_level("INFO", "lm")
    result = train(a_run(corpus, tmp_path / "run", steps=2, threads="auto"))
    (chosen, shown) = re.findall(r"threads=auto: chose (\d+); at the present load a step takes (.*)", caplog.text)[0]
    assert result["threads"] == int(chosen) == torch.get_num_threads()
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["threads"] == int(chosen)
    assert f"with {chosen}" in shown
    assert "with 1" in shown
    assert f"with {cores()}" in shown
    same = train(a_run(corpus, tmp_path / "same", steps=2, threads=int(chosen)))  # the measurement leaves no trace
    assert (same["val_loss"], same["config_hash"]) == (result["val_loss"], result["config_hash"])


def test_auto_keeps_the_threads_of_a_run_that_it_continues(corpus: Path, tmp_path: Path) -> None:
    kept = 3  # which no measurement would choose on two cores
    run = a_run(corpus, tmp_path / "run", steps=12, threads=kept)
    train(run)
    (tmp_path / "run/result.json").unlink()
    newest = sorted((tmp_path / "run/checkpoints").iterdir())[-1]
    newest.unlink()
    again = train(replace(run, threads="auto"))
    assert again["threads"] == torch.get_num_threads() == kept
    assert again["resumed_from"] == [10]


def test_more_threads_than_a_machine_can_bear_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    most = MOST_THREADS * cores()
    with pytest.raises(BadInput, match=f"^threads=100000: expected at most {most}, "):
        set_threads(100_000)
    monkeypatch.setenv("OMP_NUM_THREADS", str(most + 1))
    with pytest.raises(BadInput, match=f"^OMP_NUM_THREADS={most + 1}: expected at most {most}, "):
        set_threads(None)
    assert torch.get_num_threads() == 2


def test_a_finished_run_of_a_larger_machine_is_still_shown(corpus: Path, tmp_path: Path) -> None:
    run = a_run(corpus, tmp_path / "run", steps=1)
    result = train(run)
    assert train(replace(run, threads=100_000)) == result


@only_linux
def test_the_benchmark_times_steps_beside_a_busy_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "DEFAULT", Shape(tiny(), VOCAB, 1, 8))
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    monkeypatch.setattr(benchmark, "SETTLING", 0.0)
    found = list(benchmark.busy("cpu", 0.0))
    ways = ["2 threads", "2 threads, always spinning", "1 thread"]
    assert [one.name for one in found] == [f"step time, default, {way}" for way in ways]
    assert all(one.reference == "idle" and one.value > 0 and one.reference_value for one in found)
    with benchmark.other_program() as program:
        assert program.poll() is None
    assert program.returncode == -9
