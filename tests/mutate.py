"""Tests the tests: changes one thing in a module at a time, and names what nobody noticed.

    python -m tests.mutate rl/advantage sampling/pages --out=/tmp/mutants
    python -m tests.mutate --out=/tmp/mutants --survivors

A mutant is the module with one change: another comparison, another sign, a constant off
by one, swapped branches, a statement left out. It is killed when a test of its selection
fails, or takes far longer than without it. Each runs in a fork that has imported what is
slow, and its verdict is a line of OUT/MODULE.jsonl: a second call goes on where the first
was stopped, and tries again only what has changed since.
"""

import argparse
import ast
import copy
import hashlib
import importlib.abc
import importlib.util
import json
import os
import pathlib
import signal
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
TESTS = {  # of each module, the fastest that kill most first
    "rl/advantage": ["tests/rl/advantage_test.py"],
    "rl/objectives": ["tests/rl/objectives_test.py"],
    "rl/noise": ["tests/rl/noise_test.py", "tests/rl/views_test.py"],
    "rl/views": ["tests/rl/views_test.py", "tests/rl/noise_test.py"],
    "rl/layout": ["tests/rl/views_test.py", "tests/rl/noise_test.py"],
    "sampling/strategy": ["tests/sampling/strategy_test.py"],
    "sampling/pages": ["tests/sampling/pages_test.py"],
    "sampling/scheduler": ["tests/sampling/schedules_test.py"],
    "models/mask": ["tests/models/mask_test.py"],
}
OTHER = {  # what stands in an operator's place
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NAMES = {"min": "max", "any": "all", "minimum": "maximum", "argmin": "argmax"}
NAMES |= {other: name for name, other in NAMES.items()}
SLACK = 30  # seconds that a mutant may take beyond ten times what the tests take


# ---- Mutants -------------------------------------------------------------------------


def of_operators(node: ast.AST):
    """Yields functions that put another operator into a node."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield lambda n, i=i, op=op: n.ops.__setitem__(i, OTHER[type(op)]())
    elif type(getattr(node, "op", None)) in OTHER:
        yield lambda n: setattr(n, "op", OTHER[type(n.op)]())


def of_values(node: ast.AST):
    """Yields functions that give a node another value, or return what has it."""
    match node:
        case ast.UnaryOp():
            yield lambda n: n.operand
        case ast.Constant(value=bool()):
            yield lambda n: setattr(n, "value", not n.value)
        case ast.Constant(value=int() | float()):
            for off in (1, -1):
                yield lambda n, off=off: setattr(n, "value", n.value + off)
        case ast.IfExp():
            yield lambda n: ast.IfExp(n.test, n.orelse, n.body)
        case ast.Name(id=name) if name in NAMES:
            yield lambda n: setattr(n, "id", NAMES[n.id])
        case ast.Attribute(attr=name) if name in NAMES:
            yield lambda n: setattr(n, "attr", NAMES[n.attr])
        case ast.Call(func=ast.Attribute(attr="where"), args=[_, _, _]):
            yield lambda n: ast.Call(n.func, [n.args[0], *n.args[:0:-1]], n.keywords)


def of_statements(node: ast.AST):
    """Yields functions that return a statement for another; `pass` leaves one out.

    A name that is never bound kills by itself: it is not tried.
    """
    match node:
        case ast.Return(value=ast.AST()):
            yield lambda n: ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Continue() | ast.Break():
            yield lambda n: ast.Pass()
        case ast.AugAssign() | ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield lambda n: ast.Pass()
        case ast.If(test=ast.Name() | ast.Attribute() | ast.Call() | ast.BoolOp()):
            yield lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))


def changes(node: ast.AST):
    """Yields functions that each change a node in one way; they may return another."""
    yield from of_operators(node)
    yield from of_values(node)
    yield from of_statements(node)


def places(tree: ast.AST, statement=None):
    """Yields (parent, field, index, node, statement) of whatever may be changed.

    Words are not: docstrings, annotations, decorators and what an error says.
    """
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for index, node in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr):
                continue
            inside = node if isinstance(node, ast.stmt) else statement
            at = index if isinstance(value, list) else None
            yield tree, field, at, node, inside
            if not isinstance(node, ast.Raise):
                yield from places(node, inside)


def text(node: ast.AST) -> str:
    """Returns the first line of a statement as source."""
    return ast.unparse(node).split("\n", 1)[0]


def mutants(source: str):
    """Yields (line, was, now, tree) of every mutant, in the order of the source."""
    tree = ast.parse(source)
    for number, (*_, node, statement) in enumerate(list(places(tree))):
        for which, _ in enumerate(list(changes(node))):
            changed = copy.deepcopy(tree)
            parent, field, index, target, inside = list(places(changed))[number]
            other = list(changes(target))[which](target)
            if isinstance(other, ast.AST):
                if index is None:
                    setattr(parent, field, other)
                else:
                    getattr(parent, field)[index] = other
                inside = other if inside is target else inside
            ast.fix_missing_locations(changed)
            yield statement.lineno, text(statement), text(inside), changed


# ---- Running them --------------------------------------------------------------------


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a syntax tree in the place of its file."""

    def __init__(self, module: str, path: pathlib.Path, tree: ast.Module):
        self.module, self.path, self.tree = module, path, tree

    def find_spec(self, name, path=None, target=None):
        """Returns where the module comes from, and of all others nothing."""
        if name == self.module:
            return importlib.util.spec_from_file_location(name, self.path, loader=self)
        return None

    def exec_module(self, module):
        """Runs the tree as the module."""
        exec(compile(self.tree, str(self.path), "exec"), module.__dict__)  # noqa: S102


def verdict(finder, selection: list[str], seconds: float) -> str:
    """Returns "survived", "killed" or "too slow" of the tests in a fork."""
    child = os.fork()
    if child == 0:
        import pytest

        os.setsid()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        if finder:
            sys.meta_path.insert(0, finder)
        quick = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        os._exit(pytest.main([*quick, *selection]) != 0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "killed" if status else "survived"
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "too slow"


def key(was: str, now: str, count: int) -> str:
    """Returns a mutant's name; count: of those before it that read alike."""
    return hashlib.blake2b(f"{was}\n{now}\n{count}".encode(), digest_size=6).hexdigest()


def run(name: str, out: pathlib.Path):
    """Tries the mutants of a module that have no verdict yet."""
    path = ROOT / "dllm_jax" / f"{name}.py"
    module = ".".join(["dllm_jax", *name.split("/")])
    file = out / f"{name.replace('/', '.')}.jsonl"
    known = set()
    if file.exists():
        known = {json.loads(line)["key"] for line in file.read_text().splitlines()}
    begin = time.monotonic()
    if verdict(None, TESTS[name], 3600) != "survived":
        sys.exit(f"{' '.join(TESTS[name])} fail without a mutant")
    seconds = 10 * (time.monotonic() - begin) + SLACK
    alike = {}
    with file.open("a") as log:
        for line, was, now, tree in mutants(path.read_text()):
            alike[was, now] = alike.get((was, now), -1) + 1
            this = key(was, now, alike[was, now])
            if this in known:
                continue
            result = verdict(Mutated(module, path, tree), TESTS[name], seconds)
            row = {"key": this, "line": line, "was": was, "now": now, "result": result}
            print(json.dumps(row), file=log, flush=True)
            if result == "survived":
                print(f"{path}:{line}\n    {was}\n    {now}", flush=True)


def survivors(out: pathlib.Path):
    """Prints what survived of the mutants that the modules still have."""
    for name in TESTS:
        file = out / f"{name.replace('/', '.')}.jsonl"
        if not file.exists():
            continue
        rows = {}
        for line in file.read_text().splitlines():
            row = json.loads(line)
            rows[row["key"]] = row
        alike, count = {}, {"killed": 0, "too slow": 0, "survived": 0}
        path = ROOT / "dllm_jax" / f"{name}.py"
        for line, was, now, _ in mutants(path.read_text()):
            alike[was, now] = alike.get((was, now), -1) + 1
            row = rows.get(key(was, now, alike[was, now]))
            if row:
                count[row["result"]] += 1
                if row["result"] == "survived":
                    print(f"{path}:{line}\n    {was}\n    {now}")
        print(f"{name}: {count}")


def main():
    """Tries the modules named, or prints what survived."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("modules", nargs="*", choices=[*TESTS, []], metavar="MODULE")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--survivors", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.survivors:
        survivors(args.out)
        return
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ["JAX_PLATFORMS"] = "cpu"
    # What every fork would import; nothing of the package, and no backend is started.
    for module in ("pytest", "hypothesis.extra.numpy", "chex", "flax.struct", "optax"):
        importlib.import_module(module)
    for name in args.modules:
        run(name, args.out)


if __name__ == "__main__":
    main()
