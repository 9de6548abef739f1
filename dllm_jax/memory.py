"""What a run takes of a device's memory, told before its first step.

A run's programs are compiled before they are called, and not again then; what each needs
beside its arguments is the compiler's own figure. An estimate of ours would have to know
what XLA fuses and recomputes and what kernels hold, and be wrong where it matters. What
lies there all the time is the sum of the arrays' parts on a device.
"""

import math
import os

import jax

GIB = 2**30
HELP = {  # by phase
    "rollout": "lower sampler.rows or sampler.pages, or raise mesh.model or mesh.fsdp",
    "update": "set model.remat='full', lower batch.rows or batch.tokens, or raise "
    "mesh.fsdp or mesh.model",
}


def held(tree) -> int:
    """Returns the bytes that arrays, or shapes with a sharding, take on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )


def working(lowered, phase: str) -> int:
    """Compiles a program; returns the bytes that it needs beside its arguments.

    Raises ValueError, with the settings to change, where not even that fits a device.
    """
    try:
        plan = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"{phase} does not fit a device; {HELP[phase]}: {error}"
        ) from error
    fresh = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return plan.temp_size_in_bytes + fresh


def table(always: dict[str, int], phases: dict[str, dict[str, int]]) -> str:
    """Returns the lines to print: bytes by name, and what each phase adds to them."""

    def line(title, items):
        told = ", ".join(f"{name} {n / GIB:.3f}" for name, n in items.items() if n)
        return f"  {title:8} {sum(items.values()) / GIB:8.3f}  {told}"

    parts = {"always": always} | {f"+{name}": items for name, items in phases.items()}
    return "\n".join(
        ["memory of a device, GiB:", *(line(*part) for part in parts.items())]
    )


def check(always: dict, phases: dict, limit: int | None):
    """Raises ValueError, with the settings to change, where a phase exceeds `limit`.

    limit: bytes of a device, or None where it does not say.
    """
    for phase, items in phases.items():
        need = sum(always.values()) + sum(items.values())
        if limit is not None and need > limit:
            raise ValueError(
                f"{phase} needs {need / GIB:.2f} GiB of a device's {limit / GIB:.2f}; "
                f"{HELP[phase]}\n{table(always, phases)}"
            )


def limit() -> int | None:
    """Returns the bytes that a device of this process can give, or None.

    CPU devices share what the host has.
    """
    if jax.default_backend() == "cpu":
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return host // jax.local_device_count()
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
