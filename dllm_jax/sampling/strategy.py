"""Which masked positions to unmask now: one rule for each strategy."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A row of STRATEGIES: a rule, and what it reads."""

    take: Callable  # (draw, masked_BW, quota_B, cfg) -> take_BW: see below
    reads_sure: bool = False  # it compares `draw.sure_BW` with `cfg.threshold`
    reads_bound: bool = False  # it reads `cfg.entropy_bound`
    # It reads `draw.score_BW`. What a rule throws away has a likelihood of its own where the
    # score is one of the token drawn (confidence.Target); else that of the tokens is exact.
    ranks: bool = False


def top_n(score_BW, masked_BW, count_B):
    """Takes the `count` best masked positions of each row; ties go to the left.

    A score that is no number is the worst of a masked position's.
    """
    worst = jnp.finfo(score_BW.dtype).min
    score_BW = jnp.nan_to_num(score_BW, nan=worst)  # -inf becomes the worst, too
    score_BW = jnp.where(masked_BW, score_BW, -jnp.inf)
    rank_BW = jnp.argsort(jnp.argsort(-score_BW, axis=-1, stable=True), axis=-1)
    return masked_BW & (rank_BW < count_B[:, None])


def sequential(draw, masked_BW, quota_B, cfg):
    """Unmasks from left to right."""
    order_BW = jnp.broadcast_to(-jnp.arange(masked_BW.shape[1])[None], masked_BW.shape)
    return top_n(order_BW.astype(jnp.float32), masked_BW, quota_B)


def static(draw, masked_BW, quota_B, cfg):
    """Unmasks the `quota` best-scored masked positions of each row."""
    return top_n(draw.score_BW, masked_BW, quota_B)


def dynamic(draw, masked_BW, quota_B, cfg):
    """Unmasks all that is surer than `threshold`, and never fewer than static."""
    sure_BW = masked_BW & (draw.sure_BW > cfg.threshold)
    return sure_BW | static(draw, masked_BW, quota_B, cfg)


def entropy_bounded(draw, masked_BW, quota_B, cfg):
    """Unmasks by rising entropy while their sum stays below `entropy_bound` nats."""
    entropy_BW = jnp.where(masked_BW, draw.entropy_BW, jnp.inf)
    total_BW = jnp.cumsum(jnp.sort(entropy_BW, axis=-1), axis=-1)
    count_B = jnp.sum(total_BW < cfg.entropy_bound, axis=-1)
    return top_n(-entropy_BW, masked_BW, jnp.maximum(count_B, 1))


# `sampler.strategy` names a row. Its rule `take` is a function of
#   draw       a logits.Draw: a candidate token at every position, and scores of it
#   masked_BW  the positions that it may take
#   quota_B    tokens: the share that the schedule gives this step of the row's block
#   cfg        a SamplerConfig
# and returns take_BW, booleans. It takes masked positions only and, where a row has
# any, at least one: sampling ends because of that. Rows do not look at each other. A
# rule that reads `draw.sure_BW` has to say so: that may need logits, which are not made
# otherwise.
STRATEGIES = {
    "sequential": Strategy(sequential),
    "static": Strategy(static, ranks=True),
    "dynamic": Strategy(dynamic, reads_sure=True, ranks=True),
    "entropy_bounded": Strategy(entropy_bounded, reads_bound=True),
}
