"""A critic without a network: a ridge regression on what the trace tells of earlier steps.

The value of a state is linear in a few numbers about the tokens that stand there already:
how probable each was when it was unmasked, how many they are, how far they reach. An
answer goes wrong at tokens of which the model was not sure, so they tell much of its
reward; a network would have to see the mistake itself.

It is a baseline that does not bias the gradient: a value depends on steps before its own
alone, and its weights on training steps before this one. Host numpy, which costs two
milliseconds for an answer of 2,000 tokens; all that it has learned is FEATURES x
(FEATURES + 1) numbers.

Letters: k features, u tokens.
"""

import numpy as np

from dllm_jax import sharding
from dllm_jax.rl import noise

FEATURES = (
    "one",
    "any",  # whether a token stands there
    "count",  # of tokens, by the longest answer
    "count squared",
    "reach",  # positions up to the last token, by the longest answer
    "steps",  # rounds so far, by the longest answer
    "log-prob",  # sum over the tokens, nats
    "log-prob, mean",
    "log-prob, least",
    "log-prob, squares",
    "likelihood",  # exp of the sum
    "probability, least",
    "doubt",  # sum of 1 - p
    "log-doubt, mean",  # of log(1 - p)
    "entropy",  # sum of -p log p - (1 - p) log(1 - p), of taking the token or not
    "below 0.5",  # tokens with such a probability
    "below 0.9",
)
FLOOR = -10.0  # nats: what is less likely counts as so likely
DOUBT = 1e-6  # the least 1 - p, which f32 still tells from 0
PENALTY = 10.0  # tokens that say "0", each with the features' mean squares
KEPT = 0.9  # of what was learned, from one training step to the next


def features(trace, step_nT, longest: int) -> np.ndarray:
    """Returns [n, T, k] f64: of each unmasked token, what was known before its step.

    trace: a host Trace of n rows; step_nT: its steps, or the rounds of its noise; longest:
    tokens of an answer. What stands behind the stop token counts where it is unmasked, as
    a sampler does not know the answer's end before. 0 where no step unmasked anything.
    """
    x_nTk = np.zeros((*step_nT.shape, len(FEATURES)))
    logp_nT = np.asarray(trace.logp_BT, np.float64)
    for i, step_T in enumerate(np.asarray(step_nT)):
        pos_u = np.flatnonzero(noise.unmasked(step_T))
        pos_u = pos_u[np.argsort(step_T[pos_u], kind="stable")]
        _, first_u, round_u = np.unique(
            step_T[pos_u], return_index=True, return_inverse=True
        )
        known_uk = prefixes(
            logp_nT[i, pos_u], pos_u - int(trace.prompt_len_B[i]), longest
        )
        x_Tk = known_uk[first_u[round_u]]
        x_Tk[:, FEATURES.index("steps")] = round_u / longest
        x_nTk[i, pos_u] = x_Tk
    return x_nTk


def prefixes(logp_u, pos_u, longest: int) -> np.ndarray:
    """Returns [u, k]: the features of the first 0, 1 ... u - 1 tokens, without "steps".

    logp_u: of tokens in the order of their steps, nats; pos_u: positions of an answer.
    """
    logp_u = np.clip(logp_u, FLOOR, 0.0)
    p_u = np.exp(logp_u)
    doubt_u = np.maximum(1 - p_u, DOUBT)

    def before(x_u, accumulate, start):
        return accumulate.accumulate(np.concatenate([[start], x_u]))[:-1]

    def total(x_u):
        return before(x_u, np.add, 0.0)

    count_u = np.arange(float(len(logp_u)))
    mean_u = 1 / np.maximum(count_u, 1)
    sum_u, least_u = total(logp_u), before(logp_u, np.minimum, 0.0)
    columns = {
        "one": np.ones_like(count_u),
        "any": np.minimum(count_u, 1),
        "count": count_u / longest,
        "count squared": (count_u / longest) ** 2,
        "reach": before(pos_u + 1, np.maximum, 0) / longest,
        "steps": np.zeros_like(count_u),
        "log-prob": sum_u,
        "log-prob, mean": sum_u * mean_u,
        "log-prob, least": least_u,
        "log-prob, squares": total(logp_u**2),
        "likelihood": np.exp(sum_u),
        "probability, least": np.exp(least_u),
        "doubt": total(doubt_u),
        "log-doubt, mean": total(np.log(doubt_u)) * mean_u,
        "entropy": total(-p_u * logp_u - doubt_u * np.log(doubt_u)),
        "below 0.5": total(p_u < 0.5),
        "below 0.9": total(p_u < 0.9),
    }
    return np.stack([columns[name] for name in FEATURES], axis=-1)


class Ridge:
    """The regression, and what it has learned so far; before it has, every value is 0.

    weights = (gram + PENALTY x diag(gram) / tokens)^-1 moment, where gram and moment sum
    x x' and x R over tokens, those of older steps with KEPT^age: a ridge on features
    scaled to mean squares of 1.
    """

    def __init__(self, longest: int, memory: dict | None = None):
        """longest: tokens of an answer.

        memory: what another's `memory` was; None, or {}: nothing is learned yet.

        Raises ValueError where it was learned from other features.
        """
        self.longest, size = longest, len(FEATURES)
        self.known_nTk = None  # what was judged last, until it is learned from
        empty = {"gram": np.zeros((size, size)), "moment": np.zeros(size), "tokens": 0}
        memory = memory or empty
        self.gram_kk = np.array(memory["gram"], np.float64)
        self.moment_k = np.array(memory["moment"], np.float64)
        self.tokens = float(memory["tokens"])
        if self.gram_kk.shape != (size, size) or self.moment_k.shape != (size,):
            raise ValueError(
                f"rl.value='trace': the checkpoint's critic has {len(self.moment_k)} "
                f"features, this version's {size}; begin again in another run.folder"
            )

    @property
    def memory(self) -> dict:
        """All that it has learned, as JSON has it: every bit of it."""
        return {
            "gram": self.gram_kk.tolist(),
            "moment": self.moment_k.tolist(),
            "tokens": self.tokens,
        }

    def weights(self) -> np.ndarray:
        """Returns the weights [k] f32, those of process 0 in all of them.

        Processors differ in the last bit of a sum, and a run must not.
        """
        size_k = np.diag(self.gram_kk) / max(self.tokens, 1)
        penalty_k = PENALTY * np.where(size_k > 0, size_k, 1.0)
        weights_k = np.linalg.solve(self.gram_kk + np.diag(penalty_k), self.moment_k)
        return sharding.of_first(weights_k.astype(np.float32))

    def judge(self, trace, noised: noise.Noise) -> np.ndarray:
        """Returns the value [n, T] f32 of the state before each token's step.

        trace: a host Trace of n rows; noised: its steps, or the rounds made of them.
        """
        self.known_nTk = features(trace, noised.step_nT, self.longest)
        return (self.known_nTk @ self.weights()).astype(np.float32)

    def learn(self, seen_nT, ret_nT) -> None:
        """Learns the returns of the tokens that `judge` was last asked of, where seen."""
        self.add(self.known_nTk[seen_nT], np.float64(ret_nT[seen_nT]))
        self.known_nTk = None

    def add(self, x_uk, ret_u) -> None:
        """Adds a training step's tokens: their features, and the returns that followed."""
        self.gram_kk = KEPT * self.gram_kk + x_uk.T @ x_uk
        self.moment_k = KEPT * self.moment_k + x_uk.T @ ret_u
        self.tokens = KEPT * self.tokens + len(x_uk)
