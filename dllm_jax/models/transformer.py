"""The language tower: specs, init, embed, trunk and its two heads.

A pre-norm decoder of the Qwen3 / Llama line, whose layers layer.py has: their second half is
one feed-forward, or many experts: from the first layer on, after some dense ones, or in the
last of each group of layers. Who sees whom is the `Mask`; nothing here is causal. The stored
parameters may be f32 while computation is in `cfg.dtype`; norms' statistics and logits are
f32.

A named scope ("embed", "attention", "feed_forward", "experts", "final_norm", "head",
"value_head") marks each part, so that a profile can be read. Scopes cost nothing: they
are no part of the compiled program.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dllm_jax import pallas_kernels
from dllm_jax.models import embedding, lora, moe
from dllm_jax.models.cache import KVCache, PagedKVCache, Window, asked
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.layer import (
    attend,
    attend_paged,
    feed_forward,
    rms_norm,
    turns,
    widen,
)
from dllm_jax.models.mask import Mask
from dllm_jax.models.vision import siglip, soft
from dllm_jax.pallas_kernels import cpu_products, reference
from dllm_jax.pallas_kernels.attend import SAVED
from dllm_jax.pallas_kernels.cpu_products import Tiled, Transposed
from dllm_jax.sharding import PARAM, constrain, named

Params = dict  # nested: a word -> an array or another dict; what specs() declares

INPUT = "layer_input"  # names it for `REMAT`
# Parameters that compute in f32, or are looked up.
EXACT = {"embed", "record", "router", "router_bias", "value"}
# What the backward pass may read instead of computing it again, by ModelConfig.remat.
REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    # Recomputes no product with weights and no attention.
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(SAVED, moe.SAVED),
    ),
    # Recomputes no attention; "offload" also keeps layers' inputs in the host's memory.
    "attention": jax.checkpoint_policies.save_only_these_names(SAVED),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[SAVED],
        names_which_can_be_offloaded=[INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def guided(x_BWD, blank_BWD, guidance):
    """Returns hidden states whose logits are (1 + g) z - g z of the blank prompt's.

    Classifier-free guidance (arXiv 2207.12598, Eq. 6): the head is linear, so what it would
    do to logits is done here, and everything behind sees one distribution. In f32.
    """
    x32, blank32 = x_BWD.astype(jnp.float32), blank_BWD.astype(jnp.float32)
    return (x32 + guidance * (x32 - blank32)).astype(x_BWD.dtype)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A parameter, declared once: shape, sharding and layout follow from its letters."""

    dims: str  # letters of ModelConfig.sizes, a stack's first: "LDNH"
    init: str = "normal"  # "normal" (std 0.02), "ones" or "zeros"


def specs(cfg: ModelConfig, heads: tuple[str, ...] = ("lm",)) -> dict:
    """Returns the tree of Specs; `heads` names what the tower ends in: "lm", "value".

    With "record" it sees the log-probs of its tokens, too (`with_record`). Keys: embed, norm,
    layers and, where the model has them, first (dense layers, which come first in a tower
    with experts or in each group of its layers), head, value, record,
    projector and newline (of images), and vision (their tower), which `heads` must name,
    too. With `cfg.lora` it is the tree of what is trained: `lora.join` adds the frozen
    weights.
    """
    tree = {"embed": Spec("VD"), "norm": Spec("D", "ones")}
    tree["layers"] = stack(cfg, "L", experts=cfg.experts > 0)
    if cfg.sizes["Y"]:
        tree["first"] = stack(cfg, "Y", experts=False)
    if "lm" in heads and not cfg.tied:
        tree["head"] = Spec("DV")
    if "value" in heads:
        tree["value"] = Spec("D", "zeros")  # V = 0 before the first update
    if "record" in heads:
        tree["record"] = Spec("D", "zeros")  # nothing is seen of it then
    if cfg.vision:
        tree |= declared(soft.PARAMETERS)
    if cfg.vision and "vision" in heads:
        tree["vision"] = declared(siglip.PARAMETERS)
    return lora.specs(tree, cfg.lora) if cfg.lora else tree


def declared(table: dict) -> dict:
    """Returns the Specs of a table of (letters, what a fresh one is), nested or not."""
    return {
        name: declared(row) if isinstance(row, dict) else Spec(*row)
        for name, row in table.items()
    }


def stack(cfg: ModelConfig, letter: str, *, experts: bool) -> dict[str, Spec]:
    """Returns the Specs of layers of one kind, stacked on dimension `letter`: L or Y."""
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
    # The feed-forward that every token visits: a dense layer's, or the shared experts'.
    if experts:
        width = "Z" if cfg.shared_experts else ""
    else:
        width = "F"
    if width:
        layer |= {
            "w_gate": Spec("D" + width),
            "w_up": Spec("D" + width),
            "w_down": Spec(width + "D"),
        }
    if experts:
        layer |= {"router": Spec("DE")}
        layer |= {name: Spec(dims) for name, dims in moe.DISPATCHED.items()}
        if cfg.router_bias:
            layer |= {"router_bias": Spec("E", "zeros")}
    return {
        name: dataclasses.replace(spec, dims=letter + spec.dims)
        for name, spec in layer.items()
    }


def shape(spec: Spec, cfg: ModelConfig) -> tuple[int, ...]:
    """Returns the shape that `spec` has in this model."""
    return tuple(cfg.sizes[letter] for letter in spec.dims)


def abstract(cfg: ModelConfig, mesh, dtype, heads=("lm",)) -> Params:
    """Returns the parameters as ShapeDtypeStructs with their sharding on the mesh."""

    def struct(path, spec):
        sizes = shape(spec, cfg)
        place = named(spec.dims, sizes, PARAM, mesh)
        return jax.ShapeDtypeStruct(sizes, dtype_of(path, dtype), sharding=place)

    return jax.tree_util.tree_map_with_path(struct, specs(cfg, heads))


def dtype_of(path, dtype) -> jnp.dtype:
    """Returns the dtype that a parameter has where the others are rounded to `dtype`.

    What computes in f32 is not: a rounded router would choose other experts than that which
    learns.
    """
    exact = {getattr(key, "key", "") for key in path} & (EXACT - {"embed"})
    return jnp.promote_types(dtype, "float32") if exact else jnp.dtype(dtype)


def init(key, cfg: ModelConfig, dtype=jnp.float32, heads=("lm",)) -> Params:
    """Returns fresh parameters: normal with std 0.02, norms one, value head zero."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(specs(cfg, heads))
    keys = jax.random.split(key, len(leaves))

    def fresh(key, path, spec):
        sizes, kind = shape(spec, cfg), dtype_of(path, dtype)
        if spec.init == "normal":
            return 0.02 * jax.random.normal(key, sizes, kind)
        return jnp.full(sizes, spec.init == "ones", kind)

    return jax.tree.unflatten(tree, [fresh(k, *leaf) for k, leaf in zip(keys, leaves)])


def rounded(params: Params, cfg: ModelConfig) -> Params:
    """Returns parameters in the computing dtype, where a forward pass rounds them first.

    Left as they are: what computes in f32 (routers, the value head), and the embedding,
    whose gradient is summed in f32 and has the embedding's dtype.
    """

    def leaf(path, x):
        exact = {key.key for key in path} & EXACT
        return x if exact else x.astype(cfg.dtype)

    return jax.tree_util.tree_map_with_path(leaf, params)


@jax.named_scope("embed")
def embed(params: Params, tokens_BT, cfg: ModelConfig):
    """Returns the input embeddings x_BTD in the computing dtype.

    Ids from `cfg.vocab` on name rows of params["soft"] [M, D], where there is one: images'
    parts (soft.rows). Nothing else in a model knows of them.

    Gradients are summed in f32: in a noised batch the mask token alone has thousands of
    addends, and a sum in bfloat16 soon stops to grow.
    """
    if "soft" not in params:
        return embedding.lookup_summed_in_f32(params["embed"], tokens_BT, cfg.dtype)
    word_BT = jnp.minimum(tokens_BT, cfg.vocab - 1)
    x_BTD = embedding.lookup_summed_in_f32(params["embed"], word_BT, cfg.dtype)
    row_BT = jnp.clip(tokens_BT - cfg.vocab, 0, len(params["soft"]) - 1)
    soft_BTD = embedding.lookup_summed_in_f32(params["soft"], row_BT, cfg.dtype)
    return jnp.where((tokens_BT >= cfg.vocab)[..., None], soft_BTD, x_BTD)


def with_record(params: Params, x_BTD, logp_BT):
    """Returns embeddings plus log-probs (nats; 0: none) times the learned "record" [D].

    It starts at zero, so that a network begins as one that does not see them.
    """
    seen_BTD = logp_BT[..., None] * widen(params["record"].astype(jnp.float32), 3)
    return x_BTD + seen_BTD.astype(x_BTD.dtype)


# ---- The tower -------------------------------------------------------------------------


def trunk(
    params: Params,
    x_BTD,
    pos_BT,
    mask: Mask | Window,
    cfg: ModelConfig,
    cache: KVCache | PagedKVCache | None = None,
):
    """Returns (normed hidden states x_BTD, keys and values, the experts' load).

    pos_BT: rotary positions. mask: who sees whom, a Mask; with pages a Window.
    cache: what the rows see besides themselves, in one of three forms:

    None          nothing. Returned is the KVCache of exactly these T positions.
    KVCache       S slots, which come before the T own keys in the order of the mask.
                  It is only read, and returned is the same as without: keeping the fresh
                  keys is the caller's decision, and not keeping them is how a denoising
                  step is undone.
    PagedKVCache  pages. The Window says what is kept, whether they are seen, and of which
                  windows x is returned; so is the whole pool.

    The load is the moe.Load of each layer with experts, stacked over them, or None.
    Tokens that see nothing are padding, and do not count.
    """
    turn, paged = turns(pos_BT, cfg), isinstance(cache, PagedKVCache)
    if paged:
        real_BT = jnp.ones(pos_BT.shape, bool)
    else:
        real_BT = (mask.q_end_BT > mask.q_begin_BT) | (mask.q_group_BT >= 0)
    if paged or cache is None:
        mask = planned(mask, cfg)

    def layer(carry, inputs, asked_da=None):
        (x_BTD, pages), (p, number) = carry, inputs
        x_BTD = checkpoint_name(x_BTD, INPUT)
        if paged:
            attended = attend_paged(x_BTD, p, turn, mask, pages, number, cfg, asked_da)
            (x_BTD, pages), fresh = attended, None
        else:
            cached = layer_of(cache, number)
            x_BTD, fresh = attend(x_BTD, p, turn, mask, cached, cfg)
        x_BTD, load = feed_forward(x_BTD, p, asked(real_BT, asked_da), cfg)
        return (x_BTD, pages), (fresh, load)

    if cfg.remat != "none":
        layer = jax.checkpoint(layer, policy=REMAT[cfg.remat])
    carry = x_BTD, (cache.k_LPOKH, cache.v_LPOKH) if paged else None
    asked_da = mask.asked_da if paged else None
    if isinstance(params["layers"], tuple):
        layers = in_order(params, cfg)
        carry, fresh, load = loop_layers(layer, carry, layers, asked_da)
    elif cfg.sparse_step > 1:
        carry, fresh, load = scan_groups(layer, carry, params, cfg.sparse_step)
    else:
        carry, fresh, load = scan_stacks(layer, carry, params, whole=paged)
    x_BTD, pages = carry
    if not isinstance(params["layers"], tuple):
        x_BTD = asked(x_BTD, asked_da)
    with jax.named_scope("final_norm"):
        x_BTD = rms_norm(x_BTD, params["norm"], cfg.norm_eps)
    return x_BTD, PagedKVCache(*pages) if paged else KVCache(*fresh), load


def planned(mask: Mask | Window, cfg: ModelConfig):
    """Returns the mask with what kernels have to know of it, once for all layers.

    That is where the keys are the queries' own: of a Window, if it is a canvas.
    """
    if not isinstance(mask, Window):
        sizes = cfg.heads // cfg.kv_heads, cfg.head_dim
        return pallas_kernels.planned(mask, *sizes, implementation=cfg.kernels)
    return mask if mask.own is None else mask.replace(own=planned(mask.own, cfg))


def separate(params: Params) -> Params:
    """Returns parameters whose layers' weights are arrays of their own, in tuples of layers."""

    def layers(stack: dict) -> tuple[dict, ...]:
        leaves, tree = jax.tree.flatten(stack)
        return tuple(tree.unflatten(layer) for layer in zip(*leaves, strict=True))

    stacks = params.keys() & {"first", "layers"}
    return params | {name: layers(params[name]) for name in stacks}


def restacked(params: Params) -> Params:
    """Returns the parameters of which these are `separate`; others are left as they are."""
    tuples = [name for name, x in params.items() if isinstance(x, tuple)]
    return params | {name: stack_of(params[name]) for name in tuples}


def stack_of(layers):
    """Returns one tree of the trees of layers, whose arrays it stacks."""
    return jax.tree.map(lambda *x: jnp.stack(x), *layers)


def in_order(params: Params, cfg: ModelConfig) -> list[Params]:
    """Returns each layer's parameters by depth, where `params` has tuples of layers."""
    at = {}
    for name, letter in (("first", "Y"), ("layers", "L")):
        at |= dict(zip(cfg.layer_numbers[letter], params.get(name, ()), strict=True))
    return [at[number] for number in range(cfg.layers)]


def loop_layers(layer, carry, layers: list[Params], asked_da):
    """Does what `scan_stacks` does with layers whose weights are arrays of their own.

    The loop is Python's: every layer is compiled. See acting.py for what that gains. The
    last one's windows are but those asked: of others only keys and values are of use.
    """
    layer = jax.jit(layer)  # traced for the first, and called by all of the same shapes
    fresh, loads = [], []
    for number, p in enumerate(layers):
        of_last = asked_da if number + 1 == len(layers) else None
        carry, (fresh_of_layer, load) = layer(carry, (p, jnp.int32(number)), of_last)
        fresh.append(fresh_of_layer)
        loads += [] if load is None else [load]

    return carry, stack_of(fresh), stack_of(loads) if loads else None


def scan_stacks(layer, carry, params: Params, whole: bool):
    """Returns (carry, keys and values of all layers, the load), one stack after the other.

    layer: a function of lax.scan, from (carry, (a layer's parameters, its number)) to
    (carry, (its keys and values or None, its load or None)). whole: the layer has the stack
    of all experts and its number there: of its own ones a kernel would want a copy.
    """
    fresh, depth = [], 0
    for name in ("first", "layers"):  # the dense layers, then those with experts
        if name in params:
            begin, depth = depth, depth + len(params[name]["attn_norm"])
            kept = moe.DISPATCHED.keys() & params[name].keys() if whole else ()
            experts = {key: params[name][key] for key in kept}
            rest = {key: x for key, x in params[name].items() if key not in kept}

            # The number is carried: of an array of numbers a GPU copies each layer's by itself.
            def of_stack(carry, p, experts=experts, begin=begin):
                carry, number = carry
                more = experts | {"number": number - begin} if experts else {}
                carry, out = layer(carry, (p | more, number))
                return (carry, number + 1), out

            start = carry, jnp.int32(begin)
            (carry, _), (fresh_of_stack, load) = jax.lax.scan(of_stack, start, rest)
            fresh.append(fresh_of_stack)
    return carry, stacked(fresh), load


def scan_groups(layer, carry, params: Params, step: int):
    """Does what `scan_stacks` does, group after group: step - 1 dense layers, a sparse one.

    Dense layers that fill no group come last. A group is compiled once, whatever the depth.
    Only where there are such layers are the weights of `first` copied, to be divided.
    """
    groups = len(params["layers"]["attn_norm"])
    dense = groups * (step - 1)  # of the dense layers, those in groups
    depth = groups * step  # where the dense layers behind the groups begin

    def group(carry, inputs):
        first, last, numbers = inputs
        carry, (fresh, _) = jax.lax.scan(layer, carry, (first, numbers[:-1]))
        carry, (fresh_of_last, load) = layer(carry, (last, numbers[-1]))
        fresh_of_last = jax.tree.map(lambda x: x[None], fresh_of_last)
        return carry, (stacked([fresh, fresh_of_last]), load)

    grouped = jax.tree.map(
        lambda x: x[:dense].reshape(groups, step - 1, *x.shape[1:]), params["first"]
    )
    numbers = jnp.arange(depth).reshape(groups, step)
    carry, (fresh, load) = jax.lax.scan(
        group, carry, (grouped, params["layers"], numbers)
    )
    fresh = [jax.tree.map(lambda x: x.reshape(depth, *x.shape[2:]), fresh)]
    behind = jax.tree.map(lambda x: x[dense:], params["first"])
    if count := len(behind["attn_norm"]):
        numbers = jnp.arange(depth, depth + count)
        carry, (fresh_behind, _) = jax.lax.scan(layer, carry, (behind, numbers))
        fresh.append(fresh_behind)
    return carry, stacked(fresh), load


def stacked(fresh: list):
    """Returns keys and values of several stacks of layers as those of one, or None."""
    return jax.tree.map(lambda *x: x[0] if len(x) == 1 else jnp.concatenate(x), *fresh)


def layer_of(cache: KVCache | None, number):
    """Returns the keys and values (k_BSKH, v_BSKH) of layer `number` of a stacked cache.

    It is indexed inside the scan over layers: a scan over the cache itself would copy
    every layer of it.
    """
    if cache is None:
        return None
    return tuple(
        jax.lax.dynamic_index_in_dim(x, number, keepdims=False)
        for x in (cache.k_LBSKH, cache.v_LBSKH)
    )


def head(params: Params, cfg: ModelConfig, as_it_lies=False):
    """Returns (the language head [D, V], the id of its first column, the forbidden column).

    It is in the computing dtype, and has the columns of the ids that may be drawn alone; a
    column beyond them forbids nothing. A Tiled one is copied, or comes as it lies.
    """
    weight = params["head"] if "head" in params else params["embed"].T
    first, end = cfg.drawn or (0, cfg.vocab)
    forbidden = cfg.mask_id - first if first <= cfg.mask_id < end else end - first
    if isinstance(weight, Transposed):  # cut as it lies: what reads it turns it back
        weight = weight.w[first:end].T
    elif isinstance(weight, Tiled):  # in the computing dtype, with all columns
        return weight if as_it_lies else weight.matrix(), first, forbidden
    elif cfg.drawn:
        weight = weight[:, first:end]
    return constrain(weight.astype(cfg.dtype), "DV"), first, forbidden


@jax.named_scope("head")
def logits(params: Params, x_BWD, cfg: ModelConfig):
    """Returns f32 logits [B, W, V] for a sampling window; the mask id is forbidden.

    V counts the ids that may be drawn: the first column's is that of `head`.
    """
    weight_DV, _, forbidden = head(params, cfg, as_it_lies=True)
    x_RD = x_BWD.reshape(-1, cfg.d_model)
    if isinstance(weight_DV, Tiled):
        logits_RV = cpu_products.by_tiles(x_RD, weight_DV.w)
    elif isinstance(params.get("head"), Transposed):
        logits_RV = cpu_products.by_transpose(x_RD, weight_DV.T, jnp.float32)
    else:
        logits_RV = reference.logits(x_RD, weight_DV)
    logits_BWV = constrain(logits_RV.reshape(*x_BWD.shape[:2], -1), "BWV")
    return logits_BWV.at[..., forbidden].set(reference.NEVER)


@jax.named_scope("head")
def token_logprob(params: Params, x_BUD, token_BU, cfg: ModelConfig):
    """Returns (log-prob, entropy) of tokens at their positions, [B, U], nats, f32.

    The same ids are forbidden here as in `logits`: sampling and training have one
    distribution.
    """
    weight_DV, first, forbidden = head(params, cfg)
    return pallas_kernels.token_logprob(
        x_BUD,
        weight_DV,
        token_BU - first,  # what is not asked for stays below 0
        forbidden=forbidden,
        implementation=cfg.kernels,
    )


@jax.named_scope("head")
def selection(params: Params, x_BUD, token_BU, border_BU, cfg: ModelConfig, rule):
    """Returns what `pallas_kernels.selection` does, of positions' draws, by its Rule."""
    weight_DV, first, forbidden = head(params, cfg)
    return pallas_kernels.selection(
        x_BUD,
        weight_DV,
        token_BU - first,  # what is not asked for stays below 0
        border_BU,
        rule=rule,
        forbidden=forbidden,
        implementation=cfg.kernels,
    )


@jax.named_scope("head")
def token_draw(
    params: Params, x_BWD, key_B, temperature_B, cfg: ModelConfig, wanted_BW=None
):
    """Returns tokens drawn and what is known of them; see `pallas_kernels.token_draw`."""
    weight_DV, first, forbidden = head(params, cfg, as_it_lies=True)
    token_BW, *known = pallas_kernels.token_draw(
        x_BWD,
        weight_DV,
        key_B,
        temperature_B,
        forbidden=forbidden,
        wanted_BW=wanted_BW,
        implementation=cfg.kernels,
    )
    return token_BW + first, *known


@jax.named_scope("value_head")
def value(params: Params, x_BUD):
    """Returns the value head's output [B, U], f32."""
    return jnp.einsum(
        "BUD,D->BU", x_BUD.astype(jnp.float32), params["value"].astype(jnp.float32)
    )
