"""A value network that sees the log-probs of the tokens that are shown."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models import hf, transformer
from dllm_jax.models.config import Lora
from dllm_jax.rl import layout as layouts
from dllm_jax.rl import learner, noise, views
from dllm_jax.rl.config import BatchConfig, NoiseConfig, ObjectiveConfig, RLConfig
from dllm_jax.sampling.state import GIVEN
from tests.goldens import reader
from tests.rl import common

PLAN = learner.Plan(("value",), common.OPTIM, 10, record=True)
BLIND = dataclasses.replace(PLAN, record=False)
PROMPT, ANSWER = common.PROMPT, common.ANSWER


def packed(made, attention="block", record=True):
    """Returns (batch, source) of a trace, as RL packs it."""
    layout = layouts.Layout(attention=attention, block=4, longest=ANSWER)
    return views.pack(
        made,
        noise.noised(made, NoiseConfig(), layout),
        mask_id=60,
        layout=layout,
        cfg=BatchConfig(rows=4, tokens=48),
        most=8,
        aggregate="token",
        record=record,
    )


@pytest.mark.parametrize("attention", ["block", "full"])
def test_a_slot_has_the_log_prob_of_the_token_that_it_shows(attention):
    made = common.short_trace()
    batch, _ = packed(made, attention)
    assert packed(made, attention, record=False)[0].record_BT is None
    placed = np.argwhere(batch.record_BT != 0)
    assert len(placed) > 20
    for m, b, slot in placed:
        assert batch.tokens_BT[m, b, slot] != 60
        pos = batch.pos_BT[m, b, slot]
        i = int(
            np.flatnonzero(
                np.isclose(made.logp_BT[:, pos], batch.record_BT[m, b, slot])
            )[0]
        )
        assert made.tokens_BT[i, pos] == batch.tokens_BT[m, b, slot]
        assert made.step_BT[i, pos] != GIVEN
    masked = batch.tokens_BT == 60
    assert masked.any() and not batch.record_BT[masked].any()
    given = (batch.pos_BT < PROMPT) & ~masked
    assert given.any() and not batch.record_BT[given].any()


@pytest.mark.parametrize("attention", ["block", "full"])
def test_what_is_seen_was_drawn_before(attention):
    """What a step and later ones drew has no part in what its tokens' slots may see."""
    made = common.short_trace(n=1)
    full, source = packed(made, attention)
    for step in np.unique(made.step_BT[0][PROMPT:]):
        later = made.logp_BT * (made.step_BT < step)
        cut, _ = packed(made.replace(logp_BT=later), attention)
        for m, b, u in np.argwhere(source.row_mBU >= 0):
            if made.step_BT[0, source.pos_mBU[m, b, u]] != step:
                continue
            slot = full.where_BU[m, b, u]
            begin, end = full.begin_BT[m, b, slot], full.end_BT[m, b, slot]
            group = full.group_BT[m, b, slot]
            slots = np.arange(full.tokens_BT.shape[-1])
            seen = (slots >= begin) & (slots < end)
            seen |= (group >= 0) & (full.group_BT[m, b] == group)
            np.testing.assert_array_equal(
                full.record_BT[m, b][seen], cut.record_BT[m, b][seen]
            )


def tiny():
    """Returns (ModelConfig, params) of a golden checkpoint with a head of values."""
    cfg, params = hf.load(reader.checkpoint("sdar"), heads=PLAN.heads)
    head = jax.random.normal(jax.random.key(0), params["value"].shape)
    cfg = dataclasses.replace(cfg, dtype="float32")
    return cfg, params | {"value": head}


def test_a_first_step_is_that_of_a_network_that_does_not_see_and_its_gradient_is_right():
    cfg, params = tiny()
    made = common.short_trace()
    batch, source = packed(made)
    rng = np.random.default_rng(1)
    ret_nT, old_nT = rng.normal(size=(2, *made.step_BT.shape))
    batch = batch.replace(
        ret_BU=source.gather(ret_nT), old_value_BU=source.gather(old_nT)
    )
    assert not np.asarray(params["record"]).any()
    sees = common.score(
        {"value": params}, batch, model=cfg, plans=common.Plans(value=PLAN)
    )
    blind = common.score(
        {"value": params}, batch, model=cfg, plans=common.Plans(value=BLIND)
    )
    np.testing.assert_array_equal(sees["value"]["value"], blind["value"]["value"])

    objective = ObjectiveConfig(value_clip=0)

    def plain(record):
        """Half the mean square error, with the embedding changed by hand."""
        total = 0.0
        for i in range(int(batch.used)):
            one = learner.microbatch(batch, i)
            x = transformer.embed(params, one.tokens_BT, cfg)
            x = x + jnp.einsum("BT,D->BTD", one.record_BT, record)
            seen = learner.mask.packed(one.begin_BT, one.end_BT, one.group_BT)
            x, _, _ = transformer.trunk(params, x, one.pos_BT, seen, cfg)
            x = jnp.take_along_axis(x, one.where_BU[..., None], axis=1)
            error = jnp.einsum("BUD,D->BU", x, params["value"]) - one.ret_BU
            total += 0.5 * jnp.sum(one.weight_BU * error**2)
        return total

    want = jax.jit(jax.grad(plain))(params["record"])
    grads, _ = jax.jit(learner.gradients, static_argnames=("model", "plan", "cfg"))(
        params, batch, None, model=cfg, plan=PLAN, cfg=objective
    )
    scale = np.abs(want).max()
    assert scale > 1e-3
    np.testing.assert_allclose(grads["record"], want, atol=1e-5 * max(scale, 1))


def test_the_record_is_exported_and_read_again(tmp_path):
    cfg, params = tiny()
    params["record"] = params["record"] + 0.5
    origin = reader.checkpoint("sdar")
    hf.save(tmp_path / "value", cfg, params, like=origin)
    _, again = hf.load(tmp_path / "value", heads=PLAN.heads)
    np.testing.assert_array_equal(again["record"], params["record"])
    _, blind = hf.load(tmp_path / "value", heads=BLIND.heads)
    assert "record" not in blind
    _, everything = hf.load(tmp_path / "value")
    assert "record" in everything


def test_adapters_train_it_too():
    cfg, _ = tiny()
    adapted = dataclasses.replace(cfg, lora=Lora(4, 8.0, ("wq",)))
    assert {"value", "record"} <= transformer.specs(adapted, PLAN.heads).keys()
    assert "record" not in transformer.specs(adapted, BLIND.heads)


@pytest.mark.parametrize("value", ["none", "head", "trace"])
def test_only_a_network_of_its_own_sees_the_record(value):
    with pytest.raises(ValueError, match="value_record=True: needs rl.value='own'"):
        RLConfig(value=value, value_record=True)
