"""One update, timed: the packed layout against one row per round.

    python -m benchmarks.train_step [--steps-per-block=2 ...]

Random trajectories with a forced number of rounds in every block are laid out twice: as
`views.pack` does, and as dLLM-RL does, a row [prompt | response | noised response] for
every round, padded to the longest prompt and response. Both go through the same
`learner.update`; their gradients must agree. Times are medians over alternating calls,
compilation excluded.

With r rounds a block, a trajectory of p prompt and a answer tokens costs r (p + 2a) slots
there and p + (1 + r) a here. Without padding that is a ratio of 1.3 (p = 0) to 2 (p >> a)
for r = 2, and 1.6 to 4 for r = 4; what padding costs the first layout comes on top.

With --packed-only the states are donated and nothing is compared, for models that fill a
device. MFU: 6 FLOPs a parameter of the layers and a token that is not padding, of experts
those that it goes to, and 6 a parameter of the head and a supervised token, over
`report.flops`; attention and recomputation count for nothing.
"""

import argparse
import dataclasses
import functools
import statistics
import time

import jax
import numpy as np

from benchmarks import decode, report, roofline
from dllm_jax import command_line, pallas_kernels
from dllm_jax.models import transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.rl import layout as layouts
from dllm_jax.rl import learner, noise, views
from dllm_jax.rl.config import BatchConfig, ObjectiveConfig, OptimConfig
from dllm_jax.sampling.state import GIVEN, Trace


def one_row_per_round(trace, step_nT, *, mask_id: int, block: int, rows: int):
    """Returns (TrainBatch, Source) of dLLM-RL's rows on the absolute grid.

    Row r of a trajectory is its clean copy and a copy of all its answer's blocks, of
    which each shows its r-th round. Rows are padded to the longest; `rows` of them are a
    microbatch. The weights are 1: gather them from a packed batch.
    """
    T = step_nT.shape[1]
    grid_T = np.arange(T) // block
    answer_nT = noise.answers(trace)
    made = []
    for i in np.flatnonzero(trace.len_B):
        blocks = np.unique(grid_T[answer_nT[i]])
        first, last = blocks[0] * block, (blocks[-1] + 1) * block
        noised = np.arange(first, last)
        in_block = [np.flatnonzero(answer_nT[i] & (grid_T == b)) for b in blocks]
        steps = [np.unique(step_nT[i, inside]) for inside in in_block]
        for r in range(max(len(s) for s in steps)):
            # A block whose rounds are over shows all its tokens and supervises none.
            now = np.repeat([s[r] if r < len(s) else 2**31 - 1 for s in steps], block)
            shown = np.where(
                step_nT[i, noised] >= now, mask_id, trace.tokens_BT[i, noised]
            )
            target = np.flatnonzero((step_nT[i, noised] == now) & answer_nT[i, noised])
            made.append(
                {
                    "tokens": np.concatenate([trace.tokens_BT[i, :last], shown]),
                    "pos": np.concatenate([np.arange(last), noised]),
                    "end": np.concatenate(
                        [(grid_T[:last] + 1) * block, grid_T[noised] * block]
                    ),
                    "group": np.concatenate([np.full(last, -1), grid_T[noised]]),
                    "where": last + target,
                    "target": trace.tokens_BT[i, noised[target]],
                    "row": np.full(len(target), i),
                    "at": noised[target],
                    "prompt": first,
                    "response": last - first,
                }
            )
    width = max(m["prompt"] for m in made) + 2 * max(m["response"] for m in made)
    seats = max(len(m["where"]) for m in made)
    count = -(-len(made) // rows)

    def stack(name, size, fill=0):
        out = np.full((count * rows, size), fill, np.int32)
        for line, m in zip(out, made, strict=False):
            line[: len(m[name])] = m[name]
        return out.reshape(count, rows, size)

    source = views.Source(stack("row", seats, -1), stack("at", seats))
    batch = views.TrainBatch(
        used=np.int32(count),
        tokens_BT=stack("tokens", width),
        pos_BT=stack("pos", width),
        begin_BT=np.zeros((count, rows, width), np.int32),
        end_BT=stack("end", width),
        group_BT=stack("group", width, -1),
        where_BU=stack("where", seats),
        target_BU=stack("target", seats),
        weight_BU=(source.row_mBU >= 0).astype(np.float32),
    )
    return batch, source


def packed_rows(trace, noised, rounds: int, model: ModelConfig, layout, cfg):
    """Returns views.pack's of every trajectory of a trace, by tokens.

    rounds: the most that an answer's tokens are masked in; layout: a Layout; cfg: a
    BatchConfig.
    """
    trajectories, slots = trace.tokens_BT.shape
    most = layouts.microbatches(
        trajectories=trajectories,
        slots=slots,
        answer=layout.longest,
        rounds=rounds,
        copies=1,
        layout=layout,
        cfg=cfg,
    )
    return views.pack(
        trace,
        noised,
        mask_id=model.mask_id,
        layout=layout,
        cfg=cfg,
        most=most,
        aggregate="token",
    )


def trajectories(args, rng: np.random.Generator):
    """Returns a host Trace of random answers, every whole block in as many steps."""
    n, Q = args.trajectories, args.block
    prompt_n = rng.integers(args.max_prompt // 2, args.max_prompt + 1, n)
    len_n = rng.exponential(args.mean_answer, n).astype(int).clip(1, args.max_answer)
    T = -(-(args.max_prompt + args.max_answer) // Q) * Q
    step_nT = np.full((n, T), GIVEN, np.int32)
    for i in range(n):
        last = -(-(prompt_n[i] + len_n[i]) // Q)
        for j in range(prompt_n[i] // Q, last):
            inside = np.arange(max(j * Q, prompt_n[i]), (j + 1) * Q)
            order = np.arange(len(inside)) % args.steps_per_block
            step_nT[i, inside] = 1 + j * Q + rng.permutation(order)
    zero_nT, zero_n = np.zeros((n, T), np.float32), np.zeros(n, np.int32)
    return Trace(
        tokens_BT=rng.integers(1, args.vocab, (n, T)).astype(np.int32),
        step_BT=step_nT,
        logp_BT=zero_nT,
        conf_BT=zero_nT,
        prompt_len_B=prompt_n.astype(np.int32),
        len_B=len_n.astype(np.int32),
        steps_B=zero_n,
        forwards_B=zero_n,
        stopped_B=zero_n.astype(bool),
        bad_B=zero_n.astype(bool),
    )


def check(parser: argparse.ArgumentParser, args: argparse.Namespace):
    """Ends the command with its usage and a line if its numbers say what cannot be."""
    report.positive(parser, args)
    if args.steps_per_block > args.block:
        parser.error(
            f"--steps-per-block={args.steps_per_block}: a block of --block={args.block} "
            "has no more rounds than positions"
        )
    if args.heads % args.kv_heads:
        parser.error(f"--heads={args.heads}: no multiple of --kv-heads={args.kv_heads}")


def main():
    """Prints tokens and seconds of both layouts and their ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, default, text in (
        ("--steps-per-block", 2, "rounds of every block"),
        ("--block", 4, "positions of a block"),
        ("--trajectories", 32, "answers of one update"),
        ("--max-prompt", 64, "longest prompt; they are uniform from half of it"),
        ("--max-answer", 256, "longest answer"),
        ("--mean-answer", 96, "mean of the exponential that lengths are drawn from"),
        ("--rows", 2, "rows of a packed microbatch; of wide ones a CPU takes one"),
        ("--tokens", 576, "slots of a packed row"),
        ("--d-model", 128, "width"),
        ("--layers", 4, "layers"),
        ("--heads", 8, "query heads"),
        ("--kv-heads", 4, "key and value heads"),
        ("--head-dim", 16, "head size"),
        ("--ffw", 384, "feed-forward width"),
        ("--vocab", 2048, "vocabulary, the mask token being one more"),
        ("--repeats", 3, "timed calls of each layout"),
        ("--seed", 0, "of weights and trajectories"),
    ):
        parser.add_argument(
            flag, type=int, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--dtype",
        choices=report.DTYPES,
        default=report.dtype(),
        help="of computation (default: float32 on CPU, else bfloat16)",
    )
    parser.add_argument("--model", default="", choices=["", *decode.SHAPES])
    parser.add_argument("--remat", default="none", choices=list(transformer.REMAT))
    kinds = pallas_kernels.CHOICES
    parser.add_argument(
        "--kernels", default="auto", choices=kinds, help="model.kernels"
    )
    parser.add_argument("--packed-only", action="store_true")
    args = parser.parse_args()
    check(parser, args)

    model = ModelConfig(
        vocab=args.vocab + 1,
        d_model=args.d_model,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        ffw=args.ffw,
        mask_id=args.vocab,
    )
    model = decode.SHAPES.get(args.model, model)
    args.vocab = model.vocab - 1
    how = {name: getattr(args, name) for name in ("block", "dtype", "remat", "kernels")}
    model = dataclasses.replace(model, **how)
    rng = np.random.default_rng(args.seed)
    trace = trajectories(args, rng)
    shape = trace.tokens_BT.shape
    cfg = BatchConfig(rows=args.rows, tokens=args.tokens).on(1, jax.default_backend())
    layout = layouts.Layout(block=args.block, longest=args.max_answer)
    packed, source = packed_rows(
        trace, noise.of_steps(trace.step_BT), args.steps_per_block, model, layout, cfg
    )
    weight_nT = source.scatter(packed.weight_BU, shape)
    split = functools.partial(
        one_row_per_round,
        trace,
        trace.step_BT,
        mask_id=model.mask_id,
        block=args.block,
    )
    # Microbatches of about as many slots as the packed ones.
    width = split(rows=1)[0].tokens_BT.shape[-1]
    rows, rows_source = split(rows=max(1, cfg.rows * cfg.tokens // width))
    adv_nT, old_nT = rng.normal(size=(2, *shape)) - np.array([0, 8])[:, None, None]

    def complete(batch, source):
        return jax.device_put(
            batch.replace(
                weight_BU=source.gather(weight_nT),
                adv_BU=source.gather(adv_nT),
                old_logp_BU=source.gather(old_nT),
            )
        )

    batches = {"packed": complete(packed, source)}
    if not args.packed_only:
        batches["a row per round"] = complete(rows, rows_source)
    plans = {
        "policy": learner.Plan(("policy",), OptimConfig(lr=1e-6, max_grad_norm=1e9), 1)
    }
    params = jax.jit(functools.partial(transformer.init, cfg=model))(
        jax.random.key(args.seed)
    )
    states = {"policy": learner.begin(params, plans["policy"])}
    del params
    update = jax.jit(
        functools.partial(
            learner.update, model=model, plans=plans, cfg=ObjectiveConfig()
        ),
        donate_argnums=0 if args.packed_only else (),
    )

    gradients, seconds = {}, {name: [] for name in batches}
    for turn in range(args.repeats + 1):  # the first compiles
        for name, batch in batches.items():
            start = time.perf_counter()
            new, _ = jax.block_until_ready(update(states, batch))
            seconds[name].append(time.perf_counter() - start)
            if args.packed_only:
                states = new
            elif not turn:
                gradients[name] = new["policy"].opt_state[1][0].mu  # (1 - b1) x it
    median = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    held = {  # slots that are not padding, and all that are computed
        name: (
            int((b.end_BT + (b.group_BT >= 0) > 0).sum()),
            int(b.used * b.tokens_BT[0].size),
        )
        for name, b in batches.items()
    }
    told = {
        "model": args.model or f"{args.layers} layers of {args.d_model}",
        "dtype": args.dtype,
        "kernels": args.kernels,
        "answers": len(trace.len_B),
        "answer_tokens": int(trace.len_B.sum()),
        "sampler": f"block {args.block}, {args.steps_per_block} rounds",
        "batch": f"{cfg.rows} x {cfg.tokens}",
        "tokens": held["packed"][0],
        "packed_fill": round(packed.fill, 3),
        "seconds": round(median["packed"], 4),
        "tokens_per_second": round(held["packed"][0] / median["packed"], 1),
    }
    if peak := report.flops():
        sizes, asked = roofline.sizes_of(model), int((packed.weight_BU > 0).sum())
        flops = 6 * (sizes.layers * held["packed"][0] + sizes.head * asked)
        told["percent_mfu"] = round(100 * flops / median["packed"] / peak, 1)
    if args.packed_only:
        report.tell("train_step", **told)
        return

    def gap(a, b):
        return float(np.abs(a - b).max() / np.abs(b).max())

    worst = max(
        jax.tree.leaves(jax.tree.map(gap, *jax.device_get([*gradients.values()])))
    )
    limit = 2e-4 if args.dtype == "float32" else 5e-2
    mine, theirs = held["packed"], held["a row per round"]
    told["times_fewer_tokens"] = round(theirs[0] / mine[0], 2)
    told["with_padding"] = round(theirs[1] / mine[1], 2)
    told["times_faster"] = round(median["a row per round"] / median["packed"], 2)
    told["gradient_difference"] = f"{worst:.0e}"
    report.tell("train_step", **told)
    assert worst < limit, f"the layouts' gradients differ by {worst}"


if __name__ == "__main__":
    command_line.entry(main)
