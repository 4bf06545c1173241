"""Write the report of an ablation, also while it is running: lm-lab report output_dir=DIR

lm-lab report run_dir=RUN writes a page about a single run.
lm-lab report rows=FILE.csv baseline=ARM margin=M judges the numbers of any program, in columns arm, seed and value.
json=true prints one JSON object with the verdicts of an ablation or of rows, and nothing else, on standard output.
"""

import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lm.cli import started_by
from lm.cli.arguments import parse, split_words, with_folders
from lm.cli.compose import compose
from lm.config import RunConfig
from lm.errors import UserError, error_prefix
from lm.lab.ablation.question import ReportConfig
from lm.system.files import is_run

if TYPE_CHECKING:
    from lm.lab.ablation.results import Results

SCHEMA = ReportConfig
VERDICT_CODES = {"better": 0, "worse": 10, "equivalent": 11, "undecided": 12}


def run(args: list[str]) -> int:
    words, settings = split_words(args, ReportConfig)
    key = "run_dir" if words and is_run(Path(words[0])) else "output_dir"
    config = parse(ReportConfig, with_folders(words, settings, key))
    if config.run_dir is not None:
        from lm.lab.runs.page import write_page

        print(write_page(Path(config.run_dir), asdict(compose("train", [], RunConfig))))
        return 0
    from lm.lab.ablation.report import write_report
    from lm.lab.ablation.results import read_results

    results = read_results(Path(str(config.output_dir))) if config.rows is None else _judged(config)
    code = verdict_code(results) if config.exit_code == "verdict" else 0
    if config.output_dir is not None:
        write_report(results)
    print_results(results, config.json)
    return code


def _judged(config: ReportConfig) -> "Results":
    from lm.lab.ablation.rows import judged, own_folder, read_rows

    path, command = Path(str(config.rows)), shlex.join([*started_by(), *sys.argv[1:]])
    rows = read_rows(path)
    with error_prefix(str(path)):
        folder = own_folder(Path(config.output_dir)) if config.output_dir else Path(os.devnull)
        return judged(rows, config.baseline, config.margin, config.higher, command, folder)


def print_results(results: "Results", as_json: bool) -> None:
    """Print the results of an ablation as a table with sentences, or as the content of report.json."""
    from lm.lab.ablation.report import describe, result_table

    print(json.dumps(describe(results), allow_nan=False) if as_json else result_table(results))


def verdict_code(results: "Results") -> int:
    """Return the exit code for the verdict of the one primary comparison, or 1 if runs of the ablation have no result.

    Raises UserError if there are several comparisons.
    """
    contrasts = [contrast for contrast in results.contrasts if contrast.primary]
    if len(contrasts) != 1:
        raise UserError(f"exit_code=verdict: expected one primary comparison, found {len(contrasts)}")
    return VERDICT_CODES[contrasts[0].verdict] if results.is_whole() else 1
