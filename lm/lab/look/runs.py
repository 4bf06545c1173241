"""The runs that the page shows: their models and text, their curves, and the ablation that asked for them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lm.data.tokenizer import Tokenizer
from lm.data.tokens import TextData
from lm.errors import UserError, error_prefix
from lm.folder import find_model, load_model
from lm.lab.runs.curves import read_curves
from lm.lab.runs.find import read_run
from lm.model.transformer import Transformer
from lm.system.device import best_device
from lm.training.run_directory import RunDirectory

MAX_POINTS = 400  # of a curve


@dataclass(eq=False)
class LoadedModel:
    name: str
    path: Path  # of the run
    net: Transformer
    tokenizer: Tokenizer

    @cached_property
    def text(self) -> TextData:
        """The text of the run. Raises UserError if it is not at hand."""
        with error_prefix(f"run_dir={self.path}"):
            return RunDirectory(self.path).read_text()


def load(name: str, path: Path, classes: Sequence[str] = ()) -> LoadedModel:
    """Return the model of a run. Raises UserError."""
    net, tokenizer = load_model(path, classes)
    return LoadedModel(name, path, net.to(best_device()), tokenizer)


def token_texts(tokenizer: Tokenizer, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[tuple[int, str]]:
    """Yield each id with the text that the id completes: "" for all but the last token of a character.

    `after` is as in `Tokenizer.decode`.
    """
    pending: list[int] = []

    def recorded() -> Iterator[int]:
        for token in ids:
            pending.append(token)
            yield token

    for piece in tokenizer.stream(recorded(), after):
        *incomplete, last = pending
        pending.clear()
        yield from ((token, "") for token in incomplete)
        yield last, piece
    yield from ((token, "") for token in pending)


def described_run(name: str, path: Path) -> dict[str, Any]:
    """Return what the list shows of a run, finished or not. A point of `curve` is tokens, val/loss and val/bpb."""
    run, has_model, points = read_run(path, name), _has_model(path), list[list[float | None]]()
    try:
        if run.status != "broken":
            points = _points(path)
    except (UserError, OSError) as error:
        run = replace(run, status="broken", note=str(error))
    if has_model and not RunDirectory(path).config.exists():
        run = replace(run, status="model", note="a model without a record of its training")
    scores = [run.result.get("val_loss"), run.result.get("val_bpb")]
    kept = run.result.get("best.step")
    last_loss, last_bpb = points[-1][1:] if points and not run.result else scores
    return {
        "name": name,
        "status": run.status,
        "note": run.note or (f"the model of step {kept:,}" if kept else ""),
        "has_model": has_model,
        "text": Path(str(run["data.path"])).name if run["data.path"] else str(run["data.source"] or ""),
        "data_hash": run["data_hash"],
        "tokenizer_hash": run["tokenizer_hash"],
        "val_loss": last_loss,
        "val_bpb": last_bpb,
        "n_params": run.result.get("n_params"),
        "curve": points,
    }


def _points(path: Path) -> list[list[float | None]]:
    """Return the points of the curve of a run, at most MAX_POINTS, and the last point of all."""
    frame = read_curves(path).reindex(columns=["val/loss", "val/bpb"]).dropna(subset="val/loss").reset_index()
    step = 1 + len(frame) // MAX_POINTS
    chosen = frame.iloc[(len(frame) - 1) % step :: step].astype(object)
    points: list[list[float | None]] = chosen.where(chosen.notna(), None).to_numpy().tolist()
    return points


def _has_model(path: Path) -> bool:
    with suppress(UserError, OSError):
        return bool(find_model(path))
    return False
