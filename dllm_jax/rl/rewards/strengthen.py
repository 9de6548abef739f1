"""More tests for a record: inputs near those of its own, and what its solution says.

    strengthened(record, count=30, seed=0)      (the record with more `tests`, "")

The published tests of a task are few, and what they never call a function with they cannot
judge. As EvalPlus does (Liu et al. 2023, arXiv 2305.01210), inputs of the tests are changed a
little, keeping their types, and the reference solution says what is right. nearby.py makes the
inputs, in the sandbox; here are the forms of tests, in and out.

A new test compares as the one whose input was changed does: `set(f(x)) == {...}`,
`abs(f(x) - 2.5) < 1e-3`; where that says `==`, numbers with a point are compared to a
millionth. Where a test compares in another way, nothing is made of its inputs.
"""

import ast
import copy
import json
import pathlib
import re

from dllm_jax.rl.rewards import code, sandbox, trial

TESTS = 30  # new ones of a record, at most
TRIES = 600  # inputs, of which they are chosen
LINES = 20_000  # that a solution may run for one input
SECONDS, MEMORY_MB = 20.0, 1024  # of all of them
NEARBY = pathlib.Path(__file__).with_name("nearby.py")
# Compares values with points in them. Its names end in _, since those of the programs
# that are tested are not to be among them (trial.by_asserts).
NEAR = """
def near_(got_, wanted_):
    for kind_ in (list, tuple):  # of which one is not == the other
        if isinstance(wanted_, kind_) and isinstance(got_, kind_):
            pairs_ = zip(got_, wanted_)
            same_ = len(got_) == len(wanted_)
            return same_ and all(near_(*pair_) for pair_ in pairs_)
    if isinstance(wanted_, dict) and isinstance(got_, dict):
        pairs_ = ((got_[key_], wanted_[key_]) for key_ in wanted_ if key_ in got_)
        return got_.keys() == wanted_.keys() and all(near_(*pair_) for pair_ in pairs_)
    if isinstance(wanted_, set) and isinstance(got_, (set, frozenset)):
        found_ = (any(near_(one_, item_) for one_ in got_) for item_ in wanted_)
        return len(got_) == len(wanted_) and all(found_)
    if isinstance(wanted_, float) and isinstance(got_, (int, float)):
        return abs(got_ - wanted_) <= 1e-6 * max(1, abs(wanted_))
    return got_ == wanted_
"""

# What functions that are called find without an import, as trial.candidate has it: Python's own
# names come last, and all of them behind what the program, or nearby.py, has of that name.
MODULES = trial.USUAL.split()
USUAL = (
    "usual_ = {}\n"
    + "".join(f"exec('from {name} import *', usual_)\n" for name in MODULES)
    + "usual_.update(vars(__import__('builtins')))\n"
    + "".join(f"usual_[{name!r}] = __import__({name!r})\n" for name in MODULES)
    + "vars(__import__('builtins')).update(usual_)\ndel usual_\n"
)


# ---- Solutions -----------------------------------------------------------------------


def solution(record: dict) -> str:
    """Returns a record's reference solution; raises ValueError where it has none.

    The first of its fields that is a text.
    """
    names = "canonical_solution", "code", "solution"
    fields = [x for x in names if record.get(x) is not None]
    if not fields:
        raise ValueError(f"no solution: it needs one of the fields {', '.join(names)}")
    field = next((x for x in fields if isinstance(record[x], str)), fields[0])
    text = code.kept(record[field], str, f"a text in the field {field}")
    return str(record.get("prompt", "")) * (field == names[0]) + text


def entry(tests: dict, program: str) -> str:
    """Returns the name of the function that tests call.

    Of assertions: the last of the program's own that they name, or its last; one that it
    gives a name, as `f = lambda x: x`, where it defines none.
    """
    if "entry" in tests:
        return tests["entry"]
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    try:
        tree = code.parsed(program)
    except ValueError:
        raise ValueError("its solution is no Python") from None
    named = [x.name for x in tree.body if isinstance(x, kinds)]
    given = [y for x in tree.body if isinstance(x, ast.Assign) for y in x.targets]
    given = [x.id for x in given if isinstance(x, ast.Name)]
    if not (named or given):
        raise ValueError("its solution defines no function")
    read = {
        node.id
        for source in tests["asserts"]
        for node in ast.walk(code.parsed(source))
        if isinstance(node, ast.Name)
    }
    asked_of = ([x for x in names if x in read] for names in (named, given))
    return next(filter(None, (*asked_of, named, given)))[-1]


# ---- Forms of tests ------------------------------------------------------------------


def form(test: ast.expr, names: set[str]) -> tuple[str, str] | None:
    """Returns how an assertion compares; None where it does so in no known way.

    names: of the function. A pair of expressions, in which CALL_ is the function's call and
    VALUE_ what it is compared with: (what VALUE_ is, the new assertion).
    """
    calls = [x for x in ast.walk(test) if is_call(x, names)]
    if len(calls) != 1 or calls[0].keywords:
        return None
    (call,) = calls
    bare = test.operand if isinstance(test, ast.UnaryOp) else test
    if bare is call:
        return "bool(CALL_)", "bool(CALL_) == VALUE_"
    match test:
        case ast.Compare(left, [ast.Eq() | ast.Is()], [right]):
            side = left if call in ast.walk(left) else right
            shown = with_holes(side, {call: "CALL_"})
            return shown, f"{shown} == VALUE_"
        case ast.Compare(
            ast.Call(ast.Name("abs") | ast.Attribute(_, "fabs"), [ast.BinOp() as less]),
            [ast.Lt() | ast.LtE()],
            [ast.Constant()],
        ) if isinstance(less.op, ast.Sub) and call in (less.left, less.right):
            other = less.right if call is less.left else less.left
            return "CALL_", with_holes(test, {call: "CALL_", other: "VALUE_"})
        case ast.Call(
            ast.Name("isclose") | ast.Attribute(_, "isclose"), [left, right]
        ) if call in (left, right):
            other = right if call is left else left
            return "CALL_", with_holes(test, {call: "CALL_", other: "VALUE_"})
    return None


def is_call(node: ast.AST, names: set[str]) -> bool:
    """Returns whether an expression calls one of the names."""
    named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return named and node.func.id in names


class Holes(ast.NodeTransformer):
    """Puts names where nodes stand that are marked with one."""

    def visit(self, node: ast.AST) -> ast.AST:
        """Returns the name of a marked node."""
        if hasattr(node, "hole"):
            return ast.Name(node.hole, ast.Load())
        return self.generic_visit(node)


def with_holes(tree: ast.expr, names: dict[ast.AST, str]) -> str:
    """Returns the source of an expression with names in the place of some of its nodes."""
    for node, name in names.items():
        node.hole = name
    return ast.unparse(Holes().visit(copy.deepcopy(tree)))


class Places(ast.NodeTransformer):
    """Has every assertion say which it is, before it and, with None, after it."""

    def __init__(self, names: set[str]):
        self.names, self.forms = names, []

    def visit(self, node):
        """Returns a node, or the statements that take an assertion's place."""
        if not isinstance(node, ast.Assert):
            return self.generic_visit(node)
        found = form(node.test, self.names)
        place = f"place_({len(self.forms) if found else None})"
        self.forms += [found] if found else []
        return [*ast.parse(place).body, node, *ast.parse("place_(None)").body]


# ---- Records -------------------------------------------------------------------------


def published(tests: dict, entry: str) -> list[str]:
    """Returns what runs the tests of a function, as plain Python without a judge."""
    if tests["kind"] == "asserts":
        return [tests["setup"], *tests["asserts"]]
    return [tests["check"], f"check({entry})"]


def asked(tests: dict, program: str, count: int, seed: int) -> tuple[dict, list]:
    """Returns what nearby.strengthened is given, and the forms of new assertions."""
    name = entry(tests, program)
    given = {"entry": name, "cases": [], "tests": [], "forms": ["CALL_"]}
    given |= {"count": count, "seed": seed, "tries": TRIES, "lines": LINES}
    given["sources"] = code.sources(program, tests)
    if tests["kind"] == "calls":
        given["sources"] = [USUAL, *given["sources"]]
        given["cases"] = [arguments for arguments, _ in tests["cases"]]
        return given, [""]
    places = Places({name, "candidate"})
    trees = [places.visit(code.parsed(source)) for source in published(tests, name)]
    each = "try: exec({!r})\nexcept Exception: pass"  # the judge goes on, too
    given["tests"] = [each.format(ast.unparse(tree)) for tree in trees]
    given["forms"] = [shown for shown, _ in places.forms]
    return given, [assertion for _, assertion in places.forms]


def floats(value) -> bool:
    """Returns whether a value has a number with a point in it, but for keys of dicts."""
    if isinstance(value, dict):
        return any(map(floats, value.values()))
    if isinstance(value, (list, tuple, set)):
        return any(map(floats, value))
    return isinstance(value, float)


def assertion(form: str, call: str, value: str) -> str:
    """Returns the source of a new assertion."""
    if form.endswith(" == VALUE_") and floats(ast.literal_eval(value)):
        form = f"near_({form.removesuffix(' == VALUE_')}, VALUE_)"
    parts = {"CALL_": call, "VALUE_": value}
    return f"assert {re.sub('CALL_|VALUE_', lambda hole: parts[hole[0]], form)}"


def cases(found: list[list], tolerant: bool) -> list[list]:
    """Returns new cases: those that JSON can say, and that are compared as they must be.

    tolerant: numbers are compared to a millionth.
    """
    rows = [
        [[*ast.literal_eval(f"({args},)")], trial.listed(ast.literal_eval(value))]
        for _, args, value in found
    ]
    return [
        row
        for row in rows
        if json.loads(json.dumps(row, default=repr)) == row
        and (tolerant or not floats(row[1]))
    ]


def with_more(tests: dict, found: list[list], forms: list[str], entry: str) -> dict:
    """Returns tests with those that were found. forms: of new assertions, by place."""
    if tests["kind"] == "calls":
        return tests | {"cases": tests["cases"] + cases(found, tests["float"])}
    name = entry if tests["kind"] == "asserts" else "candidate"
    lines = [assertion(forms[place], f"{name}({args})", x) for place, args, x in found]
    if not lines:
        return tests
    near = NEAR if any("near_(" in line for line in lines) else ""
    if tests["kind"] == "asserts":
        more = {"setup": tests["setup"] + near, "asserts": tests["asserts"] + lines}
        return tests | more
    head = "def check(candidate, published_=check):\n    published_(candidate)\n"
    body = "".join(f"    {line}\n" for line in lines)
    return tests | {"check": f"{tests['check']}\n{near}\n\n{head}{body}"}


def check(record: dict) -> None:
    """Raises ValueError for a record to which no tests can be added.

    Without tests or a solution, or a task of standard input.
    """
    tests = code.tests_of(record)
    code.limits_of(record)
    if tests["kind"] == "stdio":
        raise ValueError(
            "a task of standard input: tests are added to functions' alone"
        )
    entry(tests, solution(record))


def strengthened(record: dict, count: int = TESTS, seed: int = 0) -> tuple[dict, str]:
    """Returns a record with at most `count` more tests, and why it has none, or "".

    They stand with its own in its field `tests`, whose shape code.py tells. Raises
    ValueError as `check` does, RuntimeError where programs cannot be confined.
    """
    check(record)
    tests, program = code.tests_of(record), solution(record)
    if code.grade_program(program, record) != 1:
        return record, "their solution fails their own tests"
    given, forms = asked(tests, program, count, seed)
    source = f"{NEARBY.read_text()}\n\nanswer({given!r})\n"
    result = sandbox.run(source, seconds=SECONDS, memory_mb=MEMORY_MB)
    # Who leaves in the middle has said nothing.
    ended = result.status if result.stdout else result.status.replace("ok", "exit")
    if ended != "ok":
        return record, f"their solution ends with {ended} on new inputs"
    try:
        more = with_more(tests, json.loads(result.stdout), forms, given["entry"])
    except (ValueError, TypeError, LookupError):
        return record, "their solution writes into the answer"
    if more == tests:
        return record, "no input is near, allowed, and answered twice with the same"
    stronger = record | {"tests": more}
    if code.grade_program(program, stronger) != 1:
        return record, "their solution fails the new tests when it is graded"
    return stronger, ""
