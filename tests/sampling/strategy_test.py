"""Which masked positions a strategy takes: by hand, by property, by golden."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.logits import Draw
from dllm_jax.sampling.strategy import STRATEGIES
from tests.goldens import reader

CFG = SamplerConfig(threshold=0.5, entropy_bound=0.35)
B, W = 3, 6


def with_jit(name):
    """Returns the strategy as one jitted function of arrays."""
    return jax.jit(STRATEGIES[name].take, static_argnames="cfg")


TAKE = {
    False: {name: strategy.take for name, strategy in STRATEGIES.items()},
    True: {name: with_jit(name) for name in STRATEGIES},
}
both = pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
every = pytest.mark.parametrize("name", sorted(STRATEGIES))


def take(name, masked_BW, quota_B, conf_BW=None, entropy_BW=None, *, jitted, cfg=CFG):
    """Returns what the strategy takes, as a numpy array."""
    masked_BW = np.asarray(masked_BW, bool)
    zero_BW = np.zeros(masked_BW.shape, np.float32)
    draw = Draw(
        token_BW=zero_BW.astype(np.int32),
        logp_BW=zero_BW,
        conf_BW=zero_BW if conf_BW is None else np.asarray(conf_BW, np.float32),
        entropy_BW=zero_BW if entropy_BW is None else np.asarray(entropy_BW, "f"),
        score_BW=zero_BW if conf_BW is None else np.asarray(conf_BW, np.float32),
        sure_BW=zero_BW if conf_BW is None else np.asarray(conf_BW, np.float32),
    )
    args = (draw, masked_BW, np.asarray(quota_B, np.int32))
    return np.asarray(TAKE[jitted][name](*jax.tree.map(jnp.asarray, args), cfg=cfg))


@both
@pytest.mark.parametrize(
    "name, masked, quota, conf, expected",
    [
        ("sequential", "011011", 1, [0, 0, 9, 0, 0, 9], "010000"),
        ("sequential", "011011", 3, [0, 0, 9, 0, 0, 9], "011010"),
        ("sequential", "000011", 3, [0, 0, 0, 0, 0, 0], "000011"),
        ("sequential", "000000", 2, [1, 1, 1, 1, 1, 1], "000000"),
        ("static", "111111", 2, [0.1, 0.4, 0.2, 0.3, 0, 0], "010100"),
        (
            "static",
            "101111",
            2,
            [0.1, 0.4, 0.2, 0.3, 0, 0],
            "001100",
        ),  # not a given one
        ("static", "111111", 3, [1, 1, 1, 1, 1, 1], "111000"),  # ties: from the left
        ("static", "011011", 2, [0.2, 0.2, 0.2, 0.2, 0.2, 0.7], "010001"),
        ("static", "000100", 4, [0.9, 0.9, 0.9, 0.0, 0.9, 0.9], "000100"),
        ("dynamic", "111111", 1, [0.6, 0.1, 0.7, 0.5, 0.4, 0.9], "101001"),
        ("dynamic", "111111", 1, [0.5, 0.5, 0.5, 0.5, 0.5, 0.5], "100000"),  # not >
        ("dynamic", "111111", 2, [0.1, 0.2, 0.6, 0.3, 0.1, 0.0], "001100"),
        ("dynamic", "110111", 1, [0.1, 0.2, 0.9, 0.3, 0.1, 0.0], "000100"),
    ],
)
def test_by_hand(name, masked, quota, conf, expected, jitted):
    got_BW = take(name, [[c == "1" for c in masked]], [quota], [conf], jitted=jitted)
    assert "".join("01"[int(x)] for x in got_BW[0]) == expected


@both
@pytest.mark.parametrize(
    "entropy, expected",
    [
        ([0.3, 0.1, 0.2, 0.9], "0110"),  # sums .1 .3 .6: two stay below .35
        ([0.6, 0.5, 9.0, 9.0], "0100"),  # none stays below it: one is taken
        ([0.1, 0.1, 0.1, 0.1], "1110"),  # ties: from the left
        ([0.0, 0.0, 0.0, 0.0], "1111"),
        ([0.35, 0.0, 9.0, 9.0], "0100"),  # reaching the bound is not staying below
    ],
)
def test_entropy_bounded_by_hand(entropy, expected, jitted):
    # The quota has no say, and a given position's entropy does not count.
    for quota in (1, 4):
        got_BW = take(
            "entropy_bounded",
            [[True] * 4 + [False]],
            [quota],
            entropy_BW=[entropy + [0.0]],
            jitted=jitted,
        )
        assert "".join("01"[int(x)] for x in got_BW[0]) == expected + "0"


# Halves and quarters tie often, and sums of 64ths are exact in f32.
confs = hnp.arrays(
    np.float32, (B, W), elements=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
)
entropies = hnp.arrays(
    np.float32, (B, W), elements=st.integers(0, 32).map(lambda n: n / 64)
)
masks = hnp.arrays(bool, (B, W))
quotas = hnp.arrays(np.int32, (B,), elements=st.integers(1, W))


@both
@every
@hypothesis.given(conf=confs, entropy=entropies, masked=masks, quota=quotas)
def test_takes_masked_positions_and_never_none(
    name, conf, entropy, masked, quota, jitted
):
    got = take(name, masked, quota, conf, entropy, jitted=jitted)
    assert not (got & ~masked).any()
    assert (got.any(axis=1) == masked.any(axis=1)).all()


wild = st.sampled_from([0.5, np.nan, np.inf, -np.inf])


@both
@every
@hypothesis.given(
    conf=hnp.arrays(np.float32, (B, W), elements=wild),
    entropy=hnp.arrays(np.float32, (B, W), elements=wild),
    masked=masks,
    quota=quotas,
)
def test_what_is_not_finite_keeps_no_strategy_from_taking(
    name, conf, entropy, masked, quota, jitted
):
    got = take(name, masked, quota, conf, entropy, jitted=jitted)
    assert not (got & ~masked).any()
    assert (got.any(axis=1) == masked.any(axis=1)).all()
    if name == "static":  # what is no number comes last
        for row in range(B):
            first = masked[row] & (conf[row] > 0)  # not of NaN
            assert got[row][first].sum() == min(quota[row], first.sum())


@both
@pytest.mark.parametrize("name", ["sequential", "static"])
@hypothesis.given(conf=confs, masked=masks, quota=quotas)
def test_takes_its_quota_or_what_is_left(name, conf, masked, quota, jitted):
    got = take(name, masked, quota, conf, jitted=jitted)
    assert (got.sum(axis=1) == np.minimum(quota, masked.sum(axis=1))).all()


@both
@hypothesis.given(conf=confs, masked=masks, quota=quotas)
def test_static_takes_the_most_confident_from_the_left(conf, masked, quota, jitted):
    got = take("static", masked, quota, conf, jitted=jitted)
    for row in range(B):
        best = sorted(np.flatnonzero(masked[row]), key=lambda i: (-conf[row, i], i))
        assert set(np.flatnonzero(got[row])) == set(best[: quota[row]])


@both
@hypothesis.given(conf=confs, masked=masks, quota=quotas)
def test_dynamic_is_static_and_all_that_is_sure(conf, masked, quota, jitted):
    static = take("static", masked, quota, conf, jitted=jitted)
    dynamic = take("dynamic", masked, quota, conf, jitted=jitted)
    assert (dynamic >= static).all()
    assert (dynamic == static | masked & (conf > CFG.threshold)).all()


@both
@hypothesis.given(entropy=entropies, masked=masks, quota=quotas)
def test_entropy_bounded_takes_while_the_sum_stays_below(
    entropy, masked, quota, jitted
):
    got = take("entropy_bounded", masked, quota, entropy_BW=entropy, jitted=jitted)
    for row in range(B):
        best = sorted(np.flatnonzero(masked[row]), key=lambda i: (entropy[row, i], i))
        total, count = 0.0, 0
        for i in best:
            total += entropy[row, i]
            count += total < CFG.entropy_bound
        assert set(np.flatnonzero(got[row])) == set(best[: max(count, 1)])


@pytest.mark.parametrize(
    "block, steps, expected",
    [
        (4, 4, (1, 1, 1, 1)),
        (4, 3, (2, 1, 1)),
        (4, 2, (2, 2)),
        (8, 3, (3, 3, 2)),
        (32, 5, (7, 7, 6, 6, 6)),
    ],
)
def test_schedule(block, steps, expected):
    assert SamplerConfig(block=block, steps_per_block=steps).schedule == expected


def test_schedules_of_the_reference():
    compared = 0
    table = reader.read("sampling/transfer_counts.json")
    for case in table["block_sampler"]:
        block, steps = case["block_length"], case["steps"]
        if steps > block:  # the reference idles: steps that unmask nothing
            with pytest.raises(ValueError, match=f"steps_per_block={steps}"):
                SamplerConfig(block=block, steps_per_block=steps)
            continue
        schedule = SamplerConfig(block=block, steps_per_block=steps).schedule
        assert list(schedule) == case["out"]
        compared += 1
    assert compared


@pytest.mark.parametrize(
    "field, value, match",
    [
        ("strategy", "greedy", "dynamic.*entropy_bounded.*sequential.*static"),
        ("steps_per_block", -1, "steps_per_block=-1"),
        ("steps_per_block", 5, "steps_per_block=5"),
        ("block", -1, "block"),
        ("temperature", -1.0, "temperature"),
        ("top_k", -1, "top_k"),
        ("top_p", 0.0, "top_p"),
        ("top_p", 1.5, "top_p"),
        ("top_p_first", True, "top_p_first=True .*top_k=0 and .*top_p=1.0"),
        ("rows", 0, "rows"),
        ("max_new", 0, "max_new"),
        ("max_prompt", 0, "max_prompt"),
    ],
)
def test_bad_configs_are_refused_by_name(field, value, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(CFG, **{field: value})
