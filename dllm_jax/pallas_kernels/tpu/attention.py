"""Flash attention under the range-or-group mask, for TPU.

Forward and backward of FlashAttention-2 (arXiv 2307.08691, algorithms 1 and 2), with
tiles of scores held as [keys, queries]: a query's running maximum and sum are then rows,
their reductions run over sublanes, and every product is one that the matrix unit takes
without a transposition. The G query heads of a key head share its tiles and their mask.
A step of the grid is one visit of a tile of queries to one of keys, in the order of
`tiles.walk`, so that a tile with few visits waits for none with many. What it fetches are
many keys; what it computes are those parts of them of which anything is seen. The
backward pass goes through the keys' tiles once, and keeps the gradient of all queries in
fast memory meanwhile: scores are computed once, for five products and not seven.

Letters: t queries of one tile, s keys of it or of a part, p parts of it, i tiles of the side
summed for, j others, v visits of a row.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dllm_jax.pallas_kernels import tiles
from dllm_jax.pallas_kernels.reference import ABOVE_NEVER, NEVER

TILE_T, TILE_S = 256, 1024  # queries, keys
PART = 256  # keys that are computed together
GRADIENT = 2**24  # bytes of the queries' gradient in fast memory: there are two of it
VMEM = 2**26
NN, NT = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ()))


def dot(x, y, dims=NN):
    """Returns a product of tiles, accumulated in f32."""
    # Products of 16-bit numbers are exact, and no compiler takes another precision for them
    # that JAX_DEFAULT_MATMUL_PRECISION may name.
    precision = jax.lax.Precision.DEFAULT if x.dtype.itemsize == 2 else None
    return jax.lax.dot_general(
        x, y, dims, precision=precision, preferred_element_type=jnp.float32
    )


def score(q_Ht, k_sH, sees_st):
    """Returns scores [s, t], f32; `sees` None: all are seen."""
    score_st = dot(k_sH, q_Ht)
    return score_st if sees_st is None else jnp.where(sees_st, score_st, NEVER)


def at(step_ref, bit: int):
    """Returns a decorator: its function runs at those steps of the grid that have a bit."""
    return pl.when(step_ref[pl.program_id(0), pl.program_id(2)] & bit != 0)


def visited(body, step_ref, q_mask_ref, k_mask_ref):
    """Runs body(keys, sees_st) for what this step of the grid visits; None: all are seen.

    keys: a slice of the tile, one part of it.
    """
    step = step_ref[pl.program_id(0), pl.program_id(2)]

    @pl.loop(0, k_mask_ref.shape[1] // PART)
    def _(n):
        kind = (step >> (tiles.KIND_BIT + 2 * n)) & 3
        keys = pl.ds(pl.multiple_of(n * PART, PART), PART)

        @pl.when(kind == 2)
        def _():
            body(keys, None)

        @pl.when(kind == 1)
        def _():
            begin_1t, end_1t, group_1t = (q_mask_ref[0, x : x + 1] for x in range(3))
            pos_s1, group_s1 = k_mask_ref[0, keys, 0:1], k_mask_ref[0, keys, 1:2]
            sees_st = (pos_s1 >= begin_1t) & (pos_s1 < end_1t)
            body(keys, sees_st | (group_s1 == group_1t))


def forward_kernel(
    step_ref,
    q_ref,
    k_ref,
    v_ref,
    q_mask_ref,
    k_mask_ref,
    out_ref,
    lse_ref,
    max_ref,
    sum_ref,
    acc_ref,
):
    """Sums a tile of queries' softmax over the tiles of keys that it visits."""

    @at(step_ref, tiles.BEGINS)
    def _():
        max_ref[...] = jnp.full_like(max_ref, ABOVE_NEVER)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def body(keys, sees_st):
        for g in range(q_ref.shape[2]):
            row = slice(g, g + 1)
            score_st = score(q_ref[0, 0, g], k_ref[0, 0, keys], sees_st)
            max_1t = jnp.maximum(max_ref[row], score_st.max(axis=0, keepdims=True))
            prob_st = jnp.exp(score_st - max_1t)
            fade_1t = jnp.exp(max_ref[row] - max_1t)
            max_ref[row] = max_1t
            sum_ref[row] = sum_ref[row] * fade_1t + prob_st.sum(axis=0, keepdims=True)
            v_Hs = v_ref[0, 0, :, keys]
            acc_ref[g] = acc_ref[g] * fade_1t + dot(v_Hs, prob_st.astype(v_Hs.dtype))

    visited(body, step_ref, q_mask_ref, k_mask_ref)

    @at(step_ref, tiles.ENDS)
    def _():
        sum_Gt = sum_ref[...]
        # A query that sees nothing: zero, and -NEVER keeps its gradient zero.
        lse_ref[0, 0] = jnp.where(sum_Gt > 0, max_ref[...] + jnp.log(sum_Gt), -NEVER)
        share_Gt = 1 / jnp.where(sum_Gt > 0, sum_Gt, 1)
        for g in range(q_ref.shape[2]):
            out_ref[0, 0, g] = (acc_ref[g] * share_Gt[g : g + 1]).astype(out_ref.dtype)


def backward_kernel(
    step_ref,
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    lse_ref,
    delta_ref,
    q_mask_ref,
    k_mask_ref,
    k_Hs_ref,
    dq_ref,
    dk_ref,
    dv_ref,
    acc_ref,
):
    """Sums a tile of keys' gradients over the tiles of queries, and all queries' own."""
    _, j = tiles.place(step_ref[pl.program_id(0), pl.program_id(2)])
    t = q_ref.shape[4]
    here = pl.ds(pl.multiple_of(j * t, t), t)

    @pl.when(pl.program_id(2) == 0)
    def _():
        @pl.loop(0, acc_ref.shape[0])
        def _(g):
            acc_ref[g] = jnp.zeros(acc_ref.shape[1:], acc_ref.dtype)

    @at(step_ref, tiles.BEGINS)
    def _():
        dk_ref[...] = jnp.zeros_like(dk_ref)
        dv_ref[...] = jnp.zeros_like(dv_ref)

    def body(keys, sees_st):
        for g in range(q_ref.shape[2]):
            q_Ht, dout_Ht = q_ref[0, 0, g], dout_ref[0, 0, g]
            score_st = score(q_Ht, k_ref[0, 0, keys], sees_st)
            prob_st = jnp.exp(score_st - lse_ref[0, 0, g : g + 1])
            dprob_st = dot(v_ref[0, 0, keys], dout_Ht)
            dscore_st = prob_st * (dprob_st - delta_ref[0, 0, g : g + 1])
            dscore_st = dscore_st.astype(q_Ht.dtype)
            dv_ref[0, 0, :, keys] += dot(dout_Ht, prob_st.astype(q_Ht.dtype), NT)
            dk_ref[0, 0, :, keys] += dot(q_Ht, dscore_st, NT)
            acc_ref[g, :, here] += dot(k_Hs_ref[0, 0, :, keys], dscore_st)

    visited(body, step_ref, q_mask_ref, k_mask_ref)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        @pl.loop(0, acc_ref.shape[0])
        def _(g):
            dq_ref[0, 0, g] = acc_ref[g].astype(dq_ref.dtype)


def launch(kernel, inputs, outputs, scratch, schedule, tile, interpret):
    """Runs a kernel over (row, key head, visit of a tile of one side to one of the other).

    inputs: (dimension letters, array) pairs; outputs: (letters, dtype) pairs, of which "Q" is
    T, whole; scratch: letters. schedule: of `plan`, for this side. tile: how much of a
    letter is a tile, the letter whose tiles are visited being last.
    """
    major, minor = tile
    step_Bv, count_B = schedule
    extent = {}
    for dims, x in inputs:
        extent |= dict(zip(dims, x.shape, strict=True))
    extent["Q"] = extent["T"]

    def spec(dims):
        def index_map(b, k, n, step_ref):
            i, j = tiles.place(step_ref[b, n])
            index = {"B": b, "K": k, major: i, minor: j}
            return tuple(index.get(letter, 0) for letter in dims)

        share = extent | {"B": 1, "K": 1} | tile
        return pl.BlockSpec([share[letter] for letter in dims], index_map)

    def output(dims, dtype):
        return jax.ShapeDtypeStruct([extent[letter] for letter in dims], dtype)

    def buffer(dims):
        shape = [tile.get(letter, extent[letter]) for letter in dims]
        return pltpu.VMEM(shape, jnp.float32)

    return pl.pallas_call(
        kernel,
        out_shape=[output(*of_one) for of_one in outputs],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(extent["B"], extent["K"], count_B.max()),
            in_specs=[spec(dims) for dims, _ in inputs],
            out_specs=[spec(dims) for dims, _ in outputs],
            scratch_shapes=[buffer(dims) for dims in scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM,
        ),
        interpret=interpret,
        name=kernel.__name__,
    )(step_Bv, *(x for _, x in inputs))


def tile_sizes(mask) -> tuple[int, int]:
    """Returns how many queries and how many keys a tile has."""
    T, S = mask.q_end_BT.shape[1], mask.k_pos_BS.shape[1]
    return tiles.fit(TILE_T, T), tiles.fit(TILE_S, S, PART)


def shares(G: int, H: int, T: int, t: int) -> list[slice]:
    """Returns the queries in shares whose gradients have room in fast memory, whole tiles."""
    size = max(GRADIENT // (4 * G * H * t), 1) * t
    return [slice(first, first + size) for first in range(0, T, size)]


def of_share(dims: str, x, share: slice):
    """Returns an array's part that is of a share's queries, or of all of them."""
    return x[(*[slice(None)] * dims.index("T"), share)] if "T" in dims else x


def plan(mask, G: int, H: int):
    """Returns `tiles.walk` of the tiles of queries, and for each of `shares` of the keys'.

    A tile's kind has two bits for each of its parts: `tiles.kinds` of that.
    """
    t, s = tile_sizes(mask)
    q_arrays, k_arrays = tiles.mask_arrays(mask, t, s)
    kinds_Bip = tiles.kinds(q_arrays, k_arrays, t, PART)
    kinds_Bijp = kinds_Bip.reshape(*kinds_Bip.shape[:2], -1, s // PART)
    kinds_Bij = kinds_Bijp @ 4 ** jnp.arange(s // PART)
    return tiles.walk(kinds_Bij), [
        tiles.walk(kinds_Bij[:, share.start // t : share.stop // t].swapaxes(1, 2))
        for share in shares(G, H, q_arrays[0].shape[1], t)
    ]


def arranged(q_BTNH, k_BSKH, v_BSKH, mask):
    """Returns what the kernels read, padded to whole tiles of T and of S.

    (scaled q_BKGHT, k_BKSH, v_BKSH, the mask's two arrays as inputs of `launch`, the
    schedules of `plan`, the tile of T and S by letter).
    """
    H, K = q_BTNH.shape[3], k_BSKH.shape[2]
    t, s = tile_sizes(mask)
    k_BSKH, v_BSKH = (tiles.pad(x_BSKH, 1, s) for x_BSKH in (k_BSKH, v_BSKH))
    q_mask, k_mask = tiles.mask_arrays(mask, t, s)
    return (
        queries(q_BTNH * H**-0.5, K, t),
        jnp.moveaxis(k_BSKH, 1, 2),
        jnp.moveaxis(v_BSKH, 1, 2),
        [("B3T", jnp.stack(q_mask, axis=1)), ("BS2", jnp.stack(k_mask, axis=2))],
        mask.tiles or plan(mask, q_BTNH.shape[2] // K, H),
        {"T": t, "S": s},
    )


def queries(x_BTNH, K: int, t: int):
    """Returns [B, K, G, H, T], T padded to whole tiles of t."""
    B, T, N, H = x_BTNH.shape
    x_BTKGH = tiles.pad(x_BTNH.reshape(B, T, K, N // K, H), 1, t)
    return jnp.transpose(x_BTKGH, (0, 2, 3, 4, 1))


def positions(x_BKGHT, T: int):
    """Returns [B, T, N, H]: undoes `queries`."""
    B, K, G, H, _ = x_BKGHT.shape
    return jnp.transpose(x_BKGHT[..., :T], (0, 4, 1, 2, 3)).reshape(B, T, K * G, H)


def forward(q_BTNH, k_BSKH, v_BSKH, mask, *, interpret=False):
    """Returns (attention [B, T, N, H], the log of each query's sum [B, N, T], f32)."""
    q_BKGHT, k_BKSH, v_BKSH, masks, schedules, tile = arranged(
        q_BTNH, k_BSKH, v_BSKH, mask
    )
    out_BKGHT, lse_BKGT = launch(
        forward_kernel,
        [("BKGHT", q_BKGHT), ("BKSH", k_BKSH), ("BKHS", v_BKSH.swapaxes(2, 3)), *masks],
        outputs=[("BKGHT", q_BTNH.dtype), ("BKGT", jnp.float32)],
        scratch=["GT", "GT", "GHT"],
        schedule=schedules[0],
        tile=tile,
        interpret=interpret,
    )
    B, T, N, _ = q_BTNH.shape
    return positions(out_BKGHT, T), lse_BKGT.reshape(B, N, -1)[..., :T]


def backward(
    q_BTNH, k_BSKH, v_BSKH, mask, out_BTNH, lse_BNT, dout_BTNH, *, interpret=False
):
    """Returns the gradients (dq, dk, dv), each in its input's shape and dtype."""
    q_BKGHT, k_BKSH, v_BKSH, masks, schedules, tile = arranged(
        q_BTNH, k_BSKH, v_BSKH, mask
    )
    dout_BKGHT, out_BKGHT = (
        queries(x_BTNH, k_BSKH.shape[2], tile["T"]) for x_BTNH in (dout_BTNH, out_BTNH)
    )
    delta_BKGT = jnp.sum(dout_BKGHT.astype(jnp.float32) * out_BKGHT, axis=3)
    lse_BNT = tiles.pad(lse_BNT, 2, tile["T"])
    inputs = [
        ("BKGHT", q_BKGHT),
        ("BKSH", k_BKSH),
        ("BKSH", v_BKSH),
        ("BKGHT", dout_BKGHT),
        ("BKGT", lse_BNT.reshape(delta_BKGT.shape)),
        ("BKGT", delta_BKGT),
        *masks,
        ("BKHS", k_BKSH.swapaxes(2, 3)),
    ]

    of_keys = "BKHS", jnp.float32  # summed over the shares
    gradients = [
        launch(
            backward_kernel,
            [(dims, of_share(dims, x, share)) for dims, x in inputs],
            outputs=[("BKGHQ", q_BTNH.dtype), of_keys, of_keys],
            scratch=["GHQ"],
            schedule=schedule,
            tile=dict(reversed(tile.items())),
            interpret=interpret,
        )
        for share, schedule in zip(shares(*q_BKGHT.shape[2:], tile["T"]), schedules[1])
    ]
    dq_BKGHT, *dkv = zip(*gradients, strict=True)
    H, S = k_BKSH.shape[3], k_BSKH.shape[1]
    dq_BTNH = positions(jnp.concatenate(dq_BKGHT, axis=4), q_BTNH.shape[1]) * H**-0.5
    dk_BSKH, dv_BSKH = (jnp.moveaxis(sum(x)[..., :S], 3, 1) for x in dkv)
    return tuple(x.astype(q_BTNH.dtype) for x in (dq_BTNH, dk_BSKH, dv_BSKH))
