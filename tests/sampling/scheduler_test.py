"""Who gets a row and which pages: by hand, without a device."""

import dataclasses

import numpy as np
import pytest

from dllm_jax.models.config import ModelConfig
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.scheduler import PATIENCE, Scheduler

# Four positions a block, two blocks a page; a row of 32 has four pages.
CFG = SamplerConfig(block=4, max_prompt=16, max_new=16, rows=4, page=8)
MODEL = ModelConfig(
    vocab=67, d_model=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffw=8
)
LONG = list(range(10, 26))  # fills two pages
RAGGED = list(range(30, 44))  # a page, one block of the next, and two tokens


def made(shards=1, shift=0, **changes) -> Scheduler:
    """Returns a scheduler of CFG, changed."""
    cfg = dataclasses.replace(CFG, **changes)
    model = dataclasses.replace(MODEL, shift=shift)
    return Scheduler(model=model, cfg=cfg, shards=shards)


def submit(scheduler, *prompts, first=0, new=16):
    """Queues prompts; their indices count from `first`."""
    for index, prompt in enumerate(prompts, first):
        scheduler.submit(prompt, index=index, temperature=1.0, new=new)


def prefilled(scheduler, past=0):
    """Notes that all prompts of active requests are in pages; `past`: blocks behind."""
    start_B = np.zeros(scheduler.row_count, np.int32)
    for request in scheduler.active:
        start_B[request.row] = request.prefix + past * CFG.block
    scheduler.note_progress(start_B, start_B, start_B)


def active(scheduler) -> list[int]:
    return [request.index for request in scheduler.active]


def test_what_the_device_is_told_of_a_new_row():
    scheduler = made()
    submit(scheduler, RAGGED, new=5)
    changes = scheduler.admit()
    (request,) = scheduler.active
    (row,) = np.flatnonzero(changes.here_B)
    assert row == request.row
    assert changes.prompt_BT[row, :14].tolist() == RAGGED
    assert (changes.prompt_len_B[row], changes.limit_B[row]) == (14, 19)
    assert changes.filled_B[row] == 0 and changes.target_B[row] == 16  # no such page
    # 19 positions are three pages; of another row nothing is read behind them.
    assert changes.table_BA[row].tolist() == [*request.pages, request.pages[0]]
    assert changes.room_B[row] == 24
    assert scheduler.admit() is None  # nothing has changed


def test_a_prompt_waits_for_the_same_one_and_shares_its_pages():
    scheduler = made()
    submit(scheduler, LONG, LONG, [5])
    scheduler.admit()
    assert active(scheduler) == [0, 2]  # 1 was passed over
    prefilled(scheduler)
    changes = scheduler.admit()
    first, _, second = scheduler.active
    assert second.index == 1 and second.pages[:2] == first.pages[:2]
    assert changes.filled_B[second.row] == 16
    assert (changes.target_B == 16).all()  # whole pages: nobody writes to them again


def test_a_ragged_page_is_copied():
    scheduler = made()
    submit(scheduler, RAGGED)
    scheduler.admit()
    prefilled(scheduler)
    submit(scheduler, RAGGED, first=1)
    changes = scheduler.admit()
    first, second = scheduler.active
    assert second.pages[0] == first.pages[0] and second.pages[1] != first.pages[1]
    assert changes.source_B[second.row] == first.pages[1]
    assert changes.target_B[second.row] == second.pages[1]
    assert changes.filled_B[second.row] == 12
    assert scheduler.pools[0].holders[first.pages[1]] == 1  # the copy holds it no more


def test_with_a_shift_a_prompt_s_last_block_is_run_again():
    scheduler = made(shift=1)
    submit(scheduler, LONG)
    scheduler.admit()
    prefilled(scheduler)
    submit(scheduler, LONG, first=1)
    changes = scheduler.admit()
    first, second = scheduler.active
    assert second.pages[0] == first.pages[0] and second.pages[1] != first.pages[1]
    assert changes.filled_B[second.row] == 8 and (changes.target_B == 16).all()


def test_a_request_goes_where_its_prompt_is_known():
    scheduler = made(shards=2)
    submit(scheduler, LONG, RAGGED)
    scheduler.admit()
    prefilled(scheduler)
    home = [scheduler.shard_of(request.row) for request in scheduler.active]
    assert sorted(home) == [0, 1]  # most pages to give, where nothing is known
    submit(scheduler, RAGGED, LONG, first=2)
    scheduler.admit()
    shards = [scheduler.shard_of(request.row) for request in scheduler.active]
    assert shards == [*home, home[1], home[0]]


def test_the_youngest_leaves_for_the_oldest_and_comes_first_again():
    # Six pages for rows of four: both begin, with pages for 16 blocks ahead.
    scheduler = made(pages=6, max_new=200, rows=2, page=64)
    submit(scheduler, LONG, [7] * 16, [8] * 16, new=200)
    scheduler.admit()
    assert active(scheduler) == [0, 1] and scheduler.overbooked
    oldest, youngest = scheduler.active
    for past in range(1, 50):
        prefilled(scheduler, past)
        changes = scheduler.admit()
        if not youngest.running:
            break
    assert active(scheduler) == [0]
    assert [request.index for request in scheduler.queue] == [1, 2]
    assert not youngest.pages and changes.gone_B.sum() == 1
    assert changes.room_B[oldest.row] >= oldest.start + 4
    scheduler.cancel(0)
    scheduler.admit()
    assert active(scheduler) == [1, 2]


def test_a_prompt_that_needs_many_pages_is_not_passed_for_ever():
    """Two answers end and two short prompts come before every admission."""
    long = {"prompt": [3] * 64, "index": 0, "temperature": 1.0, "new": 64}
    scheduler = made(max_prompt=64, max_new=64, pages=18)
    submit(scheduler, *[[5]] * 4, first=1, new=8)
    scheduler.admit()
    scheduler.submit(**long)
    for first in range(5, 105, 2):
        for request in scheduler.active[:2]:
            scheduler.end(request)
        submit(scheduler, [5], [5], first=first, new=8)
        scheduler.admit()
        if 0 in active(scheduler):
            break
    # It needs 16 of 18 pages: two or three admissions more see short ones end.
    assert 0 in active(scheduler) and first < 5 + 2 * (PATIENCE + 4)
    waiting = [request.index for request in scheduler.queue]
    assert waiting and waiting == sorted(waiting)


def test_who_lacks_pages_where_its_prompt_is_known_goes_elsewhere():
    scheduler = made(shards=2, pages=4)
    submit(scheduler, LONG)
    scheduler.admit()
    prefilled(scheduler)
    submit(scheduler, [*LONG[:8], 9], first=1)  # a page of it is known, three are not
    scheduler.admit()
    shards = [scheduler.shard_of(request.row) for request in scheduler.active]
    assert sorted(shards) == [0, 1]


def test_an_empty_engine_that_can_place_nobody_says_so():
    scheduler = made()
    submit(scheduler, LONG)
    scheduler.pools[0].take(15)  # by nobody: a leak
    with pytest.raises(RuntimeError, match="no request fits"):
        scheduler.admit()
