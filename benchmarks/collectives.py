"""The collectives of a compiled program: which devices take part, and what each one sends.

What a device sends is what it does where the devices of a group form a ring: (n - 1) / n of
what an all-gather makes or a reduce-scatter takes, twice that of an all-reduce.
"""

import collections
import math
import re

import numpy as np

from benchmarks import hlo

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


def kind(line: hlo.Instruction) -> str:
    """Returns which collective an instruction is, or begins; "" for what is none."""
    name = line.opcode.removesuffix("-start")
    return name if name in KINDS else ""


def sent(
    line: hlo.Instruction, operands, devices: int, within: str
) -> collections.Counter:
    """Returns the bytes that a device sends for an instruction, by (kind, group).

    operands: the instructions that make what it takes; devices: of the program; within: its
    computation's name.
    """
    what, total = kind(line), collections.Counter()
    if not what:
        return total
    if what == "all-reduce" and within.startswith("all-reduce-scatter"):
        what = "reduce-scatter"  # a TPU's fusion, which keeps a part of the sum
    group = group_of(line.attributes, devices)
    # On the wire are whole arrays, wherever they lie on the chip.
    size = sum(x._replace(space=0).bytes for o in operands for x in o.arrays)
    if len(group) > 1:
        total[what, group] = on_ring(what, size, len(group))
    return total


def on_ring(what: str, inputs: float, devices: int) -> float:
    """Returns the bytes that a device sends; inputs: those that it puts in."""
    if what == "all-gather":
        return inputs * (devices - 1)
    if what == "collective-permute":
        return inputs
    share = inputs * (devices - 1) / devices
    return 2 * share if what == "all-reduce" else share


# ---- Groups --------------------------------------------------------------------------


def group_of(attributes: str, devices: int) -> tuple[int, ...]:
    """Returns the devices of a collective's first group; of pairs, of the first that differs.

    Where all data change places some may stay where they are: a device sends them to itself.
    """
    meshed = re.search(r"replica_groups=mesh\[([^\]]+)\] \{([^}]*)\}", attributes)
    if meshed:
        return group_on_mesh(meshed[1], meshed[2])
    listed = re.search(r"source_target_pairs=\{([^=]*)\}\}", attributes)
    if listed:
        pairs = [tuple(map(int, x)) for x in re.findall(r"(\d+),(\d+)", listed[1])]
        pair = next((x for x in pairs if x[0] != x[1]), pairs[0])
        return tuple(sorted(set(pair)))
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if listed:
        return tuple(int(x) for x in listed[1].split(","))
    iota = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    )
    if iota is None:
        return tuple(range(devices))
    shape, dims = ([int(x) for x in iota[i].split(",")] for i in (1, 2))
    order = [int(x) for x in iota[3].split(",")] if iota[3] else None
    ids = np.arange(math.prod(dims)).reshape(dims).transpose(order)
    return tuple(ids.flat[: math.prod(shape[1:])].tolist())


def group_on_mesh(mesh: str, axes: str) -> tuple[int, ...]:
    """Returns the group of device 0; mesh: as in "'data'=4,'fsdp'=16"; axes: "'fsdp'".

    Of an axis may be a part: 'fsdp':(2)4 are four devices, of which each is followed by
    those of the rest, here eight, and so on.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    group, stride = [0], 1
    strides = {}
    for name in reversed(sizes):
        strides[name], stride = stride, stride * sizes[name]
    for name, before, part in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", axes):
        count = int(part) if part else sizes[name]
        step = strides[name] * sizes[name] // (int(before or 1) * count)
        group = [at + i * step for at in group for i in range(count)]
    return tuple(group)


def axes_of(group: tuple[int, ...], mesh) -> str:
    """Returns the mesh axes along which the devices of a group differ."""
    places = np.unravel_index(group, tuple(mesh.shape.values()))
    pairs = zip(mesh.shape, places, strict=True)
    return "+".join(name for name, at in pairs if np.ptp(at))
