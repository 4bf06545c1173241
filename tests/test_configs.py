"""Every YAML of configs/ composes, converts to its schema, and opens with the command that uses it."""

from pathlib import Path

import pytest
import yaml
from conftest import some

from lm.cli.compose import compose
from lm.cli.evaluate import parse_arguments
from lm.cli.mistakes import CONFIGS
from lm.config import HEADS, OPTIMIZERS, SOURCES, TOKENIZERS, RunConfig
from lm.config.ablation import AblateConfig

FILES = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "lm_eval")  # these are lm-eval's
CHOICES = [path for path in FILES if path.parent.name not in (CONFIGS.name, "ablation")]
DEFAULTS = yaml.safe_load((CONFIGS / "train.yaml").read_text())["defaults"]


def label(path: Path) -> str:
    return path.relative_to(CONFIGS).as_posix()


def choose(path: Path) -> list[str]:
    """A group's file as a choice, with a value for each key that it leaves to the user."""
    group = path.parent.relative_to(CONFIGS).as_posix()
    missing = [key for key, value in (yaml.safe_load(path.read_text()) or {}).items() if value == "???"]
    return [f"{group}={path.stem}", *(f"{group}.{key}=some/path" for key in missing)]


def train(*overrides: str) -> RunConfig:
    return compose("train", overrides, RunConfig)


@pytest.mark.parametrize("path", some(CHOICES, 3), ids=label)
def test_every_choice_composes(path: Path) -> None:
    assert isinstance(train(*choose(path)), RunConfig)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("experiment/*.yaml")), ids=label)
def test_an_experiment_may_be_made_shorter(path: Path) -> None:
    assert train(f"experiment={path.stem}", "trainer.max_steps=50").steps == 50


@pytest.mark.parametrize("path", some(sorted(CONFIGS.glob("ablation/*.yaml")), 4), ids=label)
def test_every_arm_of_every_ablation_composes(path: Path) -> None:
    choice = [f"ablation={path.stem}", "ablation.name=as-hydra-says"]
    ablation = compose("ablate", choice, AblateConfig).ablation
    assert ablation.question.endswith("?")
    for arm in ablation.arms.values():
        train(*ablation.overrides, *arm)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("data/*.yaml")), ids=label)
def test_a_text_to_score_is_chosen_as_in_training(path: Path) -> None:
    assert parse_arguments(["run_dir=r", *choose(path)]).data == train(*choose(path)).data


@pytest.mark.parametrize("path", [path for path in FILES if path.stem != "quiet"], ids=label)
def test_every_file_opens_with_the_command_that_uses_it(path: Path) -> None:
    command = next(line for line in path.read_text().splitlines() if not line.startswith("# @package"))
    assert command.startswith("# ")
    assert (CONFIGS.parent / "scripts" / f"{command.partition('scripts/')[2].split('.py')[0]}.py").is_file()
    defaults = {group: choice for entry in DEFAULTS if isinstance(entry, dict) for group, choice in entry.items()}
    if path.parent != CONFIGS:
        assert f"{path.parent.name}={path.stem}" in command or path.stem == defaults.get(path.parent.name)


@pytest.mark.parametrize(
    ("group", "names"), [("data", SOURCES), ("tokenizer", TOKENIZERS), ("optim", OPTIMIZERS), ("head", HEADS)]
)
def test_every_name_of_the_schemas_has_a_config(group: str, names: tuple[str, ...]) -> None:
    assert set(names) <= {path.stem for path in (CONFIGS / group).glob("*.yaml")}


def test_every_group_can_be_chosen_in_train() -> None:
    groups = {group for entry in DEFAULTS if isinstance(entry, dict) for group in entry}
    assert {path.parent.name for path in CHOICES} <= groups


def test_a_global_choice_changes_no_more_than_it_says() -> None:
    plain, debug, overfit = train(), train("trainer=debug"), train("trainer=overfit")
    assert debug.trainer.gradient_clip_val == plain.trainer.gradient_clip_val
    assert (debug.steps, debug.model, debug.tokenizer) == (20, plain.model, plain.tokenizer)
    assert (overfit.data.overfit_batches, overfit.model) == (1, plain.model)
    assert train("trainer=debug", "model.d_model=32").model.d_model == 32  # the command line wins
