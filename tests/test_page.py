"""The page about a single run, and the samples that are taken during its training."""

import json
from dataclasses import replace

import pytest
from conftest import TINY_RUN

from lm.lab.commands import report
from lm.training.train import train
from tests.helpers.ablation_folder import Page
from tests.helpers.runs import composed

PROMPTS = ["def f0(x", "</code><script>alert(1)</script>"]
OPTIONS = ["trainer.max_steps=8", "validation.every=4", "checkpoint.every=4", "model.dropout=0.1"]


@pytest.mark.slow
def test_the_page_of_a_run(text_file, tmp_path, capsys):
    """It was asked to continue two prompts."""
    run = composed(*TINY_RUN, *OPTIONS, f"data.path={text_file}", f"run_dir={tmp_path}/a <b>run_*x*")
    run_dir, result = train(replace(run, prompts=PROMPTS))
    odd = {"prompt": "\x1b[31m\udc80", "continuation": "\x00"}
    kept = {"step": 4, "val_loss": result["val_loss"], "last_val_loss": 9.5}
    (run_dir / "result.json").write_text(json.dumps(result | {"samples": [*result["samples"], odd], "best": kept}))
    report.run([f"run_dir={run_dir}"])
    assert capsys.readouterr().out == f"{run_dir}/report.html: finished\n"
    page = Page(run_dir)
    assert not {"script", "b", "link", "img", "iframe"} & {*page.tags}
    assert page.tags.count("svg") == 1
    assert all(address.startswith("#") for address in page.addresses)
    assert page.headings[0] == run_dir.name
    for words in (
        f"{result['val_loss']:.4f} nats per token",
        f"n-gram {result['baselines_bpb']['ngram']:.3f}",
        *(f"{count:,}" for count in result["n_params_by_role"].values()),
        *("after 4 steps", "after the last step", *PROMPTS, r"\x1b[31m\udc80"),
        f"python -m lm generate 'run_dir={run_dir}'",
        result["data_hash"][:16],
        *("step 4, the best that was validated; 9.5000 after the last step", "step 4, kept"),
    ):
        assert words in page.text
    (settings,) = (table for table in page.tables if table[0] == ["setting", "value", "default"])
    assert ["model.d_model", "32", "128"] in settings
    assert {"model.n_heads", "optim.betas"}.isdisjoint({row[0] for row in settings}), "they have their defaults"
    (run_dir / "result.json").unlink()
    with open(run_dir / "samples.jsonl", "ab") as file:
        file.write(b'{"step": 8, "tok')  # as while it is written
    report.run([f"run_dir={run_dir}"])
    page = Page(run_dir)
    assert "unfinished: step 8 of 8" in page.text
    assert f"python -m lm train 'run_dir={run_dir}'" in page.text
    assert "after 4 steps" in page.text
    assert "svg" in page.tags
    assert "How it was made" not in page.headings
