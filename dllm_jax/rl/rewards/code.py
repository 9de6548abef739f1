"""Code: the share of a problem's tests that the program in an answer passes.

Records of many formats become one shape, `tests`:

    {"kind": "stdio", "cases": [[stdin, stdout], ...], "float": false}
    {"kind": "asserts", "setup": "...", "asserts": ["assert f(1) == 2", ...]}
    {"kind": "check", "entry": "f", "prelude": "...", "check": "def check(candidate): ..."}
    {"kind": "calls", "entry": "f", "cases": [[arguments, result], ...], "float": false}

read from a record that has such a `tests` itself, or is of

    dLLM-RL          test_method, test_input and test_output or test_list; test_time_limit
    MBPP             test_list, test_setup_code or test_imports, challenge_test_list
    HumanEval        prompt, entry_point, test
    APPS, TACO       input_output, a text of JSON with inputs, outputs, fn_name
    LiveCodeBench    public_test_cases, private_test_cases, metadata
    CodeContests     public_tests, private_tests, generated_tests

Programs run in the sandbox; function tests are judged by values that cross between two
jails (trial.py), never by a program's word for it.
"""

import ast
import base64
import binascii
import concurrent.futures
import contextlib
import functools
import io
import json
import math
import pickle
import re
import textwrap
import warnings
import zlib
from decimal import Decimal, InvalidOperation

from dllm_jax import checks
from dllm_jax.exits import warn
from dllm_jax.rl.rewards import sandbox

# A block of Python, to the next fence or the text's end: dLLM-RL's, and other spellings.
BLOCKS = (
    re.compile(r"```python3?(.*?)(```|\Z)", re.DOTALL),
    re.compile(r"```[ \t]*(?:python3?|py)\b(.*?)(```|\Z)", re.DOTALL | re.IGNORECASE),
)
MOST_BYTES = 2**28  # of tests that were packed
SECONDS, MEMORY_MB = 4.0, 512
CLOSE = 1e-6
HUNG = 3  # tests that a program did not end in, until the others count as failed
RECORD = "record"  # the file that a test is said to stand in
# Escapes that Python will not know one day are the data's affair.
warnings.filterwarnings("ignore", category=SyntaxWarning, module=RECORD)
# Where several outputs are right, one that is given says nothing of the others.
ANY = re.compile(
    r"\b(?:any (?:of them|one|valid|such|order|answer|solution|possible|correct)"
    r"|multiple (?:answers|solutions|possible)|more than one (?:answer|solution))\b",
    re.IGNORECASE,
)


# ---- The program of an answer --------------------------------------------------------


def extract(text: str) -> str | None:
    """Returns the last block of Python that an answer has in fences; None without one.

    As in dLLM-RL a block is from "```python", wherever that stands, to the next "```". Other
    spellings of the language count where an answer has no such block, and blocks without a
    language where none names Python. A last block that is never closed is none: it was cut.
    """
    for block in BLOCKS:
        if found := [*block.finditer(text)]:
            return shorn(found[-1][1]) if found[-1][2] else None
    pieces = text.split("```")
    plain = [i for i in range(1, len(pieces), 2) if re.match(r"\s*\n", pieces[i])]
    if not plain or plain[-1] == len(pieces) - 1:
        return None
    return shorn(pieces[plain[-1]])


def shorn(block: str) -> str:
    """Returns a block without blanks around it, but for the indentation of its first line.

    HumanEval's answers may go on inside a function.
    """
    block = re.sub(r"^(?:\s*\n|[ \t]+)", "", block.rstrip())
    return block and block + "\n"


# ---- Records -------------------------------------------------------------------------


def tests_of(record: dict) -> dict:
    """Returns a record's tests in the shape above; raises ValueError for a bad record."""
    field = field_of(record)
    try:
        return checked(READERS[field](record))
    except ValueError as error:
        raise ValueError(f"field {field!r}: {error}") from None


def field_of(record: dict) -> str:
    """Returns the field in which a record's tests stand; raises ValueError without one."""
    fields = [field for field in READERS if record.get(field) is not None]
    if not fields:
        raise ValueError(f"no tests: it needs one of the fields {', '.join(READERS)}")
    if fields[0] not in METHODS.values():
        return fields[0]
    method = record.get("test_method")
    if method is None:  # a function's, in dLLM-RL
        return METHODS["function"] if record.get("test_list") else fields[0]
    if method not in (*METHODS,):
        raise ValueError(f"test_method={checks.shown(method)}: stdio or function")
    return METHODS[method]


def own(record: dict) -> dict:
    """Reads a record that has the shape already."""
    return kept(record["tests"], dict, "an object with a kind")


def dllm_rl(record: dict) -> dict:
    """Reads a record of dLLM-RL: standard input and output."""
    return stdio(record.get("test_input"), record.get("test_output"))


def mbpp(record: dict) -> dict:
    """Reads a record of MBPP, sanitized or not, or a function's of dLLM-RL."""
    asserts = texts(record.get("test_list")) + texts(
        record.get("challenge_test_list") or []
    )
    imports = texts(record.get("test_imports") or [])
    setup = "\n".join([*imports, str(record.get("test_setup_code") or "")])
    if len(asserts) == 1 and (whole := called_check(asserts[0])):
        return whole | {"prelude": setup}
    return {"kind": "asserts", "setup": setup, "asserts": asserts}


def called_check(source: str) -> dict | None:
    """Returns the shape of a test that is a function `check`, and its call with another.

    So are the tests of dLLM-RL's MBPP and HumanEval. None: it is something else.
    """
    *before, last = parsed(source).body or [None]
    match last:
        case ast.Expr(ast.Call(ast.Name("check"), [ast.Name(entry)], [])):
            lines = source.splitlines(keepends=True)[: last.lineno - 1]
            if defines(before, "check"):
                return {"kind": "check", "entry": entry, "check": "".join(lines)}
    return None


def humaneval(record: dict) -> dict:
    """Reads a record of HumanEval."""
    named = {x: record.get(x) for x in ("prompt", "entry_point", "test")}
    for name, value in named.items():
        kept(value, str, f"{name}, a text")
    prompt, entry, test = named.values()
    called = called_check(test) or {}
    if called.get("entry") == entry:  # as the judge calls it anyhow
        test = called["check"]
    tests = {"kind": "check", "entry": entry, "check": test}
    return tests | {"prelude": prompt + "\n    pass\n", "prompt": prompt}


def apps(record: dict) -> dict:
    """Reads a record of APPS or TACO."""
    given = kept(from_json(record["input_output"]), dict, "an object")
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not given.get("fn_name"):
        return stdio(inputs, outputs)
    # A result stands in a list of its own in many of them, and in others not.
    tests = calls(given["fn_name"], inputs, outputs)
    return tests | {"wrapped": True}


def live(record: dict) -> dict:
    """Reads a record of LiveCodeBench."""
    cases = []
    for name in ("public_test_cases", "private_test_cases"):
        given = record.get(name)
        cases += kept(from_json(unpacked(given)), list, name) if given else []
    cases = [kept(case, dict, "a list of objects") for case in cases]
    pairs = [(case.get("input"), case.get("output")) for case in cases]
    if not any(case.get("testtype") == "functional" for case in cases):
        return stdio([x for x, _ in pairs], [y for _, y in pairs])
    metadata = kept(from_json(record.get("metadata") or "{}"), dict, "metadata")
    arguments = [[from_json(x) for x in lines_of(given)] for given, _ in pairs]
    results = [from_json(result) for _, result in pairs]
    return calls(metadata.get("func_name"), arguments, results)


def contests(record: dict) -> dict:
    """Reads a record of CodeContests; raises ValueError where several outputs are right."""
    if ANY.search(str(record.get("description") or "")):
        raise ValueError("its description allows more than one output: leave it out")
    inputs, outputs = [], []
    for name in ("public_tests", "private_tests", "generated_tests"):
        given = kept(record.get(name) or {}, dict, f"an object in {name}")
        inputs += rows(given.get("input") or [])
        outputs += rows(given.get("output") or [])
    return stdio(inputs, outputs)


# The field of each `test_method`.
METHODS = {"stdio": "test_input", "function": "test_list"}
# Of others the first field that a record has says how it is read.
READERS = {
    "tests": own,
    "test_input": dllm_rl,
    "test_list": mbpp,
    "entry_point": humaneval,
    "input_output": apps,
    "private_test_cases": live,
    "public_test_cases": live,
    "public_tests": contests,
    "private_tests": contests,
}


def limits_of(record: dict) -> tuple[float | None, int | None]:
    """Returns a record's own (seconds, MiB), None for what it does not say.

    Raises ValueError for what is no limit.
    """
    seconds, memory = record.get("test_time_limit"), None
    if isinstance(record.get("time_limit"), dict):
        limit = record["time_limit"]
        seconds = amount(limit, "seconds") + amount(limit, "nanos") / 1e9
    if record.get("memory_limit_bytes"):
        memory = int(amount(record, "memory_limit_bytes")) // 2**20
    if isinstance(record.get("limits"), dict):
        seconds = record["limits"].get("seconds", seconds)
        memory = record["limits"].get("memory_mb", memory)
    seconds, memory = seconds or None, memory or None
    sandbox.check_limits(seconds or 1.0, memory or MEMORY_MB)
    return seconds, memory


def amount(record: dict, name: str) -> float:
    """Returns a field's number, 0 where there is none; raises ValueError for another."""
    value = record.get(name) or 0
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 <= value < 2**53):
        raise ValueError(f"{name}={checks.shown(value)}: must be a number, at least 0")
    return value


class Unpickler(pickle.Unpickler):
    """Reads texts alone: a pickle that names a class would run it."""

    def find_class(self, module, name):
        """Refuses."""
        raise ValueError(f"its pickle names {module}.{name}, which nobody runs")


def unpacked(given):
    """Returns LiveCodeBench's tests as JSON: plain, or pickled, packed and in base64."""
    if not isinstance(given, str) or given.lstrip()[:1] in ("[", "{"):
        return given
    try:
        packed = base64.b64decode(given, validate=True)
        reader = zlib.decompressobj()
        data = reader.decompress(packed, MOST_BYTES)
    except (binascii.Error, zlib.error):
        raise ValueError("neither JSON nor packed in base64 and zlib") from None
    if reader.unconsumed_tail:
        raise ValueError(f"more than {MOST_BYTES} bytes of tests")
    try:
        return kept(Unpickler(io.BytesIO(data)).load(), str, "a pickled text")
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001 (a damaged pickle raises anything)
        raise ValueError(f"a damaged pickle: {type(error).__name__}") from None


def from_json(given):
    """Returns what a text of JSON says, and what is none as it is."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        raise ValueError(f"{given[:40]!r} is no JSON") from None


def kept(value, kind: type, words: str):
    """Returns the value; raises ValueError where it is of another kind."""
    fits = isinstance(value, kind)
    if not fits:
        raise ValueError(f"must be {words}, and is a {type(value).__name__}")
    return value


def rows(value) -> list:
    """Returns a list; raises ValueError for what is none."""
    return kept(value, list, "a list")


def texts(value) -> list[str]:
    """Returns a list of texts; raises ValueError for what is none."""
    return [kept(x, str, "a list of texts") for x in rows(value)]


def lines_of(text: str) -> list[str]:
    """Returns the lines of a text that hold something."""
    return [x for x in re.split("\r?\n", kept(text, str, "a text")) if x.strip()]


def joined(value) -> str:
    """Returns the text of an input or output, which may be a list of its lines."""
    if isinstance(value, list):
        return "\n".join(map(joined, value))
    return str(kept(value, (str, int, float), "a text"))


def stdio(inputs, outputs) -> dict:
    """Returns the shape of programs that read and print."""
    inputs, outputs = rows(inputs), rows(outputs)
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    cases = [[joined(x), joined(y)] for x, y in zip(inputs, outputs, strict=True)]
    return {"kind": "stdio", "cases": cases}


def calls(entry, arguments, results) -> dict:
    """Returns the shape of functions that are called."""
    arguments, results = rows(arguments), rows(results)
    if len(arguments) != len(results):
        raise ValueError(f"{len(arguments)} inputs and {len(results)} outputs")
    cases = [[rows(x), y] for x, y in zip(arguments, results, strict=True)]
    return {"kind": "calls", "entry": entry, "cases": cases}


DEFAULTS = {"setup": "", "prelude": "", "float": False, "wrapped": False}
NEEDS = {
    "stdio": {"cases": list},
    "asserts": {"asserts": list, "setup": str},
    "check": {"entry": str, "prelude": str, "check": str},
    "calls": {"entry": str, "cases": list},
}


def checked(tests: dict) -> dict:
    """Returns tests with their defaults; raises ValueError where they are no tests."""
    kind = tests.get("kind")
    if not (isinstance(kind, str) and kind in NEEDS):
        raise ValueError(f"kind={checks.shown(kind)}: one of {', '.join(NEEDS)}")
    tests = DEFAULTS | tests
    for name, needed in NEEDS[kind].items():
        kept(tests.get(name), needed, f"{name}, a {needed.__name__}")
    if not tests.get("cases", tests.get("asserts", [0])):
        raise ValueError("no tests in it")
    if kind == "check" and not defines(ast.walk(parsed(tests["check"])), "check"):
        raise ValueError("its tests define no function check")
    for case in tests.get("cases", []):
        if not (isinstance(case, (list, tuple)) and len(case) == 2):
            raise ValueError("a case is a pair")
        (texts if kind == "stdio" else lambda pair: rows(pair[0]))(case)
        if kind == "stdio" and printable(case[1]) > sandbox.OUTPUT:
            raise ValueError(
                f"an output of more than {sandbox.OUTPUT} bytes, which no program may "
                "print: leave it out"
            )
    sources = [tests["setup"], tests["prelude"], *tests.get("asserts", [])]
    for source in [*sources, tests.get("check", "")]:
        parsed(source)
    return tests


def defines(nodes, name: str) -> bool:
    """Returns whether one of a program's nodes is a function or a class of a name."""
    return any(getattr(x, "name", None) == name for x in nodes)


def printable(wanted: str) -> int:
    """Returns the least number of characters that an output takes."""
    return len(wanted) and len(" ".join(wanted.split()))


def parsed(source: str) -> ast.Module:
    """Returns the tree of a test's source; raises ValueError where it is no Python."""
    try:
        return ast.parse(kept(source, str, "a text"), RECORD)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{source[:40]!r} is no Python") from None


# ---- Grading -------------------------------------------------------------------------


def grade_program(
    program: str,
    record: dict,
    *,
    seconds: float = SECONDS,
    memory_mb: int = MEMORY_MB,
    all_cases: bool = True,
) -> float:
    """Returns the share of a record's tests that a program, without fences, passes.

    NaN where the sandbox failed, again and again. seconds, memory_mb: of a test, where the
    record has none of its own. all_cases: go on after the first failure; else the share is
    that of the tests before it. Raises ValueError for a record without tests, RuntimeError
    where programs cannot be confined.
    """
    tests = tests_of(record)
    own_seconds, own_memory = limits_of(record)
    limits = {"seconds": own_seconds or seconds, "memory_mb": own_memory or memory_mb}
    if tests["kind"] == "stdio":
        return by_output(unindented(program), tests, limits, all_cases)
    count = len(tests.get("cases", tests.get("asserts", [])))
    candidate = {"sources": sources(program, tests), "typing": tests["kind"] == "calls"}
    verdict = sandbox.tried(candidate, tests, all_cases=all_cases, **limits)
    if verdict is None:
        return math.nan
    if not verdict:
        names = (record[key] for key in NAMED_BY if key in record)
        say_broken(checks.shown(next(names, "a record")))
    # How many tests a check has, it says itself, by making them.
    return verdict.count("1") / max(count, len(verdict), 1)


NAMED_BY = "task_id", "question", "question_content", "prompt"  # fields of a record


@functools.cache  # once for each record
def say_broken(name: str) -> None:
    """Tells of tests that end with their judge: the data's fault, not an answer's."""
    warn(
        f"the tests of {name} never end, end their judge, or import what is not there; its "
        "answers earn 0, and each may cost the time that a judge has: leave the record out"
    )


def sources(program: str, tests: dict) -> list[str]:
    """Returns what the candidate executes: the program, after a prompt that it may need.

    HumanEval's answers are whole functions, which may call the prompt's helpers, or go on
    where the prompt ends.
    """
    whole = unindented(program)
    if tests["kind"] != "check":
        return [whole]
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        tree = ast.parse(whole, RECORD)
        if defines(tree.body, tests["entry"]):
            return [tests["prelude"], whole]
    return [tests.get("prompt", "") + program]


def unindented(program: str) -> str:
    """Returns a program as it is where its block does not stand in a list, or in a quote."""
    return textwrap.dedent(program).strip()


def by_output(program: str, tests: dict, limits: dict, all_cases: bool) -> float:
    """Returns the share of cases in which a program prints what is wanted.

    After HUNG time-outs the others have failed: what hangs once hangs in most cases, and
    each costs all of its time.
    """
    passed = hung = 0
    for given, wanted in tests["cases"]:
        result = sandbox.ended(program, given.encode("utf-8", "replace"), **limits)
        if result.status == "sandbox":
            return math.nan
        ended = result.status in ("ok", "exit")  # its exit code says nothing
        right = ended and same_output(result.stdout, wanted, tests["float"])
        passed += right
        hung += result.status == "timeout"
        if not (right or all_cases) or hung == HUNG:
            break
    return passed / len(tests["cases"])


def same_output(got: bytes, wanted: str, tolerant: bool) -> bool:
    """Returns whether an output is the wanted one, but for blanks.

    tolerant: numbers may differ by a millionth.
    """
    try:
        ours, theirs = got.decode().split(), wanted.split()
    except UnicodeDecodeError:
        return False
    if ours == theirs or not tolerant:
        return ours == theirs
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(near(x, y) for x, y in pairs)


def near(got: str, wanted: str) -> bool:
    """Returns whether two words are the same, or finite numbers as good as equal."""
    if got == wanted:
        return True
    try:
        a, b = Decimal(got), Decimal(wanted)
    except InvalidOperation:
        return False
    if not (a.is_finite() and b.is_finite()):
        return False
    with contextlib.suppress(OverflowError):
        return abs(float(a) - float(b)) <= CLOSE * max(1.0, abs(float(b)))
    return False


def check(record: dict) -> None:
    """Raises ValueError for a record without tests, or with limits that are none."""
    tests_of(record)
    limits_of(record)


def begin(cfg) -> list[str]:
    """Starts the sandbox as rl.config.RewardConfig says; returns a line that names it.

    Raises ValueError where programs cannot be confined.
    """
    sandbox.configure(cfg.workers, cfg.allow_unsafe)
    try:
        return [f"sandbox: {sandbox.available()}"]
    except RuntimeError as error:
        raise ValueError(f"rl.reward: {error}") from None


def grade(texts: list[str], problems, cfg) -> list[float]:
    """Returns the share of tests that the program in each text passes.

    0 where a text has none. problems: data.Problem; cfg: rl.config.RewardConfig.
    """
    sandbox.configure(cfg.workers, cfg.allow_unsafe)

    @functools.cache  # the answers of a group repeat
    def of(program: str | None, number: int) -> float:
        if program is None:
            return 0.0
        return grade_program(
            program,
            problems[number].record,
            seconds=cfg.seconds,
            memory_mb=cfg.memory_mb,
            all_cases=cfg.all_cases,
        )

    first = {}  # where a record stood first: those of a group are one
    numbers = [first.setdefault(id(p.record), i) for i, p in enumerate(problems)]
    with concurrent.futures.ThreadPoolExecutor(sandbox.pool.workers) as threads:
        return [*threads.map(of, map(extract, texts), numbers)]
