"""Experts against a loop over tokens, against dLLM-RL's numbers, and on a mesh."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from dllm_jax import pallas_kernels, sharding
from dllm_jax.models import hf, layer, mask, moe, repository, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.pallas_kernels.reference import NEVER
from tests.goldens import reader
from tests.models.common import SIGMOID, SOFTMAX, STEPPED, primitives, weights

NEAR = {"atol": 1e-4, "rtol": 0}
EITHER = pytest.mark.parametrize("cfg", [SOFTMAX, SIGMOID], ids=lambda cfg: cfg.router)


def first(cfg: ModelConfig) -> dict:
    """Returns the first layer with experts."""
    return {name: x[0] for name, x in weights(cfg)["layers"].items()}


@functools.partial(jax.jit, static_argnames="cfg")
def ffw(h_BTD, p, real_BT, *, cfg):
    """Returns the experts' output and their load."""
    return moe.mixture(h_BTD, p, cfg, real_BT)


def choose(logits_E, bias_E, cfg):
    """Returns (experts, weights) of one token, by the definition."""
    e = np.exp(logits_E - logits_E.max())
    score_E = e / e.sum() if cfg.router == "softmax" else 1 / (1 + np.exp(-logits_E))
    rank_E = score_E + bias_E
    size = cfg.experts // cfg.router_groups
    sums = [np.sort(g)[-2:].sum() for g in rank_E.reshape(-1, size)]
    best = np.argsort(sums)[::-1][: cfg.router_best_groups]
    allowed = [i for i in range(cfg.experts) if i // size in best]
    chosen = sorted(allowed, key=lambda i: -rank_E[i])[: cfg.experts_per_token]
    alone = (
        cfg.router == "sigmoid" and len(chosen) == 1
    )  # such a score is left as it is
    norm = score_E[chosen].sum() if cfg.router_norm and not alone else 1
    return chosen, score_E[chosen] / norm * cfg.router_scale


@pytest.mark.parametrize("norm, count", [(True, 3), (False, 3), (True, 1)])
@EITHER
def test_experts_are_a_loop_over_tokens(cfg, norm, count):
    cfg = dataclasses.replace(cfg, router_norm=norm, experts_per_token=count)
    p = jax.tree.map(np.asarray, first(cfg))
    h = np.random.default_rng(1).normal(size=(2, 9, cfg.d_model)).astype(np.float32)
    real = np.arange(9) < np.array([[9], [4]])
    y, load = ffw(h, p, real, cfg=cfg)
    count = np.zeros(cfg.experts)
    for b, t in np.ndindex(2, 9):
        bias = p.get("router_bias", np.zeros(cfg.experts))
        chosen, weight = choose(h[b, t] @ p["router"], bias, cfg)
        want = 0
        for i, w in zip(chosen, weight, strict=True):
            gate, up = h[b, t] @ p["e_gate"][i], h[b, t] @ p["e_up"][i]
            want += w * ((gate / (1 + np.exp(-gate)) * up) @ p["e_down"][i])
            count[i] += real[b, t]
        np.testing.assert_allclose(y[b, t], want, **NEAR)
    np.testing.assert_array_equal(load.count_E, count)
    assert load.tokens == real.sum()
    assert float(load.prob_E.sum()) == pytest.approx(real.sum(), rel=1e-5)


def test_the_choice_is_narrower_than_the_experts():
    p = first(SIGMOID)
    h = jnp.asarray(np.random.default_rng(1).normal(size=(40, 16)))
    open_cfg = dataclasses.replace(SIGMOID, router_groups=1, router_bias=False)
    narrow, plain = (moe.route(h, p, cfg)[0] for cfg in (SIGMOID, open_cfg))
    assert all(len(set(row // 2)) <= 2 for row in np.asarray(narrow))
    assert (np.sort(narrow) != np.sort(plain)).any()


def test_balance_by_hand():
    load = moe.Load(
        count_E=jnp.array([[2.0, 2, 2, 2], [4, 4, 0, 0]]),
        prob_E=jnp.array([[1.0, 1, 1, 1], [2, 1, 0.5, 0.5]]),
        tokens=jnp.array([4.0, 4.0]),
    )
    metrics = moe.balance(load, experts_per_token=2)
    # f = (1/2, ...), P = (1/4, ...): 4 x 4/8 = 2.  f = (1, 1, 0, 0): 4 x (1/2 + 1/4) = 3.
    assert float(metrics["expert_aux_loss"]) == pytest.approx((2 + 3) / 2)
    assert float(metrics["expert_max_load"]) == pytest.approx((1 + 2) / 2)


# ---- In the tower --------------------------------------------------------------------


def hidden(params, tokens_BT, cfg):
    """Returns (hidden states, loads)."""
    pos_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    seen = mask.block(pos_BT, cfg.block)
    x_BTD = transformer.embed(params, tokens_BT, cfg)
    x_BTD, _, load = transformer.trunk(params, x_BTD, pos_BT, seen, cfg)
    return x_BTD, load


@functools.partial(jax.jit, static_argnames="cfg")
def forward(params, tokens_BT, cfg):
    """Returns (logits, loads)."""
    x_BTD, load = hidden(params, tokens_BT, cfg)
    return transformer.logits(params, x_BTD, cfg), load


@functools.partial(jax.jit, static_argnames="cfg")
def run(params, tokens_BT, cfg):
    """Returns (logits, loads, gradient of a number that depends on every parameter)."""

    def mean(params):
        x_BTD, load = hidden(params, tokens_BT, cfg)
        logits_BTV = transformer.logits(params, x_BTD, cfg)
        logp, entropy = transformer.token_logprob(params, x_BTD, tokens_BT, cfg)
        return jnp.mean(logp) + 0.1 * jnp.mean(entropy), (logits_BTV, load)

    (_, (logits_BTV, load)), grads = jax.value_and_grad(mean, has_aux=True)(params)
    return logits_BTV, load, grads


@pytest.mark.parametrize("block", reader.numbered("sdar_moe", "logits_bs"))
def test_logits_and_routing_of_the_reference(block):
    cfg, params = hf.load(reader.checkpoint("sdar_moe"))
    g = reader.tensors("sdar_moe/forward/goldens.safetensors")
    tokens = g["input_ids"][None]
    logits, load = forward(params, tokens, dataclasses.replace(cfg, block=block))
    keep = np.arange(cfg.vocab) != cfg.mask_id
    want = g[f"logits_bs{block}"]
    np.testing.assert_allclose(logits[0][:, keep], want[:, keep], **NEAR)
    assert (np.asarray(logits)[..., cfg.mask_id] == NEVER).all()
    router = g[f"router_logits_bs{block}"]
    prob = np.asarray(jax.nn.softmax(router, axis=-1)).sum(axis=1)
    np.testing.assert_allclose(load.prob_E, prob, **NEAR)
    chosen = np.argsort(router, axis=-1)[..., -cfg.experts_per_token :]
    count = [np.bincount(x.ravel(), minlength=cfg.experts) for x in chosen]
    np.testing.assert_array_equal(load.count_E, count)
    assert (load.tokens == tokens.size).all()


@pytest.mark.parametrize("block", reader.numbered("llada2", "logits_bs"))
def test_logits_of_llada2(block):
    cfg, params = hf.load(reader.checkpoint("llada2"))
    g = reader.tensors("llada2/forward/goldens.safetensors")
    cfg = dataclasses.replace(cfg, block=block)
    logits, _ = forward(params, g["input_ids"], cfg)
    keep = np.arange(cfg.vocab) != cfg.mask_id
    want = g[f"logits_bs{block}"]
    np.testing.assert_allclose(logits[..., keep], want[..., keep], **NEAR)


def dispatched(parts: int, x_RD, expert_RX, weights):
    """Returns dispatch of the experts 2 and 3 of 8 that lie on `parts` devices."""
    weight_RX = jnp.arange(1.0, expert_RX.size + 1).reshape(expert_RX.shape)
    matmul = functools.partial(pallas_kernels.grouped_matmul, implementation="any")
    how = {"first": 2, "matmul": matmul, "parts": parts}
    return moe.dispatch(x_RD, expert_RX, weight_RX, weights, **how)


@functools.partial(jax.jit, static_argnums=0)
def pulled(parts: int, x_RD, expert_RX, weights):
    """Returns (dispatched, its gradients)."""
    out, pull = jax.vjp(lambda x, w: dispatched(parts, x, expert_RX, w), x_RD, weights)
    return out, pull(x_RD)


@pytest.mark.parametrize("lot", [8, 4, 2])
def test_a_device_multiplies_its_own_experts_rows_however_many_they_are(lot):
    """Experts drawn of all, of the first half, and of the device's two alone."""
    rng = np.random.default_rng(lot)
    x_RD, e_gate, e_up, e_down = (
        jnp.asarray(rng.normal(size=size), jnp.float32)
        for size in ((16, 8), (2, 8, 4), (2, 8, 4), (2, 4, 8))
    )
    draw = rng.integers(0, lot, (16, 2)) + 2 * (lot == 2)
    own = int(((draw == 2) | (draw == 3)).sum())
    assert (own <= 16) == (lot > 2)  # twice a fourth of 32 choices, and else all
    args = x_RD, jnp.asarray(draw), {"e_gate": e_gate, "e_up": e_up, "e_down": e_down}
    leaves = (jax.tree.leaves(pulled(parts, *args)) for parts in (4, 1))
    for x, y in zip(*leaves, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4, rtol=1e-5)
    shapes = str(jax.make_jaxpr(functools.partial(dispatched, 4))(*args))
    assert "cond" in shapes and "f32[16,4]" in shapes


MESHES = [  # what `model` splits: the experts, their width, or nothing
    pytest.param({"fsdp": 8}, 6, (None, None), marks=pytest.mark.soak),
    ({"model": 4, "data": 2}, 8, ("model", None)),
    ({"fsdp": 2, "model": 4}, 6, (None, "model")),
]


@pytest.mark.parametrize("sizes, experts, split", MESHES)
def test_a_mesh_leaves_logits_and_gradients(sizes, experts, split):
    cfg = dataclasses.replace(SIGMOID, experts=experts, router_groups=2)
    params = weights(cfg)
    tokens = np.arange(96).reshape(8, 12) % 31
    alone, load, grads = run(params, tokens, cfg)
    mesh = sharding.make_mesh(**{"fsdp": 1} | sizes)
    placed = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding),
        params,
        transformer.abstract(cfg, mesh, jnp.float32),
    )
    spec = *placed["layers"]["e_up"].sharding.spec, None, None
    assert (spec[1], spec[3]) == split
    with jax.set_mesh(mesh):
        spread, load_spread, grads_spread = run(placed, tokens, cfg)
    np.testing.assert_allclose(spread, alone, atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(load_spread.prob_E, load.prob_E, rtol=1e-5)
    for plain, again in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_spread)):
        np.testing.assert_allclose(again, plain, atol=2e-5)


@pytest.mark.parametrize("sizes", [{"model": 2}, {"model": 4}])
def test_experts_are_read_where_their_stack_lies(sizes):
    """A layer with stacks and its number is one with experts of its own."""
    p, h_BTD = first(SIGMOID), np.random.default_rng(1).normal(size=(8, 6, 16))
    stacks = {name: jnp.stack([-p[name], p[name]]) for name in moe.DISPATCHED}
    inputs = jnp.asarray(h_BTD, jnp.float32), p, np.ones((8, 6), bool)
    want, _ = ffw(*inputs, cfg=SIGMOID)
    with jax.set_mesh(sharding.make_mesh(**{"fsdp": -1} | sizes)):
        for number, differs in ((1, False), (0, True)):
            again = inputs[0], p | stacks | {"number": jnp.int32(number)}, inputs[2]
            found, _ = ffw(*again, cfg=SIGMOID)
            assert (np.abs(found - want).max() > 1e-3) == differs


def test_a_layer_that_keeps_its_products_computes_none_again():
    """But the scores of its attention and what they weigh, of both stacks, in so short a row."""
    tokens, count = np.arange(24).reshape(2, 12), {}
    for kind in ("none", "dots", "full"):
        cfg = dataclasses.replace(SIGMOID, remat=kind)
        plain = functools.partial(run.__wrapped__, cfg=cfg)
        made = jax.make_jaxpr(plain)(weights(cfg), tokens)
        count[kind] = sum(name == "dot_general" for name, _ in primitives(made.jaxpr))
    assert count["dots"] - count["none"] == 2 * 2
    # A dense layer's six, and the other one's four, those of its two feed-forwards, and a router.
    assert count["full"] - count["dots"] == 6 + 4 + 2 + 3 + 1


@EITHER
def test_every_parameter_but_the_bias_of_the_choice_learns(cfg):
    _, load, grads = run(weights(cfg), np.arange(24).reshape(2, 12), cfg)
    still = {
        ".".join(key.key for key in path)
        for path, g in jax.tree.leaves_with_path(grads)
        if not np.abs(g).max() > 0
    }
    assert still == ({"layers.router_bias"} if cfg.router_bias else set())
    assert load.count_E.shape == (cfg.layers - cfg.dense_layers, cfg.experts)


def test_dense_layers_come_first_and_share_the_cache():
    params = weights(SIGMOID)
    assert params["first"]["w_up"].shape == (1, 16, 28)
    assert params["layers"]["w_up"].shape == (2, 16, 24)
    assert not {"router", "e_up"} & params["first"].keys()
    check_cache(params, SIGMOID)


def check_cache(params, cfg):
    """Asserts that half a row beside the other half's cache is what it is in the whole."""
    x = transformer.embed(params, np.arange(16)[None], cfg)
    pos = jnp.arange(16)[None]
    trunk = jax.jit(transformer.trunk, static_argnums=4)
    at_once, *_ = trunk(params, x, pos, mask.block(pos, 8), cfg)
    seen = mask.block(pos[:, :8], 8)
    _, cache, _ = trunk(params, x[:, :8], pos[:, :8], seen, cfg)
    assert cache.k_LBSKH.shape == (cfg.layers, 1, 8, cfg.kv_heads, cfg.head_dim)
    seen = mask.beside(mask.block(pos[:, 8:], 8), jnp.ones((1, 8), bool))
    again, *_ = trunk(params, x[:, 8:], pos[:, 8:], seen, cfg, cache)
    np.testing.assert_allclose(again, at_once[:, 8:], atol=2e-5)


def test_only_the_first_dimensions_of_a_head_turn():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 2, 8)))
    angle = jnp.ones((1, 3, 2))
    turn = jnp.cos(angle), jnp.sin(angle)
    turned = layer.rope(x, turn)
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    np.testing.assert_allclose(turned[..., :4], layer.rope(x[..., :4], turn))
    assert np.abs(turned - x)[..., :4].min() > 0


# ---- Experts in every other layer ----------------------------------------------------

STEPS = pytest.mark.parametrize("step, layers", [(2, 4), (3, 5)])


def qwen_moe(folder, step: int, layers: int) -> dict[str, np.ndarray]:
    """Writes a checkpoint of SDAR-MoE's names with random numbers; returns its tensors."""
    sizes = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 28}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    told = {"model_type": "sdar_moe", "num_hidden_layers": layers, "mask_token_id": 36}
    told |= {"decoder_sparse_step": step, "block_size": 4, "rms_norm_eps": 1e-6}
    told |= {"eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(sizes | told))
    shapes = {"model.embed_tokens": (37, 16), "lm_head": (37, 16), "model.norm": (16,)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {
            at + "input_layernorm": (16,),
            at + "post_attention_layernorm": (16,),
        }
        shapes |= {at + f"self_attn.{x}_norm": (8,) for x in "qk"}
        shapes |= {at + "self_attn.q_proj": (32, 16), at + "self_attn.o_proj": (16, 32)}
        shapes |= {at + f"self_attn.{x}_proj": (16, 16) for x in "kv"}
        width, parts = 28, [at + "mlp."]
        if (i + 1) % step == 0:
            width, parts = 12, [f"{at}mlp.experts.{e}." for e in range(6)]
            shapes |= {at + "mlp.gate": (6, 16)}
        for part in parts:
            shapes |= {part + f"{x}_proj": (width, 16) for x in ("gate", "up")}
            shapes |= {part + "down_proj": (16, width)}
    rng = np.random.default_rng(0)
    tensors = {
        f"{name}.weight": (len(shape) == 1) + rng.normal(0, 0.3, shape).astype("f4")
        for name, shape in shapes.items()
    }
    safetensors.numpy.save_file(
        tensors, folder / repository.SINGLE, metadata={"format": "pt"}
    )
    return tensors


def by_layers(tensors, tokens_T, step: int, layers: int) -> np.ndarray:
    """Returns the logits [T, V] of `qwen_moe`, layer by layer and token by token."""
    T = len(tokens_T)
    angle = np.arange(T)[:, None, None] / 1e4 ** (np.arange(4) / 4)
    sees = np.arange(T)[:, None] // 4 >= np.arange(T) // 4

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * tensors[name]

    def turn(x):
        a, b = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def softmax(x):
        x = np.exp(x - x.max(-1, keepdims=True))
        return x / x.sum(-1, keepdims=True)

    def ffw(h, at):
        gate, up, down = (
            tensors[f"{at}{x}_proj.weight"] for x in ("gate", "up", "down")
        )
        return (gate @ h / (1 + np.exp(-gate @ h)) * (up @ h)) @ down.T

    x = tensors["model.embed_tokens.weight"][tokens_T].astype(np.float64)
    for i in range(layers):
        at = f"model.layers.{i}."
        attn, h = at + "self_attn.", norm(x, at + "input_layernorm.weight")
        q, k, v = (
            (h @ tensors[f"{attn}{name}_proj.weight"].T).reshape(T, -1, 8)
            for name in "qkv"
        )
        q = turn(norm(q, attn + "q_norm.weight"))
        k = turn(norm(k, attn + "k_norm.weight"))
        k, v = (np.repeat(y, 2, axis=1) for y in (k, v))
        scores = np.where(sees, np.einsum("tnh,snh->nts", q, k) / np.sqrt(8), -np.inf)
        mixed = np.einsum("nts,snh->tnh", softmax(scores), v).reshape(T, -1)
        x = x + mixed @ tensors[attn + "o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        for t in range(T):
            if (i + 1) % step:
                x[t] += ffw(h[t], at + "mlp.")
                continue
            score = softmax(tensors[at + "mlp.gate.weight"] @ h[t])
            best = np.argsort(score)[-2:]
            for e in best:
                y = ffw(h[t], f"{at}mlp.experts.{e}.")
                x[t] += score[e] / score[best].sum() * y
    return norm(x, "model.norm.weight") @ tensors["lm_head.weight"].T


@STEPS
def test_experts_in_every_so_many_layers(step, layers, tmp_path):
    """In, through the tower against a loop over layers, and out."""
    origin = tmp_path / "origin"
    origin.mkdir()
    tensors = qwen_moe(origin, step, layers)
    cfg, params = hf.load(origin)
    sparse = layers // step
    assert params["layers"]["e_up"].shape == (sparse, 6, 16, 12)
    assert params["first"]["w_up"].shape == (layers - sparse, 16, 28)
    assert cfg.sizes["L"] == sparse and cfg.sizes["Y"] == layers - sparse
    tokens = np.arange(12) * 7 % 36
    found, load, grads = run(params, tokens[None], cfg)
    want = by_layers(tensors, tokens, step, layers)
    np.testing.assert_allclose(found[0][:, :36], want[:, :36], **NEAR)
    assert load.count_E.shape == (sparse, 6)
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(grads))

    hf.save(tmp_path / "out", cfg, params, like=origin)
    again = safetensors.numpy.load_file(tmp_path / "out" / repository.SINGLE)
    assert again.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(again[name], x)


def test_the_cache_of_groups_is_in_the_order_of_the_layers():
    check_cache(weights(STEPPED), STEPPED)


def test_a_program_of_groups_does_not_grow_with_the_depth():
    def equations(layers):
        cfg = dataclasses.replace(STEPPED, layers=layers)
        pos = jnp.arange(4)[None]
        shapes = jax.tree.map(
            lambda spec: jnp.zeros(transformer.shape(spec, cfg)), transformer.specs(cfg)
        )
        x = jnp.zeros((1, 4, cfg.d_model))
        traced = jax.make_jaxpr(transformer.trunk, static_argnums=4)(
            shapes, x, pos, mask.block(pos, 4), cfg
        )
        return str(traced).count(" = ")

    assert equations(5) == equations(11)
