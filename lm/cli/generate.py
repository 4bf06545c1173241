"""Continue a prompt: lm-lab generate [RUN] "PROMPT" [max_new_tokens=N] [temperature=T]

The prompt is taken verbatim, whatever it contains; prompt_file=FILE reads it (- is standard input).
Standard output is the prompt and its continuation. run_dir=[RUN1,RUN2] or a glob lets several runs
continue the prompt. top=5 shows the likeliest next tokens of each step on standard error.
"""

import io
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.cli import command_line
from lm.cli.arguments import is_folder, parse, split_words, with_folders
from lm.errors import UserError, check_settings, check_unused, expand_paths, reading, require
from lm.folder import runs_of
from lm.system.terminal import format_table, printable


@dataclass(slots=True, kw_only=True)
class GenerateConfig:
    run_dir: str | None = None  # run, [RUN1,RUN2], glob, or folder of transformers; null: newest run
    prompt: str | None = None  # text to continue, verbatim
    prompt_file: str | None = None  # file with the prompt; -: standard input
    interactive: bool = False  # whether prompts are asked for until the end of input
    max_new_tokens: int = 128  # most tokens of a continuation, which ends at an end-of-text token
    temperature: float = 0.0  # temperature of sampling; 0: greedy
    top_k: int | None = None  # number of most probable tokens that are sampled from; null: all
    top_p: float = 1.0  # probability of the most probable tokens that are sampled from together
    min_p: float = 0.0  # least probability of a sampled token, as a fraction of the largest
    top: int | None = None  # number of likeliest next tokens that each step shows; null: none
    n_samples: int = 1  # number of continuations, each under a line with its number
    seed: int = 0  # random seed of sampling
    threads: int | None = None  # threads of torch; null: OMP_NUM_THREADS, else all cores
    classes: list[str] | None = None  # dotted paths of classes of your own that a model may use

    def __post_init__(self) -> None:
        expand_paths(self, "run_dir", "prompt_file")
        check_settings("", self, "threads", "n_samples", "top")
        if self.temperature == 0:
            check_unused("", self, "temperature=0 (greedy; temperature=1 samples)", "n_samples", "seed")


SCHEMA = GenerateConfig


def run(args: list[str]) -> None:
    config = parse(GenerateConfig, _with_words(args))
    prompts = _prompts(config)
    names = runs_of(config.run_dir)  # raises UserError before the slow imports below
    from lm.decoding import Sampling
    from lm.folder import load_model
    from lm.system.device import best_device, set_threads

    sampling = {key: getattr(config, key) for key in ("temperature", "top_k", "top_p", "min_p")}
    Sampling(**sampling, seed=config.seed)  # raises UserError before a model is loaded
    set_threads(config.threads)
    models = {}
    for name in names:
        net, tokenizer = load_model(name, config.classes or ())
        models[name] = net.to(best_device()), tokenizer
    for turn, prompt in enumerate(prompts):  # each typed prompt has further seeds
        for name, (net, tokenizer) in models.items():
            try:
                tokenizer.without_unknown(prompt)  # warns or fails before anything is printed
            except UserError as error:
                if not config.interactive:
                    raise
                print(printable(str(error)), file=sys.stderr)
                continue
            if len(models) > 1:
                print(f"=== {_shown(name)}")
            for number in range(config.n_samples):
                if config.n_samples > 1:
                    print(f"=== sample {number + 1} of {config.n_samples}")
                seed = config.seed + turn * config.n_samples + number
                _continue(net, tokenizer, prompt, config, sampling | {"seed": seed})


def _with_words(args: list[str]) -> list[str]:
    """Return the settings, with the run and the prompt from bare words. Raises UserError."""
    words, settings = split_words(args, GenerateConfig)
    runs = [word for word in words if os.path.isdir(word) or ("/" in word and is_folder(word))]  # "*" is a prompt
    prompt = [word for word in words if word not in runs]
    if len(prompt) == 1 and os.path.isfile(prompt[0]):
        meant = " or ".join(shlex.quote(f"{key}={prompt[0]}") for key in ("prompt_file", "prompt"))
        raise UserError(f"{prompt[0]}: is a file; did you mean {meant}?")
    if not any(setting.startswith("run_dir=") for setting in settings):
        for word in prompt:
            if os.path.isdir(os.path.dirname(word)) and len(word.split()) == 1:
                raise UserError(f"{word}: no such run; a prompt is given as prompt=WORDS")
    if prompt and any(setting.startswith("prompt=") for setting in settings):
        raise UserError(f"{' '.join(prompt)}: is a second prompt; write one prompt in quotes")
    return with_folders(runs, [*([f"prompt={' '.join(prompt)}"] if prompt else []), *settings])


def _prompts(config: GenerateConfig) -> Iterator[str]:
    """Return the prompt, the content of prompt_file, or typed lines.

    Raises UserError unless exactly one of them is given, and if prompt_file is not UTF-8.
    """
    if sum([config.prompt is not None, config.prompt_file is not None, config.interactive]) != 1:
        example = f'{command_line("generate")} "Once upon a time"'
        raise UserError(f"prompt: give one, as in {example}, or prompt_file=FILE, or interactive=true")
    if config.interactive:
        return _typed_lines()
    if config.prompt_file is None:
        return iter([str(config.prompt)])
    is_stdin = config.prompt_file == "-"
    with reading(Path("standard input" if is_stdin else config.prompt_file), "UTF-8"):
        content = sys.stdin.buffer.read() if is_stdin else Path(config.prompt_file).read_bytes()
        require(b"\0" not in content, "has a zero byte", "UTF-8")
        return iter([content.decode("utf-8-sig")])


def _typed_lines() -> Iterator[str]:
    """Yield lines of standard input until the input ends. On a terminal, offer editing and a history."""
    is_terminal = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        encoding = None if is_terminal else "utf-8-sig"  # a terminal keeps its own encoding
        sys.stdin.reconfigure(encoding=encoding, errors="replace", newline=None)
    with suppress(ImportError):
        import readline  # noqa: F401  # input() uses the module once it is imported
    if is_terminal:
        print("Each line is a prompt. Ctrl-D ends.", file=sys.stderr)
    with suppress(EOFError):
        while True:
            yield input("prompt> " if is_terminal else "")


def _continue(net: Any, tokenizer: Any, prompt: str, config: GenerateConfig, sampling: dict[str, Any]) -> None:
    """Print a prompt and its continuation."""
    from lm.decoding import likeliest, stream

    rows: list[tuple[str, ...]] = []

    def observe(logits: Any) -> None:  # (1, V)
        if config.top is not None:
            pairs = likeliest(tokenizer, logits[0], config.top)
            cells = (f"{json.dumps(text, ensure_ascii=False)} {share:.1%}" for text, share in pairs)
            rows.append((str(len(rows) + 1), *cells))

    print(_shown(prompt), end="", flush=True)
    for piece in stream(net, tokenizer, prompt, config.max_new_tokens, observe, **sampling):
        print(_shown(piece), end="", flush=True)
    print()
    if rows:
        head = ("step", *(f"top {rank}" for rank in range(1, len(rows[0]))))
        print(format_table([head, *rows]), file=sys.stderr)


def _shown(text: str) -> str:
    """Return text that cannot steer a terminal."""
    return printable(text) if sys.stdout.isatty() else text
