"""The engine's scheduler: who waits, who has a row, and whose pages are whose.

Host code over lists and numpy arrays. An admission gives the rows that go on the pages
that they need, oldest first; if these are short the youngest rows go back to the queue.
Then it places what waits where most of its prompt is known, first come, first served;
who lacks pages lets others pass, but not for ever (PATIENCE).
It ends with `Changes`, in which `rows.admit` tells the device of all that. A row's
answer depends on its prompt, its key and its limits alone, so starting it again gives
the same one.
"""

import collections
import dataclasses
import math
from typing import NamedTuple

import numpy as np

from dllm_jax import checks
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR
from dllm_jax.models.vision.prompts import pictures_of
from dllm_jax.sampling import policy
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.pages import Pages, page_names
from dllm_jax.sampling.rows import Changes

AHEAD = 16  # blocks for which a row gets pages, and forwards of a turn, if overbooked
PATIENCE = 8  # admissions for which who lacks pages lets those behind it have theirs


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt that waits for an answer, or is being answered in a row."""

    index: int  # with the run's key, what its random draws depend on
    prompt: list[int]
    limit: int  # first position that its answer may not reach
    temperature: float
    prefix: int  # positions of the prompt's whole blocks: these are only prefilled
    page_names: list[bytes]  # of the pages that they fill; the last may be ragged
    row: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)  # in their order
    filled: int = 0  # Rows.filled_B, s.start_B and s.forwards_B, as last seen
    start: int = 0
    forwards: int = 0
    lacked: int = 0  # admissions, while it waits, that had too few pages for it

    @property
    def running(self) -> bool:
        """Whether it has a row: once cancelled, evicted or answered it has none."""
        return self.row is not None


@dataclasses.dataclass
class Admission:
    """An admission under way."""

    changes: Changes  # what the device will be told of it
    free: dict[int, list[int]]  # shards with rows that nobody has, and these
    prefilling: set[tuple[int, bytes]]  # prompts on their way into pages: (shard, name)


def refuse(prompt: list[int], temperature: float, model: ModelConfig):
    """Raises ValueError for a temperature, or token ids, of which no draw would be one."""
    vocab, needed = model.vocab + model.soft, None
    finite = math.isfinite(temperature)
    if not (finite and checks.within(temperature, checks.TEMPERATURE)):
        asked = checks.TEMPERATURE.replace("== ", "")
        needed = f"temperature={temperature}: a number, {asked}"
    elif not all(0 <= token < vocab for token in prompt):
        needed = f"a prompt's token ids, here {prompt[:9]}...: in 0..{vocab - 1}"
    if needed:
        raise ValueError(f"a request needs {needed}")


class Lease(NamedTuple):
    """The pages that a request begins with."""

    pages: list[int]  # in their order: those shared with others, then its own
    filled: int  # positions whose keys are in them, or will be once they are copied
    source: int | None  # the page to copy to the first of its own


class Scheduler:
    """Requests, rows and pages of a mesh's shards, as the host sees them."""

    def __init__(self, *, model: ModelConfig, cfg: SamplerConfig, shards: int):
        """Raises ValueError when the pages cannot hold a single row."""
        self.model, self.cfg = model, cfg
        self.policy = policy.choose(cfg, model.attention)
        self.rows_per_shard = -(-cfg.rows // shards)
        self.row_count = self.rows_per_shard * shards
        self.pages_per_row = self.pages_of(cfg.max_prompt, cfg.slots - cfg.max_prompt)
        enough = self.rows_per_shard * self.pages_per_row
        self.pages_per_shard = cfg.pages or enough
        # There are fewer pages than all rows would fill: a row gets some AHEAD of it.
        # Where keys are not final a canvas is run at once, up to its limit.
        self.overbooked = self.policy.final and self.pages_per_shard < enough
        if self.pages_per_shard < self.pages_per_row:
            raise ValueError(
                f"sampler.pages={self.pages_per_shard} of {cfg.page_slots} positions "
                f"cannot hold one row of {cfg.slots} (sampler.max_prompt + "
                f"sampler.max_new); set it to {self.pages_per_row} or more, or to 0 "
                "for as many as all rows can use"
            )
        self.queue: collections.deque[Request] = collections.deque()
        self.active: list[Request] = []  # oldest first
        self.asked: set[int] = set()  # the indices of both
        self.pools = [Pages(self.pages_per_shard) for _ in range(shards)]
        self.gone: set[int] = set()  # rows that the device has not heard of leaving
        self.left: set[int] = set()  # those of them whose answers had not ended
        # Whether the last admission passed over one whose prompt is being prefilled.
        self.awaits_prompt = False

    # ---- Requests come and go --------------------------------------------------------

    def submit(self, prompt: list[int], *, index: int, temperature: float, new: int):
        """Queues a prompt: see `Engine.submit`."""
        self.check(prompt, index, temperature, new)
        prefix = policy.first_block(len(prompt), self.model.attention, self.cfg.block)
        images = tuple(picture.mark for picture in pictures_of(prompt))
        shared = prompt[:prefix] if self.policy.final else []  # what others may know
        self.asked.add(index)
        self.queue.append(
            Request(
                index=index,
                prompt=prompt,
                limit=len(prompt) + new,
                temperature=temperature,
                prefix=prefix,
                page_names=page_names(shared, self.cfg.page_slots, images),
            )
        )

    def check(self, prompt: list[int], index: int, temperature: float, new: int):
        """Raises ValueError for what is wrong with a request."""
        refuse(prompt, temperature, self.model)
        needed = None
        if new < 1:
            needed = f"new={new}: at least 1 token of answer"
        elif not checks.suits(index, int):
            needed = f"index={checks.shown(index)}: {checks.KINDS[int]}"
        elif index in self.asked:
            needed = f"index={index}: one that no other request has"
        if needed:
            raise ValueError(f"a request needs {needed}")
        most = self.cfg.slots - len(prompt) if self.policy.final else self.cfg.max_new
        if not 0 < len(prompt) <= self.cfg.max_prompt or new > most:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens with an answer of {new} does not "
                f"fit sampler.max_prompt={self.cfg.max_prompt} and sampler.max_new="
                f"{self.cfg.max_new}"
            )

    def cancel(self, index: int):
        """Drops the request of that index, waiting or active."""
        self.asked.discard(index)
        self.queue = collections.deque(r for r in self.queue if r.index != index)
        for request in [r for r in self.active if r.index == index]:
            self.evict(request)

    def cancel_all(self):
        """Drops every request."""
        self.queue.clear()
        self.asked.clear()
        for request in list(self.active):
            self.evict(request)

    def end(self, request: Request):
        """Takes a request that is answered out of its row; its index is free again."""
        row = request.row
        self.evict(request)
        self.left.discard(row)
        self.asked.discard(request.index)

    def evict(self, request: Request):
        """Takes an active request out of its row, and gives its pages back."""
        self.active.remove(request)
        self.pool_of(request).release(request.pages)
        self.gone.add(request.row)
        self.left.add(request.row)
        request.row, request.pages = None, []

    def send_back(self, request: Request):
        """Sends an active request to the head of the queue: it will start again."""
        self.evict(request)
        self.queue.appendleft(request)

    def forget(self):
        """Drops what other weights left in pages; rows that build on it start again."""
        for request in list(reversed(self.active)):
            self.send_back(request)
        for pool in self.pools:
            pool.clear()

    def note_progress(self, start_B, filled_B, forwards_B) -> bool:
        """Notes how far rows are; pages of prompts that are filled become known.

        Returns whether one has moved. Raises RuntimeError where one takes more forwards
        than its schedule allows.
        """
        moved = False
        for request in self.active:
            before = request.start, request.filled, request.forwards
            request.start = int(start_B[request.row])
            request.filled = int(filled_B[request.row])
            request.forwards = int(forwards_B[request.row])
            after = request.start, request.filled, request.forwards
            moved = moved or after != before
            if request.forwards > self.cfg.most_forwards:
                raise RuntimeError(
                    f"request {request.index} has no end after "
                    f"{self.cfg.most_forwards} forwards"
                )
            for i, name in enumerate(request.page_names):
                end = min((i + 1) * self.cfg.page_slots, request.prefix)
                if request.filled >= end:
                    self.pool_of(request).publish(request.pages[i], name)
        return moved

    def pool_of(self, request: Request) -> Pages:
        """Returns the pages of an active request's shard."""
        return self.pools[self.shard_of(request.row)]

    def shard_of(self, row: int) -> int:
        """Returns the shard of a row: those of one are neighbours."""
        return row // self.rows_per_shard

    # ---- An admission ----------------------------------------------------------------

    def admit(self) -> Changes | None:
        """Admits what waits; returns what to tell the device, None for nothing."""
        self.awaits_prompt = False
        extended, evicted = self.extend_pages()
        admission = self.begin_admission()
        # Those who left for want of pages wait first in the queue: they would take the
        # pages back that they have just given up.
        if not evicted:
            self.place_waiting(admission)
        if not self.active:
            raise RuntimeError("no request fits into an empty engine")
        changes = admission.changes
        if not (extended or self.gone or changes.here_B.any()):
            return None
        changes.gone_B[list(self.gone)] = True
        self.gone.clear()
        for request in self.active:
            # What is behind its pages may be read and hidden, and zero times NaN is NaN: no
            # other row's stand there.
            changes.table_BA[request.row] = request.pages[:1]
            changes.table_BA[request.row, : len(request.pages)] = request.pages
            room = len(request.pages) * self.cfg.page_slots
            changes.room_B[request.row] = room if self.policy.final else FAR
        return changes

    def extend_pages(self) -> tuple[bool, bool]:
        """Gives rows the pages to go on, oldest first.

        The youngest of a shard leave for those that could not go on without their
        pages; the oldest always goes on. Returns (whether a row got a page, whether one
        left).
        """
        extended = evicted = False
        if not self.policy.final:  # they have all
            return extended, evicted
        for request in list(self.active):
            while request.running:  # an older one may have driven it out
                pool = self.pool_of(request)
                lacking = self.pages_due(request, request.start) - len(request.pages)
                # What there is may be fewer, and do for the present block.
                taken = pool.take(max(0, min(lacking, pool.available)))
                request.pages += taken
                extended = extended or len(taken) > 0
                room = len(request.pages) * self.cfg.page_slots
                if request.start + self.cfg.block <= room:
                    break
                mates = [r for r in self.active if self.pool_of(r) is pool]
                self.send_back(mates[-1])
                evicted = True
        return extended, evicted

    def pages_due(self, request: Request, start: int) -> int:
        """Returns how many pages a row should hold while its block is at `start`.

        Enough for all of its answer; if overbooked, for the next AHEAD blocks, since most
        answers end before their limits.
        """
        size = len(request.prompt)
        most = self.pages_of(size, request.limit - size)
        if not self.overbooked:
            return most
        ahead = start + AHEAD * self.cfg.block
        return min(most, -(-ahead // self.cfg.page_slots))

    def pages_of(self, prompt_len: int, new: int) -> int:
        """Returns how many pages a row with an answer of `new` tokens can come to need."""
        if not self.policy.cached:
            return 0
        Q, limit = self.cfg.block, prompt_len + new
        end = -(-limit // Q) * Q
        if not self.policy.final:  # that of its last window
            end = prompt_len + (-(-new // Q) - 1) * Q + self.cfg.window
        return -(-end // self.cfg.page_slots)

    def begin_admission(self) -> Admission:
        """Returns an admission in which nobody is placed yet."""
        taken = {request.row for request in self.active}
        free = {}
        for row in range(self.row_count):
            if row not in taken:
                free.setdefault(self.shard_of(row), []).append(row)
        prefilling = {
            (self.shard_of(request.row), request.page_names[-1])
            for request in self.active
            if request.page_names and request.filled < request.prefix
        }
        return Admission(self.no_changes(), free, prefilling)

    def no_changes(self) -> Changes:
        """Returns the arrays in which the device is told of changes, of which none."""

        def zeros(*widths, dtype=np.int32):
            return np.zeros((self.row_count, *widths), dtype)

        return Changes(
            gone_B=zeros(dtype=bool),
            here_B=zeros(dtype=bool),
            prompt_BT=zeros(self.cfg.max_prompt),
            prompt_len_B=zeros(),
            limit_B=zeros(),
            temperature_B=zeros(dtype=np.float32),
            threshold_B=zeros(dtype=np.float32),
            entropy_bound_B=zeros(dtype=np.float32),
            index_B=zeros(),
            filled_B=zeros(),
            source_B=zeros(),
            target_B=zeros() + self.pages_per_shard,
            table_BA=zeros(self.pages_per_row),
            room_B=zeros(),
        )

    def place_waiting(self, admission: Admission):
        """Gives rows to what waits, in its order, while one is free.

        Those that cannot be placed now are passed over and keep their places in the
        queue. Not more than there are rows are: a long queue is not read to its end. Nobody
        passes who has lacked pages for long: a prompt that needs many would wait as long as
        others come that need few.
        """
        passed, copied = [], []
        while self.queue and admission.free and len(passed) < self.row_count:
            request = self.queue.popleft()
            lease = self.place(request, admission)
            if lease is None:
                passed.append(request)
                if request.lacked > PATIENCE:
                    break
            elif lease.source is not None:
                copied.append((self.pool_of(request), lease.source))
        self.queue.extendleft(reversed(passed))
        # Whoever takes a page that is still to be copied writes to it after the copy.
        for pool, page in copied:
            pool.release([page])

    def place(self, request: Request, admission: Admission) -> Lease | None:
        """Gives a request a row and pages; returns these, None where it has to wait."""
        name = request.page_names[-1] if request.page_names else None
        if any((shard, name) in admission.prefilling for shard in admission.free):
            # For another request, whose pages are worth waiting for.
            self.awaits_prompt = True
            return None
        for shard in self.nearest_shards(request, admission):
            lease = self.take_pages(request, self.pools[shard])
            if lease is not None:
                self.seat(request, shard, lease, admission)
                return lease
        request.lacked += 1
        return None

    def nearest_shards(self, request: Request, admission: Admission) -> list[int]:
        """Returns the shards with a free row, first those that know most of the prompt.

        Among equals it is those with the most pages to give.
        """

        def promise(shard):
            pool = self.pools[shard]
            return pool.count_known(request.page_names), pool.available

        return sorted(admission.free, key=promise, reverse=True)

    def take_pages(self, request: Request, pool: Pages) -> Lease | None:
        """Returns the pages that a request begins with; None: there are too few.

        Whole pages of its prompt are shared where they are known. Its last one may be
        ragged: there the answer goes on, so that the row needs a copy of its own.
        """
        size = self.cfg.page_slots
        # A model with a shift needs the hidden state that ends the prompt: its last
        # block is always run.
        rerun = self.cfg.block if self.model.shift else 0
        shared = []
        for name in request.page_names[: max(request.prefix - rerun, 0) // size]:
            page = pool.share(name)
            if page is None:
                break
            shared.append(page)
        filled, ragged = len(shared) * size, None
        shares = request.page_names and not rerun
        if shares and 0 < request.prefix - filled < size:
            ragged = pool.share(request.page_names[-1])
        # One page or more: the answer's first block lies behind what can be shared.
        due = self.pages_due(request, request.prefix) - len(shared)
        fresh = pool.take(due)
        if fresh is None and ragged is not None:
            # The page to copy may be the very one that is missing: then its blocks are
            # run again.
            pool.release([ragged])
            ragged, fresh = None, pool.take(due)
        if fresh is None:
            pool.release(shared)
            return None
        if ragged is not None:
            filled = request.prefix
        return Lease(shared + fresh, filled, ragged)

    def seat(self, request: Request, shard: int, lease: Lease, admission: Admission):
        """Gives a request a free row of a shard, and notes what to tell the device."""
        row, changes = admission.free[shard].pop(), admission.changes
        if not admission.free[shard]:
            del admission.free[shard]
        request.row, request.pages = row, lease.pages
        request.filled, request.start = lease.filled, request.prefix
        request.forwards = request.lacked = 0
        self.active.append(request)
        if request.page_names and request.filled < request.prefix:
            admission.prefilling.add((shard, request.page_names[-1]))
        if lease.source is not None:
            changes.source_B[row] = lease.source
            changes.target_B[row] = lease.pages[request.prefix // self.cfg.page_slots]
        changes.here_B[row] = True
        changes.prompt_BT[row, : len(request.prompt)] = request.prompt
        changes.prompt_len_B[row] = len(request.prompt)
        changes.limit_B[row] = request.limit
        changes.temperature_B[row] = request.temperature
        changes.threshold_B[row] = self.cfg.threshold
        changes.entropy_bound_B[row] = self.cfg.entropy_bound
        changes.index_B[row] = request.index
        changes.filled_B[row] = request.filled
