"""Score a model: lm-lab evaluate run_dir=RUN [data=text data.path=FILE]

Without data, on the validation text of the run; with it, on all of the given text, in windows as long as the model's
context. document_mask=true scores each document without those before it, document_mask=false with them; the default is
as in training. The table goes to standard error, the same numbers as JSON to standard output.
"""

import json
import sys

from lm.cli.imports import heavy_imports
from lm.cli.launch import launch
from lm.config import EvaluateConfig
from lm.exchange.find_model import model_folder
from lm.system.table import format_table


def task(config: EvaluateConfig) -> None:
    model_folder(config.run_dir)  # raises BadInput before the slow imports below
    with heavy_imports():
        from lm.inference.evaluate import evaluate_run

    scores = evaluate_run(config, bar=sys.stderr.isatty())
    rows = [(name, f"{value:,.4f}" if isinstance(value, float) else str(value)) for name, value in scores.items()]
    print(format_table(rows), file=sys.stderr)
    print(json.dumps(scores))


def main(line: list[str] | None = None) -> None:
    launch(task, EvaluateConfig, "evaluate", line)
