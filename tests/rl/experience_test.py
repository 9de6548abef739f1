"""A step's batches: what is scored, what the sampler's record may stand for, the fill."""

import dataclasses

import jax
import numpy as np
import pytest

from dllm_jax import config, sharding
from dllm_jax.rl import experience, noise, views
from dllm_jax.rl.config import (
    BatchConfig,
    NoiseConfig,
    ObjectiveConfig,
    RLConfig,
)
from dllm_jax.rl.layout import Layout
from tests.rl.common import rollouts

LAYOUT = Layout(block=4, longest=12)
RL = RLConfig(prompts=2, group=4, value="own", updates=2)


def batches(off: float, rl=RL, as_sampled=True):
    """Returns (metrics, batches, what was scored of whom) where the policy is off so far."""
    found, told = rollouts(), []
    noised = noise.noised(found.trace, NoiseConfig(), LAYOUT)
    sources = {}

    def pack(trace, noised, group_n):
        batch, source = views.pack(
            trace,
            noised,
            mask_id=99,
            layout=LAYOUT,
            cfg=BatchConfig(rows=2, tokens=48),
            most=4,
            aggregate="token",
        )
        sources[batch.target_BU.tobytes()] = source, trace.logp_BT
        return batch, source

    def score(params, batch):
        ((name, _),) = params.items()
        told.append((name, int(batch.used)))
        source, logp = sources[np.asarray(batch.target_BU).tobytes()]
        logp_mBU = source.gather(logp) + np.float32(off)
        logp_mBU[int(batch.used) :] = 0
        return {name: {"logp": logp_mBU, "value": np.zeros_like(logp_mBU)}}

    mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    metrics, out = experience.of_rollouts(
        found,
        np.random.default_rng(0),
        rl=rl,
        noised=noised,
        as_sampled=as_sampled,
        objective=ObjectiveConfig(),
        params={"policy": None, "value": None},
        pack=pack,
        score=score,
        mesh=mesh,
    )
    recorded = [
        sources[np.asarray(batch.target_BU).tobytes()][0].gather(logp)
        for batch, (_, logp) in zip(out, sources.values(), strict=True)
    ]
    return metrics, out, recorded, told


def test_old_log_probs_are_scored():
    metrics, out, recorded, told = batches(0.01)
    # A trajectory is 8 clean tokens and 8 rounds of 4: one of 40 to a row of 48.
    assert told == [("policy", 2), ("value", 2)] * 2
    for batch, want in zip(out, recorded, strict=True):
        held = np.asarray(batch.weight_BU) > 0
        np.testing.assert_allclose(
            batch.old_logp_BU[held], want[held] + 0.01, rtol=1e-5
        )
    assert metrics["logprob_gap_max"] == pytest.approx(0.01, rel=1e-3)
    assert metrics["packed_fill"] == pytest.approx(40 / 48)
    assert "updates_trusted" not in metrics
    assert "logprob_gap_max" not in batches(0.01, as_sampled=False)[0]


def test_the_samplers_record_stands_while_it_is_near():
    rl = dataclasses.replace(RL, trusted_gap=0.02)
    metrics, out, recorded, told = batches(0.01, rl)
    assert told == [("policy", 1), ("value", 2)] * 2
    for batch, want in zip(out, recorded, strict=True):
        np.testing.assert_array_equal(batch.old_logp_BU, want)
    assert metrics["logprob_gap_max"] == pytest.approx(0.01, rel=1e-3)
    assert metrics["updates_trusted"] == 1
    metrics, out, recorded, told = batches(0.03, rl)
    assert told == [("policy", 1), ("policy", 2), ("value", 2)] * 2
    assert metrics["updates_trusted"] == 0
    assert np.abs(out[0].old_logp_BU - recorded[0]).max() > 0.02


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rl.trusted_gap": -1.0}, "trusted_gap=-1"),
        ({"rl.trusted_gap": 0.1, "rl.value": "head"}, "rl.value='head'"),
        (
            {"rl.trusted_gap": 0.1, "noise.kind": "bernoulli"},
            "'trace', not 'bernoulli'",
        ),
    ],
)
def test_what_cannot_be_trusted_is_refused(changes, words):
    tree = config.default()
    tree.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=words):
        config.freeze(tree)
