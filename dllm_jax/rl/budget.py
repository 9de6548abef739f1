"""What a run takes of a device's memory, told before its first step.

A run's programs are compiled before they are called, from shapes alone: nothing of the
size is there yet. When they are called they are found compiled. So a run that cannot fit
is refused, with the settings to change, before its weights are loaded.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dllm_jax import exits, memory, sharding
from dllm_jax.models import acting, lora, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision import look
from dllm_jax.rl import networks
from dllm_jax.rl.config import BatchConfig
from dllm_jax.rl.learner import TrainState
from dllm_jax.sampling import placement

TRAINED = 12  # bytes of a number that is trained: itself and two moments, in f32
REMEDIES = {  # by phase
    "rollout": placement.REMEDY,
    "reward": "take a smaller reward.model or reward.judge.at, lower reward.judge.rows, "
    "reward.judge.prompt or reward.judge.tokens, or serve the judge over HTTP",
    "update": "set model.remat='full', lower batch.rows or batch.tokens, or raise "
    "mesh.fsdp or mesh.model",
}


class Budget(NamedTuple):
    """Bytes on one device, by what they hold."""

    always: dict[str, int]  # there from the first step to the last
    phases: dict[str, dict[str, int]]  # what each phase of a step adds to them


def plan(
    source,
    *,
    states: dict[str, TrainState],
    model: ModelConfig,
    mesh,
    sampling: placement.Placement | None,
    update,
    others: tuple = (),
    guest: memory.Claim = memory.NOTHING,
) -> Budget:
    """Returns the Budget of a run; compiles its two large programs.

    source: its source (rl/sources.py), for `blank`, `updates` and `reference`.
    states: by name, as shapes with shardings.
    sampling: where it samples; None where nothing does. others: the further answerers of
    its evaluations.
    update: learner.update, jitted as the run calls it.
    guest: what the graders take, Grader.claim.
    Raises ValueError, with the settings to change, where a program does not even compile.
    """
    base = checkpoint(model, mesh) if model.lora else None
    if model.soft:
        base = networks.beside(base, look.abstract(model, mesh))
    always, phases = resident(states, model, mesh, reference=source.reference), {}
    always |= guest.always
    if sampling is not None:
        lowered, between_calls = sampling.answerer.lower(sampling.weights)
        kept = [between_calls, *(x.lower(sampling.weights)[1] for x in others)]
        held = {  # of answerers, who sample one after the other, the most
            "rows and pages": max(map(memory.array_bytes, kept)),
            "weights": sampled(sampling, states, model, base),
        }
        phases["rollout"] = held | {"activations": program_bytes(lowered, "rollout")}
        if guest.working:  # asked before the weights that sampled are gone
            phases["reward"] = held | guest.working
    batch = source.blank()
    gradients = max(memory.array_bytes(state.params) for state in states.values())
    lowered = update.lower(states, batch, base, dict.fromkeys(states, 0.0))
    needs = program_bytes(lowered, "update")
    phases["update"] = {
        "batches": memory.array_bytes(batch) * source.updates,
        "gradients": gradients,
        "activations": needs - gradients,
    }
    return Budget(always, phases)


def sampled(sampling: placement.Placement, states, model: ModelConfig, base) -> int:
    """Returns the bytes of the weights that sample, but for those that are there anyway.

    base: frozen weights as shapes, where the states hold adapters.
    """
    stacked = lora.join(base, states["policy"].params, model.lora)
    shown = sampling.weights.get("soft", ())  # a table, made for sampling
    return memory.array_bytes((acting.fresh(stacked, sampling.weights), shown))


def check_least(trained: dict[str, int], judges: dict[str, int], limit, keys: str):
    """Raises ValueError, with the settings to change, where what stays exceeds `limit`.

    So it does before anything is compiled, and whatever the phases add. trained: what is
    trained, and samples; judges: what graders hold; keys: what makes the former less.
    """
    most = math.inf if limit is None else limit
    own, stays = sum(trained.values()), trained | judges
    need = sum(stays.values())
    if sharding.anywhere(need > most):  # all processes decide alike
        raise ValueError(
            f"what stays takes {need / memory.GIB:.2f} GiB of a device's "
            f"{most / memory.GIB:.2f}, before anything is computed; "
            f"{REMEDIES['reward'] if own <= most else keys}\n{line('always', stays)}"
        )


def unsplit(model: ModelConfig, mesh) -> list[str]:
    """Returns a warning where devices hold more of weights and moments than their share.

    That is where an axis of the mesh does not divide what it is to split. It names a mesh of
    as many devices that hold less, whose `model` divides the heads, if there is one.
    """
    now, count = tuple(mesh.shape.values()), mesh.size
    _, fsdp, parts = now
    held, share = bytes_of(model, now), bytes_of(model, (1, 1, 1)) / fsdp / parts
    if held < max(1.25 * share, share + memory.GIB):
        return []
    axis, over, sizes = "fsdp", fsdp, {"width": model.d_model}
    if model.d_model % fsdp == 0:
        axis, over = "model", parts
        sizes = {"heads": model.heads, "key heads": model.kv_heads, "ffw": model.ffw}
        sizes |= {"vocabulary": model.vocab, "experts": model.experts}
    told = ", ".join(f"{name} {n:,}" for name, n in sizes.items() if n % over)
    words = (
        f"warning: mesh.{axis}={over} does not divide the model's {told}: of its weights and "
        f"moments a device holds {held / memory.GIB:.1f} GiB"
    )
    divide = [n for n in range(1, count + 1) if count % n == 0]
    others = [
        (count // f // m, f, m)
        for f in divide
        for m in divide
        if count // f % m == 0 and not (model.heads % m or model.kv_heads % m)
    ]
    least, _, best = min((bytes_of(model, x), x[2], x) for x in others)
    if least < 0.9 * held:
        data, fsdp, parts = best
        words += (
            f", and {least / memory.GIB:.1f} with mesh.data={data}, mesh.fsdp={fsdp} and "
            f"mesh.model={parts}"
        )
    return [words]


def bytes_of(model: ModelConfig, sizes: tuple[int, int, int]) -> int:
    """Returns the bytes of weights and moments on a device; sizes: of a mesh's axes.

    Of weights alone, in the model's dtype, where adapters learn beside them.
    """
    each = jnp.dtype(model.dtype).itemsize if model.lora else TRAINED
    mesh, held = jax.sharding.AbstractMesh(sizes, sharding.AXES), 0
    specs = transformer.specs(dataclasses.replace(model, lora=None))
    for spec in jax.tree.leaves(specs):
        shape = transformer.shape(spec, model)
        parts = sharding.named(spec.dims, shape, sharding.PARAM, mesh)
        held += each * math.prod(parts.shard_shape(shape))
    return held


def first_that_fits(remats: tuple[str, ...], planned, limit: int | None):
    """Returns (remat, update, Budget) of the first that fits a device.

    remats: keys of transformer.REMAT, the fastest first; planned: of one of them, the
    jitted update and its Budget, or ValueError; limit: as in `check`. It fits if it does in
    every process: devices may differ by some bytes, and programs may not. Raises the last
    one's ValueError where none fits.
    """
    for remat in remats:
        refused = None
        try:
            update, needs = planned(remat)
            check(needs, limit)
        except ValueError as error:
            refused = error
        if not sharding.anywhere(refused is not None):
            return remat, update, needs
    raise refused or ValueError(
        f"update does not fit a device of another process; {REMEDIES['update']}"
    )


def remats(
    model: ModelConfig, batch: BatchConfig, mesh, room: float
) -> tuple[str, ...]:
    """Returns what model.remat='auto' tries, the fastest first.

    room: bytes of a device beside what is trained. Where it cannot hold what "dots" keeps
    of a slot at the least, a layer's input, attention's output and what that is made of, and
    two inner arrays, this is left out: its compilation would take a minute for nothing. "none"
    keeps more, for no product less. That pays on a CPU alone: the update of SDAR-1.7B on
    eight H200s would move 1.36 times as many bytes.
    """
    inner = model.ffw
    if model.experts:
        inner = (model.experts_per_token + model.shared_experts) * model.expert_ffw
    heads = (model.heads + model.kv_heads) * model.head_dim
    width = 2 * model.d_model + 2 * (inner + heads) / mesh.shape["model"]
    slots = batch.rows // sharding.row_shards(mesh) * batch.tokens
    least = "attention", "full"
    kept = model.layers * slots * width * jnp.dtype(model.dtype).itemsize
    if sharding.anywhere(kept > room):  # all processes try the same
        return least
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return (*(("none", "dots") if on_cpu else ("dots",)), *least)


def resident(
    states: dict[str, TrainState], model: ModelConfig, mesh, *, reference: bool
) -> dict[str, int]:
    """Returns the bytes of a device that a run's networks take, all the time.

    states: as `plan` takes them; reference: whether the policy of the start is scored.
    """
    frozen = checkpoint(model, mesh) if model.lora or reference else ()
    images = {}
    if model.soft:
        plain = dataclasses.replace(model, lora=None)
        parts = transformer.abstract(plain, mesh, model.dtype, ("vision",))
        tower = () if model.train_tower else parts["vision"]
        images["images"] = memory.array_bytes((look.abstract(model, mesh), tower))
    return {
        "parameters": memory.array_bytes([state.params for state in states.values()]),
        "optimizer": memory.array_bytes([state.opt_state for state in states.values()]),
        "frozen": memory.array_bytes(frozen),
        **images,
    }


def checkpoint(model: ModelConfig, mesh):
    """Returns the weights of a checkpoint as they are loaded to stay frozen: shapes."""
    plain = dataclasses.replace(model, lora=None)
    return transformer.abstract(plain, mesh, model.dtype)


def program_bytes(lowered, phase: str) -> int:
    """Compiles a program; returns the bytes that it needs beside its arguments.

    Raises ValueError, with the settings to change, where not even that fits a device.
    """
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not exits.exhausted(error):
            raise
        raise ValueError(
            f"{phase} does not fit a device; {REMEDIES[phase]}: {error}"
        ) from error
    return memory.program_bytes(compiled)


def table(budget: Budget) -> str:
    """Returns the lines to print, in GiB: always, and what each phase adds."""
    lines = ["memory of a device, GiB:", line("always", budget.always)]
    lines += [line(f"+{phase}", sizes) for phase, sizes in budget.phases.items()]
    return "\n".join(lines)


def line(title: str, sizes: dict[str, int]) -> str:
    """Returns one line of the table: the sum, and what it is of."""
    parts = ", ".join(f"{name} {n / memory.GIB:.3f}" for name, n in sizes.items() if n)
    return f"  {title:8} {sum(sizes.values()) / memory.GIB:8.3f}  {parts}"


def check(budget: Budget, limit: int | None):
    """Raises ValueError, with the settings to change, where phases exceed `limit`.

    limit: bytes of a device, or None where it does not say.
    """
    always, lines = sum(budget.always.values()), []
    for phase, sizes in budget.phases.items():
        need = always + sum(sizes.values())
        if limit is not None and need > limit:
            lines.append(
                f"{phase} needs {need / memory.GIB:.2f} GiB of a device's "
                f"{limit / memory.GIB:.2f}; {REMEDIES[phase]}"
            )
    if lines:
        raise ValueError("\n".join([*lines, table(budget)]))
