"""The engine's forwards: how windows and chunks are dealt out to rows."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from dllm_jax.sampling import forwards
from tests.properties import examples


@functools.cache
def dealer(count: int):
    """Returns `deal` of a number of chunks, compiled."""
    return jax.jit(functools.partial(forwards.deal, count=count))


@pytest.mark.parametrize(
    "due, chunks",
    [
        ([0, 0, 0, 0], []),
        ([1, 0, 1, 1], [(0, 0), (2, 0), (3, 0)]),
        ([9, 1, 0, 2], [(1, 0), (3, 0), (3, 1), (0, 0)]),  # a short prompt first
        ([3, 2, 9, 9], [(1, 0), (1, 1), (0, 0), (0, 1)]),
    ],
)
def test_chunks_by_hand(due, chunks):
    row_c, nth_c, real_c = dealer(4)(np.array(due, np.int32))
    dealt = zip(row_c.tolist(), nth_c.tolist(), real_c.tolist(), strict=True)
    assert [(row, nth) for row, nth, real in dealt if real] == chunks


@examples(5)
@hypothesis.given(
    due=st.lists(st.integers(0, 12), min_size=5, max_size=5),
    count=st.sampled_from([2, 5, 11]),
)
def test_no_chunk_is_wasted_and_least_due_come_first(due, count):
    row_c, nth_c, real_c = (np.asarray(x) for x in dealer(count)(np.array(due)))
    take_b = np.bincount(row_c[real_c], minlength=5)
    assert real_c.sum() == min(count, sum(due)) and (take_b <= due).all()
    for b, n in enumerate(take_b):  # each row's chunks follow each other
        assert nth_c[real_c & (row_c == b)].tolist() == list(range(n))
    # Who waits for more than another gets none before the other has all.
    for more in range(5):
        for less in range(5):
            if due[more] > due[less]:
                assert take_b[more] == 0 or take_b[less] == due[less]


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33])
def test_fewer_chunks_are_the_first_of_more(rows):
    due_b = np.random.default_rng(rows).integers(0, 4, rows)
    for few_c, many_c in zip(dealer(2)(due_b), dealer(7)(due_b), strict=True):
        np.testing.assert_array_equal(few_c, many_c[:2])


@examples(2)
@hypothesis.given(st.lists(st.booleans(), min_size=6, max_size=6))
def test_used_places_come_first_in_their_order(used):
    place_dw, nth_dk = (np.asarray(x)[0] for x in forwards.first(np.array([used])))
    assert place_dw.tolist() == sorted(range(6), key=lambda place: not used[place])
    assert place_dw[nth_dk].tolist() == list(range(6))
