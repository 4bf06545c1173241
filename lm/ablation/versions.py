"""Earlier versions of ablation.json, read as the present one.

Version 1, which it does not say, has earlier names of settings (lm/config/renamed.py). In version 2 the verdicts that
were seen are called `looks`, which is now the name of a setting.
"""

from typing import Any

from lm.config import BadInput
from lm.config.ablation import HYPERPARAMETERS
from lm.config.renamed import KEYS, current

VERSION = 3


def current_version(found: dict[str, Any]) -> dict[str, Any]:
    """What a file of any version says, without its version. Raises BadInput for one of a later version."""
    version = found.get("version", 1)
    if version > VERSION:
        raise BadInput(f"version={version}: was written by a newer version of this program; expected {VERSION}")
    found = from_version_1(found) if version < 2 else dict(found)
    found = from_version_2(found) if version < 3 else found
    return {key: value for key, value in found.items() if key != "version"}


def from_version_1(old: dict[str, Any]) -> dict[str, Any]:
    """Some settings had earlier names."""
    found = current(old, "ablation.")
    found["plot_over"] = KEYS.get(found["plot_over"], found["plot_over"])
    found["looks"] = [current(look, "ablation.") for look in old.get("looks", [])]
    for arm in found["arms"].values():
        arm |= {key: current(arm[key]) for key in ("settings", "matched", "tuned")}
    found["searches"] = {arm: current(one, "ablation.tune.") for arm, one in old.get("searches", {}).items()}
    for search in found["searches"].values():
        search["inside"] = current(search["inside"])
        for trial in search["trials"]:
            trial |= {"values": current(trial["values"]), "score": trial.pop(found["metric"])}
    for tune in (found["tune"], *found["searches"].values()):
        tune["hyperparameters"] = [KEYS.get(key, key) for key in tune.get("hyperparameters", HYPERPARAMETERS)]
    return found


def from_version_2(old: dict[str, Any]) -> dict[str, Any]:
    return {"verdicts_seen" if key == "looks" else key: value for key, value in old.items()}
