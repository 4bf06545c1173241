"""The tables that train and evaluate print."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm.cli import command_line
from lm.config.checks import without_secrets
from lm.config.identity import key_of
from lm.config.run import SAMPLE_TEMPERATURE
from lm.data.ngram import ngram_figure
from lm.runs.find import newest_run
from lm.system.terminal import duration, printable, wrapped

Rows = list[tuple[str, ...]]
FIGURES = ("seed", "val_loss", "val_bpb", "val_top1", "n_params", "seconds")  # of a run of a sweep
GREEDY_LINES = 4  # shown: what follows often repeats them
WORDS = 24  # characters of a prompt to paste


def summary(result: dict[str, Any]) -> Rows:
    roles = ", ".join(f"{role} {count:,}" for role, count in result["n_params_by_role"].items())
    ngram = f" ({figure})" if (figure := ngram_figure(result)) else ""
    trained = result["n_params_trained"]
    of_which = f", {trained:,} of which train" if trained < result["n_params"] else ""
    return [
        ("validation loss", f"{result['val_loss']:.4f} nats per token"),
        ("bits per byte", f"{result['val_bpb']:.3f}{ngram}"),
        ("top-1 accuracy", f"{result['val_top1']:.1%}"),
        ("parameters", f"{result['n_params']:,} ({roles}){of_which}"),
        ("training", f"{result['steps']:,} steps, {result['tokens']:,} tokens"),
        ("time", f"{result['seconds']:.0f} s, {result['tokens_per_second']:,.0f} tokens per second"),
    ]


def plan(forecast: dict[str, Any]) -> Rows:
    """What a run would take."""
    length, text = f"{forecast['steps']:,} steps", f"{forecast['train_text_tokens']:,} tokens"
    resumed = f", to be resumed after step {forecast['steps_done']:,}" if forecast["steps_done"] else ""
    device = "this machine" if forecast["devices"] == 1 else f"one of {forecast['devices']} devices"
    return [
        ("run", forecast["run_dir"] + resumed),
        ("parameters", f"{forecast['n_params']:,}, vocabulary of {forecast['vocab_size']:,}"),
        ("training", f"{length}, which read the text of {text} {forecast['readings']:.1f} times"),
        ("memory", f"at least {forecast['least_bytes'] / 1e6:,.0f} MB"),
        ("time", f"about {duration(forecast['seconds'])}, by ten steps on {device}{forecast['busy']}"),
    ]


def sweep(finished: Sequence[tuple[Sequence[str], dict[str, Any]]]) -> Rows:
    """Overrides and results of a sweep: a column for each setting that was swept, a row for each set of seeds."""
    import pandas as pd  # which takes a second

    words = [{key_of(word): word.partition("=")[2] for word in overrides} for overrides, _ in finished]
    keys = dict.fromkeys(key for own in words for key in own if key not in ("seed", "run_dir"))
    swept = [key for key in keys if len({own.get(key) for own in words}) > 1]
    sets = [tuple(without_secrets(own.get(key, "")) for key in swept) for own in words]
    frame = pd.DataFrame([{key: result[key] for key in FIGURES} for _, result in finished])
    groups = frame.assign(set=sets).drop_duplicates(["set", "seed"]).groupby("set", sort=False)
    several = groups.size().max() > 1
    heads = ("seeds", "mean val_loss", "sd", "standard error", "mean val_bpb") if several else FIGURES[1:4]
    rows: Rows = [(*swept, *heads, "parameters", "seconds")]
    for values, own in groups:
        loss, mean = own["val_loss"], own[[*FIGURES]].mean()
        scores = (mean["val_loss"], loss.std(), loss.sem(), mean["val_bpb"]) if several else mean[[*heads]]
        cells = ["" if pd.isna(score) else f"{score:.4f}" for score in scores]
        size = [str(len(own))] if several else []
        rows.append((*values, *size, *cells, f"{mean['n_params']:,.0f}", f"{mean['seconds']:.0f}"))
    return rows


def score_table(scores: list[dict[str, Any]], several: bool) -> Rows:
    """The scores of evaluate without the details: a row for each figure, or one for each run and text."""
    plain = [
        {key: value for key, value in score.items() if not isinstance(value, list) and key != "frequency_in"}
        for score in scores
    ]
    if several:
        return _rows(plain)
    return [(key, _cell(value)) for key, value in plain[0].items() if key not in ("run", "text")]


def detail_tables(scores: list[dict[str, Any]], several: bool) -> Iterator[tuple[str, Rows]]:
    """Titles and tables: the loss by the frequency of the target."""
    for score in scores:
        if "by_frequency" not in score:
            continue
        place = f" ({score['run']}, {score['text']})" if several else ""
        yield f"Loss by the frequency of the target in {score['frequency_in']}{place}", _rows(score["by_frequency"])


def _rows(records: Sequence[Mapping[str, Any]]) -> Rows:
    return [tuple(records[0]), *(tuple(map(_cell, record.values())) for record in records)]


def _cell(value: Any) -> str:
    return f"{value:,.4f}" if isinstance(value, float) else "beyond e^700" if value is None else str(value)


# --- the end of a run


def ending(path: Path, result: dict[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a finished run, by its result.json and config.yaml: of its samples the first, or all of its own."""
    names, values = zip(*summary(result), strict=True)
    width = max(map(len, names)) + 2
    for name, value in zip(names, values, strict=True):
        yield wrapped(f"{name:{width}}{value}", rest=" " * width)
    for sample in result["samples"] if config.get("prompts") else result["samples"][:1]:
        for title, key in ((f"Drawn at temperature={SAMPLE_TEMPERATURE}", "drawn"), ("Greedy", "continuation")):
            lines = wrapped(printable(sample["prompt"] + sample[key]), "  ", "  ", whole=False).split("\n")
            yield from ("", f"{title}:", "", *(lines[:GREEDY_LINES] if key == "continuation" else lines))
    yield from ("", str(path), "")
    yield from (f"  {line}" for line in next_lines(path, result, config))


def next_lines(path: Path, result: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Commands to paste: they take the newest run by themselves."""
    run = [] if newest_run(Path("runs")) == path else [str(path)]
    prompts = [sample["prompt"] for sample in result["samples"]]
    prompt = next((text for text in prompts if printable(text) == text), "Once upon a time")  # a pasted one is verbatim
    yield command_line("generate", *run, _beginning(prompt), f"temperature={SAMPLE_TEMPERATURE}")
    yield command_line("look", *run)
    if config["data"]["source"] in ("stdlib", "text") and not config["init_from"]:
        yield command_line("ablate", "head=tied,untied", *filter(None, [config["data"]["path"]]))


def _beginning(prompt: str) -> str:
    """The first words of a prompt, as a word that is no setting and no flag."""
    words = prompt.splitlines()[0] if prompt.strip() else ""
    if len(words) > WORDS:
        words = words[:WORDS].rpartition(" ")[0] or words[:WORDS]
    return words if re.fullmatch(r"\w[\w ,.:;!?'()-]*", words) else f"prompt={words}"
