"""Folders of runs and models on disk: what a folder is, and a model's three files.

A model is `model.safetensors`, `tokenizer.json` and `config.json`. No file of these can run code. Where a folder of
Hugging Face transformers is named, the lab converts the folder into a model in the cache.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm.config import HeadConfig, ModelConfig, build, user_classes
from lm.data.paths import listed
from lm.errors import UserError, check_settings, first_line, reading
from lm.registry import from_lab
from lm.system.files import atomic_file, is_run, read_json, sha256, write_json, write_text
from lm.system.terminal import printable

if TYPE_CHECKING:
    from torch import Tensor

    from lm.data.tokenizer import Tokenizer
    from lm.model.transformer import Transformer

log = logging.getLogger(__name__)
RUN_MARKS = ("config.yaml", "result.json")  # a directory that holds one of them is a run, or was one
WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
INDEX = "model.safetensors.index.json"  # of a folder of transformers with weights in several files


# --- runs


def read_result(path: Path) -> dict[str, Any] | None:
    """Return the content of a result.json, or None if there is no file. Raises UserError for another content."""
    if not path.exists():
        return None
    with reading(path):
        return read_json(path)


def folders_with(marks: Sequence[str], top: Path) -> dict[str, Path]:
    """Return the folders at or below `top` that hold a file of such a name, by their names below `top`, in order.

    Hidden folders are not searched, nor is what lies in a run or in a folder that was found, unless its config.yaml is
    of another program. Return nothing for a folder that does not exist.
    """
    folders = {}

    def warn(error: OSError) -> None:
        if top.is_dir():
            log.warning("%s is left out: %s", error.filename, error.strerror)

    for folder, below, files in os.walk(top, onerror=warn):
        place, present = Path(folder), {*marks, *RUN_MARKS} & {*files}
        if present & {*marks}:
            folders[str(place.relative_to(top)) if place != top else top.resolve().name] = place
        is_end = is_run(place) or present - {"config.yaml"}
        below[:] = [] if is_end else sorted(name for name in below if name[0] != ".")
    return folders


def newest_run(folder: Path, finished: bool = True) -> Path | None:
    """Return the run below a folder that was finished last, or the last written unfinished run if not `finished`.

    Runs of ablations do not count.
    """
    times: list[tuple[float, Path]] = []
    for path in folders_with(("ablation.json", "config.yaml"), folder).values():
        result, metrics = path / "result.json", path / "metrics.csv"
        if is_run(path) and result.exists() == finished:
            last = result if finished else metrics if metrics.exists() else path / "config.yaml"
            times.append((last.stat().st_mtime, path))
    return max(times)[1] if times else None


def runs_of(run_dir: str | None) -> list[str]:
    """Return the folders that run_dir names, each with a model, or the newest run without run_dir. Raises UserError."""
    if run_dir is not None:
        names = listed(run_dir, "run_dir", folders=True)
        for name in names:
            model_folder(name)
            if is_run(run := run_of(name)) and not (run / "result.json").exists():
                log.warning("run_dir=%s: is unfinished; this is its model when it was stopped", name)
        return names
    folder = Path("runs")
    if (path := newest_run(folder)) is None:
        stopped = newest_run(folder, finished=False)
        advice = f"run_dir={stopped} was stopped" if stopped else "train one, or name one by run_dir=RUN"
        raise UserError(f"run_dir: there is no finished run below {folder}/; {advice}")
    log.info("%s", printable(f"run_dir={path}: the newest finished run below {folder}/"))
    return [str(path)]


# --- models


@dataclass(slots=True, kw_only=True)
class ModelSettings:
    """The content of the config.json of a model: all that builds the model, and hashes of the files beside it."""

    vocab_size: int
    seq_len: int  # the longest context
    document_separator: int | None = None
    model: ModelConfig
    head: HeadConfig
    sha256: dict[str, str]  # of WEIGHTS and TOKENIZER

    def __post_init__(self) -> None:
        check_settings("", self, "vocab_size", "seq_len")


def run_of(folder: str | Path) -> Path:
    """Return the directory of a run. `folder` is this directory, or the folder of the model in this directory."""
    path = Path(folder)
    return path.parent if path.name == "model" and is_run(path.parent) else path


def model_folder(run_dir: str | Path, key: str = "run_dir") -> Path:
    """Return the model folder of a run. `run_dir` may be the model folder, or a folder of transformers.

    Raises UserError if there is no such folder, or if a folder of transformers cannot be converted; OSError if the
    folder cannot be read.
    """
    folder, is_of_transformers = find_model(run_dir, key)
    return from_lab("lm.lab.formats.huggingface.converted")(folder) if is_of_transformers else folder


def find_model(run_dir: str | Path, key: str = "run_dir") -> tuple[Path, bool]:
    """Return the folder with the files of a model, and whether the folder is of transformers. Write nothing.

    Raises UserError and OSError, as `model_folder` does.
    """
    folder = Path(os.path.expanduser(run_dir))
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise UserError(f"{key}={run_dir}: {what}; expected a run directory that train wrote")
    if (folder / "model").is_dir() and not (folder / "config.json").exists():
        folder = folder / "model"
    try:
        os.stat(folder / "config.json")  # raises PermissionError in a closed folder
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{key}={run_dir}: {_without_model(folder, key)}") from None
    for name in (TOKENIZER, INDEX if (folder / INDEX).exists() else WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: no such file; expected what train wrote, or a folder of transformers")
    with reading(folder / "config.json"):
        return folder, "model_type" in read_json(folder / "config.json")


def _without_model(folder: Path, key: str) -> str:
    models = sorted(path.parents[1] for depth in ("*", "*/*") for path in folder.glob(f"{depth}/model/config.json"))
    if models:
        return f"is a folder of runs; did you mean {key}={models[0]}?"
    return "holds no model; expected a run directory that train has finished"


def read_settings(folder: Path) -> ModelSettings:
    """Return the settings of the model in a folder. Raises UserError with the file and the key."""
    path = folder / "config.json"
    with reading(path):
        content = read_json(path)
        content.pop("architecture", None)  # of version 0.2, where it was null
        settings: ModelSettings = build(ModelSettings, content)
        if {*settings.sha256} != {WEIGHTS, TOKENIZER}:
            raise UserError(f"sha256: expected the hashes of {WEIGHTS} and {TOKENIZER}")
        return settings


def write_weights(path: Path, weights: Mapping[str, "Tensor"]) -> None:
    """Write tensors atomically, because `safetensors.torch.save_file` would replace `path` by an unsynced file."""
    from safetensors.torch import save

    whole: dict[str, Tensor] = {}
    storages = set[int]()
    for name, tensor in weights.items():
        whole[name] = tensor.detach().cpu().contiguous()
        if whole[name].untyped_storage().data_ptr() in storages:  # a class of the user has a weight under two names
            whole[name] = whole[name].clone()
        storages.add(whole[name].untyped_storage().data_ptr())
    with atomic_file(path) as file:
        file.write(save(whole, {"format": "pt"}))


def read_weights(path: Path, expected: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """Return the tensors of a file, in the precision of `expected`. `expected` may be on the device "meta".

    Raises ValueError, before memory is taken, if a tensor is missing, superfluous or of another shape.
    """
    from safetensors.torch import load_file

    stored = load_file(path)  # maps the file
    for name in sorted(expected.keys() | stored.keys()):
        shapes = [tuple(weights[name].shape) if name in weights else None for weights in (stored, expected)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{name}: {path.name} has the shape {shapes[0]}, the settings give {shapes[1]}")
    return {name: tensor.to(expected[name].dtype, copy=True) for name, tensor in stored.items()}


def saved_state(net: "Transformer") -> dict[str, "Tensor"]:
    """Return the weights to save: a head that is tied for now has the values of the embedding."""
    head = net.head.saved(net.embed.weight)
    return net.state_dict() | {f"head.{name}": tensor for name, tensor in head.items()}


def save_model(net: "Transformer", tokenizer: "Tokenizer", folder: Path) -> None:
    """Write the weights, the tokenizer and, last, config.json with their hashes. `net` stays as it is."""
    folder.mkdir(exist_ok=True)
    write_weights(folder / WEIGHTS, saved_state(net))
    write_text(folder / TOKENIZER, tokenizer.to_json())
    settings = ModelSettings(
        vocab_size=net.vocab_size,
        seq_len=net.seq_len,
        document_separator=net.document_separator,
        model=net.config,
        head=net.head_config,
        sha256={name: sha256(folder / name) for name in (WEIGHTS, TOKENIZER)},
    )
    write_json(folder / "config.json", asdict(settings))


def load_model(run_dir: str | Path, classes: Sequence[str] = ()) -> "tuple[Transformer, Tokenizer]":
    """Return the model and the tokenizer of a run (or of its model/ folder), ready to generate, on the CPU.

    `run_dir` may also be a folder of transformers. `classes` are dotted paths of your classes that the settings
    of the model may name. The name of a class in a folder is not enough to import the class. Raises UserError with the
    file that is missing or damaged, or with a class that is not among `classes`.

    >>> load_model("runs/absent")
    Traceback (most recent call last):
    lm.errors.UserError: run_dir=runs/absent: no such folder; expected a run directory that train wrote
    """
    from safetensors import SafetensorError

    from lm.data.tokenizer import load_tokenizer

    folder = model_folder(run_dir)
    settings = read_settings(folder)
    if user_classes(settings.model):
        check_classes = from_lab("lm.lab.user_class.check_classes")
        check_classes(settings.model, [classes] if isinstance(classes, str | type) else classes, run_of(folder))
    for name, right in settings.sha256.items():
        if sha256(folder / name) != right:
            raise UserError(f"{folder / name}: damaged, its bytes do not match config.json")
    tokenizer = load_tokenizer(folder / TOKENIZER)
    try:
        return _read_net(folder / WEIGHTS, settings).eval(), tokenizer
    except (ValueError, TypeError, RuntimeError, SafetensorError) as error:
        reason = first_line(error)
        raise UserError(f"{folder / 'config.json'}: {reason}; expected what train wrote") from error


def _read_net(path: Path, settings: ModelSettings) -> "Transformer":
    import torch

    from lm.model.transformer import Transformer
    from lm.system.device import default_state

    # A class of the user may have tensors that no file holds.
    with default_state(), torch.device("cpu" if user_classes(settings.model) else "meta"):
        net = Transformer(
            settings.model,
            settings.head,
            vocab_size=settings.vocab_size,
            seq_len=settings.seq_len,
            document_separator=settings.document_separator,
        )
    net.load_state_dict(read_weights(path, net.state_dict()), assign=True)
    return net
