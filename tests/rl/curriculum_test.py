"""Which problems are asked: solved ones rest, half-solved ones come more often."""

import json

import numpy as np

from dllm_jax.rl.config import RLConfig
from dllm_jax.rl.curriculum import Curriculum

RIGHT, WRONG = np.ones(4, bool), np.zeros(4, bool)


def stream(start, count):
    """Returns five problems, round and round."""
    return np.arange(start, start + count) % 5


def test_what_is_solved_so_often_rests_and_comes_back():
    known = Curriculum(RLConfig(rest_after=2, rest_for=3), seed=0)
    place, asked = 0, []
    for _ in range(12):
        chosen, used = known.drawn(stream, place, 5, 100)
        place += used
        asked.append(chosen)
        for problem in chosen:
            known.note(problem, RIGHT if problem == 3 else WRONG)
    flat = [problem for chosen in asked for problem in chosen]
    assert place > len(flat) == 60  # some places were passed over
    counts = np.bincount(flat)
    # Asked twice, then passed over three times; solved again, it rests again at once.
    asked_in = [r for r in range(60) if r in (0, 1) or r % 4 == 1]
    assert counts[3] == sum(5 * r + 3 < place for r in asked_in)
    assert min(counts[[0, 1, 2, 4]]) >= place // 5


def test_one_wrong_answer_begins_the_count_again():
    known = Curriculum(RLConfig(rest_after=2), seed=0)
    for solved_n in (RIGHT, np.array([1, 1, 0, 1], bool), RIGHT):
        known.note(1, solved_n)
        assert known.asks(1, 0)
    known.note(1, RIGHT)
    assert not known.asks(1, 0)


def test_the_chance_follows_the_solve_rate():
    known = Curriculum(RLConfig(curriculum=0.9), seed=7)
    half = np.arange(16) < 8
    for problem, solved_n in ((0, half), (1, np.ones(16, bool)), (2, half < 0)):
        known.note(problem, solved_n)
    share = [
        np.mean([known.asks(problem, place) for place in range(2000)])
        for problem in (0, 1, 2, 3)
    ]
    # (16 + 1) / 18 right: 4 p (1 - p) = 0.2099, so 1 - 0.9 x 0.7901
    np.testing.assert_allclose(share, [1, 0.289, 0.289, 1], atol=0.03)


def test_without_rest_after_no_problem_rests():
    known = Curriculum(RLConfig(curriculum=0.9), seed=0)
    known.note(1, np.arange(4) < 2)  # half of them: its chance is 1
    assert all(known.asks(1, place) for place in range(9))


def test_what_it_remembers_is_all_there_is_to_it():
    cfg = RLConfig(curriculum=0.8, rest_after=1)
    rng, known = np.random.default_rng(0), Curriculum(cfg, seed=3)
    for problem in range(5):
        known.note(problem, rng.random(4) < 0.7)
    again = Curriculum(cfg, 3, json.loads(json.dumps(known.memory)))
    for place in (0, 7, 19):
        assert known.drawn(stream, place, 4, 50) == again.drawn(stream, place, 4, 50)
    assert known.memory == again.memory


def test_a_run_does_not_end_for_want_of_problems():
    known = Curriculum(RLConfig(rest_after=1, rest_for=1000), seed=0)
    for problem in range(5):
        known.note(problem, RIGHT)
    chosen, used = known.drawn(stream, 0, 3, most=10)
    assert chosen == [0, 1, 2] and used == 13
