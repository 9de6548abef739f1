"""The language tower: specs, init, embed, trunk and its two heads.

Pre-norm decoder of the Qwen3 / Llama line: h += Attn(RMSNorm(h)); h += SwiGLU(RMSNorm(h)),
rotary positions in the rotate-half convention, grouped-query attention with an optional
RMS norm on each query and key head. Who sees whom is the `Mask`; nothing here is causal.
Masters may be f32 while computation is `cfg.dtype`; norms and logits are f32.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dllm_jax import pallas_kernels
from dllm_jax.models.cache import KVCache
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
    """Returns the tree of Specs; `heads` names what the tower ends in: "lm", "value"."""
    layer = {
        "attn_norm": Spec("LD", "ones"),
        "wq": Spec("LDNH"),
        "wk": Spec("LDKH"),
        "wv": Spec("LDKH"),
        "wo": Spec("LNHD"),
        "ffw_norm": Spec("LD", "ones"),
        "w_gate": Spec("LDF"),
        "w_up": Spec("LDF"),
        "w_down": Spec("LFD"),
    }
    if cfg.qk_norm:
        layer |= {"q_norm": Spec("LH", "ones"), "k_norm": Spec("LH", "ones")}
    if cfg.qkv_bias:
        layer |= {
            "bq": Spec("LNH", "zeros"),
            "bk": Spec("LKH", "zeros"),
            "bv": Spec("LKH", "zeros"),
        }
    tree = {"embed": Spec("VD"), "layers": layer, "norm": Spec("D", "ones")}
    if "lm" in heads and not cfg.tied:
        tree["head"] = Spec("DV")
    if "value" in heads:
        tree["value"] = Spec("D", "zeros")  # V = 0 before the first update
    return tree


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


def rope(x_BTNH, angle_BTH):
    """Rotates the halves of each head by `angle` (radians, one per pair)."""
    cos = jnp.cos(angle_BTH)[:, :, None].astype(x_BTNH.dtype)
    sin = jnp.sin(angle_BTH)[:, :, None].astype(x_BTNH.dtype)
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def embed(params: Params, tokens_BT, cfg: ModelConfig):
    """Returns the input embeddings x_BTD in the computing dtype."""
    table_VD = constrain(params["embed"].astype(cfg.dtype), "VD")
    return constrain(table_VD[tokens_BT], "BTD")


def trunk(params: Params, x_BTD, pos_BT, mask: Mask, cfg: ModelConfig, cache=None):
    """Returns (normed hidden states x_BTD, the KVCache of exactly these T positions).

    With a `cache`, its S slots come before the T own keys in the order of the mask. The
    given cache is only read: keeping the returned keys is the caller's decision, and not
    keeping them is how a denoising step is undone.
    """
    octave_H = jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim
    angle_BTH = pos_BT.astype(jnp.float32)[..., None] * widen(
        cfg.rope_theta**-octave_H, 3
    )

    def layer(x_BTD, inputs):
        p, cached = inputs
        h_BTD = rms_norm(x_BTD, p["attn_norm"], cfg.norm_eps)
        q_BTNH = project(h_BTD, p["wq"], "DNH", p.get("bq"))
        k_BTKH = project(h_BTD, p["wk"], "DKH", p.get("bk"))
        v_BTKH = project(h_BTD, p["wv"], "DKH", p.get("bv"))
        if cfg.qk_norm:
            q_BTNH = rms_norm(q_BTNH, p["q_norm"], cfg.norm_eps)
            k_BTKH = rms_norm(k_BTKH, p["k_norm"], cfg.norm_eps)
        q_BTNH, k_BTKH = rope(q_BTNH, angle_BTH), rope(k_BTKH, angle_BTH)
        out_BTNH = pallas_kernels.attention(q_BTNH, k_BTKH, v_BTKH, mask, cached=cached)
        x_BTD = constrain(x_BTD + project(out_BTNH, p["wo"], "NHD"), "BTD")

        h_BTD = rms_norm(x_BTD, p["ffw_norm"], cfg.norm_eps)
        gate_BTF = jax.nn.silu(project(h_BTD, p["w_gate"], "DF"))
        h_BTF = constrain(gate_BTF * project(h_BTD, p["w_up"], "DF"), "BTF")
        x_BTD = constrain(x_BTD + project(h_BTF, p["w_down"], "FD"), "BTD")
        return x_BTD, (k_BTKH, v_BTKH)

    if cfg.remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT[cfg.remat])
    cached = None if cache is None else (cache.k_LBSKH, cache.v_LBSKH)
    x_BTD, (k, v) = jax.lax.scan(layer, x_BTD, (params["layers"], cached))
    return rms_norm(x_BTD, params["norm"], cfg.norm_eps), KVCache(k, v)


def project(x, w, dims: str, bias=None):
    """Contracts x's last dimensions with w's first: "DNH" and "NHD" alike.

    Both are flattened to two dimensions first, for which CPUs have fast code. The
    constraint gathers what `fsdp` has split, in the computing dtype.
    """
    w = constrain(w.astype(x.dtype), dims)
    inner = w.ndim - 1 if dims.endswith("D") else 1  # how many dimensions contract
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
    return pallas_kernels.token_logprob(
        x_BUD, head(params, cfg), token_BU, forbidden=cfg.mask_id
    )


def value(params: Params, x_BUD):
    """Returns the value head's output [B, U], f32."""
    return jnp.einsum(
        "BUD,D->BU", x_BUD.astype(jnp.float32), params["value"].astype(jnp.float32)
    )
