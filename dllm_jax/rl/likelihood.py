"""How likely a model finds a given answer: exactly, or from below.

A model that predicts from left to right tells it exactly, and so does one of blocks of one
token. Others bound it: the mean over noise draws of sum share log p is the evidence lower bound
(LLaDA, arXiv 2502.09992, Eq. 6 and appendix B, which takes 128 draws), block after block where
attention is by blocks. The noise, the packing and the program are those of training.
"""

import dataclasses
import functools
import zlib

import jax
import numpy as np

from dllm_jax import data, sharding
from dllm_jax.models.config import ModelConfig
from dllm_jax.pallas_kernels import choice
from dllm_jax.rl import batches, bounds, layout, learner, noise, views
from dllm_jax.rl.config import BatchConfig, NoiseConfig, OptimConfig
from dllm_jax.sampling.config import SamplerConfig


class Likelihood:
    """Log-likelihoods of answers under one set of weights."""

    def __init__(
        self,
        params,
        *,
        model: ModelConfig,
        cfg: SamplerConfig,
        batch: BatchConfig,
        draws: int,
        seed: int,
        mesh,
    ):
        """params: as hf.load lays them out, with the head "lm". draws: of the noise.

        cfg: its max_prompt and max_new are the most tokens of prompts and answers.
        """
        self.params, self.model, self.cfg = {"policy": params}, model, cfg
        self.mesh, self.seed = mesh, seed
        masks = layout.ATTENTIONS[model.attention].masks
        one = masks and cfg.block == 1 and model.attention == "block"
        self.noise = NoiseConfig(
            kind="subset" if masks else "ar", draws=1 if one or not masks else draws
        )
        seen = layout.of(model, cfg, self.noise)
        rounds = noise.rounds(self.noise, seen, cfg.max_new)
        devices = sharding.row_shards(mesh)
        wide = dataclasses.replace(
            batch, tokens=batch.tokens or seen.width(cfg.slots, rounds)
        ).on(devices, choice.platform())
        # An answer is scored at its own length: no masks stand behind it but those that
        # fill its last block, where attention is by blocks.
        self.layout = dataclasses.replace(seen, longest=1)
        most = layout.microbatches(
            trajectories=1,
            slots=cfg.slots,
            answer=cfg.max_new,
            rounds=rounds,
            copies=self.noise.copies,
            layout=seen,
            cfg=wide,
        )
        self.pack = functools.partial(
            views.pack,
            mask_id=model.mask_id,
            layout=self.layout,
            cfg=wide,
            most=most,
            aggregate="elbo",
            copies=self.noise.copies,
            draws=self.noise.draws,
        )
        plans = {"policy": learner.Plan(("nll",), OptimConfig(), 1)}
        self.score = jax.jit(functools.partial(learner.score, model=model, plans=plans))

    def of(self, prompt: list[int], answer: list[int]) -> float:
        """Returns the log-likelihood of an answer, or its bound, in nats.

        The noise is a function of the seed and of what is scored, whatever else is. Raises
        ValueError for what does not fit.
        """
        if not prompt or not answer:
            raise ValueError("a likelihood needs a prompt and an answer")
        if len(prompt) + len(answer) > self.cfg.slots or len(answer) > self.cfg.max_new:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens with an answer of {len(answer)} does "
                f"not fit sampler.max_prompt={self.cfg.max_prompt} and sampler.max_new="
                f"{self.cfg.max_new}"
            )
        example = data.Example(prompt, answer, [1] * len(answer))
        examples = data.stacked([example], self.model.pad_id, self.cfg.slots)
        content = np.array([*prompt, -1, *answer], np.int64).tobytes()
        rng = np.random.default_rng([self.seed, zlib.crc32(content)])
        noised = noise.noised(examples, self.noise, self.layout, rng)
        copies = self.noise.copies
        batch, source = self.pack(batches.take(examples, np.zeros(copies, int)), noised)
        with jax.set_mesh(self.mesh):
            placed = sharding.place_rows(batch, self.mesh, axis=1)
            out = sharding.fetch(self.score(self.params, placed))["policy"]
        logp_nT = source.scatter(out["logp"], noised.step_nT.shape)
        return float(bounds.lower_bound(logp_nT, noised.share_nT, copies)[0])
