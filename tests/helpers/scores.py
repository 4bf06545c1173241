"""The scores of one run on one text, as the command evaluate computes them."""

from pathlib import Path

from lm.cli.evaluate import score_text
from lm.folder import load_model
from lm.system.device import set_threads


def evaluate_run(config):
    """Score the run of `config` on its own validation text, or on the text of `config`."""
    set_threads(config.threads)
    net, tokenizer = load_model(str(config.run_dir), config.classes or ())
    return score_text(net, tokenizer, Path(str(config.run_dir)), config.data, config, {})
