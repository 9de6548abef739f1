"""A compiled program's text, read: instructions, what calls what, and how often loops run.

    program = parsed(compiled.as_text())
    for line in all_lines(program, program.entry):
        print(line.opcode, line.bytes, kernel_name(line))

A program is computations by name, a computation instructions by name. An instruction names
the arrays that it takes, and those computations that it calls: a fusion's inside, a loop's
body and condition, a conditional's branches. What all that costs cost_analysis.py counts.
"""

import math
import re
from typing import NamedTuple

BITS = {"pred": 8, "token": 0, "opaque": 0, "tuple": 0, "c64": 64, "c128": 128}
# Attributes that name what an instruction calls.
CALLS = ("body", "to_apply", "calls", "branch_computations")
CALLS += ("false_computation", "true_computation")
PALLAS = ("tpu_custom_call", "mosaic_gpu", "mosaic_gpu_v2")  # targets of its kernels


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
    """Instructions by name, in their order."""

    name: str
    lines: dict[str, Instruction]
    root: str  # the name of the one that makes its result

    def parameters(self) -> dict[int, str]:
        """Returns the names of its parameters by number."""
        return {
            int(line.inside): name
            for name, line in self.lines.items()
            if line.opcode == "parameter"
        }


class Program(NamedTuple):
    """Computations by name."""

    computations: dict[str, Computation]
    entry: str

    def callee(self, line: Instruction, *keys: str) -> Computation:
        """Returns the computation that an instruction calls, by the first attribute it has."""
        names = (name for key in keys for name in named(line.attributes, key))
        return self.computations[next(names)]


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
            root = line.name if is_root else root
    if not entry:
        raise ValueError("HLO: the text has no ENTRY")
    return Program(computations, entry)


# ---- Calls ---------------------------------------------------------------------------


def named(attributes: str, key: str) -> list[str]:
    """Returns the computations that an attribute names: one, or several in braces."""
    found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", attributes)
    return re.findall(r"[\w.\-]+", found[1]) if found else []


def branches(line: Instruction) -> list[str]:
    """Returns the computations of a conditional, in the order of its index: false, true."""
    keys = "branch_computations", "false_computation", "true_computation"
    return [name for key in keys for name in named(line.attributes, key)]


def reached(program: Program, name: str) -> set[str]:
    """Returns the computations that one calls, itself included."""
    found, waiting = set(), [name]
    while waiting:
        one = waiting.pop()
        if one in found or one not in program.computations:
            continue
        found.add(one)
        for line in program.computations[one].lines.values():
            for key in CALLS:
                waiting += named(line.attributes, key)
    return found


def all_lines(program: Program, name: str):
    """Yields every instruction that a computation reaches."""
    for one in sorted(reached(program, name)):
        yield from program.computations[one].lines.values()


# ---- Kernels -------------------------------------------------------------------------


def grouped(line: Instruction) -> bool:
    """Returns whether an instruction is XLA's own kernel of jax.lax.ragged_dot on a TPU.

    Its operands are whole arrays, so that the text tells what it does: the products, or
    which rows are of which group, which is next to nothing.
    """
    return line.opcode == "custom-call" and line.name.startswith("ragged-dot")


def kernel_name(line: Instruction) -> str | None:
    """Returns the name of the Pallas kernel that an instruction runs, or None."""
    target = re.search(r'custom_call_target="([^"]+)"', line.attributes)
    if line.opcode != "custom-call" or not target or target[1] not in PALLAS:
        return None
    if grouped(line):
        return None
    path = re.search(r'op_name="([^"]+)"', line.attributes)
    if path and "/" in path[1]:
        name = path[1].rsplit("/", 2)[-2]
        return re.sub(r"^(\w+\()+|\)+$", "", name)  # jvp(name): of a gradient
    return re.sub(r"\.\d+$", "", line.name)  # XLA numbers those of one name


# ---- Loops ---------------------------------------------------------------------------


def trip_count(program: Program, around: Computation, line: Instruction) -> int | None:
    """Returns how often the body of a loop of `around` runs, or None where that is data.

    XLA writes it down where it knows it. Where the loop was changed after that it does
    not, as on a TPU: then its condition compares a counter with a constant.
    """
    told = re.search(r'"known_trip_count":\{"n":"(\d+)"', line.attributes)
    if told:
        return int(told[1])
    condition = program.callee(line, "condition")
    root, known = condition.lines[condition.root], condition.lines
    if root.opcode == "fusion":
        fused = program.callee(root, "calls")
        order = fused.parameters()
        given = {order[i]: known[x] for i, x in enumerate(root.operands)}
        root, known = fused.lines[fused.root], fused.lines | given
    if root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    counter, limit = (known[x] for x in root.operands)
    if limit.opcode != "constant":
        return None
    start, step = counted_from(program, around, line, counter)
    return max(-(-(int(limit.inside) - start) // step), 0)


def counted_from(
    program: Program, around: Computation, line: Instruction, counter: Instruction
) -> tuple[int, int]:
    """Returns (first value, step) of a loop's counter; where no constant says so, 0 and 1.

    counter: what its condition compares.
    """
    body, first = program.callee(line, "body"), around.lines[line.operands[0]]
    last = body.lines[body.root]
    place = re.search(r"index=(\d+)", counter.attributes)
    if not place or {first.opcode, last.opcode} != {"tuple"}:
        return 0, 1
    index = int(place[1])
    start, step = constant(around, first.operands[index]), None
    after = uncopied(body, last.operands[index])
    if after and after.opcode == "add":
        added = [constant(body, x) for x in after.operands]
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


def loops(program: Program, name: str) -> list[str]:
    """Returns the bodies of a computation's own loops whose rounds are data."""
    around = program.computations[name]
    return [
        named(line.attributes, "body")[0]
        for line in around.lines.values()
        if line.opcode == "while" and trip_count(program, around, line) is None
    ]
