"""Bytes of a device: what arrays take, what a compiled program needs, what there is.

An estimate of ours would have to know what XLA fuses and recomputes and what kernels hold,
and be wrong where it matters. So a program's need is the compiler's own figure, and what
lies there beside programs is the sum of the arrays' parts on a device.
"""

import contextlib
import math
import os
import pathlib
import socket
from typing import NamedTuple

import jax

from dllm_jax import processes

GIB = 2**30
# Where Linux tells a container's limit, by version 2 of its control groups and by 1.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Claim(NamedTuple):
    """What a guest of a run takes of a device: bytes, by what they hold."""

    always: dict[str, int]  # there from the first step to the last
    working: dict[str, int]  # beside, while it works

    @property
    def resident(self) -> int:
        """The bytes that are always there."""
        return sum(self.always.values())


NOTHING = Claim({}, {})


def claimed(claims, beside: int) -> Claim:
    """Returns the Claim of several guests, who do not work at once.

    claims: functions from the bytes of a device that others have, to a Claim; beside: what
    is there before the first.
    """
    always, working = {}, {}
    for claim in claims:
        made = claim(beside + sum(always.values()))
        for name, size in made.always.items():
            always[name] = always.get(name, 0) + size
        working = max(working, made.working, key=lambda sizes: sum(sizes.values()))
    return Claim(always, working)


def array_bytes(tree) -> int:
    """Returns what arrays, or shapes with a sharding, take on one device.

    What is there twice, as a tied head, is one.
    """
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in {id(x): x for x in jax.tree.leaves(tree)}.values()
    )


def program_bytes(compiled) -> int:
    """Returns what a compiled program needs on one device beside its arguments.

    Results that take the place of a donated argument need nothing.
    """
    analysis = compiled.memory_analysis()
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + results


def device_bytes() -> int | None:
    """Returns what a device of this process can give, or None where it does not say.

    CPU devices share what the host has, those of a run's other processes there, too.
    """
    if jax.default_backend() == "cpu":
        hosts = processes.group.hosts.values() if processes.group else ()
        together = max(list(hosts).count(socket.gethostname()), 1)
        return host_bytes() // (together * jax.local_device_count())
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def host_bytes() -> int:
    """Returns the host's memory, or what its container is limited to."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is "max"
            sizes.append(int(pathlib.Path(limit).read_text()))
    return min(sizes)
