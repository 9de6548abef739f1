"""The language tower: specs, init, embed, trunk and its two heads.

Pre-norm decoder of the Qwen3 / Llama line: h += Attn(RMSNorm(h)); h += SwiGLU(RMSNorm(h)),
the latter one feed-forward or many experts (moe.py), after some dense layers or at once;
rotary positions in the rotate-half convention, grouped-query attention with an optional
RMS norm on each query and key head. Who sees whom is the `Mask`; nothing here is causal.
Masters may be f32 while computation is `cfg.dtype`; norms and logits are f32.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dllm_jax import pallas_kernels
from dllm_jax.models import lora, moe
from dllm_jax.models.cache import KVCache, PagedKVCache
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import Mask
from dllm_jax.pallas_kernels.reference import NEVER
from dllm_jax.sharding import PARAM, constrain, named

Params = dict  # nested: a word -> an array or another dict; what specs() declares

REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """A parameter, declared once: its dimensions' letters and how it starts."""

    dims: str
    init: str = "normal"  # "normal" (std 0.02), "ones" or "zeros"


def specs(cfg: ModelConfig, heads: tuple[str, ...] = ("lm",)) -> dict:
    """Returns the tree of Specs; `heads` names what the tower ends in: "lm", "value".

    With `cfg.lora` they are what is trained: `lora.join` adds the frozen rest.
    """
    tree = {"embed": Spec("VD"), "norm": Spec("D", "ones")}
    tree["layers"] = stack(cfg, "L", experts=cfg.experts > 0)
    if cfg.dense_layers:
        tree["first"] = stack(cfg, "Y", experts=False)
    if "lm" in heads and not cfg.tied:
        tree["head"] = Spec("DV")
    if "value" in heads:
        tree["value"] = Spec("D", "zeros")  # V = 0 before the first update
    return lora.specs(tree, cfg.lora) if cfg.lora else tree


def stack(cfg: ModelConfig, n: str, *, experts: bool) -> dict[str, Spec]:
    """Returns the Specs of layers of one kind, stacked on the letter `n`."""
    layer = {
        "attn_norm": Spec("D", "ones"),
        "wq": Spec("DNH"),
        "wk": Spec("DKH"),
        "wv": Spec("DKH"),
        "wo": Spec("NHD"),
        "ffw_norm": Spec("D", "ones"),
    }
    if cfg.qk_norm:
        layer |= {"q_norm": Spec("H", "ones"), "k_norm": Spec("H", "ones")}
    if cfg.qkv_bias:
        layer |= {
            "bq": Spec("NH", "zeros"),
            "bk": Spec("KH", "zeros"),
            "bv": Spec("KH", "zeros"),
        }
    wide = "F" if not experts else "Z" if cfg.shared_experts else ""
    if wide:
        layer |= {
            "w_gate": Spec("D" + wide),
            "w_up": Spec("D" + wide),
            "w_down": Spec(wide + "D"),
        }
    if experts:
        layer |= {"router": Spec("DE")}
        layer |= {name: Spec(dims) for name, dims in moe.DISPATCHED.items()}
        if cfg.router_bias:
            layer |= {"router_bias": Spec("E", "zeros")}
    return {name: Spec(n + spec.dims, spec.init) for name, spec in layer.items()}


def shape(spec: Spec, cfg: ModelConfig) -> tuple[int, ...]:
    """Returns the shape that `spec` has in this model."""
    return tuple(cfg.sizes[letter] for letter in spec.dims)


def abstract(cfg: ModelConfig, mesh, dtype, heads=("lm",)) -> Params:
    """Returns the parameters as ShapeDtypeStructs with their sharding on the mesh."""

    def one(spec):
        dims = shape(spec, cfg)
        return jax.ShapeDtypeStruct(
            dims, dtype, sharding=named(spec.dims, dims, PARAM, mesh)
        )

    return jax.tree.map(one, specs(cfg, heads))


def init(key, cfg: ModelConfig, dtype=jnp.float32, heads=("lm",)) -> Params:
    """Returns fresh parameters: normal with std 0.02, norms one, value head zero."""
    leaves, tree = jax.tree.flatten(specs(cfg, heads))
    keys = jax.random.split(key, len(leaves))

    def one(key, spec):
        if spec.init == "normal":
            return 0.02 * jax.random.normal(key, shape(spec, cfg), dtype)
        return jnp.full(shape(spec, cfg), spec.init == "ones", dtype)

    return jax.tree.unflatten(tree, [one(*pair) for pair in zip(keys, leaves)])


def rms_norm(x, weight, eps: float):
    """Scales the last dimension to unit mean square; statistics in f32."""
    x32 = x.astype(jnp.float32)
    x32 *= jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * widen(weight.astype(x.dtype), x.ndim)


def widen(x, ndim: int):
    """Adds leading dimensions of size one, as every broadcast here is spelled out."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def rope(x_BTNH, angle_BTh):
    """Rotates the first 2h dimensions of each head by `angle` (radians, one per pair).

    A pair is a dimension of their first half with its like in the second.
    """
    cos = jnp.cos(angle_BTh)[:, :, None].astype(x_BTNH.dtype)
    sin = jnp.sin(angle_BTh)[:, :, None].astype(x_BTNH.dtype)
    half = cos.shape[-1]
    a, b, rest = jnp.split(x_BTNH, (half, 2 * half), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def frequencies(cfg: ModelConfig):
    """Returns by how much each pair of a head's dimensions turns, radians a position.

    Llama 3.1 divides those by `factor` that turn less than `low` times in the `length`
    that it was trained on, leaves those that turn more than `high` times, and blends
    between (Llama-3.1's rope_type "llama3").
    """
    turning = int(cfg.rotary * cfg.head_dim)
    octave_h = jnp.arange(0, turning, 2, dtype=jnp.float32) / turning
    plain_h = cfg.rope_theta**-octave_h
    if not cfg.rope_llama3:
        return plain_h
    factor, low, high, length = cfg.rope_llama3
    turns_h = length * plain_h / (2 * jnp.pi)
    keep_h = jnp.clip((turns_h - low) / (high - low), 0, 1)
    return plain_h * (keep_h + (1 - keep_h) / factor)


def embed(params: Params, tokens_BT, cfg: ModelConfig):
    """Returns the input embeddings x_BTD in the computing dtype."""
    table_VD = constrain(params["embed"].astype(cfg.dtype), "VD")
    return constrain(table_VD[tokens_BT], "BTD")


def trunk(params: Params, x_BTD, pos_BT, mask: Mask, cfg: ModelConfig, cache=None):
    """Returns (normed hidden states x_BTD, keys and values, the experts' load).

    Keys and values are the KVCache of exactly these T positions. With a KVCache, its S
    slots come before the T own keys in the order of the mask. The given cache is only
    read: keeping the returned keys is the caller's decision, and not keeping them is how a
    denoising step is undone. With a PagedKVCache, `mask` is a Window, which says what is
    kept, and what is returned is the whole pool.

    The load is the moe.Load of each layer with experts, or None. Tokens that see nothing
    are padding, and do not count.
    """
    angle_BTh = pos_BT.astype(jnp.float32)[..., None] * widen(frequencies(cfg), 3)
    paged, how = isinstance(cache, PagedKVCache), {"implementation": cfg.kernels}
    if paged:
        real_BT = jnp.ones(pos_BT.shape, bool)
    else:
        real_BT = (mask.q_end_BT > mask.q_begin_BT) | (mask.q_group_BT >= 0)

    def layer(carry, inputs):
        (x_BTD, pages), (p, number) = carry, inputs
        cached = None
        if cache is not None and not paged:  # in place: a slice per stack is a copy
            cached = tuple(
                jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
                for x in (cache.k_LBSKH, cache.v_LBSKH)
            )
        h_BTD = rms_norm(x_BTD, p["attn_norm"], cfg.norm_eps)
        q_BTNH = project(h_BTD, p["wq"], "DNH", p.get("bq"))
        k_BTKH = project(h_BTD, p["wk"], "DKH", p.get("bk"))
        v_BTKH = project(h_BTD, p["wv"], "DKH", p.get("bv"))
        if cfg.qk_norm:
            q_BTNH = rms_norm(q_BTNH, p["q_norm"], cfg.norm_eps)
            k_BTKH = rms_norm(k_BTKH, p["k_norm"], cfg.norm_eps)
        q_BTNH, k_BTKH = rope(q_BTNH, angle_BTh), rope(k_BTKH, angle_BTh)
        if paged:  # kept keys are seen at once, by the next block of the same row
            at = (number, mask.table_BA, mask.start_B)
            pages = pallas_kernels.cache_update(
                pages, *at, mask.keep_B, k_BTKH, v_BTKH, **how
            )
            out_BTNH = pallas_kernels.paged_attention(
                q_BTNH, pages, *at, k_BTKH, v_BTKH, **how
            )
            kept = None
        else:
            out_BTNH = pallas_kernels.attention(
                q_BTNH, k_BTKH, v_BTKH, mask, cached=cached, **how
            )
            kept = k_BTKH, v_BTKH
        x_BTD = constrain(x_BTD + project(out_BTNH, p["wo"], "NHD"), "BTD")

        h_BTD, load = rms_norm(x_BTD, p["ffw_norm"], cfg.norm_eps), None
        if "router" in p:
            y_BTD, load = moe.ffw(h_BTD, p, cfg, real_BT)
            x_BTD = constrain(x_BTD + y_BTD, "BTD")
        if "w_gate" in p:
            gate_BTF = jax.nn.silu(project(h_BTD, p["w_gate"], "DF"))
            h_BTF = constrain(gate_BTF * project(h_BTD, p["w_up"], "DF"), "BTF")
            x_BTD = constrain(x_BTD + project(h_BTF, p["w_down"], "FD"), "BTD")
        return (x_BTD, pages), (kept, load)

    if cfg.remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT[cfg.remat])
    pages = (cache.k_LPOKH, cache.v_LPOKH) if paged else None
    fresh, number = [], 0
    for name in ("first", "layers"):
        if name in params:
            numbers_L = jnp.arange(number, number + len(params[name]["attn_norm"]))
            number += len(numbers_L)
            (x_BTD, pages), (kept, load) = jax.lax.scan(
                layer, (x_BTD, pages), (params[name], numbers_L)
            )
            fresh.append(kept)
    x_BTD = rms_norm(x_BTD, params["norm"], cfg.norm_eps)
    if paged:
        return x_BTD, PagedKVCache(*pages), load
    k, v = (x[0] if len(x) == 1 else jnp.concatenate(x) for x in zip(*fresh))
    return x_BTD, KVCache(k, v), load


def project(x, w, dims: str, bias=None):
    """Contracts x's last dimensions with w's first: "DNH" and "NHD" alike.

    A lora.Adapted weight is W and, beside it, A and B one after the other.
    Both are flattened to two dimensions first, for which CPUs have fast code. The
    constraint gathers what `fsdp` has split, in the computing dtype.
    """
    inner = len(lora.contracted(dims))
    if isinstance(w, lora.Adapted):
        low = project(x, w.a, dims[:inner] + "C")
        low = w.scale * project(low, w.b, "C" + dims[inner:])
        return low + project(x, w.w, dims, bias)
    w = constrain(w.astype(x.dtype), dims)
    rows, outer = x.shape[: x.ndim - inner], w.shape[inner:]
    size = 1
    for n in w.shape[:inner]:
        size *= n
    y = (x.reshape(-1, size) @ w.reshape(size, -1)).reshape(*rows, *outer)
    return y if bias is None else y + widen(bias.astype(x.dtype), y.ndim)


def head(params: Params, cfg: ModelConfig):
    """Returns the language head [D, V] in the computing dtype."""
    weight = params["embed"].T if cfg.tied else params["head"]
    return constrain(weight.astype(cfg.dtype), "DV")


def logits(params: Params, x_BWD, cfg: ModelConfig):
    """Returns f32 logits [B, W, V] for a sampling window; the mask id is forbidden."""
    logits_BWV = constrain(project(x_BWD, head(params, cfg), "DV"), "BWV")
    return logits_BWV.astype(jnp.float32).at[..., cfg.mask_id].set(NEVER)


def token_logprob(params: Params, x_BUD, token_BU, cfg: ModelConfig):
    """Returns (log-prob, entropy) of tokens at their positions, [B, U], nats, f32."""
    how = {"forbidden": cfg.mask_id, "implementation": cfg.kernels}
    return pallas_kernels.token_logprob(x_BUD, head(params, cfg), token_BU, **how)


def token_draw(params: Params, x_BWD, key_B, temperature_B, cfg: ModelConfig):
    """Returns tokens drawn and what is known of them; see `pallas_kernels.token_draw`."""
    args = x_BWD, head(params, cfg), key_B, temperature_B
    how = {"forbidden": cfg.mask_id, "implementation": cfg.kernels}
    return pallas_kernels.token_draw(*args, **how)


def value(params: Params, x_BUD):
    """Returns the value head's output [B, U], f32."""
    return jnp.einsum(
        "BUD,D->BU", x_BUD.astype(jnp.float32), params["value"].astype(jnp.float32)
    )
