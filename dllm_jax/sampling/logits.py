"""From logits to a token: temperature, top-k, top-p, the draw and what is recorded."""

import flax.struct
import jax
import jax.numpy as jnp

from dllm_jax.models import transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.pallas_kernels.reference import keep
from dllm_jax.sampling.confidence import TARGETS, at_token, neg_entropy
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.strategy import STRATEGIES


@flax.struct.dataclass
class Draw:
    """A candidate token at every position of the window, and what is known of it.

    `logp` is the model's own log-prob (temperature 1, unfiltered, nats): the number
    that training sees. `conf` and `entropy` (nats) belong to the distribution drawn
    from. Ranks are by `score`, and thresholds are compared with `sure`: what `cfg.target`
    is in one of the two distributions, as the config says.
    """

    token_BW: jax.Array
    logp_BW: jax.Array
    conf_BW: jax.Array
    entropy_BW: jax.Array
    score_BW: jax.Array
    sure_BW: jax.Array


def candidates(
    params,
    x_BWD,
    key_B,
    temperature_B,
    *,
    wanted_BW=None,
    model: ModelConfig,
    cfg: SamplerConfig,
) -> Draw:
    """Returns the Draw of hidden states; of positions that are not wanted, anything finite.

    Where the head that draws by itself knows all that the config asks for, no logits
    are made: [B, W, V] of f32 would be the largest array of a step.
    """
    if not fused(cfg):
        logits_BWV = transformer.logits(params, x_BWD, model)
        drawn = draw(key_B, logits_BWV, temperature_B, cfg)
        first = model.drawn[0] if model.drawn else 0  # the first column's id
        return drawn.replace(token_BW=drawn.token_BW + first)
    token_BW, logp_BW, conf_BW, entropy_BW = transformer.token_draw(
        params, x_BWD, key_B, temperature_B, model, wanted_BW
    )
    scores = {  # of what is drawn from; of the model
        "confidence": (conf_BW, jnp.exp(logp_BW)),
        "log_confidence": (jnp.log(conf_BW), logp_BW),
        "neg_entropy": (-entropy_BW, -entropy_BW),
    }
    # Of another target nothing reads a score: see `fused`.
    told = scores.get(cfg.target, scores["confidence"])
    score_BW, sure_BW = chosen(*told, cfg)
    return Draw(token_BW, logp_BW, conf_BW, entropy_BW, score_BW, sure_BW)


def chosen(drawn_from, own, cfg: SamplerConfig):
    """Returns of what ranks are, and what thresholds are compared with."""
    ranks = own if cfg.untempered_ranks else drawn_from
    return ranks, drawn_from if cfg.tempered_threshold else own


def fused(cfg: SamplerConfig) -> bool:
    """Returns whether a head that draws by itself tells all that the config asks for.

    Filters need the sorted vocabulary, margins its two best tokens, where the strategy reads
    any score. The head tells the entropy of the distribution drawn from; a threshold or ranks
    may ask for the model's own.
    """
    reads = STRATEGIES[cfg.strategy]
    untempered = reads.reads_sure and not cfg.tempered_threshold
    untempered |= reads.ranks and cfg.untempered_ranks
    targets = ("confidence", "log_confidence")
    targets += () if untempered else ("neg_entropy",)
    told = cfg.target in targets or not (reads.reads_sure or reads.ranks)
    return told and cfg.top_k == 0 and cfg.top_p == 1


def draw(key_B, logits_BWV, temperature_B, cfg: SamplerConfig) -> Draw:
    """Draws a token for every position; each row by its own key and temperature.

    Temperature 0 takes the arg-max, and its confidence is that of temperature 1: a
    distribution that has collapsed to a point would call every guess certain.
    """
    logp_BWV = jax.nn.log_softmax(logits_BWV, axis=-1)
    greedy_B11 = (temperature_B == 0)[:, None, None]
    scale_B11 = jnp.where(greedy_B11, 1.0, temperature_B[:, None, None])
    kept_BWV = keep(
        logits_BWV / scale_B11,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        top_p_first=cfg.top_p_first,
    )
    kept_BWV = jax.nn.log_softmax(kept_BWV, axis=-1)
    gumbel = jax.vmap(lambda key: jax.random.gumbel(key, logits_BWV.shape[1:]))
    noise_BWV = jnp.where(greedy_B11, 0.0, gumbel(key_B))  # the arg-max is a draw now
    token_BW = jnp.argmax(kept_BWV + noise_BWV, axis=-1)
    other_B = apart(key_B, 0)
    target = TARGETS[cfg.target].score
    ranked_BWV, compared_BWV = chosen(kept_BWV, logp_BWV, cfg)
    return Draw(
        token_BW=token_BW,
        logp_BW=at_token(logp_BWV, token_BW),
        conf_BW=jnp.exp(at_token(kept_BWV, token_BW)),
        entropy_BW=-neg_entropy(kept_BWV, token_BW, other_B),
        score_BW=target(ranked_BWV, token_BW, other_B),
        sure_BW=target(compared_BWV, token_BW, other_B),
    )


def apart(key_B, use: int):
    """Returns keys for another use, where `draw` spends key_B itself on its noise.

    use: 0 for scores at random (TARGETS), 1 for ranks (`confidence.weigh`).
    """
    beyond = 2**30 + use  # every index of the noise
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(key_B, beyond)
