"""The checker of scenes agrees with who draws them; JPEG's sizes."""

import os

import numpy as np
import pytest

from dllm_jax.data import Problem
from dllm_jax.rl import rewards
from dllm_jax.rl.config import RewardConfig
from dllm_jax.rl.rewards import scenes

COUNT = int(os.environ.get("SCENES", "1000"))


def test_the_checker_agrees_with_the_drawer():
    rng, names = np.random.default_rng(0), list(scenes.ALL)
    for _ in range(COUNT):
        right, other = rng.choice(len(names), 2, replace=False)
        rgb = scenes.draw(scenes.ALL[names[right]], rng)
        assert scenes.grade([rgb], [names[right]]) == [1.0], names[right]
        one, two = scenes.ALL[names[right]], scenes.ALL[names[other]]
        if (one.count, one.colour, one.shape) != (two.count, two.colour, two.shape):
            assert scenes.grade([rgb], [names[other]]) == [0.0], (names[right], two)


@pytest.mark.parametrize("place, opposite", [(0, 1), (1, 0), (2, 3), (3, 2)])
def test_a_place_is_not_its_opposite(place, opposite):
    rng = np.random.default_rng(1)
    scene = scenes.Scene(2, "red", "circle", scenes.PLACES[place])
    wrong = scenes.Scene(2, "red", "circle", scenes.PLACES[opposite])
    for _ in range(50):
        rgb = scenes.draw(scene, rng)
        assert scenes.grade([rgb, rgb], [str(scene), str(wrong)]) == [1.0, 0.0]


def test_what_is_no_scene_is_wrong():
    rng = np.random.default_rng(2)
    gold = "one red circle on the left"
    rgb = scenes.draw(scenes.ALL[gold], rng)
    mixed = rgb.copy()
    mixed[50:62, 40:52] = scenes.COLOURS["blue"]
    noise = rng.integers(0, 256, rgb.shape, dtype=np.uint8)
    blank = np.full_like(rgb, 255)
    assert scenes.grade([rgb, mixed, noise, blank], [gold] * 4) == [1.0, 0.0, 0.0, 0.0]
    # A rough picture still counts.
    rough = np.clip(rgb + rng.normal(0, 15, rgb.shape), 0, 255).astype(np.uint8)
    assert scenes.grade([rough], [gold]) == [1.0]
    for bad in ("", "one red circle", "four red circles on the left"):
        with pytest.raises(ValueError, match="is no scene"):
            scenes.check(bad)


def test_jpeg_pays_for_plain_pictures():
    plain = np.full((64, 64, 3), 200, np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, plain.shape, dtype=np.uint8)
    assert 0 <= scenes.compactness(noise) < 0.8 < scenes.compactness(plain) <= 1
    small = scenes.compactness(noise[:8, :8])
    assert 0 < small < scenes.compactness(plain[:8, :8])
    problems = [Problem([1], "a", "")] * 2
    more = rewards.grader("jpeg", RewardConfig(), answers="image").grade(
        [plain, noise], problems, None
    )
    less = rewards.grader("jpeg:-1", RewardConfig(), answers="image").grade(
        [plain, noise], problems, None
    )
    assert more.reward_n[0] > more.reward_n[1]
    np.testing.assert_allclose(less.reward_n, -more.reward_n)


def test_a_judge_of_texts_judges_no_image():
    with pytest.raises(ValueError, match="'math' judges no image, .* scene, jpeg"):
        rewards.grader("math", RewardConfig(), answers="image")
    with pytest.raises(ValueError, match="'scene' judges no text"):
        rewards.grader("scene", RewardConfig())
    # Nor is it asked to, of a run that learns from examples alone.
    assert rewards.grader("scene", RewardConfig(), answers="").judges == ("image",)
    own = "tests.rl.rewards.scenes_test:bright"
    judged = rewards.grader(f"{own},length:0.1", RewardConfig(), answers="image")
    assert judged.gold is False


def bright(pictures, problems, trace):
    """Returns how bright each picture is: somebody's own reward."""
    return [x.mean() / 255 for x in pictures]
