"""The engine: continuous batching over fixed rows and a paged cache.

A forward runs a window of Q positions for every row, its present block, and beside these
up to M *clean* windows: blocks whose tokens are known and whose keys are not in the pages
yet, be it the block that a row has just filled or a part of a prompt. Clean keys are
written before anything of the same layer looks, so a row commits a block and denoises the
next in one forward: a block costs its denoising steps and nothing else, and prompts are
prefilled beside rows that decode. Blocks just filled come first: no prompt delays a row.

The loop over forwards is on the device. The host comes back when rows have finished:
it harvests them, gives their pages back, admits the next prompts and, if pages are
short, sends the youngest rows back to the queue. A row's answer depends on its prompt,
its key and its limits alone, so starting it again gives the same one.

`denoise.step` is the definition: the same ids and steps, log-probs up to rounding.
"""

import collections
import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import sharding
from dllm_jax.models import cache as kv
from dllm_jax.models import transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR
from dllm_jax.sampling import denoise, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.pages import Pages, names
from dllm_jax.sampling.state import SamplingState

LONG = 2**30  # forwards: until there is something for the host to do
AHEAD = 16  # forwards that a row's pages must last, where pages are short

# ---- Device ----------------------------------------------------------------------------


@flax.struct.dataclass
class Rows:
    """Rows in flight over a pool of pages."""

    s: SamplingState  # its cache is a PagedKVCache
    table_BA: jax.Array
    filled_B: jax.Array  # positions whose keys are in the pages
    room_B: jax.Array  # positions that the row's pages hold
    last_BD: jax.Array  # hidden state before the present block, for models with a shift
    forwards: jax.Array  # how many there were
    clean: jax.Array  # windows that were run for their keys


def choose(need_B, M: int):
    """Deals M clean windows out to rows that need some, to those that need least first.

    Returns (take_B, row_M, nth_M, real_M): how many each row gets, and for each window
    its row, which of the row's it is, and whether it is one at all.
    """
    rank_B = jnp.argsort(jnp.where(need_B > 0, need_B, FAR))
    sorted_B = need_B[rank_B]
    taken_B = jnp.clip(M - jnp.cumsum(sorted_B) + sorted_B, 0, sorted_B)
    ends_B = jnp.cumsum(taken_B)
    slot_M = jnp.arange(M)
    which_M = jnp.searchsorted(ends_B, slot_M, side="right")
    which_M = jnp.minimum(which_M, len(need_B) - 1)
    take_B = jnp.zeros_like(need_B).at[rank_B].set(taken_B)
    nth_M = slot_M - (ends_B - taken_B)[which_M]
    return take_B, rank_B[which_M], nth_M, slot_M < ends_B[-1]


def need(rows: Rows, Q: int):
    """Returns how many clean windows each row waits for."""
    return jnp.where(rows.s.live_B, (rows.s.start_B - rows.filled_B) // Q, 0)


def step(params, rows: Rows, *, M: int, shards: int, model: ModelConfig, cfg):
    """Returns the rows after one forward with at most M clean windows on each shard."""
    s, Q = rows.s, cfg.block

    def split(x):  # rows of one shard are neighbours; windows are dealt out within it
        return x.reshape(shards, -1, *x.shape[1:])

    def flat(x):
        return x.reshape(-1, *x.shape[2:])

    need_B = need(rows, Q)
    take_SB, row_SM, nth_SM, real_SM = jax.vmap(lambda n: choose(n, M))(split(need_B))
    take_B = flat(take_SB)
    now_B = s.live_B & (take_B == need_B) & (s.start_B + Q <= rows.room_B)

    # The windows of a shard: clean ones, then every row's present block.
    pick = jax.vmap(lambda x, index: x[index])
    own_SB = jnp.broadcast_to(jnp.arange(take_SB.shape[1])[None], take_SB.shape)
    row_SX = jnp.concatenate([row_SM, own_SB], axis=1)
    first_SM = pick(split(rows.filled_B), row_SM) + nth_SM * Q
    start_SX = jnp.concatenate([first_SM, split(s.start_B)], axis=1)
    keep_SX = jnp.concatenate([real_SM, jnp.zeros_like(own_SB, bool)], axis=1)
    pos_SXW = start_SX[..., None] + jnp.arange(Q)[None, None]
    used_SX = jnp.concatenate([real_SM, split(now_B)], axis=1)  # others read no page
    window = kv.Window(
        table_BA=flat(pick(split(rows.table_BA), row_SX)),
        start_B=flat(jnp.where(used_SX, start_SX, 0)),
        keep_B=flat(keep_SX),
    )
    at = jax.vmap(lambda x, row, pos: x.at[row[:, None], pos].get(mode="clip"))
    tokens_XW = flat(at(split(s.tokens_BT), row_SX, pos_SXW))
    masked_XW = flat(at(split(s.step_BT), row_SX, pos_SXW)) == FAR
    shown_XW = jnp.where(masked_XW, model.mask_id, tokens_XW)
    x_XWD = transformer.embed(params, shown_XW, model)
    x_XWD, cache, _ = transformer.trunk(
        params, x_XWD, flat(pos_SXW), window, model, s.cache
    )
    x_SXWD = split(x_XWD)
    x_BWD = flat(x_SXWD[:, M:])

    last_BD = rows.last_BD
    if model.shift:  # i - 1 answers for i: for the first one in a clean window
        final_SM = real_SM & (nth_SM == pick(take_SB, row_SM) - 1)
        to_SM = jnp.where(final_SM, row_SM, take_SB.shape[1])
        put = jax.vmap(lambda x, to, new: x.at[to].set(new, mode="drop"))
        last_BD = flat(put(split(last_BD), to_SM, x_SXWD[:, :M, -1]))
        x_BWD = jnp.concatenate([last_BD[:, None], x_BWD[:, :-1]], axis=1)

    pos_BW = flat(pos_SXW[:, M:])
    s = denoise.unmask(params, s, x_BWD, pos_BW, now_B, model=model, cfg=cfg)
    moves_B = now_B & s.live_B & ~(denoise.at(s.step_BT, pos_BW) == FAR).any(axis=1)
    return rows.replace(
        s=s.replace(
            cache=cache,
            start_B=s.start_B + Q * moves_B,
            block_steps_B=jnp.where(moves_B, 0, s.block_steps_B),
        ),
        filled_B=rows.filled_B + Q * take_B,
        last_BD=last_BD,
        forwards=rows.forwards + 1,
        clean=rows.clean + take_B.sum(),
    )


@functools.partial(
    jax.jit, static_argnames=("shards", "model", "cfg"), donate_argnames="rows"
)
def advance(params, rows: Rows, steps, enough, *, shards, model, cfg):
    """Runs forwards: at most `steps`, until `enough` rows have ended or none can go on."""
    alive = rows.s.live_B.sum()
    sizes = cfg.clean_windows(len(rows.s.live_B) // shards)
    branches = [
        functools.partial(step, params, M=M, shards=shards, model=model, cfg=cfg)
        for M in sizes
    ]

    def goes_on(carry):
        n, rows = carry
        s = rows.s
        fits_B = s.start_B + cfg.block <= rows.room_B
        able_B = s.live_B & (fits_B | (need(rows, cfg.block) > 0))
        return (n < steps) & able_B.any() & (alive - s.live_B.sum() < enough)

    def body(carry):
        n, rows = carry
        waiting_S = need(rows, cfg.block).reshape(shards, -1).sum(axis=1)
        size = jnp.searchsorted(jnp.asarray(sizes[:-1]), waiting_S.max())
        return n + 1, lay(jax.lax.switch(size, branches, rows))

    return jax.lax.while_loop(goes_on, body, (0, rows))[1]


def fresh(new, key, *, model, cfg) -> Rows:
    """Returns rows that begin, without a cache; `new`: arrays over all rows."""
    key_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, new["index_B"])
    fields = ("prompt_BT", "prompt_len_B", "limit_B", "temperature_B")
    s = state.begin(*(new[name] for name in fields), key_B, None, cfg.slots)
    return Rows(
        s=s.replace(start_B=s.prompt_len_B // cfg.block * cfg.block),
        table_BA=new["table_BA"],
        filled_B=new["filled_B"],
        room_B=new["room_B"],
        last_BD=jnp.zeros((len(key_B), model.d_model), model.dtype),
        forwards=jnp.int32(0),
        clean=jnp.int32(0),
    )


@functools.partial(jax.jit, static_argnames=("model", "cfg", "pages"))
def empty(new, key, *, model, cfg, pages) -> Rows:
    """Returns rows of which none lives, over `pages` zeroed pages in all."""
    rows = fresh(new, key, model=model, cfg=cfg)
    return lay(
        rows.replace(s=rows.s.replace(cache=kv.pool(model, pages, cfg.page_slots)))
    )


@functools.partial(jax.jit, static_argnames=("model", "cfg"), donate_argnames="rows")
def admit(rows: Rows, new, key, *, model, cfg) -> Rows:
    """Returns the rows with `new` ones where `here`, and without those that are `gone`.

    Page `from` of each row's device is first copied to page `to`, past the end for none.
    """

    def copy(pool, from_B, to_B):
        return tuple(x.at[:, to_B].set(x[:, from_B], mode="drop") for x in pool)

    def merge(old, now):
        here = new["here_B"].reshape(-1, *[1] * (now.ndim - 1)) if now.ndim else False
        return jnp.where(here, now, old)

    dims = ("LPOKH", "LPOKH")
    pool = (rows.s.cache.k_LPOKH, rows.s.cache.v_LPOKH)
    args = (pool, new["from_B"], new["to_B"])
    pool = sharding.per_device(copy, (dims, "B", "B"), dims, *args)
    live_B = rows.s.live_B & ~new["gone_B"]
    old = rows.replace(s=rows.s.replace(cache=None, live_B=live_B))
    rows = jax.tree.map(merge, old, fresh(new, key, model=model, cfg=cfg))
    return lay(
        rows.replace(
            s=rows.s.replace(cache=kv.PagedKVCache(*pool)),
            table_BA=new["table_BA"],  # rows that were here may have got more pages
            room_B=new["room_B"],
        )
    )


def lay(rows: Rows) -> Rows:
    """Returns the rows split over the mesh, as every function here takes them."""

    def row(x):
        return sharding.constrain(x, "B" + "." * (x.ndim - 1)) if x.ndim else x

    pool = jax.tree.map(lambda x: sharding.constrain(x, "LPOKH"), rows.s.cache)
    rest = jax.tree.map(row, rows.replace(s=rows.s.replace(cache=None)))
    return rest.replace(s=rest.s.replace(cache=pool))


traces = jax.jit(state.trace, static_argnames="stop_ids")


# ---- Host ------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt that waits for an answer, or is being answered in row `row`."""

    index: int  # with the run's key, what its random draws depend on
    prompt: list[int]
    limit: int  # first position that its answer may not reach
    temperature: float
    whole: int  # positions of the prompt's whole blocks
    names: list[bytes]  # of the pages that these fill; the last may be ragged
    row: int = -1
    held: list[int] = dataclasses.field(default_factory=list)  # pages, in their order
    filled: int = 0  # Rows.filled_B and s.start_B, as last seen
    start: int = 0


class Engine:
    """Rows, pages and a queue. The same in every process of a mesh."""

    def __init__(self, *, model: ModelConfig, cfg: SamplerConfig, mesh):
        """Raises ValueError when the pages cannot hold a single row."""
        self.model, self.cfg, self.mesh = model, cfg, mesh
        self.shards = mesh.shape["data"] * mesh.shape["fsdp"]
        self.n = -(-cfg.rows // self.shards) * self.shards
        self.static = {"shards": self.shards, "model": model, "cfg": cfg}
        self.longest = -(-cfg.slots // cfg.page_slots)  # pages of one row
        enough = self.n // self.shards * self.longest
        self.pages = cfg.pages or enough  # of one shard
        self.short = self.pages < enough
        if self.pages < self.longest:
            raise ValueError(
                f"sampler.pages={self.pages} of {cfg.page_slots} positions cannot hold one row "
                f"of {cfg.slots} (sampler.max_prompt + sampler.max_new); set it to "
                f"{self.longest} or more, or to 0 for as many as all rows can use"
            )
        self.rows = None
        self.queue: collections.deque[Request] = collections.deque()
        self.active: list[Request] = []  # oldest first
        self.asked: set[int] = set()  # the indices of both
        self.pool = [Pages(self.pages) for _ in range(self.shards)]
        self.gone = set()  # rows to end on the device

    def begin(self, key, run=empty):
        """Returns rows and pages laid out on the device; run: `empty`, or its `lower`."""
        changes = sharding.place_rows(self.changes(), self.mesh)
        pages = self.pages * self.shards
        return run(changes, key, model=self.model, cfg=self.cfg, pages=pages)

    def lower(self, params, key):
        """Returns (the loop over forwards, lowered; its rows and pages as shapes).

        params: arrays, or their shapes with shardings. Nothing is laid out.
        """
        made = self.begin(key, empty.lower)
        rows = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            made.out_info,
            made.compile().output_shardings,
        )
        return advance.lower(params, rows, LONG, self.n, **self.static), rows

    def submit(self, prompt: list[int], *, index: int, temperature: float, new: int):
        """Queues a prompt for an answer of at most `new` tokens.

        index: of no other that waits or is active. Raises ValueError for what is wrong,
        such as a prompt that does not fit beside its answer.
        """
        limit, Q, vocab = len(prompt) + new, self.cfg.block, self.model.vocab
        for wrong, needed in (
            (new < 1, f"new={new}: at least 1 token of answer"),
            (not temperature >= 0, f"temperature={temperature}: 0 (arg-max) or more"),
            (index in self.asked, f"index={index}: one that no other request has"),
            (
                not all(0 <= token < vocab for token in prompt),
                f"a prompt's token ids, here {prompt[:9]}...: in 0..{vocab - 1}",
            ),
        ):
            if wrong:
                raise ValueError(f"a request needs {needed}")
        if not 0 < len(prompt) <= self.cfg.max_prompt or limit > self.cfg.slots:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens with an answer of {new} does not fit "
                f"sampler.max_prompt={self.cfg.max_prompt} and sampler.max_new="
                f"{self.cfg.max_new}"
            )
        whole = len(prompt) // Q * Q
        known = names(prompt[:whole], self.cfg.page_slots)
        self.asked.add(index)
        self.queue.append(Request(index, prompt, limit, temperature, whole, known))

    def stream(self, params, prompts, key, *, temperature, watch=None):
        """Yields (i, Answer i) as answers end: see `answers`."""
        fits = {i for i, p in enumerate(prompts) if 0 < len(p) <= self.cfg.max_prompt}
        for i in (
            set(range(len(prompts))) - fits
        ):  # before any waits: who asks may leave
            yield i, state.no_answer(self.cfg.slots)
        for i in sorted(fits):
            new = self.cfg.max_new
            self.submit(prompts[i], index=i, temperature=temperature, new=new)
        tell = watch and (lambda request, row: watch(request.index, request.start, row))
        for request, answer in self.run(params, key, tell):
            yield request.index, answer

    def cancel(self, index: int):
        """Drops the request of that index, waiting or active."""
        self.asked.discard(index)
        self.queue = collections.deque(r for r in self.queue if r.index != index)
        for request in [r for r in self.active if r.index == index]:
            self.leave(request)

    def run(self, params, key, watch=None):
        """Yields (request, its Answer) as answers end, until none is left.

        params: those of an earlier run or others; what is known of pages is forgotten.
        key: a typed random key. watch: called with (request, Answer) for every active one
        after every forward, for those who show an answer as it grows.
        """
        for pool in self.pool:
            pool.clear()
        if self.rows is None:
            self.rows = self.begin(key)
        try:
            while self.queue or self.active:
                self.fill(key)
                waits = self.queue and len(self.active) < self.n  # for a prefill
                steps = 1 if watch or waits else AHEAD if self.short else LONG
                enough = -(-self.n // 8) if self.queue else self.n
                self.rows = advance(params, self.rows, steps, enough, **self.static)
                yield from self.harvest(watch)
        finally:  # who stops listening cancels what is left: no other run answers it
            self.queue.clear()
            self.asked.clear()
            for request in list(self.active):
                self.leave(request)

    def harvest(self, watch):
        """Yields what has ended, and makes prompts known whose keys are there now."""
        s = self.rows.s
        live_B, start_B, filled_B = sharding.fetch(
            (s.live_B, s.start_B, self.rows.filled_B)
        )
        for request in self.active:
            request.start = int(start_B[request.row])
            request.filled = int(filled_B[request.row])
            for i, name in enumerate(request.names):
                if request.filled >= min((i + 1) * self.cfg.page_slots, request.whole):
                    self.pool_of(request.row).publish(request.held[i], name)
        ended = [r for r in self.active if not live_B[r.row]]
        if not ended and not watch:
            return
        trace = sharding.fetch(traces(s, self.cfg.stop_ids))

        def row(request):
            return state.answer(trace, request.row)

        for request in list(self.active) if watch else ():
            if request.row >= 0:  # an earlier call may have cancelled it
                watch(request, row(request))
        for request in ended:
            if request.row >= 0:  # who takes the others may have cancelled it
                answer = row(request)
                self.leave(request)
                self.asked.discard(request.index)
                yield request, answer

    def pool_of(self, row: int) -> Pages:
        """Returns the pages of a row's device."""
        return self.pool[row * self.shards // self.n]

    def leave(self, request: Request):
        """Takes an active request out of its row."""
        self.active.remove(request)
        self.pool_of(request.row).release(request.held)
        self.gone.add(request.row)
        request.row, request.held = -1, []

    def wanted(self, request: Request, start: int) -> int:
        """Returns how many pages a row should hold whose present block is at `start`."""
        Q, size = self.cfg.block, self.cfg.page_slots
        end = -(-request.limit // Q) * Q
        if self.short:
            end = min(end, start + AHEAD * Q)
        return -(-end // size)

    def grow(self) -> bool:
        """Gives rows the pages to go on, oldest first; returns whether one had to leave.

        The youngest leave for those that could not go on without: they start again
        later, with the same answer. The oldest always goes on.
        """
        left = False
        for request in list(self.active):
            while request.row >= 0:  # it may have left for an older one
                pool = self.pool_of(request.row)
                lacks = self.wanted(request, request.start) - len(request.held)
                request.held += pool.take(max(0, min(lacks, pool.available)))
                room = len(request.held) * self.cfg.page_slots
                if request.start + self.cfg.block <= room:
                    break
                mates = [r for r in self.active if self.pool_of(r.row) is pool]
                self.leave(mates[-1])
                self.queue.appendleft(mates[-1])
                left = True
        return left

    def fill(self, key):
        """Admits what waits, and tells the device of all that has changed."""
        new = self.changes()
        before = sum(len(r.held) for r in self.active)
        sources = []
        passed = []  # over by others, while a prompt like theirs is being prefilled
        left = self.grow()
        taken = {r.row for r in self.active}
        free = {}  # by shard: its rows that nobody has
        for row in range(self.n):
            if row not in taken:
                free.setdefault(row * self.shards // self.n, []).append(row)
        coming = {  # prompts that are being prefilled, and where
            (r.row * self.shards // self.n, r.names[-1])
            for r in self.active
            if r.filled < r.whole
        }
        while not left and self.queue and free and len(passed) < self.n:
            request = self.queue.popleft()
            if not self.place(request, new, sources, free, coming):
                passed.append(request)
        self.queue.extendleft(reversed(passed))
        if not self.active:
            raise RuntimeError("no request fits into an empty engine")
        grown = before != sum(len(r.held) for r in self.active)
        if not (grown or self.gone or new["here_B"].any()):
            return
        new["gone_B"][list(self.gone)] = True
        self.gone.clear()
        for request in self.active:
            new["table_BA"][request.row, : len(request.held)] = request.held
            new["room_B"][request.row] = len(request.held) * self.cfg.page_slots
        new = sharding.place_rows(new, self.mesh)
        self.rows = admit(self.rows, new, key, model=self.model, cfg=self.cfg)
        for pool, page in sources:  # the copies are under way
            pool.release([page])

    def changes(self) -> dict[str, np.ndarray]:
        """Returns the arrays with which the device is told of changes, of which none."""
        rows = self.n
        ints = ("prompt_len", "limit", "index", "filled", "room", "from", "to")
        new = {f"{name}_B": np.zeros(rows, np.int32) for name in ints}
        new["to_B"] += self.pages
        new["here_B"], new["gone_B"] = np.zeros(rows, bool), np.zeros(rows, bool)
        new["temperature_B"] = np.zeros(rows, np.float32)
        new["prompt_BT"] = np.zeros((rows, self.cfg.max_prompt), np.int32)
        new["table_BA"] = np.zeros((rows, self.longest), np.int32)
        return new

    def place(self, request: Request, new, sources: list, free, coming) -> bool:
        """Gives a request a row and pages, if there are any; returns whether it has.

        It goes where most of its prompt is known, and waits where this is on its way.
        """
        size, Q = self.cfg.page_slots, self.cfg.block
        last = request.names[-1] if request.names else None
        if any((shard, last) in coming for shard in free):
            return False

        def promise(shard):
            pool = self.pool[shard]
            return sum(name in pool.page_of for name in request.names), pool.available

        shard = max(free, key=promise)
        best, pool, held, ragged = free[shard][-1], self.pool[shard], [], None
        # A model with a shift needs the hidden state that ends the prompt: its last
        # block is always run.
        end = request.whole - Q * (self.model.shift > 0)
        for name in request.names[: max(end, 0) // size]:
            page = pool.share(name)
            if page is None:
                break
            held.append(page)
        shared = len(held) * size
        if shared + size > end > shared:
            ragged = pool.share(request.names[-1]) if end == request.whole else None
        count = self.wanted(request, request.whole) - len(held)
        fresh_pages = pool.take(count)
        if fresh_pages is None:
            pool.release(held + [ragged] * (ragged is not None))
            return False
        if ragged is not None:
            new["from_B"][best], new["to_B"][best] = ragged, fresh_pages[0]
            sources.append((pool, ragged))
            shared = request.whole
        request.row, request.held = best, held + fresh_pages
        request.filled, request.start = shared, request.whole
        self.active.append(request)
        free[shard].pop()
        if not free[shard]:
            del free[shard]
        if request.filled < request.whole:
            coming.add((shard, last))
        new["here_B"][best] = True
        new["prompt_BT"][best, : len(request.prompt)] = request.prompt
        new["prompt_len_B"][best] = len(request.prompt)
        for name in ("limit", "temperature", "index", "filled"):
            new[f"{name}_B"][best] = getattr(request, name)
        return True
