"""What a run writes about itself: metrics.jsonl, TensorBoard, a console line, curves."""

import contextlib
import json
import math
import os
import pathlib
import sys
import time

from tensorboardX import SummaryWriter
from tqdm import tqdm

# The console line: metric, its short name and format.
CONSOLE = (
    ("loss", "loss", ".4f"),
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
# The panels of curves.png: title and the metrics drawn in it.
PANELS = (
    ("training loss", ("loss",)),
    ("accuracy of rollouts", ("accuracy", "reward")),
    ("held-out accuracy", ("heldout_accuracy",)),
    ("tokens per forward", ("tokens_per_forward", "heldout_tokens_per_forward")),
    ("answer length, tokens", ("response_length", "heldout_response_length")),
    ("KL to the rollout policy", ("kl", "reference_kl")),
    ("clip fraction", ("clip_fraction",)),
    ("entropy, nats", ("entropy",)),
    ("value loss", ("value_loss",)),
    ("explained variance", ("explained_variance",)),
    ("advantage spread", ("advantage_std",)),
    ("log-prob gap, sampling to training", ("logprob_gap_mean", "logprob_gap_max")),
    ("gradient norm", ("grad_norm", "value_grad_norm")),
    ("learning rate", ("learning_rate", "value_learning_rate")),
)
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

    def __init__(self, folder, total: int, step: int, *, enabled: bool = True):
        """`step`: the last one done; what a killed run wrote beyond it is cut off."""
        self.enabled = enabled
        if not enabled:
            return
        self.total = total
        self.path = pathlib.Path(folder) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read(folder) if row["step"] <= step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(partial, self.path)
        self.file = self.path.open("a")
        self.board = SummaryWriter(
            str(self.path.parent / "tensorboard"), purge_step=step + 1
        )
        self.bar = tqdm(
            total=total,
            initial=step,
            unit="step",
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
        )
        self.started, self.first = time.perf_counter(), step

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
        done = step - self.first
        if done > 0:
            left = (time.perf_counter() - self.started) / done * (self.total - step)
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
    """Draws metrics.jsonl; panels without data are left out."""
    import matplotlib as mpl  # slow to import, and only wanted here

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = read(folder)
    panels = [
        (title, [m for m in metrics if any(r.get(m) is not None for r in rows)])
        for title, metrics in PANELS
    ]
    panels = [(title, metrics) for title, metrics in panels if metrics]
    phases = [p for p in PHASES if any(f"seconds/{p}" in row for row in rows)]
    wide = 4
    high = -(-(len(panels) + bool(phases)) // wide)
    figure, axes = plt.subplots(
        high, wide, figsize=(4 * wide, 2.6 * high), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) + bool(phases) :]:
        axis.axis("off")
    for axis, (title, metrics) in zip(axes.flat, panels, strict=False):
        for metric in metrics:
            points = [(r["step"], r[metric]) for r in rows if r.get(metric) is not None]
            marker = "o" if metric.startswith("heldout") else None
            label = metric.replace("_", " ")
            axis.plot(
                *zip(*points, strict=True), marker=marker, ms=4, lw=1.5, label=label
            )
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        if len(metrics) > 1:
            axis.legend(fontsize=7)
    if phases:
        axis = axes.flat[len(panels)]
        timed = [r for r in rows if r["step"] > 0]
        stack = [[r.get(f"seconds/{p}") or 0.0 for r in timed] for p in phases]
        axis.stackplot([r["step"] for r in timed], stack, labels=phases)
        axis.set_title("seconds per step", fontsize=10)
        axis.legend(fontsize=7, ncols=2)
    for axis in axes[-1]:
        axis.set_xlabel("step", fontsize=9)
    figure.savefig(pathlib.Path(folder) / name, dpi=100)
    plt.close(figure)
