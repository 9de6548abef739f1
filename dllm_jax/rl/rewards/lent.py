"""A judge that is a checkpoint: sampled by the engine, on the devices of the run.

Its weights and pages lie there beside the policy's for the whole run, and the plan of the
run's memory counts them. They are loaded when it is first asked, which is after the run was
found to fit. One process alone: each would ask other questions.
"""

import collections
import dataclasses
import zlib

import jax

from dllm_jax import data, memory
from dllm_jax.models import families, hf
from dllm_jax.rl.rewards.endpoint import TOP_P
from dllm_jax.sampling import answers, placement
from dllm_jax.sampling.config import SamplerConfig


class Lent:
    """Answers questions with a checkpoint. cfg: rl.config.JudgeConfig."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.tok = self.model = self.place = self.answerer = self.params = None

    def begin(self) -> list[str]:
        """Reads what the checkpoint is; returns what is to be said of it.

        Raises ValueError for one that cannot be read, and where there are many processes.
        """
        cfg = self.cfg
        if jax.process_count() > 1:
            raise ValueError(
                f"reward.judge.at={cfg.at!r}: a checkpoint judges in a run of one process; "
                "serve it over HTTP, and name the URL"
            )
        path = hf.find(cfg.at)
        self.model = dataclasses.replace(
            families.adapt(hf.read_config(path), attention="", shift=-1, mask_id=-1),
            dtype="bfloat16",
        )
        hf.check(path, self.model)
        self.tok = data.tokenizer(path)
        return [f"judge: the checkpoint {cfg.at}, {cfg.votes} votes"]

    def claim(self, beside: int, slots: int) -> memory.Claim:
        """Takes its place on the mesh in force; returns what it takes: see Grader.claim."""
        cfg = self.cfg
        sampler = SamplerConfig(
            block=self.model.block,
            temperature=cfg.temperature,
            top_p=TOP_P,
            max_prompt=cfg.prompt,
            max_new=cfg.tokens,
            rows=cfg.rows,
            stop_ids=data.stop_ids(self.tok, self.model.eos_id),
        )
        self.place = placement.place(
            model=self.model,
            cfg=sampler,
            mesh=jax.sharding.get_mesh(),
            beside=beside,
            limit=memory.device_bytes(),
        )
        lowered, between_calls = self.place.answerer.lower(self.place.weights)
        always = {
            "judge": memory.array_bytes(self.place.weights),
            "its rows and pages": memory.array_bytes(between_calls),
        }
        return memory.Claim(always, {"judge": memory.program_bytes(lowered.compile())})

    def load(self):
        """Loads the weights to where `claim` said."""
        if self.place is None:
            self.claim(0, 0)
        self.answerer, self.params = placement.filled(
            hf.find(self.cfg.at),
            self.place,
            model=self.model,
            mesh=jax.sharding.get_mesh(),
        )

    def answers(self, conversations: list[list[dict]]):
        """Returns (the text that answers each, or None; a Counter of the reasons for None).

        The draws are a function of the questions, so that a run that is resumed goes on as
        if it had not stopped.
        """
        prompts = [data.render(self.tok, messages) for messages in conversations]
        if not prompts:
            return [], collections.Counter()
        if self.params is None:
            self.load()
        stream = self.answerer.stream(
            self.params,
            prompts,
            jax.random.key(zlib.crc32(repr(prompts).encode())),
            temperature=self.cfg.temperature,
        )
        trace = answers.collect(stream, len(prompts))
        texts = answers.decode(trace, self.tok)
        told = trace.len_B > 0
        reasons = collections.Counter()
        if unsaid := int((~told).sum()):
            reasons["longer than reward.judge.prompt, or not finite"] = unsaid
        pairs = zip(texts, told.tolist(), strict=True)
        return [text if ok else None for text, ok in pairs], reasons
