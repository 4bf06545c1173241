"""Write the report of an ablation, also while it is running: python scripts/report.py output_dir=DIR

For a folder of ablations, what they say side by side.
"""

from pathlib import Path

from lm.cli.imports import heavy_imports
from lm.cli.launch import launch
from lm.config import BadInput
from lm.config.ablation import ReportConfig


def main(config: ReportConfig) -> None:
    path = Path(config.output_dir).expanduser()
    if not path.is_dir():  # importing the rest takes seconds
        raise BadInput(f"output_dir={path}: no such folder; expected one that ablate.py wrote")
    with heavy_imports():
        from lm.ablation.report import write_report
        from lm.ablation.report.overview import folders, write_overview
        from lm.ablation.summary import result_table

    if folders(path):
        write_overview(path)
        print((path / "overview.md").read_text(), end="")
    else:
        write_report(path)
        print(result_table(path))


if __name__ == "__main__":
    launch(main, ReportConfig, "report")
