"""The report of an ablation: one text, as Markdown and as a page; its figures; its numbers for programs.

In: an ablation's folder, at any moment. Out: report.md, report.html, report.json, results.csv, curves.csv, figures/.
Imports lm.ablation.judge and the modules below it; matplotlib and scipy, not torch.
"""

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import lm
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
from lm.config.checks import about
from lm.report.page import page
from lm.system.files import hash_of, make_folder, sha256, write_text

RUNS = ("*/*.json", "*/*.where", "*/*/*.json", "*/*/*.csv")
DRAWN = (*RUNS, "*.csv", "report.*", "figures/*.svg")  # files from which a report is drawn, and its own


def write_report(path: Path) -> None:
    """Write report.md, report.html, report.json, results.csv, curves.csv and figures/ into an ablation's folder.

    Raises BadInput if it holds no ablation.
    """
    study = read_study(path)
    contrasts = study.contrasts()
    remember(path, study.record, seeds_looked_at(study, primary(contrasts)))
    markdown, pictures = compose(study, contrasts)
    with about(str(path)):
        html = page(study.record.question, markdown, pictures)
    make_folder(path / "figures")
    for name, picture in pictures.items():
        write_text(path / "figures" / f"{name}.svg", picture)
    write_text(path / "report.md", markdown)
    write_text(path / "report.html", html)
    curves, rows = curves_csv(study), results_csv(study)
    if study.outcomes.curves_csv not in study.outcomes.damaged:  # else it may be the only copy of its other rows
        write_text(study.outcomes.curves_csv, curves)
    write_text(path / "results.csv", rows)  # after the curves that it has hashes of
    said = sentences(study, asked_about(study, contrasts))
    seen = [asdict(one) for one in verdicts_seen(path, study.record)]
    write_text(path / "report.json", report_json(study, contrasts, said, seen))


def fingerprint(path: Path) -> str:
    """A hash that changes with the runs, with the report's own files and with the program that writes them."""
    files = sorted({one for pattern in DRAWN for one in path.glob(pattern)})
    found = [(str(one.relative_to(path)), one.stat().st_size, one.stat().st_mtime_ns) for one in files if one.is_file()]
    program = [sha256(one) for one in sorted(Path(lm.__file__).parent.rglob("*")) if one.suffix in (".py", ".css")]
    return hash_of([found, program, version("matplotlib")])


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
