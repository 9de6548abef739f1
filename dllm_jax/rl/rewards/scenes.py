"""Scenes of a few shapes: drawn, described, and checked in a picture.

A scene is some equal shapes of one colour in one part of a white picture. Its gold answer is
its description, such as "two red circles on the left": `grade` looks for it in a picture by
colour, connected parts, their outlines and their places. A picture may be rough: what is
nearest to a colour counts as it, and specks count for nothing.
"""

import dataclasses
import io

import numpy as np
from PIL import Image

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 60, 220),
    "yellow": (240, 200, 20),
}
SHAPES = ("square", "circle", "triangle")
COUNTS = ("one", "two", "three")
PLACES = ("on the left", "on the right", "at the top", "at the bottom")
WHITE = (255, 255, 255)
SPECK = 1 / 400  # of the picture: what is smaller is none of its parts
WIDTHS = 0.16, 0.22  # of a shape, of the picture's side
# The share of a shape's bounding box that it fills: half of it, pi / 4, all of it.
FILLS = {"triangle": (0.3, 0.66), "circle": (0.66, 0.895), "square": (0.895, 1.01)}


@dataclasses.dataclass(frozen=True)
class Scene:
    """What a picture shows."""

    count: int  # 1..3
    colour: str
    shape: str
    place: str

    def __str__(self) -> str:
        """Returns its description, a caption."""
        plural = "s" if self.count > 1 else ""
        words = COUNTS[self.count - 1], self.colour, self.shape + plural, self.place
        return " ".join(words)


ALL = {
    str(scene): scene
    for scene in (
        Scene(count, colour, shape, place)
        for count in range(1, len(COUNTS) + 1)
        for colour in COLOURS
        for shape in SHAPES
        for place in PLACES
    )
}


# ---- Drawing -------------------------------------------------------------------------


def draw(scene: Scene, rng: np.random.Generator, side: int = 64) -> np.ndarray:
    """Returns a picture [side, side, 3], uint8, of a scene, whose rest is drawn at random."""
    rgb = np.full((side, side, 3), WHITE, np.uint8)
    across = scene.place in PLACES[2:]  # its shapes stand beside each other
    share = side // scene.count
    for number in range(scene.count):
        width = round(rng.uniform(*WIDTHS) * side)
        along = number * share + rng.integers(2, share - width - 1)
        first = rng.integers(2, side // 2 - width - 3)
        if scene.place in (PLACES[1], PLACES[3]):
            first = side - width - first
        top, left = (first, along) if across else (along, first)
        stamp = outline(scene.shape, width)
        rgb[top : top + width, left : left + width][stamp] = COLOURS[scene.colour]
    return rgb


def outline(shape: str, width: int) -> np.ndarray:
    """Returns where in its box [width, width] a shape is."""
    y, x = np.mgrid[:width, :width] + 0.5
    middle = width / 2
    if shape == "circle":
        return (x - middle) ** 2 + (y - middle) ** 2 <= middle**2
    if shape == "triangle":
        return np.abs(x - middle) <= y / 2
    return np.ones((width, width), bool)


# ---- Checking ------------------------------------------------------------------------


def seen(rgb: np.ndarray) -> set[str]:
    """Returns the descriptions of what a picture shows; none where it is no scene.

    What is on the left and at the top has two.
    """
    # Imported here: it takes a tenth of the time to a first answer, and few look at scenes.
    from scipy import ndimage

    side = rgb.shape[0]
    palette = np.array([WHITE, *COLOURS.values()], np.float32)
    away = np.square(rgb[:, :, None].astype(np.float32) - palette[None, None]).sum(-1)
    nearest = away.argmin(-1)
    found = []
    for number, colour in enumerate(COLOURS, 1):
        of_colour = nearest == number
        if of_colour.sum() < SPECK * side * side:
            continue
        parts, _ = ndimage.label(of_colour)
        for part, box in enumerate(ndimage.find_objects(parts), 1):
            inside = parts[box] == part
            if inside.sum() >= SPECK * side * side:
                found.append((colour, shape_of(inside), middle_of(box, side)))
    if not 1 <= len(found) <= len(COUNTS):
        return set()
    colours, shapes, middles = zip(*found, strict=True)
    if len(set(colours)) > 1 or len(set(shapes)) > 1 or shapes[0] is None:
        return set()
    y, x = np.array(middles).T
    inside = {
        PLACES[0]: (x < 0.5).all(),
        PLACES[1]: (x > 0.5).all(),
        PLACES[2]: (y < 0.5).all(),
        PLACES[3]: (y > 0.5).all(),
    }
    places = [place for place, holds in inside.items() if holds]
    return {str(Scene(len(found), colours[0], shapes[0], place)) for place in places}


def middle_of(box, side: int) -> tuple[float, float]:
    """Returns the middle (y, x) of a bounding box, as shares of the picture's side."""
    return tuple((part.start + part.stop) / 2 / side for part in box)


def shape_of(inside: np.ndarray) -> str | None:
    """Returns the shape that fills so much of its box; None where the box is no square."""
    high, wide = inside.shape
    if not 0.7 <= high / wide <= 1 / 0.7:
        return None
    fill = inside.mean()
    for shape, (low, high) in FILLS.items():
        if low <= fill < high:
            return shape
    return None


def grade(pictures: list[np.ndarray], golds: list[str]) -> list[float]:
    """Returns 1.0 for each picture that shows its gold scene, else 0.0."""
    return [
        float(gold.strip() in seen(rgb))
        for rgb, gold in zip(pictures, golds, strict=True)
    ]


def check(gold: str) -> None:
    """Raises ValueError for a gold that describes no scene."""
    if gold.strip() not in ALL:
        raise ValueError(f"{gold!r} is no scene, such as {next(iter(ALL))!r}")


def compactness(rgb: np.ndarray) -> float:
    """Returns 1 less what a picture's JPEG takes of its pixels' bytes, 0..1.

    What a white picture of its size takes is left out: of a small one that is nearly all.
    """
    taken = jpeg_bytes(rgb) - jpeg_bytes(np.full_like(rgb, 255))
    return float(np.clip(1 - taken / rgb.size, 0, 1))


def jpeg_bytes(rgb: np.ndarray) -> int:
    """Returns the bytes of a picture's JPEG."""
    file = io.BytesIO()
    Image.fromarray(rgb).save(file, format="JPEG", quality=95)
    return file.tell()
