"""What a run's programs take and could do, program by program, without the hardware.

    make budget                                   # every cell, against benchmarks/budget.json
    make budget ARGS="sdar-8b h200:8"             # cells whose names hold all these words
    make budget ARGS="--write sdar-8b"            # puts them into the file, and into the page

A cell is a program of a model on a topology, whose figures performance_model.py has. A cell
that got worse by more than 5 % than the file says ends the command with the cell, the figure,
before and after; so does a program with a fault. What does not fit is a cell with the run's own
refusal, and with the smallest slice of that chip that it fits (capacity.py).

docs/scaling.md is made of that file and holds no figure of its own.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import time

from benchmarks import capacity, performance_model, programs, scaling_page
from benchmarks.performance_model import Cell
from dllm_jax import command_line

FILE = pathlib.Path(__file__).with_name("budget.json")
WORSE = 0.05
MODELS = ("sdar-8b", "sdar-4b", "tiny", "sdar-1.7b", "sdar-30b-a3b")
TOPOLOGIES = ("h200:1", "h200:8", "v5p:2x2x1", "v5p:4x4x4", "v6e:2x4")


def cells() -> list[Cell]:
    """Returns all cells, those that tell most first."""
    alone = [
        Cell(model, "h200:1", "answers", rows)
        for model in ("sdar-8b", "sdar-4b")
        for rows in (64, 1, 128)
    ]
    alone.append(Cell("sdar-8b", "h200:1", "answers", 1, int8=True))
    runs = [
        Cell(model, topology, program)
        for model in MODELS
        for topology in TOPOLOGIES
        for program in ("rollout", "update")
    ]
    early = ("h200:8", "v5p:2x2x1", "h200:1")
    first = [c for c in runs if c.topology in early and c.model in MODELS[:3]]
    return alone + first + [c for c in runs if c not in first]


def figures(cell: Cell, *, whole: bool = False) -> dict:
    """Returns what the file keeps of a cell; compiles its program, if it fits.

    whole: with the programs that no figure counts, too: see programs.widest.
    """
    start = time.process_time()
    with contextlib.nullcontext() if whole else programs.widest():
        run = cell.run()
        row = {"refused": capacity.refusal(cell, run)}
        if not row["refused"]:
            row |= performance_model.figures(cell, run)
        if row["refused"]:
            row |= {"smallest": capacity.smallest(cell)}
    return row | {"compiler_seconds": round(time.process_time() - start)}


# ---- Against the file ----------------------------------------------------------------

# Figures of which more is worse, and of which less is.
MORE, LESS = (
    ("gib", "read_gib", "written_gib", "tflops"),
    ("tokens_per_second", "percent_of_ideal", "percent_of_pages")
    + ("mfu_bound", "mfu_with_waits"),
)


def worse(name: str, old: dict, new: dict) -> list[str]:
    """Returns a line for each figure of a cell that got worse by more than 5 %."""
    faults, lines = [f"{name}: {fault}" for fault in new.get("faults", [])], []
    if not old:
        return [f"{name}: not in the file: --write puts it there", *faults]
    if new.get("refused") and not old.get("refused"):
        lines.append(f"{name}: does not fit any more: {new['refused']}")
    room, needs = old.get("smallest", ""), new.get("smallest", "")
    if new.get("refused") and capacity.size_of(needs) > capacity.size_of(room or needs):
        lines.append(f"{name}: fitted with {room}, fits with {needs or 'nothing'}")
    lines += worse_figures(name, old, new)
    if not (old.get("refused") or new.get("refused")):
        lines += missing_parts(name, old, new)
    if "prompt" in old and "prompt" in new:
        lines += worse(f"{name} prompt", old["prompt"], new["prompt"])
    return lines + faults


def worse_figures(name: str, old: dict, new: dict) -> list[str]:
    """Returns `worse`'s lines of figures."""
    lines, fits = [], not (old.get("refused") or new.get("refused"))
    if fits:  # and where all pages do that rows can fill, no share is told
        old, new = ({"percent_of_pages": 100.0} | x for x in (old, new))
    for key in (*MORE, *LESS):
        if key in old and key in new:
            change = new[key] - old[key] if key in MORE else old[key] - new[key]
            if change > WORSE * abs(old[key]):
                lines.append(f"{name}: {key} was {old[key]}, is {new[key]}")
    before, after = (sum(x.get("sent_mib", {}).values()) for x in (old, new))
    if fits and after > before * (1 + WORSE) + 1:
        lines.append(f"{name}: sent_mib was {before:.0f}, is {after:.0f}")
    return lines


def missing_parts(name: str, old: dict, new: dict) -> list[str]:
    """Returns `worse`'s lines for what a program had, and has no more."""
    parts = [
        f"kernel {x}" for x in old.get("kernels", {}).keys() - new["kernels"].keys()
    ]
    if "prompt" in old and "prompt" not in new:
        parts.append("forward of prompts")
    return [f"{name}: the {x} is not in the program any more" for x in sorted(parts)]


def load() -> dict:
    """Returns the file's cells."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def save(name: str, row: dict):
    """Puts a cell into the file, in the order of `cells`, and writes the page."""
    known = load() | {name: row}
    order = [cell.name for cell in cells()]
    known = {key: known[key] for key in order if key in known}
    FILE.write_text(json.dumps(known, indent=1) + "\n")
    scaling_page.write(known, order)


def main():
    """Compiles the cells that are asked for, one after the other."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("word", nargs="*", help="of the names of cells; all must be in it")
    p.add_argument("--write", action="store_true", help="into budget.json and the page")
    p.add_argument("--missing", action="store_true", help="only cells not in the file")
    p.add_argument(
        "--whole", action="store_true", help="also the programs that no figure counts"
    )
    args = p.parse_args()
    asked = [x for x in cells() if all(word in x.name.split() for word in args.word)]
    if not asked:
        p.error(f"no cell has all of {args.word}: one is {cells()[0].name!r}")
    lines = []
    for cell in asked:
        known = load()
        if args.missing and cell.name in known:
            continue
        row = figures(cell, whole=args.whole)
        print(json.dumps({"cell": cell.name} | row), flush=True)
        if args.write:
            save(cell.name, row)
        before = known.get(cell.name, row if args.write else {})
        lines += worse(cell.name, before, row)
    sys.exit("\n".join(lines) or None)


if __name__ == "__main__":
    command_line.entry(main)
