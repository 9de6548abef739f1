"""What a compiled program does, counted from its text: multiplications, bytes, kernels.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs, and is
silent for GPUs. So the text is read: every instruction with its operands, every computation
that is called, a loop's body as often as the loop says.

    program = parsed(compiled.as_text())
    counted = count(program, program.entry)

Counted are, on one device:

*   FLOPs of products (`dot`, `convolution`, cuBLAS calls, a TPU's of groups of rows), two for
    a multiplication and an addition. What else is computed is small beside them.
*   bytes that come from the device's memory and go there: an instruction reads its operands
    and writes its result; what a fusion keeps inside is free, of an array that it slices or
    gathers from it reads what it takes, and what is updated in place is written where it
    changes. Arrays that a TPU keeps on the chip (memory spaces but 0) are free.
*   bytes that a device sends in collectives, by the devices that take part, as rings do it:
    (n - 1) / n of what an all-gather or a reduce-scatter makes or takes, twice that of an
    all-reduce.
*   kernels of Pallas, by name: what they do inside no text tells, and `count` leaves it to
    its caller.

A loop whose number of rounds is data is counted as one round. Of a conditional that branch
counts whose number `choose(depth, count)` returns, of how many conditionals stand around it
and of how many branches it has; where that is None, the one with most FLOPs and bytes.
"""

import collections
import dataclasses
import math
import re
from typing import NamedTuple

BITS = {"pred": 8, "token": 0, "opaque": 0, "tuple": 0, "c64": 64, "c128": 128}
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
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
ROOM = "AllocateBuffer"  # a TPU's custom call: memory that others write
KERNELS = ("tpu_custom_call", "mosaic_gpu", "mosaic_gpu_v2")


class Array(NamedTuple):
    """One array of an instruction's result."""

    dtype: str
    dims: tuple[int, ...]
    space: int  # 0: the device's memory; others: on the chip, or the host's

    @property
    def bytes(self) -> int:
        """The bytes of the device's memory that it takes."""
        return 0 if self.space else math.prod(self.dims) * bits(self.dtype) // 8


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]  # of its result: several where that is a tuple
    operands: tuple[str, ...]
    inside: str  # what stands in its parentheses
    attributes: str  # what follows them

    @property
    def bytes(self) -> int:
        """The bytes of its result."""
        return sum(array.bytes for array in self.arrays)


class Computation(NamedTuple):
    """Instructions by name, in their order; the last one's name, or what ROOT says."""

    name: str
    lines: dict[str, Instruction]
    root: str

    def parameters(self) -> dict[int, str]:
        """Returns the names of its parameters by number."""
        return {
            int(line.inside): name
            for name, line in self.lines.items()
            if line.opcode == "parameter"
        }


class Program(NamedTuple):
    """Computations by name.

    experts: groups that hold rows where a product has more, those of all layers; 0: all
    of them may. No text tells.
    """

    computations: dict[str, Computation]
    entry: str
    experts: int = 0


@dataclasses.dataclass
class Counted:
    """What a computation does on one device; see the module."""

    flops: float = 0.0
    read: float = 0.0
    written: float = 0.0
    sent: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    kernels: collections.Counter = dataclasses.field(
        default_factory=collections.Counter
    )

    def add(self, other: "Counted", times: float = 1.0):
        """Adds another's figures, `times` over."""
        self.flops += times * other.flops
        self.read += times * other.read
        self.written += times * other.written
        for mine, its in ((self.sent, other.sent), (self.kernels, other.kernels)):
            for key, amount in its.items():
                mine[key] += times * amount


# ---- From text -----------------------------------------------------------------------


def bits(dtype: str) -> int:
    """Returns the bits of an element."""
    if dtype in BITS:
        return BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)
    if not found:
        raise ValueError(f"HLO: an array of {dtype!r}, whose size is not known here")
    return int(found[1])


ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")


def arrays_of(text: str) -> tuple[Array, ...]:
    """Returns the arrays of a shape, of a tuple's all."""
    found = []
    for dtype, dims, layout in ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(d.strip("<=")) for d in dims.split(",") if d)
        found.append(Array(dtype, sizes, int(space[1]) if space else 0))
    return tuple(found)


def closed(text: str, start: int) -> int:
    """Returns where the parenthesis that opens at `start` is closed."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    raise ValueError(f"HLO: a parenthesis stays open in {text[:80]!r}")


LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")


def instruction(text: str) -> tuple[Instruction, bool] | None:
    """Returns (what a line says, whether it is its computation's root), if it says any."""
    head = LINE.match(text)
    if not head:
        return None
    start = head.end()
    if text[start] == "(":
        end = closed(text, start) + 1
    else:
        end = text.index(" ", start)
    opening = text.index("(", end)
    closing = closed(text, opening)
    inside = text[opening + 1 : closing]
    line = Instruction(
        name=head[2],
        opcode=text[end:opening].strip(),
        arrays=arrays_of(text[start:end]),
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        inside=inside,
        attributes=text[closing + 1 :],
    )
    return line, bool(head[1])


def parsed(text: str) -> Program:
    """Returns the program of a compiled module's text, HLO in its usual form."""
    computations, entry = {}, ""
    name, lines, root = "", {}, ""
    for text_line in text.splitlines():
        if text_line.startswith("}"):
            computations[name] = Computation(name, lines, root)
        elif text_line[:1] in ("%", "E") and (head := HEAD.match(text_line)):
            name, lines, root = head[2], {}, ""
            entry = name if head[1] else entry
        elif found := instruction(text_line):
            line, is_root = found
            lines[line.name] = line
            root = line.name if is_root or not root else root
    if not entry:
        raise ValueError("HLO: the text has no ENTRY")
    return Program(computations, entry)


def named(attributes: str, key: str) -> list[str]:
    """Returns the computations that an attribute names: one, or several in braces."""
    found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", attributes)
    return re.findall(r"[\w.\-]+", found[1]) if found else []


def rounds(program: Program, around: Computation, line: Instruction) -> int | None:
    """Returns how often the body of a loop of `around` runs, or None where that is data.

    XLA writes it down where it knows it. Where the loop was changed after that it does
    not, as on a TPU: then its condition compares a counter with a constant.
    """
    told = re.search(r'"known_trip_count":\{"n":"(\d+)"', line.attributes)
    if told:
        return int(told[1])
    (name,) = named(line.attributes, "condition")
    condition = program.computations[name]
    root = condition.lines[condition.root]
    within = condition
    if root.opcode == "fusion":
        within = program.computations[named(root.attributes, "calls")[0]]
        order = within.parameters()
        given = dict(zip((order[i] for i in sorted(order)), root.operands, strict=True))
        root = within.lines[within.root]
    else:
        given = {}
    if root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    counter, limit = (
        condition.lines[given[x]] if x in given else within.lines[x]
        for x in root.operands
    )
    if limit.opcode != "constant":
        return None
    start, step = counted_from(program, around, line, counter)
    return max(-(-(int(limit.inside) - start) // step), 0)


def counted_from(program: Program, around: Computation, line, counter: Instruction):
    """Returns (first value, step) of a loop's counter; where no constant says so, 0 and 1.

    counter: what its condition compares.
    """
    (body,) = named(line.attributes, "body")
    inside, first = program.computations[body], around.lines[line.operands[0]]
    last, place = (
        inside.lines[inside.root],
        re.search(r"index=(\d+)", counter.attributes),
    )
    if not place or {first.opcode, last.opcode} != {"tuple"}:
        return 0, 1
    index = int(place[1])
    start, step = constant(around, first.operands[index]), None
    after = uncopied(inside, last.operands[index])
    if after and after.opcode == "add":
        added = [constant(inside, x) for x in after.operands]
        step = next((x for x in added if x is not None), None)
    return start or 0, step or 1


def uncopied(computation: Computation, name: str) -> Instruction | None:
    """Returns the line that an array is a copy of, if it stands in the computation."""
    line = computation.lines.get(name)
    while line and line.opcode in ("copy", "copy-done", "copy-start"):
        line = computation.lines.get(line.operands[0])
    return line


def constant(computation: Computation, name: str) -> int | None:
    """Returns the whole number that an array holds, or None where that is data."""
    line = uncopied(computation, name)
    told = line and line.opcode == "constant" and line.inside.lstrip("-").isdigit()
    return int(line.inside) if told else None


# ---- Products ------------------------------------------------------------------------


def numbers(text: str, key: str) -> list[int]:
    """Returns an attribute's list of numbers in braces."""
    found = re.search(rf"{key}=\{{([\d,]*)\}}", text)
    return [int(x) for x in found[1].split(",") if x] if found else []


def product_flops(line: Instruction, operands: list[Instruction]) -> float:
    """Returns the FLOPs of a product; 0 for what is none."""
    if line.opcode == "dot":
        left = operands[0].arrays[0].dims
        over = math.prod(
            left[i] for i in numbers(line.attributes, "lhs_contracting_dims")
        )
        return 2.0 * math.prod(line.arrays[0].dims) * over
    if line.opcode == "convolution":
        return convolution_flops(line, *(x.arrays[0].dims for x in operands[:2]))
    if cublas(line):
        over = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', line.attributes)
        if over:
            left = operands[0].arrays[0].dims
            sizes = [left[int(i)] for i in re.findall(r"\d+", over[1])]
            return 2.0 * math.prod(line.arrays[0].dims) * math.prod(sizes)
    if grouped(line) and "ragged_dot_tiling" in line.attributes:
        # Of a row with its group's matrix, or of rows with rows into each group's.
        return 2.0 * math.prod(operands[-2].arrays[0].dims) * line.arrays[0].dims[-1]
    return 0.0


def grouped(line: Instruction) -> bool:
    """Returns whether an instruction is XLA's own kernel of jax.lax.ragged_dot on a TPU.

    Its operands are whole arrays, so that the text tells what it does: the products, or
    which rows are of which group, which is next to nothing.
    """
    return line.opcode == "custom-call" and line.name.startswith("ragged-dot")


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
                total += line.bytes
            elif line.opcode in ("dynamic-update-slice", "scatter") and at == 0:
                pass  # in place: what is not replaced is not touched
            elif line.opcode == "bitcast":
                total += taken(program, computation, line.name)
            elif line.opcode == "fusion":
                inner = program.computations[named(line.attributes, "calls")[0]]
                total += taken(program, inner, inner.parameters()[at])
            else:
                return whole
    return min(total, whole)


def changed(program: Program, computation: Computation, name: str) -> float:
    """Returns the bytes that a fused computation writes for its line `name`."""
    line = computation.lines[name]
    if line.opcode == "tuple":
        return sum(changed(program, computation, x) for x in line.operands)
    if line.opcode in ("bitcast", "copy") and line.operands:
        inner = computation.lines[line.operands[0]]
        if inner.opcode in ("dynamic-update-slice", "scatter"):
            return changed(program, computation, inner.name)
    if line.opcode == "dynamic-update-slice":
        return computation.lines[line.operands[1]].bytes
    if line.opcode == "scatter":
        return computation.lines[line.operands[-1]].bytes
    if cublas(line):  # the second of its results is room to work in
        return line.arrays[0].bytes
    if line.opcode == "fusion":
        inner = program.computations[named(line.attributes, "calls")[0]]
        return changed(program, inner, inner.root)
    return line.bytes


def moved(program: Program, line: Instruction, operands) -> tuple[float, float]:
    """Returns the bytes (read, written) of one instruction outside of fusions."""
    inputs = [operand.bytes for operand in operands]
    if program.experts and grouped(line) and operands:
        groups, *matrix = operands[-1].arrays[0].dims
        if len(matrix) == 2:  # else of a gradient's rows
            inputs[-1] *= min(program.experts / groups, 1)
    if line.opcode in ("fusion", "fusion-start"):
        inner = program.computations[named(line.attributes, "calls")[0]]
        names = inner.parameters()
        read = sum(taken(program, inner, names[i]) for i in range(len(operands)))
        return read, changed(program, inner, inner.root)
    if line.opcode in TAKES:
        return line.bytes + sum(inputs[1:]), line.bytes
    if line.opcode == "dynamic-update-slice":
        return sum(inputs[1:]), inputs[1]
    if line.opcode == "scatter":
        return sum(inputs[1:]), inputs[-1]
    if line.opcode == "copy-start":
        return inputs[0], line.arrays[0].bytes
    if line.opcode.removesuffix("-start") in COLLECTIVES:
        made = line.bytes
        if "-start" in line.opcode and len(line.arrays) > len(operands):
            made = max(made - sum(inputs), 0)  # its result has its operands, too
        return sum(inputs), made
    return sum(inputs), line.arrays[0].bytes if cublas(line) else line.bytes


# ---- Collectives ---------------------------------------------------------------------


def group_of(attributes: str, devices: int) -> tuple[int, ...]:
    """Returns the devices of a collective's first group."""
    meshed = re.search(r"replica_groups=mesh\[([^\]]+)\] \{([^}]*)\}", attributes)
    if meshed:
        return group_on_mesh(meshed[1], meshed[2])
    pairs = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes)
    if pairs:
        return tuple(sorted({int(pairs[1]), int(pairs[2])}))
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    if listed:
        return tuple(int(x) for x in listed[1].split(","))
    iota = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    )
    if iota is None:
        return tuple(range(devices))
    shape, dims = ([int(x) for x in iota[i].split(",")] for i in (1, 2))
    order = [int(x) for x in iota[3].split(",")] if iota[3] else list(range(len(dims)))
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    sizes = [dims[i] for i in order]
    group = []
    for flat in range(math.prod(shape[1:])):
        at = 0
        for size, i in zip(reversed(sizes), reversed(order), strict=True):
            flat, digit = divmod(flat, size)
            at += digit * strides[i]
        group.append(at)
    return tuple(group)


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


def sent(kind: str, inputs: float, devices: int) -> float:
    """Returns the bytes that a device sends; inputs: those it puts in."""
    if kind == "all-gather":
        return inputs * (devices - 1)
    if kind == "collective-permute":
        return inputs
    share = inputs * (devices - 1) / devices
    return 2 * share if kind == "all-reduce" else share


def collective(line: Instruction, operands, devices: int, within: str) -> Counted:
    """Returns what a collective sends; within: the computation's name."""
    kind = line.opcode.removesuffix("-start")
    if kind == "all-reduce" and within.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # a TPU's fusion, which keeps a part of the sum
    group = group_of(line.attributes, devices)
    # On the wire are whole arrays, wherever they lie on the chip.
    size = sum(x._replace(space=0).bytes for o in operands for x in o.arrays)
    out = Counted()
    if len(group) > 1:
        out.sent[kind, group] = sent(kind, size, len(group))
    return out


# ---- All of it -----------------------------------------------------------------------


def kernel_name(line: Instruction) -> str | None:
    """Returns the name of the Pallas kernel that an instruction runs, or None."""
    target = re.search(r'custom_call_target="([^"]+)"', line.attributes)
    if line.opcode != "custom-call" or not target or target[1] not in KERNELS:
        return None
    if grouped(line):
        return None
    path = re.search(r'op_name="([^"]+)"', line.attributes)
    if path and "/" in path[1]:
        name = path[1].rsplit("/", 2)[-2]
        return re.sub(r"^(\w+\()+|\)+$", "", name)  # jvp(name): of a gradient
    return re.sub(r"\.\d+$", "", line.name)  # XLA numbers those of one name


def most_costly(depth: int, branches: int) -> int | None:
    """Chooses no branch of a conditional: see `count`."""
    del depth, branches


def count(
    program: Program, name: str, choose=most_costly, devices: int = 1, depth: int = 0
) -> Counted:
    """Returns what a computation does, with all that it calls.

    choose: which branch a conditional takes, see the module; devices: of the program;
    depth: how many conditionals stand around it.
    """
    computation, total = program.computations[name], Counted()
    for line in computation.lines.values():
        operands = [
            computation.lines[x] for x in line.operands if x in computation.lines
        ]
        inner, times = within(program, computation, line, choose, devices, depth)
        if inner is None:
            inner = own(program, line, operands, devices, name)
        total.add(inner, times)
    return total


def within(program: Program, around: Computation, line: Instruction, *how):
    """Returns (what the computation does that a line of `around` calls, how often), or None.

    how: `count`'s choose, devices and depth.
    """
    kind, (choose, devices, depth) = line.opcode, how
    if kind == "while":
        (body,) = named(line.attributes, "body")
        times = rounds(program, around, line)
        return count(
            program, body, choose, devices, depth
        ), 1 if times is None else times
    if kind == "conditional":
        names = branches_of(line)
        taken_one = choose(depth, len(names))
        if taken_one is not None:
            names = names[taken_one : taken_one + 1]
        every = [count(program, x, choose, devices, depth + 1) for x in names]
        return max(every, key=lambda x: (x.flops, x.read + x.written)), 1
    if kind in ("call", "call-start", "async-start"):
        called = named(line.attributes, "to_apply") or named(line.attributes, "calls")
        return count(program, called[0], choose, devices, depth), 1
    return None, 1


def own(
    program: Program, line: Instruction, operands, devices: int, where: str
) -> Counted:
    """Returns what one instruction does itself; where: its computation."""
    kind = line.opcode
    if kind in FREE or kind.endswith(("-done", "-update")):
        return Counted()
    if kind == "custom-call" and f'custom_call_target="{ROOM}"' in line.attributes:
        return Counted()
    if kernel := kernel_name(line):
        return Counted(kernels=collections.Counter({kernel: 1}))
    if kind.removesuffix("-start") in COLLECTIVES:
        total = collective(line, operands, devices, where)
    else:
        total = Counted(flops=product_flops(line, operands))
    if kind in ("fusion", "fusion-start"):
        total.add(fused(program, line, devices))
    total.read, total.written = moved(program, line, operands)
    return total


def fused(program: Program, line: Instruction, devices: int) -> Counted:
    """Returns the products and collectives inside a fusion, whose arrays are its own."""
    (name, *_) = named(line.attributes, "calls")
    inner = count(program, name, most_costly, devices)
    return Counted(flops=inner.flops, sent=inner.sent, kernels=inner.kernels)


def branches_of(line: Instruction) -> list[str]:
    """Returns the computations of a conditional, in the order of its index: false, true."""
    several = named(line.attributes, "branch_computations")
    if several:
        return several
    return [
        named(line.attributes, f"{which}_computation")[0] for which in ("false", "true")
    ]


def loops(program: Program, name: str) -> list[str]:
    """Returns the bodies of a computation's own loops whose rounds are data."""
    around = program.computations[name]
    return [
        named(line.attributes, "body")[0]
        for line in around.lines.values()
        if line.opcode == "while" and rounds(program, around, line) is None
    ]


def reached(program: Program, name: str) -> set[str]:
    """Returns the computations that one calls, itself included."""
    found, waiting = set(), [name]
    keys = ("body", "to_apply", "calls", "branch_computations")
    keys += ("false_computation", "true_computation")
    while waiting:
        one = waiting.pop()
        if one in found or one not in program.computations:
            continue
        found.add(one)
        for line in program.computations[one].lines.values():
            for key in keys:
                waiting += named(line.attributes, key)
    return found


def all_lines(program: Program, name: str):
    """Yields every instruction that a computation reaches."""
    for one in sorted(reached(program, name)):
        yield from program.computations[one].lines.values()
