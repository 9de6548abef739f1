"""What a compiled program costs a device, counted from its text: FLOPs, bytes, kernels.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs, and is
silent for GPUs. Here every instruction of the text (hlo.py) is counted, and what it calls; a
loop's body as often as the loop says.

    program = hlo.parsed(compiled.as_text())
    counted = count(program, program.entry)

Counted are, on one device:

*   FLOPs of products (`dot`, `convolution`, cuBLAS calls, a TPU's of groups of rows), two for
    a multiplication and an addition. What else is computed is small beside them.
*   bytes that come from the device's memory and go there: an instruction reads its operands
    and writes its result; what a fusion keeps inside is free, of an array that it slices or
    gathers from it reads what it takes, and what is updated in place is written where it
    changes. Arrays that a TPU keeps on the chip (memory spaces but 0) are free.
*   bytes that a device sends in collectives (collectives.py), by the devices that take part.
*   kernels of Pallas, by name: what they do inside no text tells, and `count` leaves it to
    its caller.
"""

import collections
import dataclasses
import functools
import math
import re
from typing import NamedTuple

from benchmarks import collectives, hlo
from benchmarks.hlo import Computation, Instruction, Program

# They move nothing themselves: names of arrays, the ends of what `-start` began, and calls.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "opt-barrier",
    "optimization-barrier",
    "partition-id",
    "replica-id",
    "add-dependency",
    "domain",
    "iota",
}
TAKES = {"slice", "dynamic-slice", "gather"}  # of their first operand, what they make
# Of their first operand they replace as much as the operand of this number has.
UPDATES = {"dynamic-update-slice": 1, "scatter": -1}
ROOM = "AllocateBuffer"  # a TPU's custom call: memory that others write


@dataclasses.dataclass
class Counted:
    """What a computation does on one device: see the module."""

    flops: float = 0.0
    read: float = 0.0
    written: float = 0.0
    sent: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    kernels: collections.Counter = dataclasses.field(
        default_factory=collections.Counter
    )

    def add(self, other: "Counted", times: float = 1):
        """Adds another's figures, `times` over."""
        self.flops += times * other.flops
        self.read += times * other.read
        self.written += times * other.written
        for mine, its in ((self.sent, other.sent), (self.kernels, other.kernels)):
            for key, amount in its.items():
                mine[key] += times * amount


# ---- A computation -------------------------------------------------------------------


def count(
    program: Program,
    name: str,
    choose=None,
    devices: int = 1,
    experts: int = 0,
    depth: int = 0,
) -> Counted:
    """Returns what a computation does, with all that it calls.

    A loop whose number of rounds is data is counted as one round. What no text tells:

    choose: of a conditional that branch counts whose number choose(depth, branches) returns,
        of how many conditionals stand around it and of how many branches it has; where that
        is None, or nobody chooses, the one with most FLOPs and bytes.
    devices: of the program.
    experts: groups that hold rows where a product has more, those of all layers; 0: all of
        them may.
    depth: how many conditionals stand around the computation.
    """
    computation, total = program.computations[name], Counted()
    called = functools.partial(
        count, program, choose=choose, devices=devices, experts=experts, depth=depth
    )
    for line in computation.lines.values():
        if line.opcode == "while":
            rounds = hlo.trip_count(program, computation, line)
            body = program.callee(line, "body")
            total.add(called(body.name), 1 if rounds is None else rounds)
        elif line.opcode == "conditional":
            names = hlo.branches(line)
            chosen = choose(depth, len(names)) if choose else None
            if chosen is not None:
                names = names[chosen : chosen + 1]
            every = [called(x, depth=depth + 1) for x in names]
            total.add(max(every, key=lambda x: (x.flops, x.read + x.written)))
        elif line.opcode in ("call", "call-start", "async-start"):
            total.add(called(program.callee(line, "to_apply", "calls").name))
        else:
            total.add(own(program, computation, line, devices, experts))
    return total


def own(
    program: Program,
    around: Computation,
    line: Instruction,
    devices: int,
    experts: int,
) -> Counted:
    """Returns what one instruction of `around` does itself."""
    kind = line.opcode
    if kind in FREE or kind.endswith(("-done", "-update")):
        return Counted()
    if kind == "custom-call" and f'custom_call_target="{ROOM}"' in line.attributes:
        return Counted()
    if kernel := hlo.kernel_name(line):
        return Counted(kernels=collections.Counter({kernel: 1}))
    operands = [around.lines[x] for x in line.operands if x in around.lines]
    sent = collectives.sent(line, operands, devices, around.name)
    total = Counted(flops=product_flops(line, operands), sent=sent)
    if kind in ("fusion", "fusion-start"):
        total.add(count(program, program.callee(line, "calls").name, devices=devices))
    # Of a fusion, too: arrays inside of it are its own.
    total.read, total.written = moved(program, line, operands, experts)
    return total


# ---- Products ------------------------------------------------------------------------


# Of a dot, or of what cuBLAS is told.
CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')


def product_flops(line: Instruction, operands: list[Instruction]) -> float:
    """Returns the FLOPs of a product; 0 for what is none."""
    if line.opcode == "convolution":
        return convolution_flops(line, *(x.arrays[0].dims for x in operands[:2]))
    over = CONTRACTED.search(line.attributes)
    if over and (line.opcode == "dot" or cublas(line)):
        left = operands[0].arrays[0].dims
        sizes = [left[int(i)] for i in re.findall(r"\d+", over[1])]
        return 2.0 * math.prod(line.arrays[0].dims) * math.prod(sizes)
    if hlo.grouped(line) and "ragged_dot_tiling" in line.attributes:
        # Of a row with its group's matrix, or of rows with rows into each group's.
        return 2.0 * math.prod(operands[-2].arrays[0].dims) * line.arrays[0].dims[-1]
    return 0.0


def cublas(line: Instruction) -> bool:
    """Returns whether an instruction is a call of cuBLAS."""
    return line.opcode == "custom-call" and "__cublas" in line.attributes


def convolution_flops(line: Instruction, left, right) -> float:
    """Returns the FLOPs of a convolution, by which a TPU's text spells products.

    As XLA's analysis does: of each spatial dimension the pairs of a result's and a
    window's position count that meet an element, and neither padding nor a gap.
    """
    labels = re.search(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)", line.attributes)
    of_left, of_right, of_out = labels[1], labels[2], labels[3]
    groups = re.search(r"batch_group_count=(\d+)", line.attributes)
    total = right[of_right.index("i")] * right[of_right.index("o")]
    total *= left[of_left.index("b")] // (int(groups[1]) if groups else 1)
    for i, label in enumerate(x for x in sorted(of_out) if x.isdigit()):
        window = window_of(line.attributes, i)
        total *= meeting(
            left[of_left.index(label)],
            line.arrays[0].dims[of_out.index(label)],
            window,
        )
    return 2.0 * total


class Window(NamedTuple):
    """One spatial dimension of a convolution's window."""

    size: int
    stride: int
    low: int  # padding before the first element
    left_gap: int  # 1: no gap between elements of the operand
    right_gap: int  # and of the window


def window_of(attributes: str, i: int) -> Window:
    """Returns spatial dimension i of a convolution's window."""
    text = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(x.split("=") for x in text[1].split()) if text else {}

    def part(key: str, default: str) -> str:
        return fields[key].split("x")[i] if key in fields else default

    low = part("pad", "0_0").split("_")[0]
    return Window(
        size=int(part("size", "1")),
        stride=int(part("stride", "1")),
        low=int(low),
        left_gap=int(part("lhs_dilate", "1")),
        right_gap=int(part("rhs_dilate", "1")),
    )


def meeting(size: int, out: int, window: Window) -> int:
    """Returns how many pairs of a result and a window's position meet an element."""
    if window.size == 1 and not window.low and window.left_gap == 1:
        return out
    total = 0
    for k in range(window.size):
        for o in range(out):
            at = o * window.stride - window.low + k * window.right_gap
            if 0 <= at < size * window.left_gap and at % window.left_gap == 0:
                total += 1
    return total


# ---- Bytes ---------------------------------------------------------------------------


def taken(program: Program, computation: Computation, name: str) -> float:
    """Returns the bytes that a fused computation reads of its parameter `name`."""
    whole = computation.lines[name].bytes
    total = 0.0
    for line in computation.lines.values():
        for at, operand in enumerate(line.operands):
            if operand != name:
                continue
            if line.opcode in TAKES and at == 0:
                total += part_of(computation.lines[name], line)
            elif line.opcode in UPDATES and at == 0:
                pass  # in place: what is not replaced is not touched
            elif line.opcode == "bitcast":
                total += taken(program, computation, line.name)
            elif line.opcode == "fusion":
                inner = program.callee(line, "calls")
                total += taken(program, inner, inner.parameters()[at])
            else:
                return whole
    return min(total, whole)


def part_of(whole: Instruction, part: Instruction) -> float:
    """Returns the bytes of a whole array that are read for a part of it, or replaced by it.

    The part may lie elsewhere, as what a TPU brings to the chip does, and be rounded: what
    moves are the whole's numbers, wherever they lie.
    """
    return whole.arrays[0]._replace(dims=part.arrays[0].dims).bytes


def changed(program: Program, computation: Computation, name: str) -> float:
    """Returns the bytes that a fused computation writes for its line `name`."""
    line = computation.lines[name]
    if line.opcode == "tuple":
        return sum(changed(program, computation, x) for x in line.operands)
    if line.opcode in ("bitcast", "copy") and line.operands:
        inner = computation.lines[line.operands[0]]
        if inner.opcode in UPDATES:
            return changed(program, computation, inner.name)
    if line.opcode in UPDATES:
        return part_of(line, computation.lines[line.operands[UPDATES[line.opcode]]])
    if cublas(line):  # the second of its results is room to work in
        return line.arrays[0].bytes
    if line.opcode == "fusion":
        inner = program.callee(line, "calls")
        return changed(program, inner, inner.root)
    return line.bytes


def moved(
    program: Program, line: Instruction, operands, experts: int = 0
) -> tuple[float, float]:
    """Returns the bytes (read, written) of one instruction outside of fusions."""
    inputs = [operand.bytes for operand in operands]
    if experts and hlo.grouped(line) and operands:
        groups, *matrix = operands[-1].arrays[0].dims
        if len(matrix) == 2:  # else of a gradient's rows
            inputs[-1] *= min(experts / groups, 1)
    if line.opcode in ("fusion", "fusion-start"):
        inner = program.callee(line, "calls")
        names = inner.parameters()
        read = sum(taken(program, inner, names[i]) for i in range(len(operands)))
        return read, changed(program, inner, inner.root)
    if line.opcode in TAKES:
        return part_of(operands[0], line) + sum(inputs[1:]), line.bytes
    if line.opcode in UPDATES:
        return sum(inputs[1:]), part_of(line, operands[UPDATES[line.opcode]])
    if line.opcode == "copy-start":
        return inputs[0], line.arrays[0].bytes
    if collectives.kind(line):
        made = line.bytes
        if "-start" in line.opcode and len(line.arrays) > len(operands):
            made = max(made - sum(inputs), 0)  # its result has its operands, too
        return sum(inputs), made
    return sum(inputs), line.arrays[0].bytes if cublas(line) else line.bytes
