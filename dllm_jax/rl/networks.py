"""The networks of a run: what each is trained for, its first state, and what is frozen."""

import functools

import jax
import jax.numpy as jnp

from dllm_jax.models import hf, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.rl import learner
from dllm_jax.rl.config import OptimConfig


def plans(term: str, value: str, policy: OptimConfig, own: OptimConfig, updates: int):
    """Returns the Plan of each network that is trained, by name.

    term: the policy's objective; value: rl.value; policy, own: the optimizers of the
    policy and of a value network of its own, or of a head only the rate.
    """
    terms, head = (term,), 1.0
    if value == "head":
        terms, head = (term, "value"), own.lr / policy.lr if policy.lr else 1.0
    out = {"policy": learner.Plan(terms, policy, updates, head)}
    if value == "own":
        out["value"] = learner.Plan(("value",), own, updates)
    return out


def abstract(model: ModelConfig, plan: learner.Plan, mesh) -> learner.TrainState:
    """Returns a network's state without its arrays: shapes, dtypes and shardings."""
    params = transformer.abstract(model, mesh, jnp.float32, plan.heads)
    fresh = jax.eval_shape(functools.partial(learner.begin, plan=plan), params)
    fresh = fresh.replace(params=params)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        fresh,
        learner.shardings(fresh, plan, mesh),
    )


def frozen(path: str, model: ModelConfig, mesh):
    """Returns (the weights beside which adapters are trained, the stored value head).

    Either is None where there is none.
    """
    if model.lora is None:
        return None, None
    _, base = hf.load(path, mesh=mesh, dtype=model.dtype)
    return base, base.pop("value", None)


def first(path: str, model: ModelConfig, plans, places, mesh, value, key) -> dict:
    """Returns the states before the first update, by the names of their plans.

    Weights are the checkpoint's; adapters are drawn, beside the value head of `frozen`.
    """
    states = {}
    for i, (name, plan) in enumerate(plans.items()):
        if model.lora is None:
            _, params = hf.load(path, mesh=mesh, dtype=jnp.float32, heads=plan.heads)
        else:
            fresh = jax.jit(
                functools.partial(transformer.init, cfg=model, heads=plan.heads),
                out_shardings=places[name].params,
            )
            params = fresh(jax.random.fold_in(key, i))
            if value is not None and "value" in params:
                params["value"] = value.astype(jnp.float32)
        begin = functools.partial(learner.begin, plan=plan)
        start = jax.jit(begin, out_shardings=places[name], donate_argnums=0)
        states[name] = start(params)
    return states


def count(params) -> int:
    """Returns the number of parameters."""
    return sum(x.size for x in jax.tree.leaves(params))
