"""data.document_mask: a document that shares a row with others is computed as if it were alone."""

import copy
from dataclasses import replace

import pytest
import torch

from lm.cli.evaluate import EvaluateConfig
from lm.config import ValidationConfig
from lm.data.batches import TrainingStream
from lm.lab.commands import export
from lm.model import Transformer
from lm.model.transformer import enable_activation_checkpointing
from lm.system.device import fast_attention
from lm.training.loss import HAS_CHUNKED, LOSSES, plain
from lm.training.train import train
from tests.helpers.decoding import by_definition, sensitive, tokens
from tests.helpers.models import MODELS, build, gradients, name_of
from tests.helpers.runs import data_of, evaluate_run, rows, small_run
from tests.helpers.texts import write_rows
from tests.helpers.tiny import SEQ, VOCAB, tiny

EOT = 3
LENGTHS = (4, 1, 6, SEQ - 11)  # of the pieces of a row; the first began in an earlier row, the others begin with EOT
USABLE = [name for name in LOSSES if name != "chunked" or HAS_CHUNKED]


def pack():
    """Rows (2, SEQ) of several documents, and the pieces (2, length) that they consist of."""
    row = torch.randint(EOT + 1, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(0))
    pieces = list(row.split(LENGTHS, 1))  # views
    for piece in pieces[1:]:
        piece[:, 0] = EOT
    return row, pieces


@torch.no_grad()
@pytest.mark.parametrize("model", MODELS, ids=name_of)
def test_logits_in_a_shared_row_are_those_of_each_document_alone(model):
    masked, plain_net = build(**model, separator=EOT), build(**model)
    row, pieces = pack()
    alone = torch.cat([plain_net(piece) for piece in pieces], 1)
    torch.testing.assert_close(masked(row), alone, rtol=0, atol=1e-5)
    assert (plain_net(row) - alone)[:, LENGTHS[0] :].abs().max() > 1e-3  # the comparison sees a missing mask


@pytest.mark.parametrize(("loss", "checkpointing"), [("plain", True), *((name, False) for name in USABLE)])
def test_the_loss_is_the_mean_over_the_documents_alone(loss, checkpointing):
    """And so is its gradient. The target of a document's last token is the separator of the next."""
    masked, alone = build("tied", separator=EOT), build("tied")
    if checkpointing:
        enable_activation_checkpointing(masked)
    row, pieces = pack()
    targets = torch.cat((row[:, 1:], torch.full((2, 1), EOT)), 1)
    parts = zip(LENGTHS, pieces, targets.split(LENGTHS, 1), strict=True)
    expected = sum(length * plain(alone, piece, target) for length, piece, target in parts) / SEQ
    expected.backward()
    value = LOSSES[loss](masked, row, targets)
    value.backward()
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
    assert abs(plain(alone, row, targets) - expected) > 1e-4
    for name, grad in gradients(alone).items():
        torch.testing.assert_close(masked.get_parameter(name).grad, grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("fast", [False, True])
def test_mixed_precision_takes_the_mask_in_either_kernel(fast):
    net, (row, pieces) = build("tied", separator=EOT), pack()
    exact = net(row)
    with torch.autocast("cpu", torch.bfloat16), fast_attention("cpu", fast, SEQ):
        together, alone = net(row), torch.cat([net(piece) for piece in pieces], 1)
        plain(net, row, row).backward()
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-2)
    torch.testing.assert_close(together.float(), exact, rtol=0, atol=2e-2)
    assert all(grad.isfinite().all() for grad in gradients(net).values())


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_decoding_of_a_document_is_the_same_in_every_way(position):
    """Up to end of text and past the context: uncached, cached, in a batch."""
    net, n = copy.deepcopy(sensitive(position=position, seq_len=24)), 26
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 8, (length,), generator=generator).tolist() for length in (1, 12, 24, 40)]
    net.document_separator = 0

    def document(ids):
        return ids[: ids.index(0) + 1] if 0 in ids else ids

    expected = [document(by_definition(net, [0, *prompt], n)) for prompt in prompts]
    assert {len(ids) < n for ids in expected} == {True, False}, "a document that ends and one that does not"
    assert [document(ids) for ids in tokens(net, [[0, *prompt] for prompt in prompts], n)] == expected
    assert [document(tokens(net, [[0, *prompt]], n)[0]) for prompt in prompts] == expected


# --- a run


def test_training_curve_score_and_evaluation_use_one_mask_and_an_export_says_that_it_has_none(tmp_path, caplog, capsys):
    """By a tiny run on a text of 300 documents that are shorter than its context."""
    path = write_rows(tmp_path / "rows.jsonl", [f"{i} is {'odd' if i % 2 else 'even'}" for i in range(300)])
    few = {"max_steps": 4, "accumulate_grad_batches": 1, "log_every_n_steps": 1, "prompts": []}
    run = small_run(path, tmp_path / "run", model=tiny(), **few)
    data = replace(run.data, source="json", document_mask=True)
    run = replace(run, data=data, validation=ValidationConfig(every=2, batches=None))
    data = data_of(run)
    _, result = train(run)
    assert "has only 3,029 tokens" in caplog.text
    logged = rows(tmp_path / "run")
    assert float(logged[-1]["val/loss"]) == pytest.approx(result["val_loss"], rel=1e-6)

    batch = TrainingStream(data.train, seq_len=32, batch_size=4, seed=run.seed).batch(0)
    sizes = {"vocab_size": 257, "seq_len": 32, "seed": run.seed}
    first, joined = (
        plain(Transformer(run.model, run.head, **sizes, document_separator=separator), *batch).item()
        for separator in (data.tokenizer.eot, None)
    )
    assert float(logged[0]["train/loss"]) == pytest.approx(first, rel=1e-5)
    assert abs(joined - first) > 1e-4

    evaluation = EvaluateConfig(run_dir=str(tmp_path / "run"), threads=1)
    masked, joined = (evaluate_run(replace(evaluation, document_mask=mask)) for mask in (None, False))
    assert masked["loss"] == pytest.approx(result["val_loss"], rel=1e-6)
    assert abs(joined["loss"] - masked["loss"]) > 1e-4
    assert evaluate_run(replace(evaluation, document_mask=True)) == masked

    export.run([f"run_dir={tmp_path / 'run'}", f"output_dir={tmp_path / 'out'}"])
    assert "does not mask" in capsys.readouterr().out
