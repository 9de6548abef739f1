"""The best evaluation: ties go to the earlier, what is stale ends a run."""

import json
import types

import pytest

from dllm_jax import train
from dllm_jax.rl.best import MARK, Best, holds, mark, publish, still


def test_the_highest_is_kept_and_without_a_higher_one_the_run_ends():
    found = Best("heldout_accuracy", patience=2)
    values = [0.5, 0.6, 0.6, 0.55, 0.7, 0.1, 0.2]
    told = []
    for step, value in enumerate(values):
        told.append((found.note(step, {"heldout_accuracy": value}), found.done))
        found = Best(found.name, 2, json.loads(json.dumps(found.memory)))  # resumed
    assert [best for best, _ in told] == [True, True, False, False, True, False, False]
    assert [done for _, done in told] == [False] * 3 + [True] + [False] * 2 + [True]
    assert (found.step, found.value) == (4, 0.7)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("heldout_accuracy", ""),
        ("", ""),
        (
            "heldout_pass@2",
            "run.keep_best='heldout_pass@2' was 'heldout_accuracy': the best begins anew",
        ),
    ],
)
def test_the_best_of_another_metric_is_no_measure(name, said):
    found, told = Best("heldout_accuracy", 3), []
    found.note(4, {"heldout_accuracy": 0.9})
    found.note(5, {"heldout_accuracy": 0.8})
    assert not found.before(4) and found.before(5)
    memory = json.loads(json.dumps(found.memory))
    again = Best(name, 3, memory, told.append)
    assert told == [said] * bool(said)
    same = name == "heldout_accuracy"
    assert (again.value, again.step, again.stale) == (
        (0.9, 4, 1) if same else (None, 0, 0)
    )
    assert again.before(9) == same  # without one there is nothing to export
    if said:
        assert again.note(6, {name: 0.1})


def test_a_memory_without_a_name_is_of_the_metric_that_is_watched():
    """As older checkpoints have it."""
    told = []
    found = Best(
        "heldout_accuracy", 0, {"value": 0.9, "step": 4, "stale": 1}, told.append
    )
    assert (found.value, told) == (0.9, [])


def test_the_best_of_other_evaluations_is_no_measure():
    """An easier set of problems would have the best for good."""
    easy, hard = {"data.heldout": ["a"], "n": 8}, {"data.heldout": ["b"], "n": 8}
    told = []
    found = Best("heldout_accuracy", 3, still(None, easy, told.append))
    found.note(4, {"heldout_accuracy": 0.9})
    memory = json.loads(json.dumps(found.memory))
    assert Best("heldout_accuracy", 3, still(memory, easy, told.append)).value == 0.9
    older = {name: x for name, x in memory.items() if name != "of"}
    assert Best("heldout_accuracy", 3, still(older, hard, told.append)).value == 0.9
    assert not told
    again = Best("heldout_accuracy", 3, still(memory, hard, told.append), told.append)
    said = "was of evaluations before data.heldout changed: the best begins anew"
    assert told == [f"run.keep_best='heldout_accuracy' {said}"]
    assert (again.value, again.step, again.of) == (None, 0, hard)
    assert again.note(6, {"heldout_accuracy": 0.1})


def test_without_patience_it_never_ends():
    found = Best("heldout_accuracy", patience=0)
    for step in range(9):
        found.note(step, {"heldout_accuracy": 0.5})
    assert not found.done and found.step == 0


def test_without_a_name_nothing_is_watched():
    assert not Best("", 0).note(1, {})


def test_an_unknown_metric_is_refused_with_those_there_are():
    row = {"heldout_accuracy": 1.0, "heldout_tokens_per_forward": 2.0, "reward": 0.1}
    message = (
        "run.keep_best='heldout_acc' is no metric of the evaluation: heldout_accuracy, "
        "heldout_tokens_per_forward$"
    )
    with pytest.raises(ValueError, match=message):
        Best("heldout_acc", 0).note(1, row)


def test_what_is_published_takes_the_place_of_another_export(tmp_path):
    for name in ("best", "export"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(name)
    publish(tmp_path)
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["best"]
    assert (tmp_path / "best" / "best").exists()


def test_of_which_step_the_best_weights_are_is_known_beside_them(tmp_path):
    assert holds(tmp_path, 3)  # of a run of before: nothing says otherwise
    mark(tmp_path, None)  # while they are written
    assert not holds(tmp_path, 3)
    mark(tmp_path, 5)
    assert holds(tmp_path, 5) and not holds(tmp_path, 3)
    (tmp_path / MARK).write_bytes(b"\0\0")  # as a machine that lost power leaves it
    assert not holds(tmp_path, 5)


@pytest.mark.parametrize("held, exported", [(3, "best"), (5, "last")])
def test_weights_that_are_not_the_best_ones_are_not_exported_as_such(
    tmp_path, held, exported
):
    """Killed after step 5, which was better, and run again from 4 with other settings."""
    champion, said, last = Best("heldout_accuracy", 0), [], []
    champion.note(3, {"heldout_accuracy": 0.5})
    (tmp_path / "best").mkdir()
    mark(tmp_path, held)
    here = types.SimpleNamespace(folder=tmp_path, main=True, say=said.append)
    run = types.SimpleNamespace(
        here=here,
        champion=champion,
        progress=types.SimpleNamespace(step=9, states={"policy": "weights"}),
        export=lambda *args: last.append(args),
    )
    train.Training.export_policy(run)
    assert (tmp_path / "export").exists() == (exported == "best")
    assert last == ([] if exported == "best" else [("export", "weights")])
    assert ("the last weights are exported" in said[0]) == (exported == "last")
