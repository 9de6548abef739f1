"""Puts what two evaluations drew beside each other: a PNG to look at.

    python -m examples.scenes.gallery BEFORE/eval.jsonl AFTER/eval.jsonl OUT.png

A column is a caption. Its rows are four drawings of the first evaluation and, below the gap,
four of the second, each in a frame: green where the checker found what was asked for.
"""

import argparse
import base64
import io

from PIL import Image, ImageDraw, ImageOps

from dllm_jax.records import records, right

CAPTIONS, DRAWN = 8, 4
SIDE, FRAME, GAP, TITLE = 64, 3, 6, 40  # pixels
RIGHT, WRONG = "#2f7d3b", "#b3302a"


def drawings(path: str) -> dict[str, list[dict]]:
    """Returns an evaluation's drawings by their caption; raises ValueError for none."""
    found = {}
    for row in records(path):
        if row.get("picture"):  # an answer that was skipped has none
            found.setdefault(row["question"], []).append(row)
    if not found:
        raise ValueError(f"{path}: no answer in it is a picture")
    return found


def framed(row: dict) -> Image.Image:
    """Returns an answer's picture in a frame that says whether it is right."""
    packed = base64.b64decode(row["picture"].partition(",")[2])
    picture = Image.open(io.BytesIO(packed)).convert("RGB")
    picture = picture.resize((SIDE, SIDE), Image.Resampling.NEAREST)
    return ImageOps.expand(picture, FRAME, RIGHT if right(row) else WRONG)


def sheet(sides: list[dict[str, list[dict]]]) -> Image.Image:
    """Returns the picture of evaluations, one below the other."""
    captions, cell = list(sides[0])[:CAPTIONS], SIDE + 2 * FRAME + GAP
    height = TITLE + len(sides) * (DRAWN * cell + 2 * GAP)
    out = Image.new("RGB", (cell * len(captions) + GAP, height), "white")
    pen = ImageDraw.Draw(out)
    for column, caption in enumerate(captions):
        x, words = GAP + column * cell, caption.split()
        lines = [" ".join(words[i : i + 2]) for i in range(0, len(words), 2)]
        pen.multiline_text((x, 2), "\n".join(lines), "black", spacing=1)
        for number, side in enumerate(sides):
            y = TITLE + number * (DRAWN * cell + 2 * GAP)
            for row in side.get(caption, [])[:DRAWN]:
                out.paste(framed(row), (x, y))
                y += cell
    return out


def main():
    """Writes the PNG."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("before", help="an evaluation's eval.jsonl")
    p.add_argument("after", help="another's, of the same captions")
    p.add_argument("out", help="the PNG")
    args = p.parse_args()
    try:
        sides = [drawings(args.before), drawings(args.after)]
    except ValueError as error:
        p.error(str(error))
    sheet(sides).save(args.out)


if __name__ == "__main__":
    main()
