"""What diagnostics.csv adds, where runs have one: loss by frequency of the target, gradients by side, row norms."""

from collections.abc import Iterable
from statistics import fmean

from matplotlib.figure import Figure

from lm.ablation.judge.statistics import interval
from lm.ablation.judge.study import Study
from lm.ablation.report.curves import by_seed, draw_curve, mean_curves
from lm.ablation.report.page import plain, table
from lm.ablation.report.plots import beyond, drawing, legend, log_axis, looks, panels, tokens_axis, window

FILE = "diagnostics.csv"
BANDS = tuple(f"band{i}" for i in range(1, 6))
SIDES = {
    "lookup_grad": "gradient norm, lookup side",
    "head_grad": "gradient norm, head side",
    "cosine": "cosine between the two",
}
Intervals = list[tuple[float, float, float]]  # mean, low, high of each band


def diagnostics_section(study: Study, pictures: dict[str, str]) -> list[str]:
    arms = list(mean_curves(study, FILE, "clip_rate"))
    if not arms:
        return []
    pictures["gradients"] = gradients(study)
    head = [f"{side}, {band}" for side in ("table", "head") for band in BANDS]
    rows = [[plain(arm), clip_rate(study, arm), *norms(study, arm)] for arm in arms]
    return [
        "## Inside the training",
        *bands_part(study, pictures),
        "### Gradients of the table, by side",
        "What reaches the embedding table through the lookup, what reaches the matrix that scores, and the cosine of "
        "the angle between them: mean over seeds, shaded from the least to the most of them.",
        "![Gradient norms and their cosine over training](figures/gradients.svg)",
        "### Row norms at the end, and clipping",
        table(["arm", "clipped steps", *head], rows),
        "Mean norm of the rows that are looked up (table) and of those that score (head), by how frequent their tokens "
        "are in the training text; means over seeds. Clipped steps: those whose gradient was cut, over the whole run.",
    ]


def last(study: Study, arm: str, column: str) -> dict[int, float]:
    """The last value of a column of each seed's run."""
    curves = by_seed(study, arm, FILE, column)
    return {seed: curve[max(curve)] for seed, curve in curves.items() if curve}


def norms(study: Study, arm: str) -> list[str]:
    found = [last(study, arm, f"{side}_norm/{band}").values() for side in ("table", "head") for band in BANDS]
    return [f"{fmean(values):.3g}" if values else "-" for values in found]


def clip_rate(study: Study, arm: str) -> str:
    """Rows stand at equal distances, so that their mean is that of the run."""
    rates = [fmean(curve.values()) for curve in by_seed(study, arm, FILE, "clip_rate").values() if curve]
    return f"{100 * fmean(rates):.0f} %"


def bands_part(study: Study, pictures: dict[str, str]) -> list[str]:
    """Nothing where tokenizers differ: a band of one arm holds other tokens than that of another then."""
    drafts = {arm: band_differences(study, arm, other) for arm, other in study.record.contrasts.items()}
    found = {arm: one for arm, one in drafts.items() if one}
    if not found or len({arm.identity["tokenizer_hash"] for arm in study.record.arms.values()}) > 1:
        return []
    pictures["bands"] = bands(study, found)
    head = ["arm", "band1 (frequent)", *BANDS[1:-1], "band5 (rare)"]
    return [
        "### Loss by frequency of the target",
        "At the end of training, each arm minus the one it is compared with, in nats per token: mean and 95 % interval "
        "over seeds. Each band holds about a fifth of the training text, band1 its most frequent tokens, band5 its "
        "rarest.",
        "![Difference in loss by frequency of the target token](figures/bands.svg)",
        table(head, [[plain(arm), *(spell_interval(*triple) for triple in one)] for arm, one in found.items()]),
    ]


def spell_interval(mean: float, low: float, high: float) -> str:
    return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]" if low < high else f"{mean:+.4f}"


def band_differences(study: Study, arm: str, other: str) -> Intervals:
    """Paired by seed; empty unless every band has a value."""
    found: Intervals = []
    for band in BANDS:
        ours, theirs = (last(study, one, f"loss/{band}") for one in (arm, other))
        values = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
        if not values:
            return []
        found.append((fmean(values), *(interval(values) or (values[0], values[0]))))
    return found


@drawing
def bands(study: Study, found: dict[str, Intervals]) -> Figure:
    style = looks(list(study.record.arms))
    main = [one for arm, one in found.items() if arm in study.record.primary] or list(found.values())
    figure, (axes,) = panels(1, 2.8, 0.3)
    axes.axhline(0, color="black", lw=1)
    axes.set(
        ylabel="nats per token", ylim=window([0, *ends(main)], ends(found.values()), study.record.equivalence_margin)
    )
    for i, (arm, intervals) in enumerate(found.items()):
        x = [band + 0.6 * ((i + 0.5) / len(found) - 0.5) for band in range(len(BANDS))]
        mean, low, high = zip(*intervals, strict=True)
        axes.vlines(x, low, high, color=style[arm].color)
        axes.plot(x, mean, style[arm].marker, color=style[arm].color, label=arm)
        for at, value in zip(x, mean, strict=True):
            beyond(axes, at, [value], color=style[arm].color)
    axes.set_xticks(range(len(BANDS)), ["band1\nfrequent", *BANDS[1:-1], "band5\nrare"])
    axes.grid(visible=False, axis="x")
    legend(figure, axes)
    return figure


def ends(many: Iterable[Intervals]) -> list[float]:
    return [value for one in many for triple in one for value in triple]


@drawing
def gradients(study: Study) -> Figure:
    style = looks(list(study.record.arms))
    figure, axes = panels(len(SIDES), 1.9, 0.4, sharex=True)
    for one, (column, title) in zip(axes, SIDES.items(), strict=True):
        curves = mean_curves(study, FILE, column)
        for arm, curve in curves.items():
            draw_curve(one, curve, style[arm], arm)
        values = [mean for curve in curves.values() for mean, *_ in curve.values()]
        if column != "cosine" and values and max(values) > 5 * min(values) > 0:
            one.set_yscale("log")
            log_axis(one.yaxis)
        one.set_title(title)
    tokens_axis(axes[-1])
    legend(figure, axes[0])
    return figure
