"""Continue a prompt: lm-lab generate run_dir=RUN "prompt=def f(x, y):" [max_new_tokens=N] [temperature=T]

The prompt is taken verbatim, whatever it contains; prompt_file=FILE reads it (- is standard input). Standard output
is the prompt and its continuation, as it is decoded.
"""

import io
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lm.cli.imports import heavy_imports
from lm.cli.launch import launch
from lm.config import BadInput, GenerateConfig
from lm.exchange.find_model import model_folder


def prompts_of(config: GenerateConfig) -> Iterator[str]:
    if config.interactive and (config.prompt is not None or config.prompt_file is not None):
        raise BadInput("interactive=true: asks for the prompts; leave prompt and prompt_file out")
    if config.interactive:
        return typed_prompts()
    return iter([read_prompt(config)])


def read_prompt(config: GenerateConfig) -> str:
    if (config.prompt is None) == (config.prompt_file is None):
        raise BadInput("prompt: give prompt=TEXT or prompt_file=FILE, one of the two")
    if config.prompt is not None:
        return utf8(config.prompt)
    if config.prompt_file == "-":
        if sys.stdin is None:
            raise BadInput("standard input: is closed; expected a prompt")
        try:
            return sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise BadInput(f"standard input: not UTF-8 at byte {error.start} ({error.reason})") from error
    from lm.data.documents import read_text

    return read_text(Path(str(config.prompt_file)))


def task(config: GenerateConfig) -> None:
    prompts = prompts_of(config)
    model_folder(config.run_dir)  # raises BadInput before the slow imports below
    with heavy_imports():
        from lm.exchange.portable import load_model
        from lm.inference.generate import stream
        from lm.inference.sampling import Sampling
        from lm.system.device import best_device, set_threads

    options = {key: getattr(config, key) for key in ("temperature", "top_k", "min_p", "seed")}
    Sampling(**options)  # raises BadInput before the model is loaded
    set_threads(config.threads)
    net, tokenizer = load_model(config.run_dir, config.trust)
    net.to(best_device())
    for prompt in prompts:
        try:
            tokenizer.encode(utf8(prompt))  # or fail before anything is printed
        except BadInput as error:
            if not config.interactive:
                raise
            print(error, file=sys.stderr)
            continue
        for number in range(config.n_samples):
            if config.n_samples > 1:
                print(f"=== sample {number + 1} of {config.n_samples}")
            print(prompt, end="", flush=True)
            one = options | {"seed": config.seed + number}
            for piece in stream(net, tokenizer, prompt, config.max_new_tokens, **one):
                print(piece, end="", flush=True)
            print()


def utf8(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"prompt: not UTF-8 at character {error.start}") from error
    return prompt


def typed_prompts() -> Iterator[str]:
    """Lines of standard input until it ends; on a terminal, with editing and a history."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused, and the next one read
    with suppress(ImportError):
        import readline  # noqa: F401  # input() uses it once it is imported
    while True:
        try:
            yield input("prompt> " if sys.stdin.isatty() else "")
        except EOFError:
            return


def main(line: list[str] | None = None) -> None:
    launch(task, GenerateConfig, "generate", line, verbatim=("prompt",))
