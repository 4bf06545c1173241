"""The report of an ablation: one text, as Markdown and as a page; its figures; its numbers for programs.

In: an ablation's folder, at any moment. Out: report.md, report.html, report.json, results.csv, curves.csv, figures/.
Imports lm.ablation.judge and the modules below it; matplotlib and scipy, not torch.
"""

from dataclasses import asdict
from pathlib import Path

from lm.ablation.judge.contrasts import Contrast
from lm.ablation.judge.looks import seeds_looked_at
from lm.ablation.judge.study import Study, read_study
from lm.ablation.report.again import again_section, losses_section
from lm.ablation.report.answer import answer, asked_about, basis, primary, sentences
from lm.ablation.report.arms import arms_section
from lm.ablation.report.contrasts import contrasts_section
from lm.ablation.report.curves import curves_section
from lm.ablation.report.diagnostics import diagnostics_section
from lm.ablation.report.numbers import curves_csv, report_json, results_csv
from lm.ablation.report.seeds import seeds_section
from lm.ablation.report.setting import setting_section
from lm.ablation.report.text import text_section
from lm.ablation.report.tuning import tuning_section
from lm.ablation.report.warnings import warnings_list
from lm.ablation.seen import remember, verdicts_seen
from lm.report.page import page
from lm.system.files import write_text


def write_report(path: Path) -> None:
    """Write report.md, report.html, report.json, results.csv, curves.csv and figures/ into an ablation's folder.

    Raises UserError if it holds no ablation.
    """
    study = read_study(path)
    contrasts = study.contrasts()
    remember(path, study.record, seeds_looked_at(study, primary(contrasts)))
    markdown, pictures = compose(study, contrasts)
    curves, rows = curves_csv(study), results_csv(study)
    (path / "figures").mkdir(exist_ok=True)
    for name, picture in pictures.items():
        write_text(path / "figures" / f"{name}.svg", picture)
    write_text(path / "report.md", markdown)
    write_text(path / "report.html", page(study.record.question, markdown, pictures))
    write_text(path / "curves.csv", curves)
    write_text(path / "results.csv", rows)
    said = sentences(study, asked_about(study, contrasts))
    seen = [asdict(one) for one in verdicts_seen(path, study.record)]
    write_text(path / "report.json", report_json(study, contrasts, said, seen))


def compose(study: Study, contrasts: list[Contrast]) -> tuple[str, dict[str, str]]:
    """The Markdown, and the figures it shows, by name."""
    pictures: dict[str, str] = {}
    parts = [
        *answer(study, contrasts),
        *warnings_list(study, contrasts),
        *basis(study, contrasts),
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
