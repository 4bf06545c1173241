"""Print how far the losses in curves.csv are from the whole text: python docs/studies/tying/first_windows.py

The runs of the study scored the first 16 batches of the validation text while they trained, and after the last step
these batches and the whole text. Errors are the former minus the latter, in nats per token.
"""

import csv
from pathlib import Path
from statistics import fmean, stdev

from scipy.stats import t

HERE = Path(__file__).parent


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def errors(folder: Path) -> dict[tuple[str, str], float]:
    """Of the last loss of each reported run at equal tokens, by arm and seed."""
    last = {row["run_dir"]: float(row["val/loss"]) for row in read(folder / "curves.csv")}
    rows = [row for row in read(folder / "results.csv") if row["purpose"] == "reported"]
    rows = [row for row in rows if "tokens" in row["budgets"].split()]
    return {(row["arm"], row["seed"]): last[row["run_dir"]] - float(row["val_loss"]) for row in rows}


print("condition      error of the loss     of untied - tied: mean (95 % CI), standard deviation over seeds")
for path in sorted(HERE.glob("*/curves.csv")):
    found = errors(path.parent)
    gaps = [found["untied", seed] - found["tied", seed] for arm, seed in found if arm == "untied"]
    losses = [error for (arm, _), error in found.items() if arm in ("tied", "untied")]
    if gaps:
        mean, half = fmean(gaps), t.ppf(0.975, len(gaps) - 1) * stdev(gaps) / len(gaps) ** 0.5
        said = f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f}), {stdev(gaps):.3f}"
        print(f"{path.parent.name:14} {min(losses):+.3f} to {max(losses):+.3f}      {said}")
