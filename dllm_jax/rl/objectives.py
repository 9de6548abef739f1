"""The losses, per token and weighed: a loss is the sum of weight x term, never a mean.

The weights carry every normaliser (`views.AGGREGATES`), so the gradient of an update does
not depend on how it is cut into microbatches. Every objective returns (loss, sums): the
sums add up over microbatches and become the step's metrics (`summary`).
"""

import dataclasses

import jax
import jax.numpy as jnp

from dllm_jax.rl.config import ObjectiveConfig

LIMIT = 10.0  # log-ratios are clamped to +-10 before exp


def kl(delta, kind: str):
    """Estimates KL(new || old) from delta = log new - log old at sampled tokens.

    k3 = exp(-d) - 1 + d is unbiased and never negative; k1 = d (Schulman 2020,
    "Approximating KL divergence"). The exponent is clamped.
    """
    if kind == "k1":
        return delta
    return jnp.exp(jnp.clip(-delta, -LIMIT, LIMIT)) - 1 + delta


def nll(out, batch, cfg: ObjectiveConfig):
    """Masked cross-entropy: -log p of the supervised tokens."""
    held = batch.weight_BU > 0
    loss = -jnp.sum(jnp.where(held, batch.weight_BU * out["logp"], 0.0))
    return loss, {
        "loss": loss,
        "entropy": jnp.sum(jnp.where(held, out["entropy"], 0.0)),
    }


def policy(out, batch, cfg: ObjectiveConfig):
    """Clipped surrogate with KL, TraceRL (arXiv 2509.06949) Eq. 3.

    -min(rho A, clip(rho, 1 - eps, 1 + eps') A) + beta KL(pi || pi_old), and with a fixed
    reference model + reference_beta KL(pi || pi_ref); rho = pi / pi_old. A wider eps' is
    DAPO's clip-higher (arXiv 2503.14476, section 3.1).
    """
    held = batch.weight_BU > 0
    delta = jnp.where(held, out["logp"] - batch.old_logp_BU, 0.0)
    ratio = jnp.exp(jnp.clip(delta, -LIMIT, LIMIT))
    clipped = jnp.clip(ratio, 1 - cfg.clip, 1 + (cfg.clip_high or cfg.clip))
    surrogate = jnp.minimum(ratio * batch.adv_BU, clipped * batch.adv_BU)
    to_old = kl(delta, cfg.kl)
    per_token = -surrogate + cfg.beta * to_old
    sums = {
        "policy_loss": -jnp.sum(batch.weight_BU * surrogate),
        "kl": jnp.sum(kl(delta, "k3")),
        "clip_fraction": jnp.sum(
            held & (ratio * batch.adv_BU > clipped * batch.adv_BU)
        ),
        "entropy": jnp.sum(jnp.where(held, out["entropy"], 0.0)),
    }
    if cfg.reference_beta:
        to_ref = kl(jnp.where(held, out["logp"] - batch.ref_logp_BU, 0.0), cfg.kl)
        per_token += cfg.reference_beta * to_ref
        sums["reference_kl"] = jnp.sum(to_ref)
    return jnp.sum(batch.weight_BU * per_token), sums


def linear(out, batch, cfg: ObjectiveConfig):
    """The policy gradient -A grad log pi: ratios to the detached present policy.

    DiPO (arXiv 2512.22234) Eq. 7, with the KL to a fixed reference as there. SPG's and
    DPO's gradients have this form too, with the factors of `bounds` in A's place.
    """
    own = batch.replace(old_logp_BU=jax.lax.stop_gradient(out["logp"]))
    loss, sums = policy(out, own, dataclasses.replace(cfg, beta=0.0))
    return loss, {k: x for k, x in sums.items() if k not in ("kl", "clip_fraction")}


def value(out, batch, cfg: ObjectiveConfig):
    """Clipped value loss: 1/2 max((V - R)^2, (V_old + clip(V - V_old, +-eps) - R)^2)."""
    near = batch.old_value_BU + jnp.clip(
        out["value"] - batch.old_value_BU, -cfg.clip, cfg.clip
    )
    free = (out["value"] - batch.ret_BU) ** 2
    worst = jnp.maximum(free, (near - batch.ret_BU) ** 2)
    loss = 0.5 * jnp.sum(batch.weight_BU * worst)
    return loss, {"value_loss": loss}


OBJECTIVES = {
    "nll": nll,
    "policy": policy,
    "dipo": linear,
    "spg": linear,
    "dpo": linear,
    "value": value,
}
SUMMED = ("loss", "policy_loss", "value_loss")  # already weighed; the others are counts
