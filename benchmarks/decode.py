"""Sampling speed: the engine against batches that wait for their slowest row.

    python -m benchmarks.decode --model=0.1b --rows 1 8 32

Random weights and a forced rate of unmasking, so that speed does not depend on what the
weights say: a step takes the first masked position and every other one that drew an
even token, about 2.2 steps for a block of 4. Prompts and limits are ragged, with three
times as many requests as rows (--waves); neighbours of a --group have the same prompt.
With a --cache of full attention both look at whole canvases, each row of the engine when
its own block begins (`engine_canvases` in all), a batch when that of all rows does.
Both ways answer the same requests and must give the same ids; they alternate, the
median is told, compilation excluded. On an accelerator that is in `chips.CHIPS` the
share of the roofline is told too: the time that one forward after the other would need
for reading weights and the cache of the rows that were busy, or for their
multiplications if that is longer. `busy_rows` is how many were: the last requests leave
rows idle, fewer the more --waves there are.

With --steady every prompt and every answer is as long as it may be, one of each for a row, and
what is told is of the second half of the answers: what the run takes beyond one with answers
half as long. So no prompt is in it; rows wait for the last one at the end alone, which takes
longer in the longer run (`busy_rows`).

`percent_mfu` is the share of `report.flops` that went into multiplications by weights, of
prompts and of windows that were asked for, by the experts that each token goes to. With
--room answers may be longer than they are; of several rooms, which take turns,
`times_first_room` is how many times as fast the engine is as with the first one, the mean of
the turns' ratios with its 95 % interval.

`percent_on_host` is what the host spends of a run's time between a device call's end and
the next one's start: harvesting, admitting, telling the device. `host_ms_per_forward`
is its CPU time for that, on any device. With --steady both are of the whole run with answers
half as long, its prompts included.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.roofline import Sizes, sizes_of
from benchmarks.shapes import RELEASED
from dllm_jax import command_line, pallas_kernels, sharding
from dllm_jax import statistics as scores
from dllm_jax.models import acting, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR
from dllm_jax.sampling import denoise, placement, policy, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.engine import Engine
from dllm_jax.sampling.strategy import STRATEGIES, Strategy, sequential

SMALL = {"vocab": 32768, "head_dim": 64, "tied": True, "mask_id": 0, "eos_id": 1}
SHAPES = RELEASED | {
    "tiny": dataclasses.replace(
        ModelConfig(d_model=128, layers=4, heads=2, ffw=384, kv_heads=1), **SMALL
    ),
    "30m": dataclasses.replace(
        ModelConfig(d_model=512, layers=8, heads=8, ffw=1536, kv_heads=4),
        **SMALL | {"vocab": 8192},
    ),
    "135m": dataclasses.replace(
        ModelConfig(d_model=576, layers=30, heads=9, ffw=1536, kv_heads=3),
        **SMALL | {"vocab": 49152},
    ),
    "0.1b": dataclasses.replace(
        ModelConfig(d_model=768, layers=12, heads=12, ffw=2048, kv_heads=4), **SMALL
    ),
}


def forced(draw, masked_BW, quota_B, cfg):
    """Takes the first masked position, and others by the parity of what they drew."""
    first_BW = sequential(draw, masked_BW, jnp.ones_like(quota_B), cfg)
    return first_BW | (masked_BW & (draw.token_BW % 2 == 0))


STRATEGIES["forced"] = Strategy(forced)


def requests(rows: int, args, model: ModelConfig):
    """Returns (prompts, new): `waves` ragged requests for every row."""
    rng = np.random.default_rng(args.seed)
    if args.steady:
        prompts = rng.integers(2, model.vocab, (rows, args.prompt)).tolist()
        return prompts, np.full(rows, args.new)
    count = args.waves * rows
    shortest = max(args.prompt // 2, 1)
    lengths = rng.integers(shortest, args.prompt, count, endpoint=True)
    prompts = [rng.integers(2, model.vocab, n).tolist() for n in lengths]
    prompts = [prompts[i - i % args.group] for i in range(count)]
    least = max(args.new // 8, 1)
    return prompts, rng.integers(least, args.new, count, endpoint=True)


@dataclasses.dataclass(frozen=True)
class Work:
    """What a run computed."""

    forwards: int
    clean: int  # windows that were run for their keys
    steps: int  # windows that were run to unmask something, of all rows

    def beyond(self, less):
        """Returns what this is more than some other work."""
        return Work(*(a - b for a, b in zip(*map(dataclasses.astuple, (self, less)))))


def on_engine(made: Engine, params, prompts, new, key):
    """Returns ({request: answer}, the Work that it took)."""
    before = (0, 0)
    if made.rows is not None:
        before = int(made.rows.forwards), int(made.rows.clean)
    for i, prompt in enumerate(prompts):
        made.submit(prompt, index=i, temperature=1.0, new=int(new[i]))
    answers = {request.index: row for request, row in made.run(params, key)}
    work = Work(
        forwards=int(made.rows.forwards) - before[0],
        clean=int(made.rows.clean) - before[1],
        steps=sum(int(row.steps) for row in answers.values()),
    )
    return {i: answer(row) for i, row in answers.items()}, work


def in_batches(params, prompts, new, key, *, model: ModelConfig, cfg: SamplerConfig):
    """Returns the same, `cfg.rows` requests at a time."""
    answers, forwards, steps = {}, 0, 0
    for first in range(0, len(prompts), cfg.rows):
        index_B = np.arange(first, first + cfg.rows, dtype=np.uint32)
        prompt_BT = np.zeros((cfg.rows, cfg.max_prompt), np.int32)
        for row_T, i in zip(prompt_BT, index_B, strict=True):
            row_T[: len(prompts[i])] = prompts[i]
        len_B = np.array([len(prompts[i]) for i in index_B], np.int32)
        trace = denoise.generate(
            params,
            prompt_BT,
            len_B,
            len_B + new[index_B].astype(np.int32),
            np.ones(cfg.rows, np.float32),
            jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, index_B),
            model=model,
            cfg=cfg,
        )
        trace = jax.device_get(trace)
        for row, i in enumerate(index_B):
            answers[int(i)] = answer(state.answer(trace, row))
        waits = policy.choose(cfg, model.attention).stale
        forwards += together(trace, cfg.block) if waits else trace.forwards_B.max()
        steps += int(trace.steps_B.sum())
    return answers, Work(int(forwards), 0, steps)


def together(trace, block: int) -> int:
    """Returns the forwards of a batch whose rows wait for each other at every block."""
    place_BT = np.arange(trace.step_BT.shape[1])[None] - trace.prompt_len_B[:, None]
    step_BT = np.where(trace.step_BT == FAR, 0, trace.step_BT)
    last_JB = [
        np.where(place_BT // block == number, step_BT, 0).max(axis=1)
        for number in range(-1, step_BT.shape[1] // block + 1)
    ]
    steps_JB = np.diff(np.maximum.accumulate(last_JB), axis=0)
    return int(steps_JB.max(axis=1).sum())


def clocks():
    """Returns (wall seconds, CPU seconds of this thread) as an array."""
    return np.array([time.perf_counter(), time.thread_time()])


def host_work(run):
    """Returns (share of a run's wall time, CPU seconds) outside of device calls.

    A device call lasts from the engine's dispatch to what it fetches at the end.
    """
    loop, fetch = Engine.loop.fget, sharding.fetch
    on_device, dispatched = np.zeros(2), None

    def timed_loop(made):
        def dispatch(*args, **static):
            nonlocal dispatched
            dispatched = clocks()
            return loop(made)(*args, **static)

        return dispatch

    def timed_fetch(tree):
        nonlocal on_device, dispatched
        fetched = fetch(tree)
        if dispatched is not None:
            on_device, dispatched = on_device + clocks() - dispatched, None
        return fetched

    start = clocks()
    with (
        mock.patch.object(Engine, "loop", property(timed_loop)),
        mock.patch.object(sharding, "fetch", timed_fetch),
    ):
        run()
    wall, cpu = clocks() - start
    return 1 - on_device[0] / wall, cpu - on_device[1]


def answer(row) -> list[int]:
    """Returns the ids of a row's answer."""
    return row.tokens_T[row.prompt_len : row.prompt_len + row.len].tolist()


def multiplications(model: ModelConfig, work: Work) -> float:
    """Returns the FLOPs of weights that some work of the engine needs.

    Prompts' whole blocks are among the windows that were run for their keys. Of experts
    those count that a token goes to; an embedding is looked up, not multiplied.
    """
    sizes = sizes_of(model)
    windows = sizes.layers * (work.steps + work.clean) + sizes.head * work.steps
    return 2 * model.block * windows


def weights_read(model: ModelConfig, sizes: Sizes, tokens: float) -> float:
    """Returns the weights that a forward of so many tokens reads at most, once each."""
    if not model.experts:
        return sizes.stored + sizes.head
    chosen = model.experts_per_token / model.experts
    of_experts = (sizes.stored - sizes.layers) / (1 - chosen)
    return sizes.stored + sizes.head - of_experts * max(0, 1 - chosen * tokens)


def roofline(model: ModelConfig, context: int, work: Work):
    """Returns the least seconds of some work on this chip, or None if it is unknown."""
    chip = report.chip()
    if chip is None or model.attention == "full":  # of canvases it knows nothing
        return None
    tokens = model.block * (work.steps + work.clean) / work.forwards
    weights = weights_read(model, sizes_of(model), tokens)
    cache = 2 * model.layers * model.kv_heads * model.head_dim * context * work.steps
    bytes_ = (weights * work.forwards + cache) * jnp.dtype(model.dtype).itemsize
    return max(bytes_ / chip[0], multiplications(model, work) / chip[1])


def sampler(rows: int, room: int, args, model: ModelConfig) -> SamplerConfig:
    """Returns how a number of rows is sampled: at the forced rate, nothing stops."""
    return SamplerConfig(
        block=model.block,
        steps_per_block=model.block,
        strategy="forced",
        max_prompt=args.prompt,
        max_new=max(args.new, room),
        rows=rows,
        prefill=args.prefill,
        cache=args.cache,
    )


def timed(ways: dict, repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of each way's calls; the ways alternate."""
    seconds = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def compared(first: list[float], own: list[float]) -> str:
    """Returns how many times as fast a room is as the first, and the interval of that.

    first, own: seconds. The geometric mean of the turns' ratios: what slows a turn slows both.
    """
    found = scores.mean(np.log(first) - np.log(own))
    if found.low is None:  # a single turn
        return f"{np.exp(found.value):.3f}"
    value, low, high = np.exp(found[:3])
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


def measure(rows: int, args, model: ModelConfig, params, mesh) -> list[dict]:
    """Returns what a number of rows gives with each room: rows of the table.

    The rooms take turns, too: only then do they tell what room costs.
    """
    key = jax.random.key(args.seed)
    prompts, new = requests(rows, args, model)
    cfgs = {room: sampler(rows, room, args, model) for room in args.room}
    ways = {}
    for room, cfg in cfgs.items():
        made = Engine(model=model, cfg=cfg, mesh=mesh)
        ways[room, "engine"] = functools.partial(
            on_engine, made, params, prompts, new, key
        )
        if args.steady:
            ways[room, "half"] = functools.partial(
                on_engine, made, params, prompts, new // 2, key
            )
        elif not args.engine_only:
            ways[room, "batches"] = functools.partial(
                in_batches, params, prompts, new, key, model=model, cfg=cfg
            )
    answers = {way: run() for way, run in ways.items()}  # compiles
    whole = [ids for (_, name), (ids, _) in answers.items() if name != "half"]
    if len({str(sorted(ids.items())) for ids in whole}) > 1:
        raise RuntimeError("the engine, batches or rooms answer differently")
    seconds = timed(ways, args.repeats)
    table = []
    for room, cfg in cfgs.items():
        names = [name for its, name in ways if its == room]
        found = {
            name: (*answers[room, name], statistics.median(seconds[room, name]))
            for name in names
        }
        if args.steady:
            found = {"engine": second_half(found["engine"], found["half"])}
        watched = room, "half" if args.steady else "engine"
        share, busy = host_work(ways[watched])
        host = share, busy / answers[watched][1].forwards
        row = told(cfg, args, model, prompts, found, host)
        if len(cfgs) > 1:
            turns = (seconds[its, "engine"] for its in (args.room[0], room))
            row["times_first_room"] = compared(*turns)
        table.append(row)
    return table


def second_half(whole, half):
    """Returns what answers, Work and seconds are beyond those of answers half as long."""
    (ids, work, seconds), (first, less, before) = whole, half
    rest = {i: answer[len(first[i]) :] for i, answer in ids.items()}
    return rest, work.beyond(less), seconds - before


def told(cfg, args, model: ModelConfig, prompts, found, host) -> dict:
    """Returns a row of the table.

    found: (answers, Work, seconds) of "engine" and "batches". host: `host_work`'s share,
    and CPU seconds of a forward.
    """
    (share, busy), (ids, work, seconds) = host, found["engine"]
    context = args.prompt * 3 // 4 + args.new // 4
    if args.steady:
        context = args.prompt + args.new * 3 // 4
    tokens = sum(len(answer) for answer in ids.values())
    row = {
        "model": args.model,
        "dtype": model.dtype,
        "kernels": model.kernels,
        "rows": cfg.rows,
        "context": context,
        "max_new": cfg.max_new,
        "sampler": f"block {model.block}, {cfg.strategy}, temperature 1",
        "requests": len(prompts),
        "tokens": tokens,
        "group": args.group,
        "tokens_per_forward": round(tokens / work.forwards, 2),
        "busy_rows": round(work.steps / work.forwards, 1),
        "percent_on_host": round(100 * share, 2),
        "host_ms_per_forward": round(1e3 * busy, 3),
    }
    if model.attention == "full":
        row["cache"], row["engine_canvases"] = args.cache, work.clean
    for name, (_, its, lasted) in found.items():
        row[f"{name}_forwards"] = its.forwards
        row[f"{name}_tokens_per_second"] = float(f"{tokens / lasted:.4g}")
    if peak := report.flops():
        flops = multiplications(model, work)
        row["percent_mfu"] = round(100 * flops / seconds / peak, 1)
    if "batches" in found:
        row["speedup"] = round(found["batches"][2] / seconds, 2)
    shortest = roofline(model, context, work)
    if shortest is not None:
        row["percent_of_roofline"] = round(100 * shortest / seconds, 1)
    return row


def main():
    """Measures each number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="0.1b", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--prompt", type=int, default=128, help="longest prompt, tokens"
    )
    parser.add_argument("--new", type=int, default=128, help="longest answer, tokens")
    parser.add_argument(
        "--room", type=int, nargs="+", default=[0], help="sampler.max_new, if more"
    )
    parser.add_argument("--waves", type=int, default=3, help="requests for every row")
    parser.add_argument("--group", type=int, default=1, help="requests of one prompt")
    parser.add_argument("--steady", action="store_true", help="of busy rows, see above")
    parser.add_argument(
        "--prefill", type=int, default=512, help="prompt tokens a forward takes along"
    )
    parser.add_argument(
        "--dtype", choices=report.DTYPES, help="default: bfloat16, on CPU float32"
    )
    parser.add_argument(
        "--cache",
        default="auto",
        choices=("auto", *policy.POLICIES),
        help="none, prefix and dual: full attention",
    )
    parser.add_argument("--block", type=int, default=4)
    kinds = pallas_kernels.CHOICES
    parser.add_argument(
        "--kernels", default="auto", choices=kinds, help="model.kernels"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine-only", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report.positive(parser, args, "room")
    if args.steady and args.new < 2 * args.block:
        parser.error(f"--new={args.new}: half of it is to be a block of {args.block}")
    dtype = args.dtype or report.dtype()
    full = args.cache in ("none", "prefix", "dual")
    model = dataclasses.replace(
        SHAPES[args.model],
        dtype=dtype,
        kernels=args.kernels,
        block=args.block,
        attention="full" if full else "block",
    )
    mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    init = jax.jit(lambda key: transformer.init(key, model, jnp.dtype(dtype)))

    def weights(count: int):  # made anew, so that a device never holds them twice
        like = placement.weights(model, sampler(count, 0, args, model), mesh)
        return acting.taken(init(jax.random.key(args.seed)), like)

    for count in args.rows:
        for row in measure(count, args, model, weights(count), mesh):
            report.tell("decode", **row)


if __name__ == "__main__":
    command_line.entry(main)
