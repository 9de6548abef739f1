"""Prompts in, graded rollouts out: the host's side of sampling.

The same in every process: each queues the same prompts and fetches the same traces, and
process 0 alone grades, so that a grader's time-out cannot split a run in two.
"""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
from jax.experimental import multihost_utils

from dllm_jax import sharding
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR
from dllm_jax.sampling import denoise, policy, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.engine import Engine
from dllm_jax.sampling.state import Trace


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Host traces of n rollouts; a group is the rollouts of one problem."""

    trace: Trace  # numpy, first dimension n
    group_n: np.ndarray
    text: list[str]  # decoded once, for graders and people
    reward_n: np.ndarray
    timeouts: int = 0  # answers that earn 0 since grading them took too long


def sampler(*, model: ModelConfig, cfg: SamplerConfig, mesh):
    """Returns how this model answers: `through` the engine, or `in_batches`.

    Either is a function (params, prompts, key, *, temperature, watch=None) that yields
    (i, row i of a host Trace) as answers end; prompt i draws from fold_in(key, i). A prompt
    that is empty or longer than `cfg.max_prompt` gets an empty answer; the caller reports
    it. watch: called with (i, first position of its present block, its row so far) after
    every forward.
    """
    if policy.choose(cfg, model.attention).canvas != "prefill":
        # No key is final before its answer is, or none is kept.
        generate = functools.partial(denoise.generate, model=model, cfg=cfg)
        return functools.partial(in_batches, generate, cfg=cfg, mesh=mesh)
    return functools.partial(through, Engine(model=model, cfg=cfg, mesh=mesh))


def lower(answers, params, key):
    """Returns (its program lowered for these parameters, its rows as shapes).

    answers: of `sampler`; rows that go through batches come with each batch. params:
    arrays, or their shapes with shardings.
    """
    (how,) = answers.args
    if answers.func is through:
        return how.lower(params, key)
    one = np.ones((1, answers.keywords["cfg"].max_prompt), np.int32)
    arrays = rows_of(one, one[0, :1], 0, key, temperature=0.0, **answers.keywords)
    return how.func.lower(params, **arrays, **how.keywords), ()


def sample(answers, params, prompts: list[list[int]], key, *, temperature, stop=None):
    """Returns the host Trace of one answer to each prompt; answers: see `sampler`.

    None where `stop`, which is asked as answers end, says so: alike in every process.
    """
    rows = {}
    for i, row in answers(params, prompts, key, temperature=temperature):
        rows[i] = row
        if stop is not None and len(rows) % 16 == 0 and stop():
            return None
    return jax.tree.map(lambda *x: np.stack(x), *(rows[i] for i in range(len(rows))))


def through(engine: Engine, params, prompts, key, *, temperature, watch=None):
    """Answers prompts on the engine."""
    fits = {i for i, p in enumerate(prompts) if 0 < len(p) <= engine.cfg.max_prompt}
    for i in set(range(len(prompts))) - fits:  # before any waits: who asks may leave
        yield i, no_answer(engine.cfg.slots)
    for i in sorted(fits):
        new = engine.cfg.max_new
        engine.submit(prompts[i], index=i, temperature=temperature, new=new)
    tell = watch and (lambda request, row: watch(request.index, request.start, row))
    for request, row in engine.run(params, key, tell):
        yield request.index, row


def no_answer(slots: int) -> Trace:
    """Returns the row of a prompt that cannot be answered."""
    zero, zeros = np.int32(0), np.zeros(slots, np.float32)
    return Trace(
        tokens_BT=np.zeros(slots, np.int32),
        step_BT=np.full(slots, FAR, np.int32),
        logp_BT=zeros,
        conf_BT=zeros,
        prompt_len_B=zero,
        len_B=zero,
        steps_B=zero,
        forwards_B=zero,
        stopped_B=np.bool_(False),
    )


def in_batches(generate, params, prompts, key, *, temperature, cfg, mesh, watch=None):
    """Answers prompts `cfg.rows` at a time; generate: `denoise.generate`, bound."""
    n = len(prompts)
    tokens_nP = np.zeros((n, cfg.max_prompt), np.int32)
    len_n = np.zeros(n, np.int32)
    for i, prompt in enumerate(prompts):
        if 0 < len(prompt) <= cfg.max_prompt:
            tokens_nP[i, : len(prompt)] = prompt
            len_n[i] = len(prompt)
    how = {"temperature": temperature, "cfg": cfg, "mesh": mesh}
    for first in range(0, n, cfg.rows):
        arrays = rows_of(tokens_nP, len_n, first, key, **how)
        held = range(min(cfg.rows, n - first))
        if watch is None:
            trace = sharding.fetch(generate(params, **arrays))
        else:  # the same steps, one at a time
            s, live = denoise.start(params, **arrays, **generate.keywords), True
            while live:
                s = denoise.advance(params, s, **generate.keywords)
                now = s.live_B, s.start_B, state.trace(s, cfg.stop_ids)
                live_B, start_B, trace = sharding.fetch(now)
                live = live_B.any()
                for row in held:
                    watch(first + row, start_B[row], row_of(trace, row))
        for row in held:
            yield first + row, row_of(trace, row)


def row_of(trace: Trace, row: int) -> Trace:
    """Returns one row of a host Trace."""
    return jax.tree.map(lambda x: x[row], trace)


def rows_of(tokens_nP, len_n, first: int, key, *, temperature, cfg, mesh):
    """Returns the arguments of `denoise.generate` for prompts from `first` on."""
    n = len(len_n)
    rows = np.arange(first, first + cfg.rows)
    index = np.minimum(rows, n - 1)
    real = np.where(rows < n, len_n[index], 0)  # fillers never live
    arrays = sharding.place_rows(
        {
            "prompt_BT": tokens_nP[index],
            "prompt_len_B": real,
            "limit_B": real + cfg.max_new,
            "temperature_B": np.full(cfg.rows, temperature, np.float32),
            "index_B": index.astype(np.uint32),
        },
        mesh,
    )
    return arrays | {"key_B": row_keys(key, arrays.pop("index_B"))}


@jax.jit
def row_keys(key, index_B):
    """Returns one key per row, by its index alone."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, index_B)


def decode(trace: Trace, tok) -> list[str]:
    """Returns the answers' texts, without special tokens."""
    rows = zip(trace.tokens_BT, trace.prompt_len_B, trace.len_B, strict=True)
    answers = [tokens[first : first + count] for tokens, first, count in rows]
    return tok.batch_decode(
        answers, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def graded(trace: Trace, texts, golds, group_n, grader, *, truncated_wrong: bool):
    """Returns Rollouts with `grader(texts, golds)` as reward, decided by process 0.

    Rows without an answer (their prompt was too long), and with `truncated_wrong` those
    that were cut at their limit, earn 0.
    """
    reward_n = np.zeros(len(texts), np.float32)
    if jax.process_index() == 0:
        reward_n[:] = grader(texts, golds)
        reward_n[trace.len_B == 0] = 0
        if truncated_wrong:
            reward_n[~trace.stopped_B] = 0
    if jax.process_count() > 1:
        reward_n = np.asarray(multihost_utils.broadcast_one_to_all(reward_n))
    late = int(np.isnan(reward_n).sum())
    return Rollouts(trace, group_n, texts, np.nan_to_num(reward_n), late)


def answered(
    answers, params, problems, group_n, key,
    *, tok, timer, grader, truncated_wrong, **how,
):  # fmt: skip
    """Returns Rollouts: one answer to each data.Problem, sampled, decoded and graded.

    None where sampling was stopped.
    answers: see `sampler`; timer: a metrics.Timer; how: see `sample`.
    """
    trace = sample(answers, params, [p.prompt_ids for p in problems], key, **how)
    if trace is None:
        return None
    with timer("reward"):
        told = decode(trace, tok), [p.answer for p in problems], group_n, grader
        return graded(trace, *told, truncated_wrong=truncated_wrong)


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
    answered = np.maximum((trace.len_B > 0).sum(), 1)
    return {
        "reward": float(rollouts.reward_n.mean()),
        "accuracy": float((rollouts.reward_n >= 1).mean()),
        "graded_timeouts": rollouts.timeouts,
        "response_length": float(trace.len_B.sum() / answered),
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
                **record(rollouts.trace, i, prompt),
                "text": rollouts.text[i],
                "reward": float(rollouts.reward_n[i]),
                "group": int(rollouts.group_n[i]),
            }
        )
    return out


def record(trace: Trace, i: int, prompt: list[int]) -> dict:
    """Returns row i of a host trace as a JSON-able record: ids, steps, log-probs."""
    first = int(trace.prompt_len_B[i])
    span = slice(first, first + int(trace.len_B[i]))
    finished = "stop" if trace.stopped_B[i] else "length"
    if trace.len_B[i] == 0:
        finished = "skipped"
    return {
        "prompt_ids": [int(t) for t in prompt],
        "response_ids": trace.tokens_BT[i, span].tolist(),
        "step_map": trace.step_BT[i, span].tolist(),
        "logprobs": [round(float(x), 6) for x in trace.logp_BT[i, span]],
        "confidence": [round(float(x), 6) for x in trace.conf_BT[i, span]],
        "forwards": int(trace.forwards_B[i]),
        "finished": finished,
    }
