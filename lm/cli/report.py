"""Write the report of an ablation, also while it is running: lm-lab report output_dir=DIR

For a folder of ablations, their comparisons side by side.
"""

from pathlib import Path

from lm.cli.imports import heavy_imports
from lm.cli.launch import launch
from lm.config import BadInput
from lm.config.ablation import ReportConfig


def task(config: ReportConfig) -> None:
    path = Path(config.output_dir).expanduser()
    if not path.is_dir():  # importing the rest takes seconds
        raise BadInput(f"output_dir={path}: no such folder; expected one that ablate wrote")
    with heavy_imports():
        from lm.ablation.report import write_report
        from lm.ablation.report.overview import folders, write_overview
        from lm.ablation.summary import overview_table, result_table

    if folders(path):
        print(overview_table(path, write_overview(path)))
    else:
        write_report(path)
        print(result_table(path))


def main(line: list[str] | None = None) -> None:
    launch(task, ReportConfig, "report", line)
