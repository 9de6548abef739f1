"""Experts in place of one feed-forward: the router, the dispatch and the load.

Each token goes to X of E SwiGLU experts (of inner width I), which its router chooses:

    softmax   s = softmax(W h); the X largest                       (SDAR-MoE, Qwen3-MoE)
    sigmoid   s = sigmoid(W h); the X largest of s + bias, in the best groups of experts,
              a group being as good as its two best              (LLaDA2; DeepSeek-V3's)
              where X is 1 that s stays as it is, as in their codes

and y = sum_x w_x expert_x(h), where w are the chosen s, made to sum to one and scaled as
the config says; experts shared by all tokens (inner width Z together) are added to it by
the layer. No token is ever dropped. The router computes in f32.

Letters: c choices of all tokens (R x X), g groups of experts, e experts of a group,
b groups that are open to a token.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from dllm_jax.models.config import ModelConfig
from dllm_jax.pallas_kernels import grouped_matmul
from dllm_jax.sharding import ACT, constrain, pspec

# The experts' own weights, in one layer. Routed tokens are not a plain product with them,
# so they are dispatched here and not projected, and have no adapters.
DISPATCHED = {"e_gate": "EDI", "e_up": "EDI", "e_down": "EID"}
SAVED = "experts"  # names what a rematerialised layer may keep of their products


@flax.struct.dataclass
class Load:
    """What a layer's router did, in sums: those of several batches may be added."""

    count_E: jax.Array  # how often each expert was chosen
    prob_E: jax.Array  # the router's probability of each, summed over the tokens
    tokens: jax.Array  # that were routed


def load_of(expert_BTX, prob_BTE, real_BT) -> Load:
    """Returns the Load of the tokens that are `real`."""
    chosen_BTE = jax.nn.one_hot(expert_BTX, prob_BTE.shape[-1]).sum(axis=2)
    return Load(
        count_E=jnp.sum(jnp.where(real_BT[..., None], chosen_BTE, 0), axis=(0, 1)),
        prob_E=jnp.sum(jnp.where(real_BT[..., None], prob_BTE, 0), axis=(0, 1)),
        tokens=jnp.sum(real_BT, dtype=jnp.float32),
    )


def balance(load: Load, experts_per_token: int) -> dict[str, jax.Array]:
    """Returns metrics of a Load, whose leaves may be stacked over layers; means over them.

    expert_aux_loss: E sum_e f_e P_e, with f_e the choices of e per token and P_e its mean
    probability (Switch, arXiv 2101.03961, equations 4 to 6, with X choices instead of
    one): X when balanced. expert_max_load: the busiest expert's choices over the average.
    """
    E = load.count_E.shape[-1]
    tokens_1 = jnp.maximum(load.tokens, 1)[..., None]
    loss = E * jnp.sum(load.count_E * load.prob_E / tokens_1**2, axis=-1)
    busiest = load.count_E.max(axis=-1) / tokens_1[..., 0] * E / experts_per_token
    return {"expert_aux_loss": loss.mean(), "expert_max_load": busiest.mean()}


@jax.named_scope("router")
def route(h_RD, p, cfg: ModelConfig):
    """Returns (expert_RX, weight_RX, prob_RE): who is chosen, how much, out of what.

    p: the layer's parameters, here "router" [D, E] and, with a bias, "router_bias" [E].
    """
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
        rank_Rge = rank_RE.reshape(R, cfg.router_groups, -1)
        rank_Rg = jax.lax.top_k(rank_Rge, 2)[0].sum(axis=-1)
        _, group_Rb = jax.lax.top_k(rank_Rg, cfg.router_best_groups)
        open_Rg = jax.nn.one_hot(group_Rb, cfg.router_groups).any(axis=1)
        rank_RE = jnp.where(open_Rg[..., None], rank_Rge, -jnp.inf).reshape(R, E)
    _, expert_RX = jax.lax.top_k(rank_RE, X)
    weight_RX = jnp.take_along_axis(score_RE, expert_RX, axis=1)
    if cfg.router_norm and (X > 1 or cfg.router == "softmax"):
        weight_RX /= weight_RX.sum(axis=1, keepdims=True) + 1e-20
    return expert_RX, weight_RX * cfg.router_scale, prob_RE


def mixture(h_BTD, p, cfg: ModelConfig, real_BT):
    """Returns (y_BTD, the Load of the tokens that are `real`), without shared experts.

    p: the layer's parameters, "router" and those of DISPATCHED among them. With a "number"
    these are stacks of layers, and it is the layer's.
    """
    B, T, D = h_BTD.shape
    routed = route(h_BTD.reshape(B * T, D), p, cfg)
    expert_BTX, weight_BTX, prob_BTE = (x.reshape(B, T, -1) for x in routed)
    weights = {name: p[name].astype(h_BTD.dtype) for name in DISPATCHED}

    def matmul(x_nD, w_EDF, sizes_E):
        how = {"number": p.get("number"), "implementation": cfg.kernels}
        return checkpoint_name(grouped_matmul(x_nD, w_EDF, sizes_E, **how), SAVED)

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        y_BTD = visit(h_BTD, expert_BTX, weight_BTX, weights, first=0, matmul=matmul)
    else:
        y_BTD = visit_on_mesh(
            h_BTD, expert_BTX, weight_BTX, weights, matmul=matmul, mesh=mesh
        )
    load = load_of(expert_BTX, prob_BTE, real_BT)
    return constrain(y_BTD, "BTD"), load


def visit_on_mesh(h_BTD, expert_BTX, weight_BTX, weights, *, matmul, mesh):
    """Returns `visit` of all experts, which lie apart on the mesh, as y_BTD.

    Every device runs its own experts, or its own part of their width, on its own rows,
    and the parts are added: activations are replicated over `model`, so that no token has
    to travel.
    """
    rows = pspec("BTD", h_BTD.shape, ACT, mesh)
    split = {
        name: pspec(dims.rjust(weights[name].ndim, "L"), weights[name].shape, ACT, mesh)
        for name, dims in DISPATCHED.items()
    }
    in_specs = (rows, rows, rows, split)
    # Otherwise their width, or nothing: then the spec is empty.
    depth = weights["e_gate"].ndim - 3  # 1: a stack of layers
    experts_apart = tuple(split["e_gate"])[depth : depth + 1] == ("model",)
    parts_are_added = "model" in split["e_gate"]
    axes = axes_of(rows) | axes_of(split["e_gate"])  # what an output's part varies on

    def varying(x, spec):
        return jax.lax.pcast(x, tuple(axes - axes_of(spec)), to="varying")

    def on_device(*inputs):
        # By pcast, explicitly: shard_map sums a gradient over the axes on which it knows
        # the value to vary, and a gather inside that spreads a value tells it nothing.
        h_BTD, expert_BTX, weight_BTX, weights = jax.tree.map(varying, inputs, in_specs)
        first = 0
        if experts_apart:
            first = jax.lax.axis_index("model") * weights["e_gate"].shape[-3]
        parts = mesh.shape["model"] if experts_apart else 1
        routed = h_BTD, expert_BTX, weight_BTX, weights
        y_BTD = visit(*routed, first=first, matmul=matmul, parts=parts)
        return jax.lax.psum(y_BTD, "model") if parts_are_added else y_BTD

    return jax.shard_map(on_device, in_specs=in_specs, out_specs=rows, mesh=mesh)(
        h_BTD, expert_BTX, weight_BTX, weights
    )


def visit(h_BTD, expert_BTX, weight_BTX, weights, *, first, matmul, parts=1):
    """Returns what the experts first, first + 1, ... add to y_BTD.

    weights: those experts' own, by the names of DISPATCHED. expert_BTX counts all experts.
    """
    B, T, D = h_BTD.shape
    rows = (x.reshape(B * T, -1) for x in (h_BTD, expert_BTX, weight_BTX))
    y_RD = dispatch(*rows, weights, first=first, matmul=matmul, parts=parts)
    return y_RD.reshape(B, T, D)


@jax.named_scope("dispatch")
def dispatch(h_RD, expert_RX, weight_RX, weights, *, first, matmul, parts):
    """Returns the weighted sum [R, D] of the experts first, first + 1, ...: see `visit`.

    Choices are sorted by expert, so that each expert multiplies one run of rows; those of
    experts that are elsewhere come last and count for nothing. parts: devices among which
    the experts lie apart.
    """
    (R, X), E = expert_RX.shape, weights["e_gate"].shape[-3]
    expert_c = expert_RX.reshape(-1) - first
    expert_c = jnp.where((expert_c >= 0) & (expert_c < E), expert_c, E)
    order_c = jnp.argsort(expert_c)
    sizes_E = jnp.bincount(expert_c, length=E + 1)[:E].astype(jnp.int32)
    place_RX = jnp.argsort(order_c).reshape(R, X)

    def of_first(count, h_RD, weights):
        """Returns out_RXD of the first `count` choices in order, 0 of the others."""
        x_nD = h_RD[order_c[:count] // X]
        gate_nI = jax.nn.silu(matmul(x_nD, weights["e_gate"], sizes_E))
        up_nI = matmul(x_nD, weights["e_up"], sizes_E)
        out_nD = matmul(gate_nI * up_nI, weights["e_down"], sizes_E)
        # Rows behind the last expert's are of choices elsewhere, and 0.
        return out_nD.at[place_RX].get(mode="fill", fill_value=0)

    # Of choices that go evenly to all devices, twice a device's share is mostly enough.
    few, every = -(-2 * R * X // parts), functools.partial(of_first, R * X)
    if few >= R * X:
        out_RXD = every(h_RD, weights)
    else:
        of_few = functools.partial(of_first, few)
        out_RXD = jax.lax.cond(sizes_E.sum() > few, every, of_few, h_RD, weights)
    return jnp.einsum("RXD,RX->RD", out_RXD, weight_RX.astype(h_RD.dtype))


def axes_of(spec: PartitionSpec) -> set[str]:
    """Returns the mesh axes that a PartitionSpec splits over."""
    return {axis for axes in spec if axes for axis in np.atleast_1d(axes)}
