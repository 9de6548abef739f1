"""Grading beside sampling finds what grading at the end finds, in the same order."""

import threading

import jax
import numpy as np
import pytest

from dllm_jax import data, metrics, sharding
from dllm_jax.rl import beside, rollout
from dllm_jax.rl.rewards import Grader, Grades, anything
from dllm_jax.sampling import state
from tests.rl import lent

N, T = 12, 20
GROUP_N = np.repeat(np.arange(4), 3)
PROBLEMS = [data.Problem([5, 6], f"problem {group}", "", {}) for group in GROUP_N]


def answer(i: int):
    """Returns answer i: two tokens of the prompt, and then some of its own."""
    tokens_T, step_T = np.zeros((2, T), np.int32)
    count = 1 + i % 5
    tokens_T[2 : 2 + count] = 20 + i
    step_T[2 : 2 + count] = 1
    return state.no_answer(T)._replace(
        tokens_T=tokens_T,
        step_T=step_T,
        prompt_len=np.int32(2),
        len=np.int32(count),
        forwards=np.int32(1),
        stopped=np.bool_(i % 4 > 0),
    )


class Sampler:
    """Gives the answers in an order of its own; calls `between` after each."""

    def __init__(self, order, between=lambda i: None):
        self.order, self.between, self.released = order, between, 0

    def stream(self, params, prompts, key, **_):
        for i in self.order:
            yield i, answer(i)
            self.between(i)

    def release(self):
        self.released += 1


def judged(texts, problems, trace) -> Grades:
    """Returns rewards that tell which answer and which problem they are of."""
    numbers = [float(p.text.split()[1]) for p in problems]
    reward_n = np.array([len(t) + 10 * n for t, n in zip(texts, numbers, strict=True)])
    reward_n[trace.tokens_BT[:, 2] == 25] = np.nan
    of_tokens_nT = trace.tokens_BT.astype(np.float32) * (trace.step_BT > 0)
    return Grades(reward_n, of_tokens_nT, {"first": reward_n / 2, "other": trace.len_B})


def answered(sampler, grade=judged, **facts):
    return rollout.answered(
        sampler,
        None,
        PROBLEMS,
        GROUP_N,
        jax.random.key(0),
        temperature=1.0,
        decode=lent.decode,
        timer=metrics.Timer(),
        grader=Grader(grade, anything, **facts),
        truncated_wrong=True,
    )


def same(one, two):
    """Asserts two Rollouts equal."""
    assert one.text == two.text
    for name in ("reward_n", "late_n", "group_n", "reward_nT"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert [*one.parts] == [*two.parts]
    for name, x_n in one.parts.items():
        np.testing.assert_array_equal(x_n, two.parts[name])
    jax.tree.map(np.testing.assert_array_equal, one.trace, two.trace)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_finds_what_grading_at_the_end_finds(seed):
    sampler = Sampler(np.random.default_rng(seed).permutation(N).tolist())
    beside_it = answered(sampler)
    assert sampler.released == 1
    same(beside_it, answered(Sampler(range(N)), aside=False))
    assert beside_it.late_n.sum() == 1 and beside_it.reward_n[5] == 0


def test_groups_are_graded_while_others_are_sampled():
    """The first group is graded, in another thread, before the last one has ended."""
    graded, threads, waited = threading.Event(), set(), []

    def grade(texts, problems, trace):
        assert len(texts) % 3 == 0  # whole groups
        threads.add(threading.get_ident())
        graded.set()
        return judged(texts, problems, trace)

    def between(i):
        if i == 5:
            waited.append(graded.wait(30))

    same(answered(Sampler(range(N), between), grade), answered(Sampler(range(N))))
    assert waited == [True]
    assert threading.get_ident() not in threads or len(threads) > 1
    threads.clear()
    answered(Sampler(range(N)), grade, aside=False)
    assert threads == {threading.get_ident()}


def test_what_waits_is_graded_together():
    """A slow grader is not asked group by group."""
    go, sizes = threading.Event(), []

    def grade(texts, problems, trace):
        sizes.append(len(texts))
        go.wait(30)
        return judged(texts, problems, trace)

    answered(Sampler(range(N), lambda i: i == N - 1 and go.set()), grade)
    assert sum(sizes) == N and sizes[0] >= 3 and len(sizes) <= 3


def test_no_more_than_most_are_graded_together():
    """The first of those that wait."""
    begun, go, graded = threading.Event(), threading.Event(), []

    def grade(texts, problems, trace):
        graded.append(trace.tokens_BT[:, 2].tolist())
        begun.set()
        assert go.wait(30)
        return judged(texts, problems, trace)

    grader = Grader(grade, anything)
    grading = beside.Beside(grader, lent.decode, PROBLEMS, GROUP_N, most=4)
    for i, _ in grading.watched((i, answer(i)) for i in (0, 1, 2, *range(11, 2, -1))):
        if i == 2:
            assert begun.wait(30)
    go.set()
    grading.result(range(N))
    assert [[x - 20 for x in rows] for rows in graded] == [
        [0, 1, 2],
        [3, 4, 5, 6],
        [7, 8, 9, 10],
        [11],
    ]


def test_a_graders_error_ends_the_step():
    def grade(texts, problems, trace):
        raise ValueError("rl.reward='mine:f' returned what is no list of numbers")

    with pytest.raises(ValueError, match="returned what is no list"):
        answered(Sampler(range(N)), grade)


def test_a_stream_that_was_stopped_is_not_graded_to_its_end():
    calls = []

    def grade(texts, problems, trace):
        calls.append(len(texts))
        return judged(texts, problems, trace)

    assert answered(Sampler(range(5)), grade) is None
    assert sum(calls) <= 3


def test_each_process_grades_its_share(monkeypatch):
    monkeypatch.setattr(sharding, "dealt", lambda: slice(1, None, 2))
    grading = beside.Beside(Grader(judged, anything), lent.decode, PROBLEMS, GROUP_N)
    order = np.random.default_rng(0).permutation(N).tolist()
    for _ in grading.watched((i, answer(i)) for i in order):
        pass
    texts, grades = grading.result(range(N))
    own = np.arange(1, N, 2)
    trace = state.stacked([answer(i) for i in own])
    expected = judged([texts[i] for i in own], [PROBLEMS[i] for i in own], trace)
    np.testing.assert_array_equal(grades.reward_n, expected.reward_n)
    np.testing.assert_array_equal(grades.reward_nT, expected.reward_nT)
    assert len(texts) == N
    few = beside.Beside(
        Grader(judged, anything), lent.decode, PROBLEMS[:1], GROUP_N[:1]
    )
    for _ in few.watched([(0, answer(0))]):
        pass
    _, nothing = few.result([0])
    assert nothing.reward_n.shape == (0,)


def test_what_is_graded_is_taken_out_by_number():
    """What was there before is in no group, and of the others each is forgotten."""
    grading = beside.Beside(
        Grader(judged, anything), lent.decode, PROBLEMS, GROUP_N, done=4
    )
    for _ in grading.watched((i, answer(i)) for i in range(N)):
        pass
    texts, grades = grading.result([4, 5])  # what is left of its group
    rows = [answer(4), answer(5)]
    assert texts == lent.decode(state.stacked(rows))
    expected = judged(texts, PROBLEMS[4:6], state.stacked(rows))
    np.testing.assert_array_equal(grades.reward_n, expected.reward_n)
    assert [*grades.parts] == ["first", "other"]
    grading.result(range(6, N))
    assert not (grading.answers or grading.texts or grading.grades or grading.jobs)


def test_rewards_of_tokens_are_of_all_answers_or_of_none():
    some = [Grades(np.ones(1), np.ones((1, 3))), Grades(np.ones(1))]
    with pytest.raises(ValueError, match="in some answers, not in all"):
        beside.joined(some)


@pytest.mark.parametrize("parts", [{}, {"b": np.ones(1)}, {"a": np.ones(1), "b": 1}])
def test_the_parts_of_all_answers_have_the_same_names(parts):
    one, other = (Grades(np.ones(1), None, x) for x in ({"a": np.ones(1)}, parts))
    for some in ([one, other], [other, one]):
        with pytest.raises(ValueError, match="other parts than others: .*a"):
            beside.joined(some)
    first, second = (
        rollout.Rollouts(*[np.zeros(1, int)] * 5, parts=x.parts) for x in (one, other)
    )
    with pytest.raises(ValueError, match="other parts than others: .*a"):
        rollout.joined(first, second)


def test_processes_agree_on_what_was_said(monkeypatch):
    """One that has no answers takes what the others found."""
    some = Grades(np.ones(1), None, {"a": np.ones(1)})
    none = Grades(np.ones(0))
    monkeypatch.setattr(sharding, "told", lambda own: [own, '[["a"], false]'])
    assert beside.agreed(some) == beside.agreed(none) == (["a"], False)
    for other in (Grades(np.ones(1)), Grades(np.ones(1), np.ones((1, 3)), some.parts)):
        with pytest.raises(ValueError, match="rl.reward: "):
            beside.agreed(other)


@pytest.mark.parametrize("first", [0, 1, 5])
def test_parts_of_a_list_are_dealt_by_their_numbers(monkeypatch, first):
    """In every process all have what each found of its share."""
    shares, numbers = [], np.arange(first, first + 7)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for index in range(3):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        own_n = np.full(7, -1)
        share = sharding.dealt(first)
        own_n[share] = numbers[share]
        assert (own_n[share] % 3 == index).all()
        shares.append(own_n)
    every = lambda own_n: np.stack(shares)
    monkeypatch.setattr(sharding.multihost_utils, "process_allgather", every)
    np.testing.assert_array_equal(sharding.gathered(shares[0], first), numbers)
