"""The schedules against dLLM-RL's and their definition; a value head's own rate."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

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
