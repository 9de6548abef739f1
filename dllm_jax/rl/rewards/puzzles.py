r"""Puzzles that are judged by their rules: countdown and 4 x 4 sudoku.

The answer is what stands in the last `\boxed{}` or `<answer>`. Nothing of it is executed.
"""

import ast
import operator
import re
from fractions import Fraction

from dllm_jax.rl.rewards import math

MOST = 200  # characters of an expression
# What LaTeX and others write for a sign, and what says nothing.
SIGNS = {"\\times": "*", "\\cdot": "*", "\\div": "/", "×": "*", "÷": "/", "−": "-"}
SIGNS |= {"·": "*", "⋅": "*", "∗": "*", "–": "-", "\\left": "", "\\right": ""}
SIGNS |= dict.fromkeys(("\\(", "\\)", "\\,", "\\;", "\\ ", "~", "$"), " ")
FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value(node: ast.AST, used: list[int]) -> Fraction:
    """Returns what an expression is worth, and notes its numbers; ValueError for others."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        both = value(node.left, used), value(node.right, used)
        return OPERATIONS[type(node.op)](*both)
    raise ValueError("neither a number nor + - * /")


def countdown(answer: str, record: dict) -> bool:
    """Returns whether an expression uses each number once and equals the target."""
    for sign, plain in SIGNS.items():
        answer = answer.replace(sign, plain)
    text, used = " ".join(answer.split("=")[0].split()), []
    while len(text) <= MOST and FRACTION.search(text):  # one may stand in another
        text = FRACTION.sub(r"((\1)/(\2))", text)
    if len(text) > MOST or not EXPRESSION.fullmatch(text):
        return False
    try:
        worth = value(ast.parse(text, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return worth == record["target"] and sorted(used) == sorted(record["numbers"])


def sudoku(answer: str, record: dict) -> bool:
    """Returns whether 16 digits keep the givens, and no line or box has one twice."""
    digits = re.sub(r"[\s,|&\\]", "", answer)
    given = zip(digits, record["puzzle"], strict=False)
    if not re.fullmatch("[1-4]{16}", digits) or any(
        g not in ("0", d) for d, g in given
    ):
        return False
    cells = range(16)
    groups = [[i for i in cells if i // 4 == k] for k in range(4)]
    groups += [[i for i in cells if i % 4 == k] for k in range(4)]
    groups += [[i for i in cells if i // 8 * 2 + i % 4 // 2 == k] for k in range(4)]
    return all(len({digits[i] for i in group}) == 4 for group in groups)


# name: (how an answer is judged, what a record needs, and of which kind).
PUZZLES = {
    "countdown": (countdown, {"numbers": list, "target": int}),
    "sudoku": (sudoku, {"puzzle": str}),
}
WANTED = {list: "a list", int: "a whole number", str: "a text"}


def check(name: str, record: dict) -> None:
    """Raises ValueError for a record that is no puzzle of the name."""
    for field, kind in PUZZLES[name][1].items():
        if type(record.get(field)) is not kind:
            raise ValueError(f"field {field!r}: a {name} needs {WANTED[kind]}")
    if name == "sudoku" and not re.fullmatch("[0-4]{16}", record["puzzle"]):
        raise ValueError("field 'puzzle': 16 digits from 0 to 4")
    if name == "countdown" and not all(type(x) is int for x in record["numbers"]):
        raise ValueError("field 'numbers': whole numbers")


def grade(name: str, texts: list[str], problems) -> list[float]:
    """Returns 1.0 for each text whose answer solves its problem's puzzle, else 0.0."""
    judge = PUZZLES[name][0]
    pairs = zip(map(math.extract, texts), problems, strict=True)
    return [float(x is not None and judge(x, p.record)) for x, p in pairs]
