"""What every benchmark prints: a line of JSON that says everything, and a table row.

    python -m benchmarks.report FILE.jsonl ... > docs/benchmarks.md

makes a table of each command's lines on each device. docs/benchmarks.jsonl keeps them.
"""

import argparse
import datetime
import json
import os
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import jaxlib

from benchmarks import chips
from dllm_jax import folder

DTYPES = "float32", "bfloat16", "float16"  # that benchmarks compute in
QUEUED = 0.02  # see `seconds`
ONCE = ("benchmark", "command", "device", "date", "commit", "python", "jax", "jaxlib")
HEAD = """# Benchmarks

A row is what the command above its table printed; a cell is empty where a figure does not
apply. Random weights: speed does not depend on what they say, as the rate of unmasking is
forced. On CPU (two cores) only ratios, whose sides took turns in one run, mean something.
Tables of `against` have another commit's checkout beside this one, the same flags in turns, on
two cores with nothing else to do, bytecode written on both sides: minimum / median / maximum
of the rounds, and the median of their ratios; `asked` is the goal, and written beside them.
Such ratios belong to a machine, of which `machine` says what its two cores read and multiply.
From 729bf73 on few slots are multiplied by transposed weights: of those with one row the ones
that read 25 GB/s are of weights in tiles, as they lay before. From 2d1875a on such products are
sums, and weights of one operand one matrix; from 0397149 on sums of more than 512 are none;
from c7be198 on shallow weights lie in tiles again, and their products are sums.
Rows of a GPU that name no commit are of 59e1659. Those of 27d85a3 are of programs with XLA's
kernel for norms, which sampling is without since (`denoise.ON_GPU`); from c03e924 on a
forward's layers are one CUDA graph there.
Tables of `kernels --counted` are of programs that were compiled for a chip and not run: bytes,
FLOPs and what the chip takes for them at the least; `benchmarks/counted.py` says what is
counted and what is not.
"""


def chip():
    """Returns (bytes/s, FLOP/s) of the device, or None if chips.CHIPS lacks it.

    Warns of an accelerator that is not: its rows lack their share of what it can do.
    """
    kind = jax.devices()[0].device_kind
    found = chips.BY_KIND.get(kind)
    if not found and jax.default_backend() != "cpu":
        print(f"chips.CHIPS does not know {kind!r}", file=sys.stderr)
    return found and (found.bandwidth, found.flops)


def flops() -> float | None:
    """Returns the FLOP/s of the device at most, or None if it is unknown.

    On a CPU it is what a multiplication of two large f32 matrices reaches just now.
    """
    if jax.default_backend() == "cpu":
        size = 2048
        x = jnp.ones((size, size))
        return 2 * size**3 / seconds(jax.jit(jnp.matmul), x, x)
    found = chip()
    return found and found[1]


def dtype() -> str:
    """Returns the type that a platform computes best in."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def seconds(f, *args, repeats: int = 5, fed: bool = False) -> float:
    """Returns the least wall seconds of a call, after one that compiles.

    On an accelerator calls follow each other without waiting, for QUEUED seconds: what the
    host takes to start one, and to learn of its end, is hidden as it is within a run. fed: a
    call's result is the first argument of the next, which may take its memory.
    """
    first, *rest = args

    def lasted(calls: int) -> float:
        nonlocal first
        start = time.perf_counter()
        for _ in range(calls):
            out = f(first, *rest)
            first = out if fed else first
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls

    lasted(1)
    calls = 1
    if jax.default_backend() != "cpu":
        calls = max(1, min(100, int(QUEUED / lasted(1))))
    return min(lasted(calls) for _ in range(repeats))


def positive(parser: argparse.ArgumentParser, args: argparse.Namespace, *besides: str):
    """Ends the command with its usage and a line if a number it was given is less than 1.

    besides: names of numbers that may be 0, as a seed may.
    """
    for name, value in vars(args).items():
        numbers = value if isinstance(value, list) else [value]
        least = 0 if name in ("seed", *besides) else 1
        less = [x for x in numbers if type(x) is int and x < least]
        if less:
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag}: {less[0]} is less than {least}")


def lines_of(file: str) -> list[dict]:
    """Returns the lines of JSON of a file; raises ValueError naming one that is broken."""
    found = []
    for number, text in enumerate(pathlib.Path(file).read_text().splitlines(), 1):
        if text[:1] == "{":
            try:
                found.append(json.loads(text))
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}:{number}: {error}") from None
    return found


def tell(benchmark: str, **facts):
    """Prints a result: its row, and itself as JSON with all that it depends on."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if flag.startswith(("--xla_gpu", "--xla_tpu"))]
    words = [f'XLA_FLAGS="{" ".join(flags)}"'] if flags else []
    words += [f"python -m benchmarks.{benchmark}", *sys.argv[1:]]
    print("| " + " | ".join(f"{k} {v}" for k, v in facts.items()) + " |")
    line = {
        "benchmark": benchmark,
        "command": " ".join(words),
        "device": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }
    if commit := folder.commit():
        facts["commit"] = commit[:7] + commit[40:]  # with "+changes" where there are
    print(json.dumps(line | facts), flush=True)


def tables(lines: list[dict]) -> str:
    """Returns a Markdown table for each command on each device, in their order."""
    groups = {}
    for line in lines:
        key = tuple(line.pop(name, "") for name in ONCE)
        groups.setdefault(key, []).append(line)
    out = [HEAD]
    for once, rows in groups.items():
        benchmark, command, device, date, at, python, *versions = once
        names = list(dict.fromkeys(name for row in rows for name in row))
        out.append(f"## {benchmark}, {device}\n")
        out.append(
            f"`{command}`  \n{date}, {f'commit {at}, ' * bool(at)}Python {python}, jax "
            f"{versions[0]}, jaxlib {versions[1]}\n"
        )
        out.append("| " + " | ".join(names).replace("_", " ") + " |")
        out.append("|" + "---|" * len(names))
        for row in rows:
            out.append(
                "| " + " | ".join(str(row.get(name, "")) for name in names) + " |"
            )
        out.append("")
    if not any(group[2].startswith("NVIDIA") for group in groups):
        out.append("Not measured on a GPU: `benchmarks/all_gpu.sh` is what would.\n")
    if not any(group[2].startswith("TPU") for group in groups):
        out.append("Not measured on a TPU: `benchmarks/all_tpu.sh` is what would.\n")
    return "\n".join(out)


def main():
    """Prints the tables of the lines of all files."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("file", nargs="+", help="lines of JSON, as docs/benchmarks.jsonl")
    try:
        lines = [line for file in p.parse_args().file for line in lines_of(file)]
    except (OSError, ValueError) as error:
        p.error(str(error))
    print(tables(lines))


if __name__ == "__main__":
    main()
