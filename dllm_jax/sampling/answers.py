"""Prompts in, answers out: the front door of sampling.

An *answerer* is what answers the prompts of a run: `Engine` (continuous batching), or
`Batches` where an answer is guided or something stands behind it, as in drawings. Every
answerer has these two methods, and its callers know no others:

    stream(params, prompts, key, *, temperature, new=None, watch=None, stop=None)
        Yields (i, Answer i) as answers end; prompt i draws from fold_in(key, i). A
        prompt that is empty or longer than `cfg.max_prompt` gets `state.no_answer`; the
        caller reports it. new: of each prompt, the most tokens of its answer, a text, 1 to
        `cfg.max_new`; None: that for all. Raises ValueError for token ids, and a
        temperature, that the model cannot take, before any is begun. watch: called with (i,
        first position of its present block, its Answer so far) after every forward, for
        those who show an answer as it grows. stop: asked after every turn, which is at most
        `denoise.TURN` forwards, and equally often in every process; once it says so no more
        answers come, and the last to come are those that have ended.
    lower(params)
        Returns (the program that samples, lowered; the arrays that it keeps between
        calls, as shapes), for the memory plan. params: arrays, or their shapes with
        shardings.

`params` are those of models/acting.py, on the mesh of the answerer: `placement.py` says
which. The same in every process: each queues the same prompts and fetches the same answers.
"""

import dataclasses
import sys

import jax
import numpy as np

from dllm_jax import exits, sharding
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision.prompts import pictures_of
from dllm_jax.sampling import denoise, policy, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.engine import Engine
from dllm_jax.sampling.rows import traces
from dllm_jax.sampling.scheduler import refuse
from dllm_jax.sampling.state import Answer, SamplingState, Trace


def answerer(*, model: ModelConfig, cfg: SamplerConfig, mesh):
    """Returns the answerer that serves what the config asks for.

    Guidance, for which every row has a second canvas, and what stands behind an answer are
    of whole batches: drawn answers have one length and end together. Raises ValueError as
    `policy.choose` does, and for pages where nothing is cached.
    """
    cached = policy.choose(cfg, model.attention).cached
    if cfg.pages and not cached:
        raise ValueError(
            f"sampler.pages={cfg.pages}: there are none with sampler.cache="
            f"{policy.name_of(cfg, model.attention)!r}; set it to 0"
        )
    if cfg.guidance or cfg.tail:
        return Batches(model=model, cfg=cfg, mesh=mesh)
    return Engine(model=model, cfg=cfg, mesh=mesh)


class Batches:
    """Batches of `cfg.rows` prompts in lock-step: each ends with its slowest row.

    On a mesh there are as many rows more as its shards divide.
    """

    def __init__(self, *, model: ModelConfig, cfg: SamplerConfig, mesh):
        for name in ("blank", "tail"):
            ids = getattr(cfg, name)
            if not all(token < model.vocab for token in ids):
                raise ValueError(f"sampler.{name}={ids}: ids are 0..{model.vocab - 1}")
        self.model, self.mesh = model, mesh
        shards = sharding.row_shards(mesh)
        self.cfg = dataclasses.replace(cfg, rows=-(-cfg.rows // shards) * shards)
        programs = denoise.advance, denoise.advance_on_gpu
        self.loop = denoise.loop_on(mesh.devices.flat[0].platform, cfg, *programs)

    def stream(
        self, params, prompts, key, *, temperature, new=None, watch=None, stop=None
    ):
        """Yields (i, Answer i), batch by batch: see the module."""
        n = len(prompts)
        new_n = np.array(self.cfg.lengths(new, n), np.int32)
        tokens_nT = np.zeros((n, self.cfg.max_prompt), np.int32)
        len_n = np.zeros(n, np.int32)
        for i, prompt in enumerate(prompts):
            if 0 < len(prompt) <= self.cfg.max_prompt:
                refuse(prompt, temperature, self.model)
                tokens_nT[i, : len(prompt)] = prompt
                len_n[i] = len(prompt)
        for first in range(0, n, self.cfg.rows):
            count = min(self.cfg.rows, n - first)  # fillers answer nothing
            if not len_n[first : first + count].any():
                for row in range(first, first + count):
                    yield row, state.no_answer(self.cfg.slots)
                continue
            arrays = self.batch(tokens_nT, len_n, new_n, first, key, temperature)
            for live_B, start_B, s in self.turns(params, arrays, bool(watch)):
                if watch:
                    trace = self.trace(s)
                    for row in range(count):
                        watch(first + row, start_B[row], state.answer(trace, row))
                stopped = stop is not None and stop()
                if stopped:
                    break
            trace = self.trace(s)
            for row in np.flatnonzero(~live_B[:count]).tolist():
                yield first + row, state.answer(trace, row)
            if stopped:
                return

    def release(self):
        """Drops what is kept between calls: nothing."""

    @sharding.on_own_mesh
    def lower(self, params):
        """Returns (the loop over forwards, lowered; its rows as shapes)."""
        one_1T = np.ones((1, self.cfg.max_prompt), np.int32)
        one_1 = one_1T[0, :1]
        arrays = self.rows(one_1T, one_1, one_1, 0, temperature=0.0)
        # Nothing is laid out, so that the devices need not be here.
        arrays = sharding.shapes_of_rows(arrays, self.mesh)
        key = jax.eval_shape(jax.random.key, 0)
        drawn = row_keys.lower(key, arrays.pop("index_B"))
        arrays["key_B"] = sharding.laid_out(drawn)
        static = {"model": self.model, "cfg": self.cfg.static}
        rows = sharding.laid_out(denoise.start.lower(params, **arrays, **static))
        return self.loop.lower(params, rows, denoise.TURN, **static), rows

    def turns(self, params, arrays, watched: bool):
        """Yields a batch's (live_B, start_B, SamplingState) after every turn.

        arrays: of `batch`. watched: a turn is one forward. The state is gone with the
        next turn. Raises RuntimeError where rows live longer than they can.
        """
        static = {"model": self.model, "cfg": self.cfg.static}
        steps = 1 if watched else denoise.TURN
        with jax.set_mesh(self.mesh):  # the caller has its own between two turns
            s = denoise.start(params, **arrays, **static)
        for _ in range(0, self.cfg.most_forwards, steps):
            with jax.set_mesh(self.mesh):
                s = self.loop(params, s, steps, **static)
                live_B, start_B = sharding.fetch((s.live_B, s.start_B))
            yield live_B, start_B, s
            if not live_B.any():
                return
        rows = np.flatnonzero(live_B).tolist()
        raise RuntimeError(
            f"rows {rows} of a batch live on after {self.cfg.most_forwards} forwards"
        )

    @sharding.on_own_mesh
    def trace(self, s: SamplingState) -> Trace:
        """Returns the host Trace of a batch's rows as they are."""
        whole = self.cfg.answers == "image"
        return sharding.fetch(traces(s, self.cfg.stop_ids, whole=whole))

    @sharding.on_own_mesh
    def batch(self, tokens_nT, len_n, new_n, first: int, key, temperature) -> dict:
        """Returns the arguments of `denoise.start` for prompts from `first` on."""
        arrays = self.rows(tokens_nT, len_n, new_n, first, temperature)
        arrays = sharding.place_rows(arrays, self.mesh)
        key = sharding.key_on(self.mesh, key)
        return arrays | {"key_B": row_keys(key, arrays.pop("index_B"))}

    def rows(self, tokens_nT, len_n, new_n, first: int, temperature) -> dict:
        """Returns them on the host; index_B: their prompts' numbers, of which keys are made."""
        n, rows = len(len_n), np.arange(first, first + self.cfg.rows)

        def each(value):
            return np.full(self.cfg.rows, value, np.float32)

        index = np.minimum(rows, n - 1)
        real = np.where(rows < n, len_n[index], 0)  # fillers never live
        return {
            "prompt_BT": tokens_nT[index],
            "prompt_len_B": real,
            "limit_B": real + new_n[index],
            "temperature_B": each(temperature),
            "threshold_B": each(self.cfg.threshold),
            "entropy_bound_B": each(self.cfg.entropy_bound),
            "index_B": index.astype(np.uint32),
        }


@jax.jit
def row_keys(key, index_B):
    """Returns one key per row, by its index alone."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, index_B)


def checked(stream, count: int, before: int = 0):
    """Yields a stream's answers; says at its end how many met numbers that are not finite.

    Raises exits.NotFinite where all did that were begun, of the `count` prompts' answers;
    before: how many of them an earlier attempt left, of which the stream tells nothing.
    """
    ended = begun = bad = 0
    for i, answer in stream:
        ended += 1
        if answer.forwards:
            begun += 1
        if answer.bad:
            bad += 1
        yield i, answer
    if bad and ended == count and bad == begun and not before:
        raise exits.NotFinite(f", in all of {begun} answers")
    if bad and jax.process_index() == 0:
        text = f"warning: {bad} of {begun} answers met numbers that are not finite"
        print(f"{text}: they are empty and earn 0", file=sys.stderr, flush=True)


def collect(stream, count: int) -> Trace | None:
    """Returns the host Trace of a stream's answers, in the order of its `count` prompts.

    None where the stream was stopped before the last of them.
    """
    answers = dict(stream)
    if len(answers) < count:
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
        finished = "nan" if answer.bad else "skipped"
    return {
        "prompt_ids": [int(t) for t in prompt],
        "response_ids": answer.tokens_T[span].tolist(),
        "step_map": answer.step_T[span].tolist(),
        "logprobs": [round(float(x), 6) for x in answer.logp_T[span]],
        "confidence": [round(float(x), 6) for x in answer.conf_T[span]],
        "forwards": int(answer.forwards),
        "finished": finished,
        **images_of(prompt),
    }


def answers_prompt(line: dict, prompt) -> bool:
    """Returns whether a record answers a prompt: its ids, and its images as they are now."""
    marks = [picture.mark for picture in pictures_of(prompt)]
    had = [image["mark"] for image in line.get("images", [])]
    return line.get("prompt_ids") == prompt and had == marks


def images_of(prompt) -> dict:
    """Returns a prompt's images as a record has them: {} where there are none.

    first_row: the id in the prompt with which an image begins, counted from the
    vocabulary's end; one whose codes are in the prompt has none.
    """
    images, row = [], 0
    for picture in pictures_of(prompt):
        images.append({"file": picture.file, "mark": picture.mark})
        images[-1] |= {"first_row": row} if picture.rows else {}
        row += picture.rows
    return {"images": images} if images else {}
