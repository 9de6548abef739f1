"""More tests for records of code: near the published ones, and right by the solution."""

import ast
import json
import random

import pytest

from dllm_jax.data import __main__ as command
from dllm_jax.exits import CannotGoOn
from dllm_jax.rl.rewards import code, nearby, sandbox, strengthen
from tests import served


@pytest.fixture(scope="module", autouse=True)
def close_jails():
    yield
    sandbox.close()


def record(source: str, *tests: str, setup: str = "") -> dict:
    return {"code": source, "test_list": [*tests], "test_setup_code": setup}


def added(row: dict, **how) -> list[str]:
    """Returns the assertions that a record of MBPP's format gains."""
    stronger, why = strengthen.strengthened(row, **how)
    assert (why == "") == ("tests" in stronger)
    assert {key: stronger[key] for key in row} == row
    return stronger["tests"]["asserts"][len(row["test_list"]) :] if not why else []


def made(*inputs: tuple, tries: int = 400, seed: int = 0) -> list[tuple]:
    """Returns new inputs of those of tests."""
    tested = [(0, args) for args in inputs]
    return [args for _, args in nearby.made(tested, tries, random.Random(seed))]


# ---- What is near --------------------------------------------------------------------

KEPT = {  # inputs of tests, and what new ones have in common with them
    "signs": ([(3,), (10,), (7,)], lambda x: type(x) is int and x > 0),
    "a sign that both have": ([(-3,), (10,), (7,)], lambda x: type(x) is int),
    "kinds": ([(1.5,), (2.25,)], lambda x: type(x) is float and x > 0),
    "emptiness": ([([1, 2],), ([3],)], lambda x: len(x) > 0),
    "order": ([([1, 2, 9],), ([3, 3, 5, 7],)], lambda x: x == sorted(x)),
    "length": ([([1, 2, 9],), ([5],)], lambda x: len(x) <= 3 + nearby.FURTHER),
    "items": ([([5, 2],), ([3, 4, 1],)], lambda x: len({*x}) == len(x)),
    "letters": ([("abba",), ("cab",)], lambda x: {*x} <= {*"abc"}),
    "form": ([("2020-01-05",), ("199-1-2",)], lambda x: nearby.shape(x) == "0-0-0"),
    "pattern": ([("2020-01-05",), ("1999-11-21",)], lambda x: x[4::3] == "--"),
    "nothing below two": ([(3,), (10,), (7,)], lambda x: x >= 2),
    "parts": ([("1.20",), ("13.7",)], lambda x: ".." not in x and x[0] != "."),
    "mixed items": (
        [([1, (2, 3)],), ([4, (5,), 6],)],
        lambda x: len({*map(type, x)}) == 2,
    ),
    "brackets": ([("(()(()))()",), ("()()",)], nearby.balanced),
    "words": ([("a bc",), ("d e f",)], lambda x: x == x.strip()),
    "keys": ([({"a": 1},), ({"b": 5},)], lambda x: all(v > 0 for v in x.values())),
    "rows": ([([(1, 2), (3, 4)],)], lambda x: all(len(row) == 2 for row in x)),
    "a number and a list": ([([5, 1], 2), ([7], 1)], lambda x, n: len(x) == n),
    "two lists": (
        [([1, 2], [3, 4]), ([5], [6])],
        lambda x, y: len(x) == len(y),
    ),
    "a range": ([(1, 5), (2, 9)], lambda a, b: a < b),
    "a member": ([([4, 5, 6], 5), ([1, 9], 9)], lambda x, item: item in x),
}


@pytest.mark.parametrize("name", KEPT)
def test_new_inputs_keep_what_those_of_the_tests_have_in_common(name):
    inputs, common = KEPT[name]
    new = made(*inputs)
    assert len(new) > 8
    assert len({repr(args) for args in new} | {*map(repr, inputs)}) == len(new) + len(
        inputs
    )
    assert all(common(*args) for args in new)


def test_what_inputs_do_not_have_in_common_is_changed():
    assert any(x < 0 for (x,) in made((-3,), (10,), (7,)))
    assert any(x != sorted(x) for (x,) in made(([1, 2, 9],), ([7, 3],)))
    assert {len(x) for (x,) in made(([1, 2, 9],), ([7, 3],))} >= {2, 3, 4}
    assert any(not x for x, _ in made(("ab", 5), ("", 7), ("b", 6)))
    assert {x < y for x, y in made((1, 5), (9, 2))} == {False, True}
    assert any(x % 1 for (x,) in made((1.0,), (2.5,)))


def test_new_inputs_are_drawn_by_the_seed():
    inputs = ([4, 1, 3], 2), ([5, 5], 1)
    assert made(*inputs, seed=1) == made(*inputs, seed=1) != made(*inputs, seed=2)


def test_nothing_is_made_of_functions_of_nothing():
    assert made(()) == [] == made()


def test_changes_that_cannot_be_are_left_out():
    keys = {(1, 2): (3, [4]), (5, 6): (7, [])}  # a key is no tuple with a list
    assert made(({(1, 2): (3, [4])},), (keys,))
    assert not made((10**400,), (10**400 + 5,))  # beyond a float


def test_inputs_stay_as_they_were():
    inputs = [([1, [2, 3]], {"a": [1]})]
    before = repr(inputs)
    assert made(*inputs) and repr(inputs) == before


# ---- How tests compare ---------------------------------------------------------------

FORMS = {  # a test: (what its value is, the new assertion)
    "f(1) == 2": ("CALL_", "CALL_ == VALUE_"),
    "2 == f(1)": ("CALL_", "CALL_ == VALUE_"),
    "f(1) is None": ("CALL_", "CALL_ == VALUE_"),
    "set(f([1, 2])) == {1}": ("set(CALL_)", "set(CALL_) == VALUE_"),
    "round(f(x)[0], 2) == 1.5": ("round(CALL_[0], 2)", "round(CALL_[0], 2) == VALUE_"),
    "f(1)": ("bool(CALL_)", "bool(CALL_) == VALUE_"),
    "not f(1)": ("bool(CALL_)", "bool(CALL_) == VALUE_"),
    "abs(f(1) - 2.5) < 1e-3": ("CALL_", "abs(CALL_ - VALUE_) < 0.001"),
    "math.fabs(2.5 - f(1)) <= 1": ("CALL_", "math.fabs(VALUE_ - CALL_) <= 1"),
    "math.isclose(f(1), 2, rel_tol=0.1)": (
        "CALL_",
        "math.isclose(CALL_, VALUE_, rel_tol=0.1)",
    ),
    "f(1) != 2": None,
    "f(1) < 2": None,
    "f(1) == f(2)": None,
    "f(x=1) == 2": None,
    "g(1) == 2": None,
    "abs(poly(f(1))) < 1e-4": None,
    "abs(f(1) + 2.5) < 3": None,
    "abs(2 * f(1) - 5) < 1e-3": None,
    "f(1) == 2 and True": None,
}


@pytest.mark.parametrize("test", FORMS)
def test_a_new_test_compares_as_the_one_it_comes_from(test):
    assert strengthen.form(ast.parse(test, mode="eval").body, {"f"}) == FORMS[test]


@pytest.mark.parametrize(
    ("value", "near"),
    [("{'n': 1, 'x': 0.5}", True), ("[1, (2, {0.5})]", True), ("{0.5: 1}", False)],
)
def test_one_number_with_a_point_is_compared_as_such(value, near):
    line = strengthen.assertion("CALL_ == VALUE_", "f(1)", value)
    assert line.startswith("assert near_(f(1), ") == near


@pytest.mark.parametrize(
    ("source", "test", "like"),
    [
        ("def f(x): return {*x}", "set(f([3, 1])) == {1, 3}", "assert set(f(["),
        ("def f(x): return x / 3", "abs(f(2.0) - 0.667) < 0.01", "assert abs(f("),
        ("def f(x): return x / 3", "f(2.0) == 2 / 3", "assert near_(f("),
        ("def f(x): return [x / 3]", "f(2.0) == [2 / 3]", "assert near_(f("),
        ("def f(x): return x > 5", "not f(2)", "assert bool(f("),
        (
            "def f(x): return (y for y in x)",
            "list(f([5, 2])) == [5, 2]",
            "assert list(f([",
        ),
    ],
)
def test_new_tests_are_asked_in_the_form_of_their_own(source, test, like):
    lines = added(record(source, f"assert {test}"), count=3)
    assert len(lines) == 3 and all(line.startswith(like) for line in lines)


@pytest.mark.parametrize(
    "value", ["{'a': x / 10}", "{x / 10}", "(x / 10, {1: [x / 10]})"]
)
def test_points_in_dicts_and_sets_are_compared_to_a_millionth(value):
    row = record(
        f"def f(x): return {value}", f"assert f(3) == {value.replace('x', '3')}"
    )
    stronger, _ = strengthen.strengthened(row, count=5)
    assert len(stronger["tests"]["asserts"]) == 6
    for more, passed in (("1e-9", 1), ("0.001", 1 / 6)):
        moved = value.replace("x / 10", f"((x / 10) + {more} * (x != 3))")
        assert code.grade_program(f"def f(x): return {moved}", stronger) == passed


def test_a_list_is_no_tuple_with_points_in_it_either():
    row = record("def f(x): return (x / 10, 1)", "assert f(3) == (0.3, 1)")
    stronger, _ = strengthen.strengthened(row, count=5)
    listed = "def f(x): return [x / 10, 1]"
    assert code.grade_program(listed, row) == code.grade_program(listed, stronger) == 0


def test_values_with_points_are_compared_to_a_millionth():
    tests = "assert f(3) == [0.3, {}]", "assert f(8) == [0.8, {}]"
    row = record("def f(x): return [x / 10, {}]", *tests)
    stronger, _ = strengthen.strengthened(row, count=5)
    near = "def f(x): return [x / 10 if x in (3, 8) else x / 10 + 1e-9, {}]"
    far = "def f(x): return [x / 10 if x in (3, 8) else x / 10 + 0.001, {}]"
    assert code.grade_program(far, row) == 1
    # A name of the program's own does not come between.
    assert code.grade_program(f"pairs = got = wanted = 3\n{near}", stronger) == 1
    assert code.grade_program(far, stronger) == 2 / 7


# ---- What is added -------------------------------------------------------------------


def test_a_wrong_program_that_the_published_tests_let_pass_is_found_out():
    row = record("def f(x):\n    return x * 2", "assert f(2) == 4")
    wrong = "def f(x):\n    return x + 2"
    stronger, why = strengthen.strengthened(row)
    assert why == ""
    assert code.grade_program(wrong, row) == 1
    assert code.grade_program(wrong, stronger) < 0.3
    assert code.grade_program(row["code"], stronger) == 1


def test_branches_that_no_published_test_takes_are_taken():
    source = "def f(n):\n    if n == 7:\n        return 'seven'\n    return n % 2"
    row = record(source, "assert f(5) == 1", "assert f(8) == 0")
    assert "assert f(7) == 'seven'" in added(row, count=3)


def test_the_same_seed_adds_the_same_and_published_tests_come_first():
    row = record(
        "def f(x): return sum(x)", "assert f([2, 1]) == 3", "assert f([5]) == 5"
    )
    first, again = (strengthen.strengthened(row, seed=3)[0] for _ in range(2))
    other, _ = strengthen.strengthened(row, seed=4)
    assert first == again != other
    assert first["tests"]["asserts"][0] == row["test_list"][0]
    assert len(first["tests"]["asserts"]) == 2 + strengthen.TESTS
    more, why = strengthen.strengthened(first, count=2, seed=4)
    assert why == "" and len(more["tests"]["asserts"]) == 4 + strengthen.TESTS


def test_a_check_keeps_its_own_tests():
    row = {
        "prompt": "def f(x):\n",
        "canonical_solution": "    return x + 0.5\n",
        "entry_point": "f",
        "test": "def check(candidate):\n    for i in range(3):\n"
        "        assert candidate(i) == i + 0.5, 'no'\n    assert True\n",
    }
    stronger, why = strengthen.strengthened(row, count=4)
    assert why == "" and stronger["tests"]["check"].startswith(row["test"])
    twice, _ = strengthen.strengthened(stronger, count=4, seed=1)
    for tests, count in ((stronger, 7), (twice, 11)):
        assert code.grade_program("    return x + 0.5", tests) == 1
        wrong = "    return x + 0.5 if x < 3 else x"
        passed = round(count * code.grade_program(wrong, tests))
        assert 3 <= passed < count
        published = "    return x + 0.5 if x > 2 else 0"
        assert code.grade_program(published, tests) < 1


def test_cases_are_what_json_can_say():
    tests = {"kind": "calls", "entry": "f", "cases": [[[[1, 2]], 3], [[[5]], 5]]}
    solution = "class Solution:\n    def f(self, x: List[int]): return sum(x)"
    row = {"tests": tests, "solution": solution}
    stronger, why = strengthen.strengthened(json.loads(json.dumps(row)), count=6)
    cases = stronger["tests"]["cases"]
    assert why == "" and cases[:2] == tests["cases"] and len(cases) == 8
    assert all(sum(x) == value for (x,), value in cases)
    assert json.loads(json.dumps(stronger)) == stronger
    pointed = row | {"solution": solution.replace("sum(x)", "float(sum(x))")}
    assert strengthen.strengthened(pointed)[0] == pointed
    tolerant = pointed | {"tests": tests | {"float": True}}
    assert len(strengthen.strengthened(tolerant)[0]["tests"]["cases"]) > 2


def test_a_function_finds_what_it_has_when_it_is_graded():
    body = "heappush(h := [], pow(x, 1, 9)); return h[0] + math.floor(inf < 0)"
    tests = {"kind": "calls", "entry": "f", "cases": [[[3], 3], [[7], 7]]}
    row = {"tests": tests, "solution": f"def f(x: List[int]): {body}"}
    assert code.grade_program(row["solution"], row) == 1
    assert len(strengthen.strengthened(row, count=4)[0]["tests"]["cases"]) == 6
    tests = {"kind": "calls", "entry": "f", "cases": [[[3], [3, 3]], [[7], [7, 7]]]}
    pairs = {"tests": tests, "solution": "def f(x): return x, x"}  # no lists
    stronger, why = strengthen.strengthened(pairs, count=4)
    cases = stronger["tests"]["cases"]
    assert why == "" and len(cases) == 6
    assert all(value == [x, x] for (x,), value in cases)


@pytest.mark.parametrize(
    "source",
    [
        "f = lambda x: x + 1\nLIMIT = 9",
        "def add(x): return x + 1\nf = add",
        "import sys\ndef f(x): return x + 1\nhere = vars(sys.modules[__name__])",
        "from __future__ import annotations\nfrom dataclasses import *\n@dataclass\n\
class P:\n    x: int\ndef f(x): return P(x).x + 1",
    ],
)
def test_however_a_function_comes_to_its_name(source):
    row = record(source, "assert f(3) == 4", "assert f(7) == 8")
    assert len(added(row, count=4)) == 4


@pytest.mark.parametrize(
    "setup", ["raise ValueError", "y = {}['{x}']", "half = math.pi"]
)
def test_a_setup_that_raises_keeps_nobody_from_new_tests(setup):
    """When it is graded, only tests that need it fail; what they import is there."""
    tests = "assert f(3) == 4", "assert f(7) == 8"
    row = record("def f(x): return x + 1", *tests, setup=setup)
    assert code.grade_program(row["code"], row) == 1
    assert len(added(row, count=4)) == 4


def test_a_solution_that_is_no_text_leaves_it_to_the_next():
    assert strengthen.solution({"code": ["f"], "solution": "def f(): pass"}) == (
        "def f(): pass"
    )
    whole = {"prompt": "def f():\n", "canonical_solution": "    pass", "code": "other"}
    assert strengthen.solution(whole) == "def f():\n    pass"


def test_a_function_may_be_asynchronous():
    """Who asks it plainly has no answer, which is not that there is no function."""
    row = record("async def f(x): return x", "assert f(3) == 3")
    assert strengthen.entry(code.tests_of(row), row["code"]) == "f"
    assert strengthen.strengthened(row) == (row, "their solution fails their own tests")


# ---- Solutions that are not to be believed -------------------------------------------

NOTHING = {  # a solution that passes its test, `f([4, 1]) == [4, 1]`, and adds none
    "raises otherwise": "def f(x):\n    assert x == [4, 1]\n    return x",
    "never ends otherwise": "def f(x):\n    while x != [4, 1]: x = [*x]\n    return x",
    "random": "import random\ndef f(x):\n"
    "    return x if x == [4, 1] else random.random()",
    "random from its start": "import random\nn = random.random()\ndef f(x):\n"
    "    return x if x == [4, 1] else n",
    "counts": "n = 0\ndef f(x):\n    global n\n    n += 1\n"
    "    return x if x == [4, 1] else n",
    "no number": "def f(x):\n    return x if x == [4, 1] else float('nan')",
    "no end": "def f(x):\n    return x if x == [4, 1] else 1e999",
    "an object": "def f(x):\n    return x if x == [4, 1] else object()",
    "itself": "def f(x):\n    if x != [4, 1]: x.append(x)\n    return x",
    "huge": "def f(x):\n    return x if x == [4, 1] else 'a' * 10**6",
    "the order of a set": "def f(x):\n"
    "    return x if x == [4, 1] else list(set('abc') | set('def'))",
    "the order of a set of its own": "def f(x):\n"
    "    return x if x == [4, 1] else [*{n for n in x}, *{-n for n in x}]",
    "the order of a set that is written": "def f(x):\n"
    "    return x if x == [4, 1] else [*{5, 6, 7}]",
    "the order of a set that stays": "def f(x):\n"
    "    return x if x == [4, 1] else [*(frozenset(x) | frozenset([5, 6]))]",
    "one of a set": "def f(x):\n    return x if x == [4, 1] else {*range(9)}.pop()",
    "ends its process": "import os\ndef f(x):\n"
    "    return x if x == [4, 1] else os._exit(0)",
    "leaves": "import sys\ndef f(x):\n    return x if x == [4, 1] else sys.exit()",
    "forges": "def f(x):\n    if x != [4, 1]:\n        import os\n"
    '        os.write(1, b\'[[0, "[1]", "2"]]\')\n        os._exit(0)\n    return x',
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_is_refused_or_not_repeated_is_not_added(name):
    row = record(NOTHING[name], "assert f([4, 1]) == [4, 1]")
    stronger, why = strengthen.strengthened(row, count=5)
    assert stronger == row and why


def test_what_depends_on_the_order_of_a_given_set_is_not_added():
    tests = "assert f({1, 2}) == [1, 2]", "assert f({3, 5}) == [3, 5]"
    lines = added(record("def f(x): return [*x]", *tests))
    given = [ast.parse(line).body[0].test.left.args[0] for line in lines]
    assert lines and all(len(ast.literal_eval(x)) == 1 for x in given)
    # A set is a set, in whatever order it is read.
    kinds = "def f(x): return isinstance(x, set) and type(x) == set and sorted(x)"
    assert len(added(record(kinds, *tests), count=9)) == 9


def test_one_who_ends_its_process_is_told_from_one_who_writes():
    def why(source: str) -> str:
        row = record(f"import os\n{source}", "assert f(3) == 3", "assert f(9) == 9")
        return strengthen.strengthened(row)[1]

    leaves = "def f(x): return x if x in (3, 9) else os._exit(0)"
    writes = "def f(x): return x if x in (3, 9) else os.write(1, b'[')"
    assert why(leaves) == "their solution ends with exit on new inputs"
    assert why(writes) == "their solution writes into the answer"


@pytest.mark.parametrize(
    "source", ["def f(x): raise KeyError", "def f(x):\n    while True: pass", "f = 3"]
)
def test_a_solution_that_fails_its_own_tests_adds_none(source):
    row = record(f"def g(): pass\n{source}", "assert f(1) == 1")
    row["test_time_limit"] = 0.2
    assert strengthen.strengthened(row) == (row, "their solution fails their own tests")


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("def f(x):\n    print('[]')\n    return x[::-1]", lambda x: x[::-1]),
        ("def f(x):\n    x.sort()\n    x.append(0)\n    return x[0]", min),
        ("def f(x): return (len(x), x[0])", lambda x: (len(x), x[0])),
        ("def f(x): return set(x)", lambda x: {*x}),
        (
            "import collections\ndef f(x): return collections.Counter(x)",
            lambda x: {item: x.count(item) for item in x},
        ),
        ("def f(x): return sorted(set(x))", lambda x: sorted({*x})),
    ],
)
def test_what_a_solution_prints_or_changes_is_not_what_it_says(source, value):
    row = record(source, f"assert f([4, 1]) == {value([4, 1])!r}")
    lines = added(row, count=6)
    assert len(lines) == 6
    for line in lines:
        compare = ast.parse(line).body[0].test
        (given,) = compare.left.args
        assert ast.literal_eval(compare.comparators[0]) == value(
            ast.literal_eval(given)
        )


# ---- The command ---------------------------------------------------------------------

DOUBLE = record("def f(x): return 2 * x", "assert f(2) == 4", "assert f(5) == 10")
FAILS = record("def f(x): return 3 * x", "assert f(2) == 4")


def test_the_command(tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in (DOUBLE, FAILS)))
    arguments = ["strengthen", str(given), str(out), "--tests=4", "--seed=2"]
    done = served.run("dllm_jax.data", arguments)
    assert done.returncode == 0, done.stderr
    assert f"1 of 2 records have more tests: {out}" in done.stdout
    assert "as they were, since their solution fails their own tests: records 2" in (
        done.stderr
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == [strengthen.strengthened(DOUBLE, 4, 2)[0], FAILS]
    assert "to train on them: " in done.stdout
    assert {*tmp_path.iterdir()} == {given, out}


def test_nobody_is_told_to_train_on_what_gained_nothing(tmp_path, capsys):
    given = tmp_path / "in.jsonl"
    given.write_text(json.dumps(FAILS))
    command.strengthened(str(given), str(tmp_path / "out.jsonl"), 2, 0)
    told = capsys.readouterr().out
    assert "0 of 1 records have more tests" in told and "to train on" not in told


def test_what_cannot_be_written_is_told_before_programs_run(tmp_path, monkeypatch):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(json.dumps(DOUBLE))
    out.write_text("mine")

    def ran(*args):
        raise NotImplementedError

    monkeypatch.setattr(strengthen, "strengthened", ran)
    with pytest.raises(CannotGoOn, match="in.jsonl: cannot be written to: "):
        command.strengthened(str(given), str(given / "out.jsonl"), 2, 0)
    with pytest.raises(NotImplementedError):
        command.strengthened(str(given), str(out), 2, 0)
    assert out.read_text() == "mine" and {*tmp_path.iterdir()} == {given, out}


STDIO = {"solution": "print(1)", "test_input": ["1\n"], "test_output": ["1\n"]}
BAD = {
    "a task of standard input": STDIO,
    "no solution: it needs one of the fields canonical_solution, code, solution": {
        "test_list": ["assert f(1) == 1"],
        "code": None,
    },
    "must be a text in the field code, and is a int": record(5, "assert f(1) == 1"),
    "must be a text in the field canonical_solution, and is a list": {
        "test_list": ["assert f(1) == 1"],
        "canonical_solution": ["def f(x): return x"],
    },
    "no tests: it needs one of the fields": {"code": "def f(x): return x"},
    "its solution is no Python": record("def f(x", "assert f(1) == 1"),
    "its solution defines no function": record("len('a')", "assert f(1) == 1"),
    "is no Python": record("def f(x): return x", "assert f(1) =="),
}


@pytest.mark.parametrize("says", BAD)
def test_records_to_which_none_can_be_added_are_refused(says):
    with pytest.raises(ValueError, match=says):
        strengthen.check(BAD[says])


def test_a_refusal_names_the_record_and_leaves_nothing(tmp_path):
    given = tmp_path / "in.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in (DOUBLE, STDIO)))
    refusals = {
        (given, tmp_path / "out.jsonl"): "record 2: a task of standard input",
        (given, tmp_path / "out.json"): "name a file *.jsonl",
        (given, given): "that is the file it reads",
        (tmp_path / "none.jsonl", tmp_path / "out.jsonl"): "no such file",
    }
    for files, says in refusals.items():
        done = served.run("dllm_jax.data", ["strengthen", *map(str, files)])
        assert done.returncode == 2 and says in done.stderr, done.stderr
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert [*tmp_path.iterdir()] == [given]
