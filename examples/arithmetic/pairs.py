"""Makes pairs of answers, for a reward model or DPO, of what an evaluation left.

    python -m dllm_jax.eval --config=configs/eval.py \
        --config.data.heldout=examples/arithmetic/train.jsonl --config.eval.problems=2000 \
        --config.run.folder=runs/arithmetic/answers
    python examples/arithmetic/pairs.py

answers problems three times each, and writes runs/arithmetic/pairs.jsonl: for each problem
with a right answer and a wrong one, the first of either.
"""

import argparse
import collections
import json
import pathlib

from dllm_jax.records import records, right


def pairs(answers: list[dict]) -> list[dict]:
    """Returns a preference for each group of graded answers that has both."""
    groups = collections.defaultdict(dict)
    for record in answers:  # right or wrong; of neither nobody knows which
        groups[record["group"]].setdefault(right(record), record)
    return [
        {
            "prompt": found[True]["question"],
            "chosen": found[True]["text"],
            "rejected": found[False]["text"],
        }
        for found in groups.values()
        if {True, False} <= found.keys() and found[False]["text"].strip()
    ]


def main():
    """Reads an evaluation's answers and writes the pairs."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--answers", default="runs/arithmetic/answers/eval.jsonl")
    p.add_argument("--out", default="runs/arithmetic/pairs.jsonl")
    args = p.parse_args()
    try:
        found = pairs(records(args.answers, "--answers"))
    except ValueError as error:
        p.error(str(error))
    except KeyError as error:
        p.error(f"--answers={args.answers}: no {error} in it: name an eval.jsonl")
    text = "".join(json.dumps(pair) + "\n" for pair in found)
    try:
        pathlib.Path(args.out).write_text(text)
    except OSError as error:
        p.error(f"--out={args.out}: {error.strerror}")
    print(f"{len(found)} pairs in {args.out}")


if __name__ == "__main__":
    main()
