"""Draws some pictures with their questions, and what several models answered.

    head -12 runs/pictures/heldout.jsonl > runs/pictures/some.jsonl
    .venv/bin/python -m dllm_jax.generate --model=runs/pictures/sft/export \\
        --prompts=runs/pictures/some.jsonl --out=runs/pictures/before.jsonl \\
        --max-new-tokens=8 --dtype=float32 --temperature=0
    .venv/bin/python examples/pictures/show.py runs/pictures/some.jsonl \\
        before=runs/pictures/before.jsonl --out=sheet.png

An answer is green where it is right.
"""

import argparse
import pathlib
import sys

import matplotlib as mpl
from PIL import Image

from dllm_jax.records import records
from dllm_jax.rl.rewards import math

ACROSS = 4  # pictures side by side
RIGHT, WRONG = "#2f7d3b", "#b3302a"


def read(file: pathlib.Path) -> list[dict]:
    """Returns a file's lines; ends the program where it cannot be read."""
    try:
        return records(str(file), "file")
    except ValueError as error:
        sys.exit(f"error: {error}")


def draw(rows: list[dict], named: dict, folder: pathlib.Path, out: str) -> None:
    """Writes the sheet.

    rows: the questions; named: answers to them in the same order, by what to call their
    model; folder: where the pictures' paths begin.
    """
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    down = -(-len(rows) // ACROSS)
    figure, axes = plt.subplots(down, ACROSS, figsize=(3.2 * ACROSS, 2.2 * down))
    for axis in axes.flat:
        axis.axis("off")
    for i, (axis, row) in enumerate(zip(axes.flat, rows, strict=False)):
        with Image.open(folder / row["image"]) as image:
            axis.imshow(image.convert("RGB"))
        # Dollars are those of a text, not the borders of a formula.
        axis.set_title(row["question"], fontsize=7, parse_math=False)
        for line, (name, answers) in enumerate(named.items()):
            text = answers[i]["text"]
            right = math.grade([text], [row["answer"]])[0] == 1
            said = f"{name}: {' '.join(text.split())}"
            axis.text(
                0.5,
                -0.1 - 0.13 * line,
                said,
                transform=axis.transAxes,
                ha="center",
                fontsize=7,
                parse_math=False,
                color=RIGHT if right else WRONG,
            )
    figure.tight_layout(h_pad=2.0)
    figure.savefig(out, dpi=100)


def main():
    """Reads the command line and writes the sheet."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("questions", type=pathlib.Path, help="a file of problems")
    p.add_argument("answers", nargs="+", help="NAME=FILE that generate wrote")
    p.add_argument("--out", default="sheet.png")
    args = p.parse_args()
    rows, named = read(args.questions), {}
    for given in args.answers:
        name, equals, file = given.partition("=")
        if not equals:
            p.error(f"{given}: NAME=FILE")
        named[name] = read(pathlib.Path(file))
        if not len(named[name]) == len(rows) > 0:
            p.error(f"{file}: {len(named[name])} answers to {len(rows)} questions")
    draw(rows, named, args.questions.parent, args.out)


if __name__ == "__main__":
    main()
