"""Files to pixels: images that nobody has looked at, read with bounded memory.

Pillow decodes; no JAX. A file is opened by its content, not by its ending, and only as one
of FORMATS: Pillow's other decoders start programs or are rarely tested against damage.
Arrays of pixels are [height, width, 3], of tiles [tiles, 3, height, width].
"""

import base64
import hashlib
import io
import math
import os
import pathlib
import re
import stat
import warnings

import numpy as np
from PIL import Image

MARK = "<image>"  # where an image stands in a text
FIELDS = "image_abs_path", "image_path"  # by which dLLM-RL's records name one, too
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
# At most: 0.2 GB as bytes of three colours. A photograph of a telephone has 12 to 50
# million; a larger one would be shrunk a hundredfold before a model sees it.
PIXELS, SIDE = 2**26, 2**16
# Of a picture that people look at, in a record or on a page, and of one that a judge is shown:
# pixels a side at most; and the bytes above which it is a JPEG.
LOOKED_AT, JUDGED, AS_PNG = 256, 1024, 2**15
URL = re.compile(r"\w[\w+.-]*:(//|image/)")
SIXTEEN_BITS = ("I", "I;16", "I;16L", "I;16B", "I;16N")


def paths_of(row: dict, field: str) -> list:
    """Returns the paths of a record's images: of its field, or of one of FIELDS."""
    names = [name for name in (field, *FIELDS) if row.get(name) is not None]
    given = row[names[0]] if names else []
    return given if isinstance(given, list) else [given]


def inside(path, root) -> pathlib.Path:
    """Returns where a file is, links resolved; a relative path begins at `root`.

    root: the folder that files must not leave, by "..", as an absolute path or by a link;
    None: the working folder, and any file may be named. Raises ValueError.
    """
    name = named(path)
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ValueError(f"{name}: it must be a file's path")
    base = pathlib.Path(root or ".").resolve()
    try:
        file = (base / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, a NUL
        raise ValueError(f"{name}: {error}") from None
    if root is not None and not file.is_relative_to(base):
        raise ValueError(f"{name} is outside of the image root {base}")
    return file


def named(path) -> str:
    """Returns what a message calls an image."""
    text = repr(str(path)).encode(errors="backslashreplace").decode()
    return f"image {text}"[:300]


def read(path, *, root=None) -> np.ndarray:
    """Returns an image file's pixels [height, width, 3], uint8 RGB.

    root: see `inside`. Of an animation it is the first frame; 16-bit grey keeps its upper
    eight bits; an opacity is dropped, as dLLM-RL does, and a camera's note of how it was
    held is not obeyed. Raises ValueError, of one line that names the file, for one that is
    missing, damaged, too large or of no known format.
    """
    file, name = inside(path, root), named(path)
    try:
        kind = file.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if URL.match(str(path)):
            reason = "URLs are not read: it must be a file's path"
        raise ValueError(f"{name}: {reason}") from None
    if not stat.S_ISREG(kind):
        raise ValueError(f"{name} is no file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is damaged and can be read
            with Image.open(file, formats=FORMATS) as image:
                refuse_large(image.size)
                return pixels(image)
    except Image.UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise ValueError(f"{name} is damaged, or none of {known}") from None
    except Image.DecompressionBombError:
        raise ValueError(f"{name} has more than {PIXELS:,} pixels") from None
    except MemoryError:
        raise ValueError(f"{name} does not fit into memory") from None
    except Exception as error:  # noqa: BLE001 (decoders of damaged files raise anything)
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{name} cannot be read: {reason}") from None


def refuse_large(size: tuple[int, int]) -> None:
    """Raises ValueError for an image that would take too much memory, before it does."""
    width, height = size
    if not (0 < width <= SIDE and 0 < height <= SIDE and width * height <= PIXELS):
        raise ValueError(
            f"it has {width} x {height} pixels; at most {PIXELS:,} are read, and {SIDE:,} "
            "a side"
        )


def pixels(image: Image.Image) -> np.ndarray:
    """Returns an opened image's pixels [height, width, 3], uint8 RGB; raises as decoders do."""
    if image.mode == "F":
        raise ValueError("its pixels are fractions, whose range nothing tells")
    if image.mode == "I" and image.format == "TIFF":  # elsewhere these are of 16 bits
        raise ValueError("its pixels have 32 bits or a sign, whose range nothing tells")
    if image.mode in SIXTEEN_BITS:  # Pillow would cut off what is above 255
        grey = np.clip(np.asarray(image), 0, 2**16 - 1) >> 8
        return np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2)
    return np.array(image.convert("RGB"))


def mark(rgb: np.ndarray) -> str:
    """Returns what is the same for the same pixels, and for no others."""
    digest = hashlib.sha256(repr(rgb.shape).encode())
    digest.update(np.ascontiguousarray(rgb))
    return digest.hexdigest()[:32]


def marked(file: str, known: str) -> np.ndarray:
    """Returns the pixels of a file that was read before, `read` without a root.

    known: their mark. Raises ValueError where they are not the same any more.
    """
    rgb = read(file)
    if mark(rgb) != known:
        raise ValueError(f"{named(file)} has changed since it was read")
    return rgb


def tiles(rgb: np.ndarray, canvas: tuple[int, int], side: int) -> np.ndarray:
    """Returns an image as tiles [1 + tiles of the canvas, 3, side, side], uint8.

    The first is all of it, squeezed into a square. The others, row by row, are those of a
    black canvas of (width, height), in whose middle it lies as large as it can.
    """
    image, (wide, high) = Image.fromarray(rgb), canvas
    wider, higher = wide / image.width, high / image.height
    if wider < higher:
        size = wide, min(math.ceil(image.height * wider), high)
    else:
        size = min(math.ceil(image.width * higher), wide), high
    board = Image.new("RGB", canvas, (0, 0, 0))
    corner = (wide - size[0]) // 2, (high - size[1]) // 2
    board.paste(image.resize(size, Image.Resampling.BICUBIC), corner)
    whole = np.asarray(image.resize((side, side), Image.Resampling.BICUBIC))
    parts = np.asarray(board).reshape(high // side, side, wide // side, side, 3)
    parts = parts.transpose(0, 2, 1, 3, 4).reshape(-1, side, side, 3)
    return np.concatenate([whole[None], parts]).transpose(0, 3, 1, 2)


def normalized(pixels: np.ndarray) -> np.ndarray:
    """Returns pixels of 0..255 as f32 in [-1, 1].

    To the last bit as LLaDA-V's and MMaDA's processors: times a rounded 1 / 255 is not.
    """
    return (pixels.astype(np.float32) / np.float32(255) - 0.5) / 0.5


def embedded(rgb: np.ndarray, side: int = LOOKED_AT) -> str:
    """Returns an image [height, width, 3], uint8, as a data URI, shrunk to so many a side.

    It is a PNG where that is small, as of drawings, and else a JPEG: at most 0.3 million
    characters of LOOKED_AT, and 3 million of JUDGED.
    """
    image = Image.fromarray(rgb)
    image.thumbnail((side, side))
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 85})):
        packed = io.BytesIO()
        image.save(packed, format=kind, **options)
        if packed.tell() <= AS_PNG:
            break
    return f"data:image/{kind};base64,{base64.b64encode(packed.getvalue()).decode()}"
