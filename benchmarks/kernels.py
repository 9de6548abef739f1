"""Every kernel against its specification and, where there is one, against the library's.

    python -m benchmarks.kernels [--only=attention ...]

An op's answers are compared with `reference.py`'s before anything is timed; what differs
is told and not timed. The library's are jax.nn.dot_product_attention (cuDNN on GPU) and
splash attention on TPU, both causal, and jax.lax.ragged_dot. Forward, and where it trains
forward with backward. A platform without kernels, such as CPU, has rows for the
specification and the library alone. On GPU attention is timed a second time without the
turns of its two warpgroups, `out_of_turn` (gpu/attention.py, IN_TURN). Shapes are those of
SDAR-1.7B.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from dllm_jax import pallas_kernels
from dllm_jax.models import mask
from dllm_jax.pallas_kernels import choice, reference

N, K, H, D, V = 16, 8, 128, 2048, 151936  # SDAR-1.7B
E, F = 128, 768  # experts of SDAR-30B-A3B and their width
SMALL = {"tokens": 512, "rows": 4, "vocab": 4096, "context": 256, "experts": 8}
LARGE = {"tokens": 4096, "rows": 128, "vocab": V, "context": 1024, "experts": E}


def attention_inputs(size, dtype):
    """Returns (q, k, v) and the masks: causal, and four packed trajectories."""
    T = size["tokens"]
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (1, T, N, H), (1, T, K, H), (1, T, K, H)
    inputs = [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes)]
    slot = np.arange(T)
    begin = slot // (T // 4) * (T // 4)  # half of each is clean, half noised blocks
    clean = slot - begin < T // 8
    inside = np.where(clean, slot - begin, slot - begin - T // 8)
    end = begin + inside // 4 * 4 + np.where(clean, 4, 0)  # a clean block sees itself
    group = np.where(clean, -1, slot // 4 * 4)
    arrays = (jnp.asarray(x[None], jnp.int32) for x in (begin, end, group))
    return inputs, {
        "causal": mask.causal(jnp.asarray(slot[None], jnp.int32)),
        "packed": mask.packed(*arrays),
    }


def library_attention(q_BTNH, k_BTKH, v_BTKH):
    """Returns causal attention by what the platform's library has."""
    if jax.default_backend() != "tpu":
        library = "cudnn" if jax.default_backend() == "gpu" else "xla"
        return jax.nn.dot_product_attention(
            q_BTNH, k_BTKH, v_BTKH, is_causal=True, implementation=library
        )
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    B, T = q_BTNH.shape[:2]
    masks = [splash.CausalMask((T, T))] * (N // K)
    run = splash.make_splash_mqa_single_device(splash.MultiHeadMask(masks))
    q_BKGTH = jnp.moveaxis(q_BTNH.reshape(B, T, K, N // K, H), 1, 3) * H**-0.5
    k_BKTH, v_BKTH = (jnp.moveaxis(x_BTKH, 1, 2) for x_BTKH in (k_BTKH, v_BTKH))
    out_BKGTH = jax.vmap(jax.vmap(run))(q_BKGTH, k_BKTH, v_BKTH)
    return jnp.moveaxis(out_BKGTH, 3, 1).reshape(q_BTNH.shape)


def out_of_turn(run):
    """Returns a function like `run` in whose program no warpgroup awaits its turn."""

    def free(*inputs):
        from dllm_jax.pallas_kernels.gpu import attention

        before, attention.IN_TURN = attention.IN_TURN, False
        try:
            return run(*inputs)
        finally:
            attention.IN_TURN = before

    return free


def attentions(size, dtype):
    """Yields (op, shape, its inputs, ways to compute it: name -> function of them)."""
    inputs, masks = attention_inputs(size, dtype)
    for name, seen in masks.items():
        run = functools.partial(pallas_kernels.attention, mask=seen)
        ways = implementations("attention", run)
        if jax.default_backend() == "gpu":
            ways["out_of_turn"] = out_of_turn(ways["kernel"])
        if name == "causal":
            ways["library"] = library_attention
        shape = f"{size['tokens']} tokens, {name}"
        yield "attention", shape, inputs, ways
        yield "attention, backward", shape, inputs, gradients(ways, 3)


def pages(size, dtype):
    """Yields the two ops of the cache: windows of 4 over pages of 32."""
    B, O, A = size["rows"], 32, size["context"] // 32 + 1
    keys = jax.random.split(jax.random.key(1), 5)
    pool = tuple(jax.random.normal(k, (2, B * A, O, K, H), dtype) for k in keys[:2])
    table = jnp.arange(B * A, dtype=jnp.int32).reshape(B, A)
    start = jnp.asarray(np.random.default_rng(0).integers(8, A * O // 4, B) * 4)
    start = jnp.minimum(start, (A - 1) * O).astype(jnp.int32)
    q = jax.random.normal(keys[2], (B, 4, N, H), dtype)
    k, v = (jax.random.normal(key, (B, 4, K, H), dtype) for key in keys[3:])
    shape = f"{B} rows, {size['context']} positions"

    def attend(q, pool, k, v, implementation):
        return pallas_kernels.paged_attention(
            q, pool, 1, table, start, k, v, implementation=implementation
        )

    def update(pool, k, v, implementation):
        keep = jnp.ones(B, bool)
        return pallas_kernels.cache_update(
            pool, 1, table, start, keep, k, v, implementation=implementation
        )

    ways = implementations("paged_attention", attend)
    yield "paged_attention", shape, (q, pool, k, v), ways
    yield "cache_update", shape, (pool, k, v), implementations("cache_update", update)


def heads(size, dtype):
    """Yields the fused head: a log-prob, its gradient, and a draw."""
    R, V = size["tokens"], size["vocab"]
    keys = jax.random.split(jax.random.key(2), 3)
    x = jax.random.normal(keys[0], (1, R, D), dtype)
    head = jax.random.normal(keys[1], (D, V), dtype) * 0.02
    token = jax.random.randint(keys[2], (1, R), 1, V)
    shape = f"{R} tokens, {V} ids"

    def logprob(x, head, implementation):
        return pallas_kernels.token_logprob(
            x, head, token, forbidden=0, implementation=implementation
        )[0]

    def draw(x, head, implementation):
        key_B = jax.random.split(jax.random.key(3), size["rows"])
        temperature_B = jnp.ones(size["rows"])
        return pallas_kernels.token_draw(
            x, head, key_B, temperature_B, forbidden=0, implementation=implementation
        )[1]

    ways = implementations("token_logprob", logprob)
    yield "token_logprob", shape, (x, head), ways
    yield "token_logprob, backward", shape, (x, head), gradients(ways, 2)
    rows = size["rows"]
    x = jax.random.normal(keys[0], (rows, 4, D), dtype)
    shape = f"{rows} rows of 4, {V} ids"
    yield "token_draw", shape, (x, head), implementations("token_draw", draw)


def experts(size, dtype):
    """Yields the grouped matmul; the library's is jax.lax.ragged_dot."""
    R, E = size["tokens"], size["experts"]
    keys = jax.random.split(jax.random.key(4), 2)
    x = jax.random.normal(keys[0], (R, D), dtype)
    w = jax.random.normal(keys[1], (E, D, F), dtype) * 0.02
    sizes = np.random.default_rng(0).multinomial(R, np.full(E, 1 / E))
    sizes = jnp.asarray(sizes, jnp.int32)
    ways = {
        "ours": functools.partial(pallas_kernels.grouped_matmul, sizes_E=sizes),
        "library": functools.partial(jax.lax.ragged_dot, group_sizes=sizes),
    }
    # The specification's copy of a matrix for every row does not fit: ragged_dot is it.
    if R * D * F * x.dtype.itemsize < 2**32:
        specified = functools.partial(reference.grouped_matmul, sizes_E=sizes)
        ways = {"reference": specified} | ways
    yield "grouped_matmul", f"{R} rows, {E} groups", (x, w), ways


def implementations(op: str, run):
    """Returns the specification and, where there are, XLA's and the platform's kernel."""
    platform = jax.default_backend()
    ways = {"reference": functools.partial(run, implementation="reference")}
    if (op, "any") in choice.KERNELS:
        ways["any"] = functools.partial(run, implementation="any")
    if (op, platform) in choice.KERNELS:
        ways["kernel"] = functools.partial(run, implementation=platform)
    return ways


def gradients(ways, count: int):
    """Returns the same with the gradients of their first arguments, of a fixed sum."""

    def gradient(f):
        def total(*inputs):
            out = f(*inputs).astype(jnp.float32)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

        return jax.grad(total, argnums=tuple(range(count)))

    return {name: gradient(f) for name, f in ways.items()}


def off(out, want) -> float:
    """Returns the largest difference, of the largest number."""

    def of_array(x, y):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        return np.abs(x - y).max() / max(np.abs(y).max(), 1e-9)

    return float(max(jax.tree.leaves(jax.tree.map(of_array, out, want))))


def measured(inputs, ways, limit: float, repeats: int) -> dict:
    """Returns facts of every way: how far it is off the first, and its milliseconds.

    What is off by more than `limit` is not timed; what fails says so, and the others go on.
    """
    facts, want = {}, None
    for name, f in ways.items():
        try:
            run = jax.jit(f)
            out = run(*inputs)
            want = out if want is None else want
            gap = off(out, want)
            facts[f"{name}_off"] = f"{gap:.0e}"
            del out
            if gap <= limit:
                least = report.seconds(run, *inputs, repeats=repeats)
                facts[f"{name}_ms"] = round(1e3 * least, 3)
        except Exception as error:  # noqa: BLE001  (the others are worth it)
            facts[f"{name}_failed"] = f"{type(error).__name__}: {error}"[:200]
    return facts


def main():
    """Compares and times."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--only", nargs="+", default=[""], help="ops that begin like this")
    p.add_argument("--small", action="store_true", help="default on CPU")
    p.add_argument("--repeats", type=int, default=5)
    args = p.parse_args()
    dtype = jnp.dtype(report.dtype())
    size = SMALL if args.small or jax.default_backend() == "cpu" else LARGE
    limit = 1e-3 if dtype == jnp.float32 else 4e-2
    for cases in (attentions, pages, heads, experts):
        for op, shape, inputs, ways in cases(size, dtype):
            if op.startswith(tuple(args.only)):
                facts = measured(inputs, ways, limit, args.repeats)
                report.tell("kernels", op=op, shape=shape, dtype=dtype.name, **facts)


if __name__ == "__main__":
    main()
