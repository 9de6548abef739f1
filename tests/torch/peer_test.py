"""benchmarks/peer.py beside PyTorch: both sides do the same, from the same weights."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_updates_of_the_same_weights_have_the_same_gradient():
    """A case compares its norms, whatever steps the cases before it have taken."""
    flags = "--shapes 0.6m --parts update rows --rounds 2 4 --rows 2 --repeats 1"
    told = subprocess.run(
        [os.environ["DLLM_PYTHON"], "-m", "benchmarks.peer", *flags.split()]
        + [f"--torch={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    lines = [json.loads(x) for x in told.stdout.splitlines() if x.startswith("{")]
    assert [line["part"] for line in lines] == ["update", "update", "rows"]
