"""Makes tasks in which the order of unmasking matters, and a blank checkpoint for SFT.

    python -m examples.puzzles.make sudoku
    python -m examples.puzzles.make sums
    python -m examples.puzzles.make countdown --train=6000

writes train.jsonl and heldout.jsonl (different problems) to examples/puzzles/TASK, from which
configs/sft.py:TASK trains the bundled model, and tells how many held-out problems are among
those to train on. That of sudoku begins as a randomly initialised checkpoint, which is written
to runs/sudoku/blank; those of the others as the bundled model of examples/arithmetic.

sudoku: 4 x 4, as few givens as one order finds, so that there is one solution. The prompt is
the 16 digits, 0 where a cell is empty, and its answer is one block: the model chooses which
cell it fills next. sums: two numbers of up to four digits, worked out digit by digit from the
right, in blocks of 16, where a digit can wait for the carry beside it. countdown: three numbers
of two digits, and a target of two that they make with + and -, each used once; of what the model
works out the checker reads the expression in the box alone, and any that is right will do.

    python -m examples.puzzles.make countdown --read FILE

writes those problems of d1's countdown_cd3_test.jsonl whose numbers and targets have two digits,
as the model is asked them, to runs/countdown/d1.jsonl: a second held-out file, some of whose
targets need * or /.
"""

import argparse
import json
import pathlib
from collections.abc import Callable

import numpy as np

from dllm_jax.data import tasks
from examples.arithmetic.make import (
    check_counts,
    respond,
    tokenizer,
    write_blank,
    write_records,
)

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


def countdown_record(numbers: list[int], target: int) -> dict:
    """Returns a question as short as its tokens, and what the grader judges by."""
    question = f"{','.join(map(str, numbers))}={target}"
    return {"question": question, "numbers": numbers, "target": target}


def countdown(count: int, seed: int) -> list[dict]:
    """Returns different countdowns of numbers of two digits, with a solution worked out.

    What is added stands before what is subtracted, so that no step is below zero.
    """
    rng, seen = np.random.default_rng(seed), {}
    while len(seen) < count:
        numbers, plus = rng.integers(10, 100, 3), rng.integers(0, 2, 3).astype(bool)
        target = int(numbers[plus].sum() - numbers[~plus].sum())
        if not 10 <= target < 100:
            continue
        record = countdown_record(numbers.tolist(), target)
        first, *others = sorted(zip(~plus, numbers, strict=True), key=lambda x: x[0])
        text, worth, steps = str(first[1]), int(first[1]), ""
        for minus, number in others:
            term = f"{'-' if minus else '+'}{number}"
            after = worth - int(number) if minus else worth + int(number)
            steps += f"{worth}{term}={after},"
            text, worth = text + term, after
        known = str(sorted(record["numbers"])), target  # however they are arranged
        seen.setdefault(known, record | {"response": f"{steps}\\boxed{{{text}}}"})
    return [*seen.values()]


def read_d1(path: str) -> list[dict]:
    """Returns the records of d1's file of countdowns whose numbers all have two digits."""
    lines = [json.loads(x) for x in pathlib.Path(path).read_text().splitlines()]
    asked = [([*map(int, x["input"].split(","))], int(x["output"])) for x in lines]
    return [
        countdown_record(numbers, target)
        for numbers, target in asked
        if all(10 <= x < 100 for x in (*numbers, target))
    ]


# Task: (its records, how many different ones there are, the field of the question, the block of
# its blank model; 0: none).
TASKS: dict[str, tuple[Callable, int, str, int]] = {
    "sudoku": (sudoku, tasks.MOST["sudoku"], "puzzle", 20),
    "sums": (sums, 10_000**2, "question", 0),
    "countdown": (countdown, 286_068, "question", 0),
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
    p.add_argument("--read", metavar="FILE", help="countdown: d1's problems instead")
    args = p.parse_args()
    if args.read:
        if args.task != "countdown":
            p.error("--read is of countdown alone")
        if not pathlib.Path(args.read).is_file():
            p.error(f"--read={args.read}: no such file")
        folder = pathlib.Path("runs/countdown")
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row) + "\n" for row in read_d1(args.read)]
        (folder / "d1.jsonl").write_text("".join(lines))
        print(f"{folder}/d1.jsonl: {len(lines)} problems")
        return
    draw, most, field, block = TASKS[args.task]
    check_counts(p, args, most)
    try:
        rows = draw(args.heldout + args.train, args.seed)
    except ValueError as error:
        p.error(str(error))
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
