"""Continue a prompt: lm-lab generate run_dir=RUN "prompt=def f(x, y):" [max_new_tokens=N] [temperature=T]

The prompt is taken verbatim, whatever it contains; prompt_file=FILE reads it (- is standard input). Standard output
is the prompt and its continuation, as it is decoded.
"""

import io
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lm.cli.compose import parse
from lm.config import GenerateConfig, UserError
from lm.exchange.find_model import model_folder
from lm.system.terminal import printable
from lm.training.run_directory import RunDirectory

SCHEMA = GenerateConfig


def run(args: list[str]) -> None:
    given = [arg for arg in args if arg.startswith("prompt=")]
    if len(given) > 1:
        raise UserError(f"{given[1]}: is a second prompt; give one, in quotes if it has spaces")
    config = parse(GenerateConfig, args)
    if sum([config.prompt is not None, config.prompt_file is not None, config.interactive]) != 1:
        raise UserError("prompt: give one of prompt=TEXT, prompt_file=FILE and interactive=true")
    prompts = _typed_prompts() if config.interactive else iter([_read_prompt(config)])
    model_folder(config.run_dir)  # raises UserError before the slow imports below
    from lm.exchange.portable import load_model
    from lm.inference.generate import stream
    from lm.inference.sampling import Sampling
    from lm.system.device import best_device, set_threads

    directory = RunDirectory(Path(config.run_dir).expanduser())
    if directory.config.exists() and not directory.result.exists():
        print(f"run_dir={config.run_dir}: is unfinished; this is its model when it was stopped", file=sys.stderr)
    options = {key: getattr(config, key) for key in ("temperature", "top_k", "min_p", "seed")}
    Sampling(**options)  # raises UserError before the model is loaded
    set_threads(config.threads)
    net, tokenizer = load_model(config.run_dir, config.trust)
    net.to(best_device())
    shown = printable if sys.stdout and sys.stdout.isatty() else str  # no text of a model steers a terminal
    for prompt in prompts:
        try:
            tokenizer.encode(prompt)  # or fail before anything is printed
        except UserError as error:
            if not config.interactive:
                raise
            print(error, file=sys.stderr)
            continue
        for number in range(config.n_samples):
            if config.n_samples > 1:
                print(f"=== sample {number + 1} of {config.n_samples}")
            print(shown(prompt), end="", flush=True)
            for piece in stream(
                net, tokenizer, prompt, config.max_new_tokens, **options | {"seed": config.seed + number}
            ):
                print(shown(piece), end="", flush=True)
            print()


def _read_prompt(config: GenerateConfig) -> str:
    """The prompt, or the content of prompt_file. Raises UserError if it is not UTF-8."""
    if config.prompt is not None:
        return config.prompt
    name, stdin = str(config.prompt_file), config.prompt_file == "-"
    try:
        return (sys.stdin.buffer.read() if stdin else Path(name).read_bytes()).decode()
    except UnicodeDecodeError as error:
        name = "standard input" if stdin else name
        raise UserError(f"{name}: not UTF-8 at byte {error.start} ({error.reason})") from error


def _typed_prompts() -> Iterator[str]:
    """Lines of standard input until it ends; on a terminal, with editing and a history."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with suppress(ImportError):
        import readline  # noqa: F401  # input() uses it once it is imported
    with suppress(EOFError):
        while True:
            yield input("prompt> " if sys.stdin.isatty() else "")
