"""Losses of a trajectory's evidence bounds, as factors of its tokens' log-probs.

A sum over trajectories of f(bound) is not linear in the log-probs, so it cannot be cut
into microbatches. Its gradient can: sum of df/dbound x grad log p, and the factors
follow from log-probs scored beforehand (`learner.score`). They stand in the place of
advantages in the objective `linear`, whose gradient is then exact at the scored
weights.

m noise draws of a trajectory are m rows, one after the other; a masked token stands for
as many as its share says (`noise.subset`, objective.aggregate "elbo"):

    lower bound   L = 1/m sum_d sum_t share_dt log p_dt
    upper bound   U = 1/power sum_t log(1/m sum_d share_dt p_dt^power)

Letters: i trajectories, d draws of each.

Host numpy.
"""

import numpy as np


def sandwich(
    adv_nT,
    logp_nT,
    share_nT,
    answer_nT,
    *,
    draws: int,
    weight: float,
    power: float,
) -> np.ndarray:
    """Returns advantages [n, T] in which negative ones lower the upper bound too.

    SPG, sandwiched policy gradient (arXiv 2510.09541, section 3; in detail as its
    published code): where A < 0 the bound of log pi that is lowered is
    weight x U + (1 - weight) x L. U sums over the tokens that some draw masked; as
    there, it is scaled to all of the answer.
    logp_nT: as scored, nats; share_nT: of the noise; answer_nT: where the answers are;
    all with a row for each draw. power: the upper bound's.
    """
    n, T = adv_nT.shape
    shape = (n // draws, draws, T)
    share_idT = share_nT.reshape(shape)
    masked_idT = share_idT > 0
    # p^power over its largest of all draws, so that improbable tokens do not underflow.
    power_logp_idT = np.where(masked_idT, power * logp_nT.reshape(shape), -np.inf)
    top_i1T = np.max(power_logp_idT, axis=1, keepdims=True)
    p_idT = np.exp(power_logp_idT - np.where(np.isfinite(top_i1T), top_i1T, 0))
    mean_i1T = (share_idT * p_idT).mean(axis=1, keepdims=True)
    covered_i = np.maximum(masked_idT.any(axis=1).sum(axis=-1), 1)
    scale_id = answer_nT.sum(axis=-1).reshape(shape[:2]) / covered_i[:, None]
    # dU / d log p is share x p^power / mean; the share is in the weights of the loss.
    upper_idT = np.where(masked_idT, p_idT / np.where(mean_i1T > 0, mean_i1T, 1), 0)
    upper_idT = upper_idT * scale_id[..., None]
    mixed_nT = (1 - weight) + weight * upper_idT.reshape(n, T)
    return np.where(adv_nT < 0, mixed_nT, 1) * adv_nT


def lower_bound(logp_nT, share_nT, draws: int) -> np.ndarray:
    """Returns each trajectory's evidence lower bound [i], nats: the draws' mean."""
    return (share_nT * logp_nT).sum(axis=1).reshape(-1, draws).mean(axis=1)


def preference(policy_i, reference_i, beta: float):
    """Returns (loss, factors of the bounds [i], margins) of pairs.

    policy_i, reference_i: the evidence bounds of chosen, rejected, chosen, ...

    VRPO (LLaDA 1.5, arXiv 2505.19223, section 3): DPO's mean of -log sigmoid(margin)
    with evidence bounds B for log-likelihoods,

        margin = beta (B_policy - B_reference)(chosen)
               - beta (B_policy - B_reference)(rejected)

    Its variance is least with one mask per noise level, and with the same draws for
    both models: both are scored on one batch.
    """
    gain_i = beta * (policy_i - reference_i)
    margins = gain_i[0::2] - gain_i[1::2]  # [pairs]
    loss = np.logaddexp(0, -margins).mean()
    # sigmoid(-margin), whose exp of a large margin would leave the range of f32.
    push = beta * np.exp(-np.logaddexp(0, margins)) / len(margins)
    return float(loss), np.stack([push, -push], axis=1).reshape(-1), margins


def preference_factors(
    policy_nT, reference_nT, share_nT, len_n, *, draws: int, beta: float
):
    """Returns (metrics, factors [n, T] in the place of advantages) of pairs of answers.

    policy_nT, reference_nT: log-probs of both models on the same noise, which has
    `draws` rows for each answer; share_nT: the noise's; len_n: the answers' lengths.
    """
    told = preference(
        lower_bound(policy_nT, share_nT, draws),
        lower_bound(reference_nT, share_nT, draws),
        beta,
    )
    # The weights divide by all rows' tokens; a bound is a mean over its draws' rows.
    factor_n = np.repeat(told[1], draws) * (len_n.sum() / draws)
    return preference_metrics(*told), np.broadcast_to(factor_n[:, None], share_nT.shape)


def ranking_factors(score_nT, share_nT):
    """Returns (metrics, factors [n, T] in the place of advantages) of pairs of answers.

    The loss of a reward model (Bradley and Terry 1952; InstructGPT, arXiv 2203.02155,
    Eq. 1): the mean over pairs of -log sigmoid(score of the chosen - of the rejected). It
    is `preference`'s with scores for bounds. score_nT: where share_nT is not 0, the one
    score of answer n.
    """
    score_i = np.where(share_nT > 0, score_nT, 0.0).sum(axis=1)
    told = preference(score_i, np.zeros_like(score_i), 1.0)
    # The weights divide by all answers.
    factor_n = told[1] * len(score_i)
    return preference_metrics(*told), np.broadcast_to(factor_n[:, None], share_nT.shape)


def preference_metrics(loss: float, factor_i, margins) -> dict[str, float]:
    """Returns the metrics of pairs, of what `preference` returns."""
    return {
        "preference_loss": loss,
        "preference_margin": float(margins.mean()),
        "preference_accuracy": float((margins > 0).mean()),
    }
