"""THE trainer core: TrainState, score, update.

What is trained is a dict of TrainStates, and a *plan* says by which objectives: the
policy alone, a policy and a value network side by side, or one network with two heads.
SFT and RL, policy and value are the same `update`; every function is jitted by `train`.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dllm_jax.models import lora, mask, moe, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.rl import objectives
from dllm_jax.rl.config import ObjectiveConfig, OptimConfig


@flax.struct.dataclass
class TrainState:
    """Parameters in training; `opt_state` is AdamW's, and its count drives the rate."""

    step: jax.Array
    params: transformer.Params
    opt_state: optax.OptState


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one TrainState is trained for; hashable, so that it can be static."""

    terms: tuple[str, ...]  # keys of OBJECTIVES
    optim: OptimConfig
    updates: int  # of the whole run: where the schedule ends
    head_rate: float = 1.0  # of a value head on the policy's trunk, over the trunk's

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the network needs: see transformer.specs."""
        lm = ("lm",) if set(self.terms) - {"value"} else ()
        return lm + (("value",) if "value" in self.terms else ())


def schedule(cfg: OptimConfig, updates: int) -> optax.Schedule:
    """Returns the learning rate by update: linear warm-up, then the named decay."""
    rest = max((cfg.horizon or updates) - cfg.warmup, 1)
    decay = {
        "constant": optax.constant_schedule(cfg.lr),
        "linear": optax.linear_schedule(cfg.lr, cfg.lr * cfg.final, rest),
        "cosine": optax.cosine_decay_schedule(cfg.lr, rest, alpha=cfg.final),
    }[cfg.schedule]
    if not cfg.warmup:
        return decay
    warm = optax.linear_schedule(0.0, cfg.lr, cfg.warmup)
    return optax.join_schedules([warm, decay], [cfg.warmup])


def optimizer(plan: Plan) -> optax.GradientTransformation:
    """Returns AdamW behind a clip of the global norm.

    A value head starts at zero; at the rate of the policy beside it, it would stay there.
    """
    cfg = plan.optim

    def head(params):
        return {name: name == "value" for name in params}

    return optax.chain(
        optax.clip_by_global_norm(cfg.max_grad_norm),
        optax.adamw(
            schedule(cfg, plan.updates),
            b1=cfg.b1,
            b2=cfg.b2,
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
        ),
        optax.masked(optax.scale(plan.head_rate), head),
    )


def begin(params, plan: Plan) -> TrainState:
    """Returns a state before its first update."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer(plan).init(params),
    )


def shardings(state: TrainState, plan: Plan, mesh):
    """Returns the shardings of a state: moments lie where their parameters do.

    `state` may be abstract; its params carry their shardings.
    """
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda x: x.sharding, state.params)
    return TrainState(
        step=whole,
        params=placed,
        opt_state=optax.tree_map_params(
            optimizer(plan),
            lambda _, sharding: sharding,
            state.opt_state,
            placed,
            transform_non_params=lambda _: whole,
        ),
    )


def outputs(params, batch, model: ModelConfig, heads: tuple[str, ...]):
    """Runs one microbatch; returns what its heads say at the supervised slots, [B, U].

    The clean copies never touch a head. Experts add their `load`, a moe.Load.
    """
    seen = mask.packed(batch.begin_BT, batch.end_BT, batch.group_BT)
    x_BTD = transformer.embed(params, batch.tokens_BT, model)
    x_BTD, _, load = transformer.trunk(params, x_BTD, batch.pos_BT, seen, model)
    x_BUD = jnp.take_along_axis(x_BTD, batch.where_BU[..., None], axis=1)
    out = {} if load is None else {"load": load}
    if "lm" in heads:
        out["logp"], out["entropy"] = transformer.token_logprob(
            params, x_BUD, batch.target_BU, model
        )
    if "value" in heads:
        out["value"] = transformer.value(params, x_BUD)
    return out


def score(params: dict, batch, *, model: ModelConfig, plans: dict):
    """Returns every network's outputs on the whole batch: name -> {output: [A, B, U]}.

    The same function of the same arrays as in the loss, without gradient.
    """
    zeros_ABU = jnp.zeros(batch.where_BU.shape, jnp.float32)
    names = {
        name: outputs_of(plan.heads) for name, plan in plans.items() if name in params
    }
    init = {n: dict.fromkeys(kinds, zeros_ABU) for n, kinds in names.items()}

    def body(i, kept):
        micro = jax.tree.map(lambda x: x[i] if x.ndim else x, batch)
        for name, kinds in names.items():
            out = outputs(params[name], micro, model, plans[name].heads)
            kept[name] = {k: kept[name][k].at[i].set(out[k]) for k in kinds}
        return kept

    return jax.lax.fori_loop(0, batch.used, body, init)


def outputs_of(heads: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the keys of `outputs` for these heads."""
    lm = ("logp", "entropy") if "lm" in heads else ()
    return lm + (("value",) if "value" in heads else ())


def loss(params, batch, base=None, *, model, plan: Plan, cfg: ObjectiveConfig):
    """Returns (loss, sums) of one microbatch: the sum of the plan's objectives."""
    whole = lora.join(base, params, model.lora)
    out = outputs(whole, batch, model, plan.heads)
    total, sums = 0.0, {"load": out["load"]} if "load" in out else {}
    for term in plan.terms:
        shared = term == "value" and len(plan.terms) > 1
        part, more = objectives.OBJECTIVES[term](out, batch, cfg)
        total += part * (cfg.value_weight if shared else 1.0)
        sums |= more
    return total, sums


def update(states: dict, batch, base=None, *, model, plans, cfg: ObjectiveConfig):
    """Returns (states after one optimizer update of each, metrics).

    base: the weights that stay, where the states hold LoRA's adapters.
    Gradients are summed in f32 over the used microbatches, whose number is data and not
    shape, so a run compiles this once.
    """
    new, metrics = {}, {}
    count = jnp.maximum(jnp.sum(batch.weight_BU > 0), 1)
    for name, plan in plans.items():
        state = states[name]
        gradient = jax.value_and_grad(loss, has_aux=True)

        def one(i, plan=plan, params=state.params, gradient=gradient):
            micro = jax.tree.map(lambda x: x[i] if x.ndim else x, batch)
            (total, sums), grads = gradient(
                params, micro, base, model=model, plan=plan, cfg=cfg
            )
            return {"total": total, **sums}, grads

        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(one, 0)
        )
        sums, grads = jax.lax.fori_loop(
            0,
            batch.used,
            lambda i, kept, one=one: jax.tree.map(jnp.add, kept, one(i)),
            zeros,
        )
        norm = optax.tree.norm(grads)
        step, opt_state = optimizer(plan).update(grads, state.opt_state, state.params)
        new[name] = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, step),
            opt_state=opt_state,
        )
        prefix = "" if name == "policy" else f"{name}_"
        sums.pop("total")
        load = sums.pop("load", None)
        if load is not None:
            told = moe.balance(load, model.experts_per_token)
            metrics |= {f"{prefix}{key}": value for key, value in told.items()}
        for key, total in sums.items():
            metrics[key] = total if key in objectives.SUMMED else total / count
        metrics[f"{prefix}grad_norm"] = norm
        metrics[f"{prefix}learning_rate"] = schedule(plan.optim, plan.updates)(
            state.step
        )
    return new, metrics
