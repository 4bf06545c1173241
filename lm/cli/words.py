"""The words of a command line, before Hydra reads them."""

import re
import sys
from collections.abc import Iterable

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

PATHS = (
    *("path", "run_dir", "output_dir", "output", "prompt_file", "cache_dir", "nanogpt", "init_from"),
    *("texts", "plot", "folder", "csv"),
)
SWEEP = ("-m", "--multirun")
COMPLETION = ("-sc", "--shell_completion")


def key_of(word: str) -> str:
    """The key that a word sets: `+trainer.benchmark=true` sets trainer.benchmark, `~logger` logger, `--help` none."""
    return word.partition("=")[0].lstrip("+~") if "=" in word or word.startswith("~") else ""


def has(words: Iterable[str], flags: tuple[str, ...]) -> bool:
    return any(word in flags for word in words)


def not_utf8(words: Iterable[str]) -> str | None:
    """What is said of the first word that is not UTF-8, as most files hold names: a run under it could not be read."""
    for word in words:
        if any("\ud800" <= c <= "\udfff" for c in word) and not is_setting(word, ("prompt",)):  # which names no file
            encoding = sys.getfilesystemencoding()
            hint = "rename the file" if encoding == "utf-8" else f"words are {encoding} here; set PYTHONUTF8=1"
            return f"{word}: not UTF-8; {hint}"
    return None


def fixed_run_dir(line: list[str]) -> str | None:
    """The one directory into which a sweep would write all its runs, None if there is none."""
    try:
        found = OverridesParser.create().parse_overrides([word for word in line if not word.startswith("-")])
    except OverrideParseException:  # Hydra is going to say what is wrong
        return None
    sweeps = any(one.is_sweep_override() for one in found)
    fixed = [one.value() for one in found if one.key_or_group == "run_dir" and not one.is_sweep_override()]
    return str(fixed[0]) if sweeps and fixed and fixed[0] is not None and "${" not in str(fixed[0]) else None


def take_verbatim(words: list[str], keys: tuple[str, ...]) -> tuple[dict[str, str], list[str]]:
    """Separate `key=value` of these keys, whose values are taken as they stand, past Hydra's grammar."""
    found = {word.partition("=")[0]: word.partition("=")[2] for word in words if is_setting(word, keys)}
    return found, [word for word in words if not is_setting(word, keys)]


def is_setting(word: str, keys: tuple[str, ...]) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and key in keys


def take_others(words: list[str], known: list[str]) -> tuple[list[str], list[str]]:
    """Separate what sets no key in `known` and none of Hydra's."""

    def other(word: str) -> bool:
        key = key_of(word).partition(".")[0]
        return key not in ("", "hydra", *known) and not key.startswith(("-", "hydra/"))

    return [word for word in words if other(word)], [word for word in words if not other(word)]


def prepared(words: list[str]) -> list[str]:
    """The words for Hydra: -m comes first, as argparse demands, and a path may hold any characters.

    In a sweep paths are left alone, for there a comma separates values.
    """
    flags = [word for word in words if word in SWEEP]
    return flags + [word if flags else quoted(word) for word in words if word not in SWEEP]


def quoted(word: str) -> str:
    key, equals, value = word.partition("=")
    is_path = equals and key.split(".")[-1] in PATHS and value != "null" and value[:1] not in ("'", '"')
    return f"{key}={literal(value)}" if is_path else word


def literal(value: str) -> str:
    """A string literal of Hydra's grammar that means exactly `value`, without interpolation."""
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value) + "'"
