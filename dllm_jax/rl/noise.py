"""Noise: which tokens are masked together, and which of them are supervised.

Every kind says it with one array, a step map: in the round of step t all that was unmasked
at t or later is masked, what came earlier is shown, and the tokens of t are supervised. The
trace of sampling is one itself; random masks are maps of few steps. Host numpy.
"""

import flax.struct
import numpy as np

from dllm_jax.models.mask import FAR
from dllm_jax.rl.config import NoiseConfig
from dllm_jax.rl.layout import Layout
from dllm_jax.sampling.state import GIVEN


@flax.struct.dataclass
class Noise:
    """Step maps of n rows, one for each draw of a trajectory, and what is supervised."""

    step_nT: np.ndarray
    # How many tokens each one stands for: 1 / the probability that it is masked. 0: it is
    # not supervised.
    share_nT: np.ndarray


def of(step_nT) -> Noise:
    """Returns the step maps as they are: everything that some step unmasked counts."""
    taken_nT = (step_nT != GIVEN) & (step_nT != FAR)
    return Noise(step_nT=step_nT, share_nT=taken_nT.astype(np.float32))


# ---- The kinds: (steps, answer, scope, blocks) of a trajectory -> a list of its draws ----


def shrink(step_T, scope_T, size: int):
    """Merges the neighbouring steps of a scope, `size` at a time, into the largest.

    What was never unmasked is no step: a token merged with it would be lost.
    """
    out_T = step_T.copy()
    taken_T = (step_T != GIVEN) & (step_T != FAR)
    for one in np.unique(scope_T[taken_T]):
        inside = taken_T & (scope_T == one)
        steps, index = np.unique(step_T[inside], return_inverse=True)
        last = np.minimum((index // size + 1) * size, len(steps)) - 1
        out_T[inside] = steps[last]
    return out_T


def trace(step_T, answer_T, scope_T, blocks_T, rng, cfg: NoiseConfig):
    """The steps of sampling (TraceRL, arXiv 2509.06949, section 4.1), shrunk."""
    step_T = shrink(step_T, scope_T, cfg.shrink) if cfg.shrink > 1 else step_T
    return [of(step_T)]


def coins(step_T, scope_T, rng: np.random.Generator, cfg: NoiseConfig):
    """Returns (masked, rate): a coin for each token, masked with probability `rate`.

    Each token's rate is its own, or a scope's tokens share one (NoiseConfig.rate).
    """
    if cfg.rate == "token":
        rate_T = rng.uniform(cfg.lower, cfg.upper, step_T.shape)
    else:
        rate_T = rng.uniform(cfg.lower, cfg.upper, scope_T.max() + 1)[scope_T]
    return rng.random(step_T.shape) < rate_T, rate_T


def masks(step_T, masked_T, rate_T) -> Noise:
    """Returns one round with these tokens masked, beside what was never unmasked."""
    closed_T = (step_T == GIVEN) | (step_T == FAR)
    on_T = masked_T & ~closed_T
    return Noise(
        step_nT=np.where(closed_T, step_T, on_T).astype(step_T.dtype),
        share_nT=(on_T / np.where(on_T, rate_T, 1)).astype(np.float32),
    )


def bernoulli(step_T, answer_T, scope_T, blocks_T, rng, cfg: NoiseConfig):
    """Masks at random what is not given (LLaDA, arXiv 2502.09992, Eq. 3)."""
    return [masks(step_T, *coins(step_T, scope_T, rng, cfg))]


def complement(step_T, answer_T, scope_T, blocks_T, rng, cfg: NoiseConfig):
    """A random mask, and all that it leaves: coupled-GRPO (arXiv 2506.20639, section 4)."""
    masked_T, rate_T = coins(step_T, scope_T, rng, cfg)
    return [masks(step_T, masked_T, rate_T), masks(step_T, ~masked_T, 1 - rate_T)]


def semi_ar(step_T, answer_T, scope_T, blocks_T, rng, cfg: NoiseConfig):
    """Masks at random in one block after the other, with all later blocks masked.

    Where the layout hides later blocks anyway, this is `bernoulli`.
    """
    one = bernoulli(step_T, answer_T, blocks_T, blocks_T, rng, cfg)[0]
    open_T = (step_T != GIVEN) & (step_T != FAR)
    turns_T = 2 * blocks_T + 1 + (one.share_nT > 0)
    return [one.replace(step_nT=np.where(open_T, turns_T, step_T).astype(np.int32))]


def subset(step_T, answer_T, scope_T, blocks_T, rng, cfg: NoiseConfig):
    """Masks l of the n answer tokens of each scope, l uniform in 1 .. n; they are step 1.

    With weight n / l for each (weights "elbo") the log-probs sum to an unbiased estimate
    of the evidence lower bound (LLaDA, arXiv 2502.09992, Eq. 6), a scope after the other.
    What follows the answer stays masked.
    """
    out_T = np.where(answer_T | (step_T == GIVEN), GIVEN, FAR).astype(step_T.dtype)
    share_T = np.zeros(step_T.shape, np.float32)
    for one in np.unique(scope_T[answer_T]):
        inside = rng.permutation(np.flatnonzero(answer_T & (scope_T == one)))
        chosen = inside[: rng.integers(len(inside)) + 1]
        out_T[chosen], share_T[chosen] = 1, len(inside) / len(chosen)
    return [Noise(step_nT=out_T, share_nT=share_T)]


def everything(step_T, answer_T, scope_T, blocks_T, rng, cfg: NoiseConfig):
    """Nothing is masked, all is supervised: next-token prediction."""
    return [of(step_T)]


KINDS = {
    "trace": trace,
    "bernoulli": bernoulli,
    "complement": complement,
    "semi_ar": semi_ar,
    "subset": subset,
    "ar": everything,
}


def answers(trace):
    """Returns where [n, T] each trajectory's answer is: the tokens to supervise."""
    pos_1T = np.arange(trace.tokens_BT.shape[1])[None]
    first_n1 = trace.prompt_len_B[:, None]
    return (pos_1T >= first_n1) & (pos_1T < first_n1 + trace.len_B[:, None])


def noised(trace, cfg: NoiseConfig, layout: Layout, rng=None) -> Noise:
    """Returns the noise of a host trace: `cfg.copies` rows of each trajectory, in order."""
    out, T = [], trace.tokens_BT.shape[1]
    rows = zip(trace.step_BT, answers(trace), trace.prompt_len_B, strict=True)
    for step_T, answer_T, prompt in rows:
        # What follows an answer is masked, unless a sampler says when it was unmasked.
        after_T = (np.arange(T) >= prompt) & ~answer_T & (step_T == GIVEN)
        step_T = np.where(after_T, FAR, step_T)
        around = layout.scope(T, prompt), layout.numbers(T, prompt)
        for _ in range(cfg.draws):
            out += KINDS[cfg.kind](step_T, answer_T, *around, rng, cfg)
    return Noise(
        step_nT=np.stack([one.step_nT for one in out]),
        share_nT=np.stack([one.share_nT for one in out]),
    )


def rounds(cfg: NoiseConfig, layout: Layout, answer: int, steps: int = FAR) -> int:
    """Returns the most rounds that a scope with `answer` tokens can have, of all draws.

    steps: the most that an answer has, where its trace is given.
    """
    size = answer if layout.attention == "full" else layout.block
    if cfg.kind == "trace":
        return -(-min(size, steps) // cfg.shrink)
    if cfg.kind == "semi_ar" and layout.attention == "full":
        return (-(-answer // layout.block) + 1) * cfg.draws
    return cfg.copies


def check(cfg: NoiseConfig, layout: Layout):
    """Raises ValueError for noise that a model cannot learn from."""
    if cfg.kind == "ar" and layout.attention != "causal":
        raise ValueError(
            "noise.kind='ar' trains causal attention, but the export would sample with "
            f"attention={layout.attention!r}; set model.attention='causal' and model.shift=1"
        )
    if layout.attention == "causal":
        if cfg.kind not in ("trace", "ar"):
            raise ValueError(
                f"noise.kind={cfg.kind!r} masks tokens, but the model's attention is causal; "
                "set noise.kind='ar', or adapt the model: configs/sft.py:adapt"
            )
        if layout.shift < 1:
            raise ValueError(
                "noise.kind='ar' predicts the next token, but the model's shift is 0: a "
                "token would be predicted from itself; set model.shift=1"
            )
