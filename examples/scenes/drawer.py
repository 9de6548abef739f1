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
    """Returns a picture [32, 32, 3], uint8: the scene's shapes in cells of its half."""
    y, x = np.mgrid[:GRID, :GRID]
    low = GRID // 2
    inside = {
        "on the left": x < low,
        "on the right": x >= low,
        "at the top": y < low,
        "at the bottom": y >= low,
    }[scene.place]
    cells = rng.choice(np.flatnonzero(inside), scene.count, replace=False)
    return filled({int(cell): (scene.colour, scene.shape) for cell in cells})


def crowd(rng: np.random.Generator) -> np.ndarray:
    """Returns a picture of which about half of the cells have any shape of any colour."""
    kinds = rng.integers(0, 2 * len(KINDS), GRID * GRID).tolist()
    return filled({cell: KINDS[k] for cell, k in enumerate(kinds) if k < len(KINDS)})


def filled(cells: dict[int, tuple[str, str]]) -> np.ndarray:
    """Returns a picture of {cell, row after row: (colour, shape)}."""
    rgb = np.full((SIDE, SIDE, 3), scenes.WHITE, np.uint8)
    for cell, (colour, shape) in cells.items():
        top, left = cell // GRID * CELL, cell % GRID * CELL
        stamp = scenes.outline(shape, WIDTH)
        rgb[top : top + WIDTH, left : left + WIDTH][stamp] = scenes.COLOURS[colour]
    return rgb
