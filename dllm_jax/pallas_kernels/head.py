"""The head and what is asked of it: a token's log-prob and entropy, a draw, or what of a
draw was done.

A part of the vocabulary, on each device along the mesh's axis `model`, gives the softmax's
statistics over its own columns, and `join` makes of them those of all. With z the logits
and p = softmax(z), a part's are lse = log sum exp z and mean = sum p z; then

    log-prob of a token = z_token - lse,    entropy = lse - mean,

and of the tokens behind a border, all whose logit is at most a limit, the log of their
probability is their own lse less that of all. The limit is known once lse is: a second walk
over the vocabulary.

Letters: u positions of one tile.
"""

import functools
import math

import jax
import jax.numpy as jnp

from dllm_jax import sharding
from dllm_jax.pallas_kernels import noise, reference
from dllm_jax.pallas_kernels.choice import kernel
from dllm_jax.pallas_kernels.cpu_products import Tiled
from dllm_jax.pallas_kernels.reference import BELOW_NEVER, NEVER, Rule

HEAD_TILE = 512  # positions of a row whose logits are alive at once, at most
# Where a row has more than these, a tile is a quarter of it: one of which no token is asked
# is skipped. On CPU a third of 448 took 0.6 times as long, all of them 1.1 times.
FEW = 128
# Of so many rows and more there is a second program, for 5/8 of them: as many as packed rows
# ask tokens of with 2.2 steps a block and no prompts. It takes 13 of 80 s of a TPU's compiler.
MANY, FEWER = 1024, 5 / 8


# ---- The log-prob of a token ---------------------------------------------------------


def token_logprob(
    x_BUD, head_DV, token_BU, *, forbidden: int, implementation="auto", interpret=False
):
    """Returns (log-prob of `token`, entropy), each [B, U], nats, f32.

    No more than a tile of logits is alive, forward and backward: [B, tile, V] of the
    specification, which walks over U, and less in a kernel, which also walks over V. The
    column `forbidden` (the mask id) has probability zero. A token below 0 is not asked for:
    what is returned for it means nothing. Differentiable in x and head;
    split over rows and the vocabulary of the mesh.
    """
    module = kernel("token_logprob", implementation)
    if module is None:
        specified = functools.partial(reference.token_logprob, forbidden=forbidden)
        return tiled(specified, 2, x_BUD, head_DV, token_BU)
    return fused_logprob(module, forbidden, interpret, x_BUD, head_DV, token_BU)


def tiled(specified, count: int, x_BUD, head_DV, token_BU, *seats):
    """Returns a specification's answer, `count` arrays [B, U], a tile of U at a time.

    specified: of (x_RD, head_DV, token_R, *seats of R); seats: further arrays [B, U].
    """
    B, U, D = x_BUD.shape
    tile = min(HEAD_TILE, max(-(-U // 4), min(FEW, U)))
    pad = (0, 0), (0, -U % tile)
    x_BUD = jnp.pad(x_BUD, (*pad, (0, 0)))
    token_BU = jnp.pad(token_BU, pad, constant_values=-1)
    seats = [jnp.pad(y_BU, pad) for y_BU in seats]

    @jax.checkpoint  # so that the gradient computes a tile's logits again
    def answer_of_tile(_, tile_inputs):
        x_BuD, token_Bu, *seats = tile_inputs

        def compute(x_BuD, head_DV):
            rows = [y_Bu.reshape(-1) for y_Bu in (jnp.maximum(token_Bu, 0), *seats)]
            out = specified(x_BuD.reshape(-1, D), head_DV, *rows)
            return tuple(y_R.reshape(B, -1) for y_R in out)

        def skip(x_BuD, head_DV):
            return (jnp.zeros(token_Bu.shape, jnp.float32),) * count

        if tile == U:
            return None, compute(x_BuD, head_DV)
        asked = jnp.any(token_Bu >= 0)
        return None, jax.lax.cond(asked, compute, skip, x_BuD, head_DV)

    def tiles(x):  # [B, U, ...] -> [U / tile, B, tile, ...]: rows stay where they are
        return jnp.moveaxis(x.reshape(B, -1, tile, *x.shape[2:]), 1, 0)

    inputs = [tiles(x) for x in (x_BUD, token_BU, *seats)]
    _, out = jax.lax.scan(answer_of_tile, None, inputs)
    return tuple(jnp.moveaxis(y, 0, 1).reshape(B, -1)[:, :U] for y in out)


def row_counts(R: int) -> list[int]:
    """Returns of how many of R rows there is a program, those of `of_asked`."""
    if R < MANY:
        return [R]
    return [math.ceil(R * FEWER / 128) * 128, R]


def of_asked(compute, asked_R, *rows):
    """Returns compute(*rows), of which only rows that are asked need be right.

    rows: arrays of R rows; compute: of arrays of n rows, those that are asked among them,
    to (arrays of n rows, other arrays). Rows that are left out give 0.
    """
    R = len(asked_R)
    counts, order_R = row_counts(R), jnp.argsort(~asked_R)

    def of_first(n, *rows):
        place_n = order_R[:n]
        of_rows, rest = compute(*(x[place_n] for x in rows))
        zeros = (jnp.zeros((R, *y.shape[1:]), y.dtype) for y in of_rows)
        placed = (z.at[place_n].set(y) for z, y in zip(zeros, of_rows, strict=True))
        return tuple(placed), rest

    programs = [functools.partial(of_first, n) for n in counts[:-1]] + [compute]
    enough = jnp.searchsorted(jnp.asarray(counts), asked_R.sum())
    return jax.lax.switch(enough, programs, *rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def fused_logprob(module, forbidden, interpret, x_BUD, head_DV, token_BU):
    """Returns (log-prob, entropy) as a module of KERNELS computes them, each [B, U]."""
    return fused_forward(module, forbidden, interpret, x_BUD, head_DV, token_BU)[0]


def fused_forward(module, forbidden, interpret, x_BUD, head_DV, token_BU):
    V = head_DV.shape[1]

    def run(x_BUD, head_DV, token_BU):
        axis, offset = vocabulary_part(head_DV, V)

        def pick(x_RD, token_R):
            how = {"forbidden": forbidden, "interpret": interpret}
            return module.pick(x_RD, head_DV, token_R, offset, **how), ()

        token_R = token_BU.reshape(-1)
        x_RD, asked_R = x_BUD.reshape(-1, x_BUD.shape[2]), token_R >= 0
        (lse_R, mean_R, logit_R), _ = of_asked(pick, asked_R, x_RD, token_R)
        lse_R, mean_R = join(lse_R, mean_R, axis)
        logit_R = logit_R if axis is None else jax.lax.psum(logit_R, axis)
        out = logit_R - lse_R, lse_R - mean_R, lse_R, mean_R
        return tuple(jnp.where(asked_R, y, 0).reshape(token_BU.shape) for y in out)

    logp_BU, entropy_BU, lse_BU, mean_BU = sharding.per_device(
        run, ("BUD", "DV", "BU"), ("BU",) * 4, x_BUD, head_DV, token_BU
    )
    return (logp_BU, entropy_BU), (x_BUD, head_DV, token_BU, lse_BU, mean_BU)


def fused_backward(module, forbidden, interpret, saved, gradients):
    x_BUD, head_DV, token_BU, lse_BU, mean_BU = saved
    columns = lse_BU, mean_BU, *gradients
    dx_BUD, dhead_DV = pulled(
        module, forbidden, interpret, x_BUD, head_DV, token_BU >= 0, token_BU, columns
    )
    return dx_BUD, dhead_DV, None  # a token has none


def pulled(module, forbidden, interpret, x_BUD, head_DV, asked_BU, token_BU, columns):
    """Returns (dx_BUD, dhead_DV); columns: see choice.py, `saved`, each [B, U]."""
    B, V = x_BUD.shape[0], head_DV.shape[1]
    lse_BU, mean_BU, *gradients = columns
    # Of what is not asked nothing is learned, and its exponentials are 0 whatever it holds.
    lse_BU = jnp.where(asked_BU, lse_BU, -NEVER)
    gradients = [jnp.where(asked_BU, y_BU, 0) for y_BU in gradients[:2]] + gradients[2:]

    def run(x_BUD, head_DV, asked_BU, *columns):
        axis, offset = vocabulary_part(head_DV, V)

        def gradient(x_RD, token_R, *saved):
            how = {"forbidden": forbidden, "interpret": interpret}
            seats = x_RD, head_DV, token_R, offset, saved
            of_rows, of_head = module.pick_gradient(*seats, **how)
            return (of_rows,), of_head

        columns = [y_BU.reshape(-1) for y_BU in columns]
        x_RD = x_BUD.reshape(-1, x_BUD.shape[2])
        (dx_RD,), dhead_DV = of_asked(gradient, asked_BU.reshape(-1), x_RD, *columns)
        if axis is not None:
            dx_RD = jax.lax.psum(dx_RD, axis)
        if x_BUD.shape[0] < B:
            dhead_DV = jax.lax.psum(dhead_DV, sharding.ACT["B"])
        return dx_RD.reshape(x_BUD.shape), dhead_DV

    of_seats = asked_BU, token_BU, lse_BU, mean_BU, *gradients
    dims_in = ("BUD", "DV", *["BU"] * len(of_seats))
    return sharding.per_device(run, dims_in, ("BUD", "DV"), x_BUD, head_DV, *of_seats)


fused_logprob.defvjp(fused_forward, fused_backward)


# ---- The log-prob of what a sampler did ----------------------------------------------


def selection(
    x_BUD,
    head_DV,
    token_BU,
    border_BU,
    *,
    rule: Rule,
    forbidden: int,
    implementation="auto",
    interpret=False,
):
    """Returns (log-prob of what was done, entropy, tokens ahead), each [B, U], f32.

    See `reference.selection`; a token below 0 is not asked for. Kernels know rules that
    draw from the model's own distribution: with a temperature, filters or a penalty it is
    the specification on every platform. Memory, derivatives and meshes as `token_logprob`.
    """
    module = kernel("selection", implementation) if rule.plain else None
    if module is None:
        specified = functools.partial(
            reference.selection, rule=rule, forbidden=forbidden
        )
        return tiled(specified, 3, x_BUD, head_DV, token_BU, border_BU)
    static = module, rule.log_threshold, forbidden, interpret
    return fused_selection(static, x_BUD, head_DV, token_BU, border_BU)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_selection(static, x_BUD, head_DV, token_BU, border_BU):
    """Returns what `selection` does; static: module, threshold's log, forbidden, interpret."""
    return selection_forward(static, x_BUD, head_DV, token_BU, border_BU)[0]


def selection_forward(static, x_BUD, head_DV, token_BU, border_BU):
    module, log_threshold, forbidden, interpret = static
    (picked_BU, entropy_BU), saved = fused_forward(
        module, forbidden, interpret, x_BUD, head_DV, token_BU
    )
    lse_BU, mean_BU = saved[3:]
    asked_BU, V = token_BU >= 0, head_DV.shape[1]
    taken_BU = jnp.isinf(border_BU) | ~asked_BU
    # What lies behind the border, as logits: of a taken token nothing does.
    limit_BU = lse_BU + jnp.minimum(border_BU, log_threshold)
    limit_BU = jnp.where(taken_BU, BELOW_NEVER, limit_BU)

    def run(x_BUD, head_DV, limit_BU):
        axis, offset = vocabulary_part(head_DV, V)

        def behind(x_RD, limit_R):
            how = {"forbidden": forbidden, "interpret": interpret}
            return module.behind(x_RD, head_DV, limit_R, offset, **how), ()

        limit_R, x_RD = limit_BU.reshape(-1), x_BUD.reshape(-1, x_BUD.shape[2])
        (behind_R, ahead_R), _ = of_asked(behind, limit_R > BELOW_NEVER, x_RD, limit_R)
        behind_R, _ = join(behind_R, behind_R, axis)
        ahead_R = ahead_R if axis is None else jax.lax.psum(ahead_R, axis)
        return behind_R.reshape(limit_BU.shape), ahead_R.reshape(limit_BU.shape)

    behind_BU, ahead_BU = sharding.per_device(
        run, ("BUD", "DV", "BU"), ("BU",) * 2, x_BUD, head_DV, limit_BU
    )
    logp_BU = jnp.where(taken_BU, picked_BU, behind_BU - lse_BU)
    lost_BU = logp_BU < reference.LEAST
    ahead_BU = jnp.where(taken_BU, picked_BU > log_threshold, ahead_BU)
    out = jnp.where(lost_BU, reference.LEAST, logp_BU), entropy_BU, ahead_BU
    token_BU = jnp.where(taken_BU, token_BU, -1)
    seats = asked_BU, token_BU, lse_BU, mean_BU, limit_BU, behind_BU, lost_BU
    return out, (x_BUD, head_DV, *seats)


def selection_backward(static, saved, gradients):
    module, _, forbidden, interpret = static
    *inputs, lse_BU, mean_BU, limit_BU, behind_BU, lost_BU = saved
    dlogp_BU, dentropy_BU, _ = gradients
    dlogp_BU = jnp.where(lost_BU, 0.0, dlogp_BU)
    columns = lse_BU, mean_BU, dlogp_BU, dentropy_BU, limit_BU, behind_BU
    dx_BUD, dhead_DV = pulled(module, forbidden, interpret, *inputs, columns)
    return dx_BUD, dhead_DV, None, None


fused_selection.defvjp(selection_forward, selection_backward)


# ---- The draw of a token -------------------------------------------------------------


def token_draw(
    x_BWD,
    head_DV,
    key_B,
    temperature_B,
    *,
    forbidden: int,
    wanted_BW=None,
    implementation="auto",
    interpret=False,
):
    """Returns (token, its log-prob at temperature 1, its probability, entropy), [B, W].

    See `reference.token_draw`. The head may be Tiled, of a lone device. wanted_BW: where
    anybody reads these; elsewhere they are finite if the logits are. None: everywhere. The
    noise is that of the specification, number for number, on every platform: kernels compute
    the same generator. Top-k and top-p need the sorted vocabulary and are not here: a caller
    that filters takes the logits. Split as `token_logprob` is.
    """
    module = kernel("token_draw", implementation)
    if module is None:
        head_DV = head_DV.matrix() if isinstance(head_DV, Tiled) else head_DV
        return reference.token_draw(x_BWD, head_DV, key_B, temperature_B, forbidden)
    run = functools.partial(
        draw_on_device,
        module=module,
        V=head_DV.shape[1],
        forbidden=forbidden,
        interpret=interpret,
    )
    if wanted_BW is None:
        wanted_BW = jnp.ones(x_BWD.shape[:2], bool)
    inputs = x_BWD, head_DV, noise.words(key_B), temperature_B, wanted_BW
    inputs = jax.tree.map(jnp.asarray, inputs)  # numpy's are not indexed inside a loop
    dims_in = "BWD", "DV", "B2", "B", "BW"
    return sharding.per_device(run, dims_in, ("BW",) * 4, *inputs)


def draw_on_device(
    x_BWD,
    head_DV,
    words_B2,
    temperature_B,
    wanted_BW,
    *,
    module,
    V: int,
    forbidden: int,
    interpret,
):
    """Returns `token_draw` of a device's rows, joined with the vocabulary's other parts.

    head_DV: the device's part, of `V` columns in all; words_B2: the words of each key.
    """
    B, W, _ = x_BWD.shape
    axis, offset = vocabulary_part(head_DV, V)
    arrays = x_BWD, head_DV, words_B2, temperature_B, wanted_BW, offset
    how = {"module": module, "V": V, "forbidden": forbidden, "interpret": interpret}
    drawn = draw_of_part(*arrays, **how)
    token_R, noisy_R, logit_R, lse_R, tempered_lse_R, tempered_mean_R = drawn
    lse_R, _ = join(lse_R, tempered_mean_R, axis)
    tempered_lse_R, tempered_mean_R = join(tempered_lse_R, tempered_mean_R, axis)
    if axis is not None:
        token_R, logit_R = best(token_R, noisy_R, logit_R, axis, V)
    scale_R = jnp.where(temperature_B == 0, 1, temperature_B).repeat(W)
    # Of large numbers, such as logits by a small temperature, both differences are rounded; the
    # barrier is there because XLA would not round the quotient as where its sum was made.
    tempered_R = jax.lax.optimization_barrier(logit_R / scale_R)
    conf_R = jnp.minimum(jnp.exp(tempered_R - tempered_lse_R), 1)
    entropy_R = jnp.maximum(tempered_lse_R - tempered_mean_R, 0)
    out = token_R, logit_R - lse_R, conf_R, entropy_R
    return tuple(y_R.reshape(B, W) for y_R in out)


def draw_of_part(
    x_BWD,
    head_DV,
    words_B2,
    temperature_B,
    wanted_BW,
    offset,
    *,
    module,
    V: int,
    forbidden: int,
    interpret,
):
    """Returns what a module draws of the ids from `offset` on, [B * W] each: see choice.py."""
    B, W, D = x_BWD.shape
    slot_BW = jnp.broadcast_to(jnp.arange(W)[None], (B, W))
    return module.draw(
        x_BWD.reshape(-1, D),
        head_DV,
        jnp.column_stack([words_B2.repeat(W, axis=0), slot_BW.reshape(-1)]),
        temperature_B.repeat(W),
        offset,
        wanted_R=wanted_BW.reshape(-1),
        width=V,
        forbidden=forbidden,
        interpret=interpret,
    )


# ---- The parts of the vocabulary -----------------------------------------------------


def vocabulary_part(head_DV, V: int):
    """Returns (mesh axis that splits the vocabulary or None, first id of this part)."""
    if head_DV.shape[1] == V:
        return None, 0
    return "model", jax.lax.axis_index("model") * head_DV.shape[1]


def join(lse_R, mean_R, axis):
    """Returns (log of the sum, mean) over all parts of the vocabulary."""
    if axis is None:
        return lse_R, mean_R
    top_R = jax.lax.pmax(lse_R, axis)
    weight_R = jnp.exp(lse_R - top_R)
    total_R = jax.lax.psum(weight_R, axis)
    return top_R + jnp.log(total_R), jax.lax.psum(weight_R * mean_R, axis) / total_R


def best(token_R, noisy_R, logit_R, axis, V: int):
    """Returns (token, logit) of the part whose noisy score is the largest.

    Of parts that tie it is the smallest id, as in an arg-max over the whole vocabulary. Of
    scores that are no numbers it is the last one.
    """
    wins_R = noisy_R == jax.lax.pmax(noisy_R, axis)
    candidate_R = jnp.where(wins_R, token_R, V)
    first_R = jax.lax.pmin(candidate_R, axis)
    logit_R = jax.lax.psum(jnp.where(candidate_R == first_R, logit_R, 0), axis)
    return jnp.minimum(first_R, V - 1), logit_R
