"""Four processes of which one is killed again and again: nothing is lost, none waits."""

import json
import pathlib
import random
import signal
import time

import hypothesis
import pytest

from dllm_jax import exits
from tests import served
from tests.properties import EXAMPLES

PROCESSES, DEVICES = 4, 8
LIMIT_S = 30
CLOCK = ("seconds/", "tokens_per_second/")
# What a process is doing when it is killed, by what it has just left in the folder.
MOMENTS = {
    "rollout": "metrics.jsonl",
    "update": "samples/*",
    "save": "checkpoints/*checkpoint-tmp*",
    "anything": "samples/*",
}


def kills() -> int:
    """Returns how many, by hypothesis' profile."""
    full = hypothesis.settings.default.max_examples >= EXAMPLES["soak"]
    return 20 if full else 3


def start(folder: pathlib.Path, cache: pathlib.Path, steps: int) -> list[served.Run]:
    """Returns the processes of a run."""
    keys = [f"run.folder={folder}", f"run.compile_cache={cache}", f"rl.steps={steps}"]
    keys += ["data.heldout=", "rl.updates=1", "run.samples=16"]
    arguments = ["--config=configs/smoke.py", *(f"--config.{key}" for key in keys)]
    return served.group(
        "dllm_jax.train",
        [arguments] * PROCESSES,
        devices=DEVICES // PROCESSES,
        jax_enable_compilation_cache=True,
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


def left(folder: pathlib.Path) -> dict:
    """Returns what a run leaves, without what a clock decides."""
    files = [*folder.glob("samples/*"), *folder.glob("export/*")]
    out = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    out["metrics"] = [
        {k: x for k, x in json.loads(line).items() if not k.startswith(CLOCK)}
        for line in lines
    ]
    return out


@pytest.mark.soak
def test_one_of_four_is_killed_and_nothing_is_lost(tmp_path):
    draw, count = random.Random(0), kills()
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
    got, want = left(folder), left(whole)
    assert got.keys() == want.keys()
    for name, content in want.items():
        assert got[name] == content, name
