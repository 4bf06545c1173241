"""Training in this process: the files of a run, what its numbers depend on, and that it learns."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import HEADS, TEXT, UNTIED, WHOLE_RESULT

from lm import generate, load_model
from lm.config import CheckpointConfig, DiagnosticsConfig, OptimConfig, TokenizerConfig, ValidationConfig
from lm.data.batches import TrainingStream
from lm.data.tokenizer import byte_tokenizer
from lm.data.tokens import TextData, prepare
from lm.decoding import decode
from lm.errors import Diverged, UserError
from lm.lab.measures.samples import validation_prompts
from lm.scoring import validate
from lm.training.loss import HAS_CHUNKED
from lm.training.train import train
from tests.helpers.runs import (
    MUON,
    change,
    checkpoints,
    column,
    compiles,
    losses,
    result,
    rows,
    short_run,
    signalled,
    stop,
)

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
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["d_model"] == 32
    assert [int(row["step"]) for row in rows(folder)] == list(range(1, 21))
    names = sorted(path.name for path in (folder / "model").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert checkpoints(run) == [10, 20]


def test_a_finished_run_is_read_and_never_touched(finished):
    """Whatever is asked for that decides no number."""
    run, folder, scores = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    same_length = change(run, max_tokens=scores["tokens"], max_steps=1)
    left_open = change(run, accelerator="auto", precision="auto", loss="auto", threads=2)
    again = replace(run, checkpoint=CheckpointConfig(every=1, resume=False), validation=ValidationConfig(every=3))
    again = change(again, other_code=True, diagnostics=DiagnosticsConfig(every=2), log_every_n_steps=9)
    for same in (run, left_open, same_length, again):
        assert train(same) == (folder, scores)
    for key, changes in (("trainer.precision", {"precision": "bf16-mixed"}), ("loss", {"loss": "chunked"})):
        with pytest.raises(UserError, match=rf"{key} is "):
            train(change(run, **changes))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.slow
def test_prompts_that_a_run_was_never_given_are_not_shown(finished, command):
    run_dir = f"run_dir={finished[1]}"
    assert "Drawn at" in command("train", run_dir)[1]
    for prompts, said in (("[mine]", True), ("[]", False)):
        code, out, errors = command("train", run_dir, f"prompts={prompts}")
        assert (code, "Drawn at" in out, "prompts: " in errors) == (0, False, said)


def test_a_run_trains_in_a_thread(text_file, tmp_path):
    """As in a notebook; signals are for the main thread."""
    run = short_run(text_file, tmp_path / "run", tokenizer=TokenizerConfig(vocab_size=300), max_steps=5)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(train, run).result()[1]["steps"] == 5


def test_validations_and_samples(finished, tmp_path, capsys):
    """The curve ends at the score bit for bit; rows before it are estimates. Prompts are continued at each of them."""
    run, validation = finished[0], ValidationConfig(every=5, batches=2)
    run = change(run, run_dir=str(tmp_path), prompts=["def f"], validation=validation, enable_progress_bar=True)
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
    assert [(line["step"], line["tokens"]) for line in lines] == [(step, step * 4 * 32) for step in (5, 10, 15)]
    assert {sample["prompt"] for line in [*lines, scores] for sample in line["samples"]} == {"def f"}


def test_default_samples_are_of_three_places_of_the_validation_text(finished):
    run, folder, scores = finished
    assert [sample["prompt"] for sample in scores["samples"]] == validation_prompts(prepare(run.data, run.tokenizer))
    net, tokenizer = load_model(folder)
    for seed, sample in enumerate(scores["samples"]):
        n = 48 if seed else 300  # bytes, of the first enough to read
        assert sample["continuation"] == generate(net, tokenizer, sample["prompt"], n)
        assert sample["drawn"] == generate(net, tokenizer, sample["prompt"], n, temperature=0.8, seed=seed)
    assert not (folder / "samples.jsonl").exists()


@pytest.mark.parametrize(("line", "n_prompts"), [("# {i}\n\ndef f{i}(a, b):\n    return {i}\n", 3), ("#{i}#\n", 0)])
def test_default_prompts_are_three_different_stretches_of_whole_words(line, n_prompts):
    text, tokenizer = "".join(line.format(i=i) for i in range(200)), byte_tokenizer()
    ids = np.array([tokenizer.eot, *tokenizer.encode(text)])
    data = TextData(tokenizer=tokenizer, train=ids, val=ids, val_bytes=len(text.encode()), baselines={}, hash="")
    prompts = validation_prompts(data)
    assert len(set(prompts)) == n_prompts
    for prompt in prompts:
        assert prompt[0].isalpha()
        assert 6 <= len(prompt) <= 60
        assert not text[text.index(prompt) + len(prompt) :][:1].isalnum()


# --- numbers


def test_twenty_steps_are_golden(finished, text_file, tmp_path):
    """A refactoring keeps these losses; a change of numerics updates tests/golden.json and explains it."""
    golden, (_, untied, _) = json.loads(GOLDEN.read_text()), finished
    train(short_run(text_file, tmp_path / "tied", head=HEADS["tied"]))
    assert losses(tmp_path / "tied") == pytest.approx(golden["tied"], abs=2e-4)
    assert losses(untied) == pytest.approx(golden["untied"], abs=2e-4)


def test_micro_batches_give_the_gradient_of_their_batch(finished, tmp_path):
    """AdamW gives nearly the same losses for a gradient of any scale, so the losses do not show it."""
    run, folder, _ = finished
    train(change(run, run_dir=str(tmp_path / "run"), prompts=[], accumulate_grad_batches=4, max_steps=1))
    (norm,) = column(tmp_path / "run", "train/grad_norm")
    assert norm == pytest.approx(column(folder, "train/grad_norm")[0], rel=1e-4)


def test_one_batch_is_memorised_and_recited(text_file, tmp_path):
    """Targets, loss, optimizer, cache and argmax together: the model continues what it was trained on."""
    optim = OptimConfig(lr=1e-2, weight_decay=0.0, decay="constant")
    run = short_run(text_file, tmp_path / "run", head=HEADS["tied"], optim=optim, max_steps=100)
    train(replace(run, data=replace(run.data, batch_size=2, overfit_batches=1)))
    assert losses(tmp_path / "run")[-1] < 0.1
    net, _ = load_model(tmp_path / "run")
    stream = TrainingStream(prepare(run.data, run.tokenizer).train, seq_len=32, batch_size=2, seed=0)
    tokens = stream.batch(0)[0][0].tolist()
    assert [token for (token,) in islice(decode(net, [tokens[:8]]), 24)] == tokens[8:]


EQUAL, NEAR, OTHER = (0.0, 0.0), (0.0, 1e-3), (1e-6, math.inf)  # the range of the largest difference of two losses
SAME_LENGTH = {"max_tokens": 20 * 4 * 32 - 5, "max_steps": 999}  # a length in tokens sets steps and schedule
needs_chunks = pytest.mark.skipif(not HAS_CHUNKED, reason="needs torch 2.13")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (SAME_LENGTH | {"gradient_clip_val": 0}, EQUAL),  # bit for bit; 0 is no limit
        pytest.param({"loss": "chunked", "activation_checkpointing": True}, NEAR, marks=needs_chunks),
        pytest.param({"compile": True}, NEAR, marks=[pytest.mark.nightly, compiles]),
        ({"gradient_clip_val": 1.0}, OTHER),
        ({"seed": 1}, OTHER),
    ],
)
def test_what_losses_depend_on(changes, difference, finished, tmp_path):
    run, folder, scores = finished
    _, again = train(change(run, run_dir=str(tmp_path / "run"), prompts=[], **changes))
    gap = max(abs(a - b) for a, b in zip(losses(tmp_path / "run"), losses(folder), strict=True))
    assert difference[0] <= gap <= difference[1]
    assert again["steps"] == 20
    assert abs(again["val_loss"] - scores["val_loss"]) <= difference[1]
    load_model(tmp_path / "run")


@pytest.mark.parametrize("signal_after", [None, 9])
def test_a_diverged_run_says_what_to_change_and_saves_nothing(signal_after, text_file, tmp_path):
    """Nor where a signal ends the run after a step that is not finite, before its loss is looked at."""
    checkpoint = CheckpointConfig(every=100 if signal_after else 1, keep=100)
    settings = {"gradient_clip_val": None, "log_every_n_steps": 100, "checkpoint": checkpoint}
    run = short_run(text_file, tmp_path / "run", optim=OptimConfig(lr=1e15, warmup_steps=0), **settings)
    interruption = signalled(signal_after) if signal_after else nullcontext()
    with interruption, pytest.raises(Diverged, match=r"at step \d+; optim\.lr_scale=0\.25 divides all"):
        train(run)
    for path in tmp_path.glob("run/checkpoints/*"):
        assert all(tensor.isfinite().all() for tensor in torch.load(path, weights_only=True)["net"].values())
    assert not (tmp_path / "run/model").exists()


def test_a_wrong_setting_leaves_no_directory(text_file, tmp_path):
    run = short_run(text_file, tmp_path / "new/run")
    for changes, key in (
        ({"data": replace(run.data, seq_len=100_000)}, "data"),
        ({"data": replace(run.data, path="absent")}, r"data\.path"),
        ({"data": replace(run.data, order="documents")}, r"data\.order=documents"),
        ({"init_tied_matrix": "mean"}, "init_tied_matrix"),
    ):
        with pytest.raises(UserError, match=rf"^{key}\b"):
            train(change(run, **changes))
        assert not (tmp_path / "new").exists()


def test_the_final_score_is_that_of_the_saved_model_in_bf16_too(tmp_path):
    (tmp_path / "text").write_text(TEXT * 5)
    run = short_run(tmp_path / "text", tmp_path / "run", precision="bf16-mixed", optim=MUON, head=HEADS["tied"])
    score = train(run)[1]["val_loss"]
    data = prepare(run.data, run.tokenizer)
    assert validate(load_model(tmp_path / "run")[0], run, data).loss == score
