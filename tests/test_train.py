"""Training end to end, in process: the files of a run, what its numbers depend on, and that it learns."""

import csv
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import yaml
from conftest import HEADS, TEXT, TIED, UNTIED, as_nobody
from lm.training.options import resolve
from lm.training.task import LMTask
from safetensors.torch import load_file
from test_resume import a_run

from lm.config import (
    BadInput,
    CheckpointConfig,
    DataConfig,
    Diverged,
    EvaluateConfig,
    HeadConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TokenizerConfig,
    ValidationConfig,
)
from lm.config.identity import config_hash
from lm.data.batches import TrainingStream
from lm.data.tokenizer import EOT
from lm.data.tokens import TextData, prepare
from lm.data.vocabulary import byte_tokenizer, train_bpe
from lm.exchange.portable import load_model
from lm.inference.decode import decode
from lm.inference.evaluate import evaluate, evaluate_run
from lm.inference.generate import generate
from lm.model.head import UntiedMidTrainingHead
from lm.model.transformer import Transformer
from lm.system.device import cpu_name
from lm.system.files import checksum, sha256
from lm.training.callbacks import Interrupted
from lm.training.loss import HAS_CHUNKED
from lm.training.metrics import MetricsFile
from lm.training.run_directory import RunDirectory, default_dir
from lm.training.samples import validation_prompts
from lm.training.train import train

GOLDEN = Path(__file__).parent / "golden.json"
PROMISED = (
    "val_loss val_bpb val_top1 n_params n_params_by_role flops_per_token steps tokens seconds tokens_per_second seed"
    " head resumed_from config_hash data_hash threads device python versions precision"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(TEXT)
    return path


def short(corpus: Path, run_dir: Path, **changes: Any) -> RunConfig:
    """Twenty logged steps without dropout."""
    run = a_run(corpus, run_dir, steps=20, model=ModelConfig(n_layers=2, d_model=32, n_heads=2, d_ff=64))
    run.trainer |= {"accumulate_grad_batches": 1, "log_every_n_steps": 1}
    return replace(run, **changes)


def rows(run_dir: Path) -> list[dict[str, str]]:
    with open(run_dir / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def losses(run_dir: Path) -> list[float]:
    return [float(row["train/loss"]) for row in rows(run_dir)]


def test_a_run_leaves_what_the_design_promises(corpus: Path, tmp_path: Path) -> None:
    run = short(corpus, tmp_path / "run")
    result = train(run)
    assert json.loads((tmp_path / "run/result.json").read_text()) == result | {"checksum": checksum(result)}
    assert result["cpu"] == cpu_name()
    assert set(PROMISED.split()) <= result.keys()
    assert result["config_hash"] == config_hash(run)
    assert result["n_params"] == sum(result["n_params_by_role"].values())
    assert result["tokens"] == 20 * 4 * 32
    assert result["val_tokens"] == len(TEXT) - int(len(TEXT) * 0.9), "bytes: every validation token once"
    assert result["val_bpb"] == pytest.approx(result["val_loss"] / math.log(2)), "bytes: a token is a byte"
    settings = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert settings["model"]["d_model"] == 32
    assert [int(row["step"]) for row in rows(tmp_path / "run")] == list(range(1, 21))
    assert [row["step"] for row in rows(tmp_path / "run") if row["val/loss"]] == ["20"]
    assert_ends_at(tmp_path / "run", result)
    assert sorted(path.name for path in (tmp_path / "run/model").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 2


def assert_ends_at(run_dir: Path, result: dict[str, Any]) -> None:
    """The last row of the curve is the score of the table, bit for bit."""
    last, columns = rows(run_dir)[-1], ("val_loss", "val_bpb", "val_top1", "val_tokens")
    assert int(last["step"]) == result["steps"]
    assert [float(last[name.replace("_", "/")]) for name in columns] == [result[name] for name in columns]


@pytest.mark.parametrize("every", [0, 5, 20])
def test_the_curve_ends_at_the_score(corpus: Path, tmp_path: Path, every: int) -> None:
    run = short(corpus, tmp_path / "run", validation=ValidationConfig(every=every, batches=2))
    result = train(run)
    assert_ends_at(tmp_path / "run", result)
    assert rows(tmp_path / "run")[-1]["train/loss"]
    estimates = [int(row["val/tokens"]) for row in rows(tmp_path / "run")[:-1] if row["val/loss"]]
    assert estimates == [2 * 4 * 32] * (3 if every == 5 else 0)
    assert result["val_tokens"] > 2 * 4 * 32


def test_an_estimate_is_near_the_score_of_a_text_that_begins_easily(tmp_path: Path) -> None:
    """A tenth of the validation text, its beginning, is one letter; a rule that reads the first windows is far off."""
    letters = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 60_000)))
    (tmp_path / "corpus.txt").write_text("a" * 20_000 + letters[:52_000] + "a" * 800 + letters[52_000:59_200])
    run = short(tmp_path / "corpus.txt", tmp_path / "run", optim=OptimConfig(lr=0.01, warmup_steps=5))
    run.trainer["max_steps"] = 40
    data = prepare(run.data, run.tokenizer)
    score = train(run, data)["val_loss"]
    net, _ = load_model(tmp_path / "run")
    first, estimate = evaluate(net, data.val[:513], 32, 4), evaluate(net, data.val, 32, 4, max_batches=4)
    assert estimate.n_tokens == first.n_tokens == 512
    assert first.loss < score - 1
    assert estimate.loss == pytest.approx(score, abs=0.1)


def test_no_step_seeds_devices_that_are_absent(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed formats a stack trace for each of them, which takes a tenth of the time of a small step."""

    def refuse(seed: int) -> None:
        raise AssertionError("torch.manual_seed was called")

    monkeypatch.setattr(torch, "manual_seed", refuse)
    train(short(corpus, tmp_path / "run"))


def test_a_finished_run_is_read_and_never_touched(corpus: Path, tmp_path: Path) -> None:
    run = short(corpus, tmp_path / "run")
    result = train(run)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert train(run) == result
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_twenty_steps_are_golden(corpus: Path, tmp_path: Path) -> None:
    """A refactoring keeps these losses; a change of numerics updates tests/golden.json and explains it."""
    found = {}
    for name in ("tied", "untied"):
        train(short(corpus, tmp_path / name, head=HEADS[name]))
        found[name] = losses(tmp_path / name)
    golden = json.loads(GOLDEN.read_text())
    for name in found:
        assert found[name] == pytest.approx(golden[name], abs=2e-4), f"{name}: now {found[name]}"
    train(short(corpus, tmp_path / "again", head=UNTIED))
    assert losses(tmp_path / "again") == found["untied"], "bit for bit within a process"


def test_accumulation_sees_the_same_sequences(corpus: Path, tmp_path: Path) -> None:
    whole, accumulated = short(corpus, tmp_path / "whole"), short(corpus, tmp_path / "accumulated")
    accumulated.trainer["accumulate_grad_batches"] = 4
    train(whole)
    train(accumulated)
    assert losses(tmp_path / "accumulated") == pytest.approx(losses(tmp_path / "whole"), abs=1e-3)
    assert losses(tmp_path / "accumulated") != losses(tmp_path / "whole")


def test_a_length_in_tokens_sets_steps_and_schedule(corpus: Path, tmp_path: Path) -> None:
    in_steps = train(short(corpus, tmp_path / "steps"))
    run = short(corpus, tmp_path / "tokens", max_tokens=20 * 4 * 32 - 5)
    run.trainer["max_steps"] = 999
    in_tokens = train(run)
    assert in_tokens["steps"] == in_steps["steps"] == 20
    assert (tmp_path / "tokens/metrics.csv").read_text() == (tmp_path / "steps/metrics.csv").read_text()


def test_the_seed_decides(corpus: Path, tmp_path: Path) -> None:
    one, other = (train(short(corpus, tmp_path / str(seed), seed=seed)) for seed in (1, 2))
    assert one["val_loss"] != other["val_loss"]
    assert default_dir(short(corpus, tmp_path, seed=1)) != default_dir(short(corpus, tmp_path, seed=2))


def test_run_names_ignore_what_does_not_change_the_run(corpus: Path, tmp_path: Path) -> None:
    run = short(corpus, tmp_path)
    same = replace(run, run_dir=None, threads=7, checkpoint=CheckpointConfig(every=3), prompts=["x"])
    assert config_hash(run) == config_hash(same)
    assert config_hash(run) != config_hash(replace(run, optim=OptimConfig(lr=1.0)))


@pytest.mark.parametrize(
    "head", [head if head in ("tied", "untied") else pytest.param(head, marks=pytest.mark.slow) for head in HEADS]
)
def test_one_batch_is_memorised_and_reproduced(head: str, corpus: Path, tmp_path: Path) -> None:
    """Targets, loss, optimizer, cache and argmax together: the model continues what it was trained on."""
    run = short(corpus, tmp_path / "run", head=HEADS[head])
    run.trainer["max_steps"] = 150
    data = replace(run.data, batch_size=2, overfit_batches=1)
    train(replace(run, data=data, optim=OptimConfig(lr=1e-2, weight_decay=0.0, decay="constant")))
    assert losses(tmp_path / "run")[-1] < 0.1
    net, _ = load_model(tmp_path / "run")
    stream = TrainingStream(prepare(run.data, run.tokenizer).train, seq_len=32, batch_size=2, seed=0)
    shown = stream.batch(0)[0][0].tolist()
    decoded = [one for (one,) in islice(decode(net, [shown[:8]]), 24)]
    assert decoded == shown[8:]


def test_evaluate_gives_the_number_in_the_result(corpus: Path, tmp_path: Path) -> None:
    result = train(short(corpus, tmp_path / "run"))
    scores = evaluate_run(EvaluateConfig(run_dir=str(tmp_path / "run"), threads=1))
    assert scores["loss"] == result["val_loss"]
    assert scores["bpb"] == result["val_bpb"]
    (tmp_path / "val.txt").write_text(TEXT[int(len(TEXT) * 0.9) :])
    config = DataConfig(source="text", path=str(tmp_path / "val.txt"), batch_size=4)
    again = evaluate_run(EvaluateConfig(run_dir=str(tmp_path / "run"), data=config, threads=1))
    assert again == scores


def test_a_run_is_scored_where_nothing_can_be_written(
    open_folder: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copy(corpus, open_folder / "corpus.txt")
    run = short(open_folder / "corpus.txt", open_folder / "run")
    result = train(run)
    monkeypatch.chdir(open_folder)
    asked = EvaluateConfig(run_dir=str(open_folder / "run"), threads=1)
    with as_nobody():
        with monkeypatch.context() as patch:  # the cache of the run is used
            patch.setattr("lm.data.tokens.build", lambda *_: pytest.fail("built again"))
            assert evaluate_run(asked)["loss"] == result["val_loss"]
        other = evaluate_run(replace(asked, data=DataConfig(source="text", path=str(run.data.path))))
    shutil.rmtree(open_folder / "cache")
    with as_nobody():
        assert evaluate_run(asked)["loss"] == result["val_loss"]
    assert other["bytes"] == len(TEXT.encode())
    assert not (open_folder / ".cache").exists()


def test_a_run_is_scored_with_its_own_copy_of_a_tokenizer_file(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bpe([TEXT], 300).to_json())
    tokenizer = TokenizerConfig(kind="file", vocab_size=None, path=str(path))
    result = train(short(corpus, tmp_path / "run", tokenizer=tokenizer))
    path.write_text(train_bpe([TEXT], 290).to_json())
    assert evaluate_run(EvaluateConfig(run_dir=str(tmp_path / "run"), threads=1))["loss"] == result["val_loss"]


def test_a_diverging_run_stops_and_keeps_its_last_good_checkpoint(corpus: Path, tmp_path: Path) -> None:
    run = short(corpus, tmp_path / "run", checkpoint=CheckpointConfig(every=1, keep=100))
    run.trainer["gradient_clip_val"] = None
    with pytest.raises(BadInput, match=r"at step \d+: choose optim\.lr below"):
        train(replace(run, optim=OptimConfig(lr=1e15, warmup_steps=0)))
    for path in (tmp_path / "run/checkpoints").iterdir():
        weights = torch.load(path, weights_only=True)["state_dict"]
        assert not any(weight.isnan().any() for weight in weights.values())


def test_divergence_that_surfaces_as_another_exception_is_divergence(corpus: Path, tmp_path: Path) -> None:
    run = short(corpus, tmp_path / "run")
    run.trainer |= {"gradient_clip_val": None, "log_every_n_steps": 10}
    model = replace(run.model, linear="brittle.Finite")
    with pytest.raises(Diverged, match=r"are not finite after step \d, which ended in RuntimeError: no scale"):
        train(replace(run, model=model, optim=OptimConfig(lr=1e15, warmup_steps=0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate_grad_batches": 3}, "accumulate_grad_batches=3: does not divide data.batch_size=4"),
        ({"max_steps": None}, "max_steps=None: expected a number of steps"),
        ({"max_stepz": 3}, "max_stepz"),
        ({"limit_val_batches": 3}, "limit_val_batches: is decided by this project"),
        ({"limit_train_batches": 3}, "limit_train_batches: is decided by this project"),
        ({"precision": "16-mixed"}, "precision=16-mixed: choose one of auto"),
        ({"devices": -1}, "devices=-1: expected a number"),
        ({"precision": "17-bit"}, "17-bit"),
    ],
)
def test_a_wrong_trainer_setting_leaves_no_directory(
    changes: dict[str, Any], message: str, corpus: Path, tmp_path: Path
) -> None:
    run = short(corpus, tmp_path / "new" / "run")
    run.trainer |= changes
    with pytest.raises(BadInput, match=message):
        train(run)
    assert not (tmp_path / "new").exists()


def test_a_run_needs_a_number_of_steps(corpus: Path, tmp_path: Path) -> None:
    run = short(corpus, tmp_path / "run")
    del run.trainer["max_steps"]
    with pytest.raises(BadInput, match=r"^trainer\.max_steps: is missing"):
        train(run)


@pytest.mark.parametrize("shown", [True, False])
def test_console_lines_follow_enable_progress_bar(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], shown: bool
) -> None:
    run = short(corpus, tmp_path / "run", validation=ValidationConfig(every=5))
    run.trainer["enable_progress_bar"] = shown
    train(run)
    assert capsys.readouterr().err.count(" of 20: train/loss ") == 4 * shown


@pytest.mark.skipif(not HAS_CHUNKED, reason="needs torch 2.13")
def test_less_memory_gives_nearly_equal_numbers(corpus: Path, tmp_path: Path) -> None:
    plain = train(short(corpus, tmp_path / "plain", loss="plain"))
    small = train(short(corpus, tmp_path / "small", loss="chunked", activation_checkpointing=True))
    assert small["val_loss"] == pytest.approx(plain["val_loss"], abs=1e-4)
    assert losses(tmp_path / "small") == pytest.approx(losses(tmp_path / "plain"), abs=1e-4)
    load_model(tmp_path / "small")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, inside its compiler
def test_compile_keeps_names_and_gives_nearly_equal_numbers(corpus: Path, tmp_path: Path) -> None:
    plain = train(short(corpus, tmp_path / "plain"))
    compiled = train(short(corpus, tmp_path / "compiled", compile=True))
    assert compiled["val_loss"] == pytest.approx(plain["val_loss"], abs=1e-3)
    load_model(tmp_path / "compiled")


def test_a_directory_with_other_files_is_never_touched(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.yaml").write_text("precious: true\n")
    with pytest.raises(BadInput, match="holds other files"):
        train(short(corpus, tmp_path / "mine"))
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["precious: true\n"]


def test_a_file_in_the_place_of_the_directory_is_named(corpus: Path) -> None:
    """The text itself, say: no advice may lead to its removal."""
    assert RunDirectory(corpus).read_result() is None
    with pytest.raises(BadInput, match=f"run_dir={corpus}: is a file; expected a directory"):
        train(short(corpus, corpus))


def test_a_changed_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_tokenizer().to_json())
    run = short(corpus, tmp_path / "run", tokenizer=TokenizerConfig(kind="file", vocab_size=None, path=str(path)))
    train(run)
    other = json.loads(path.read_text())
    vocab = other["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(other))
    with pytest.raises(BadInput, match="tokenizer_hash"):
        train(run)


def test_a_lossy_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, EOT: 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path.write_text(backend.to_str())
    with pytest.raises(BadInput, match=r"tokenizer"):
        train(short(corpus, tmp_path / "run", tokenizer=TokenizerConfig(kind="file", vocab_size=None, path=str(path))))


def test_a_run_killed_before_its_result_is_finished_with_a_progress_bar(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = short(corpus, tmp_path / "run")
    run.trainer["enable_progress_bar"] = True
    result = train(run)
    (tmp_path / "run/result.json").unlink()
    metrics = (tmp_path / "run/metrics.csv").read_text()
    assert result["metrics_hash"] == sha256(tmp_path / "run/metrics.csv")
    assert "diagnostics_hash" not in result
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    again = train(run)
    assert again["resumed_from"] == [20]
    assert again["val_loss"] == result["val_loss"]
    assert again["seconds"] < result["seconds"] + 0.001, "no step was made"
    assert (tmp_path / "run/metrics.csv").read_text() == metrics


def test_an_incomplete_row_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    MetricsFile(path, 0).log_metrics({"train/loss": 1.5}, 120)
    path.write_text(path.read_text() + "13")
    MetricsFile(path, 120).log_metrics({"train/loss": 1.25}, 130)
    assert [row["step"] for row in rows(tmp_path)] == ["120", "130"]


def test_rows_that_were_changed_before_a_resume_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.csv"
    MetricsFile(path, 0).log_metrics({"train/loss": 1.5}, 120)
    expected, whole = sha256(path), path.read_text()
    path.write_text(whole + "130,,,2.5,,,,,\n14")  # after the checkpoint
    MetricsFile(path, 120, expected=expected)
    assert path.read_text() == whole
    path.write_text(whole.replace("1.5", "1.6"))
    with pytest.raises(
        BadInput, match=r"metrics\.csv: was changed after step 120; remove it to go on without its rows"
    ):
        MetricsFile(path, 120, expected=expected)
    path.unlink()
    MetricsFile(path, 120, expected=expected)
    assert "has no rows up to step 120" in caplog.text


def test_temporary_files_of_a_killed_process_are_deleted(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/.lock").touch()
    (tmp_path / "run/checkpoints/.partial-abc").write_text("half")
    train(short(corpus, tmp_path / "run"))
    assert not list((tmp_path / "run").rglob(".partial*"))


def test_a_clipping_limit_of_zero_is_no_limit(corpus: Path, tmp_path: Path) -> None:
    for name, limit in (("zero", 0), ("none", None)):
        run = short(corpus, tmp_path / name)
        run.trainer["gradient_clip_val"] = limit
        train(run)
    assert losses(tmp_path / "zero") == losses(tmp_path / "none")


MIDTRAINING, FROM_EMBEDDING = (
    HEADS["untied_midtraining"],
    HEADS["untied_from_embedding"],
)  # unties before step 11 of 20


def run_with_dropout(corpus: Path, run_dir: Path, head: HeadConfig = MIDTRAINING) -> RunConfig:
    """Twenty logged steps with dropout and accumulation."""
    run = a_run(corpus, run_dir, steps=20, head=head)
    run.trainer["log_every_n_steps"] = 1
    return run


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model/model.safetensors")


def stop_in_step(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM while this step is being made."""
    make = LMTask.training_step

    def training_step(task: LMTask, batch: Any, batch_idx: int) -> torch.Tensor:
        if task.trainer.global_step + 1 == step and batch_idx % 2 == 0:  # a second signal would kill the process
            os.kill(os.getpid(), signal.SIGTERM)
        return make(task, batch, batch_idx)

    monkeypatch.setattr(LMTask, "training_step", training_step)


def test_every_variant_is_trained_on_the_same_batches_with_the_same_dropout(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: dict[str, list[Any]] = {}
    make = LMTask.training_step

    def training_step(task: LMTask, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = make(task, batch, batch_idx)
        shown.setdefault(task.run.head.name, []).append((batch[0].tolist(), torch.initial_seed()))
        return loss

    monkeypatch.setattr(LMTask, "training_step", training_step)
    first = {}
    for name, head in HEADS.items():
        run = run_with_dropout(corpus, tmp_path / name, head=head)
        run.trainer["max_steps"] = 3
        train(run)
        first[name] = losses(tmp_path / name)[0]
    assert len(shown["tied"]) == 6
    assert all(shown[name] == shown["tied"] for name in HEADS)
    as_tied = [name for name in HEADS if first[name] == first["tied"]]
    assert as_tied == ["tied", "tied_projected", "untied_from_embedding", "untied_midtraining"], (
        "and have equal first losses, bit for bit"
    )


def test_a_run_equals_the_tied_one_until_it_unties(corpus: Path, tmp_path: Path) -> None:
    """With dropout and accumulation. The first untied step has the same loss, but two gradients instead of one."""
    for name, head in (("tied", TIED), ("untied", MIDTRAINING)):
        train(run_with_dropout(corpus, tmp_path / name, head=head))
    tied, untied = rows(tmp_path / "tied"), rows(tmp_path / "untied")
    assert untied[:10] == tied[:10]
    assert untied[10]["train/loss"] == tied[10]["train/loss"]
    assert untied[10]["train/grad_norm"] != tied[10]["train/grad_norm"]
    assert all(one["train/loss"] != other["train/loss"] for one, other in zip(untied[11:], tied[11:], strict=True))
    ended = weights(tmp_path / "untied")
    assert not torch.equal(ended["head.proj.weight"], ended["embed.weight"])


def test_untying_during_training_changes_no_loss_and_copies_the_moments(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, seen = LMTask.on_train_batch_start, []

    def on_train_batch_start(task: LMTask, batch: Any, batch_idx: int) -> None:
        embedding, own, state = task.net.embed.weight, task.net.head.proj.weight, task.trainer.optimizers[0].state
        known = own in state
        with torch.no_grad():
            before = task.net(batch[0])
            start(task, batch, batch_idx)
            after = task.net(batch[0])
        if own in state and not known:
            seen.append(task.trainer.global_step)
            assert torch.equal(after, before)
            assert torch.equal(own, embedding)
            assert own.data_ptr() != embedding.data_ptr()
            assert state[own].keys() == {"step", "exp_avg", "exp_avg_sq"}
            for name, moment in state[own].items():
                assert torch.equal(moment, state[embedding][name])
                assert moment.data_ptr() != state[embedding][name].data_ptr()
                assert moment.norm() > 0
            assert state[own]["step"] == 10

    monkeypatch.setattr(LMTask, "on_train_batch_start", on_train_batch_start)
    train(short(corpus, tmp_path / "run", head=MIDTRAINING, checkpoint=CheckpointConfig(every=7)))
    assert seen == [10]


def without_moments(state: dict[Any, Any], own: Any, embedding: Any) -> dict[Any, Any]:
    return {key: value for key, value in state.items() if key is not embedding}


def without_own_state(state: dict[Any, Any], own: Any, embedding: Any) -> dict[Any, Any]:
    return {key: value for key, value in state.items() if key is not own}


def everything(state: dict[Any, Any], own: Any, embedding: Any) -> dict[Any, Any]:
    return state


@pytest.mark.parametrize(("seen", "same"), [(everything, True), (without_moments, False), (without_own_state, False)])
def test_the_losses_show_an_untying_that_loses_moments_or_repeats(
    seen: Callable[..., Any], same: bool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Untying without the moments, or copying the embedding again in every step, changes the run from there on."""
    train(short(corpus, tmp_path / "run", head=MIDTRAINING))
    on_train_step = UntiedMidTrainingHead.on_train_step
    monkeypatch.setattr(
        UntiedMidTrainingHead,
        "on_train_step",
        lambda head, progress, embedding, state: on_train_step(
            head, progress, embedding, seen(state, head.proj.weight, embedding)
        ),
    )
    train(short(corpus, tmp_path / "other", head=MIDTRAINING))
    one, other = rows(tmp_path / "run"), rows(tmp_path / "other")
    assert one[:11] == other[:11]
    assert (one[11:] == other[11:]) == same


def test_untied_at_zero_equals_untied_from_embedding_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    for name, head in (("zero", replace(MIDTRAINING, untie_at=0.0)), ("copied", FROM_EMBEDDING)):
        train(run_with_dropout(corpus, tmp_path / name, head=head))
    assert (tmp_path / "zero/metrics.csv").read_text() == (tmp_path / "copied/metrics.csv").read_text()
    zero, copied = weights(tmp_path / "zero"), weights(tmp_path / "copied")
    assert zero.keys() == copied.keys()
    assert all(torch.equal(zero[name], copied[name]) for name in zero)


def test_untied_at_one_equals_tied_bit_for_bit(corpus: Path, tmp_path: Path) -> None:
    """And the saved model, which has two matrices, has the logits of the tied one."""
    results = [
        train(run_with_dropout(corpus, tmp_path / name, head=head))
        for name, head in (("one", replace(MIDTRAINING, untie_at=1.0)), ("tied", TIED))
    ]
    assert results[0]["val_loss"] == results[1]["val_loss"]
    assert (tmp_path / "one/metrics.csv").read_text() == (tmp_path / "tied/metrics.csv").read_text()
    one, tied = (load_model(tmp_path / name)[0] for name in ("one", "tied"))
    tokens = torch.arange(64).view(2, 32)
    assert torch.equal(one(tokens), tied(tokens))
    assert torch.equal(one.head.proj.weight, tied.embed.weight)
    assert evaluate_run(EvaluateConfig(run_dir=str(tmp_path / "one"), threads=1))["loss"] == results[1]["val_loss"]


@pytest.mark.parametrize("at", [0.5, 1.0])
def test_a_midtraining_run_killed_before_its_result_has_the_same_result(
    at: float, corpus: Path, tmp_path: Path
) -> None:
    """No step is left, so the checkpoint alone tells whether the head is untied."""
    run = short(corpus, tmp_path / "run", head=replace(MIDTRAINING, untie_at=at))
    result, model = train(run), weights(tmp_path / "run")
    (tmp_path / "run/result.json").unlink()
    again = train(run)
    assert again["resumed_from"] == [20]
    assert again["val_loss"] == result["val_loss"]
    assert all(torch.equal(tensor, model[name]) for name, tensor in weights(tmp_path / "run").items())


@pytest.mark.parametrize("step", [5, 10])
def test_a_run_stopped_before_untying_saves_the_model_that_was_trained(
    step: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It equals that of a tied run stopped in the same step."""
    stop_in_step(step, monkeypatch)
    for name, head in (("tied", TIED), ("untied", MIDTRAINING)):
        with pytest.raises(Interrupted):
            train(run_with_dropout(corpus, tmp_path / name, head=head))
    tokens = torch.arange(64).view(2, 32)
    untied, tied = (load_model(tmp_path / name)[0] for name in ("untied", "tied"))
    assert torch.equal(untied(tokens), tied(tokens))
    fresh = Transformer(untied.config, MIDTRAINING, vocab_size=257, seq_len=32)
    assert not torch.equal(untied.embed.weight, fresh.embed.weight)


def test_a_run_stopped_again_before_a_step_saves_the_same_model(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second signal comes after the checkpoint is read and before the first step."""
    stop_in_step(5, monkeypatch)
    with pytest.raises(Interrupted):
        train(run_with_dropout(corpus, tmp_path / "run"))
    model, configure = weights(tmp_path / "run"), LMTask.configure_optimizers
    monkeypatch.setattr(
        LMTask, "configure_optimizers", lambda task: os.kill(os.getpid(), signal.SIGTERM) or configure(task)
    )
    with pytest.raises(Interrupted, match="after step 5"):
        train(run_with_dropout(corpus, tmp_path / "run"))
    assert all(torch.equal(tensor, model[name]) for name, tensor in weights(tmp_path / "run").items())


@pytest.mark.parametrize("key", ["devices", "num_nodes"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_only_untied_midtraining_is_refused_on_several_devices(
    head: HeadConfig, key: str, corpus: Path, tmp_path: Path
) -> None:
    run = short(corpus, tmp_path / "run", head=head)
    assert resolve(run)[key] == 1
    run.trainer[key] = 2
    if head is MIDTRAINING:
        with pytest.raises(
            BadInput, match=r"^head\.kind=untied_midtraining: trains on one device only; choose trainer\.devices=1"
        ):
            resolve(run)
    else:
        assert resolve(run)[key] == 2


def data_of(text: str, val_text: str, seq_len: int = 8) -> TextData:
    """A byte-level corpus whose validation text is `val_text`."""
    tokenizer = byte_tokenizer()
    train_ids, val_ids = (np.array([tokenizer.eot, *tokenizer.encode(one)]) for one in (text, val_text))
    return TextData(
        tokenizer=tokenizer, train=train_ids, val=val_ids, val_bytes=len(val_text.encode()), baselines={}, hash=""
    )


CODE = "".join(f"x = [\n    {i},\n]\n\n\n# {'-' * 60}\n\n\ndef f{i}(a, b):\n    return a + {i}\n\n" for i in range(200))
PROSE = "".join(
    f"It was night {i} of the winter, and nobody had seen the sun for weeks. They slept.\n\n" for i in range(99)
)
PLAY = "".join(f"ROMEO {i}:\nWhat shall I swear by?\n\nJULIET {i}:\nDo not swear at all;\n\n" for i in range(99))
VAL_TEXTS = {
    "code": (CODE, r"def f\d+\(a, b\):"),
    "prose": (PROSE, r"It was night \d+ of the winter, and nobody had seen the sun"),
    "play": (PLAY, r"(ROMEO|JULIET) \d+:"),
    "lines": (TEXT, r"def f\d+\(x, y\):"),
    "one line": (
        "".join(f"Sentence {i} is short. " for i in range(500)),
        r"Sentence \d+ is short\.( Sentence \d+ is short\.)*.*\b",
    ),
    "no spaces": ("".join(map(chr, range(0x4E00, 0x5E00))), r"\w{60}"),
}


@pytest.mark.parametrize("name", VAL_TEXTS)
def test_default_prompts_begin_a_function_a_paragraph_or_a_sentence(name: str) -> None:
    text, pattern = VAL_TEXTS[name]
    data = data_of(text, text)
    prompts = validation_prompts(data)
    assert prompts == validation_prompts(data)
    assert len(set(prompts)) == 3
    for prompt in prompts:
        assert re.fullmatch(pattern, prompt), prompt
        assert 0 < len(prompt) <= 60
        end = text.index(prompt) + len(prompt)
        assert name == "no spaces" or not text[end : end + 1].strip(), "cut at the end of a word"


@pytest.mark.parametrize("text", ["", "\n\n\n", "#" * 500 + "\n" + "=" * 500, "a"])
def test_a_text_without_words_gives_no_prompts(text: str) -> None:
    assert validation_prompts(data_of(TEXT, text)) == []


def test_the_result_has_the_continuations_of_the_default_prompts(corpus: Path, tmp_path: Path) -> None:
    run = short(corpus, tmp_path / "run")
    found = train(run)["samples"]
    assert [one["prompt"] for one in found] == validation_prompts(prepare(run.data, run.tokenizer))
    net, tokenizer = load_model(tmp_path / "run")
    assert [one["continuation"] for one in found] == [generate(net, tokenizer, one["prompt"], 48) for one in found]
