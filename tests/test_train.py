"""Training in this process: the files of a run, what its numbers depend on, and that it learns."""

import gc
import json
import math
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import yaml
from conftest import HEADS, TEXT, UNTIED, as_nobody

from lm import generate, load_model
from lm.config import (
    DataConfig,
    Diverged,
    EvaluateConfig,
    OptimConfig,
    RunConfig,
    TokenizerConfig,
    UserError,
    ValidationConfig,
)
from lm.data.batches import TrainingStream
from lm.data.tokenizer import EOT
from lm.data.tokens import TextData, prepare
from lm.data.vocabulary import byte_tokenizer
from lm.inference.decode import decode
from lm.inference.evaluate import evaluate, evaluate_run
from lm.model.transformer import Transformer
from lm.training.loss import HAS_CHUNKED
from lm.training.metrics import MetricsFile
from lm.training.samples import validation_prompts
from lm.training.train import _log_warnings, train
from tests.helpers.runs import change, checkpoints, losses, result, rows, short_run

GOLDEN = Path(__file__).parent / "golden.json"
RESULT_KEYS = (
    "val_loss val_bpb val_top1 val_tokens val_bytes n_params n_params_by_role flops_per_token steps tokens seconds"
    " tokens_per_second seed head resumed_from config_hash data_hash tokenizer_hash threads device cpu python versions"
    " precision baselines_bpb samples init_from"
)

Finished = tuple[RunConfig, Path, dict[str, Any]]


def score(run_dir: Path, **settings: Any) -> dict[str, Any]:
    return evaluate_run(EvaluateConfig(run_dir=str(run_dir), threads=1, **settings))


@pytest.fixture(scope="module")
def finished(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A finished run, its directory and its result."""
    run = short_run(text_file, tmp_path_factory.mktemp("finished") / "run")
    return run, *train(run)


# --- the files of a run


def test_a_run_leaves_what_the_design_promises(finished: Finished) -> None:
    run, folder, scores = finished
    assert str(folder) == run.run_dir
    assert result(folder) == scores
    assert set(RESULT_KEYS.split()) <= scores.keys()
    assert scores["n_params"] == sum(scores["n_params_by_role"].values())
    assert scores["tokens"] == 20 * 4 * 32
    assert scores["val_tokens"] == len(TEXT) - int(len(TEXT) * 0.9), "bytes: every validation token once"
    assert scores["val_bpb"] == pytest.approx(scores["val_loss"] / math.log(2)), "bytes: a token is a byte"
    assert yaml.safe_load((folder / "config.yaml").read_text())["model"]["d_model"] == 32
    assert [int(row["step"]) for row in rows(folder)] == list(range(1, 21))
    names = sorted(path.name for path in (folder / "model").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert checkpoints(run) == [10, 20]


def test_a_finished_run_is_read_and_never_touched(finished: Finished) -> None:
    run, folder, scores = finished
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    same_length = change(run, max_tokens=scores["tokens"], max_steps=1)
    for same in (run, change(run, accelerator="auto", precision="auto", loss="auto", threads=2), same_length):
        assert train(same) == (folder, scores)
    for key, changes in (("trainer.precision", {"precision": "bf16-mixed"}), ("loss", {"loss": "chunked"})):
        with pytest.raises(UserError, match=rf"{key} is "):
            train(change(run, **changes))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_evaluate_gives_the_number_in_the_result(finished: Finished, tmp_path: Path) -> None:
    _, folder, scores = finished
    scored = score(folder)
    assert (scored["loss"], scored["bpb"]) == (scores["val_loss"], scores["val_bpb"])
    (tmp_path / "val.txt").write_text(TEXT[int(len(TEXT) * 0.9) :])
    assert score(folder, data=DataConfig(source="text", path=str(tmp_path / "val.txt"), batch_size=4)) == scored


@pytest.mark.parametrize("every", [0, 5, 20])
def test_the_curve_ends_at_the_score(text_file: Path, tmp_path: Path, every: int) -> None:
    """Bit for bit; the rows before it are estimates."""
    folder, scores = train(short_run(text_file, tmp_path / "run", validation=ValidationConfig(every=every, batches=2)))
    *before, last = rows(folder)
    columns = ("val_loss", "val_bpb", "val_top1", "val_tokens")
    assert [float(last[name.replace("_", "/")]) for name in columns] == [scores[name] for name in columns]
    assert last["train/loss"]
    assert [int(row["val/tokens"]) for row in before if row["val/loss"]] == [2 * 4 * 32] * (3 if every == 5 else 0)
    assert scores["val_tokens"] > 2 * 4 * 32


def test_metrics_have_whole_rows_up_to_the_resume_and_a_header(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    MetricsFile(path).append(120, {"train/loss": 1.5})
    MetricsFile(path, 120).append(125, {"train/loss": 1.4})
    path.write_text(path.read_text() + "13")  # cut off
    MetricsFile(path, 120).append(130, {"train/loss": 1.25})
    assert [row["step"] for row in rows(tmp_path)] == ["120", "130"]


def test_samples_are_continuations_of_prompts(finished: Finished, tmp_path: Path) -> None:
    """At the end of three places of the validation text, or of the user's prompts, then at each validation too."""
    run, folder, scores = finished
    assert [sample["prompt"] for sample in scores["samples"]] == validation_prompts(prepare(run.data, run.tokenizer))
    net, tokenizer = load_model(folder)
    for seed, sample in enumerate(scores["samples"]):
        assert sample["continuation"] == generate(net, tokenizer, sample["prompt"], 48)
        assert sample["drawn"] == generate(net, tokenizer, sample["prompt"], 48, temperature=0.8, seed=seed)
    assert not (folder / "samples.jsonl").exists()
    own = change(run, run_dir=str(tmp_path / "own"), prompts=["def f"], validation=ValidationConfig(every=5))
    folder, scores = train(own)
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["tokens"]) for line in lines] == [(step, step * 4 * 32) for step in (5, 10, 15)]
    assert {sample["prompt"] for line in [*lines, scores] for sample in line["samples"]} == {"def f"}


@pytest.mark.parametrize("is_shown", [True, False])
def test_lines_of_validations_follow_enable_progress_bar(
    is_shown: bool, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validation = ValidationConfig(every=5)
    train(short_run(text_file, tmp_path / "run", validation=validation, enable_progress_bar=is_shown))
    assert capsys.readouterr().err.count(" of 20: train/loss ") == 4 * is_shown - is_shown


# --- numbers


def test_twenty_steps_are_golden(text_file: Path, tmp_path: Path) -> None:
    """A refactoring keeps these losses; a change of numerics updates tests/golden.json and explains it."""
    golden = json.loads(GOLDEN.read_text())
    for name in ("tied", "untied"):
        train(short_run(text_file, tmp_path / name, head=HEADS[name]))
        assert losses(tmp_path / name) == pytest.approx(golden[name], abs=2e-4)
    train(short_run(text_file, tmp_path / "again", head=UNTIED))
    assert losses(tmp_path / "again") == losses(tmp_path / "untied"), "bit for bit within a process"


@pytest.mark.parametrize(
    "head", [pytest.param(name, marks=[pytest.mark.slow] * (i > 1)) for i, name in enumerate(HEADS)]
)
def test_one_batch_is_memorised_and_recited(head: str, text_file: Path, tmp_path: Path) -> None:
    """Targets, loss, optimizer, cache and argmax together: the model continues what it was trained on."""
    optim = OptimConfig(lr=1e-2, weight_decay=0.0, decay="constant")
    run = short_run(text_file, tmp_path / "run", head=HEADS[head], optim=optim, max_steps=150)
    train(replace(run, data=replace(run.data, batch_size=2, overfit_batches=1)))
    assert losses(tmp_path / "run")[-1] < 0.1
    net, _ = load_model(tmp_path / "run")
    stream = TrainingStream(prepare(run.data, run.tokenizer).train, seq_len=32, batch_size=2, seed=0)
    tokens = stream.batch(0)[0][0].tolist()
    assert [token for (token,) in islice(decode(net, [tokens[:8]]), 24)] == tokens[8:]


def test_accumulation_sees_the_same_sequences(text_file: Path, tmp_path: Path) -> None:
    for n in (1, 4):
        train(short_run(text_file, tmp_path / str(n), accumulate_grad_batches=n))
    assert losses(tmp_path / "4") == pytest.approx(losses(tmp_path / "1"), abs=1e-3)
    assert losses(tmp_path / "4") != losses(tmp_path / "1")


def test_a_length_in_tokens_sets_steps_and_schedule(text_file: Path, tmp_path: Path) -> None:
    train(short_run(text_file, tmp_path / "steps"))
    _, scores = train(short_run(text_file, tmp_path / "tokens", max_tokens=20 * 4 * 32 - 5, max_steps=999))
    assert scores["steps"] == 20
    assert (tmp_path / "tokens/metrics.csv").read_text() == (tmp_path / "steps/metrics.csv").read_text()


def test_the_seed_decides_and_a_clipping_limit_of_zero_is_no_limit(text_file: Path, tmp_path: Path) -> None:
    for seed, limit in ((0, None), (0, 0), (0, 1.0), (1, None)):
        train(short_run(text_file, tmp_path / f"{seed} {limit}", seed=seed, gradient_clip_val=limit))
    assert losses(tmp_path / "0 None") == losses(tmp_path / "0 0") != losses(tmp_path / "0 1.0")
    assert losses(tmp_path / "0 None") != losses(tmp_path / "1 None")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, inside its compiler
def test_compile_gives_nearly_equal_numbers(text_file: Path, tmp_path: Path) -> None:
    for enabled in (False, True):
        train(short_run(text_file, tmp_path / str(enabled), compile=enabled))
        load_model(tmp_path / str(enabled))
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), abs=1e-3)


@pytest.mark.skipif(not HAS_CHUNKED, reason="needs torch 2.13")
def test_less_memory_gives_nearly_equal_numbers(text_file: Path, tmp_path: Path) -> None:
    _, plain = train(short_run(text_file, tmp_path / "plain", loss="plain"))
    _, small = train(short_run(text_file, tmp_path / "small", loss="chunked", activation_checkpointing=True))
    assert small["val_loss"] == pytest.approx(plain["val_loss"], abs=1e-4)
    assert losses(tmp_path / "small") == pytest.approx(losses(tmp_path / "plain"), abs=1e-4)
    load_model(tmp_path / "small")


def test_runs_in_one_process_leave_no_model_in_memory(text_file: Path, tmp_path: Path) -> None:
    """As the jobs of a sweep, one of which fails and says what to change."""

    def n_models() -> int:
        gc.collect()
        return sum(type(thing) is Transformer for thing in gc.get_objects())

    before, run = n_models(), short_run(text_file, tmp_path / "run")
    train(run)
    optim = OptimConfig(lr=1e15, warmup_steps=0)
    with pytest.raises(Diverged, match=r"at step \d+: .*optim\.lr"):
        train(change(run, run_dir=str(tmp_path / "diverged"), optim=optim, gradient_clip_val=None))
    assert n_models() == before


# --- scores of a run


def test_an_estimate_is_near_the_score_of_a_text_that_begins_easily(tmp_path: Path) -> None:
    """A tenth of the validation text, its beginning, is one letter; a rule that reads the first windows is far off."""
    letters = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 60_000)))
    (tmp_path / "text").write_text("a" * 20_000 + letters[:52_000] + "a" * 800 + letters[52_000:59_200])
    optim = OptimConfig(lr=0.01, warmup_steps=5)
    run = short_run(tmp_path / "text", tmp_path / "run", optim=optim, max_steps=40)
    data = prepare(run.data, run.tokenizer)
    folder, scores = train(run, data)
    net, _ = load_model(folder)
    first, estimate = evaluate(net, data.val[:513], 32, 4), evaluate(net, data.val, 32, 4, max_batches=4)
    assert estimate.n_tokens == first.n_tokens == 512
    assert first.loss < scores["val_loss"] - 1
    assert estimate.loss == pytest.approx(scores["val_loss"], abs=0.1)


def test_a_run_is_scored_where_nothing_can_be_written(
    open_folder: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(text_file, open_folder / "text")
    folder, scores = train(short_run(open_folder / "text", open_folder / "run"))
    monkeypatch.chdir(open_folder)
    with as_nobody():
        assert score(folder)["loss"] == scores["val_loss"]
        other = score(folder, data=DataConfig(source="text", path="text"))
    shutil.rmtree(open_folder / "cache")
    with as_nobody():
        assert score(folder)["loss"] == scores["val_loss"]
    assert other["bytes"] == len(TEXT.encode())


def test_a_text_of_a_few_pages_is_warned_about_with_its_epochs(
    text_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for max_bytes in (None, 4_000):
        run = short_run(text_file, tmp_path)
        run = replace(run, data=replace(run.data, max_bytes=max_bytes))
        _log_warnings(run, prepare(run.data, run.tokenizer))
        assert ("only 3601 tokens, read 0.7 times" in caplog.text) == (max_bytes is not None)


# --- what is refused


def test_what_lies_in_the_place_of_the_directory_is_never_touched(text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for path in (tmp_path / "text", tmp_path / "mine/notes.txt"):  # the text itself, say; a folder of somebody
        shutil.copy(text_file, path)
    for run_dir in (tmp_path / "text", tmp_path / "mine"):
        with pytest.raises(UserError, match=f"^run_dir={run_dir}: "):
            train(short_run(tmp_path / "text", run_dir))
    assert {path.name for path in tmp_path.rglob("*")} - {"cache"} >= {"text", "mine", "notes.txt"}
    assert [path.read_text() for path in (tmp_path / "text", *(tmp_path / "mine").iterdir())] == [TEXT, TEXT]


def test_a_wrong_setting_leaves_no_directory(text_file: Path, tmp_path: Path) -> None:
    run = short_run(text_file, tmp_path / "new/run")
    for changes, key in (
        ({"data": replace(run.data, seq_len=100_000)}, "data"),
        ({"data": replace(run.data, path="absent")}, r"data\.path"),
        ({"init_tied_matrix": "mean"}, "init_tied_matrix"),
    ):
        with pytest.raises(UserError, match=rf"^{key}\b"):
            train(change(run, **changes))
        assert not (tmp_path / "new").exists()


def test_another_or_a_lossy_tokenizer_is_refused_and_scores_take_the_runs_own(text_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_tokenizer().to_json())
    tokenizer = TokenizerConfig(kind="file", vocab_size=None, path=str(path))
    run = short_run(text_file, tmp_path / "run", tokenizer=tokenizer)
    folder, scores = train(run)
    (folder / "result.json").rename(tmp_path / "result.json")
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match="tokenizer_hash"):
        train(run)
    (tmp_path / "result.json").rename(folder / "result.json")
    assert score(folder)["loss"] == scores["val_loss"]
    lossy = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, EOT: 1}, unk_token="[UNK]"))
    lossy.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    path.write_text(lossy.to_str())
    with pytest.raises(UserError, match=f"^{path}: "):
        train(change(run, run_dir=str(tmp_path / "lossy")))


# --- default prompts


def data_of(text: str) -> TextData:
    """A byte-level corpus whose validation text this is."""
    tokenizer = byte_tokenizer()
    ids = np.array([tokenizer.eot, *tokenizer.encode(text)])
    return TextData(tokenizer=tokenizer, train=ids, val=ids, val_bytes=len(text.encode()), baselines={}, hash="")


VAL_TEXTS = {
    "code": "".join(f"x = [\n    {i},\n]\n\n# {'-' * 60}\n\ndef f{i}(a, b):\n    return {i}\n\n" for i in range(200)),
    "one line": "".join(f"Sentence {i} is short. " for i in range(500)),
    "no spaces": "".join(map(chr, range(0x4E00, 0x5E00))),
    **{name: name for name in ("", "\n\n\n", "#" * 500, "a")},
}


@pytest.mark.parametrize("name", VAL_TEXTS)
def test_default_prompts_are_three_different_stretches_of_whole_words(name: str) -> None:
    """None of a text without words."""
    text = VAL_TEXTS[name]
    prompts = validation_prompts(data_of(text))
    assert len(set(prompts)) == (0 if text == name else 3)
    for prompt in prompts:
        assert prompt[0].isalpha()
        assert 6 <= len(prompt) <= 60
        end = text.index(prompt) + len(prompt)
        assert name == "no spaces" or not text[end : end + 1].isalnum()
