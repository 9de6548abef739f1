"""Math rewards against the reference's verdicts, exact arithmetic and hostile answers."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import threading
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_jax import exits
from dllm_jax.rl.rewards import math, worker
from tests.goldens import reader


def cases(name):
    return reader.read(f"rewards/{name}")["cases"]


@pytest.fixture(scope="module", autouse=True)
def close_worker():
    yield
    math.close()


# ---- extraction


@pytest.mark.parametrize("case", cases("extraction.json"), ids=lambda c: c["text"][:30])
def test_extraction_equals_the_golden(case):
    wanted = case["extract_final_boxed_answer"]
    # The reference reports a failure as a sentence, which it then grades as an answer.
    wanted = None if wanted == "Can not extract the answer!" else wanted
    assert math.extract(case["text"]) == wanted


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 5 </answer>", "5"),
        ("<answer>5</answer> no, <answer>6\n</answer>", "6"),
        (r"so \boxed{3}. <answer>5</answer>", "5"),
        (r"<answer>5</answer>, that is \boxed{6}", "6"),
        (r"<answer>It is \boxed{\frac{1}{2}}.</answer>", r"\frac{1}{2}"),
        ("<answer>5</answer> or rather <answer>6", None),
        ("<answer>5", None),
        ("5</answer>", None),
        (r"first \boxed{3}, then \boxed{\frac{1}{2", None),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed {7}", "7"),
        (r"\boxed{\boxed{7}}", "7"),
        ("#### 7", None),
        ("The answer is 7.", None),
        ("", None),
    ],
)
def test_extraction_takes_what_opens_last(text, answer):
    assert math.extract(text) == answer


@given(st.text(alphabet="ab{}\\ ", max_size=20), st.text(max_size=20))
def test_extraction_of_a_box_ignores_what_surrounds_it(content, before):
    text = f"{before}\\boxed{{{content}}} {before}".replace("<answer>", "")
    answer = math.extract(text)
    if "{" not in content and "}" not in content and not content.endswith("\\"):
        assert answer == content.strip()
    assert answer is None or answer in text


# ---- comparison

# Where the verdict differs from the reference's (with a working LaTeX parser), and why.
DIFFERENCES = {
    ("0.5", r"50\%"): (True, "a percentage is a number"),
    ("2x", "x+x"): (True, "expressions are simplified"),
    ("0.50", ".5"): (True, "decimals are numbers"),
    ("1 1/2", "3/2"): (True, "a mixed number, not 11/2"),
    (r"\frac{14}{3}", r"4\frac{2}{3}"): (True, "a mixed number, not a product"),
    ("Yes", "yes"): (True, "the case of a word says nothing"),
    (r"\text{yes}", "Yes"): (True, "the case of a word says nothing"),
    (r"\emptyset", r"\varnothing"): (True, "two glyphs of one symbol"),
    (r"6 \times 7", "42"): (False, "a calculation left undone"),
    ("2+2", "4"): (False, "a calculation left undone"),
    ("1-2", "-1"): (False, "a calculation left undone"),
    ("12,34", "1234"): (False, "a list of two: thousands have three digits"),
}


@pytest.mark.parametrize(
    "case", cases("math_equal.json"), ids=lambda c: f"{c['answer']}~{c['ground_truth']}"
)
def test_verdict_equals_the_golden(case):
    answer, gold = case["answer"], case["ground_truth"]
    if not gold:  # the reference lets an empty answer win
        with pytest.raises(ValueError, match="gold answer ''"):
            math.equal(answer, gold)
        return
    reference = case["verdict_with_latex_parser"]
    wanted, why = DIFFERENCES.get((answer, gold), (reference, ""))
    assert (wanted != reference) == bool(why)  # the table holds nothing stale
    assert math.equal(answer, gold) == wanted


RIGHT = [
    ("18", "She makes 9 * 2 = $<<9*2=18>>18 a day.\n#### 18"),
    ("1,450,000", "#### 1,450,000"),
    (r"\$32,348", r"\$32,\!348"),
    ("11111111100", r"11,\! 111,\! 111,\! 100"),
    ("1 234 567.50", "1,234,567.5"),
    ("1{,}000", "1000"),
    ("18 dollars per day", "18"),
    (r"864 \text{ in}^2", r"864 \mbox{ inches}^2"),
    (r"\frac{270}{7}", r"\frac{270}7\text{ degrees}"),
    (r"25^\circ\text{C}", "25"),
    (r"12\pi \text{ cm}^2", r"12\pi"),
    (r"5\text{ m}/\text{s}", "5"),
    ("5 percent", "0.05"),
    (r"6.72\times 10^{-5}", ".0000672"),
    ("−5", "-5"),
    (r"2\sqrt{3}", "sqrt(12)"),
    ("100,200", "100, 200"),
    ("2 and 1", r"\{1,2\}"),
    ("2, 1", "1,2"),
    (r"1-\sqrt{19}, 1+\sqrt{19}", r"1 \pm \sqrt{19}"),
    (r"( 1.5, -13 )", r"\left( \frac{3}{2}, -13 \right)"),
    (r"(3,\infty)\cup(-\infty,2)", r"(-\infty, 2) \cup (3, \infty)"),
    (
        r"\begin{pmatrix} -\frac13 \\ 2 \end{pmatrix}",
        r"\begin{pmatrix}-1/3\\2\end{pmatrix}",
    ),
    (r"3 < x \le 4", "(3,4]"),
    ("[-2,7]", r"x \in [-2,7]"),
    ("x=3, y=4", "y=4, x=3"),
    ("2x - y + 3 = 0", "y = 2x + 3"),
    ("f(x) = 2x + 3", "3+2x"),
    ("C", r"\text{(C)}"),
]

WRONG = [
    ("5, or 6, or 7", "5"),
    (r"5 \text{ or } 6", "5"),
    (r"\pm 3", "3"),
    ("2+3=5", "5"),
    ("37+48", "85"),
    ("1=5", "5"),
    ("5 6", "11"),
    ("2(3)", "5"),
    (r"4 \approx 5", "4"),
    (r"5 \text{ million}", "5"),
    ("#### 5", "5"),
    ("The answer is 5", "5"),
    (r"\boxed{5}", "4"),
    ("3m", "3"),
    ("5x", "5"),
    ("5 abc", "5"),
    ("52", "52_8"),
    ("0.333", r"\frac13"),
    ("3.14159265", r"\pi"),
    ("1,2345", "12345"),
    ("1020", "10,20"),
    ("(12)", "(1,2)"),
    ("(1,234)", "1234"),
    ("1,2", "(1,2)"),
    ("[1,2)", "(1,2)"),
    ("3, 3, 5", "3, 5, 5"),
    (r"1+\sqrt{19}", r"1 \pm \sqrt{19}"),
    (r"\frac{1}{2}3", "1/23"),
    ("1/0", "2/0"),
    ("seat", r"\text{east}"),
    ("R", "r"),
    ("x^2+y^2=-1", "x^2+1=0"),
    ("x=5", "y=5"),
    ("", "5"),
    ("1" * 2000, "1"),
    ("a\x00b", "ab"),
    ("\ud800", "x"),
]


@pytest.mark.parametrize(("answer", "gold"), RIGHT)
def test_right(answer, gold):
    assert math.equal(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), WRONG)
def test_wrong(answer, gold):
    assert not math.equal(answer, gold)


def printed(value):
    """Returns ways of writing a Fraction down."""
    top, bottom = value.numerator, value.denominator
    sign, size = "-" if value < 0 else "", abs(top)
    ways = [
        f"{top}/{bottom}",
        rf"\frac{{{top}}}{{{bottom}}}",
        f"${3 * top}/{3 * bottom}$",
    ]
    ways += [rf"{sign}\dfrac{{{size:,}}}{{{bottom}}}", rf"x = {top}/{bottom}"]
    ways += [rf"{100 * top}/{bottom}\%", rf"{sign} {size} / {bottom} \text{{ cm}}^2"]
    if bottom == 1:
        ways += [f"{top:,}", f"{top}.00", f"{top:,}".replace(",", r",\!"), f"{top}e0"]
    elif size > bottom:
        whole, rest = divmod(size, bottom)
        ways += [f"{sign}{whole} {rest}/{bottom}"]
        ways += [rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}"]
    if 10**6 % bottom == 0:
        decimal = f"{size // bottom}.{size % bottom * 10**6 // bottom:06}"
        ways += [sign + decimal, rf"\${sign}{decimal}", sign + decimal.lstrip("0")]
    return ways


bottoms = st.one_of(st.integers(1, 60), st.sampled_from([1, 2, 8, 100, 625, 1000]))
values = st.builds(Fraction, st.integers(-(10**7), 10**7), bottoms)


@given(values, st.data())
def test_a_number_equals_itself_however_written_and_not_its_neighbour(value, data):
    answer, gold = (data.draw(st.sampled_from(printed(value))) for _ in range(2))
    assert math.equal(answer, gold)
    neighbour = value + Fraction(data.draw(st.sampled_from([1, -1])), value.denominator)
    assert not math.equal(data.draw(st.sampled_from(printed(neighbour))), gold)


@given(st.lists(st.integers(-9999, 9999), min_size=2, max_size=4), st.randoms())
def test_lists_are_unordered_tuples_are_not_and_neither_is_a_number(numbers, random):
    shuffled = random.sample(numbers, len(numbers))
    bare, mixed = (", ".join(map(str, ns)) for ns in (numbers, shuffled))
    assert math.equal(mixed, bare)
    assert math.equal(f"({mixed})", f"({bare})") == (shuffled == numbers)
    assert not math.equal("".join(map(str, numbers)), f"({bare})")
    assert not math.equal(bare, str(numbers[0]))


@given(st.text(alphabet=st.sampled_from(r"\{}()[]^_,.=<>+-/%$&|! 019abx"), max_size=16))
def test_any_text_gets_a_verdict(text):
    assert math.equal(text, "73x") is False


# ---- the worker

HOSTILE = [
    "9^{9^{9^9}}",
    "10**10**10",
    "10^{10^{10}}",
    "1e999999999",
    "99999999999!",
    "(" * 200 + "5" + ")" * 200,
    "5" + r"\text{a} " * 60 + "!",  # exponential for a careless regular expression
]


def test_hostile_answers_are_wrong_and_the_next_is_graded(monkeypatch):
    monkeypatch.setattr(math.workers().every[0], "limit_s", 1.0)
    for i, answer in enumerate(HOSTILE):
        assert not math.equal(answer, "5")
        assert math.equal(rf"\sqrt{{{12 * (i + 1) ** 2}}}", rf"{2 * i + 2}\sqrt{{3}}")


def test_too_slow_means_killed(monkeypatch):
    assert math.equal("x+17", "17+x")
    process = math.workers().every[0].process
    monkeypatch.setattr(math.workers().every[0], "limit_s", 0.2)
    assert not math.equal("8^{9^{9^9}}", "5")
    assert process.poll() is not None
    assert math.workers().every[0].process is not process


def test_a_dead_worker_is_replaced():
    assert math.equal("x+18", "18+x")
    math.workers().every[0].process.kill()
    assert math.equal("x+19", "19+x")
    math.close()
    assert math.workers().every[0].process is None
    assert math.equal("x+20", "20+x")


def test_a_worker_that_cannot_start_raises(monkeypatch):
    math.close()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(exits.CannotGoOn, match="does not start"):
        math.equal("x+21", "21+x")


def test_duplicates_are_verified_once(monkeypatch):
    asked = []
    monkeypatch.setattr(math.workers(), "ask", lambda *pair: asked.append(pair) or True)
    assert math.grade([r"\boxed{x+22}"] * 4, ["22+x"] * 4) == [1.0] * 4
    assert asked == [("x+22", "22+x")]


def test_a_time_out_is_not_remembered(monkeypatch):
    asked = []

    def late(*pair):
        asked.append(pair)
        raise TimeoutError

    monkeypatch.setattr(math.workers(), "ask", late)
    answers, golds = [r"\boxed{x+23}", r"\boxed{x+23}"], ["23+x", "23+x"]
    assert all(map(np.isnan, math.grade(answers, golds)))
    assert asked == [("x+23", "23+x")]  # once in a step
    monkeypatch.setattr(math.workers(), "ask", lambda *pair: True)
    assert math.grade(answers, golds) == [1.0, 1.0]


def test_several_workers_are_asked_at_once(monkeypatch):
    """Each waits for the other: one alone would wait for ever."""
    several = worker.Workers(2, math.__file__, math.LIMIT_S)
    both = threading.Barrier(2)

    def ask(own, *pair):
        both.wait(60)
        return pair == ("x+24", "24+x")

    monkeypatch.setattr(worker.Worker, "ask", ask)
    monkeypatch.setattr(math, "workers", lambda: several)
    texts, golds = [r"\boxed{x+24}", r"\boxed{x+25}"] * 2, ["24+x", "26+x"] * 2
    assert math.grade(texts, golds) == [1.0, 0.0] * 2
    assert several.idle.qsize() == 2 and math.grade([], []) == []


def test_the_worker_imports_neither_jax_nor_the_package():
    run = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", worker.__file__, math.__file__],
        input="",
        capture_output=True,
        text=True,
        check=True,
    )
    modules = {line.split("|")[-1].strip() for line in run.stderr.splitlines()}
    assert "math_verify" in modules
    assert not {m for m in modules if m.split(".")[0] in ("jax", "jaxlib", "dllm_jax")}


def test_math_verify_is_asked_for_by_name(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install math-verify"):
        math.workers.__wrapped__()


# ---- the grader


def test_grade():
    completions = [r"\boxed{72}", "72", r"\boxed{71}", "<answer>72.0</answer>", ""]
    assert math.grade(completions, ["so ... #### 72"] * 5) == [
        1.0,
        0.0,
        0.0,
        1.0,
        0.0,
    ]
    assert math.grade([], []) == []


@pytest.mark.parametrize("gold", ["", "  ", "$$", "####", None, 72])
def test_a_bad_gold_is_named(gold):
    for refuses in (math.check, lambda gold: math.grade(["no answer"], [gold])):
        with pytest.raises(ValueError, match="gold answer") as error:
            refuses(gold)
        assert repr(gold) in str(error.value)


@pytest.mark.parametrize("gold", ["72", "so ... #### 72", r"\frac{1}{2}", "east"])
def test_a_good_gold_passes_the_check(gold):
    assert math.check(gold) is None


def test_every_completion_has_a_gold():
    with pytest.raises(ValueError, match="shorter"):
        math.grade(["a", "b"], ["1"])


# ---- the public table

PAIRS = [
    json.loads(line)
    for line in (pathlib.Path(__file__).parent / "math_pairs.jsonl")
    .read_text()
    .splitlines()
]


@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in PAIRS}))
def test_the_public_table_of_pairs_holds(kind):
    """A line of it is {"kind", "answer", "gold", "right"}: docs/rewards.md."""
    wrong = [
        pair
        for pair in PAIRS
        if pair["kind"] == kind
        and math.equal(pair["answer"], pair["gold"]) is not pair["right"]
    ]
    assert wrong == []


def test_the_public_table_is_large_and_says_nothing_twice():
    assert len(PAIRS) >= 300
    assert len({(pair["answer"], pair["gold"]) for pair in PAIRS}) == len(PAIRS)
    assert {len(pair) for pair in PAIRS} == {4}
    assert 100 < sum(pair["right"] for pair in PAIRS) < len(PAIRS) - 100
