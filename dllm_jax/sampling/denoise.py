"""THE sampler core: a step is look, unmask, move.

Block diffusion with a key/value cache. A canvas is cut into blocks of Q positions on
the absolute grid pos // Q; a block is denoised in the light of the committed ones
before it. Each `step` runs every live row's present block once. If the block arrived
clean, its keys are kept and the row moves on; otherwise its keys are dropped and some
of its masked positions are unmasked. Rows are independent: each has its own block, step
count, limit, temperature and random key, so a batch, a rollout and a server are the
same `step`. Families with full attention re-run their canvas, as their cache policy
says (`policy.py`): what a step looks at is all that differs (LOOKS).

A row whose draw is no number ends at once, as `bad`: nothing that follows from it would be
an answer.

Letters: v positions of a window: a block, and what is run before and behind it.
"""

import functools
import types

import jax
import jax.numpy as jnp

from dllm_jax import sharding
from dllm_jax.models import cache as kv
from dllm_jax.models import mask, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR
from dllm_jax.sampling import confidence, logits, policy, state
from dllm_jax.sampling.config import TRACED, SamplerConfig
from dllm_jax.sampling.policy import CachePolicy
from dllm_jax.sampling.state import SamplingState, Trace
from dllm_jax.sampling.strategy import STRATEGIES

TURN = 32  # forwards, at most, between two questions whether to stop


def step(
    params,
    s: SamplingState,
    *,
    model: ModelConfig,
    cfg: SamplerConfig,
    draw=logits.candidates,
) -> SamplingState:
    """Returns the state after one step of every live row.

    draw: makes candidates of hidden states, as `logits.candidates` does.
    """
    cache_policy = policy.choose(cfg, model.attention)
    pos_BW = s.start_B[:, None] + jnp.arange(cfg.block)[None]
    look = LOOKS[cache_policy.canvas]
    s, x_BWD, now_B = look(params, s, pos_BW, cache_policy, model=model, cfg=cfg)
    s = unmask(
        params,
        s,
        x_BWD,
        pos_BW,
        now_B,
        model=model,
        cfg=cfg,
        draw=draw,
        must_BW=owed(s, pos_BW, cache_policy, model),
    )
    if cache_policy.final:  # the blocks of live rows that did not unmask were committed
        moves_B = s.live_B & ~now_B
    else:  # nothing is to be committed
        moves_B = s.live_B & ~open_positions(s, pos_BW, model).any(axis=1)
    return move(s, moves_B, cfg.block)


# ---- Look ----------------------------------------------------------------------------


def look_at_canvas(
    params, s, pos_BW, cache_policy: CachePolicy, *, model, cfg: SamplerConfig
):
    """Runs whole canvases and keeps no key: exact for every family, and slow.

    With guidance each row has a second one, in which nothing is asked for.
    """
    answering_BW = pos_BW - model.shift
    if not cfg.guidance:
        x_BTD, _ = run_canvas(params, s, model=model, cfg=cfg)
        return s, at(x_BTD, answering_BW), s.live_B
    rows, first_B, moved_B = with_blank(s, cfg.blank)
    x_BTD, _ = run_canvas(params, rows, model=model, cfg=cfg, first_B=first_B)
    x_BWD = at(x_BTD, answering_BW.repeat(2, axis=0) + moved_B[:, None])
    return s, transformer.guided(x_BWD[::2], x_BWD[1::2], cfg.guidance), s.live_B


def with_blank(s: SamplingState, blank: tuple[int, ...]):
    """Returns (the rows, each with one behind it that asks for nothing; first_B, moved_B).

    The blank prompt ends where the row's own does, so that what follows has its positions;
    before it, at `first`, the second row has nothing to see. Both read the same answer: the
    second, where the blank prompt is the longer one, as many positions later as `moved` says,
    which no position tells that is relative to others.
    """
    pos_1T = jnp.arange(s.tokens_BT.shape[1])[None]
    more_B = len(blank) - s.prompt_len_B
    moved_B = jnp.maximum(more_B, 0)
    from_BT = jnp.maximum(pos_1T - moved_B[:, None], 0)
    blank_BT = at(s.tokens_BT, from_BT)
    place_BT = pos_1T - (s.prompt_len_B + moved_B)[:, None]
    for place, token in enumerate(reversed(blank), 1):
        blank_BT = jnp.where(place_BT == -place, token, blank_BT)

    def both(own, beside):
        return jnp.stack([own, beside], axis=1).reshape(-1, *own.shape[1:])

    zero_B = jnp.zeros_like(moved_B)
    rows = s.replace(
        tokens_BT=both(s.tokens_BT, blank_BT),
        step_BT=both(s.step_BT, at(s.step_BT, from_BT)),
        limit_B=both(s.limit_B, s.limit_B + moved_B),
    )
    return rows, both(zero_B, jnp.maximum(-more_B, 0)), both(zero_B, moved_B)


def look_at_block(
    params, s, pos_BW, cache_policy: CachePolicy, *, model, cfg: SamplerConfig
):
    """Runs blocks in the light of those before; keeps the keys of those that are clean.

    They are final then: no later token changes what a block and those before it see. A
    block costs one forward more than its denoising steps, in which its row waits.
    """
    x_BWD, fresh = run_window(params, s, cache_policy, model=model, cfg=cfg)
    clean_B = s.live_B & ~open_positions(s, pos_BW, model).any(axis=1)
    cache = kv.write(s.cache, fresh, s.start_B, clean_B)
    s = s.replace(cache=cache, forwards_B=s.forwards_B + clean_B)
    return s, x_BWD, s.live_B & ~clean_B


def look_at_either(
    params, s, pos_BW, cache_policy: CachePolicy, *, model, cfg: SamplerConfig
):
    """Runs whole canvases where blocks begin, and keeps their keys; else windows.

    A window sees the keys of its block's entry: stale, until the next begins. Rows at a
    block's entry wait for the others to come to one: a forward is either of canvases,
    each of which costs as much as many windows, or of windows.
    """

    def canvas(s):
        x_BTD, cache = run_canvas(params, s, model=model, cfg=cfg)
        return at(x_BTD, pos_BW - model.shift), cache

    def window(s):
        x_BWD, _ = run_window(params, s, cache_policy, model=model, cfg=cfg)
        return x_BWD, s.cache

    enters_B = s.live_B & (s.block_steps_B == 0)
    together = (enters_B | ~s.live_B).all()
    x_BWD, cache = jax.lax.cond(together, canvas, window, s)
    return s.replace(cache=cache), x_BWD, s.live_B & (enters_B == together)


# By CachePolicy.canvas: when the whole canvas is run. Each is a function
#   (params, s, pos_BW, cache_policy, *, model, cfg) -> (s, x_BWD, now_B):
# the state with the keys that are kept; the hidden states that answer for the positions
# of each row's block, which is at pos_BW; the live rows that unmask some by them now.
LOOKS = {
    "step": look_at_canvas,
    "prefill": look_at_block,
    "block": look_at_either,
}


def run_canvas(
    params, s: SamplingState, *, model: ModelConfig, cfg: SamplerConfig, first_B=None
):
    """Returns (x_BTD, its KVCache); hidden state i - shift answers for position i.

    first_B: as in `forward`.
    """
    pos_BT = jnp.broadcast_to(jnp.arange(cfg.slots)[None], s.tokens_BT.shape)
    return forward(params, s, pos_BT, model=model, cfg=cfg, first_B=first_B)


def run_window(
    params,
    s: SamplingState,
    cache_policy: CachePolicy,
    *,
    model: ModelConfig,
    cfg: SamplerConfig,
):
    """Returns (hidden states x_BWD that answer for the block, its KVCache).

    With a shift and stale keys nothing answers for the block's first position: zeros.
    """
    Q, shift = cfg.block, model.shift
    # Where keys are final the window can begin with the position that answers for the
    # block's first. Where they are stale the block's entry has answered for that.
    back = shift if cache_policy.final else 0
    ahead = cfg.horizon if cache_policy.ahead else 0
    pos_Bv = s.start_B[:, None] - back + jnp.arange(back + Q + ahead)[None]
    slots_1S = jnp.arange(s.cache.k_LBSKH.shape[2])[None]
    kept_BS = slots_1S < pos_Bv[:, :1]
    if cache_policy.suffix:
        kept_BS |= slots_1S > pos_Bv[:, -1:]
    x_BvD, fresh = forward(params, s, pos_Bv, model=model, cfg=cfg, kept_BS=kept_BS)
    x_BvD = jnp.pad(x_BvD, ((0, 0), (shift - back, 0), (0, 0)))
    return x_BvD[:, :Q], jax.tree.map(lambda x: x[:, :, back:], fresh)


def forward(
    params,
    s: SamplingState,
    pos_BW,
    *,
    model: ModelConfig,
    cfg: SamplerConfig,
    kept_BS=None,
    first_B=None,
):
    """Returns (hidden states x_BWD, their KVCache) of the canvas at some positions.

    kept_BS: the slots of the cache that they see; None: they see no cache. first_B: the
    first position of the canvas that is seen; None: all are.
    """
    tokens_BW, masked_BW = at(s.tokens_BT, pos_BW), at(s.step_BT, pos_BW) == FAR
    shown_BW = jnp.where(masked_BW, model.mask_id, tokens_BW)
    x_BWD = transformer.embed(params, shown_BW, model)
    end_B = s.limit_B + len(cfg.tail)
    seen = mask.clean(model.attention, pos_BW, end_B, cfg.block)
    if first_B is not None:
        seen = mask.starting(seen, first_B)
    if kept_BS is None:
        return transformer.trunk(params, x_BWD, pos_BW, seen, model)[:2]
    seen = mask.beside(seen, kept_BS)
    return transformer.trunk(params, x_BWD, pos_BW, seen, model, s.cache)[:2]


# ---- Unmask, and move ----------------------------------------------------------------


def owed(s: SamplingState, pos_BW, cache_policy: CachePolicy, model: ModelConfig):
    """Returns the positions that are unmasked now whatever the strategy says, or None.

    With a shift and stale keys no later window answers for what begins a block.
    """
    if not cache_policy.stale:
        return None
    first_BW = pos_BW < (s.start_B + model.shift)[:, None]
    return first_BW & (s.block_steps_B == 0)[:, None]


def unmask(
    params,
    s: SamplingState,
    x_BWD,
    pos_BW,
    now_B,
    *,
    model: ModelConfig,
    cfg: SamplerConfig,
    draw=logits.candidates,
    must_BW=None,
) -> SamplingState:
    """Returns the state after a denoising step of the rows `now`.

    A row with a draw that is not finite, where it may unmask, ends without an answer.

    x_BWD: hidden states that answer for pos_BW, computed with masked positions masked.
    now_B: the rows, all of them live. must_BW: positions that are unmasked, if masked,
    whatever the strategy says.
    """
    tokens_BW, masked_BW = at(s.tokens_BT, pos_BW), open_positions(s, pos_BW, model)
    may_BW = choices(s, pos_BW, tokens_BW, masked_BW, cfg)
    key_B = jax.vmap(jax.random.fold_in)(s.key_B, s.steps_B)
    drawn = draw(
        params,
        x_BWD,
        key_B,
        s.temperature_B,
        wanted_BW=may_BW & now_B[:, None],
        model=model,
        cfg=cfg,
    )
    rank_key_B = logits.apart(key_B, 1)
    drawn = confidence.weigh(drawn, rank_key_B, s.block_steps_B, model.pad_id, cfg)
    quota_B = jnp.asarray(cfg.schedule)[
        jnp.minimum(s.block_steps_B, len(cfg.schedule) - 1)
    ]
    take_BW = STRATEGIES[cfg.strategy].take(drawn, may_BW, quota_B, of_rows(cfg, s))
    if must_BW is not None:
        take_BW |= must_BW & may_BW
    drawn_BW = drawn.logp_BW + drawn.conf_BW + drawn.entropy_BW
    bad_B = now_B & (may_BW & ~jnp.isfinite(drawn_BW)).any(axis=1)
    take_BW &= (now_B & ~bad_B)[:, None]
    count_B = s.steps_B + now_B
    tokens_BW = jnp.where(take_BW, drawn.token_BW, tokens_BW)
    done_B, end_B = ended(s, pos_BW, tokens_BW, masked_BW & ~take_BW, cfg.stop_ids)
    return s.replace(
        tokens_BT=put(s.tokens_BT, pos_BW, take_BW, drawn.token_BW),
        step_BT=put(s.step_BT, pos_BW, take_BW, count_B[:, None]),
        logp_BT=put(s.logp_BT, pos_BW, take_BW, drawn.logp_BW),
        conf_BT=put(s.conf_BT, pos_BW, take_BW, drawn.conf_BW),
        steps_B=count_B,
        block_steps_B=s.block_steps_B + now_B,
        forwards_B=s.forwards_B + now_B,
        len_B=jnp.where(done_B & ~bad_B, end_B - s.prompt_len_B, s.len_B),
        live_B=s.live_B & ~done_B & ~bad_B,
        bad_B=s.bad_B | bad_B,
    )


def choices(s: SamplingState, pos_BW, tokens_BW, masked_BW, cfg: SamplerConfig):
    """Returns which masked positions may be unmasked: see SamplerConfig.before_stop."""
    if not cfg.before_stop:
        return masked_BW
    stop_B = first_stop(s, pos_BW, tokens_BW, masked_BW, cfg.stop_ids)
    return masked_BW & (pos_BW < stop_B[:, None])


def of_rows(cfg: SamplerConfig, s: SamplingState):
    """Returns the config, its TRACED fields those of the rows where they have their own.

    Then they are [B, 1].
    """
    own = {name: getattr(s, f"{name}_B") for name in TRACED}
    own = {name: x_B[:, None] for name, x_B in own.items() if x_B is not None}
    return types.SimpleNamespace(**vars(cfg) | own) if own else cfg


def open_positions(s: SamplingState, pos_BW, model: ModelConfig):
    """Returns which positions are masked, and to be unmasked.

    With full attention a canvas ends at its limit; otherwise with the block there.
    """
    masked_BW = at(s.step_BT, pos_BW) == FAR
    if model.attention == "full":
        masked_BW &= pos_BW < s.limit_B[:, None]
    return masked_BW


def ended(s: SamplingState, pos_BW, tokens_BW, masked_BW, stop_ids: tuple[int, ...]):
    """Returns (done_B, end_B): which rows have ended, and before which position.

    A row ends when nothing is masked up to its first stop id, or to its limit. A stop
    id counts in the answer only.
    """
    stop_B = first_stop(s, pos_BW, tokens_BW, masked_BW, stop_ids)
    end_B = jnp.minimum(stop_B + 1, s.limit_B)
    open_B = (masked_BW & (pos_BW < end_B[:, None])).any(axis=1)
    return s.live_B & ~open_B & (end_B <= pos_BW[:, -1] + 1), end_B


def first_stop(s: SamplingState, pos_BW, tokens_BW, masked_BW, stop_ids):
    """Returns the position of each answer's first stop id [B], FAR where it has none."""
    answer_BW = (pos_BW >= s.prompt_len_B[:, None]) & ~masked_BW
    stops_BW = answer_BW & state.isin(tokens_BW, stop_ids)
    return jnp.min(jnp.where(stops_BW, pos_BW, FAR), axis=1)


def move(s: SamplingState, moves_B, Q: int) -> SamplingState:
    """Returns the state with the rows `moves` at their next block."""
    return s.replace(
        start_B=s.start_B + Q * moves_B,
        block_steps_B=jnp.where(moves_B, 0, s.block_steps_B),
    )


# ---- Whole rows ----------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("model", "cfg"))
def start(
    params,
    prompt_BT,
    prompt_len_B,
    limit_B,
    temperature_B,
    key_B,
    threshold_B=None,
    entropy_bound_B=None,
    *,
    model: ModelConfig,
    cfg: SamplerConfig,
) -> SamplingState:
    """Returns rows that are prefilled and ready to `step`.

    prompt_BT: ids from position 0 on, any width up to the canvas
    prompt_len_B: tokens; 0 marks a filler row, which never lives
    limit_B: first position that no answer may reach, at most `cfg.slots`
    temperature_B: f32; 0 takes the arg-max
    key_B: a typed random key, which with the row's own content decides its draws
    threshold_B, entropy_bound_B: f32; None: what `cfg` says
    """
    cache_policy = policy.choose(cfg, model.attention)
    slots = cfg.slots if cache_policy.cached else 0
    cache = kv.empty(model, prompt_BT.shape[0], slots)
    s = state.begin(
        prompt_BT,
        prompt_len_B,
        limit_B,
        temperature_B,
        key_B,
        cache,
        cfg.slots,
        cfg.tail,
        threshold_B=threshold_B,
        entropy_bound_B=entropy_bound_B,
    )
    start_B = policy.first_block(s.prompt_len_B, model.attention, cfg.block)
    s = s.replace(start_B=start_B)
    if cache_policy.final:
        s = prefill(params, s, prompt_BT.shape[1], model=model, cfg=cfg)
    return constrained(s)


def prefill(
    params, s: SamplingState, width: int, *, model: ModelConfig, cfg: SamplerConfig
) -> SamplingState:
    """Returns the state with the keys of its prompts' whole blocks.

    The first `width` positions are run. Keys beyond a row's whole blocks are written
    too, but its window never looks past `start` in the cache.
    """
    tokens_BT = s.tokens_BT[:, :width]
    pos_BT = jnp.broadcast_to(jnp.arange(width), tokens_BT.shape)
    seen = mask.clean(model.attention, pos_BT, s.prompt_len_B, cfg.block)
    x_BTD = transformer.embed(params, tokens_BT, model)
    _, fresh, _ = transformer.trunk(params, x_BTD, pos_BT, seen, model)
    cache = kv.write(s.cache, fresh, jnp.zeros_like(s.start_B), s.live_B)
    return s.replace(cache=cache, forwards_B=(s.start_B > 0).astype(s.forwards_B.dtype))


def constrained(s: SamplingState) -> SamplingState:
    """Returns the rows split over the mesh, as `start` and `advance` give them."""
    cache = jax.tree.map(lambda x: sharding.constrain(x, "LBSKH"), s.cache)
    return sharding.constrain_rows(s.replace(cache=None)).replace(cache=cache)


# Left to itself XLA copies every layer's weights out of their stack before it multiplies by
# them, and joins some: they cross a GPU's memory three times. Products by cuBLAS read them
# where they are, and only those that are not joined. A CUDA graph of a layer is recorded for
# each layer's addresses: of fewer graphs than a tower has layers none is found again. XLA's
# kernel for norms is left out: beside it each norm's weight was copied, 72 times a forward.
ON_GPU = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_dot_merger_threshold_mb": 0,
    "xla_cmd_buffer_trace_cache_size": 256,
    "xla_disable_hlo_passes": "triton-softmax-rewriter",
}


def loop_on(platform: str, cfg: SamplerConfig, plain, on_gpu):
    """Returns which of a loop's two programs is a platform's.

    Of products by cuBLAS none converts int8 as it reads it.
    """
    return on_gpu if platform == "gpu" and not cfg.int8 else plain


jitted = functools.partial(
    jax.jit, static_argnames=("model", "cfg"), donate_argnames="s"
)


@jitted
def advance(
    params, s: SamplingState, steps=1, *, model: ModelConfig, cfg: SamplerConfig
) -> SamplingState:
    """Runs at most `steps` forwards, for callers who watch, or may have to stop."""
    return constrained(run(params, s, steps, model=model, cfg=cfg))


advance_on_gpu = jitted(advance.__wrapped__, compiler_options=ON_GPU)


def run(
    params, s: SamplingState, steps, *, model: ModelConfig, cfg: SamplerConfig
) -> SamplingState:
    """Returns the state after `steps` forwards, or where no row lives any more."""

    def goes_on(carry):
        n, s = carry
        return (n < steps) & s.live_B.any()

    def body(carry):
        n, s = carry
        return n + 1, step(params, s, model=model, cfg=cfg)

    return jax.lax.while_loop(goes_on, body, (0, s))[1]


@functools.partial(jax.jit, static_argnames=("model", "cfg"))
def generate(
    params,
    prompt_BT,
    prompt_len_B,
    limit_B,
    temperature_B,
    key_B,
    *,
    model: ModelConfig,
    cfg: SamplerConfig,
) -> Trace:
    """Samples every row to its end; the arguments are those of `start`.

    All in one program, which nobody can stop: `answers.Batches` runs it in turns.
    """
    s = start(
        params,
        prompt_BT,
        prompt_len_B,
        limit_B,
        temperature_B,
        key_B,
        model=model,
        cfg=cfg,
    )
    s = run(params, s, cfg.most_forwards, model=model, cfg=cfg)
    return state.trace(s, cfg.stop_ids)


# ---- Positions of a canvas -----------------------------------------------------------


def at(x, pos_BW):
    """Returns x, [B, T] or [B, T, D], at some positions: [B, W] or [B, W, D]."""
    pos = pos_BW.reshape(*pos_BW.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, pos, axis=1, mode="clip")


def put(x_BT, pos_BW, take_BW, new_BW):
    """Returns x with `new` at those positions that are taken; new_BW may be [B, 1]."""
    target_BW = jnp.where(take_BW, pos_BW, x_BT.shape[1])  # past the end: dropped
    new_BW = jnp.broadcast_to(new_BW, pos_BW.shape).astype(x_BT.dtype)

    def put_in_row(x_T, target_W, new_W):
        return x_T.at[target_W].set(new_W, mode="drop")

    # Row by row: indices that also name the row would tie the rows of a mesh together.
    return jax.vmap(put_in_row)(x_BT, target_BW, new_BW)
