"""This checkout against another commit of it: one benchmark, in turns.

    python -m benchmarks.against COMMIT decode --model=tiny --rows 1 32
    python -m benchmarks.against --rounds=7 COMMIT train_step --tokens=1152 --rows=2
    python -m benchmarks.against COMMIT first
    python -m benchmarks.against --patch=benchmarks/a77af13.patch a77af13 decode --model=30m

Each round runs `python -m benchmarks.NAME ...` here and then in a worktree of COMMIT, with
the same interpreter and libraries, each with its own sources. Told are, for every line of
JSON that both print and for what it says of time, minimum, median and maximum of the
rounds here and there, and the median of the rounds' ratios: above 1 this checkout is ahead.
A --patch is applied to the other checkout first, for shapes that its benchmarks do not know.
`first` is no module: `generate` with the bundled model, from the start of the process to its
end, with an empty cache of compiled programs and again with that full.
A first round that compiles is as good as the others: benchmarks leave compilation out.
Ratios belong to a machine, of which `machine` tells what its cores read and multiply.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from benchmarks import report

ROOT = pathlib.Path(__file__).parents[1]
TIMES = ("seconds", "tokens_per_second", "ms", "ms_per_forward", "latency")


@contextlib.contextmanager
def checkout(commit: str, patch: pathlib.Path | None = None):
    """A folder with the files of a commit, patched, for a while."""
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        made = subprocess.run(
            [*git, "add", "-q", "--detach", folder, commit], check=False
        )
        if made.returncode:  # git has said why
            sys.exit(f"error: git makes no checkout of {commit} from {ROOT}")
        try:
            if patch:
                apply = ["git", "-C", folder, "apply", patch.absolute()]
                if subprocess.run(apply, check=False).returncode:
                    sys.exit(f"error: --patch={patch} does not apply to {commit}")
            yield pathlib.Path(folder)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


def commit_of(folder: pathlib.Path) -> str:
    """Returns the commit of a checkout: what HEAD~3 is today, it is not tomorrow."""
    git = ["git", "-C", folder, "rev-parse", "HEAD"]
    return subprocess.run(git, stdout=subprocess.PIPE, text=True, check=True).stdout[:7]


def lines_of(folder: pathlib.Path, command: list[str]) -> list[dict]:
    """Returns the lines of JSON that a benchmark of the checkout in `folder` prints."""
    if command[0] == "first":
        return first_answer(folder, command[1:])
    ran = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{command[0]}", *command[1:]],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in ran.stdout.splitlines() if line[:1] == "{"]


def first_answer(folder: pathlib.Path, flags: list[str]) -> list[dict]:
    """Returns the seconds of a first answer in the checkout, cold and warm.

    flags: of generate, besides the model's and the prompt.
    """
    command = [sys.executable, "-m", "dllm_jax.generate", "785+800", *flags]
    command += ["--model=examples/arithmetic/model", "--dtype=float32"]
    lines = []
    with tempfile.TemporaryDirectory() as cache:
        kept = {
            "PYTHONPATH": str(folder),
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        env = os.environ | kept
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # a user's machine has bytecode
        run = functools.partial(
            subprocess.run, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL
        )
        run([sys.executable, "-c", "import dllm_jax.generate, transformers"])
        for compiled in ("cold", "warm"):
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
            run(command)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            busy = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
            line = {"benchmark": "first", "compiled": compiled}
            line |= {"seconds": time.time() - start, "processor_seconds": busy}
            lines.append(line)
    return lines


def compared(rounds: list[list[list[dict]]]) -> list[dict]:
    """Returns a row for each line and time: values here, there, and their ratio.

    rounds: of each, the lines of this checkout and of the other one, in the same order.
    """
    rows = []
    counts = {len(lines) for both in rounds for lines in both}
    if len(counts) > 1 or counts == {0}:
        sys.exit(f"error: the two print {sorted(counts)} lines, which have no pairs")
    for number, (here, there) in enumerate(zip(*rounds[0], strict=True)):
        shared = [key for key in here if key in there]
        name = " ".join(
            str(here[key])
            for key in shared
            if here[key] == there[key] and key not in report.ONCE
        )
        for key in shared:
            timed = key.endswith(tuple(f"_{time}" for time in TIMES)) or key in TIMES
            if not timed or not isinstance(here[key], int | float):
                continue
            pairs = [
                (ours[number][key], theirs[number][key]) for ours, theirs in rounds
            ]
            more_is_better = key.endswith("per_second")
            ratios = [(a / b if more_is_better else b / a) for a, b in pairs if a and b]
            if ratios:
                ours, theirs = zip(*pairs, strict=True)
                ratio = statistics.median(ratios)
                rows.append(
                    {
                        "line": name,
                        "time": key,
                        "here": spread(ours),
                        "there": spread(theirs),
                        "times_faster": round(ratio, 2),
                    }
                )
    return rows


def spread(values) -> str:
    """Returns "minimum / median / maximum"."""
    numbers = min(values), statistics.median(values), max(values)
    return " / ".join(f"{x:.4g}" for x in numbers)


def machine() -> str:
    """Returns what all cores together read of memory, and multiply in f32, just now."""
    parts = [np.ones(2**26, np.float32) for _ in range(os.cpu_count())]
    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        lasted = report.seconds(lambda parts: list(pool.map(np.sum, parts)), parts)
    read = sum(part.nbytes for part in parts) / lasted
    return f"{read / 1e9:.0f} GB/s, {report.flops() / 1e9:.0f} GFLOP/s"


def main():
    """Runs both in turns and tells each row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="of this repository, such as a77af13")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patch", type=pathlib.Path, help="of the other checkout")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="a module of benchmarks/, and its flags",
    )
    args = parser.parse_args()
    if not args.command:
        parser.error("name a benchmark, such as decode")
    report.positive(parser, args)
    with checkout(args.commit, args.patch) as other:
        commit, rounds = commit_of(other), []
        for number in range(args.rounds):
            try:
                rounds.append([lines_of(x, args.command) for x in (ROOT, other)])
            except subprocess.CalledProcessError as error:  # the command has said why
                command = " ".join(map(str, error.cmd))
                sys.exit(f"error: {command} ended with {error.returncode}")
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    rows = compared(rounds)
    found = {"machine": machine()} if jax.default_backend() == "cpu" else {}
    for row in rows:
        report.tell("against", against=commit, **row | found)


if __name__ == "__main__":
    main()
