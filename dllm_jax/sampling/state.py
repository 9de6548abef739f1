"""What the sampler carries, and the trace that it hands up."""

import dataclasses
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.models.cache import KVCache
from dllm_jax.models.mask import FAR

GIVEN = 0  # the step of a token that was never masked; denoising steps count from 1


@flax.struct.dataclass
class SamplingState:
    """Rows in flight. A position is masked iff its step is FAR."""

    tokens_BT: jax.Array
    step_BT: jax.Array  # GIVEN, the step at which it was unmasked, or FAR
    logp_BT: jax.Array  # the model's log-prob of the token when it was unmasked, nats
    conf_BT: jax.Array  # its probability in the distribution it was drawn from
    prompt_len_B: jax.Array
    limit_B: jax.Array  # the answer ends before this position
    start_B: jax.Array  # first position of the window; everything before is cached
    steps_B: jax.Array  # denoising steps so far
    block_steps_B: jax.Array  # of these, in the present block
    forwards_B: jax.Array  # forwards so far, with those that only kept a block's keys
    len_B: jax.Array  # tokens of the answer, once the row has ended
    live_B: jax.Array
    bad_B: jax.Array  # it met a number that is not finite, and ended there
    temperature_B: jax.Array
    # These two stand in place of SamplerConfig's; None: as it is there.
    threshold_B: jax.Array | None
    entropy_bound_B: jax.Array | None
    key_B: jax.Array
    cache: KVCache


@flax.struct.dataclass
class Trace:
    """Finished rows: canvases with the order in which they were filled.

    The answer of row b is positions prompt_len .. prompt_len + len. What follows it in
    its last block, unmasked or not, is kept: the answer was conditioned on it.
    """

    tokens_BT: jax.Array
    step_BT: jax.Array
    logp_BT: jax.Array
    conf_BT: jax.Array
    prompt_len_B: jax.Array
    len_B: jax.Array
    steps_B: jax.Array
    forwards_B: jax.Array
    stopped_B: jax.Array  # it met a stop id; False: it was cut at its limit
    # It met a number that is not finite: its answer is none, of length 0.
    bad_B: jax.Array


class Answer(NamedTuple):
    """One row of a host Trace, field by field."""

    tokens_T: np.ndarray
    step_T: np.ndarray
    logp_T: np.ndarray
    conf_T: np.ndarray
    prompt_len: np.int32
    len: np.int32
    steps: np.int32
    forwards: np.int32
    stopped: np.bool_
    bad: np.bool_


def answer(trace: Trace, row: int) -> Answer:
    """Returns one row of a host Trace."""
    return Answer(*(getattr(trace, f.name)[row] for f in dataclasses.fields(Trace)))


def stacked(answers: list[Answer]) -> Trace:
    """Returns the host Trace of these rows."""
    return Trace(*(np.stack(column) for column in zip(*answers, strict=True)))


def no_answer(slots: int) -> Answer:
    """Returns the row of a prompt that cannot be answered."""
    zero, zeros_T = np.int32(0), np.zeros(slots, np.float32)
    return Answer(
        tokens_T=np.zeros(slots, np.int32),
        step_T=np.full(slots, FAR, np.int32),
        logp_T=zeros_T,
        conf_T=zeros_T,
        prompt_len=zero,
        len=zero,
        steps=zero,
        forwards=zero,
        stopped=np.bool_(False),
        bad=np.bool_(False),
    )


def begin(
    prompt_BT,
    prompt_len_B,
    limit_B,
    temperature_B,
    key_B,
    cache,
    slots: int,
    tail: tuple[int, ...] = (),
    *,
    threshold_B,
    entropy_bound_B,
):
    """Returns rows of `slots` positions whose prompt is given and whose rest is masked.

    tail: ids that are given from the limit on.

    `prompt_BT` holds each prompt from position 0 on; what lies beyond `prompt_len` is
    ignored. A row of prompt length 0 is a filler and never lives.
    """
    pad = slots - prompt_BT.shape[1]
    tokens_BT = jnp.pad(prompt_BT, ((0, 0), (0, pad)))
    given_BT = jnp.arange(slots)[None] < prompt_len_B[:, None]
    tokens_BT = jnp.where(given_BT, tokens_BT, 0)
    behind_BT = jnp.arange(slots)[None] - limit_B[:, None]
    for place, token in enumerate(tail):
        tokens_BT = jnp.where(behind_BT == place, token, tokens_BT)
        given_BT |= behind_BT == place
    zero_BT = jnp.zeros(tokens_BT.shape, jnp.float32)
    zero_B = jnp.zeros_like(prompt_len_B)
    return SamplingState(
        tokens_BT=tokens_BT,
        step_BT=jnp.where(given_BT, GIVEN, jnp.int32(FAR)),
        logp_BT=zero_BT,
        conf_BT=zero_BT,
        prompt_len_B=prompt_len_B,
        limit_B=limit_B,
        start_B=zero_B,
        steps_B=zero_B,
        block_steps_B=zero_B,
        forwards_B=zero_B,
        len_B=zero_B,
        live_B=prompt_len_B > 0,
        bad_B=jnp.zeros_like(prompt_len_B, bool),
        temperature_B=temperature_B,
        threshold_B=threshold_B,
        entropy_bound_B=entropy_bound_B,
        key_B=key_B,
        cache=cache,
    )


def trace(
    state: SamplingState, stop_ids: tuple[int, ...], whole: bool = False
) -> Trace:
    """Returns what the finished rows hand up; the cache stays behind.

    whole: all answers have one length, such as images: none is cut there.
    """
    end_B1 = (state.prompt_len_B + state.len_B - 1)[:, None]
    last_B1 = jnp.take_along_axis(state.tokens_BT, jnp.maximum(end_B1, 0), axis=1)
    shared = {f.name for f in dataclasses.fields(Trace)} - {"stopped_B"}
    return Trace(
        **{name: getattr(state, name) for name in shared},
        stopped_B=(isin(last_B1[:, 0], stop_ids) | whole) & (state.len_B > 0),
    )


def isin(tokens, ids: tuple[int, ...]):
    """Returns where a token is one of a static handful of ids."""
    return jnp.isin(tokens, jnp.asarray(ids, jnp.int32))
