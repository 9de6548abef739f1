"""Losses of a trajectory's evidence bounds, as factors of its tokens' log-probs.

A sum over trajectories of f(bound) is not linear in the log-probs, so it cannot be cut
into microbatches. Its gradient can: sum of df/dbound x grad log p, and the factors follow
from log-probs scored beforehand (`learner.score`). They stand in the place of advantages in
the objective `linear`, whose gradient is then exact at the scored weights.

m noise draws of a trajectory are m rows, one after the other; a masked token stands for
as many as its share says (`noise.subset`, weights "elbo"):

    lower bound   L = 1/m sum_d sum_i share_di log p_di
    upper bound   U = 1/power sum_i log(1/m sum_d share_di p_di^power)

Host numpy.
"""

import numpy as np


def sandwich(adv_nT, logp_nT, share_nT, answer_nT, *, draws, weight, power):
    """Returns advantages in which negative ones lower the upper bound too.

    SPG, sandwiched policy gradient (arXiv 2510.09541, section 3; in detail as its
    published code): where A < 0 the bound of log pi that is lowered is weight x U +
    (1 - weight) x L. U sums over the tokens that some draw masked; as there, it is scaled
    to all of the answer.
    """
    n, T = adv_nT.shape
    rows = (n // draws, draws, T)
    share = share_nT.reshape(rows)
    masked = share > 0
    power_logp = np.where(masked, power * logp_nT.reshape(rows), -np.inf)
    top = np.max(power_logp, axis=1, keepdims=True)
    p = np.exp(power_logp - np.where(np.isfinite(top), top, 0))
    mean = (share * p).mean(axis=1, keepdims=True)
    covered = np.maximum(masked.any(axis=1).sum(axis=-1), 1)
    scale = answer_nT.sum(axis=-1).reshape(rows[:2]) / covered[:, None]
    upper = np.where(masked, p / np.where(mean > 0, mean, 1), 0) * scale[..., None]
    mixed_nT = (1 - weight) + weight * upper.reshape(n, T)
    return np.where(adv_nT < 0, mixed_nT, 1) * adv_nT


def lower(logp_nT, share_nT, draws: int):
    """Returns each trajectory's evidence lower bound, nats: the mean over its draws."""
    return (share_nT * logp_nT).sum(axis=1).reshape(-1, draws).mean(axis=1)


def preference(policy_n, reference_n, beta: float):
    """Returns (loss, factors of the bounds, margins) of pairs: chosen, rejected, chosen ..

    VRPO (LLaDA 1.5, arXiv 2505.19223, section 3): DPO's mean of -log sigmoid(margin) with
    evidence bounds B for log-likelihoods,
    margin = beta (B_policy - B_reference)(chosen) - beta (B_policy - B_reference)(rejected).
    Its variance is least with one mask per noise level, and with the same draws for both
    models: both are scored on one batch.
    """
    gain = beta * (policy_n - reference_n)
    margin = gain[0::2] - gain[1::2]
    loss = np.logaddexp(0, -margin).mean()
    push = beta / (1 + np.exp(margin)) / len(margin)
    return float(loss), np.stack([push, -push], axis=1).reshape(-1), margin


def compared(out: dict, len_n, share_nT, batch, source, *, draws: int, beta: float):
    """Returns (metrics, the batch with its factors) of pairs scored by both models.

    out: `learner.score`'s, of "policy" and "reference"; len_n: the answers' lengths.
    """
    shape = share_nT.shape
    bound = {
        name: lower(source.scatter(x["logp"], shape), share_nT, draws)
        for name, x in out.items()
    }
    loss, factor_n, margin_n = preference(bound["policy"], bound["reference"], beta)
    told = {
        "preference_loss": loss,
        "preference_margin": float(margin_n.mean()),
        "preference_accuracy": float((margin_n > 0).mean()),
    }
    # The weights divide by all rows' tokens; a bound is a mean over its draws' rows.
    factor_n = np.repeat(factor_n, draws) * (len_n.sum() / draws)
    factor_nT = np.broadcast_to(factor_n[:, None], shape)
    return told, batch.replace(adv_BU=source.gather(factor_nT))
