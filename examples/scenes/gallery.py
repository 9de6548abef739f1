"""Puts what two evaluations drew beside each other: a PNG to look at.

    python -m examples.scenes.gallery BEFORE/eval.jsonl AFTER/eval.jsonl OUT.png

A column is a caption. Its rows are four drawings of the first evaluation and, below the gap,
four of the second, each in a frame: green where the checker found what was asked for.
"""

import sys

import matplotlib
import numpy as np

from dllm_jax import data
from dllm_jax.data import records
from dllm_jax.models import families, hf
from dllm_jax.models.vision import codes

MODEL = "runs/scenes/blank"  # whose tokenizers all models of this example have
CAPTIONS, DRAWN = 8, 4
FRAMES = {True: (30, 150, 60), False: (200, 60, 50)}
COLUMNS = range(CAPTIONS)  # of the captions, as they come


def codec() -> codes.Codec:
    """Returns what makes pictures of the example's ids."""
    cfg = families.read_config(hf.find(MODEL))
    tok = data.tokenizer(MODEL)
    made = codes.format_of(MODEL, tok, cfg.vocab, cfg.codebook, vq="", size=0)
    return codes.Codec(made)


def drawings(path: str) -> dict[str, list[dict]]:
    """Returns an evaluation's answers by their caption."""
    found = {}
    for row in records(path):
        found.setdefault(row["question"], []).append(row)
    return found


def column(of: codes.Codec, rows: list[dict]) -> list[np.ndarray]:
    """Returns the framed pictures of a caption's first answers."""
    pictures = of.pictures([row["response_ids"] for row in rows[:DRAWN]])
    framed = []
    for picture, row in zip(pictures, rows, strict=False):
        big = picture.repeat(4, axis=0).repeat(4, axis=1)
        frame = np.full((big.shape[0] + 6, big.shape[1] + 6, 3), 255, np.uint8)
        frame[1:-1, 1:-1] = FRAMES[row["reward"] >= 1]
        frame[3:-3, 3:-3] = big
        framed.append(frame)
    return framed


def main():
    """Writes the PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    before, after, out = sys.argv[1:]
    sides, of = (drawings(before), drawings(after)), codec()
    captions = [list(sides[0])[i] for i in COLUMNS]
    figure, axes = pyplot.subplots(2 * DRAWN, CAPTIONS, figsize=(9, 9.6))
    for j, caption in enumerate(captions):
        shown = [picture for side in sides for picture in column(of, side[caption])]
        for i, picture in enumerate(shown):
            axes[i, j].imshow(picture, interpolation="nearest")
            axes[i, j].axis("off")
        words = caption.split()
        axes[0, j].set_title(
            "\n".join([" ".join(words[:3]), " ".join(words[3:])]), fontsize=7
        )
    for i, name in ((0, "after SFT"), (DRAWN, "after TraceRL")):
        axes[i, 0].text(-12, 35, name, rotation=90, va="top", ha="right", fontsize=9)
    figure.tight_layout(pad=0.4)
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    main()
