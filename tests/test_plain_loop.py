"""The twin of the loop in docs/ is the default run, bit for bit."""

import runpy
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from lm import load_model
from lm.data.tokens import prepare
from lm.training.train import train
from tests.helpers.runs import composed, losses

PLAIN_LOOP = ROOT / "docs/plain_loop.py"
WORDS = ["experiment=none", "data=text", "trainer=cpu", "trainer.precision=32-true", "threads=1", "loss=plain"]
WORDS += ["trainer.max_steps=8", "trainer.log_every_n_steps=1", "validation.every=0", "prompts=[]"]


@pytest.mark.slow
def test_the_plain_loop_makes_the_losses_and_weights_of_the_default_run(text_file, tmp_path):
    run = composed(*WORDS, f"data.path={text_file}", f"run_dir={tmp_path / 'run'}", "tokenizer.vocab_size=300")
    path, result = train(run)
    data = prepare(run.data, run.tokenizer)
    twin = runpy.run_path(str(PLAIN_LOOP))
    net, of_steps = twin["train"](data, 8)
    assert of_steps == losses(path)
    expected = load_model(path)[0].state_dict()
    assert net.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in net.state_dict().items())
    val = torch.from_numpy(data.val.astype("int64"))
    assert abs(twin["score"](net, val) - result["val_loss"]) < 1e-5


@pytest.mark.nightly
def test_the_plain_loop_is_a_command_without_lightning_and_hydra():
    script = f"import runpy, sys; sys.argv[1:] = ['{ROOT}/lm/lab/ablation', '1']"
    script += f"; runpy.run_path('{PLAIN_LOOP}', run_name='__main__')"
    script += "; assert not {'lightning_fabric', 'hydra'} & sys.modules.keys()"
    answer = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (answer.returncode, "bits per byte" in answer.stdout) == (0, True), answer.stderr
