"""Prompts with images: a mark in a text becomes the ids of an image's rows.

A record's images are named by its field `data.image`, one path or several. Where its text
has a MARK for each, they stand there; where it has none they come first, a line each. The
checkpoint's chat template writes the conversation, and each piece of text between images is
tokenised by itself.

A Prompt counts the rows of its own images from the vocabulary's end on; which rows of a
table they are is decided when one is made (look.py).
"""

import dataclasses
import os

from dllm_jax import data, images
from dllm_jax.checks import shown
from dllm_jax.images import MARK
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision import soft

# What LLaVA-NeXT, and so LLaDA-V, begins conversations with.
SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual "
    "content that the user provides, and assist the user with a variety of tasks using "
    "natural language."
)


@dataclasses.dataclass(frozen=True)
class Picture:
    """An image file, as far as a prompt needs it: its pixels are read again when looked at."""

    file: str
    mark: str  # of its pixels: images.mark
    size: tuple[int, int]  # width, height
    tiles: int = 0
    rows: int = 0  # of the table; 0: its codes are in the prompt


class Prompt(list):
    """Token ids that know their images, whose rows they count from the vocabulary's end."""

    def __init__(self, ids, pictures: tuple[Picture, ...] = ()):
        super().__init__(ids)
        self.pictures = pictures


def pictures_of(prompt) -> tuple[Picture, ...]:
    """Returns the images of a prompt, which may be a plain list of ids."""
    return getattr(prompt, "pictures", ())


def identity(prompt) -> tuple:
    """Returns what tells a prompt from others: its ids, and the marks of its images."""
    return (*prompt, *(picture.mark for picture in pictures_of(prompt)))


class Reader:
    """What makes Prompts for one model."""

    def __init__(self, model: ModelConfig, *, keep_newline: bool = True):
        """keep_newline: see ModelArgs."""
        self.model, self.keep_newline = model, keep_newline
        self.known: dict[str, Picture] = {}  # by file
        self.rows: list[int] = []  # the ids of rows, as many as a prompt had so far

    def ids(self, first: int, count: int) -> list[int]:
        """Returns the ids of a prompt's rows from `first` on.

        All prompts share these numbers: with some of its own each, of thousands of rows, would
        take five times as much.
        """
        vocab, rows = self.model.vocab, self.rows
        rows += range(vocab + len(rows), vocab + first + count)
        return rows[first : first + count]

    def shown(self, row: dict, field: str, root) -> "Shown":
        """Returns what `data.render` takes to show a record's images.

        field: with their paths; of an answer that was sampled before they stand where
        `answers.record` puts them. root: the folder that files must not leave. Raises
        data.Unreadable for an image that cannot be read, or is no more what it was.
        """
        sampled = row.get("images") or [] if "response_ids" in row else []
        if not isinstance(sampled, list) or not all(
            isinstance(x, dict) and {"file", "mark"} <= x.keys() for x in sampled
        ):
            raise ValueError("images must be a list of objects with a file and a mark")
        paths = [x["file"] for x in sampled] or images.paths_of(row, field)
        found = self.of_files(paths, root)
        for image, picture in zip(sampled, found.pictures, strict=False):
            if image["mark"] != picture.mark:
                name = images.named(image["file"])
                raise data.Unreadable(f"{name} has changed since it was looked at")
        return found

    def of_files(self, paths: list, root) -> "Shown":
        """Returns what `data.render` takes to show these image files: see `shown`."""
        pictures = tuple(self.picture(path, root) for path in paths)
        tiles = sum(one.tiles for one in {x.mark: x for x in pictures}.values())
        if tiles > self.model.tiles:
            raise ValueError(
                f"its images are cut into {tiles} tiles, more than model.tiles="
                f"{self.model.tiles}"
            )
        return Shown(self, pictures)

    def picture(self, path, root) -> Picture:
        """Returns the Picture of a file; raises data.Unreadable."""
        try:
            file = os.fspath(images.inside(path, root))
            if file not in self.known:
                rgb = images.read(path, root=root)
                size = rgb.shape[1], rgb.shape[0]
                cfg = self.model.vision
                counts = soft.tile_count(size, cfg), len(soft.arrangement(size, cfg))
                self.known[file] = Picture(file, images.mark(rgb), size, *counts)
        except ValueError as error:
            raise data.Unreadable(str(error)) from None
        return self.known[file]


@dataclasses.dataclass(frozen=True)
class Shown:
    """The images of one conversation, and how they get into it."""

    reader: Reader
    pictures: tuple[Picture, ...]
    plain = False  # a chat template writes the conversation
    mark = MARK

    @property
    def blind(self) -> bool:
        """Whether there is no image, where one may be shown."""
        return not self.pictures

    def messages(self, messages: list[dict]) -> list[dict]:
        """Returns a conversation with the system's message, and with marks for its images.

        Raises ValueError where there are more marks than images, or fewer.
        """
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": SYSTEM}, *messages]
        marks = sum(message["content"].count(MARK) for message in messages)
        if marks == 0 and self.pictures:
            first = next((x for x in messages if x["role"] == "user"), None)
            if first is None:
                raise ValueError("an image needs a message of the user's")
            lines = f"{MARK}\n" * len(self.pictures) + first["content"]
            told = first | {"content": lines}
            return [told if x is first else x for x in messages]
        if marks != len(self.pictures):
            raise ValueError(
                f"it has {marks} times {MARK} for {len(self.pictures)} image(s)"
            )
        return messages

    def ids(self, tok, written: str) -> Prompt:
        """Returns the ids of a written conversation."""
        pieces = written.split(MARK)
        if len(pieces) - 1 != len(self.pictures):
            raise ValueError(
                f"the chat template made {len(pieces) - 1} of {len(self.pictures)} marks "
                f"{MARK} in {shown(written)}"
            )
        ids, row = list(data.ids_of(tok, pieces[0])), 0
        skip = 0 if self.reader.keep_newline else 1
        for picture, piece in zip(self.pictures, pieces[1:], strict=True):
            ids += self.reader.ids(row, picture.rows)
            ids += data.ids_of(tok, piece)[skip:]
            row += picture.rows
        return Prompt(ids, self.pictures)

    def sampled(self, ids: list[int]) -> Prompt:
        """Returns the prompt of an answer that was sampled before; see `answers.record`."""
        vocab, rows = self.reader.model.vocab, sum(x.rows for x in self.pictures)
        if [t for t in ids if t >= vocab] != [*range(vocab, vocab + rows)]:
            raise ValueError(
                f"its prompt_ids do not have the {rows} rows of its images from {vocab} on: "
                "are they another model's?"
            )
        return Prompt(ids, self.pictures)
