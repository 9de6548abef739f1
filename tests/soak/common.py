"""What the soaks of whole runs share."""

import json
import pathlib

import hypothesis

from tests.properties import EXAMPLES

CLOCK = ("seconds/", "tokens_per_second/")


def kills(full: int) -> int:
    """Returns how many times to kill, by hypothesis' profile: `full`, or three."""
    return full if hypothesis.settings.default.max_examples >= EXAMPLES["soak"] else 3


def arguments(folder: pathlib.Path, cache: pathlib.Path, steps: int) -> list[str]:
    """Returns those of a small run that writes every answer."""
    keys = [f"run.folder={folder}", f"run.compile_cache={cache}", f"rl.steps={steps}"]
    keys += ["data.heldout=", "rl.updates=1", "run.samples=16"]
    keys += ["data.train=examples/arithmetic/heldout.jsonl"]  # few, so soon read
    return ["--config=configs/smoke.py", *(f"--config.{key}" for key in keys)]


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


def check_same(folder: pathlib.Path, whole: pathlib.Path):
    """Asserts that two runs left the same."""
    got, want = left(folder), left(whole)
    assert got.keys() == want.keys()
    for name, content in want.items():
        assert got[name] == content, name
