"""A table of answers for the terminal."""

import re
import shutil
import unicodedata

from dllm_jax import records

HIDDEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]+"
)
HEAD = ("", "reward", "tokens", "per forward", "prompt", "answer")


def of_rows(rows: list[dict], width: int | None = None) -> str:
    """Returns a table of records, a line each, no wider than the terminal (of 60 or more).

    width: in columns; None: the terminal's.
    """
    width = width or shutil.get_terminal_size((100, 24)).columns
    cells = [HEAD, *(cells_of(row) for row in rows)]
    numbers = [max(len(row[k]) for row in cells) for k in range(4)]
    left = max(width - sum(numbers) - 2 * 5, 20)
    prompt = min(max(columns(row[4]) for row in cells), left // 2)
    lines = []
    for row in cells:
        told = [cell.rjust(size) for cell, size in zip(row[:4], numbers, strict=True)]
        words = [cut(row[4], prompt), cut(row[5], left - prompt).rstrip()]
        lines.append("  ".join([*told, *words]).rstrip())
    return "\n".join(lines)


def cells_of(row: dict) -> tuple[str, ...]:
    """Returns what a record has in each column of HEAD."""
    count, forwards = len(row["response_ids"]), row.get("forwards")
    reward = records.reward(row)
    sign = {None: " ", True: "✓", False: "✗"}[records.right(row)]
    prompt = row.get("question") or str(row.get("prompt_ids") or "")
    text = "[picture]" if row.get("picture") else row.get("text")
    return (
        sign,
        "" if reward is None else f"{reward:.2f}",
        str(count),
        f"{count / forwards:.2f}" if forwards else "",
        " ".join(HIDDEN.sub(" ", prompt).split()),
        " ".join(
            HIDDEN.sub(" ", str(row["response_ids"]) if text is None else text).split()
        ),
    )


def columns(text: str) -> int:
    """Returns how many columns of a terminal a text takes."""
    return sum(map(columns_of, text[:1000]))


def columns_of(char: str) -> int:
    """Returns how many columns a character takes; a mark on the one before it takes none."""
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 1 + (unicodedata.east_asian_width(char) in "WF")


def cut(text: str, width: int) -> str:
    """Returns a text that takes exactly so many columns, its end cut off if need be."""
    if columns(text) > width:
        taken = ""
        for char in text:
            if columns(taken + char) >= width:
                break
            taken += char
        text = taken + "…"
    return text + " " * (width - columns(text))
