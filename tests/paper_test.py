"""The paper's claims in miniature: what lines of docs/paper.jsonl become, and one that is made."""

import json

import numpy as np
import pytest

from benchmarks import paper
from benchmarks.paper import Cell
from tests import served


def row(method, seed, accuracy, tokens, task="sudoku"):
    """Returns a line of the file, of evaluations after 0, 8 and 16 steps."""
    return Cell(task, method, seed)._asdict() | {
        "steps": [0, 8, 16],
        "accuracy": accuracy,
        "training_tokens": tokens,
        "forwards": [0, 100, 200],
        "tokens_per_forward": [2.0, 2.0, 4.0],
        "length": [20.0, 20.0, 20.0],
    }


def known(*rows):
    """Returns lines by their cells."""
    return {Cell(x["task"], x["method"], x["seed"]): x for x in rows}


def test_areas_are_compared_up_to_where_the_first_ends():
    slow = row("tracerl", 0, [0.0, 0.4, 0.8], [0, 400, 800])
    fast = row("random", 0, [0.0, 0.4, 0.8], [0, 200, 400])
    assert paper.area(slow, "steps", 16) == pytest.approx(0.4)
    assert paper.area(slow, "training_tokens", 400) == pytest.approx(0.2)
    assert paper.area(slow, "training_tokens", 600) == pytest.approx(0.3)
    assert paper.difference(slow, fast, "steps") == pytest.approx(0)
    # Up to 400 tokens: one rises to 0.4 meanwhile, the other to 0.8.
    assert paper.difference(slow, fast, "training_tokens") == pytest.approx(-0.2)
    assert paper.difference(fast, slow, "training_tokens") == pytest.approx(0.2)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_an_interval_holds_the_mean_as_often_as_it_says(n):
    rng, held = np.random.default_rng(0), 0
    for _ in range(2000):
        found = paper.interval(rng.normal(0.3, 0.2, n))
        held += abs(found.mean - 0.3) < found.half
    assert 0.93 < held / 2000 < 0.97


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.1, 0.11, 0.12], "holds"),
        ([-0.1, -0.11, -0.12], "does not hold: the reverse does"),
        ([0.1, -0.1, 0.02], "cannot be told here: of 3 seeds the interval holds 0"),
        ([0.1, 0.1], "cannot be told here: 2 of at least 3 seeds were run"),
    ],
)
def test_a_claim_holds_where_its_interval_says_so(values, said):
    assert paper.verdict(paper.interval(values)) == said


def test_only_seeds_that_both_have_are_compared():
    cells = known(
        row("tracerl", 0, [0.5, 0.5, 0.5], [0, 1, 2]),
        row("tracerl", 1, [0.9, 0.9, 0.9], [0, 1, 2]),
        row("random", 0, [0.4, 0.4, 0.4], [0, 1, 2]),
    )
    found = paper.compared(cells, "sudoku", "tracerl", "random", "steps")
    assert found.seeds == 1 and found.mean == pytest.approx(0.1)
    tables = paper.rendered(cells)
    assert "* sudoku, random: seeds 1, 2, 3, 4, 5" in tables["missing"]
    assert (
        "| TraceRL | 2 | 0.700 | 0.700 | 0.700 | 10.00 | 5.00 |"
        in (tables["sudoku overview"])
    )


def test_forwards_are_saved_against_before_and_against_others():
    cells = known(
        row("tracerl", 0, [0.5, 0.5, 0.5], [0, 1, 2]),
        row("random", 0, [0.4, 0.4, 0.4], [0, 1, 2]) | {"length": [20, 20, 28]},
    )
    assert paper.saved(cells, "sudoku", "tracerl", "").mean == 5  # 10 before, 5 after
    assert paper.saved(cells, "sudoku", "tracerl", "random").mean == 2  # 7 after


def test_what_a_run_told_is_summed_up():
    rows = [
        {
            "step": 0,
            "heldout_accuracy": 0.25,
            "heldout_tokens_per_forward": 2.0,
            "heldout_response_length": 19.0,
        },
        {
            "step": 1,
            "packed_slots": 300,
            "response_length": 20.0,
            "tokens_per_forward": 2.0,
            "entropy": 0.5,
        },
    ]
    rows.append(rows[0] | rows[1] | {"step": 2, "heldout_accuracy": 0.5, "entropy": 1})
    told = paper.told_of(rows, per_step=8)
    assert told["steps"] == [0, 2] and told["accuracy"] == [0.25, 0.5]
    assert told["training_tokens"] == [0, 600] and told["forwards"] == [0, 160]
    assert told["entropy"] == 0.75 and "selection_bias" not in told
    rows = [
        row
        | {
            k.replace("heldout", "heldout_wide"): 2 * x
            for k, x in row.items()
            if "heldout" in k
        }
        for row in rows
    ]
    assert paper.told_of(rows, per_step=8)["accuracy"] == [0.5, 1.0]


def test_every_cell_is_of_its_configuration_and_the_page_is_the_file():
    for cell, told in paper.load().items():
        assert told["keys"] == " ".join(paper.keys_of(cell))
    page = paper.PAGE.read_text()
    for name, table in paper.rendered(paper.load()).items():
        assert f"<!-- {name}: begin -->\n{table}\n<!-- {name}: end -->" in page


def test_the_picture_has_a_panel_for_each_method_of_enough_seeds(tmp_path):
    steep = [row("tracerl", s, [0.5, 0.6, 0.7 + s / 10], [0, 1, 2]) for s in range(3)]
    flat = [row("random", s, [0.5, 0.5, 0.5], [0, 1, 4]) for s in range(3)]
    x, mean, half = paper.band(steep, "training_tokens")
    assert (x[0], x[-1]) == (0, 2) and mean[-1] == pytest.approx(0.8)
    # Of 0.7, 0.8 and 0.9 the deviation is 0.1, and Student's t of two degrees is 4.303.
    assert half[-1] == pytest.approx(4.303 * 0.1 / 3**0.5) and half[0] == 0
    file = tmp_path / "paper.png"
    paper.draw(known(*steep, *flat[:2]), "sudoku", file)
    assert not file.exists()  # two seeds are too few
    paper.draw(known(*steep, *flat), "sudoku", file)
    assert file.stat().st_size > 5_000


def test_a_coin_is_the_same_for_the_same_step():
    class Trace:
        tokens_BT = np.arange(4000).reshape(400, 10)

    first = paper.coin(["x"] * 400, None, Trace)
    assert 0.4 < first.mean() < 0.6 and {*first.tolist()} == {0.0, 1.0}
    assert (first == paper.coin(["y"] * 400, None, Trace)).all()


def test_one_cell_in_little(tmp_path, monkeypatch):
    """A step of the control with a coin's reward: accuracy is the puzzle's all the same."""

    def run(words, **how):
        assert words[1] == "-m" and how["check"]
        done = served.run(words[2], words[3:], served.split(1))
        assert done.returncode == 0, done.stderr

    monkeypatch.setattr(paper.subprocess, "run", run)
    little = ["rl.steps=1", "rl.prompts=2", "rl.group=2", "eval.problems=4"]
    little += ["eval.every=1", "sampler.rows=4", "batch.rows=1", "rl.updates=1"]
    little += ["rl.min_solved=0.0", "rl.max_solved=1.0", "sampler.page=64"]
    told = paper.run(
        Cell("sudoku", "random_reward", 0),
        tmp_path,
        *(f"--config.{x}" for x in little),
    )
    assert told["steps"] == [0, 1] and told["length"] == [19.0, 19.0]
    assert told["training_tokens"][-1] > 4 * 60 and told["forwards"][-1] >= 4
    assert json.loads(json.dumps(told)) == told
    assert not list((tmp_path / "sudoku" / "random_reward").iterdir())
