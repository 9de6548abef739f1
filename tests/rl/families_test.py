"""One step of RL on checkpoints of other families: adapters beside a value head."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from dllm_jax import sharding
from dllm_jax.models import hf, lora
from dllm_jax.models.config import Lora
from dllm_jax.rl import batches, learner, networks, noise, views
from dllm_jax.rl import layout as layouts
from dllm_jax.rl.config import (
    BatchConfig,
    NoiseConfig,
    ObjectiveConfig,
    OptimConfig,
    RLConfig,
)
from dllm_jax.rl.layout import Layout
from tests.goldens import reader
from tests.rl import common


def step_batch(model, plans, params, mesh):
    """Returns the batch of a step that samples 8 answers, half of which are right."""
    rollouts = common.rollouts()
    layout = Layout(attention=model.attention, shift=model.shift, block=4, longest=12)
    kind, shape = NoiseConfig(shrink=2), BatchConfig(rows=2, tokens=64)
    trajectories, slots = rollouts.trace.tokens_BT.shape
    most = layouts.microbatches(
        trajectories=trajectories,
        slots=slots,
        answer=8,
        rounds=noise.rounds(kind, layout, 8),
        copies=1,
        layout=layout,
        cfg=shape,
    )
    metrics, (batch,), _ = batches.of_rollouts(
        rollouts,
        np.random.default_rng(0),
        rl=RLConfig(prompts=2, group=4, value="head"),
        noised=noise.noised(rollouts.trace, kind, layout),
        as_sampled=True,
        objective=ObjectiveConfig(),
        params={"policy": params},
        pack=functools.partial(
            views.pack,
            mask_id=model.mask_id,
            layout=layout,
            cfg=shape,
            most=most,
            aggregate="step",
        ),
        score=jax.jit(functools.partial(learner.score, model=model, plans=plans)),
        mesh=mesh,
    )
    assert metrics["groups_kept"] == 2
    return batch


@pytest.mark.parametrize(
    ("family", "attention"), [("llada", "full"), ("llada2", "block")]
)
def test_a_step_learns_from_right_and_wrong_answers(family, attention):
    path = str(reader.checkpoint(family))
    model = hf.read_config(reader.checkpoint(family))
    assert model.attention == attention
    model = dataclasses.replace(model, dtype="float32", block=4, lora=Lora(2, 4.0, ()))
    mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    optim = OptimConfig(lr=1e-2)
    plans = networks.plans("policy", "head", optim, optim, updates=1)
    frozen, value = networks.frozen(path, model, mesh)
    wanted = {"policy": networks.abstract(model, plans["policy"], mesh)}
    places = jax.tree.map(lambda x: x.sharding, wanted)
    states = networks.initial(
        path, model, plans, places, mesh, value, jax.random.key(0)
    )

    params = lora.join(frozen, states["policy"].params, model.lora)
    batch = step_batch(model, plans, params, mesh)
    update = functools.partial(
        learner.update, model=model, plans=plans, cfg=ObjectiveConfig()
    )
    new, metrics = jax.jit(update)(states, batch, frozen)
    assert all(np.isfinite(x) for x in metrics.values())
    # The first update is on the policy whose log-probs were scored.
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["grad_norm"] > 0 and metrics["value_loss"] > 0
    before, after = states["policy"].params, new["policy"].params
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), before, after)
    for leaf, yes in jax.tree.leaves_with_path(moved):
        # B starts at zero, and until it has left it A has no gradient.
        assert yes == (leaf[-1].key != "a"), leaf
