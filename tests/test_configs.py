"""Every YAML of configs/ composes, converts to its schema, and opens with the command that uses it."""

from pathlib import Path

import pytest
import yaml

from lm.cli.compose import compose
from lm.cli.evaluate import parse_arguments
from lm.cli.mistakes import CONFIGS
from lm.config import HEADS, RunConfig
from lm.config.ablation import AblateConfig
from lm.config.data import SOURCES, TOKENIZERS
from lm.config.optim import OPTIMIZERS

FILES = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "lm_eval")  # these are lm-eval's
DEFAULTS = yaml.safe_load((CONFIGS / "train.yaml").read_text())["defaults"]
GROUPS = [group for entry in DEFAULTS if isinstance(entry, dict) for group in entry]


def choices(group: str) -> list[Path]:
    return sorted((CONFIGS / group).glob("*.yaml"))


def label(path: Path) -> str:
    return path.relative_to(CONFIGS).as_posix()


def choose(path: Path) -> list[str]:
    """A group's file as a choice, with a value for each key that it leaves to the user."""
    group = path.parent.relative_to(CONFIGS).as_posix()
    missing = [key for key, value in (yaml.safe_load(path.read_text()) or {}).items() if value == "???"]
    return [f"{group}={path.stem}", *(f"{group}.{key}=some/path" for key in missing)]


def train(*overrides: str) -> RunConfig:
    return compose("train", overrides, RunConfig)


@pytest.mark.slow
@pytest.mark.parametrize("i", range(max(len(choices(group)) for group in GROUPS)))
def test_every_choice_composes(i: int) -> None:
    """The i-th of every group together; an experiment, which chooses of several groups, by itself and shorter."""
    groups = {group: choices(group) for group in GROUPS if group != "experiment"}
    paths = [files[i % len(files)] for files in groups.values()]
    run = train(*(override for path in paths for override in choose(path)))
    assert run.head.name in label(paths[GROUPS.index("head")])
    for path in choices("experiment")[i : i + 1]:
        assert train(*choose(path), "trainer.max_steps=50").steps == 50


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem != "smoke")) for path in choices("ablation")],
    ids=label,
)
def test_every_arm_of_every_ablation_composes(path: Path) -> None:
    choice = [f"ablation={path.stem}", "ablation.name=as-hydra-says"]
    ablation = compose("ablate", choice, AblateConfig).ablation
    assert ablation.question.endswith("?")
    for arm in ablation.arms.values():
        train(*ablation.overrides, *arm)


def test_a_text_to_score_is_chosen_as_in_training() -> None:
    for name in ("json", "hub"):
        words = choose(CONFIGS / f"data/{name}.yaml")
        assert parse_arguments(["run_dir=r", *words]).data == train(*words).data


def test_every_file_opens_with_the_command_that_uses_it() -> None:
    defaults = {group: choice for entry in DEFAULTS if isinstance(entry, dict) for group, choice in entry.items()}
    for path in FILES:
        if path.stem == "quiet":
            continue
        command = next(line for line in path.read_text().splitlines() if not line.startswith("# @package"))
        assert command.startswith("# "), path
        assert (CONFIGS.parent / "scripts" / f"{command.partition('scripts/')[2].split('.py')[0]}.py").is_file(), path
        if path.parent != CONFIGS:
            is_default = path.stem == defaults.get(path.parent.name)
            assert f"{path.parent.name}={path.stem}" in command or is_default, path


def test_every_name_of_the_schemas_has_a_config_and_every_group_can_be_chosen() -> None:
    for group, names in {"data": SOURCES, "tokenizer": TOKENIZERS, "optim": OPTIMIZERS, "head": HEADS}.items():
        assert {*names} <= {path.stem for path in choices(group)}
    assert {path.parent.name for path in FILES if path.parent != CONFIGS} <= {*GROUPS, "ablation"}


def test_a_global_choice_changes_no_more_than_it_says() -> None:
    plain, debug = train(), train("trainer=debug", "model.d_model=32")
    assert debug.trainer.gradient_clip_val == plain.trainer.gradient_clip_val
    assert (debug.steps, debug.tokenizer, debug.model.d_model) == (20, plain.tokenizer, 32)  # the command line wins
    overfit = train("trainer=overfit")
    assert (overfit.data.overfit_batches, overfit.model) == (1, plain.model)
