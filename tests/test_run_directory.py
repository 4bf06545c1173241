"""Whose folder a run directory is, and which code made a run."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from conftest import TEXT, TINY_RUN

from lm.config import OptimConfig
from lm.errors import UserError
from lm.folder import load_model
from lm.system.files import is_run
from lm.training.train import train
from tests.helpers.models import weights
from tests.helpers.runs import change, composed, files, result, short_run, small_run, stop


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "baseURL: https://x/\ntitle: My site\n"),
        ("config.yaml", "model: {n_layers: 3}\ndata: {path: a}\n"),
        ("notes.txt", "mine"),
    ],
)
def test_what_lies_in_the_place_of_the_directory_is_refused_and_never_touched(name, content, tmp_path, monkeypatch):
    """A folder of another program or of a person, and the text itself."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    Path("my.txt").write_text(TEXT)
    before = files(tmp_path)
    for run_dir in (".", "my.txt"):
        with pytest.raises(UserError, match=f"^run_dir={run_dir}: "):
            train(composed("data=text", "data.path=my.txt", "tokenizer=byte", f"run_dir={run_dir}"))
    assert files(tmp_path) == before
    assert not is_run(tmp_path)


def test_a_run_says_which_code_made_it_and_other_code_does_not_continue_it(text_file, tmp_path, monkeypatch, caplog):
    run = short_run(text_file, tmp_path / "run")
    stop(run, 12)
    code = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["code"]
    other = {"version": "9.9.9", "hash": "0" * 64}
    monkeypatch.setattr("lm.training.run_directory.code_identity", lambda: other)
    with pytest.raises(UserError, match=r"was begun by other code.*checkpoint\.resume=false.*other_code=true"):
        train(run)
    train(replace(run, other_code=True))
    assert result(tmp_path / "run")["code"] == other != code
    monkeypatch.undo()
    assert train(run)[1]["code"] == other
    assert "was made by other code (version 9.9.9)" in caplog.text


CLASS = """
import torch
from torch import nn
from lm import Linear

from factor_of_mine import FACTOR

class Own(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj = Linear(config.d_model, config.d_ff)
        self.down_proj = Linear(config.d_ff, config.d_model)
        self.register_buffer("n", torch.tensor(0))
        self.register_buffer("one", torch.tensor(1.0), persistent=False)

    def forward(self, x):
        self.n += self.training
        return FACTOR * self.one * self.down_proj(self.up_proj(x).relu())
"""


def test_a_class_of_the_user_is_averaged_and_is_code(text_file, tmp_path, monkeypatch):
    """Its counter is that of the trained model, its tensors may lie in no file, its code is hashed."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "counts_of_mine.py").write_text(CLASS)
    (tmp_path / "factor_of_mine.py").write_text("FACTOR = 1.0\n")
    run = short_run(text_file, tmp_path / "run", max_steps=6, optim=OptimConfig(ema=0.5, warmup_steps=2))
    run = replace(run, model=replace(run.model, ffn="counts_of_mine.Own"))
    train(run)
    assert weights(tmp_path / "run")["blocks.0.ffn.n"] == 6
    stopped = replace(run, run_dir=str(tmp_path / "stopped"))
    stop(stopped, 3)
    (tmp_path / "factor_of_mine.py").write_text("FACTOR = 2.0\n")  # which the class imports
    with pytest.raises(UserError, match=r"was begun by another version of counts_of_mine\.Own"):
        train(stopped)
    (tmp_path / "counts_of_mine.py").unlink()
    monkeypatch.delitem(sys.modules, "counts_of_mine")
    assert train(run)[1]["steps"] == 6, "a finished run is shown without its class"


def test_the_defaults_of_torch_that_a_notebook_has_set_change_no_run_and_no_model(text_file, tmp_path):
    run, losses = short_run(text_file, tmp_path / "run", max_steps=2), []
    for dtype, records in ((torch.float32, True), (torch.float64, False)):
        torch.set_default_dtype(dtype)
        try:
            with torch.set_grad_enabled(records):
                folder, scores = train(replace(run, run_dir=str(tmp_path / f"{dtype}")))
                net, _ = load_model(folder)
            assert torch.get_default_dtype() == dtype
        finally:
            torch.set_default_dtype(torch.float32)
        assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}
        losses.append(scores["val_loss"])
    assert losses[0] == losses[1]


def test_settings_of_python_are_checked_as_those_of_a_file_are(text_file, tmp_path):
    run = small_run(text_file, tmp_path / "run")
    for wrong, key in (({"max_steps": 2.5}, "trainer.max_steps"), ({"prompts": "Once"}, "prompts")):
        with pytest.raises(UserError, match=f"^{key}: "):
            train(change(run, **wrong))
    run = change(run, optim=replace(run.optim, betas=(0.9, 0.95)), max_steps=2)
    assert train(run) == train(run), "a tuple is a list"


def test_a_run_in_the_folder_of_its_text_is_no_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(TEXT)
    words = [*TINY_RUN, "data.path=.", "data.cache_dir=cache/.x"]
    first = train(composed(*words, "run_dir=runs/a"))
    assert train(composed(*words, "run_dir=runs/a")) == first
    assert train(composed(*words, "run_dir=runs/b"))[1]["data_hash"] == first[1]["data_hash"]


def test_what_was_decided_before_the_first_checkpoint_stays_and_what_was_left_goes(text_file, tmp_path, monkeypatch):
    """A run of minutes that is killed at once keeps its number of steps; the model of another attempt does not stay."""
    run = short_run(text_file, tmp_path / "run", max_minutes=0.02)
    for seconds in (0.1, 0.2):
        monkeypatch.setattr("lm.training.resolve.seconds_per_step", lambda run, data, seconds=seconds: seconds)
        with monkeypatch.context() as patch:
            patch.setattr("lm.training.train.fit", Mock(side_effect=RuntimeError("a power failure")))
            with pytest.raises(RuntimeError, match="a power failure"):
                train(run)
        assert not (tmp_path / "run/model").exists()
        (tmp_path / "run/model").mkdir()
        (tmp_path / "run/model/model.safetensors").touch()
    assert train(run)[1]["steps"] == 12


def test_a_tokenizer_file_is_kept_with_a_run_that_stopped(finished_run, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(finished_run / "model/tokenizer.json", "own.json")
    tokenizer = ["tokenizer=file", "tokenizer.path=own.json"]
    words = [word for word in TINY_RUN if not word.startswith("tokenizer")]
    stop(composed(*words, *tokenizer, f"data.path={text_file}", "run_dir=run"), 6)
    Path("own.json").unlink()
    assert train(composed("run_dir=run"))[1]["resumed_from"] == [6]
