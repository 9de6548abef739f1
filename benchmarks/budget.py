"""What a run's programs take and could do, program by program, without the hardware.

    make budget                                   # every cell, against benchmarks/budget.json
    make budget ARGS="sdar-8b h200:8"             # cells whose names hold all these words
    make budget ARGS="--write sdar-8b"            # puts them into the file, and into the page

A cell is a program of a model on a topology, compiled as `python -m dllm_jax.train` with the
preset's settings would (programs.py), its text counted (hlo.py) and set against what the chip
can do (roofline.py). A cell that got worse by more than 5 % than the file says ends the
command with the cell, the figure, before and after; so does a program that gathers weights in
the loop over forwards, copies a pool of pages, or makes an array of scores. What does not fit
is a cell with the run's own refusal, and with the smallest slice of that chip that it fits.

docs/scaling.md is made of that file and holds no figure of its own.
"""

import argparse
import bisect
import contextlib
import functools
import json
import math
import pathlib
import sys
import time
from typing import NamedTuple

import jax

from benchmarks import chips, hlo, programs, roofline, scaling_page, topologies
from dllm_jax import command_line, memory
from dllm_jax.models import acting
from dllm_jax.models.config import ModelConfig
from dllm_jax.pallas_kernels import choice, head
from dllm_jax.sampling import forwards, placement

FILE = pathlib.Path(__file__).with_name("budget.json")
GIB, MIB = 2**30, 2**20
WORSE = 0.05
MODELS = ("sdar-8b", "sdar-4b", "tiny", "sdar-1.7b", "sdar-30b-a3b")
TOPOLOGIES = ("h200:1", "h200:8", "v5p:2x2x1", "v5p:4x4x4", "v6e:2x4")
SLICES = {  # by size: where a refused cell looks for room
    "h200": ("h200:1", "h200:2", "h200:4", "h200:8", "h200:2x8", "h200:4x8"),
    "v5p": ("v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4"),
    "v6e": ("v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:8x8", "v6e:8x16", "v6e:16x16"),
}


class Cell(NamedTuple):
    """A program of a model on a topology."""

    model: str
    topology: str
    program: str  # "rollout" or "update" of a run, or "answers": a rollout by itself
    rows: int = 0  # sampler.rows, of "answers"
    int8: bool = False  # sampler.int8, of "answers"

    @property
    def name(self) -> str:
        """What the file calls it."""
        rows = f" rows={self.rows}" if self.rows else ""
        more = " int8" if self.int8 else ""
        return f"{self.model} {self.topology} {self.program}{rows}{more}"


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


# ---- A cell's figures ----------------------------------------------------------------


def figures(cell: Cell, *, whole: bool = False) -> dict:
    """Returns what the file keeps of a cell; compiles its program, if it fits.

    whole: with the programs that no figure counts, too: see programs.widest.
    """
    with contextlib.nullcontext() if whole else programs.widest():
        return measured(cell)


def measured(cell: Cell) -> dict:
    """Returns `figures` of the programs that are compiled here."""
    start = time.process_time()
    more = {"rows": cell.rows} if cell.rows else {}
    more |= {"int8": True} if cell.int8 else {}
    run = programs.Run(cell.model, cell.topology, **more)
    row = {"refused": refusal(cell, run)}
    if not row["refused"]:
        row |= made(cell, run)
    if row["refused"]:
        row |= {"smallest": smallest(cell)}
    return row | {"compiler_seconds": round(time.process_time() - start)}


def refusal(cell: Cell, run: programs.Run) -> str:
    """Returns why a program cannot fit whatever is compiled; "" where it may."""
    resident = sum(run.resident.values())
    needs, what = resident, "what is trained takes"
    if cell.program != "update":
        needs = sampling_bytes(run, 0 if cell.program == "answers" else resident)
        what = "what is trained, the weights that sample and their pages take"
    if cell.program == "answers":
        what = "weights and pages take"
    if needs <= run.limit:
        return ""
    return f"{what} {needs / GIB:.1f} GiB of a device's {run.limit / GIB:.1f}"


def made(cell: Cell, run: programs.Run) -> dict:
    """Returns the figures of a program that is compiled, or why it does not fit."""
    try:
        if cell.program == "update":
            return of_update(cell, run)
        return of_rollout(cell, run)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"refused": shortened(str(error))}


def shortened(text: str) -> str:
    """Returns the first sentence of what a compiler says."""
    return " ".join(text.split())[:160]


def common(cell: Cell, run: programs.Run, compiled, beside: int) -> dict:
    """Returns the figures that all programs have; beside: bytes of what else is there."""
    peak = topologies.peak_bytes(compiled) + beside
    row = {"gib": round(peak / GIB, 2), "gib_there": round(run.limit / GIB, 2)}
    if peak > run.limit:
        row["refused"] = (
            f"{cell.program} takes {peak / GIB:.1f} GiB of a device's "
            f"{run.limit / GIB:.1f}"
        )
    return row


def told(counted: hlo.Counted, mesh) -> dict:
    """Returns counted figures as the file has them."""
    by_axis = {}
    for (kind, group), size in counted.sent.items():
        name = f"{axes_of(group, mesh)} {kind}"
        by_axis[name] = by_axis.get(name, 0) + size
    return {
        "read_gib": significant(counted.read / GIB),
        "written_gib": significant(counted.written / GIB),
        "tflops": significant(counted.flops / 1e12),
        "sent_mib": {k: significant(v / MIB) for k, v in sorted(by_axis.items())},
        "kernels": {k: int(v) for k, v in sorted(counted.kernels.items())},
    }


def significant(x: float) -> float:
    """Returns a figure with four digits."""
    return float(f"{x:.4g}")


def axes_of(group: tuple[int, ...], mesh) -> str:
    """Returns the mesh axes along which the devices of a group differ."""
    sizes, at = tuple(mesh.shape.values()), []
    for flat in group:
        digits = []
        for size in reversed(sizes):
            flat, digit = divmod(flat, size)
            digits.append(digit)
        at.append(digits[::-1])
    pairs = zip(mesh.shape, zip(*at, strict=True), strict=True)
    return "+".join(name for name, digits in pairs if len(set(digits)) > 1)


def of_rollout(cell: Cell, run: programs.Run) -> dict:
    """Returns the figures of the engine's loop: a forward of blocks, and one of prompts."""
    place = run.alone if cell.program == "answers" else run.sampling
    resident = 0 if cell.program == "answers" else sum(run.resident.values())
    compiled = run.rollout(place)
    row = common(cell, run, compiled, resident)
    if "refused" in row:
        return row
    program = hlo.parsed(compiled.as_text())
    (body,) = hlo.loops(program, program.entry)
    mesh, rows = place.answerer.mesh, place.answerer.scheduler.rows_per_shard
    program = program._replace(experts=run.model.experts // mesh.shape["model"])
    counted, facts = of_blocks(run, program, body, mesh, rows)
    seconds = roofline.seconds(counted, cell.topology)
    share = mesh.shape["model"]
    size = 1 if cell.int8 else facts.itemsize
    best = roofline.ideal_forward(run.model, rows, facts, share, size)
    tokens = rows * run.cfg.sampler.block / roofline.STEPS / share
    row |= told(counted, mesh)
    row |= {
        "rows_per_device": significant(rows / share),
        "weights_shared_by": share,
        "weights_gib": significant(memory.array_bytes(place.weights) / GIB),
        "tokens_per_second": significant(tokens / seconds),
        "percent_of_ideal": significant(
            100 * roofline.seconds(best, cell.topology) / seconds
        ),
        "faults": rollout_faults(program, body, place, run),
    }
    scheduler = place.answerer.scheduler
    if scheduler.overbooked:
        enough = rows * scheduler.pages_per_row
        row["percent_of_pages"] = significant(100 * scheduler.pages_per_shard / enough)
    if run.cfg.sampler.max_prompt >= 2 * run.cfg.sampler.block:
        row["prompt"] = of_prompts(cell, run, program, body, mesh, rows)
    return row


def of_blocks(run: programs.Run, program: hlo.Program, body: str, mesh, rows: int):
    """Returns (Counted, Facts) of a forward of blocks for `rows` rows of a shard.

    Of its programs it is the smallest that has room for the windows of that many rows.
    """
    cfg, due = run.cfg.sampler, rows * (1 + 1 / roofline.STEPS)
    sizes = forwards.window_counts(mesh.devices.flat[0].platform, cfg, rows)
    enough = next(i for i, size in enumerate(sizes) if size >= due)
    facts = roofline.facts(
        run.model,
        mesh.shape["model"],
        rows=due,
        windows=sizes[enough],
        held=rows if forwards.pairs_fit(run.model, cfg.block) else due,
        width=cfg.block,
        seats=rows * cfg.block,
        context=min(roofline.CONTEXT, cfg.slots // 2),
        keys=0.0,
    )

    prefilled = cfg.max_prompt >= 2 * cfg.block
    programs_there = len(sizes) + prefilled * len(cfg.chunk_counts(rows))
    chosen = []

    def choose(depth: int, branches: int) -> int | None:
        if not depth and branches == programs_there:
            chosen.append(enough)
            return enough
        return None if depth else 0  # the other says whether rows denoise: they do

    counted = hlo.count(program, body, choose, mesh.size)
    if programs_there > 1 and not chosen:
        raise RuntimeError(f"the loop has no choice of {programs_there} programs")
    return roofline.with_kernels(counted, facts), facts


def of_prompts(cell, run, program, body: str, mesh, rows: int) -> dict:
    """Returns the figures of a forward of the most prompt chunks of a shard."""
    cfg = run.cfg.sampler
    many = cfg.chunk_counts(rows)[-1]
    facts = roofline.facts(
        run.model,
        mesh.shape["model"],
        rows=many,
        windows=many,
        held=many,
        width=cfg.chunk,
        seats=0,
        context=cfg.max_prompt,
        keys=float(cfg.max_prompt),
    )

    def choose(depth: int, branches: int) -> int:
        return branches - 1  # the largest number of chunks, the widest table

    counted = roofline.with_kernels(hlo.count(program, body, choose, mesh.size), facts)
    tokens = many * cfg.chunk / mesh.shape["model"]
    rate = tokens / roofline.seconds(counted, cell.topology)
    return told(counted, mesh) | {"tokens_per_second": significant(rate)}


def rollout_faults(program, body: str, place: placement.Placement, run) -> list[str]:
    """Returns what the loop over forwards must not do, and does."""
    cfg, model = run.cfg.sampler, run.model
    pool = place.answerer.page_count // place.answerer.shards
    heads = model.kv_heads // math.gcd(
        model.kv_heads, place.answerer.mesh.shape["model"]
    )
    page = (model.layers, pool, cfg.page_slots, heads, model.head_dim)
    faults = []
    for line in hlo.all_lines(program, body):
        dims = [array.dims for array in line.arrays]
        if line.opcode.startswith("all-gather") and line.bytes > MIB:
            faults.append(f"{line.opcode} of {line.bytes / MIB:.0f} MiB: {line.name}")
        if line.opcode.startswith("copy") and page in dims:
            faults.append(f"the pool of pages is copied: {line.name}")
    return faults + scores_of_tables(program, body, place, run)


def scores_of_tables(program, body: str, place, run) -> list[str]:
    """Returns the arrays with a number for each head, query and key of rows' tables.

    They are told from masks, which have one for all heads, by being larger than that of the
    most windows by half at least; and from keys by a position's row of heads. Heads that no
    kernel takes are left out: see update_faults.
    """
    cfg, model, scheduler = run.cfg.sampler, run.model, place.answerer.scheduler
    if model.head_dim not in choice.HEAD_SIZES:
        return []
    rows, prompt = scheduler.rows_per_shard, -(-cfg.max_prompt // cfg.page_slots)
    queries = {  # at most, by the pages of a table: of rows, and of prompts
        scheduler.pages_per_row: 2 * rows * cfg.block,
        prompt: cfg.chunk_counts(rows)[-1] * cfg.chunk,
    }
    least = {pages * cfg.page_slots: 1.5 * many for pages, many in queries.items()}
    share = place.answerer.mesh.shape["model"]
    heads = model.kv_heads // math.gcd(model.kv_heads, share)
    keys = {n * model.head_dim for n in (1, 2, heads, 2 * heads)}
    found = {
        array.dims
        for line in hlo.all_lines(program, body)
        for array in line.arrays
        if array.dims and array.dims[-1] in least
        if math.prod(array.dims[:-1]) >= least[array.dims[-1]]
        if array.dims[-2] not in keys
    }
    return [f"an array of scores: {list(dims)}" for dims in sorted(found)]


def of_update(cell: Cell, run: programs.Run) -> dict:
    """Returns the figures of an update: its loops over microbatches and what surrounds them."""
    compiled, remat = run.update()
    row = common(cell, run, compiled, 0)
    if "refused" in row:
        return row
    program = hlo.parsed(compiled.as_text())
    batch, work = run.settings.batch, work_of(run)
    rows = batch.rows // run.rows_on
    seats = head.row_counts(rows * run.settings.layout.seats(batch))
    enough = bisect.bisect_left(seats[:-1], rows * batch.tokens * roofline.SUPERVISED)
    facts = roofline.facts(
        run.model,
        run.mesh.shape["model"],
        rows=rows,
        windows=rows,
        held=0,
        width=batch.tokens,
        seats=seats[enough],
        context=0,
        keys=float(min(batch.tokens, roofline.VISITED)),
    )

    def choose(depth: int, branches: int) -> int | None:
        # Of the head's two programs; of experts', if they have two, likewise the fewer.
        del depth
        return enough if branches == len(seats) > 1 else None

    whole = hlo.count(program, program.entry, choose, run.mesh.size)
    for body in hlo.loops(program, program.entry):
        one = hlo.count(program, body, choose, run.mesh.size)
        whole.add(one, work.microbatches - 1)
    counted = roofline.with_kernels(whole, facts)
    seconds = roofline.seconds(counted, cell.topology)
    useful = work.useful / run.mesh.size
    busy = seconds * chips.chip(cell.topology).flops
    figures = {
        "remat": remat,
        "microbatches": work.microbatches,
        "rows_per_device": facts.rows,
        "seconds": significant(seconds),
        "mfu_bound": significant(100 * useful / counted.flops),
        "mfu_with_waits": significant(100 * useful / busy),
        "faults": update_faults(program, run.model, batch.tokens),
    }
    return row | told(counted, run.mesh) | figures


class Work(NamedTuple):
    """What an update is for."""

    microbatches: int
    useful: float  # FLOPs, of all devices


def work_of(run: programs.Run) -> Work:
    """Returns the Work of an update of as many answers as the recipe says."""
    cfg, batch = run.cfg, run.settings.batch
    answers = -(-cfg.rl.prompts * cfg.rl.group // cfg.rl.updates)
    prompt, answer = roofline.PROMPT, roofline.ANSWER
    if cfg.sampler.slots < prompt + answer:  # the bundled model's
        prompt, answer = cfg.sampler.max_prompt / 2, cfg.sampler.max_new / 2
    slots = answers * (prompt + (1 + roofline.STEPS) * answer)
    rows = math.ceil(slots / batch.tokens / roofline.FILL)
    useful = roofline.useful_update(run.model, answers, prompt, answer, len(run.plans))
    return Work(-(-rows // batch.rows), useful)


def update_faults(program: hlo.Program, model: ModelConfig, tokens: int) -> list[str]:
    """Returns the arrays of all pairs of a row's positions that a program makes.

    Heads that no kernel takes, such as the bundled model's, are left out: in its short rows
    the specification computes them, which keeps the scores.
    """
    if model.head_dim not in choice.HEAD_SIZES:
        return []
    found = {
        array.dims
        for line in hlo.all_lines(program, program.entry)
        for array in line.arrays
        if array.dims.count(tokens) > 1
    }
    return [f"an array of scores: {list(dims)}" for dims in sorted(found)]


# ---- What does not fit ---------------------------------------------------------------


def smallest(cell: Cell) -> str:
    """Returns the least change with which the program fits: fewer rows, or a larger slice.

    What may fit the memory plan's arithmetic says, from the sizes that are known; then it
    is compiled, and what comes next only if that was wrong. "" where nothing was found.
    """
    for setting, other, rows in remedies(cell):
        row = tried(other, rows)
        if not row["refused"]:
            return f"{setting}: {row['gib']} of {row['gib_there']} GiB"
    return ""


@functools.cache
def tried(cell: Cell, rows: int) -> dict:
    """Returns a cell's figures with so many rows (0: the preset's), or why there are none.

    Cells of one model come upon the same ones.
    """
    run = programs.Run(cell.model, cell.topology, **({"rows": rows} if rows else {}))
    if estimate(cell, run) > run.limit:
        return {"refused": "by the plan's arithmetic"}
    return {"refused": ""} | made(cell, run)


def remedies(cell: Cell):
    """Yields (a change in words, the cell with it, sampler.rows or 0: as they are)."""
    if cell.program == "rollout":
        rows = programs.settings(cell.model)[0].sampler.rows
        for fewer in (rows // 2, rows // 4, rows // 8):
            yield f"sampler.rows={fewer}", cell, fewer
    for topology in SLICES[cell.topology.partition(":")[0]]:
        if chips.devices(topology) > chips.devices(cell.topology):
            yield topology, cell._replace(topology=topology), 0


def estimate(cell: Cell, run: programs.Run) -> float:
    """Returns about what a program and what lies beside it take of a device."""
    resident, model = sum(run.resident.values()), run.model
    if cell.program != "update":
        return sampling_bytes(run, resident)
    trained = run.resident["parameters"] / len(run.states)  # f32, of one network
    rows, tokens = run.settings.batch.rows // run.rows_on, run.settings.batch.tokens
    layer = tokens * (10 * model.d_model + 3 * max(model.ffw, 1)) * 2
    saved = tokens * model.layers * model.d_model * 2
    gathered = 2 * trained * run.rows_on / model.layers / 2
    return resident + 1.5 * trained + rows * (layer + saved) + gathered


def sampling_bytes(run: programs.Run, beside: float) -> float:
    """Returns the least that sampling takes of a device, and what is beside it."""
    cfg, model = run.cfg.sampler, run.model
    itemsize = jax.numpy.dtype(model.dtype).itemsize
    row = cfg.slots * model.layers * 2 * model.kv_heads * model.head_dim * itemsize
    shared_by = acting.folds(model, run.mesh)[-1] * run.mesh.shape["model"]
    weights = roofline.sizes_of(model)
    size = (weights.stored + (2 - model.tied) * weights.head) * itemsize / shared_by
    pages = 1 if cfg.pages else 1 / 2  # of a number that is not set half will do
    return beside + size + -(-cfg.rows // run.rows_on) * row * pages


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
    if new.get("refused") and size_of(needs) > size_of(room or needs):
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


def size_of(remedy: str) -> tuple[int, int]:
    """Returns what orders the changes of `smallest`: fewer rows, slices, and none found."""
    setting = remedy.partition(": ")[0]
    if not setting:
        return 2, 0
    name, _, rows = setting.partition("sampler.rows=")
    return (1, chips.devices(name)) if name else (0, -int(rows))


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
