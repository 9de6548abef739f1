"""The engine: continuous batching over fixed rows, and a paged cache where there is one.

Requests wait in a queue, are admitted to rows as these come free, and leave with their
answers. Who gets which row and which pages is for `scheduler.py` to say; `forwards.py`
has the loop over forwards, which runs on the device. The host comes back when rows have
ended: one *turn* is an admission, a run of forwards, and a harvest.

`denoise.step` is the definition: the same ids and steps, log-probs up to rounding.
"""

import functools

import jax
import numpy as np

from dllm_jax import sharding
from dllm_jax.models.config import ModelConfig
from dllm_jax.sampling import denoise, forwards, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.rows import (
    Rows,
    admit,
    copy_pages,
    empty,
    not_finite,
    some_traces,
)
from dllm_jax.sampling.scheduler import AHEAD, Request, Scheduler
from dllm_jax.sampling.state import Answer


class Engine:
    """Rows, pages and a queue. The same in every process of a mesh."""

    def __init__(self, *, model: ModelConfig, cfg: SamplerConfig, mesh):
        """mesh: of the weights that sample; a run's other arrays may be on another.

        Raises ValueError when the pages cannot hold a single row.
        """
        self.model, self.cfg, self.mesh = model, cfg, mesh
        self.shards = sharding.row_shards(mesh)
        self.scheduler = Scheduler(model=model, cfg=cfg, shards=self.shards)
        self.page_count = self.scheduler.pages_per_shard * self.shards
        self.rows: Rows | None = None  # laid out at the first turn
        self.params = None  # the weights by which the keys in the pages were made
        self.changed = False  # whether the device was told anything for this turn
        self.tainted = False  # whether a page may hold what is not finite

    # ---- What callers ask for --------------------------------------------------------

    def submit(self, prompt: list[int], *, index: int, temperature: float, new: int):
        """Queues a prompt for an answer of at most `new` tokens.

        index: of no other that waits or is active. Raises ValueError for what is wrong,
        such as a prompt that does not fit beside its answer.
        """
        self.scheduler.submit(prompt, index=index, temperature=temperature, new=new)

    def cancel(self, index: int):
        """Drops the request of that index, waiting or active, if there is one."""
        self.scheduler.cancel(index)

    @property
    def busy(self) -> bool:
        """Whether a request waits or is active."""
        return bool(self.scheduler.queue or self.scheduler.active)

    @property
    def platform(self) -> str:
        """The devices'."""
        return self.mesh.devices.flat[0].platform

    @functools.cached_property
    def rides(self) -> bool:
        """Whether prompts ride with blocks."""
        return forwards.rides(self.platform, self.model, self.cfg)

    @property
    def loop(self):
        """The loop over forwards, as it is compiled for the devices of the mesh."""
        programs = forwards.advance, forwards.advance_on_gpu
        return denoise.loop_on(self.platform, self.cfg, *programs)

    def turn(self, params, key, watch=None) -> list[tuple[Request, Answer]]:
        """Returns what ends in one turn: an admission, a run of forwards, a harvest.

        For a server, which submits and cancels between turns. The arguments are those
        of `run`. While `params` is the same object, prompts' pages stay known from turn
        to turn, and the engine keeps it alive. With another one every row starts again:
        an answer comes from one set of weights.
        """
        if not self.busy:
            return []
        key = sharding.key_on(self.mesh, key)
        self.forward(params, key, watched=watch is not None)
        return list(self.harvest(watch))

    def run(self, params, key, watch=None, stop=None):
        """Yields (request, its Answer) as answers end, until none is left.

        params: those of an earlier run or others; what one run knows of pages the next
        does not. key: a typed random key. watch: called with (request, Answer) for
        every active one after every forward, for those who show an answer as it grows.
        The caller may submit and cancel requests at any answer. If it drops the
        generator, what is left is cancelled, so that no later run answers it; so it is
        where `stop`, which is asked after every turn, says so.
        """
        key = sharding.key_on(self.mesh, key)
        try:
            while self.busy:  # a turn, of which answers are taken one by one
                self.forward(params, key, watched=watch is not None)
                yield from self.harvest(watch)
                if stop is not None and stop():
                    return
        finally:
            self.scheduler.cancel_all()
            self.params = None

    def stream(
        self, params, prompts, key, *, temperature, new=None, watch=None, stop=None
    ):
        """Yields (i, Answer i) as answers end: see `answers`."""
        new = self.cfg.lengths(new, len(prompts))
        fits = [0 < len(prompt) <= self.cfg.max_prompt for prompt in prompts]
        # First, while no request waits: the caller may leave at any answer.
        for i, prompt in enumerate(prompts):
            if not fits[i]:
                yield i, state.no_answer(self.cfg.slots)
        try:
            for i, prompt in enumerate(prompts):
                if fits[i]:
                    self.submit(prompt, index=i, temperature=temperature, new=new[i])
        except ValueError:  # none that came before waits for the next stream
            self.scheduler.cancel_all()
            raise

        def show(request, answer):
            watch(request.index, request.start, answer)

        for request, answer in self.run(params, key, show if watch else None, stop):
            yield request.index, answer

    def release(self):
        """Drops rows and pages, whose memory others may want; the next turn makes new ones."""
        self.rows = self.params = None

    @sharding.on_own_mesh
    def lower(self, params):
        """Returns (the loop over forwards, lowered; its rows and pages as shapes).

        params: arrays, or their shapes with shardings. Nothing is laid out, so that the
        devices need not be here.
        """
        begun = empty.lower(
            sharding.shapes_of_rows(self.scheduler.no_changes(), self.mesh),
            jax.eval_shape(jax.random.key, 0),
            model=self.model,
            cfg=self.cfg.static,
            pages=self.page_count,
        )
        rows = sharding.laid_out(begun)
        lowered = self.loop.lower(
            params,
            rows,
            denoise.TURN,
            self.scheduler.row_count,
            shards=self.shards,
            model=self.model,
            cfg=self.cfg.static,
            rides=self.rides,
        )
        return lowered, rows

    # ---- A turn ----------------------------------------------------------------------

    @sharding.on_own_mesh
    def forward(self, params, key, *, watched: bool):
        """Admits what waits, then runs forwards until there is something for the host.

        watched: that is after every forward.
        """
        if params is not self.params:
            self.scheduler.forget()
            self.params = params
        if self.tainted or self.rows is None:
            self.begin(key)
        changes = self.scheduler.admit()
        if self.left_not_finite():
            self.begin(key)
            changes = self.scheduler.admit()
        self.scheduler.left.clear()
        self.changed = changes is not None
        if self.changed:
            copies = (changes.target_B < self.scheduler.pages_per_shard).any()
            changes = sharding.place_rows(changes, self.mesh)
            if copies:
                self.rows = copy_pages(self.rows, changes)
            static = {"model": self.model, "cfg": self.cfg.static}
            self.rows = admit(self.rows, changes, key, **static)
        steps, enough = self.until(watched)
        self.rows = self.loop(
            params,
            self.rows,
            steps,
            enough,
            shards=self.shards,
            model=self.model,
            cfg=self.cfg.static,
            rides=self.rides,
        )

    def begin(self, key):
        """Lays rows and pages out anew; the rows that were active start again.

        What a page hides has probability zero, but zero times NaN is NaN: no page may keep
        what is not finite for whoever has it next.
        """
        self.scheduler.forget()
        self.scheduler.left.clear()
        self.rows, self.tainted = None, False  # its memory goes before the other comes
        self.rows = empty(
            sharding.place_rows(self.scheduler.no_changes(), self.mesh),
            key,
            model=self.model,
            cfg=self.cfg.static,
            pages=self.page_count,
        )

    def left_not_finite(self) -> bool:
        """Returns whether a row that left before its answer's end left a NaN in its pages.

        Of a prompt's keys no draw tells until the row has one.
        """
        left = self.scheduler.left
        if not left or not self.page_count:
            return False
        left_B = np.isin(np.arange(self.scheduler.row_count), list(left))
        left_B = sharding.place_rows(left_B, self.mesh)
        return bool(sharding.fetch(not_finite(self.rows, left_B)).any())

    def until(self, watched: bool) -> tuple[int, int]:
        """Returns after how many forwards, and ended rows, the host is to come back."""
        row_count, waiting = self.scheduler.row_count, len(self.scheduler.queue)
        # It pays to come back for an eighth of the rows if others wait for them.
        enough = -(-row_count // 8) if waiting else row_count
        if watched:
            return 1, enough
        # A request that waits beside a free row for the pages of a prompt like its own
        # can have them after any forward.
        if len(self.scheduler.active) < row_count and self.scheduler.awaits_prompt:
            return 1, enough
        return AHEAD if self.scheduler.overbooked else denoise.TURN, enough

    @sharding.on_own_mesh
    def fetch_progress(self):
        """Returns, on the host, live_B, start_B, filled_B and forwards_B of the rows."""
        s = self.rows.s
        return sharding.fetch((s.live_B, s.start_B, self.rows.filled_B, s.forwards_B))

    def harvest(self, watch):
        """Yields (request, its Answer) for what has ended.

        A request leaves its row as its answer is taken; until then the caller, or
        `watch`, may cancel it. Raises RuntimeError where rows would never end.
        """
        live_B, *progress = self.fetch_progress()
        moved = self.scheduler.note_progress(*progress)
        active = list(self.scheduler.active)
        ended = [request for request in active if not live_B[request.row]]
        if not (moved or ended or self.changed):
            raise RuntimeError(
                f"requests {[request.index for request in active]} cannot go on, and "
                "nothing will change that"
            )
        if not ended and not watch:
            return
        answers = self.answers(active if watch else ended)
        # Before anybody may cancel one, or leave: the pages stay.
        bad = any(answers[request].bad for request in ended)
        self.tainted = self.tainted or (bad and self.page_count > 0)
        if watch:
            for request in active:
                if request.running:
                    watch(request, answers[request])
        for request in ended:
            if request.running:
                self.scheduler.end(request)
                yield request, answers[request]

    @sharding.on_own_mesh
    def answers(self, requests: list[Request]) -> dict[Request, Answer]:
        """Returns the Answers of active requests, as far as they have come.

        They are fetched some at a time, for which one program serves: a row's trace is
        as long as a canvas, and few rows end together.
        """
        row_count, found = self.scheduler.row_count, {}
        size = min(row_count, max(8, -(-row_count // 8)))
        for first in range(0, len(requests), size):
            some = requests[first : first + size]
            row_n = np.zeros(size, np.int32)
            row_n[: len(some)] = [request.row for request in some]
            trace = sharding.fetch(some_traces(self.rows.s, row_n, self.cfg.stop_ids))
            for n, request in enumerate(some):
                found[request] = state.answer(trace, n)
        return found
