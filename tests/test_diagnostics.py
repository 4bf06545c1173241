"""diagnostics.csv is correct, also after a kill, and leaves the run equal bit for bit."""

import csv
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import HEADS, SEQ, TEXT, TIED, UNTIED, VOCAB, some, tiny
from lm.training.options import resolve
from test_resume import PROCESSES, a_run, finish, outcome, work
from test_train import short
from torch import Tensor

from lm.config import BadInput, CheckpointConfig, DiagnosticsConfig, HeadConfig, RunConfig
from lm.data.batches import IGNORED
from lm.data.tokens import prepare
from lm.exchange.portable import load_model
from lm.inference import details
from lm.inference.details import BANDS, NLLByTarget, frequency_bands, token_counts
from lm.model.transformer import Transformer
from lm.training.diagnostics import BY_BAND, COLUMNS, GRADIENTS, EmbeddingGradient
from lm.training.train import train

TOKENS, TARGETS = torch.randint(VOCAB, (2, 4, SEQ), generator=torch.Generator().manual_seed(0))
LOSSES = BY_BAND[:BANDS]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(TEXT)
    return path


def read(run_dir: Path, name: str = "diagnostics") -> list[dict[str, str]]:
    with open(run_dir / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows]


def build(head: HeadConfig) -> Transformer:
    return Transformer(tiny(), head, vocab_size=VOCAB, seq_len=SEQ)


def backward(net: Transformer, parts: int = 1) -> None:
    """The gradient of one step in `parts` micro-batches, as Lightning computes it."""
    for tokens, targets in zip(TOKENS.chunk(parts), TARGETS.chunk(parts), strict=True):
        (F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()) / parts).backward()


def measured(net: Transformer, parts: int = 1) -> tuple[Tensor, Tensor]:
    gradient = EmbeddingGradient(net)
    backward(net)  # of a step that is not measured
    net.zero_grad()
    for _ in range(parts):
        gradient.start()
    backward(net, parts)
    with torch.no_grad():
        net(TOKENS)  # a validation is not measured either
    return gradient.gradients()


def untied_twin(net: Transformer, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the input and the output embeddings, from an untied model that is equal otherwise."""
    twin = build(replace(UNTIED, embedding_std=net.embed.std, embedding_multiplier=net.embed.multiplier))
    twin.head.proj.load_state_dict({"weight": scores})
    backward(twin)
    return twin.embed.weight.grad, twin.head.proj.weight.grad


def near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6 * other.abs().max().item()) and other.norm().item() > 1e-3


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 2.5, None])
def test_both_gradients_of_a_tied_embedding_equal_those_of_an_untied_twin(scale: float | None, parts: int) -> None:
    net = build(replace(TIED, embedding_multiplier=scale))
    embedding_grad, head_grad = measured(net, parts)
    twin_embedding_grad, twin_head_grad = untied_twin(net, net.embed.weight.detach())
    assert near(embedding_grad, twin_embedding_grad)
    assert near(head_grad, twin_head_grad)
    assert near(embedding_grad + head_grad, net.embed.weight.grad)
    assert not near(embedding_grad, head_grad), "so that they cannot be confused"


def test_with_a_projection_head_grad_is_of_the_embedding() -> None:
    net = build(HEADS["tied_projected"])
    with torch.no_grad():
        net.head.proj.weight.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.2)
    embedding_grad, head_grad = measured(net)
    twin_embedding_grad, twin_head_grad = untied_twin(net, net.head.matrix(net.embed.weight).detach())
    assert near(embedding_grad, twin_embedding_grad)
    assert near(head_grad, twin_head_grad @ net.head.proj.weight.T)  # output = embedding @ projection
    assert not near(head_grad, twin_head_grad)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("scale", [1.0, None])
def test_untied_gradients_are_those_of_the_two_matrices(scale: float | None, parts: int) -> None:
    net = build(replace(UNTIED, embedding_multiplier=scale))
    embedding_grad, head_grad = measured(net, parts)
    assert torch.equal(head_grad, net.head.proj.weight.grad)
    assert near(embedding_grad, net.embed.weight.grad)


@pytest.mark.parametrize("progress", [0.0, 0.9])
def test_untied_midtraining_is_measured_before_and_after_untying(progress: float) -> None:
    net = build(HEADS["untied_midtraining"])
    net.head.on_train_step(progress, net.embed.weight, {})
    embedding_grad, head_grad = measured(net)
    twin_embedding_grad, twin_head_grad = untied_twin(net, net.embed.weight.detach())
    assert near(embedding_grad, twin_embedding_grad)
    assert near(head_grad, twin_head_grad)
    assert near(net.embed.weight.grad, twin_embedding_grad + twin_head_grad if progress < 0.5 else twin_embedding_grad)


def zipf(vocab_size: int, n: int) -> np.ndarray:
    weights = 1 / np.arange(1, vocab_size + 1)
    names = np.random.default_rng(0).permutation(vocab_size)  # so that ids are not ordered by frequency
    return names[np.random.default_rng(1).choice(vocab_size, n, p=weights / weights.sum())].astype(np.uint16)


def test_bands_divide_the_vocabulary_into_equal_shares_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = zipf(1000, 50_000)
    bands = frequency_bands(token_counts(tokens, 1010))  # ten tokens never occur
    assert bands.shape == (1010,)
    assert set(bands.tolist()) == set(range(BANDS)), "each token in one band, no band empty"
    counts = np.bincount(tokens, minlength=1010)
    assert np.bincount(bands, counts) / len(tokens) == pytest.approx([0.2] * BANDS, abs=0.03)
    for i in range(BANDS - 1):
        assert counts[bands == i].min() >= counts[bands == i + 1].max(), "from frequent to rare"
    assert set(bands[1000:].tolist()) == {BANDS - 1}
    monkeypatch.setattr(details, "CHUNK", 999)
    assert np.array_equal(frequency_bands(token_counts(tokens, 1010)), bands)


def test_a_very_frequent_token_leaves_equal_shares_for_other_bands() -> None:
    tokens = np.concatenate([np.zeros(1000, dtype=np.uint16), 1 + zipf(300, 1000)])
    mass = np.bincount(frequency_bands(token_counts(tokens, 301))[tokens], minlength=BANDS) / len(tokens)
    assert mass == pytest.approx([0.5, 0.125, 0.125, 0.125, 0.125], abs=0.03)
    assert frequency_bands(token_counts(np.array([2, 2, 0]), 3)).tolist() == [1, 2, 0], "fewer tokens than bands"


def test_nothing_is_measured_by_default(corpus: Path, tmp_path: Path) -> None:
    train(short(corpus, tmp_path / "run"))
    assert not (tmp_path / "run/diagnostics.csv").exists()


@pytest.mark.parametrize("head", some(["tied", "untied", "tied_scaled", "untied_midtraining"], 2))
def test_diagnostics_leave_the_run_equal_bit_for_bit(head: str, corpus: Path, tmp_path: Path) -> None:
    """With dropout and accumulation; and a small change of a setting is detected."""
    run = a_run(corpus, tmp_path / "off", steps=20, head=HEADS[head])
    train(run)
    asked = DiagnosticsConfig(every=3)
    train(replace(run, run_dir=str(tmp_path / "on"), diagnostics=asked))
    train(replace(run, run_dir=str(tmp_path / "nudged"), optim=replace(run.optim, eps=run.optim.eps * 1.01)))
    off, on, nudged = (outcome(replace(run, run_dir=str(tmp_path / name))) for name in ("off", "on", "nudged"))
    for one in (off, on, nudged):
        del one["result"]["config_hash"]
        one["result"].pop("diagnostics_hash", None)
    assert on == off
    assert nudged["weights"] != off["weights"]
    assert column(read(tmp_path / "on"), "step") == [3, 6, 9, 12, 15, 18, 20]
    assert tuple(read(tmp_path / "on")[0]) == COLUMNS


def test_two_micro_batches_are_measured_as_one(corpus: Path, tmp_path: Path) -> None:
    first = {}
    for accumulate in (1, 2):
        run = short(corpus, tmp_path / str(accumulate), diagnostics=DiagnosticsConfig(every=1))
        run.trainer |= {"accumulate_grad_batches": accumulate, "max_steps": 3}
        train(run)
        first[accumulate] = [column(read(tmp_path / str(accumulate)), side) for side in GRADIENTS]
    assert first[2] == [pytest.approx(values, rel=1e-3) for values in first[1]]
    assert len({tuple(values) for values in first[1]}) == 3


def test_the_clip_rate_equals_a_count_by_hand(corpus: Path, tmp_path: Path) -> None:
    for limit in (1.5, None):
        run = short(corpus, tmp_path / str(limit), diagnostics=DiagnosticsConfig(every=6))
        run.trainer["gradient_clip_val"] = limit
        train(run)
        rows, norms = read(tmp_path / str(limit)), column(read(tmp_path / str(limit), "metrics"), "train/grad_norm")
        assert [int(row["step"]) for row in rows] == [6, 12, 18, 20]
        assert [int(row["tokens"]) for row in rows] == [step * 4 * 32 for step in (6, 12, 18, 20)]
        spans = [norms[0:6], norms[6:12], norms[12:18], norms[18:20]]
        by_hand = [sum(norm > (limit or 1e9) for norm in span) / len(span) for span in spans]
        assert column(rows, "clip_rate") == by_hand
        assert (0 < sum(by_hand) < 4) == (limit is not None)


def test_gradients_are_measured_before_they_are_clipped(corpus: Path, tmp_path: Path) -> None:
    for limit in (0.01, None):
        run = short(corpus, tmp_path / str(limit), diagnostics=DiagnosticsConfig(every=1))
        run.trainer |= {"gradient_clip_val": limit, "max_steps": 1}
        train(run)
    (clipped,), (free,) = read(tmp_path / "0.01"), read(tmp_path / "None")
    assert [clipped[side] for side in GRADIENTS] == [free[side] for side in GRADIENTS]
    assert (clipped["clip_rate"], free["clip_rate"]) == ("1.0", "0.0")


def mean_loss(row: dict[str, str], bands: np.ndarray) -> float:
    """The losses by band, each weighted with its targets; `bands`: (n,) of all targets."""
    counts = np.bincount(bands, minlength=BANDS)
    assert [row[name] != "" for name in LOSSES] == [bool(count) for count in counts], "empty where no target was"
    return sum(float(row[name] or 0) * count for name, count in zip(LOSSES, counts, strict=True)) / counts.sum()


def test_each_target_gets_its_own_negative_log_likelihood() -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    by_target = NLLByTarget(4)
    for part in (slice(0, 4), slice(4, 6)):
        by_target.add(logits[part], torch.tensor([2, 0, 2, IGNORED, 3, 0])[part])
    total_nll = -logits.log_softmax(-1)
    expected = [total_nll[1, 0] + total_nll[5, 0], 0, total_nll[0, 2] + total_nll[2, 2], total_nll[4, 3]]
    assert by_target.total_nll == pytest.approx(np.array(expected), rel=1e-5)
    assert by_target.counts.tolist() == [2, 0, 2, 1]


@pytest.mark.parametrize("head", ["tied_scaled", "untied"])
def test_losses_and_norms_by_band_match_the_saved_model(head: str, corpus: Path, tmp_path: Path) -> None:
    run = short(corpus, tmp_path / "run", head=HEADS[head], diagnostics=DiagnosticsConfig(every=8))
    result, data = train(run), prepare(run.data, run.tokenizer)
    bands = frequency_bands(token_counts(data.train, data.tokenizer.vocab_size))
    rows = read(tmp_path / "run")
    assert mean_loss(rows[-1], bands[data.val[1:]]) == pytest.approx(result["val_loss"], rel=1e-5)
    net, _ = load_model(tmp_path / "run")
    matrices = {"embedding_norm": net.embed.matrix(), "head_norm": net.head.matrix(net.embed.weight)}
    for name, matrix in matrices.items():
        expected = [matrix[bands == i].norm(dim=1).mean().item() for i in range(BANDS)]
        assert [float(rows[-1][f"{name}/band{i + 1}"]) for i in range(BANDS)] == pytest.approx(expected, rel=1e-5)
    assert rows[-1]["embedding_norm/band1"] != rows[-1]["head_norm/band1"]


def test_a_band_without_targets_is_empty(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "monotone.txt"
    path.write_text(TEXT[: len(TEXT) * 9 // 10] + "f" * (len(TEXT) // 10 + 1))  # its end is the validation text
    run = short(path, tmp_path / "run", diagnostics=DiagnosticsConfig(every=20))
    result = train(run)
    (row,) = read(tmp_path / "run")
    (one,) = (name for name in LOSSES if row[name])
    assert float(row[one]) == pytest.approx(result["val_loss"], rel=1e-5)
    assert all(row[name] for name in COLUMNS if name not in LOSSES)


def test_only_the_last_row_has_validation_losses(corpus: Path, tmp_path: Path) -> None:
    train(short(corpus, tmp_path / "run", diagnostics=DiagnosticsConfig(every=5)))
    *before, last = read(tmp_path / "run")
    assert before
    assert not any(row[name] for row in before for name in LOSSES)
    assert all(row[name] for row in [*before, last] for name in COLUMNS if name not in LOSSES)
    assert any(last[name] for name in LOSSES)


def test_several_devices_are_refused(corpus: Path, tmp_path: Path) -> None:
    run = short(corpus, tmp_path / "run", diagnostics=DiagnosticsConfig(every=5))
    run.trainer["devices"] = 2
    with pytest.raises(BadInput, match=r"diagnostics\.every=5: measures on one device"):
        resolve(run)
    assert resolve(replace(run, diagnostics=DiagnosticsConfig()))["devices"] == 2


def a_measured_run(corpus: Path, run_dir: Path) -> RunConfig:
    """Rows at 7, 14, 21, ... and checkpoints at 5, 10, 15, ..., so most resumes begin between two rows."""
    run = a_run(corpus, run_dir, steps=40, diagnostics=DiagnosticsConfig(every=7))
    run.trainer["gradient_clip_val"] = 1.85  # about half of the steps are clipped
    return replace(run, checkpoint=CheckpointConfig(every=5))


def work_until(run: RunConfig, step: int, where: str) -> None:
    """Train until SIGKILL: `in` the step after `step`, or right after the checkpoint of `step` is `saved`."""
    from lm.training.task import LMTask

    from lm.training.checkpoint import Checkpoints

    train_step, save = LMTask.training_step, Checkpoints.save_checkpoint

    def die_in(task: Any, *args: Any) -> Tensor:
        if where == "in" and task.trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(task, *args)

    def die_after(self: Any, checkpoint: dict[str, Any], *args: Any, **options: Any) -> None:
        save(self, checkpoint, *args, **options)
        if where == "saved" and checkpoint["global_step"] == step:
            os.kill(os.getpid(), signal.SIGKILL)

    LMTask.training_step, Checkpoints.save_checkpoint = die_in, die_after  # type: ignore[method-assign]
    work(run)


def work_forgetful(run: RunConfig) -> None:
    from lm.training.diagnostics import Diagnostics

    Diagnostics.load_state_dict = lambda *_: None  # type: ignore[method-assign]
    work(run)


def kill(run: RunConfig, step: int, where: str) -> None:
    process = PROCESSES.Process(target=work_until, args=(run, step, where))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture(scope="module")
def undisturbed(corpus: Path) -> Path:
    run = a_measured_run(corpus, corpus.parent / "undisturbed")
    assert finish(run) == 0
    return corpus.parent / "undisturbed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "where"),
    [
        (25, "saved"),  # between two rows
        (35, "saved"),  # at a row, which must be on disk
        (29, "in"),  # after a row that is newer than the last checkpoint: it is logged again, once
    ],
)
def test_a_killed_run_ends_with_the_same_rows(
    undisturbed: Path, corpus: Path, tmp_path: Path, step: int, where: str
) -> None:
    run = a_measured_run(corpus, tmp_path / "run")
    kill(run, step, where)
    assert [int(row["step"]) for row in read(tmp_path / "run")] == list(range(7, step + 1, 7))
    assert finish(run) == 0
    assert (tmp_path / "run/diagnostics.csv").read_bytes() == (undisturbed / "diagnostics.csv").read_bytes()
    assert [int(row["step"]) for row in read(tmp_path / "run")] == [7, 14, 21, 28, 35, 40]


@pytest.mark.slow
def test_the_comparison_sees_a_count_that_was_not_restored(undisturbed: Path, corpus: Path, tmp_path: Path) -> None:
    run = a_measured_run(corpus, tmp_path / "run")
    kill(run, 25, "saved")
    process = PROCESSES.Process(target=work_forgetful, args=(run,))
    process.start()
    process.join(120)
    broken, whole = read(tmp_path / "run"), read(undisturbed)
    assert 0 < float(whole[3]["clip_rate"]) < 1, "otherwise half the count could give the same"
    assert broken != whole
    assert [row | {"clip_rate": ""} for row in broken] == [row | {"clip_rate": ""} for row in whole]


def test_a_run_killed_before_its_result_keeps_its_rows(undisturbed: Path) -> None:
    before = (undisturbed / "diagnostics.csv").read_bytes()
    (undisturbed / "result.json").unlink()
    train(a_measured_run(undisturbed.parent / "corpus.txt", undisturbed))
    assert (undisturbed / "diagnostics.csv").read_bytes() == before


def test_rows_that_were_changed_before_a_resume_are_refused(undisturbed: Path) -> None:
    path = undisturbed / "diagnostics.csv"
    (undisturbed / "result.json").unlink()
    whole = path.read_text()
    try:
        path.write_text(whole.replace("7,", "8,", 1))
        with pytest.raises(BadInput, match=r"diagnostics\.csv: was changed after step 40; remove it to go on without"):
            train(a_measured_run(undisturbed.parent / "corpus.txt", undisturbed))
    finally:
        path.write_text(whole)
        train(a_measured_run(undisturbed.parent / "corpus.txt", undisturbed))
    assert path.read_text() == whole


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, inside its compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # which torch hides from users
def test_a_compiled_model_is_measured_too(corpus: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(torch.compiler.reset)  # compiled code of a model with hooks must not reach other tests
    rows = {}
    for compiled in (False, True):
        run = short(corpus, tmp_path / str(compiled), head=HEADS["tied_scaled"], diagnostics=DiagnosticsConfig(every=3))
        run.trainer["max_steps"] = 7
        train(replace(run, compile=compiled))
        rows[compiled] = read(tmp_path / str(compiled))
    for name in COLUMNS:
        first = -1 if name in LOSSES else 0  # only the last row has losses
        found, expected = (column(rows[compiled][first:], name) for compiled in (True, False))
        assert found == pytest.approx(expected, rel=1e-2, abs=1e-3)
