"""Adapters: nothing at first, added exactly, trained alone, on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dllm_jax import sharding
from dllm_jax.models import lora, transformer
from dllm_jax.models.config import Lora
from dllm_jax.rl import learner, noise, views
from dllm_jax.rl.config import BatchConfig, ObjectiveConfig, OptimConfig
from dllm_jax.rl.layout import Layout
from tests.rl import dllm_rl

ALL = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
outputs = jax.jit(learner.outputs, static_argnames=("model", "heads"))


@pytest.fixture(scope="module")
def adapted(tiny):
    """Returns (config with adapters, base, trained with a B that is not zero, batch)."""
    plain, base = tiny
    cfg = dataclasses.replace(plain, lora=Lora(3, 6.0, ALL))
    trained = transformer.init(jax.random.key(0), cfg, heads=("lm", "value"))
    keys = iter(jax.random.split(jax.random.key(1), 99))
    trained = jax.tree.map(
        lambda x: 0.3 * jax.random.normal(next(keys), x.shape), trained
    )
    rng = np.random.default_rng(0)
    step = np.where(np.arange(12) < 5, 0, rng.integers(1, 9, (6, 12)))
    trace = dllm_rl.trace(
        rng.integers(0, 60, (6, 12)), step, np.full(6, 5), np.full(6, 7)
    )
    batch, _ = views.pack(
        trace,
        noise.of_steps(step),
        mask_id=cfg.mask_id,
        layout=Layout(block=4),
        cfg=BatchConfig(rows=8, tokens=64),
        most=1,
        aggregate="token",
    )
    return cfg, base, trained, batch


def test_what_is_trained_are_adapters_and_a_value_head(adapted):
    cfg, _, trained, _ = adapted
    assert set(trained) == {"layers", "value"}
    assert set(trained["layers"]) == set(ALL)
    shapes = {k: (x["a"].shape, x["b"].shape) for k, x in trained["layers"].items()}
    L, D, N, K, H, F, C = (cfg.sizes[letter] for letter in "LDNKHFC")
    assert shapes["wq"] == ((L, D, C), (L, C, N, H))
    assert shapes["wv"] == ((L, D, C), (L, C, K, H))
    assert shapes["wo"] == ((L, N, H, C), (L, C, D))
    assert shapes["w_down"] == ((L, F, C), (L, C, D))


def test_a_fresh_adapter_changes_nothing(adapted):
    cfg, base, _, batch = adapted
    fresh = transformer.init(jax.random.key(0), cfg)
    assert all(pair["a"].any() for pair in fresh["layers"].values())
    micro = jax.tree.map(lambda x: x[0] if x.ndim else x, batch)
    plain = dataclasses.replace(cfg, lora=None)
    for name in ("logp", "entropy"):
        np.testing.assert_allclose(
            outputs(lora.join(base, fresh, cfg.lora), micro, cfg, ("lm",))[name],
            outputs(base, micro, plain, ("lm",))[name],
            atol=1e-6,
        )


@pytest.mark.parametrize("targets", [ALL, ("wo",), ("wv", "w_down")])
def test_merged_weights_do_what_the_adapters_do(targets, adapted):
    cfg, base, trained, batch = adapted
    cfg = dataclasses.replace(cfg, lora=dataclasses.replace(cfg.lora, targets=targets))
    trained = {"layers": {t: trained["layers"][t] for t in targets}}
    full = lora.join(base, trained, cfg.lora)
    merged = lora.merge(full)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    for name, x in base["layers"].items():
        assert (merged["layers"][name] != x).any() == (name in targets)
    micro = jax.tree.map(lambda x: x[0] if x.ndim else x, batch)
    plain = dataclasses.replace(cfg, lora=None)
    one, two, before = (
        outputs(params, micro, model, ("lm",))["logp"]
        for params, model in ((full, cfg), (merged, plain), (base, plain))
    )
    np.testing.assert_allclose(one, two, atol=1e-5 * np.abs(two).max())
    assert np.abs(two - before).max() > 0.1


def one_update(cfg, base, trained, batch, mesh):
    """Returns (state before, after, its placed form, metrics) on a mesh."""
    plans = {"policy": learner.Plan(("nll", "value"), OptimConfig(lr=1e-2), 4)}
    batch = batch.replace(
        ret_BU=np.ones_like(batch.weight_BU), old_value_BU=0 * batch.weight_BU
    )
    with jax.set_mesh(mesh):
        plain = dataclasses.replace(cfg, lora=None)
        like = transformer.abstract(plain, mesh, jnp.float32)
        base = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), base, like)
        like = transformer.abstract(cfg, mesh, jnp.float32, ("lm", "value"))
        placed = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), trained, like)
        state = learner.begin(placed, plans["policy"])
        step = functools.partial(
            learner.update, model=cfg, plans=plans, cfg=ObjectiveConfig()
        )
        batch = sharding.place_rows(batch, mesh, axis=1)
        step, losses = jax.jit(step), []
        new, metrics = step({"policy": state}, batch, base)
        states = new
        for _ in range(8):
            states, metrics_of_step = step(states, batch, base)
            losses.append(float(metrics_of_step["loss"]))
    return state, new["policy"], jax.device_get(metrics) | {"later": losses}


def test_an_update_trains_the_adapters_alone_on_every_mesh(adapted):
    cfg, base, trained, batch = adapted
    one, *others = (
        one_update(
            cfg,
            base,
            trained,
            batch,
            sharding.make_mesh(
                data=d, fsdp=f, model=m, devices=jax.devices()[: d * f * m]
            ),
        )
        for d, f, m in ((1, 1, 1), (2, 2, 2))
    )
    before, after, metrics = one
    assert jax.tree.structure(after.params) == jax.tree.structure(trained)
    assert metrics["later"][-1] < 0.9 * metrics["loss"]
    size = sum(x.size for x in jax.tree.leaves(trained))
    moments = optax.tree.get(after.opt_state, "mu")
    assert sum(x.size for x in jax.tree.leaves(moments)) == size
    jax.tree.map_with_path(
        lambda path, x, y: np.testing.assert_array_less(
            0, np.abs(x - y).max(), str(path)
        ),
        before.params,
        after.params,
    )
    for _, state, other in others:
        wq = state.params["layers"]["wq"]
        assert (
            wq["a"].sharding.spec[1] == "fsdp" and wq["b"].sharding.spec[2] == "model"
        )
        assert other["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)


def test_gradients_are_those_of_the_merged_weights(adapted):
    """By the chain rule: dA = scale dW B^T, dB = scale A^T dW."""
    cfg, base, trained, batch = adapted
    micro = jax.tree.map(lambda x: x[0] if x.ndim else x, batch)
    plan = learner.Plan(("nll",), OptimConfig(), 1)

    def grad(params, base, model):
        def loss(params):
            return learner.loss(
                params, micro, base, model=model, plan=plan, cfg=ObjectiveConfig()
            )[0]

        return jax.jit(jax.grad(loss))(params)

    ours = grad({"layers": trained["layers"]}, base, cfg)
    merged = lora.merge(lora.join(base, trained, cfg.lora))
    full = grad(merged, None, dataclasses.replace(cfg, lora=None))
    for name, sums in (("wq", "LDNH,LCNH->LDC"), ("wo", "LNHD,LCD->LNHC")):
        expected = 2.0 * jnp.einsum(
            sums, full["layers"][name], trained["layers"][name]["b"]
        )
        near = 1e-4 * np.abs(expected).max()
        np.testing.assert_allclose(ours["layers"][name]["a"], expected, atol=near)
    expected = 2.0 * jnp.einsum(
        "LDC,LDNH->LCNH", trained["layers"]["wq"]["a"], full["layers"]["wq"]
    )
    near = 1e-4 * np.abs(expected).max()
    np.testing.assert_allclose(ours["layers"]["wq"]["b"], expected, atol=near)


def test_an_unknown_target_lists_the_known(tiny):
    cfg = dataclasses.replace(tiny[0], lora=Lora(3, 6.0, ("q_proj",)))
    with pytest.raises(ValueError, match="no weight 'q_proj'; choose from .*'wq'"):
        transformer.specs(cfg)
    with pytest.raises(ValueError, match="lora_rank=-1"):
        Lora(-1, 6.0)


def test_without_targets_every_projection_has_an_adapter(tiny):
    cfg = dataclasses.replace(tiny[0], lora=Lora(3, 6.0))
    assert set(transformer.specs(cfg)["layers"]) == set(ALL)
    moe = dataclasses.replace(cfg, experts=4, experts_per_token=2, expert_ffw=8)
    assert set(transformer.specs(moe)["layers"]) == {"wq", "wk", "wv", "wo"}
    mixed = dataclasses.replace(moe, dense_layers=1)
    assert set(transformer.specs(mixed)["first"]) == set(ALL)
