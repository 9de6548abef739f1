"""The losses, per token and weighed: a loss is the sum of weight x term, never a mean.

The weights carry every normaliser (`views.AGGREGATES`), so the gradient of an update
does not depend on how it is cut into microbatches. Every objective returns (loss,
sums): the sums add up over microbatches and become the step's metrics.

`cfg` is an ObjectiveConfig throughout; rl/config.py imports this module for the names
of the losses.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

LIMIT = 10.0  # log-ratios are clamped to +-10 before exp
LOG_WEIGHT = 1.6094379  # log 5: StableDRL's largest log-ratio


# ---- KL(new || old) from delta = log new - log old at sampled tokens, nats -----------


def k1(delta):
    """d: negative for some tokens; as a loss its gradient is 0 on average, on policy."""
    return delta


def k2(delta):
    """d^2 / 2: biased, but its gradient d grad log new is that of the KL, on policy."""
    return 0.5 * delta**2


def k3(delta):
    """exp(-d) - 1 + d: never negative; unbiased for tokens drawn from the new policy.

    Here they are the old one's: right to second order in d. The exponent is clamped, as in
    dLLM-RL, so that a token below -LIMIT is pulled back no more: the slope is 1 there.
    """
    return jnp.expm1(jnp.clip(-delta, -LIMIT, LIMIT)) + delta


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl(delta, kind: str):
    """Estimates KL(new || old) at sampled tokens, nats.

    Schulman 2020, "Approximating KL divergence". delta: log new - log old; kind: a key
    of KL_ESTIMATORS.
    """
    return KL_ESTIMATORS[kind](delta)


# ---- The objectives ------------------------------------------------------------------


def nll(out, batch, cfg):
    """Masked cross-entropy: -log p of the supervised tokens."""
    real_BU = batch.weight_BU > 0
    loss = -jnp.sum(jnp.where(real_BU, batch.weight_BU * out["logp"], 0.0))
    return loss, {
        "loss": loss,
        "entropy": jnp.sum(jnp.where(real_BU, out["entropy"], 0.0)),
    }


def policy(out, batch, cfg):
    """Clipped surrogate with KL, TraceRL (arXiv 2509.06949) Eq. 3.

    -min(rho A, clip(rho, 1 - eps, 1 + eps') A) + beta KL(pi || pi_old), and with a
    fixed reference model + reference_beta KL(pi || pi_ref), and - entropy_bonus H(pi) where
    one is set (PPO, arXiv 1707.06347, Eq. 9); rho = pi / pi_old. A wider
    eps' is DAPO's clip-higher (arXiv 2503.14476, section 3.1). The metric kl, to pi_old,
    is k3, whatever the loss uses.
    """
    real_BU = batch.weight_BU > 0
    delta_BU = jnp.where(real_BU, out["logp"] - batch.old_logp_BU, 0.0)
    ratio_BU = jnp.exp(jnp.clip(delta_BU, -LIMIT, LIMIT))
    clipped_BU = jnp.clip(ratio_BU, 1 - cfg.clip, 1 + (cfg.clip_high or cfg.clip))
    surrogate_BU = jnp.minimum(ratio_BU * batch.adv_BU, clipped_BU * batch.adv_BU)
    to_old_BU = kl(delta_BU, cfg.kl)
    loss_BU = -surrogate_BU + cfg.beta * to_old_BU
    sums = {
        "policy_loss": -jnp.sum(batch.weight_BU * surrogate_BU),
        "kl": jnp.sum(k3(delta_BU)),
        "clip_fraction": jnp.sum(
            real_BU & (ratio_BU * batch.adv_BU > clipped_BU * batch.adv_BU)
        ),
        "entropy": jnp.sum(jnp.where(real_BU, out["entropy"], 0.0)),
    }
    if cfg.reference_beta:
        ref_delta_BU = jnp.where(real_BU, out["logp"] - batch.ref_logp_BU, 0.0)
        to_reference_BU = kl(ref_delta_BU, cfg.kl)
        scheduled = batch.reference_beta is not None
        weight = batch.reference_beta if scheduled else cfg.reference_beta
        loss_BU += weight * to_reference_BU
        sums["reference_kl"] = jnp.sum(to_reference_BU)
    if cfg.entropy_bonus:
        loss_BU -= cfg.entropy_bonus * jnp.where(real_BU, out["entropy"], 0.0)
    if cfg.nll_weight:  # LightningRL (arXiv 2603.13319): right answers' likelihood
        right_BU = jnp.where(real_BU, batch.right_BU * out["logp"], 0.0)
        loss_BU -= cfg.nll_weight * right_BU
        sums["right_nll"] = -jnp.sum(batch.weight_BU * right_BU)
    return jnp.sum(batch.weight_BU * loss_BU), sums


def linear(out, batch, cfg):
    """The policy gradient -A grad log pi: ratios to the detached present policy.

    DiPO (arXiv 2512.22234) Eq. 7, with the KL to a fixed reference as there. SPG's and
    DPO's gradients have this form too, with the factors of `bounds` in A's place.
    """
    detached = batch.replace(old_logp_BU=jax.lax.stop_gradient(out["logp"]))
    loss, sums = policy(out, detached, dataclasses.replace(cfg, beta=0.0))
    # The ratio is 1: what would be told of it is always 0.
    return loss, {k: x for k, x in sums.items() if k not in ("kl", "clip_fraction")}


def value(out, batch, cfg):
    """Clipped value loss.

    1/2 max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2), with eps=0 the first.
    """
    eps = cfg.clip if cfg.value_clip < 0 else cfg.value_clip
    worst_BU = (out["value"] - batch.ret_BU) ** 2
    if eps:
        change_BU = jnp.clip(out["value"] - batch.old_value_BU, -eps, eps)
        near_BU = batch.old_value_BU + change_BU
        worst_BU = jnp.maximum(worst_BU, (near_BU - batch.ret_BU) ** 2)
    loss = 0.5 * jnp.sum(batch.weight_BU * worst_BU)
    return loss, {"value_loss": loss}


def ranking(out, batch, cfg):
    """The gradient of Bradley and Terry's loss by the scores of answers.

    Its factors are in adv_BU: see bounds.ranking_factors.
    """
    real_BU = batch.weight_BU > 0
    score_BU = jnp.where(real_BU, out["value"], 0.0)
    return -jnp.sum(batch.weight_BU * batch.adv_BU * score_BU), {}


# ---- Losses of whole answers -----------------------------------------------------------
#
# exp of a sum over an answer's tokens cannot be cut into microbatches, but its gradient can:
# the sums are scored first, at the weights of the update itself, and what follows from them
# is a factor of each answer. Letters: n answers of an update.


class Answers(NamedTuple):
    """An update's answers, [n]; what is not `real` holds none."""

    # The log-ratio to the policy that sampled, as the weights sum it.
    delta_n: jax.Array
    ref_delta_n: jax.Array  # to the reference
    adv_n: jax.Array
    real_n: jax.Array


def clipped_answers(answers: Answers, cfg):
    """Returns (factor of A, what is added to it, metrics) of ratios of whole answers.

    The loss is 1/n sum_i -min(rho_i A_i, clip(rho_i, 1 - eps, 1 + eps') A_i)
    + beta KL_i, with rho_i = exp(d_i) and, by objective.aggregate,

        sequence       d_i = 1/|o_i| sum_t (log new - log old): GSPO's (arXiv 2507.18071,
                       Eqs. 5 and 7), here of the trace's or its steps' own likelihood
        elbo_sequence  d_i = 1/|o_i| (L_new - L_old), L the evidence bound: ESPO (arXiv
                       2512.03759), and with a quadrature of levels GDPO (arXiv
                       2510.08554) as Block-R1 has it
        elbo_answer    d_i = L_new - L_old: EBPO (arXiv 2602.08676)

    The KL is of d_i, too. The gradient is that of the linear loss whose factor is
    -d loss / d d_i: 0 beyond +-LIMIT, where rho_i is clamped.
    """
    ratio_n = jnp.exp(jnp.clip(answers.delta_n, -LIMIT, LIMIT))
    adv_n, high = answers.adv_n, 1 + (cfg.clip_high or cfg.clip)
    clipped_n = jnp.clip(ratio_n, 1 - cfg.clip, high)
    is_clipped_n = ratio_n * adv_n > clipped_n * adv_n
    slope = jax.vmap(jax.grad(lambda delta: kl(delta, cfg.kl)))
    pull_n = cfg.beta * slope(answers.delta_n)
    count = jnp.maximum(jnp.sum(answers.real_n), 1)

    def mean(x_n):
        return jnp.sum(jnp.where(answers.real_n, x_n, 0.0)) / count

    told = {
        "policy_loss": -mean(jnp.minimum(ratio_n * adv_n, clipped_n * adv_n)),
        "answer_kl": mean(k3(answers.delta_n)),
        "answer_clip_fraction": mean(is_clipped_n),
    }
    if cfg.reference_beta:
        pull_n += cfg.reference_beta * slope(answers.ref_delta_n)
        told["answer_reference_kl"] = mean(kl(answers.ref_delta_n, cfg.kl))
    still_n = is_clipped_n | (jnp.abs(answers.delta_n) > LIMIT)
    return jnp.where(still_n, 0.0, ratio_n), -pull_n, told


def self_normalised(answers: Answers, cfg):
    """Returns (factor of A, 0, metrics): StableDRL's importance weights of SPG's bounds.

    n softmax_i(min(L_new - L_old, log 5)) over an update's answers, without a gradient.
    """
    log_weight_n = jnp.minimum(answers.delta_n, LOG_WEIGHT)
    weight_n = jax.nn.softmax(jnp.where(answers.real_n, log_weight_n, -jnp.inf))
    weight_n = weight_n * jnp.sum(answers.real_n)
    return weight_n, jnp.zeros_like(weight_n), {"answer_weight_max": weight_n.max()}


def of_answers(out, batch, cfg):
    """The linear loss of answers whose factors stand in A's place; see `Answers`.

    Its sum says nothing, and is not told: pairs have a loss of their own (bounds.preference).
    """
    loss, sums = linear(out, batch, dataclasses.replace(cfg, reference_beta=0.0))
    return loss, {key: x for key, x in sums.items() if key != "policy_loss"}


@dataclasses.dataclass(frozen=True)
class Objective:
    """A row of OBJECTIVES: called as its function is, with facts that others read."""

    # function(out, batch, cfg) -> (loss, sums). out: learner.outputs of a microbatch,
    # of which the objective reads "logp" and "entropy" or "value", each [B, U] in f32;
    # batch: the microbatch, with the optional fields that it needs. loss: a scalar, the
    # sum of weight_BU x term; sums: name -> scalar, over the supervised tokens. What
    # stands in the filling, where weight_BU is 0, changes neither them nor a gradient.
    function: Callable
    rl: bool = False  # objective.loss may name it
    bounds: bool = False  # adv_BU holds factors of evidence bounds: see bounds.py
    clips: bool = False  # ratios to the policy that sampled
    pulled: bool = True  # to a reference, by objective.reference_beta
    head: str = "lm"  # which of the network's heads it trains: "lm" or "value"
    # Of whole answers: (Answers, cfg) -> (factor of A [n], added to it [n], metrics).
    answers: Callable | None = None

    @property
    def by_answer(self) -> bool:
        """Whether all tokens of an answer have one advantage."""
        return self.bounds or self.answers is not None

    def __call__(self, out, batch, cfg):
        """Returns (loss, sums)."""
        return self.function(out, batch, cfg)


OBJECTIVES = {
    "nll": Objective(nll),
    "policy": Objective(policy, rl=True, clips=True),
    "dipo": Objective(linear, rl=True),
    "sequence": Objective(of_answers, rl=True, clips=True, answers=clipped_answers),
    "spg": Objective(linear, rl=True, bounds=True),
    "stable": Objective(
        of_answers, rl=True, bounds=True, pulled=False, answers=self_normalised
    ),
    "dpo": Objective(of_answers, bounds=True),
    "value": Objective(value, head="value"),
    "ranking": Objective(ranking, head="value"),
}
RL_LOSSES = tuple(name for name, row in OBJECTIVES.items() if row.rl)
# Sums that are weighed already; the others are divided by the number of supervised
# tokens.
SUMMED = ("loss", "policy_loss", "value_loss", "right_nll")
