"""The schedules against dLLM-RL's and their definition; a value head's own rate."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dllm_jax.models import transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision.config import VisionConfig
from dllm_jax.rl import optim
from dllm_jax.rl.config import OptimConfig
from tests.rl import dllm_rl


@pytest.mark.parametrize(
    "case",
    dllm_rl.read("train/lr_schedules.json")["cases"],
    ids=lambda c: f"{c['scheduler']}-{c['warmup_steps']}-{c['num_training_steps']}",
)
def test_schedules_are_the_references(case):
    if "raises" in case:
        pytest.skip("the reference's own failure")
    name, base = case["scheduler"], case["base_lr"]
    cfg = OptimConfig(
        lr=base,
        schedule={"constant_with_warmup": "constant", "polynomial": "linear"}.get(
            name, name
        ),
        warmup=case["warmup_steps"],
        final=1e-7 / base if name == "polynomial" else 0.0,
    )
    run = case["num_training_steps"]
    ours = optim.schedule(cfg, run)
    # Beyond the run the reference's cosine rises again; ours stays where it ended.
    np.testing.assert_allclose(
        [ours(step) for step in range(run + 1)],
        case["lr_at_step"][: run + 1],
        rtol=1e-5,
        atol=1e-9,
    )
    assert float(ours(run + 5)) == pytest.approx(float(ours(run)), abs=1e-9)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_ends_at_its_final_fraction(schedule):
    cfg = OptimConfig(lr=2.0, schedule=schedule, warmup=4, final=0.25)
    ours = optim.schedule(cfg, 12)
    assert [float(ours(step)) for step in (0, 2, 4)] == [0, 1, 2]
    assert float(ours(8)) == pytest.approx((2 + 0.5) / 2)  # half-way
    assert float(ours(12)) == float(ours(99)) == pytest.approx(0.5)
    # A horizon in the place of the run's length: the same schedule for any run.
    fixed = optim.schedule(dataclasses.replace(cfg, horizon=12), 1000)
    assert [float(fixed(step)) for step in range(15)] == [
        float(ours(step)) for step in range(15)
    ]


def test_a_value_head_on_the_policy_has_a_rate_of_its_own():
    params = {"layers": {"wq": jnp.ones(3)}, "value": jnp.ones(3)}

    def change(head_rate):
        optimizer = optim.optimizer(OptimConfig(), 1, head_rate)
        return optimizer.update(params, optimizer.init(params), params)[0]

    slow, fast = change(1.0), change(50.0)
    np.testing.assert_array_equal(fast["layers"]["wq"], slow["layers"]["wq"])
    np.testing.assert_allclose(fast["value"], 50 * slow["value"], rtol=1e-6)


@pytest.mark.parametrize("schedule", optim.SCHEDULES)
def test_a_configuration_takes_every_schedule_of_the_table_and_no_other(schedule):
    assert OptimConfig(schedule=schedule).schedule == schedule
    with pytest.raises(ValueError, match="choose from constant, linear, cosine"):
        OptimConfig(schedule="step")


@pytest.mark.parametrize("norms", [False, True])
def test_weight_decay_spares_biases_and_unless_told_norms(norms):
    names = ("wq", "bq", "bk", "bv", "attn_norm", "q_norm", "router", "router_bias")
    names += ("attn_norm_bias", "ffw_norm_bias")  # of a vision tower
    params = {
        "embed": jnp.ones(3),
        "norm": jnp.ones(3),
        "layers": {name: jnp.ones(3) for name in names},
        "value": jnp.ones(3),
    }
    cfg = OptimConfig(lr=0.1, weight_decay=0.1, decay_norms=norms)
    optimizer = optim.optimizer(cfg, 1)
    still = jax.tree.map(jnp.zeros_like, params)
    change, _ = optimizer.update(still, optimizer.init(params), params)
    leaves = {**change, **change["layers"]}
    shrunk = {n for n in leaves if n != "layers" and (leaves[n] != 0).all()}
    scales = {"norm", "attn_norm", "q_norm"} if norms else set()
    assert shrunk == {"embed", "wq", "router", "value"} | scales
    np.testing.assert_allclose(leaves["wq"], -0.01, rtol=1e-5)


def test_without_decay_the_state_is_as_it_was():
    """So that runs that were saved before norms were exempted go on."""
    params = {"norm": jnp.ones(3)}
    bare = optim.optimizer(OptimConfig(), 1).init(params)
    plain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.constant_schedule(1e-6)),
        optax.masked(optax.scale(1.0), lambda params: {"norm": False}),
    ).init(params)
    assert jax.tree.structure(bare) == jax.tree.structure(plain)


def test_every_bias_and_norm_of_a_tower_is_known_by_name():
    cfg = ModelConfig(
        qkv_bias=True,
        qk_norm=True,
        experts=4,
        dense_layers=1,
        router_bias=True,
        vision=VisionConfig(),
    )
    tree = transformer.specs(cfg, ("lm", "vision"))
    names = {
        path[-1].key: spec.init
        for path, spec in jax.tree_util.tree_leaves_with_path(tree)
    }
    zeros = {n for n, init in names.items() if init == "zeros"}
    norms = {n for n in names if "norm" in n}  # a layer norm has a bias, too
    told = {n for n in zeros if n.endswith("_bias")}
    assert zeros - told == set(optim.BIASES)
    assert {"router_bias", "attn_norm_bias"} <= told
    assert {n for n, init in names.items() if init == "ones"} == norms - zeros
