"""The report of an ablation: one text, as Markdown and as a page; its figures; its numbers for programs.

It can be written at any moment. What has no content is left out, and what can still change says so at the top.
"""

from pathlib import Path

from lm.ablation.judge.study import Contrast, Study, read_study
from lm.ablation.report.again import again_section, losses_section
from lm.ablation.report.answer import answer, basis, primary, sentences
from lm.ablation.report.arms import arms_section
from lm.ablation.report.contrasts import contrasts_section
from lm.ablation.report.curves import curves_section
from lm.ablation.report.diagnostics import diagnostics_section
from lm.ablation.report.page import page
from lm.ablation.report.record import curves_csv, report_json, results_csv
from lm.ablation.report.seeds import seeds_section
from lm.ablation.report.setting import setting_section
from lm.ablation.report.text import text_section
from lm.ablation.report.tuning import tuning_section
from lm.ablation.report.warnings import warnings_list
from lm.ablation.restore import restore
from lm.system.files import write_text


def write_report(path: Path) -> None:
    """Write report.md, report.html, report.json, results.csv, curves.csv and figures/ into an ablation's folder.

    Raises BadInput if it holds no ablation.
    """
    restore(path)
    study = read_study(path)
    contrasts = study.contrasts()
    markdown, pictures = compose(study, contrasts)
    (path / "figures").mkdir(exist_ok=True)
    for name, picture in pictures.items():
        write_text(path / "figures" / f"{name}.svg", picture)
    write_text(path / "report.md", markdown)
    write_text(path / "report.html", page(study.record["question"], markdown, pictures))
    write_text(path / "results.csv", results_csv(study))
    write_text(path / "curves.csv", curves_csv(study))
    write_text(path / "report.json", report_json(study, contrasts, sentences(study, primary(contrasts))))


def compose(study: Study, contrasts: list[Contrast]) -> tuple[str, dict[str, str]]:
    """The Markdown, and the figures it shows, by name."""
    pictures: dict[str, str] = {}
    parts = [
        *answer(study, contrasts),
        *warnings_list(study, contrasts),
        *basis(study),
        *contrasts_section(study, contrasts, pictures),
        *seeds_section(study, pictures),
        *arms_section(study),
        *curves_section(study, pictures),
        *tuning_section(study, pictures),
        *setting_section(study, contrasts, pictures),
        *diagnostics_section(study, pictures),
        *text_section(study),
        *losses_section(study),
        *again_section(study),
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    return text.encode(errors="replace").decode(), pictures  # half a surrogate pair cannot be written
