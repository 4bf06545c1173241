"""Arguments before Hydra or a dataclass reads them: words, names of other trainers, mistakes.

`train` and `ablate` take a text as a bare word. The size of the text chooses a recipe, a file of configs/experiment.
The recipe is one ordinary override, `experiment=NAME`, in front of the typed words. So a sweep, --cfg job, the hash of
a run and a resume treat the recipe like any override.

`hydra_words`, at the end, does all this for `train`. `split_words` and `parse` are for commands without YAML files.
"""

import difflib
import glob
import logging
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lm.cli import command_line
from lm.config import RECIPES, TYPED_LENGTHS, DataConfig, fields_of, literal, recipe_of
from lm.data.paths import is_url, kind_of, matches
from lm.data.sources import text_size
from lm.errors import UserError, first_line
from lm.system.files import is_run

# Beside this package in an installed wheel, in the root of the project in a checkout.
CONFIGS = next(
    path for path in (Path(__file__).parents[1] / "configs", Path(__file__).parents[2] / "configs") if path.is_dir()
)
# The folders of configs/ from which a command line chooses a file.
GROUPS = ("ablation", "data", "experiment", "head", "logger", "model", "optim", "tokenizer", "trainer")
CONTINUED = {"data", "logger"}  # groups that may be typed beside run_dir without starting another run
HYDRA_FLAGS = {  # flag -> whether a value follows
    **dict.fromkeys(("-m", "--multirun", "--resolve", "-sc", "--shell-completion"), False),
    **dict.fromkeys(("-c", "--cfg", "-p", "--package", "--info", "--hydra-help"), True),
    **dict.fromkeys(("-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir"), True),
}
# Settings that are paths. Hydra's grammar has neither parentheses nor letters beyond a to z.
PATHS = ("data.path", "data.val_path", "data.cache_dir", "tokenizer.path", "init_from", "run_dir", "output_dir")
VERBATIM = ("prompt", "baseline")  # settings whose text may be "null"
MIN_BYTES = 2_000  # a page of text, of which a tenth is held out
# Names of these settings in other trainers and in papers. A name means the first setting that the command has.
OTHER_NAMES = {
    "data.path": "data dataset file text corpus input train_file train_path train_data",
    "data.val_path": "val_file val_data validation_file",
    "data.seq_len": "block_size context context_length context_size ctx_len sequence_length max_position_embeddings",
    "data.batch_size": "batch bs train_batch_size per_device_train_batch_size",
    "head": "tied untied tie tie_weights tie_embeddings tie_word_embeddings weight_tying lm_head",
    "model.n_layers": "layers n_layer depth num_hidden_layers",
    "model.n_heads": "heads n_head num_attention_heads",
    "model.n_kv_heads": "kv_heads num_key_value_heads",
    "model.d_model": "dim width n_embd n_embed embed_dim hidden_size",
    "model.d_ff": "intermediate_size ffn_dim",
    "model.ffn": "activation hidden_act mlp",
    "model.position": "pos positions position_embedding",
    "tokenizer.vocab_size": "vocab",
    "optim": "optimizer",
    "optim.lr": "learning_rate",
    "optim.weight_decay": "wd",
    "optim.warmup_steps": "warmup warmup_iters",
    "optim.decay": "schedule scheduler lr_scheduler lr_scheduler_type",
    "trainer": "cpu gpu cuda",
    "trainer.accelerator": "device",
    "trainer.devices": "gpus n_gpus num_gpus",
    "trainer.precision": "dtype amp",
    "trainer.max_steps": "iters max_iters steps",
    "trainer.max_epochs": "epochs num_train_epochs",
    "trainer.accumulate_grad_batches": "accumulate grad_accum grad_accum_steps gradient_accumulation_steps",
    "trainer.gradient_clip_val": "clip grad_clip max_grad_norm",
    "trainer.log_every_n_steps": "log_every log_interval logging_steps",
    "validation.every": "val_every eval_every eval_interval eval_steps",
    "validation.batches": "eval_iters",
    "checkpoint.every": "save_every save_interval save_steps",
    "checkpoint.patience": "early_stopping early_stopping_patience",
    "max_minutes": "minutes",
    "seed": "random_seed",
    "init_from": "pretrained finetune",
    "output_dir": "out output out_dir save_dir dir",
    "run_dir": "run model checkpoint out_dir output_dir save_dir log_dir resume",
    "seeds": "num_seeds pairs n_pairs num_pairs repeats replicates runs n_runs",
    "workers": "jobs n_jobs parallel",
    "plan_only": "plan dry_run",
    "prompt": "text input",
    "temperature": "temp",
    "max_new_tokens": "tokens n_tokens num_tokens length max_length",
}
# A flag or a setting of a flat command, known or not. Other words may be a prompt.
ASSIGNMENT = re.compile(r"--?[a-zA-Z][\w.-]*(=|$)|\+*[a-zA-Z][\w./@-]*=")
Kinds = dict[str, Any]  # dotted key of every setting of a command -> its type
log = logging.getLogger(__name__)


def kinds_of(schema: Any) -> Kinds:
    """Return the types of the settings of a dataclass, of groups as well as of what they hold."""
    return {key: item.type for key, item in fields_of(schema).items()}


def takes_list(kind: Any) -> bool:
    """Return whether a setting of this type may be a list."""
    return list in (get_origin(part) for part in (kind, *get_args(kind)))


def key_of(override: str) -> str:
    """Return the key that an override sets: `+head.name=a` sets head.name, `~logger` logger."""
    return override.partition("=")[0].lstrip("+~")


# --- mistakes


def unknown_key(word: str, kinds: Kinds, following: str = "") -> str:
    """Return the line about a flag or a key that does not exist; `following` is the next word.

    >>> unknown_key("steps=3", {"trainer.max_steps": int})
    'steps: no such key; did you mean trainer.max_steps=3?'
    >>> unknown_key("--lr", {"optim.lr": float}, "0.1")
    '--lr: no such flag; did you mean optim.lr=0.1?'
    """
    typed, equals, value = word.partition("=")
    if not typed:
        return f"{word}: expected key=value without spaces around the ="
    if not equals and "=" not in following and not following.startswith("-"):
        value = following
    what = "flag" if typed.startswith("-") else "key"
    meant = " or ".join(_assigned(key, value, kinds) for key in _similar_keys(typed, kinds))
    is_code = what == "key" and equals and "prompt" in kinds
    prompt = f" (a prompt: {shlex.quote(f'prompt={word}')})" if is_code else ""
    return f"{typed}: no such {what}; {f'did you mean {meant}?' if meant else '--help shows the settings'}{prompt}"


def _similar_keys(typed: str, kinds: Kinds) -> list[str]:
    """Return the settings that a name may mean: by its name elsewhere, its last part, or nearly its spelling."""
    name = typed.lstrip("-+~").replace("-", "_").lower()
    for key, names in OTHER_NAMES.items():
        if key in kinds and name in names.split():
            return [key]
    last = {key: key.rpartition(".")[2] for key in kinds}
    if same := [key for key, part in last.items() if part == name.rpartition(".")[2]]:
        return same
    spellings = {(key if "." in name else part): key for key, part in last.items()}
    return [spellings[spelling] for spelling in difflib.get_close_matches(name, spellings, 1, 0.75)]


def _assigned(key: str, value: str, kinds: Kinds) -> str:
    """Return a setting with a value as it is typed in a shell."""
    if key == "data.path":
        return shlex.join(text_settings(value or "FILE"))
    if key in GROUPS and not (CONFIGS / key / f"{value}.yaml").is_file():
        choices = sorted(path.stem for path in (CONFIGS / key).glob("*.yaml"))
        return f"{key}=CHOICE ({', '.join(choices)})"
    if bool in (kinds[key], *get_args(kinds[key])) and value not in ("true", "false"):
        value = "true"
    if takes_list(kinds[key]) and not value.startswith("["):
        value = f"[{value or 'VALUE'}]"
    return shlex.quote(f"{key}={value or 'VALUE'}")


# --- flat commands: generate, evaluate and the like, which read no YAML files


def split_words(args: Sequence[str], schema: Any) -> tuple[list[str], list[str]]:
    """Return the bare words and the settings of a flat command. Raises UserError."""
    words = classify(args, kinds_of(schema), {})
    return words.bare, words.overrides


def parse(schema: Any, args: Sequence[str], **values: Any) -> Any:
    """Return key=value arguments as a flat dataclass; `values` are settings that come from elsewhere.

    A text setting takes everything after the first = as it stands. All other settings are parsed as YAML.
    """
    kinds = kinds_of(schema)
    for arg in args:
        key, text = key_of(arg), arg.partition("=")[2]
        if str in (kinds[key], *get_args(kinds[key])) and (text != "null" or key in VERBATIM):
            values[key] = text
            continue
        try:
            node = OmegaConf.structured(schema)
            node[key] = OmegaConf.create(f"value: {text}").value
            values[key] = OmegaConf.to_container(node)[key]  # type: ignore[index,call-overload]
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            raise UserError(value_mistake(arg, error)) from error
    for item in fields(schema):
        is_required = item.default is MISSING and item.default_factory is MISSING
        if is_required and item.name not in values:
            raise UserError(f"{item.name}: is missing; give it as {item.name}=VALUE")
    return schema(**values)


def value_mistake(setting: str, error: BaseException) -> str:
    """Return the line about a setting whose value OmegaConf does not take.

    >>> value_mistake("prompts=def f", ValueError("str is not a ListConfig, list or tuple."))
    "prompts=def f: expected a list, as in 'prompts=[def f]'"
    """
    key, _, value = setting.partition("=")
    is_of_list = "is not a ListConfig" in str(error)
    example = shlex.quote(f"{key}=[{value or 'VALUE'}]")
    text = f"expected a list, as in {example}" if is_of_list else first_line(error)
    return f"{setting}: {text}"


def is_folder(word: str) -> bool:
    """Return whether a word is a folder, or a glob that matches folders."""
    # Without recursion: a prompt may begin with /**.
    return os.path.isdir(word) or (glob.has_magic(word) and bool(glob.glob(f"{word}/")))


def with_folders(folders: Sequence[str], settings: Sequence[str], key: str = "run_dir") -> list[str]:
    """Return the settings with the folders that bare words name. Raises UserError for a second one."""
    if not folders:
        return [*settings]
    if any(setting.startswith(f"{key}=") for setting in settings):
        raise UserError(f"{folders[0]}: is a second {key}; {key}=[A,B] names several")
    value = folders[0] if len(folders) == 1 else f"[{','.join(folders)}]"
    return [f"{key}={value}", *settings]


# --- commands of Hydra: train and ablate


class Words(NamedTuple):
    flags: list[str]  # of Hydra, with their values
    overrides: list[str]  # key=value, and Hydra's ~key
    bare: list[str]


def is_completion(args: Sequence[str]) -> bool:
    """Return whether a shell asks Hydra for completions."""
    return bool({"-sc", "--shell-completion"} & {*args})


def classify(args: Sequence[str], kinds: Kinds, flags: Mapping[str, bool] = HYDRA_FLAGS) -> Words:
    """Sort the arguments of a command. Raises UserError for an unknown flag or key.

    Behind a -- stand bare words. A flat command has no `flags`.
    """
    words = Words([], [], [])
    end = args.index("--") if "--" in args else len(args)
    i = 0
    while i < end:
        arg, following = args[i], args[i + 1] if i + 1 < len(args) else ""
        i += 1
        flag = arg.partition("=")[0]
        if flag in flags:
            words.flags.append(arg)
            if flags[flag] and "=" not in arg and following:
                words.flags.append(following)
                i += 1
        elif is_setting(arg, kinds, bool(flags)):
            words.overrides.append(arg)
        elif (re.match("-|.*=", arg) if flags else ASSIGNMENT.match(arg)) and not is_text(arg):
            raise UserError(unknown_key(arg, kinds, following))
        else:
            words.bare.append(arg)
    words.bare.extend(args[end + 1 :])
    return words


def is_setting(arg: str, kinds: Kinds, is_hydra: bool = True) -> bool:
    """Return whether a word sets a known key or, for Hydra, chooses from a group or is one of Hydra's."""
    if is_hydra and arg.startswith("~"):
        return not os.path.exists(arg)  # a file may be called so
    key, equals, _ = arg.partition("=")
    key = key.lstrip("+")
    group = re.split("[.@/]", key)[0]
    is_open = group == "hydra" or get_origin(kinds.get(key.rpartition(".")[0])) is dict
    is_choice = key.partition("@")[0] in GROUPS
    return bool(equals) and (key in kinds or (is_hydra and (is_choice or is_open)))


def is_text(word: str) -> bool:
    """Return whether a word is an existing file or folder, a glob that matches some, or a URL."""
    if is_url(word) or os.path.exists(word):
        return True
    return glob.has_magic(word) and bool(matches(word))


def text_settings(path: str) -> list[str]:
    """Return the settings that read a text, whose ending tells a table.

    >>> text_settings("rows.jsonl")
    ['data=json', 'data.path=rows.jsonl']
    """
    return [f"data={kind_of(path)}", f"data.path={path}"]


def with_text(words: Words) -> list[str]:
    """Return the overrides with the settings of the text that a bare word names. Raises UserError."""
    keys = [key_of(override) for override in words.overrides]
    if not words.bare:
        return words.overrides
    for word in words.bare:
        if not is_text(word):
            raise UserError(unknown_word(word))
    path, *others = words.bare
    if others or "data.path" in keys:
        advice = "several files are one text as a folder or a glob in quotes; data.val_path=FILE is for validation"
        raise UserError(f"{words.bare[-1]}: is a second text; {advice}")
    if is_run(Path(path)):
        raise UserError(f"{path}: is a run; did you mean {shlex.quote(f'run_dir={path}')}?")
    settings = [f"data.path={path}"] if "data" in keys else text_settings(path)
    return [*settings, *words.overrides]


def unknown_word(word: str) -> str:
    """Return the line about a bare word that names nothing."""
    groups = [group for group in GROUPS if (CONFIGS / group / f"{word}.yaml").is_file()]
    if groups:
        setting = f"{groups[0]}={word}"
        meant = command_line("ablate", setting) if groups[0] == "ablation" else setting
        return f"{word}: a setting is given as key=value; did you mean {meant}?"
    if os.path.islink(word):
        return f"{word}: is a link to {os.readlink(word)}, which does not exist"
    folder, name = os.path.split(word)
    names = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    close = difflib.get_close_matches(name, names, 1, 0.75)
    advice = f"; did you mean {shlex.quote(os.path.join(folder, close[0]))}?" if close else ""
    return f"{word}: no such file, folder or glob{advice}"


def split_values(override: str) -> list[str]:
    """Return the values of an override, several in a sweep. Commas in an existing path do not separate values."""
    value = override.partition("=")[2]
    return [value] if os.path.exists(value) else value.split(",")


def recipe_for(overrides: Sequence[str], is_sweep: bool = False) -> str | None:
    """Return the recipe for the text that overrides name, if they choose none. Log the recipe and the size.

    experiment=, model=, tokenizer=, optim= and init_from= decide how to train; a head, a trainer
    and a logger do not. Raises UserError for a text that is too small or texts that differ.
    """
    decided = {"experiment", "model", "tokenizer", "optim", "init_from", "data.overfit_batches"}
    given = {key_of(override): _unquoted(override, is_sweep) for override in overrides}
    if any(map(_loads, overrides)) and not {*given} & {*GROUPS} - CONTINUED:  # the run has its settings
        return None
    if given.get("trainer") == ["overfit"]:  # the dropout of a recipe would keep the loss from falling to zero
        return None
    kind = given.get("data", [""])[0]
    paths = given.get("data.path", [])
    absent = [path for path in paths if not os.path.exists(path)]
    is_computed = any("${" in path or FUNCTION.match(path) for path in absent)  # by Hydra
    if is_computed or kind not in ("text", "json", "csv", "parquet"):
        return None
    if typed := sorted(decided & given.keys()):
        if paths and {*typed} <= {"model", "tokenizer", "optim"}:
            log.info("%s gets no recipe, because %s= is typed", paths[0], typed[0])
        return None
    settings: dict[str, Any] = {
        key: given[f"data.{key}"][0] for key in ("column", "cache_dir") if f"data.{key}" in given
    }
    limits = [int(limit) for limit in given.get("data.max_bytes", ()) if re.fullmatch(r"[0-9]+(_[0-9]+)*", limit)]
    recipes: dict[str, str] = {}  # a text with its limit -> recipe
    for path in paths:
        whole = text_size(DataConfig(source=kind, path=path, **settings), limit=max(RECIPES) + 1)
        for limit in limits or [whole]:
            size = min(whole, limit)
            if size < MIN_BYTES:
                is_enough = size > MIN_BYTES / 3  # for a window of characters, which may have three bytes each
                advice = "; experiment=none tokenizer=char trains on it all the same" if is_enough else ""
                what = f"data.path={path}: has" if size == whole else f"data.max_bytes={limit}: leaves"
                raise UserError(f"{what} {size:,} bytes, expected {MIN_BYTES:,} or more{advice}")
            recipes[path if len(limits) < 2 else f"{path} data.max_bytes={limit}"] = recipe_of(size)
            log.info("%s has %s, so its recipe is experiment=%s", path, _in_words(size), recipe_of(size))
    if len({*recipes.values()}) > 1:
        listed = ", ".join(f"{text} experiment={name}" for text, name in recipes.items())
        raise UserError(f"data.path: these texts have different recipes ({listed}); give experiment=NAME for all")
    return next(iter(recipes.values()), None)


def _loads(override: str) -> bool:
    """Return whether an override names a run whose settings are taken."""
    key, _, value = override.partition("=")
    return (key == "init_from" and value != "null") or (key == "run_dir" and is_run(Path(os.path.expanduser(value))))


def _unquoted(override: str, is_sweep: bool) -> list[str]:
    """Return the values of an override without the quotes of Hydra's grammar."""
    values = split_values(override) if is_sweep else [override.partition("=")[2]]
    return [value if os.path.exists(value) else unquoted(value) for value in values]


def _in_words(size: float) -> str:
    if size > max(RECIPES):
        return f"more than {max(RECIPES) / 1e6:g} MB"
    return f"{size / 1e3:,.0f} kB" if size < 1e6 else f"{size / 1e6:,.1f} MB"


# --- text in Hydra's grammar

FUNCTION = re.compile(r"(choice|glob|range)\(")  # of Hydra's grammar
# Digits that Hydra reads as a number, and would write otherwise: 2024_01 is 202401, 3.10 is 3.1.
NUMBER = re.compile(r"[+-]?[\d_]+(\.[\d_]*)?(e[+-]?\d+)?", re.IGNORECASE)
QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
ELEMENT = re.compile(rf"\s*({QUOTED.pattern}|[^,]*?)\s*,", re.DOTALL)  # of a list, with the comma behind it
# Text that Hydra's grammar takes without quotes. It has neither letters beyond a to z nor spaces at an end, and braces
# stand for an interpolation alone.
UNQUOTED = re.compile(r"(?!\s)(\$\{[^{}]*\}|[\w /\\+.$%*@?|:-])*(?<![\s\\])", re.ASCII)


def quoted(text: str) -> str:
    """Return text as a string of Hydra's grammar; ${key} in it is interpolated.

    >>> quoted("it's (1),a=b.txt")
    "'it\\\\'s (1),a=b.txt'"
    """
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"


def unquoted(value: str) -> str:
    """Return a value without the quotes of Hydra's grammar around it."""
    return value[1:-1] if QUOTED.fullmatch(value) else value


def for_hydra(override: str, kinds: Kinds, is_sweep: bool = False) -> str:
    """Return an override as Hydra reads it: with quotes around paths, digits and text that Hydra's grammar lacks.

    >>> for_hydra("data.path=a (1).txt", {"data.path": str}), for_hydra("seed=1", {"seed": int})
    ("data.path='a (1).txt'", 'seed=1')
    >>> for_hydra("prompts=[Größe, f(x)]", {"prompts": list[str]})
    "prompts=['Größe','f(x)']"
    """
    key, equals, value = override.partition("=")
    name = key.lstrip("+")
    kind = kinds.get(name)
    parts = {*get_args(kind)} if isinstance(kind, UnionType) else {kind}
    if dict in (get_origin(kind), get_origin(kinds.get(name.rpartition(".")[0]))):  # names with values
        return override if override.startswith(("+", "~")) else f"++{override}"  # a name may be new
    if not equals or not parts & {str, list[str]}:
        return override
    if list[str] in parts and value.startswith("[") and value.endswith("]"):
        elements = ELEMENT.findall(f"{value[1:-1]},") if value[1:-1].strip() else []
        for left, right in ("()", "[]", "{}"):
            if any(e.count(left) != e.count(right) for e in elements if not QUOTED.fullmatch(e)):
                return override  # a comma in brackets does not separate elements
        words = ("true", "false", "null")
        return f"{key}=[{','.join(quoted(e) if _needs_quotes(e, words) else e for e in elements)}]"
    is_path = name in PATHS and value != "null"
    if is_path and os.path.exists(value):  # whatever its name looks like
        return f"{key}={quoted(literal(value))}"
    if FUNCTION.match(value) or (is_sweep and value[:1] in ("'", '"')):
        return override
    values = split_values(override) if is_sweep else [value]
    booleans = [] if bool in parts else ["true", "false"]
    return f"{key}={','.join(quoted(v) if _needs_quotes(v, booleans, is_path) else v for v in values)}"


def _needs_quotes(text: str, words: Sequence[str], is_path: bool = False) -> bool:
    """Return whether text needs quotes in Hydra's grammar. `words` are read as something else than text."""
    if QUOTED.fullmatch(text):
        return False
    return is_path or text.lower() in words or bool(NUMBER.fullmatch(text)) or not UNQUOTED.fullmatch(text)


def hydra_words(args: Sequence[str], kinds: Kinds) -> list[str]:
    """Return the arguments of train for Hydra, with the recipe of the text. Raises UserError.

    >>> hydra_words(["experiment=none", "seed=1"], {"seed": int})
    ['experiment=none', 'seed=1']
    """
    if is_completion(args):
        return [*args]
    words = classify(args, kinds)
    overrides = with_text(words)
    is_sweep = bool({"-m", "--multirun"} & {*words.flags})
    lengths = {key_of(word): word for word in overrides if key_of(word) in TYPED_LENGTHS and not word.endswith("=null")}
    if len(lengths) > 1:
        raise UserError(f"{' '.join(lengths.values())}: expected one length of a run")
    if {"-c", "--cfg"} & {*words.flags} and (loaded := [word for word in overrides if _loads(word)]):
        folder = loaded[0].partition("=")[2]
        raise UserError(f"{loaded[0]}: is read after --cfg; {folder}/config.yaml has the settings of this run")
    for word in overrides:
        is_one = split_values(word) not in ([""], ["null"]) and len(split_values(word)) == 1 and "$" not in word
        if is_sweep and is_one and key_of(word) == "run_dir":
            raise UserError(f"{word}: is one directory, and a sweep needs one for each run; leave run_dir out")
    recipe = recipe_for(overrides, is_sweep)
    chosen = [f"experiment={recipe}"] if recipe else []
    return [*words.flags, *chosen, *(for_hydra(word, kinds, is_sweep) for word in overrides)]
