"""Prompts in, answers out: the front door of sampling.

An *answerer* is what answers the prompts of a run: `Engine` where keys are final once
their block is (continuous batching over pages), `Batches` where they are not (families
with full attention). Every answerer has these two methods, and its callers know no
others:

    stream(params, prompts, key, *, temperature, watch=None)
        Yields (i, Answer i) as answers end; prompt i draws from fold_in(key, i). A
        prompt that is empty or longer than `cfg.max_prompt` gets `state.no_answer`; the
        caller reports it. watch: called with (i, first position of its present block,
        its Answer so far) after every forward, for those who show an answer as it
        grows.
    lower(params, key)
        Returns (the program that samples, lowered; the arrays that it keeps between
        calls, as shapes), for the memory plan. params: arrays, or their shapes with
        shardings.

The same in every process: each queues the same prompts and fetches the same answers.
"""

import jax
import numpy as np

from dllm_jax import sharding
from dllm_jax.models.config import ModelConfig
from dllm_jax.sampling import denoise, policy, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.engine import Engine
from dllm_jax.sampling.state import Answer, Trace


def answerer(*, model: ModelConfig, cfg: SamplerConfig, mesh):
    """Returns the answerer that serves the model's attention."""
    if policy.choose(cfg, model.attention).final:
        return Engine(model=model, cfg=cfg, mesh=mesh)
    return Batches(model=model, cfg=cfg, mesh=mesh)


class Batches:
    """Batches of `cfg.rows` prompts in lock-step: each ends with its slowest row."""

    def __init__(self, *, model: ModelConfig, cfg: SamplerConfig, mesh):
        self.model, self.cfg, self.mesh = model, cfg, mesh

    def stream(self, params, prompts, key, *, temperature, watch=None):
        """Yields (i, Answer i), batch by batch: see the module."""
        n = len(prompts)
        tokens_nT = np.zeros((n, self.cfg.max_prompt), np.int32)
        len_n = np.zeros(n, np.int32)
        for i, prompt in enumerate(prompts):
            if 0 < len(prompt) <= self.cfg.max_prompt:
                tokens_nT[i, : len(prompt)] = prompt
                len_n[i] = len(prompt)
        for first in range(0, n, self.cfg.rows):
            arrays = self.batch(tokens_nT, len_n, first, key, temperature)
            count = min(self.cfg.rows, n - first)  # fillers answer nothing
            if watch is None:
                trace = sharding.fetch(self.generate(params, **arrays))
            else:
                trace = self.watched(params, arrays, first, count, watch)
            for row in range(count):
                yield first + row, state.answer(trace, row)

    def lower(self, params, key):
        """Returns (`denoise.generate`, lowered; nothing: rows come with each batch)."""
        one_1T = np.ones((1, self.cfg.max_prompt), np.int32)
        arrays = self.batch(one_1T, one_1T[0, :1], 0, key, temperature=0.0)
        lowered = denoise.generate.lower(
            params, **arrays, model=self.model, cfg=self.cfg
        )
        return lowered, ()

    def generate(self, params, **arrays) -> Trace:
        """Returns the batch's Trace, on the device."""
        return denoise.generate(params, **arrays, model=self.model, cfg=self.cfg)

    def watched(self, params, arrays, first: int, count: int, watch) -> Trace:
        """Returns the batch's Trace after the same steps, one at a time and shown.

        arrays: of `batch`, for `count` prompts from `first` on.
        """
        static = {"model": self.model, "cfg": self.cfg}
        s, live = denoise.start(params, **arrays, **static), True
        while live:
            s = denoise.advance(params, s, **static)
            live_B, start_B, trace = sharding.fetch(
                (s.live_B, s.start_B, state.trace(s, self.cfg.stop_ids))
            )
            live = live_B.any()
            for row in range(count):
                watch(first + row, start_B[row], state.answer(trace, row))
        return trace

    def batch(self, tokens_nT, len_n, first: int, key, temperature) -> dict:
        """Returns the arguments of `denoise.generate` for prompts from `first` on."""
        n, rows = len(len_n), np.arange(first, first + self.cfg.rows)
        index = np.minimum(rows, n - 1)
        real = np.where(rows < n, len_n[index], 0)  # fillers never live
        arrays = sharding.place_rows(
            {
                "prompt_BT": tokens_nT[index],
                "prompt_len_B": real,
                "limit_B": real + self.cfg.max_new,
                "temperature_B": np.full(self.cfg.rows, temperature, np.float32),
                "index_B": index.astype(np.uint32),
            },
            self.mesh,
        )
        return arrays | {"key_B": row_keys(key, arrays.pop("index_B"))}


@jax.jit
def row_keys(key, index_B):
    """Returns one key per row, by its index alone."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, index_B)


def collect(stream, stop=None) -> Trace | None:
    """Returns the host Trace of all answers of a stream, in the order of the prompts.

    None where `stop`, which is asked as answers end, says so: alike in every process.
    """
    answers = {}
    for i, answer in stream:
        answers[i] = answer
        if stop is not None and len(answers) % 16 == 0 and stop():
            return None
    return state.stacked([answers[i] for i in range(len(answers))])


def in_order(stream):
    """Yields a stream's (i, Answer i) in the order of the prompts, each when it can."""
    waiting, due = {}, 0
    for i, answer in stream:
        waiting[i] = answer
        while due in waiting:
            yield due, waiting.pop(due)
            due += 1


def decode(trace: Trace, tok) -> list[str]:
    """Returns the answers' texts, without special tokens."""
    rows = zip(trace.tokens_BT, trace.prompt_len_B, trace.len_B, strict=True)
    answers = [tokens[first : first + count] for tokens, first, count in rows]
    return tok.batch_decode(
        answers, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def record(answer: Answer, prompt: list[int]) -> dict:
    """Returns an answer as a JSON-able record: ids, steps, log-probs."""
    first = int(answer.prompt_len)
    span = slice(first, first + int(answer.len))
    finished = "stop" if answer.stopped else "length"
    if answer.len == 0:
        finished = "skipped"
    return {
        "prompt_ids": [int(t) for t in prompt],
        "response_ids": answer.tokens_T[span].tolist(),
        "step_map": answer.step_T[span].tolist(),
        "logprobs": [round(float(x), 6) for x in answer.logp_T[span]],
        "confidence": [round(float(x), 6) for x in answer.conf_T[span]],
        "forwards": int(answer.forwards),
        "finished": finished,
    }
