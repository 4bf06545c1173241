"""What `--help` prints of a command."""

import re
import shlex
import sys
from collections.abc import Callable
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from omegaconf import OmegaConf

from lm.cli import program


def offer_help(task: Callable[..., Any]) -> None:
    """Let configs/quiet.yaml ask for the help text of this command; Hydra would list every folder of configs/."""
    doc = getattr(sys.modules.get(task.__module__), "__doc__", None) or ""

    def text() -> str:
        about = re.sub(r"lm-lab (\w+)", lambda found: shlex.join(program.start(found[1])), doc)
        groups = "".join(f"\n  {group}: {', '.join(choices)}" for group, choices in own_groups().items())
        listed = f"Groups, each chosen by group=name:\n{groups}\n\n" if groups else ""
        return f"{about.strip()}\n\n{listed}Settings, each changed by key=value:\n\n$CONFIG"

    OmegaConf.register_new_resolver("command_help", text, replace=True)


def own_groups() -> dict[str, list[str]]:
    """The groups that the command's own configuration names, with the choices of each, a user's included."""
    loader = GlobalHydra.instance().config_loader()
    groups = [group for group in reversed(list(HydraConfig.get().runtime.choices)) if not group.startswith("hydra/")]
    return {group: loader.get_group_options(group, ObjectType.CONFIG) for group in groups}
