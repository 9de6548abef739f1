"""The optimizer of every network: AdamW behind a clip, and one schedule over the run.

`cfg` is an OptimConfig throughout; rl/config.py imports this module for the names of the
schedules that a configuration may choose.
"""

import functools

import jax
import optax

# Parameters of transformer.stack, of a vision tower and of its projector.
BIASES = ("bq", "bk", "bv", "bo", "b_up", "b_down", "b_patch", "b_in", "b_out")


def constant(cfg, updates: int) -> optax.Schedule:
    """The rate stays."""
    return optax.constant_schedule(cfg.lr)


def linear(cfg, updates: int) -> optax.Schedule:
    """The rate falls on a line to its final fraction, and stays there."""
    return optax.linear_schedule(cfg.lr, cfg.lr * cfg.final, updates)


def cosine(cfg, updates: int) -> optax.Schedule:
    """The rate falls on half a cosine to its final fraction, and stays there."""
    return optax.cosine_decay_schedule(cfg.lr, updates, alpha=cfg.final)


# What follows the warm-up: (an OptimConfig, updates left for it) -> rate by update.
SCHEDULES = {"constant": constant, "linear": linear, "cosine": cosine}


def schedule(cfg, updates: int) -> optax.Schedule:
    """Returns the learning rate by update: linear warm-up, then the named decay.

    updates: of the whole run, warm-up included; a `horizon` takes their place.
    """
    after_warmup = max((cfg.horizon or updates) - cfg.warmup, 1)
    decay = SCHEDULES[cfg.schedule](cfg, after_warmup)
    if not cfg.warmup:
        return decay
    warmup = optax.linear_schedule(0.0, cfg.lr, cfg.warmup)
    return optax.join_schedules([warmup, decay], [cfg.warmup])


def decayed(params, *, norms: bool):
    """Returns which parameters weight decay shrinks: no bias, and norms only if asked.

    A norm's weight is a scale around one, and a bias an offset: neither is too large for
    being far from zero.
    """

    def shrinks(path, _) -> bool:
        name = path[-1].key
        if name in BIASES or name.endswith("_bias"):
            return False
        return norms or "norm" not in name

    return jax.tree_util.tree_map_with_path(shrinks, params)


def optimizer(
    cfg, updates: int, head_rate: float = 1.0
) -> optax.GradientTransformation:
    """Returns AdamW behind a clip of the gradient's global norm.

    head_rate: a value head's learning rate divided by that of the other parameters. The
    head starts at zero; at the rate of a policy beside it, it would stay there.
    """

    def is_value_head(params):
        return {name: name == "value" for name in params}

    return optax.chain(
        optax.clip_by_global_norm(cfg.max_grad_norm),
        optax.adamw(
            schedule(cfg, updates),
            b1=cfg.b1,
            b2=cfg.b2,
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            # Without decay there is nothing to exempt, and the state needs no mask.
            mask=functools.partial(decayed, norms=cfg.decay_norms)
            if cfg.weight_decay
            else None,
        ),
        optax.masked(optax.scale(head_rate), is_value_head),
    )
