r"""The paper's claims (TraceRL, arXiv 2509.06949) in miniature: docs/paper.md, cell by cell.

    python -m benchmarks.paper --missing          what is not in docs/paper.jsonl yet
    python -m benchmarks.paper --task sudoku5 --method tracerl --seed 0
    python -m benchmarks.paper --page             docs/paper.md anew, nothing is run

A cell is a task, a method and a seed: one `python -m dllm_jax.train` of a bundled model, some
minutes of one core. What it told is appended to docs/paper.jsonl, and the tables of
docs/paper.md are made of that file alone. A cell that was interrupted goes on where it was;
one that is in the file already, and is asked for again without --missing, is run again from
the start and compared with it. Cells come seed by seed, all methods of a seed first.

Accuracy is of held-out problems, at temperature 1. Its area is the mean height of the curve
over an axis: RL steps, training tokens (slots of the packed batches that hold something,
clean or noised) or denoising forwards of the rollouts; of two methods up to where the first
of them ends. Differences are paired by seed; their 95 % interval is Student's.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import textwrap
import zlib
from typing import NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
FILE, PAGE = ROOT / "docs" / "paper.jsonl", ROOT / "docs" / "paper.md"
IMAGES = ROOT / "docs" / "images"
PICTURES = {  # of these tasks
    "sudoku5": "paper.png",
    "smollm2": "smollm2_tracerl.png",
    "words": "smollm2_words.png",
}
SEEDS = (0, 1, 2, 3, 4, 5)
FEWEST = 3  # seeds below which nothing is said of a claim
# Student's t of 95 %, two-sided, by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}


# ---- Cells -----------------------------------------------------------------------------


class Task(NamedTuple):
    """A bundled model, and how long it is trained."""

    preset: str  # of configs/
    reward: str  # what says that an answer is right
    # Of random masks: with so many an answer has about as many slots as with its trace;
    # and where every step unmasks one token.
    draws: int
    static_draws: int
    half: float  # the learning rate of the row that learns at half of it
    keys: tuple[str, ...]
    # Nothing is said of forwards, since every answer takes as many, and no row others, or
    # since answers change their length.
    even: bool = False
    only: tuple[str, ...] = ()  # methods that are tried on it; none named: all
    seeds: int = len(SEEDS)  # the first so many are run

    @property
    def methods(self) -> list[str]:
        """The keys of METHODS that are tried on it."""
        named = self.only or METHODS
        return [name for name in named if not (self.even and "static" in name)]


TASKS = {
    "sudoku5": Task(
        *("sudoku", "sudoku", 5, 20, 1e-4),
        (
            *("sampler.strategy=static", "sampler.steps_per_block=5"),
            *("policy_optim.lr=2e-4", "rl.steps=48", "eval.every=16"),
            *("eval.problems=256", "eval.answers=4"),
        ),
        even=True,
    ),
    "sudoku": Task(
        *("sudoku", "sudoku", 4, 20, 5e-5),
        ("rl.steps=40", "eval.every=10", "eval.problems=256"),
    ),
    # The default run, without a critic: its critics are rows.
    "arithmetic": Task(
        *("arithmetic", "math", 1, 4, 1.5e-5),
        ("rl.value=none", "eval.every=20", "eval.problems=256", "eval.answers=4"),
        only=(
            *("tracerl", "selection", "random", "critic", "regression"),
            *("random_reward", "random_selection", "constant", "constant_selection"),
        ),
        even=True,
    ),
    # Needs the model that docs/smollm2.md makes; TraceRL has the preset's regression.
    "smollm2": Task(
        *("smollm2", "math", 2, 2, 1e-5),
        ("rl.steps=20",),
        even=True,
        only=("tracerl", "random"),
        seeds=3,
    ),
    # What that model was not taught: the same arithmetic in other words.
    "words": Task(
        *("smollm2", "math", 2, 2, 1e-5),
        (
            *("data.train=runs/smollm2/words_train.jsonl", "sampler.max_prompt=40"),
            *("data.heldout=runs/smollm2/words_heldout.jsonl", "rl.steps=20"),
        ),
        even=True,
        only=("tracerl", "random", "random_slow"),
        seeds=3,
    ),
    # The default task with full attention, and countdowns of three numbers.
    "full": Task(
        *("full", "math", 4, 8, 2.5e-5),
        ("eval.problems=256", "eval.answers=4"),
        even=True,
        only=("tracerl", "random"),
        seeds=3,
    ),
    "countdown": Task(
        *("countdown", "countdown", 4, 8, 2.5e-5),
        ("eval.problems=256", "eval.answers=4"),
        only=("tracerl", "random"),
        seeds=3,
    ),
}
SELECTION = (
    *("objective.likelihood=selection", "noise.kind=trace", "noise.shrink=1"),
    *("sampler.cache=auto", "sampler.horizon=0", "rl.trusted_gap=0"),
)
STATIC = "sampler.strategy=static"
HALF = "sampler.block=10", "eval.samplers=wide:block=20"
# Method: (what the page calls it, the config file, its keys). What stands
# in braces is the task's.
METHODS = {
    "tracerl": ("TraceRL", "tracerl", ()),
    "random": (
        *("random masks, as many training tokens", "random_masking"),
        ("noise.draws={draws}",),
    ),
    "selection": ("TraceRL, likelihood of the steps", "tracerl", SELECTION),
    "coupled": ("coupled, two pairs", "coupled", ("noise.draws=2",)),
    "random_reward": (
        *("control: a coin's reward", "tracerl"),
        ("rl.reward={reward}:0,benchmarks.paper:coin",),
    ),
    "random_selection": (
        *("control: a coin's reward, likelihood of the steps", "tracerl"),
        ("rl.reward={reward}:0,benchmarks.paper:coin", *SELECTION),
    ),
    "constant": (
        *("control: every answer worth 1", "tracerl"),
        (
            *("rl.reward={reward}:0,benchmarks.paper:one", "rl.advantage=none"),
            "rl.max_solved=1.0",
        ),
    ),
    "constant_selection": (
        *("control: the same, likelihood of the steps", "tracerl"),
        (
            *("rl.reward={reward}:0,benchmarks.paper:one", "rl.advantage=none"),
            *("rl.max_solved=1.0", *SELECTION),
        ),
    ),
    "random_slow": (
        *("the same random masks, half the rate", "random_masking"),
        ("noise.draws={draws}", "policy_optim.lr={half}"),
    ),
    "random_twice": ("random masks, drawn twice", "random_masking", ("noise.draws=2",)),
    "shrink": ("TraceRL, two steps in one", "tracerl", ("noise.shrink=2",)),
    "critic": ("TraceRL, value network", "tracerl", ("rl.value=own",)),
    "regression": ("TraceRL, critic by regression", "tracerl", ("rl.value=trace",)),
    "static": ("TraceRL, one token a step", "tracerl", (STATIC,)),
    "random_static": (
        *("random masks, one token a step", "random_masking"),
        (STATIC, "noise.draws={static_draws}"),
    ),
    "narrow": ("blocks of 10, evaluated in one of 20", "tracerl", HALF),
    "grown": (
        *("the same, trained in one of 20", "tracerl"),
        (*HALF, "noise.block=20"),
    ),
}


class Cell(NamedTuple):
    """What is run at once."""

    task: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        return f"--task {self.task} --method {self.method} --seed {self.seed}"


def coin(texts, problems, trace) -> np.ndarray:
    """Returns a reward of 1 for each second answer or so, whatever it says.

    Drawn with the tokens of all answers as the seed: the same whenever a step is repeated.
    """
    seed = zlib.crc32(np.ascontiguousarray(trace.tokens_BT).tobytes())
    return (np.random.default_rng(seed).random(len(texts)) < 0.5).astype(np.float32)


def one(texts, problems, trace) -> np.ndarray:
    """Returns a reward of 1 for every answer."""
    return np.ones(len(texts), np.float32)


def keys_of(cell: Cell) -> list[str]:
    """Returns a cell's command line: its configuration, and what it changes."""
    task, (_, file, keys) = TASKS[cell.task], METHODS[cell.method]
    own = [key.format(**task._asdict()) for key in keys]
    changes = [*task.keys, *own, f"seed={cell.seed}", f"data.seed={cell.seed}"]
    changes += ["run.export=False", "run.samples=0", "run.keep=1", "run.save_every=10"]
    changes += ["run.trackers="]
    config = f"--config=configs/{file}.py:{task.preset}"
    return [config, *(f"--config.{change}" for change in changes)]


def run(cell: Cell, folder: pathlib.Path, *more: str) -> dict:
    """Trains a cell and returns its line of the file. more: further changes, for tests."""
    own = folder / cell.task / cell.method / str(cell.seed)
    command = [sys.executable, "-m", "dllm_jax.train", *keys_of(cell), *more]
    command.append(f"--config.run.folder={own}")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    rows = [json.loads(line) for line in (own / "metrics.jsonl").open()]
    told = told_of(rows, answers(own / "config.json"))
    shutil.rmtree(own)  # so that another run of it is a run
    return cell._asdict() | told | {"keys": " ".join(keys_of(cell))}


def answers(config: pathlib.Path) -> int:
    """Returns how many answers a step of a run samples."""
    rl = json.loads(config.read_text())["rl"]
    return rl["prompts"] * rl["group"]


def told_of(rows: list[dict], per_step: int) -> dict:
    """Returns what a run's metrics say, with six digits.

    Curves have a number for each evaluation; tokens and forwards are those so far.
    """
    forwards = [
        per_step * row["response_length"] / row["tokens_per_forward"]
        if row.get("tokens_per_forward")
        else 0.0
        for row in rows
    ]
    spent = {
        "training_tokens": np.cumsum([row.get("packed_slots", 0.0) for row in rows]),
        "forwards": np.cumsum(forwards),
    }
    at = [i for i, row in enumerate(rows) if "heldout_accuracy" in row]
    out = {"steps": [rows[i]["step"] for i in at]}
    for name, key in CURVES.items():
        wide = key.replace("heldout", "heldout_wide")  # where a sampler is called so
        key = wide if wide in rows[0] else key
        out[name] = [digits(rows[i][key]) for i in at]
    out |= {name: [digits(x[i]) for i in at] for name, x in spent.items()}
    for name in MEANS:
        found = [row[name] for row in rows if name in row]
        if found:
            out[name] = digits(np.mean(found))
    return out


CURVES = {
    "accuracy": "heldout_accuracy",
    "tokens_per_forward": "heldout_tokens_per_forward",
    "length": "heldout_response_length",
}
MEANS = ("groups_kept", "entropy", "selection_bias", "borders_crossed")


def digits(x) -> float:
    """Returns a number with six digits."""
    return float(f"{x:.6g}")


def cells() -> list[Cell]:
    """Returns all cells in the order in which they are run."""
    return [
        Cell(name, method, seed)
        for seed in SEEDS
        for name, task in TASKS.items()
        for method in task.methods
        if seed in SEEDS[: task.seeds]
    ]


def load() -> dict[Cell, dict]:
    """Returns the file's cells."""
    text = FILE.read_text() if FILE.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    return {Cell(*(row[name] for name in Cell._fields)): row for row in rows}


# ---- What the cells say ------------------------------------------------------------------


def area(row: dict, axis: str, end: float) -> float:
    """Returns the mean height of a cell's accuracy over an axis, from 0 to `end`."""
    x, y = np.array(row[axis], float), np.array(row["accuracy"], float)
    if x[-1] == 0:  # nothing was learned from
        return float(y[0])
    inside = x < end
    x = np.append(x[inside], end)
    y = np.append(y[inside], np.interp(end, row[axis], y))
    return float(np.trapezoid(y, x) / end)


def difference(first: dict, second: dict, axis: str) -> float:
    """Returns by how much the area of the first of two cells is larger.

    Both up to where the axis of the first of them ends.
    """
    end = min(row[axis][-1] for row in (first, second))
    return area(first, axis, end) - area(second, axis, end) if end else 0.0


class Interval(NamedTuple):
    """A mean over seeds with the half of its 95 % interval; inf of one seed."""

    mean: float
    half: float
    seeds: int

    def __str__(self):
        if not self.seeds:
            return "not run"
        half = f" ± {self.half:.3f}" if np.isfinite(self.half) else ""
        return f"{self.mean:+.3f}{half}"


def interval(values) -> Interval:
    """Returns the Interval of one number for each seed."""
    values = np.array(list(values), float)
    n = len(values)
    if n < 2:
        return Interval(float(values.sum()), np.inf, n)
    half = T95[n - 1] * values.std(ddof=1) / np.sqrt(n)
    return Interval(float(values.mean()), float(half), n)


def both(known: dict, task: str, first: str, second: str) -> list[tuple[dict, dict]]:
    """Returns the cells of two methods by the seeds that both have."""
    pairs = ((Cell(task, first, s), Cell(task, second, s)) for s in SEEDS)
    return [(known[a], known[b]) for a, b in pairs if a in known and b in known]


def compared(known: dict, task: str, first: str, second: str, axis: str) -> Interval:
    """Returns by how much the area of the first method is larger, over seeds."""
    pairs = both(known, task, first, second)
    return interval(difference(a, b, axis) for a, b in pairs)


def of_method(known: dict, task: str, method: str) -> list[dict]:
    """Returns a method's cells by seed."""
    return [known[c] for s in SEEDS if (c := Cell(task, method, s)) in known]


def gain(row: dict, name: str) -> float:
    """Returns by how much a curve rises from its first evaluation to its last."""
    return curve(row, name)[-1] - curve(row, name)[0]


def curve(row: dict, name: str) -> np.ndarray:
    """Returns a curve of a cell; `forwards_per_answer` is made of two."""
    if name != "forwards_per_answer":
        return np.array(row[name], float)
    return np.array(row["length"], float) / np.array(row["tokens_per_forward"], float)


def saved(known: dict, task: str, first: str, second: str) -> Interval:
    """Returns how many fewer forwards the first method's answers take at the end.

    second: another method, or "" for those of the first before training.
    """
    name = "forwards_per_answer"
    if not second:
        return interval(-gain(row, name) for row in of_method(known, task, first))
    pairs = both(known, task, first, second)
    return interval(curve(b, name)[-1] - curve(a, name)[-1] for a, b in pairs)


def verdict(found: Interval) -> str:
    """Returns whether a claim, that a difference is above 0, holds."""
    if found.seeds < FEWEST:
        return f"cannot be told here: {found.seeds} of at least {FEWEST} seeds were run"
    if found.mean - found.half > 0:
        return "holds"
    if found.mean + found.half < 0:
        return "does not hold: the reverse does"
    return f"cannot be told here: of {found.seeds} seeds the interval holds 0"


# ---- The page ----------------------------------------------------------------------------

AXES = {
    "steps": "equal steps",
    "training_tokens": "equal training tokens",
    "forwards": "equal forwards",
}
# (What is said, the method that should be higher, the other, over which axis.)
CLAIMS = (
    ("TraceRL learns more than random masks", "tracerl", "random", "training_tokens"),
    ("... which learn at half the rate", "tracerl", "random_slow", "training_tokens"),
    ("... from as many steps of as many answers", "tracerl", "random", "steps"),
    ("... and than masks drawn twice", "tracerl", "random_twice", "steps"),
    (
        *("... where every step unmasks one token", "static", "random_static"),
        "training_tokens",
    ),
    ("TraceRL learns more than coupled RL", "tracerl", "coupled", "training_tokens"),
    ("a value network helps TraceRL", "critic", "tracerl", "steps"),
    ("... and a regression on the trace", "regression", "tracerl", "steps"),
    ("two steps in one learn more", "shrink", "tracerl", "training_tokens"),
    (
        *("the likelihood of the steps is better than the tokens'", "selection"),
        *("tracerl", "steps"),
    ),
    ("right rewards do it, not any", "tracerl", "random_reward", "steps"),
    ("... nor sharpening by a constant one", "tracerl", "constant", "steps"),
    (
        *(
            "a constant reward harms less by the steps' likelihood",
            "constant_selection",
        ),
        *("constant", "steps"),
    ),
    (
        *("... and so does a coin's", "random_selection"),
        *("random_reward", "steps"),
    ),
    (
        *("a larger block is learned from answers in smaller ones", "grown", "narrow"),
        "steps",
    ),
)
# (What is said, the method whose answers take fewer forwards, the other; "": before).
FASTER = (
    ("TraceRL needs fewer forwards for an answer than before", "tracerl", ""),
    ("... fewer than random masks, after as many steps", "tracerl", "random"),
    ("... and not for any reward: fewer than a coin's", "tracerl", "random_reward"),
    (
        "the likelihood of the steps needs fewer than the tokens'",
        "selection",
        "tracerl",
    ),
)
# Claims of the paper that no cell is about, and why.
OPEN = {
    "trace SFT is above random-mask and semi-AR SFT at equal compute": """no cell here; see
[methods.md](methods.md), on the arithmetic task""",
}


def overview(known: dict, task: str) -> list[str]:
    """Returns the table of a task's methods."""
    heads = ["method", "seeds", "accuracy before", "after", "area over steps"]
    heads += ["forwards per answer before", "after", "tokens per forward before"]
    heads += ["after", "length before", "after", "training tokens", "forwards"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method, (name, *_) in METHODS.items():
        rows = of_method(known, task, method)
        if not rows:
            continue
        told = [name, str(len(rows))]
        ends = [mean(rows, "accuracy", at, 3) for at in (0, -1)]
        areas = [area(row, "steps", row["steps"][-1]) for row in rows]
        told += [*ends, f"{np.mean(areas):.3f}"]
        for key in ("forwards_per_answer", "tokens_per_forward", "length"):
            told += [mean(rows, key, at, 2) for at in (0, -1)]
        told += [mean(rows, key, -1, 0) for key in ("training_tokens", "forwards")]
        lines.append(f"| {' | '.join(told)} |")
    return lines


def mean(rows: list[dict], name: str, at: int, places: int) -> str:
    """Returns the mean over cells of a curve's first or last number."""
    return f"{np.mean([curve(row, name)[at] for row in rows]):,.{places}f}"


def differences(known: dict, task: str) -> list[str]:
    """Returns the table of what separates each method from TraceRL, paired by seed."""
    heads = ["less TraceRL", "seeds", *(f"area, {words}" for words in AXES.values())]
    heads += ["own gain in accuracy", "selection bias, nats"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method, (name, *_) in METHODS.items():
        rows = of_method(known, task, method)
        if not rows:
            continue
        found = [compared(known, task, method, "tracerl", axis) for axis in AXES]
        bias = [row["selection_bias"] for row in rows if "selection_bias" in row]
        told = [str(x) for x in found] if method != "tracerl" else [""] * len(AXES)
        told.append(str(interval(gain(row, "accuracy") for row in rows)))
        told.append(str(interval(bias)) if bias else "")
        seeds = found[0].seeds if method != "tracerl" else len(rows)
        lines.append(f"| {name} | {seeds} | {' | '.join(told)} |")
    return lines


def claims(known: dict, task: str) -> list[str]:
    """Returns the table of claims, and what the cells say of each."""
    lines = ["| claim | difference | seeds | |", "|---|---|---|---|"]
    for said, first, second, axis in CLAIMS:
        if not {first, second} <= {*TASKS[task].methods}:
            continue
        found = compared(known, task, first, second, axis)
        how = f"{said}, {AXES[axis]}"
        lines.append(f"| {how} | {found} | {found.seeds} | {verdict(found)} |")
    for said, first, second in () if TASKS[task].even else FASTER:
        if not {first, second} - {""} <= {*TASKS[task].methods}:
            continue
        found = saved(known, task, first, second)
        lines.append(f"| {said} | {found} | {found.seeds} | {verdict(found)} |")
    return lines


def missing(known: dict) -> list[str]:
    """Returns a list of the cells that are not in the file."""
    lines = []
    for name, task in TASKS.items():
        for method in task.methods:
            seeds = SEEDS[: task.seeds]
            seeds = [s for s in seeds if Cell(name, method, s) not in known]
            if seeds:
                lines.append(f"* {name}, {method}: seeds {', '.join(map(str, seeds))}")
    return lines or ["* none"]


def rendered(known: dict) -> dict[str, str]:
    """Returns what stands between the marks of the page, by their names."""
    parts = {"missing": missing(known)}
    for task in TASKS:
        parts |= {
            f"{task} overview": overview(known, task),
            f"{task} differences": differences(known, task),
            f"{task} claims": claims(known, task),
        }
    lines = ["| claim | |", "|---|---|"]
    parts["open"] = lines + [
        f"| {said} | {' '.join(why.split())} |" for said, why in OPEN.items()
    ]
    return {name: "\n".join(lines) for name, lines in parts.items()}


def write_page(known: dict) -> None:
    """Writes the tables into docs/paper.md, between their marks.

    Raises ValueError naming a mark that the page lacks.
    """
    text = PAGE.read_text()
    for name, table in rendered(known).items():
        begin, end = (f"<!-- {name}: {x} -->" for x in ("begin", "end"))
        if begin not in text or end not in text:
            raise ValueError(f"{PAGE.name} lacks {begin} or {end}")
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text)


# ---- The picture -------------------------------------------------------------------------

ACROSS = 4  # panels side by side
COLORS = "#2563a8", "#d9662b"  # TraceRL's, and that of what it is compared with
GRID = 60  # points of a curve's band


def band(rows: list[dict], axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (x, mean, half): a method's accuracy over an axis, with its 95 % interval.

    Between evaluations the curve of a seed is straight; up to where the first seed ends.
    """
    x = np.linspace(0, min(row[axis][-1] for row in rows), GRID)
    curves = np.stack([np.interp(x, row[axis], row["accuracy"]) for row in rows])
    points = [interval(column) for column in curves.T]
    return x, np.array([p.mean for p in points]), np.array([p.half for p in points])


def draw(known: dict, task: str, path: pathlib.Path) -> None:
    """Draws each method's held-out accuracy beside TraceRL's, over training tokens.

    Methods of fewer than `FEWEST` seeds have no panel; without any nothing is written.
    """
    import matplotlib as mpl  # slow to import, and only wanted here

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from dllm_jax.curves import STYLE

    found = {method: of_method(known, task, method) for method in METHODS}
    found = {x: rows for x, rows in found.items() if len(rows) >= FEWEST}
    first = found.pop("tracerl", None)
    if not found or first is None:
        return
    across = min(ACROSS, len(found))
    down = -(-len(found) // across)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            *(down, across),
            figsize=(2.8 * across, 2.4 * down),
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for panel in axes.flat[len(found) :]:
            panel.axis("off")
        for panel, (method, rows) in zip(axes.flat, found.items(), strict=False):
            for told, color in zip((first, rows), COLORS, strict=True):
                x, mean_, half = band(told, "training_tokens")
                panel.plot(x / 1000, mean_, color=color)
                panel.fill_between(
                    x / 1000, mean_ - half, mean_ + half, color=color, alpha=0.18, lw=0
                )
            title = textwrap.fill(METHODS[method][0], 28)
            panel.set_title(title, color=COLORS[1])
            panel.set_xlabel("training tokens, thousands")
        low, high = axes[0, 0].get_ylim()  # of three seeds, a band may leave [0, 1]
        axes[0, 0].set_ylim(max(low, 0), min(high, 1))
        for line in axes:
            line[0].set_ylabel("held-out accuracy")
        axes[0, 0].legend(axes[0, 0].lines[:1], [METHODS["tracerl"][0]])
        figure.savefig(path, dpi=90)
        plt.close(figure)


def show(known: dict) -> None:
    """Writes the page and the pictures."""
    write_page(known)
    for task, name in PICTURES.items():
        draw(known, task, IMAGES / name)


def different(old: dict, new: dict) -> list[str]:
    """Returns a line for each figure in which two lines of the file differ."""
    names = [*dict.fromkeys([*old, *new])]
    return [
        f"{name}: {old.get(name)} in the file, now {new.get(name)}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def main():
    """Runs the cells that are asked for, one after the other, and writes the page."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--task", nargs="+", choices=[*TASKS], default=[*TASKS])
    p.add_argument("--method", nargs="+", choices=[*METHODS], default=[*METHODS])
    p.add_argument("--seed", nargs="+", type=int, choices=SEEDS, default=[*SEEDS])
    p.add_argument("--missing", action="store_true", help="only cells not in the file")
    p.add_argument("--list", action="store_true", help="tell the cells, run nothing")
    p.add_argument(
        "--page", action="store_true", help="write docs/paper.md, run nothing"
    )
    p.add_argument("--most", type=int, default=0, help="cells to run; 0: all")
    p.add_argument("--folder", type=pathlib.Path, default=ROOT / "runs" / "paper")
    args = p.parse_args()
    known = load()
    asked = [
        cell
        for cell in cells()
        if cell.task in args.task
        and cell.method in args.method
        and cell.seed in args.seed
        and not (args.missing and cell in known)
    ]
    if args.list or args.page:
        print("\n".join(cell.name for cell in asked) if args.list else PAGE)
        if args.page:
            show(known)
        return
    for cell in asked[: args.most or None]:
        row = run(cell, args.folder)
        print(json.dumps(row), flush=True)
        if cell in known:
            print("\n".join(different(known[cell], row)) or "the same", flush=True)
            continue
        with FILE.open("a") as file:
            file.write(json.dumps(row) + "\n")
        known = load()  # another process may have added to it
        show(known)


if __name__ == "__main__":
    main()
