"""What a program of a run could do on its chips: bytes, FLOPs, tokens/s, MFU, and faults.

A program is compiled as `python -m dllm_jax.train` would (programs.py), its text counted
(cost_analysis.py) and set against what the chip can do (roofline.py). Of a rollout a forward
of blocks is told, and one of prompts; of an update the whole of it. Faults are what a text
must not hold: weights gathered in the loop over forwards, a pool of pages copied, an array of
scores.
"""

import bisect
import math
from typing import NamedTuple

import jax

from benchmarks import (
    chips,
    collectives,
    cost_analysis,
    hlo,
    programs,
    roofline,
    topologies,
)
from dllm_jax import exits, memory
from dllm_jax.memory import GIB
from dllm_jax.models import cache, selfcheck
from dllm_jax.models.config import ModelConfig
from dllm_jax.pallas_kernels import choice, head
from dllm_jax.sampling import forwards, placement

MIB = 2**20


class Cell(NamedTuple):
    """A program of a model on a topology."""

    model: str
    topology: str
    program: str  # "rollout" or "update" of a run, or "answers": a rollout by itself
    rows: int = 0  # sampler.rows; 0: the preset's
    int8: bool = False  # sampler.int8

    @property
    def name(self) -> str:
        """What benchmarks/budget.json calls it."""
        rows = f" rows={self.rows}" if self.rows else ""
        more = " int8" if self.int8 else ""
        return f"{self.model} {self.topology} {self.program}{rows}{more}"

    def run(self) -> programs.Run:
        """Returns the run that it is a program of."""
        sampler = {"rows": self.rows} if self.rows else {}
        sampler |= {"int8": True} if self.int8 else {}
        return programs.Run(self.model, self.topology, **sampler)

    def trained(self, run: programs.Run) -> int:
        """Returns the bytes of a device that what its run trains takes, if it trains."""
        return 0 if self.program == "answers" else sum(run.resident.values())


def figures(cell: Cell, run: programs.Run) -> dict:
    """Returns the figures of a program, which it compiles, or why it does not fit.

    run: the cell's.
    """
    try:
        if cell.program == "update":
            return of_update(cell, run)
        return of_rollout(cell, run)
    except jax.errors.JaxRuntimeError as error:
        if not exits.exhausted(error):
            raise
        return {"refused": " ".join(str(error).split())[:160]}


def held(cell: Cell, run: programs.Run, compiled, beside: int) -> dict:
    """Returns what a program holds, and whether it fits; beside: bytes of what else is there."""
    peak = topologies.peak_bytes(compiled) + beside
    row = {"gib": round(peak / GIB, 2), "gib_there": round(run.limit / GIB, 2)}
    if peak > run.limit:
        row["refused"] = (
            f"{cell.program} takes {peak / GIB:.1f} GiB of a device's "
            f"{run.limit / GIB:.1f}"
        )
    return row


def told(counted: cost_analysis.Counted, mesh) -> dict:
    """Returns counted figures as the file has them."""
    by_axis = {}
    for (kind, group), size in counted.sent.items():
        name = f"{collectives.axes_of(group, mesh)} {kind}"
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


# ---- A rollout -----------------------------------------------------------------------


class Loop(NamedTuple):
    """The engine's loop over forwards, compiled."""

    program: hlo.Program
    body: str  # the computation of a forward
    place: placement.Placement
    run: programs.Run

    @property
    def mesh(self):
        """The mesh on which it samples."""
        return self.place.answerer.mesh

    @property
    def rows(self) -> int:
        """Rows of a shard."""
        return self.place.answerer.scheduler.rows_per_shard

    def facts(self, **sizes) -> roofline.Facts:
        """Returns the Facts of a forward; K: the key heads that pages have."""
        model = self.run.model
        own = roofline.facts(model, self.mesh.shape["model"], **sizes)
        with jax.set_mesh(self.mesh):
            held = cache.held_heads(model)
        return own._replace(K=own.K * held // model.kv_heads)

    def counted(self, facts: roofline.Facts, choose) -> cost_analysis.Counted:
        """Returns what a forward does; choose: as of cost_analysis.count."""
        found = cost_analysis.count(
            self.program, self.body, choose, self.mesh.size, experts=facts.E
        )
        return roofline.with_kernels(found, facts)


def of_rollout(cell: Cell, run: programs.Run) -> dict:
    """Returns the figures of the engine's loop: a forward of blocks, and one of prompts."""
    place = run.alone if cell.program == "answers" else run.sampling
    compiled = run.rollout(place)
    row = held(cell, run, compiled, cell.trained(run))
    if "refused" in row:
        return row
    program = hlo.parsed(compiled.as_text())
    (body,) = hlo.loops(program, program.entry)
    loop = Loop(program, body, place, run)
    counted, facts = of_blocks(loop)
    seconds = roofline.seconds(counted, cell.topology)
    share, rows = loop.mesh.shape["model"], loop.rows
    size = 1 if cell.int8 else facts.itemsize
    best = roofline.ideal_forward(run.model, rows, facts, share, size)
    tokens = rows * run.cfg.sampler.block / roofline.STEPS / share
    row |= told(counted, loop.mesh)
    row |= {
        "rows_per_device": significant(rows / share),
        "weights_shared_by": share,
        "weights_gib": significant(memory.array_bytes(place.weights) / GIB),
        "tokens_per_second": significant(tokens / seconds),
        "percent_of_ideal": significant(
            100 * roofline.seconds(best, cell.topology) / seconds
        ),
        "faults": rollout_faults(loop),
    }
    scheduler = place.answerer.scheduler
    if scheduler.overbooked:
        enough = rows * scheduler.pages_per_row
        row["percent_of_pages"] = significant(100 * scheduler.pages_per_shard / enough)
    if run.cfg.sampler.has_chunks:
        row["prompt"] = of_prompts(loop, cell.topology)
    return row


def of_blocks(loop: Loop) -> tuple[cost_analysis.Counted, roofline.Facts]:
    """Returns what a forward of blocks does for all rows of a shard, and its Facts.

    Of its programs it is the smallest that has room for the windows of that many rows.
    """
    run, rows = loop.run, loop.rows
    cfg, due = run.cfg.sampler, rows * (1 + 1 / roofline.STEPS)
    sizes = forwards.window_counts(loop.mesh.devices.flat[0].platform, cfg, rows)
    enough = next(i for i, size in enumerate(sizes) if size >= due)
    facts = loop.facts(
        rows=due,
        windows=sizes[enough],
        held=rows
        if cache.pairs_fit(run.model.heads, run.model.kv_heads, cfg.block)
        else due,
        width=cfg.block,
        seats=rows * cfg.block,
        context=min(roofline.CONTEXT, cfg.slots // 2),
        keys=0.0,
    )
    programs_there = len(sizes) + cfg.has_chunks * len(cfg.chunk_counts(rows))
    chosen = []

    def choose(depth: int, branches: int) -> int | None:
        if not depth and branches == programs_there:
            chosen.append(enough)
            return enough
        return None if depth else 0  # the other says whether rows denoise: they do

    counted = loop.counted(facts, choose)
    if programs_there > 1 and not chosen:
        raise RuntimeError(f"the loop has no choice of {programs_there} programs")
    return counted, facts


def of_prompts(loop: Loop, topology: str) -> dict:
    """Returns the figures of a forward of the most prompt chunks of a shard."""
    cfg = loop.run.cfg.sampler
    many = cfg.chunk_counts(loop.rows)[-1]
    facts = loop.facts(
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

    counted = loop.counted(facts, choose)
    tokens = many * cfg.chunk / loop.mesh.shape["model"]
    rate = tokens / roofline.seconds(counted, topology)
    return told(counted, loop.mesh) | {"tokens_per_second": significant(rate)}


# ---- An update -----------------------------------------------------------------------


def of_update(cell: Cell, run: programs.Run) -> dict:
    """Returns the figures of an update: its loops over microbatches and what surrounds them."""
    compiled, remat = run.update()
    row = held(cell, run, compiled, 0)
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

    whole = cost_analysis.count(program, program.entry, choose, run.mesh.size)
    for body in hlo.loops(program, program.entry):
        one = cost_analysis.count(program, body, choose, run.mesh.size)
        whole.add(one, work.microbatches - 1)
    counted = roofline.with_kernels(whole, facts)
    seconds = roofline.seconds(counted, cell.topology)
    useful = work.useful / run.mesh.size
    busy = seconds * chips.chip(cell.topology).flops
    row |= told(counted, run.mesh)
    return row | {
        "remat": remat,
        "microbatches": work.microbatches,
        "rows_per_device": facts.rows,
        "seconds": significant(seconds),
        "mfu_bound": significant(100 * useful / counted.flops),
        "mfu_with_waits": significant(100 * useful / busy),
        "faults": update_faults(program, run.model, batch.tokens),
    }


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


# ---- Faults --------------------------------------------------------------------------


def rollout_faults(loop: Loop) -> list[str]:
    """Returns what the loop over forwards must not do, and does."""
    cfg, model, answerer = loop.run.cfg.sampler, loop.run.model, loop.place.answerer
    heads = selfcheck.part_of(model, loop.mesh.shape["model"])["kv_heads"]
    pool = answerer.page_count // answerer.shards
    pages = (model.layers, pool, cfg.page_slots)  # of any number of heads
    faults = []
    for line in hlo.all_lines(loop.program, loop.body):
        dims = [array.dims[:3] for array in line.arrays if len(array.dims) == 5]
        if line.opcode.startswith("all-gather") and line.bytes > MIB:
            faults.append(f"{line.opcode} of {line.bytes / MIB:.0f} MiB: {line.name}")
        if line.opcode.startswith("copy") and pages in dims:
            faults.append(f"the pool of pages is copied: {line.name}")
    return faults + scores_of_tables(loop, heads)


def scores_of_tables(loop: Loop, heads: int) -> list[str]:
    """Returns the arrays with a number for each head, query and key of rows' tables.

    They are told from masks, which have one for all heads, by being larger than that of the
    most windows by half at least; and from keys by a position's row of heads.
    heads: of the keys of a device.
    """
    cfg, model = loop.run.cfg.sampler, loop.run.model
    prompt = -(-cfg.max_prompt // cfg.page_slots)
    queries = {  # at most, by the pages of a table: of rows, and of prompts
        loop.place.answerer.scheduler.pages_per_row: 2 * loop.rows * cfg.block,
        prompt: cfg.chunk_counts(loop.rows)[-1] * cfg.chunk,
    }
    least = {pages * cfg.page_slots: 1.5 * many for pages, many in queries.items()}
    keys = {n * model.head_dim for n in (1, 2, heads, 2 * heads)}

    def of_pairs(dims: tuple[int, ...]) -> bool:
        if not dims or dims[-1] not in least:
            return False
        return math.prod(dims[:-1]) >= least[dims[-1]] and dims[-2] not in keys

    return scores(loop.program, loop.body, model, of_pairs)


def update_faults(program: hlo.Program, model: ModelConfig, tokens: int) -> list[str]:
    """Returns the arrays of all pairs of a row's positions that a program makes."""
    return scores(program, program.entry, model, lambda dims: dims.count(tokens) > 1)


def scores(program: hlo.Program, name: str, model: ModelConfig, of_pairs) -> list[str]:
    """Returns a line for each shape that `of_pairs` tells for an array of scores.

    Heads that no kernel takes, such as the bundled model's, are left out: in its short rows
    the specification computes them, which keeps the scores.
    """
    if model.head_dim not in choice.HEAD_SIZES:
        return []
    found = {
        array.dims
        for line in hlo.all_lines(program, name)
        for array in line.arrays
        if of_pairs(array.dims)
    }
    return [f"an array of scores: {list(dims)}" for dims in sorted(found)]
