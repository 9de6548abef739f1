"""THE trainer core: TrainState, score, update.

What is trained is a dict of TrainStates, and a *plan* says by which objectives: the
policy alone, a policy and a value network side by side, or one network with two heads.
SFT and RL, policy and value are the same `update`; every function is jitted by `train`.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import optax

from dllm_jax.models import lora, mask, moe, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision import soft
from dllm_jax.pallas_kernels import Rule, choice
from dllm_jax.rl import objectives, selection
from dllm_jax.rl.config import ObjectiveConfig, OptimConfig
from dllm_jax.rl.optim import optimizer, schedule
from dllm_jax.rl.views import TrainBatch

UNROLLED = 8  # layers at most that are compiled one by one for CPU


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
    # Learning rate of a value head divided by that of the policy's trunk, which it shares.
    head_rate: float = 1.0
    # How tokens were drawn, where the log-probs are those of the sampler's steps; None: they
    # are the tokens' own.
    rule: Rule | None = None
    record: bool = False  # it sees what the sampler recorded of the tokens shown

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that the network needs: see transformer.specs."""
        needed = {objectives.OBJECTIVES[term].head for term in self.terms}
        needed |= {"record"} if self.record else set()
        return tuple(head for head in ("lm", "value", "record") if head in needed)

    def optimizer(self) -> optax.GradientTransformation:
        """Returns the network's optimizer."""
        return optimizer(self.optim, self.updates, self.head_rate)

    def learning_rate(self, step):
        """Returns the rate of the update that comes after `step` others."""
        return schedule(self.optim, self.updates)(step)


def begin(params, plan: Plan) -> TrainState:
    """Returns a state before its first update."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=plan.optimizer().init(params),
    )


def shardings(state: TrainState, plan: Plan, mesh):
    """Returns the shardings of a state: moments lie where their parameters do.

    `state` may be abstract; its params carry their shardings.
    """
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    params = jax.tree.map(lambda x: x.sharding, state.params)
    return TrainState(
        step=replicated,
        params=params,
        opt_state=optax.tree_map_params(
            plan.optimizer(),
            lambda _, sharding: sharding,
            state.opt_state,
            params,
            transform_non_params=lambda _: replicated,
        ),
    )


def outputs(
    params,
    batch: TrainBatch,
    model: ModelConfig,
    heads: tuple[str, ...],
    rule: Rule | None = None,
):
    """Runs one microbatch; returns what its heads say at the supervised slots, [B, U].

    `logp` and `entropy` are of the head "lm", in nats; `value` is of the head "value". The
    clean copies never touch a head. Experts add their `load`, a moe.Load. With a `rule`
    they are of steps, and selection.outputs says what else is told.
    """
    seen = mask.packed(batch.begin_BT, batch.end_BT, batch.group_BT)
    params = soft.attach(params, model)
    x_BTD = transformer.embed(params, batch.tokens_BT, model)
    if "record" in heads:
        x_BTD = transformer.with_record(params, x_BTD, batch.record_BT)
    params = by_layer(params, model)
    x_BTD, _, load = transformer.trunk(params, x_BTD, batch.pos_BT, seen, model)
    x_BUD = jnp.take_along_axis(x_BTD, batch.where_BU[..., None], axis=1)
    out = {} if load is None else {"load": load}
    if "value" in heads:
        out["value"] = transformer.value(params, x_BUD)
    if batch.guidance is not None:  # the gradient reaches both canvases
        blank_BUD = jnp.take_along_axis(x_BTD, batch.beside_BU[..., None], axis=1)
        x_BUD = transformer.guided(x_BUD, blank_BUD, batch.guidance)
    if "lm" in heads and rule is not None:
        asked_BU = jnp.where(batch.unit_BU >= 0, batch.target_BU, -1)
        done = transformer.selection(
            params, x_BUD, asked_BU, batch.limit_BU, model, rule
        )
        out |= selection.outputs(*done, batch.unit_BU, batch.limit_BU)
    elif "lm" in heads:
        asked_BU = jnp.where(batch.weight_BU > 0, batch.target_BU, -1)  # not of filling
        out["logp"], out["entropy"] = transformer.token_logprob(
            params, x_BUD, asked_BU, model
        )
    return out


def by_layer(params, model: ModelConfig):
    """Returns parameters whose layers are compiled one by one, where that pays.

    A loop over layers copies what its backward pass reads of each: on CPU a gradient of 3
    layers of 128 took 1.1 times as long. Deep models would compile much longer. Outside of
    the loop over microbatches it is called first: inside each would cut its own slices.
    """
    pays = choice.platform() == "cpu" and model.layers <= UNROLLED
    if not pays or isinstance(params["layers"], tuple):
        return params
    return transformer.separate(params)


def score(params: dict, batch: TrainBatch, *, model: ModelConfig, plans: dict):
    """Returns every network's outputs on the whole batch: name -> {output: [m, B, U]}.

    params: those of the networks that are asked, by name; plans: of these and others. The
    same function of the same arrays as in the loss, without gradient.
    """
    params = {  # once
        name: by_layer(soft.attach(x, model), model) for name, x in params.items()
    }
    zeros_mBU = jnp.zeros(batch.where_BU.shape, jnp.float32)
    asked = {name: plan for name, plan in plans.items() if name in params}
    blank = {
        name: dict.fromkeys(outputs_of(plan.heads, plan.rule), zeros_mBU)
        for name, plan in asked.items()
    }

    def fill(i, scores):
        micro = microbatch(batch, i)
        for name, plan in asked.items():
            out = outputs(params[name], micro, model, plan.heads, plan.rule)
            scores[name] = {
                key: scores[name][key].at[i].set(out[key]) for key in scores[name]
            }
        return scores

    return jax.lax.fori_loop(0, batch.used, fill, blank)


def outputs_of(heads: tuple[str, ...], rule: Rule | None) -> tuple[str, ...]:
    """Returns the keys of `outputs` for these heads, but for the experts' load."""
    lm = ("logp", "entropy") if "lm" in heads else ()
    if lm and rule is not None:
        lm += ("token_logp", "token_entropy", "ahead")
    return lm + (("value",) if "value" in heads else ())


def microbatch(batch: TrainBatch, i) -> TrainBatch:
    """Returns microbatch i of a batch as packed: arrays without their first dimension."""
    return jax.tree.map(lambda x: x[i] if x.ndim else x, batch)


def loss(
    params,
    batch: TrainBatch,
    base=None,
    shown=None,
    *,
    model: ModelConfig,
    plan: Plan,
    cfg: ObjectiveConfig,
):
    """Returns (loss, sums) of one microbatch: the sum of the plan's objectives.

    params: what is trained; base: see `update`; shown: of `table`, where that was made
    before. sums: see `objectives`, and with experts their `load`.
    """
    joined = lora.join(base, params, model.lora) | (shown or {})
    out = outputs(joined, batch, model, plan.heads, plan.rule)
    total, sums = 0.0, {"load": out["load"]} if "load" in out else {}
    units = batch
    if "ahead" in out:
        units = selection.by_unit(batch)
        sums["borders_crossed"] = selection.crossed(out, batch)
    for term in plan.terms:
        of_term = batch if term == "value" else units  # values are of tokens
        term_loss, term_sums = objectives.OBJECTIVES[term](out, of_term, cfg)
        shares_trunk = term == "value" and len(plan.terms) > 1
        total += term_loss * (cfg.value_weight if shares_trunk else 1.0)
        sums |= term_sums
    return total, sums


def judged(
    row,
    params,
    batch: TrainBatch,
    *,
    model: ModelConfig,
    plan: Plan,
    cfg: ObjectiveConfig,
) -> tuple[TrainBatch, dict]:
    """Returns (the batch with answers' factors in the place of advantages, metrics).

    row: an Objective of whole answers, which are scored by these weights first. A log-ratio
    is the sum over the answer's tokens by their weights, times the number of answers: with
    1 / (n |o|) the mean. What it is hangs on no other answer.
    """
    out = score({"policy": params}, batch, model=model, plans={"policy": plan})
    units = batch
    if batch.unit_BU is not None:
        units = selection.by_unit(batch)
    weight, answer = units.weight_BU, batch.answer_BU.astype(jnp.int32)
    real = weight > 0

    def total(x):
        placed = jnp.zeros(weight.size, jnp.float32)
        return placed.at[answer].add(jnp.where(real, x, 0.0))

    real_n, logp = total(1.0) > 0, out["policy"]["logp"]
    answers = objectives.Answers(
        delta_n=batch.answers * total(weight * (logp - batch.old_logp_BU)),
        ref_delta_n=batch.answers * total(weight * (logp - batch.ref_logp_BU)),
        adv_n=total(weight * units.adv_BU) / jnp.where(real_n, total(weight), 1),
        real_n=real_n,
    )
    factor_n, added_n, told = row.answers(answers, cfg)
    adv = factor_n[answer] * batch.adv_BU + added_n[answer]
    return batch.replace(adv_BU=adv), told


def table(params, base, model: ModelConfig) -> dict:
    """Returns the table of a step's images under its name; {} where there are none.

    params, base: see `loss`.
    """
    joined = lora.join(base, params, model.lora)
    return {"soft": soft.attach(joined, model)["soft"]} if "seen" in joined else {}


def gradients(
    params,
    batch: TrainBatch,
    base,
    *,
    model: ModelConfig,
    plan: Plan,
    cfg: ObjectiveConfig,
):
    """Returns (gradients, sums), both summed in f32 over the used microbatches.

    Their number is data and not shape, so that a run compiles the loop once. Losses of whole
    answers look at all of them beforehand: a forward more (`judged`). The images' table is
    made before the loop, and its gradient goes on to projector and tower behind it, once.
    """
    gradient = jax.value_and_grad(loss, argnums=(0, 3), has_aux=True)
    # Once, and not in every microbatch, whose backward pass would gather f32 from `fsdp`.
    rounded, told = transformer.rounded(params, model), {}
    shown, behind = jax.vjp(lambda x: table(x, base, model), rounded)
    base = {name: x for name, x in (base or {}).items() if name != "seen"} or None
    for row in (objectives.OBJECTIVES[term] for term in plan.terms):
        if row.answers:
            joined = lora.join(base, rounded, model.lora) | shown
            batch, told = judged(row, joined, batch, model=model, plan=plan, cfg=cfg)

    if not model.lora:  # whose adapters meet their weights in the loss
        rounded = by_layer(rounded, model)

    def of_microbatch(i):
        (total, sums), grads = gradient(
            rounded, microbatch(batch, i), base, shown, model=model, plan=plan, cfg=cfg
        )
        return {"total": total, **sums}, grads

    def add(i, so_far):
        return jax.tree.map(jnp.add, so_far, of_microbatch(i))

    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(of_microbatch, 0)
    )
    sums, (grads, of_table) = jax.lax.fori_loop(0, batch.used, add, zeros)
    grads = transformer.restacked(grads)
    if shown:
        of_table = jax.tree.map(lambda x, of: x.astype(of.dtype), of_table, shown)
        (more,) = behind(of_table)
        grads = jax.tree.map(lambda x, y: x + y.astype(jnp.float32), grads, more)
    return grads, sums | told


def update(
    states: dict[str, TrainState],
    batch: TrainBatch,
    base=None,
    limits: dict[str, float] | None = None,
    *,
    model: ModelConfig,
    plans: dict[str, Plan],
    cfg: ObjectiveConfig,
):
    """Returns (states after one optimizer update of each, metrics).

    A network whose loss or gradient is not finite, or whose gradient's norm is above its
    limit, stays as it is, its moments and the count that drives its rate with it: as if
    the update had not been. base: the weights that stay, where the states hold LoRA's
    adapters. limits: norms by network; 0, or None for all of them: there is none.
    """
    new_states, metrics = {}, {}
    supervised = jnp.maximum(supervised_units(batch), 1)
    for name, plan in plans.items():
        state = states[name]
        grads, sums = gradients(
            state.params, batch, base, model=model, plan=plan, cfg=cfg
        )
        grad_norm = optax.tree.norm(grads)
        change, opt_state = plan.optimizer().update(
            grads, state.opt_state, state.params
        )
        updated = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, change),
            opt_state=opt_state,
        )
        applies = jnp.isfinite(sums["total"] + grad_norm)
        if limits is not None:
            applies &= (limits[name] == 0) | (grad_norm <= limits[name])
        new_states[name] = jax.tree.map(
            functools.partial(jnp.where, applies), updated, state
        )
        metrics |= named(name, sums, supervised, model)
        own = {
            "grad_norm": grad_norm,
            "learning_rate": plan.learning_rate(state.step),
            "updates_skipped": 1.0 - applies,
        }
        metrics |= prefixed(name, own)
    return new_states, metrics


def supervised_units(batch: TrainBatch):
    """Returns how many tokens of a batch are supervised, or how many steps."""
    if batch.unit_BU is None:
        return jnp.sum(batch.weight_BU > 0)
    seat_U = jnp.arange(batch.unit_BU.shape[-1], dtype=batch.unit_BU.dtype)
    return jnp.sum(batch.unit_BU == seat_U[None, None])


def named(network: str, sums: dict, supervised, model: ModelConfig) -> dict:
    """Returns a network's metrics of an update, from the sums of `gradients`.

    supervised: how many tokens, or steps, were. Objectives name their metrics themselves, as none
    serves two networks; those of experts bear the network's name.
    """
    metrics = {}
    if "load" in sums:
        balance = moe.balance(sums["load"], model.experts_per_token)
        metrics |= prefixed(network, balance)
    for key, total in sums.items():
        if key not in ("total", "load"):
            whole = key in objectives.SUMMED or key.startswith("answer_")
            metrics[key] = total if whole else total / supervised
    return metrics


def prefixed(network: str, metrics: dict) -> dict:
    """Returns the metrics that every network has by name: the policy's bear no prefix."""
    if network == "policy":
        return metrics
    return {f"{network}_{key}": value for key, value in metrics.items()}
