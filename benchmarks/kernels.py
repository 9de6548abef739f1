"""Every kernel against its specification and, where there is one, against the library's.

    python -m benchmarks.kernels [--only=attention ...]
    .venv-aot/bin/python -m benchmarks.kernels --counted v5p:2x2x1    # a chip that is not here

An op's answers are compared with `reference.py`'s before anything is timed; what differs
is told and not timed. The library's are jax.nn.dot_product_attention (XLA's, and cuDNN on
GPU) and splash attention on TPU, all causal, log_softmax and categorical of whole logits,
a sort for top-p, jax.lax.ragged_dot, and on GPU jax's kernel of it, `mgpu`. Forward, and where
it trains forward with backward. A platform without kernels, such as CPU, has rows for the
specification and the library alone. On GPU attention is timed a second time without the turns of its two warpgroups, `out_of_turn`
(gpu/attention.py, IN_TURN). Shapes are those of SDAR-1.7B, and of SDAR-8B where they are
counted: benchmarks/counted.py says what.
"""

import argparse
import functools
import importlib
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.shapes import RELEASED
from dllm_jax import command_line, pallas_kernels
from dllm_jax.models import layer, mask
from dllm_jax.pallas_kernels import attend as attend_ops
from dllm_jax.pallas_kernels import choice, reference

SMALL = {"tokens": 512, "rows": 4, "vocab": 4096, "context": 256, "experts": 8}
LARGE = {
    "tokens": 4096,
    "rows": 128,
    "vocab": RELEASED["sdar-1.7b"].vocab,
    "context": 1024,
    "experts": RELEASED["sdar-30b-a3b"].experts,
}
# Queries and keys of a tile: four times and eight times its default's.
SPLASH = 512, 1024


class Scale(NamedTuple):
    """What the inputs are made of."""

    sizes: dict[str, int]  # SMALL's or LARGE's
    model: Any  # whose heads and widths they have
    dtype: Any
    platform: str  # whose kernels and libraries compute
    normal: Any  # (key, shape, dtype, deviation=1) -> an array


class Case(NamedTuple):
    """An op on its inputs, and ways to compute it."""

    op: str
    shape: str  # in words
    inputs: tuple
    ways: dict[str, Any]  # name: function of the inputs
    # Inputs that a program gives away: the first, which its result takes the place of.
    donated: tuple[int, ...] = ()


def normal(key, shape, dtype, deviation=1.0):
    """Returns random numbers."""
    return jax.random.normal(key, shape, dtype) * jnp.asarray(deviation, dtype)


def masks(T: int):
    """Returns two masks of a row: causal, and four packed trajectories."""
    slot = np.arange(T)
    begin = slot // (T // 4) * (T // 4)  # half of each is clean, half noised blocks
    clean = slot - begin < T // 8
    inside = np.where(clean, slot - begin, slot - begin - T // 8)
    end = begin + inside // 4 * 4 + np.where(clean, 4, 0)  # a clean block sees itself
    group = np.where(clean, -1, slot // 4 * 4)
    arrays = (jnp.asarray(x[None], jnp.int32) for x in (begin, end, group))
    return {
        "causal": mask.causal(jnp.asarray(slot[None], jnp.int32)),
        "packed": mask.packed(*arrays),
    }


def causal_libraries(platform: str):
    """Returns causal attention by what the platform's libraries have."""
    names = {"tpu": ("xla",), "gpu": ("xla", "cudnn")}.get(platform, ("xla",))
    ways = {name: functools.partial(sdpa, implementation=name) for name in names}
    return ways | ({"splash": splash_attention} if platform == "tpu" else {})


def sdpa(q_BTNH, k_BTKH, v_BTKH, mask, implementation: str):
    """Returns jax.nn.dot_product_attention; causal, whatever the mask."""
    del mask
    return jax.nn.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, is_causal=True, implementation=implementation
    )


def splash_attention(q_BTNH, k_BTKH, v_BTKH, mask):
    """Returns splash attention; causal, whatever the mask."""
    del mask
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    (B, T, N, H), K = q_BTNH.shape, k_BTKH.shape[2]
    t, s = (min(size, T) for size in SPLASH)
    sizes = {
        "block_q": t,
        "block_kv": s,
        "block_kv_compute": t,
        "block_q_dkv": t,
        "block_kv_dkv": s,
        "block_kv_dkv_compute": t,
    }
    run = splash.make_splash_mqa_single_device(
        splash.MultiHeadMask([splash.CausalMask((T, T))] * (N // K)),
        block_sizes=splash.BlockSizes(**sizes, use_fused_bwd_kernel=True),
    )
    q_BKGTH = jnp.moveaxis(q_BTNH.reshape(B, T, K, N // K, H), 1, 3) * H**-0.5
    k_BKTH, v_BKTH = (jnp.moveaxis(x_BTKH, 1, 2) for x_BTKH in (k_BTKH, v_BTKH))
    out_BKGTH = jax.vmap(jax.vmap(run))(q_BKGTH, k_BKTH, v_BKTH)
    return jnp.moveaxis(out_BKGTH, 3, 1).reshape(q_BTNH.shape)


def traced_with(run, module: str, name: str, value):
    """Returns a function like `run`, traced while a GPU module's constant has that value."""

    def changed(*inputs):
        where = importlib.import_module(f"dllm_jax.pallas_kernels.gpu.{module}")
        with mock.patch.object(where, name, value):
            return run(*inputs)

    return changed


def out_of_turn(run):
    """Returns a function like `run` in whose program no warpgroup awaits its turn."""
    return traced_with(run, "attention", "IN_TURN", False)


def attentions(scale: Scale):
    """Yields attention of a row by each mask, and its gradient."""
    T, model = scale.sizes["tokens"], scale.model
    N, K, H = model.heads, model.kv_heads, model.head_dim
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (1, T, N, H), (1, T, K, H), (1, T, K, H), (1, T, N, H)
    *inputs, dout = (
        scale.normal(k, s, scale.dtype) for k, s in zip(keys, shapes, strict=True)
    )
    for name, seen in masks(T).items():
        ways = implementations("attention", pallas_kernels.attention, scale.platform)
        if jax.default_backend() == "gpu":
            ways["out_of_turn"] = out_of_turn(ways["kernel"])
        if name == "causal":
            ways |= causal_libraries(scale.platform)
        shape = f"{T} tokens, {name}"
        yield Case("attention", shape, (*inputs, seen), ways)
        yield Case(
            "attention, backward", shape, (dout, *inputs, seen), gradients(ways, 3)
        )


def pages(scale: Scale):
    """Yields the two ops of the cache: windows of 4 over pages of 32."""
    size, model = scale.sizes, scale.model
    N, K, H = model.heads, model.kv_heads, model.head_dim
    B, O, A = size["rows"], 32, size["context"] // 32 + 1
    keys = jax.random.split(jax.random.key(1), 5)
    random = functools.partial(scale.normal, dtype=scale.dtype)
    pool = tuple(random(k, (2, B * A, O, K, H)) for k in keys[:2])
    table = jnp.arange(B * A, dtype=jnp.int32).reshape(B, A)
    start = jnp.asarray(np.random.default_rng(0).integers(8, A * O // 4, B) * 4)
    start = jnp.minimum(start, (A - 1) * O).astype(jnp.int32)
    q = random(keys[2], (B, 4, N, H))
    k, v = (random(key, (B, 4, K, H)) for key in keys[3:])
    shape = f"{B} rows, {size['context']} positions"

    def attend(q, pool, table, start, k, v, implementation):
        return pallas_kernels.paged_attention(
            q, pool, 1, table, start, k, v, implementation=implementation
        )

    def update(pool, table, start, keep, k, v, implementation):
        return pallas_kernels.cache_update(
            pool, 1, table, start, keep, k, v, implementation=implementation
        )

    ways = implementations("paged_attention", attend, scale.platform)
    yield Case("paged_attention", shape, (q, pool, table, start, k, v), ways)
    ways = implementations("cache_update", update, scale.platform)
    inputs = pool, table, start, jnp.ones(B, bool), k, v
    yield Case("cache_update", shape, inputs, ways, donated=(0,))


def chunks(scale: Scale):
    """Yields attention of prompts' chunks, of 64 positions, over pages of 32.

    `gathered` is the kernel of `attention` over the pages, gathered first.
    """
    size, model = scale.sizes, scale.model
    N, K, H = model.heads, model.kv_heads, model.head_dim
    C, W, O = size["rows"] // 2, 64, 32
    keys = jax.random.split(jax.random.key(5), 3)

    def attend(q, pool, table, seen, implementation, op=pallas_kernels.chunk_attention):
        return op(q, pool, 1, table, seen, implementation=implementation)

    ways = implementations("paged_attention", attend, scale.platform)
    if scale.platform == "gpu":
        by_xla = functools.partial(
            attend_ops.gathered_attention, gather=reference.gathered
        )
        gathered = functools.partial(attend, op=by_xla)
        ways["gathered"] = functools.partial(gathered, implementation="gpu")
    q = scale.normal(keys[2], (C, W, N, H), scale.dtype)
    for positions in (size["context"], 2 * size["context"]):
        A = positions // O
        pool = tuple(
            scale.normal(k, (2, C * A, O, K, H), scale.dtype) for k in keys[:2]
        )
        table = jnp.arange(C * A, dtype=jnp.int32).reshape(C, A)
        first = np.random.default_rng(0).integers(0, positions // W, C) * W
        end = first[:, None] + np.arange(W)[None] // 4 * 4 + 4
        held = jnp.broadcast_to(jnp.arange(positions)[None], (C, positions))
        seen = mask.ranged(jnp.asarray(end, jnp.int32), held)
        shape = f"{C} chunks of {W}, {positions} positions"
        yield Case("chunk_attention", shape, (q, pool, table, seen), ways)


def queries(scale: Scale):
    """Yields what comes between the product to queries, keys and values, and attention.

    Norms, rotation, and queries by heads. `of_one` is the sampler's way on a GPU; the
    specification cuts the product first.
    """
    size, model = scale.sizes, scale.model
    C, W, K, H = size["tokens"] // 64, 64, model.kv_heads, model.head_dim
    keys = jax.random.split(jax.random.key(6), 3)
    shape = C, W, K, model.heads // K + 2, H
    p = {
        name: scale.normal(key, (H,), scale.dtype)
        for name, key in zip(("q_norm", "k_norm"), keys)
    }
    turn = layer.turns(jnp.broadcast_to(jnp.arange(W)[None], (C, W)), model)

    def apart(all_CWKJH, p, turn):
        q_CWKGH, k_CWKH, v_CWKH = layer.of_heads(all_CWKJH)
        cut = q_CWKGH.reshape(C, W, -1, H), k_CWKH
        return *layer.of_two_products(*cut, p, turn, model), v_CWKH

    def by_heads(made):
        def run(*inputs):
            q_CWNH, *rest = made(*inputs)
            return jnp.swapaxes(q_CWNH.reshape(C, W, K, -1, H), 1, 2), *rest

        return run

    of_one = functools.partial(layer.of_one_product, cfg=model)
    ways = {"reference": by_heads(apart), "of_one": by_heads(of_one)}
    inputs = scale.normal(keys[2], shape, scale.dtype), p, turn
    yield Case("queries", f"{size['tokens']} slots", inputs, ways)


def whole_logits(x, head):
    """Returns all logits, f32, the first id being forbidden."""
    logits = jnp.einsum("...D,DV->...V", x, head).astype(jnp.float32)
    return logits.at[..., 0].set(reference.NEVER)


def picked(logits, token):
    """Returns the log-prob of each token by log_softmax."""
    logp = jax.nn.log_softmax(logits, axis=-1)
    return jnp.take_along_axis(logp, token[..., None], axis=-1)[..., 0]


def heads(scale: Scale):
    """Yields the fused head's log-prob, and its gradient."""
    size, D = scale.sizes, scale.model.d_model
    R, V = size["tokens"], size["vocab"]
    keys = jax.random.split(jax.random.key(2), 4)
    x = scale.normal(keys[0], (1, R, D), scale.dtype)
    head = scale.normal(keys[1], (D, V), scale.dtype, 0.02)
    token = jax.random.randint(keys[2], (1, R), 1, V)

    def logprob(x, head, token, implementation):
        return pallas_kernels.token_logprob(
            x, head, token, forbidden=0, implementation=implementation
        )[0]

    def log_softmax(x, head, token):
        return picked(whole_logits(x, head), token)

    shape = f"{R} tokens, {V} ids"
    ways = implementations("token_logprob", logprob, scale.platform)
    ways["log_softmax"] = log_softmax
    yield Case("token_logprob", shape, (x, head, token), ways)
    dlogp = scale.normal(keys[3], (1, R), jnp.float32)
    inputs = dlogp, x, head, token
    yield Case("token_logprob, backward", shape, inputs, gradients(ways, 2))


def draws(scale: Scale):
    """Yields a draw of many rows."""
    yield draw_of(scale, scale.sizes["rows"], 1.0)


def draws_of_few(scale: Scale):
    """Yields a draw of which a share is wanted, and a draw of one row.

    `kernel_of_few` is the kernel itself, where a GPU's leaves so few to XLA.
    """
    yield draw_of(scale, scale.sizes["rows"], 0.4)
    yield draw_of(scale, 1, 1.0)


def draw_of(scale: Scale, rows: int, share: float) -> Case:
    """Returns draws of rows of 4 positions, a share of which is wanted.

    On a CPU the head is a transpose, as a deep one of what samples is (cpu_products.py).
    """
    D, V = scale.model.d_model, scale.sizes["vocab"]
    keys = jax.random.split(jax.random.key(2), 2)
    x = scale.normal(keys[0], (rows, 4, D), scale.dtype)
    turned = scale.platform == "cpu"
    head = scale.normal(keys[1], (V, D) if turned else (D, V), scale.dtype, 0.02)
    wanted = jnp.asarray(np.random.default_rng(0).random((rows, 4)) < share)

    def draw(x, head, temperature_B, implementation):
        key_B = jax.random.split(jax.random.key(3), rows)
        logp = pallas_kernels.token_draw(
            *(x, head.T if turned else head, key_B, temperature_B),
            forbidden=0,
            wanted_BW=wanted,
            implementation=implementation,
        )[1]
        return jnp.where(wanted, logp, 0)

    def categorical(x, head, temperature_B):
        key_B = jax.random.split(jax.random.key(3), rows)
        logits = whole_logits(x, head.T if turned else head)
        tempered = logits / temperature_B[:, None, None]
        drawn = jax.vmap(jax.random.categorical)(key_B, tempered)
        return jnp.where(wanted, picked(logits, drawn), 0)

    ways = implementations("token_draw", draw, scale.platform)
    if scale.platform == "gpu" and rows == 1:
        ways["kernel_of_few"] = traced_with(ways["kernel"], "token_logprob", "FEW", 0)
    ways["categorical"] = categorical
    shape = f"{rows} rows of 4, {V} ids" + (f", {share} wanted" if share < 1 else "")
    return Case("token_draw", shape, (x, head, jnp.ones(rows)), ways)


def filters(scale: Scale):
    """Yields what top-p keeps of rows of 4 positions, alone and of the 40 that top-k keeps."""
    rows, V = 4 * scale.sizes["rows"], scale.sizes["vocab"]
    logits = scale.normal(jax.random.key(5), (rows, V), jnp.float32, 3.0)

    def kept(x, top_k):
        return jax.nn.softmax(reference.keep(x, top_k=top_k, top_p=0.95))

    def by_sorting(x, top_k):
        x = reference.keep(x, top_k=top_k, top_p=1.0)
        sorted_x = -jnp.sort(-x, axis=-1)
        prob = jax.nn.softmax(sorted_x)
        inside = jnp.cumsum(prob, axis=-1) - prob < 0.95
        least = jnp.where(inside, sorted_x, jnp.inf).min(axis=-1, keepdims=True)
        return jax.nn.softmax(jnp.where(x >= least, x, -jnp.inf))

    for top_k in (0, 40):
        ways = {"reference": kept, "sort": by_sorting}
        ways = {name: functools.partial(f, top_k=top_k) for name, f in ways.items()}
        shape = f"{rows} positions, {V} ids, top-k {top_k}"
        yield Case("top_p", shape, (logits,), ways)


def experts(scale: Scale):
    """Yields the grouped matmul of SDAR-30B-A3B, and the library's."""
    R, E = scale.sizes["tokens"], scale.sizes["experts"]
    model = RELEASED["sdar-30b-a3b"]
    D, F = model.d_model, model.expert_ffw
    keys = jax.random.split(jax.random.key(4), 2)
    x = scale.normal(keys[0], (R, D), scale.dtype)
    w = scale.normal(keys[1], (E, D, F), scale.dtype, 0.02)
    sizes = np.random.default_rng(0).multinomial(R, np.full(E, 1 / E))
    run = pallas_kernels.grouped_matmul
    ways = implementations("grouped_matmul", run, scale.platform)
    ways["ragged_dot"] = jax.lax.ragged_dot
    if scale.platform == "gpu":
        ways["mgpu"] = ragged_dot_mgpu
    inputs = x, w, jnp.asarray(sizes, jnp.int32)
    yield Case("grouped_matmul", f"{R} rows, {E} groups", inputs, ways)


def ragged_dot_mgpu(x_RD, w_EDF, sizes_E):
    """Returns jax's own GPU kernel's product, in tiles of the size of ours."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as library

    return library.ragged_dot(
        x_RD,
        w_EDF,
        group_sizes=sizes_E,
        block_m=64,
        block_n=128,
        block_k=64,
        max_concurrent_steps=4,
        grid_block_n=1,
    )


CASES = attentions, pages, heads, draws, experts
# Not counted: what is skipped there is data, and queries are no kernel's.
TIMED = *CASES, chunks, draws_of_few, queries, filters


def implementations(op: str, run, platform: str):
    """Returns the specification and, where there are, XLA's and the platform's kernel."""
    ways = {"reference": functools.partial(run, implementation="reference")}
    if (op, "any") in choice.KERNELS:
        ways["any"] = functools.partial(run, implementation="any")
    if (op, platform) in choice.KERNELS:
        ways["kernel"] = functools.partial(run, implementation=platform)
    return ways


def gradients(ways, count: int):
    """Returns the same with the gradients of their first arguments behind their results.

    Each takes the gradient of its result before its arguments.
    """

    def gradient(f):
        def pulled(dout, *inputs):
            first, rest = inputs[:count], inputs[count:]
            out, pull = jax.vjp(lambda *first: f(*first, *rest), *first)
            return out, pull(dout)

        return pulled

    return {name: gradient(f) for name, f in ways.items()}


def off(out, want) -> float:
    """Returns the largest difference, of the largest number."""

    def of_array(x, y):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        return np.abs(x - y).max() / max(np.abs(y).max(), 1e-9)

    return float(max(jax.tree.leaves(jax.tree.map(of_array, out, want))))


def measured(case: Case, limit: float, repeats: int) -> dict:
    """Returns facts of every way: how far it is off the first, and its milliseconds.

    What is off by more than `limit` is not timed; what fails says so, and the others go on.
    """
    facts, want, fed = {}, None, bool(case.donated)
    for name, f in case.ways.items():
        try:
            out = jax.jit(f)(*case.inputs)
            want = jax.device_get(out) if want is None else want
            gap = off(out, want)
            facts[f"{name}_off"] = f"{gap:.0e}"
            if gap <= limit:
                run = jax.jit(f, donate_argnums=case.donated)
                inputs = (out, *case.inputs[1:]) if fed else case.inputs
                del out
                least = report.seconds(run, *inputs, repeats=repeats, fed=fed)
                facts[f"{name}_ms"] = round(1e3 * least, 3)
        except Exception as error:  # noqa: BLE001  (the others are worth it)
            facts[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:200]
    return facts


def known(parser: argparse.ArgumentParser, only, ops: set[str]) -> None:
    """Ends the command with its usage and a line if no op begins like one of `only`."""
    for word in only:
        if not any(op.startswith(word) for op in ops):
            parser.error(f"--only {word}: no op begins so, of {', '.join(sorted(ops))}")


def main():
    """Compares and times."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--only", nargs="+", default=[""], help="ops that begin like this")
    p.add_argument("--small", action="store_true", help="default on CPU")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument(
        "--counted", metavar="TOPOLOGY", help="count for such a chip: v5p:2x2x1, h200:1"
    )
    args = p.parse_args()
    report.positive(p, args)
    if args.counted:
        # They take the CPU for all that is computed.
        from benchmarks import counted, topologies

        topologies.checked(p, args.counted)
        there = counted.tell(args.counted, tuple(args.only))
        known(p, args.only, there)
        return
    dtype = jnp.dtype(report.dtype())
    size = SMALL if args.small or jax.default_backend() == "cpu" else LARGE
    limit = 1e-3 if dtype == jnp.float32 else 4e-2
    model = RELEASED["sdar-1.7b"]
    scale = Scale(size, model, dtype, jax.default_backend(), normal)
    there = set()
    for cases in TIMED:
        for case in cases(scale):
            there.add(case.op)
            if case.op.startswith(tuple(args.only)):
                facts = measured(case, limit, args.repeats)
                about = {"op": case.op, "shape": case.shape, "dtype": dtype.name}
                report.tell("kernels", **about, **facts)
    known(p, args.only, there)


if __name__ == "__main__":
    command_line.entry(main)
