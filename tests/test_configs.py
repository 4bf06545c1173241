"""Every YAML of configs/ composes, converts to its schema, and opens with the command that uses it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import some
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from lm.training.options import resolve

from lm.cli.compose import compose as compose_words
from lm.cli.compose import convert
from lm.cli.errors import CONFIGS
from lm.cli.names import trainer_arguments
from lm.config import (
    HEADS,
    OPTIMIZERS,
    SOURCES,
    TOKENIZERS,
    EvaluateConfig,
    ExportConfig,
    GenerateConfig,
    RunConfig,
    RunsConfig,
)
from lm.config.ablation import AblateConfig, ReportConfig
from lm.config.benchmark import BenchmarkConfig

SCHEMAS = {
    "train": RunConfig,
    "generate": GenerateConfig,
    "evaluate": EvaluateConfig,
    "export": ExportConfig,
    "ablate": AblateConfig,
    "report": ReportConfig,
    "runs": RunsConfig,
    "benchmark": BenchmarkConfig,
}
NEEDED = {
    "train": [],
    "generate": ["run_dir=r"],
    "evaluate": ["run_dir=r"],
    "runs": [],
    "export": ["run_dir=r", "output_dir=o"],
    "ablate": ["ablation=smoke", "ablation.name=as-hydra-says"],
    "report": ["output_dir=o"],
    "benchmark": [],
}
FILES = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "lm_eval")  # these are lm-eval's
SHIPPED = (
    *("aa", "continue_untied", "documents", "ffn", "lora_rank", "position", "recipe"),
    *("smoke", "tying", "tying_core", "untie_when", "vocab"),
)
EXPERIMENTS = ("chars", "fineweb_edu", "shakespeare_char", "shakespeare_char_long", "tinystories", "wikitext103")
CHOICES = [path for path in FILES if path.parent.name not in (CONFIGS.name, "ablation")]
ABLATIONS = [path for path in FILES if path.parent.name == "ablation"]


def label(path: Path) -> str:
    return path.relative_to(CONFIGS).as_posix()


def composed(name: str, *overrides: str) -> Any:
    ConfigStore.instance().store(name=f"{name}_schema", node=SCHEMAS[name])
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return convert(compose(name, [*NEEDED[name], *overrides]), SCHEMAS[name], {})


def choose(path: Path) -> list[str]:
    """A group's file as a choice, with a value for each key that it leaves to the user."""
    group = path.parent.relative_to(CONFIGS).as_posix()
    missing = [key for key, value in (yaml.safe_load(path.read_text()) or {}).items() if value == "???"]
    return [f"{group}={path.stem}", *(f"{group}.{key}=some/path" for key in missing)]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("experiment/*.yaml")), ids=label)
def test_an_experiment_may_be_made_shorter(path: Path) -> None:
    run = composed("train", f"experiment={path.stem}", "trainer.max_steps=50")
    assert resolve(run)["max_steps"] == 50


@pytest.mark.parametrize("path", some(CHOICES, 3), ids=label)
def test_every_choice_composes_and_converts(path: Path) -> None:
    run = composed("train", *choose(path))
    assert isinstance(run, RunConfig)
    assert set(run.trainer) <= set(trainer_arguments())


@pytest.mark.parametrize("path", some(ABLATIONS, 4), ids=label)
def test_every_arm_of_every_ablation_composes(path: Path) -> None:
    ablation = composed("ablate", f"ablation={path.stem}").ablation
    assert ablation.question.endswith("?")
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for words in ablation.arms.values():
            compose_words("train", [*ablation.overrides, *words], RunConfig)


@pytest.mark.parametrize("path", [path for path in FILES if path.parent == CONFIGS and path.stem != "quiet"], ids=label)
def test_every_script_has_a_config_that_converts(path: Path) -> None:
    assert type(composed(path.stem)) is SCHEMAS[path.stem]
    assert (CONFIGS.parent / "scripts" / f"{path.stem}.py").is_file()


@pytest.mark.parametrize("path", sorted((CONFIGS / "data").glob("*.yaml")), ids=label)
def test_a_text_to_score_is_chosen_as_in_training(path: Path) -> None:
    assert composed("evaluate", *choose(path)).data == composed("train", *choose(path)).data


def opening(path: Path) -> str:
    return next(line for line in path.read_text().splitlines() if not line.startswith("# @package"))


def shipped(path: Path) -> bool:
    """Files in these two groups may be a user's own, which open as they like."""
    return path.parent.name not in ("ablation", "experiment") or path.stem in (*SHIPPED, *EXPERIMENTS)


@pytest.mark.parametrize("path", [path for path in FILES if path.stem != "quiet" and shipped(path)], ids=label)
def test_every_file_opens_with_the_command_that_uses_it(path: Path) -> None:
    command = opening(path)
    assert command.startswith("# ")
    assert "python scripts/" in command
    script = CONFIGS.parent / "scripts" / f"{command.partition('scripts/')[2].split('.py')[0]}.py"
    assert script.is_file()
    if path.parent != CONFIGS:
        group, default = path.parent.name, composed_default(path.parent.name)
        assert f"{group}={path.stem}" in command or path.stem == default


def composed_default(group: str) -> str | None:
    defaults = yaml.safe_load((CONFIGS / "train.yaml").read_text())["defaults"]
    return next((one[group] for one in defaults if isinstance(one, dict) and group in one), None)


@pytest.mark.parametrize("path", sorted((CONFIGS / "head").glob("*.yaml")), ids=label)
def test_a_head_is_named_as_its_file(path: Path) -> None:
    assert composed("train", f"head={path.stem}").head.name == path.stem


@pytest.mark.parametrize(
    ("group", "names"), [("data", SOURCES), ("tokenizer", TOKENIZERS), ("optim", OPTIMIZERS), ("head", HEADS)]
)
def test_every_name_of_the_schemas_has_a_config(group: str, names: tuple[str, ...]) -> None:
    assert set(names) <= {path.stem for path in (CONFIGS / group).glob("*.yaml")}


def test_every_group_can_be_chosen_in_train() -> None:
    defaults = yaml.safe_load((CONFIGS / "train.yaml").read_text())["defaults"]
    groups = {key for one in defaults if isinstance(one, dict) for key in one}
    assert {path.parent.name for path in CHOICES} <= groups


def test_a_global_choice_changes_the_trainer_and_no_more_than_it_says() -> None:
    plain, debug, overfit = composed("train"), composed("train", "trainer=debug"), composed("train", "trainer=overfit")
    assert set(plain.trainer) <= set(debug.trainer)
    assert debug.trainer["gradient_clip_val"] == plain.trainer["gradient_clip_val"]
    assert (debug.trainer["max_steps"], debug.model, debug.tokenizer) == (20, plain.model, plain.tokenizer)
    assert (overfit.data.overfit_batches, overfit.model) == (1, plain.model)
    assert composed("train", "trainer=debug", "model.d_model=32").model.d_model == 32  # the command line wins
