"""Which programs of a run fit the memory of their chips, and what would make room.

The least that a program takes follows from shapes, before anything is compiled: what is
trained, the weights that sample and the pages of their keys. Where it does not fit, fewer rows
and larger slices of the same chip are tried, in this order, the likely ones compiled.
"""

import functools

import jax

from benchmarks import chips, performance_model, programs, roofline
from benchmarks.performance_model import Cell
from dllm_jax.memory import GIB
from dllm_jax.models import acting

SLICES = {  # by size: where a refused cell looks for room
    "h200": ("h200:1", "h200:2", "h200:4", "h200:8", "h200:2x8", "h200:4x8"),
    "v5p": ("v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4", "v5p:2x4x4", "v5p:4x4x4"),
    "v6e": ("v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:8x8", "v6e:8x16", "v6e:16x16"),
}
LEAST = {  # by program, what `least_bytes` are of
    "answers": "weights and pages take",
    "rollout": "what is trained, the weights that sample and their pages take",
    "update": "what is trained takes",
}


def refusal(cell: Cell, run: programs.Run) -> str:
    """Returns why a program cannot fit whatever is compiled; "" where it may."""
    needs = least_bytes(cell, run)
    if needs <= run.limit:
        return ""
    there = f"{needs / GIB:.1f} GiB of a device's {run.limit / GIB:.1f}"
    return f"{LEAST[cell.program]} {there}"


def smallest(cell: Cell) -> str:
    """Returns the least change with which the program fits: fewer rows, or a larger slice.

    What may fit the memory plan's arithmetic says, from the sizes that are known; then it
    is compiled, and what comes next only if that was wrong. "" where nothing was found.
    """
    for setting, other in remedies(cell):
        row = tried(other)
        if not row["refused"]:
            return f"{setting}: {row['gib']} of {row['gib_there']} GiB"
    return ""


def remedies(cell: Cell):
    """Yields (a change in words, the cell with it)."""
    if cell.program == "rollout":
        rows = programs.settings(cell.model)[0].sampler.rows
        for fewer in (rows // 2, rows // 4, rows // 8):
            yield f"sampler.rows={fewer}", cell._replace(rows=fewer)
    for topology in SLICES[cell.topology.partition(":")[0]]:
        if chips.devices(topology) > chips.devices(cell.topology):
            yield topology, cell._replace(topology=topology)


def size_of(remedy: str) -> tuple[int, int]:
    """Returns what orders the changes of `smallest`: fewer rows, slices, and none found."""
    setting = remedy.partition(": ")[0]
    if not setting:
        return 2, 0
    name, _, rows = setting.partition("sampler.rows=")
    return (1, chips.devices(name)) if name else (0, -int(rows))


@functools.cache
def tried(cell: Cell) -> dict:
    """Returns a cell's figures, or why there are none.

    Cells of one model come upon the same ones.
    """
    run = cell.run()
    if likely_bytes(cell, run) > run.limit:
        return {"refused": "by the plan's arithmetic"}
    return {"refused": ""} | performance_model.figures(cell, run)


def likely_bytes(cell: Cell, run: programs.Run) -> float:
    """Returns about what a program and what lies beside it take of a device."""
    least, model = least_bytes(cell, run), run.model
    if cell.program != "update":
        return least
    trained = run.resident["parameters"] / len(run.states)  # f32, of one network
    rows, tokens = run.settings.batch.rows // run.rows_on, run.settings.batch.tokens
    layer = tokens * (10 * model.d_model + 3 * max(model.ffw, 1)) * 2
    saved = tokens * model.layers * model.d_model * 2
    gathered = 2 * trained * run.rows_on / model.layers / 2
    return least + 1.5 * trained + rows * (layer + saved) + gathered


def least_bytes(cell: Cell, run: programs.Run) -> float:
    """Returns the least that a program and what lies beside it take of a device."""
    trained = cell.trained(run)
    if cell.program == "update":
        return trained
    cfg, model = run.cfg.sampler, run.model
    itemsize = jax.numpy.dtype(model.dtype).itemsize
    row = cfg.slots * model.layers * 2 * model.kv_heads * model.head_dim * itemsize
    shared_by = acting.folds(model, run.mesh)[-1] * run.mesh.shape["model"]
    weights = roofline.sizes_of(model)
    size = (weights.stored + (2 - model.tied) * weights.head) * itemsize / shared_by
    pages = 1 if cfg.pages else 1 / 2  # of a number that is not set half will do
    return trained + size + -(-cfg.rows // run.rows_on) * row * pages
