"""What diagnostics.csv adds, where runs have one: loss by frequency of the target, gradients by side, row norms."""

from collections.abc import Iterable
from statistics import fmean

from matplotlib.figure import Figure

from lm.ablation.judge.statistics import interval
from lm.ablation.judge.study import Study
from lm.ablation.report.curves import by_seed, draw_curve, mean_curves
from lm.report.page import plain, table
from lm.report.plots import beyond, drawing, legend, log_axis, looks, panels, tokens_axis, window

FILE = "diagnostics.csv"
BANDS = tuple(f"band{i}" for i in range(1, 6))
HEAD = ("band1 (frequent)", *BANDS[1:-1], "band5 (rare)")
MATRICES = {"embedding_norm": "embedding", "head_norm": "LM head"}
SIDES = {
    "embedding_grad": "gradient norm through the input embeddings",
    "head_grad": "gradient norm through the LM head",
    "cosine": "cosine similarity of the two gradients",
}
Intervals = list[tuple[float, float, float]]  # mean, low, high of each band


def diagnostics_section(study: Study, pictures: dict[str, str]) -> list[str]:
    arms = list(mean_curves(study, FILE, "clip_rate"))
    if not arms:
        return []
    pictures["gradients"] = gradients(study)
    rows = [
        [plain(arm), matrix, *norms(study, arm, key), clip_rate(study, arm)]
        for arm in arms
        for key, matrix in MATRICES.items()
    ]
    return [
        "## Training diagnostics",
        *bands_part(study, pictures),
        "### Gradient norms",
        "Norm of the gradient that reaches the embedding matrix through the input embeddings, norm of the gradient "
        "through the LM head, and the cosine similarity of the two gradients. Lines are means over seeds; the shaded "
        "area reaches from the lowest to the highest seed.",
        "![Gradient norms and their cosine similarity over training](figures/gradients.svg)",
        "### Row norms and gradient clipping",
        table(["arm", "matrix", *HEAD, "clipped steps"], rows),
        "Mean norm of the rows of the embedding matrix and of the LM head at the end of training, by frequency of the "
        "token in the training text; means over seeds. Clipped steps: the share of all training steps whose gradient "
        "was clipped.",
    ]


def last(study: Study, arm: str, column: str) -> dict[int, float]:
    """The last value of a column of each seed's run."""
    return {seed: curve[max(curve)] for seed, curve in by_seed(study, arm, FILE, column).items()}


def norms(study: Study, arm: str, key: str) -> list[str]:
    found = [last(study, arm, f"{key}/{band}").values() for band in BANDS]
    return [f"{fmean(values):.3g}" if values else "-" for values in found]


def clip_rate(study: Study, arm: str) -> str:
    """The rows of the file are evenly spaced, so their mean is that of the run."""
    return f"{100 * fmean(fmean(curve.values()) for curve in by_seed(study, arm, FILE, 'clip_rate').values()):.0f} %"


def bands_part(study: Study, pictures: dict[str, str]) -> list[str]:
    """Nothing where tokenizers differ: the same band then holds other tokens in each arm."""
    drafts = {arm: band_differences(study, arm, other) for arm, other in study.record.contrasts.items()}
    found = {arm: one for arm, one in drafts.items() if one}
    if not found or len({arm.identity["tokenizer_hash"] for arm in study.record.arms.values()}) > 1:
        return []
    pictures["bands"] = bands(study, found)
    rows = [[plain(arm), *(spell_interval(*triple) for triple in one)] for arm, one in found.items()]
    return [
        "### Loss by frequency of the target token",
        "Each arm minus its baseline at the end of training, in nats per token: mean and 95 % CI over seeds. Each band "
        "covers about a fifth of the training text; band1 has the most frequent tokens, band5 the rarest.",
        "![Difference in loss by frequency of the target token](figures/bands.svg)",
        table(["arm", *HEAD], rows),
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
    limits = window([0, *ends(main)], ends(found.values()), study.record.equivalence_margin)
    axes.set(ylabel="nats per token", ylim=limits)
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
