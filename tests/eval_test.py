"""Evaluation of the bundled model, as its command runs it."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy

from dllm_jax.rl import rollout
from tests import served

MODEL = pathlib.Path(__file__).parents[1] / "examples/arithmetic/model"


def run(*args, program="eval"):
    """Returns the finished command."""
    return served.run(f"dllm_jax.{program}", [*args])


def test_pass_at_k_by_hand():
    solved = np.array([[True, False, False], [False, False, False], [True, True, True]])
    assert rollout.pass_at(solved, 1) == pytest.approx((1 / 3 + 0 + 1) / 3)
    assert rollout.pass_at(solved, 2) == pytest.approx((1 - 1 / 3 + 0 + 1) / 3)
    assert rollout.pass_at(solved, 3) == pytest.approx(2 / 3)


def test_the_bundled_model(tmp_path):
    done = run(
        "--config=configs/eval.py",
        f"--config.run.folder={tmp_path}",
        "--config.eval.problems=8",
        "--config.eval.answers=2",
        "--config.sampler.rows=16",
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "eval.json").read_text())
    lines = [json.loads(x) for x in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    right = np.array([line["reward"] >= 1 for line in lines]).reshape(8, 2)
    assert told["pass@1"] == pytest.approx(right.mean()) == told["accuracy"]
    assert told["pass@2"] == pytest.approx(right.any(axis=1).mean())
    tokens = sum(len(line["response_ids"]) for line in lines)
    forwards = sum(line["forwards"] for line in lines)
    assert told["tokens_per_forward"] == pytest.approx(tokens / forwards)
    for line in lines:
        assert len(line["step_map"]) == len(line["response_ids"])
        assert line["question"] and line["answer"]
    assert f"accuracy {told['accuracy']:>19.4g}".split() in [
        x.split() for x in done.stdout.splitlines()
    ]


@pytest.mark.parametrize("program", ["eval", "train"])
def test_a_folder_that_is_no_checkpoint_is_one_line(tmp_path, program):
    keys = [f"--config.model.path={tmp_path}", f"--config.run.folder={tmp_path}/run"]
    done = run("--config=configs/smoke.py", *keys, program=program)
    assert done.returncode == 2
    told = done.stderr.strip().splitlines()[-1]
    assert told == f"error: {tmp_path} is not a checkpoint: it has no config.json"


@pytest.mark.parametrize("program", ["eval", "train"])
def test_weights_of_an_absurd_scale_are_one_line(tmp_path, program):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    loud = {name: 1e30 * x.astype(np.float32) for name, x in weights.items()}
    safetensors.numpy.save_file(loud, folder / "model.safetensors")
    keys = [f"model.path={folder}", f"run.folder={tmp_path}/run", "eval.problems=4"]
    done = run(
        "--config=configs/smoke.py", *(f"--config.{x}" for x in keys), program=program
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "error: the model's first forward is not finite, in all of 4"
    )
    assert "Traceback" not in done.stderr


def test_nothing_to_evaluate_is_one_line():
    done = run("--config=configs/eval.py", "--config.data.heldout=")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: data.heldout is emp")
