"""Problems that examples make: their own programs pass their tests."""

import numpy as np
import pytest

from dllm_jax import data, images
from dllm_jax.models import hf
from dllm_jax.models.vision import codes, magvit
from dllm_jax.rl import rewards
from dllm_jax.rl.config import RewardConfig
from dllm_jax.rl.rewards import code, sandbox, scenes
from examples.functions import make
from examples.scenes import drawer, tokenizer


@pytest.fixture(scope="module", autouse=True)
def close_jails():
    yield
    sandbox.close()


def test_functions_of_twenty_families_pass_their_own_tests():
    rng = np.random.default_rng(0)
    assert len(make.FAMILIES) == 20
    rows = [make.problem(rng, i, 3, 5, wrong=0.0) for i in range(20)]
    wrong = [make.problem(rng, i, 3, 5, wrong=1.0) for i in range(20)]
    grader = rewards.grader("code", RewardConfig(seconds=10.0))
    grader.begin()
    problems = [data.Problem([1], row["question"], "", row) for row in rows]
    for problem in problems:
        grader.check(problem)
    texts = [row["response"] for row in rows]
    assert (grader.grade(texts, problems, None).reward_n == 1).all()
    texts = [row["response"] for row in wrong]
    assert (grader.grade(texts, problems, None).reward_n < 1).all()


def test_their_problems_differ_and_are_drawn_by_the_seed():
    rows, again = (make.problems(np.random.default_rng(1), 0.3) for _ in range(2))
    assert rows == again and len({row["question"] for row in rows}) == len(rows) == 272
    responses = [code.extract(row["response"]) for row in rows]
    assert all(text.startswith("def f(x):\n    return ") for text in responses)


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
