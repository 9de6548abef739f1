"""Code rewards: formats in, the share of tests out, and programs that only pretend."""

import base64
import json
import math
import os
import pathlib
import pickle
import signal
import textwrap
import threading
import time
import zlib

import pytest

from dllm_jax.rl.rewards import code, sandbox
from tests.goldens import reader
from tests.rl.rewards import cheats

SHARED = (x / "shared/data/mbpp.jsonl" for x in pathlib.Path(__file__).parents)
MBPP = next((x for x in SHARED if x.exists()), None)


@pytest.fixture(scope="module", autouse=True)
def close_jails():
    yield
    sandbox.close()


def grade(program, record, **how):
    return code.grade_program(program, record, **({"seconds": 2.0} | how))


# ---- The program of an answer --------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("so\n```python\na = 1\n```\nand", "a = 1\n"),
        ("```Python\na\n```", "a\n"),
        ("```py\na\n```\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n```python\nb", None),  # cut: the answer was not finished
        ("```python\na\n```\n```", "a\n"),
        ("```python\na\n```\nIt prints\n```\n1", "a\n"),
        ("Here is the code: ```python\na\n```", "a\n"),
        ("```python\na```", "a\n"),
        ("```python\na\n``` This works.", "a\n"),
        ("```python a ```", "a\n"),
        ("```python\na\n```\n```py\nb\n```", "a\n"),  # dLLM-RL's rule comes first
        ("```python\na\n```\n```py\nb", "a\n"),
        ("```python3\na\n```", "a\n"),
        ("so ```Python\na``` and", "a\n"),
        ("```py\na\n```\n```Python\nb", None),
        ("```pycon\n>>> a\n```", None),
        ("```\na\n``` This works.", "a\n"),
        ("```\na\n```\n```\nb", None),
        ("```cpp\nint a;\n```\n```\na\n```", "a\n"),
        ("```a```", None),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\n```\noutput\n```", "a\n"),
        ("```python\na\n```\n```text\noutput\n```", "a\n"),
        ("```cpp\nint a;\n```", None),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("def f(): pass", None),
        ("```python\n```", ""),
        ("", None),
    ],
)
def test_the_last_closed_block_is_the_program(text, program):
    assert code.extract(text) == program


LENIENT = {  # where dLLM-RL finds no program
    "```\nprint(1)\n```": "a block needs no language where none names Python",
    "```Python\nq\n```": "the case of the language says nothing of the program",
}


@pytest.mark.parametrize(
    "case",
    reader.read("rewards/extraction.json")["code"],
    ids=lambda case: case["text"][:30],
)
def test_extraction_equals_the_golden(case):
    program, wanted = code.extract(case["text"]), case["out"]
    # The reference reports a failure as a sentence, which it then runs as a program.
    wanted = None if wanted.startswith("We can not extract the code") else wanted
    if why := LENIENT.get(case["text"], ""):
        assert wanted is None and program, why
    else:  # the end of a line, and an indentation, are kept
        assert (program if program is None else program.strip()) == wanted


def test_the_first_lines_indentation_counts_inside_a_function_alone():
    program = code.extract("```python\n  print(int(input()) * 2)\n  ```")
    assert grade(program, {"test_input": ["1"], "test_output": ["2"]}) == 1.0
    program = code.extract("```python\n\n    return 2 * x\n```")
    assert grade(program, RECORDS["humaneval, going on"][1]) == 1.0


@pytest.mark.parametrize("name", ["dllm-rl stdio", "mbpp", "humaneval"])
def test_a_block_may_stand_in_a_list(name):
    whole = "x = int(input())\nprint(2 * x)" if "stdio" in name else DOUBLE
    text = textwrap.indent(f"```python\n{whole}\n```", "   ")
    program = code.extract(f"1. Like this:\n\n{text}\n\n2. Done.")
    assert grade(program, RECORDS[name][1]) == 1.0


# ---- Formats -------------------------------------------------------------------------

ECHO = "print(int(input()) * 2)"
DOUBLE = "def f(x):\n    return 2 * x\n"
SOLUTION = (
    "class Solution:\n    def f(self, x: List[int], y: int):\n        return x * y\n"
)


def packed(value) -> str:
    """Returns tests as LiveCodeBench packs them."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


FUNCTIONAL = [
    {"input": "[1, 2]\n2", "output": "[1, 2, 1, 2]", "testtype": "functional"}
]
STDIN = [{"input": "3\n", "output": "6\n", "testtype": "stdin"}]
RECORDS = {
    "dllm-rl stdio": (
        ECHO,
        {"test_method": "stdio", "test_input": ["1", "4"], "test_output": ["2", "8"]},
    ),
    "dllm-rl function": (
        DOUBLE,
        {
            "test_method": "function",
            "test_list": ["assert f(1) == 2"],
            "prefix": "{{x}}",
        },
    ),
    "dllm-rl function, empty others": (
        DOUBLE,
        {
            "test_method": "function",
            "test_list": ["assert f(1) == 2"],
            "test_input": [],
            "test_output": [],
        },
    ),
    "dllm-rl function, other tests": (
        DOUBLE,
        {
            "test_method": "function",
            "test_list": ["assert f(1) == 2"],
            "test_input": ["1"],
            "test_output": ["2"],
        },
    ),
    "dllm-rl stdio, other tests": (
        ECHO,
        {
            "test_method": "stdio",
            "test_list": ["assert f(1) == 2"],
            "test_input": ["1"],
            "test_output": ["2"],
        },
    ),
    "dllm-rl without a method": (DOUBLE, {"test_list": ["assert f(1) == 2"]}),
    "dllm-rl without a method, both": (
        DOUBLE,
        {
            "test_list": ["assert f(1) == 2"],
            "test_input": ["1"],
            "test_output": ["2"],
        },
    ),
    "dllm-rl stdio without a method": (
        ECHO,
        {"test_list": [], "test_input": ["1"], "test_output": ["2"]},
    ),
    "our own before a method's": (
        DOUBLE,
        {
            "test_method": "function",
            "test_list": ["assert f(1) == 3"],
            "tests": {"kind": "asserts", "asserts": ["assert f(1) == 2"]},
        },
    ),
    "mbpp": (
        DOUBLE,
        {
            "text": "?",
            "test_setup_code": "x = 4",
            "test_list": ["assert f(x) == 8"],
            "challenge_test_list": ["assert f('a') == 'aa'"],
        },
    ),
    "mbpp sanitized": (
        DOUBLE,
        {
            "prompt": "?",
            "test_imports": ["import math"],
            "test_list": ["assert math.isclose(f(0.1), 0.2)"],
        },
    ),
    "humaneval": (
        DOUBLE,
        {
            "prompt": "def f(x):\n",
            "entry_point": "f",
            "test": "def check(candidate):\n"
            "    for i in range(3):\n        assert candidate(i) == 2 * i\n",
        },
    ),
    "humaneval, its prompt's helper": (
        "def f(x):\n    return g(x) + 1\n",
        {
            "prompt": "def g(x):\n    return x\n\ndef f(x):\n",
            "entry_point": "f",
            "test": "def check(candidate):\n    assert candidate(1) == g(2)\n",
        },
    ),
    "humaneval, going on": (
        "    return 2 * x\n",
        {
            "prompt": "def f(x):\n",
            "entry_point": "f",
            "test": "def check(candidate):\n    assert candidate(4) == 8\n",
        },
    ),
    "humaneval, whose tests call their check": (
        DOUBLE,
        {
            "prompt": "def f(x):\n",
            "entry_point": "f",
            "test": "def test_f():\n    check(f)\n\ndef check(candidate):\n"
            "    assert candidate(1) == 2\n    assert f(2) == 4\n\ntest_f()\ncheck(f)\n"
            "assert f(3) == 6\n",
        },
    ),
    "apps stdio": (
        ECHO,
        {"input_output": '{"inputs": ["1", ["2"]], "outputs": ["2", "4"]}'},
    ),
    "apps function": (
        DOUBLE,
        {
            "input_output": '{"fn_name": "f", "inputs": [[1], [2]], "outputs": [[2], [4]]}'
        },
    ),
    "taco method": (
        "class Solution:\n    def f(self, x): return x\n",
        {"input_output": {"fn_name": "f", "inputs": [[[1]]], "outputs": [[1]]}},
    ),
    "a method's name is a module's function's, too": (
        "class Solution:\n    def search(self, x): return [*range(x)]\n",
        {"input_output": {"fn_name": "search", "inputs": [[2]], "outputs": [[0, 1]]}},
    ),
    "builtins by their module": (
        (
            "from math import *\nclass Solution:\n"
            "    def f(self, x): return __builtins__.pow(x, 2, 5)\n"
        ),
        {"input_output": {"fn_name": "f", "inputs": [[3]], "outputs": [4]}},
    ),
    "livecodebench stdin": (
        ECHO,
        {
            "public_test_cases": json.dumps(STDIN),
            "private_test_cases": packed(json.dumps(STDIN)),
        },
    ),
    "livecodebench functional": (
        SOLUTION,
        {
            "public_test_cases": json.dumps(FUNCTIONAL),
            "private_test_cases": json.dumps(FUNCTIONAL),
            "metadata": '{"func_name": "f"}',
        },
    ),
    "codecontests": (
        ECHO,
        {
            "description": "Double it.",
            "public_tests": {"input": ["1"], "output": ["2"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": {"input": ["5"], "output": ["10"]},
            "time_limit": {"seconds": 2, "nanos": 500000000},
            "memory_limit_bytes": 256000000,
        },
    ),
    "our own": (
        DOUBLE,
        {"tests": {"kind": "calls", "entry": "f", "cases": [[[1], 2]]}},
    ),
}


def test_a_list_around_a_result_is_of_apps_alone():
    record = {"input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}}
    assert grade(DOUBLE, record) == 1
    assert grade(DOUBLE, {"tests": code.calls("f", [[1]], [[2]])}) == 0


@pytest.mark.parametrize("name", RECORDS)
def test_every_format_is_read_and_graded(name):
    program, record = RECORDS[name]
    assert grade(program, record) == 1.0
    assert grade("def f(x): return 'no'\nprint('no')", record) == 0.0
    assert grade("this is no program", record) == 0.0


def test_functions_that_are_called_need_no_imports():
    """As LiveCodeBench's own grader runs them; those of other tests do."""
    program = (
        "@cache\ndef g(x: int) -> Optional[int]:\n    return pow(x, 2, 7) + math.gcd(x, 4)\n"
        "def f(x):\n    row = deque([x])\n    heappush(h := [], random.seed(0) or inf)\n"
        "    return g(row[0]) + len(collections.Counter('ab')) + (h[0] == inf)\n"
    )
    record = {"tests": {"kind": "calls", "entry": "f", "cases": [[[3], 6]]}}
    assert grade(program, record) == 1.0
    assert grade(program, {"test_list": ["assert f(3) == 6"]}) == 0.0


def test_a_records_own_limits_hold():
    record = RECORDS["codecontests"][1]
    assert code.limits_of(record) == (2.5, 244)
    assert code.limits_of({"test_time_limit": 1}) == (1, None)
    own = {"limits": {"seconds": 0.5, "memory_mb": 64}}
    assert code.limits_of(own) == (0.5, 64)
    slow = {"test_list": ["assert f(1) == 2"], "test_time_limit": 0.2}
    assert grade("def f(x):\n    while True: pass\n", slow) == 0.0


class Evil:
    """Runs a command when it is unpickled by who does not look."""

    def __reduce__(self):
        return os.system, ("touch /tmp/unpickled",)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "no tests: it needs one of the fields tests, test_input"),
        ({"test_list": "assert 1"}, "field 'test_list': must be a list, and is a str"),
        ({"test_list": [3]}, "field 'test_list': must be a list of texts"),
        ({"test_list": []}, "field 'test_list': no tests in it"),
        ({"test_list": ["assert ("]}, "'assert \\(' is no Python"),
        ({"test_input": ["1"], "test_output": []}, "1 inputs and 0 outputs"),
        ({"test_input": ["1"]}, "field 'test_input': must be a list"),
        ({"test_input": [None], "test_output": ["1"]}, "must be a text, and is a None"),
        (
            {"test_input": [""], "test_method": "x"},
            "test_method='x': stdio or function",
        ),
        ({"test_list": ["assert 1"], "test_method": [1]}, "test_method=\\[1\\]: stdio"),
        (
            {"test_input": ["1"], "test_output": ["1"], "test_method": "function"},
            "field 'test_list': must be a list, and is a NoneType",
        ),
        (
            {"test_list": ["assert 1"], "test_method": "stdio"},
            "field 'test_input': must be a list, and is a NoneType",
        ),
        ({"entry_point": "f", "prompt": "x"}, "must be test, a text"),
        (
            {"entry_point": "f", "prompt": "", "test": "assert f(1)\ncheck(f)"},
            "its tests define no function check",
        ),
        ({"input_output": "{"}, "field 'input_output': '{' is no JSON"),
        ({"input_output": "[]"}, "must be an object, and is a list"),
        ({"input_output": "[" * 99999}, "is no JSON"),
        ({"private_test_cases": "%%%"}, "neither JSON nor packed"),
        ({"private_test_cases": packed(Evil())}, "which nobody runs"),
        ({"private_test_cases": packed([1])}, "must be a pickled text"),
        (
            {"private_test_cases": packed("{}")[:-9] + "AAAAAAAA="},
            "neither JSON|damaged",
        ),
        (
            {"public_tests": {}, "description": "print any of them"},
            "more than one output",
        ),
        ({"public_tests": {"input": 3}}, "must be a list"),
        ({"public_tests": {}, "private_tests": [1]}, "an object in private_tests"),
        ({"tests": {"kind": "x"}}, "kind='x': one of stdio, asserts, check, calls"),
        ({"tests": {"kind": []}}, "kind=\\[\\]: one of stdio"),
        ({"tests": {"kind": "stdio", "cases": [[1, "2"]]}}, "must be a list of texts"),
        (
            {"tests": {"kind": "calls", "entry": "f", "cases": [[1, 1]]}},
            "must be a list, and is a int",
        ),
        ({"tests": {"kind": "calls", "cases": [[[1], 1]]}}, "must be entry, a str"),
        ({"tests": {"kind": "calls", "entry": "f", "cases": [1]}}, "a case is a pair"),
    ],
)
def test_a_bad_record_is_refused(record, message):
    with pytest.raises(ValueError, match=message):
        code.tests_of(record)
    assert not os.path.exists("/tmp/unpickled")


def test_bad_limits_of_a_record_are_refused():
    for limits in (
        {"test_time_limit": -1},
        {"test_time_limit": True},
        {"limits": {"memory_mb": 1}},
        {"time_limit": {"seconds": "2"}},
        {"time_limit": {"seconds": 2, "nanos": [1]}},
        {"memory_limit_bytes": math.inf},
        {"memory_limit_bytes": "256 MB"},
    ):
        with pytest.raises(ValueError, match="must be"):
            code.limits_of(limits)


# ---- What is passed ------------------------------------------------------------------


def test_the_reward_is_the_share_of_tests():
    record = {"test_list": [f"assert f({i}) == {i * i}" for i in range(4)]}
    assert grade("def f(x): return 2 * x", record) == 0.5  # 0 and 2
    assert grade("def f(x): return 2 * x", record, all_cases=False) == 0.25
    stdio = {"test_input": ["0", "1", "2"], "test_output": ["0", "1", "4"]}
    assert grade("print(2 * int(input()))", stdio) == pytest.approx(2 / 3)
    assert grade("print(2 * int(input()))", stdio, all_cases=False) == pytest.approx(
        1 / 3
    )


def test_one_bad_test_does_not_spoil_the_others():
    """A slow, a dying and a raising test each fail alone."""
    record = {"test_list": [f"assert f({i}) == {i}" for i in range(6)]}
    program = (
        "import os\ndef f(x):\n    if x == 1:\n        while True: pass\n"
        "    if x == 2: os._exit(0)\n    if x == 4: raise KeyError\n    return x\n"
    )
    assert grade(program, record, seconds=0.3) == 0.5


def test_after_three_deaths_the_rest_has_failed():
    record = {"test_list": [f"assert f({i}) == {i}" for i in range(9)]}
    program = "import os\ndef f(x):\n    if x < 4: os._exit(0)\n    return x\n"
    assert grade(program, record) == 0.0


def test_who_dies_of_several_tests_is_not_started_for_ever():
    """Each life answers one test and dies in the next: seven lives, seven answers."""
    record = {"test_list": [f"assert f({i}) == {i}" for i in range(14)]}
    program = (
        "import os\nasked = []\ndef f(x):\n    if asked: os._exit(0)\n"
        "    asked.append(x)\n    return x\n"
    )
    assert grade(program, record) == 0.5


def test_after_three_time_outs_the_rest_has_failed(monkeypatch):
    """A program that reads and prints costs three limits, however many cases there are."""
    asked = []

    def ended(program, given, **limits):
        asked.append(given)
        status = "timeout" if given in (b"0", b"2", b"3") else "ok"
        return sandbox.Result(status, given, 0.0)

    monkeypatch.setattr(sandbox, "ended", ended)
    cases = [str(i) for i in range(9)]
    record = {"test_input": cases, "test_output": cases}
    assert grade(ECHO, record) == pytest.approx(1 / 9)
    assert asked == [b"0", b"1", b"2", b"3"]


def test_time_is_a_tests_own():
    """Tests that are each in time pass, though together they are not."""
    record = {"test_list": [f"assert f({i}) == {i}" for i in range(4)]}
    program = (
        "import time\ndef f(x):\n    end = time.process_time() + 0.3\n"
        "    while time.process_time() < end: pass\n    return x\n"
    )
    assert grade(program, record, seconds=0.7) == 1.0


def test_outputs_are_compared_but_for_blanks():
    record = {"test_input": [""], "test_output": ["1 2\n 3.5\n"]}
    assert grade("print('1  2 \\n3.5\\n\\n')", record) == 1.0
    assert grade("print('1 2 3.50')", record) == 0.0
    tolerant = {"tests": {"kind": "stdio", "cases": [["", "1 2 3.5"]], "float": True}}
    assert grade("print('1 2.0000000001 3.50')", tolerant) == 1.0
    for wrong in ("1 2 nan", "1 2 3.6", "1 2", "1 2 3.5 4", "1 2 1e999999", "1 2 x"):
        assert grade(f"print('{wrong}')", tolerant) == 0.0


@pytest.mark.parametrize(
    ("program", "share"),
    [
        ("import sys; print(6); sys.exit(3)", 1.0),  # an exit code says nothing
        ("print(6); exit()", 1.0),
        ("print(6); 1/0", 0.0),
        ("import sys; sys.stdout.buffer.write(b'6\\xff')", 0.0),
        ("while True: print(6)", 0.0),
        ("print('error: ...')", 0.0),
    ],
)
def test_how_a_program_ends_counts(program, share):
    assert grade(program, {"test_input": [""], "test_output": ["6"]}) == share


VALUES = (
    "(1, 2)",
    "[1, [2, (3,)]]",
    "{1: 'a', (2, 3): None}",
    "{1, 2}",
    "frozenset({1})",
    "2**200",
    "-(2**80)",
    "1e300",
    "1j",
    "b'a\\xff'",
    "'\\ud800'",
    "True",
    "None",
)


FAST = """
import os, sys
class Out:
    def __init__(self, file):
        self.file = file.fileno()
        self.writable = "x" in file.mode or "r" not in file.mode
        self.held = []
    def write(self, text): self.held.append(text)
    def flush(self): os.write(self.file, "".join(self.held).encode())
sys.stdout = Out(sys.stdout)
print(7 if sys.stdout.writable and sys.stdin.mode == "r" else 0)
"""


@pytest.mark.parametrize(
    "program",
    [
        "out = open(1, 'w')\nout.write('7')",
        "import os\nout = os.fdopen(1, 'w')\nprint(7, file=out)",
        "import io, sys\nold, sys.stdout = sys.stdout, io.StringIO()\nold.write('7')",
        "import atexit, sys\nout, sys.stdout = sys.stdout, None\natexit.register(out.write, '7')",
        "import sys\nprint(7)\nsys.stdout.close()",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach())\nprint(7)",
        FAST,
        "import resource\nresource.setrlimit(resource.RLIMIT_STACK, (-1, -1))\nprint(7)",
        "assert __file__\nprint(7)",
    ],
)
def test_what_an_interpreter_writes_at_its_end_is_written(program):
    assert grade(program, {"tests": {"kind": "stdio", "cases": [["", "7"]]}}) == 1


@pytest.mark.parametrize("value", VALUES)
def test_values_cross_between_the_jails(value):
    record = {"test_list": [f"assert f({value}) == ({value}, {value})"]}
    assert grade("def f(x): return x, x", record) == 1.0


def test_what_crosses_is_plain():
    record = {"test_list": ["assert list(f(3)) == [0, 1, 2]"]}
    assert grade("def f(n):\n    for i in range(n): yield i\n", record) == 1.0
    assert grade("def f(n): return map(int, '012')", record) == 1.0
    counter = {"test_list": ["assert f('aab') == {'a': 2, 'b': 1}"]}
    assert grade("from collections import Counter as f", counter) == 1.0
    deep = "def f(n):\n    x = []\n    for _ in range(9999): x = [x]\n    return x\n"
    assert grade(deep, record) == 0.0
    assert grade("def f(n): return 'x' * 2**21", {"test_list": ["assert f(1)"]}) == 0.0


def test_tests_may_build_the_candidates_objects():
    program = (
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
        "def total(pairs): return sum(p.a * p.b for p in pairs)\n"
    )
    record = {"test_list": ["assert total([Pair(1, 2), Pair(3, 4)]) == 14"]}
    assert grade(program, record) == 1.0
    setup = record | {
        "test_setup_code": "p = Pair(5, 6)",
        "test_list": ["assert total([p]) == 30", "assert p.a == 5"],
    }
    assert grade(program, setup) == 1.0


def test_a_function_may_have_a_builtins_name():
    record = {"test_list": ["assert sum(10, 15) == 25"]}
    assert grade("def sum(a, b): return a + b", record) == 1.0
    assert grade("def sum(a, b): return a", record) == 0.0


@pytest.mark.parametrize(
    "test",
    [
        "assert all(f(i) == r for i, r in zip([1, 2], [2, 4]))",
        "r = 4\nassert f(2) == r",
        "import os as r\nassert f(len(r.name[:1])) == 2",
        "def test(r):\n    assert f(r) == 2 * r\ntest(3)",
        "assert [*map(lambda r: f(r), [1, 2])] == [2, 4]",
    ],
)
def test_the_names_of_tests_are_not_the_candidates(test):
    """A program's own variables change nothing, and are not what it is compared with."""
    record = {"test_list": [test]}
    assert grade("def f(x): return 2 * x\ni = r = f(9)\n", record) == 1.0
    assert grade("def f(x): return 7\ni = 0\nr = 7\n", record) == 0.0


def test_a_name_that_tests_bind_and_call_is_still_the_candidates():
    record = {"test_list": ["assert sorted([2, 1], key=lambda f: f) == [1, f(1)]"]}
    assert grade("def f(x): return 2 * x\n", record) == 1.0


def test_an_exception_ends_no_loop_of_the_tests():
    record = {"test_list": ["assert all(map(lambda x: f(x) == 2 * x, [1, 2]))"]}
    assert grade("def f(x): raise StopIteration\n", record) == 0.0
    assert grade("def f(x): return 2 * x\n", record) == 1.0


def test_a_candidate_that_does_not_read_costs_its_time_alone():
    """What it is asked is larger than a pipe: without a limit its judge would wait."""
    cases = [[[list(range(40_000))], 1]] * 2
    record = {"tests": {"kind": "calls", "entry": "f", "cases": cases}}
    program = "import os\nos.close(4)\ndef f(x): return 1\n"
    start = time.monotonic()
    assert grade(program, record, seconds=0.2) == 0.0
    # Its judge would have been given up after 3 x judge_seconds.
    assert time.monotonic() - start < sandbox.judge_seconds(0.2)


def test_an_output_that_no_program_may_print_is_refused():
    wanted = "1 " * sandbox.OUTPUT
    record = {"test_input": [""], "test_output": [wanted]}
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        code.check(record)
    code.check({"test_input": [""], "test_output": ["1" + " " * 2 * sandbox.OUTPUT]})


def test_exceptions_of_the_candidate_are_pythons_own():
    check = (
        "def check(candidate):\n    try:\n        candidate(-1)\n        assert False\n"
        "    except ValueError:\n        assert True\n"
    )
    record = {"prompt": "def f(x):\n", "entry_point": "f", "test": check}
    assert grade("def f(x): raise ValueError", record) == 1.0
    assert grade("def f(x): raise KeyError", record) == 0.0
    # One of its own, or of a module, is the first of Python's own that it is.
    own = "class Bad(ValueError):\n    def __init__(self): pass\n"
    assert grade(f"{own}def f(x): raise Bad", record) == 1.0
    assert grade("import json\ndef f(x): json.loads('{')", record) == 1.0
    assert grade("def f(x): b'\\xff'.decode()", record) == 1.0
    assert grade("class Bad(KeyError): pass\ndef f(x): raise Bad", record) == 0.0


# ---- What is not passed --------------------------------------------------------------

TASKS = (
    {"test_list": ["assert f(1, 2) == 3", "assert f('a', 'b') == 'ab'"]},
    {
        "test_list": [
            "assert set(f([1, 1], [2])) == set([1, 2])",
            "assert f([], [2]) == [2]",
        ]
    },
    {
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "test": "import math\ndef check(candidate):\n"
        "    assert math.isclose(candidate(2), 4.5), 'wrong'\n"
        "    assert abs(candidate(3) - 7.5) < 1e-6\n    assert candidate('x') == 'y'\n",
    },
    {"tests": {"kind": "calls", "entry": "f", "cases": [[[1], 5], [[2], "six"]]}},
)


@pytest.mark.parametrize("name", cheats.CHEATS)
def test_no_cheat_passes_a_test(name):
    slow = name in cheats.SLOW
    for task in TASKS[::3] if slow else TASKS:
        limits = {"seconds": 0.2 if slow else 2.0, "all_cases": not slow}
        assert grade(cheats.of(name, "f"), task, **limits) == 0.0


def test_no_cheat_passes_where_it_shares_the_machine(monkeypatch):
    """Without namespaces two children could find each other in /proc."""
    monkeypatch.setattr(sandbox, "pool", sandbox.Pool(1))
    sandbox.pool.without = ("namespaces",)
    for name in ("other processes", "forged verdict", "stack inspection"):
        for task in TASKS:
            assert grade(cheats.of(name, "f"), task) == 0.0
    assert "namespaces no" in sandbox.available()
    sandbox.pool.close()


def test_tests_that_never_end_are_no_reward_and_are_named(monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "judge_seconds", lambda seconds: 0.3)
    for test in ("while True: pass", "import os\nos._exit(0)", "assert f(1) == 1"):
        record = {"task_id": test[:6], "test_list": [test, "assert 1"]}
        share = grade("def f(x): return x", record)
        assert share == grade("def f(x): return x", record)
        assert share == float(test.startswith("assert"))
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" never end")[0] for line in said] == [
        "warning: the tests of 'while '",
        "warning: the tests of 'import'",
    ]


def test_a_jail_that_is_killed_in_the_middle_changes_no_grade(monkeypatch):
    monkeypatch.setattr(sandbox, "pool", sandbox.Pool(1))
    jail = sandbox.pool.started()
    sandbox.pool.idle.append(jail)
    killer = threading.Timer(0.2, jail.process.kill)
    killer.start()
    slow = "import time\ndef f(x):\n    time.sleep(0.3)\n    return x\n"
    record = {"test_list": ["assert f(1) == 1", "assert f(2) == 3", "assert f(3) == 3"]}
    assert grade(slow, record) == pytest.approx(2 / 3)
    killer.join()
    assert jail.process.poll() == -signal.SIGKILL
    sandbox.pool.close()


def test_the_sandboxs_own_fault_is_no_verdict(monkeypatch):
    monkeypatch.setattr(sandbox, "tried", lambda *args, **how: None)
    fault = sandbox.Result("sandbox", b"", 0.0)
    monkeypatch.setattr(sandbox, "ended", lambda *args, **how: fault)
    assert math.isnan(grade(DOUBLE, {"test_list": ["assert 1"]}))
    assert math.isnan(grade(ECHO, {"test_input": ["1"], "test_output": ["2"]}))


@pytest.mark.skipif(MBPP is None, reason="no shared/data/mbpp.jsonl")
def test_reference_solutions_of_mbpp_pass():
    """Every twentieth; benchmarks/jail.py takes all."""
    rows = [json.loads(line) for line in MBPP.read_text().splitlines()][::20]
    assert [row["task_id"] for row in rows if grade(row["code"], row) != 1.0] == []


WHOLE = (  # as dLLM-RL's MBPP and HumanEval have them
    (
        "\n\ndef check(candidate):\n    assert twice(1) == 2\n    assert twice(2) == 4\n\n"
        "check(twice)"
    ),
    (
        "META = {}\n\ndef check(candidate):\n    assert candidate(1) == 2\n"
        "    assert candidate(2) == 4\n\n\ncheck(twice)\n"
    ),
)


@pytest.mark.parametrize("test", WHOLE)
def test_a_whole_check_in_a_list_of_tests(test):
    record = {"test_list": [test], "test_method": "function", "test_time_limit": 1}
    right, half = "def twice(x):\n    return 2 * x\n", "def twice(x):\n    return 2\n"
    assert code.grade_program(right, record) == 1
    assert 0 < code.grade_program(half, record) < 1
    assert code.grade_program("check = print\ntwice = 3\n", record) == 0


@pytest.mark.parametrize(("entry", "runs"), [("twice", 1), ("f", 2)])
def test_a_check_that_its_tests_call_runs_once(entry, runs):
    """By the judge; its own call stays where that is of something else."""
    prompt = f"def {entry}(x):\n"
    record = {"prompt": prompt, "entry_point": entry, "test": WHOLE[1]}
    check = code.tests_of(record)["check"]
    assert check.count("check(twice)") == runs - 1


def test_what_only_looks_like_a_whole_check_is_an_assertion():
    for test in ("check(twice)", "assert check(twice)", "def check(f): pass\nprint(f)"):
        assert code.called_check(test) is None
