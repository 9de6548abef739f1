"""Four processes of which one is killed again and again: nothing is lost, none waits."""

import pathlib
import random
import signal
import time

import pytest

from dllm_jax import exits
from tests import served
from tests.soak.common import arguments, check_same, kills

PROCESSES, DEVICES = 4, 8
LIMIT_S = 30
# What a process is doing when it is killed, by what it has just left in the folder.
MOMENTS = {
    "rollout": "metrics.jsonl",
    "update": "samples/*",
    "save": "checkpoints/*checkpoint-tmp*",
    "anything": "samples/*",
}


def start(folder: pathlib.Path, cache: pathlib.Path, steps: int) -> list[served.Run]:
    """Returns the processes of a run."""
    return served.group(
        "dllm_jax.train",
        [arguments(folder, cache, steps)] * PROCESSES,
        devices=DEVICES // PROCESSES,
        jax_compilation_cache_dir=None,  # run.compile_cache is
    )


def seen(folder: pathlib.Path, pattern: str) -> list:
    """Returns what the files of a pattern look like now."""
    out = []
    for path in sorted(folder.glob(pattern)):
        try:
            out.append((path.name, path.stat().st_size))
        except FileNotFoundError:  # renamed meanwhile
            out.append((path.name, None))
    return out


def await_change(runs: list[served.Run], folder: pathlib.Path, pattern: str) -> bool:
    """Returns whether something new came before the run's end."""
    before = seen(folder, pattern)
    while True:
        now = seen(folder, pattern)
        if [item for item in now if item not in before]:
            return True
        before = now
        if all(run.poll() is not None for run in runs):
            return False
        time.sleep(0.002)


@pytest.mark.soak
def test_one_of_four_is_killed_and_nothing_is_lost(tmp_path):
    draw, count = random.Random(0), kills(20)
    steps, cache = 2 * count + 2, tmp_path / "compiled"
    whole, folder = tmp_path / "whole", tmp_path / "run"
    for run in start(whole, cache, steps):
        told, _ = run.communicate(timeout=3600)
        assert run.returncode == 0, told
    folder.mkdir()
    waits = []
    for number in range(count):
        moment = list(MOMENTS)[number % len(MOMENTS)]
        runs = start(folder, cache, steps)
        if not await_change(runs, folder, MOMENTS[moment]):
            break
        time.sleep(draw.uniform(0, 0.3 if moment != "anything" else 2.0))
        victim = draw.randrange(PROCESSES)
        runs[victim].kill()
        killed = time.monotonic()
        for index, run in enumerate(runs):
            told, _ = run.communicate(timeout=600)
            code = -signal.SIGKILL if index == victim else exits.STOPPED
            assert run.returncode == code, told
            if index != victim:
                line = told.strip().split("\n")[-1]
                assert line.startswith(f"error: process {victim} on "), told
        waits.append(time.monotonic() - killed)
        print(f"kill {number + 1}, {moment}, process {victim}: {waits[-1]:.1f} s")
        assert waits[-1] < LIMIT_S
    for run in start(folder, cache, steps):
        told, _ = run.communicate(timeout=3600)
        assert run.returncode == 0, told
    print(f"{len(waits)} kills; the longest wait {max(waits):.1f} s")
    check_same(folder, whole)
