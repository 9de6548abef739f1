"""Words in pictures: a drawing is worth how much of its gold text can be read in it.

rapidocr reads on the host's CPU, with models that lie in its package: nothing is downloaded.
It is an extra, imported when a run begins that asks for it:

    make install EXTRAS=ocr
"""

import functools

import numpy as np
from PIL import Image

SIDE = 256  # pixels a side at least: smaller pictures are read enlarged


@functools.cache
def reader():
    """Returns a function from pictures [h, w, 3], uint8 BGR, to what is read in them.

    Raises ValueError where the extra is missing.
    """
    try:
        import onnxruntime  # noqa: F401  (rapidocr asks for it at its first picture)
        import rapidocr
    except ImportError as error:
        raise ValueError(
            f"rl.reward='ocr' reads words in pictures and needs an extra ({error}): "
            "make install EXTRAS=ocr"
        ) from None
    return rapidocr.RapidOCR(params={"Global.log_level": "error"})


def begin() -> list[str]:
    """Loads the models; returns what is to be said of them."""
    reader()
    return ["ocr: rapidocr reads the words in pictures, on the CPU"]


def plain(text: str) -> str:
    """Returns a text's letters and digits alone, in lower case."""
    return "".join(filter(str.isalnum, text.casefold()))


def read(rgb: np.ndarray) -> str:
    """Returns the words in a picture [h, w, 3], uint8, as `plain` has them."""
    image = Image.fromarray(rgb)
    factor = SIDE / min(image.size)
    if factor > 1:
        size = round(image.width * factor), round(image.height * factor)
        image = image.resize(size, Image.Resampling.BICUBIC)
    found = reader()(np.asarray(image)[:, :, ::-1])
    return plain("".join(found.txts or ()))


def distance(one: str, other: str) -> int:
    """Returns how many characters at least must be put in, left out or changed."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        last, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))
    return row[-1]


def check(gold: str) -> None:
    """Raises ValueError for a gold without a letter or digit."""
    if not plain(gold):
        raise ValueError(
            f"the gold answer {gold[:80]!r} has no letter or digit to draw"
        )


def grade(pictures: list, golds: list[str]) -> list[float]:
    """Returns 1 less the share of its gold's characters that each picture has wrong.

    1: it shows the gold's letters and digits and no others; 0: none of it can be read.
    """
    out = []
    for rgb, gold in zip(pictures, golds, strict=True):
        wanted = plain(gold)
        out.append(max(1 - distance(read(rgb), wanted) / len(wanted), 0.0))
    return out
