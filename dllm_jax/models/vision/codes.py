"""Images as tokens: where codes lie in a vocabulary, and what stands around them in prompts.

MMaDA (arXiv 2505.15809): the id of code i is i plus the length of the tokenizer, so that
codes follow its last token. To be looked at an image stands before the conversation,

    <|mmu|> <|soi|> codes <|eoi|> conversation

and to be drawn behind its caption, which has a given length,

    <|t2i|> BOS caption EOS <|soi|> codes <|eoi|>

of which nothing is known but what is not a code. A tokenizer that does not call these tokens
so has them among its reserved ones, as LLaDA's.

Letters: w columns of pixels.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable

import jax
import numpy as np
from PIL import Image

from dllm_jax import data, exits, images, memory, sharding
from dllm_jax.images import MARK
from dllm_jax.models import hf, repository
from dllm_jax.models.vision import autoencoders, magvit
from dllm_jax.models.vision.prompts import Picture, Prompt

RESERVED = "<|reserved_token_{}|>"
# Token: its number of the reserved ones.
NUMBERS = {"soi": 0, "eoi": 1, "t2i": 4, "mmu": 5}
# Pixels a side, of MMaDA's images; the released tokenizer says nothing of it.
SIZE = 512
TOGETHER = 8  # images that are decoded by one program
# Of an image that is put on white the sides at most, and of one that is cut the longer side as
# a multiple of the other: else a line of pixels would become gigabytes. What is beyond is shrunk
# first, and cut off first.
WIDEST, LONGEST = 2**13, 64
FITS = ("pad", "crop")  # an image into a square: white around it, or its middle
# Fields in which a MARK is a text like any other.
ANSWERS = ("answer", "response", "chosen", "rejected")


@dataclasses.dataclass(frozen=True)
class ImageTokens:
    """The ids that images are made of."""

    first: int  # of code 0
    count: int  # of codes
    soi: int  # before an image
    eoi: int  # behind one
    t2i: int  # begins a prompt that asks for one
    mmu: int  # begins a prompt that shows one
    bos: int
    eos: int

    @property
    def drawn(self) -> tuple[int, int]:
        """The ids of codes: ModelConfig.drawn."""
        return self.first, self.first + self.count

    @functools.cached_property
    def every(self) -> tuple[int, ...]:
        """The id of each code: with numbers of its own a prompt would take five times as much."""
        return tuple(range(*self.drawn))

    def ids(self, codes) -> list[int]:
        """Returns the ids of codes."""
        return [self.every[code] for code in codes]

    def codes(self, ids) -> list[int]:
        """Returns the codes of ids; raises ValueError for one that is none of a code."""
        first, end = self.drawn
        for token in ids:
            if not first <= token < end:
                raise ValueError(
                    f"{token} is no image's: ids of codes are {first}..{end - 1}"
                )
        return [int(token) - first for token in ids]

    def looking(self, codes, conversation: list[int]) -> list[int]:
        """Returns the prompt of a conversation about an image."""
        return [self.mmu, self.soi, *self.ids(codes), self.eoi, *conversation]

    def drawing(self, caption: list[int]) -> list[int]:
        """Returns the prompt of a caption's ids; that of () asks for nothing."""
        begin = [] if caption[:1] == [self.bos] else [self.bos]
        return [self.t2i, *begin, *caption, self.eos, self.soi]


def tokens_of(tok, vocab: int, bits: int) -> ImageTokens:
    """Returns a tokenizer's ImageTokens, for codes of so many bits.

    Raises ValueError where it lacks one, or where the vocabulary has no room for the codes.
    """
    name, known = str(tok.name_or_path), tok.get_vocab()
    ids = {}
    for word, number in NUMBERS.items():
        names = f"<|{word}|>", RESERVED.format(number)
        there = [known[x] for x in names if x in known]
        if not there:
            raise ValueError(
                f"tokenizer {name!r} has neither {names[0]} nor {names[1]}: the model reads "
                "and draws no images"
            )
        ids[word] = there[0]
    for word, token in (("bos", tok.bos_token_id), ("eos", tok.eos_token_id)):
        if token is None:
            raise ValueError(f"tokenizer {name!r} has no {word}_token")
        ids[word] = token
    first, count = len(tok), 2**bits
    if first + count > vocab:
        raise ValueError(
            f"{count} codes behind the {first} tokens of tokenizer {name!r} go beyond the "
            f"vocabulary of {vocab}: it is another model's, or model.vq is"
        )
    return ImageTokens(first=first, count=count, **ids)


# ---- The tokenizer of images ---------------------------------------------------------


def find(model_path, given: str) -> pathlib.Path:
    """Returns the folder of a model's MAGVIT-v2.

    given: model.vq; "": a folder inside of the model's. Raises ValueError where it is none.
    """
    if given:
        folder = repository.find(given)
        if autoencoders.module_of(folder) is not magvit:
            raise ValueError(
                f"model.vq={given!r} is no {magvit.KIND}: its config.json has no "
                f'"_class_name": "{magvit.KIND}"'
            )
        return folder
    files = sorted(pathlib.Path(model_path).glob("*/config.json"))
    found = [x.parent for x in files if autoencoders.module_of(x.parent) is magvit]
    if not found:
        raise ValueError(
            f"{str(model_path)!r} needs the tokenizer of its images, and has no folder with "
            "one: set model.vq to it (--vq=DIR), such as showlab/magvitv2"
        )
    return found[0]


@dataclasses.dataclass(frozen=True)
class Format:
    """The images of a model: how large, and which tokens. Nothing large is read for it."""

    folder: pathlib.Path  # of the tokenizer of images
    tokens: ImageTokens
    size: int  # pixels a side
    factor: int  # pixels a side of what one code stands for

    @property
    def count(self) -> int:
        """Codes of an image."""
        return (self.size // self.factor) ** 2

    def claim(self, *, draws: bool) -> memory.Claim:
        """Returns what a Codec takes of a device: its weights, and one of its programs.

        draws: whether that makes images of codes, or codes of an image.
        """
        cfg, mesh = autoencoders.read(self.folder, magvit), own_mesh()
        params = magvit.abstract(cfg, jax.NamedSharding(mesh, jax.P()))
        with jax.set_mesh(mesh):
            if draws:
                codes_BN = np.zeros((TOGETHER, self.count), np.int32)
                codes_BN = sharding.shapes_of_rows(codes_BN, mesh)
                side = self.size // self.factor
                program = magvit.image_of.lower(params, codes_BN, side, side)
            else:
                blank_BChw = np.zeros((1, 3, self.size, self.size), np.float32)
                program = magvit.codes_of.lower(params, blank_BChw)
            needs = memory.program_bytes(program.compile())
        name = "tokenizer of images"
        return memory.Claim({name: memory.array_bytes(params)}, {name: needs})


def own_mesh() -> jax.sharding.Mesh:
    """Returns the mesh of this process's devices, which share images that are decoded.

    No other process takes part: each reads and draws whenever it comes to it.
    """
    return sharding.make_mesh(devices=jax.local_devices())


def format_of(
    model_path, tok, vocab: int, codebook: int, *, vq: str, size: int
) -> Format:
    """Returns a model's Format; vq, size: model.vq and model.image_size.

    codebook: how many codes the model knows. Raises ValueError for what does not go together.
    """
    folder = find(model_path, vq)
    cfg = autoencoders.read(folder, magvit)
    if 2**cfg.bits != codebook:
        raise ValueError(
            f"{folder} has {2**cfg.bits} codes, and {str(model_path)!r} knows {codebook} "
            "(codebook_size)"
        )
    size = size or cfg.told_size or SIZE
    if size % cfg.factor:
        raise ValueError(
            f"model.image_size={size}: {folder} makes a code of {cfg.factor} x {cfg.factor} "
            "pixels; it must be a multiple"
        )
    return Format(folder, tokens_of(tok, vocab, cfg.bits), size, cfg.factor)


class Codec:
    """Images to ids and back, by the weights of a Format's tokenizer."""

    def __init__(self, made: Format, fit: str = "pad"):
        """fit: one of FITS."""
        self.format, self.fit, self.mesh = made, fit, own_mesh()
        whole = jax.NamedSharding(self.mesh, jax.P())
        self.params = jax.device_put(hf.load(made.folder)[1], whole)

    @sharding.on_own_mesh
    def ids(self, rgb: np.ndarray) -> list[int]:
        """Returns the ids of an image [h, w, 3], uint8."""
        pixels = prepared(rgb, self.format.size, self.fit)
        codes_BN = magvit.encode(self.params, pixels[None])
        return self.format.tokens.ids(np.asarray(codes_BN)[0])

    @sharding.on_own_mesh
    def pictures(self, ids: list) -> np.ndarray:
        """Returns the images [n, h, w, 3], uint8, of the ids of each; raises ValueError."""
        codes = np.array([self.format.tokens.codes(one) for one in ids], np.int32)
        placed = sharding.place_rows(codes, self.mesh)
        return shown(np.asarray(magvit.decode(self.params, placed)))

    def drawn(self, trace) -> list[np.ndarray]:
        """Returns the picture of each row of a host Trace; one without an answer is black."""
        side, count = self.format.size, self.format.count
        out = [np.zeros((side, side, 3), np.uint8) for _ in trace.len_B]
        rows = np.flatnonzero(trace.len_B == count)
        ids = [trace.tokens_BT[i, trace.prompt_len_B[i] :][:count] for i in rows]
        for first in range(0, len(rows), TOGETHER):
            some = ids[first : first + TOGETHER]
            filled = some + some[:1] * (TOGETHER - len(some))  # one program for all
            for i, picture in zip(rows[first:], self.pictures(filled), strict=False):
                out[i] = picture
        return out


def prepared(rgb: np.ndarray, size: int, fit: str) -> np.ndarray:
    """Returns an image [h, w, 3], uint8, as a square [3, size, size], f32 in [-1, 1].

    fit: "pad" puts it on white, an odd pixel more to the right or below, and resizes, as
    dLLM-RL does; "crop" resizes the shorter side and takes the middle, as MMaDA does.
    """
    image, cubic = Image.fromarray(rgb), Image.Resampling.BICUBIC
    if fit == "pad":
        image.thumbnail((WIDEST, WIDEST))  # only where the white would be too much
        wide, high = image.size
        side = max(wide, high)
        board = Image.new("RGB", (side, side), (255, 255, 255))
        board.paste(image, ((side - wide) // 2, (side - high) // 2))
        square = board.resize((size, size), cubic)
    else:
        side = min(image.size)
        image = middle(image, *(min(n, LONGEST * side) for n in image.size))
        image = image.resize(
            [max(size, int(size * n / side)) for n in image.size], cubic
        )
        square = middle(image, size, size)
    return np.moveaxis(images.normalized(np.asarray(square)), 2, 0)


def middle(image: Image.Image, wide: int, high: int) -> Image.Image:
    """Returns the middle of an image."""
    left, top = round((image.width - wide) / 2), round((image.height - high) / 2)
    return image.crop((left, top, left + wide, top + high))


def shown(pixels_nChw: np.ndarray) -> np.ndarray:
    """Returns decoded images as [n, h, w, 3], uint8."""
    unit = np.clip((np.moveaxis(pixels_nChw, 1, 3) + 1) / 2, 0, 1)
    return (unit * 255).astype(np.uint8)


def write(path, rgb: np.ndarray) -> None:
    """Writes an image [h, w, 3], uint8, as a PNG, at once or not at all."""
    with exits.whole(pathlib.Path(path)) as partial:
        Image.fromarray(rgb).save(partial, format="PNG")


# ---- Prompts with images -------------------------------------------------------------


class Reader:
    """What makes prompts about images, for a model that reads codes: see prompts.Reader."""

    def __init__(self, codec: Callable[[], Codec]):
        """codec: returns the Codec, when the first image is read."""
        self.codec = functools.cache(codec)
        self.known: dict[str, tuple[Picture, list[int]]] = {}  # by file, with its ids

    def shown(self, row: dict, field: str, root) -> "Shown | None":
        """Returns what `data.render` takes to show a record's image; None: it has none.

        field: with its path. A record of dLLM-RL may have its ids instead. root: the folder
        that files must not leave. Raises data.Unreadable for an image that cannot be read.
        """
        if row.get("image_token_ids") is not None:
            format = self.codec().format
            codes = format.tokens.codes(data.ids(row, "image_token_ids"))
            if len(codes) != format.count:
                raise ValueError(
                    f"image_token_ids has {len(codes)} codes, and an image of the model's "
                    f"{format.count}: is it another model.image_size's?"
                )
            return Shown(format.tokens, (codes,))
        paths = images.paths_of(row, field)
        if not paths and "response_ids" in row:  # the ids of its prompt hold the image
            return self.of_files([], root)
        if not paths and asks_to_show(row):
            raise ValueError(f"it has {MARK} in its text, and no image in {field!r}")
        return self.of_files(paths, root) if paths else None

    def of_files(self, paths: list, root) -> "Shown":
        """Returns what `data.render` takes to show these image files: see `shown`."""
        if len(paths) > 1:
            raise ValueError(f"it has {len(paths)} images, and the model reads one")
        if not paths:
            return Shown(None, ())
        tokens = self.codec().format.tokens
        picture, ids = self.read(paths[0], root)
        return Shown(tokens, (tokens.codes(ids),), (picture,))

    def read(self, path, root) -> tuple[Picture, list[int]]:
        """Returns the Picture of a file, and its ids; raises data.Unreadable.

        It is encoded once.
        """
        try:
            file = os.fspath(images.inside(path, root))
            if file not in self.known:
                rgb = images.read(path, root=root)
                picture = Picture(file, images.mark(rgb), rgb.shape[1::-1])
                self.known[file] = picture, self.codec().ids(rgb)
        except ValueError as error:
            raise data.Unreadable(str(error)) from None
        return self.known[file]


def asks_to_show(row: dict) -> bool:
    """Returns whether a record without an image has a MARK where it asks.

    In an answer it is a text like any other.
    """
    texts = [x for name, x in row.items() if name not in ANSWERS and isinstance(x, str)]
    for name in ("messages", "prompt"):
        turns = row[name] if isinstance(row.get(name), list) else []
        said = [
            x for x in turns if isinstance(x, dict) and x.get("role") != "assistant"
        ]
        texts += [str(x.get("content")) for x in said]
    return any(MARK in text for text in texts)


@dataclasses.dataclass(frozen=True)
class Shown:
    """The image of one conversation, if it has one, and how it gets into it."""

    tokens: ImageTokens | None  # None where there is no image
    codes: tuple[list[int], ...]
    pictures: tuple[Picture, ...] = ()  # of images that files name
    plain = False  # a chat template writes the conversation
    mark = MARK

    @property
    def blind(self) -> bool:
        """Whether there is no image, where one may be shown."""
        return not self.codes

    def messages(self, messages: list[dict]) -> list[dict]:
        """Returns a conversation without marks; raises ValueError where there are too many."""
        marks = sum(message["content"].count(MARK) for message in messages)
        if marks > len(self.codes):
            raise ValueError(
                f"it has {marks} times {MARK} for {len(self.codes)} image(s)"
            )
        if not marks:
            return messages
        return [
            message | {"content": message["content"].replace(MARK, "").lstrip("\n")}
            for message in messages
        ]

    def ids(self, tok, written: str) -> Prompt:
        """Returns the ids of a written conversation."""
        conversation = list(data.ids_of(tok, written))
        if not self.codes:
            return Prompt(conversation)
        return Prompt(self.tokens.looking(self.codes[0], conversation), self.pictures)

    def sampled(self, ids: list[int]) -> Prompt:
        """Returns the prompt of an answer that was sampled before, its codes in it."""
        return Prompt(ids, self.pictures)


class Captions:
    """What makes prompts of captions, for a model that draws: see prompts.Reader."""

    def __init__(self, codec: Callable[[], Codec] | None, tokens: ImageTokens):
        """codec: where records have the image to be drawn, which is learned; see Reader."""
        self.reader = None if codec is None else Reader(codec)
        self.tokens = tokens

    def shown(self, row: dict, field: str, root) -> "Caption":
        """Returns what `data.render` takes for a record; see Reader.shown."""
        if self.reader is None or "response_ids" in row:
            return Caption(self.tokens)
        shown = self.reader.shown(row, field, root)
        codes = () if shown is None else shown.codes[0]  # none: a caption set aside
        return Caption(self.tokens, tuple(self.tokens.ids(codes)))

    def of_files(self, paths: list, root) -> "Caption":
        """Returns what `data.render` takes for a prompt without a record."""
        return Caption(self.tokens)


@dataclasses.dataclass(frozen=True)
class Caption:
    """How a caption becomes a prompt, and the image that answers it."""

    tokens: ImageTokens
    answer: tuple[int, ...] = ()  # the ids to learn; (): none are told
    plain = True  # no conversation
    mark = MARK
    blind = False  # it shows nothing

    def messages(self, messages: list[dict]) -> list[dict]:
        """Returns the messages as they are."""
        return messages

    def ids(self, tok, written: str) -> list[int]:
        """Returns the prompt of a caption."""
        return self.tokens.drawing(list(data.ids_of(tok, written)))

    def sampled(self, ids: list[int]) -> list[int]:
        """Returns the prompt of an image that was sampled before."""
        return ids
