"""Experts against a loop over tokens, against dLLM-RL's numbers, and on a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import sharding
from dllm_jax.models import hf, mask, moe, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.pallas_kernels.reference import NEVER
from tests.goldens import reader

NEAR = {"atol": 1e-4, "rtol": 0}
SOFTMAX = ModelConfig(
    vocab=37,
    d_model=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffw=28,
    experts=8,
    experts_per_token=3,
    expert_ffw=12,
    mask_id=36,
    dtype="float32",
)
SIGMOID = dataclasses.replace(
    SOFTMAX,
    router="sigmoid",
    router_bias=True,
    router_scale=2.5,
    router_groups=4,
    router_best_groups=2,
    shared_experts=2,
    dense_layers=1,
    rotary=0.5,
)
EITHER = pytest.mark.parametrize("cfg", [SOFTMAX, SIGMOID], ids=lambda cfg: cfg.router)
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def weights(cfg: ModelConfig) -> dict:
    """Returns random parameters, in which biases are not zero either."""
    rng = np.random.default_rng(0)

    def one(spec):
        noise = rng.normal(size=transformer.shape(spec, cfg))
        return jnp.asarray(1 + 0.2 * noise if spec.init == "ones" else 0.4 * noise)

    return jax.tree.map(one, transformer.specs(cfg))


def first(cfg: ModelConfig) -> dict:
    """Returns the first layer with experts."""
    return {name: x[0] for name, x in weights(cfg)["layers"].items()}


@functools.partial(jit, static_argnames="cfg")
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
    norm = score_E[chosen].sum() if cfg.router_norm else 1
    return chosen, score_E[chosen] / norm * cfg.router_scale


@pytest.mark.parametrize("norm", [True, False])
@EITHER
def test_experts_are_a_loop_over_tokens(cfg, norm):
    cfg = dataclasses.replace(cfg, router_norm=norm)
    p = jax.tree.map(np.asarray, first(cfg))
    h = np.random.default_rng(1).normal(size=(2, 9, cfg.d_model)).astype(np.float32)
    real = np.arange(9) < np.array([[9], [4]])
    found, load = ffw(h, p, real, cfg=cfg)
    count = np.zeros(cfg.experts)
    for b, t in np.ndindex(2, 9):
        bias = p.get("router_bias", np.zeros(cfg.experts))
        chosen, weight = choose(h[b, t] @ p["router"], bias, cfg)
        want = 0
        for i, w in zip(chosen, weight, strict=True):
            gate, up = h[b, t] @ p["e_gate"][i], h[b, t] @ p["e_up"][i]
            want += w * ((gate / (1 + np.exp(-gate)) * up) @ p["e_down"][i])
            count[i] += real[b, t]
        np.testing.assert_allclose(found[b, t], want, **NEAR)
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
    told = moe.balance(load, experts_per_token=2)
    # f = (1/2, ...), P = (1/4, ...): 4 x 4/8 = 2.  f = (1, 1, 0, 0): 4 x (1/2 + 1/4) = 3.
    assert float(told["expert_aux_loss"]) == pytest.approx((2 + 3) / 2)
    assert float(told["expert_max_load"]) == pytest.approx((1 + 2) / 2)


# ---- In the tower --------------------------------------------------------------------


@functools.partial(jit, static_argnames="cfg")
def run(params, tokens_BT, cfg):
    """Returns (logits, loads, gradient of a number that depends on every parameter)."""
    pos_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    seen = mask.block(pos_BT, cfg.block)

    def mean(params):
        x_BTD = transformer.embed(params, tokens_BT, cfg)
        x_BTD, _, load = transformer.trunk(params, x_BTD, pos_BT, seen, cfg)
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
    found, load, _ = run(params, tokens, dataclasses.replace(cfg, block=block))
    keep = np.arange(cfg.vocab) != cfg.mask_id
    want = g[f"logits_bs{block}"]
    np.testing.assert_allclose(found[0][:, keep], want[:, keep], **NEAR)
    assert (np.asarray(found)[..., cfg.mask_id] == NEVER).all()
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
    found, _, _ = run(params, g["input_ids"], dataclasses.replace(cfg, block=block))
    keep = np.arange(cfg.vocab) != cfg.mask_id
    want = g[f"logits_bs{block}"]
    np.testing.assert_allclose(found[..., keep], want[..., keep], **NEAR)


MESHES = [  # what `model` splits: the experts, their width, nothing
    ({"model": 2, "data": 4}, 8, ("model", None)),
    ({"fsdp": 2, "model": 4}, 6, (None, "model")),
    ({"fsdp": 8}, 8, (None, None)),
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
    spec = placed["layers"]["e_up"].sharding.spec
    assert (spec[1], spec[3]) == split
    with jax.set_mesh(mesh):
        spread, load_spread, grads_spread = run(placed, tokens, cfg)
    np.testing.assert_allclose(spread, alone, atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(load_spread.prob_E, load.prob_E, rtol=1e-5)
    for plain, again in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_spread)):
        np.testing.assert_allclose(again, plain, atol=2e-5)


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
    x = transformer.embed(params, np.arange(16)[None], SIGMOID)
    pos = jnp.arange(16)[None]
    trunk = jit(transformer.trunk, static_argnums=4)
    whole, *_ = trunk(params, x, pos, mask.block(pos, 8), SIGMOID)
    seen = mask.block(pos[:, :8], 8)
    _, kept, _ = trunk(params, x[:, :8], pos[:, :8], seen, SIGMOID)
    assert kept.k_LBSKH.shape == (3, 1, 8, 2, 8)
    seen = mask.beside(mask.block(pos[:, 8:], 8), jnp.ones((1, 8), bool))
    again, *_ = trunk(params, x[:, 8:], pos[:, 8:], seen, SIGMOID, kept)
    np.testing.assert_allclose(again, whole[:, 8:], atol=2e-5)


def test_only_the_first_dimensions_of_a_head_turn():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 2, 8)))
    angle = jnp.ones((1, 3, 2))
    turned = transformer.rope(x, angle)
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    np.testing.assert_allclose(turned[..., :4], transformer.rope(x[..., :4], angle))
    assert np.abs(turned - x)[..., :4].min() > 0
