"""Full attention under every policy: a loop over one row, without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.models import mask, transformer
from dllm_jax.models.mask import FAR
from dllm_jax.sampling import confidence, logits, policy
from dllm_jax.sampling.state import GIVEN
from dllm_jax.sampling.strategy import STRATEGIES
from tests.sampling.common import end_of


@functools.partial(jax.jit, static_argnames=("model", "cfg"))
def look(params, shown_T, entry_T, at, limit, temperature, key, *, model, cfg):
    """Returns the draws for the block at `at`, computed from whole canvases.

    Under `prefix` and `dual` a canvas as it was at the block's entry comes first, and
    the window, whose keys are a group that only it sees, after it: keys that were kept
    are simply those of another canvas.
    """
    T = cfg.slots
    pos_BT = jnp.arange(T)[None]
    seen = mask.clean(model.attention, pos_BT, limit[None], cfg.block)
    answers_W, tokens_BT = at - model.shift + jnp.arange(cfg.block), shown_T[None]
    W = cfg.block + cfg.horizon
    pos_BW = at + jnp.arange(W)[None]
    own_BW = jnp.where(pos_BW < limit, 1, -3)
    beyond_BT = (
        (pos_BT >= at + W) & (pos_BT < limit) & policy.POLICIES[cfg.cache].suffix
    )
    seen = mask.Mask(
        q_begin_BT=jnp.zeros((1, T + W), "i"),
        q_end_BT=jnp.concatenate([seen.q_end_BT, 0 * pos_BW + at], axis=1),
        q_group_BT=jnp.concatenate([0 * pos_BT - 1, 0 * pos_BW + 1], axis=1),
        k_pos_BS=jnp.concatenate([pos_BT, 0 * pos_BW + FAR], axis=1),
        k_group_BS=jnp.concatenate([jnp.where(beyond_BT, 1, -2), own_BW], axis=1),
    )
    shown_BW = jnp.take(shown_T, pos_BW, mode="clip")
    tokens_BT = jnp.concatenate([entry_T[None], shown_BW], axis=1)
    pos_BT = jnp.concatenate([pos_BT, pos_BW], axis=1)
    entered = (shown_T == entry_T).all()
    answers_W += jnp.where(entered, 0, T - at)
    x_BTD = transformer.embed(params, tokens_BT, model)
    x_BTD, *_ = transformer.trunk(params, x_BTD, pos_BT, seen, model)
    x_BWV = transformer.logits(params, x_BTD[:, answers_W], model)
    drawn = logits.draw(key[None], x_BWV, temperature[None], cfg)
    noise = logits.apart(key[None], 1)
    drawn = confidence.weigh(drawn, noise, jnp.zeros(1, int), model.pad_id, cfg)
    return jax.tree.map(lambda x: x[0], drawn)


def define(params, prompt, limit, temperature, key, *, model, cfg):
    """What `generate` means: one row, one forward of all of its canvas per step."""
    first, count, T = len(prompt), 0, cfg.slots
    tokens_T, step_T, logp_T = np.zeros(T, "i"), np.full(T, FAR), np.zeros(T)
    tokens_T[:first], step_T[:first] = prompt, GIVEN
    for at in range(first, limit, cfg.block):
        window, quotas = np.s_[at : min(at + cfg.block, limit)], iter(cfg.schedule)
        entry_T = np.where(step_T == FAR, model.mask_id, tokens_T)
        while (masked_W := step_T[window] == FAR).any():
            shown_T = np.where(step_T == FAR, model.mask_id, tokens_T)
            if cfg.cache == "none":
                entry_T = shown_T
            drawn = look(
                params,
                shown_T,
                entry_T,
                at,
                limit,
                np.float32(temperature),
                jax.random.fold_in(key, count),
                model=model,
                cfg=cfg,
            )
            drawn_1W = jax.tree.map(lambda x: x[None], drawn)
            masked_BW = np.pad(masked_W, (0, cfg.block - len(masked_W)))[None]
            quota_B = np.array([next(quotas, cfg.schedule[-1])])
            take_BW = STRATEGIES[cfg.strategy].take(drawn_1W, masked_BW, quota_B, cfg)
            take_W = np.array(take_BW[0])
            if cfg.cache != "none" and (shown_T == entry_T).all():
                take_W[: model.shift] = True
            count += 1
            for i in np.flatnonzero(take_W):
                tokens_T[at + i], step_T[at + i] = drawn.token_BW[i], count
                logp_T[at + i] = drawn.logp_BW[i]
            end = end_of(tokens_T, step_T, first, limit, cfg.stop_ids)
            if end is not None:
                return tokens_T, step_T, logp_T, end - first, count
