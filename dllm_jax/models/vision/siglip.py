"""The SigLIP tower: tiles of pixels to features of their patches.

SigLIP (arXiv 2303.15343) and SigLIP 2 (arXiv 2502.14786) of fixed resolution, as LLaDA-V
uses them: a ViT with pre-norm layers and learned positions, no class token. The features
are those of the second last layer: the last one is not run, and no norm follows. Norms and
softmax are computed in f32, all else in the parameters' dtype.

Letters: w pixels of a row, p patches, e the tower's width, f inner width, i rows of
patches, j patches of a row, b heads, d a head's dimension, q patches that look.

In `pixels_BChw` B are tiles, C colours, h and w height and width. Parameters have besides l
layers, a all heads side by side, and c colours, y and x pixels down and across a patch.
"""

import jax
import jax.numpy as jnp

# Parameters: name -> (letters of VisionConfig.sizes, what a fresh one is).
LAYER = {
    "attn_norm": ("le", "ones"),
    "attn_norm_bias": ("le", "zeros"),
    "wq": ("lea", "normal"),
    "bq": ("la", "zeros"),
    "wk": ("lea", "normal"),
    "bk": ("la", "zeros"),
    "wv": ("lea", "normal"),
    "bv": ("la", "zeros"),
    "wo": ("lae", "normal"),
    "bo": ("le", "zeros"),
    "ffw_norm": ("le", "ones"),
    "ffw_norm_bias": ("le", "zeros"),
    "w_up": ("lef", "normal"),
    "b_up": ("lf", "zeros"),
    "w_down": ("lfe", "normal"),
    "b_down": ("le", "zeros"),
}
PARAMETERS = {
    "patch": ("ecyx", "normal"),
    "b_patch": ("e", "zeros"),
    "position": ("pe", "normal"),
    "layers": LAYER,
}


@jax.named_scope("vision_tower")
def features(params, pixels_BChw, cfg):
    """Returns the features of each tile's patches, row by row [B, p, e].

    params: of hf.load of a SigLIP folder, or the "vision" part of LLaDA-V's. pixels_BChw:
    tiles of `side` x `side` pixels in [-1, 1]. cfg: a VisionConfig, or the ModelConfig that
    has one. Raises ValueError for tiles of another size.
    """
    cfg = getattr(cfg, "vision", cfg)
    if pixels_BChw.ndim != 4 or pixels_BChw.shape[1:] != (3, cfg.side, cfg.side):
        raise ValueError(
            f"tiles of shape {pixels_BChw.shape}: [tiles, 3, {cfg.side}, {cfg.side}]"
        )
    n, patch, dtype = cfg.across, cfg.patch, params["patch"].dtype
    x = pixels_BChw[:, :, : n * patch, : n * patch].astype(dtype)
    x = x.reshape(len(x), 3, n, patch, n, patch)
    x_Bije = jnp.einsum("Bciyjx,ecyx->Bije", x, params["patch"])
    x_Bpe = x_Bije.reshape(len(x), n * n, cfg.width)
    x_Bpe += params["b_patch"][None, None] + params["position"][None]

    def layer(x_Bpe, p):
        x_Bpe += attend(normed(x_Bpe, p, "attn_norm", cfg), p, cfg)
        h_Bpf = linear(normed(x_Bpe, p, "ffw_norm", cfg), p["w_up"], p["b_up"])
        h_Bpf = jax.nn.gelu(h_Bpf, approximate=True)
        return x_Bpe + linear(h_Bpf, p["w_down"], p["b_down"]), None

    return jax.lax.scan(jax.checkpoint(layer), x_Bpe, params["layers"])[0]


def attend(x_Bpe, p, cfg):
    """Returns the attention of all patches of a tile to all [B, p, e]."""
    B, count, _ = x_Bpe.shape
    q_Bpbd, k_Bpbd, v_Bpbd = (
        linear(x_Bpe, p[f"w{x}"], p[f"b{x}"]).reshape(B, count, cfg.heads, -1)
        for x in "qkv"
    )
    score_Bbqp = jnp.einsum("Bqbd,Bpbd->Bbqp", q_Bpbd, k_Bpbd)
    score_Bbqp = score_Bbqp.astype(jnp.float32) * q_Bpbd.shape[-1] ** -0.5
    weight_Bbqp = jax.nn.softmax(score_Bbqp).astype(v_Bpbd.dtype)
    out_Bqbd = jnp.einsum("Bbqp,Bpbd->Bqbd", weight_Bbqp, v_Bpbd)
    return linear(out_Bqbd.reshape(B, count, -1), p["wo"], p["bo"])


def normed(x_Bpe, p, name: str, cfg):
    """Returns the layer norm of each patch's features; statistics in f32."""
    x32 = x_Bpe.astype(jnp.float32)
    x32 -= x32.mean(axis=-1, keepdims=True)
    square = (x32 * x32).mean(axis=-1, keepdims=True)
    x32 *= jax.lax.rsqrt(square + cfg.norm_eps)
    weight, bias = (p[key].astype(jnp.float32) for key in (name, f"{name}_bias"))
    return (x32 * weight[None, None] + bias[None, None]).astype(x_Bpe.dtype)


def linear(x, w, bias):
    """Returns x W + bias over the last dimension of x, which has three."""
    return x @ w + bias[None, None]
