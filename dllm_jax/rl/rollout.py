"""What answers are worth: rollouts, their rewards, and what a step tells of them.

The same in every process; process 0 alone grades, so that a grader's time-out cannot split
a run in two.
"""

import dataclasses
import json
import math

import jax
import numpy as np
from jax.experimental import multihost_utils

from dllm_jax.sampling import answers, state
from dllm_jax.sampling.state import Trace


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Host traces of n rollouts; a group is the rollouts of one problem."""

    trace: Trace  # numpy, first dimension n
    group_n: np.ndarray
    text: list[str]  # decoded once, for graders and people
    reward_n: np.ndarray
    timeouts: int = 0  # answers that earn 0 since grading them took too long


def graded(trace: Trace, texts, golds, group_n, grader, *, truncated_wrong: bool):
    """Returns Rollouts whose rewards are the Grader's (rl/rewards), decided by process 0.

    Rows without an answer (their prompt was too long), and with `truncated_wrong` those
    that were cut at their limit, earn 0.
    """
    reward_n = np.zeros(len(texts), np.float32)
    if jax.process_index() == 0:
        reward_n[:] = grader.grade(texts, golds)
        reward_n[trace.len_B == 0] = 0
        if truncated_wrong:
            reward_n[~trace.stopped_B] = 0
    if jax.process_count() > 1:
        reward_n = np.asarray(multihost_utils.broadcast_one_to_all(reward_n))
    late = int(np.isnan(reward_n).sum())
    return Rollouts(trace, group_n, texts, np.nan_to_num(reward_n), late)


def answered(
    answerer,
    params,
    problems,
    group_n,
    key,
    *,
    temperature: float,
    tok,
    timer,
    grader,
    truncated_wrong: bool,
    stop=None,
) -> Rollouts | None:
    """Returns Rollouts: one answer to each data.Problem, sampled, decoded and graded.

    None where sampling was stopped: see `answers.collect`.
    answerer: see `sampling.answers`; timer: a metrics.Timer.
    """
    prompts = [problem.prompt_ids for problem in problems]
    stream = answerer.stream(params, prompts, key, temperature=temperature)
    trace = answers.collect(stream, stop)
    if trace is None:
        return None
    with timer("reward"):
        texts, golds = answers.decode(trace, tok), [p.answer for p in problems]
        return graded(
            trace, texts, golds, group_n, grader, truncated_wrong=truncated_wrong
        )


def report_long(problems, max_prompt: int, say):
    """Says how many prompts are too long; they are skipped with a reward of 0."""
    long = sum(len(p.prompt_ids) > max_prompt for p in problems)
    if long:
        say(
            f"{long} of {len(problems)} prompts are longer than sampler.max_prompt="
            f"{max_prompt} tokens: they are skipped and earn 0"
        )


def pass_at(solved_ns, k: int) -> float:
    """Returns pass@k of n problems with s answers each, k <= s: is one of k right?

    The unbiased estimate 1 - C(s - c, k) / C(s, k) with c right ones (Codex, arXiv
    2107.03374, Eq. 1).
    """
    s = solved_ns.shape[1]
    wrong_n = (~solved_ns).sum(axis=1)
    return float(np.mean([1 - math.comb(w, k) / math.comb(s, k) for w in wrong_n]))


def speed(trace: Trace):
    """Returns each row's tokens per forward; 0 for a row without an answer."""
    return trace.len_B / np.maximum(trace.forwards_B, 1)


def summary(rollouts: Rollouts) -> dict[str, float]:
    """Returns what a step says about its rollouts: means over answers.

    tokens_per_forward counts the forwards that a row was denoised in. On the engine
    there are no others: the keys of blocks and prompts are computed beside these.
    """
    trace = rollouts.trace
    count = np.maximum((trace.len_B > 0).sum(), 1)
    return {
        "reward": float(rollouts.reward_n.mean()),
        "accuracy": float((rollouts.reward_n >= 1).mean()),
        "graded_timeouts": rollouts.timeouts,
        "response_length": float(trace.len_B.sum() / count),
        "tokens_per_forward": float(trace.len_B.sum() / max(trace.forwards_B.sum(), 1)),
        "truncated": float((~trace.stopped_B & (trace.len_B > 0)).mean()),
    }


def write(folder, step: int, rollouts: Rollouts, problems, count: int):
    """Writes some of a step's rollouts with their traces."""
    path = folder / "samples" / f"step_{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    rows = as_records(rollouts, [p.prompt_ids for p in problems[:count]])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_records(rollouts: Rollouts, prompts: list[list[int]]) -> list[dict]:
    """Returns JSON-able records of rollouts with their traces, as `generate` writes."""
    out = []
    for i, prompt in enumerate(prompts):
        out.append(
            {
                **answers.record(state.answer(rollouts.trace, i), prompt),
                "text": rollouts.text[i],
                "reward": float(rollouts.reward_n[i]),
                "group": int(rollouts.group_n[i]),
            }
        )
    return out
