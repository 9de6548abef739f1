"""The pictures of a page: each once, small, and of a file's answers of bounded size together.

They are of two kinds: files that a prompt showed, which a record names by file and mark, and
what an answer drew, which its record holds as a data URI (images.embedded).
"""

import pathlib
import re

from dllm_jax import images
from dllm_jax.data import files

TOTAL = 12 * 2**20  # characters of all pictures that a file of answers adds to a page
DRAWN = 2**20  # characters of one that a record holds
SOURCE = re.compile(r"data:image/(?:png|jpeg);base64,[A-Za-z0-9+/]+={0,2}")


class Album:
    """The pictures of a page: those of a file of answers, or of two."""

    def __init__(self):
        self.pictures: list[str] = []  # data URIs
        self.places: dict[str, int] = {}  # of each of them
        self.size = 0
        self.roots: tuple[str, ...] | None = None  # None: no file has begun
        self.told: dict[tuple, int | str] = {}  # what `shown` said, by file and mark

    def begin(self, roots: tuple[str, ...]) -> bool:
        """Begins a file of answers, and returns whether it is the first.

        roots: the folders that its image files must lie in.
        """
        first = self.roots is None
        self.roots, self.told, self.size = roots, {}, 0
        return first

    def drawn(self, uri: str) -> int | str:
        """Returns the number of a picture, or why the page has no room for it."""
        if uri not in self.places:
            if self.size + len(uri) > TOTAL:
                return f"left out: a page holds {TOTAL >> 20} MB of a file's pictures"
            self.size += len(uri)
            self.places[uri] = len(self.pictures)
            self.pictures.append(uri)
        return self.places[uri]

    def shown(self, image: dict) -> int | str:
        """Returns the number of a prompt's picture, or a line that names it and says why not.

        image: its `file`, and the `mark` of its pixels.
        """
        known = image["file"], image.get("mark")
        if known not in self.told:
            self.told[known] = self.of_file(*known)
        return self.told[known]

    def of_file(self, file: str, mark: str | None) -> int | str:
        """Returns what `shown` does of a file; it is read here."""
        name = images.named(file)
        try:
            rgb = images.read(file, root=self.root_of(file))
        except ValueError as error:
            return str(error)
        if mark is not None and images.mark(rgb) != mark:
            return f"{name} has changed since the model saw it"
        said = self.drawn(images.embedded(rgb))
        return f"{name}: {said}" if isinstance(said, str) else said

    def root_of(self, file: str) -> str:
        """Returns the root that a file lies in; raises ValueError where it is in none."""
        for root in self.roots:
            try:
                images.inside(file, root)
            except ValueError:
                continue
            return root
        raise ValueError(
            f"{images.named(file)} is outside of {' and '.join(self.roots)}; name its folder "
            "by --images=DIR"
        )


def check(row: dict) -> None:
    """Raises ValueError for a record whose images, or whose picture, are none."""
    given = row.get("images")
    given = [] if given is None else given
    if not isinstance(given, list) or not all(map(names_file, given)):
        raise ValueError("images must be a list of objects with a file and a mark")
    uri = row.get("picture")
    if uri is None:
        return
    if type(uri) is not str or len(uri) > DRAWN or not SOURCE.fullmatch(uri):
        raise ValueError(
            f"picture must be a data URI of a PNG or JPEG, of at most {DRAWN:,} characters"
        )


def names_file(image) -> bool:
    """Returns whether a record's image is what `answers.record` writes of one."""
    if not isinstance(image, dict) or type(image.get("file")) is not str:
        return False
    return bool(image["file"]) and type(image.get("mark")) in (str, type(None))


def roots_of(file: pathlib.Path, data: dict) -> tuple[str, ...]:
    """Returns where the images of a file of answers may lie.

    data: the group of this name of the run that wrote it; {}: then it is the file's folder.
    """
    if root := data.get("image_root"):
        return (str(root),)
    # "a.jsonl:3" has a weight, which is no part of the folder.
    named = [x for key in ("train", "heldout") for x in files(str(data.get(key) or ""))]
    datasets = [pathlib.Path(x) for x in named if x]
    return tuple(dict.fromkeys(str(x.parent) for x in datasets)) or (str(file.parent),)
