"""Flash attention under the range-or-group mask, for Hopper GPUs.

Forward and backward of FlashAttention-2 and -3 (arXiv 2307.08691, 2407.08608). A block
of three warpgroups keeps a tile of one side, the resident one: two warpgroups compute, 64
rows of it each, while the third copies the tiles of the other side, the streamed one, that
`tiles.schedule` names, and what the mask is made of there, through a ring of buffers. Scores
are in base 2, so that an exponential is one instruction. A tile of scores has rows of the
resident side (axis 0) and columns of the streamed one (axis 1): the queries are axis 0 of the
forward pass and of dq, and axis 1 of dk and dv.

Letters: r rows of one tile, c columns of it, i tiles of queries, j tiles of keys.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dllm_jax.pallas_kernels import choice, tiles
from dllm_jax.pallas_kernels.reference import ABOVE_NEVER, NEVER

ROWS, RESIDENT = 64, 128  # rows of a warpgroup's products; of the two that compute
TILE, TILE_BACKWARD = 128, 64  # columns: of the streamed side
BUFFERS = 2  # of streamed tiles
# Whether the two warpgroups that compute take turns in the forward pass: see `in_turn`.
IN_TURN = True
ALONG = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)  # axis 0, axis 1


def run(
    body,
    dtype,
    out_type,
    grid: dict[str, int],
    scratch,
    name: str,
    *,
    interpret,
    wgs=2,
    approximate=True,
):
    """Returns plgpu.kernel of `wgs` warpgroups that compute and one that copies.

    body: the kernel, called with the inputs, the outputs and the scratch; dtype: of what
    it multiplies; grid: sizes by name; approximate: whether logarithms and exponentials may
    be. What is returned takes the inputs and gives `out_type`'s arrays. Raises ValueError for
    numbers that no product takes as they lie in memory. The interpreter prints races.
    """
    if str(dtype) not in choice.NUMBERS["gpu"] and not interpret:
        raise ValueError(
            f"pallas_kernels.{name}: implementation='gpu' takes "
            f"{' or '.join(choice.NUMBERS['gpu'])}, not {dtype}; use 'reference'"
        )
    kernel = plgpu.kernel(
        body,
        out_type=(out_type,),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=wgs + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=approximate),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
        kernel_name=name,
    )
    return lambda *inputs: kernel(*inputs)[0]


def wide(x, axis: int, like):
    """Returns a vector along `axis`, as large as `like`."""
    return lax.broadcast_in_dim(x, like.shape, [axis])


def rows(like):
    """Returns each element's row, in the registers of an accumulator."""
    layout = plgpu.Layout.WGMMA
    return plgpu.broadcasted_iota(jnp.int32, like.shape, 0, layout=layout)


def columns(like):
    """Returns each element's column, in the registers of an accumulator."""
    layout = plgpu.Layout.WGMMA
    return plgpu.broadcasted_iota(jnp.int32, like.shape, 1, layout=layout)


def filled(value, *shape):
    """Returns a value in all registers of an accumulator, or of one of its columns."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else ALONG[0]
    return plgpu.layout_cast(jnp.full(shape, value, jnp.asarray(value).dtype), layout)


def shared(dtype, *shape):
    """Returns shared memory for a product's operand: in swizzled lines of 128 bytes."""
    lines = plgpu.TilingTransform((8, 128 // dtype.itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(lines, plgpu.SwizzleTransform(128)))


def feed(fetch, steps, free, buffers: int):
    """Runs fetch(step, buffer), each when its buffer is free; ends when all are."""
    ahead = jnp.minimum(steps, buffers)

    @pl.loop(0, steps + ahead)
    def _(n):
        @pl.when(n >= ahead)
        def _():
            plgpu.barrier_wait(free.at[lax.rem(n - ahead, jnp.int32(buffers))])

        @pl.when(n < steps)
        def _():
            fetch(n, lax.rem(n, jnp.int32(buffers)))


def streamed(factors, shape, first, steps: int, ready, free, buffers: int):
    """Returns the sum of `steps` products x @ y, [shape] f32, as `feed` brings them.

    factors: a buffer's x and y, in shared memory; first: the number of the first step.
    """

    def slot(n):
        return lax.rem(n, jnp.int32(buffers))

    def run(acc_ref):
        @pl.loop(0, steps)
        def _(d):
            n = first + d
            plgpu.barrier_wait(ready.at[slot(n)])
            plgpu.wgmma(acc_ref, *factors(slot(n)))
            plgpu.wgmma_wait(1)  # of the step before: its buffers are free

            @pl.when(d > 0)
            def _():
                plgpu.barrier_arrive(free.at[slot(n - 1)])

        acc = acc_ref[...]
        plgpu.barrier_arrive(free.at[slot(first + steps - 1)])
        return acc

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def meeting(wgs: int):
    """Returns the scratch by which `in_turn` keeps order: a barrier, or none."""
    return [plgpu.Barrier(num_arrivals=2)] if IN_TURN and wgs == 2 else []


def in_turn(wg, met, walk):
    """Returns walk(turn), in which two warpgroups multiply and exponentiate by turns.

    The schedule of FlashAttention-3 (section 3.1): while one does its softmax the other has
    the matrix unit, first for the product with its values, then for its next scores. Both
    meet twice in each of their steps, when a product of scores has been issued and when a
    softmax is done, and the second is a half of a step behind the first: as both walk the
    same number of steps, none waits for a meeting that the other does not come to.

    met: of `meeting`; of no barrier `turn` is None, and nobody waits. walk: goes through
    the steps, in each of which it calls turn() twice.
    """
    if not met:
        return walk(None)
    (both,) = met

    def turn():
        plgpu.barrier_arrive(both)
        plgpu.barrier_wait(both)

    pl.when(wg == 1)(turn)
    carry = walk(turn)
    pl.when(wg == 0)(turn)
    return carry


def product(x_ref, y_ref, turn=None):
    """Returns x @ y.T, both in shared memory, f32; turn: of `in_turn`, once it is issued."""

    def run(acc_ref):
        plgpu.wgmma(acc_ref, x_ref, y_ref.transpose((1, 0)))
        if turn:
            turn()
        return acc_ref[...]

    return pl.run_scoped(run, plgpu.ACC((x_ref.shape[0], y_ref.shape[0]), jnp.float32))


def add_product(acc, x, y_ref, interpret: bool):
    """Returns acc + x @ y, x in registers."""
    x = x.astype(y_ref.dtype)
    if interpret:  # the interpreter knows products of shared memory only
        y = y_ref[...]
        plgpu.commit_smem()  # what was read may be copied over
        return acc + jnp.dot(x, y, preferred_element_type=jnp.float32)
    run = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, x, y_ref))
    return run(plgpu.ACC.init(acc))


def forward_start(H: int):
    """Returns (maximum, sum, sum of p · v) of no keys."""
    return filled(ABOVE_NEVER, ROWS), filled(0.0, ROWS), filled(0.0, ROWS, H)


def forward_step(carry, resident, streamed, mask, vectors, turn, scale, interpret):
    """Adds a tile of keys to running (maximum, sum, sum of p · v).

    resident: (q,), streamed: (k, v), in shared memory; mask: of scores, hides those of keys
    that are not seen; vectors: none; turn: of `in_turn`.
    """
    del vectors
    max_r, sum_r, acc_rH = carry
    (q_rH,), (k_cH, v_cH) = resident, streamed
    score_rc = mask(product(q_rH, k_cH, turn) * (scale * math.log2(math.e)))
    new_r = jnp.maximum(max_r, score_rc.max(axis=1))
    prob_rc = jnp.exp2(score_rc - wide(new_r, 0, score_rc))
    fade_r = jnp.exp2(max_r - new_r)
    sum_r = sum_r * fade_r + prob_rc.sum(axis=1)
    acc_rH *= wide(fade_r, 0, acc_rH)
    prob_rc = prob_rc.astype(v_cH.dtype)
    if turn:
        # The compiler may not move the softmax behind the turn that ends it.
        softmax = new_r, sum_r, acc_rH, prob_rc
        new_r, sum_r, acc_rH, prob_rc = lax.optimization_barrier(softmax)
        turn()
    return new_r, sum_r, add_product(acc_rH, prob_rc, v_cH, interpret)


def forward_end(carry):
    """Returns (the attention, the log of each query's sum)."""
    max_r, sum_r, acc_rH = carry
    sees_r = sum_r > 0
    sum_r = jnp.where(sees_r, sum_r, 1.0)
    # A query that sees nothing: zero, and -NEVER keeps its gradient zero.
    lse_r = jnp.where(sees_r, max_r * math.log(2) + jnp.log(sum_r), -NEVER)
    return acc_rH / wide(sum_r, 0, acc_rH), lse_r


def backward_step(
    carry, resident, streamed, mask, vectors, turn, scale, interpret, *, q_axis: int
):
    """Adds a tile to the resident side's gradients: of (q,), or of (k, v).

    resident, streamed: (q, dout) and (k, v), or the other way round, in shared memory;
    mask: as in `forward_step`; vectors: (lse, delta) of the tile's queries; turn: none, as
    with three or four products to an exponential the matrix unit has work without.
    """
    del turn
    lse, delta = vectors
    score_rc = mask(product(resident[0], streamed[0]) * (scale * math.log2(math.e)))
    prob_rc = jnp.exp2(score_rc - wide(lse * math.log2(math.e), q_axis, score_rc))
    dprob_rc = product(resident[1], streamed[1])
    dscore_rc = prob_rc * (dprob_rc - wide(delta, q_axis, score_rc))
    # dq = dscore @ k, or, in tiles of [keys, queries], dk = dscore @ q, dv = prob @ dout.
    factors = dscore_rc, prob_rc
    return tuple(
        add_product(acc_rH, factor_rc, y_cH, interpret)
        for acc_rH, factor_rc, y_cH in zip(carry, factors, streamed, strict=False)
    )


class Pass(NamedTuple):
    """What a run over the tiles computes."""

    name: str
    step: Callable  # adds a streamed tile to what the resident one sums
    q_axis: int  # the queries' axis of a tile of scores; 0: they are resident
    tile: int  # columns
    results: int  # arrays like the resident side's
    place: int  # of its schedule in `plan`


FORWARD = Pass("attention", forward_step, 0, TILE, 1, 0)
GRADIENT_Q = Pass(
    "attention_dq", functools.partial(backward_step, q_axis=0), 0, TILE_BACKWARD, 1, 1
)
GRADIENT_KV = Pass(
    "attention_dkv", functools.partial(backward_step, q_axis=1), 1, TILE_BACKWARD, 2, 2
)


def launch(kind: Pass, q_side, k_side, vectors, mask, interpret):
    """Runs a pass over the tiles that each resident tile sees.

    q_side: [q] forward, [q, dout] backward; k_side: [k, v]; vectors: [] or [lse, delta],
    each [B, N, T]. Returns [out, lse], or the gradients of the resident side.
    """
    lengths = q_side[0].shape[1], k_side[0].shape[1]
    sides = [[tiles.pad(x, 1, RESIDENT) for x in side] for side in (q_side, k_side)]
    vectors = [tiles.pad(x_BNT, 2, RESIDENT) for x_BNT in vectors]
    masks = tiles.mask_arrays(mask, RESIDENT, RESIDENT)
    q_axis, tile = kind.q_axis, kind.tile
    resident, streamed = sides[q_axis], sides[1 - q_axis]
    (B, rows, heads, H), dtype = resident[0].shape, resident[0].dtype
    G, scale = q_side[0].shape[2] // k_side[0].shape[2], H**-0.5
    schedule = (mask.tiles or plan(mask))[kind.place]

    def body(
        schedule,
        resident,
        streamed,
        vectors,
        masks,
        out_refs,
        resident_smem,
        streamed_smem,
        lines_smem,
        arrived,
        ready,
        free,
        met,
    ):
        visit_ref, count_ref = schedule
        b, h, i = (lax.axis_index(axis) for axis in ("row", "head", "tile"))
        wg = lax.axis_index("warpgroup")
        row = i * RESIDENT + wg * ROWS
        count = count_ref[b, i]
        steps = count if q_axis == 0 else count * G

        def visited(n):
            """Returns (first column, head of the streamed side, whether all is seen)."""
            g, j = (0, n) if q_axis == 0 else (lax.div(n, count), lax.rem(n, count))
            visit = visit_ref[b, i, j]
            head = lax.div(h, jnp.int32(G)) if q_axis == 0 else h * G + g
            return lax.shift_right_logical(visit, 1) * tile, head, (visit & 1) == 1

        @pl.when(wg < 2)
        def _():
            plgpu.set_max_registers(232, action="increase")
            for x_ref, buffer in zip(resident, resident_smem, strict=True):
                source = x_ref.at[b, pl.ds(row, ROWS), h]
                plgpu.copy_gmem_to_smem(source, buffer.at[wg], arrived.at[wg])
            plgpu.barrier_wait(arrived.at[wg])

            def load(ref, axis):
                return plgpu.load(ref, layout=ALONG[axis], optimized=False)

            here = pl.ds(row, ROWS)
            held = [load(x.at[b, here], 0) for x in masks[q_axis]]
            values = [load(x.at[b, h, here], 0) for x in vectors if q_axis == 0]
            masked = len(masks[1 - q_axis])  # lines; behind them are the vectors

            def compute(turn, n, carry):
                slot = lax.rem(n, jnp.int32(BUFFERS))
                _, _, all_seen = visited(n)
                plgpu.barrier_wait(ready.at[slot])

                def hide(score_rc):
                    lines = [load(x.at[slot], 1) for x in lines_smem[:masked]]
                    of_q, of_k = (held, lines) if q_axis == 0 else (lines, held)
                    begin, end, q_group = (wide(x, q_axis, score_rc) for x in of_q)
                    pos, k_group = (wide(x, 1 - q_axis, score_rc) for x in of_k)
                    sees_rc = ((pos >= begin) & (pos < end)) | (k_group == q_group)
                    return jnp.where(sees_rc, score_rc, NEVER)

                def mask(score_rc):
                    return lax.cond(all_seen, lambda score_rc: score_rc, hide, score_rc)

                sides = (
                    [x.at[wg] for x in resident_smem],
                    [x.at[slot] for x in streamed_smem],
                )
                lines = [load(x.at[slot], 1) for x in lines_smem[masked:]]
                carry = kind.step(
                    carry, *sides, mask, values or lines, turn, scale, interpret
                )
                plgpu.barrier_arrive(free.at[slot])
                return carry

            if kind is FORWARD:
                start = forward_start(H)
            else:
                start = (filled(0.0, ROWS, H),) * kind.results

            def walk(turn):
                step = functools.partial(compute, turn)
                return lax.fori_loop(0, steps, step, start)

            carry = in_turn(wg, met, walk)
            if kind is FORWARD:
                *results, out_refs[-1][b, h, pl.ds(row, ROWS)] = forward_end(carry)
            else:
                results = carry[0] * scale, *carry[1:]
            for x, buffer in zip(results, resident_smem, strict=False):
                buffer[wg] = x.astype(buffer.dtype)
            plgpu.commit_smem()
            for x_ref, buffer, _ in zip(out_refs, resident_smem, results, strict=False):
                target = x_ref.at[b, pl.ds(row, ROWS), h]
                plgpu.copy_smem_to_gmem(buffer.at[wg], target)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == 2)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            def fetch(n, slot):
                column, head, _ = visited(n)
                here = pl.ds(column, tile)
                sources = [x.at[b, here, head] for x in streamed]
                sources += [x.at[b, here] for x in masks[1 - q_axis]]
                sources += [x.at[b, head, here] for x in vectors if q_axis == 1]
                buffers = *streamed_smem, *lines_smem
                for source, buffer in zip(sources, buffers, strict=True):
                    plgpu.copy_gmem_to_smem(source, buffer.at[slot], ready.at[slot])

            feed(fetch, steps, free, BUFFERS)

    out_type = [jax.ShapeDtypeStruct(resident[0].shape, dtype)] * kind.results
    if kind is FORWARD:
        out_type.append(jax.ShapeDtypeStruct((B, heads, rows), jnp.float32))
    lines = [*masks[1 - q_axis], *(vectors if q_axis == 1 else ())]
    scratch = [
        [shared(dtype, 2, ROWS, H) for _ in resident],
        [shared(dtype, BUFFERS, tile, H) for _ in streamed],
        [plgpu.SMEM((BUFFERS, tile), x.dtype) for x in lines],
        plgpu.Barrier(num_arrivals=len(resident), num_barriers=2),
        plgpu.Barrier(num_arrivals=len(streamed) + len(lines), num_barriers=BUFFERS),
        plgpu.Barrier(num_arrivals=2, num_barriers=BUFFERS),
        meeting(2) if kind is FORWARD else [],
    ]
    grid = {"head": heads, "tile": rows // RESIDENT, "row": B}
    results = run(body, dtype, out_type, grid, scratch, kind.name, interpret=interpret)(
        schedule, resident, streamed, vectors, masks
    )
    return [
        x[:, : lengths[q_axis]] if x.ndim == 4 else x[..., : lengths[0]]
        for x in results
    ]


def schedule_of(kind: Pass, masks):
    """Returns `tiles.schedule` of a pass: what each resident tile sees of the others."""
    if kind.q_axis == 0:
        return tiles.schedule(tiles.kinds(*masks, RESIDENT, kind.tile))
    kinds_Bij = tiles.kinds(*masks, kind.tile, RESIDENT)
    return tiles.schedule(kinds_Bij.swapaxes(1, 2))


def plan(mask, *_):
    """Returns the schedule of each pass, by its place."""
    masks = tiles.mask_arrays(mask, RESIDENT, RESIDENT)
    passes = FORWARD, GRADIENT_Q, GRADIENT_KV
    return tuple(schedule_of(kind, masks) for kind in passes)


def forward(q_BTNH, k_BSKH, v_BSKH, mask, *, interpret=False):
    """Returns (attention [B, T, N, H], the log of each query's sum [B, N, T], f32)."""
    out_BTNH, lse_BNT = launch(FORWARD, [q_BTNH], [k_BSKH, v_BSKH], [], mask, interpret)
    return out_BTNH, lse_BNT


def backward(
    q_BTNH, k_BSKH, v_BSKH, mask, out_BTNH, lse_BNT, dout_BTNH, *, interpret=False
):
    """Returns the gradients (dq, dk, dv), each in its input's shape and dtype."""
    delta_BNT = jnp.einsum(
        "BTNH,BTNH->BNT", out_BTNH, dout_BTNH, preferred_element_type=jnp.float32
    )
    sides = [q_BTNH, dout_BTNH], [k_BSKH, v_BSKH]
    vectors = [lse_BNT, delta_BNT]
    (dq_BTNH,) = launch(GRADIENT_Q, *sides, vectors, mask, interpret)
    dk_BSKH, dv_BSKH = launch(GRADIENT_KV, *sides, vectors, mask, interpret)
    return dq_BTNH, dk_BSKH, dv_BSKH
