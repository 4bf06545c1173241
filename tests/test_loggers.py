"""Loggers are told the settings of a run and its final scores, which are read back here from their files."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TEXT, TINY_RUN
from hydra import compose, initialize_config_dir
from lm.training.loggers import FINAL, loggable, with_settings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lm.cli.compose import convert, register
from lm.cli.errors import CONFIGS
from lm.config import BadInput, RunConfig
from lm.training.train import train


def trained(folder: Path, *words: str) -> dict[str, Any]:
    """The result of a tiny run with a logger of configs/logger/."""
    (folder / "corpus.txt").write_text(TEXT)
    register("train", RunConfig)
    line = [*TINY_RUN, f"data.path={folder}/corpus.txt", f"run_dir={folder}/run", *words]
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        run = convert(compose("train", line), RunConfig, {})
    return train(run)


def values(fields: Any) -> dict[str, Any]:
    return {key: getattr(value, value.WhichOneof("kind")) for key, value in fields.items()}


def test_tensorboard_has_curves_settings_and_final_scores(tmp_path: Path) -> None:
    result = trained(tmp_path, "logger=tensorboard", "optim.betas=[0.8,0.9]", "validation.every=0")
    folder = tmp_path / "run/tensorboard"
    events = EventAccumulator(str(folder)).Reload()
    assert [point.step for point in events.Scalars("train/loss")] == list(range(1, 21))
    (point,) = events.Scalars("val/loss")
    assert (point.step, point.value) == (20, pytest.approx(result["val_loss"]))
    for name in FINAL:
        *_, point = events.Scalars(name)
        assert (point.step, point.value) == (20, pytest.approx(result[name]))
    parts = {
        tag: HParamsPluginData.FromString(content) for tag, content in events.PluginTagToContent("hparams").items()
    }
    settings = values(parts["_hparams_/session_start_info"].session_start_info.hparams)
    assert settings["optim.lr"] > 0
    assert (settings["model.n_layers"], settings["head.name"]) == (2, "tied")
    assert settings["optim.betas"] == "[0.8, 0.9]"
    assert settings["data_hash"] == result["data_hash"]
    metrics = parts["_hparams_/experiment"].experiment.metric_infos
    assert {one.name.tag for one in metrics} == set(FINAL)
    written = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert written["model.d_ff"] == 64
    assert not [key for key in written if key.startswith("logger.")]


def test_the_settings_of_loggers_are_kept_from_them() -> None:
    settings = {"seed": 0, "logger": {"mine": {"password": "secret"}}, "model": {"n_layers": 2}}
    assert loggable(settings) == {"seed": 0, "model.n_layers": 2}


def test_a_logger_that_cannot_begin_is_bad_input() -> None:
    class Refuses:
        def log_hyperparams(self, settings: dict[str, Any]) -> None:
            raise RuntimeError("not logged in\nsee the manual")

    with pytest.raises(BadInput, match=r"^logger: Refuses: not logged in$"), with_settings([Refuses()], {}):
        pass


# --- Weights & Biases, whose file is a log of records as LevelDB's, in blocks of 32 KiB


def records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 0x8000 - at % 0x8000 < 7:  # no room for a header: padding
            at += 0x8000 - at % 0x8000
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def test_weights_and_biases_has_settings_and_final_scores_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is in the extra `track`")
    monkeypatch.setenv("WANDB_SILENT", "true")
    result = trained(tmp_path, "logger=wandb", "+logger.wandb.offline=true")
    assert wandb.run is None, "the next run of a sweep would go on writing to it"
    (path,) = tmp_path.glob("run/wandb/offline-*/run-*.wandb")
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for record in records(path):
        for items, found in ((record.config.update, config), (record.run.config.update, config)):
            found.update({one.key: json.loads(one.value_json) for one in items})
        summary.update({one.key: json.loads(one.value_json) for one in record.summary.update})
        summary.update({one.key or one.nested_key[0]: json.loads(one.value_json) for one in record.history.item})
    assert (config["model.n_layers"], config["head.name"]) == (2, "tied")
    assert config["data_hash"] == result["data_hash"]
    assert {name: summary[name] for name in FINAL} == pytest.approx({name: result[name] for name in FINAL})


def test_the_documentation_names_the_loggers() -> None:
    said = (ROOT / "docs/runs.md").read_text()
    assert all(f"logger={path.stem}" in said for path in (CONFIGS / "logger").glob("*.yaml") if path.stem != "none")
