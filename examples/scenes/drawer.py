"""Draws scenes as mosaics of 4 x 4 cells: what the tiny model learns to draw.

A picture is 16 x 16 pixels. Its squares are cells of a colour, no two of which touch along an
edge, as `dllm_jax.rl.rewards.scenes`, which judges what a picture shows, takes two that do for
one shape, which is no square.
"""

import itertools

import numpy as np

from dllm_jax.rl.rewards import scenes

SIDE, CELL = 16, 4  # pixels: of a picture, and of a cell
GRID = SIDE // CELL
PALETTE = np.array([scenes.WHITE, *scenes.COLOURS.values()], np.uint8)
# Caption: Scene.
ALL = {name: scene for name, scene in scenes.ALL.items() if scene.shape == "square"}


def cells(scene: scenes.Scene) -> np.ndarray:
    """Returns the numbers of the cells of a scene's half, row by row."""
    y, x = np.divmod(np.arange(GRID * GRID), GRID)
    low = GRID // 2
    inside = {
        "on the left": x < low,
        "on the right": x >= low,
        "at the top": y < low,
        "at the bottom": y >= low,
    }[scene.place]
    return np.flatnonzero(inside)


def apart(chosen) -> bool:
    """Returns whether no two of some cells touch along an edge."""
    places = [divmod(int(cell), GRID) for cell in chosen]
    pairs = itertools.combinations(places, 2)
    return all(abs(y - v) + abs(x - u) > 1 for (y, x), (v, u) in pairs)


def painted(scene: scenes.Scene, chosen) -> np.ndarray:
    """Returns the picture [16, 16, 3], uint8, of a scene whose squares are these cells."""
    colours = np.zeros(GRID * GRID, np.int32)
    colours[np.array(chosen)] = 1 + list(scenes.COLOURS).index(scene.colour)
    small = PALETTE[colours.reshape(GRID, GRID)]
    return small.repeat(CELL, axis=0).repeat(CELL, axis=1)


def draw(scene: scenes.Scene, rng: np.random.Generator) -> np.ndarray:
    """Returns a picture [16, 16, 3], uint8: the scene's squares in its half, at random.

    Every choice of cells that do not touch is as likely.
    """
    free = cells(scene)
    while not apart(chosen := rng.choice(free, scene.count, replace=False)):
        pass
    return painted(scene, chosen)


def every(scene: scenes.Scene) -> list[np.ndarray]:
    """Returns all the different pictures of a scene."""
    choices = itertools.combinations(cells(scene).tolist(), scene.count)
    return [painted(scene, chosen) for chosen in choices if apart(chosen)]
