"""Words of a command line that are no key=value: commands of other names, a text, a run, a prompt, a question."""

import difflib
import glob
import logging
import math
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.cli import COMMANDS, NAME, command_line
from lm.cli.aliases import EPOCHS, RESUME, command_of, meaning
from lm.cli.mistakes import Kinds, explain_non_override, kinds_of, resume_line, text_settings
from lm.config import RunConfig, UserError
from lm.config.identity import flat, key_of
from lm.data.paths import COMPRESSED, is_url, listed
from lm.formats.base import model_folder
from lm.training.run_directory import RunDirectory

N_OFFERED = 4  # runs of a folder
BYTES_PER_TOKEN = 3.0  # of BPE with a small vocabulary, about
log = logging.getLogger(__name__)


def no_such_command(word: str, args: Sequence[str]) -> str:
    """The message about a command that does not exist."""
    if word in RESUME:
        return f"{word}: no such command; {resume_line()}"
    key, equals, _ = word.partition("=")
    start = command_of(word) or difflib.get_close_matches(word, COMMANDS, n=1)
    if equals and not is_text(word):
        start = [{"ablation": "ablate", "prompt": "generate"}.get(key, "train"), word]
    elif start:
        if any("=" not in arg and not os.path.isdir(arg) for arg in args) and start[0] == "generate":
            start = start[:1]  # what follows is a prompt
    elif os.path.isfile(f"{word}/config.yaml"):
        start = ["look", word]
    elif is_question(word):
        start = ["ablate", word]
    elif is_text(word):
        start = ["train", word]
    else:
        return f"{word}: no such command; {NAME} --help lists them"
    return f"{word}: no such command; did you mean {command_line(start[0], *start[1:], *args)}?"


# --- texts


def is_text(word: str) -> bool:
    """Whether a word is a file, a folder, a glob that matches some, or an address."""
    if is_url(word) or ("=" in word and not word.startswith(("/", "./", "../"))):
        return bool(re.match(r"\w+://", word))
    return os.path.exists(word) or (glob.has_magic(word) and any(glob.iglob(word, recursive=True)))


def is_question(word: str) -> bool:
    return word.endswith((".yaml", ".yml")) and os.path.isfile(word)


def with_text(args: Sequence[str], kinds: Kinds) -> list[str]:
    """The arguments, with the settings of the text in the place of the word that names it. Raises UserError.

    Any other word must be a setting, or Hydra's ~key.
    """
    runs = [RunDirectory(Path(arg.partition("=")[2]).expanduser()) for arg in args if arg.startswith("run_dir=")]
    trained_on = [flat(run.read_config()).get("data.path") for run in runs]  # which may be gone since
    texts = [arg for arg in args if is_text(arg) or arg in trained_on]
    for i, arg in enumerate(args):
        if "=" not in arg and arg not in texts and not arg.startswith("~"):
            raise UserError(explain_non_override(args, kinds, i))
    if not texts:
        return [*args]
    path, others = texts[0], [arg for arg in args if arg not in texts]
    if len(texts) > 1 or "data.path" in map(key_of, others):
        val_path = shlex.quote(f"data.val_path={texts[-1]}")
        advice = f"several files are one text as a folder or a glob in quotes; {val_path} is for validation"
        raise UserError(f"{texts[-1]}: is a second text, expected one; {advice}")
    if os.path.isfile(f"{path}/config.yaml"):
        raise UserError(f"{path}: is a run; did you mean {shlex.quote(f'run_dir={path}')}?")
    if "data" in map(key_of, others):
        return [*others, f"data.path={path}"]
    if not (settings := text_settings(path)).startswith("data=text "):
        raise UserError(f"{path}: is no plain text; did you mean {settings}?")
    return [*others, "data=text", f"data.path={path}"]


def describe_epochs(value: str, args: Sequence[str]) -> str:
    """How a number of readings is given, in steps if the size of the command's text is known without reading it."""
    from lm.cli.compose import compose
    from lm.cli.recipe import with_recipe
    from lm.data.sources import open_source

    kinds = kinds_of(RunConfig)
    keys = {arg: key_of(arg).split(".") for arg in args if "=" in arg}
    settings = [arg for arg, key in keys.items() if key[0] in {"experiment", *kinds} and key[-1] not in EPOCHS]
    settings = [arg for arg in settings if "," not in arg or key_of(arg).startswith("data")]  # else of a comparison
    meant = (meaning(key_of(arg), arg.partition("=")[2], kinds) for arg in keys if arg not in settings)
    settings += ["=".join(pair) for pair in meant if pair]
    settings += filter(is_text, args)
    try:
        if float(value) <= 0:
            raise UserError("no length")
        run = compose("train", with_recipe(with_text(settings, kinds)), RunConfig)
        text = run.data.path or "the standard library"
        files = getattr(open_source(run.data), "files", {}) if run.data.source in ("stdlib", "text") else {}
        if not files or any(str(file).endswith(COMPRESSED) or isinstance(file, str) for file in files.values()):
            raise UserError("its size is not that of the text")
        n_bytes = min(sum(file.stat().st_size for file in files.values()), run.data.max_bytes or math.inf)
        if run.data.val_path is None:
            n_bytes -= min(n_bytes * run.data.val_fraction, run.data.val_max_bytes or math.inf)
        with open(next(iter(files.values())), "rb") as file:
            head = file.read(1 << 16)
        sizes = {"byte": 1.0, "char": len(head) / max(len(head.decode(errors="ignore")), 1)}
        n_tokens = n_bytes / sizes.get(run.tokenizer.kind, BYTES_PER_TOKEN)
        steps = max(math.ceil(float(value) * n_tokens / run.tokens_per_step), 1)
    except (UserError, OSError, ValueError, OverflowError):
        return "a length is trainer.max_steps=N or max_tokens=N: a reading has as many tokens as the training text"
    return f"a length is given in steps; did you mean trainer.max_steps={steps}, about {value} readings of {text}?"


# --- words of the flat commands


def split_words(args: Sequence[str], schema: Any) -> tuple[list[str], list[str]]:
    """The words that are no settings, and the settings; a -- in front is left out. Raises UserError for a flag."""
    args = args[1:] if args[:1] == ["--"] else args
    for i, arg in enumerate(args):
        if re.fullmatch(r"--?[a-zA-Z][\w-]*(=.*)?", arg, re.DOTALL):
            raise UserError(explain_non_override(args, kinds_of(schema), i))
    words = [arg for arg in args if not re.match(r"\+*[a-zA-Z][\w.-]*=", arg)]
    return words, [arg for arg in args if arg not in words]


def is_folder(word: str) -> bool:
    """Whether a word is a folder, or a glob that matches some."""
    return os.path.isdir(word) or (glob.has_magic(word) and bool(glob.glob(f"{word}/")))


def with_folders(folders: Sequence[str], settings: Sequence[str], key: str = "run_dir") -> list[str]:
    """The settings with the folders that words name. Raises UserError if `key` names one too."""
    if folders and any(arg.startswith(f"{key}=") for arg in settings):
        what = "run; run_dir=[RUN1,RUN2] names several" if key == "run_dir" else "folder"
        raise UserError(f"{folders[0]}: is a second {what}")
    value = folders[0] if len(folders) == 1 else f"[{','.join(folders)}]"
    return [*([f"{key}={value}"] if folders else []), *settings]


def runs_of(run_dir: str | None, folder: Path = Path("runs")) -> list[str]:
    """The folders that run_dir names, each with a model, or else the newest run, which is said. Raises UserError."""
    from lm.lab.runs.find import newest_run

    if run_dir is not None:
        names = listed(run_dir, "run_dir", folders=True)
        for name in names:
            _check_run(name)
            directory = RunDirectory(Path(name))
            if directory.config.exists() and not directory.result.exists():
                log.warning("run_dir=%s: is unfinished; this is its model when it was stopped", name)
        return names
    if (path := newest_run(folder)) is None:
        other = shlex.quote(f"run_dir={newest_run(folder, finished=False) or 'RUN'}")
        raise UserError(f"run_dir: there is no finished run below {folder}/; {other} names another")
    log.info("run_dir=%s: the newest finished run below %s/", path, folder)
    return [str(path)]


def _check_run(run_dir: str) -> None:
    """Raise UserError if there is no model; in a folder of runs, such as that of an ablation, with its runs."""
    try:
        model_folder(run_dir)
    except UserError as error:
        models = sorted(path for depth in ("*", "*/*") for path in Path(run_dir).glob(f"{depth}/model/config.json"))
        if not models:
            raise
        runs = [shlex.quote(f"run_dir={path.parents[1]}") for path in models[:N_OFFERED]]
        runs += [f"one of {len(models) - N_OFFERED} more there"] if models[N_OFFERED:] else []
        raise UserError(f"run_dir={run_dir}: is a folder of runs; did you mean {' or '.join(runs)}?") from error
