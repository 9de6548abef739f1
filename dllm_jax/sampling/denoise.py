"""THE sampler core: prefill, step, generate.

Block diffusion with an exact cache. A canvas is cut into blocks of Q positions on the
absolute grid pos // Q; a block is denoised in the light of the committed ones before it.
Each `step` runs every live row's present block once. If the block arrived clean, its keys
are kept and the row moves on; otherwise its keys are dropped and some of its masked
positions are unmasked. Rows are independent: each has its own block, step count, limit,
temperature and random key, so a batch, a rollout and a server are the same `step`.
Families with full attention re-run their canvas, as their cache policy says (`policy.py`).
"""

import functools

import jax
import jax.numpy as jnp

from dllm_jax.models import cache as kv
from dllm_jax.models import mask, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR
from dllm_jax.sampling import confidence, logits, policy, state
from dllm_jax.sampling.state import SamplingState, Trace
from dllm_jax.sampling.strategy import STRATEGIES


def prefill(params, s: SamplingState, width: int, *, model: ModelConfig, cfg):
    """Returns the state at its first block, with the keys that its policy wants there.

    Under the block policy the first `width` positions are run. Keys beyond a row's whole
    blocks are written too, but its window never looks past `start` in the cache. Blocks
    of full attention are counted from the answer's start: there is no grid to share.
    """
    whole_B = s.prompt_len_B // cfg.block * cfg.block
    start_B = s.prompt_len_B if model.attention == "full" else whole_B
    s = s.replace(start_B=start_B)
    if policy.choose(cfg, model.attention).canvas != "prefill":
        return s
    tokens_BT = s.tokens_BT[:, :width]
    pos_BT = jnp.broadcast_to(jnp.arange(width), tokens_BT.shape)
    seen = mask.clean(model.attention, pos_BT, s.prompt_len_B, cfg.block)
    x_BTD = transformer.embed(params, tokens_BT, model)
    _, fresh, _ = transformer.trunk(params, x_BTD, pos_BT, seen, model)
    cache = kv.write(s.cache, fresh, jnp.zeros_like(start_B), s.live_B)
    return s.replace(cache=cache, forwards_B=(start_B > 0).astype(s.forwards_B.dtype))


def forward(params, s: SamplingState, pos_BW, *, model, cfg, kept_BS=None):
    """Returns (hidden states x_BWD, their KVCache) of the canvas at some positions.

    kept_BS: the slots of the cache that they see; None: they see no cache.
    """
    tokens_BW, masked_BW = at(s.tokens_BT, pos_BW), at(s.step_BT, pos_BW) == FAR
    x_BWD = transformer.embed(
        params, jnp.where(masked_BW, model.mask_id, tokens_BW), model
    )
    seen = mask.clean(model.attention, pos_BW, s.limit_B, cfg.block)
    if kept_BS is None:
        return transformer.trunk(params, x_BWD, pos_BW, seen, model)[:2]
    seen = mask.beside(seen, kept_BS)
    return transformer.trunk(params, x_BWD, pos_BW, seen, model, s.cache)[:2]


def step(params, s: SamplingState, *, model: ModelConfig, cfg, draw=logits.candidates):
    """Returns the state after one step of every live row."""
    Q, shift = cfg.block, model.shift
    how = policy.choose(cfg, model.attention)
    run = functools.partial(forward, params, model=model, cfg=cfg)
    pos_BW = s.start_B[:, None] + jnp.arange(Q)[None]

    def canvas(s):  # position i - shift answers for position i
        pos_BT = jnp.broadcast_to(jnp.arange(cfg.slots)[None], s.tokens_BT.shape)
        x_BTD, fresh = run(s, pos_BT)
        return at(x_BTD, pos_BW - shift), fresh

    # Keys of blocks before are final, and the window begins with the position that
    # answers for the block's first. Otherwise the block's entry has answered for it.
    back = shift if how.canvas == "prefill" else 0

    def window(s):
        width = back + Q + cfg.horizon * how.ahead
        pos_BV = s.start_B[:, None] - back + jnp.arange(width)[None]
        slots_BS = jnp.arange(s.cache.k_LBSKH.shape[2])[None]
        kept_BS = slots_BS < pos_BV[:, :1]
        if how.suffix:
            kept_BS |= slots_BS > pos_BV[:, -1:]
        x_BVD, fresh = run(s, pos_BV, kept_BS=kept_BS)
        x_BVD = jnp.pad(x_BVD, ((0, 0), (shift - back, 0), (0, 0)))
        return x_BVD[:, :Q], jax.tree.map(lambda x: x[:, :, back:], fresh)

    if how.canvas == "prefill":  # a clean block: keep its keys and move on
        x_BWD, fresh = window(s)
        clean_B = s.live_B & ~(at(s.step_BT, pos_BW) == FAR).any(axis=1)
        cache = kv.write(s.cache, fresh, s.start_B, clean_B)
        s = s.replace(cache=cache, forwards_B=s.forwards_B + clean_B)
        now_B = s.live_B & ~clean_B
    elif how.canvas == "step":
        x_BWD, now_B = canvas(s)[0], s.live_B
    else:
        # Rows at a block's entry wait for the others to come to one: a forward is either
        # of canvases, each of which costs as much as many windows, or of windows.
        enters_B = s.live_B & (s.block_steps_B == 0)
        together = (enters_B | ~s.live_B).all()
        x_BWD, cache = jax.lax.cond(
            together, canvas, lambda s: (window(s)[0], s.cache), s
        )
        s, now_B = s.replace(cache=cache), s.live_B & (enters_B == together)

    s = unmask(params, s, x_BWD, pos_BW, now_B, model=model, cfg=cfg, draw=draw)
    if how.canvas != "prefill":
        clean_B = s.live_B & ~open_positions(s, pos_BW, model).any(axis=1)
    return s.replace(
        start_B=s.start_B + Q * clean_B,
        block_steps_B=jnp.where(clean_B, 0, s.block_steps_B),
    )


def open_positions(s: SamplingState, pos_BW, model: ModelConfig):
    """Returns which positions are masked, and to be unmasked.

    With full attention a canvas ends at its limit; otherwise with the block there.
    """
    masked_BW = at(s.step_BT, pos_BW) == FAR
    if model.attention == "full":
        masked_BW &= pos_BW < s.limit_B[:, None]
    return masked_BW


def unmask(params, s, x_BWD, pos_BW, now_B, *, model, cfg, draw=logits.candidates):
    """Returns the state after a denoising step of the rows `now`.

    x_BWD: their windows' hidden states, computed with the masked positions masked.
    """
    tokens_BW, masked_BW = at(s.tokens_BT, pos_BW), open_positions(s, pos_BW, model)
    key_B = jax.vmap(jax.random.fold_in)(s.key_B, s.steps_B)
    drawn = draw(params, x_BWD, key_B, s.temperature_B, model=model, cfg=cfg)
    drawn = confidence.weigh(drawn, logits.apart(key_B, 1), model.pad_id, cfg)
    quota_B = jnp.asarray(cfg.schedule)[
        jnp.minimum(s.block_steps_B, len(cfg.schedule) - 1)
    ]
    take_BW = STRATEGIES[cfg.strategy].take(drawn, masked_BW, quota_B, cfg)
    if policy.choose(cfg, model.attention).canvas == "block":
        # No window answers for a block's first position.
        first_BW = pos_BW < (s.start_B + model.shift)[:, None]
        take_BW |= first_BW & masked_BW & (s.block_steps_B == 0)[:, None]
    take_BW &= now_B[:, None]
    count_B = s.steps_B + now_B
    tokens_BW = jnp.where(take_BW, drawn.token_BW, tokens_BW)
    masked_BW &= ~take_BW

    # A row ends when nothing is masked up to its first stop id, or to its limit.
    answer_BW = (pos_BW >= s.prompt_len_B[:, None]) & ~masked_BW
    stops_BW = answer_BW & state.isin(tokens_BW, cfg.stop_ids)
    stop_B = jnp.min(jnp.where(stops_BW, pos_BW, FAR), axis=1)
    end_B = jnp.minimum(stop_B + 1, s.limit_B)
    open_B = (masked_BW & (pos_BW < end_B[:, None])).any(axis=1)
    done_B = s.live_B & ~open_B & (end_B <= pos_BW[:, -1] + 1)
    return s.replace(
        tokens_BT=put(s.tokens_BT, pos_BW, take_BW, drawn.token_BW),
        step_BT=put(s.step_BT, pos_BW, take_BW, count_B[:, None]),
        logp_BT=put(s.logp_BT, pos_BW, take_BW, drawn.logp_BW),
        conf_BT=put(s.conf_BT, pos_BW, take_BW, drawn.conf_BW),
        steps_B=count_B,
        block_steps_B=s.block_steps_B + now_B,
        forwards_B=s.forwards_B + now_B,
        len_B=jnp.where(done_B, end_B - s.prompt_len_B, s.len_B),
        live_B=s.live_B & ~done_B,
    )


@functools.partial(jax.jit, static_argnames=("model", "cfg"))
def start(
    params, prompt_BT, prompt_len_B, limit_B, temperature_B, key_B, *, model, cfg
):
    """Returns rows that are prefilled and ready to `step`.

    prompt_BT: ids from position 0 on, any width up to the canvas; prompt_len_B: 0 marks a
    filler row; limit_B: first position that no answer may reach, at most `cfg.slots`;
    key_B: one typed random key per row, which with the row's own content decides its draw.
    """
    uncached = policy.choose(cfg, model.attention).canvas == "step"
    cache = kv.empty(model, prompt_BT.shape[0], 0 if uncached else cfg.slots)
    s = state.begin(
        prompt_BT, prompt_len_B, limit_B, temperature_B, key_B, cache, cfg.slots
    )
    return prefill(params, s, prompt_BT.shape[1], model=model, cfg=cfg)


@functools.partial(jax.jit, static_argnames=("model", "cfg"), donate_argnames="s")
def advance(params, s: SamplingState, *, model, cfg) -> SamplingState:
    """One jitted `step`, for callers who watch a canvas fill."""
    return step(params, s, model=model, cfg=cfg)


@functools.partial(jax.jit, static_argnames=("model", "cfg"))
def generate(
    params, prompt_BT, prompt_len_B, limit_B, temperature_B, key_B, *, model, cfg
) -> Trace:
    """Samples every row to its end; the arguments are those of `start`."""
    rows = prompt_BT, prompt_len_B, limit_B, temperature_B, key_B
    s = start(params, *rows, model=model, cfg=cfg)
    s = jax.lax.while_loop(
        lambda s: s.live_B.any(), lambda s: step(params, s, model=model, cfg=cfg), s
    )
    return state.trace(s, cfg.stop_ids)


def at(x_BT, pos_BW):
    """Returns x, [B, T] or [B, T, D], at the window's positions."""
    pos = pos_BW.reshape(*pos_BW.shape, *[1] * (x_BT.ndim - 2))
    return jnp.take_along_axis(x_BT, pos, axis=1, mode="clip")


def put(x_BT, pos_BW, take_BW, new_BW):
    """Returns x with `new` at the window's positions that were taken."""
    kept_BW = jnp.where(take_BW, pos_BW, x_BT.shape[1])  # past the end: dropped
    new_BW = jnp.broadcast_to(new_BW, pos_BW.shape).astype(x_BT.dtype)

    def row(x_T, kept_W, new_W):
        return x_T.at[kept_W].set(new_W, mode="drop")

    # Row by row: indices that also name the row would tie the rows of a mesh together.
    return jax.vmap(row)(x_BT, kept_BW, new_BW)
