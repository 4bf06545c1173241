"""Draw figures/length.svg and print the numbers that tying.md quotes: python docs/studies/tying/length.py"""

import csv
from pathlib import Path
from statistics import correlation, fmean, stdev

import matplotlib
from matplotlib.figure import Figure
from scipy.stats import t

HERE = Path(__file__).parent
LINES = {  # label: arm, conditions by length, colour, marker and line, horizontal shift in the figure
    "Muon, equal tokens": ("untied", ["main", "longer_tuned"], "#0072b2", "o-", 0.975),
    "Muon, equal parameters": ("untied_matched", ["main", "longer_tuned"], "#56a0d3", "s--", 1.025),
    "AdamW, equal tokens": ("untied", ["adamw", "adamw_longer"], "#c44e00", "^-", 0.975),
    "AdamW, equal parameters": ("untied_matched", ["adamw"], "#e08a4a", "v--", 1.025),
}


def differences(condition: str, arm: str) -> tuple[int, dict[str, float]]:
    """Training tokens, and for each seed the loss of `arm` minus that of tied, of the reported runs at equal tokens."""
    with open(HERE / condition / "results.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["purpose"] == "reported" and "tokens" in row["budgets"]]
    loss = {(row["arm"], row["seed"]): float(row["val_loss"]) for row in rows}
    seeds = [row["seed"] for row in rows if row["arm"] == arm]
    tokens = next(int(row["tokens"]) for row in rows if row["arm"] == arm)
    return tokens, {seed: loss[arm, seed] - loss["tied", seed] for seed in seeds}


def interval(*groups: list[float]) -> tuple[float, float, float]:
    """The sum of the means of independent groups and its 95 % t interval (Welch's, if there are several)."""
    parts = [(stdev(values) ** 2 / len(values), len(values) - 1) for values in groups]
    total = sum(variance for variance, _ in parts)
    freedom = total**2 / sum(variance**2 / count for variance, count in parts)
    mean, half = sum(map(fmean, groups)), t.ppf(0.975, freedom) * total**0.5
    return mean, mean - half, mean + half


def crossing(arm: str, short: str, long: str) -> None:
    """The length at which the difference is zero, if it is linear in log tokens between the two conditions.

    The 95 % interval holds each length at which the interpolated difference does not differ from zero.
    """
    (start, one), (end, other) = differences(short, arm), differences(long, arm)
    pairs = [(one[seed], other[seed]) for seed in one.keys() & other.keys()]
    for name in ("all seeds, conditions independent", "shared seeds, paired"):
        grid = []
        for p in (step / 5000 for step in range(1, 5000)):
            groups = [[(1 - p) * value for value in one.values()], [p * value for value in other.values()]]
            grid.append((p, *interval(*groups if "all" in name else [[(1 - p) * a + p * b for a, b in pairs]])))
        inside = [p for p, _, low, high in grid if low <= 0 <= high]
        at = [start * (end / start) ** p for p in (min(grid, key=lambda row: abs(row[1]))[0], inside[0], inside[-1])]
        text = "{:.2f} M tokens (95 % CI {:.2f} to {:.2f})".format(*(tokens / 1e6 for tokens in at))
        print(f"{arm} - tied is zero at {at[0] / 1024:.0f} steps, {text}: {name}")
    print(f"  correlation of the two differences over the shared seeds: {correlation(*zip(*pairs, strict=True)):.2f}")


matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "length", "font.size": 11}
figure = Figure(figsize=(5.4, 4.0), layout="constrained")
axes = figure.subplots()
for label, (arm, conditions, colour, style, shift) in LINES.items():
    points = []
    for condition in conditions:
        tokens, values = differences(condition, arm)
        mean, low, high = interval(list(values.values()))
        points.append((tokens / 1e6 * shift, mean, mean - low))
        text = f"{mean:+.4f} (95 % CI {low:+.4f} to {high:+.4f})"
        print(f"{label:24} {condition:13} {tokens / 1e6:.2f} M tokens, {len(values)} seeds: {text}")
    axes.errorbar(*zip(*points, strict=True), fmt=style, color=colour, capsize=3, label=label)
axes.axhline(0, color="black", linewidth=1)
for text, height in (("tied is better", 0.005), ("untied is better", -0.013)):
    axes.text(0.345, height, text, style="italic")
axes.set(xscale="log", xlim=(0.33, 2.0), ylim=(-0.145, 0.145), xlabel="training tokens, millions")
axes.set_ylabel("untied minus tied, nats per token")
axes.set_xticks([0.4096, 0.8192, 1.6384], ["0.41", "0.82", "1.64"])
axes.set_xticks([], minor=True)
axes.legend(loc="upper left", frameon=False, fontsize=10)
figure.savefig(HERE / "figures/length.svg", metadata={"Date": None})
for arm in ("untied", "untied_matched"):
    crossing(arm, "main", "longer_tuned")
