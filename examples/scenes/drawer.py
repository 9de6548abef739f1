"""Draws scenes whose shapes stand in the cells of a grid: what the tiny model learns to draw.

A picture is 32 x 32 pixels, 4 x 4 cells of 8; a shape is 7 pixels wide and fills a cell. What
a picture shows is judged by `dllm_jax.rl.rewards.scenes`, which knows of no cells.
"""

import numpy as np

from dllm_jax.rl.rewards import scenes

SIDE, CELL, WIDTH = 32, 8, 7  # pixels: of a picture, a cell and a shape
GRID = SIDE // CELL
KINDS = [(colour, shape) for colour in scenes.COLOURS for shape in scenes.SHAPES]


def draw(scene: scenes.Scene, rng: np.random.Generator) -> np.ndarray:
    """Returns a picture [32, 32, 3], uint8, of a scene, its cells drawn at random."""
    return filled(placed(scene, rng))


def placed(scene: scenes.Scene, rng: np.random.Generator) -> np.ndarray:
    """Returns what each of the 16 cells has, row after row: 0, nothing, or 1 + its kind.

    The scene's shapes stand in cells of its half of the picture.
    """
    y, x = np.mgrid[:GRID, :GRID]
    low = GRID // 2
    inside = {
        "on the left": x < low,
        "on the right": x >= low,
        "at the top": y < low,
        "at the bottom": y >= low,
    }[scene.place]
    cells_N = np.zeros(GRID * GRID, np.int32)
    chosen = rng.choice(np.flatnonzero(inside), scene.count, replace=False)
    cells_N[chosen] = 1 + KINDS.index((scene.colour, scene.shape))
    return cells_N


def crowd(rng: np.random.Generator) -> np.ndarray:
    """Returns cells of which about half have any shape of any colour: see `placed`."""
    cells_N = rng.integers(1, len(KINDS) + 1, GRID * GRID, dtype=np.int32)
    return np.where(rng.random(cells_N.shape) < 0.5, cells_N, 0)


def filled(cells_N: np.ndarray) -> np.ndarray:
    """Returns the picture of cells: see `placed`."""
    rgb = np.full((SIDE, SIDE, 3), scenes.WHITE, np.uint8)
    for cell in np.flatnonzero(cells_N).tolist():
        colour, shape = KINDS[cells_N[cell] - 1]
        top, left = cell // GRID * CELL, cell % GRID * CELL
        stamp = scenes.outline(shape, WIDTH)
        rgb[top : top + WIDTH, left : left + WIDTH][stamp] = scenes.COLOURS[colour]
    return rgb
