"""What a run writes about itself: metrics.jsonl, TensorBoard, a console line, curves."""

import collections
import contextlib
import json
import math
import os
import pathlib
import statistics
import sys
import time

from tensorboardX import SummaryWriter
from tqdm import tqdm

# The console line: metric, its short name and format.
CONSOLE = (
    ("loss", "loss", ".4f"),
    ("preference_loss", "loss", ".4f"),
    ("preference_accuracy", "told apart", ".3f"),
    ("reward", "reward", ".3f"),
    ("accuracy", "acc", ".3f"),
    ("heldout_accuracy", "held-out", ".3f"),
    ("tokens_per_forward", "tok/fwd", ".2f"),
    ("heldout_tokens_per_forward", "held-out tok/fwd", ".2f"),
    ("groups_kept", "groups", ".0f"),
    ("kl", "kl", ".1e"),
    ("logprob_gap_max", "gap", ".0e"),
    ("value_loss", "value", ".3f"),
    ("grad_norm", "grad", ".2f"),
)
PANELS = {  # of curves.png: title -> the metrics drawn in it; the first is drawn large
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
STYLE = {"axes.grid": True, "grid.alpha": 0.25, "legend.frameon": False}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "legend.fontsize": 7}
STYLE |= {"axes.titlesize": 9, "axes.titleweight": "bold", "font.size": 8}
COLORS = ("#2563a8", "#d9662b", "#4c9a57", "#9067b3", "#b8860b", "#7a7a7a")
WIDE = 4  # panels side by side
FEW = 30  # points that are drawn one by one
PHASES = ("rollout", "reward", "score", "update", "checkpoint", "eval")


class Timer:
    """Wall seconds per phase; the caller waits for the device inside the phase."""

    def __init__(self):
        self.seconds = {}

    @contextlib.contextmanager
    def __call__(self, phase: str):
        """Adds the time spent inside to a phase; an inner phase is not counted twice."""
        outer = dict(self.seconds)
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            inner = sum(self.seconds.values()) - sum(outer.values())
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent - inner

    def pop(self) -> dict[str, float]:
        """Returns seconds/PHASE and starts again from nothing."""
        out = {f"seconds/{phase}": s for phase, s in self.seconds.items()}
        self.seconds = {}
        return out


class Writer:
    """Writes each step's metrics to the run folder and tells the terminal."""

    def __init__(self, folder, total: int, step: int, last=None, *, enabled=True):
        """`step`: the last one done; what a killed run wrote beyond it is cut off.

        last: the row of that step, which is written if the run was killed before it was.
        """
        self.enabled = enabled
        if not enabled:
            return
        self.total = total
        self.path = pathlib.Path(folder) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        begin = step + 1 if step else 0  # what begins writes step 0 itself
        kept = [row for row in read(folder) if row["step"] < begin]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(partial, self.path)
        self.file = self.path.open("a")
        self.board = SummaryWriter(
            str(self.path.parent / "tensorboard"), purge_step=begin
        )
        self.bar = tqdm(
            total=total,
            initial=step,
            unit="step",
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
        )
        self.first, self.last = step, time.perf_counter()
        self.paces = collections.deque(maxlen=10)  # seconds of the last steps
        if last is not None and step not in [row["step"] for row in kept]:
            self.write(step, last)

    def write(self, step: int, metrics: dict) -> None:
        """Writes one step; numbers that are not finite become null and are called out."""
        if not self.enabled:
            return
        values = {name: float(x) for name, x in metrics.items()}
        bad = sorted(name for name, x in values.items() if not math.isfinite(x))
        row = {"step": step} | {k: None if k in bad else x for k, x in values.items()}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        now = time.perf_counter()
        if step > self.first:
            self.paces.append(now - self.last)
        self.last = now
        for name, x in values.items():
            self.board.add_scalar(name, x, step)
        self.board.flush()
        self.bar.update(max(step - self.bar.n, 0))
        tqdm.write(self.line(step, values), file=sys.stdout)
        if bad:
            tqdm.write(f"warning: not finite: {', '.join(bad)}", file=sys.stderr)
        sys.stdout.flush()

    def line(self, step: int, values: dict) -> str:
        """Returns the console's line of a step."""
        parts = [f"step {step:>{len(str(self.total))}}/{self.total}"]
        for name, short, form in CONSOLE:
            if name in values:
                parts.append(f"{short} {values[name]:{form}}")
        seconds = sum(x for name, x in values.items() if name.startswith("seconds/"))
        parts.append(f"{seconds:.1f}s")
        if self.paces:
            # The median: the first step compiles, and some evaluate.
            left = statistics.median(self.paces) * (self.total - step)
            parts.append(f"left {int(left // 60)}:{int(left % 60):02d}")
        return "  ".join(parts)

    def close(self) -> None:
        """Closes the files."""
        if self.enabled:
            self.bar.close()
            self.file.close()
            self.board.close()


def read(folder) -> list[dict]:
    """Returns the rows of metrics.jsonl; a last line that was cut short is left out."""
    path = pathlib.Path(folder) / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def curves(folder, name: str = "curves.png") -> None:
    """Draws metrics.jsonl; what has no data is left out, and so is what repeats another.

    A metric of every step is drawn faintly, with its running mean over it.
    """
    import matplotlib as mpl  # slow to import, and only wanted here

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure = drawn(plt, read(folder))
    if figure is not None:
        figure.savefig(pathlib.Path(folder) / name, dpi=110)
        plt.close(figure)


def drawn(plt, rows):
    """Returns the figure, or None where there is nothing to draw."""
    panels = []
    for title, metrics in PANELS.items():
        lines = {}
        for metric in metrics:
            points = [(r["step"], r[metric]) for r in rows if r.get(metric) is not None]
            points = [(step, x) for step, x in points if x > 0 or metric not in LOG]
            if points and points not in lines.values():
                lines[metric] = points
        if lines:
            panels.append((title, lines))
    timed = [r for r in rows if any(f"seconds/{p}" in r for p in PHASES)]
    timed = [r for r in timed if r["step"] > 0]
    count = len(panels) + bool(timed)
    if not count:
        return None

    high = max(-(-(count + 3) // WIDE), 2)
    figure = plt.figure(figsize=(3.3 * WIDE, 2.3 * high), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    grid = figure.add_gridspec(high, WIDE)
    cells = [(i, j) for i in range(high) for j in range(WIDE) if i > 1 or j > 1]
    places = [grid[:2, :2]] + [grid[i, j] for i, j in cells]
    if 1 < count < len(places):  # the last panel takes what is left of its row
        i, j = cells[count - 2]
        places[count - 1] = grid[i, j:]
    axes = [figure.add_subplot(place) for place in places[:count]]
    for axis, (title, lines) in zip(axes, panels, strict=False):
        for color, (metric, points) in zip(COLORS, lines.items(), strict=False):
            label = metric.replace("_", " ")
            if metric.startswith("heldout_"):
                label = "held-out problems"
            elif f"heldout_{metric}" in lines:
                label = "rollouts"
            draw(axis, points, color, label)
        if lines.keys() & set(LOG):
            axis.set_yscale("log")
        else:
            axis.ticklabel_format(axis="y", scilimits=(-2, 4))
        axis.set_title(title)
        if len(lines) > 1 or "held-out problems" in axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=7 if axis is not axes[0] else 10)
    if timed:
        axis = axes[-1]
        phases = [p for p in PHASES if any(f"seconds/{p}" in r for r in timed)]
        stack = [[r.get(f"seconds/{p}") or 0.0 for r in timed] for p in phases]
        colors = [COLORS[PHASES.index(phase)] for phase in phases]
        steps = [r["step"] for r in timed]
        axis.stackplot(steps, stack, labels=phases, colors=colors, alpha=0.85)
        # The first step compiles, and would hide the others.
        total = sorted(sum(column) for column in zip(*stack, strict=True))
        axis.set_ylim(0, 1.5 * total[int(0.97 * (len(total) - 1))] or 1)
        axis.set_title("seconds per step")
        axis.legend(ncols=3, loc="upper right", handlelength=1, columnspacing=1)
    axes[0].title.set_fontsize(12)
    axes[0].set_xlabel("step", fontsize=9)
    return figure


def draw(axis, points, color, label):
    """Draws one metric: few points as they are, many with their running mean."""
    steps, values = zip(*points, strict=True)
    if len(points) <= FEW:
        axis.plot(steps, values, color=color, marker="o", ms=3.5, lw=1.6, label=label)
        return
    half = min(len(values) // 20 + 1, 8)
    near = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    axis.plot(steps, values, color=color, lw=0.8, alpha=0.35)
    mean = [sum(part) / len(part) for part in near]
    axis.plot(steps, mean, color=color, lw=1.8, label=label)
