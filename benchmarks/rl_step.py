"""Seconds of a TraceRL step, by phase, from a run's own timer.

    python -m benchmarks.rl_step [--model=sdar-1.7b] [--config.a.b=value ...]

Trains for a few steps in a temporary folder and tells the median of all but the first,
which compiles. Without --model it is the bundled arithmetic model; with one, random
weights of that shape and the bundled tokenizer, every group being kept.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

import ml_dtypes  # noqa: F401 (numpy learns of bfloat16)
import numpy as np
import safetensors.numpy

from benchmarks import decode, report
from dllm_jax import command_line
from dllm_jax.models import hf, repository

SMALL = "examples/arithmetic/model"
DENSE = [name for name, x in decode.SHAPES.items() if not (x.experts or x.vision)]


def written(name: str, folder: str) -> str:
    """Returns a folder with random weights of a shape and the small model's tokenizer."""
    home, shape = pathlib.Path(folder) / "model", decode.SHAPES[name]
    shutil.copytree(SMALL, home, ignore=shutil.ignore_patterns(repository.SINGLE))
    config = json.loads((home / "config.json").read_text()) | {
        "hidden_size": shape.d_model,
        "intermediate_size": shape.ffw,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": shape.tied,
    }
    (home / "config.json").write_text(json.dumps(config))
    model, rng, weights = hf.read_config(home), np.random.default_rng(0), {}
    for _, spec, stored in hf.parameters(model, ("lm",)):
        for index, place in stored.items():
            size = hf.tensor_shape(spec, model, len(index))
            x = rng.standard_normal(size, np.float32) * 0.02
            x = np.ones(size) if spec.init == "ones" else x
            weights[place.name] = x.astype("bfloat16")
    safetensors.numpy.save_file(
        weights, home / repository.SINGLE, metadata={"format": "pt"}
    )
    return str(home)


def main():
    """Runs, and reads the run's metrics."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", default="", choices=["", *DENSE])
    p.add_argument("--steps", type=int, default=4)
    args, more = p.parse_known_args()
    if args.steps < 2:
        p.error(f"--steps={args.steps}: the first step compiles, so at least 2")
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "model.path": written(args.model, folder) if args.model else SMALL,
            "run.folder": f"{folder}/run",
            "run.export": False,
            "data.heldout": "",
            "rl.steps": args.steps,
            "rl.min_solved": 0.0,
            "rl.max_solved": 1.0,
        }
        command = [sys.executable, "-m", "dllm_jax.train"]
        command += ["--config=configs/tracerl.py"]
        command += [f"--config.{name}={value}" for name, value in flags.items()]
        ran = subprocess.run(command + more, check=False, stdout=sys.stderr)
        if ran.returncode:  # it has said why
            sys.exit(ran.returncode)
        text = (pathlib.Path(folder) / "run/metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()][1:]

    def median(name):
        return statistics.median(row[name] for row in rows)

    phases = [name for name in rows[-1] if name.startswith("seconds/")]
    told = {name.replace("/", "_"): round(median(name), 3) for name in phases}
    report.tell(
        "rl_step",
        model=args.model or "arithmetic, 0.6M",
        steps=len(rows),
        **told,
        seconds=round(sum(told.values()), 3),
        tokens_per_forward=round(median("tokens_per_forward"), 2),
        response_length=round(median("response_length"), 1),
        packed_fill=round(median("packed_fill"), 3),
        tokens_per_second_of_rollout=round(median("tokens_per_second/rollout"), 1),
    )


if __name__ == "__main__":
    command_line.entry(main)
