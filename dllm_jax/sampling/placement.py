"""Where a run samples: on which mesh, by whom, and with weights of which layout.

Each device has all weights (but for what `mesh.model` splits) if they fit beside what else
lies there; if not, the same devices share them out by tensor parallelism, as few of them as
it takes. The less devices share, the less they wait for each other at every layer. Where the
pages that rows can fill do not fit even then, there are fewer.
"""

import dataclasses
import math
from typing import NamedTuple

import jax

from dllm_jax import exits, memory, sharding
from dllm_jax.models import acting, hf, selfcheck, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision import look
from dllm_jax.sampling import answers, looking, policy
from dllm_jax.sampling.config import SamplerConfig

ROLLOUTS = ("auto", "replicated", "model")
REMEDY = (
    "lower sampler.rows or sampler.pages, or raise mesh.model, or set "
    "mesh.rollout='model'"
)
LEAST = 16  # bytes of a slot, besides its keys: a token, its step and its scores
SPARED = 1 / 20  # of a device, for what a program holds that is not compiled yet
OF_WEIGHTS = "raise mesh.model, or set mesh.rollout='model' or sampler.int8=True"


class Placement(NamedTuple):
    """Who samples, and what with."""

    answerer: answers.Batches | answers.Engine
    weights: transformer.Params  # acting.abstract: shapes with shardings
    # A line to print; "" where the mesh leaves no choice, and divides the rows.
    note: str


def place(
    *,
    model: ModelConfig,
    cfg: SamplerConfig,
    mesh,
    rollout: str = "auto",
    beside: int = 0,
    limit: int | None = None,
) -> Placement:
    """Returns where a run on `mesh` samples.

    rollout: "replicated": every device has all weights, but for what `mesh.model` splits;
    "model": as many neighbours along fsdp as the model's heads allow share them; "auto":
    all weights if they fit, or else the fewest neighbours that can hold them.
    beside: bytes of a device that others take meanwhile. limit: those it has, None where it
    does not say; then they fit.
    Raises ValueError where rollout is "model" and no neighbours can share, and for rows of
    which no device holds the least part.
    """
    if limit is not None:
        refuse_rows(cfg, mesh, limit)
    counts = acting.folds(model, mesh)
    if rollout == "model":
        refuse_to_fold(counts, model, mesh)
        counts = counts[-1:]
    elif rollout == "replicated":
        counts = counts[:1]
    why = ""
    for count in counts:
        warn_of_kernels(model, cfg, acting.folded(mesh, count))
        placement = placed(model, cfg, acting.folded(mesh, count))
        if limit is None or count == counts[-1]:
            break
        # All processes decide alike, though devices may differ by some bytes.
        if not sharding.anywhere(bytes_of(placement, beside, limit) > limit):
            why = why or f"; they fit into {gib(limit)} GiB beside the rest"
            break
        why = f"; all of them on each do not fit into {gib(limit)} GiB beside the rest"
    lines = [] if mesh.shape["fsdp"] == 1 else [note_of(placement, rollout) + why]
    if limit is not None:
        placement, words = within(placement, model, cfg, beside, limit)
        lines += words
    lines += rounded(acting.folded(mesh, count), cfg.rows)
    return placement._replace(note="; ".join(lines))


def loaded(
    path, *, model: ModelConfig, cfg: SamplerConfig, mesh, rollout: str, say, beside=0
):
    """Returns (an answerer, the weights of the checkpoint at `path`, laid out for it).

    say: prints a line; beside: as `place` takes it. Raises ValueError as `place` and
    hf.load do, and where a device has no room for it.
    """
    limit = memory.device_bytes()
    placement = place(
        model=model, cfg=cfg, mesh=mesh, rollout=rollout, beside=beside, limit=limit
    )
    check(placement, beside, limit)
    if placement.note:
        say(placement.note)
    return filled(path, placement, model=model, mesh=mesh)


def filled(path, placement: Placement, *, model: ModelConfig, mesh):
    """Returns `loaded` of a Placement that `place` made. mesh: what it was made for."""
    heads = ("lm", "vision") if model.soft else ("lm",)
    _, params = hf.load(path, mesh=mesh, dtype=model.dtype, heads=heads)
    answerer, made_of = placement.answerer, looking.parts(params)
    tower = made_of.pop("vision", None)
    params = acting.taken(params, placement.weights)
    if not model.soft:
        return answerer, params
    answerer = looking.Looking(answerer, look.Eyes(tower, model, mesh))
    return answerer, params | {looking.LOOK: made_of}


def warn_of_kernels(model: ModelConfig, cfg: SamplerConfig, mesh) -> None:
    """Warns of kernels that are wrong here, as `selfcheck.check`, which then are not used.

    Its widths are those of a device of the mesh, which may be folded; a judge's model has
    others than the policy. Not for a mesh of devices that are not there.
    """
    if mesh.devices.flat[0] not in jax.devices():
        return
    with jax.set_mesh(mesh):
        wide = selfcheck.widths(model, cfg.block, cfg.page_slots)
        folder = jax.config.jax_compilation_cache_dir or ""
        for line in selfcheck.check(model.kernels, wide, folder):
            exits.warn(line.removeprefix("warning: "))


def placed(model: ModelConfig, cfg: SamplerConfig, mesh) -> Placement:
    """Returns the Placement on exactly this mesh."""
    answerer = answers.answerer(model=model, cfg=cfg, mesh=mesh)
    return Placement(answerer, weights(model, cfg, mesh), "")


def within(
    placement: Placement,
    model: ModelConfig,
    cfg: SamplerConfig,
    beside: int,
    limit: int,
) -> tuple[Placement, list[str]]:
    """Returns (a placement with as many pages as fit, what to say of it).

    Half of those that rows can fill, or more: rows get pages as they go, and few answers are
    the longest that there may be. With fewer, or where the number is set, it is left as it
    is, for `check` to refuse.
    """
    made, chosen = placement.answerer, placement
    if cfg.pages or not paged(made):
        return placement, []
    enough = pages = made.scheduler.pages_per_shard
    pool = memory.array_bytes(made.lower(placement.weights)[1].s.cache)
    while True:
        sizes = sizes_of(chosen, beside, limit)
        over = sum(sizes.values()) - limit
        if "activations" not in sizes:
            over += SPARED * limit
        if not sharding.anywhere(over > 0):
            break
        dropped = min(max(over, 0) * enough / pool, enough)
        # A compiler that refuses does not say by how much: half of them are tried.
        if pages == enough and sharding.anywhere(over == math.inf):
            dropped = enough // 2 - 1
        pages -= sharding.largest(math.ceil(dropped) + 1)
        if pages < max(enough / 2, made.scheduler.pages_per_row):
            return placement, []
        few = dataclasses.replace(cfg, pages=pages)
        chosen = placed(model, few, made.mesh)
    if pages == enough:
        return placement, []
    words = f"sampler.pages={pages}, of {enough} that rows could fill: more do not fit"
    return chosen, [f"{words} into {gib(limit)} GiB beside the rest"]


def paged(answerer) -> bool:
    """Returns whether rows get their pages as they go, so that there may be fewer."""
    return isinstance(answerer, answers.Engine) and answerer.scheduler.policy.final


def another(answerer, model: ModelConfig, cfg: SamplerConfig):
    """Returns who samples by another sampler in the place of an answerer that was `place`d.

    Where that one has not all pages that its rows could fill, this one has no more positions.
    """
    if isinstance(answerer, looking.Looking):
        return looking.Looking(another(answerer.answerer, model, cfg), answerer.eyes)
    warn_of_kernels(model, cfg, answerer.mesh)
    made = answers.answerer(model=model, cfg=cfg, mesh=answerer.mesh)
    positions = answerer.cfg.pages * answerer.cfg.page_slots
    if cfg.pages or not paged(made) or not positions:
        return made
    pages = max(positions // cfg.page_slots, made.scheduler.pages_per_row)
    few = dataclasses.replace(cfg, pages=min(pages, made.scheduler.pages_per_shard))
    return answers.answerer(model=model, cfg=few, mesh=answerer.mesh)


def others(answerer, model: ModelConfig, samplers: dict[str, SamplerConfig]) -> dict:
    """Returns `another` of each sampler of eval.samplers, by its name.

    Raises ValueError, naming it, for the first that does not suit the model.
    """
    made = {}
    for name, cfg in samplers.items():
        own = dataclasses.replace(model, block=cfg.block)
        try:
            made[name] = another(answerer, own, cfg)
        except ValueError as error:
            if not exits.refuses(error):
                raise
            where = f"eval.samplers: {name}: " if name else ""
            raise ValueError(f"{where}{error}") from None
    return made


def weights(model: ModelConfig, cfg: SamplerConfig, mesh) -> transformer.Params:
    """Returns `acting.abstract` for a sampler on exactly this mesh."""
    whole = policy.POLICIES[policy.name_of(cfg, model.attention)].canvas == "step"
    width = cfg.max_prompt + cfg.max_new if whole else cfg.window
    slots = per_shard(mesh, cfg.rows) * width
    return acting.abstract(model, mesh, in_int8=cfg.int8, slots=slots)


def bytes_of(placement: Placement, beside: int, limit: int) -> float:
    """Returns the bytes of a device that are taken while it samples: see `sizes_of`."""
    return sum(sizes_of(placement, beside, limit).values())


def sizes_of(placement: Placement, beside: int, limit: int) -> dict[str, float]:
    """Returns the bytes of a device that are taken while it samples, by what they hold.

    Nothing is compiled where weights, rows and pages alone exceed `limit`. What the compiler
    refuses takes more than any device has.
    """
    sizes = {"what lies beside": beside}
    sizes["weights"] = memory.array_bytes(placement.weights)
    if sum(sizes.values()) > limit:
        return sizes
    lowered, kept = placement.answerer.lower(placement.weights)
    sizes["rows and pages"] = memory.array_bytes(kept)
    if sum(sizes.values()) > limit:
        return sizes
    try:
        return sizes | {"activations": memory.program_bytes(lowered.compile())}
    except jax.errors.JaxRuntimeError as error:
        if not exits.exhausted(error):
            raise
        return sizes | {"activations": math.inf}


def check(placement: Placement, beside: int, limit: int | None):
    """Raises ValueError, with the keys to change, where sampling exceeds `limit`.

    limit: bytes of a device, or None where it does not say. What samples finds its program
    compiled.
    """
    if limit is None:
        return
    sizes = sizes_of(placement, beside, limit)
    need = sum(sizes.values())
    if not sharding.anywhere(need > limit):  # all processes decide alike
        return
    parts = ", ".join(f"{name} {gib(size)}" for name, size in sizes.items() if size)
    words = f"needs {gib(need)} GiB of a device's {gib(limit)}, {gib(need - limit)} too many"
    if need == math.inf:
        words = f"does not fit a device's {gib(limit)} GiB"
    if need <= limit:
        words = f"does not fit a device of another process, but {gib(limit)} GiB here"
    keys = OF_WEIGHTS if beside + sizes["weights"] > limit else REMEDY
    raise ValueError(f"sampling {words} ({parts}); {keys}")


def refuse_rows(cfg: SamplerConfig, mesh, limit: int):
    """Raises ValueError for rows whose tokens alone exceed a device, before any is made.

    To count their pages one by one would take the host's memory first.
    """
    count = per_shard(mesh, cfg.rows)
    need = LEAST * count * cfg.slots
    if sharding.anywhere(need > limit):
        raise ValueError(
            f"sampler.rows={cfg.rows}: tokens and scores of {count} rows of {cfg.slots} "
            f"positions alone take {gib(need)} GiB of a device's {gib(limit)}; lower "
            "sampler.rows"
        )


def refuse_to_fold(counts: list[int], model: ModelConfig, mesh):
    """Raises ValueError where no neighbours along fsdp can share the weights."""
    if mesh.shape["fsdp"] == 1:
        raise ValueError(
            "mesh.rollout='model': mesh.fsdp is 1, so no device has a neighbour to share "
            "weights with; set 'auto'"
        )
    if len(counts) == 1:
        raise ValueError(
            f"mesh.rollout='model': no number of neighbours among mesh.fsdp="
            f"{mesh.shape['fsdp']}, times mesh.model={mesh.shape['model']}, divides the "
            f"model's {model.heads} heads, {model.kv_heads} key heads and inner widths; "
            "set 'replicated' or 'auto'"
        )


def note_of(placement: Placement, rollout: str) -> str:
    """Returns the line that says where a run samples."""
    shape = placement.answerer.mesh.shape
    share = gib(memory.array_bytes(placement.weights))
    copies = sharding.row_shards(placement.answerer.mesh)
    return (
        f"mesh.rollout={rollout!r}: sampling has {copies} x all weights, {share} GiB of "
        f"them on each device (data, fsdp, model: {tuple(shape.values())})"
    )


def rounded(mesh, rows: int) -> list[str]:
    """Returns what to say of rows that the devices do not divide, if they do not."""
    shards, each = sharding.row_shards(mesh), per_shard(mesh, rows)
    if each * shards == rows:
        return []
    return [f"sampler.rows={rows} become {each * shards}, {each} on each of {shards}"]


def per_shard(mesh, rows: int) -> int:
    """Returns the rows of each of the mesh's shards of them."""
    return -(-rows // sharding.row_shards(mesh))


def gib(size: float) -> str:
    """Returns bytes in GiB, to print."""
    return f"{size / memory.GIB:.2f}"
