"""This package against plain PyTorch: same weights, prompts, limits and rates, in turns.

    make .venv-torch/.installed                     # the environment with PyTorch
    python -m benchmarks.peer                       # everything: hours
    python -m benchmarks.peer --shapes 30m --parts rows update --rows 32 --rounds 2

Parts, a line of JSON each:

    rows     ragged prompts and answers, three requests for every row
    prompts  one long prompt and eight tokens of an answer
    update   one AdamW step on answers with so many rounds in every block
    canvas   full attention (LLaDA's), two tokens a step, without a cache and with `prefix`;
             of no more than 8 rows
    first    from the start of a process to its first answer, cold and warm; of the
             smallest shape, as it is the bundled model's

The other side is benchmarks/torch_loop.py, which says what it does well. Seconds are
minimum / median / maximum of alternating repetitions, the first call excluded but in
`first`; `times_as_fast` is the median of their ratios, above 1 where this package is
ahead. CPU, f32, as many threads as there are cores.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from benchmarks import decode, report, train_step
from dllm_jax import command_line, exits, sharding
from dllm_jax.models import acting, hf
from dllm_jax.models.config import ModelConfig
from dllm_jax.rl import layout as layouts
from dllm_jax.rl import learner, noise
from dllm_jax.rl.config import BatchConfig, ObjectiveConfig, OptimConfig
from dllm_jax.sampling import answers, placement
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.engine import Engine

ROOT = pathlib.Path(__file__).parents[1]
SMALLEST = ModelConfig(
    vocab=512,
    d_model=128,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffw=384,
    tied=True,
    mask_id=0,
    eos_id=1,
)
SHAPES = {
    name: dataclasses.replace(model, dtype="float32")
    for name, model in (
        ("0.6m", SMALLEST),
        ("30m", decode.SHAPES["30m"]),
        ("135m", decode.SHAPES["135m"]),
    )
}
ANSWERS = {"0.6m": 32, "30m": 8, "135m": 4}  # of an update
CANVASES = 8  # rows at most: of more, each of PyTorch's calls takes minutes
BUNDLED = "0.6m"  # the shape of the model that `first` asks


def fields_of(model: ModelConfig) -> dict:
    """Returns what the config.json of the other side's model says of its shape."""
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.d_model,
        "intermediate_size": model.ffw,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "tie_word_embeddings": model.tied,
        "eos_token_id": model.eos_id,
    }


class Torch:
    """The other side's process: `ask` returns its seconds for a task."""

    def __init__(self, python: str, folder: str, model: ModelConfig):
        """Starts it; it makes the model in `folder` where there is none."""
        self.process = subprocess.Popen(
            # -P: files beside the program, such as kernels.py, are no packages of PyTorch's.
            [
                python,
                "-P",
                ROOT / "benchmarks/torch_loop.py",
                folder,
                json.dumps(fields_of(model)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": ""},
        )
        while (line := self.process.stdout.readline()).strip() != "ready":
            if not line:
                raise exits.CannotGoOn(
                    "the PyTorch loop did not start: it has said why"
                )

    def ask(self, key: str = "seconds", **task) -> float:
        """Returns the seconds of a task, or what else it says of it."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            said = f"the PyTorch loop ended with {code} in {task['task']!r}: see above"
            raise exits.CannotGoOn(said)
        return json.loads(line)[key]

    def close(self):
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait()


def timed(run) -> float:
    """Returns the seconds of a call."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def told(part: str, ours, theirs, repeats: int, work: int = 0, **facts):
    """Prints a part's line: `ours` and `theirs` return seconds, in turns.

    work: tokens or answers' tokens of a call, for rates; 0: none are told.
    """
    pairs = [(ours(), theirs()) for _ in range(repeats + 1)]
    ours_s, theirs_s = zip(*(pairs[1:] or pairs), strict=True)
    ratio = statistics.median(b / a for a, b in zip(ours_s, theirs_s, strict=True))
    spread = {"seconds": ours_s, "pytorch_seconds": theirs_s}
    for name, values in spread.items():
        numbers = min(values), statistics.median(values), max(values)
        facts[name] = " / ".join(f"{x:.4g}" for x in numbers)
    if work:
        facts["tokens"] = work
        facts["tokens_per_second"] = round(work / statistics.median(ours_s), 1)
        facts["pytorch_tokens_per_second"] = round(
            work / statistics.median(theirs_s), 1
        )
    report.tell("peer", part=part, **facts, times_as_fast=round(ratio, 2))


@dataclasses.dataclass
class Side:
    """What a shape is measured with."""

    name: str
    model: ModelConfig
    params: dict  # as they are trained
    torch: Torch
    args: argparse.Namespace
    folder: str

    @functools.cached_property
    def mesh(self):
        """One device."""
        return sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])

    def acting(self, model: ModelConfig, cfg: SamplerConfig):
        """Returns the weights as a sampler has them; model: the side's, perhaps varied."""
        like = placement.weights(model, cfg, self.mesh)
        return acting.laid_out(self.params, like)


def sampled(side: Side, part: str, prompts, new, rows: int, limits: tuple[int, int]):
    """Measures requests on the engine; limits: the longest prompt and answer."""
    cfg = SamplerConfig(
        block=side.model.block,
        steps_per_block=side.model.block,
        strategy="forced",
        max_prompt=limits[0],
        max_new=limits[1],
        rows=rows,
    )
    engine = Engine(model=side.model, cfg=cfg, mesh=side.mesh)
    key = jax.random.key(side.args.seed)
    request = {"prompts": prompts, "new": [int(n) for n in new], "rows": rows}
    weights = side.acting(side.model, cfg)
    run = functools.partial(
        decode.on_engine, engine, weights, prompts, np.array(new), key
    )
    told(
        part,
        lambda: timed(lambda: run() and None),
        lambda: side.torch.ask(task="sample", **request),
        side.args.repeats,
        int(sum(new)),
        model=side.name,
        rows=rows,
        longest_prompt=limits[0],
        longest_answer=limits[1],
    )


def rows(side: Side):
    """Ragged requests, three for every row."""
    args = argparse.Namespace(
        prompt=64, new=64, waves=3, group=1, steady=False, seed=side.args.seed
    )
    for count in side.args.rows:
        prompts, new = decode.requests(count, args, side.model)
        sampled(side, "rows", prompts, new, count, (args.prompt, args.new))


def prompts(side: Side):
    """One prompt, and eight tokens."""
    rng = np.random.default_rng(side.args.seed)
    for length in side.args.prompts:
        prompt = rng.integers(2, side.model.vocab, length).tolist()
        sampled(side, "prompts", [prompt], [8], 1, (length, 8))


def canvas(side: Side):
    """Blocks of 32 behind a prompt of 64, under full attention."""
    prompt, new, block = 64, 64, 32
    full = dataclasses.replace(side.model, attention="full", block=block)
    rng = np.random.default_rng(side.args.seed)
    for count in side.args.rows:
        if count > CANVASES:
            continue
        asked = rng.integers(2, full.vocab, (count, prompt)).tolist()
        for cache in ("none", "prefix"):
            cfg = SamplerConfig(
                block=block,
                steps_per_block=block // 2,
                strategy="static",
                cache=cache,
                horizon=new if cache == "prefix" else 0,
                max_prompt=prompt,
                max_new=new,
                rows=count,
            )
            made = answers.answerer(model=full, cfg=cfg, mesh=side.mesh)
            weights = side.acting(full, cfg)

            def run(made=made, asked=asked, weights=weights):
                key = jax.random.key(side.args.seed)
                stream = made.stream(weights, asked, key, temperature=1.0)
                return answers.collect(stream, len(asked)).tokens_BT

            sizes = {"rows": count, "prompt": prompt, "new": new, "block": block}
            task = functools.partial(
                side.torch.ask, task="canvas", cache=cache, **sizes
            )
            told(
                "canvas",
                lambda run=run: timed(run),
                task,
                side.args.repeats,
                count * new,
                model=side.name,
                cache=cache,
                rows=count,
            )


def update(side: Side):
    """One step, on packed rows of a width that the program chooses, and on rows of rounds."""
    model, n = side.model, ANSWERS[side.name]
    for rounds in side.args.rounds:
        args = argparse.Namespace(
            trajectories=n,
            max_prompt=64,
            max_answer=256,
            mean_answer=96,
            block=model.block,
            steps_per_block=rounds,
            vocab=model.vocab - 1,
        )
        rng = np.random.default_rng(side.args.seed)
        trace = train_step.trajectories(args, rng)
        shape = trace.tokens_BT.shape
        layout = layouts.Layout(block=model.block, longest=args.max_answer)
        width = side.args.tokens or layout.width(shape[1], rounds)
        cfg = BatchConfig(rows=side.args.micro, tokens=width)
        batch, source = train_step.packed_rows(
            trace, noise.of_steps(trace.step_BT), rounds, model, layout, cfg
        )
        split, split_source = train_step.one_row_per_round(
            trace, trace.step_BT, mask_id=model.mask_id, block=model.block, rows=1
        )
        adv_nT, old_nT = rng.normal(size=(2, *shape)) - np.array([0, 8])[:, None, None]
        weight_nT = source.scatter(batch.weight_BU, shape)
        ours = jax.device_put(
            batch.replace(
                adv_BU=source.gather(adv_nT), old_logp_BU=source.gather(old_nT)
            )
        )
        theirs = {
            name: getattr(split, field)
            for name, field in (
                ("tokens", "tokens_BT"),
                ("pos", "pos_BT"),
                ("end", "end_BT"),
                ("group", "group_BT"),
                ("where", "where_BU"),
                ("target", "target_BU"),
            )
        }
        for name, x_nT in (("weight", weight_nT), ("adv", adv_nT), ("old", old_nT)):
            theirs[name] = split_source.gather(x_nT)
        theirs = {name: np.concatenate(x) for name, x in theirs.items()}
        whole = ("tokens", "pos", "end", "group", "where", "target")
        theirs |= {name: theirs[name].astype(np.int64) for name in whole}
        file = f"{side.folder}/update.npz"
        np.savez(file, **theirs)
        plans = {"policy": learner.Plan(("policy",), OptimConfig(lr=1e-6), 100)}
        states = {"policy": learner.begin(side.params, plans["policy"])}
        step = jax.jit(
            functools.partial(
                learner.update, model=model, plans=plans, cfg=ObjectiveConfig()
            )
        )
        ours_norm = float(step(states, ours)[1]["grad_norm"])
        norm = side.torch.ask("gradient_norm", task="update", file=file)
        if abs(norm / ours_norm - 1) > 1e-3:
            raise RuntimeError(f"two gradients: their norms are {ours_norm} and {norm}")
        told(
            "update",
            lambda step=step, states=states, ours=ours: timed(
                lambda: step(states, ours)
            ),
            functools.partial(side.torch.ask, task="update", file=file),
            side.args.repeats,
            int(trace.len_B.sum()),
            model=side.name,
            rounds=rounds,
            answers=n,
            batch=f"{cfg.rows} x {cfg.tokens}",
            slots=int(batch.used) * cfg.rows * cfg.tokens,
            pytorch_slots=theirs["tokens"].size,
            fill=round(batch.fill, 3),
        )


def first(side: Side):
    """The bundled model answers a prompt, and PyTorch's, of its size, one of 16 tokens."""
    line = json.dumps({"prompts": [list(range(5, 21))], "new": [32], "rows": 1})
    with tempfile.TemporaryDirectory() as cache:
        kept = {
            "PYTHONPATH": str(ROOT),
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        command = [sys.executable, "-m", "dllm_jax.generate"]
        command += ["--model=examples/arithmetic/model", "--dtype=float32", "785+800"]

        def ours() -> float:
            start = time.perf_counter()
            subprocess.run(
                command,
                cwd=ROOT,
                check=True,
                stdout=subprocess.DEVNULL,
                env=os.environ | kept,
            )
            return time.perf_counter() - start

        def theirs() -> float:
            start = time.perf_counter()
            torch = Torch(side.args.torch, side.folder, side.model)
            torch.ask(task="sample", **json.loads(line))
            seconds = time.perf_counter() - start
            torch.close()
            return seconds

        told("first", ours, theirs, 0, model=side.name, compiled="cold")
        told("first", ours, theirs, side.args.repeats, model=side.name, compiled="warm")


PARTS = {
    "rows": rows,
    "prompts": prompts,
    "update": update,
    "canvas": canvas,
    "first": first,
}


def main():
    """Measures every part of every shape that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    lengths = [128, 512, 1024, 2048, 4096]
    parser.add_argument("--prompts", type=int, nargs="+", default=lengths)
    parser.add_argument("--rounds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro", type=int, default=2, help="rows of our microbatch")
    parser.add_argument("--tokens", type=int, default=0, help="of a row; 0: chosen")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torch", default=str(ROOT / ".venv-torch/bin/python"))
    args = parser.parse_args()
    report.positive(parser, args, "tokens")
    if max(args.rounds) > (block := SMALLEST.block):
        parser.error(f"--rounds={max(args.rounds)}: a block has {block} positions")
    if not pathlib.Path(args.torch).exists():
        parser.error(f"{args.torch} is not there: make .venv-torch/.installed makes it")
    if args.parts == ["first"] and BUNDLED not in args.shapes:
        parser.error(f"--parts first is of the bundled model: --shapes {BUNDLED}")
    if args.parts == ["canvas"] and min(args.rows) > CANVASES:
        parser.error(f"--rows: canvas has no more than {CANVASES}")
    for name in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            torch = Torch(args.torch, folder, SHAPES[name])
            stored, params = hf.load(folder, dtype="float32")
            model = dataclasses.replace(stored, dtype="float32")
            side = Side(name, model, params, torch, args, folder)
            for part in args.parts:
                if part != "first" or name == BUNDLED:
                    PARTS[part](side)
            torch.close()


if __name__ == "__main__":
    command_line.entry(main)
