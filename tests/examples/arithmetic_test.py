"""The bundled model that adds: its problems and its shape are what the command makes."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from examples.arithmetic import make as arithmetic
from examples.arithmetic import pairs
from examples.functions import make as functions
from examples.puzzles import make as puzzles

HERE = pathlib.Path(arithmetic.__file__).parent


def test_the_bundled_sums_are_what_their_command_makes():
    heldout, train = (
        [json.loads(line) for line in (HERE / f"{name}.jsonl").open()]
        for name in ("heldout", "train")
    )
    made = arithmetic.problems(np.random.default_rng(0), 8256, 0.5)
    assert (len(heldout), made) == (256, heldout + train)
    asked = {row["question"] for row in train}
    assert sum(row["question"] in asked for row in heldout) == 0


def test_its_command_says_nothing_of_pytorch():
    env = {x: y for x, y in os.environ.items() if x != "TRANSFORMERS_VERBOSITY"}
    command = [sys.executable, arithmetic.__file__, "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "flags", "says"),
    [
        (arithmetic, "--train=-1", "--heldout and --train: 1 or more each"),
        (arithmetic, "--heldout=1000000", "of 1,000,000 problems"),
        (arithmetic, "--worked=2", "--worked=2.0: a share, from 0 to 1"),
        (functions, "--train=2000000", "1 or more each, of 5,760 problems"),
        (functions, "--heldout=0", "--heldout and --train: 1 or more each"),
        (functions, "--wrong=7", "--wrong=7.0: a share, from 0 to 1"),
        (puzzles, "sudoku --train=200000", "1 or more each, of 27,264 problems"),
        (puzzles, "countdown --train=300000", "1 or more each, of 286,068 problems"),
        (puzzles, "sums --train=-300", "--heldout and --train: 1 or more each"),
        (pairs, "--answers=none.jsonl", "--answers 'none.jsonl': no such file"),
        (
            pairs,
            f"--answers={HERE}/heldout.jsonl",
            "no 'group' in it: name an eval.jsonl",
        ),
    ],
)
def test_what_they_cannot_make_is_one_line(
    monkeypatch, capsys, tmp_path, command, flags, says
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["command", *flags.split()])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("model", "attention", "block"), [("model", None, 4), ("full", "full", 8)]
)
def test_the_bundled_models_have_the_shape_of_the_blank_one(model, attention, block):
    stored = safetensors.numpy.load_file(HERE / model / "model.safetensors")
    blank = arithmetic.weights(np.random.default_rng(0), arithmetic.SHAPE)
    assert {x: w.shape for x, w in stored.items()} == {
        x: w.shape for x, w in blank.items()
    }
    told = json.loads((HERE / model / "config.json").read_text())
    assert {key: told[key] for key in arithmetic.SHAPE} == arithmetic.SHAPE
    assert (told.get("attention_pattern"), told["block_size"]) == (attention, block)
    assert sum(file.stat().st_size for file in (HERE / model).iterdir()) < 3e6
