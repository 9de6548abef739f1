"""Blocks that are larger than the sampler's, and the order from left to right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models import mask, transformer
from dllm_jax.rl import layout as layouts
from dllm_jax.rl import learner, noise, views
from dllm_jax.rl.config import BatchConfig, NoiseConfig, ObjectiveConfig
from dllm_jax.sampling.config import SamplerConfig
from tests.rl import common

MASK = 66
PLAN = learner.Plan(("nll",), common.OPTIM, 1)
ROWS = {
    "blocks of 8 for the sampler's 4": ("block", NoiseConfig(block=8)),
    "left to right in blocks": ("block", NoiseConfig(kind="left_to_right")),
    "left to right in a canvas": ("full", NoiseConfig(kind="left_to_right")),
}


def rounds_by_hand(made, attention: str, cfg: NoiseConfig):
    """Returns (tokens, length, target) of a canvas for each round, as lists of [T].

    target: the token where the round unmasks one, -1 elsewhere.
    """
    block = cfg.block or 4
    tokens, lengths, targets = [], [], []
    for i, given in enumerate(made.prompt_len_B):
        end = int(given + made.len_B[i])
        pos = np.arange(made.tokens_BT.shape[1])
        inside = (pos >= given) & (pos < end)
        step = np.where(inside, made.step_BT[i], 0)
        if cfg.kind == "left_to_right":
            step = np.where(inside, pos, 0)
        for now in np.unique(step[inside]):
            at = int(np.flatnonzero(step == now)[0])
            shown = np.where(step >= now, MASK, made.tokens_BT[i])
            whole = len(pos) if attention == "full" else (at // block + 1) * block
            tokens.append(shown)
            lengths.append(min(whole, len(pos)))
            targets.append(np.where(inside & (step == now), made.tokens_BT[i], -1))
    return np.stack(tokens), np.array(lengths), np.stack(targets)


@pytest.mark.parametrize("name", ROWS)
def test_gradients_are_those_of_every_round_by_itself(tiny, name):
    model, params = tiny
    model = dataclasses.replace(model, dtype="float32")
    attention, cfg = ROWS[name]
    made = common.short_trace()
    sampler = SamplerConfig(block=4, max_prompt=3, max_new=9, stop_ids=(1,))
    model = dataclasses.replace(model, attention=attention)
    layout = layouts.of(model, sampler, cfg)
    batch, _ = views.pack(
        made,
        noise.noised(made, cfg, layout),
        mask_id=MASK,
        layout=layout,
        cfg=BatchConfig(rows=4, tokens=48),
        most=12,
        aggregate="token",
    )
    tokens_BT, len_B, target_BT = rounds_by_hand(made, attention, cfg)
    pos_BT = np.broadcast_to(np.arange(tokens_BT.shape[1])[None], tokens_BT.shape)

    def plain(params):
        """The mean of -log p over tokens, each in its round's canvas."""
        x = transformer.embed(params, tokens_BT, model)
        # What lies beyond a round's block is seen by nothing in it.
        seen = mask.clean(attention, pos_BT, len_B, layout.block)
        x, _, _ = transformer.trunk(params, x, pos_BT, seen, model)
        logp, _ = transformer.token_logprob(params, x, target_BT, model)
        return -jnp.sum(jnp.where(target_BT >= 0, logp, 0)) / made.len_B.sum()

    want = jax.jit(jax.grad(plain))(params)
    found, sums = jax.jit(learner.gradients, static_argnames=("model", "plan", "cfg"))(
        params, batch, None, model=model, plan=PLAN, cfg=ObjectiveConfig()
    )
    assert float(sums["loss"]) == pytest.approx(float(plain(params)), rel=1e-5)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max()),
        found,
        want,
    )


def test_larger_blocks_show_what_the_sampler_had_unmasked_and_no_more():
    """A block of 8 is two of the sampler's: the second is masked as long as it was."""
    made = common.short_trace(n=1)
    layout = layouts.Layout(block=8, longest=9)
    drawn = noise.noised(made, NoiseConfig(block=8), layout)
    np.testing.assert_array_equal(drawn.step_nT, made.step_BT)
    supervised_nT = noise.answers(made)
    found = layouts.views_of([0], 3, 9, drawn, supervised_nT, layout)
    steps = made.step_BT[0]
    assert [(v.first, v.end, v.round) for v in found] == [
        *((0, 8, step) for step in np.unique(steps[3:8])),
        *((8, 12, step) for step in np.unique(steps[8:])),
    ]


@pytest.mark.parametrize("kind", ["trace", "bernoulli"])
def test_whole_answers_have_no_blocks(kind):
    layout = layouts.Layout(attention="full", block=8, longest=9)
    with pytest.raises(
        ValueError, match="noise.block=8: a model with attention='full'"
    ):
        noise.check(NoiseConfig(kind=kind, block=8), layout)


def test_a_causal_model_learns_no_order_of_masks():
    for attention in ("block", "full"):  # these do
        layout = layouts.Layout(attention=attention, longest=9)
        noise.check(NoiseConfig(kind="left_to_right"), layout)
    layout = layouts.Layout(attention="causal", shift=1, longest=9)
    with pytest.raises(ValueError, match="'left_to_right' masks tokens, but"):
        noise.check(NoiseConfig(kind="left_to_right"), layout)


def test_rounds_of_an_order_may_be_picked():
    made = common.short_trace()
    layout = layouts.Layout(block=4, longest=9)
    cfg = NoiseConfig(kind="left_to_right", rounds=3)
    drawn = noise.noised(made, cfg, layout, np.random.default_rng(0))
    assert (np.count_nonzero(drawn.share_nT, axis=1) == 3).all()
    np.testing.assert_allclose(drawn.weight_nT.sum(axis=1), 9)
    with pytest.raises(ValueError, match="noise.rounds=2: rounds are picked of"):
        NoiseConfig(kind="bernoulli", rounds=2)
