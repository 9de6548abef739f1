"""Held-out problems: which they are, what is told of them, and whose time it is."""

import dataclasses

import pytest

from dllm_jax.rl import heldout
from tests.rl import lent


@pytest.mark.parametrize(("count", "number"), [(3, 3), (0, 256)])
def test_the_first_problems_of_the_file_are_evaluated(tmp_path, count, number):
    settings = lent.settings(heldout_problems=count)
    problems = heldout.problems(settings, lent.tools(settings, tmp_path))
    whole = (lent.ARITHMETIC / "heldout.jsonl").read_text().splitlines()
    assert len(problems) == (count or len(whole))
    assert problems[0].text in whole[0]


def test_without_a_file_there_are_none(tmp_path):
    settings = lent.settings()
    nothing = dataclasses.replace(settings.data, heldout="")
    settings = dataclasses.replace(settings, data=nothing)
    assert heldout.problems(settings, lent.tools(settings, tmp_path)) == []


def test_all_of_an_evaluation_is_time_of_eval(tmp_path):
    settings = lent.settings()
    tools = lent.tools(settings, tmp_path)
    problems = heldout.problems(settings, tools)
    metrics = heldout.evaluate(2, lent.Weights(), problems, settings, tools)
    assert metrics == {
        "heldout_accuracy": pytest.approx(1 / 3),
        "heldout_tokens_per_forward": 1.0,
        "heldout_response_length": lent.ANSWER,
        "heldout_nan_answers": 0,
    }
    assert tools.timer.pop().keys() == {"seconds/eval"}
