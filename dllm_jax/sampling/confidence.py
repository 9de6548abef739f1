"""How sure a position is: the scores by which strategies rank and compare.

    confidence        p(token)             margin    p(1st) - p(2nd)
    log_confidence    log p(token) <= 0    top       p(1st)
    neg_entropy       sum p log p <= 0     random    none: an order at random

A score belongs to a distribution p: the one drawn from, after temperature and filters,
or the model's own. A cold temperature makes every score of the former high, so that a
threshold on it lets whole blocks pass; thresholds act on the latter unless told
otherwise.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp


def confidence(logp_BWV, token_BW, key_B):
    """Returns the probability of the token drawn."""
    return jnp.exp(at_token(logp_BWV, token_BW))


def log_confidence(logp_BWV, token_BW, key_B):
    """Returns the log-prob of the token drawn, nats: with noise, MaskGIT's confidence."""
    return at_token(logp_BWV, token_BW)


def margin(logp_BWV, token_BW, key_B):
    """Returns by how much the most probable token leads."""
    best_BW2 = jnp.exp(jax.lax.top_k(logp_BWV, 2)[0])
    return best_BW2[..., 0] - best_BW2[..., 1]


def neg_entropy(logp_BWV, token_BW, key_B):
    """Returns minus the entropy, nats: 0 where one token is certain."""
    # xlogy-like: a token that was cut adds nothing, and not 0 * -inf.
    return jnp.sum(
        jnp.where(jnp.isfinite(logp_BWV), jnp.exp(logp_BWV) * logp_BWV, 0.0), axis=-1
    )


def top(logp_BWV, token_BW, key_B):
    """Returns the probability of the most probable token, whichever was drawn."""
    return jnp.exp(jnp.max(logp_BWV, axis=-1))


def random(logp_BWV, token_BW, key_B):
    """Returns uniform numbers drawn from each row's key: an order at random."""
    return jax.vmap(lambda key: jax.random.uniform(key, token_BW.shape[1:]))(key_B)


@dataclasses.dataclass(frozen=True)
class Target:
    """A row of TARGETS: a score, and whether it looks at the token that was drawn.

    Where it does, who is taken by it is taken for what it drew: unlikely draws are thrown
    away, and the tokens that stay are no draws of p (objective.likelihood "selection").
    Where it does not, they are ("tokens").
    """

    score: Callable
    of_draw: bool = False


# `sampler.target` names a row. A score is a function of
#   logp_BWV  the log-probs of a distribution, nats; -inf where a token was cut
#   token_BW  the tokens drawn from it
#   key_B     typed random keys, which nothing else draws from
# and returns [B, W], higher for what is surer; it need not be a probability. Rows do
# not look at each other. A score that the fused head does not know needs logits
# (logits.fused).
TARGETS = {
    "confidence": Target(confidence, of_draw=True),
    "log_confidence": Target(log_confidence, of_draw=True),
    "margin": Target(margin),
    "neg_entropy": Target(neg_entropy),
    "random": Target(random),
    "top": Target(top),
}


def weigh(drawn, key_B, step_B, pad_id: int, cfg):
    """Returns the logits.Draw `drawn` with scores as strategies should see them.

    step_B: of each row's block, from 0.

    `pad_penalty` lowers the scores of padding: with full attention models are so sure
    of it that answers would be padded before they are written. `rank_temperature` turns
    the n best into n drawn without replacement from softmax(score / temperature): the n
    best under Gumbel noise.
    """

    def penalised(x_BW):
        lower_BW = jnp.where(x_BW > 0, x_BW / cfg.pad_penalty, x_BW * cfg.pad_penalty)
        return jnp.where(drawn.token_BW == pad_id, lower_BW, x_BW)

    score_BW, sure_BW = penalised(drawn.score_BW), penalised(drawn.sure_BW)
    if cfg.rank_temperature:
        noise = jax.vmap(lambda key: jax.random.gumbel(key, score_BW.shape[1:]))
        by_step = jnp.asarray(cfg.rank_temperatures)
        scale_B = by_step[jnp.minimum(step_B, len(by_step) - 1)]
        score_BW = score_BW + scale_B[:, None] * noise(key_B)
    return drawn.replace(score_BW=score_BW, sure_BW=sure_BW)


def at_token(x_BWV, token_BW):
    """Returns x at the token of each position: [B, W]."""
    return jnp.take_along_axis(x_BWV, token_BW[..., None], axis=-1)[..., 0]
