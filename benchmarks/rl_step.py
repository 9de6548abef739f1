"""Seconds of a TraceRL step, by phase, from a run's own timer.

    python -m benchmarks.rl_step [--model=sdar-1.7b] [--config.a.b=value ...]

Trains for a few steps in a temporary folder and tells the median of all but the first,
which compiles. Without --model it is the bundled arithmetic model; with one, random
weights of that shape and the bundled tokenizer, every group being kept.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import jax

from benchmarks import decode, report
from dllm_jax.models import hf, transformer

SMALL = "examples/arithmetic/model"


def written(name: str, folder: str) -> str:
    """Returns a folder with random weights of a shape and the small model's tokenizer."""
    small = hf.read_config(pathlib.Path(SMALL))
    model = dataclasses.replace(
        decode.SHAPES[name],
        vocab=small.vocab,
        mask_id=small.mask_id,
        eos_id=small.eos_id,
        pad_id=small.pad_id,
        dtype="bfloat16",
    )
    init = jax.jit(lambda key: transformer.init(key, model, "bfloat16"))
    hf.save(f"{folder}/model", model, init(jax.random.key(0)), like=SMALL)
    return f"{folder}/model"


def main():
    """Runs, and reads the run's metrics."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", default="", choices=["", *decode.SHAPES])
    p.add_argument("--steps", type=int, default=4)
    args, more = p.parse_known_args()
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
        subprocess.run(command + more, check=True, stdout=sys.stderr)
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
    main()
