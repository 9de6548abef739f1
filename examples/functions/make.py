"""Makes small programming problems, write a function of one of twenty families, and a model.

    python -m examples.functions.make

writes train.jsonl and heldout.jsonl (disjoint problems) beside this file: a question such as
`g(n): the rest of n divided by 7`, six tests that were made by running the right program, and
a response to learn from. It also writes a randomly initialised SDAR-format checkpoint, whose
tokenizer knows characters and some words of Python, to runs/functions/blank, from which
`configs/sft.py:functions` trains the bundled model. Half of the answers are wrong on
purpose: they are the program of another family, as a model that is always right has nothing
to learn. Which program pays is left to reinforcement learning (`configs/tracerl.py:code`).

The tests of a problem tell its program from those of every other family and from the same
program with its numbers one higher or lower, as far as these differ anywhere.
"""

import argparse
import itertools
import pathlib

import numpy as np

from examples.arithmetic import make as arithmetic

HERE = pathlib.Path(__file__).parent
# (what is asked, the value of the right program, the kind of x): {k} is a digit from 2 to 9,
# {j} another one, or the same; {x} is the argument's name.
FAMILIES = [
    ("{x} plus {k}", "{x} + {k}", "int"),
    ("{x} minus {k}", "{x} - {k}", "int"),
    ("{k} minus {x}", "{k} - {x}", "int"),
    ("{x} times {k}", "{x} * {k}", "int"),
    ("{x} times {k} plus {j}", "{x} * {k} + {j}", "int"),
    ("{x} plus {k}, times {j}", "({x} + {k}) * {j}", "int"),
    ("the rest of {x} divided by {k}", "{x} % {k}", "int"),
    ("{x} divided by {k}, rounded down", "{x} // {k}", "int"),
    ("{x} squared plus {k}", "{x} * {x} + {k}", "int"),
    ("the larger of {x} and {k}", "max({x}, {k})", "int"),
    ("the smaller of {x} and {k}", "min({x}, {k})", "int"),
    ("how far {x} is from {k}", "abs({x} - {k})", "int"),
    ("is {x} above {k}", "{x} > {k}", "int"),
    ("is {x} divisible by {k}", "{x} % {k} == 0", "int"),
    ("the sum of list {x} plus {k}", "sum({x}) + {k}", "list"),
    ("the first {k} of list {x}", "{x}[:{k}]", "list"),
    ("list {x} without its first {k}", "{x}[{k}:]", "list"),
    ("each of list {x} plus {k}", "[y + {k} for y in {x}]", "list"),
    ("how many of list {x} are above {k}", "sum(y > {k} for y in {x})", "list"),
    ("list {x} backwards, {k} times", "{x}[::-1] * {k}", "list"),
]
FUNCTIONS, ARGUMENTS = "fghpqr", "xnabcv"
DIGITS = range(2, 10)
# Of a family without {j} there are no more, and of each there are to be about as many.
MOST = len(FAMILIES) * len(DIGITS) * len(FUNCTIONS) * len(ARGUMENTS)
TESTS = 6
# Tokens beside single characters, so that an answer takes 10 to 25 of them.
WORDS = (
    *("```python\ndef ", "):\n    return ", "\n```", " plus ", " minus ", " times "),
    *("the ", " of ", "list ", " divided by ", ", rounded down", " squared", " and "),
    *("how far ", " is from ", "is ", " above ", " divisible by ", "how many", " are"),
    *(" without its first ", "each", " backwards, ", "larger", "smaller", "first "),
    *("sum", "max(", "min(", "abs(", "[y + ", "(y > ", " for y in ", "[::-1]", " + "),
    *(" - ", " * ", " % ", " // ", " == 0", "rest"),
)
SHAPE = arithmetic.SHAPE | {
    "hidden_size": 96,
    "intermediate_size": 256,
    "head_dim": 24,
    "vocab_size": 160,  # 146 tokens, filled up to a multiple of 16
}


def argument(rng: np.random.Generator, kind: str):
    """Returns a value that x may have."""
    if kind == "int":
        return int(rng.integers(-30, 100))
    return rng.integers(-5, 15, rng.integers(0, 12)).tolist()


def program(value: str, function: str, x: str) -> str:
    """Returns the program whose function has this value of x."""
    return f"def {function}({x}):\n    return {value}"


def called(value: str, given: list) -> list:
    """Returns the value of x for each x that is given. value: text of FAMILIES, filled in."""
    run = eval(f"lambda x: {value}")  # text of the table above
    return [run(x) for x in given]


def others(index: int, k: int, j: int) -> list[str]:
    """Returns values that are not this family's, and that its tests should tell apart."""
    asked, value, kind = FAMILIES[index]
    names = {"x": "x", "k": k, "j": j}
    found = [v.format(**names) for _, v, its in FAMILIES if its == kind and v != value]
    for step_k, step_j in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        if step_k or "{j}" in asked:
            found.append(value.format(x="x", k=k + step_k, j=j + step_j))
    return found


def telling(rng: np.random.Generator, index: int, k: int, j: int) -> list:
    """Returns TESTS values of x on which no other program does what the right one does.

    Some programs differ on few of them, or nowhere (2 * x is x * 2): of 200 draws the one
    that tells most apart is taken.
    """
    _, value, kind = FAMILIES[index]
    right = value.format(x="x", k=k, j=j)
    best, most = [], -1
    for _ in range(200):
        given = [argument(rng, kind) for _ in range(TESTS)]
        wanted = called(right, given)
        missed = others(index, k, j)
        told = sum(repr(called(other, given)) != repr(wanted) for other in missed)
        if told > most:
            best, most = given, told
        if told == len(missed):
            break
    return best


def problem(rng, index: int, k: int, j: int, function: str, x: str, wrong: float):
    """Returns a problem of a family; with a chance of `wrong` its response is another's."""
    asked, value, kind = FAMILIES[index]
    names = {"x": x, "k": k, "j": j}
    given = telling(rng, index, k, j)
    wanted = called(value.format(**names | {"x": "x"}), given)
    told = value
    if rng.random() < wrong:
        choices = [v for _, v, its in FAMILIES if its == kind and v != value]
        told = choices[rng.integers(len(choices))]
    text = program(told.format(**names), function, x)
    pairs = zip(given, wanted, strict=True)
    return {
        "question": f"{function}({x}): {asked.format(**names)}",
        "response": f"```python\n{text}\n```",
        "tests": {
            "kind": "asserts",
            "setup": "",
            "asserts": [f"assert {function}({x!r}) == {y!r}" for x, y in pairs],
        },
    }


def problems(rng: np.random.Generator, count: int, wrong: float) -> list[dict]:
    """Returns different problems, shuffled, of each family about as many; at most MOST."""
    rows = []
    each = -(-count // len(FAMILIES))
    for index, (asked, _, _) in enumerate(FAMILIES):
        all_j = DIGITS if "{j}" in asked else [0]
        every = [*itertools.product(DIGITS, all_j, FUNCTIONS, ARGUMENTS)]
        for i in rng.permutation(len(every))[:each]:
            rows.append(problem(rng, index, *every[i], wrong))
    return [rows[i] for i in rng.permutation(len(rows))[:count]]


def main():
    """Writes the two files and the blank checkpoint."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", default=str(HERE), help="folder of the problems")
    p.add_argument("--blank", default="runs/functions/blank", help="checkpoint folder")
    p.add_argument("--heldout", type=int, default=128, help="problems set aside")
    p.add_argument("--train", type=int, default=2000, help="problems to train on")
    p.add_argument("--wrong", type=float, default=0.5, help="share of wrong responses")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    arithmetic.check_counts(p, args, MOST)
    arithmetic.check_share(p, args, "wrong")
    rng = np.random.default_rng(args.seed)
    rows = problems(rng, args.heldout + args.train, args.wrong)
    arithmetic.write_records(pathlib.Path(args.out), rows, args.heldout)
    tok = arithmetic.tokenizer(WORDS)
    arithmetic.write_blank(pathlib.Path(args.blank), rng, SHAPE, tok)


if __name__ == "__main__":
    main()
