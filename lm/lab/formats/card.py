"""The model card of an exported folder: README.md, with the metadata that the Hugging Face Hub reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from lm.config import described_settings, flat
from lm.data.ngram import ngram_figure
from lm.errors import without_secrets
from lm.lab.report.pages import render
from lm.model.size import n_params
from lm.model.transformer import Transformer
from lm.system.files import write_text
from lm.system.terminal import to_override_value

ENVIRONMENT = ("seed", "precision", "device", "threads", "python")  # of result.json
SCORES = {  # of result.json: how they are called, their unit, and the name of the metric for the Hub
    "val_loss": ("validation loss", "nats per token", "loss"),
    "val_bpb": ("bits per byte", "bits per byte", "bits_per_byte"),
    "val_top1": ("top-1 accuracy", "of the tokens", "accuracy"),
}


def write_card(folder: Path, net: Transformer, settings: dict[str, Any], result: dict[str, Any]) -> None:
    """Write README.md. `settings` and `result` are config.yaml and result.json of the run, empty if there are none."""
    settings, title = without_secrets(flat(settings)), folder.resolve().name
    text, base = _text_of(settings), _base_of(settings)
    evaluations = [
        EvalResult("text-generation", "held-out", f"validation text of {text}", kind, result[key], metric_name=name)
        for key, (name, _, kind) in SCORES.items()
        if result
    ]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["lm-lab", "small-language-model"],
        datasets=[str(settings.get("data.path"))] if settings.get("data.source") == "hub" else None,
        model_name=title if result else None,
        eval_results=evaluations or None,
    )
    context = {
        "metadata": data.to_yaml(),
        "title": title,
        "n_params": n_params(net),
        "seq_len": net.seq_len,
        "new_tokens": min(64, net.seq_len // 2),
        "settings": settings,
        "result": result,
        "ngram": ngram_figure(result),
        "base": base,
        "scores": [(name, result[key], unit) for key, (name, unit, _) in SCORES.items() if result],
        "facts": list(_facts(settings, result, text)) if settings else [],
        "lines": _lines(settings),
    }
    write_text(folder / "README.md", str(ModelCard(render("card.md.j2", **context))))


def _text_of(settings: dict[str, Any]) -> str:
    """The text without the folders of this machine."""
    source, path = settings.get("data.source"), str(settings.get("data.path"))
    if source == "stdlib":
        return "the source code of Python's standard library"
    return path if source == "hub" or "://" in path else Path(path).name


def _facts(settings: dict[str, Any], result: dict[str, Any], text: str) -> Iterator[tuple[str, str]]:
    """What the model was trained on and with. What is a hash is shown as code."""
    yield "text", text
    yield "hash of the text", str(settings.get("data_hash"))
    yield "hash of the tokenizer", str(settings.get("tokenizer_hash"))
    if settings.get("data_revision"):
        yield "revision of the text", str(settings["data_revision"])
    if result:
        yield "tokens of the text", f"{result['train_text_tokens']:,}"
        yield "tokens seen in training", f"{result['tokens']:,} in {result['steps']:,} steps"
        yield from ((key, str(result[key])) for key in ENVIRONMENT)
        yield "packages", ", ".join(f"{name} {version}" for name, version in result["versions"].items())


def _base_of(settings: dict[str, Any]) -> str | None:
    """The name of what a run started from, and the beginning of the hash of its weights."""
    sha256 = settings.get("init_record.sha256") or settings.get("init_sha256")
    path = settings.get("init_record.path") or settings.get("init_from")
    return f"{Path(str(path)).name} ({str(sha256)[:16]})" if sha256 else None


def _lines(settings: dict[str, Any]) -> str:
    """Every setting that decides the result, as `train` takes it, without the folders of this machine."""
    not_typed = ("data_hash", "tokenizer_hash")  # of the text and the tokenizer, which `train` finds out
    own = {key: value for key, value in described_settings(settings).items() if key not in not_typed}
    own |= {key.removeprefix("requested."): settings[key] for key in settings if key.startswith("requested.")}
    if settings.get("init_from"):
        own = {"init_from": settings["init_from"]} | own
        own.pop("tokenizer.path", None)  # it is that of init_from
    local = {"init_from", "data.path", "data.val_path", "tokenizer.path"}
    local -= {"data.path"} if settings.get("data.source") == "hub" else set()  # which is a name there
    own |= {key: Path(str(own[key])).name for key in local if own.get(key) and "://" not in str(own[key])}
    return "\n".join(f"{key}={to_override_value(value)}" for key, value in own.items())
