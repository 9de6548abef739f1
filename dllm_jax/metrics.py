"""What a run writes about itself: metrics.jsonl, its trackers and a console line."""

import collections
import contextlib
import json
import math
import os
import pathlib
import statistics
import sys
import time

import numpy as np
from tqdm import tqdm

from dllm_jax.exits import read, room, warn, whole

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
# Told where there are any: updates of all networks, answers of steps and evaluations.
COUNTS = {"skipped": "updates_skipped", "unjudged": "graded_timeouts"}


class Timer:
    """Wall seconds per phase; the caller waits for the device inside the phase.

    It also knows where the run is, for those who watch it from another thread: the step,
    the phase, and when anything last moved (of time.monotonic).
    """

    def __init__(self):
        self.seconds = {}
        self.step, self.phase, self.moved = 0, "", time.monotonic()

    def moving(self, asked):
        """Returns the function `asked`, whose calls are signs that the run moves."""

        def call(*args):
            self.moved = time.monotonic()
            return asked(*args)

        return call

    @contextlib.contextmanager
    def __call__(self, phase: str):
        """Adds the time spent inside to a phase; an inner phase is not counted twice."""
        before = sum(self.seconds.values())
        start = time.perf_counter()
        outer, self.phase, self.moved = self.phase, phase, time.monotonic()
        try:
            yield
            self.phase = outer  # where it fails, that is the phase to tell
        finally:
            self.moved = time.monotonic()
            spent = time.perf_counter() - start
            inner = sum(self.seconds.values()) - before
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent - inner

    def pop(self) -> dict[str, float]:
        """Returns seconds/PHASE and starts again from nothing."""
        out = {f"seconds/{phase}": s for phase, s in self.seconds.items()}
        self.seconds = {}
        return out


class Writer:
    """Writes each step's metrics to the run folder and tells the terminal."""

    def __init__(
        self,
        folder,
        total: int,
        step: int,
        saved_rows: dict[int, dict] | None = None,
        *,
        enabled: bool = True,
        pending: bool = False,
        trackers=None,
    ):
        """Begins the files of a run of `total` steps, of which `step` was the last done.

        What a killed run wrote beyond that step is cut off. saved_rows: the metrics of
        steps, as checkpoints tell them: they take the place of rows that are lost, and of
        the last one, if the run was killed before it wrote it. enabled: whether to write at
        all; one process of a run does. pending: a signal stopped the evaluation of `step`,
        which is written once it is made up for. trackers: called with the first step to be
        written, returns the run's Trackers; None: there are none.
        """
        self.enabled = enabled
        if not enabled:
            return
        self.total = total
        self.path = pathlib.Path(folder) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        next_step = step + 1 if step else 0  # a run that begins writes step 0 itself
        past = {row["step"]: row for row in history(folder) if row["step"] < next_step}
        saved = {n: x for n, x in (saved_rows or {}).items() if n not in past}
        last_row = saved.pop(step, None)
        past |= {n: row_of(n, x) for n, x in saved.items() if n < step}
        # It was evaluated and told, and then the run was killed: it is evaluated once more,
        # and its row takes the place of this one.
        self.told = step if pending and step in past else None
        self.begin(past)
        first = step if pending else next_step
        self.trackers = trackers(first) if trackers else None
        self.bar = tqdm(
            total=total,
            initial=step,
            unit="step",
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
        )
        self.first_step, self.last_time = step, time.perf_counter()
        # Seconds of the last steps without evaluations, and of all steps' evaluations: those
        # of one attempt may be few, and one of them right behind its start.
        self.paces = collections.deque(maxlen=10)
        self.evaluated = sum(x.get("seconds/eval") or 0.0 for n, x in past.items() if n)
        if last_row is not None:
            self.write(step, last_row)

    def begin(self, rows: dict[int, dict]) -> None:
        """Makes the file hold these rows, by their steps."""
        lines = [json.dumps(rows[n]) + "\n" for n in sorted(rows)]
        text = "".join(lines)
        with whole(self.path, len(text)) as partial:
            partial.write_text(text)

    def append(self, row: dict) -> None:
        """Appends a row, which is on the disk when this returns.

        The file is opened anew: another may stand there by now, as of who edited it, and
        what is written to one that was removed is nowhere.
        """
        if not self.path.exists():
            warn(f"{self.path} was removed: it begins anew")
        with room(self.path.parent), self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write(self, step: int, metrics: dict) -> None:
        """Writes one step; numbers that are not finite become null and are called out."""
        if not self.enabled:
            return
        values = {name: float(x) for name, x in metrics.items()}
        bad = sorted(name for name, x in values.items() if not math.isfinite(x))
        if step == self.told:
            before = history(self.path.parent)
            self.begin({row["step"]: row for row in before if row["step"] < step})
        self.append(row_of(step, values))
        now = time.perf_counter()
        evaluated = values.get("seconds/eval", 0.0)
        if step > self.first_step:
            self.paces.append(now - self.last_time - evaluated)
        if step and step != self.told:  # what was told is among the rows of before
            self.evaluated += evaluated
        self.last_time = now
        if self.trackers:
            self.trackers.log(step, values)
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
        for short, tail in COUNTS.items():
            count = sum(x for name, x in values.items() if name.endswith(tail))
            parts += [f"{short} {count:.0f}"] if count else []
        seconds = sum(x for name, x in values.items() if name.startswith("seconds/"))
        parts.append(f"{seconds:.1f}s")
        if self.paces:
            # The median, as the first step compiles; evaluations, of some, by their mean.
            pace = statistics.median(self.paces)
            pace += self.evaluated / step
            left = int(pace * (self.total - step))
            parts.append(f"left {clock(left)}")
        return "  ".join(parts)

    def close(self, stopped: bool = False) -> None:
        """Closes the bar and the trackers. stopped: whether a signal ends the run."""
        if self.enabled:
            self.bar.close()
            if self.trackers:
                self.trackers.close(stopped)


def clock(seconds: int) -> str:
    """Returns a time as people read it: 5:09, 3:05:09 or 2d 3:05:09."""
    hours, rest = divmod(seconds, 3600)
    minutes = f"{rest // 60}:{rest % 60:02d}"
    if not hours:
        return minutes
    days = f"{hours // 24}d " if hours >= 24 else ""
    return f"{days}{hours % 24}:{minutes:0>5}"


def row_of(step: int, values: dict[str, float | None]) -> dict:
    """Returns the row of a step; numbers that are not finite are null."""
    return {"step": step} | {
        name: x if x is not None and math.isfinite(x) else None
        for name, x in values.items()
    }


def history(folder) -> list[dict]:
    """Returns the rows of metrics.jsonl by their steps.

    A line that is damaged is left out and said, and of two of one step the last one counts.
    Raises exits.CannotGoOn where the file cannot be read.
    """
    path, rows, damaged = pathlib.Path(folder) / "metrics.jsonl", {}, []
    lines = read(path).split(b"\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not is_row(row):
                raise ValueError
            step = row.pop("step")
            rows[step] = row_of(step, row)
        except (ValueError, RecursionError, OverflowError):  # no UTF-8, JSON, or row
            damaged += [str(number)] if line.strip() else []
    if damaged:
        warn(f"{path}: left out as damaged: line {', '.join(damaged)}")
    return [rows[step] for step in sorted(rows)]


def is_row(row) -> bool:
    """Returns whether a line's JSON is a step's metrics: numbers by name, and null."""
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] < 0:
        return False
    return all(x is None or type(x) in (int, float) for x in row.values())


def mean(rows: list[dict]) -> dict[str, float]:
    """Returns the mean of each metric over the rows that tell it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        name: float(np.mean([row[name] for row in rows if name in row]))
        for name in names
    }
