"""Which module computes an op: the table of kernels, their contract, and the choice.

The contract of a module in KERNELS, by op. Every array is one device's part (attend.py
and head.py cut them out and join what comes back); `interpret=True` runs the kernel by
Pallas' interpreter, on any platform (TPU's also take `pltpu.InterpretParams`).

    attention
        forward(q_BTNH, k_BSKH, v_BSKH, mask, *, interpret)
            -> (out_BTNH in q's dtype, lse_BNT f32: the log of each query's sum)
        backward(q_BTNH, k_BSKH, v_BSKH, mask, out_BTNH, lse_BNT, dout_BTNH, *, interpret)
            -> (dq_BTNH, dk_BSKH, dv_BSKH), each in its input's dtype
        plan(mask, G, H) -> a tree of arrays [B, ...]: what both may find in mask.tiles, or
            None; G: query heads of a key head
        A query that sees nothing gets zero, and gives no gradient: its lse is 1e30.
        (`reference` gives it a mean of all values; nobody may read either.)
    paged_attention
        attend(q_BWNH, pages, layer, table_BA, start_B, k_BQKH, v_BQKH, *, interpret)
            -> out_BWNH in q's dtype
        pages: (k, v), each [L, P, O, K, H]; layer: a scalar. There may be more queries than
        keys k, v: the first ones see none of these, and what is given for them is finite
        where they see no page either. Pages that begin at `start` or beyond are never read
        and may hold NaN; the row's pages before them are finite to their ends: where these
        hold NaN, only the row's own answer does. "any", and
        `reference`, read more than that: for them a row's pages are finite up to the next
        power of two of the longest row's, or all.
        A module may also have
        attend_chunk(q_BWNH, pages, layer, table_BA, end_BW, *, interpret)
            -> out_BWNH in q's dtype
        Each query sees the positions before its own end in its row's pages, and nothing
        else: where that is 0 it gets zero. Pages that begin at or beyond a row's greatest
        end are never read. Without it `attention` runs over gathered pages, by its own
        gathered(pages, layer, table_BA, *, interpret) -> (k_BSKH, v_BSKH)
        if there is one. All of these pages are read, and no product is made of them.
    cache_update
        update(pages, layer, table_BA, start_B, keep_B, k_BWKH, v_BWKH, *, interpret)
            -> pages, the same memory, written where `keep`; W is a page at the most
    token_logprob
        pick(x_RD, head_DV, token_R, offset, *, forbidden, interpret)
            -> (lse_R, mean_R, logit_R), f32: the log of the sum of exponentials, the mean
               logit under the softmax, and the token's logit
        pick_gradient(x_RD, head_DV, token_R, offset, saved, *, forbidden, interpret)
            -> (dx_RD, dhead_DV), in the inputs' dtypes
        The head's V columns are some of the vocabulary, from the id `offset` on; tokens and
        `forbidden` are ids of all of it. The logit is 0 where the token is elsewhere. saved:
        lse and mean over the whole vocabulary, the gradients of log-prob and entropy.
    selection
        behind(x_RD, head_DV, limit_R, offset, *, forbidden, interpret)
            -> (behind_R, ahead_R), f32: the log of the sum of exponentials of the logits that
               are at most the limit, below every logit where none is, and how many are above
        pick and pick_gradient as of `token_logprob`, but that `saved` goes on with the limit
        and with `behind` over the whole vocabulary: a row's log-prob is then that of a token
        (the limit below every logit) or of what lies behind (the token below 0).
    token_draw
        draw(x_RD, head_DV, words_R3, temperature_R, offset, *, wanted_R, width, forbidden,
             interpret)
            -> (token_R i32, noisy_R, logit_R, lse_R, tempered_lse_R, tempered_mean_R), f32:
               the drawn id, the score it won by (with noise), its logit, and of the
               distributions at temperature 1 and at the row's own what `pick` gives
        words: the two of the key and the row's place in its draw, whose rows of noise are
        `width` ids wide (`noise.gumbel`). Temperature 0 draws without noise, at 1. Of rows
        that are not wanted nothing is read; what is given for them is finite.
    grouped_matmul
        multiply(x_RD, w_EDF, sizes_E, number) -> y_RF in x's dtype
        Rows are sorted by group, sizes_E to each; rows after the last group give 0, and get
        no gradient. With a number (None: without) w is a stack w_LEDF, and that layer of it
        is meant.
        Differentiable. TPU's is of XLA's operations: nothing is to be interpreted.
"""

import importlib

import jax

# (op, platform): its module in this package, imported when it is taken: those of Mosaic
# cost more time than the rest of the package. "any" is of XLA's own operations, for
# platforms without a kernel of that op; it needs no trust, and takes heads of any size.
KERNELS = {
    ("attention", "any"): "tiled_attention",
    ("attention", "gpu"): "gpu.attention",
    ("attention", "tpu"): "tpu.attention",
    ("cache_update", "tpu"): "tpu.cache_update",
    ("grouped_matmul", "any"): "tiled_matmul",
    ("grouped_matmul", "gpu"): "gpu.grouped_matmul",
    ("grouped_matmul", "tpu"): "tpu.grouped_matmul",
    ("paged_attention", "any"): "held_pages",
    ("paged_attention", "gpu"): "gpu.paged_attention",
    ("paged_attention", "tpu"): "tpu.paged_attention",
    ("selection", "gpu"): "gpu.token_logprob",
    ("selection", "tpu"): "tpu.token_logprob",
    ("token_draw", "any"): "tiled_head",
    ("token_draw", "gpu"): "gpu.token_logprob",
    ("token_draw", "tpu"): "tpu.token_logprob",
    ("token_logprob", "gpu"): "gpu.token_logprob",
    ("token_logprob", "tpu"): "tpu.token_logprob",
}
# Of a platform that is here its kernels take these alone, but for grouped_matmul's.
NUMBERS = {"gpu": ("bfloat16", "float16")}
# Whose kernels "auto" takes where nothing was checked.
TRUSTED = ("tpu",)
# (op, platform): whether its kernel was right on this machine. models/selfcheck.py looks
# before a run, and "auto" goes by what it found.
verdicts: dict[tuple[str, str], bool] = {}
CHOICES = ("auto", "reference", "platform")  # of a whole run
HEAD_SIZES = (64, 128)  # of the kernels that have heads
CHUNK_TILE = 256  # on a CPU, see `tile`


def platform() -> str:
    """Returns the platform that is compiled for: the mesh's in force, or the default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def tile(head_dim: int, chunk: bool = False) -> int:
    """Returns how many keys a tile of `tiled_attention` has, and how many queries at most.

    chunk: of a prompt's chunk, over keys that are not its own. On CPU 64 is the fastest or
    close to it of 32, 48, 64, 96 and 128 at rows of 288 to 2,048 packed slots where heads
    are of 32; where they are of 64, 96 takes 0.80 to 0.88 of its time with three heads for
    a key and 0.85 to 1.07 with two; and 256 is the fastest of 64 to 512 for chunks: it
    takes 0.8 of the time of 128, half of that of 64.
    Elsewhere a step of its loop costs several launches, so that tiles are large; that they
    are 1,024 is not measured.
    """
    if platform() != "cpu":
        return 1024
    if chunk:
        return CHUNK_TILE
    return 96 if head_dim >= 64 else 64


def module(op: str, name: str):
    """Returns the module of KERNELS that computes `op` on the platform `name`."""
    return importlib.import_module(f"dllm_jax.pallas_kernels.{KERNELS[op, name]}")


def begin(name: str):
    """Imports the kernels of a platform, before a run traces anything.

    Pallas adds options to JAX's, by which traces are told apart: what was traced before would
    be traced anew, and compiled anew.
    """
    for op, platform_of_op in KERNELS:
        if platform_of_op == name:
            module(op, name)


def kernel(
    op: str,
    implementation: str,
    head_size: int | None = None,
    slots: int | None = None,
):
    """Returns the module that computes `op`, or None for the specification.

    implementation: "reference", "auto" or "platform" (see the package), or a platform of
    KERNELS. head_size: H, for ops that have heads. slots: the larger of T and S,
    for ops that the specification computes faster where both are small. Raises ValueError for an
    implementation that the op, or its head size, does not have.
    """
    if implementation == "reference":
        return None
    fits = head_size is None or head_size in HEAD_SIZES
    if implementation in CHOICES:
        here = platform()
        right = verdicts.get((op, here), here in TRUSTED)
        trusted = implementation == "platform" or right
        if fits and trusted and (op, here) in KERNELS:
            return module(op, here)
        # Rows of up to two tiles gain little from skipped ones. On CPU the gradient by
        # the specification takes 1 to 1.5 times as long with 192 to 384 packed slots, and
        # six times with 1,152.
        few = slots is not None and slots <= 2 * tile(head_size)
        return None if few or (op, "any") not in KERNELS else module(op, "any")
    if (op, implementation) not in KERNELS:
        platforms = [name for name_of_op, name in KERNELS if name_of_op == op]
        raise ValueError(
            f"pallas_kernels.{op}: implementation={implementation!r} does not exist; "
            f"choose from {[*CHOICES, *platforms]}"
        )
    if not fits and implementation != "any":
        raise ValueError(
            f"pallas_kernels.{op}: implementation={implementation!r} takes heads of "
            f"size {HEAD_SIZES}, not {head_size}; use 'reference'"
        )
    return module(op, implementation)
