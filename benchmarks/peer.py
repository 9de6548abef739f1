"""The engine against a plain PyTorch loop: same checkpoint, prompts, limits and rate.

    make test-torch                             # makes the environment with PyTorch
    python -m benchmarks.peer --rows 1 32

The loop (benchmarks/torch_loop.py) is what a model card's code does, batched: a cache,
sdpa attention, one forward more to keep a block's keys, and a batch that ends with its
longest answer. Both unmask at the forced rate of benchmarks/decode.py. They alternate;
medians, first call excluded. CPU, f32.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time

import jax

from benchmarks import decode, report
from dllm_jax import sharding
from dllm_jax.models import acting, hf
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.engine import Engine

ROOT = pathlib.Path(__file__).parents[1]


def main():
    """Measures each number of rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="0.1b", choices=("tiny", "0.1b"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument(
        "--prompt", type=int, default=128, help="longest prompt, tokens"
    )
    parser.add_argument("--new", type=int, default=128, help="longest answer, tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.set_defaults(waves=3, group=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torch", default=str(ROOT / ".venv-torch/bin/python"))
    args = parser.parse_args()
    if not pathlib.Path(args.torch).exists():
        parser.error(f"{args.torch} is not there: make test-torch makes it")
    shape = decode.SHAPES[args.model]
    fields = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.ffw,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied,
    }
    with tempfile.TemporaryDirectory() as folder:
        run(args, folder, fields)


def run(args, folder: str, fields: dict):
    """Starts the loop and times it and the engine in turn."""
    loop = subprocess.Popen(
        # -P: files beside the program, such as kernels.py, are no packages of PyTorch's.
        [
            args.torch,
            "-P",
            ROOT / "benchmarks/torch_loop.py",
            folder,
            json.dumps(fields),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": ""},
    )
    while loop.stdout.readline().strip() != "ready":
        if loop.poll() is not None:
            raise RuntimeError("the PyTorch loop did not start")
    model, params = hf.load(folder, dtype="float32")
    mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
    params = acting.taken(params, acting.abstract(model, mesh))
    for rows in args.rows:
        prompts, new = decode.requests(rows, args, model)
        line = {"prompts": prompts, "new": new.tolist(), "rows": rows}
        cfg = SamplerConfig(
            block=model.block,
            steps_per_block=model.block,
            strategy="forced",
            max_prompt=args.prompt,
            max_new=args.new,
            rows=rows,
        )
        engine, key = Engine(model=model, cfg=cfg, mesh=mesh), jax.random.key(args.seed)
        seconds = {"engine": [], "torch": []}
        for _ in range(args.repeats + 1):
            start = time.perf_counter()
            decode.on_engine(engine, params, prompts, new, key)
            seconds["engine"].append(time.perf_counter() - start)
            loop.stdin.write(json.dumps(line) + "\n")
            loop.stdin.flush()
            seconds["torch"].append(json.loads(loop.stdout.readline())["seconds"])
        median = {name: statistics.median(x[1:]) for name, x in seconds.items()}
        tokens = int(new.sum())
        report.tell(
            "peer",
            model=args.model,
            dtype="float32",
            rows=rows,
            tokens=tokens,
            engine_tokens_per_second=round(tokens / median["engine"], 1),
            pytorch_tokens_per_second=round(tokens / median["torch"], 1),
            times_as_fast=round(median["torch"] / median["engine"], 2),
        )
    loop.stdin.close()


if __name__ == "__main__":
    main()
