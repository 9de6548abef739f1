"""Answers by hand for the pages, and what is hostile in them."""

import json
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ROOT / "examples" / "arithmetic" / "model"
FULL = ROOT / "examples" / "arithmetic" / "full"  # with full attention


def answer(ids=(5, 6, 7), **fields) -> dict:
    """Returns a record as `generate --out` writes it, written from right to left."""
    count = len(ids)
    return {
        "prompt_ids": [1, 2, 3],
        "response_ids": [*ids],
        "step_map": [*range(count, 0, -1)],
        "logprobs": [-0.25] * count,
        "confidence": [0.5] * count,
        "forwards": max(count, 1),
        "finished": "stop",
    } | fields


def write(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    """Writes records to a file; returns it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
