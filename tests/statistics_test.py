"""Intervals against closed forms, pass@k and maj@k by hand, AUP's published vectors."""

import itertools
import math

import numpy as np
import pytest

from dllm_jax import statistics

# ---- Scores of problems ------------------------------------------------------------------


def test_pass_at_k_by_hand():
    right = np.array([[True, False, False], [False, False, False], [True, True, True]])
    assert statistics.pass_at(right, 1) == pytest.approx([1 / 3, 0, 1])
    assert statistics.pass_at(right, 2) == pytest.approx([2 / 3, 0, 1])
    assert statistics.pass_at(right, 3) == pytest.approx([1, 0, 1])


def test_pass_at_k_is_the_mean_over_all_sets_of_k_answers():
    right = np.random.default_rng(3).random((5, 6)) < 0.4
    for k in range(1, 7):
        sets = [*itertools.combinations(range(6), k)]
        whole = [np.mean([row[list(taken)].any() for taken in sets]) for row in right]
        assert statistics.pass_at(right, k) == pytest.approx(whole)


MAJORITY = [  # what the answers say, which are right, k: the share of votes won
    ([0, 0, 1], [1, 1, 0], 3, 1.0),
    ([0, 1, 1], [1, 0, 0], 3, 0.0),
    ([0, 1, 2], [1, 0, 0], 3, 1 / 3),  # all lead
    ([0, 0, 1, 1], [0, 0, 1, 1], 4, 0.5),
    ([-1, -1, 0], [0, 0, 1], 3, 1.0),  # who says nothing has no vote
    ([-1, -1], [0, 0], 2, 0.0),
    ([0, 0, 0], [1, 1, 1], 2, 1.0),
    ([0], [1], 1, 1.0),
]


@pytest.mark.parametrize(("said", "right", "k", "want"), MAJORITY)
def test_majority_by_hand(said, right, k, want):
    got = statistics.majority_at(np.array([said]), np.array([right], bool), k)
    assert got == pytest.approx([want])


def test_majority_is_near_the_mean_over_all_sets_and_that_of_one_is_pass_at_1():
    said, right = np.array([[0, 0, 1, 1, 2]]), np.array([[0, 0, 1, 1, 0]], bool)
    sets = [np.array(x) for x in itertools.combinations(range(5), 3)]
    whole = statistics.majority_at
    exact = np.mean([whole(said[:, x], right[:, x], 3)[0] for x in sets])
    assert whole(said, right, 3)[0] == pytest.approx(exact, abs=0.05)
    assert whole(said, right, 1)[0] == pytest.approx(0.4, abs=0.05)
    assert (whole(said, right, 3) == whole(said, right, 3)).all()


# ---- Intervals ---------------------------------------------------------------------------


def test_wilsons_interval():
    assert statistics.wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    ends = statistics.wilson(0.0, 10)[0], statistics.wilson(1.0, 10)[1]
    assert ends == pytest.approx((0, 1))
    assert statistics.wilson(0.0, 10)[1] == pytest.approx(3.8415 / 13.8415, abs=1e-4)
    low, high = statistics.wilson(0.75, 500)  # MATH500: 3.8 points to each side
    assert (high - low) / 2 == pytest.approx(0.038, abs=5e-4)
    assert statistics.wilson(0.1, 30) == pytest.approx((0.035, 0.256), abs=1e-3)


@pytest.mark.parametrize("n", [1, 5, 30, 299])
def test_the_betas_interval_where_its_quantiles_have_a_closed_form(n):
    none = [1 - (1 - q) ** (1 / (n + 1)) for q in (0.025, 0.975)]
    assert statistics.beta(0, n) == pytest.approx(none, abs=1e-4)
    assert statistics.beta(n, n) == pytest.approx([1 - x for x in none[::-1]], abs=1e-4)


def test_the_betas_interval_is_the_binomials():
    """P(Beta(1 + c, 1 + n - c) <= x) is P(Bin(n + 1, x) > c), for whole numbers."""
    n, c = 12, 5
    for x, mass in zip(statistics.beta(c, n), (0.025, 0.975), strict=True):
        terms = [
            math.comb(n + 1, i) * x**i * (1 - x) ** (n + 1 - i)
            for i in range(c + 1, n + 2)
        ]
        assert sum(terms) == pytest.approx(mass, abs=1e-4)


def test_the_clustered_interval_by_hand():
    low, high = statistics.clustered(np.array([0.0, 0.5, 1.0, 0.5]))
    half = 1.959964 * math.sqrt((0.25 + 0.25) / 3) / 2
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half))


def test_the_bootstrap_of_a_mean_is_near_the_normal_approximation():
    gain_n = np.random.default_rng(0).normal(1.0, 2.0, 400)
    got = statistics.mean(gain_n)
    half = 1.96 * gain_n.std() / 20  # good for 400
    assert got.value == pytest.approx(gain_n.mean())
    assert got.low == pytest.approx(gain_n.mean() - half, abs=0.03)
    assert got.high == pytest.approx(gain_n.mean() + half, abs=0.03)
    assert statistics.mean(gain_n[:1])[1:3] == (None, None)
    assert statistics.mean(gain_n) == got


def test_a_quotient_of_sums_is_not_the_mean_of_quotients():
    above, below = np.array([10.0, 1.0, 30.0]), np.array([10.0, 2.0, 10.0])
    got = statistics.ratio(above, below)
    assert got.value == pytest.approx(41 / 22)
    assert got.low < got.value < got.high
    assert statistics.ratio([0.0, 0.0], [0.0, 0.0]).value == 0


def test_problems_that_were_not_asked_are_in_no_draw_of_a_quotient():
    asked = np.array([24.0, 20.0, 30.0]), np.array([10.0, 10.0, 12.0])
    more = (np.concatenate([x, np.zeros(4)]) for x in asked)
    assert statistics.ratio(*more) == statistics.ratio(*asked)
    assert statistics.ratio([24.0, 0.0], [10.0, 0.0])[:3] == (2.4, None, None)


@pytest.mark.parametrize("n", [1, 3, 50])
def test_differences_that_are_all_alike_have_no_interval(n):
    value_n = np.random.default_rng(1).random(n)
    assert statistics.paired(value_n, value_n)[:3] == (0, None, None)
    value, low, high, _ = statistics.paired(value_n, value_n + 1)
    assert value == pytest.approx(1) and low is None and high is None


def test_differences_are_bootstrapped_in_pairs():
    value_n = np.random.default_rng(1).random(50)
    other_n = value_n + np.arange(50) / 50
    got = statistics.paired(value_n, other_n)
    assert got == statistics.mean(other_n - value_n) and got.low < got.value < got.high


def test_which_interval_a_share_gets():
    rng = np.random.default_rng(0)
    for n, samples, method in (
        (30, 1, "beta"),
        (30, 4, "beta"),
        (500, 1, "wilson"),
        (500, 4, "clustered"),
    ):
        value_n = (rng.random((n, samples)) < 0.6).mean(axis=1)
        got = statistics.share(value_n, samples)
        assert got.method == method and 0 <= got.low < got.value < got.high <= 1


@pytest.mark.parametrize(
    ("n", "samples", "right", "method"),
    [
        (299, 1, 150, "beta"),
        (300, 1, 150, "wilson"),
        (299, 2, 150, "beta"),
        (300, 2, 29, "beta"),  # and so few wrong ones
        (300, 2, 271, "beta"),
        (300, 2, 30, "clustered"),
        (300, 2, 269, "clustered"),
    ],
)
def test_of_how_few_a_share_has_the_betas_interval(n, samples, right, method):
    got = statistics.share((np.arange(n) < right).astype(float), samples)
    assert got.method == method and got.value == pytest.approx(right / n)


def test_an_interval_holds_what_was_measured():
    for n, value in itertools.product((5, 300, 400), (0.0, 1.0)):
        got = statistics.share(np.full(n, value), 1)
        assert got.low <= value <= got.high and got.high - got.low > 0.005


def test_answers_that_are_alike_tell_no_more_than_one():
    same = np.array([0.0, 1.0] * 15)
    assert statistics.effective(same, 8) == 30
    assert statistics.effective(np.full(30, 1.0), 8) == 30
    # Of 0.1 three times rounding makes a variance.
    assert statistics.effective(np.full(3, 0.1), 10) == 3
    rng = np.random.default_rng(0)
    free = (rng.random((200, 8)) < 0.5).mean(axis=1)
    assert 1000 < statistics.effective(free, 8) <= 1600


def test_a_right_answer_more_does_not_make_many_of_few_problems():
    """As of AIME: 30 problems with 20 answers each."""
    none_n, one_n = np.zeros(30), np.array([1 / 20] + 29 * [0.0])
    none, one, rest = (statistics.share(x, 20) for x in (none_n, one_n, 1 - one_n))
    assert none.high / 3 < one.high < none.high
    assert (rest.low, rest.high) == pytest.approx((1 - one.high, 1 - one.low))


@pytest.mark.parametrize("share", [0.02, 0.98])
def test_intervals_cover_the_truth_of_few_right_answers_that_are_alike(share):
    """Answers to a problem are correlated by 0.5."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(300):
        hard_n = rng.beta(share, 1 - share, 30)
        got = statistics.share(rng.binomial(20, hard_n) / 20, 20)
        covered += got.low <= share <= got.high
    assert covered >= 0.92 * 300


@pytest.mark.parametrize(("n", "samples"), [(30, 1), (30, 4), (400, 1), (400, 3)])
def test_intervals_cover_the_truth_of_problems_that_differ(n, samples):
    """Problems of their own difficulty, right in 0.3 to 0.9 of cases: 0.6 on average."""
    rng, covered = np.random.default_rng(n + samples), 0
    for _ in range(100):
        hard_n1 = rng.uniform(0.3, 0.9, (n, 1))
        got = statistics.share(
            (rng.random((n, samples)) < hard_n1).mean(axis=1), samples
        )
        covered += got.low <= 0.6 <= got.high
    assert covered >= 88


@pytest.mark.parametrize("truth", [0.004, 0.997])
def test_intervals_cover_shares_of_what_is_rare(truth):
    """Clustered ones would cover 83 and 86 % of 1,500, the Beta's 96."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
        hard_n = rng.beta(2 * truth, 2 * (1 - truth), 320)
        got = statistics.share(rng.binomial(4, hard_n) / 4, 4)
        assert got.method in ("beta", "wilson")  # this where none was
        covered += got.low <= truth <= got.high
    assert covered >= 185


def test_students_quantile():
    known = {1: 12.7062, 2: 4.3027, 4: 2.7764, 9: 2.2622, 29: 2.0452, 298: 1.9680}
    for freedom, t in known.items():
        assert statistics.student(freedom) == pytest.approx(t, abs=1e-4)


def test_few_problems_with_many_answers_are_known_no_better_than_they_are():
    """Five of them, each with a chance of its own; without Student's t 89 % are covered."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(100):
        hard_n = rng.beta(10, 10, 5)
        got = statistics.share(rng.binomial(32, hard_n) / 32, 32)
        covered += got.low <= 0.5 <= got.high
    assert covered >= 93


# ---- AUP ---------------------------------------------------------------------------------

PUBLISHED = [(1.0, 74.02), (9.11, 73.09)]  # d3LLM-LLaDA on GSM8K


def test_the_published_values_of_aup():
    assert statistics.aup(PUBLISHED, 74.98) == pytest.approx(637.7, abs=0.05)
    assert statistics.aup(PUBLISHED[::-1], 90.3) == pytest.approx(416.10, abs=0.05)
    assert statistics.aup([(1.0, 74.1)]) == pytest.approx(74.1)
    assert statistics.aup([(2.0, 74.1)], 90.0) == pytest.approx(148.2)


def test_points_far_below_the_first_earn_no_area_and_a_last_one_is_refused():
    low = (4.0, 60.0)
    assert statistics.aup([*PUBLISHED, low], 74.98) == pytest.approx(
        statistics.aup(PUBLISHED, 74.98)
    )
    with pytest.raises(ValueError, match="right in 60.00 %, more than 5 points below"):
        statistics.aup([*PUBLISHED, (10.0, 60.0)])


def test_the_best_of_a_sweep_is_its_own_where_no_other_is_named():
    assert statistics.aup(PUBLISHED) == statistics.aup(PUBLISHED, 74.02)


@pytest.mark.parametrize("n", [10, 30, 300])
def test_a_bootstrap_of_few_problems_is_as_wide_as_students(n):
    value_n = np.random.default_rng(1).normal(size=n)
    half = statistics.student(n - 1) * np.std(value_n, ddof=1) / n**0.5
    _, low, high, _ = statistics.mean(value_n)
    assert (high - low) / 2 == pytest.approx(half, rel=0.1)


def test_intervals_of_differences_on_few_problems_hold_the_truth(monkeypatch):
    monkeypatch.setattr(statistics, "DRAWS", 1000)
    rng, held = np.random.default_rng(0), 0
    for _ in range(300):
        gain = statistics.paired(np.zeros(8), rng.normal(0.2, 1, 8))
        held += gain.low <= 0.2 <= gain.high
    assert held / 300 > 0.92  # 0.86 with the percentiles 2.5 and 97.5
