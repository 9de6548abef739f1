"""Trains the default task by every method at equal compute: the tables of docs/methods.md.

    python -m benchmarks.methods [--folder=runs/methods] [--seeds 0 1 2] [--only NAME ...]
    python -m benchmarks.methods --newer [--seeds 0] [--only NAME ...]

--newer: a second table, of the rows that came later, on this task and on sudoku in five steps
(docs/paper.md), beside TraceRL without a value model.

Each run is a `python -m dllm_jax.train` of the bundled model; they run one after another,
all methods of a seed before the next seed. What is finished is skipped and what was
interrupted goes on, so the command can be stopped and started again. Afterwards, and
after every run, the table in docs/methods.md and docs/images/methods.png tell what is
there; FOLDER/results.json holds their numbers.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

from dllm_jax import metrics, records

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
MODEL = "examples/arithmetic/model"
TASK = "examples/arithmetic/"
STEPS, PROMPTS, GROUP, UPDATES = 30, 16, 8, 2
MARKS = [  # of the first table, and of that of --newer
    [f"<!-- benchmarks.methods{which}: {end} -->" for end in ("begin", "end")]
    for which in ("", " --newer")
]
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # t of 95 %, by how many runs
ANSWERS = 4  # to each held-out problem, whenever a run evaluates

NONE, STEP = "rl.value=none", "objective.aggregate=step"
CONSTANT = "objective.aggregate=constant"
SUBSET = ("noise.kind=subset", "objective.aggregate=elbo")
DIPO = (
    *(NONE, "objective.loss=dipo", "objective.aggregate=group", "rl.filter=varied"),
    *("rl.advantage=center", "objective.reference_beta=0.1"),
)
# Method: the config file and the keys it sets.
RL = {
    "TraceRL, own value network": ("tracerl", STEP, "rl.value=own"),
    "TraceRL, own value network, raw rewards": (
        *("tracerl", STEP, "rl.value=own", "rl.advantage=none"),
    ),
    "TraceRL, value head": (
        *("tracerl", STEP, "rl.value=head", "value_optim.lr=3e-5"),
    ),
    "TraceRL, no value model": ("tracerl", STEP, NONE),
    "coupled RL": ("coupled",),
    "random-masking RL": ("random_masking",),
    "GRPO on traces": ("tracerl", NONE, "objective.aggregate=sequence"),
    "Dr. GRPO": ("tracerl", NONE, "rl.advantage=center", CONSTANT),
    "RLOO": ("tracerl", NONE, "rl.advantage=loo"),
    "DAPO": ("tracerl", NONE, "objective.clip_high=0.28", "rl.filter=varied"),
    "DiPO": ("tracerl", *DIPO),
    "DiPO, one update a step": ("tracerl", *DIPO, "rl.updates=1"),
    "LightningRL's reward": (
        *("tracerl", NONE, "rl.speed=1.0", "rl.filter=paced"),
        "objective.aggregate=sequence",
    ),
    "SPG": ("tracerl", NONE, "objective.loss=spg", *SUBSET, "noise.draws=2"),
    "TraceRL, shrink 2": ("tracerl", STEP, "rl.value=own", "noise.shrink=2"),
}
ONE = "sampler.strategy=static"  # each step unmasks one token, so that a trace has an order
ORDERED = {
    "TraceRL, a token a step": ("tracerl", STEP, NONE, ONE),
    "coupled RL, a token a step": ("coupled", ONE),
    "random-masking RL, a token a step": ("random_masking", ONE),
}
MASKS, RIGHT = "noise.kind=bernoulli", "data.train={folder}/right.jsonl"
SFT = {
    # With block attention later blocks are out of sight, and semi-AR is this, bit for bit.
    "SFT, random masks (semi-AR)": ("sft", MASKS),
    "SFT, random masks, 1/p": ("sft", MASKS, "objective.aggregate=elbo"),
    "SFT, own right answers, random masks": ("sft", MASKS, RIGHT),
    "SFT, own right answers, traces": ("sft:trace", RIGHT),
    # Next-token prediction: the model unlearns its blocks first.
    "SFT, AR": (
        *("sft", "noise.kind=ar", "model.attention=causal", "model.shift=1"),
        *("sampler.block=1", "sampler.steps_per_block=1"),
    ),
    "VRPO on own pairs": (
        *("sft:dpo", "data.train={folder}/pairs.jsonl", "policy_optim.lr=1e-5"),
    ),
}
METHODS = RL | ORDERED | SFT
SEQUENCE = NONE, "objective.loss=sequence"
K2 = "objective.kl=k2"
# The rows that came later, each tried on both of TASKS.
NEWER = {
    "TraceRL": ("tracerl", STEP, NONE),
    "likelihood of the sampler's steps": (
        *("tracerl", NONE, "objective.likelihood=selection", "rl.trusted_gap=0"),
    ),
    "GSPO on traces": ("tracerl", *SEQUENCE, "objective.aggregate=sequence"),
    "ESPO": (
        *("tracerl", *SEQUENCE, "objective.aggregate=elbo_sequence", K2),
        *("noise.kind=subset", "noise.draws=2"),
    ),
    "GDPO": (
        *("tracerl", *SEQUENCE, "objective.aggregate=elbo_sequence", K2),
        *("noise.kind=quadrature", "noise.draws=2"),
    ),
    "EBPO": (
        *("tracerl", *SEQUENCE, "objective.aggregate=elbo_answer", K2),
        "noise.kind=subset",
    ),
    "AGRPO": ("tracerl", NONE, "noise.kind=trace", "noise.rounds=4"),
    "JustGRPO's order": (
        *("tracerl", NONE, "noise.kind=left_to_right", "noise.rounds=4"),
    ),
    "EGSPO": ("tracerl", NONE, "noise.rounds=4", "noise.pick=surprise"),
    "wd1": (
        *("tracerl", NONE, "objective.loss=dipo", "rl.advantage=wd1"),
        "rl.filter=varied",
    ),
    "StableDRL": (
        *("tracerl", NONE, "objective.loss=stable", "noise.kind=subset"),
        *("objective.aggregate=elbo_answer", "noise.draws=2"),
    ),
    "LightningRL, right answers": (
        *("tracerl", NONE, "rl.speed=1.0", "rl.filter=paced"),
        *("objective.aggregate=sequence", "objective.nll_weight=0.1"),
    ),
}
# Task: (the preset, its keys), for NEWER.
TASKS = {
    "arithmetic": ("arithmetic", ()),
    "sudoku5": (
        "sudoku",
        (
            *("sampler.strategy=static", "sampler.steps_per_block=5"),
            *("policy_optim.lr=2e-4", "rl.updates=1"),
            *("eval.problems=256", "eval.answers=4"),
        ),
    ),
}
NAMES = [*METHODS], [f"{task}: {name}" for task in TASKS for name in NEWER]
ARITHMETIC = f"model.path={MODEL}", "data.heldout={folder}/heldout.jsonl"
COMMON = (
    *(
        "batch.rows=8",
        "eval.every=10",
        "eval.temperature=1.0",
        "run.compile_cache={folder}/compiled",
    ),
    *("run.samples=0", "run.keep=1", "run.save_every=10", "run.export=False"),
    *(f"rl.steps={STEPS}", f"rl.prompts={PROMPTS}", f"rl.group={GROUP}"),
    *(f"rl.updates={UPDATES}", f"sft.steps={STEPS * UPDATES}"),
)
PER_UPDATE = PROMPTS * GROUP // UPDATES


def keys_of(name: str, folder: pathlib.Path) -> list[str]:
    """Returns the command-line overrides of a method, its config first."""
    task, _, newer = name.partition(": ")
    if newer:
        file, *keys = NEWER[newer]
        preset, of_task = TASKS[task]
        file += f":{preset}"
        common = [*COMMON, *of_task, *(ARITHMETIC if preset == "arithmetic" else ())]
    else:
        file, *keys = METHODS[name]
        common = [*COMMON, *ARITHMETIC]
    if name in SFT:
        dpo = file == "sft:dpo"
        common += [
            *("policy_optim.lr=1e-4", "policy_optim.schedule=constant"),
            *("policy_optim.warmup=0", f"sft.examples={PER_UPDATE // (1 + dpo)}"),
            *("eval.every=20", "run.save_every=20"),
        ]
    path, _, preset = file.partition(":")
    config = f"--config=configs/{path}.py" + (f":{preset}" if preset else "")
    return [config] + [f"--config.{k.format(folder=folder)}" for k in (*common, *keys)]


def call(program: str, *args: str):
    """Runs a program of the package at low priority; raises if it fails."""
    command = ["nice", "-n", "10", sys.executable, "-m", f"dllm_jax.{program}", *args]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def collect(folder: pathlib.Path):
    """Writes what the bundled model answers to problems of the training set.

    right.jsonl has the right answers with their traces; pairs.jsonl has a right and a
    wrong answer of each problem that got both.
    """
    told = folder / "collected"
    call(
        "eval",
        *("--config=configs/eval.py", "--config.eval.temperature=1.0"),
        *(f"--config.run.folder={told}", f"--config.data.heldout={TASK}train.jsonl"),
        *("--config.eval.problems=5120", "--config.eval.answers=4"),
    )
    rows = [json.loads(line) for line in (told / "eval.jsonl").open()]
    right, pairs = [], {}
    for row in rows:
        won = records.right(row)
        if won:
            right.append(row)
        pairs.setdefault(row["question"], {})["chosen" if won else "rejected"] = row
    with (folder / "right.jsonl").open("w") as file:
        for row in right:
            file.write(json.dumps(row) + "\n")
    with (folder / "pairs.jsonl").open("w") as file:
        for question, pair in pairs.items():
            if len(pair) == 2:
                texts = {k: row["text"] for k, row in pair.items()}
                file.write(json.dumps({"prompt": question} | texts) + "\n")


def result(folder: pathlib.Path, name: str, seed: int) -> dict | None:
    """Returns what a run told, or None if it has not ended."""
    rows = metrics.history(run_folder(folder, name, seed))
    if not rows or rows[-1]["step"] < (STEPS * UPDATES if name in SFT else STEPS):
        return None
    phases = ("rollout", "reward", "score", "update")
    seconds = [sum(r.get(f"seconds/{p}", 0.0) for p in phases) for r in rows[1:]]
    told = [r for r in rows if "heldout_accuracy" in r]
    variance = [r["explained_variance"] for r in rows if "explained_variance" in r]
    return {
        "steps": [r["step"] for r in told],
        "accuracy": [r["heldout_accuracy"] for r in told],
        "tokens_per_forward": [r["heldout_tokens_per_forward"] for r in told],
        # The median: what compiles, or waits for its turn on a busy machine, is not it.
        "seconds": statistics.median(seconds) * len(seconds),
        "explained_variance": statistics.mean(variance) if variance else None,
    }


def mean(values, digits: int = 3) -> str:
    """Returns mean ± standard deviation."""
    values = list(values)
    spread = statistics.stdev(values) if len(values) > 1 else None
    told = f"{statistics.mean(values):.{digits}f}"
    return told if spread is None else f"{told} ± {spread:.{digits}f}"


def beside(runs: dict, base: dict) -> str:
    """Returns by how many points runs end above those of another method, seed by seed.

    The mean with its 95 % interval (t); runs, base: by seed.
    """
    gains = [
        100 * (run["accuracy"][-1] - base[seed]["accuracy"][-1])
        for seed, run in runs.items()
        if seed in base
    ]
    told = f"{statistics.mean(gains):+.1f}"
    if len(gains) not in STUDENT:
        return told
    half = STUDENT[len(gains)] * statistics.stdev(gains) / len(gains) ** 0.5
    low, high = statistics.mean(gains) - half, statistics.mean(gains) + half
    return f"{told} [{low:.1f}, {high:.1f}]"


def report(folder: pathlib.Path, seeds: list[int], newer: bool):
    """Writes results.json, a table and, of the first one, a picture of what has ended."""
    results = {}
    for name in NAMES[newer]:
        runs = {seed: result(folder, name, seed) for seed in seeds}
        if any(runs.values()):
            results[name] = {seed: run for seed, run in runs.items() if run}
    file = "newer.json" if newer else "results.json"
    (folder / file).write_text(json.dumps(results, indent=1) + "\n")
    head = ["method", "runs", "accuracy before", "after", "tokens per forward"]
    head += ["seconds", *["beside TraceRL, points"] * newer]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, by_seed in results.items():
        runs = list(by_seed.values())
        before, after = (mean(r["accuracy"][at] for r in runs) for at in (0, -1))
        speed = mean([r["tokens_per_forward"][-1] for r in runs], 2)
        seconds = statistics.median(r["seconds"] for r in runs)
        cells = [name, len(runs), before, after, speed, f"{seconds:.0f}"]
        base = f"{name.partition(': ')[0]}: TraceRL"
        if newer:
            own = name == base or base not in results
            cells.append("" if own else beside(by_seed, results[base]))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    page, (begin, end) = DOCS / "methods.md", MARKS[newer]
    head, _, rest = page.read_text().partition(begin)
    table = "\n".join(lines)
    page.write_text(f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}")
    if not newer:
        draw({name: ends_of(list(runs.values())) for name, runs in results.items()})


def ends_of(runs: list[dict]) -> tuple[float, float, float]:
    """Returns a method's mean accuracy before and after, and the deviation of the latter."""
    before, after = ([run["accuracy"][at] for run in runs] for at in (0, -1))
    spread = statistics.stdev(after) if len(after) > 1 else 0.0
    return statistics.mean(before), statistics.mean(after), spread


def draw(ends: dict) -> None:
    """Draws every method's held-out accuracy at the end, the best above; ends: of `ends_of`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    groups = {"RL": RL, "RL, a token a step": ORDERED, "SFT, and pairs": SFT}
    tables = {}
    for title, names in groups.items():  # AR begins, and stays, far below
        known = sorted((ends[x][1], x) for x in names if x in ends and x != "SFT, AR")
        tables |= {title: known} if known else {}
    if not tables:
        return
    figure, axes = plt.subplots(
        len(tables),
        figsize=(8, 7.5),
        squeeze=False,
        sharex=True,
        height_ratios=[len(table) + 1 for table in tables.values()],
        layout="constrained",
    )
    axes = axes[:, 0]
    for axis, (title, table) in zip(axes, tables.items(), strict=True):
        for place, (after, name) in enumerate(table):
            axis.errorbar(after, place, xerr=ends[name][2], color="C0", fmt="o", ms=5)
        axis.axvline(ends[table[0][1]][0], color="0.6", ls="--", lw=1, label="before")
        axis.set_yticks(range(len(table)), [name for _, name in table], fontsize=9)
        axis.set_ylim(-0.7, len(table) - 0.3)
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(axis="x", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(loc="lower left", bbox_to_anchor=(0.22, 0), frameon=False)
    axes[-1].set_xlabel("held-out accuracy, mean and standard deviation of the seeds")
    figure.savefig(DOCS / "images" / "methods.png", dpi=110)
    plt.close(figure)


def run_folder(folder: pathlib.Path, name: str, seed: int) -> pathlib.Path:
    """Returns where a run lives."""
    return folder / "".join(c if c.isalnum() else "_" for c in name) / str(seed)


def main():
    """Runs what is missing, and reports."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--folder", type=pathlib.Path, default="runs/methods")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    p.add_argument("--newer", action="store_true", help="the second table")
    p.add_argument("--only", nargs="*", choices=NAMES[0] + NAMES[1], metavar="NAME")
    args = p.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    problems = (ROOT / TASK / "heldout.jsonl").read_text()
    (args.folder / "heldout.jsonl").write_text(problems * ANSWERS)
    if not (args.newer or (args.folder / "pairs.jsonl").exists()):
        collect(args.folder)
    for seed in args.seeds:
        for name in args.only or NAMES[args.newer]:
            if result(args.folder, name, seed):
                continue
            run, began = run_folder(args.folder, name, seed), time.monotonic()
            how = [f"seed={seed}", f"data.seed={seed}", f"run.folder={run}"]
            call("train", *keys_of(name, args.folder), *(f"--config.{k}" for k in how))
            told = result(args.folder, name, seed)
            print(
                f"{name}, seed {seed}: accuracy {told['accuracy'][-1]:.3f}, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
            report(args.folder, args.seeds, args.newer)
    report(args.folder, args.seeds, args.newer)


if __name__ == "__main__":
    main()
