"""Scores of records, cards, and the AUP of a sweep."""

import collections
import dataclasses
import json

import matplotlib.pyplot as plt
import numpy as np
import pytest

from dllm_jax import statistics
from dllm_jax.data import Problem
from dllm_jax.rl import rewards, scores
from dllm_jax.rl.config import RewardConfig
from dllm_jax.sampling.config import SamplerConfig

VOTE = rewards.grader("math", RewardConfig()).vote


def record(said="", *, right=True, tokens=4, forwards=2, **fields):
    """Returns a line of eval.jsonl, as far as scores read it."""
    return {
        "response_ids": [0] * tokens,
        "forwards": forwards,
        "finished": "stop",
        "reward": float(right),
        "group": 0,
        "text": f"\\boxed{{{said}}}" if said else "",
    } | fields


def test_scores_by_hand():
    rows = [
        *(record("1/2"), record("0.5"), record("3", right=False)),
        *(record("7", right=False), record(right=False), record("8", forwards=6)),
    ]
    rows[5]["finished"] = "length"
    got = scores.of_records(rows, 3, VOTE)
    assert got["accuracy"].value == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert got["pass@1"] == got["accuracy"]
    assert got["pass@2"].value == pytest.approx((1 + 2 / 3) / 2)
    assert got["pass@3"].value == 1
    assert got["maj@3"].value == pytest.approx((1 + 1 / 2) / 2)  # a draw of 7 and 8
    assert got["truncated"].value == pytest.approx(1 / 6)
    assert got["response_length"].value == 4
    assert got["forwards"].value == pytest.approx(16 / 6)
    assert got["tokens_per_forward"].value == pytest.approx(24 / 16)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("problems", [2, 50, 400])
def test_scores_of_answers_that_are_all_alike_have_an_interval(problems, right):
    got = scores.of_records([record("1", right=right)] * 3 * problems, 3, VOTE)
    for name in ("accuracy", "pass@2", "pass@3", "maj@3"):
        assert got[name].high - got[name].low > 0.005
        assert got[name][:3] == got["pass@3"][:3] and got[name].value == right


@pytest.mark.parametrize(("part", "right"), [(0.01, 0.0), (0.03, 1.0)])
def test_intervals_cover_pass_and_maj_at_k_of_what_is_rare(part, right):
    """A part of the problems is right in 0.3 of its answers, the others never, or always.

    A bootstrap would cover 86 and 87 %: where few differ, its draws of them are too alike.
    """
    rng, covered = np.random.default_rng(0), collections.Counter()
    won = 0.3**3 + 3 * 0.3**2 * 0.7  # two of three agree; wrong ones say the same
    truth = {
        "pass@2": part * (1 - 0.7**2) + (1 - part) * right,
        "maj@3": part * won + (1 - part) * right,
    }
    for _ in range(100):
        hard_n1 = np.where(rng.random((500, 1)) < part, 0.3, right)
        right_ns = rng.random((500, 3)) < hard_n1
        found = scores.of_sets(right_ns, right_ns.astype(int))
        for name, x in truth.items():
            covered[name] += found[name].low <= x <= found[name].high
    assert min(covered.values()) >= 90, covered


def test_what_nobody_judged_counts_in_no_accuracy():
    rows = [record(), record(right=False, graded=False), record(), record(right=False)]
    got = scores.of_records(rows, 2)
    assert got["accuracy"].value == 0.75 and got["pass@1"] == got["accuracy"]
    assert "maj@2" not in got and got["pass@2"].value == 1
    assert got["unjudged"].value == 0.25 and "skipped" not in got


@pytest.mark.parametrize("problems", [3, 400])
def test_an_unjudged_answer_costs_a_problem_no_more_than_itself(problems):
    late = record(right=False, graded=False)
    whole = [record(), record(right=False)] * problems
    want = scores.of_records(whole, 2)["accuracy"]
    got = scores.of_records([*whole, late, late], 2)[
        "accuracy"
    ]  # a problem without any
    assert got == want
    rows = [record(), record()] * problems
    got = scores.of_records([*rows, record(), late], 2)["accuracy"]
    assert got == scores.of_records([*rows, record(), record()], 2)["accuracy"]
    assert got.low < 1 == got.value
    got = scores.of_records([late, late], 2)
    assert got["accuracy"][:3] == (0.0, None, None) and got["pass@2"].value == 0
    assert scores.written("accuracy", got["accuracy"]._asdict()) == "–"
    assert scores.written("pass@2", got["pass@2"]._asdict()) == "–"
    assert got["unjudged"].value == 1


def test_what_was_skipped_is_told_and_is_in_no_share_of_answers_given():
    skipped = record(right=False, tokens=0, forwards=0, finished="skipped")
    cut = record(finished="length")
    got = scores.of_records([record(), cut, skipped, skipped, cut, cut], 2)
    assert got["skipped"].value == pytest.approx(1 / 3)
    assert got["truncated"].value == 0.75 and got["response_length"].value == 4
    assert got["accuracy"].value == pytest.approx(2 / 3)
    assert "skipped" not in scores.of_records([record(), cut], 2)
    bad = record(right=False, tokens=0, forwards=0, finished="nan")
    assert "skipped" not in scores.of_records([bad, cut], 2)


def test_a_table_has_a_column_for_what_one_card_alone_tells():
    late = record(right=False, graded=False)
    facts = {"checkpoint": {"path": "m", "hash": "0" * 64}, "data": {"path": "d"}}
    facts |= {"problems": 1, "answers": 2, "seed": 0, "temperature": 1.0}
    facts |= {"sampler": dataclasses.asdict(SamplerConfig())}
    cards = []
    for rows in ([record(), record()], [record(), late]):
        found = scores.of_records(rows, 2)
        cards.append(facts | {"scores": {k: x._asdict() for k, x in found.items()}})
    for order in (cards, cards[::-1]):
        head, _, *rows = scores.table(order).splitlines()
        at = head.split(" | ").index("unjudged")
        said = {row.split(" | ")[at].split(" [")[0] for row in rows}
        assert said == {"0.0 %", "50.0 %"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps_per_block", 2),
        ("unmasking", "cosine"),
        ("cache", "prefix"),
        ("top_k", 5),
        ("rank_temperature", 0.5),
        ("before_stop", True),
        ("int8", True),
    ],
)
def test_a_cards_words_tell_samplers_apart(field, value):
    sampler = dataclasses.asdict(SamplerConfig(max_new=14, max_prompt=99, rows=8))
    plain = scores.in_words({"temperature": 1.0, "sampler": sampler})
    assert plain == "dynamic 0.9 block 4, T=1, 14 tokens"
    other = scores.in_words({"temperature": 1.0, "sampler": sampler | {field: value}})
    assert other == f"{plain}, {field}={value}"


def test_the_first_of_several_graders_says_what_is_right_if_it_could():
    said = {"reward": 0.5, "rewards": {"math": 1.0, "length": -0.5}}
    lost = {"reward": 1.0, "rewards": {"math": None, "length": 1.0}}
    wrong = {"reward": 0.0, "rewards": {"math": 0.0, "length": 0.0}}
    rows = [record(**x) for x in (said, wrong, lost, wrong)]
    got = scores.of_records(rows, 2)
    assert got["accuracy"].value == 0.25 and got["pass@2"].value == 0.5


def test_a_sweep_counts_an_unjudged_answer_in_no_accuracy():
    late = record(right=False, graded=False, tokens=8)
    rows = [record(), late, record(right=False), record(), late, late]
    point = scores.setting(0.5, rows, 2)
    (told,) = scores.sweep("sampler.threshold", [point], 0.0)["points"]
    assert told["accuracy"] == 100 * scores.of_records(rows, 2)["accuracy"].value == 75
    assert told["tokens_per_forward"] == pytest.approx(36 / 12)


def test_votes_go_by_what_answers_mean():
    texts = [
        "\\boxed{0.5}",
        "\\boxed{\\frac{1}{2}}",
        "no",
        "\\boxed{2}",
        "\\boxed{50\\%}",
    ]
    said = VOTE(texts)
    assert said[0] == said[1] == 0 and said[2] == -1 and said[3] == 1
    letters = rewards.grader("choice", RewardConfig()).vote
    assert letters(["\\boxed{a}", "\\boxed{(A)}", "\\boxed{B}", "C"]) == [0, 0, 1, -1]
    assert rewards.grader("math,length:0.1", RewardConfig()).vote is not None
    assert rewards.grader("code", RewardConfig()).vote is None


def test_the_aup_of_a_sweep_and_its_interval():
    rng = np.random.default_rng(0)
    hard_n = rng.random(200)
    points = []
    for value, right, tokens in ((0.9, 0.75, 8), (0.6, 0.74, 24)):
        right_n = (hard_n < right).astype(float)
        points.append(
            scores.Setting(value, right_n, np.full(200, tokens), np.full(200, 8))
        )
    got = scores.sweep("sampler.threshold", points, 80.0)
    measured = [(x["tokens_per_forward"], x["accuracy"]) for x in got["points"]]
    assert got["aup"]["value"] == pytest.approx(statistics.aup(measured, 80.0))
    assert got["aup"]["low"] < got["aup"]["value"] < got["aup"]["high"]
    assert scores.sentence(got).endswith("with 80.00 % as the best accuracy")
    assert json.loads(json.dumps(got)) == got
    own = scores.sweep("sampler.threshold", points, 0.0)
    best = max(y for _, y in measured)
    assert own["best"] == best > 1 and own == scores.sweep("x", points, 0.8) | {
        "key": "sampler.threshold"
    }
    worse = scores.Setting(0.3, np.zeros(200), np.full(200, 40), np.full(200, 8))
    got = scores.sweep("sampler.threshold", [*points, worse], 0.0)
    assert got["aup"] is None and "more than 5 points below" in scores.sentence(got)
    got = scores.sweep("sampler.threshold", [worse], 0.0)
    assert got["best"] == 0 and got["aup"] is None
    assert scores.sentence(got) == "AUP: nothing is right, by any setting"


def test_the_picture_of_a_sweep_has_intervals_and_whole_labels(tmp_path, monkeypatch):
    drawn, close = [], plt.close
    monkeypatch.setattr(plt, "close", drawn.append)
    rows = ((0.75, 3.0, 40.0), (0.9, 1.0, 60.0))
    names = ("value", "tokens_per_forward", "accuracy")
    told = {"key": "x", "points": [dict(zip(names, row, strict=True)) for row in rows]}
    known = {"value": 0.4, "low": 0.3, "high": 0.55}, {"value": 0.6, "low": None}
    cards = [{"scores": {"accuracy": {"high": None} | x}} for x in known]
    scores.picture(told, cards, tmp_path / "sweep.png")
    (axis,) = drawn[0].axes
    ends = [x[:, 1].tolist() for x in axis.containers[0].lines[2][0].get_segments()]
    assert ends == [[60, 60], pytest.approx([30, 55])]
    for label in axis.texts:
        box = label.get_window_extent()
        assert axis.bbox.contains(*box.p0) and axis.bbox.contains(*box.p1)
    close(drawn[0])


def test_the_accuracy_of_groups():
    levels = [3, 5, 3]
    asked = [Problem([], "", "", {"level": x}) for x in levels for _ in range(2)]
    rows = [record(right=x) for x in (1, 1, 0, 0, 1, 0)]
    made = {"by": "level", "groups": scores.groups(rows, asked, 2, "level")}
    told = {
        x: (g["problems"], g["accuracy"]["value"]) for x, g in made["groups"].items()
    }
    assert told == {"3": (2, 0.75), "5": (1, 0.0)}
    assert scores.table_of_groups(made).splitlines()[2].startswith("| 3 | 2 | 75.0 % [")
