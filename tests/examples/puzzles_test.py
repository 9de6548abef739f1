"""Puzzles that examples make: their responses are right, and what is bundled is told."""

import json
import pathlib

import pytest

from dllm_jax import data
from dllm_jax.rl import rewards
from dllm_jax.rl.config import RewardConfig
from examples.puzzles import make as puzzles


@pytest.mark.parametrize("task", puzzles.TASKS)
def test_responses_to_puzzles_are_right_and_no_two_are_the_same(task):
    draw, _, field, _ = puzzles.TASKS[task]
    rows = draw(40, 3)
    assert rows == draw(40, 3) and len({row[field] for row in rows}) == 40
    grader = rewards.grader({"sums": "math"}.get(task, task), RewardConfig())
    asked = [data.Problem([1], "", row.get("answer", ""), row) for row in rows]
    for problem in asked:
        grader.check(problem)
    texts = [row["response"] for row in rows]
    assert (grader.grade(texts, asked, None).reward_n == 1).all()
    others = texts[1:] + texts[:1]
    assert (grader.grade(others, asked, None).reward_n == 0).all()


def test_held_out_problems_that_are_trained_on_are_counted():
    old, new = [{"puzzle": "1"}, {"puzzle": "2"}], [{"puzzle": "2"}, {"puzzle": "2"}]
    assert puzzles.shared(new, old, "puzzle") == 2
    assert puzzles.shared(old, new, "puzzle") == 1


def test_no_countdown_is_another_rearranged_and_no_step_is_below_zero():
    rows = puzzles.countdown(300, 1)
    assert len({(*sorted(row["numbers"]), row["target"]) for row in rows}) == 300
    for row in rows:
        *steps, box = row["response"].split(",")
        worth = [int(step.split("=")[1]) for step in steps]
        assert len(worth) == 2 and worth[-1] == row["target"] < 100
        assert min(worth) >= 0 and box.startswith("\\boxed{")
        assert row["question"].endswith(f"={row['target']}")


def test_countdowns_of_d1_are_asked_as_the_model_is(tmp_path):
    file = tmp_path / "countdown_cd3_test.jsonl"
    lines = (("30,90,93", 27), ("30,100,93", 23), ("30,90,9", 51), ("10,90,99", 1))
    made = [json.dumps({"input": x, "output": str(y)}) + "\n" for x, y in lines]
    file.write_text("".join(made))
    (row,) = puzzles.read_d1(str(file))  # the others have other widths
    assert row == puzzles.countdown_record([30, 90, 93], 27)
    assert row["question"] == "30,90,93=27"
    asked = [data.Problem([1], "", "", row)]
    grader = rewards.grader("countdown", RewardConfig())
    for text, right in (("90+30-93", 1), ("30+93-90", 0)):
        grades = grader.grade([f"\\boxed{{{text}}}"], asked, None)
        assert grades.reward_n == [right]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("$90+30-93$", 1),
        (r"\(90 + 30 - 93\)", 1),
        (r"\left(90+30\right)-93 = 27", 1),
        ("90+30\u201393", 1),
        ("-93+90+30", 1),
        (r"(30-93)\cdot\frac{90}{1}", 0),  # a number of its own
        ("0x5A+30-93", 0),
        ("9_0+30-93", 0),
        ("90+30-93 # or so", 0),
        ("90.0+30-93", 0),
        ("90+30-93 or 1", 0),
        ("9**9**9", 0),
        ("1or 2", 0),
    ],
)
def test_a_countdown_is_numbers_signs_and_brackets_however_they_are_written(
    text, right, recwarn
):
    asked = [data.Problem([1], "", "", puzzles.countdown_record([30, 90, 93], 27))]
    grader = rewards.grader("countdown", RewardConfig())
    assert grader.grade([f"\\boxed{{{text}}}"], asked, None).reward_n == [right]
    assert not recwarn.list  # of Python's parser


@pytest.mark.parametrize(
    ("text", "target"),
    [
        (r"\frac{90}{30} + 12", 15),
        (r"\frac{90}{\frac{30}{12}}", 36),
        (r"12 \cdot \dfrac{90}{30}", 36),
    ],
)
def test_a_countdown_may_be_a_fraction(text, target):
    record = puzzles.countdown_record([90, 30, 12], target)
    grader = rewards.grader("countdown", RewardConfig())
    asked = [data.Problem([1], "", "", record)]
    assert grader.grade([f"\\boxed{{{text}}}"], asked, None).reward_n == [1]


def test_only_countdowns_are_read(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for given, said in (
        (["sums", "--read", "x.jsonl"], "--read is of countdown"),
        (["countdown", "--read", "x.jsonl"], "--read=x.jsonl: no such file"),
    ):
        monkeypatch.setattr("sys.argv", ["make", *given])
        with pytest.raises(SystemExit):
            puzzles.main()
        assert said in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("task", "most"), [("sudoku", 1e6), ("sums", 3e6), ("countdown", 3e6)]
)
def test_what_is_bundled_is_what_its_command_makes(task, most):
    draw, _, field, _ = puzzles.TASKS[task]
    folder = pathlib.Path(puzzles.__file__).parent / task
    heldout, train = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").open()]
        for name in ("heldout", "train")
    )
    assert draw(300, seed=0) == (heldout + train)[:300]
    assert (len(heldout), puzzles.shared(heldout, train, field)) == (256, 0)
    size = sum(file.stat().st_size for file in (folder / "model").iterdir())
    assert size < most
