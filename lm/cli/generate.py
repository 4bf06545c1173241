"""Continue a prompt: lm-lab generate run_dir=RUN "prompt=def f(x, y):" [max_new_tokens=N] [temperature=T]

The prompt is taken verbatim, whatever it contains; prompt_file=FILE reads it (- is standard input). Standard output
is the prompt and its continuation, as it is decoded.
"""

import sys
from pathlib import Path

from lm.cli.imports import heavy_imports
from lm.cli.launch import launch
from lm.config import BadInput, GenerateConfig
from lm.exchange.find_model import model_folder


def read_prompt(config: GenerateConfig) -> str:
    if (config.prompt is None) == (config.prompt_file is None):
        raise BadInput("prompt: give prompt=TEXT or prompt_file=FILE, one of the two")
    if config.prompt is not None:
        try:
            config.prompt.encode()
        except UnicodeEncodeError as error:
            raise BadInput(f"prompt: not UTF-8 at character {error.start}") from error
        return config.prompt
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
    prompt = read_prompt(config)
    model_folder(config.run_dir)  # raises BadInput before the slow imports below
    with heavy_imports():
        from lm.exchange.portable import load_model
        from lm.inference.generate import stream
        from lm.system.device import best_device, set_threads
        from lm.system.waiting import adaptive_waiting

    threads = set_threads(config.threads)
    net, tokenizer = load_model(config.run_dir, config.trust)
    pieces = stream(
        net.to(best_device()),
        tokenizer,
        prompt,
        config.max_new_tokens,
        temperature=config.temperature,
        seed=config.seed,
    )
    tokenizer.encode(prompt)  # or fail before anything is printed
    print(prompt, end="", flush=True)
    with adaptive_waiting(threads):
        for piece in pieces:
            print(piece, end="", flush=True)
    print()


def main(line: list[str] | None = None) -> None:
    launch(task, GenerateConfig, "generate", line, verbatim=("prompt",))
