"""The engine's forwards: how windows and chunks are dealt out to rows."""

import functools
import itertools
import types

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from dllm_jax.models.config import ModelConfig
from dllm_jax.sampling import forwards, shards
from dllm_jax.sampling.config import SamplerConfig
from tests.properties import examples


@functools.cache
def dealer(count: int):
    """Returns `deal` of a number of chunks, compiled."""
    return jax.jit(functools.partial(forwards.deal, count=count))


def check_least_first(due, take):
    """Asserts that who waits for more than another has none before that one has all."""
    for more, less in itertools.permutations(range(len(due)), 2):
        if due[more] > due[less]:
            assert take[more] == 0 or take[less] == due[less]


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


@pytest.mark.parametrize(
    ("platform", "due", "many"),
    [
        ("cpu", [[4, 2], [1, 0]], False),
        ("cpu", [[4, 3], [1, 0]], True),
        ("gpu", [[1, 3], [2, 2]], False),
        ("gpu", [[1, 3], [2, 3]], True),
    ],
)
def test_few_after_few_run_what_is_not_much_less_than_many(
    monkeypatch, platform, due, many
):
    """It is the fullest shard that says: every one runs the same program."""
    monkeypatch.setattr(shards, "platform", lambda: platform)
    assert shards.of_many(np.array(due), (1, 8)) == many
    assert shards.of_many(np.array(due), (8,)) == 0


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
    check_least_first(due, take_b)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33])
def test_fewer_chunks_are_the_first_of_more(rows):
    due_b = np.random.default_rng(rows).integers(0, 4, rows)
    for few_c, many_c in zip(dealer(2)(due_b), dealer(7)(due_b), strict=True):
        np.testing.assert_array_equal(few_c, many_c[:2])


@pytest.mark.parametrize(
    "rows, counts",
    [(1, (1, 2)), (7, (7, 10, 14)), (8, (4, 8, 12, 16)), (16, (4, 8, 16, 24, 32))],
)
def test_programs_for_few_windows_and_for_all(rows, counts):
    """Two windows a row at the most; small programs for rows that are left."""
    assert SamplerConfig().window_counts(rows) == counts


@pytest.mark.parametrize(
    "platform, rows, block, counts",
    [("gpu", 1, 4, (2,)), ("gpu", 7, 4, (8, 10, 14)), ("gpu", 1, 2, (4,))]
    + [("gpu", 1, 32, (1, 2)), ("gpu", 8, 4, (4, 8, 12, 16)), ("tpu", 1, 4, (1, 2))],
)
def test_a_gpus_products_are_of_whole_multiples_of_8_slots(
    platform, rows, block, counts
):
    cfg = SamplerConfig(block=block)
    assert forwards.window_counts(platform, cfg, rows) == counts


@pytest.mark.parametrize(
    "rows, block, counts",
    [(1, 4, (1, 2, 16)), (1, 32, (1, 2)), (8, 4, (4, 8, 12, 16, 30))]
    + [(32, 4, (8, 16, 32, 48, 64, 95))],
)
def test_where_prompts_ride_one_program_holds_their_blocks_too(rows, block, counts):
    assert SamplerConfig(block=block).window_counts(rows, rides=True) == counts


@pytest.mark.parametrize(
    "platform, width, longest, rides",
    [("cpu", 512, 64, True), ("cpu", 512, 65, False), ("cpu", 128, 64, False)]
    + [("gpu", 512, 64, False), ("tpu", 512, 64, False)],
)
def test_short_prompts_ride_beside_weights_that_no_cache_holds(
    platform, width, longest, rides
):
    model = ModelConfig(d_model=width, ffw=1536, layers=8, heads=8, dtype="float32")
    cfg = SamplerConfig(block=4, max_prompt=longest)
    assert forwards.rides(platform, model, cfg) == rides


@pytest.mark.parametrize(
    "due, now, room",
    [
        ([1, 1, 0, 0], [1, 1, 1, 1], 8),  # the smallest that holds all
        ([1, 0, 0, 0], [1, 1, 1, 1], 8),
        ([5, 0, 0, 0], [1, 1, 0, 0], 4),  # three blocks of a prompt fill what is left
        ([5, 0, 0, 0], [0, 1, 1, 0], 8),  # two are less than half
        ([6, 0, 0, 0], [1, 1, 0, 0], 8),  # it is full
        ([7, 1, 1, 0], [1, 1, 1, 0], 8),
        ([8, 1, 1, 0], [1, 1, 1, 0], 21),
        ([3, 0, 0, 0], [1, 1, 1, 1], 8),  # no room beside them at all
        ([9, 9, 9, 9], [1, 1, 1, 1], 21),  # more than any holds
        ([9, 9, 0, 0], [1, 1, 0, 0], 21),
        ([9, 1, 0, 0], [0, 0, 1, 0], 8),
        ([3, 0, 0, 0], [0, 0, 0, 0], 2),
        ([0, 0, 0, 0], [0, 0, 0, 1], 2),
    ],
)
def test_prompts_wait_for_a_program_that_they_fill(due, now, room):
    """Half of them at least do not."""
    due, now, counts = np.array([due]), np.array([now], bool), (2, 4, 8, 21)
    assert forwards.room_of(due, now, counts) == room
    # The fullest shard says.
    less, one = np.minimum(due, 1), np.array([[0, 0, 0, 1]], bool)
    both = np.concatenate([due, less * (due > 1)]), np.concatenate([now, now & one])
    assert forwards.room_of(*both, counts) == room


@examples(4)
@hypothesis.given(
    due=st.lists(st.integers(0, 16), min_size=8, max_size=8),
    seed=st.integers(0, 99),
)
def test_prompts_do_not_wait_for_other_rows_to_end(due, seed):
    """Rows that go on for ever have one or two windows in each forward."""
    rng, due, counts = np.random.default_rng(seed), np.array(due), (4, 8, 12, 16, 30)
    goes_on, waits, forwards_run = due < 2, (due > 1).sum(), 0
    while (due > 1).any():
        s = types.SimpleNamespace(live_B=np.ones(8, bool), start_B=np.full(8, 80))
        rows = types.SimpleNamespace(
            s=s, filled_B=80 - 4 * due, room_B=np.where(goes_on, 84, 80)
        )
        held = jax.device_get(forwards.places_of(rows, 1, 4, counts)).due_db[0]
        due = np.where(goes_on, rng.integers(0, 2, 8), due - held)
        forwards_run += 1
    assert forwards_run <= 5 * waits  # each halves what is left of 16 blocks at least


@examples(4)
@hypothesis.given(
    due=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    able=st.lists(st.booleans(), min_size=6, max_size=6),
    most=st.integers(4, 12),
)
def test_what_a_forward_does_not_hold_waits(due, able, most):
    """Two shards of three rows, whose prompts ride."""
    due, able, counts = np.array(due), np.array(able), (2, 3, most)
    start = np.full(6, 40)
    s = types.SimpleNamespace(live_B=np.ones(6, bool), start_B=start)
    rows = types.SimpleNamespace(
        s=s, filled_B=start - 4 * due, room_B=np.where(able, 44, 40)
    )
    held, now, windows = jax.device_get(forwards.places_of(rows, 2, 4, counts))
    due, able = due.reshape(2, 3), able.reshape(2, 3)
    room = int(forwards.room_of(due, able, counts))
    np.testing.assert_array_equal(windows, held.sum(axis=1) + now.sum(axis=1))
    full = np.minimum((due + able).sum(axis=1), room)
    np.testing.assert_array_equal(windows, full)
    assert (now <= able).all() and (held == due)[now].all() and (held >= 0).all()
    for d in range(2):
        check_least_first(due[d] + able[d], held[d] + now[d])


def windows_of(due, now, filled, start, count: int):
    """Returns forwards.windows_of for rows by shard, on the host."""
    tokens = np.broadcast_to(np.arange(64)[None], (due.size, 64))
    s = types.SimpleNamespace(
        tokens_BT=tokens, step_BT=np.zeros_like(tokens), start_B=start.reshape(-1)
    )
    rows = types.SimpleNamespace(s=s, filled_B=filled.reshape(-1))
    model = types.SimpleNamespace(mask_id=99)
    places = forwards.Places(due, now, due.sum(axis=1) + now.sum(axis=1))
    made = forwards.windows_of(rows, places, count, model, 4)
    return jax.tree.map(np.asarray, made)


@examples(4)
@hypothesis.given(
    due=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    now=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_every_block_that_is_due_and_every_present_one_has_a_window(due, now):
    """Two shards of three rows: blocks in their order, before what sees them."""
    due, now = np.array(due).reshape(2, 3), np.array(now).reshape(2, 3)
    filled = 4 * np.arange(6).reshape(2, 3)
    start = filled + 4 * due
    made = windows_of(due, now, filled, start, 12)
    for d in range(2):
        full = [
            (row, filled[d, row] + 4 * nth)
            for row in range(3)
            for nth in range(due[d, row])
        ]
        present = [(row, start[d, row]) for row in np.flatnonzero(now[d])]
        used = len(full) + len(present)
        got = list(zip(made.row_dw[d], made.pos_dwW[d, :, 0], strict=True))[:used]
        assert sorted(got[: len(full)]) == sorted(full)
        assert got[len(full) :] == present
        assert made.keep_dw[d].tolist() == [True] * len(full) + [False] * (
            12 - len(full)
        )
        assert (made.pos_dwW[d, used:, 0] == 0).all()  # sees no page
        for row in range(3):
            last, own = made.window_d2b[d, :, row]
            if due[d, row]:
                assert got[last] == (row, start[d, row] - 4)
            if now[d, row]:
                assert got[own] == (row, start[d, row])


@pytest.mark.parametrize("count", [2, 4, 6])
def test_the_two_windows_of_a_row_are_paired(count):
    """A row has its full block, its next one, both or neither: two shards of four rows."""
    full = np.array([[1, 0, 0, 1], [0, 0, 0, 0]], bool)
    now = np.array([[1, 1, 0, 0], [0, 0, 1, 0]], bool)
    if count == 2:
        full[0], now[0] = [0, 0, 1, 0], [0, 0, 1, 0]
    start, table = 4 * np.arange(1, 9), np.arange(16).reshape(8, 2)
    due = full.astype(int)
    windows = windows_of(due, now, start.reshape(2, 4) - 4 * due, start, 8)
    row, of_full = windows.row_dw, windows.keep_dw
    used = full.sum(axis=1) + now.sum(axis=1)
    rows = types.SimpleNamespace(s=types.SimpleNamespace(start_B=start), table_BA=table)
    pairs = jax.tree.map(np.asarray, forwards.pairs_of(rows, windows, count))
    held = min(count, 4)
    for d in range(2):
        at = np.s_[d * held : d * held + held]
        here = np.flatnonzero(full[d] | now[d])[::-1]  # the longest first
        row_of = (pairs.table_BA[at, 0] // 2 - 4 * d).tolist()
        assert row_of[: len(here)] == here.tolist()
        begins = start.reshape(2, 4)[d, here].tolist()
        assert pairs.start_B[at].tolist() == begins + [0] * (held - len(here))
        places = pairs.place_R[d * count : d * count + count]
        assert (places < 2 * held).all() and (pairs.window_B2[at] < count).all()
        for window in range(used[d]):  # each is where its row looks for it
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
