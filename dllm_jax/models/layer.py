"""What a layer of the tower does: attention, a feed-forward, and what both are made of.

    x += Attn(RMSNorm(x))    x += SwiGLU(RMSNorm(x))

The second half is one feed-forward, or many experts (moe.py). Positions are rotary, in the
rotate-half convention; attention has grouped queries, and an optional RMS norm on each query
and key head. In these functions `p` is the layer's parameters: transformer.specs()["layers"]
without the L.
"""

import math

import jax
import jax.numpy as jnp

from dllm_jax import pallas_kernels
from dllm_jax.models import lora, moe
from dllm_jax.models.cache import Window, asked, cut
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.int8 import Int8
from dllm_jax.models.mask import Mask
from dllm_jax.pallas_kernels.cpu_products import (
    Tiled,
    Transposed,
    by_tiles,
    by_transpose,
    product,
)
from dllm_jax.sharding import constrain


@jax.named_scope("attention")
def attend(x_BTD, p, turn, mask: Mask, cached, cfg: ModelConfig):
    """Returns (x_BTD + Attn(RMSNorm(x_BTD)), the fresh (k_BTKH, v_BTKH)).

    cached: keys and values (k_BSKH, v_BSKH) that come before the own ones, or None.
    """
    q_BTNH, k_BTKH, v_BTKH = queries_keys_values(x_BTD, p, turn, cfg)
    out_BTNH = pallas_kernels.attention(
        q_BTNH, k_BTKH, v_BTKH, mask, cached=cached, implementation=cfg.kernels
    )
    return add_attention(x_BTD, p, out_BTNH), (k_BTKH, v_BTKH)


@jax.named_scope("attention")
def attend_paged(
    x_BWD, p, turn, window: Window, pages, number, cfg: ModelConfig, asked_da=None
):
    """Returns (x_BWD + Attn(RMSNorm(x_BWD)), pages with the keys that are kept).

    pages: (k_LPOKH, v_LPOKH) of all layers, of which this is layer `number`. asked_da: the
    windows of which x is returned; None: all.
    """
    q_BWNH, *own = queries_keys_values(x_BWD, p, turn, cfg)
    K, held = own[0].shape[2], pages[0].shape[3]  # see cache.held_heads
    if held > K:
        own = [jnp.repeat(x_BWKH, held // K, axis=2) for x_BWKH in own]
        q_BWNH = dealt(q_BWNH, K, held // K)
    k_BWKH, v_BWKH = own
    B, J = window.keep_BJ.shape
    Q = x_BWD.shape[1] // J
    start_BJ = window.start_B[:, None] + Q * jnp.arange(J)[None]
    # Of a row's pages the two that a block can touch: a table for each block of a canvas
    # would be more than a TPU's scalars may take.
    page_BJ2 = (start_BJ // pages[0].shape[2])[..., None] + jnp.arange(2)[None, None]
    page_BJ2 = jnp.minimum(page_BJ2, window.table_BA.shape[1] - 1)
    table_BJ2 = jnp.take_along_axis(window.table_BA[:, None], page_BJ2, axis=2)
    # The pages are written before they are read: where a block and the next one of the
    # same answer are two windows of this batch, the next one sees the block's kept keys.
    # Block by block: the last may end in a page where the answer goes on.
    pages = pallas_kernels.cache_update(
        pages,
        number,
        table_BJ2.reshape(B * J, 2),
        (start_BJ % pages[0].shape[2]).reshape(-1),
        window.keep_BJ.reshape(-1),
        *(x.reshape(B * J, Q, *x.shape[2:]) for x in (k_BWKH, v_BWKH)),
        implementation=cfg.kernels,
    )
    out_BWNH = attend_window(
        (q_BWNH, k_BWKH, v_BWKH), window, pages, number, implementation=cfg.kernels
    )
    out_BWNH = own_queries(out_BWNH, K, cfg.heads // cfg.kv_heads)
    # The next layer writes to what this one has read. XLA does not see through a choice of
    # widths, and copied all pages of all layers, four times a forward.
    out_BWNH, pages = jax.lax.optimization_barrier((out_BWNH, pages))
    x_BWD, out_BWNH = (asked(x, asked_da) for x in (x_BWD, out_BWNH))
    return add_attention(x_BWD, p, out_BWNH), pages


def dealt(q_BWNH, K: int, times: int):
    """Returns queries of K key heads, of which each is there so many times, for as many each.

    Zeros are the last of a key head where they do not divide.
    """
    B, W, N, H = q_BWNH.shape
    short = -(N // K) % times
    if not short:
        return q_BWNH
    q_BWKGH = q_BWNH.reshape(B, W, K, N // K, H)
    q_BWKGH = jnp.pad(q_BWKGH, ((0, 0), (0, 0), (0, 0), (0, short), (0, 0)))
    return q_BWKGH.reshape(B, W, -1, H)


def own_queries(out_BWNH, K: int, G: int):
    """Returns the first G queries of each of K key heads: those that `dealt` was given."""
    B, W, N, H = out_BWNH.shape
    if N == K * G:
        return out_BWNH
    return out_BWNH.reshape(B, W, K, N // K, H)[:, :, :, :G].reshape(B, W, K * G, H)


def attend_window(fresh, window: Window, pages, number, **how):
    """Returns the attention of windows over pages that are written: [B, W, N, H].

    fresh: the windows' own (q_BWNH, k_BWKH, v_BWKH). how: implementation.
    """
    (q_BWNH, *own), table_BA = fresh, window.table_BA
    held = q_BWNH, pages, number
    if window.own is not None:
        return pallas_kernels.attention(*fresh, window.own, **how)
    if window.mask is not None:
        return pallas_kernels.chunk_attention(*held, table_BA, window.mask, **how)
    if window.pairs is not None:
        by_row = window.pairs
        return pallas_kernels.paired_attention(
            *(*held, by_row.table_BA, by_row.start_B, *own),
            *(by_row.window_B2, by_row.place_R),
            **how,
        )
    start_B = window.start_B
    if window.end_B is not None:
        start_B, pos_BW = cut(window.end_B, q_BWNH.shape[1])
        own = pallas_kernels.cached_at(pages, number, table_BA, pos_BW)
    return pallas_kernels.paged_attention(*held, table_BA, start_B, *own, **how)


def queries_keys_values(x_BTD, p, turn, cfg: ModelConfig):
    """Returns (q_BTNH, k_BTKH, v_BTKH) of RMSNorm(x_BTD); queries and keys rotated.

    What they are made by may be one matrix, "wqkv".
    """
    h_BTD = rms_norm(x_BTD, p["attn_norm"], cfg.norm_eps)
    if "wqkv" in p:
        all_BTKJH = project(h_BTD, p["wqkv"], "DKJH", p.get("bqkv"))
        return of_one_product(all_BTKJH, p, turn, cfg)
    q_BTNH = project(h_BTD, p["wq"], "DNH", p.get("bq"))
    k_BTKH = project(h_BTD, p["wk"], "DKH", p.get("bk"))
    v_BTKH = project(h_BTD, p["wv"], "DKH", p.get("bv"))
    return *of_two_products(q_BTNH, k_BTKH, p, turn, cfg), v_BTKH


def of_two_products(q_BTNH, k_BTKH, p, turn, cfg: ModelConfig):
    """Returns queries and keys, normed and rotated."""
    if cfg.qk_norm:
        q_BTNH = rms_norm(q_BTNH, p["q_norm"], cfg.norm_eps)
        k_BTKH = rms_norm(k_BTKH, p["k_norm"], cfg.norm_eps)
    return rope(q_BTNH, turn), rope(k_BTKH, turn)


def of_one_product(all_BTKJH, p, turn, cfg: ModelConfig):
    """Returns (q_BTNH, k_BTKH, v_BTKH), queries and keys rotated, of a key head's together.

    The norms' statistics are taken of all at once: of its parts a GPU would first make
    arrays of their own.
    """
    q_BTKGH, k_BTKH, v_BTKH = of_heads(all_BTKJH)
    if cfg.qk_norm:
        q_BTKGH, k_BTKH, _ = of_heads(unit(all_BTKJH, cfg.norm_eps))
        q_BTKGH = weighed(q_BTKGH, p["q_norm"])
        k_BTKH = weighed(k_BTKH, p["k_norm"])
    q_BTNH = q_BTKGH.reshape(*q_BTKGH.shape[:2], cfg.heads, -1)
    return rope_swapping(q_BTNH, turn), rope_swapping(k_BTKH, turn), v_BTKH


def of_heads(x_BTKJH):
    """Returns what belongs to each key head's queries, to its key, and to its value."""
    return x_BTKJH[..., :-2, :], x_BTKJH[..., -2, :], x_BTKJH[..., -1, :]


def add_attention(x_BTD, p, out_BTNH):
    """Returns x_BTD plus what the heads' outputs are projected to."""
    return constrain(x_BTD + project(out_BTNH, p["wo"], "NHD"), "BTD")


@jax.named_scope("feed_forward")
def feed_forward(x_BTD, p, real_BT, cfg: ModelConfig):
    """Returns (x_BTD + FFW(RMSNorm(x_BTD)), the moe.Load of a layer with experts or None).

    real_BT: the tokens that count in the load.
    """
    h_BTD, load = rms_norm(x_BTD, p["ffw_norm"], cfg.norm_eps), None
    if "router" in p:
        with jax.named_scope("experts"):
            y_BTD, load = moe.mixture(h_BTD, p, cfg, real_BT)
            x_BTD = constrain(x_BTD + y_BTD, "BTD")
    if "w_down" in p:  # a dense layer's, or the experts that every token visits
        x_BTD = constrain(x_BTD + swiglu(h_BTD, p), "BTD")
    return x_BTD, load


def swiglu(h_BTD, p):
    """Returns W_down (silu(W_gate h) * W_up h) [B, T, D].

    F stands for the shared experts' inner width Z too, which the mesh splits alike. Gate
    and up may be one matrix, "w_gate_up".
    """
    if "w_gate_up" in p:
        both_BTF2 = project(h_BTD, p["w_gate_up"], "DF2")
        gate_BTF, up_BTF = both_BTF2[..., 0], both_BTF2[..., 1]
    else:
        gate_BTF, up_BTF = (project(h_BTD, p[w], "DF") for w in ("w_gate", "w_up"))
    h_BTF = constrain(jax.nn.silu(gate_BTF) * up_BTF, "BTF")
    return project(h_BTF, p["w_down"], "FD")


def project(x, w, dims: str, bias=None):
    """Contracts x's last dimensions with w's first, whose letters are `dims`.

    "DNH" takes [..., D] to [..., N, H] and "NHD" back. A lora.Adapted weight W acts as
    W + scale A B, its adapters one after the other. The constraint gathers what `fsdp`
    has split of w, in the computing dtype. Both are flattened to matrices, for which CPUs
    have fast code. An Int8's scales multiply what comes out of the product. A
    Transposed is read as it lies, and so is a Tiled.
    """
    inner = len(lora.contracted(dims))
    if isinstance(w, lora.Adapted):
        low_rank = project(x, w.a, dims[:inner] + "C")
        delta = w.scale * project(low_rank, w.b, "C" + dims[inner:])
        return delta + project(x, w.w, dims, bias)
    if isinstance(w, Int8):
        y = project(x, w.w, dims)
        y *= widen(w.scale.astype(x.dtype), y.ndim)
        return y if bias is None else y + widen(bias.astype(x.dtype), y.ndim)
    rows, size = x.shape[: x.ndim - inner], math.prod(x.shape[x.ndim - inner :])
    x_RD = x.reshape(-1, size)
    if isinstance(w, Transposed):
        w = constrain(w.w.astype(x.dtype), dims[inner:] + dims[:inner])
        y, outer = by_transpose(x_RD, w.reshape(-1, size)), w.shape[:-inner]
    elif isinstance(w, Tiled):
        y, outer = by_tiles(x_RD, w.w), w.others
    else:
        w = constrain(w.astype(x.dtype), dims)
        y, outer = product(x_RD, w.reshape(size, -1)), w.shape[inner:]
    y = y.reshape(*rows, *outer)
    return y if bias is None else y + widen(bias.astype(x.dtype), y.ndim)


# ---- Norms, rotation ------------------------------------------------------------------


def rms_norm(x, weight, eps: float):
    """Scales the last dimension to unit mean square, and by `weight`; statistics in f32."""
    return weighed(unit(x, eps), weight)


def weighed(x, weight):
    """Returns x times what its last dimension is weighed by."""
    return x * widen(weight.astype(x.dtype), x.ndim)


def unit(x, eps: float):
    """Scales the last dimension to unit mean square; statistics in f32.

    NaN where that is infinite: its root's inverse, 0, would make garbage look sound. The
    remainder, by the greatest number, is NaN there and else the number itself: XLA for GPUs
    has a kernel for norms, and does not see one behind a comparison.
    """
    x32 = x.astype(jnp.float32)
    square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    square = jax.lax.rem(square + eps, jnp.finfo(jnp.float32).max)
    return (x32 * jax.lax.rsqrt(square)).astype(x.dtype)


def rope(x_BTNH, turn):
    """Rotates the first 2h dimensions of each head; turn: (cos_BTh, sin_BTh) of the angles.

    Pair i is dimensions i and i + h (rotate-half); dimensions from 2h on stay.
    """
    cos, sin = (x_BTh[:, :, None] for x_BTh in turn)
    h = cos.shape[-1]
    a, b, still = jnp.split(x_BTNH, (h, 2 * h), axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin, still], axis=-1)
    return turned.astype(x_BTNH.dtype)


def rope_swapping(x_BTNH, turn):
    """Does what `rope` does, in a form that a GPU reads well: halves change places.

    A concatenation is read number by number there (`benchmarks.kernels --only queries`).
    """
    cos, sin = (x_BTh[:, :, None, None] for x_BTh in turn)
    halves = *x_BTNH.shape[:-1], 2, cos.shape[-1]
    if math.prod(halves) != x_BTNH.size:  # not all dimensions rotate
        return rope(x_BTNH, turn)
    sign_21 = jnp.array([[-1], [1]], x_BTNH.dtype)
    x_BTN2h = x_BTNH.reshape(halves)
    other_BTN2h = jnp.flip(x_BTN2h, axis=-2) * (sin * widen(sign_21, x_BTN2h.ndim))
    turned_BTN2h = x_BTN2h * cos + other_BTN2h
    return turned_BTN2h.astype(x_BTNH.dtype).reshape(x_BTNH.shape)


def frequencies(cfg: ModelConfig):
    """Returns by how much each pair of a head's dimensions turns [h], radians a position.

    theta^(-2i / d) for pair i of the d dimensions that rotate (RoPE, arXiv 2104.09864,
    section 3.4.2). Llama 3.1 divides those by `factor` that turn less than `low` times in
    the `length` that it was trained on, leaves those that turn more than `high` times,
    and blends between (rope_type "llama3" of transformers).
    """
    turning = int(cfg.rotary * cfg.head_dim)
    exponent_h = jnp.arange(0, turning, 2, dtype=jnp.float32) / turning
    # float: of a config.json it may be a whole number, and one beyond 32 bits.
    plain_h = float(cfg.rope_theta) ** -exponent_h
    if not cfg.rope_llama3:
        return plain_h
    factor, low, high, length = map(float, cfg.rope_llama3)
    turns_h = length * plain_h / (2 * jnp.pi)
    keep_h = jnp.clip((turns_h - low) / (high - low), 0, 1)
    return plain_h * (keep_h + (1 - keep_h) / factor)


def turns(pos_BT, cfg: ModelConfig):
    """Returns (cos_BTh, sin_BTh) of the angles by which positions turn, for `rope`.

    In the computing dtype, or with `cfg.rope_f32` in f32, in which `rope` then rotates; of
    angles in f32. The barrier is there because XLA for CPUs would
    compute them in each layer for each head: 8 rows of 30M took 1.02 to 1.05 times as long.
    """
    angle_BTh = pos_BT.astype(jnp.float32)[..., None] * widen(frequencies(cfg), 3)
    turn = jnp.cos(angle_BTh), jnp.sin(angle_BTh)
    dtype = jnp.float32 if cfg.rope_f32 else cfg.dtype
    return jax.lax.optimization_barrier(tuple(x.astype(dtype) for x in turn))


def widen(x, ndim: int):
    """Adds leading dimensions of size one up to `ndim` dimensions.

    Every broadcast here is spelled out: the tests forbid JAX to promote ranks.
    """
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)
