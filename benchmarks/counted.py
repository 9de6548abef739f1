"""What an op's ways move and multiply on a chip that is not here, beside the least it needs.

    .venv-aot/bin/python -m benchmarks.kernels --counted v5p:2x2x1
    .venv-aot/bin/python -m benchmarks.kernels --counted h200:1

Each way is compiled for one device of the topology. Of XLA's operations the text is counted
(cost_analysis.py), of kernels what their grids fetch, write and multiply: roofline.KERNELS has
it, and the tiles that are visited are those of the very mask, rows and groups. `us` is what the
chip takes for that at the least (roofline.seconds); `least_us` is for every input read once,
every result written once, and the products of those pairs alone that are seen, no score computed
twice; `times_least` their ratio. `temporaries_mib` is the compiler's plan.

Not counted: what is no product (exponentials, noise, masks), launches, stalls, and what of a
chunk lies beyond a row's pages. On a GPU what blocks that run together share is taken to come
from memory once: a head that each tile of rows walks over, an expert's matrix, the keys of
256 queries' tiles and of the query heads that share them. Loops whose rounds are data count as
one round: so "any", which is made of such, has no row.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import cost_analysis, hlo, kernels, report, roofline, topologies
from benchmarks.kernels import Case, Scale
from benchmarks.shapes import RELEASED
from dllm_jax import sharding
from dllm_jax.pallas_kernels import tiles

MIB = 2**20
RAGGED = 16, 32  # pages and queries of a block of jax's ragged_paged_attention
NOTHING = roofline.Facts(*[0] * 16)
DENSE = "ranges and groups that are data would be a dense mask"
ALONE = "jax's takes one query of each row, and a window has four"
# (op, platform, end of its shape): what else there is, and why no figure is told of it.
WORDS = {
    ("attention", "tpu", "packed"): (
        "splash",
        "its masks are no data: known when traced",
    ),
    ("attention", "gpu", "packed"): ("cudnn", DENSE),
    ("paged_attention", "tpu", ""): ("paged_attention", ALONE),
    ("paged_attention", "gpu", ""): ("paged_attention", ALONE),
    ("cache_update", "tpu", ""): ("jax", "none of this layout but the scatter above"),
    ("cache_update", "gpu", ""): (
        "kernel",
        "none: the scatter above is what a run has",
    ),
}


# ---- What kernels do -----------------------------------------------------------------


def attention_tiles() -> dict[str, tuple[int, int, int]]:
    """Returns (queries, keys, of which are computed together) of the kernels' tiles."""
    from dllm_jax.pallas_kernels.gpu import attention as gpu
    from dllm_jax.pallas_kernels.tpu import attention as tpu

    ours = tpu.TILE_T, tpu.TILE_S, tpu.PART
    splash = *kernels.SPLASH, kernels.SPLASH[1]
    return {
        "forward_kernel": ours,
        "backward_kernel": ours,
        "attention": (gpu.RESIDENT, gpu.TILE, gpu.TILE),
        "attention_dq": (gpu.RESIDENT, gpu.TILE_BACKWARD, gpu.TILE_BACKWARD),
        "attention_dkv": (gpu.TILE_BACKWARD, gpu.RESIDENT, gpu.RESIDENT),
        "splash_mqa_fwd_no_residuals": splash,
        "splash_mqa_fwd_residuals": splash,
        "splash_mqa_dkv_no_residuals": splash,
    }


def visited(mask, t: int, s: int, part: int) -> tuple[float, float]:
    """Returns (keys of the tiles that a query visits, on average; the share computed).

    A tile is t queries by s keys; of its parts those are computed of which any is seen.
    """
    B, T = mask.q_end_BT.shape
    q_arrays, k_arrays = tiles.mask_arrays(mask, t, s)
    kinds_Bip = np.asarray(tiles.kinds(q_arrays, k_arrays, t, part)) > 0
    B, i, _ = kinds_Bip.shape
    visits = int(kinds_Bip.reshape(B, i, -1, s // part).any(3).sum())
    parts = int(kinds_Bip.sum())
    return visits * s * t / (B * T), parts * part / max(visits * s, 1)


def facts(case: Case, kernel: str) -> roofline.Facts:
    """Returns the Facts of a kernel on a case's inputs."""
    op, _, gradient = case.op.partition(", ")
    inputs = case.inputs[1:] if gradient else case.inputs
    return FACTS[op](kernel, *inputs)


def of_attention(kernel, q_BTNH, k_BSKH, v_BSKH, mask) -> roofline.Facts:
    (B, T, N, H), K = q_BTNH.shape, k_BSKH.shape[2]
    t, s, part = attention_tiles()[kernel]
    keys, computed = visited(mask, min(t, T), min(s, T), min(part, T))
    sizes = {"N": N, "K": K, "H": H, "itemsize": q_BTNH.dtype.itemsize}
    return NOTHING._replace(
        rows=B, width=T, keys=keys, computed=computed, tile=(t, s), **sizes
    )


def of_pages(kernel, q_BWNH, pages, table_BA, start_B, k_BQKH, v_BQKH):
    (B, Q, N, H), (O, K) = q_BWNH.shape, pages[0].shape[2:4]
    facts = NOTHING._replace(rows=B, windows=B, held=B, width=Q, N=N, K=K, H=H)
    facts = facts._replace(itemsize=q_BWNH.dtype.itemsize)
    if kernel != "ragged_paged_attention_kernel":
        return facts._replace(context=rounded(start_B, O))
    block, queries = RAGGED
    return facts._replace(
        context=rounded(start_B + Q, O),
        keys=rounded(start_B + Q, block * O),
        tile=(queries, block * O),
    )


def rounded(length_B, unit: int) -> float:
    """Returns the mean of lengths in whole units."""
    return float(np.mean(-(-np.asarray(length_B) // unit) * unit))


def of_update(kernel, pages, table_BA, start_B, keep_B, k_BWKH, v_BWKH):
    _, W, K, H = k_BWKH.shape
    kept = int(np.sum(keep_B))
    itemsize = k_BWKH.dtype.itemsize
    return NOTHING._replace(kept=kept, width=W, K=K, H=H, itemsize=itemsize)


def of_head(kernel, x_BUD, head_DV, *_):
    *rows, D = x_BUD.shape
    tile = 0, 0
    if kernel.endswith("_kernel"):  # TPU's
        from dllm_jax.pallas_kernels.tpu import token_logprob as tpu

        tile = tpu.TILE_R, tpu.TILE_V
    sizes = {"D": D, "V": head_DV.shape[1], "itemsize": x_BUD.dtype.itemsize}
    return NOTHING._replace(seats=math.prod(rows), tile=tile, **sizes)


def of_experts(kernel, x_RD, w_EDF, sizes_E):
    (R, D), (E, _, F) = x_RD.shape, w_EDF.shape
    sizes = {"D": D, "E": E, "X": 1, "I": F, "itemsize": x_RD.dtype.itemsize}
    return NOTHING._replace(windows=R, width=1, **sizes)


FACTS = {
    "attention": of_attention,
    "paged_attention": of_pages,
    "cache_update": of_update,
    "token_logprob": of_head,
    "token_draw": of_head,
    "grouped_matmul": of_experts,
}


def with_kernels(counted: cost_analysis.Counted, case: Case) -> cost_analysis.Counted:
    """Returns the figures with those of the kernels added, each by its own tiles."""
    total = cost_analysis.Counted(counted.flops, counted.read, counted.written)
    for name, times in counted.kernels.items():
        alone = cost_analysis.Counted(kernels={name: times})
        total.add(roofline.with_kernels(alone, facts(case, name)))
    return total


# ---- The least -----------------------------------------------------------------------


def pairs(mask) -> int:
    """Returns how many pairs of a query and a key are seen."""
    begin, end, group, pos, of_key = (
        np.asarray(x)
        for x in (mask.q_begin_BT, mask.q_end_BT, mask.q_group_BT)
        + (mask.k_pos_BS, mask.k_group_BS)
    )
    pos, of_key = pos[:, None], of_key[:, None]
    in_range = (pos >= begin[..., None]) & (pos < end[..., None])
    return int((in_range | (of_key == group[..., None])).sum())


def array_bytes(tree) -> int:
    """Returns the bytes of a tree's arrays."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def least(case: Case) -> cost_analysis.Counted:
    """Returns what an op needs: see the module."""
    op, _, gradient = case.op.partition(", ")
    inputs = case.inputs[1:] if gradient else case.inputs
    flops, read = 0.0, float(array_bytes(case.inputs))
    written = float(array_bytes(jax.eval_shape(case.ways["reference"], *case.inputs)))
    if op == "attention":  # scores and values; their four gradients
        q_BTNH, *_, mask = inputs
        heads = q_BTNH.shape[2] * q_BTNH.shape[3]
        flops = (12.0 if gradient else 4.0) * pairs(mask) * heads
    if op == "paged_attention":
        q_BWNH, pages, _, start_B, k_BQKH, _ = inputs
        of_position = array_bytes(k_BQKH) / math.prod(k_BQKH.shape[:2])
        held = int(np.sum(start_B))
        read += held * 2 * of_position - array_bytes(pages)
        seen = q_BWNH.shape[1] * (held + math.prod(k_BQKH.shape[:2]))
        flops = 4.0 * seen * math.prod(q_BWNH.shape[2:])
    if op == "cache_update":
        *_, keep_B, k_BWKH, v_BWKH = inputs
        read = written = array_bytes((k_BWKH, v_BWKH)) * float(np.mean(keep_B))
    if op in ("token_logprob", "token_draw"):
        x_BUD, head_DV, *_ = inputs
        of_logits = 2.0 * math.prod(x_BUD.shape[:2]) * math.prod(head_DV.shape)
        flops = of_logits * (3 if gradient else 1)
    if op == "grouped_matmul":
        _, w_EDF, sizes_E = inputs
        flops = 2.0 * int(np.sum(sizes_E)) * math.prod(w_EDF.shape[1:])
    return cost_analysis.Counted(flops=flops, read=read, written=written)


# ---- Rows ----------------------------------------------------------------------------


def compiled(f, inputs, donated: tuple[int, ...], topology: str):
    """Returns f, compiled for one device of a topology."""
    mesh = sharding.make_mesh(devices=[topologies.devices(topology)[0]])
    place = NamedSharding(mesh, PartitionSpec())

    def struct(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    with jax.set_mesh(mesh):
        run = jax.jit(f, donate_argnums=donated)
        return run.lower(*jax.tree.map(struct, inputs)).compile()


def row(f, inputs, case: Case, topology: str) -> dict:
    """Returns the figures of one way to compute a case, or what its compiler says."""
    try:
        made = compiled(f, inputs, case.donated, topology)
    except Exception as error:  # noqa: BLE001  (the others are worth it)
        return {"says": " ".join(f"{type(error).__name__}: {error}".split())[:120]}
    program = hlo.parsed(made.as_text())
    around = cost_analysis.count(program, program.entry)
    plan = made.memory_analysis().temp_size_in_bytes
    told = figures(with_kernels(around, case), around, least(case), topology)
    return told | {"temporaries_mib": figure(plan / MIB)}


def figures(counted, around, needed, topology: str) -> dict:
    """Returns the figures of a way; around: those outside of kernels; needed: the least.

    Where products stand in a fusion as no product, the text does not tell what they take:
    then there are no times.
    """
    seconds, least_seconds = (roofline.seconds(x, topology) for x in (counted, needed))
    told = {
        "read_mib": figure(counted.read / MIB),
        "written_mib": figure(counted.written / MIB),
        "around_kernels_mib": figure((around.read + around.written) / MIB),
        "gflop": figure(counted.flops / 1e9),
    }
    if counted.flops < 0.9 * needed.flops:
        return told | {"says": "its products are none in the text: not all is counted"}
    return told | {
        "us": figure(1e6 * seconds),
        "least_us": figure(1e6 * least_seconds),
        "times_least": figure(seconds / least_seconds),
    }


def figure(x: float) -> float:
    """Returns a figure with three digits, whole from a hundred on, to a thousandth."""
    return round(x) if x >= 100 else round(float(f"{x:.3g}"), 3)


def ragged_pages(case: Case):
    """Returns (jax's ragged_paged_attention, its inputs for the rows of `kernels.pages`).

    A window's keys are in its pages, and keys and values in one pool. It is causal inside of
    a window, where ours sees all of itself.
    """
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ragged

    q_BWNH, (k_LPOKH, _), table_BA, start_B, *_ = case.inputs
    (B, W, N, H), (_, P, O, K, _) = q_BWNH.shape, k_LPOKH.shape
    block, queries = RAGGED

    def attend(q_RNH, pool_POkH, table_BA, start_B):
        return ragged.ragged_paged_attention(
            q_RNH,
            pool_POkH,
            start_B + W,
            table_BA,
            jnp.arange(B + 1, dtype=jnp.int32) * W,
            jnp.full(1, B, jnp.int32),
            sm_scale=H**-0.5,
            num_kv_pages_per_block=block,
            num_queries_per_block=queries,
        )

    q_RNH = jax.ShapeDtypeStruct((B * W, N, H), q_BWNH.dtype)
    pool_POkH = jax.ShapeDtypeStruct((P, O, 2 * K, H), k_LPOKH.dtype)
    return attend, (q_RNH, pool_POkH, table_BA, start_B)


def rows(case: Case, platform: str, topology: str):
    """Yields (name, figures or words) of every way to compute a case."""
    for name, f in case.ways.items():
        if name != "any":
            yield name, row(f, case.inputs, case, topology)
    if (case.op, platform) == ("paged_attention", "tpu"):
        f, inputs = ragged_pages(case)
        yield "ragged_paged_attention", row(f, inputs, case, topology)
    for (op, where, end), (name, says) in WORDS.items():
        if (op, where) == (case.op, platform) and case.shape.endswith(end):
            yield name, {"says": says}


def tell(topology: str, only: tuple[str, ...] = ("",)) -> set[str]:
    """Prints the rows of every op that begins like one of `only`, in SDAR-8B's shapes.

    Returns the names of all ops. The topology is one that there is.
    """
    platform = "gpu" if topology.partition(":")[0] in topologies.HOPPERS else "tpu"
    there = set()

    def struct(key, shape, dtype, deviation=1.0):
        return jax.ShapeDtypeStruct(shape, dtype)

    model, dtype = RELEASED["sdar-8b"], jnp.dtype("bfloat16")
    scale = Scale(kernels.LARGE, model, dtype, platform, struct)
    for cases in kernels.CASES:
        for case in cases(scale):
            there.add(case.op)
            if not case.op.startswith(only):
                continue
            about = {"op": case.op, "shape": case.shape}
            for name, told in rows(case, platform, topology):
                device = f"{topology}, not run"
                report.tell("kernels", **about, by=name, **told, device=device)
    return there
