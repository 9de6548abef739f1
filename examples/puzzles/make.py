"""Makes tasks in which the order of unmasking matters, and a blank checkpoint for SFT.

    python -m examples.puzzles.make sudoku
    python -m examples.puzzles.make sums

writes train.jsonl and heldout.jsonl (different problems) to examples/puzzles/TASK, from which
configs/sft.py:TASK trains the bundled model, and tells how many held-out problems are among
those to train on. That of sudoku begins as a randomly initialised checkpoint, which is written
to runs/sudoku/blank; that of sums as the bundled model of examples/arithmetic.

sudoku: 4 x 4, as few givens as one order finds, so that there is one solution. The prompt is
the 16 digits, 0 where a cell is empty, and its answer is one block: the model chooses which
cell it fills next. sums: two numbers of up to four digits, worked out digit by digit from the
right, in blocks of 16, where a digit can wait for the carry beside it.
"""

import argparse
import json
import pathlib
from collections.abc import Callable

import numpy as np

from dllm_jax.data import tasks
from examples.arithmetic.make import respond, tokenizer, write_blank, write_records

HERE = pathlib.Path(__file__).parent
# A prompt has four tokens besides the question: that of a sudoku is a block of 20.
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 112,
}


def sudoku(count: int, seed: int) -> list[dict]:
    """Returns different sudokus; `puzzle` is the question and what the grader judges by."""
    return [
        {
            "puzzle": row["puzzle"],
            "response": f"\\boxed{{{row['solution']}}}",
        }
        for row in tasks.drawn("sudoku", count, seed)
    ]


def sums(count: int, seed: int) -> list[dict]:
    """Returns different sums of two numbers below 10,000, with their working."""
    rng, seen = np.random.default_rng(seed), {}
    while len(seen) < count:
        a, b = rng.integers(0, 10_000, 2).tolist()
        seen[f"{a}+{b}"] = a, b
    return [
        {
            "question": question,
            "answer": str(a + b),
            "response": respond(a, b, worked=True),
        }
        for question, (a, b) in seen.items()
    ]


# Task: (its records, the field of the question, the block of its blank model; 0: none).
TASKS: dict[str, tuple[Callable, str, int]] = {
    "sudoku": (sudoku, "puzzle", 20),
    "sums": (sums, "question", 0),
}


def shared(heldout: list[dict], train: list[dict], field: str) -> int:
    """Returns how many held-out records have a field that one to train on has, too."""
    known = {row[field] for row in train}
    return sum(row[field] in known for row in heldout)


def main():
    """Writes a task's records, and its blank checkpoint if it has one."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("task", choices=[*TASKS])
    p.add_argument("--heldout", type=int, default=256, help="problems set aside")
    p.add_argument("--train", type=int, default=4000, help="problems to train on")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    draw, field, block = TASKS[args.task]
    rows = draw(args.heldout + args.train, args.seed)
    folder = HERE / args.task
    write_records(folder, rows, args.heldout)
    parts = [
        [json.loads(line) for line in (folder / f"{name}.jsonl").open()]
        for name in ("heldout", "train")
    ]
    for name in (field, "response"):
        print(
            f"{shared(*parts, name)} of {args.heldout} held-out problems have a {name} "
            "that is in train.jsonl"
        )
    if block:
        write_blank(
            pathlib.Path("runs") / args.task / "blank",
            np.random.default_rng(args.seed),
            SHAPE,
            tokenizer(chat=CHAT),
            block_size=block,
            torch_dtype="bfloat16",
        )


if __name__ == "__main__":
    main()
