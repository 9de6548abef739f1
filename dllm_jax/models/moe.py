"""Experts in place of one feed-forward: the router, the dispatch and the load.

Each token goes to X of E SwiGLU experts (of inner width I), which its router chooses:

    softmax   s = softmax(W h); the X largest                       (SDAR-MoE, Qwen3-MoE)
    sigmoid   s = sigmoid(W h); the X largest of s + bias, in the best groups of experts,
              a group being as good as its two best              (LLaDA2; DeepSeek-V3's)

and y = sum_x w_x expert_x(h), where w are the chosen s, made to sum to one and scaled as
the config says; experts shared by all tokens (inner width Z together) are added to it.
No token is ever dropped. The router computes in f32.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.models.config import ModelConfig
from dllm_jax.pallas_kernels import grouped_matmul
from dllm_jax.sharding import ACT, constrain, pspec

DISPATCHED = {"e_gate": "EDI", "e_up": "EDI", "e_down": "EID"}


@flax.struct.dataclass
class Load:
    """What a layer's router did, in sums: those of several batches may be added."""

    count_E: jax.Array  # how often each expert was chosen
    prob_E: jax.Array  # the router's probability of each, summed over the tokens
    tokens: jax.Array  # that were routed


def balance(load: Load, experts_per_token: int) -> dict[str, jax.Array]:
    """Returns metrics of a Load, whose leaves may be stacked over layers; means over them.

    expert_aux_loss: E sum_e f_e P_e, with f_e the choices of e per token and P_e its mean
    probability (Switch, arXiv 2101.03961, equations 4 to 6, with X choices instead of
    one): X when balanced. expert_max_load: the busiest expert's choices over the average.
    """
    E = load.count_E.shape[-1]
    tokens_1 = jnp.maximum(load.tokens, 1)[..., None]
    loss = E * jnp.sum(load.count_E * load.prob_E / tokens_1**2, axis=-1)
    most = load.count_E.max(axis=-1) / tokens_1[..., 0] * E / experts_per_token
    return {"expert_aux_loss": loss.mean(), "expert_max_load": most.mean()}


def route(h_RD, p, cfg: ModelConfig):
    """Returns (expert_RX, weight_RX, prob_RE): who is chosen, how much, out of what."""
    R, E, X = len(h_RD), cfg.experts, cfg.experts_per_token
    logits_RE = jnp.dot(
        h_RD.astype(jnp.float32), p["router"].astype(jnp.float32), precision="highest"
    )
    if cfg.router == "softmax":
        score_RE = prob_RE = rank_RE = jax.nn.softmax(logits_RE, axis=-1)
    else:
        score_RE = rank_RE = jax.nn.sigmoid(logits_RE)
        prob_RE = score_RE / score_RE.sum(axis=-1, keepdims=True)
    if cfg.router_bias:  # it balances the load, and moves no weight
        rank_RE = rank_RE + p["router_bias"].astype(jnp.float32)[None]
    if cfg.router_groups > 1:
        rank_RGE = rank_RE.reshape(R, cfg.router_groups, -1)
        best_RG = jax.lax.top_k(rank_RGE, 2)[0].sum(axis=-1)
        _, group_Rg = jax.lax.top_k(best_RG, cfg.router_best_groups)
        open_RG = jax.nn.one_hot(group_Rg, cfg.router_groups).any(axis=1)
        rank_RE = jnp.where(open_RG[..., None], rank_RGE, -jnp.inf).reshape(R, E)
    _, expert_RX = jax.lax.top_k(rank_RE, X)
    weight_RX = jnp.take_along_axis(score_RE, expert_RX, axis=1)
    if cfg.router_norm:
        weight_RX /= weight_RX.sum(axis=1, keepdims=True) + 1e-20
    return expert_RX, weight_RX * cfg.router_scale, prob_RE


def dispatch(h_RD, expert_RX, weight_RX, e_gate, e_up, e_down, first, matmul):
    """Returns the weighted sum of the experts first, first + 1, ...: a part of y_RD.

    Choices are sorted by expert, so that each expert multiplies one run of rows; those of
    experts that are elsewhere come last and count for nothing.
    """
    (R, X), E = expert_RX.shape, len(e_gate)
    here_M = expert_RX.reshape(-1) - first
    here_M = jnp.where((here_M >= 0) & (here_M < E), here_M, E)
    order_M = jnp.argsort(here_M)
    sizes_E = jnp.bincount(here_M, length=E + 1)[:E].astype(jnp.int32)
    x_MD = h_RD[order_M // X]
    gate_MI = jax.nn.silu(matmul(x_MD, e_gate, sizes_E))
    up_MI = matmul(x_MD, e_up, sizes_E)
    out_MD = matmul(gate_MI * up_MI, e_down, sizes_E)
    out_MD = jnp.where((jnp.arange(R * X) < sizes_E.sum())[:, None], out_MD, 0)
    out_RXD = out_MD[jnp.argsort(order_M)].reshape(R, X, -1)
    return jnp.einsum("RXD,RX->RD", out_RXD, weight_RX.astype(h_RD.dtype))


def named_axes(spec) -> set[str]:
    """Returns the mesh axes that a PartitionSpec splits over."""
    return {axis for axes in spec if axes for axis in np.atleast_1d(axes)}


def ffw(h_BTD, p, cfg: ModelConfig, real_BT):
    """Returns (y_BTD, the Load of the tokens that are `real`), without shared experts.

    On a mesh every device runs its own experts, or its own part of their width, on its
    own rows, and the parts are added: activations are replicated over `model`, so that
    no token has to travel.
    """
    B, T, D = h_BTD.shape
    routed = route(h_BTD.reshape(B * T, D), p, cfg)
    expert_BTX, weight_BTX, prob_BTE = (x.reshape(B, T, -1) for x in routed)
    weights = {name: p[name].astype(h_BTD.dtype) for name in DISPATCHED}
    matmul = functools.partial(grouped_matmul, implementation=cfg.kernels)

    def part(h_BTD, expert_BTX, weight_BTX, weights, first=0):
        rows = (x.reshape(-1, x.shape[-1]) for x in (h_BTD, expert_BTX, weight_BTX))
        y_RD = dispatch(*rows, **weights, first=first, matmul=matmul)
        return y_RD.reshape(h_BTD.shape)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        y_BTD = part(h_BTD, expert_BTX, weight_BTX, weights)
    else:
        rows = pspec("BTD", h_BTD.shape, ACT, mesh)
        split = {
            name: pspec(dims, weights[name].shape, ACT, mesh)
            for name, dims in DISPATCHED.items()
        }
        whole = "model" in split["e_gate"]  # only once the parts are added
        apart = split["e_gate"][0] == "model"  # experts; otherwise their width
        specs = (rows, rows, rows, split)
        axes = named_axes(rows) | ({"model"} if whole else set())

        def own(*inputs):
            # Explicit: of what a gather spreads by itself, no gradient is summed.
            h_BTD, expert_BTX, weight_BTX, weights = jax.tree.map(
                lambda x, spec: jax.lax.pcast(
                    x, tuple(axes - named_axes(spec)), to="varying"
                ),
                inputs,
                specs,
            )
            first = jax.lax.axis_index("model") * len(weights["e_gate"]) if apart else 0
            y_BTD = part(h_BTD, expert_BTX, weight_BTX, weights, first)
            return jax.lax.psum(y_BTD, "model") if whole else y_BTD

        y_BTD = jax.shard_map(own, in_specs=specs, out_specs=rows, mesh=mesh)(
            h_BTD, expert_BTX, weight_BTX, weights
        )

    chosen_BTE = jax.nn.one_hot(expert_BTX, cfg.experts).sum(axis=2)
    load = Load(
        count_E=jnp.sum(jnp.where(real_BT[..., None], chosen_BTE, 0), axis=(0, 1)),
        prob_E=jnp.sum(jnp.where(real_BT[..., None], prob_BTE, 0), axis=(0, 1)),
        tokens=jnp.sum(real_BT, dtype=jnp.float32),
    )
    return constrain(y_BTD, "BTD"), load
