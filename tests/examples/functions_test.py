"""Problems that examples make: their own programs pass their tests."""

import json

import numpy as np
import pytest

from dllm_jax import data
from dllm_jax.rl import rewards
from dllm_jax.rl.config import RewardConfig
from dllm_jax.rl.rewards import code, sandbox
from examples.functions import make


@pytest.fixture(scope="module", autouse=True)
def close_jails():
    yield
    sandbox.close()


def test_functions_of_twenty_families_pass_their_own_tests():
    rng = np.random.default_rng(0)
    assert len(make.FAMILIES) == 20
    rows = [make.problem(rng, i, 3, 5, "g", "n", wrong=0.0) for i in range(20)]
    wrong = [make.problem(rng, i, 3, 5, "g", "n", wrong=1.0) for i in range(20)]
    grader = rewards.grader("code", RewardConfig(seconds=10.0))
    grader.begin()
    problems = [data.Problem([1], row["question"], "", row) for row in rows]
    for problem in problems:
        grader.check(problem)
    texts = [row["response"] for row in rows]
    assert (grader.grade(texts, problems, None).reward_n == 1).all()
    texts = [row["response"] for row in wrong]
    assert (grader.grade(texts, problems, None).reward_n < 1).all()


def test_their_problems_differ_and_are_drawn_by_the_seed():
    rows, again = (make.problems(np.random.default_rng(1), 60, 0.5) for _ in range(2))
    assert rows == again and len({row["question"] for row in rows}) == len(rows) == 60
    for row in rows:
        function, x = row["question"][0], row["question"][2]
        assert code.extract(row["response"]).startswith(f"def {function}({x}):\n")


def test_of_each_family_there_are_as_many_as_are_asked_for(monkeypatch):
    monkeypatch.setattr(make, "problem", lambda rng, index, *given: {"family": index})
    rows = make.problems(np.random.default_rng(0), make.MOST, 0.5)
    found = np.bincount([row["family"] for row in rows], minlength=20)
    assert len(rows) == make.MOST and set(found) == {make.MOST // 20}


@pytest.mark.parametrize("index", range(20))
def test_their_tests_tell_each_program_from_the_others(index):
    _, value, kind = make.FAMILIES[index]
    given = make.telling(np.random.default_rng(0), index, 4, 7)
    wanted = make.called(value.format(x="x", k=4, j=7), given)
    others = [v for _, v, its in make.FAMILIES if its == kind and v != value]
    for other in others:
        assert make.called(other.format(x="x", k=4, j=7), given) != wanted
    if "{k}" in value:
        assert make.called(value.format(x="x", k=5, j=7), given) != wanted


def test_the_bundled_model_has_words_for_every_answer_of_its_data():
    tok = data.tokenizer(str(make.HERE / "model"))
    files = [
        (make.HERE / name).read_text() for name in ("heldout.jsonl", "train.jsonl")
    ]
    heldout, train = ([json.loads(x) for x in text.splitlines()] for text in files)
    asked = [{row["question"] for row in rows} for rows in (heldout, train)]
    assert [*map(len, asked)] == [128, 2000] and not asked[0] & asked[1]
    ids = [tok(row["response"])["input_ids"] for row in heldout + train]
    assert max(map(len, ids)) <= 15
    assert not any(tok.unk_token_id in row for row in ids)
