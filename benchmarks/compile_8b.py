"""Compiles the rollout step and the TraceRL update of SDAR-8B, without the hardware.

    python -m benchmarks.compile_8b                     # in the environment of `make aot`
    python -m benchmarks.compile_8b --model=sdar-4b v5p:2x2x2 h200:8

Prints the seconds of compilation and the bytes per device that the compiler plans, beside
what a device has. Policy and value network train together in f32 with AdamW, bf16
computation, whole-layer remat. Says nothing about speed.
"""

import argparse
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp

from benchmarks import topologies
from benchmarks.shapes import RELEASED
from dllm_jax import pallas_kernels, sharding
from dllm_jax.models import acting, transformer
from dllm_jax.rl import learner, views
from dllm_jax.rl.config import ObjectiveConfig, OptimConfig
from dllm_jax.sampling import engine
from dllm_jax.sampling.config import SamplerConfig

# topology -> (devices on "model", rows of the rollout, rows of a microbatch)
TARGETS = {"v5p:4x4x4": (4, 256, 16), "h200:8": (2, 128, 4)}
TOKENS = 8192  # slots of a packed row
SAMPLER = SamplerConfig(max_prompt=784, max_new=2000, stop_ids=(151645, 151643))


def letters(name: str) -> str:
    """Returns the dimension letters that a field's name ends in."""
    suffix = name.rpartition("_")[2]
    return suffix if suffix.isupper() else ""


def lay_out(tree, mesh, prefix: str = ""):
    """Gives each array of a flax dataclass the sharding that its name spells."""

    def one(name, leaf):
        dims = (prefix if leaf.ndim and name != "key_B" else "") + letters(name)
        placed = sharding.named(dims, leaf.shape, sharding.ACT, mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)

    fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
    return tree.replace(
        **{
            name: lay_out(x, mesh) if dataclasses.is_dataclass(x) else one(name, x)
            for name, x in fields.items()
            if x is not None
        }
    )


def rollout_step(model, mesh, rows: int, fold: int = 1):
    """Returns the engine's compiled loop over `rows` rows with pages for all of them.

    fold: by how many neighbours along fsdp share the weights; 1: each has them all.
    """
    mesh = acting.folded(mesh, fold)
    params = acting.abstract(model, mesh)
    cfg = dataclasses.replace(SAMPLER, rows=rows)
    made = engine.Engine(model=model, cfg=cfg, mesh=mesh)
    begin = functools.partial(engine.empty, model=model, cfg=cfg, pages=made.page_count)
    in_flight = jax.eval_shape(begin, made.scheduler.no_changes(), jax.random.key(0))
    loop = functools.partial(
        engine.advance.__wrapped__, shards=made.shards, model=model, cfg=cfg
    )
    limits = (jax.ShapeDtypeStruct((), jnp.int32),) * 2
    args = (params, lay_out(in_flight, mesh), *limits)
    return compiled(mesh, jax.jit(loop, donate_argnums=1), *args)


def batch(mesh, rows: int) -> views.TrainBatch:
    """Returns an abstract TrainBatch of eight microbatches."""
    names = [f.name for f in dataclasses.fields(views.TrainBatch) if f.name != "used"]
    widths = {"T": TOKENS, "U": TOKENS // 2}
    floats = ("weight", "adv", "old", "ref", "ret")
    arrays = {
        name: jax.ShapeDtypeStruct(
            (8, rows, widths[name[-1]]),
            jnp.float32 if name.startswith(floats) else jnp.int32,
        )
        for name in names
    }
    used = jax.ShapeDtypeStruct((), jnp.int32)
    return lay_out(views.TrainBatch(used=used, **arrays), mesh, prefix="m")


def tracerl_update(model, mesh, rows: int):
    """Returns the compiled update of policy and value network."""
    plans = {
        "policy": learner.Plan(("policy",), OptimConfig(), 100),
        "value": learner.Plan(("value",), OptimConfig(lr=5e-6), 100),
    }
    states, places = {}, {}
    for name, plan in plans.items():
        params = transformer.abstract(model, mesh, jnp.float32, plan.heads)
        shapes = jax.eval_shape(functools.partial(learner.begin, plan=plan), params)
        places[name] = learner.shardings(shapes.replace(params=params), plan, mesh)
        states[name] = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            places[name],
        )
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    update = functools.partial(
        learner.update, model=model, plans=plans, cfg=ObjectiveConfig()
    )
    jitted = jax.jit(update, donate_argnums=0, out_shardings=(places, whole))
    return compiled(mesh, jitted, states, batch(mesh, rows))


def compiled(mesh, jitted, *args):
    """Compiles for devices that can run nothing, so only this happens on their mesh."""
    with jax.set_mesh(mesh):
        return jitted.lower(*args).compile()


def report(topology: str, name: str = "sdar-8b"):
    """Compiles both programs for a topology; yields (program, bytes a device, seconds).

    Where kernels are there and not trusted yet, with them as well. Raises SkipReason where the environment lacks the compiler.
    """
    split, rows, packed = TARGETS.get(topology, (2, 64, 8))
    mesh = topologies.mesh(topology, model=split)
    trusted = mesh.devices.flat[0].platform in pallas_kernels.choice.TRUSTED
    for kernels in ("auto",) if trusted else ("auto", "platform"):
        model = dataclasses.replace(RELEASED[name], remat="full", kernels=kernels)
        for program, build, size in (
            ("rollout step", rollout_step, rows),
            ("TraceRL update", tracerl_update, packed),
        ):
            start = time.perf_counter()
            used = topologies.peak_bytes(build(model, mesh, size))
            added = ", kernels" if kernels == "platform" else ""
            yield program + added, used, time.perf_counter() - start


def main():
    """Prints the table."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("topology", nargs="*", default=list(TARGETS))
    p.add_argument("--model", choices=sorted(RELEASED), default="sdar-8b")
    args = p.parse_args()
    for topology in args.topology:
        try:
            for program, used, seconds in report(topology, args.model):
                has = topologies.hbm_bytes(topology)
                print(
                    f"{args.model} {topology:10} {program:15} {used / 2**30:6.2f} GiB a "
                    f"device of {has / 2**30:6.2f}, compiled in {seconds:.0f} s",
                    flush=True,
                )
        except topologies.SkipReason as reason:
            print(f"{topology:10} SKIPPED {reason}")


if __name__ == "__main__":
    main()
