"""The model card of an exported folder, read back by huggingface_hub, and its example, which runs."""

import re
from pathlib import Path

import pytest
from conftest import HEADS, SEQ, TEXT, TINY_RUN, tiny
from huggingface_hub import ModelCard

from lm.cli import export
from lm.cli.compose import compose
from lm.config import RunConfig
from lm.formats.card import write_card
from lm.model.transformer import Transformer
from lm.training.train import train


def exported(run_dir: str, output_dir: str) -> str:
    export.run([f"run_dir={run_dir}", f"output_dir={output_dir}"])
    return Path(output_dir, "README.md").read_text()


def test_the_card_says_what_the_run_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run on a text whose name is Markdown and HTML; of what has no result or no settings it says less."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a_*text*<b>|.txt"
    path.write_text(TEXT)
    run = train(compose("train", [*TINY_RUN, "run_dir=run", f"data.path={path}"], RunConfig))[1]
    text = exported("run", "out")
    data = ModelCard(text).data
    scores = {result.metric_type: result.metric_value for result in data.eval_results or []}
    assert scores == {"loss": run["val_loss"], "bits_per_byte": run["val_bpb"], "accuracy": run["val_top1"]}
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", "text-generation", None)
    assert f"On {run['val_tokens']:,} tokens ({run['val_bytes']:,} bytes) of text that was held out" in text
    assert f"| tokens of the text | {run['train_text_tokens']:,} |" in text
    assert f"{run['n_params']:,} parameters" in text
    assert run["data_hash"] in text
    assert f"| precision | {run['precision']} |" in text
    assert r"| text | a\_\*text\*\<b\>\|.txt |" in text, "names are no markup"
    assert "\nmodel.d_model=32\n" in text
    assert str(tmp_path) not in text, "the folders of this machine are nobody's business"
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    capsys.readouterr()
    exec(example, {})
    assert capsys.readouterr().out.startswith("Once")

    Path("run/result.json").unlink()
    unfinished = exported("run", "unfinished")
    assert "| text |" in unfinished
    assert "## Training" in unfinished
    assert "## Scores" not in unfinished
    alone = exported("out", "again")
    assert "model-index" not in alone
    assert "## Training" not in alone


def test_settings_of_a_stranger_have_a_card(tmp_path: Path) -> None:
    net = Transformer(tiny(), HEADS["tied"], vocab_size=257, seq_len=SEQ)
    write_card(tmp_path, net, {"data": {"source": "hub"}, "base": {"sha256": 5}, "data_hash": ["x"]}, {})
    assert "the weights of `None (5)`" in (tmp_path / "README.md").read_text()
