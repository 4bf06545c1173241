"""Training end to end, in process: what a run leaves, what decides its numbers, that it learns."""

import csv
import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import yaml
from conftest import HEADS, TEXT, UNTIED
from test_resume import a_run

from lm.batches import TrainingStream
from lm.config import (
    BadInput,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TokenizerConfig,
)
from lm.data import prepare
from lm.decode import decode
from lm.evaluate import evaluate_run
from lm.metrics import MetricsFile
from lm.portable import load_model
from lm.run import config_hash, default_dir
from lm.tokenizer import EOT, byte_tokenizer
from lm.train import train

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
    """Twenty steps, each of them logged, with no dropout."""
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
    assert json.loads((tmp_path / "run/result.json").read_text()) == result
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
    assert sorted(path.name for path in (tmp_path / "run/model").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 2


def test_a_finished_run_is_read_and_never_touched(corpus: Path, tmp_path: Path) -> None:
    run = short(corpus, tmp_path / "run")
    result = train(run)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert train(run) == result
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_twenty_steps_are_golden(corpus: Path, tmp_path: Path) -> None:
    """A refactor leaves these losses alone; a change of numerics updates tests/golden.json and says why."""
    found = {}
    for name, head in HEADS.items():
        train(short(corpus, tmp_path / name, head=head))
        found[name] = losses(tmp_path / name)
    golden = json.loads(GOLDEN.read_text())
    for name in HEADS:
        assert found[name] == pytest.approx(golden[name], abs=2e-4), f"{name}: now {found[name]}"
    train(short(corpus, tmp_path / "again", head=UNTIED))
    assert losses(tmp_path / "again") == found["untied"], "bit for bit within a process"


def test_accumulation_sees_the_same_sequences(corpus: Path, tmp_path: Path) -> None:
    whole, split = short(corpus, tmp_path / "whole"), short(corpus, tmp_path / "split")
    split.trainer["accumulate_grad_batches"] = 4
    train(whole)
    train(split)
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "whole"), abs=1e-3)
    assert losses(tmp_path / "split") != losses(tmp_path / "whole")


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


@pytest.mark.parametrize("head", HEADS)
def test_one_batch_is_learned_by_heart_and_recited(head: str, corpus: Path, tmp_path: Path) -> None:
    """Data shift, loss, optimizer, cache and argmax in one: the model says on what it was shown."""
    run = short(corpus, tmp_path / "run", head=HEADS[head])
    run.trainer["max_steps"] = 150
    data = replace(run.data, batch_size=2, overfit_batches=1)
    train(replace(run, data=data, optim=OptimConfig(lr=1e-2, weight_decay=0.0, decay="constant")))
    assert losses(tmp_path / "run")[-1] < 0.1
    net, _ = load_model(tmp_path / "run")
    stream = TrainingStream(prepare(run.data, run.tokenizer).train, seq_len=32, batch_size=2, seed=0)
    shown = stream.batch(0)[0][0].tolist()
    recited = [one for (one,) in islice(decode(net, [shown[:8]]), 24)]
    assert recited == shown[8:]


def test_evaluate_gives_the_number_in_the_result(corpus: Path, tmp_path: Path) -> None:
    result = train(short(corpus, tmp_path / "run"))
    scores = evaluate_run(EvaluateConfig(run_dir=str(tmp_path / "run"), threads=1))
    assert scores["loss"] == result["val_loss"]
    assert scores["bits_per_byte"] == result["val_bpb"]
    (tmp_path / "val.txt").write_text(TEXT[int(len(TEXT) * 0.9) :])
    config = DataConfig(source="text", path=str(tmp_path / "val.txt"), batch_size=4)
    again = evaluate_run(EvaluateConfig(run_dir=str(tmp_path / "run"), data=config, threads=1))
    assert again == scores


def test_a_diverging_run_stops_and_keeps_its_last_good_checkpoint(corpus: Path, tmp_path: Path) -> None:
    run = short(corpus, tmp_path / "run", checkpoint=CheckpointConfig(every=1, keep=100))
    run.trainer["gradient_clip_val"] = None
    with pytest.raises(BadInput, match=r"at step \d+: lower optim\.lr"):
        train(replace(run, optim=OptimConfig(lr=1e30, warmup_steps=0)))
    for path in (tmp_path / "run/checkpoints").iterdir():
        weights = torch.load(path, weights_only=True)["state_dict"]
        assert not any(weight.isnan().any() for weight in weights.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate_grad_batches": 3}, "accumulate_grad_batches=3: does not divide data.batch_size=4"),
        ({"max_steps": None}, "max_steps=None: expected a number of steps"),
        ({"max_stepz": 3}, "max_stepz"),
        ({"limit_val_batches": 3}, "limit_val_batches: is decided by this project"),
        ({"limit_train_batches": 3}, "limit_train_batches: is decided by this project"),
        ({"precision": "16-mixed"}, "half precision"),
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


def test_tensorboard_can_stand_beside(corpus: Path, tmp_path: Path) -> None:
    logger = {"_target_": "lightning.pytorch.loggers.TensorBoardLogger", "name": "tensorboard", "version": ""}
    train(short(corpus, tmp_path / "run", head=UNTIED, logger={"tensorboard": logger}))
    assert list((tmp_path / "run/tensorboard").glob("events*"))
    assert len(rows(tmp_path / "run")) == 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, inside its compiler
def test_compile_changes_no_name_and_hardly_a_number(corpus: Path, tmp_path: Path) -> None:
    plain = train(short(corpus, tmp_path / "plain"))
    compiled = train(short(corpus, tmp_path / "compiled", compile=True))
    assert compiled["val_loss"] == pytest.approx(plain["val_loss"], abs=1e-3)
    load_model(tmp_path / "compiled")


def test_a_strangers_directory_is_never_touched(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.yaml").write_text("precious: true\n")
    with pytest.raises(BadInput, match="holds files that are no run's"):
        train(short(corpus, tmp_path / "mine"))
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["precious: true\n"]


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


def test_a_run_killed_before_its_result_is_finished_under_a_bar(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = short(corpus, tmp_path / "run")
    run.trainer["enable_progress_bar"] = True
    result = train(run)
    (tmp_path / "run/result.json").unlink()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    again = train(run)
    assert again["resumed_from"] == [20]
    assert again["val_loss"] == result["val_loss"]


def test_a_torn_row_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    MetricsFile(path, 0).log_metrics({"train/loss": 1.5}, 120)
    path.write_text(path.read_text() + "13")
    MetricsFile(path, 120).log_metrics({"train/loss": 1.25}, 130)
    assert [row["step"] for row in rows(tmp_path)] == ["120", "130"]


def test_what_a_killed_process_left_half_written_is_swept(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/.lock").touch()
    (tmp_path / "run/checkpoints/.partial-abc").write_text("half")
    train(short(corpus, tmp_path / "run"))
    assert not list((tmp_path / "run").rglob(".partial*"))


def test_no_limit_is_no_limit(corpus: Path, tmp_path: Path) -> None:
    for name, limit in (("zero", 0), ("none", None)):
        run = short(corpus, tmp_path / name)
        run.trainer["gradient_clip_val"] = limit
        train(run)
    assert losses(tmp_path / "zero") == losses(tmp_path / "none")
