"""What chips can do at most: the one table of it, for benchmarks on chips and without.

Bandwidth and FLOP/s are of the makers' data sheets, bf16 without sparsity. `link` is what a
device sends in one direction over one link, at 90 % of a TPU's nominal 100 GB/s (v5e: 50)
and 80 % of NVLink's 450; how many links a slice has for a ring: `link_bytes`.
"""

import math
from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """One JAX device."""

    # Its device_kind, as JAX says it; the first is the plain one.
    kinds: tuple[str, ...]
    memory: int  # bytes; a TPU's as libtpu states it when it refuses a program
    bandwidth: float  # of its memory, bytes/s
    flops: float  # bf16 FLOP/s
    link: float  # bytes/s


CHIPS = {
    "h100": Chip(
        ("NVIDIA H100", "NVIDIA H100 80GB HBM3"), 80 * 10**9, 3.35e12, 989e12, 360e9
    ),
    "h200": Chip(("NVIDIA H200",), 141 * 10**9, 4.8e12, 989e12, 360e9),
    "v5e": Chip(("TPU v5 lite",), int(15.75 * GIB), 819e9, 197e12, 45e9),
    "v5p": Chip(("TPU v5", "TPU v5p"), int(95.73 * GIB), 2765e9, 459e12, 90e9),
    "v6e": Chip(("TPU v6 lite",), int(31.24 * GIB), 1640e9, 918e12, 90e9),
}
BY_KIND = {kind: chip for chip in CHIPS.values() for kind in chip.kinds}
TORUS = {"v5p": 4, "v5e": 16, "v6e": 16}  # from this length on an axis is a ring
# Their rings are closed by what joins cubes: parts of a cube have none.
CUBES = ("v5p",)


def chip(topology: str) -> Chip:
    """Returns the chip of `chip:shape`."""
    return CHIPS[topology.partition(":")[0]]


def link_bytes(topology: str) -> float:
    """Returns the bytes/s that a device can send to its neighbours in one direction.

    GPUs: by NVLink, in a node. TPUs: an axis of a slice gives one link, two where it is a
    ring, none where it is one chip long.
    """
    name, _, shape = topology.partition(":")
    if name not in TORUS:
        return CHIPS[name].link
    long = [int(x) > 1 for x in shape.split("x")]
    return max(sum(long) + sum(rings(topology)), 1) * CHIPS[name].link


def rings(topology: str) -> tuple[bool, ...]:
    """Returns whether the last chip of each of a slice's axes is next to the first, too.

    What is no number is refused by the compiler, which knows the shapes.
    """
    name, _, shape = topology.partition(":")
    long = [x.isdigit() and int(x) >= TORUS[name] for x in shape.split("x")]
    return tuple(x and (name not in CUBES or all(long)) for x in long)


def devices(topology: str) -> int:
    """Returns how many devices a topology has."""
    shape = topology.partition(":")[2]
    return math.prod(int(x) for x in shape.split("x"))
