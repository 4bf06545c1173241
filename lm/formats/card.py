"""The model card of an exported folder: README.md, with the metadata that the Hugging Face Hub reads."""

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from lm.config.identity import flat, identifying
from lm.model.size import n_params
from lm.model.transformer import Transformer
from lm.report.page import code, fence, plain, table
from lm.system.files import write_text
from lm.system.terminal import printable, spelled

LIMITS = """It is meant for experiments with small language models, not for anything that relies on what it says. It
is small, it knows only the text that it was trained on, and it was not trained to follow instructions, to be truthful
or to be safe: it repeats what that text contains, whatever that is, and makes up the rest. Do not use it to inform or
advise people, or to decide about them."""
UNKNOWN = """What it can be used for is not known here: it depends on its training. Do not rely on what it says."""
LICENCE = """This card names no licence: which one is possible depends on the training text, and is for those to say who
publish the model."""
USE = """from transformers import AutoModelForCausalLM, AutoTokenizer

folder = {folder!r}
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
prompt = tokenizer("Once", return_tensors="pt")
(answer,) = model.generate(**prompt, do_sample=False, max_new_tokens={n_tokens})
print(tokenizer.decode(answer, skip_special_tokens=True))"""
PLACE = ("seed", "precision", "device", "threads", "python")
SCORES = {  # of result.json: how they are called, their unit, and the name of the metric for the Hub
    "val_loss": ("validation loss", "nats per token", "loss"),
    "val_bpb": ("bits per byte", "bits per byte", "bits_per_byte"),
    "val_top1": ("top-1 accuracy", "of the tokens", "accuracy"),
}


def write_card(folder: Path, net: Transformer, settings: dict[str, Any], result: dict[str, Any]) -> None:
    """Write README.md. `settings` and `result` are config.yaml and result.json of the run, empty if there are none."""
    settings = flat(settings)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["lm-lab", "small-language-model"],
        datasets=[str(settings.get("data.path"))] if settings.get("data.source") == "hub" else None,
        model_name=folder.resolve().name if result else None,
        eval_results=evaluations(settings, result) if result else None,
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {plain(printable(folder.resolve().name))}",
        f"A decoder-only language model with {n_params(net):,} parameters and a context of {net.seq_len:,} tokens. "
        f"It was {origin(settings, result)}.",
        "## What it is for, and what not",
        LIMITS if settings else UNKNOWN,
        LICENCE,
        "## How to load it",
        f"```python\n{USE.format(folder=folder.resolve().name, n_tokens=min(64, net.seq_len // 2))}\n```",
        *(scores(result) if result else ["There are no scores: the run that made it has no result here."]),
        *(training(settings, result) if settings else []),
    ]
    write_text(folder / "README.md", str(ModelCard("\n\n".join(parts) + "\n")))


def origin(settings: dict[str, Any], result: dict[str, Any]) -> str:
    if not settings:
        return "read from a model folder that says nothing about its training"
    tokens = f" for {result['steps']:,} steps on {result['tokens']:,} tokens" if result else ", not to its end"
    base = f", starting from the weights of {code(base_of(settings))}" if settings.get("base.sha256") else ""
    return f"trained with lm-lab{tokens}{base}"


def base_of(settings: dict[str, Any]) -> str:
    return f"{Path(str(settings.get('base.path'))).name} ({str(settings['base.sha256'])[:16]})"


def evaluations(settings: dict[str, Any], result: dict[str, Any]) -> list[EvalResult]:
    """Scores on the held-out text, as the Hub lists them."""
    text = f"validation text of {text_of(settings)}"
    return [
        EvalResult("text-generation", "held-out", text, kind, result[key], metric_name=name)
        for key, (name, _, kind) in SCORES.items()
    ]


def text_of(settings: dict[str, Any]) -> str:
    """The text without the folders of this machine."""
    source, path = settings.get("data.source"), str(settings.get("data.path"))
    if source == "stdlib":
        return "the source code of Python's standard library"
    return path if source == "hub" or "://" in path else Path(path).name


def scores(result: dict[str, Any]) -> list[str]:
    rows = [[name, f"{result[key]:.4f}", unit] for key, (name, unit, _) in SCORES.items()]
    baselines = ", ".join(f"{name} {bits:.3f}" for name, bits in result["baselines_bpb"].items())
    size = f"{result['val_tokens']:,} tokens ({result['val_bytes']:,} bytes)"
    return [
        "## Scores",
        table(["score", "value", "unit"], rows),
        f"On {size} of text that was held out from training. Compressors reach, in bits per byte: {plain(baselines)}.",
    ]


def training(settings: dict[str, Any], result: dict[str, Any]) -> list[str]:
    facts = [["text", plain(printable(text_of(settings)))], ["hash of the text", code(str(settings.get("data_hash")))]]
    if settings.get("data_revision"):
        facts.append(["revision of the text", code(str(settings["data_revision"]))])
    if result:
        facts.append(["tokens of the text", f"{result['train_text_tokens']:,}"])
        facts.append(["tokens seen in training", f"{result['tokens']:,} in {result['steps']:,} steps"])
        facts += [[key, plain(printable(str(result[key])))] for key in PLACE]
        facts.append(["packages", plain(", ".join(f"{name} {found}" for name, found in result["versions"].items()))])
    own = {key: value for key, value in identifying(settings).items() if value is not None}
    own |= {key: Path(str(own[key])).name for key in own if key.endswith("path") and "://" not in str(own[key])}
    own |= {"data.path": text_of(settings)} if "data.path" in own else {}
    every = "\n".join(printable(f"{key}={spelled(value)}") for key, value in own.items())
    return ["## Training", table(["what", "value"], facts), "Every setting that decides the result:", fence(every)]
