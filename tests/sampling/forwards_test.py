"""The engine's forwards: how windows and chunks are dealt out to rows."""

import functools
import types

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from dllm_jax.sampling import forwards
from dllm_jax.sampling.config import SamplerConfig
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


@pytest.mark.parametrize(
    "rows, counts",
    [(1, (1, 2)), (7, (7, 10, 14)), (8, (4, 12, 16)), (16, (4, 8, 24, 32))],
)
def test_programs_for_few_windows_and_for_all(rows, counts):
    """Two windows a row at the most; small programs for rows that are left."""
    assert SamplerConfig().window_counts(rows) == counts


@pytest.mark.parametrize("count", [2, 4, 6])
def test_the_two_windows_of_a_row_are_paired(count):
    """A row has its full block, its next one, both or neither: two shards of four rows."""
    full = np.array([[1, 0, 0, 1], [0, 0, 0, 0]], bool)
    now = np.array([[1, 1, 0, 0], [0, 0, 1, 0]], bool)
    if count == 2:
        full[0], now[0] = [0, 0, 1, 0], [0, 0, 1, 0]
    used = np.concatenate([full, now], axis=1)
    place, nth = (np.asarray(x) for x in forwards.first(used))
    row, of_full = place % 4, place < 4
    keep = np.take_along_axis(used, place, axis=1) & of_full
    windows = forwards.Windows(row, None, None, keep, nth, used)
    start, table = 4 * np.arange(1, 9), np.arange(16).reshape(8, 2)
    rows = types.SimpleNamespace(s=types.SimpleNamespace(start_B=start), table_BA=table)
    pairs = jax.tree.map(np.asarray, forwards.pairs_of(rows, windows, count))
    held = min(count, 4)
    for d in range(2):
        at = np.s_[d * held : d * held + held]
        here = np.flatnonzero(full[d] | now[d])
        row_of = (pairs.table_BA[at, 0] // 2 - 4 * d).tolist()
        assert row_of[: len(here)] == here.tolist()
        begins = start.reshape(2, 4)[d, here].tolist()
        assert pairs.start_B[at].tolist() == begins + [0] * (held - len(here))
        places = pairs.place_R[d * count : d * count + count]
        assert (places < 2 * held).all() and (pairs.window_B2[at] < count).all()
        for window in range(used[d].sum()):  # each is where its row looks for it
            own, second = row_of.index(row[d, window]), int(not of_full[d, window])
            assert places[window] == 2 * own + second
            assert pairs.window_B2[at][own, second] == window
        for own, (first, second) in enumerate(pairs.window_B2[at][: len(here)]):
            both = full[d, here[own]] and now[d, here[own]]
            assert (first != second) == both


@examples(2)
@hypothesis.given(st.lists(st.booleans(), min_size=6, max_size=6))
def test_used_places_come_first_in_their_order(used):
    place_dw, nth_dk = (np.asarray(x)[0] for x in forwards.first(np.array([used])))
    assert place_dw.tolist() == sorted(range(6), key=lambda place: not used[place])
    assert place_dw[nth_dk].tolist() == list(range(6))
