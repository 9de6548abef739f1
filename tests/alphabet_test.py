"""One alphabet: the suffix of every name in the package against the package's docstring."""

import ast
import collections
import pathlib
import re
import subprocess
import sys

import pytest

import dllm_jax

ROOT = pathlib.Path(dllm_jax.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
SUFFIX = re.compile(r"[^_].*_(?P<letters>[A-Za-z0-9]*[A-Z][A-Za-z0-9]*)")
ROW = re.compile(r"^    ([A-Za-z])  (.+)$", re.MULTILINE)
OWN = re.compile(r"^Letters:(.*?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"^    ([\w/]+\.py)  +(.+)$", re.MULTILINE)

TABLE = dict(ROW.findall(dllm_jax.__doc__))


def names(tree: ast.AST) -> dict[str, int]:
    """Returns the identifiers of a syntax tree that can name arrays, and a line of each.

    Classes are in CapWords and constants in UPPER_CASE, which end in no axes.
    """
    lines = {}
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str) and name not in classes and not name.isupper():
                lines.setdefault(name, getattr(node, "lineno", 0))
    return lines


def suffix(name: str) -> str:
    """Returns the letters that a name ends in, or nothing."""
    match = SUFFIX.fullmatch(name)
    return match["letters"] if match else ""


def own_letters(docstring: str | None) -> dict[str, str]:
    """Returns what a module's docstring says of letters of its own."""
    match = OWN.search(docstring or "")
    if not match:
        return {}
    items = re.split(r"[,;]\s+(?=[a-z]\s)", match[1].strip(" .\n"))
    rows = [item.split(maxsplit=1) for item in items]
    for row in rows:
        assert len(row) == 2 and re.fullmatch("[a-z]", row[0]), (
            f"'Letters:' lists 'letter meaning, letter meaning', not {' '.join(row)!r}"
        )
    assert len(rows) == len({letter for letter, _ in rows}), "a letter has two meanings"
    return {letter: " ".join(meaning.split()) for letter, meaning in rows}


def strangers(tree: ast.Module) -> list[str]:
    """Returns what a module's suffixes say that neither table nor docstring explains."""
    own = own_letters(ast.get_docstring(tree))
    out = [
        f"'Letters:' explains {letter!r}, which the package's table has as"
        f" {TABLE[letter]!r}"
        for letter in sorted(TABLE.keys() & own.keys())
    ]
    known, used = TABLE.keys() | own.keys(), set()
    for name, line in names(tree).items():
        letters = {letter for letter in suffix(name) if letter.isalpha()}
        out += [f"line {line}: {x!r} of {name}" for x in sorted(letters - known)]
        # All letters may be small, as in `row_dc`: then it may be a word, too.
        last = {letter for letter in name.split("_")[-1] if letter.isalpha()}
        used |= last if last <= known else set()
    return out + [
        f"'Letters:' explains {x!r}: unused" for x in sorted(own.keys() - used)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_letter_of_a_suffix_is_in_the_alphabet(path):
    assert strangers(ast.parse(path.read_text())) == []


def test_a_letter_means_one_thing():
    count = collections.Counter(letter for letter, _ in ROW.findall(dllm_jax.__doc__))
    assert {letter for letter, rows in count.items() if rows > 1} == set()
    assert {letter for letter in TABLE if letter.islower()} == set("nmh")
    assert len(set(TABLE.values())) == len(TABLE)


def test_the_check_finds_what_is_wrong():
    bad = ast.parse(
        '"""A module.\n\nLetters: d shards, w windows of\nmany words, v values, k unused.\n"""\n'
        "def f(x_dwB, *, y_qT):\n"
        "    self.z_11h = MAX_CHARS + g(RLIMIT_AS=_Pool, v_BΩ=1, one_1T=t_B)\n"
        "class Some_Thing:\n"
        "    tokens_Bj: int\n"
        "    two_dv: int\n"
    )
    assert strangers(bad) == [
        "line 6: 'q' of y_qT",
        "line 9: 'j' of tokens_Bj",
        "'Letters:' explains 'k': unused",
    ]
    (clash,) = strangers(
        ast.parse('"""A module.\n\nLetters: n names.\n"""\nx_nB = 1\n')
    )
    assert "items on the host" in clash
    assert own_letters("A.\n\nLetters: d the shards, or parts, w windows.") == {
        "d": "the shards, or parts",
        "w": "windows",
    }
    for words in ("shards", "B rows", "d shards, d devices"):
        with pytest.raises(AssertionError):
            own_letters(f"A module.\n\nLetters: {words}.\n")


def test_the_reading_order_names_files_that_are_there():
    places = [place for place, _ in PLACE.findall(dllm_jax.__doc__)]
    assert len(places) > 20
    assert len(places) == len(set(places))
    assert [place for place in places if not (ROOT / place).is_file()] == []


def test_importing_the_package_prints_nothing_and_loads_nothing_heavy():
    script = "import sys, dllm_jax; assert not {'jax', 'numpy'} & {*sys.modules}"
    run = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT.parent,
    )
    assert (run.stdout, run.stderr) == ("", "")
