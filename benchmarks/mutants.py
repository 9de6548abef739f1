"""Whether reference solutions with one change are found out: mutants, graded by their tests.

    python -m benchmarks.mutants HumanEval.jsonl.gz [mbpp.jsonl ...] [--count=300]

The protocol. A mutant is a reference solution with one operator or comparison swapped for
another (SWAPS). Different ones are drawn until `count` of them count, and each is graded as
an answer is. One that passes all tests is compared with its solution call by call: on what the tests
call, and on GENERATED inputs that are made of these by small changes. It is then

    equivalent   the two say the same of every input: it is told apart by nothing, is not
                 counted, and another one is drawn
    unseen       they differ, but on no input of the tests: no grader that asks these tests
                 can find it out
    lenient      they differ on an input of the tests, which accept both (roots to 1e-4): the
                 same tests, run as plain Python without a judge, pass, too
    missed       they differ on an input of the tests, which refuse it there: the grader is
                 at fault

The files may be those that `python -m dllm_jax.data strengthen` wrote: the mutants are the same,
the tests are more.

What both do with an input that the solution refuses (it raises, or takes more than LINES lines)
is no difference. All of it runs in the sandbox.
"""

import argparse
import ast
import json
import random
import warnings

from benchmarks import report
from benchmarks.jail import graded
from dllm_jax import command_line
from dllm_jax.records import records
from dllm_jax.rl.rewards import code, sandbox, strengthen
from dllm_jax.rl.rewards.strengthen import NEARBY, entry, solution

SWAPS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.In: ast.NotIn,
}
PASSED = "missed", "lenient", "unseen"
GENERATED = 2000  # inputs beside those of the tests
LINES = 20_000  # that a solution may run for one input; a mutant ten times as many
# Compares two programs; nearby.py and `given` are put before it. Prints how many inputs
# there were, and how many told them apart, of the tests and of the generated ones. These
# are changed more freely than nearby.py does: a mutant is judged by more than what
# strengthened tests are made of.
COMPARE = r"""
def said(function, args, lines):
    try:
        value, left, _ = watched(function, args, lines)
    except (Exception, Endless) as error:
        return None, type(error).__name__
    return repr(value), repr(left)


def changed(x, draw):
    if type(x) is bool:
        return not x
    if type(x) is int:
        return draw.choice([x + 1, x - 1, -x, 2 * x, 0, 1, draw.randint(-20, 100)])
    if type(x) is float:
        return draw.choice([x + 1, x - 0.5, -x, x / 3, 0.0, draw.uniform(-20, 100)])
    if type(x) is str:
        return "".join(changed_row(list(x), draw, draw.choice("aeZ 0.,(1-")))
    if type(x) in (list, tuple):
        new = changed(draw.choice(x), draw) if x else draw.randint(-9, 9)
        return type(x)(changed_row(list(x), draw, new))
    if type(x) is dict and x:
        key = draw.choice(sorted(x, key=repr))
        return {**x, key: changed(x[key], draw)}
    return x


name = given["entry"]
right, other = (loaded([given[x]], x) for x in ("solution", "mutant"))
tested = [args for _, args in recorded(right, name, given["tests"])]
try:
    loaded(given["tests"], "tests", **other, candidate=other[name])
    accepted = True
except Exception:
    accepted = False
draw, made = random.Random(0), []
for _ in range(given["generated"] if tested else 0):
    args = list(draw.choice(tested))
    for _ in range(draw.choice([1, 1, 2, 4])):
        if args:
            at = draw.randrange(len(args))
            args[at] = changed(args[at], draw)
    made.append(tuple(args))
found = {"accepted": accepted}
for kind, inputs in (("tests", tested), ("generated", made)):
    found[kind] = found[kind + "_differ"] = 0
    for args in inputs:
        wanted = said(right[name], args, given["lines"])
        if wanted[0] is None:
            continue
        found[kind] += 1
        got = said(other[name], args, 10 * given["lines"])
        if got != wanted:
            found[kind + "_differ"] += 1
            found.setdefault("such_as", repr((args, wanted, got))[:300])
print(json.dumps(found))
"""


def mutants(source: str) -> list[str]:
    """Returns a program with one operator swapped for another, in every way."""
    with warnings.catch_warnings():  # of escapes in other people's texts
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)):
            field, old = "op", node.op
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            field, old = "ops", node.ops[0]
        else:
            continue
        if type(old) not in SWAPS:
            continue
        kept, new = getattr(node, field), SWAPS[type(old)]()
        setattr(node, field, [new] if field == "ops" else new)
        found.append(ast.unparse(tree))
        setattr(node, field, kept)
    return found


def compared(row: dict, mutant: str, generated: int = GENERATED) -> dict | None:
    """Returns how a solution and its mutant differ; None where that did not end.

    accepted: whether its tests pass as plain Python; tests, generated: the inputs that were
    tried; tests_differ, generated_differ: on how many of them; such_as: the first.
    """
    tests, source = code.tests_of(row), solution(row)
    name = entry(tests, source)
    given = {
        "solution": source,
        "mutant": mutant,
        "entry": name,
        "tests": strengthen.published(tests, name),
        "generated": generated,
        "lines": LINES,
    }
    result = sandbox.run(
        f"{NEARBY.read_text()}\ngiven = {given!r}\n{COMPARE}",
        seconds=60,
        memory_mb=1024,
    )
    return json.loads(result.stdout) if result.status == "ok" else None


def verdict(row: dict, mutant: str, generated: int = GENERATED) -> tuple[str, dict]:
    """Returns what a mutant that passed is, as the head of this file says, and why."""
    found = compared(row, mutant, generated)
    if found is None:
        return "unseen", {"such_as": "a generated input, which it did not end on"}
    if found["tests_differ"]:
        return "lenient" if found["accepted"] else "missed", found
    return "unseen" if found["generated_differ"] else "equivalent", found


def found_out(rows: list[dict], count: int) -> dict[str, list]:
    """Returns task, verdict and reason of all that passed, by verdict; `count` are graded.

    rows: a set's records. Where all mutants together are fewer, "counted" says how many.
    """
    every = {text: row for row in rows for text in mutants(solution(row))}
    order = random.Random(0).sample(sorted(every), len(every))
    told = {kind: [] for kind in (*PASSED, "equivalent", "counted")}
    while order and len(told["counted"]) < count:
        drawn = [
            order.pop() for _ in range(min(count - len(told["counted"]), len(order)))
        ]
        jobs = [(text, every[text]) for text in drawn]
        grades = graded(jobs, seconds=1, all_cases=False)
        for (text, row), grade in zip(jobs, grades, strict=True):
            kind, why = verdict(row, text) if grade == 1 else ("found out", {})
            if kind != "found out":
                told[kind].append((row["task_id"], why))
            if kind != "equivalent":
                told["counted"].append(row["task_id"])
    return told


def main() -> None:
    """Prints what the mutants of each file came to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="problems with solutions and tests")
    parser.add_argument("--count", type=int, default=300, help="mutants of each file")
    args = parser.parse_args()
    report.positive(parser, args)
    every = {path: list(records(path)) for path in args.files}
    print(sandbox.available())
    for path, rows in every.items():
        told = found_out(rows, args.count)
        parts = ", ".join(f"{len(told[kind])} {kind}" for kind in PASSED)
        print(
            f"{path}: {sum(len(told[kind]) for kind in PASSED)} of "
            f"{len(told['counted'])} different mutants pass: {parts}; and "
            f"{len(told['equivalent'])} are equivalent"
        )
        for kind in (*PASSED, "equivalent"):
            for task, why in told[kind]:
                print(f"    {kind} {task} {json.dumps(why)}", flush=True)


if __name__ == "__main__":
    command_line.entry(main)
