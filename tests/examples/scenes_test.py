"""Scenes that an example draws: its checker and its codes agree with the drawer."""

import numpy as np

from dllm_jax import images
from dllm_jax.models import hf
from dllm_jax.models.vision import codes, magvit
from dllm_jax.rl.rewards import scenes
from examples.scenes import drawer, tokenizer


def test_the_checker_agrees_with_the_drawer_of_mosaics():
    rng, names = np.random.default_rng(0), list(drawer.ALL)
    assert len(names) == 48
    for _ in range(10_000):
        right, other = (names[i] for i in rng.choice(len(names), 2, replace=False))
        found = scenes.seen(drawer.draw(drawer.ALL[right], rng))
        assert right in found
        one, two = drawer.ALL[right], drawer.ALL[other]
        if (one.count, one.colour) != (two.count, two.colour):
            assert other not in found, (right, other)


def test_codes_of_mosaics_lose_nothing(tmp_path):
    tokenizer.write(tmp_path / "vq")
    cfg, params = hf.load(tmp_path / "vq")
    assert (cfg.bits, cfg.factor) == (4, 4)
    rng = np.random.default_rng(1)
    drawn = np.stack([drawer.draw(scene, rng) for scene in drawer.ALL.values()])
    codes_BN = magvit.encode(params, np.moveaxis(images.normalized(drawn), 3, 1))
    assert set(np.unique(codes_BN)) == {0, 1, 2, 4, 8}
    made = codes.shown(np.asarray(magvit.decode(params, codes_BN)))
    assert np.abs(made.astype(int) - drawn).max() <= 1
    assert sum(scenes.grade(list(made), list(drawer.ALL))) == 48
