"""The head and what is asked of it, in tiles of the vocabulary, for TPU.

Logits x @ head exist a tile at a time, [r, v]; running maxima and sums make of them the
softmax's statistics, as in flash attention. The gradient computes the tiles again (as in
"Cut your losses", arXiv 2411.09009). A head that is split over devices is given with
`offset`, the id of its first column, and the callers join what the parts say.

Letters: r rows of one tile, v columns of it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dllm_jax.pallas_kernels import noise, tiles
from dllm_jax.pallas_kernels.reference import BELOW_NEVER, NEVER
from dllm_jax.pallas_kernels.tpu.attention import NT, dot

TILE_R, TILE_V = 512, 512  # at most, see `tile_sizes`
VMEM = 64 * 2**20  # bytes that a kernel may use; the default, 16 MiB, is half a tile
ROOM = VMEM - 8 * 2**20  # bytes of what is D long; the rest is for tiles of logits


def column(ref, n: int):
    """Returns column n of [r, columns] as [r, 1]."""
    return ref[:, n : n + 1]


def logits(offset_ref, x_ref, head_ref, tile, *, V: int, forbidden: int):
    """Returns (logits [r, v] f32, their tokens' ids or -1, which of them count).

    tile: which of the part's V columns; beyond the last and at `forbidden` none counts.
    """
    score_rv = dot(x_ref[...], head_ref[...])
    at_rv = jax.lax.broadcasted_iota(jnp.int32, score_rv.shape, 1)
    at_rv += tile * score_rv.shape[1]
    id_rv = jnp.where(at_rv < V, at_rv + offset_ref[0], -1)
    counts_rv = (id_rv >= 0) & (id_rv != forbidden)
    return jnp.where(counts_rv, score_rv, NEVER), id_rv, counts_rv


def softmax_update(score_rv, stats_ref, at: int):
    """Adds a tile to running (maximum, sum, sum of p · score): columns `at` and on."""
    old_r1 = column(stats_ref, at)
    max_r1 = jnp.maximum(old_r1, score_rv.max(axis=1, keepdims=True))
    prob_rv, fade_r1 = jnp.exp(score_rv - max_r1), jnp.exp(old_r1 - max_r1)
    stats_ref[:, at : at + 1] = max_r1
    for n, term_rv in ((1, prob_rv), (2, prob_rv * score_rv)):
        total_r1 = column(stats_ref, at + n) * fade_r1
        total_r1 += term_rv.sum(axis=1, keepdims=True)
        stats_ref[:, at + n : at + n + 1] = total_r1


def softmax_result(stats_ref, at: int):
    """Returns (log of the sum of exponentials, mean score), each [r, 1]."""
    max_r1, sum_r1, moment_r1 = (column(stats_ref, at + n) for n in range(3))
    return max_r1 + jnp.log(sum_r1), moment_r1 / sum_r1


def clear(stats_ref, *maxima):
    """Sets running sums to zero and the columns `maxima` to the lowest value."""
    at = jax.lax.broadcasted_iota(jnp.int32, stats_ref.shape, 1)
    is_max = functools.reduce(jnp.logical_or, [at == n for n in maxima])
    stats_ref[...] = jnp.where(is_max, BELOW_NEVER, 0.0)


def pick_kernel(
    offset_ref,
    x_ref,
    head_ref,
    token_ref,
    out_ref,
    stats_ref,
    *,
    V: int,
    forbidden: int,
):
    """Writes `pick`'s three columns; stats: softmax's three and the token's logit."""
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        clear(stats_ref, 0)

    score_rv, id_rv, _ = logits(
        offset_ref, x_ref, head_ref, j, V=V, forbidden=forbidden
    )
    softmax_update(score_rv, stats_ref, 0)
    token_score_rv = jnp.where(id_rv == token_ref[...], score_rv, 0.0)
    stats_ref[:, 3:4] += token_score_rv.sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        out_ref[:, 0:1], out_ref[:, 1:2] = softmax_result(stats_ref, 0)
        out_ref[:, 2:3] = column(stats_ref, 3)


def behind_kernel(
    offset_ref,
    x_ref,
    head_ref,
    limit_ref,
    out_ref,
    stats_ref,
    *,
    V: int,
    forbidden: int,
):
    """Writes `behind`'s two columns; stats: maximum and sum behind, and how many are not."""
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        clear(stats_ref, 0)

    score_rv, _, counts_rv = logits(
        offset_ref, x_ref, head_ref, j, V=V, forbidden=forbidden
    )
    behind_rv = counts_rv & (score_rv <= limit_ref[...])
    score_rv = jnp.where(behind_rv, score_rv, BELOW_NEVER)
    old_r1 = column(stats_ref, 0)
    max_r1 = jnp.maximum(old_r1, score_rv.max(axis=1, keepdims=True))
    prob_rv = jnp.where(behind_rv, jnp.exp(score_rv - max_r1), 0.0)
    faded_r1 = column(stats_ref, 1) * jnp.exp(old_r1 - max_r1)
    ahead_rv = (counts_rv & ~behind_rv).astype(jnp.float32)
    stats_ref[:, 0:1] = max_r1
    stats_ref[:, 1:2] = faded_r1 + prob_rv.sum(axis=1, keepdims=True)
    stats_ref[:, 2:3] += ahead_rv.sum(axis=1, keepdims=True)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        max_r1, sum_r1 = column(stats_ref, 0), column(stats_ref, 1)
        lse_r1 = max_r1 + jnp.log(jnp.where(sum_r1 > 0, sum_r1, 1.0))
        out_ref[:, 0:1], out_ref[:, 1:2] = lse_r1, column(stats_ref, 2)


def draw_kernel(
    offset_ref,
    x_ref,
    head_ref,
    words_ref,
    scale_ref,
    out_ref,
    id_ref,
    stats_ref,
    *,
    V: int,
    forbidden: int,
    width: int,
):
    """Writes the drawn id and `draw`'s five other columns.

    stats: the softmax's three columns at temperature 1 and at the row's own, then the best
    noisy score and its logit.
    """
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        clear(stats_ref, 0, 3, 6)
        id_ref[...] = jnp.zeros_like(id_ref)

    score_rv, id_rv, counts_rv = logits(
        offset_ref, x_ref, head_ref, j, V=V, forbidden=forbidden
    )
    tempered_rv = jnp.where(counts_rv, score_rv * scale_ref[:, 0:1], NEVER)
    softmax_update(score_rv, stats_ref, 0)
    softmax_update(tempered_rv, stats_ref, 3)

    first, second, slot = (column(words_ref, n) for n in range(3))
    noise_rv = noise.gumbel(first, second, slot * width + id_rv)
    noisy_rv = tempered_rv + jnp.where(scale_ref[:, 1:2] > 0, noise_rv, 0.0)
    best_r1 = noisy_rv.max(axis=1, keepdims=True)
    token_r1 = jnp.where(noisy_rv == best_r1, id_rv, tiles.NOWHERE)
    token_r1 = token_r1.min(axis=1, keepdims=True)
    score_r1 = jnp.where(id_rv == token_r1, score_rv, 0.0).sum(axis=1, keepdims=True)
    better_r1 = best_r1 > column(stats_ref, 6)
    stats_ref[:, 6:7] = jnp.where(better_r1, best_r1, column(stats_ref, 6))
    stats_ref[:, 7:8] = jnp.where(better_r1, score_r1, column(stats_ref, 7))
    id_ref[...] = jnp.where(better_r1, token_r1, id_ref[...])

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        out_ref[:, 0:1], _ = softmax_result(stats_ref, 0)
        out_ref[:, 1:2], out_ref[:, 2:3] = softmax_result(stats_ref, 3)
        out_ref[:, 3:5] = stats_ref[:, 6:8]


def logit_gradient(
    offset_ref, x_ref, head_ref, token_ref, saved_ref, tile, *, V: int, forbidden: int
):
    """Returns the gradient of a tile of logits, [r, v] f32.

    Of the log-prob: 1(token) - p. Of the entropy: -p (score - mean score). Of the log of
    what lies behind a limit: p / its sum there, - p.
    saved: (log of the sum, mean score, dlogp, dentropy) of each row, and where a limit is
    (limit, log of the sum behind it).
    """
    score_rv, id_rv, counts_rv = logits(
        offset_ref, x_ref, head_ref, tile, V=V, forbidden=forbidden
    )
    lse_r1, mean_r1, dlogp_r1, dentropy_r1 = (column(saved_ref, n) for n in range(4))
    prob_rv = jnp.exp(score_rv - lse_r1)
    is_token_rv = (id_rv == token_ref[...]).astype(jnp.float32)
    grad_rv = dlogp_r1 * (is_token_rv - prob_rv)
    grad_rv -= dentropy_r1 * prob_rv * (score_rv - mean_r1)
    if saved_ref.shape[1] > 4:
        limit_r1, behind_r1 = column(saved_ref, 4), column(saved_ref, 5)
        behind_rv = jnp.where(score_rv <= limit_r1, score_rv - behind_r1, BELOW_NEVER)
        grad_rv += dlogp_r1 * jnp.exp(behind_rv)
    return jnp.where(counts_rv, grad_rv, 0.0)


def dx_kernel(
    offset_ref,
    x_ref,
    head_ref,
    token_ref,
    saved_ref,
    dx_ref,
    acc_ref,
    *,
    V: int,
    forbidden: int,
):
    """Sums the gradient of a tile of rows over the tiles of the vocabulary."""
    j = pl.program_id(1)

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    grad_rv = logit_gradient(
        offset_ref, x_ref, head_ref, token_ref, saved_ref, j, V=V, forbidden=forbidden
    )
    head_Dv = head_ref[...]
    if V % head_Dv.shape[1]:  # beyond the last column lies anything, even NaN
        at_Dv = jax.lax.broadcasted_iota(jnp.int32, head_Dv.shape, 1)
        head_Dv = jnp.where(at_Dv < V - j * head_Dv.shape[1], head_Dv, 0)
    acc_ref[...] += dot(grad_rv.astype(head_Dv.dtype), head_Dv, NT)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        dx_ref[...] = acc_ref[...].astype(dx_ref.dtype)


def dhead_kernel(
    offset_ref,
    x_ref,
    x_Dr_ref,
    head_ref,
    token_ref,
    saved_ref,
    dhead_ref,
    acc_ref,
    *,
    V: int,
    forbidden: int,
):
    """Sums the gradient of a tile of the vocabulary over the tiles of rows."""
    i = pl.program_id(1)

    @pl.when(i == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    grad_rv = logit_gradient(
        offset_ref,
        x_ref,
        head_ref,
        token_ref,
        saved_ref,
        pl.program_id(0),
        V=V,
        forbidden=forbidden,
    )
    acc_ref[...] += dot(x_Dr_ref[...], grad_rv.astype(x_Dr_ref.dtype))

    @pl.when(i == pl.num_programs(1) - 1)
    def _():
        dhead_ref[...] = acc_ref[...].astype(dhead_ref.dtype)


def shape(dims: str, size: dict[str, int]) -> list[int]:
    """Returns the shape of letters whose sizes are given; a digit is its own size."""
    return [int(n) if n.isdigit() else size[n] for n in dims]


def tile_sizes(R: int, D: int, V: int, itemsize: int) -> tuple[int, int]:
    """Returns how many rows and how many columns a tile has.

    Fewer of a wide model, or of float32, so that the largest kernel has room, that of the
    head's gradient: twice x, its transpose, the head and its gradient, and a sum in f32.
    An exact product of float32 has its factors in three parts of bfloat16, too.
    """
    most_r, most_v = TILE_R, TILE_V
    bytes_of_both = 4 * itemsize + (6 if itemsize == 4 else 0)
    while True:
        r, v = tiles.fit(most_r, R, 16), tiles.fit(most_v, V)
        needed = D * (bytes_of_both * (r + v) + 4 * v)
        if needed <= ROOM or max(most_r, most_v) <= 128:
            return r, v
        if most_r >= most_v:
            most_r //= 2
        else:
            most_v //= 2


def launch(
    name: str,
    kernel,
    offset,
    inputs,
    outputs,
    scratch,
    *,
    major: str,
    forbidden: int,
    interpret,
):
    """Runs a kernel over tiles of R and V, the sums running over the one not `major`.

    inputs: (dimension letters, array) pairs, a digit being a number of columns; outputs:
    (letters, dtype); scratch: shapes in letters.
    """
    extent = {}
    for dims, x in inputs:
        extent |= dict(zip(dims, x.shape, strict=True))
    itemsize = inputs[0][1].dtype.itemsize
    r, v = tile_sizes(*(extent[n] for n in "RDV"), itemsize)
    tile = {"R": r, "V": v}
    share = extent | tile
    minor = "RV".replace(major, "")

    def spec(dims):
        def index_map(i, j, offset_ref):
            return tuple({major: i, minor: j}.get(letter, 0) for letter in dims)

        return pl.BlockSpec(shape(dims, share), index_map)

    return pl.pallas_call(
        functools.partial(kernel, V=extent["V"], forbidden=forbidden),
        out_shape=[
            jax.ShapeDtypeStruct(shape(dims, extent), dtype) for dims, dtype in outputs
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=tuple(pl.cdiv(extent[n], tile[n]) for n in (major, minor)),
            in_specs=[spec(dims) for dims, _ in inputs],
            out_specs=[spec(dims) for dims, _ in outputs],
            scratch_shapes=[
                pltpu.VMEM(shape(dims, share), jnp.float32) for dims in scratch
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        interpret=interpret,
        name=name,
    )(jnp.asarray(offset, jnp.int32)[None], *(x for _, x in inputs))


def filled(head_DV, x_RD, *arrays):
    """Returns x and other arrays [R, columns] with rows added, of zeros, to a whole tile."""
    r, _ = tile_sizes(*x_RD.shape, head_DV.shape[1], x_RD.dtype.itemsize)
    return [tiles.pad(x, 0, r) for x in (x_RD, *arrays)]


def pick(x_RD, head_DV, token_R, offset, *, forbidden: int, interpret=False):
    """Returns (log of the sum of exponentials, mean logit, logit of `token`), [R] f32.

    The last is zero where this part of the head does not hold the token.
    """
    R = len(x_RD)
    x_RD, token_R1 = filled(head_DV, x_RD, token_R[:, None])
    (out_R3,) = launch(
        "pick_kernel",
        pick_kernel,
        offset,
        [("RD", x_RD), ("DV", head_DV), ("R1", token_R1)],
        outputs=[("R3", jnp.float32)],
        scratch=["R4"],
        major="R",
        forbidden=forbidden,
        interpret=interpret,
    )
    return tuple(out_R3[:R].T)


def behind(x_RD, head_DV, limit_R, offset, *, forbidden: int, interpret=False):
    """Returns (log of the sum of exponentials behind the limit, tokens before it), [R]."""
    R = len(x_RD)
    x_RD, limit_R1 = filled(head_DV, x_RD, limit_R[:, None])
    (out_R2,) = launch(
        "behind_kernel",
        behind_kernel,
        offset,
        [("RD", x_RD), ("DV", head_DV), ("R1", limit_R1)],
        outputs=[("R2", jnp.float32)],
        scratch=["R3"],
        major="R",
        forbidden=forbidden,
        interpret=interpret,
    )
    return tuple(out_R2[:R].T)


def pick_gradient(
    x_RD, head_DV, token_R, offset, saved, *, forbidden: int, interpret=False
):
    """Returns (dx, dhead) of this part of the head; saved: see `logit_gradient`."""
    R = len(x_RD)
    columns = f"R{len(saved)}"
    x_RD, token_R1, saved = filled(
        head_DV, x_RD, token_R[:, None], jnp.stack(saved, axis=1)
    )
    run = functools.partial(launch, forbidden=forbidden, interpret=interpret)
    of_logits = [("DV", head_DV), ("R1", token_R1), (columns, saved)]
    (dx_RD,) = run(
        "dx_kernel",
        dx_kernel,
        offset,
        [("RD", x_RD), *of_logits],
        outputs=[("RD", x_RD.dtype)],
        scratch=["RD"],
        major="R",
    )
    (dhead_DV,) = run(
        "dhead_kernel",
        dhead_kernel,
        offset,
        [("RD", x_RD), ("DR", x_RD.T), *of_logits],
        outputs=[("DV", head_DV.dtype)],
        scratch=["DV"],
        major="V",
    )
    return dx_RD[:R], dhead_DV


def draw(
    x_RD,
    head_DV,
    words_R3,
    temperature_R,
    offset,
    *,
    wanted_R,
    width: int,
    forbidden: int,
    interpret=False,
):
    """Returns (token, its noisy score, its logit, lse, tempered lse, tempered mean), [R].

    words: the key's two and the row's place in its draw, whose rows are `width` wide.
    """
    del wanted_R  # the head is read once, for however many
    R = len(x_RD)
    greedy_R = temperature_R == 0
    scale_R2 = jnp.stack([1 / jnp.where(greedy_R, 1, temperature_R), ~greedy_R], axis=1)
    x_RD, words_R3, scale_R2 = filled(head_DV, x_RD, words_R3, scale_R2)
    out_R5, token_R1 = launch(
        "draw_kernel",
        functools.partial(draw_kernel, width=width),
        offset,
        [("RD", x_RD), ("DV", head_DV), ("R3", words_R3), ("R2", scale_R2)],
        outputs=[("R5", jnp.float32), ("R1", jnp.int32)],
        scratch=["R8"],
        major="R",
        forbidden=forbidden,
        interpret=interpret,
    )
    lse_R, tempered_lse_R, mean_R, noisy_R, logit_R = out_R5[:R].T
    return token_R1[:R, 0], noisy_R, logit_R, lse_R, tempered_lse_R, mean_R
