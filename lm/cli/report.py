"""Write the report of an ablation, also while it is running: lm-lab report output_dir=DIR

For a folder of ablations, their comparisons side by side. lm-lab report run_dir=RUN writes a page about a single run.
"""

from dataclasses import asdict
from pathlib import Path

from lm.cli.compose import compose, parse
from lm.config import RunConfig, UserError
from lm.config.ablation import ReportConfig

SCHEMA = ReportConfig


def run(args: list[str]) -> None:
    config = parse(ReportConfig, args)
    key, command = ("run_dir", "train") if config.run_dir is not None else ("output_dir", "ablate")
    path = Path(str(config.run_dir or config.output_dir)).expanduser()
    if not path.is_dir():  # importing the rest takes seconds
        raise UserError(f"{key}={path}: no such folder; expected one that {command} wrote")
    if config.run_dir is not None and not (path / "config.yaml").exists():
        raise UserError(f"run_dir={path}: holds no config.yaml; expected the directory of a run that train wrote")
    from lm.ablation.report import write_report
    from lm.ablation.report.overview import folders, write_overview
    from lm.ablation.summary import overview_table, result_table
    from lm.runs.page import write_page

    if config.run_dir is not None:
        print(write_page(path, asdict(compose("train", [], RunConfig))))
    elif folders(path):
        print(overview_table(path, write_overview(path)))
    else:
        write_report(path)
        print(result_table(path))
