"""Looking: from the images of some prompts to their table on the mesh.

A table has the images of one step, each once, in rows of a fixed number. The tower runs on
`BATCH` tiles at a time, once for an image: what it has seen it remembers, up to REMEMBERED
bytes, unless it is trained meanwhile.

Letters: w pixels of a row, p patches, e the tower's width, k patches that make a row.
"""

import collections
import dataclasses
import functools

import jax
import numpy as np

from dllm_jax import images, sharding
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision import siglip, soft
from dllm_jax.models.vision.prompts import Picture, Prompt, pictures_of

BATCH = 8  # tiles of a pass, on each device that shares rows
REMEMBERED = 2**31  # bytes of features on the host


@dataclasses.dataclass(frozen=True)
class Table:
    """The images that are looked at together, and where each begins."""

    seen: soft.Seen
    first_of: dict[str, int]  # a picture's mark -> its first row

    def placed(self, prompt, vocab: int) -> Prompt:
        """Returns a prompt's ids, with those of its images as rows of this table."""
        rows = []
        for picture in pictures_of(prompt):
            first = vocab + self.first_of[picture.mark]
            rows += range(first, first + picture.rows)
        ids = (rows[i - vocab] if i >= vocab else i for i in prompt)
        return Prompt(ids, pictures_of(prompt))

    def canvases(self, tokens_BT: np.ndarray, prompts: list, vocab: int) -> np.ndarray:
        """Returns canvases with these prompts, whose images are rows of this table."""
        out_BT = tokens_BT.copy()
        for out_T, prompt in zip(out_BT, prompts, strict=True):
            out_T[: len(prompt)] = self.placed(prompt, vocab)
        return out_BT


class Eyes:
    """What looks at pictures for one model. The same in every process."""

    def __init__(self, tower, model: ModelConfig, mesh):
        """tower: params["vision"], or None where it is trained, so that pixels are shown."""
        self.tower, self.model, self.mesh = tower, model, mesh
        self.features_of = collections.OrderedDict()  # by mark, the oldest first
        self.passes = 0  # batches that the tower has seen
        self.last: tuple[tuple[str, ...], Table] | None = None
        self.shards = sharding.row_shards(mesh)

    def chunks(self, prompts: list) -> list[list[int]]:
        """Returns the prompts' indices, in order, cut where a table would be full."""
        chunks, marks, tiles = [[]], set(), 0
        for i, prompt in enumerate(prompts):
            own = {x.mark: x.tiles for x in pictures_of(prompt)}
            more = sum(count for mark, count in own.items() if mark not in marks)
            if tiles + more > self.model.tiles:
                chunks.append([])
                marks, tiles, more = set(), 0, sum(own.values())
            marks |= own.keys()
            tiles += more
            chunks[-1].append(i)
        return chunks

    def look(self, prompts: list) -> Table:
        """Returns the table of the prompts' images, in the order in which they come."""
        found = {x.mark: x for prompt in prompts for x in pictures_of(prompt)}
        if self.last is None or self.last[0] != tuple(found):
            self.last = tuple(found), self.table(list(found.values()))
        return self.last[1]

    def table(self, pictures: list[Picture]) -> Table:
        """Returns the table of different pictures.

        Raises ValueError where they have too many tiles, or one is not what it was.
        """
        count = sum(picture.tiles for picture in pictures)
        if count > self.model.tiles:
            raise ValueError(
                f"{len(pictures)} images are cut into {count} tiles, more than model.tiles="
                f"{self.model.tiles}: raise it, or have fewer images in a step"
            )
        blank = blank_arrays(self.model, trained=self.tower is None)
        held = blank.pixels_BChw if self.tower is None else blank.features_Bpe
        if self.tower is not None:
            self.remember(pictures)
        first_of, row, tile = {}, 0, 0
        for picture in pictures:
            plan = soft.arrangement(picture.size, self.model.vision)
            rows = slice(row, row + len(plan))
            blank.source_Mk[rows] = plan.source_Mk + tile * self.model.vision.patches
            blank.weight_Mk[rows] = plan.weight_Mk
            blank.newline_M[rows] = plan.newline_M
            held[tile : tile + picture.tiles] = self.shown(picture)
            first_of[picture.mark] = row
            row, tile = row + len(plan), tile + picture.tiles
        return Table(place(blank, self.mesh), first_of)

    def shown(self, picture: Picture) -> np.ndarray:
        """Returns what the table has of a picture: features, or pixels of its tiles."""
        if self.tower is None:
            return tiles_of(picture, self.model)
        return self.features_of[picture.mark]

    def remember(self, pictures: list[Picture]):
        """Lets the tower see what it has not, and forgets the oldest that is too much."""
        new = [x for x in pictures if x.mark not in self.features_of]
        width = BATCH * self.shards
        waiting = []  # (the picture's mark, a tile)
        for picture in new:
            waiting += [(picture.mark, x) for x in tiles_of(picture, self.model)]
            while len(waiting) >= width:
                self.see(waiting[:width], width)
                waiting = waiting[width:]
        if waiting:
            self.see(waiting, width)
        for picture in pictures:
            self.features_of.move_to_end(picture.mark)
        while len(self.features_of) > len(pictures) and self.size > REMEMBERED:
            self.features_of.popitem(last=False)

    @property
    def size(self) -> int:
        """Bytes of the features that are remembered."""
        return sum(x.nbytes for x in self.features_of.values())

    def see(self, tiles: list, width: int):
        """Runs the tower on (mark, tile) pairs, filled up to `width`; keeps its features."""
        pixels_BChw = np.stack([x for _, x in tiles])
        fill = [(0, width - len(tiles))] + [(0, 0)] * 3
        placed = sharding.place_rows(np.pad(pixels_BChw, fill), self.mesh)
        with jax.set_mesh(self.mesh):
            features_Bpe = sharding.fetch(
                features(self.tower, placed, cfg=self.model.vision)
            )
        self.passes += 1
        for (mark, _), features_pe in zip(tiles, features_Bpe, strict=False):
            have = self.features_of.get(mark, features_Bpe[:0])
            self.features_of[mark] = np.concatenate([have, features_pe[None]])


features = jax.jit(siglip.features, static_argnames="cfg")


@functools.partial(jax.jit, static_argnames="cfg")
def rows(params, seen: soft.Seen, *, cfg: ModelConfig):
    """Returns the table's rows: `soft.rows`, compiled."""
    return soft.rows(params, seen, cfg)


def tiles_of(picture: Picture, model: ModelConfig) -> np.ndarray:
    """Returns the tiles of a picture, pixels in [-1, 1]; raises ValueError if it changed."""
    rgb, cfg = images.marked(picture.file, picture.mark), model.vision
    canvas = soft.canvas_of(picture.size, cfg)
    return images.normalized(images.tiles(rgb, canvas, cfg.side))


def blank_arrays(model: ModelConfig, *, trained: bool) -> soft.Seen:
    """Returns a table without images, on the host; trained: of a tower that is."""
    cfg, rows = model.vision, (model.soft, soft.TAPS)
    dtype = jax.numpy.dtype(model.dtype)
    features_Bpe = np.zeros((model.tiles, cfg.patches, cfg.width), dtype)
    pixels_BChw = np.zeros((model.tiles, 3, cfg.side, cfg.side), np.float32)
    return soft.Seen(
        features_Bpe=None if trained else features_Bpe,
        pixels_BChw=pixels_BChw if trained else None,
        source_Mk=np.zeros(rows, np.int32),
        weight_Mk=np.zeros(rows, np.float32),
        newline_M=np.zeros(model.soft, np.float32),
    )


def abstract(model: ModelConfig, mesh) -> soft.Seen:
    """Returns the shapes of a table on the mesh, as training sees it."""
    return laid_out(blank_arrays(model, trained=model.train_tower), mesh)


def laid_out(seen: soft.Seen, mesh) -> soft.Seen:
    """Returns a table's shapes on the mesh: tiles split over rows, all else whole."""
    split, whole = sharding.shapes_of_rows(seen, mesh), jax.NamedSharding(mesh, jax.P())
    names = "source_Mk", "weight_Mk", "newline_M"
    return split.replace(
        **{name: getattr(split, name).update(sharding=whole) for name in names}
    )


def place(seen: soft.Seen, mesh) -> soft.Seen:
    """Returns a table on the mesh: see `laid_out`."""

    def put(x, shape):
        return sharding.place(x, shape.sharding.spec, mesh)

    return jax.tree.map(put, seen, laid_out(seen, mesh))
