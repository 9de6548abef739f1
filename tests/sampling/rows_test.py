"""The engine's device half: how clean windows are dealt out to rows."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from dllm_jax.sampling import rows
from tests.properties import examples


@functools.cache
def dealer(clean_count: int):
    """Returns `deal` of a number of windows, compiled."""
    return jax.jit(functools.partial(rows.deal, clean_count=clean_count))


@pytest.mark.parametrize(
    "due, take",
    [
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([1, 1, 1, 0], [1, 1, 1, 0]),
        ([9, 1, 0, 1], [2, 1, 0, 1]),  # blocks just filled before a long prompt
        ([3, 2, 9, 9], [2, 2, 0, 0]),  # the shorter prompt is ready sooner
        ([2, 2, 2, 2], [2, 2, 0, 0]),
    ],
)
def test_windows_by_hand(due, take):
    take_b, row_c, nth_c, real_c = dealer(4)(np.array(due, np.int32))
    assert take_b.tolist() == take
    dealt = zip(row_c.tolist(), nth_c.tolist(), real_c.tolist(), strict=True)
    windows = [(row, nth) for row, nth, real in dealt if real]
    assert sorted(windows) == [(b, i) for b in range(4) for i in range(take[b])]


@examples(5)
@hypothesis.given(
    due=st.lists(st.integers(0, 12), min_size=5, max_size=5),
    clean_count=st.sampled_from([2, 5, 11]),
)
def test_no_window_is_wasted_and_least_due_come_first(due, clean_count):
    take_b, row_c, nth_c, real_c = dealer(clean_count)(np.array(due, np.int32))
    take_b, real_c = np.asarray(take_b), np.asarray(real_c)
    assert take_b.sum() == real_c.sum() == min(clean_count, sum(due))
    assert (take_b <= due).all()
    for b, n in enumerate(take_b):  # each row's windows follow each other
        assert nth_c[real_c & (row_c == b)].tolist() == list(range(n))
    # Who waits for more than another gets none before the other has all.
    for more in range(5):
        for less in range(5):
            if due[more] > due[less]:
                assert take_b[more] == 0 or take_b[less] == due[less]
