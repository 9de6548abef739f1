"""Experts in training: what sampling saw, the same on every mesh, and their load."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models import mask, moe, transformer
from dllm_jax.rl import learner, noise
from dllm_jax.rl.config import OptimConfig
from dllm_jax.sampling import denoise
from tests.models import common as small
from tests.rl import common

CFG = dataclasses.replace(small.SIGMOID, kv_heads=4, block=common.BLOCK)
# Every other layer is dense.
STEPPED = dataclasses.replace(
    small.STEPPED, kv_heads=4, block=common.BLOCK, remat="full"
)


@pytest.fixture(scope="module")
def sampled():
    """Returns (params with a value head, a host trace)."""
    weights = small.weights(CFG)
    params = weights | {"value": jnp.linspace(-1, 1, CFG.d_model)}
    prompt_BT = jax.random.randint(jax.random.key(6), (common.N, 10), 7, CFG.mask_id)
    len_B = jnp.arange(common.N) % 10 + 1
    sampler = common.SAMPLERS["dynamic"]
    generate = jax.jit(functools.partial(denoise.generate, model=CFG, cfg=sampler))
    keys = jax.random.split(jax.random.key(7), common.N)
    return params, jax.device_get(
        generate(
            params, prompt_BT, len_B, len_B + sampler.max_new, jnp.ones(common.N), keys
        )
    )


def test_log_probs_are_those_recorded_in_sampling(sampled):
    params, trace = sampled
    batch, source = common.cut(trace, CFG, common.CUT)
    plans = common.Plans(policy=learner.Plan(("policy",), OptimConfig(), 1))
    out = common.score({"policy": params}, batch, model=CFG, plans=plans)["policy"]
    logp_nT = source.scatter(out["logp"], trace.step_BT.shape)
    answer_nT = noise.answers(trace)
    np.testing.assert_allclose(
        logp_nT[answer_nT], trace.logp_BT[answer_nT], atol=1e-4, rtol=0
    )


UPDATED = common.Plans(policy=common.PLANS["policy"])


@pytest.fixture(scope="module")
def updated(sampled):
    """Returns (params, trace, what updates on one device give): layers with experts and without."""
    _, trace = sampled
    value = jnp.linspace(-1, 1, STEPPED.d_model)
    params = small.weights(STEPPED) | {"value": value}
    # The answers are another model's: their log-probs are made this one's.
    batch, source = common.cut(trace, STEPPED, common.CUT)
    plans = common.Plans(policy=learner.Plan(("policy",), OptimConfig(), 1))
    out = common.score({"policy": params}, batch, model=STEPPED, plans=plans)["policy"]
    trace = trace.replace(logp_BT=source.scatter(out["logp"], trace.step_BT.shape))
    return params, trace, common.on_mesh((1, 1, 1), STEPPED, params, trace, UPDATED)


@pytest.mark.soak
def test_an_update_is_the_same_on_a_mesh(updated):
    """Without `make soak`: gradients on a mesh are moe_test's, updates learner_test's."""
    params, trace, (alone, *_) = updated
    spread, states, traced = common.on_mesh((2, 2, 2), STEPPED, params, trace, UPDATED)
    assert traced == 1
    for (_, _, ours), (_, _, single) in zip(spread, alone, strict=True):
        common.check_equal(ours, single)
    spec = states["policy"].params["layers"]["e_down"].sharding.spec
    assert tuple(spec) == (None, "model", None, "fsdp")


def test_an_update_moves_every_layer_and_tells_the_load(updated):
    params, _, (alone, states, _) = updated
    for name in ("first", "layers"):
        moved = states["policy"].params[name]["wq"] - params[name]["wq"]
        assert (np.abs(moved).max(axis=(1, 2, 3)) > 0).all()  # of every layer

    batch, _, (_, metrics) = alone[0]
    trunk = jax.jit(transformer.trunk, static_argnums=4)
    total = None  # of the microbatches in use, by one forward of each
    for i in range(int(batch.used)):
        micro = jax.tree.map(lambda x, i=i: x[i] if x.ndim else x, batch)
        seen = mask.packed(micro.begin_BT, micro.end_BT, micro.group_BT)
        x_BTD = transformer.embed(params, micro.tokens_BT, STEPPED)
        load = trunk(params, x_BTD, micro.pos_BT, seen, STEPPED)[2]
        assert load.tokens[0] == np.sum(
            (micro.end_BT > micro.begin_BT) | (micro.group_BT >= 0)
        )
        total = load if total is None else jax.tree.map(jnp.add, total, load)
    for name, x in moe.balance(total, STEPPED.experts_per_token).items():
        assert float(metrics[name]) == pytest.approx(float(x), rel=1e-4)
    assert metrics["expert_max_load"] > 1
    update = functools.partial(
        learner.update, model=STEPPED, plans=common.PLANS, cfg=common.OBJECTIVE
    )
    _, metrics = jax.eval_shape(update, common.begin(params), batch)
    assert metrics.keys() > {"value_expert_aux_loss", "value_expert_max_load"}
