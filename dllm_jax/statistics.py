"""What numbers of an evaluation say, and how far they can be trusted.

Problems are the unit: answers to one problem resemble each other, so an interval is that of
problems drawn anew, however many answers each has (arXiv 2411.00640). Of few problems the
normal approximation is too narrow (arXiv 2503.01747), and a Beta distribution stands in.
Every interval is of 95 %, and every draw is seeded: the same answers give the same numbers.

Letters: s answers to a problem, d draws, c columns.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Z = 1.959964  # of 95 %, two-sided
FEW = 300  # problems below which a share's interval is a Beta's
RARE = 30  # and of right, or wrong, problems, where each has several answers
DOUBT = 2  # problems whose word it is, beside these, that answers to one are all alike
DRAWS, SEED = 10_000, 0
SUBSETS = 1_000  # of answers, for maj@k
CHUNK = 2_000_000  # numbers drawn at once
ALIKE = 1e-9  # numbers that differ by less do so by rounding
FALL = 5.0  # percentage points: settings that lose more accuracy earn no area
STEEP = 3.0  # AUP's alpha: how fast lost accuracy loses weight
OF_NONE = "of none"  # the method of a share of nothing


class Score(NamedTuple):
    """A number, the ends of its 95 % interval (None: not known), and by which method."""

    value: float
    low: float | None
    high: float | None
    method: str


# ---- Scores of problems ------------------------------------------------------------------


def pass_at(right_ns, k: int):
    """Returns pass@k of each of n problems with s answers, k <= s: is one of k right?

    The unbiased estimate 1 - C(s - c, k) / C(s, k) with c right ones (Codex, arXiv
    2107.03374, Eq. 1): [n].
    """
    samples = right_ns.shape[1]
    wrong_n = (~right_ns).sum(axis=1).tolist()
    return np.array([1 - math.comb(x, k) / math.comb(samples, k) for x in wrong_n])


def majority_at(class_ns, right_ns, k: int):
    """Returns maj@k of each of n problems: is what most of k answers say right?

    class_ns: answers that say the same have the same number; -1 says nothing, and has no
    vote. Where several lead, each has its share. The mean over SUBSETS sets of k answers,
    drawn without replacement; of all s there is one set: [n].
    """
    n, samples = right_ns.shape
    rng, rows_d1 = np.random.default_rng(SEED), np.arange(SUBSETS)[:, None]
    out_n = np.zeros(n)
    for i in range(n):
        if k == samples:
            taken_ds = np.ones((1, samples), bool)
        else:
            order_dk = rng.random((SUBSETS, samples)).argsort(axis=1)[:, :k]
            taken_ds = np.zeros((SUBSETS, samples), bool)
            taken_ds[rows_d1, order_dk] = True
        said = [x for x in np.unique(class_ns[i]) if x >= 0]
        if not said:
            continue
        mine_cs = class_ns[i][None] == np.array(said)[:, None]
        votes_dc = taken_ds.astype(int) @ mine_cs.T
        right_c = (mine_cs & right_ns[i][None]).any(axis=1)
        most_d1 = votes_dc.max(axis=1, keepdims=True)
        leads_dc = (votes_dc == most_d1) & (most_d1 > 0)
        won_d = (leads_dc * right_c[None]).sum(axis=1)
        out_n[i] = (won_d / np.maximum(leads_dc.sum(axis=1), 1)).mean()
    return out_n


# ---- Intervals ---------------------------------------------------------------------------


def wilson(share: float, n: float) -> tuple[float, float]:
    """Returns Wilson's interval of a share of n (JASA 22, 1927)."""
    centre = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    root = math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    half = Z * root / (1 + Z * Z / n)
    # Of 0 and 1 an end is the share itself, which rounding would leave out.
    return max(min(centre - half, share), 0.0), min(max(centre + half, share), 1.0)


def beta(right: float, n: float) -> tuple[float, float]:
    """Returns the credible interval of a share, `right` of n, that was uniform before.

    That of Beta(1 + right, 1 + n - right).
    """
    from scipy import special  # not at the top: a quarter of a second

    low, high = special.betaincinv(1 + right, 1 + n - right, [0.025, 0.975])
    return float(low), float(high)


def clustered(value_n) -> tuple[float, float]:
    """Returns mean +- Z standard errors of [n] problems' means (arXiv 2411.00640, Eq. 4)."""
    n = len(value_n)
    half = Z * float(np.std(value_n, ddof=1)) / math.sqrt(n)
    return float(np.mean(value_n)) - half, float(np.mean(value_n)) + half


def bootstrap(statistic: Callable, x_nc) -> tuple[float | None, float | None]:
    """Returns the percentile interval of a statistic, over problems drawn anew.

    At percentiles further out than 2.5 and 97.5, as Student's t is than Z, without which it
    is too narrow of few problems: 10 have 91 % in place of 95 (Hesterberg, The American
    Statistician 69, 2015, "expanded percentile"). statistic: from means of the columns, [d,
    c], to [d] numbers; x_nc: the problems. (None, None) for a single problem.
    """
    n = len(x_nc)
    if n < 2:
        return None, None
    rng, size, found = np.random.default_rng(SEED), max(CHUNK // n, 1), []
    for first in range(0, DRAWS, size):
        drawn_dn = rng.integers(0, n, (min(size, DRAWS - first), n))
        columns = [x_n[drawn_dn].mean(axis=1) for x_n in x_nc.T]
        found.append(statistic(np.stack(columns, axis=1)))
    tail = 50 * math.erfc(student(n - 1) * math.sqrt(n / (n - 1) / 2))  # in per cent
    low, high = np.percentile(np.concatenate(found), [tail, 100 - tail])
    return float(low), float(high)


def column(mean_dc):
    """Returns the statistic that is the mean of the only column."""
    return mean_dc[:, 0]


def quotient(mean_dc):
    """Returns the statistic that is a quotient of two columns' sums; 0 over 0 is 0."""
    below_d = mean_dc[:, 1]
    return mean_dc[:, 0] / np.where(below_d > 0, below_d, 1)


def share(value_n, samples: int) -> Score:
    """Returns a share with its interval; value_n: of each problem's `samples` answers.

    Or the mean of other numbers from 0 to 1 that follow from these, as pass@k does.

    One answer to each, or all alike: Wilson's. Several: the clustered one. Of few, or of
    several that are nearly all right or wrong, the Beta's, where several answers count as
    so many independent ones as their variance says, which of few problems is itself
    uncertain (Korn and Graubard, Survey Methodology 24, 1998): between n, and n times
    `samples`. Of 320 problems with four answers, of which 0.4 % are right, the clustered
    intervals would hold that in 75 to 89 % of all cases, the Beta's in 96 to 98.
    """
    n, value = len(value_n), float(np.mean(value_n))
    alike, rare = np.ptp(value_n) == 0, n * min(value, 1 - value) < RARE
    if n < FEW or (samples > 1 and rare and not alike):
        size = n if samples == 1 else effective(value_n, samples)
        low, high = beta(value * size, size)
        # Equal tails would leave out what was measured, where all answers are alike.
        return Score(value, min(low, value), max(high, value), "beta")
    if samples == 1 or alike:
        return Score(value, *wilson(value, n), "wilson")
    # Of so many right and wrong ones it stays within 0 and 1.
    return Score(value, *clustered(value_n), "clustered")


def effective(value_n, samples: int) -> float:
    """Returns how many independent answers tell as much as `samples` to each problem.

    Fewer by (Z / t)^2, t Student's quantile, since the variance that says so is that of n
    problems: without it 5 of them would have intervals of 88 %. And fewer where few problems
    have any right answer, or any wrong one: of 30 with 20 answers, 2 % of them right and
    correlated by 0.5, the intervals held that in 82 % of all cases without it, in 96 with it.
    """
    n, value = len(value_n), float(np.mean(value_n))
    # All alike, which says nothing of the answers' independence; rounding makes a variance
    # of these, too.
    if np.ptp(value_n) == 0:
        return n
    spread = float(np.var(value_n, ddof=1)) / n
    told = value * (1 - value) / spread * (Z / student(n - 1)) ** 2
    told = min(max(told, n), n * samples)
    # How alike answers to one problem are is told by those that have some of the rarer kind.
    rare = min(np.count_nonzero(value_n > 0), np.count_nonzero(value_n < 1))
    return float(n * (told / n) ** (rare / (rare + DOUBT)))


def student(freedom: int) -> float:
    """Returns the t that Student's distribution exceeds, in size, in 5 % of all cases."""
    from scipy import special

    return float(special.stdtrit(freedom, 0.975))


def mean(value_n) -> Score:
    """Returns the mean over problems of any number, with its interval."""
    value_n = np.asarray(value_n, float)
    return Score(
        float(value_n.mean()), *bootstrap(column, value_n[:, None]), "bootstrap"
    )


def ratio(above_n, below_n) -> Score:
    """Returns a quotient of two sums over problems, with its interval.

    Problems with 0 in both, such as those that were too long to be asked, say nothing of it:
    a draw of them alone would be a quotient of 0.
    """
    x_nc = np.stack([above_n, below_n], axis=1).astype(float)
    x_nc = x_nc[x_nc.any(axis=1)] if x_nc.any() else x_nc
    value = float(quotient(x_nc.mean(axis=0, keepdims=True))[0])
    return Score(value, *bootstrap(quotient, x_nc), "bootstrap")


def paired(first_n, second_n) -> Score:
    """Returns by how much the second of two is ahead on the same problems, on average.

    The bootstrap's interval, of the differences: what makes a problem hard for both is in
    neither. Differences that are all alike, but for rounding, say nothing of how far others
    may be: there the interval is not known.
    """
    gain_n = np.asarray(second_n, float) - np.asarray(first_n, float)
    if np.allclose(gain_n, gain_n[0], rtol=ALIKE, atol=ALIKE):
        return Score(float(gain_n.mean()), None, None, "all alike")
    return mean(gain_n)


# ---- Accuracy under parallelism ----------------------------------------------------------


def aup(points: list[tuple[float, float]], best: float | None = None) -> float:
    """Returns AUP, the area under accuracy over tokens per forward (arXiv 2601.07568).

    points: (tokens per forward, accuracy in %) of one method's settings. best: accuracy in
    %, the best of any method that is compared; None: of these points. Numbers of another
    `best` are not to be compared with this. Raises ValueError where the fastest setting is
    more than FALL below the slowest, as there the area says nothing.
    """
    ordered = sorted(points)
    if ordered[-1][1] < ordered[0][1] - FALL:
        raise ValueError(
            f"AUP: the fastest setting is right in {ordered[-1][1]:.2f} %, more than "
            f"{FALL:g} points below the slowest's {ordered[0][1]:.2f} %: end the sweep "
            "where accuracy still holds"
        )
    return area(ordered, max(y for _, y in ordered) if best is None else best)


def area(ordered: list[tuple[float, float]], best: float) -> float:
    """Returns AUP's sum over points by rising tokens per forward.

    rho_1 y_1 + sum of (rho_i - rho_{i-1}) (y_i W(y_i) + y_{i-1} W(y_{i-1})) / 2 with
    W(y) = min(exp(-STEEP (1 - y / best)), 1), over points no more than FALL below the first.
    """
    least = ordered[0][1] - FALL
    kept = [(rho, y) for rho, y in ordered if y >= least]
    weighed = [y * min(math.exp(-STEEP * (1 - y / best)), 1.0) for _, y in kept]
    total = kept[0][0] * kept[0][1]
    for i in range(1, len(kept)):
        total += (kept[i][0] - kept[i - 1][0]) * (weighed[i] + weighed[i - 1]) / 2
    return total
