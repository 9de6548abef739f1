"""Generated tasks whose answers can be verified: arithmetic, countdown, sudoku.

The same seed gives the same records, and no two of them are the same.
"""

import json
from collections.abc import Callable, Iterator

import numpy as np

from dllm_jax.data import sets

TRIES = 1000  # for a record that is not there yet, before there are no more


def arithmetic(rng: np.random.Generator) -> dict:
    """Returns a calculation of two to four numbers, and its value."""
    count = int(rng.integers(2, 5))
    numbers = rng.integers(1, 100, count).tolist()
    text, terms = str(numbers[0]), numbers[:1]
    for number in numbers[1:]:
        sign = rng.choice(["+", "-", "*"])
        text += f" {sign} {number}"
        if sign == "*":
            terms[-1] *= number
        else:
            terms.append(number if sign == "+" else -number)
    return {
        "question": f"Calculate {text}. Put the result within \\boxed{{}}.",
        "answer": str(sum(terms)),
    }


def countdown(rng: np.random.Generator) -> dict:
    """Returns numbers and a target that they can make, each used once."""
    numbers = rng.integers(1, 100, int(rng.integers(3, 5))).tolist()
    target = numbers[0]
    for number in numbers[1:]:
        nexts = [target + number, target * number]
        nexts += [target - number] if target > number else []
        nexts += [target // number] if target % number == 0 else []
        target = int(rng.choice([x for x in nexts if x < 1000] or nexts[:1]))
    rng.shuffle(numbers)
    return sets.countdown_row(numbers, target)


def sudoku(rng: np.random.Generator) -> dict:
    """Returns a 4 x 4 sudoku with one solution and as few givens as one order finds."""
    base = np.array([[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]])
    for _ in range(2):  # rows, then columns: bands, and the lines within each
        band = rng.permutation(2)
        order = [2 * b + i for b in band for i in rng.permutation(2)]
        base = base[order].T
    full = rng.permutation([1, 2, 3, 4])[base - 1].reshape(-1).tolist()
    cells = full.copy()
    for place in rng.permutation(16).tolist():
        before, cells[place] = cells[place], 0
        if len(solutions(cells, 2)) > 1:
            cells[place] = before
    return sets.sudoku_row("".join(map(str, cells)), "".join(map(str, full)))


def solutions(cells: list[int], most: int) -> list[list[int]]:
    """Returns the solutions of a 4 x 4 sudoku, `most` of them at most."""
    if 0 not in cells:
        return [cells]
    place, found = cells.index(0), []
    row, column = divmod(place, 4)
    seen = {
        x
        for i, x in enumerate(cells)
        if i // 4 == row
        or i % 4 == column
        or (i // 8, i % 4 // 2) == (row // 2, column // 2)
    }
    for digit in {1, 2, 3, 4} - seen:
        found += solutions([*cells[:place], digit, *cells[place + 1 :]], most)
        if len(found) >= most:
            break
    return found[:most]


# name: how a record is drawn, and the grader that judges it.
TASKS: dict[str, tuple[Callable[[np.random.Generator], dict], str]] = {
    "arithmetic": (arithmetic, "math"),
    "countdown": (countdown, "countdown"),
    "sudoku": (sudoku, "sudoku"),
}
# How many different ones a task has, where that is few. Of sudokus: grids, and of each those that
# lose their only solution with any given; the last of them are hardly ever drawn.
MOST = {"sudoku": 96 * 284}


def drawn(name: str, count: int, seed: int) -> Iterator[dict]:
    """Yields `count` different records of a task.

    Raises ValueError where there are not so many.
    """
    draw, rng, seen = TASKS[name][0], np.random.default_rng(seed), set()
    most = MOST.get(name, count)
    if count > most:  # found out by TRIES after minutes
        raise ValueError(f"{name}: there are {most:,} different ones, no {count:,}")
    while len(seen) < count:
        for _ in range(TRIES):
            row = draw(rng)
            text = json.dumps(row)
            if text not in seen:
                break
        else:
            raise ValueError(f"{name}: no {count} different tasks were found")
        seen.add(text)
        yield row
