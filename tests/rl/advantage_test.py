"""Advantages against hand-computed tables, dLLM-RL's, and their identities."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dllm_jax.rl import advantage
from tests.rl import dllm_rl


@pytest.mark.parametrize(
    ("solved", "right", "wrong"),
    [(4, 1.7321, -0.5774), (8, 1, -1), (12, 0.5774, -1.7321), (0, 0, 0), (16, 0, 0)],
)
def test_zscores_of_sixteen(solved, right, wrong):
    # Two interleaved groups, the other unlike this one.
    reward_n = np.zeros(32, np.float32)
    reward_n[0 : 2 * solved : 2] = 1
    reward_n[1:13:2] = 5
    out_n = advantage.relative(reward_n, np.arange(32) % 2, "zscore")[0::2]
    np.testing.assert_allclose(out_n[:solved], right, atol=5e-5)
    np.testing.assert_allclose(out_n[solved:], wrong, atol=5e-5)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, 1e-3, 12345.678])
def test_equal_rewards_have_no_advantage(reward):
    reward_n = np.full(7, reward, np.float32)  # whose mean may round
    for kind in advantage.BASELINES:
        out_n = advantage.relative(reward_n, np.zeros(7), kind)
        np.testing.assert_array_equal(out_n, 0)


@pytest.mark.parametrize(
    ("scale", "offset"), [(1e30, 0), (1e-30, 0), (1 / 16, 1e6), (3, -7)]
)
@pytest.mark.parametrize("kind", ["zscore", "center", "loo"])
def test_rewards_of_any_size_are_compared(kind, scale, offset):
    """Whatever f32 makes of their squares, and of the mean of large ones."""
    steps = np.array([1, 0, 0, 2, 0.0])
    reward_n = (offset + scale * steps).astype(np.float32)
    found = advantage.relative(reward_n, np.zeros(5), kind) / scale
    want = {
        "zscore": (steps - 0.6) / np.sqrt(0.64) / scale,
        "center": steps - 0.6,
        "loo": (steps - 0.6) * 5 / 4,
    }
    np.testing.assert_allclose(found, want[kind], rtol=1e-5)


def test_baselines_of_two_groups():
    reward_n, group_n = np.array([1, 5, 0, 0, 7, 2.0]), np.array([0, 1, 0, 0, 1, 0])
    center = [0.25, -1, -0.75, -0.75, 1, 1.25]  # means 3/4 and 6
    others = [1 / 3, -2, -1, -1, 2, 5 / 3]  # means of the others: 2/3, 7, 1, 1, 5, 1/3
    std = np.sqrt((0.25**2 + 2 * 0.75**2 + 1.25**2) / 4)
    for kind, expected in (
        ("center", center),
        ("loo", others),
        ("zscore", center / np.where(group_n == 0, std, 1)),
        ("none", reward_n),
    ):
        found = advantage.relative(reward_n, group_n, kind)
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=kind)


def test_speed_is_normalised_on_its_own():
    """However small the spread of the speeds, it counts as much as that of the rewards."""
    reward_n, speed_n = np.array([0, 0, 1, 1.0]), np.array([1, 1.01, 1, 1.01])
    rest = np.array([0.0, 1]), np.array([5, 9.0])  # a second group, which is dropped
    reward_n, speed_n = map(np.append, (reward_n, speed_n), rest)
    group_n, keep_n = np.array([0, 0, 0, 0, 1, 1]), np.arange(6) < 4
    given = reward_n, speed_n, group_n, keep_n, "zscore"
    # z-scores (-1, -1, 1, 1) and (-1, 1, -1, 1) add to (-2, 0, 0, 2), of std sqrt(2)
    found = advantage.combined(*given, speed=1.0)[:4]
    np.testing.assert_allclose(found, np.array([-1, 0, 0, 1]) * np.sqrt(2), rtol=1e-5)
    # with half the weight to (-3, -1, 1, 3) / 2, of std sqrt(5) / 2
    found = advantage.combined(*given, speed=0.5)[:4]
    np.testing.assert_allclose(found, np.array([-3, -1, 1, 3]) / np.sqrt(5), rtol=1e-5)
    np.testing.assert_array_equal(
        advantage.combined(*given, speed=0.0),
        advantage.relative(reward_n, group_n, "zscore"),
    )


def solvable(correct_n, group_n):
    """Returns what the default filter keeps of binary rewards."""
    none_n = np.zeros(len(correct_n))
    right_n = correct_n >= 1
    return advantage.kept(correct_n, right_n, none_n, group_n, "solvable", 0.2, 0.8)


def test_wd1_weighs_by_two_softmaxes():
    rewards = np.array([1.0, 0, 0.5, 0])
    up, down = np.exp(rewards - 0.375), np.exp(0.375 - rewards)
    want = up / up.sum() - down / down.sum()
    np.testing.assert_allclose(advantage.wd1(rewards), want, rtol=1e-6)
    # However large rewards are: e to 2,000 is no number.
    np.testing.assert_allclose(advantage.wd1(np.array([2000.0, 0])), [1, -1])
    np.testing.assert_allclose(advantage.wd1(np.array([-2000.0, 0])), [-1, 1])


def test_speed_counts_as_much_as_its_weight():
    reward_n, speed_n = np.array([0, 1, 1.0]), np.array([1, 2, 4.0])
    one = np.zeros(3), np.ones(3, bool)
    found = advantage.combined(reward_n, speed_n, *one, "zscore", speed=0.5)
    want = advantage.zscore(advantage.zscore(reward_n) + advantage.zscore(speed_n) / 2)
    np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.parametrize("right", range(1, 8))
@pytest.mark.parametrize("kind", ["zscore", "center"])
def test_speed_that_outweighs_what_is_right_leaves_nothing_and_no_rounding(kind, right):
    reward_n = (np.arange(8) < right).astype(np.float32)
    speed_n, one = np.where(reward_n, 1 / 3, 4 / 3), (np.zeros(8), np.ones(8, bool))
    found = advantage.combined(reward_n, speed_n, *one, kind, speed=1.0)
    np.testing.assert_array_equal(found, 0)
    less = advantage.combined(reward_n, speed_n, *one, kind, speed=0.999)
    np.testing.assert_allclose(less, advantage.zscore(reward_n), rtol=1e-3)


def test_what_is_dropped_has_the_unit_of_what_is_kept():
    """As a value network learns from both."""
    reward_n, group_n = np.float32([0, 1, 0, 0]), np.array([0, 0, 1, 1])
    given = reward_n, np.float32([1, 2, 1, 2]), group_n
    kept, dropped = advantage.combined(
        *given, group_n == 0, "zscore", speed=1.0
    ).reshape(2, 2)
    np.testing.assert_allclose(kept, [-1, 1], rtol=1e-6)  # of -2 and 2
    np.testing.assert_allclose(dropped, [-0.5, 0.5], rtol=1e-6)
    none = advantage.combined(*given, group_n < 0, "zscore", speed=1.0)
    np.testing.assert_allclose(none, [-2, 2, -1, 1])
    fast = given[0], np.float32([1, 1, 1, 2]), group_n
    alike = advantage.combined(*fast, np.arange(4) == 0, "zscore", speed=1.0)
    np.testing.assert_allclose(alike, [0, 1, -1, 1])


def test_one_right_answer_and_a_hundredth_of_speed_are_enough():
    mixed, wrong = np.array([0, 1.0]), np.zeros(2)
    assert advantage.paced(mixed, mixed >= 1, np.array([0, 0.01]), 0, 1)
    assert not advantage.paced(mixed, mixed >= 1, np.array([0, 0.009]), 0, 1)
    assert not advantage.paced(wrong, wrong >= 1, np.array([0, 1.0]), 0, 1)


def test_filters():
    reward_n = np.array([0, 0, 0, 0.5, 1, 1, 0, 1, 0, 1])
    speed_n = np.array([1, 2, 1, 2, 1, 2, 3, 3, 1, 1.005])
    groups = np.arange(5)  # all wrong, partly right, all right, twice mixed
    for rule, wanted in (
        ("solvable", [0, 0, 0, 1, 1]),
        ("varied", [0, 1, 0, 1, 1]),
        ("paced", [0, 0, 1, 0, 0]),
    ):
        # A sum of rewards may be below 1 where an answer is right.
        for weight in (1, 0.5):
            given = weight * reward_n, reward_n >= 1, speed_n, np.repeat(groups, 2)
            keep = advantage.kept(*given, rule, 0.2, 0.8)
            np.testing.assert_array_equal(keep, np.repeat(wanted, 2), err_msg=rule)


@pytest.mark.parametrize("kind", [bool, np.float32])
@pytest.mark.parametrize("group", [5, 10, 15, 20, 40])
def test_the_bounds_of_the_solve_rate_are_inclusive(kind, group):
    rates = np.arange(group + 1)  # group k has k correct answers
    correct = (np.arange(group)[None] < rates[:, None]).astype(kind).reshape(-1)
    keep = solvable(correct, np.repeat(rates, group))
    kept = keep.reshape(-1, group)
    assert (kept == kept[:, :1]).all()
    np.testing.assert_array_equal(
        kept[:, 0], (rates >= group // 5) & (rates <= 4 * group // 5)
    )


def test_of_which_nobody_knows_is_in_no_solve_rate():
    right_n = np.array([1, np.nan, np.nan, np.nan, 0, 1, np.nan, np.nan])
    group_n, rest = np.repeat([0, 1], 4), (np.zeros(8), np.arange(8.0))
    for right, rule, kept in (
        (right_n, "solvable", [0, 1]),  # 1 of 1, and 1 of 2
        (np.full(8, np.nan), "solvable", [0, 0]),
        (right_n, "paced", [1, 1]),
        (np.full(8, np.nan), "paced", [0, 0]),
    ):
        keep = advantage.kept(rest[0], right, rest[1], group_n, rule, 0.2, 0.8)
        np.testing.assert_array_equal(keep, np.repeat(kept, 4))


def test_thirteen_of_sixteen_is_too_many():
    correct = np.arange(16) < 13
    assert not solvable(correct, np.zeros(16)).any()


@pytest.mark.parametrize(
    "case",
    dllm_rl.read("rewards/rl_reward_stage.json")["cases"],
    ids=lambda c: c["name"],
)
def test_rewards_and_filter_are_the_references(case):
    sizes = [len(task) for task in case["correctness"]]
    group_n = np.repeat(np.arange(len(sizes)), sizes)
    correct_n = np.concatenate(case["correctness"])
    reward_n = advantage.relative(correct_n.astype(np.float32), group_n, "zscore")
    np.testing.assert_allclose(reward_n, np.concatenate(case["rewards"]), rtol=1e-6)
    keep_n = solvable(correct_n, group_n)
    responses = np.concatenate([task["full_output"] for task in case["tasks"]])
    samples = case["training_samples"]
    assert list(responses[keep_n]) == [sample["response"] for sample in samples]
    np.testing.assert_allclose(
        reward_n[keep_n], [sample["reward"] for sample in samples], rtol=1e-6
    )


# ---- GAE over the steps of a trace ---------------------------------------------------


@pytest.mark.parametrize(
    ("gamma", "lam", "reward", "ret", "adv"),
    [
        (1, 1, [0, 0, 0, 1.5], [1.5, 1.5, 1.5, 1.5], [1.4, 1.3, 1.1, 1.0]),
        (1, 0, [0, 0, 0, 1.5], [1.5, 1.5, 1.5, 1.5], [0.2, 0.3, 0.1, 1.0]),
        (
            0.9,
            0.95,
            [0, 0, 0, 1.5],
            [1.215, 1.35, 1.35, 1.5],
            [1.029275, 1.105, 0.905, 1.0],
        ),
        (
            0.99,
            1,
            [0, 0, 0.6, 1],
            [1.2771, 0.99, 1.59, 1.0],
            [1.1771, 0.79, 1.19, 0.5],
        ),
    ],
)
def test_worked_numbers(gamma, lam, reward, ret, adv):
    """A row between others of other lengths, behind a prompt and before a tail."""
    step_nT = np.array([[0, 1, 2, 2, 3, 9], [0, 0, 1, 9, 9, 9], [0, 5, 4, 3, 2, 1]])
    answer_nT = np.array(
        [[0, 1, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]], bool
    )
    reward_nT, value_nT = np.full((2, 3, 6), 7.0)
    reward_nT[0, 1:5], value_nT[0, 1:5] = reward, [0.1, 0.2, 0.4, 0.5]
    ret_nT, adv_nT = advantage.gae(
        reward_nT, value_nT, step_nT, answer_nT, gamma=gamma, lam=lam
    )
    np.testing.assert_allclose(ret_nT[0, 1:5], ret, rtol=1e-6)
    np.testing.assert_allclose(adv_nT[0, 1:5], adv, rtol=1e-5)
    assert not ret_nT[~answer_nT].any() and not adv_nT[~answer_nT].any()


def test_the_outcome_lies_on_the_last_step():
    step_nT = np.array([[0, 2, 1, 2, 3], [0, 0, 1, 1, 1]])  # and a tail of the block
    answer_nT = np.array([[0, 1, 1, 1, 0], [0, 0, 1, 1, 0]], bool)
    out_nT = advantage.outcome(np.array([0.5, -2.0]), step_nT, answer_nT)
    np.testing.assert_array_equal(out_nT, [[0, 0.5, 0, 0.5, 0], [0, 0, -2, -2, 0]])


def check_gae(*, step_map, response_ids, rewards, rows, case):
    """Asserts that our returns and advantages are those of the reference's rows."""
    step_nL = np.array(step_map) + 1
    is_pad_nL = np.array(response_ids) == case["pad_id"]
    L1 = step_nL.shape[1]
    trained, seq = np.array(rows["p_mask"], bool)[:, -L1:], np.array(rows["seq_ids"])
    # Here the reference counts a sample's first `post_num` pads as its answer, and takes
    # null for none of them; other pads that its rows train have return and advantage 0.
    most = case["post_num"] or 0
    answer_nL = ~is_pad_nL | (np.cumsum(is_pad_nL, axis=1) <= most)

    def whole(name):  # every token is trained in one row
        out_nL = np.zeros(step_nL.shape)
        np.add.at(out_nL, seq, np.where(trained, np.array(rows[name])[:, -L1:], 0))
        return out_nL

    value_nL = whole("old_values")
    if np.ndim(rewards) == 1:
        reward_nL = advantage.outcome(np.array(rewards), step_nL, answer_nL)
    else:
        reward_nL = np.where(answer_nL, rewards, 0)
    out = advantage.gae(
        reward_nL,
        value_nL,
        step_nL,
        answer_nL,
        gamma=case["gamma"],
        lam=case["lambda"],
    )
    for ours_nL, name in zip(out, ("Return", "adv"), strict=True):
        np.testing.assert_allclose(
            np.where(trained, ours_nL[seq], 0),
            np.array(rows[name])[:, -L1:],
            rtol=1e-5,
            atol=2e-5,
        )


@pytest.mark.parametrize(
    "case",
    dllm_rl.read("dataprep/sdar_value_gae.json")["cases"],
    ids=lambda c: c["name"],
)
def test_gae_is_the_references(case):
    if "raises" in case:
        pytest.skip(f"the reference fails here: {case['raises'][:60]}")
    check_gae(
        step_map=case["step_map"],
        response_ids=case["response_ids"],
        rewards=case["rewards"],
        rows=case,
        case=case,
    )


def test_gae_of_a_scored_batch_is_the_references():
    case = dllm_rl.read("sdar_value/value/case.json")
    rows = dllm_rl.tensors("sdar_value/value/goldens.safetensors")
    check_gae(
        step_map=rows["step_map_all"],
        response_ids=rows["resp_input_ids_all"],
        rewards=[sample["reward"] for sample in case["samples"]],
        rows=rows,
        case=case,
    )


@st.composite
def episodes(draw):
    """Returns (reward_n, reward_nT, value_nT, step_nT, answer_nT)."""
    n, T = draw(st.integers(1, 4)), draw(st.integers(2, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    step_nT = rng.integers(1, draw(st.integers(2, 9)), (n, T))
    answer_nT = rng.random((n, T)) < 0.7
    answer_nT[:, 0] = True
    return rng.normal(size=n), *rng.normal(size=(2, n, T)), step_nT, answer_nT


@given(episodes())
def test_without_discount_every_return_is_the_outcome(episode):
    reward_n, _, value_nT, step_nT, answer_nT = episode
    ret_nT, adv_nT = advantage.gae(
        advantage.outcome(reward_n, step_nT, answer_nT),
        value_nT,
        step_nT,
        answer_nT,
        gamma=1.0,
        lam=1.0,
    )
    expected_nT = np.where(answer_nT, reward_n[:, None], 0)
    np.testing.assert_allclose(ret_nT, expected_nT, atol=1e-5)
    np.testing.assert_allclose(
        adv_nT, np.where(answer_nT, expected_nT - value_nT, 0), atol=1e-5
    )


@given(episodes(), st.floats(0, 1), st.floats(0, 1))
def test_step_means_follow_the_recursion(episode, gamma, lam):
    """mean over a step of A_j is A*_t = sum_l (gamma lam)^l delta_{t+l}; of R_j, R*_t."""
    _, reward_nT, value_nT, step_nT, answer_nT = episode
    ret_nT, adv_nT = advantage.gae(
        reward_nT, value_nT, step_nT, answer_nT, gamma=gamma, lam=lam
    )
    for i in range(len(step_nT)):
        steps = np.unique(step_nT[i, answer_nT[i]])
        inside = [answer_nT[i] & (step_nT[i] == step) for step in steps]
        r, v, ret, adv = (
            np.array([x_nT[i, at].mean() for at in inside])
            for x_nT in (reward_nT, value_nT, ret_nT, adv_nT)
        )
        delta = r - v + gamma * np.append(v[1:], 0)
        for t in range(len(steps)):
            ahead = np.arange(len(steps) - t)
            np.testing.assert_allclose(
                adv[t], ((gamma * lam) ** ahead * delta[t:]).sum(), atol=1e-5
            )
            np.testing.assert_allclose(ret[t], (gamma**ahead * r[t:]).sum(), atol=1e-5)


def test_explained_variance():
    answer_nT = np.array([[True, True, True, False]])
    ret_nT = np.array([[1.0, 2.0, 3.0, 50.0]])
    assert advantage.explained_variance(ret_nT, ret_nT, answer_nT) == 1
    assert advantage.explained_variance(0 * ret_nT, ret_nT, answer_nT) == 0
    # Small returns are explained, or not, as large ones are.
    value_nT = ret_nT.copy()
    value_nT[0, 0] += 0.5
    told = advantage.explained_variance(value_nT, ret_nT, answer_nT)
    small = advantage.explained_variance(1e-6 * value_nT, 1e-6 * ret_nT, answer_nT)
    assert 0.5 < told < 1 and small == pytest.approx(told)


def test_where_returns_are_all_the_same_nothing_is_explained():
    answer_nT = np.array([[True, True, True, False]])
    constant, values = np.full((1, 4), 0.1, np.float32), np.array([[0, 1, 2, 3.0]])
    for value_nT in (constant, values):
        assert advantage.explained_variance(value_nT, constant, answer_nT) == 0
        assert advantage.explained_variance(value_nT, values, ~answer_nT) == 0
    assert advantage.explained_variance(values, values, np.zeros((1, 4), bool)) == 0


def test_length_costs_from_the_tail_on():
    len_n = np.array([0, 16, 17, 18, 20, 30])
    found = advantage.overlong(len_n, 20, 4)
    np.testing.assert_allclose(found, [0, 0, 0.25, 0.5, 1, 1])


def test_explained_variance_by_thirds_of_the_answers():
    answer_nT = np.zeros((2, 12), bool)
    answer_nT[0, 3:12], answer_nT[1, 1:4] = True, True
    rng = np.random.default_rng(0)
    ret_nT, value_nT = rng.normal(size=(2, 2, 12))
    thirds = [(slice(3, 6), 1), (slice(6, 9), 2), (slice(9, 12), 3)]
    found = advantage.by_thirds(value_nT, ret_nT, answer_nT)
    for name, (part, single) in zip(("first", "middle", "last"), thirds, strict=True):
        ret = np.append(ret_nT[0, part], ret_nT[1, single])
        value = np.append(value_nT[0, part], value_nT[1, single])
        want = 1 - (ret - value).var() / ret.var()
        assert found[f"explained_variance_{name}"] == pytest.approx(want)
    # An answer of two tokens has no last third of its own.
    two = np.arange(12)[None] < 2
    told = advantage.by_thirds(value_nT[:1], ret_nT[:1], two)
    assert told.keys() == {"explained_variance_first", "explained_variance_middle"}


def test_whitening_is_of_the_supervised_tokens():
    rng = np.random.default_rng(1)
    adv_nT, seen_nT = rng.normal(3, 5, (4, 9)), rng.random((4, 9)) < 0.5
    found = advantage.whitened(adv_nT, seen_nT)
    assert found[seen_nT].mean() == pytest.approx(0, abs=1e-6)
    assert found[seen_nT].std() == pytest.approx(1, abs=1e-5)
    assert not found[~seen_nT].any()
    assert np.corrcoef(found[seen_nT], adv_nT[seen_nT])[0, 1] == pytest.approx(1)
    for same in (7.0, 0.1):  # the mean of 0.1s is rounded
        alike_nT = np.full((11, 91), same, np.float32)
        assert not advantage.whitened(alike_nT, np.ones(alike_nT.shape, bool)).any()
    assert not advantage.whitened(adv_nT, np.zeros(adv_nT.shape, bool)).any()
    tiny = advantage.whitened(1e-9 * adv_nT, seen_nT)
    np.testing.assert_allclose(tiny, found, atol=1e-5)
