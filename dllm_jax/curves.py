"""curves.png: the metrics of a run, drawn.

One panel for each row of PANELS that has data, the first one large, and one of the seconds
of each phase of a step. A metric of every step is drawn faintly, with its running mean over
it; a metric that repeats another of its panel point by point is left out.
"""

import itertools
import math
import pathlib

import numpy as np

PANELS = {  # title -> the metrics drawn in it
    "accuracy": ("heldout_accuracy", "accuracy", "reward"),
    "training loss": ("loss",),
    "tokens per forward": ("heldout_tokens_per_forward", "tokens_per_forward"),
    "answer length, tokens": ("heldout_response_length", "response_length"),
    "KL to the rollout policy": ("kl",),
    "KL to the first policy": ("reference_kl",),
    "clip fraction": ("clip_fraction",),
    "entropy, nats": ("entropy",),
    "value loss": ("value_loss",),
    "explained variance of the value": ("explained_variance",),
    "advantage spread": ("advantage_std",),
    "log-prob gap, sampling to training": ("logprob_gap_max", "logprob_gap_mean"),
    "gradient norm": ("grad_norm", "value_grad_norm"),
    "learning rate": ("learning_rate", "value_learning_rate"),
}
LOG = ("logprob_gap_max", "logprob_gap_mean")  # drawn on a logarithmic scale
PHASES = ("rollout", "reward", "score", "update", "checkpoint", "eval", "best")
COLORS = ("#2563a8", "#d9662b", "#4c9a57", "#9067b3", "#b8860b", "#7a7a7a", "#c0547c")
DASHES = ("-", "--", ":", "-.")  # of as many lines each as there are colours
STYLE = {
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "font.size": 8,
    "grid.alpha": 0.25,
    "legend.fontsize": 7,
    "legend.frameon": False,
}
WIDE = 4  # panels side by side
FEW = 30  # points that are drawn one by one
BARS = 400  # of the seconds of steps; where there are more, each is the mean of several
FLAT = 0.01  # of a value: what moves less has an axis of this much to both sides


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Draws the rows of a metrics.jsonl to a PNG file; writes none without data."""
    import matplotlib as mpl  # slow to import, and only wanted here

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure = figure_of(plt, rows)
    if figure is not None:
        figure.savefig(path, dpi=110)
        plt.close(figure)


def figure_of(plt, rows: list[dict]):
    """Returns the figure, or None where there is nothing to draw."""
    panels = panels_of(rows)
    timed = [row for row in rows if row["step"] > 0 and phases_of(row)]
    count = len(panels) + (1 if timed else 0)
    if not count:
        return None
    figure, axes = grid(plt, count)
    for axis, (title, lines) in zip(axes, panels, strict=False):
        draw_panel(axis, title, lines, 10 if axis is axes[0] else 7)
    if timed:
        draw_seconds(axes[-1], timed)
    for axis in axes:  # there is no half of a step
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes[0].title.set_fontsize(12)
    axes[0].set_xlabel("step", fontsize=9)
    return figure


def panels_of(rows: list[dict]) -> list[tuple[str, dict]]:
    """Returns (title, {metric: its points (step, value)}) of every panel with data."""
    panels = []
    for title, metrics in PANELS.items():
        lines = {}
        for metric in (name for known in metrics for name in kin(known, rows)):
            points = points_of(rows, metric)
            if points and not any(same(points, drawn) for drawn in lines.values()):
                lines[metric] = points
        if lines:
            panels.append((title, lines))
    return panels


def same(points, others) -> bool:
    """Returns whether two metrics are one, but for rounding: one line would hide the other."""
    return len(points) == len(others) and all(
        step == step_ and math.isclose(y, y_, rel_tol=1e-5, abs_tol=1e-8)
        for (step, y), (step_, y_) in zip(points, others, strict=True)
    )


def kin(metric: str, rows: list[dict]) -> list[str]:
    """Returns a metric and, of held-out ones, those of further files and samplers."""
    head, held_out, tail = metric.partition("heldout_")
    if head or not held_out:
        return [metric]
    told = dict.fromkeys(name for row in rows for name in row if name != metric)
    return [metric] + [
        x for x in told if x.startswith("heldout_") and x.endswith(f"_{tail}")
    ]


def points_of(rows: list[dict], metric: str) -> list[tuple[int, float]]:
    """Returns a metric's points; a logarithmic scale has no place for those at 0."""
    points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
    return [(step, y) for step, y in points if y > 0 or metric not in LOG]


def phases_of(row: dict) -> list[str]:
    """Returns the phases that a row tells the seconds of."""
    return [phase for phase in PHASES if f"seconds/{phase}" in row]


def grid(plt, count: int):
    """Returns (figure, axes): a first one of 2 x 2 cells, and the others in reading order.

    They lie beside it and below it; the last one takes what is left of its row.
    """
    high = max(math.ceil((count + 3) / WIDE), 2)
    figure = plt.figure(figsize=(3.3 * WIDE, 2.3 * high), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    cells = figure.add_gridspec(high, WIDE)
    single = [(i, j) for i in range(high) for j in range(WIDE) if i > 1 or j > 1]
    single = single[: count - 1]
    places = [cells[:2, :2]] + [cells[i, j] for i, j in single]
    if single:
        i, j = single[-1]
        places[-1] = cells[i, j:]
    return figure, [figure.add_subplot(place) for place in places]


def draw_panel(axis, title: str, lines: dict, legend_size: int):
    """Draws the metrics of one panel."""
    looks = itertools.cycle(itertools.product(DASHES, COLORS))
    for (dashes, color), (metric, points) in zip(looks, lines.items(), strict=False):
        look = {"color": color, "linestyle": dashes}
        # A file's name may have dollars, between which matplotlib reads a formula.
        draw_line(axis, points, look, label_of(metric, lines).replace("$", r"\$"))
    if lines.keys() & set(LOG):
        axis.set_yscale("log")
    else:
        axis.ticklabel_format(axis="y", scilimits=(-2, 4), useOffset=False)
        low, high = axis.get_ylim()
        margin = FLAT * max(abs(low), abs(high))
        if high - low < margin:  # by rounding alone
            axis.set_ylim(low - margin, high + margin)
    axis.set_title(title)
    if len(lines) > 1 or any(metric.startswith("heldout_") for metric in lines):
        axis.legend(fontsize=legend_size)


def label_of(metric: str, lines: dict) -> str:
    """Returns what the legend calls a metric; lines: all of its panel."""
    if metric.startswith("heldout_"):
        known = (x for metrics in PANELS.values() for x in metrics)
        tail = next(x for x in known if metric.endswith(x.removeprefix("heldout_")))
        more = metric.removesuffix(tail.removeprefix("heldout_"))[len("heldout_") :]
        return "held-out problems" + (more and f", {more[:-1].replace('_', ' ')}")
    if f"heldout_{metric}" in lines:
        return "rollouts"
    return metric.replace("_", " ")


def draw_line(axis, points, look: dict, label: str):
    """Draws one metric: few points as they are, many with their running mean.

    look: colour and dashes, as matplotlib calls them.
    """
    steps, values = zip(*points, strict=True)
    if len(points) <= FEW:
        axis.plot(steps, values, **look, marker="o", ms=3.5, lw=1.6, label=label)
        return
    # Of a long run's steps a pixel has many: the mean of a few would fill its panel.
    half = max(min(len(values) // 20 + 1, 8), len(values) // 200)
    window, ones = np.ones(2 * half + 1), np.ones(len(values))
    totals, counts = (np.convolve(line, window, "same") for line in (values, ones))
    axis.plot(steps, values, **look, lw=0.8, alpha=0.35)
    axis.plot(steps, totals / counts, **look, lw=1.8, label=label)


def draw_seconds(axis, rows: list[dict]):
    """Draws the seconds of each step as a bar, its phases on top of each other."""
    timed = {phase for row in rows for phase in phases_of(row)}
    phases = [phase for phase in PHASES if phase in timed]
    size = -(-len(rows) // BARS)
    bars = [rows[i : i + size] for i in range(0, len(rows), size)]
    stack = [[mean_seconds(bar, phase) for bar in bars] for phase in phases]
    colors = [COLORS[PHASES.index(phase)] for phase in phases]
    # Of both edges of a bar: a line to the next step would show seconds that nobody spent.
    edges = [x for bar in bars for x in (bar[0]["step"] - 0.5, bar[-1]["step"] + 0.5)]
    tops = [[x for x in row for _ in range(2)] for row in stack]
    axis.stackplot(edges, tops, labels=phases, colors=colors, alpha=0.85)
    # The first step compiles, and would hide the others.
    totals = sorted(sum(column) for column in zip(*stack, strict=True))
    axis.set_ylim(0, 1.5 * totals[int(0.97 * (len(totals) - 1))] or 1)
    axis.set_title("seconds per step")
    axis.legend(ncols=3, loc="upper right", handlelength=1, columnspacing=1)


def mean_seconds(rows: list[dict], phase: str) -> float:
    """Returns what a phase takes in a step, the mean of some."""
    return sum(float(row.get(f"seconds/{phase}") or 0) for row in rows) / len(rows)
