"""Cache policies: what each family's cost in forwards and seconds, and in log-probs.

    python -m benchmarks.sampling --model=tiny --rows=4

Random weights, sharpened so that no distribution is flat, in the shape of each family:
its attention, shift and block. A step unmasks a fixed number of tokens and nothing
stops, so that speed does not depend on what the weights say. A family's policies answer
the same prompts in turn; the median is told, compilation excluded, and the speed-up
over `none`, which re-runs the canvas at every step. The gap is between the log-prob
recorded in sampling and that of the training forward, nats: rounding for the exact
policies; what `prefix` and `dual` leave depends on the weights and says nothing of a
trained model's.

Prints a row of a table and a line of JSON for each family and policy.
"""

import argparse
import dataclasses
import functools
import statistics

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report, train_step
from benchmarks.decode import SHAPES, timed
from dllm_jax import command_line, sharding
from dllm_jax.models import acting, transformer
from dllm_jax.rl import layout as layouts
from dllm_jax.rl import learner, noise
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
    kind = NoiseConfig()
    rounds = noise.rounds(kind, layout, cfg.max_new)
    packed, source = train_step.packed_rows(
        trace, noise.noised(trace, kind, layout), rounds, model, layout, batch
    )
    plans = {"policy": learner.Plan(("policy",), OptimConfig(), 1)}
    score = jax.jit(functools.partial(learner.score, model=model, plans=plans))
    logp_nT = source.scatter(
        score({"policy": params}, packed)["policy"]["logp"], trace.step_BT.shape
    )
    gaps = np.abs(logp_nT - trace.logp_BT)[noise.answers(trace)]
    return float(gaps.mean()), float(gaps.max())


def family_of(name: str, args, dtype: str):
    """Returns (ModelConfig, params) of a family's shape."""
    attention, shift, _ = FAMILIES[name]
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
    return model, params


def requests(args, vocab: int) -> dict:
    """Returns the arguments of `denoise.generate` for the rows of a batch."""
    rng = np.random.default_rng(args.seed)
    prompt_BT = rng.integers(2, vocab, (args.rows, args.prompt)).astype(np.int32)
    len_B = rng.integers(args.prompt // 2, args.prompt, args.rows, endpoint=True)
    return {
        "prompt_BT": prompt_BT,
        "prompt_len_B": len_B.astype(np.int32),
        "limit_B": (len_B + args.new).astype(np.int32),
        "temperature_B": np.ones(args.rows, np.float32),
        "key_B": jax.random.split(jax.random.key(args.seed), args.rows),
    }


def measure(family: str, args, dtype: str) -> list[dict]:
    """Returns what each policy of a family gives: rows of the table."""
    model, params = family_of(family, args, dtype)
    arrays = requests(args, model.vocab)
    base = SamplerConfig(
        block=args.block,
        steps_per_block=args.block // 2,
        strategy="static",
        max_prompt=args.prompt,
        max_new=args.new,
    )
    cfgs = {name: dataclasses.replace(base, cache=name) for name in FAMILIES[family][2]}

    mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    weights = acting.laid_out(params, acting.abstract(model, mesh))

    def run(cfg):
        return jax.device_get(denoise.generate(weights, **arrays, model=model, cfg=cfg))

    traces = {name: run(cfg) for name, cfg in cfgs.items()}  # compiles
    ways = {name: functools.partial(run, cfg) for name, cfg in cfgs.items()}
    times = timed(ways, args.repeats)
    seconds = {name: statistics.median(some) for name, some in times.items()}
    slowest, *_ = seconds.values()  # the first re-runs the canvas at every step
    rows = []
    for name, trace in traces.items():
        mean, largest = gap(params, trace, model=model, cfg=cfgs[name])
        rows.append(
            {
                "model": args.model,
                "dtype": dtype,
                "family": family,
                "cache": name,
                "rows": args.rows,
                "canvas": f"{args.prompt} + {args.new}",
                "sampler": f"block {base.block}, static, temperature 1",
                "tokens": int(trace.len_B.sum()),
                "forwards": round(float(trace.forwards_B.mean()), 1),
                "seconds": round(seconds[name], 3),
                "times_faster": round(slowest / seconds[name], 2),
                "gap_mean": f"{mean:.1g}",
                "gap_max": f"{largest:.1g}",
            }
        )
    return rows


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
        "--dtype", choices=report.DTYPES, help="default: bfloat16, on CPU float32"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report.positive(parser, args)
    for family in args.family:
        for row in measure(family, args, args.dtype or report.dtype()):
            report.tell("sampling", **row)


if __name__ == "__main__":
    command_line.entry(main)
