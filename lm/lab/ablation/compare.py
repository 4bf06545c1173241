"""The one-line comparison and the judge in Python: compare("model.dropout=0,0.2", text="my.txt").verdict"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

import pandas as pd

from lm.cli import command_line
from lm.cli.compose import compose
from lm.errors import error_prefix, require
from lm.lab.ablation.ask import compose_question, question_words, write_question
from lm.lab.ablation.question import AblateConfig
from lm.lab.ablation.results import Results
from lm.lab.ablation.warnings import report_warnings


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question of two values or more, of the first comparison where there are several."""

    verdict: str  # better, worse, equivalent or undecided
    sentence: str  # what that means, with the interval
    contrasts: pd.DataFrame  # a row for each comparison, as lm.lab.results.contrasts gives it
    folder: Path | None  # of the report, the rows and the question; None of a frame
    warnings: list[str]  # what weakens the verdict, such as rows that are left out
    rows: pd.DataFrame  # arm, seed, factor of the tuned setting, and value of every finished run that is compared

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the mean difference; None with fewer than two pairs."""
        low, high = self.contrasts[["ci_low", "ci_high"]].iloc[0]
        return None if pd.isna(low) else (float(low), float(high))


def compare(
    change: str,
    text: str | Path | None = None,
    seeds: int | Iterable[int] | None = None,
    margin: float | None = None,
    overrides: Sequence[str] = (),
    output_dir: str | Path | None = None,
    tune: bool | None = None,
) -> Answer:
    """Train every value of a setting at every seed, in pairs, and judge the others against the first.

    `change` is a setting of train with its values; `text` a file, folder, glob or address, without which the default
    text is read; `seeds` the number of seeds, by default 5, or the seeds; `margin` the smallest difference that
    matters, by default 1 % of perplexity; `overrides` are settings of train for all; `tune` scores each value at its
    own best learning rate. What is finished in the folder is not run again. Runs are made in other processes, so a
    script calls it below `if __name__ == "__main__":`. Raises UserError.
    """
    from lm import results as frames
    from lm.lab.ablation.ablate import ablate

    require(isinstance(change, str) and not isinstance(overrides, str), "compare", "a str, and a list of overrides")
    is_seeds = isinstance(seeds, int | Iterable | None) and not isinstance(seeds, str)
    require(is_seeds, f"seeds={seeds!r}", "a number of seeds, or a list of seeds")
    seeds = seeds if isinstance(seeds, int | None) else [*seeds]
    own = {"seeds": seeds, "margin": margin, "tune": tune, "output_dir": output_dir}
    typed = [change, *(f"{key}={value}" for key, value in own.items() if value is not None), *overrides]
    typed += [] if text is None else [str(text)]
    asked = compose("ablate", question_words(typed)[0], AblateConfig)
    config, runs = compose_question(asked)
    results = ablate(config, runs, command_line("ablate", *typed))
    write_question(asked.ablation, asked.overrides, results.folder)
    return _answer(results, frames.contrasts(results.folder), results.folder)


def judge(
    frame: pd.DataFrame, baseline: str | None = None, margin: float | None = None, higher: bool = False
) -> Answer:
    """Return the paired verdict of an ablation on the numbers of any program, in columns arm, seed and value.

    Other columns are not read, and rows of a seed that makes no pair are left out; a value that is not finite is a run
    that diverged. Of two arms the first is the baseline if none is named. Without a margin, in the unit of the values,
    nothing is called equivalent. `higher`: more is better. Raises UserError that names the column or the row.
    """
    from lm.lab.ablation.rows import checked_rows, judged
    from lm.lab.results import contrasts_of

    with error_prefix("frame"):
        require(isinstance(frame, pd.DataFrame), f"is a {type(frame).__name__}", "a frame of pandas")
        is_number = isinstance(margin, Real | None) and not isinstance(margin, bool)
        require(is_number, f"margin={margin!r}", "a number")
        require(isinstance(higher, bool), f"higher={higher!r}", "True or False")
        results = judged(checked_rows(frame), None if baseline is None else str(baseline), margin, higher)
    return _answer(results, contrasts_of({"": results}), None)


def _answer(results: Results, contrasts: pd.DataFrame, folder: Path | None) -> Answer:
    done, metric = results.done, results.question.metric
    rows = done[["arm", "seed", "factor", metric]].rename(columns={metric: "value"}).reset_index(drop=True)
    answer = results.answers()[0]
    told = [*map(str, report_warnings(results))]
    return Answer(answer.verdict, answer.sentence, contrasts, folder, told, rows)
