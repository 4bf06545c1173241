"""Train one run: lm-lab train [TEXT] [group=choice] [key=value ...]

TEXT is a file, folder, glob or URL. Its size chooses a recipe (experiment=), which replaces some of the
defaults below. Without a text, the source of Python's standard library is read. The same command resumes
a run that was interrupted and shows a run that is finished. The flag -m trains a run for each combination
of values: -m head=tied,untied seed=0,1 trains four.
"""

import gc
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lm.cli import command_line
from lm.cli.arguments import MIN_BYTES, hydra_words, is_text, kinds_of
from lm.cli.compose import run_hydra, to_dataclass
from lm.cli.main import configure_messages, report_error
from lm.config import RunConfig, classes_word, flat
from lm.data.ngram import ngram_figure
from lm.data.paths import kind_of
from lm.data.text import MIN_COPIED
from lm.errors import UserError, without_secrets
from lm.folder import newest_run
from lm.registry import from_lab
from lm.system.terminal import close_bars, format_table, is_first_process, printable, wrapped
from lm.training.run_directory import SAMPLE_TEMPERATURE, RunDirectory

SCHEMA = RunConfig
IS_HYDRA = True
GREEDY_LINES = 4  # lines of a greedy sample that are shown: further lines often repeat these
PROMPT_CHARACTERS = 24  # characters of the prompt in the command to paste
Rows = list[tuple[str, ...]]
log = logging.getLogger(__name__)


def run(args: list[str]) -> int:
    words = hydra_words(args, kinds_of(RunConfig))
    finished: dict[Path, tuple[list[str], dict[str, Any]]] = {}  # overrides and result of each run
    codes, process = [0], os.getpid()

    def job(config: DictConfig, overrides: list[str]) -> float | None:
        """Train a run. Return the validation loss, because a sweeper that searches minimises this number."""
        is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        try:
            path, result = _train(config, overrides, is_sweep)
        except Exception as error:
            if not is_sweep:
                raise
            codes.append(report_error(error, " ".join(overrides)))  # the other jobs go on
            gc.collect()  # the model of this job, before the next one is built
            if os.getpid() != process:  # in a process of a launcher
                kind = UserError if codes[-1] == 2 else RuntimeError
                raise kind(f"a job of the sweep failed: {error}") from None
            return None
        if result is None:
            return None
        if path in finished:  # the settings that differ change no number of a run
            log.warning("%s: is the run of %s, and no other run", " ".join(overrides), " ".join(finished[path][0]))
        finished.setdefault(path, (overrides, result))
        return float(result["val_loss"])

    run_hydra("train", RunConfig, args, words, job)
    if len(finished) > 1:
        sweep_table = from_lab("lm.lab.runs.sweep.sweep_table", default=lambda finished: [])
        print(format_table(sweep_table([*finished.values()])))
    return max(codes)


def _train(config: DictConfig, overrides: list[str], is_sweep: bool) -> tuple[Path, dict[str, Any] | None]:
    """Train what Hydra has composed, print the end of the run, and return its directory and its result.

    The result is None if this is not the first process.
    """
    run: RunConfig = to_dataclass(config, overrides, RunConfig)
    configure_messages(run.trainer.world_size)
    if is_sweep and run.trainer.world_size > 1:
        raise UserError(f"trainer.devices={run.trainer.devices}: a sweep trains each run in one process; leave -m out")
    path = Path(run.run_dir or "")
    result = RunDirectory(path).finished_result(run) if run.run_dir else None  # `train` asks too, but imports torch
    if result is None:
        log.info("reading %s", run.data.path or "the source of Python's standard library")
        from lm.training.train import train  # imports torch and Fabric, which takes seconds

        path, result = train(run)
    if not is_first_process(run.trainer.world_size):
        return path, None
    close_bars()
    if is_sweep:
        print(format_table(score_table(result)), f"\n{path}\n", sep="\n")
    else:
        saved = RunDirectory(path).read_config()
        if run.prompts not in (None, saved.get("prompts")):  # the finished run has samples of other prompts
            result = result | {"samples": []}
        print(*summary(path, result, saved | {"data": asdict(run.data)}), sep="\n")  # the text may have moved
    return path, result


# --- the end of a run


def score_table(result: dict[str, Any]) -> Rows:
    roles = ", ".join(f"{role} {count:,}" for role, count in result["n_params_by_role"].items())
    figure = ngram_figure(result)
    trained = result["n_params_trained"]
    part = f", {trained:,} of which train" if trained < result["n_params"] else ""
    best = result.get("best")  # under checkpoint.best
    share = result.get("copied", 0.0)
    copied = [("validation text", f"{share:.0%} of it stands in the training text too")] if share >= MIN_COPIED else []
    kept = [("best step", f"{best['step']:,} (the last step has {best['last_val_loss']:.4f} nats)")] if best else []
    return [
        ("validation loss", f"{result['val_loss']:.4f} nats per token"),
        ("bits per byte", f"{result['val_bpb']:.3f}" + (f" ({figure})" if figure else "")),
        ("top-1 accuracy", f"{result['val_top1']:.1%}"),
        *copied,
        *kept,
        ("parameters", f"{result['n_params']:,} ({roles}){part}"),
        ("training", f"{result['steps']:,} steps, {result['tokens']:,} tokens"),
        ("time", f"{result['seconds']:.0f} s, {result['tokens_per_second']:,.0f} tokens per second"),
    ]


def summary(path: Path, result: dict[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a finished run: scores, samples, and commands to type next."""
    rows = score_table(result)
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        yield wrapped(f"{name:{width}}{value}", rest=" " * width)
    samples = result["samples"] if config.get("prompts") else result["samples"][:1]
    for sample in samples:
        for title, key, most in (
            (f"Sample at temperature {SAMPLE_TEMPERATURE}", "drawn", None),
            ("Greedy sample", "continuation", GREEDY_LINES),
        ):
            text = printable(sample["prompt"] + sample[key])
            yield from ("", f"{title}:", "", *wrapped(text, "  ", "  ", whole=False).split("\n")[:most])
    yield from ("", str(path), "")
    yield from (f"  {line}" for line in next_commands(path, result, config))


def next_commands(path: Path, result: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield commands to paste. Leave out the run if it is the newest run, because the commands take the newest run."""
    is_newest = newest_run(Path("runs")) == path
    name = f"run_dir={path}" if re.match("-|.*=", str(path)) else str(path)  # a bare word must not look like a setting
    words = [] if is_newest else [name]
    classes = classes_word(flat(dict(config)))
    prompts = (sample["prompt"] for sample in result["samples"])
    prompt = next((prompt for prompt in prompts if printable(prompt) == prompt), "Once upon a time")
    yield command_line("generate", *words, beginning(prompt), f"temperature={SAMPLE_TEMPERATURE}", *classes)
    yield command_line("look", *words, *classes)
    source, text = config["data"]["source"], config["data"]["path"] or ""
    is_usual = not text or (source == kind_of(text) == "text" and is_text(text) and not _is_short(text))
    is_usual = is_usual and not text.endswith((".yaml", ".yml"))  # which is a question for ablate
    if source in ("stdlib", "text") and is_usual and not config["init_from"] and without_secrets(text) == text:
        yield command_line("ablate", "head=tied,untied", *filter(None, [text]))


def _is_short(text: str) -> bool:
    """Return whether a file is too small for a recipe."""
    return os.path.isfile(text) and os.path.getsize(text) < MIN_BYTES


def beginning(prompt: str) -> str:
    """Return the first words of a prompt, as an argument that generate takes for a prompt.

    >>> beginning("To be, or not to be, that is the question"), beginning("x = 1")
    ('To be, or not to be,', 'prompt=x = 1')
    """
    words = prompt.splitlines()[0] if prompt.strip() else ""
    if words != printable(words):
        return "Once upon a time"
    if len(words) > PROMPT_CHARACTERS:
        words = words[:PROMPT_CHARACTERS].rpartition(" ")[0] or words[:PROMPT_CHARACTERS]
    return words if re.fullmatch(r"\w[\w ,.:;!?'()-]*", words) else f"prompt={words}"
