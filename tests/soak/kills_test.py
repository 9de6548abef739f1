"""A run that is killed again and again, beside a second attempt, and its grader too."""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import time

import pytest

from dllm_jax import exits
from tests import served
from tests.soak.common import arguments, check_same, kills

DISK_MB = 20


def start(folder: pathlib.Path, cache: pathlib.Path, steps: int) -> served.Run:
    """Returns a run under way."""
    small = ["--config.rl.value=head", "--config.run.keep=1"]  # 7 MB a checkpoint
    return served.start(
        "dllm_jax.train",
        arguments(folder, cache, steps) + small,
        jax_compilation_cache_dir=None,  # run.compile_cache is
    )


def end(run: served.Run, code: int = 0) -> str:
    """Returns what a run printed, once it has ended as it should."""
    told, _ = run.communicate(timeout=3600)
    assert run.returncode == code, told
    return told


def holds(run: served.Run, lock: pathlib.Path) -> bool:
    """Returns whether a lock is a run's own: one that was killed has left its, too."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(lock.read_text())["pid"] == run.process.pid
    return False


def graders(run: served.Run) -> list[int]:
    """Returns the processes that a run has started."""
    numbers = []
    for thread in pathlib.Path(f"/proc/{run.process.pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            numbers += (thread / "children").read_text().split()
    return [int(number) for number in numbers]


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of its own of 20 MB, where one may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", str(folder)]
    mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    if not mounted:
        print(f"no disk of {DISK_MB} MB may be mounted here: the run has a large one")
    yield folder
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.soak
def test_a_run_killed_at_any_moment_leaves_what_it_would_have(tmp_path, small_disk):
    draw, count = random.Random(0), kills(30)
    steps, cache = count + 4, tmp_path / "compiled"
    whole, folder = tmp_path / "whole", small_disk / "run"
    began = time.monotonic()
    end(start(whole, cache, steps))
    # Within so long an attempt is killed: what is compiled by then takes half of it all.
    slowest_s = (time.monotonic() - began) / 4
    killed = overlapped = 0
    for number in range(count):
        run = start(folder, cache, steps)
        moment = time.monotonic() + draw.uniform(0.2, slowest_s)
        second, harm = None, draw.choice((signal.SIGKILL, signal.SIGSTOP))
        while time.monotonic() < moment and run.poll() is None:
            time.sleep(draw.uniform(0.05, 0.5))
            if harm and (workers := graders(run)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(workers[0], harm)
                harm = None  # once in an attempt
            if second is None and holds(run, folder / "lock"):
                second = start(folder, cache, steps)
        if second is not None and run.poll() is None:
            assert "is in use by pid" in end(second, exits.REFUSED)
            overlapped += 1
        elif second is not None:
            second.kill()
            second.communicate()
        run.kill()
        run.communicate()
        killed += run.returncode == -signal.SIGKILL
        print(f"kill {number + 1}: {sorted(os.listdir(folder))}")
    end(start(folder, cache, steps))
    print(f"{killed} kills, {overlapped} attempts beside a living one")
    assert killed and overlapped
    check_same(folder, whole)
