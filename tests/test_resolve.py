"""What a run leaves to the machine: device, precision, threads and loss; and whether it fits into memory."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import tiny

from lm.config import ModelConfig, RunConfig
from lm.errors import UserError
from lm.system.device import cores, count_threads, has_native_bf16
from lm.training.loss import HAS_CHUNKED, LossOf
from lm.training.processes import build_fabric
from lm.training.resolve import build_model, resolve
from tests.helpers.runs import change

CPU = change(RunConfig(), accelerator="cpu")


@pytest.fixture(autouse=True)
def uncached():
    has_native_bf16.cache_clear()
    yield
    has_native_bf16.cache_clear()


# --- device and precision


def test_a_cpu_trains_in_bf16_where_it_is_native(monkeypatch):
    for capabilities, precision in (
        ({"avx512_bf16": True, "cpu_name": "AMD EPYC"}, "bf16-mixed"),
        ({"avx512_bf16": True, "cpu_name": "Intel Xeon"}, "32-true"),
        ({"avx512_bf16": True, "amx_bf16": True, "cpu_name": "Intel Xeon"}, "bf16-mixed"),
        ({}, "32-true"),  # of a torch that does not tell
    ):
        has_native_bf16.cache_clear()
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=capabilities: known, raising=False)
        assert resolve(CPU, 257).trainer.precision == precision


@pytest.mark.parametrize(("is_native", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_a_gpu_trains_in_native_bf16(is_native, precision, monkeypatch):
    """Others emulate it, several times slower."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: is_native or including_emulation
    )
    for name in ("gpu", "auto"):
        trainer = resolve(change(RunConfig(), accelerator=name), 257).trainer
        assert (trainer.accelerator, trainer.precision) == ("cuda", precision)


def test_an_absent_gpu_is_named_and_a_mac_is_told_what_it_cannot_repeat(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = change(RunConfig(model=ModelConfig(dropout=0.1)), accelerator="gpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name in ("gpu", "mps"):
        with pytest.raises(UserError, match=f"^trainer.accelerator={name}: "):
            resolve(change(run, accelerator=name), 257)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve(run, 257).trainer.accelerator == "mps"
    with pytest.raises(UserError, match=r"model\.dropout=0"):
        resolve(replace(run, activation_checkpointing=True), 257)


def test_torchrun_and_the_trainer_must_agree(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    resolve(CPU, 257)  # a variable that somebody else has left
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(UserError, match=r"^trainer\.devices: .*\b2\b.*\b1\b"):
        resolve(CPU, 257)
    resolve(change(CPU, devices=2), 257)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    with pytest.raises(UserError, match=r"^trainer\.num_nodes=2: expected torchrun or srun"):
        build_fabric(change(CPU, num_nodes=2).trainer)


# --- threads


def test_threads_are_those_of_the_environment_or_all_cores(monkeypatch):
    for value, threads in {" 1,2": 1, "1000": cores()}.items():  # a host may have more cores than a container
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert resolve(CPU, 257).threads == threads
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= (resolve(CPU, 257).threads or 0) <= (os.cpu_count() or 1)
    with pytest.raises(UserError, match=r"^threads=100000: "):
        resolve(replace(CPU, threads=100_000), 257)
    for value in ("0", "two"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        with pytest.raises(UserError, match=f"^OMP_NUM_THREADS={value}: "):
            count_threads(None)
        assert count_threads(1) == 1


def test_cores_are_limited_by_the_quota_of_a_container(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(64)}, raising=False)
    monkeypatch.setattr("lm.system.device.CPU_QUOTA", tmp_path / "cpu.max")
    for quota, expected in (("150000 100000", 2), ("max 100000", 64), ("", 64)):
        (tmp_path / "cpu.max").write_text(quota)
        assert cores() == expected


@pytest.mark.skipif(not HAS_CHUNKED, reason="needs torch 2.13")
def test_auto_chooses_the_faster_loss():
    for vocab_size, changes, loss in (
        (8192, {}, "chunked"),
        (257, {}, "plain"),
        (10**5, {"compile": True}, "plain"),
        (10**5, {"loss": "plain"}, "plain"),
        (257, {"loss": "chunked"}, "chunked"),
        (8192, {"ngram_smoothing": 0.5}, "plain"),
    ):
        assert resolve(change(CPU, **{"precision": "32-true", **changes}), vocab_size).loss == loss
    with pytest.raises(UserError, match="loss=chunked"):
        resolve(change(CPU, loss="chunked", ngram_smoothing=0.5), 257)


@pytest.mark.slow
def test_every_run_of_a_process_is_compiled(monkeypatch):
    compiled = []

    def backend(graph, inputs):
        compiled[-1] += 1
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    for width in range(16, 160, 16):
        compiled.append(0)
        run = replace(RunConfig(loss="plain", compile=True), model=tiny(n_layers=1, d_ff=width))
        tokens = torch.zeros(1, 8, dtype=torch.long)
        LossOf(build_model(run, 97), run)(tokens, tokens)
    assert min(compiled) > 0


def test_an_embedding_has_a_row_for_each_token():
    with pytest.raises(UserError, match=r"^model\.vocab_rows=10: expected 97 or more, or null$"):
        build_model(replace(CPU, model=tiny(vocab_rows=10)), 97)
