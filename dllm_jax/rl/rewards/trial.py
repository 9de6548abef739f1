"""What runs inside the jail: a program, or a candidate and the judge who asks it.

The judge holds the tests, the candidate the program, each in a jail of its own; between
them go lines of JSON. What crosses is plain: numbers, texts and containers of them, each
rebuilt from text on the other side, never an object with methods of its own. So whatever
the candidate is, the judge compares values with values.

    judge -> candidate   {"id": 1, "e": "f(1, 2)"}      evaluate
                         {"id": 2, "f": "f", "a": [..], "k": {..}}   call
                         {"id": 3, "x": "t = Tree()"}   execute
    candidate -> judge   {"id": 1, "v": value} or {"id": 1, "x": "ValueError"}
                         {"ready": 0, "names": [...]}   first, of a candidate's life

Values: null, booleans, texts, lists and integers below 2^53 are JSON's own; all others are
an object of one key, see `pack`. Instances of subclasses cross as their base.

What a test hands to the candidate's own function the candidate sees; the value that it is
compared with never crosses. This file is imported by the jail and imports nothing of the
package.
"""

import ast
import atexit
import builtins
import collections.abc
import contextlib
import fractions
import functools
import importlib
import io
import itertools
import json
import math
import os
import random
import resource
import select
import sys
import threading
import time
import types

ERROR, MEMORY = 81, 82  # exit codes: jail.py reads them
MOST_BYTES = 2**20  # of a reply
DEPTH = 60  # of a value
ITEMS = 100_000  # that are taken from an iterator
LOST = 3  # candidates that died of one test each, until the others count as failed,
DIED = 7  # ... and candidates that died at all, of what they did in several
WIDE = 2**53
STACK = 2**26  # bytes of a thread's, at most
USUAL = (
    "string re datetime collections heapq bisect copy math random statistics itertools "
    "functools operator io sys json typing"
)
NOT_READ = "site", "antigravity", "this"  # modules that are not for tests
STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}


def read_all(file: int) -> bytes:
    """Returns what a descriptor holds, from its start."""
    parts, position = [], 0
    while part := os.pread(file, 2**20, position):
        parts.append(part)
        position += len(part)
    return b"".join(parts)


def set_streams() -> None:
    """Makes sys.stdin and its neighbours those of descriptors 0 to 2.

    And random numbers those of one seed: what is run again says the same again.
    """
    random.seed(0)
    how = {"encoding": "utf-8", "errors": "surrogateescape"}
    given = io.BufferedReader(io.FileIO(0, "r", closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(given, **how)
    sys.stdin.mode = "r"  # which the interpreter's own have, and fast readers ask for
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        stream = io.TextIOWrapper(raw, **how)
        stream.mode = "w"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    builtins.open = io.open = opener(io.open)
    builtins.exit = builtins.quit = sys.exit  # which `site` would have brought
    # Programs for contests ask for more stack at their start, and would end when refused.
    resource.setrlimit = lambda kind, limits: None
    # Of a thread's stack all counts as memory, also what is never written.
    real = threading.stack_size
    threading.stack_size = lambda size=0: real(min(size, STACK))


def opener(real):
    """Returns `open`, real, that knows standard input and its neighbours by their paths.

    The jail shows no such files; and programs that read "/dev/stdin" do nothing else there.
    """

    @functools.wraps(real)
    def opened(file, *args, **kwargs):
        path = os.fspath(file) if isinstance(file, (str, os.PathLike)) else None
        if path in STREAMS:
            file = os.dup(STREAMS[path])
        return real(file, *args, **kwargs)

    return opened


def named(name: str) -> dict:
    """Returns the namespace of a new module, which is known by its name."""
    module = types.ModuleType(name)
    module.__builtins__ = builtins
    sys.modules[name] = module
    return module.__dict__


# ---- A program -----------------------------------------------------------------------


def run_program() -> None:
    """Runs the program of descriptor 3 as a script, and ends the process as it says."""
    source = read_all(3)
    os.close(3)
    set_streams()
    code, space = 0, named("__main__")
    space["__file__"] = "program.py"
    try:
        exec(compile(source, "program.py", "exec"), space)  # noqa: S102
    except SystemExit as error:
        code = exit_code(error)
    except MemoryError:
        code = MEMORY
    except BaseException:  # noqa: BLE001 (whatever the program raises)
        code = ERROR
    try:  # as the interpreter ends: some programs print from there
        threading._shutdown()
        atexit._run_exitfuncs()
        written(space)
    except BaseException:  # noqa: BLE001
        code = code or ERROR
    os._exit(code)


def written(space: dict) -> None:
    """Writes what streams still hold: standard output's, and those in the namespace.

    An interpreter that ends writes and closes whatever a program left open.
    """
    if sys.stdout is not None and not getattr(sys.stdout, "closed", False):
        sys.stdout.flush()
    for stream in (sys.__stdout__, *space.values()):
        with contextlib.suppress(ValueError):  # closed, or taken apart
            if isinstance(stream, io.IOBase):
                stream.flush()


def exit_code(error: SystemExit) -> int:
    """Returns the exit code that a program ends with; 1 where it is none of the small."""
    code = error.code
    if code is None:
        return 0
    return code & 255 if type(code) is int and 0 <= code & 255 < ERROR else 1


# ---- Values --------------------------------------------------------------------------


def pack(value, depth: int = 0):
    """Returns a value as JSON; raises TypeError for what is not plain or too deep."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        value = int.__index__(value)
        return value if -WIDE < value < WIDE else {"i": int.__format__(value, "x")}
    if isinstance(value, str):
        return str.__str__(value)
    if depth > DEPTH:
        raise TypeError("too deep")
    for kind, key, parts in PACKED:
        if isinstance(value, kind):
            inner = parts(value)
            if isinstance(inner, list) and key != "c":
                inner = [pack(x, depth + 1) for x in inner]
            return {key: inner} if key else inner
    raise TypeError(f"a {type(value).__name__} does not cross")


def real_and_imaginary(value: complex) -> list[str]:
    """Returns the parts of a complex number."""
    return [float.__repr__(value.real), float.__repr__(value.imag)]


# (kind, the key of the object that it becomes, its parts), the first that fits. What the
# parts are read by is the base's own, whatever a subclass says.
PACKED = (
    (float, "f", float.__repr__),
    (complex, "c", real_and_imaginary),
    (bytes, "b", bytes.hex),
    (bytearray, "b", bytearray.hex),
    (list, "", lambda x: [*list.__iter__(x)]),
    (dict, "d", lambda x: [[*pair] for pair in dict.items(x)]),
    (tuple, "t", lambda x: [*tuple.__iter__(x)]),
    (set, "s", lambda x: [*set.__iter__(x)]),
    (frozenset, "z", lambda x: [*frozenset.__iter__(x)]),
    (fractions.Fraction, "q", lambda x: [x.numerator, x.denominator]),
    (collections.abc.Iterable, "n", lambda x: [*itertools.islice(iter(x), ITEMS)]),
)


def unpack(given, depth: int = 0):
    """Returns the value that `pack` wrote; raises ValueError for what it never writes."""
    if depth > 2 * DEPTH:
        raise ValueError("too deep")
    if given is None or type(given) in (bool, int, str):
        return given
    if type(given) is list:
        return [unpack(x, depth + 1) for x in given]
    if type(given) is not dict or len(given) != 1:
        raise ValueError("no value")
    ((key, inner),) = given.items()
    if key in ("i", "f", "b") and type(inner) is str:
        return {"i": lambda x: int(x, 16), "f": float, "b": bytes.fromhex}[key](inner)
    if type(inner) is not list:
        raise ValueError("no value")
    if key == "c":
        return complex(*map(float, inner))
    rows = [unpack(x, depth + 1) for x in inner]
    return UNPACKED[key](rows)


UNPACKED = {
    "d": dict,
    "t": tuple,
    "s": set,
    "z": frozenset,
    "n": iter,
    "q": lambda pair: fractions.Fraction(*pair),
}


# ---- The candidate -------------------------------------------------------------------


def candidate(life: int) -> None:
    """Runs the program of descriptor 3, then answers from 4 to 5 until it is killed.

    life: how many there were before.
    """
    given = json.loads(read_all(3))
    os.close(3)
    set_streams()
    while select.select([4], [], [], 0)[0]:  # what the one before left unanswered
        os.read(4, 2**16)
    space = named("candidate")
    if given["typing"]:
        # Among Python's: `search` is the program's, or its Solution's, never re's.
        vars(builtins).update(usual())
    before = {*space}
    told = {"ready": life}
    try:
        for source in given["sources"]:
            exec(compile(source, "program.py", "exec"), space)  # noqa: S102
        told["names"] = sorted(x for x in {*space} - before if type(x) is str)
    except BaseException as error:  # noqa: BLE001
        told["error"] = type(error).__name__
    send(5, told)
    for row in lines(4):
        answer = {"id": row["id"]}
        try:
            answer["v"] = pack(answered(row, space))
            text = json.dumps(answer)
            if len(text) > MOST_BYTES:
                raise OverflowError
        except BaseException as error:  # noqa: BLE001
            answer = {"id": row["id"], "x": pythons_own(type(error))}
        send(5, answer)


def pythons_own(kind: type) -> str:
    """Returns the name of the first of Python's own exceptions that one is.

    Not of UnicodeError's kinds, which cannot be raised with a text alone.
    """
    own = (x for x in kind.__mro__ if getattr(builtins, x.__name__, None) is x)
    return next(x.__name__ for x in own if x.__mro__[1] is not UnicodeError)


def usual() -> dict:
    """Returns what programs of LeetCode's kind use without an import, by name.

    Graders of such problems put these imports before each of them: all names of the modules
    of USUAL, the modules themselves, and Python's own names last.
    """
    modules = {name: importlib.import_module(name) for name in USUAL.split()}
    found = {}
    for module in (*modules.values(), builtins):
        public = [x for x in vars(module) if not x.startswith("_")]
        names = getattr(module, "__all__", public)
        found |= {x: getattr(module, x) for x in names}
    return found | modules


def answered(row: dict, space: dict):
    """Returns what a request asks for."""
    if "e" in row:
        return eval(compile(row["e"], "test", "eval"), space)
    if "x" in row:
        exec(compile(row["x"], "test", "exec"), space)  # noqa: S102
        return None
    arguments, named_ones = unpack(row["a"]), unpack(row["k"])
    name = row["f"]
    if name not in space or hasattr(space.get("Solution"), name):
        return getattr(space["Solution"](), name)(*arguments, **named_ones)
    return space[name](*arguments, **named_ones)


def send(file: int, message: dict, end: float = math.inf) -> bool:
    """Writes a line; returns whether there was room for all of it until the time `end`."""
    data = b"\n" + json.dumps(message).encode() + b"\n"  # ends what somebody began
    while data:
        left = None if end == math.inf else max(end - time.monotonic(), 0)
        if not select.select([], [file], [], left)[1]:
            return False  # nobody reads
        data = data[os.write(file, data[: select.PIPE_BUF]) :]
    return True


def lines(file: int):
    """Yields the messages of a descriptor as they come."""
    text = b""
    while part := os.read(file, 2**16):
        *rows, text = (text + part).split(b"\n")
        for row in rows:
            if row:
                yield json.loads(row)


# ---- The judge -----------------------------------------------------------------------


class Failed(Exception):
    """The candidate gave no value."""


class Enough(BaseException):
    """The verdict needs no more tests."""


def judge(seconds: float, all_cases: bool) -> None:
    """Judges by the tests of descriptor 3 and says what it found on descriptor 6.

    seconds: what a candidate has for a test. all_cases: go on after the first failure.
    """
    tests = json.loads(read_all(3))
    set_streams()
    bench = Bench(Candidates(seconds), all_cases)
    try:
        KINDS[tests["kind"]](bench, tests)
    except Enough:
        pass
    found = "".join("01"[x] for x in bench.verdict)
    os.write(6, b"end " + found.encode() + b"\n")
    time.sleep(3600)  # it is killed now


class Candidates:
    """The candidate as the judge sees it: it may die, and then there is another."""

    def __init__(self, seconds: float):
        self.limit = 3 * seconds + 1  # of waiting; the jail reads the processor's clock
        self.number, self.life, self.served, self.lost = 0, -1, 0, 0
        self.alive, self.broken, self.names, self.setups = False, False, [], []
        self.text = b""

    def ask(self, **request):
        """Returns the value that the candidate gives; raises Failed where it gives none.

        What the candidate raises of Python's own exceptions is raised here.
        """
        while True:
            self.ready()
            reply = self.replied(request)
            if reply is not None:
                break
            if self.served == 0:  # it died of this alone
                self.lost += 1
                raise Failed("no answer")
        self.served += 1
        if "v" in reply:
            try:
                return unpack(reply["v"])
            except Exception as error:
                raise Failed("no value") from error
        kind = getattr(builtins, str(reply.get("x")), None)
        own = isinstance(kind, type) and issubclass(kind, Exception)
        # It would end a loop of the tests, all(map(...)), before it found a failure.
        own = own and kind is not StopIteration
        raise kind("of the candidate") if own else Failed("it raised")

    def replied(self, request: dict) -> dict | None:
        """Returns the reply to a request; None where the candidate died or is too slow."""
        self.number += 1
        end = time.monotonic() + self.limit
        sent = send(4, {"id": self.number} | request, end)
        while sent and (row := self.row(end)) is not None:
            if row.get("id") == self.number:
                return row
            if row.get("dead") == self.life:
                break
        self.alive = False
        return None

    def ready(self) -> None:
        """Has a candidate that waits for questions; raises Failed where there is none."""
        if self.alive:
            return
        if self.broken or self.lost >= LOST or self.life + 1 >= DIED:
            raise Failed("no candidate")
        self.life, self.served, self.text = self.life + 1, 0, b""
        os.write(6, b"new\n")
        end = time.monotonic() + self.limit
        while (row := self.row(end)) is not None:
            if row.get("ready") == self.life and type(row.get("names")) is list:
                self.names = [x for x in row["names"] if type(x) is str]
                self.alive = True
                for source in self.setups:
                    self.replied({"x": source})
                return
            if row.get("ready") == self.life or row.get("dead") == self.life:
                break
        self.broken = True
        raise Failed("the program fails")

    def row(self, end: float) -> dict | None:
        """Returns the next message, {} for nonsense; None after the time `end`."""
        while b"\n" not in self.text:
            left = end - time.monotonic()
            if left <= 0 or not select.select([5], [], [], left)[0]:
                return None
            self.text += os.read(5, 2**16)
            if len(self.text) > MOST_BYTES + 2**17:
                return None
        row, _, self.text = self.text.partition(b"\n")
        try:
            message = json.loads(row)
        except (ValueError, RecursionError):
            return {}
        return message if type(message) is dict else {}


class Bench:
    """What tests run on: their namespace, and the verdict as it grows."""

    def __init__(self, candidates: Candidates, all_cases: bool):
        self.candidates, self.all_cases = candidates, all_cases
        self.verdict: list[bool] = []
        self.space = named("tests")
        own = {"__evaluate__": self.evaluate, "__call__": self.call}
        self.space |= own | {"__assert__": self.asserted}

    def note(self, passed: bool) -> None:
        """Adds a test's verdict; raises Enough where no further one is wanted."""
        self.verdict.append(bool(passed))
        if len(self.verdict) >= ITEMS or not (passed or self.all_cases):
            raise Enough

    def asserted(self, test) -> None:
        """Notes whether an assertion, a function of nothing, holds."""
        try:
            holds = bool(test())
        except Exception:  # noqa: BLE001
            holds = False
        self.note(holds)

    def evaluate(self, source: str):
        """Returns an expression's value in the candidate's namespace."""
        return self.candidates.ask(e=source)

    def call(self, name: str, *arguments, **named_ones):
        """Returns what a function of the candidate returns."""
        return self.candidates.ask(f=name, a=pack([*arguments]), k=pack(named_ones))

    def execute(self, tree: ast.Module) -> None:
        """Runs statements of the tests."""
        ast.fix_missing_locations(tree)
        exec(compile(tree, "tests", "exec"), self.space)  # noqa: S102

    def import_mentioned(self, trees: list[ast.AST], but: set[str]) -> None:
        """Imports the standard library's modules that tests name without importing."""
        modules = {*sys.stdlib_module_names} - {*self.space, *NOT_READ, *but}
        for name in mentioned(trees) & modules:
            self.space[name] = importlib.import_module(name)


def by_asserts(bench: Bench, tests: dict) -> None:
    """Judges by statements, each a test: those of MBPP and of dLLM-RL's files."""
    trees = [ast.parse(x) for x in tests["asserts"]]
    setup = ast.parse(tests["setup"])
    try:
        bench.candidates.ready()
    except Failed:
        for _ in trees:
            bench.note(False)
        return
    names = {*bench.candidates.names}
    # Where tests call nothing else, a builtin's name is that of the function they test:
    # elsewhere a candidate's own `set` would be shown what its answer is compared with.
    known = {*dir(builtins), *sys.stdlib_module_names}
    tested = mentioned(trees) if mentioned(trees) <= known else set()
    bench.import_mentioned([*trees, setup], names & tested)
    # What builds the candidate's own objects can only be run where these live.
    if mentioned([setup]) & names - known:
        bench.candidates.setups.append(tests["setup"])
        bench.candidates.replied({"x": tests["setup"]})
        stored = (x for x in ast.walk(setup) if isinstance(x, ast.Name))
        names |= {x.id for x in stored if isinstance(x.ctx, ast.Store)}
    else:
        with contextlib.suppress(Exception):  # then the tests that need it fail
            bench.execute(setup)
    # What tests give to something, a loop's variable too, is theirs, but for what they call.
    nodes = [x for tree in trees for x in ast.walk(tree)]
    called = {ast.unparse(x.func) for x in nodes if isinstance(x, ast.Call)}
    own = {*bench.space, *known} - tested | bound(trees) - called
    asker = Asker(names - own)
    for tree in trees:
        try:
            bench.execute(asker.visit(tree))
            passed = True
        except Exception:  # noqa: BLE001
            passed = False
        bench.note(passed)


def mentioned(trees: list[ast.AST]) -> set[str]:
    """Returns the names that sources read."""
    found = (x for tree in trees for x in ast.walk(tree) if isinstance(x, ast.Name))
    return {x.id for x in found if not stores(x)}


SCOPES = ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp


def bound(trees: list[ast.AST]) -> set[str]:
    """Returns the names that sources bind: variables, arguments, functions, imports."""
    nodes = [x for tree in trees for x in ast.walk(tree)]
    found = {x.id for x in nodes if isinstance(x, ast.Name) and stores(x)}
    found |= {x.arg for x in nodes if isinstance(x, ast.arg)}
    kinds = ast.FunctionDef, ast.ClassDef
    found |= {x.name for x in nodes if isinstance(x, kinds)}
    aliases = (x.asname or x.name for x in nodes if isinstance(x, ast.alias))
    return found | {name.split(".")[0] for name in aliases}


class Asker(ast.NodeTransformer):
    """Rewrites what tests ask of the candidate into questions to it.

    A call that begins with one of its names is evaluated there, whole, where it names
    nothing else; where it names what only the tests have, its arguments are evaluated
    here and cross as values.
    """

    def __init__(self, names: set[str]):
        self.names, self.known = names, names | {*dir(builtins)}

    def asked(self, node: ast.expr) -> ast.expr:
        """Returns the question that takes an expression's place."""
        loose = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
        simple = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if loose - bound([node]) <= self.known or not simple:
            arguments = [ast.Constant(ast.unparse(node))]
            return ast.Call(ast.Name("__evaluate__", ast.Load()), arguments, [])
        arguments = [ast.Constant(node.func.id), *map(self.visit, node.args)]
        keywords = [self.visit(x) for x in node.keywords]
        return ast.Call(ast.Name("__call__", ast.Load()), arguments, keywords)

    def visit(self, node: ast.AST) -> ast.AST:
        """Asks for what begins with a name of the candidate's, and is not written to."""
        if isinstance(node, SCOPES):  # what it binds is its own
            return Asker(self.names - bound([node])).generic_visit(node)
        kinds = ast.Call, ast.Attribute, ast.Subscript, ast.Name
        if isinstance(node, kinds) and not stores(node) and self.begins(node):
            return self.asked(node)
        return self.generic_visit(node)

    def begins(self, node: ast.expr) -> bool:
        """Returns whether an expression's leftmost name is the candidate's."""
        while not isinstance(node, ast.Name):
            if isinstance(node, ast.Call):
                node = node.func
            elif isinstance(node, (ast.Attribute, ast.Subscript)):
                node = node.value
            else:
                return False
        return node.id in self.names


def stores(node: ast.AST) -> bool:
    """Returns whether an expression is written to."""
    return isinstance(getattr(node, "ctx", None), ast.Store)


class Assertions(ast.NodeTransformer):
    """Makes every assertion inside of a function a test of its own."""

    def visit(self, node: ast.AST) -> ast.AST:
        """Returns, for an assertion, a call that notes whether it holds.

        `assert True` holds whatever the candidate does: it is no test.
        """
        if not isinstance(node, ast.Assert) or isinstance(node.test, ast.Constant):
            return self.generic_visit(node)
        nothing = ast.arguments([], [], None, [], [], None, [])
        test = ast.Lambda(nothing, node.test)
        return ast.Expr(ast.Call(ast.Name("__assert__", ast.Load()), [test], []))


def by_check(bench: Bench, tests: dict) -> None:
    """Judges by a function `check(candidate)`: HumanEval's, each assertion a test."""
    entry = tests["entry"]
    bench.execute(ast.parse(tests["prelude"]))  # its helpers are the tests', too

    def proxy(*arguments, **named_ones):
        return bench.call(entry, *arguments, **named_ones)

    bench.space[entry] = proxy  # which one of them calls by its name
    tree = Assertions().visit(ast.parse(tests["check"]))
    # Some call their check themselves.
    own = [x for x in tree.body if isinstance(x, ast.Expr)]
    tree.body = [x for x in tree.body if not isinstance(x, ast.Expr)]
    bench.execute(tree)
    try:
        bench.execute(ast.Module(own, []))
        bench.space["check"](proxy)
    except Exception:  # noqa: BLE001 (it ended before its last assertion)
        bench.note(False)
    if not bench.verdict:
        bench.note(True)


def by_calls(bench: Bench, tests: dict) -> None:
    """Judges by arguments and results: those of LiveCodeBench, APPS and TACO."""
    for arguments, wanted in tests["cases"]:
        try:
            got = bench.call(tests["entry"], *arguments)
            got, wanted = listed(got), listed(wanted)
            passed = alike(got, wanted, tests["float"])
            if tests["wrapped"] and isinstance(wanted, list) and len(wanted) == 1:
                passed = passed or alike(got, wanted[0], tests["float"])
        except Exception:  # noqa: BLE001
            passed = False
        bench.note(passed)


def listed(value):
    """Returns a value with lists for its tuples: JSON knows no others."""
    if isinstance(value, (list, tuple)):
        return [listed(x) for x in value]
    if isinstance(value, dict):
        return {key: listed(x) for key, x in value.items()}
    return value


def alike(got, wanted, tolerant: bool) -> bool:
    """Returns whether values are equal; tolerant: numbers to a millionth."""
    if not tolerant:
        return got == wanted
    if isinstance(got, list) and isinstance(wanted, list):
        same = (alike(g, w, True) for g, w in zip(got, wanted, strict=False))
        return len(got) == len(wanted) and all(same)
    if isinstance(got, dict) and isinstance(wanted, dict):
        return got.keys() == wanted.keys() and all(
            alike(got[key], wanted[key], True) for key in wanted
        )
    if isinstance(got, (int, float)) and isinstance(wanted, (int, float)):
        return got == wanted or abs(got - wanted) <= 1e-6 * max(1, abs(wanted))
    return got == wanted


KINDS = {"asserts": by_asserts, "check": by_check, "calls": by_calls}
