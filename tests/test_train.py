"""Training in this process: the files of a run, what its numbers depend on, and that it learns."""

import json
import math
import os
import re
import runpy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lm import generate, load_model
from lm.cli.evaluate import EvaluateConfig
from lm.config import CheckpointConfig, DiagnosticsConfig, ModelConfig, OptimConfig, RunConfig, ValidationConfig
from lm.data.batches import TrainingStream
from lm.errors import Diverged
from lm.lab.measures.samples import validation_prompts
from lm.lab.runs.find import find_runs
from lm.lab.runs.page import write_page
from lm.scoring import validate
from lm.system.device import cores, count_threads, has_native_bf16
from lm.training.log import MetricsFile
from lm.training.loss import HAS_CHUNKED
from lm.training.resolve import build_fabric, build_model, resolve
from lm.training.train import train
from tests.helpers import ROOT
from tests.helpers.decoding import tokens
from tests.helpers.models import equal, weights
from tests.helpers.refusals import refused
from tests.helpers.runs import (
    MUON,
    change,
    checkpoints,
    column,
    composed,
    data_of,
    evaluate_run,
    losses,
    overfitting_run,
    result,
    rows,
    short_run,
    signalled,
    stop,
)
from tests.helpers.tiny import HEADS, TEXT, UNTIED, WHOLE_RESULT, tiny

GOLDEN = Path(__file__).parent / "golden.json"


@pytest.fixture(scope="module")
def finished(text_file, tmp_path_factory):
    """A finished run, its directory and its result."""
    run = short_run(text_file, tmp_path_factory.mktemp("finished") / "run", head=UNTIED, prompts=None)
    return run, *train(run)


# --- the files of a run


def test_a_run_leaves_what_the_design_promises(finished):
    run, folder, scores = finished
    assert str(folder) == run.run_dir
    assert result(folder) == scores
    assert {*WHOLE_RESULT, "ngram_share", "init_from"} <= scores.keys()
    assert scores["n_params"] == sum(scores["n_params_by_role"].values())
    assert scores["tokens"] == 20 * 4 * 32
    assert scores["val_tokens"] == len(TEXT) - int(len(TEXT) * 0.9), "bytes: every validation token once"
    assert scores["val_bpb"] == pytest.approx(scores["val_loss"] / math.log(2)), "bytes: a token is a byte"
    names = sorted(path.name for path in (folder / "model").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert checkpoints(run) == [10, 20]


def test_a_finished_run_is_read_and_never_touched(finished):
    """Whatever is asked for that decides no number."""
    run, folder, scores = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    again = {"checkpoint": CheckpointConfig(every=1, resume=False), "validation": ValidationConfig(every=3)}
    again |= {"other_code": True, "diagnostics": DiagnosticsConfig(every=2), "log_every_n_steps": 9}
    left_open = {"accelerator": "auto", "precision": "auto", "loss": "auto", "threads": 2}
    for changes in ({}, left_open, {"max_tokens": scores["tokens"], "max_steps": 1}, again):
        assert train(change(run, **changes)) == (folder, scores)
    with refused("loss is "):
        train(change(run, loss="chunked"))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_validations_and_samples(finished, tmp_path, capsys, monkeypatch):
    """The curve ends at the score bit for bit; rows before it are estimates. Prompts are continued at each of them."""
    run, validation = finished[0], ValidationConfig(every=5, batches=2)
    run = change(run, run_dir=str(tmp_path), prompts=["def f"], validation=validation, enable_progress_bar=True)
    monkeypatch.setattr("lm.training.log.shows_bar", lambda run: True)  # as in a terminal
    stop(run, 7)  # a resume keeps the samples before it
    folder, scores = train(run)
    printed = capsys.readouterr().err
    assert (printed.count(" of 20: train/loss "), printed.count(" to go, ")) == (3, 1)
    assert losses(folder) == losses(finished[1]), "which had neither"
    *before, last = rows(folder)
    columns = ("val_loss", "val_bpb", "val_top1", "val_tokens")
    assert [float(last[name.replace("_", "/")]) for name in columns] == [scores[name] for name in columns]
    assert last["train/loss"]
    assert [int(row["val/tokens"]) for row in before if row["val/loss"]] == [2 * 4 * 32] * 3
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 10, 15]
    assert {sample["prompt"] for line in [*lines, scores] for sample in line["samples"]} == {"def f"}


def test_default_samples_are_of_three_places_of_the_validation_text(finished):
    """Each is a stretch of whole words. A text without words has no prompts."""
    run, folder, scores = finished
    data = data_of(run)
    text, prompts = data.tokenizer.decode(data.val.tolist()), [sample["prompt"] for sample in scores["samples"]]
    assert len({*prompts}) == 3
    assert all(prompt[0].isalpha() and re.search(rf"\b{re.escape(prompt)}\b", text) for prompt in prompts)
    net, tokenizer = load_model(folder)
    for seed, sample in enumerate(scores["samples"]):
        n = 48 if seed else 300  # bytes, of the first enough to read
        assert sample["continuation"] == generate(net, tokenizer, sample["prompt"], n)
        assert sample["drawn"] == generate(net, tokenizer, sample["prompt"], n, temperature=0.8, seed=seed)
    assert not (folder / "samples.jsonl").exists()
    for line, prompts in (("#1#\n", []), ("of Windows\r\n", ["of Windows"])):
        assert validation_prompts(replace(data, val=np.array(tokenizer.encode(line * 200)))) == prompts
    short = validation_prompts(replace(data, val=np.array(tokenizer.encode("Once upon a time\r\n"))))
    assert (len(short) > 0, "\r" in "".join(short)) == (True, False)


# --- numbers


def test_twenty_steps_are_golden(finished, text_file, tmp_path):
    """A refactoring keeps these losses; a change of numerics updates tests/golden.json and explains it.

    One of the two trains in a thread, as in a notebook; signals are for the main thread.
    """
    golden, (_, untied, _) = json.loads(GOLDEN.read_text()), finished
    with ThreadPoolExecutor(1) as pool:
        pool.submit(train, short_run(text_file, tmp_path / "tied", head=HEADS["tied"])).result()
    assert losses(tmp_path / "tied") == pytest.approx(golden["tied"], abs=2e-4)
    assert losses(untied) == pytest.approx(golden["untied"], abs=2e-4)


def test_micro_batches_give_the_gradient_of_their_batch(finished, tmp_path):
    """AdamW gives nearly the same losses for a gradient of any scale, so the losses do not show it."""
    run, folder, _ = finished
    train(change(run, run_dir=str(tmp_path / "run"), prompts=[], accumulate_grad_batches=4, max_steps=1))
    (norm,) = column(tmp_path / "run", "train/grad_norm")
    assert norm == pytest.approx(column(folder, "train/grad_norm")[0], rel=1e-4)


def test_a_number_without_a_column_is_an_error(tmp_path):
    """Who adds a number to a row, and no column to COLUMNS, would look for it in metrics.csv in vain."""
    metrics = MetricsFile(tmp_path / "metrics.csv")
    with pytest.raises(ValueError, match="train/weight_norm"):
        metrics.append(1, {"train/loss": 2.0, "train/weight_norm": 3.0})


def test_one_batch_is_memorised_and_recited(text_file, tmp_path, caplog):
    """Targets, loss, optimizer, cache and argmax together: the model continues what it was trained on."""
    caplog.set_level("INFO")
    optim = OptimConfig(lr=1e-2, weight_decay=0.0, decay="constant")
    run = short_run(text_file, tmp_path / "run", head=HEADS["tied"], optim=optim, max_steps=100)
    train(replace(run, data=replace(run.data, batch_size=2, overfit_batches=1)))
    assert "100 steps read the 64 training tokens 100.0 times" in caplog.text
    assert losses(tmp_path / "run")[-1] < 0.1
    net, _ = load_model(tmp_path / "run")
    stream = TrainingStream(data_of(run).train, seq_len=32, batch_size=2, seed=0)
    text = stream.batch(0)[0][0].tolist()
    assert tokens(net, [text[:8]], 24) == [text[8:]]


@pytest.mark.parametrize("signal_after", [None, 9])
def test_a_diverged_run_says_what_to_change_and_saves_nothing_but_its_last_row(signal_after, text_file, tmp_path):
    """Nor a checkpoint where a signal ends the run after a step that is not finite, before its loss is looked at."""
    checkpoint = CheckpointConfig(every=100 if signal_after else 1, keep=100)
    settings = {"gradient_clip_val": None, "log_every_n_steps": 100, "checkpoint": checkpoint}
    run = short_run(text_file, tmp_path / "run", optim=OptimConfig(lr=1e15, warmup_steps=0), **settings)
    interruption = signalled(signal_after) if signal_after else nullcontext()
    with interruption, pytest.raises(Diverged, match=r"at step \d+; optim\.lr_scale=0\.25 divides all"):
        train(run)
    for path in tmp_path.glob("run/checkpoints/*"):
        assert all(tensor.isfinite().all() for tensor in torch.load(path, weights_only=True)["net"].values())
    assert not (tmp_path / "run/model").exists()
    (found,) = find_runs(tmp_path / "run")
    assert (found.status, found.note.partition(" of ")[0]) == ("diverged", f"step {signal_after or 2}")
    assert "Resume it" not in Path(write_page(tmp_path / "run", {}).partition(": ")[0]).read_text()


def test_the_final_score_is_that_of_the_saved_model_in_bf16_too(tmp_path):
    (tmp_path / "text").write_text(TEXT * 5)
    run = short_run(tmp_path / "text", tmp_path / "run", precision="bf16-mixed", optim=MUON, head=HEADS["tied"])
    score = train(run)[1]["val_loss"]
    data = data_of(run)
    assert validate(load_model(tmp_path / "run")[0], run, data).loss == score


# --- the twin of the loop in docs/

PLAIN_LOOP = ROOT / "docs/plain_loop.py"
WORDS = ["experiment=none", "data=text", "trainer=cpu", "trainer.precision=32-true", "threads=1", "loss=plain"]
WORDS += ["trainer.max_steps=8", "trainer.log_every_n_steps=1", "validation.every=0", "prompts=[]"]


@pytest.mark.slow
def test_the_plain_loop_makes_the_losses_and_weights_of_the_default_run(text_file, tmp_path):
    run = composed(*WORDS, f"data.path={text_file}", f"run_dir={tmp_path / 'run'}", "tokenizer.vocab_size=300")
    path, result = train(run)
    data = data_of(run)
    twin = runpy.run_path(str(PLAIN_LOOP))
    net, of_steps = twin["train"](data, 8)
    assert of_steps == losses(path)
    assert equal(net.state_dict(), load_model(path)[0].state_dict())
    val = torch.from_numpy(data.val.astype("int64"))
    assert abs(twin["score"](net, val) - result["val_loss"]) < 1e-5


# --- the best model, and the average of the weights

KEEP_BEST = CheckpointConfig(every=5, keep=3, best=True)
IMPATIENT = replace(KEEP_BEST, patience=3)


def val_loss(folder):
    return float(evaluate_run(EvaluateConfig(run_dir=str(folder), threads=1))["loss"])


@pytest.fixture(scope="module")
def best(text_file, tmp_path_factory):
    """A finished run that keeps its best model."""
    run = overfitting_run(text_file, tmp_path_factory.mktemp("finished") / "run", checkpoint=KEEP_BEST)
    train(run)
    return run


def test_the_model_is_the_best_one_and_the_curve_ends_with_the_last_one(best):
    folder = Path(str(best.run_dir))
    scores, chosen = result(folder), result(folder)["best"]
    estimates = {int(row["step"]): float(row["val/loss"]) for row in rows(folder)[:-1] if row["val/loss"]}
    assert chosen["step"] == min(estimates, key=lambda step: estimates[step])
    assert 2 < chosen["step"] < 22
    assert val_loss(folder) == scores["val_loss"] == chosen["val_loss"] < chosen["last_val_loss"]
    assert column(folder, "val/loss")[-1] == chosen["last_val_loss"]


def test_a_diverged_run_leaves_its_best_model(text_file, tmp_path, monkeypatch):
    """Of one without `best`, nothing is left."""
    layers, step = "tests.helpers.layers.Exploding", 9
    monkeypatch.setenv("DISTURBED_CALL", str(2 * 6 * 2 * (step - 1) + 1))  # layers, projections, micro-batches
    monkeypatch.setattr("tests.helpers.layers.Disturbing.calls", 0)
    run = overfitting_run(text_file, tmp_path / "best", checkpoint=CheckpointConfig(every=1, best=True))
    with pytest.raises(Diverged):
        train(replace(run, model=replace(run.model, linear=layers)))
    state = torch.load(max((tmp_path / "best/checkpoints").iterdir()), weights_only=True)
    assert state["best_step"] > 0
    assert equal(weights(tmp_path / "best"), state["best"])


def test_a_run_ends_after_validations_without_a_lower_loss(best, text_file, tmp_path):
    """Its resume: tests/test_resume.py."""
    _, scores = train(overfitting_run(text_file, tmp_path / "run", checkpoint=IMPATIENT))
    folder, whole = tmp_path / "run", Path(str(best.run_dir))
    assert (scores["ended_by"], result(whole)["ended_by"]) == ("patience", "steps")
    assert scores["steps"] == scores["best"]["step"] + 3 * 2 < result(whole)["steps"] == 24
    assert scores["tokens"] == scores["steps"] * best.tokens_per_step
    assert rows(folder)[:-1] == rows(whole)[: scores["steps"] - 1]
    assert equal(weights(folder), weights(whole))


def test_the_model_is_the_average_over_the_steps_of_the_same_training(text_file, tmp_path):
    """Also across the step in which the head is untied: until then its average is that of the embedding."""
    settings = {"max_steps": 12, "head": HEADS["untied_midtraining"], "checkpoint": CheckpointConfig(every=1, keep=100)}
    optim = OptimConfig(lr=0.02, warmup_steps=2)
    train(overfitting_run(text_file, tmp_path / "plain", optim=optim, **settings))
    run = overfitting_run(text_file, tmp_path / "run", optim=replace(optim, ema=0.5), **settings)
    folder, scores = train(run)
    assert losses(folder) == losses(tmp_path / "plain")
    steps = [torch.load(path, weights_only=True) for path in sorted((folder / "checkpoints").iterdir())]
    average = build_model(run, 257).state_dict()
    for i, step in enumerate(steps):
        decay = min(0.5, (1 + i) / (10 + i))
        average = {name: decay * tensor + (1 - decay) * step["net"][name] for name, tensor in average.items()}
    saved = weights(folder)
    for name, tensor in average.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-4, atol=1e-6)
    assert not torch.equal(saved["head.proj.weight"], saved["embed.weight"])
    assert not torch.allclose(saved["norm.weight"], steps[-1]["net"]["norm.weight"])
    assert val_loss(folder) == scores["val_loss"]


# --- what a run leaves to the machine: device, precision, threads and loss

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
        with refused(f"^trainer.accelerator={name}: "):
            resolve(change(run, accelerator=name), 257)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve(run, 257).trainer.accelerator == "mps"
    with refused(r"model\.dropout=0"):
        resolve(replace(run, activation_checkpointing=True), 257)


def test_torchrun_and_the_trainer_must_agree(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    resolve(CPU, 257)  # a variable that somebody else has left
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with refused(r"^trainer\.devices: .*\b2\b.*\b1\b"):
        resolve(CPU, 257)
    resolve(change(CPU, devices=2), 257)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    with refused(r"^trainer\.num_nodes=2: expected torchrun or srun"):
        build_fabric(change(CPU, num_nodes=2).trainer)


# --- threads


def test_threads_are_those_of_the_environment_or_all_cores(monkeypatch):
    for value, threads in {" 1,2": 1, "1000": cores()}.items():  # a host may have more cores than a container
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert resolve(CPU, 257).threads == threads
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= (resolve(CPU, 257).threads or 0) <= (os.cpu_count() or 1)
    with refused(r"^threads=100000: "):
        resolve(replace(CPU, threads=100_000), 257)
    for value in ("0", "two"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        with refused(f"^OMP_NUM_THREADS={value}: "):
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
    with refused("loss=chunked"):
        resolve(change(CPU, loss="chunked", ngram_smoothing=0.5), 257)


def test_an_embedding_has_a_row_for_each_token():
    with refused(r"^model\.vocab_rows=10: expected 97 or more, or null$"):
        build_model(replace(CPU, model=tiny(vocab_rows=10)), 97)
