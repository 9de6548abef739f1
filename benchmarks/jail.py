"""How many programs a second the jail runs, and what reference solutions and cheats earn.

    python -m benchmarks.jail                          trivial programs a second
    python -m benchmarks.jail --mbpp=mbpp.jsonl --humaneval=HumanEval.jsonl.gz

The first says it for one jail and for as many as there are cores, the least and the best of
several rounds; `--cheats` runs every program of tests/rl/rewards/cheats.py on every
task (--every=N: on each N-th), which takes half an hour. It needs no accelerator and no network.
"""

import argparse
import collections
import concurrent.futures
import os
import time

from benchmarks import report
from dllm_jax import command_line
from dllm_jax.records import records
from dllm_jax.rl.rewards import code, sandbox
from dllm_jax.rl.rewards.strengthen import entry, solution
from tests.rl.rewards import cheats

PROGRAM = "print(int(input()) + 1)"


def rate(workers: int, count: int) -> float:
    """Returns trivial programs a second through so many jails."""
    sandbox.close()
    sandbox.configure(workers)

    def one(i: int) -> bytes:
        return sandbox.run(PROGRAM, b"%d" % i, seconds=4, memory_mb=256).stdout

    with concurrent.futures.ThreadPoolExecutor(workers) as threads:
        list(threads.map(one, range(2 * workers)))  # the jails stand
        began = time.perf_counter()
        printed = list(threads.map(one, range(count)))
    took = time.perf_counter() - began
    assert printed == [b"%d\n" % (i + 1) for i in range(count)]
    return count / took


def graded(jobs: list[tuple[str, dict]], **how) -> list[float]:
    """Returns the grades of (program, record) pairs."""

    def one(job: tuple[str, dict]) -> float:
        return code.grade_program(*job, **how)

    with concurrent.futures.ThreadPoolExecutor(sandbox.pool.workers) as threads:
        return list(threads.map(one, jobs))


def show_cheats(rows: list[dict], every: int) -> None:
    """Prints for each cheat on how many tasks it passed all tests, and some."""
    for name in cheats.CHEATS:
        slow = name in cheats.SLOW
        chosen = rows[:: every * (40 if slow else 1)]
        jobs = [
            (cheats.of(name, entry(code.tests_of(row), solution(row))), row)
            for row in chosen
        ]
        grades = graded(jobs, seconds=1 if slow else 4, all_cases=not slow)
        told = collections.Counter("all" if x == 1 else "some" for x in grades if x)
        print(
            f"{name:20s} {len(jobs):5d} tasks, {dict(told) or 'none passed'}",
            flush=True,
        )


def main() -> None:
    """Prints what the flags ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbpp", help="its file: are the reference solutions right?")
    parser.add_argument("--humaneval", help="likewise")
    parser.add_argument("--cheats", action="store_true", help="on the files' tasks")
    parser.add_argument(
        "--every", type=int, default=1, help="cheats: on each N-th task"
    )
    args = parser.parse_args()
    report.positive(parser, args)
    files = [path for path in (args.mbpp, args.humaneval) if path]
    if args.cheats and not files:
        parser.error("--cheats: name the tasks by --mbpp or --humaneval")
    every = {path: list(records(path)) for path in files}
    cores = len(os.sched_getaffinity(0))
    print(f"{sandbox.available()}; {cores} cores, load {os.getloadavg()[0]:.1f}")
    for workers in sorted({1, cores}):
        rates = sorted(rate(workers, 200) for _ in range(5))
        print(f"{workers} jails: {rates[0]:.0f} to {rates[-1]:.0f} programs a second")
    sandbox.configure(cores)
    for path, found in every.items():
        grades = graded([(solution(row), row) for row in found])
        failed = [
            (r["task_id"], g) for r, g in zip(found, grades, strict=True) if g != 1
        ]
        print(f"{path}: {len(found) - len(failed)} of {len(found)} pass; not {failed}")
    if args.cheats:
        show_cheats([row for found in every.values() for row in found], args.every)


if __name__ == "__main__":
    command_line.entry(main)
