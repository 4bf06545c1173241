"""Trackers are told the settings of a run, its rows and its final scores."""

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lm.config import LoggerConfig, OptimConfig, WandbConfig
from lm.errors import Diverged
from lm.lab.trackers import FINAL
from lm.training.train import train
from tests.helpers.refusals import refused
from tests.helpers.runs import composed, files, kill, result, short_run
from tests.helpers.tiny import TINY_RUN


def tiny(text, folder, *overrides):
    return composed(*TINY_RUN, f"data.path={text}", f"run_dir={folder / 'run'}", *overrides)


class Tracked:
    """A run of a stand-in for wandb, which writes what it is told to a file; its `config` is itself."""

    def __init__(self, path, options):
        self.config, self.path = self, path
        self.write("init", options)

    def write(self, event, content=None):
        with open(self.path, "a") as file:
            file.write(json.dumps([event, content], default=str) + "\n")

    def update(self, params, **_):
        self.write("config", params)

    def define_metric(self, name, **options):
        self.write("metric", [name, options])

    def log(self, metrics):
        self.write("log", metrics)

    def finish(self, exit_code):
        self.write("finish", exit_code)


def use_stand_in(folder):
    """Let this process import a stand-in for wandb that tracks in this folder."""
    sys.modules["wandb"] = SimpleNamespace(init=lambda **options: Tracked(folder / "tracked", options))


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # so that what is there is put back
    use_stand_in(tmp_path)


def tracked(folder):
    """What it was told: events, and their contents."""
    return [*map(json.loads, (folder / "tracked").read_text().splitlines())]


SETTINGS = ["optim.betas=[0.8,0.9]", "validation.every=0"]


@pytest.fixture(scope="module")
def logged(text_file, tmp_path_factory):
    """The folder of a finished run with curves for TensorBoard."""
    folder = tmp_path_factory.mktemp("logged")
    train(tiny(text_file, folder, "logger=tensorboard", *SETTINGS))
    return folder


def test_tensorboard_has_curves_settings_and_final_scores(logged):
    scores, folder = result(logged / "run"), logged / "run/tensorboard"
    events = EventAccumulator(str(folder)).Reload()
    assert [point.step for point in events.Scalars("train/loss")] == list(range(1, 21))
    for name, expected in {"val/loss": scores["val_loss"], **{name: scores[name] for name in FINAL}}.items():
        *_, point = events.Scalars(name)
        assert (point.step, point.value) == (20, pytest.approx(expected))
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    fields = HParamsPluginData.FromString(content).session_start_info.hparams
    settings = {key: getattr(value, value.WhichOneof("kind")) for key, value in fields.items()}
    expected = {"model.n_layers": 2, "optim.betas": "[0.8, 0.9]", "data_hash": scores["data_hash"]}
    assert settings | expected == settings


def test_trackers_have_settings_rows_and_final_scores_but_no_secrets(wandb, text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a secret")
    words = ["logger=wandb", "logger.wandb.offline=true", "logger.wandb.project=mine"]
    words += ["head.name='https://me:a_secret@host/a.txt?a_secret'"]
    _, scores = train(tiny(text_file, tmp_path, *words))
    (_, options), *events, last = tracked(tmp_path)
    assert (options["name"], options["project"]) == ("run", "mine")
    assert last == ["finish", 0], "or the next run of a sweep would go on writing to it"
    settings = {key: value for event, content in events if event == "config" for key, value in content.items()}
    assert (settings["model.n_layers"], settings["data_hash"]) == (2, scores["data_hash"])
    logged = [content for event, content in events if event == "log"]
    assert sum("train/loss" in row for row in logged) == 20
    assert {name: logged[-1][name] for name in FINAL} == {name: scores[name] for name in FINAL}
    assert not any(b"a secret" in content for content in files(tmp_path).values())
    assert b"a_secret" not in (tmp_path / "tracked").read_bytes()


@pytest.mark.nightly
def test_a_resumed_run_is_sent_once(wandb, text_file, tmp_path):
    """By the same id, and without the steps that were sent before the kill and are made again."""
    run = tiny(text_file, tmp_path, "logger=[wandb,tensorboard]", "logger.wandb.offline=true", *SETTINGS)
    for step in (3, 13):  # before any checkpoint, and after that of step 10
        kill(run, step, partial(use_stand_in, tmp_path))
    train(run)
    starts = [options for event, options in tracked(tmp_path) if event == "init"]
    assert {(options["id"], options["resume"]) for options in starts} == {(starts[0]["id"], "allow")}
    assert len(starts) == 3
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert [point.step for point in events.Scalars("train/loss")] == list(range(1, 21))
    train(replace(run, run_dir=str(tmp_path / "again")))
    *_, last = (options for event, options in tracked(tmp_path) if event == "init")
    assert last["id"] != starts[0]["id"], "or it would be written into that of the first"


def test_a_run_that_fails_is_closed(wandb, text_file, tmp_path):
    run = short_run(text_file, tmp_path / "run", gradient_clip_val=None, optim=OptimConfig(lr=1e15, warmup_steps=0))
    with pytest.raises(Diverged):
        train(replace(run, logger=LoggerConfig(wandb=WandbConfig(offline=True))))
    assert tracked(tmp_path)[-1] == ["finish", 1]


def test_a_tracker_that_cannot_begin_costs_no_checkpoint(text_file, logged, tmp_path, monkeypatch):
    """Also with checkpoint.resume=false, which deletes them when the run begins."""
    refusal = Mock(side_effect=RuntimeError("not logged in\nsee the manual"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=refusal))
    shutil.copytree(logged, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run/result.json").unlink()
    before = files(tmp_path / "run")
    with refused(r"^logger=wandb: "):
        train(tiny(text_file, tmp_path, *SETTINGS, "logger=wandb", "checkpoint.resume=false"))
    assert files(tmp_path / "run") == before


def test_without_the_package_one_line_says_what_to_type(text_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refused(r"^logger=wandb: needs the package wandb; type pip install -e '\.\[track\]'"):
        train(tiny(text_file, tmp_path, *SETTINGS, "logger=wandb"))


@pytest.mark.slow
def test_the_real_wandb_keeps_settings_and_final_scores_on_this_machine(text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    pytest.importorskip("wandb", reason="is in the extra `track`")
    train(tiny(text_file, tmp_path, "logger=wandb", "logger.wandb.offline=true"))
    contents = [path.read_bytes() for path in (tmp_path / "run").rglob("*.wandb")]
    assert any(b"model.n_layers" in content and b"val_bpb" in content for content in contents)
