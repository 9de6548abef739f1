"""A check of this machine's kernels before a run: each op against its specification.

A kernel that compiles and is right when interpreted can still be wrong on a chip that it
never ran on. So every op with a kernel for the platform is computed twice at the start,
by the kernel and by `pallas_kernels.reference`, on random arrays of the run's own widths,
those of one device: seconds, on a GPU most of a minute. What is right is remembered by
versions, chip and widths; what is not is looked at again at every start, for a chip may have
been out of memory, but for what an earlier process did not get over (first_run.py). `auto`
takes what is right and says what is not; with "platform" what is not right is an error.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import platform as machine
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import exits, pallas_kernels, processes, sharding
from dllm_jax.folder import write
from dllm_jax.models import cache, first_run, mask
from dllm_jax.models.config import ModelConfig
from dllm_jax.pallas_kernels import choice, noise, reference, tiled_head
from dllm_jax.pallas_kernels.head import draw_of_part

# How far a kernel may be from its specification, over the largest number there: rounding
# to bfloat16, or products of float32 that a chip rounds.
TOLERANCE = {"bfloat16": 2e-2, "float32": 5e-3}
# Nats that a head's numbers may be off, which it makes in f32 whatever comes in: of a product
# of f32 that a chip rounds as much as of others. A ratio is clipped at a fifth.
NATS = {"bfloat16": 1e-2}
# Of what may be off by more: draws in which two tokens all but tie, or borders that one
# all but reaches; of products of f32 that a chip rounds many do.
LOOSE = {"selection": 0.05, "token_draw": 0.05}
LOOSE_EXACT = LOOSE | {"token_draw": 0.005}
HEADED = ("attention", "cache_update", "paged_attention")
SLOTS, ROWS, HELD, VOCAB = 320, 4, 5, 8192
LONG = 1400  # slots of more than one tile of keys, on every chip
# By platform, seats of a row: on a TPU all rows' are two tiles, over which the head's
# gradient is summed; on a GPU a block goes over several tiles of the vocabulary.
SEATS = {"cpu": 96, "gpu": 576, "tpu": 160}
CHUNK = 64  # positions of a prompt's chunk, or whole blocks of no fewer
ALL = "all"  # that are compiled side by side


@dataclasses.dataclass(frozen=True)
class Widths:
    """What decides how kernels cut their arrays."""

    heads: int
    kv_heads: int
    held_heads: int  # key heads of pages
    head_dim: int
    d_model: int
    vocab: int
    experts: int
    expert_ffw: int
    dtype: str
    block: int
    page: int
    split: bool = False  # the vocabulary is one part of several

    @property
    def paged_heads(self) -> int:
        """The heads that ask pages: `heads`, and zeros where those of pages do not divide."""
        return -(-self.heads // self.held_heads) * self.held_heads


def part_of(model: ModelConfig, parts: int) -> dict[str, int]:
    """Returns the heads, kv_heads, vocab and experts of one of `parts` devices along `model`.

    As `sharding.ACT` splits them: what does not divide is whole on each (`head_letters`).
    """

    def part(**sizes):
        splits = all(size % parts == 0 for size in sizes.values())
        return {name: size // parts if splits else size for name, size in sizes.items()}

    heads = part(heads=model.heads, kv_heads=model.kv_heads)
    return heads | part(vocab=model.vocab) | part(experts=model.experts)


def widths(model: ModelConfig, block: int, page: int) -> Widths:
    """Returns the Widths of a device of the mesh in force.

    Of its vocabulary it is a part, with the same ragged end. Experts that do not divide are
    whole on each, or each one's width is split. block: sampler.block; page: positions of a
    cache page.
    """
    parts = jax.sharding.get_abstract_mesh().shape.get("model", 1)
    own, inner = part_of(model, parts), model.sizes["I"]
    vocab, experts = own.pop("vocab"), own.pop("experts")
    if model.experts % parts and inner % parts == 0:
        inner //= parts
    twice = cache.held_heads(model) // model.kv_heads
    return Widths(
        **own,
        held_heads=twice * own["kv_heads"],
        vocab=min(vocab, VOCAB + vocab % VOCAB),
        split=vocab < model.vocab,
        experts=min(experts, 8),
        head_dim=model.head_dim,
        d_model=model.d_model,
        expert_ffw=inner,
        dtype=model.dtype,
        block=block,
        page=page,
    )


seen: set[tuple[str, Widths]] = set()  # what `check` has looked at in this process


def check(kernels: str, wide: Widths, folder: str = "") -> list[str]:
    """Notes in `choice.verdicts` which kernels are right here; returns lines to print.

    kernels: model.kernels. folder: where the next start finds what was right; "": nowhere.
    A run asks for each of its samplers, and for each mesh: what is wrong in the widths of one
    is taken for none, and the same widths are looked at once.
    Raises ValueError for a kernel that is wrong where kernels="platform" asks for it, each
    time. The same in every process.
    """
    if (kernels, wide) in seen:
        return []
    lines = found_wrong(kernels, wide, folder)
    seen.add((kernels, wide))
    return lines


def found_wrong(kernels: str, wide: Widths, folder: str) -> list[str]:
    """Does what `check` does, whatever this process has looked at."""
    here = choice.platform()
    if kernels != "reference" and here not in SEATS:
        return [
            f"warning: {here!r} is no chip with kernels: XLA's operations do instead"
        ]
    ops = ops_of(here, wide)
    if kernels == "reference" or not ops:
        return []
    if wide.dtype not in choice.NUMBERS.get(here, (wide.dtype,)):
        told = f"{here}'s kernels take {choice.NUMBERS[here][0]}, not {wide.dtype}"
        if kernels == "platform":
            raise ValueError(f"model.kernels='platform': {told}; set model.dtype")
        choice.verdicts |= {(op, here): False for op in ops}
        return [f"{told}: XLA's operations do instead"]
    choice.begin(here)
    file = file_of(folder, wide, "json")
    marks = {op: mark(folder, wide, op) for op in (*ops, ALL) if folder}
    kept = remembered(file) if folder else set()
    known = {op for op in kept if not first_run.lost(marks.get(op))}
    looked = faults([op for op in ops if op not in known], here, wide, marks)
    # What is remembered is right in all processes: the next start asks none of them.
    wrong = {op: sharding.anywhere(bool(looked.get(op))) for op in ops}
    found = {op for op in ops if not wrong[op]}
    # What hung since, or is wrong elsewhere, is asked again once its file is removed.
    if folder and found != kept and jax.process_index() == 0:
        # A folder that takes nothing costs the next start its time.
        with contextlib.suppress(OSError, exits.CannotGoOn):
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file, json.dumps(sorted(found)))
    lines = []
    for op in ops:
        reason = looked.get(op, "")
        right = not wrong[op]
        choice.verdicts[op, here] = right and choice.verdicts.get((op, here), True)
        told = f"{here}'s kernel of {op}: {reason or 'wrong in another process'}"
        if not right and kernels == "platform":
            raise ValueError(
                f"model.kernels='platform': {told}; use 'auto', which does without it"
            )
        if not right:
            lines.append(f"warning: not used is {told}")
    return lines


def ops_of(here: str, wide: Widths) -> list[str]:
    """Returns the ops with a kernel on a platform, and for heads of that size."""
    ops = sorted(op for op, name in choice.KERNELS if name == here)
    fits = wide.head_dim in choice.HEAD_SIZES
    return [op for op in ops if fits or op not in HEADED]


def remembered(file: pathlib.Path) -> set[str]:
    """Returns the ops that were right at an earlier start; none if it left nothing whole."""
    try:
        return set(json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return set()


def mark(folder: str, wide: Widths, op: str) -> pathlib.Path:
    """Returns the file of an op's first run, of this process."""
    return file_of(folder, wide, f"{op}.{jax.process_index()}.tried")


def file_of(folder: str, wide: Widths, ending: str) -> pathlib.Path:
    """Returns a file of what is known of kernels in these widths."""
    return pathlib.Path(os.path.expanduser(folder), f"kernels_{key(wide)}.{ending}")


@functools.cache
def key(wide: Widths) -> str:
    """Returns what identifies a verdict: chip, its driver and compiler, sources, widths."""
    device = jax.local_devices()[0]
    facts = [device.device_kind, device.client.platform_version, jax.__version__]
    facts += [processes.sources(), machine.machine(), repr(wide)]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def faults(
    ops: list[str],
    here: str,
    wide: Widths,
    marks: dict[str, pathlib.Path] | None = None,
) -> dict[str, str]:
    """Returns `fault` of each op.

    They are compiled side by side, which takes the time, and run one by one, so that it is
    known which one hangs. marks: by op, the file that tells of its first run; by ALL, that
    which tells of their compilation. Where one was left the next start compiles one by one,
    too: a compiler has aborted, or somebody was out of patience.
    """
    marks = marks or {}
    fresh = [op for op in ops if not first_run.lost(marks.get(op))]
    apart = first_run.lost(marks.get(ALL))
    compiled = functools.partial(prepared, here=here, wide=wide)
    with (
        first_run.marked(None if apart else marks.get(ALL)),
        futures.ThreadPoolExecutor(1 if apart else max(len(fresh), 1)) as pool,
    ):
        files = (marks.get(op) if apart else None for op in fresh)
        made = dict(zip(fresh, pool.map(compiled, fresh, files)))
    if apart and first_run.lost(marks[ALL]):  # and no new one of another process
        with contextlib.suppress(OSError):
            marks[ALL].unlink()
    return {op: fault(op, here, wide, made.get(op), marks.get(op)) for op in ops}


def prepared(op: str, file: pathlib.Path | None, here: str, wide: Widths):
    """Returns (a kernel, its specification) for the first local device, compiled.

    Each is called without arguments. Or it returns what is raised meanwhile. file: one that is
    there meanwhile, and longer where the process does not get over it.
    """
    alone = sharding.make_mesh(fsdp=1, devices=jax.local_devices()[:1])
    try:
        run, arrays = CHECKS[op](wide, np.random.default_rng(0))
        with first_run.marked(file), jax.set_mesh(alone):
            lowered = [
                jax.jit(functools.partial(run, name)).lower(*arrays)
                for name in (here, "reference")
            ]
            return [functools.partial(x.compile(), *arrays) for x in lowered]
    except Exception as error:  # noqa: BLE001 (whatever a compiler raises)
        return error


def fault(op: str, here: str, wide: Widths, made, file: pathlib.Path | None) -> str:
    """Returns what is wrong with a kernel on the first local device; "": nothing is.

    made: see `prepared`; None: nobody got over its first run, as `file` tells.
    """
    if made is None:
        return (
            "an earlier start, with this chip and these versions, did not get over its check; "
            f"remove {file} to have it tried again"
        )
    try:
        if isinstance(made, Exception):
            raise made
        kernel, specification = made
        # First: a device that was broken before is no kernel's fault.
        want = jax.device_get(specification())
        with first_run.tried(file, f"{here}'s kernel of {op}"):
            got = jax.device_get(kernel())
    except (exits.Stopped, exits.CannotGoOn):
        raise
    except Exception as error:  # noqa: BLE001 (whatever a driver raises)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    nats = NATS.get(wide.dtype)
    loose = (LOOSE if nats is None else LOOSE_EXACT).get(op, 0.0)
    return difference(got, want, TOLERANCE[wide.dtype], loose, nats)


def difference(got, want, tolerance: float, loose: float, nats=None) -> str:
    """Returns by how much two trees of arrays differ; "": by no more than they may.

    Whole numbers, such as the ids of tokens, are equal or off. nats: what f32 may be off; None:
    as others, `tolerance` of the largest number.
    """
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        whole, exact = jnp.issubdtype(y.dtype, jnp.integer), y.dtype == jnp.float32
        exact &= nats is not None
        rounding = 0.0 if whole else nats if exact else tolerance
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        largest = 1.0 if exact else max(np.abs(y).max(), 1e-30)
        lost = ~np.isfinite(x)
        if lost.mean() > loose:
            return f"{lost.mean():.1%} of its numbers are not finite"
        error = np.abs(x - y) / largest
        off = (error > rounding) | lost
        if off.mean() > loose:
            of = "" if exact else " of the largest number"
            return (
                f"it is {np.nanmax(error):.2g}{of} off, where "
                f"{rounding:g} is rounding, in {off.mean():.1%} of the numbers"
            )
    return ""


# ---- The sizes -----------------------------------------------------------------------


def attention_sizes(here: str, wide: Widths) -> list[tuple[int, int, int]]:
    """Returns (rows, slots, key heads) of what `attention` checks on a platform.

    On a chip a sum over several tiles of keys, too, forward and backward, of few heads: the
    specification keeps all their scores.
    """
    sizes = [(ROWS, SLOTS, wide.kv_heads)]
    return sizes if here == "cpu" else [*sizes, (1, LONG, min(wide.kv_heads, 2))]


def page_sizes(here: str, wide: Widths) -> list[tuple[int, int]]:
    """Returns (rows, pages of each) of what `paged_attention` checks on a platform.

    On a GPU also as many rows as have their pages shared out among blocks, and so many that
    some blocks go from one to another. On a TPU rows of several chunks, an odd number: one
    core has them all.
    """
    sizes = [(ROWS, HELD)]
    if here == "gpu":
        sizes += shared_out_and_whole(wide, wide.block)
    if here == "tpu":
        kernel = choice.module("paged_attention", here)
        page = wide.page, wide.held_heads, wide.head_dim, wide.dtype
        queries = wide.block * wide.paged_heads // wide.held_heads
        sizes.append((ROWS + 1, 3 * kernel.pages_of_chunk(*page, queries) + 1))
    return sizes


def shared_out_and_whole(wide: Widths, width: int) -> list[tuple[int, int]]:
    """Returns (rows, pages of each): as many as a GPU's blocks share out, and more than these.

    width: positions of a window or a chunk. All have more tiles than there are buffers.
    """
    kernel = choice.module("paged_attention", "gpu")
    _, tiles = kernel.cut(width * wide.heads // wide.kv_heads)
    at_once = kernel.BLOCKS // (wide.kv_heads * tiles)
    held = 9 * kernel.TILE // wide.page + 1
    return [(max(at_once // 2, 1), held), (at_once + 1, held)]


def chunk_sizes(here: str, wide: Widths) -> list[tuple[int, int, int]]:
    """Returns (rows, pages of each, positions) of chunks: for chips, on which kernels read them.

    On a TPU more pages than two steps of `gathered` copy.
    """
    width = -(-CHUNK // wide.block) * wide.block
    if here == "tpu":
        return [(1, 2 * choice.module("paged_attention", here).AT_ONCE + 1, width)]
    if here != "gpu":
        return []
    return [(*size, width) for size in shared_out_and_whole(wide, width)]


# ---- The checks ----------------------------------------------------------------------
#
# By op: a function (wide, rng) -> (run, arrays), where run(implementation, *arrays) gives
# what is compared.


def attention(wide: Widths, rng):
    """Packed rows: clean copies, noised blocks that see what came before them, padding.

    On a chip a block over cached keys, too: a TPU has a tile of its own for few queries.
    """
    here = choice.platform()
    cases = [packed_rows(wide, rng, *size) for size in attention_sizes(here, wide)]
    windows = [] if here == "cpu" else [window(wide, rng)]

    def run(implementation, cases, windows):
        found = [
            pallas_kernels.attention(
                q, k, v, seen, cached=cached, implementation=implementation
            )
            for q, k, v, cached, seen in windows
        ]
        for q, k, v, dout, seen in cases:
            attend = functools.partial(
                pallas_kernels.attention, mask=seen, implementation=implementation
            )
            out, pull = jax.vjp(attend, q, k, v)
            # Padding sees nothing: whatever it gets is finite, and nobody reads it.
            real_BT = (seen.q_end_BT > seen.q_begin_BT) | (seen.q_group_BT >= 0)
            real = real_BT[..., None, None].astype(out.dtype)
            found.append((out * real, pull(dout * real)))
        return found

    return run, (cases, windows)


def window(wide: Widths, rng):
    """Returns (q, k, v, cached keys and values, the mask) of blocks; the first sees no other."""
    W = min(wide.block, 256)  # of more the specification's scores would be large
    kept_B = np.linspace(0, LONG, ROWS).astype(np.int32)
    q = normal(rng, (ROWS, W, wide.heads, wide.head_dim), wide.dtype)
    k, v, *cached = (
        normal(rng, (ROWS, size, wide.kv_heads, wide.head_dim), wide.dtype)
        for size in (W, W, LONG, LONG)
    )
    pos_BW = jnp.asarray(kept_B[:, None] + np.arange(W)[None])
    kept_BS = jnp.asarray(np.arange(LONG)[None] < kept_B[:, None])
    seen = mask.beside(mask.full(pos_BW, jnp.asarray(kept_B + W)), kept_BS)
    return q, k, v, tuple(cached), seen


def packed_rows(wide: Widths, rng, rows: int, slots: int, kv_heads: int):
    """Returns (q, k, v, the output's gradient, the mask) of one size of `attention`.

    A row has two trajectories, of which the second sees nothing of the first, and is unlike
    the others: the second begins and padding begins elsewhere. No kernel knows of blocks: wide
    ones are taken for narrower ones here, of which a row has several.
    """
    few = rows, slots, kv_heads, wide.head_dim
    shape = *few[:2], kv_heads * wide.heads // wide.kv_heads, wide.head_dim
    q, k, v, dout = (normal(rng, size, wide.dtype) for size in (shape, few, few, shape))
    Q = min(wide.block, slots // 16)
    clean, slot = slots // 2 // Q * Q, np.arange(slots)[None]
    row = np.arange(rows)[:, None] % 4
    noised, padding = slot >= clean, slot >= slots - slots // 16 * (1 + row)
    block = np.where(noised, (slot - clean) % clean, slot) // Q * Q  # where it begins
    # In the first row a TPU's part of 256 keys is seen whole before.
    second = clean * (4 - row) // 5 // Q * Q
    begin = np.where(block < second, 0, second)
    end = np.where(padding, begin, np.where(noised, block, block + Q))
    group = np.where(noised & ~padding, (slot - clean) // Q, -1)
    seen = mask.packed(*(jnp.asarray(x, "int32") for x in (begin, end, group)))
    return q, k, v, dout, seen


def pages(wide: Widths, rng, rows: int = ROWS, held: int = HELD):
    """Returns (pages, layer, table_BA, start_B, keep_B, k_BWKH, v_BWKH), rows ragged.

    held: pages of a row, of which the last one fills all. More than ROWS share theirs.
    """
    kept = min(rows, ROWS) * held
    pool = 2, kept, wide.page, wide.held_heads, wide.head_dim
    fresh = rows, wide.block, wide.held_heads, wide.head_dim
    pools = tuple(normal(rng, pool, wide.dtype) for _ in "kv")
    table = rng.permutation(rows * held).reshape(rows, held) % kept
    most = held * wide.page // wide.block - 1
    start = rng.integers(0, most, rows) * wide.block
    start[-1] = (most - 1) * wide.block
    keep_B = jnp.arange(rows) % 2 == 0
    k, v = (normal(rng, fresh, wide.dtype) for _ in "kv")
    at = jnp.asarray(table, "int32"), jnp.asarray(start, "int32")
    return pools, jnp.int32(1), *at, keep_B, k, v


def paged_attention(wide: Widths, rng):
    """A block, or two of which the second has keys, over pages of various lengths.

    On a chip chunks of prompts, too: a block sees itself and those before it.
    """
    here, cases = choice.platform(), []
    for rows, held in page_sizes(here, wide):
        pools, layer, table_BA, start_B, _, k, v = pages(wide, rng, rows, held)
        queries = rows, 2 * wide.block, wide.paged_heads, wide.head_dim
        q = normal(rng, queries, wide.dtype)
        # Of one block some rows have no pages, the first and one between others, and some all.
        # Two are asked together where a run asks them so: of more queries a chip may have no
        # room. The first sees something.
        one_B = start_B.at[:3:2].set(0).at[-1].set(held * wide.page)
        held_by = pools, layer, table_BA
        if cache.pairs_fit(wide.heads, wide.kv_heads, wide.block):
            cases.append((q, *held_by, start_B + wide.block, k, v))
        cases.append((q[:, wide.block :], *held_by, one_B, k, v))
    chunks = [chunk(wide, rng, *size) for size in chunk_sizes(here, wide)]

    def run(implementation, cases, chunks):
        how = {"implementation": implementation}
        return [pallas_kernels.paged_attention(*arrays, **how) for arrays in cases] + [
            pallas_kernels.chunk_attention(*arrays, **how) for arrays in chunks
        ]

    return run, (cases, chunks)


def chunk(wide: Widths, rng, rows: int, held: int, width: int):
    """Returns (q_BWNH, pages, layer, table_BA, mask) of chunks that begin anywhere."""
    pools, layer, table_BA, start_B, *_ = pages(wide, rng, rows, held)
    q = normal(rng, (rows, width, wide.paged_heads, wide.head_dim), wide.dtype)
    slots, Q = held * wide.page, wide.block
    end_BW = start_B[:, None] + jnp.arange(width)[None] // Q * Q + Q
    slots_BS = jnp.broadcast_to(jnp.arange(slots)[None], (rows, slots))
    return q, pools, layer, table_BA, mask.ranged(jnp.minimum(end_BW, slots), slots_BS)


def cache_update(wide: Widths, rng):
    """Windows of which every other is kept; the first crosses a page's end."""

    def run(implementation, *arrays):
        return pallas_kernels.cache_update(*arrays, implementation=implementation)

    pools, layer, table_BA, start_B, *rest = pages(wide, rng)
    return run, (pools, layer, table_BA, start_B.at[0].set(wide.page - 1), *rest)


def token_logprob(wide: Widths, rng):
    """Log-probs and entropies, and the gradient of both; of a part of the vocabulary, too."""
    x, head = hidden_and_head(wide, rng)
    token = tokens(wide, rng, x.shape[:2])
    pulled = tuple(normal(rng, token.shape, "float32") for _ in range(2))

    def run(implementation, x, head, token, pulled):
        def logprob(x, head):
            return pallas_kernels.token_logprob(
                x, head, token, forbidden=wide.vocab // 2, implementation=implementation
            )

        out, pull = jax.vjp(logprob, x, head)
        part = of_part(implementation, x, head, token, *pulled) if wide.split else ()
        return out, pull(pulled), part

    return run, (x, head, token, pulled)


def of_part(implementation, x_BUD, head_DV, *of_seats):
    """Returns what kernels are asked of the second of two parts of a vocabulary.

    (lse, mean, the token's logit; the gradients of x and head.) of_seats: tokens, of which
    every other one is the other part's, and the gradients of log-prob and entropy.
    """
    V, module = head_DV.shape[1], choice.kernel("token_logprob", implementation)
    x_RD = x_BUD.reshape(-1, len(head_DV))
    token_R, dlogp_R, dentropy_R = (x_BU.reshape(-1) for x_BU in of_seats)
    token_R += V * (jnp.arange(len(token_R)) % 2)
    id_1V, id_R1 = V + jnp.arange(V)[None], token_R[:, None]
    logits_RV = reference.logits(x_RD, head_DV)
    logits_RV = jnp.where(id_1V == V + V // 2, reference.NEVER, logits_RV)
    lse_R, mean_R = tiled_head.statistics(logits_RV)
    all_R = lse_R + math.log(2)  # as if the other part were like this one
    saved, how = (all_R, mean_R, dlogp_R, dentropy_R), {"forbidden": V + V // 2}
    if module is not None:
        given, how = (x_RD, head_DV, token_R, V), how | {"interpret": False}
        return *module.pick(*given, **how), *module.pick_gradient(*given, saved, **how)
    is_RV, prob_RV = id_1V == id_R1, jnp.exp(logits_RV - all_R[:, None])
    logit_R = jnp.where(is_RV, logits_RV, 0).sum(axis=1)
    pulled_RV = (
        dentropy_R[:, None] * (logits_RV - mean_R[:, None]) + dlogp_R[:, None]
    ) * prob_RV
    pulled_RV = (is_RV * dlogp_R[:, None] - pulled_RV).astype(x_RD.dtype)
    return lse_R, mean_R, logit_R, pulled_RV @ head_DV.T, x_RD.T @ pulled_RV


def behind_of_part(implementation, x_BUD, head_DV, border_BU):
    """Returns (the log of the sum behind a limit, how many are before it) of that part."""
    V, module = head_DV.shape[1], choice.kernel("selection", implementation)
    x_RD = x_BUD.reshape(-1, len(head_DV))
    limit_R = jnp.where(jnp.isinf(border_BU), reference.BELOW_NEVER, border_BU)
    limit_R, forbidden = limit_R.reshape(-1), V + V // 2
    if module is not None:
        given, how = (x_RD, head_DV, limit_R, V), {"forbidden": forbidden}
        behind_R, ahead_R = module.behind(*given, **how, interpret=False)
    else:
        logits_RV = reference.logits(x_RD, head_DV)
        counts_1V = V + jnp.arange(V)[None] != forbidden
        behind_RV = counts_1V & (logits_RV <= limit_R[:, None])
        held_RV = jnp.where(behind_RV, logits_RV, reference.BELOW_NEVER)
        behind_R = jax.nn.logsumexp(held_RV, axis=1)
        ahead_R = (counts_1V & ~behind_RV).sum(axis=1).astype(jnp.float32)
    # Where nothing is behind it, the sum's log is no number's: not one to compare others with.
    return jnp.where(behind_R > reference.ABOVE_NEVER, behind_R, 0.0), ahead_R


def selection(wide: Widths, rng):
    """Tokens taken, or thrown away behind a border far from all, its gradient; of a part, too."""
    x, head = hidden_and_head(wide, rng)
    token = tokens(wide, rng, x.shape[:2])
    # So low that a token that rounding moves is a small one.
    border = rng.uniform(-9, -5, token.shape)
    border = jnp.where(rng.random(token.shape) < 0.5, border, jnp.inf)
    pulled = tuple(normal(rng, token.shape, "float32") for _ in range(3))

    def run(implementation, x, head, token, border, pulled):
        def done(x, head):
            return pallas_kernels.selection(
                x,
                head,
                token,
                border,
                rule=pallas_kernels.Rule(),
                forbidden=wide.vocab // 2,
                implementation=implementation,
            )

        (*out, ahead), pull = jax.vjp(done, x, head)
        # Of the tokens ahead one may be next to the border, and counted or not.
        whole = out, ahead / 100, pull(pulled)
        if not wide.split:
            return whole
        return whole, behind_of_part(implementation, x, head, border)

    return run, (x, head, token, border, pulled)


def token_draw(wide: Widths, rng):
    """Draws at several temperatures, 0 among them, of some positions; of a part, too.

    Nearly all scores are below zero, which is where a maximum is not to begin.
    """
    x, head = hidden_and_head(wide, rng)
    x, head = x.at[..., 0].set(1), head.at[0].set(-24)
    keys = jax.random.split(jax.random.key(0), ROWS)
    temperature_B = jnp.asarray([0.0, 0.5, 1.0, 1.5], "float32")
    wanted_BW = jnp.asarray(rng.random(x.shape[:2]) < 0.7)

    def run(implementation, x, head, keys, temperature_B, wanted_BW):
        out = pallas_kernels.token_draw(
            x,
            head,
            keys,
            temperature_B,
            forbidden=wide.vocab // 2,
            wanted_BW=wanted_BW,
            implementation=implementation,
        )
        if wide.split:
            part = "any" if implementation == "reference" else implementation
            out += draw_of_part(
                x,
                head,
                noise.words(keys),
                temperature_B,
                wanted_BW,
                wide.vocab,
                module=choice.kernel("token_draw", part),
                V=2 * wide.vocab,
                forbidden=wide.vocab * 3 // 2,
                interpret=False,
            )
        return [jnp.where(wanted_BW, y.reshape(wanted_BW.shape), 0) for y in out]

    return run, (x, head, keys, temperature_B, wanted_BW)


def grouped_matmul(wide: Widths, rng):
    """Rows of ragged groups, one of them empty, and of none, and the gradient of all.

    As where experts lie apart: rows behind the last group are of another device's. What they
    get and give is 0, or it would be added to what that one finds. Of two layers the second:
    by its number, as it samples, and its own matrices, as it learns.
    """
    E, rows, F = max(wide.experts, 2), 256, wide.expert_ffw or wide.d_model
    x, dy = (normal(rng, (rows, size), wide.dtype) for size in (wide.d_model, F))
    w = normal(rng, (2, E, wide.d_model, F), wide.dtype)
    sizes = rng.multinomial(rows - 40, [0.0, *[1 / (E - 1)] * (E - 1)])

    def run(implementation, x, w, sizes, dy):
        how = {"implementation": implementation}

        def product(x, w):
            return pallas_kernels.grouped_matmul(x, w, sizes, **how)

        y, pull = jax.vjp(product, x, w[1])
        dx, dw = pull(dy)
        if implementation == "reference":  # which adds row by row, and rounds each time
            group_R = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), "right")
            is_RE = jax.nn.one_hot(group_R, E, dtype=dw.dtype)  # of no group: of zeros
            kept = {"preferred_element_type": jnp.float32}
            dw = jnp.einsum("RE,RD,RF->EDF", is_RE, x, dy, **kept).astype(dw.dtype)
        return pallas_kernels.grouped_matmul(x, w, sizes, 1, **how), y, dx, dw

    return run, (x, w, jnp.asarray(sizes, "int32"), dy)


def tokens(wide: Widths, rng, shape):
    """Returns ids of tokens, none of them the forbidden one in the middle."""
    token = rng.integers(0, wide.vocab - 1, shape)
    return jnp.asarray(token + (token >= wide.vocab // 2), "int32")


def normal(rng, shape, dtype: str):
    """Returns standard normal numbers."""
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def hidden_and_head(wide: Widths, rng):
    """Returns (x_BUD, head_DV) whose logits have a deviation of 3: few tokens tie."""
    x = normal(rng, (ROWS, SEATS[choice.platform()], wide.d_model), wide.dtype)
    head = normal(rng, (wide.d_model, wide.vocab), "float32") * 3 / wide.d_model**0.5
    return x, head.astype(wide.dtype)


CHECKS = {
    "attention": attention,
    "cache_update": cache_update,
    "grouped_matmul": grouped_matmul,
    "paged_attention": paged_attention,
    "selection": selection,
    "token_draw": token_draw,
    "token_logprob": token_logprob,
}
