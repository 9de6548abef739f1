"""Generated tasks: different, the same for a seed, and judged by their own rules."""

import numpy as np
import pytest

from dllm_jax import data
from dllm_jax.data import sets, tasks
from dllm_jax.rl import rewards
from dllm_jax.rl.config import RewardConfig

CFG = RewardConfig()


def graded(name: str, record: dict, *answers: str) -> list[float]:
    """Returns what the task's grader says of answers in boxes."""
    grader = rewards.grader(tasks.TASKS[name][1], CFG)
    problem = data.Problem([], record["question"], record.get("answer", ""), record)
    grader.check(problem)
    texts = [f"so \\boxed{{{x}}}" for x in answers]
    return grader.grade(texts, [problem] * len(texts), None).reward_n.tolist()


@pytest.mark.parametrize("name", tasks.TASKS)
def test_records_differ_and_are_a_function_of_the_seed(name):
    rows = [*tasks.drawn(name, 50, 1)]
    assert len({str(row) for row in rows}) == 50
    assert rows == [*tasks.drawn(name, 50, 1)]
    assert rows[:20] == [*tasks.drawn(name, 20, 1)] != [*tasks.drawn(name, 20, 2)]


def test_too_many_are_refused(monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "one", (lambda rng: {"question": "?"}, "math"))
    with pytest.raises(ValueError, match="one: no 2 different tasks were found"):
        list(tasks.drawn("one", 2, 0))
    with pytest.raises(ValueError, match="sudoku: there are 27,264 different ones"):
        next(tasks.drawn("sudoku", 30_000, 0))


def test_arithmetic_is_right():
    for row in tasks.drawn("arithmetic", 100, 0):
        text = row["question"].removeprefix("Calculate ").partition(".")[0]
        assert str(eval(text)) == row["answer"]
    assert graded("arithmetic", row, row["answer"], "0.5") == [1, 0]


def reachable(numbers) -> set:
    """Returns all that the numbers can make, each used once: by pairs, in any order."""
    if len(numbers) == 1:
        return {numbers[0]}
    out = set()
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers):
            if i == j:
                continue
            rest = [x for k, x in enumerate(numbers) if k not in (i, j)]
            made = [a + b, a * b, a - b] + ([a / b] if b else [])
            for x in made:
                out |= reachable([*rest, x])
    return out


def test_a_countdown_can_be_solved():
    for row in tasks.drawn("countdown", 20, 0):
        found = np.array(sorted(reachable(row["numbers"])))
        assert np.abs(found - row["target"]).min() < 1e-9


COUNTDOWN = sets.countdown_row([30, 100, 93], 23)
EXPRESSIONS = {
    "100 - (30 + 93)": 0,
    "30 - (100 - 93)": 1,
    "30 + 93 - 100 = 23": 1,
    "93 - 100 + 30": 1,
    "30 \\times 1 + 93 - 100": 0,  # a number that is not given
    "23": 0,
    "30 + 93 - 100 + 30 - 30": 0,
    "30 - (100 - 93": 0,
    "30 / (100 - 100)": 0,
    "__import__('os').getpid()": 0,
    "9**9**9**9": 0,
    "(" * 90 + "30": 0,
    "-93": 0,
    "": 0,
}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_countdown_by_hand(text):
    assert graded("countdown", COUNTDOWN, text) == [EXPRESSIONS[text]]


def test_fractions_are_exact():
    record = sets.countdown_row([1, 3, 3], 1)
    assert graded("countdown", record, "1 ÷ 3 × 3", "3 / 3 * 1") == [1, 1]
    record = sets.countdown_row([8, 3, 8, 3], 24)
    assert graded("countdown", record, "8 / (3 - 8 / 3)") == [1]


def test_a_sudoku_has_one_solution_and_what_breaks_a_rule_is_wrong():
    for row in tasks.drawn("sudoku", 20, 0):
        cells = [*map(int, row["puzzle"])]
        (only,) = tasks.solutions(cells, 3)
        assert "".join(map(str, only)) == row["solution"]
        assert cells.count(0) >= 8
    right = row["solution"]
    spaced = " ".join(right[:8]) + "\n" + right[8:]
    given = next(i for i, x in enumerate(row["puzzle"]) if x != "0")
    swapped = right.translate(str.maketrans("1234", "2143"))  # rules kept, givens not
    broken = right[:given] + right[given].translate(str.maketrans("1234", "2341"))
    broken += right[given + 1 :]
    wrong = [swapped, broken, right[:15], right + "1", "1" * 16, row["puzzle"]]
    assert graded("sudoku", row, right, spaced, *wrong) == [1, 1] + [0] * 6


def test_any_solution_of_an_open_sudoku_is_right():
    row = sets.sudoku_row("0" * 16, "1234341221434321")
    assert graded("sudoku", row, "1234341221434321", "4321214334121234") == [1, 1]
    # Of lines, columns and boxes one kind alone has a digit twice.
    wrong = "1313242431314242", "1234341212343412", "1234234134124123"
    assert graded("sudoku", row, *wrong) == [0, 0, 0]


BAD = [
    (
        "countdown",
        {"numbers": "1,2", "target": 3},
        "'numbers': a countdown needs a list",
    ),
    ("countdown", {"numbers": [1, "2"], "target": 3}, "'numbers': whole numbers"),
    ("countdown", {"numbers": [1, 2]}, "'target': a countdown needs a whole number"),
    ("sudoku", {"puzzle": "12"}, "'puzzle': 16 digits from 0 to 4"),
    ("sudoku", {}, "'puzzle': a sudoku needs a text"),
]


@pytest.mark.parametrize(("name", "record", "says"), BAD)
def test_records_that_are_no_puzzles_are_refused(name, record, says):
    with pytest.raises(ValueError, match=says):
        rewards.grader(name, CFG).check(data.Problem([], "", "", record))
