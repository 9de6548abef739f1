"""Cache policies: what each family's cost in forwards and seconds, and in log-probs.

    python -m benchmarks.sampling --model=tiny --rows=4

Random weights, sharpened so that no distribution is flat, in the shape of each family: its
attention, shift and block. A step unmasks a fixed number of tokens and nothing stops, so
that speed does not depend on what the weights say. A family's policies answer the same
prompts in turn; the median is told, compilation excluded, and the speed-up over `none`,
which re-runs the canvas at every step. The gap is between the log-prob recorded in sampling
and that of the training forward, nats: rounding for the exact policies; what `prefix` and
`dual` leave depends on the weights and says nothing of a trained model's.

Prints a row of a table and a line of JSON for each family and policy.
"""

import argparse
import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.decode import SHAPES
from dllm_jax.models import transformer
from dllm_jax.rl import layout as layouts
from dllm_jax.rl import learner, noise, views
from dllm_jax.rl.config import BatchConfig, NoiseConfig, OptimConfig
from dllm_jax.sampling import denoise
from dllm_jax.sampling.config import SamplerConfig

FULL = ("none", "prefix", "dual")
FAMILIES = {  # attention, shift, the policies to compare: the first re-runs the canvas
    "SDAR": ("block", 0, ("none", "block")),
    "Fast-dLLM v2": ("block", 1, ("none", "block")),
    "LLaDA": ("full", 0, FULL),
    "Dream": ("full", 1, FULL),
}
SHARPER = 4  # times the weights of `transformer.init`


def gap(params, trace, *, model, cfg):
    """Returns (mean, largest) difference of the log-probs of sampling and training."""
    layout = layouts.Layout(
        attention=model.attention,
        shift=model.shift,
        block=cfg.block,
        longest=cfg.max_new,
    )
    batch = BatchConfig(rows=8, tokens=2 * cfg.slots)
    n, kind = len(trace.len_B), NoiseConfig()
    rounds = noise.rounds(kind, layout, cfg.max_new)
    packed, source = views.pack(
        trace,
        noise.noised(trace, kind, layout),
        mask_id=model.mask_id,
        layout=layout,
        cfg=batch,
        most=layouts.microbatches(
            trajectories=n,
            slots=cfg.slots,
            answer=cfg.max_new,
            rounds=rounds,
            copies=1,
            layout=layout,
            cfg=batch,
        ),
        aggregate="token",
    )
    plans = {"policy": learner.Plan(("policy",), OptimConfig(), 1)}
    score = jax.jit(functools.partial(learner.score, model=model, plans=plans))
    logp_nT = source.scatter(
        score({"policy": params}, packed)["policy"]["logp"], trace.step_BT.shape
    )
    gaps = np.abs(logp_nT - trace.logp_BT)[noise.answers(trace)]
    return float(gaps.mean()), float(gaps.max())


def measure(family: str, args, dtype: str) -> list[dict]:
    """Returns what each policy of a family gives."""
    attention, shift, policies = FAMILIES[family]
    model = dataclasses.replace(
        SHAPES[args.model],
        dtype=dtype,
        attention=attention,
        shift=shift,
        block=args.block,
    )
    params = jax.tree.map(
        lambda x: x if (x == 1).all() else SHARPER * x,  # norms stay
        transformer.init(jax.random.key(args.seed), model, jnp.dtype(dtype)),
    )
    base = SamplerConfig(
        block=args.block,
        steps_per_block=args.block // 2,
        strategy="static",
        max_prompt=args.prompt,
        max_new=args.new,
    )
    rng = np.random.default_rng(args.seed)
    prompt_BT = rng.integers(2, model.vocab, (args.rows, args.prompt)).astype(np.int32)
    len_B = rng.integers(args.prompt // 2, args.prompt, args.rows, endpoint=True)
    arrays = (
        *(prompt_BT, len_B.astype(np.int32), (len_B + args.new).astype(np.int32)),
        np.ones(args.rows, np.float32),
        jax.random.split(jax.random.key(args.seed), args.rows),
    )

    def run(cfg):
        return jax.device_get(denoise.generate(params, *arrays, model=model, cfg=cfg))

    cfgs = [dataclasses.replace(base, cache=name) for name in policies]
    traces = [run(cfg) for cfg in cfgs]  # compiles
    seconds = [[] for _ in cfgs]
    for _ in range(args.repeats):
        for times, cfg in zip(seconds, cfgs, strict=True):
            start = time.perf_counter()
            run(cfg)
            times.append(time.perf_counter() - start)
    out = []
    for times, cfg, trace in zip(seconds, cfgs, traces, strict=True):
        median = statistics.median(times)
        mean, most = gap(params, trace, model=model, cfg=cfg)
        out.append(
            {
                "model": args.model,
                "dtype": dtype,
                "family": family,
                "cache": cfg.cache,
                "rows": args.rows,
                "canvas": f"{args.prompt} + {args.new}",
                "sampler": f"block {cfg.block}, static, temperature 1",
                "tokens": int(trace.len_B.sum()),
                "forwards": round(float(trace.forwards_B.mean()), 1),
                "seconds": round(median, 3),
                "times_faster": round(statistics.median(seconds[0]) / median, 2),
                "gap_mean": f"{mean:.1g}",
                "gap_max": f"{most:.1g}",
            }
        )
    return out


def main():
    """Measures each family."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", choices=SHAPES, help="its size")
    parser.add_argument("--family", nargs="+", default=[*FAMILIES], choices=FAMILIES)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256, help="longest, tokens")
    parser.add_argument("--new", type=int, default=64, help="of an answer, tokens")
    parser.add_argument(
        "--dtype", default=None, help="default: bfloat16, on CPU float32"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for family in args.family:
        for row in measure(family, args, args.dtype or report.dtype()):
            report.tell("sampling", **row)


if __name__ == "__main__":
    main()
