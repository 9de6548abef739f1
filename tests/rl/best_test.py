"""The best evaluation: ties go to the earlier, what is stale ends a run."""

import errno
import json
import pathlib
import types

import pytest

from dllm_jax import begin, config, exits, train
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
@pytest.mark.parametrize("of", [None, {"data.heldout": ["a"]}])
def test_the_best_of_another_metric_is_no_measure(name, said, of):
    found, told = Best("heldout_accuracy", 3), []
    found.note(4, {"heldout_accuracy": 0.9})
    found.note(5, {"heldout_accuracy": 0.8})
    assert not found.before(4) and found.before(5)
    memory = json.loads(json.dumps(found.memory))
    again = Best(name, 3, still(memory, name, of, told.append))
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
    memory = {"value": 0.9, "step": 4, "stale": 1}
    name = "heldout_accuracy"
    found = Best(name, 0, still(memory, name, {"n": 8}, told.append))
    assert (found.value, told) == (0.9, [])


def test_the_best_of_other_evaluations_is_no_measure():
    """An easier set of problems would have the best for good."""
    easy, hard = {"data.heldout": ["a"], "n": 8}, {"data.heldout": ["b"], "n": 8}
    told, name = [], "heldout_accuracy"

    def resumed(memory, of):
        return Best(name, 3, still(memory, name, of, told.append))

    found = resumed(None, easy)
    found.note(4, {name: 0.9})
    memory = json.loads(json.dumps(found.memory))
    assert resumed(memory, easy).value == 0.9
    older = {key: x for key, x in memory.items() if key != "of"}
    assert resumed(older, hard).value == 0.9
    assert resumed(memory, easy | {"eval.samplers": ""}).value == 0.9  # older, too
    done = resumed(memory, None)  # there will be no further one to compare
    assert (done.value, done.of) == (0.9, easy)
    assert not told
    again = resumed(memory, hard)
    said = "was of evaluations before data.heldout changed: the best begins anew"
    assert told == [f"run.keep_best='heldout_accuracy' {said}"]
    assert (again.value, again.step, again.of) == (None, 0, hard)
    assert again.note(6, {"heldout_accuracy": 0.1})


def asked(changed: dict) -> dict:
    """Returns what evaluations ask with these settings changed."""
    tree = config.default()
    tree.data.heldout = "examples/arithmetic/heldout.jsonl"
    for section, values in changed.items():
        tree[section].update(values)
    return begin.evaluated(config.freeze(tree))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"sampler": {"strategy": "static"}}, "sampler.strategy"),
        ({"sampler": {"stop_ids": (7,)}}, "sampler.stop_ids"),
        ({"eval": {"samplers": "one:strategy=static"}}, "eval.samplers"),
        ({"data": {"template": "{question}="}}, "data.template"),
        ({"rl": {"truncated": "graded"}}, "rl.truncated"),
        ({"data": {"answer": "gold"}}, "data.answer"),
        ({"sampler": {"rows": 8, "page": 64, "temperature": 0.5}}, ""),
        ({"rl": {"steps": 7}, "eval": {"every": 3}}, ""),
    ],
)
def test_what_answers_depend_on_tells_evaluations_apart(change, key):
    told, name = [], "heldout_accuracy"
    found = Best(name, 3, still(None, name, asked({}), told.append))
    found.note(4, {name: 0.9})
    memory = json.loads(json.dumps(found.memory))
    again = Best(name, 3, still(memory, name, asked(change), told.append))
    assert (again.value is None) == bool(key)
    assert [f"before {key} changed" in line for line in told] == [True] * bool(key)


@pytest.mark.parametrize("judges", ["answers", "chunks"])
def test_a_judge_of_answers_tells_evaluations_apart(judges):
    spec, split = ("judge", "none") if judges == "answers" else ("math", "marks")

    def of(**judge):
        judge = {"at": "http://localhost:1/v1"} | judge
        reward = {"split": split, "judge": judge}
        return asked({"rl": {"reward": spec}, "reward": reward})

    for change in ({"at": "examples.arithmetic.verdicts:verdicts"}, {"votes": 5}):
        assert (of(**change) != of()) == (judges == "answers")
    assert of(tries=9, parallel=2, at="http://elsewhere/v1") == of()


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


def test_a_mark_that_cannot_be_read_ends_a_run_in_a_line(tmp_path, monkeypatch):
    mark(tmp_path, 5)

    def read_bytes(file):
        raise OSError(errno.EIO, "Input/output error", str(file))

    monkeypatch.setattr(pathlib.Path, "read_bytes", read_bytes)
    with pytest.raises(
        exits.CannotGoOn, match="best.json cannot be read: Input/output"
    ):
        holds(tmp_path, 5)


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
