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


def draw(scene: scenes.Scene, rng: np.random.Generator) -> np.ndarray:
    """Returns a picture [16, 16, 3], uint8: the scene's squares in its half, at random.

    Every choice of cells that do not touch is as likely.
    """
    y, x = np.divmod(np.arange(GRID * GRID), GRID)
    low = GRID // 2
    inside = {
        "on the left": x < low,
        "on the right": x >= low,
        "at the top": y < low,
        "at the bottom": y >= low,
    }[scene.place]
    cells = np.flatnonzero(inside)
    while True:
        chosen = rng.choice(cells, scene.count, replace=False)
        pairs = itertools.combinations(chosen, 2)
        if all(abs(x[a] - x[b]) + abs(y[a] - y[b]) > 1 for a, b in pairs):
            break
    colours = np.zeros(GRID * GRID, np.int32)
    colours[chosen] = 1 + list(scenes.COLOURS).index(scene.colour)
    small = PALETTE[colours.reshape(GRID, GRID)]
    return small.repeat(CELL, axis=0).repeat(CELL, axis=1)
