"""Graders by name, several at once, and one's own from a file anywhere."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from dllm_jax import begin, config, data
from dllm_jax.rl import rewards, rollout
from dllm_jax.rl.config import RewardConfig, RLConfig
from dllm_jax.rl.rewards import Grades, choice, math, sandbox, short
from dllm_jax.sampling import state
from tests.rl import lent

CFG = RewardConfig(seconds=2.0, memory_mb=256)


@pytest.fixture(scope="module", autouse=True)
def close_jails():
    yield
    sandbox.close()
    math.close()


def problem(answer="", **record):
    return data.Problem([1], "?", answer, record)


def trace(*lengths, room=10):
    """Returns answers of so many tokens, each behind a prompt of two."""
    rows = [
        state.no_answer(room + 2)._replace(
            prompt_len=np.int32(2), len=np.int32(n), stopped=np.bool_(True)
        )
        for n in lengths
    ]
    return state.stacked(rows)


def grade(spec, texts, problems, lengths=None):
    lengths = lengths or [5] * len(texts)
    return rewards.grader(spec, CFG).grade(texts, problems, trace(*lengths))


# ---- The shipped ones ----------------------------------------------------------------


def test_math_and_choice_compare_with_the_gold():
    texts = [r"\boxed{0.5}", r"\boxed{2}", "1/2"]
    grades = grade("math", texts, [problem("1/2")] * 3)
    assert grades.reward_n.tolist() == [1.0, 0.0, 0.0]
    assert grades.reward_nT is None
    texts = [
        r"\boxed{(b)}",
        "<answer>B. Paris</answer>",
        r"\boxed{\text{B}}",
        r"\boxed{C}",
    ]
    texts += [r"\boxed{B or C}", r"\boxed{$B$ or **C**}", r"\boxed{AB}", "B", ""]
    grades = grade("choice", texts, [problem("(B)")] * 9)
    assert grades.reward_n.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "text",
    [
        "$B$",
        "**B**",
        "**B.** Paris",
        "`b`",
        r"\textrm{B}",
        r"\mathsf{(B)}",
        r"$\mathit{B}$",
        r"\texttt{B}",
        r"\text{\textbf{B}}",
        r"\(B\)",
        "[B]",
        '"B"',
        "Option B",
        r"\text{Choice (B)}",
        "B - Paris",
        "B. Either A or C",
    ],
)
def test_a_choice_is_a_letter_in_whatever_font(text):
    assert choice.grade([rf"\boxed{{{text}}}"] * 2, ["B", "C"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "text",
    ["B. Paris or C. Rome", "(B) Paris and (C) Rome"]
    + ["(B) or (C)", "(B)(C)", "B) and C)", "(B). (C)", "B. C. D.", "(B), (C)"]
    + ["B. or C", "B-C", "Options B"],
)
def test_several_options_are_no_choice(text):
    assert choice.grade([rf"\boxed{{{text}}}"] * 2, ["B", "C"]) == [0.0, 0.0]


SHORT = {  # gold: what is right, and what is wrong
    "A": (["A", "a.", "(A)", "A. cat", "A: cat"], ["B", "A cat", "A or B", "the"]),
    "B": (
        ["B", "b.", "(B)", "B. Paris", r"\boxed{B}", "<think>A or C</think>B"]
        + ["**B**", "**B.**", "**B**. Paris", "`B`", "$B$", '"B"', r"\mathsf{B}"],
        ["C", "**C**", "**B** or C", "$AB$", "B*C"],
    ),
    "(A)": (["A", "a. cat"], ["B", "the"]),
    "yes": (
        ["Yes.", "YES, it is", r"\boxed{\text{yes}}", r"\boxed{\textsf{yes}}"],
        ["no", "yes or no", "y", "It is yes", "a", "The...", "?", r"\boxed{.}"],
    ),
    "no": (["No", "no, it isn't."], ["yes", "none", "I do not know", "the", "-"]),
    "€5": (["5", "€ 5.0"], ["$5", r"\$5", "£5", "€6", "5 $"]),
    "$5": (["5", r"\$5.00", "$5$", "five"], ["€5", "¥5", "$6"]),
    "2": (
        ["two", "2.0", r"\boxed{2}", " 2. "],
        ["-2", "12", "1 2", "2 cats", r"\boxed{2"],
    ),
    "-1,250.5": (["-1250.5", "- 1250.50"], ["1250.5", "-1,250", "1250 5"]),
    "a red circle": (
        ["Red circle.", "the red circle", "RED  circle"],
        ["circle red", "red"],
    ),
    "rectangle": (
        ["Rectangle", "<answer>a rectangle</answer>"],
        ["", "rectangle" * 99],
    ),
}


@pytest.mark.parametrize("gold", SHORT)
def test_a_short_answer_says_the_same_in_other_words(gold):
    right, wrong = SHORT[gold]
    wrong = [*wrong, r"\boxed{}", "<answer>", "x" * 10_000, gold + r" \boxed{"]
    short.check(gold)
    assert short.grade(right, [gold] * len(right)) == [1.0] * len(right)
    assert short.grade(wrong, [gold] * len(wrong)) == [0.0] * len(wrong)


FORMULAS = {  # as above, of numbers and operators
    "5": (
        ["$5$", "(5)", "**5**", "= 5", "5!", r"\$5", "#5", "five", r"\text{5}"],
        ["$-5$", "(-5)", "**-5**", r"\left(-5\right)", "−5", ".5", "x = -5", "minus 5"],
    ),
    "-5": (["$-5$", "−5", "–5", "x = -5", "(-5)", "- 5"], ["5", "$5$", "five"]),
    "x-1": (["x - 1", "-1 + x", "X-1"], ["x+1", "1-x", "-1"]),
    "x+1": (["1+x"], ["x 1", "x-1"]),
    "x>5": (["5<x"], ["x<5", "5"]),
    "(2, -3)": (["(2,-3)"], ["(2, 3)", "(-3, 2)", "2 3"]),
    "x^2": (["x²", "x·x"], ["x2", "2x", "x³"]),
    r"\sqrt{2}": (["√2", "√(2)"], ["2", "√3", "√20"]),
    "1/2": (["0.5", r"\frac{1}{2}", "$1/2$", "½"], ["1-2", "1 2", "12", "-1/2"]),
    "0.5": ([".5", "1/2"], ["5", "-.5"]),
    # Scores, dates and times are no calculations.
    "3-2": (["3 - 2", "3–2", "$3-2$", "3-2.", "\\(3-2\\)"], ["2-1", "1", "2-3"]),
    "2023-01-05": (["2023-1-5"], ["2023-05-01", "2017"]),
    "1/1/2023": (["01/01/2023"], ["10/10/2023"]),
    "10:30": (["10:30"], ["5:15", "1/3"]),
    "O+": (["o+"], ["O-", "O"]),
    "A+": (["a+", "$A+$"], ["A-", "A"]),
    # Words, and names in which an operator is none.
    "2 cats": (["two cats", "2 cats."], ["-2 cats", "2", "$-2$ cats"]),
    "a 7": (["7", "seven"], ["-7", "(-7)"]),
    "seven": (["7", "$7$"], ["-7", "$-7$"]),
    "0.5 m": ([".5 m"], ["5 m", "-.5 m"]),
    "F-16": (["F 16", "f-16"], ["F-15", "16"]),
    "N/A": (["n/a"], ["A/N"]),
    "B 7": (["b 7"], ["7 B", "B 8"]),
}


@pytest.mark.parametrize("gold", FORMULAS)
def test_a_short_answers_signs_are_no_punctuation(gold):
    right, wrong = FORMULAS[gold]
    short.check(gold)
    assert short.grade(right, [gold] * len(right)) == [1.0] * len(right)
    assert short.grade(wrong, [gold] * len(wrong)) == [0.0] * len(wrong)


def test_words_are_no_mathematics_and_what_takes_too_long_is_no_verdict(monkeypatch):
    asked = []
    monkeypatch.setattr(math, "equal", lambda *pair: asked.append(pair))
    texts, golds = ["x-1", "two cats", "seven"], ["x+1", "2 cats", "a 7"]
    grades = short.grade(texts, golds)
    assert np.isnan(grades[0]) and grades[1:] == [1.0, 1.0]
    assert asked == [("x-1", "x+1")]


@pytest.mark.parametrize("gold", ["", "...", "the", "word " * 50])
def test_a_long_answer_is_no_short_one(gold):
    with pytest.raises(ValueError, match="is no short one"):
        short.check(gold)


def test_short_answers_vote():
    vote = rewards.grader("short", CFG).vote
    assert vote(["two", "2", "B", "", "3"]) == [0, 0, 1, -1, 2]


@pytest.mark.parametrize("gold", ["", "AB", "1", "the first"])
def test_a_choice_needs_a_letter(gold):
    with pytest.raises(ValueError, match="is no letter of an option"):
        choice.check(gold)


def test_code_runs_the_records_tests():
    record = {"test_list": ["assert f(1) == 2", "assert f(2) == 3"]}
    grader = rewards.grader("code", CFG)
    (line,) = grader.begin()
    assert line.startswith("sandbox: ") and "seccomp" in line
    assert not grader.gold
    texts = [
        "```python\ndef f(x): return x + 1\n```",
        "```python\ndef f(x): return 2\n```",
        "```python\ndef f(x): return x + 1\n",  # cut
        "def f(x): return x + 1",
    ]
    asked = [problem(**record)] * 4
    for one in asked:
        grader.check(one)
    assert grade("code", texts, asked).reward_n.tolist() == [1.0, 0.5, 0.0, 0.0]
    with pytest.raises(ValueError, match="no tests: it needs one of the fields"):
        grader.check(problem("4", question="?"))


def test_a_file_of_programs_needs_tests_and_no_answers(tmp_path):
    path = tmp_path / "tasks.jsonl"
    good = {"text": "Double it.", "test_list": ["assert f(1) == 2"]}
    grader = rewards.grader("code:1,length:0.1", CFG)
    cfg = data.DataConfig(question="text")
    path.write_text(json.dumps(good) + "\n")
    (one,) = data.problems(str(path), lent.TOK, cfg, grader)
    assert one.record == good and one.answer == ""
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | {"test_list": [1]}))
    with pytest.raises(
        ValueError, match="record 2: field 'test_list': must be a list of"
    ):
        data.problems(str(path), lent.TOK, cfg, grader)
    with pytest.raises(ValueError, match="record 1: no field 'answer'"):
        data.problems(str(path), lent.TOK, cfg, rewards.grader("math,code", CFG))


def test_code_is_refused_where_nothing_confines(monkeypatch):
    def none():
        raise RuntimeError("programs cannot be run safely here: no Landlock")

    monkeypatch.setattr(sandbox, "available", none)
    with pytest.raises(
        ValueError, match="rl.reward: programs cannot be run safely here"
    ):
        rewards.grader("code", CFG).begin()


def test_length_and_format():
    grades = grade("length", ["", "", ""], [problem()] * 3, [0, 5, 10])
    np.testing.assert_allclose(grades.reward_n, [1.0, 0.5, 0.0])
    texts = [r"\boxed{1}", "<answer>1</answer>", "```python\n1\n```", "1", r"\boxed{1"]
    assert grade("format", texts, [problem()] * 5).reward_n.tolist() == [1, 1, 1, 0, 0]


def test_an_answers_room_is_its_limit_whatever_its_canvas_has():
    grader = rewards.grader("length", CFG, room=8)
    asked = [problem()] * 3
    found = grader.grade(["", "", ""], asked, trace(0, 4, 8, room=30))
    np.testing.assert_allclose(found.reward_n, [1.0, 0.5, 0.0])


def test_a_run_tells_its_graders_the_limit_of_an_answer(monkeypatch):
    seen = {}

    def spied(*given, **how):
        seen.update(how)
        raise LookupError

    monkeypatch.setattr(rewards, "grader", spied)
    cfg, model = config.Config(), types.SimpleNamespace(looks=False)
    here = types.SimpleNamespace(cfg=cfg, model=model, tok=None, samples=True)
    with pytest.raises(LookupError):
        begin.tools(here)
    assert seen["room"] == cfg.sampler.max_new


# ---- Several at once -----------------------------------------------------------------


def test_several_are_weighed_and_each_is_told():
    texts, asked = [r"\boxed{1}", r"\boxed{2}"], [problem("1")] * 2
    grades = grade("math:1,length:0.1", texts, asked, [5, 10])
    np.testing.assert_allclose(grades.reward_n, [1.05, 0.0])
    assert {name: x.tolist() for name, x in grades.parts.items()} == {
        "math": [1.0, 0.0],
        "length": [0.5, 0.0],
    }
    assert not grade("math", texts, asked).parts
    assert grade("math:2", texts, asked).reward_n.tolist() == [2.0, 0.0]
    assert rewards.grader("length,math", CFG).gold
    assert not rewards.grader("length,format", CFG).gold


def test_what_one_cannot_judge_nobody_has_judged():
    nan = Grades(np.array([1.0, np.nan]))
    both = rewards.added({"a": nan, "b:c": Grades(np.ones(2))}, {"a": 1.0, "b:c": 0.5})
    np.testing.assert_array_equal(both.reward_n, [1.5, np.nan])
    told = rewards.added({"a": nan, "b": Grades(np.ones(2))}, {"a": 0.0, "b": 0.5})
    np.testing.assert_array_equal(told.reward_n, [0.5, 0.5])
    np.testing.assert_array_equal(told.parts["a"], [1.0, np.nan])
    assert [*both.parts] == ["a", "c"] and both.reward_nT is None


def test_rewards_of_tokens_are_added_by_weight():
    one = Grades(np.ones(2), np.ones((2, 3)))
    both = rewards.added(
        {"a": one, "b": Grades(np.ones(2)), "c": one}, {"a": 1, "b": 1, "c": 0.5}
    )
    np.testing.assert_array_equal(both.reward_nT, np.full((2, 3), 1.5))


def graded(grader, lengths, **how):
    texts = [rf"\boxed{{{i}}}" for i in range(len(lengths))]
    asked = [problem("0")] * len(texts)
    group_n = np.zeros(len(texts), int)
    return lent.graded(trace(*lengths), texts, asked, group_n, grader, **how)


def test_accuracy_is_the_firsts_and_every_part_is_a_metric():
    grader = rewards.grader("math,length:0.5", CFG)
    got = graded(grader, [5, 5, 0, 10], truncated_wrong=True)
    np.testing.assert_allclose(got.reward_n, [1.25, 0.25, 0.0, 0.0])
    told = rollout.summary(got)
    assert told["accuracy"] == 0.25
    assert told["reward/math"] == 0.25 and told["reward/length"] == 0.25
    assert rollout.passed(got, 4) == pytest.approx(
        {"pass@1": 0.25, "pass@2": 0.5, "pass@4": 1}
    )
    records = rollout.as_records(got, [problem("0")] * 4)
    assert records[1]["rewards"] == {"math": 0.0, "length": 0.5}
    for record in records:
        record["finished"] = "stop"
    assert rollout.summary(rollout.of_records(records))["reward/length"] == 0.25
    records[1]["rewards"] = {"mine": 1.0}
    with pytest.raises(ValueError, match="graded by math, length and mine"):
        rollout.of_records(records)


def test_accuracy_leaves_out_what_its_grader_could_not_judge_and_rewards_do_not():
    """With a weight of 0: the other grader says what is learned from."""

    def grade(texts, problems, trace) -> Grades:
        every = {
            "math": Grades(np.array([1.0, 0.0, np.nan, np.nan])),
            "x": Grades(np.array([0.5, 0.5, 0.5, np.nan])),
        }
        return rewards.added(every, {"math": 0.0, "x": 1.0})

    grader = rewards.Grader(grade, rewards.anything)
    got = graded(grader, [5] * 4, truncated_wrong=False)
    np.testing.assert_array_equal(got.reward_n, np.float32([0.5, 0.5, 0.5, 0]))
    assert got.late_n.tolist() == [False] * 3 + [True]
    assert got.judged_n.tolist() == [True] * 2 + [False] * 2
    told = rollout.summary(got)
    assert (told["accuracy"], told["reward"], told["graded_timeouts"]) == (0.5, 0.5, 2)
    assert (told["reward/math"], told["reward/x"]) == (0.5, 0.5)
    # As a card tells it: pass@1 is the accuracy, and beyond it what nobody judged is wrong.
    assert rollout.passed(got, 2) == {"pass@1": 0.5, "pass@2": 0.5}
    few = dataclasses.replace(got, parts={"math": np.array([1, np.nan, 0, 0])})
    assert rollout.passed(few, 2)["pass@1"] == 0.5  # and not 1 / 3
    records = rollout.as_records(got, [problem("0")] * 4)
    text = json.dumps(records, allow_nan=False)
    assert [x["rewards"]["math"] for x in records] == [1.0, 0.0, None, None]
    assert [x.get("graded") for x in records] == [None] * 3 + [False]
    assert rollout.summary(rollout.of_records(json.loads(text))) == told


def test_the_first_grader_stays_the_first_where_a_step_asks_again():
    grader = rewards.grader("math,length:0.5", CFG)
    got = graded(grader, [5, 5], truncated_wrong=False)
    both = rollout.joined(got, got)
    assert [*both.parts] == ["math", "length"]
    assert both.solved_n.tolist() == [True, False] * 2


def test_what_was_not_judged_leaves_the_means(tmp_path):
    def own(texts, problems, trace):
        return [1.0, np.nan, 0.0]

    grader = rewards.Grader(
        lambda *given: Grades(np.array(own(*given))), rewards.anything
    )
    told = rollout.summary(graded(grader, [5, 5, 5], truncated_wrong=False))
    assert (told["reward"], told["accuracy"], told["graded_timeouts"]) == (0.5, 0.5, 1)


@pytest.mark.parametrize("names", ["one", "one,two"])
def test_where_nobody_judged_there_are_no_means(names):
    """0 would be what wrong answers get."""
    grades = dict.fromkeys(names.split(","), Grades(np.full(4, np.nan)))
    every = rewards.added(grades, dict.fromkeys(grades, 1.0))
    grader = rewards.Grader(lambda *given: every, rewards.anything)
    got = graded(grader, [5] * 4, truncated_wrong=False)
    told = rollout.summary(got)
    assert told["graded_timeouts"] == 4
    assert not {"reward", "accuracy", "reward/one", "reward/two"} & {*told}
    assert rollout.passed(got, 2) == {}


# ---- One's own -----------------------------------------------------------------------

OWN = """
import os
import numpy as np
from dllm_jax.rl.rewards import Grades

def brevity(texts, problems, trace):
    return [1 / (1 + len(text)) for text in texts]

def keyed(texts, problems, trace):
    right = [p.record["key"] in t for t, p in zip(texts, problems)]
    return Grades(np.array(right, np.float32))

def check(problem):
    if "key" not in problem.record:
        raise ValueError("no field 'key'")

keyed.check = check

def math(texts, problems, trace):
    return [0.25] * len(texts)

def boundless(texts, problems, trace):
    return [1.0, float("-inf")]

def boundless_tokens(texts, problems, trace):
    return Grades(np.ones(2), np.full(trace.tokens_BT.shape, np.inf))

def short(texts, problems, trace):
    return [1.0]

def words(texts, problems, trace):
    return ["good"] * len(texts)

def numerals(texts, problems, trace):
    return ["1.0"] * len(texts)

def vast(texts, problems, trace):
    return [10**400] * len(texts)

def some_numerals(texts, problems, trace):
    return ["1.0", None]

def keeps(texts, problems, trace):
    return [float(len(p.record.setdefault("seen", {text}))) for text, p in zip(texts, problems)]

class Mute(Exception):
    def __str__(self):
        raise KeyError

def mute(texts, problems, trace):
    raise Mute

def tokens(texts, problems, trace):
    return Grades(np.ones(2), np.ones((2, 3)))

def listed(texts, problems, trace):
    return Grades([1.0, 0.5], np.ones(trace.tokens_BT.shape).tolist(), {"a": [1, None]})

def parted(texts, problems, trace):
    return Grades(np.ones(2), parts={"a": [1.0]})

def wordless(texts, problems, trace):
    return [1.0] * len(texts)

wordless.check = lambda problem: problem.record["key"]

def away(texts, problems, trace):
    os.chdir("/")
    return [1.0] * len(texts)

away.check = lambda problem: os.chdir("/")

def lost(texts, problems, trace):
    os.chdir("/")
    raise OSError("lost")

number = 3

def of_two(texts, golds):
    return [0.0 for _ in texts]

def sorting(texts, problems, trace):
    texts.sort(), problems.clear()
    return [0.0 for _ in texts]

def verdict(texts, problems, trace):
    return [0.0 for _ in texts]
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module outside of the repository."""
    (tmp_path / "mine_outside.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_outside", raising=False)
    return "mine_outside"


def test_a_function_of_ones_own_grades(mine):
    grades = grade(f"{mine}:brevity", ["a", "abc"], [problem()] * 2)
    np.testing.assert_allclose(grades.reward_n, [0.5, 0.25])
    both = grade(f"{mine}:keyed,{mine}:brevity:-0.5", ["ab"], [problem(key="b")])
    np.testing.assert_allclose(both.reward_n, [1 - 0.5 / 3])
    assert [*both.parts] == ["keyed", "brevity"]
    grader = rewards.grader(f"{mine}:keyed", CFG)
    grader.check(problem(key="b"))
    with pytest.raises(ValueError, match="no field 'key'"):
        grader.check(problem())
    assert RLConfig(reward=f"{mine}:brevity:0.5").reward


@pytest.mark.parametrize("spec", ["{}:keyed", "{}:keyed,length:0.1"])
def test_a_function_is_told_the_gold_answer_where_there_is_one(mine, tmp_path, spec):
    rows = [{"question": "1+1", "answer": 2}, {"question": "1+2"}]
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(json.dumps(row | {"key": "b"}) for row in rows))
    grader = rewards.grader(spec.format(mine), CFG)
    found = data.problems(str(path), lent.TOK, data.DataConfig(), grader)
    assert [x.answer for x in found] == ["2", ""]


@pytest.mark.parametrize("spec", ["format", "length", "math"])
def test_a_judge_of_chunks_is_told_the_gold_answer(mine, tmp_path, spec):
    path = tmp_path / "some.jsonl"
    path.write_text(json.dumps({"question": "1+1", "answer": "2"}))
    asked = dataclasses.replace(CFG.judge, at=f"{mine}:check")
    cfg = dataclasses.replace(CFG, split="tokens", judge=asked)
    grader = rewards.grader(spec, cfg, lent.TOK)
    (found,) = data.problems(str(path), lent.TOK, data.DataConfig(), grader)
    assert found.answer == "2"


def test_a_function_has_lists_of_its_own(mine):
    grades = grade(f"{mine}:sorting,{mine}:brevity", ["abc", "a"], [problem()] * 2)
    np.testing.assert_allclose(grades.parts["brevity"], [0.25, 0.5])


def test_lists_of_a_function_are_arrays(mine):
    for weight in (1.0, 0.5):
        grades = grade(f"{mine}:listed:{weight}", ["a", "b"], [problem()] * 2)
        np.testing.assert_array_equal(grades.reward_n, [weight, 0.5 * weight])
        assert (grades.reward_nT == weight).all()
    alone = grade(f"{mine}:listed", ["a", "b"], [problem()] * 2)
    np.testing.assert_array_equal(alone.parts["a"], [1, np.nan])
    for spec in (
        ":0.5",
        ":0.5,length",
    ):  # its first part says what is right, there, too
        told = grade(f"{mine}:listed{spec}", ["a", "b"], [problem()] * 2, [1, 1])
        np.testing.assert_array_equal(next(iter(told.parts.values())), [1, np.nan])


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("math,OWN:math:0.5", {"math": 1.0, "OWN:math": 0.25}),
        ("OWN:math:0,math,length", {"OWN:math": 0.25, "math": 1.0, "length": 0.5}),
        ("OWN:math,length", {"math": 0.25, "length": 0.5}),
        ("math,OWN:verdict", {"math": 1.0, "OWN:verdict": 0.0}),  # as of chunks
    ],
)
def test_two_graders_of_one_name_are_told_apart(mine, spec, parts):
    grades = grade(spec.replace("OWN", mine), [r"\boxed{1}"], [problem("1")])
    told = {name.replace(mine, "OWN"): x.item() for name, x in grades.parts.items()}
    assert [*told.items()] == [*parts.items()]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine_nowhere:f", "No module named 'mine_nowhere'; its folder must be"),
        ("mine_outside:f", "mine_outside has no f"),
        ("mine_outside:number", "number is no function"),
        (
            "mine_outside:of_two",
            r"with \(texts, problems, trace\), and takes \(texts, golds\)$",
        ),
    ],
)
def test_what_is_not_there_is_refused(mine, name, message):
    with pytest.raises(ValueError, match=message):
        rewards.grader(name, CFG)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os\nos.nope", "its module raised AttributeError: .* line 2\\)$"),
        ("raise RuntimeError('no gpu')", "raised RuntimeError: no gpu \\(.*line 1"),
        ("import sys\nsys.exit(0)", "its module raised SystemExit: 0 \\(.*line 2"),
        ("x = 1\ndef f(:", "raised SyntaxError: invalid syntax \\(.*_bad.py, line 2"),
        ("import not_there_xyz", "'mine_bad:f': No module named 'not_there_xyz'$"),
    ],
)
def test_a_module_that_raises_is_named_with_the_place(
    tmp_path, monkeypatch, source, message
):
    (tmp_path / "mine_bad.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_bad", raising=False)
    with pytest.raises(ValueError, match=message):
        rewards.grader("mine_bad:f", CFG)


def test_functions_are_known_by_their_source(mine, tmp_path):
    spec = f"math,{mine}:brevity:0.5,judge"
    cfg = dataclasses.replace(
        CFG, judge=dataclasses.replace(CFG.judge, at=f"{mine}:check")
    )
    before = rewards.sources(spec, cfg)
    told = [f"the source of {mine}:{name}" for name in ("brevity", "check")]
    assert [*before] == told and all(before.values())
    (tmp_path / "mine_outside.py").write_text(OWN + "\n")
    after = rewards.sources(spec, cfg)
    assert all(after[name] != before[name] for name in told)
    assert rewards.sources("math", cfg) == {}
    chunks = dataclasses.replace(cfg, split="marks")  # a judge of theirs, too
    assert [*rewards.sources("math", chunks)] == told[1:]
    assert rewards.sources("math", chunks, chunks=False) == {}
    url = dataclasses.replace(CFG.judge, at="http://localhost:1/v1")
    assert rewards.sources("judge", dataclasses.replace(CFG, judge=url)) == {}
    with pytest.raises(ValueError, match="mine_outside has no f"):
        rewards.sources(f"{mine}:f", CFG)


def test_checkpoints_that_judge_are_known_by_their_weights(tmp_path):
    """By key, as hosts may have them elsewhere."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    at = dataclasses.replace(CFG.judge, at=str(folder))
    cfg = dataclasses.replace(CFG, model=str(folder), judge=at)
    spec = "reward_model,judge"
    before = rewards.sources(spec, cfg)
    told = [f"the checkpoint of {key}" for key in ("reward.model", "reward.judge.at")]
    assert [*before] == told and [*rewards.sources("math", cfg)] == []
    (folder / "model.safetensors").write_text("others")
    assert all(rewards.sources(spec, cfg)[x] != before[x] for x in told)


def test_a_check_that_raises_is_named_with_the_place(mine):
    with pytest.raises(ValueError, match="wordless': its check raised KeyError: 'key'"):
        rewards.grader(f"{mine}:wordless", CFG).check(problem())


def test_a_function_that_writes_into_records_writes_into_its_own(mine):
    asked = problem()
    before = dict(asked.record)
    assert grade(f"{mine}:keeps", ["a"], [asked]).reward_n.tolist() == [1]
    assert asked.record == before
    asked.record["lock"] = threading.Lock()  # as its check may
    assert grade(f"{mine}:keeps", ["a"], [asked]).reward_n.tolist() == [1]


def test_a_child_that_a_function_forks_goes_no_further():
    code = """if True:
        import os
        from dllm_jax.rl.rewards import own

        def f(ends):
            if not os.fork():
                return ends()
            return os.waitstatus_to_exitcode(os.wait()[1])

        for ends in (exit, int, lambda: exit(3), lambda: 1 / 0):
            print(own.said("rl.reward", "mine:f", f, ends), flush=True)
    """
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0\n0\n3\n1\n"), done.stderr
    assert done.stderr.count("ZeroDivisionError") == 1


def test_the_working_directory_stays(mine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert grade(f"{mine}:away", ["a"], [problem()]).reward_n.tolist() == [1]
        rewards.grader(f"{mine}:away", CFG).check(problem())
        assert os.getcwd() == str(tmp_path)
    assert capsys.readouterr().err.count("changes the working directory") == 1
    with pytest.raises(ValueError, match="raised OSError: lost"):
        grade(f"{mine}:lost", ["a"], [problem()])
    assert os.getcwd() == str(tmp_path)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()  # by somebody else
    assert grade(f"{mine}:away", ["a"], [problem()]).reward_n.tolist() == [1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", "grades of shape \\(1,\\) for 2 answers"),
        ("parted", "grades of shape \\(1,\\) for 2 answers"),
        ("words", "returned what is no list of numbers"),
        ("numerals", "returned what is no list of numbers"),
        ("some_numerals", "returned what is no list of numbers"),
        ("vast", "returned what is no list of numbers"),
        ("mute", "mute' raised Mute:  \\("),
        (
            "boundless",
            "rl.reward='mine_outside:boundless' returned -inf: a reward is a",
        ),
        ("boundless_tokens", "returned inf: a reward is a finite number, or NaN"),
        ("tokens", "rewards of tokens of shape \\(2, 3\\); the canvases are \\(2, 12"),
    ],
)
def test_a_function_that_returns_nonsense_is_named(mine, name, message):
    with pytest.raises(ValueError, match=message):
        grade(f"{mine}:{name}", ["a", "b"], [problem()] * 2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "maths",
            "choose from math, choice, short, code, judge, reward_model, .*or name your own",
        ),
        ("", "choose from math"),
        ("math,", "'' is no grader"),
        ("math:x", "'math:x': a weight is one finite number"),
        ("math:0", "'math:0': one weight at least is not 0"),
        ("math:nan", "a weight is one"),
        ("math:1:2", "a weight is one"),
        ("math,math:2", "'math' is named twice"),
        ("a b:c", "reward='a b:c': choose from"),
        ("mod:0.5", "reward='mod:0.5': choose from"),
    ],
)
def test_a_bad_name_or_weight_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        RLConfig(reward=spec)


@pytest.mark.parametrize(
    "bad", [{"seconds": 0.0}, {"memory_mb": 1}, {"workers": -1}, {"allow_unsafe": 1}]
)
def test_bad_limits_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        RewardConfig(**bad)
