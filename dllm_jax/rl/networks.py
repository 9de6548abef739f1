"""The networks of a run: what each is trained for, its first state, and what is frozen.

Trained are the whole weights in f32, or with LoRA adapters alone (and a value head), which
act on frozen weights beside them, the *base*. The *reference* is the policy of the start.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from dllm_jax import exits, sharding
from dllm_jax.models import acting, hf, lora, mask, repository, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision.look import Eyes
from dllm_jax.models.vision.soft import Seen
from dllm_jax.rl import learner
from dllm_jax.rl.config import BatchConfig, OptimConfig
from dllm_jax.sampling import looking


def plans(
    term: str,
    value: str,
    policy_optim: OptimConfig,
    value_optim: OptimConfig,
    updates: int,
) -> dict[str, learner.Plan]:
    """Returns the Plan of each network that is trained, by name.

    term: the policy's objective. value: rl.value; where it is "head" only the rate of
    value_optim is used, as the head shares the policy's AdamW. updates: of the whole run.
    """
    terms, head_rate = (term,), 1.0
    if value == "head":
        terms = (term, "value")
        head_rate = value_optim.lr / policy_optim.lr if policy_optim.lr else 1.0
    trained = {"policy": learner.Plan(terms, policy_optim, updates, head_rate)}
    if value == "own":
        trained["value"] = learner.Plan(("value",), value_optim, updates)
    return trained


def scored(plans: dict[str, learner.Plan], reference: bool) -> dict[str, learner.Plan]:
    """Returns the Plans of what `learner.score` runs: with a reference, it beside all."""
    if not reference:
        return plans
    policy_alone = dataclasses.replace(plans["policy"], terms=("policy",))
    return plans | {"reference": policy_alone}


def parts(model: ModelConfig, heads: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the heads of a network, and its vision tower where that is trained."""
    return (*heads, "vision") if model.train_tower else heads


def beside(base, seen: Seen | None):
    """Returns the base with a step's images, which networks see beside what is trained."""
    return base if seen is None else (base or {}) | {"seen": seen}


def eyes(path: str, model: ModelConfig, mesh) -> Eyes | None:
    """Returns what looks at images, with the checkpoint's tower unless that is trained."""
    if not model.soft:
        return None
    tower = None
    if not model.train_tower:
        _, params = hf.load(path, mesh=mesh, dtype=model.dtype, only=("vision",))
        tower = params["vision"]
    return Eyes(tower, model, mesh)


def abstract(model: ModelConfig, plan: learner.Plan, mesh) -> learner.TrainState:
    """Returns a network's state without its arrays: shapes, dtypes and shardings."""
    heads = parts(model, plan.heads)
    params = transformer.abstract(model, mesh, jnp.float32, heads)
    state = jax.eval_shape(functools.partial(learner.begin, plan=plan), params)
    state = state.replace(params=params)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        state,
        learner.shardings(state, plan, mesh),
    )


def frozen(path: str, model: ModelConfig, mesh):
    """Returns (the base beside which adapters are trained, the stored value head).

    Either is None where there is none.
    """
    if model.lora is None:
        return None, None
    _, base = hf.load(path, mesh=mesh, dtype=model.dtype)
    base.pop("vision", None)  # whoever looks at images has it
    return base, base.pop("value", None)


def reference(path: str, model: ModelConfig, mesh, base):
    """Returns the weights of the policy at the start of the run: the base if there is one.

    Otherwise they are loaded once more, in the dtype of computation.
    """
    if base is not None:
        return base
    heads = parts(model, ("lm",))
    _, params = hf.load(path, mesh=mesh, dtype=model.dtype, heads=heads)
    return params


def abstract_reference(model: ModelConfig, mesh):
    """Returns what `reference` returns without a base, as shapes with shardings."""
    return transformer.abstract(model, mesh, model.dtype, parts(model, ("lm",)))


def as_reference(policy, like):
    """Returns a copy of the policy as the reference from now on.

    policy: its trained parameters, which may be donated then. like: abstract_reference.
    """
    places, tree = jax.tree.flatten(like)
    copy = copier(tree, tuple((x.dtype, x.sharding) for x in places))
    return copy({name: policy[name] for name in like})


@functools.cache
def copier(tree, places):
    """Returns a program that copies a tree; places: each leaf's (dtype, sharding)."""

    def copied(params):
        leaves = tree.flatten_up_to(params)
        copies = [
            jnp.copy(x).astype(to) for x, (to, _) in zip(leaves, places, strict=True)
        ]
        return tree.unflatten(copies)

    return jax.jit(copied, out_shardings=tree.unflatten([at for _, at in places]))


def check_value(path: str, model: ModelConfig, record: bool) -> None:
    """Raises ValueError where a checkpoint's layers are no value network beside a policy.

    record: whether the network is to see what the sampler recorded (rl.value_record).
    """
    try:
        folder = repository.find(path)
        stored = hf.read_config(folder)
        sees = hf.holds(hf.Tensors(folder), stored, "record")
    except ValueError as error:
        raise ValueError(f"rl.value_path: {error}") from None
    has, wants = (
        {
            ".".join(key.key for key in keys): transformer.shape(spec, one)
            for keys, spec, _ in hf.leaves(one, ("value",))
        }
        for one in (stored, dataclasses.replace(model, lora=None))
    )
    for name in sorted(has.keys() | wants.keys()):
        if has.get(name) != wants.get(name):
            raise ValueError(
                f"rl.value_path={path!r}: its {name} is {has.get(name, 'missing')}, the "
                f"policy's {wants.get(name, 'missing')}; a critic is of the policy's shape"
            )
    if sees and not record:
        raise ValueError(
            f"rl.value_path={path!r}: this critic was trained to see what the sampler "
            "recorded, which would be left out; set rl.value_record=True"
        )


def initial(
    path: str,
    model: ModelConfig,
    plans,
    places,
    mesh,
    value,
    key,
    value_path: str = "",
) -> dict:
    """Returns the states before the first update, by the names of their plans.

    Weights are the checkpoint's; adapters are drawn from `key`, beside the value head of
    `frozen`, if it stored one. places: the states' shardings, by the same names.
    value_path: the checkpoint of the value network, if it has one of its own.
    """
    states = {}
    for i, (name, plan) in enumerate(plans.items()):
        if model.lora is None:
            own = value_path if name == "value" and value_path else path
            heads = parts(model, plan.heads)
            _, params = hf.load(own, mesh=mesh, dtype=jnp.float32, heads=heads)
        else:
            draw = jax.jit(
                functools.partial(transformer.init, cfg=model, heads=plan.heads),
                out_shardings=places[name].params,
            )
            params = draw(jax.random.fold_in(key, i))
            if value is not None and "value" in params:
                params["value"] = value.astype(jnp.float32)
        begin = jax.jit(
            functools.partial(learner.begin, plan=plan),
            out_shardings=places[name],
            donate_argnums=0,
        )
        states[name] = begin(params)
    return states


@dataclasses.dataclass(frozen=True)
class Weights:
    """What the networks of a run are at one moment."""

    states: dict[str, learner.TrainState]
    base: transformer.Params | None  # frozen, where the states hold adapters
    reference: transformer.Params | None
    model: ModelConfig
    like: transformer.Params  # what samples, as shapes: see models/acting.py
    seen: Seen | None = None  # the images of what is scored

    def seeing(self, seen: Seen) -> "Weights":
        """Returns the same weights, with other images."""
        return dataclasses.replace(self, seen=seen)

    def acting(self) -> transformer.Params:
        """Returns the weights that sample, a copy for the most part: drop them soon."""
        policy = self.states["policy"].params
        joined = lora.join(self.base, policy, self.model.lora)
        params = acting.laid_out(joined, self.like)
        if self.model.soft:
            params |= {looking.LOOK: looking.parts(joined)}
        return params

    def scoring(self) -> dict[str, transformer.Params]:
        """Returns the weights of every network of `scored`, by name, and its images."""
        base = beside(self.base, self.seen)
        weights = {
            name: lora.join(base, state.params, self.model.lora)
            for name, state in self.states.items()
        }
        if self.reference is not None:
            weights["reference"] = beside(self.reference, self.seen)
        return weights


def check_forward(params, model: ModelConfig):
    """Raises exits.NotFinite where a forward of a few masked tokens is not finite.

    For runs that sample nothing: the others see it in their answers.
    """
    tokens_BT = jnp.full((1, max(model.block, 2)), model.mask_id)
    finite = jax.jit(functools.partial(forward_is_finite, model=model))
    if not sharding.fetch(finite(params, tokens_BT)):
        raise exits.NotFinite


def forward_is_finite(params, tokens_BT, *, model: ModelConfig):
    """Returns whether hidden states and entropies of a clean canvas are all finite."""
    pos_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    len_B = jnp.full(len(tokens_BT), tokens_BT.shape[1])
    seen = mask.clean(model.attention, pos_BT, len_B, model.block)
    x_BTD = transformer.embed(params, tokens_BT, model)
    x_BTD, _, _ = transformer.trunk(params, x_BTD, pos_BT, seen, model)
    finite = jnp.isfinite(x_BTD).all()
    if "head" not in params and not model.tied:  # of a network that has values alone
        return finite
    _, entropy_BT = transformer.token_logprob(params, x_BTD, pos_BT, model)
    return finite & jnp.isfinite(entropy_BT).all()


def export(folder, policy, path: str, model: ModelConfig, mesh):
    """Writes a policy as a Hugging Face folder like the checkpoint at `path`.

    policy: its trained parameters. Adapters are added to the checkpoint's weights, which
    are loaded as precise as they are stored.
    """
    base = None
    if model.lora is not None:
        _, base = hf.load(path, mesh=mesh)
    merged = lora.merge(lora.join(base, policy, model.lora))
    model = dataclasses.replace(model, lora=None)
    hf.save(folder, model, merged, like=path, trained=True)


def sizes(policy, base) -> str:
    """Returns how many parameters are trained, and how many stay frozen beside them."""
    frozen_ones = f" beside {count(base):,} frozen ones" if base else ""
    return f"{count(policy):,} parameters{frozen_ones}"


def value_share(model: ModelConfig, seats: int, cfg: BatchConfig) -> float:
    """Returns the share of an update's FLOPs that a value network of its own takes.

    By the weights that a slot is multiplied with: the layers' in both networks, of experts
    those that are chosen, and the language head's in the policy alone, at a row's `seats`.
    Attention's scores, the same in both, are left out.
    """
    tree, sizes = transformer.specs(dataclasses.replace(model, lora=None)), model.sizes
    layers = 0.0
    for spec in jax.tree.leaves([tree.get("first", {}), tree["layers"]]):
        chosen = model.experts_per_token / sizes["E"] if spec.dims[1] == "E" else 1.0
        layers += chosen * math.prod(transformer.shape(spec, model))
    head = sizes["D"] * sizes["V"] * seats / cfg.tokens
    return layers / (2 * layers + head)


def count(params) -> int:
    """Returns the number of parameters."""
    return sum(x.size for x in jax.tree.leaves(params))
