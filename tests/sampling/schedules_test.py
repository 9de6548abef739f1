"""The engine over a device without a model: whose keys are read, and whose pages are whose.

A key is the tokens that it would be computed from: under block attention those up to the
end of its block. So what is read can be told from what should be, and thousands of
schedules take the time that a model takes for one.
"""

import collections
import dataclasses
import types

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from dllm_jax import sharding
from dllm_jax.models.config import ModelConfig
from dllm_jax.sampling import engine
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.denoise import TURN
from dllm_jax.sampling.engine import Engine
from dllm_jax.sampling.scheduler import AHEAD
from dllm_jax.sampling.state import Trace
from tests.properties import examples

ASKED = 12  # prompts that may come


class Row:
    """A row in flight: what it will have answered, and how far it is."""

    def __init__(self, changes, row: int, size: int, shift: int):
        prompt_len, index = changes.prompt_len_B[row], changes.index_B[row]
        rng = np.random.default_rng(index)
        self.prompt_len = int(prompt_len)
        self.limit, self.size = int(changes.limit_B[row]), size
        self.canvas = changes.prompt_BT[row, :prompt_len].tolist()
        end = -(-self.limit // size) * size
        self.canvas += rng.integers(0, 9, end - len(self.canvas)).tolist()
        self.stop = int(rng.integers(self.prompt_len + 1, 2 * self.limit))
        self.steps = rng.integers(
            1, size + 1, end // size + 1
        ).tolist()  # of each block
        self.start = self.prompt_len // size * size
        self.filled = int(changes.filled_B[row])
        # With a shift, the end of the last block before the present one is needed.
        self.end_of_clean = None if shift else self.start
        self.live, self.forwards = True, 0

    def key(self, at: int) -> tuple:
        """Returns what the key at a position is computed from."""
        return tuple(self.canvas[: (at // self.size + 1) * self.size])

    def due(self) -> int:
        """Returns how many blocks before its present one have no keys."""
        return (self.start - self.filled) // self.size if self.live else 0


class Device:
    """The device half of the engine; `s` of its rows is itself, as is what `fetch` gets."""

    def __init__(self, model, cfg, shards: int, pages: int):
        self.model, self.cfg, self.shards = model, cfg, shards
        self.size = cfg.block
        self.count = -(-cfg.rows // shards)
        self.rows: dict[int, Row] = {}
        self.table_BA = self.room_B = None
        pages //= shards
        self.pools = [
            [[None] * cfg.page_slots for _ in range(pages)] for _ in range(shards)
        ]
        self.forwards = 0

    def copy_pages(self, changes):
        """Copies the pages on which new rows go on."""
        before = [[list(page) for page in pool] for pool in self.pools]
        for row, (source, target) in enumerate(
            zip(changes.source_B, changes.target_B, strict=True)
        ):
            pool = row // self.count
            if target < len(self.pools[pool]):
                self.pools[pool][target] = list(before[pool][source])

    def admit(self, changes):
        """Does what the host says: rows leave and come."""
        for row in np.flatnonzero(changes.gone_B):
            self.rows.pop(int(row), None)
        for row in np.flatnonzero(changes.here_B):
            self.rows[int(row)] = Row(changes, row, self.size, self.model.shift)
        self.table_BA, self.room_B = changes.table_BA, changes.room_B

    def slot(self, row: int, at: int):
        """Returns (page, slot of it) of a row's position."""
        assert at < self.room_B[row], "beyond its pages"
        page = self.table_BA[row, at // self.cfg.page_slots]
        return self.pools[row // self.count][page], at % self.cfg.page_slots

    def forward(self):
        """Runs chunks of prompts where a row waits for more than a block, else blocks."""
        self.forwards += 1
        live = {number: row for number, row in self.rows.items() if row.live}
        if any(row.due() > 1 for row in live.values()):
            written, now = self.chunks(live), {}
        else:
            written = {number: row.start for number, row in live.items() if row.due()}
            now = {
                number: row
                for number, row in live.items()
                if row.start + self.size <= self.room_B[number]
            }
        for number, end in written.items():
            self.write(number, self.rows[number], end)
        for number in {**written, **now}:  # everything is written before it is read
            row = self.rows[number]
            self.check(number, row, row.start if number in now else row.filled)
        for row in now.values():
            self.step(row)

    def chunks(self, live: dict[int, Row]) -> dict[int, int]:
        """Returns up to where rows' prompts are filled, who waits for least first."""
        due = {  # in chunks
            number: -(-row.due() * self.size // self.cfg.chunk)
            for number, row in live.items()
            if row.due() > 1
        }
        on_shard = collections.Counter()
        for number, count in due.items():
            on_shard[number // self.count] += count
        counts = self.cfg.chunk_counts(self.count)
        count = counts[0 if 2 * max(on_shard.values()) <= counts[-1] else -1]
        left, filled = dict.fromkeys(on_shard, count), {}
        for number in sorted(due, key=lambda number: (due[number], number)):
            row, shard = live[number], number // self.count
            taken = min(due[number], left[shard])
            left[shard] -= taken
            filled[number] = min(row.filled + taken * self.cfg.chunk, row.start)
        return filled

    def write(self, number: int, row: Row, end: int):
        """Writes a row's keys up to a position."""
        for at in range(row.filled, end):
            page, slot = self.slot(number, at)
            page[slot] = row.key(at)
        if end == row.start > row.filled:
            row.end_of_clean = row.start
        row.filled = end

    def check(self, number: int, row: Row, end: int):
        """Asserts that a row finds its own keys up to a position."""
        for at in range(end):
            page, slot = self.slot(number, at)
            assert page[slot] == row.key(at), (number, at)

    def step(self, row: Row):
        """Takes one step of a row's block, and leaves it when it is full."""
        if row.start and self.model.shift:
            assert row.end_of_clean == row.start
        block = row.start // self.size
        row.forwards += 1
        row.steps[block] -= 1
        if row.steps[block] == 0:
            row.start += self.size
            row.live = row.start < min(row.limit, row.stop)

    def advance(self, steps: int, enough: int):
        """Runs forwards as the loop on the device does."""
        alive = sum(row.live for row in self.rows.values())
        n = 0
        while n < steps:
            live = {r: x for r, x in self.rows.items() if x.live}
            able = [
                r
                for r, x in live.items()
                if x.due() or x.start + self.size <= self.room_B[r]
            ]
            if not able or alive - len(live) >= enough:
                break
            self.forward()
            n += 1

    # What the host fetches.

    def of_rows(self, name: str):
        """Returns a number of each row."""
        rows = [self.rows.get(row) for row in range(self.count * self.shards)]
        return np.array([getattr(row, name) if row else 0 for row in rows])

    live_B = property(lambda self: self.of_rows("live"))
    start_B = property(lambda self: self.of_rows("start"))
    filled_B = property(lambda self: self.of_rows("filled"))
    forwards_B = property(lambda self: self.of_rows("forwards"))
    s = property(lambda self: self)

    def traces(self, numbers) -> Trace:
        """Returns some rows' traces, of which the tests read tokens and lengths."""
        n = len(numbers)
        tokens_BT = np.zeros((n, self.cfg.slots), np.int32)
        prompt_len_B, len_B = np.zeros((2, n), np.int32)
        for i, number in enumerate(numbers):
            if row := self.rows.get(int(number)):
                tokens_BT[i, : len(row.canvas)] = row.canvas
                prompt_len_B[i] = row.prompt_len
                len_B[i] = min(row.limit, row.stop) - row.prompt_len
        zero_BT, zero_B = np.zeros(tokens_BT.shape), np.zeros(n, np.int32)
        return Trace(
            tokens_BT=tokens_BT,
            step_BT=zero_BT,
            logp_BT=zero_BT,
            conf_BT=zero_BT,
            prompt_len_B=prompt_len_B,
            len_B=len_B,
            steps_B=zero_B,
            forwards_B=zero_B,
            stopped_B=zero_B > 0,
            bad_B=zero_B > 0,
        )


def without_a_model(monkeypatch, shards: int):
    """Puts a Device in the place of what the engine calls."""

    def empty(changes, key, *, model, cfg, pages):
        return Device(model, cfg, shards, pages)

    def copy_pages(device, changes):
        device.copy_pages(changes)
        return device

    def admit(device, changes, key, *, model, cfg):
        device.admit(changes)
        return device

    def advance(params, device, steps, enough, **static):
        device.advance(steps, enough)
        return device

    for name, stand_in in (
        ("empty", empty),
        ("copy_pages", copy_pages),
        ("admit", admit),
        ("not_finite", lambda device, left_B: np.zeros_like(left_B)),
        ("some_traces", lambda device, row_n, stop_ids: device.traces(row_n)),
    ):
        monkeypatch.setattr(engine, name, stand_in)
    monkeypatch.setattr(engine.Engine, "loop", property(lambda made: advance))
    for name in ("place_rows", "fetch"):
        monkeypatch.setattr(engine.sharding, name, as_it_is)
    monkeypatch.setattr(engine.sharding, "key_on", lambda mesh, key: key)


def as_it_is(x, *mesh):
    """Returns what would be sent to the device, or fetched from it."""
    return x


def prompts(seed: int, longest: int) -> list[list[int]]:
    """Returns ragged prompts; most begin like another one, some are another one."""
    rng = np.random.default_rng(seed)
    out = [rng.integers(0, 9, rng.integers(1, longest + 1)).tolist()]
    while len(out) < ASKED:
        like, keep = out[rng.integers(len(out))], int(rng.integers(0, longest + 1))
        more = rng.integers(0, 9, rng.integers(0, longest + 1)).tolist()
        new = (like[:keep] + more)[: int(rng.integers(1, longest + 1))]
        out.append(like if rng.random() < 0.3 or not new else new)
    return out


def sound(made: Engine):
    """Asserts that no page is lost, and that only the same keys share one."""
    scheduler = made.scheduler
    for pool in scheduler.pools:
        mates = [r for r in scheduler.active if scheduler.pool_of(r) is pool]
        held = [(r, i, page) for r in mates for i, page in enumerate(r.pages)]
        count = collections.Counter(page for *_, page in held)
        assert pool.holders == [count[page] for page in range(len(pool.holders))]
        assert sorted([*count, *pool.free, *pool.idle]) == list(
            range(len(pool.holders))
        )
        for page in (page for page in count if count[page] > 1):
            names = {tuple(r.page_names[i : i + 1]) for r, i, p in held if p == page}
            assert len(names) == 1 and names != {()}


sizes = st.fixed_dictionaries(
    {
        "block": st.sampled_from([1, 2, 4]),
        "page": st.sampled_from([1, 2, 4, 8]),
        "prefill": st.sampled_from([1, 8, 32]),
        "rows": st.integers(1, 5),
        "max_prompt": st.integers(1, 20),
        "max_new": st.integers(1, 12),
    }
)


@examples(5)
@hypothesis.given(
    sizes=sizes,
    shards=st.integers(1, 2),
    shift=st.integers(0, 1),
    spare=st.integers(0, 12),
    seed=st.integers(0, 2**32 - 1),
    arrive=st.lists(st.integers(0, 4), min_size=ASKED, max_size=ASKED),
    cancelled=st.dictionaries(st.integers(1, 8), st.integers(0, ASKED - 1), max_size=4),
    watched=st.booleans(),
)
# The page to copy is the only one that could be given.
@hypothesis.example(
    sizes={
        "block": 1,
        "page": 2,
        "prefill": 1,
        "rows": 1,
        "max_prompt": 1,
        "max_new": 1,
    },
    shards=1,
    shift=0,
    spare=0,
    seed=0,
    arrive=[0] * ASKED,
    cancelled={},
    watched=False,
)
def test_every_row_reads_its_own_keys_and_every_request_is_answered_once(
    sizes, shards, shift, spare, seed, arrive, cancelled, watched
):
    """In any order, short of pages or not, sharing prompts, with cancellations."""
    cfg = SamplerConfig(**sizes, steps_per_block=1)
    least = -(-cfg.slots // cfg.page_slots)
    cfg = SamplerConfig(**sizes, steps_per_block=1, pages=least + spare)
    mesh = sharding.make_mesh(data=shards, fsdp=1, devices=jax.devices()[:shards])
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_a_model(monkeypatch, shards)
        made = Engine(model=ModelConfig(vocab=9, shift=shift), cfg=cfg, mesh=mesh)
        play(made, prompts(seed, cfg.max_prompt), arrive, cancelled, watched)
    assert not made.busy
    for pool in made.scheduler.pools:
        assert not any(pool.holders)
        assert pool.available == len(pool.holders)


def play(made: Engine, asked, arrive, cancelled, watched: bool):
    """Submits, runs and cancels; asserts that who waits is answered, and nobody else."""
    coming, waiting, ended = list(enumerate(asked)), {}, 0

    def come(count):
        for _ in range(min(count, len(coming))):
            index, prompt = coming.pop()
            new = 1 + index % made.cfg.max_new
            made.submit(prompt, index=index, temperature=0.0, new=new)
            waiting[index] = prompt

    def watch(request, answer):
        assert request.index in waiting

    while coming:  # a run ends when nothing is left; what comes later starts another
        come(1)
        for request, answer in made.run(None, None, watch if watched else None):
            prompt = waiting.pop(request.index)  # once, and not what was cancelled
            assert answer.prompt_len == len(prompt)
            assert answer.tokens_T[: len(prompt)].tolist() == prompt
            sound(made)
            ended += 1
            if ended in cancelled:
                made.cancel(cancelled[ended])
                waiting.pop(cancelled[ended], None)
            come(arrive[ended - 1])
        assert not waiting


def test_when_the_host_comes_back():
    shape = {"data": 1, "fsdp": 1}
    cfg = SamplerConfig(block=2, page=4, rows=16, max_prompt=8, max_new=64)
    alike, other = [1] * 8, [2] * 8

    def until(*prompts, **changes) -> tuple[int, int]:
        """Returns after how many forwards, and ended rows."""
        made = Engine(
            model=ModelConfig(vocab=9),
            cfg=dataclasses.replace(cfg, **changes),
            mesh=types.SimpleNamespace(shape=shape),
        )
        for index, prompt in enumerate(prompts):
            made.submit(prompt, index=index, temperature=0.0, new=64)
        made.scheduler.admit()
        return made.until(watched=False)

    assert until(alike, other) == (TURN, 16)  # nobody waits
    assert until(*[other] * 2) == (1, 2)  # one waits for the other's prompt
    assert until(*[[n % 9, n // 9] for n in range(40)]) == (TURN, 2)  # for rows
    # For pages, which come with the end of others.
    assert until(alike, other, [3] * 8, pages=20) == (AHEAD, 2)
    assert until(alike, alike, pages=20) == (1, 2)
