"""Makes small programming problems: write a function of one of twenty families.

    python examples/arithmetic/make.py
    python examples/functions/make.py
    python -m dllm_jax.train --config=configs/sft.py:functions
    python -m dllm_jax.train --config=configs/tracerl.py:code

The first leaves a blank model of single characters, the second train.jsonl and heldout.jsonl
(disjoint problems) in runs/functions: a question, six tests that were made by running the
right program, and that program as the response to learn from. Some responses are wrong on
purpose, as a model that is always right has nothing to learn.
"""

import argparse
import json
import pathlib

import numpy as np

# (what is asked, the value of the right program, the kind of x): {k} is a digit from 2 to 9,
# {j} another one, or the same.
FAMILIES = [
    ("x plus {k}", "x + {k}", "int"),
    ("x minus {k}", "x - {k}", "int"),
    ("{k} minus x", "{k} - x", "int"),
    ("x times {k}", "x * {k}", "int"),
    ("x times {k} plus {j}", "x * {k} + {j}", "int"),
    ("x plus {k}, times {j}", "(x + {k}) * {j}", "int"),
    ("the rest of x divided by {k}", "x % {k}", "int"),
    ("x divided by {k}, rounded down", "x // {k}", "int"),
    ("x squared plus {k}", "x * x + {k}", "int"),
    ("the larger of x and {k}", "max(x, {k})", "int"),
    ("the smaller of x and {k}", "min(x, {k})", "int"),
    ("how far x is from {k}", "abs(x - {k})", "int"),
    ("is x above {k}", "x > {k}", "int"),
    ("is x divisible by {k}", "x % {k} == 0", "int"),
    ("the sum of list x plus {k}", "sum(x) + {k}", "list"),
    ("the first {k} of list x", "x[:{k}]", "list"),
    ("list x without its first {k}", "x[{k}:]", "list"),
    ("each of list x plus {k}", "[y + {k} for y in x]", "list"),
    ("how many of list x are above {k}", "sum(y > {k} for y in x)", "list"),
    ("list x backwards, {k} times", "x[::-1] * {k}", "list"),
]
TESTS = 6


def argument(rng: np.random.Generator, kind: str):
    """Returns a value that x may have."""
    if kind == "int":
        return int(rng.integers(-30, 100))
    return rng.integers(-5, 15, rng.integers(0, 12)).tolist()


def program(value: str) -> str:
    """Returns the program whose function f has this value."""
    return f"def f(x):\n    return {value}"


def problem(rng: np.random.Generator, index: int, k: int, j: int, wrong: float) -> dict:
    """Returns a problem of a family; with a chance of `wrong` its response is another's."""
    asked, value, kind = FAMILIES[index]
    names = {"k": k, "j": j}
    scope = {}
    exec(program(value.format(**names)), scope)  # noqa: S102 (text of the table above)
    given = [argument(rng, kind) for _ in range(TESTS)]
    told = value.format(**names)
    if rng.random() < wrong:
        others = [other for _, other, its in FAMILIES if its == kind and other != value]
        told = others[rng.integers(len(others))].format(**names)
    return {
        "question": f"f(x): {asked.format(**names)}",
        "response": f"```python\n{program(told)}\n```",
        "tests": {
            "kind": "asserts",
            "setup": "",
            "asserts": [f"assert f({x!r}) == {scope['f'](x)!r}" for x in given],
        },
    }


def problems(rng: np.random.Generator, wrong: float) -> list[dict]:
    """Returns all different problems, shuffled."""
    chosen = [
        (index, k, j)
        for index, (asked, _, _) in enumerate(FAMILIES)
        for k in range(2, 10)
        for j in (range(2, 10) if "{j}" in asked else [0])
    ]
    return [problem(rng, *chosen[i], wrong) for i in rng.permutation(len(chosen))]


def main():
    """Writes the two files."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", default="runs/functions", help="folder of the files")
    p.add_argument("--heldout", type=int, default=64, help="problems set aside")
    p.add_argument("--wrong", type=float, default=0.3, help="share of wrong responses")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    rows = problems(np.random.default_rng(args.seed), args.wrong)
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    parts = {"heldout": rows[: args.heldout], "train": rows[args.heldout :]}
    for name, part in parts.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (out / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
