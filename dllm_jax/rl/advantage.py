"""From rewards to advantages: baselines within a group, and GAE over the trace's steps.

Host numpy: a few thousand numbers once per RL step.
"""

import numpy as np

ROUNDING = 1e-5  # of what two rewards spread: what their sum spreads less is no spread

# ---- Rewards -> advantages -----------------------------------------------------------


def zscore(reward_n):
    """(r - mean) / std, population std: GRPO (arXiv 2402.03300, section 4.1.1).

    Of rewards from 0 to 1, which have the same: squares of very large or very small ones
    leave the range of f32.
    """
    share_n = (reward_n - reward_n.min()) / np.ptp(reward_n)
    return (share_n - share_n.mean()) / share_n.std()


def center(reward_n):
    """r - mean: GRPO without its std, Dr. GRPO (arXiv 2503.20783, section 3.2)."""
    return reward_n - reward_n.mean()


def loo(reward_n):
    """r - the mean of the others' rewards: RLOO (arXiv 2402.14740)."""
    others = len(reward_n) - 1
    return reward_n - (reward_n.sum() - reward_n) / others


def wd1(reward_n):
    """softmax(r) - softmax(-r): wd1 (arXiv 2507.08838), with objective.loss "dipo".

    Its loss is sum_i (softmax(-A)_i - softmax(A)_i) log pi_i, A = r - mean, which a softmax
    does not see.
    """
    weights = [np.exp(x_n - x_n.max()) for x_n in (reward_n, -reward_n)]
    up_n, down_n = (w_n / w_n.sum() for w_n in weights)
    return up_n - down_n


BASELINES = {
    "zscore": zscore,
    "center": center,
    "loo": loo,
    "wd1": wd1,
}  # of one group's rewards


def relative(reward_n, group_n, kind: str):
    """Returns each reward relative to its group's; 0 where a group's are all equal.

    kind: a key of BASELINES, or "none" for the rewards as they are. All of them compare
    rewards: to add a number to each changes nothing.
    """
    if kind == "none":
        return reward_n
    out_n = np.zeros(len(reward_n), np.float32)
    for group in np.unique(group_n):
        inside_n = group_n == group
        rewards = reward_n[inside_n]
        least = rewards.min()
        if least < rewards.max():  # a rounded mean would give equal ones a std
            # Above the least of them: the mean of large ones is rounded by more than they
            # may differ, and what it is off by would push all of them one way.
            out_n[inside_n] = BASELINES[kind](rewards - least)
    return out_n


def combined(reward_n, speed_n, group_n, keep_n, kind: str, *, speed: float):
    """Returns the advantages of rewards and, with weight `speed`, of decoding speed.

    LightningRL's decoupled normalisation (arXiv 2603.13319): each reward is made
    relative to its group on its own, then they are added, and their sum is z-scored
    over all that is kept of the step, as its published code does (z-scores, weight 1).
    Of what is dropped a value network may learn (rl.value_all): it has the same unit.
    speed_n: tokens per forward.
    """
    adv_n = relative(reward_n, group_n, kind)
    if not speed:
        return adv_n
    parts = adv_n, speed * relative(speed_n, group_n, kind)
    adv_n = sum(parts)
    kept_n = adv_n[keep_n]
    if not kept_n.size:
        return adv_n
    # What is left where right answers are as much slower as they are better is rounding.
    if np.ptp(kept_n) <= ROUNDING * max(np.ptp(part_n[keep_n]) for part_n in parts):
        return np.where(keep_n, 0, adv_n)
    share_n = (adv_n - kept_n.min()) / np.ptp(kept_n)
    return (share_n - share_n[keep_n].mean()) / share_n[keep_n].std()


def overlong(len_n, longest: int, tail: int):
    """Returns what each answer's length costs it, 0 to 1: DAPO (arXiv 2503.14476, Eq. 13).

    len_n: tokens; longest: the most that an answer may have, of which the last `tail` cost
    more and more: 1 at the limit.
    """
    return np.clip((len_n - (longest - tail)) / tail, 0.0, 1.0).astype(np.float32)


# ---- Which groups are kept -----------------------------------------------------------


def solvable(reward_n, right_n, speed_n, low, high) -> bool:
    """The solve rate lies in [low, high]: TraceRL (arXiv 2509.06949, section 5)."""
    known_n = right_n[~np.isnan(right_n)]
    return bool(known_n.size) and low <= known_n.mean() <= high


def varied(reward_n, right_n, speed_n, low, high) -> bool:
    """The rewards are not all equal: DAPO (arXiv 2503.14476, section 3.2)."""
    return reward_n.min() < reward_n.max()


def paced(reward_n, right_n, speed_n, low, high) -> bool:
    """One is right, and they differ in speed: LightningRL (arXiv 2603.13319).

    The least difference, 0.01 tokens per forward, is its published configuration's.
    """
    return bool((right_n == 1).any() and np.ptp(speed_n) >= 0.01)


# (rewards, which are right, speeds, low, high) of one group -> whether it is kept.
FILTERS = {"solvable": solvable, "varied": varied, "paced": paced}


def kept(reward_n, right_n, speed_n, group_n, rule: str, low: float, high: float):
    """Returns which rollouts [n] are of a group that passes the rule, a key of FILTERS.

    right_n: which are right, whatever a sum of several graders' rewards is; NaN: nobody
    knows. speed_n: tokens per forward; low, high: bounds of a group's solve rate.
    """
    keep_n = np.zeros(len(reward_n), bool)
    for group in np.unique(group_n):
        inside_n = group_n == group
        of_group = (x_n[inside_n] for x_n in (reward_n, right_n, speed_n))
        keep_n[inside_n] = FILTERS[rule](*of_group, low, high)
    return keep_n


# ---- Steps of the trace --------------------------------------------------------------


def outcome(reward_n, step_nT, answer_nT):
    """Returns the rewards per token [n, T]: the outcome on those of the last step."""
    last_n1 = np.where(answer_nT, step_nT, 0).max(axis=1, keepdims=True)
    last_nT = answer_nT & (step_nT == last_n1)
    return np.where(last_nT, reward_n[:, None], 0.0).astype(np.float32)


def gae(reward_nT, value_nT, step_nT, answer_nT, *, gamma: float, lam: float):
    """Returns (return_nT, advantage_nT); tokens unmasked in one step share a state.

    Step-level GAE of TraceRL (arXiv 2509.06949, section 4.3). With r*, V* the means
    over a step's tokens and t + 1 the next distinct step (zero beyond the last):

        R*_t = r*_t + gamma R*_{t+1}          A*_t = r*_t - V*_t + gamma V*_{t+1}
                                                     + gamma lam A*_{t+1}
        R_j = r_j + gamma R*_{t+1}            A_j = r_j - V_j + gamma V*_{t+1}
                                                     + gamma lam A*_{t+1}
    for token j of step t. Zero outside the answer.
    """
    rank_nT = np.zeros(step_nT.shape, np.int64)  # of a token's step among its row's
    for i, answer_T in enumerate(answer_nT):
        steps = step_nT[i, answer_T]
        rank_nT[i, answer_T] = np.unique(steps, return_inverse=True)[1]
    count = int(rank_nT.max(initial=0)) + 1
    row, _ = np.nonzero(answer_nT)
    rank = rank_nT[answer_nT]

    # Arrays [n, count + 1] of steps, with a step of zeros at the end. Rows with fewer
    # steps start the recursion from zeros: their r and V are zero up there.
    def mean(x_nT):
        total, tokens = np.zeros((2, len(step_nT), count + 1))
        np.add.at(total, (row, rank), x_nT[answer_nT])
        np.add.at(tokens, (row, rank), 1)
        return total / np.maximum(tokens, 1)

    step_reward, step_value = mean(reward_nT), mean(value_nT)
    step_ret, step_adv = np.zeros((2, *step_reward.shape))
    for t in reversed(range(count)):
        step_ret[:, t] = step_reward[:, t] + gamma * step_ret[:, t + 1]
        step_adv[:, t] = (
            step_reward[:, t]
            - step_value[:, t]
            + gamma * step_value[:, t + 1]
            + gamma * lam * step_adv[:, t + 1]
        )
    ret_nT, adv_nT = np.zeros((2, *step_nT.shape), np.float32)
    ret_nT[answer_nT] = reward_nT[answer_nT] + gamma * step_ret[row, rank + 1]
    adv_nT[answer_nT] = (
        reward_nT[answer_nT]
        - value_nT[answer_nT]
        + gamma * step_value[row, rank + 1]
        + gamma * lam * step_adv[row, rank + 1]
    )
    return ret_nT, adv_nT


def explained_variance(value_nT, ret_nT, answer_nT) -> float:
    """Returns 1 - var(return - value) / var(return) over the answers' tokens.

    0 where all returns are the same: there is nothing to explain.
    """
    returns = np.asarray(ret_nT[answer_nT], np.float64)
    if not returns.size or returns.min() == returns.max():
        return 0.0
    return float(1 - (returns - value_nT[answer_nT]).var() / returns.var())


def by_thirds(value_nT, ret_nT, answer_nT) -> dict[str, float]:
    """Returns the explained variance of the first, middle and last third of the answers.

    A token's third is that of its place among its answer's tokens. Late tokens are the easy
    ones: nearly all of an answer stands there, and little is left to credit.
    """
    before_nT = np.cumsum(answer_nT, axis=1) - answer_nT
    count_n1 = np.maximum(answer_nT.sum(axis=1, keepdims=True), 1)
    third_nT = 3 * before_nT // count_n1
    return {
        f"explained_variance_{name}": explained_variance(
            value_nT, ret_nT, answer_nT & (third_nT == third)
        )
        for third, name in enumerate(("first", "middle", "last"))
        if (answer_nT & (third_nT == third)).any()
    }


def whitened(adv_nT, seen_nT):
    """Returns advantages of mean 0 and standard deviation 1 over the supervised tokens.

    Where all are the same they are 0.
    """
    seen = np.asarray(adv_nT[seen_nT], np.float64)
    # A rounded mean would give equal ones a standard deviation.
    if not seen.size or seen.min() == seen.max():
        return np.zeros(adv_nT.shape, np.float32)
    white_nT = (adv_nT - seen.mean()) / seen.std()
    return np.where(seen_nT, white_nT, 0.0).astype(np.float32)
