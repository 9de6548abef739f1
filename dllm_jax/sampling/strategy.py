"""Which masked positions to unmask now.

Every strategy is a function (draw, masked_BW, quota_B, cfg) -> take_BW of booleans; it
takes only masked positions and, where any is masked, at least one. `quota` is the
schedule's share of this step.
"""

import jax.numpy as jnp


def top_n(score_BW, masked_BW, count_B):
    """Takes the `count` best masked positions of each row; ties go to the left."""
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


STRATEGIES = {
    "sequential": sequential,
    "static": static,
    "dynamic": dynamic,
    "entropy_bounded": entropy_bounded,
}
