"""A reward model as a grader: the score that its value head gives an answer.

What `configs/rlhf.py:reward` trains (Bradley-Terry, on pairs of answers) is a checkpoint of
any family with a value head. The score of an answer is the head's at the answer's end, with
the end token masked and all before it shown, just as noise.kind="end" trains it: whatever
the family, that one position sees the whole answer.

Scores have no zero and no unit: what counts is how they differ within a group. The model
must share the policy's tokenizer, as answers are scored on the ids that were sampled. It
lies on one device of each process, whose memory's plan counts it, and is loaded when the
first answer is to be scored, which is after the run was found to fit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import data, memory, sharding
from dllm_jax.models import hf, mask, repository, transformer

ROWS = 16  # canvases of a forward


class Ranker:
    """Scores answers. path: of the reward model; tok: the policy's tokenizer."""

    def __init__(self, path: str, tok):
        self.path, self.tok = path, tok
        self.mesh = self.params = self.score = self.model = None

    def begin(self) -> list[str]:
        """Reads what the model is; raises ValueError where it cannot judge the policy's."""
        folder = repository.find(self.path)
        own = data.tokenizer(folder)
        if self.tok is not None and own.get_vocab() != self.tok.get_vocab():
            raise ValueError(
                f"reward.model={self.path!r} has another tokenizer than the policy; it "
                "scores the very tokens that were sampled"
            )
        self.mesh = sharding.make_mesh(fsdp=1, devices=jax.local_devices()[:1])
        self.model, valued = hf.headers(folder)
        if not valued:
            raise ValueError(
                f"reward.model={self.path!r} has no value head: it is no reward model; "
                "configs/rlhf.py:reward trains one"
            )
        if self.model.attention != "causal" and self.model.mask_id >= self.model.vocab:
            raise ValueError(f"reward.model={self.path!r} has no mask token")
        self.score = jax.jit(functools.partial(scores, model=self.model))
        return [f"reward model: {self.path}"]

    def claim(self, beside: int, slots: int) -> memory.Claim:
        """Returns what it takes of its device: see Grader.claim."""
        kind = self.model.dtype
        params = transformer.abstract(self.model, self.mesh, kind, ("value",))
        wide = -(-(slots + 1) // self.model.block) * self.model.block
        tokens_BT = jax.ShapeDtypeStruct((ROWS, wide), np.int32)
        end_B = jax.ShapeDtypeStruct((ROWS,), np.int32)
        with jax.set_mesh(self.mesh):
            compiled = self.score.lower(params, tokens_BT, end_B).compile()
        always = {"reward model": memory.array_bytes(params)}
        return memory.Claim(always, {"reward model": memory.program_bytes(compiled)})

    def load(self):
        """Loads the weights, but for a language head."""
        folder, kind = repository.find(self.path), self.model.dtype
        _, self.params = hf.load(folder, mesh=self.mesh, dtype=kind, heads=("value",))

    def grade(self, trace) -> np.ndarray:
        """Returns the score of each answer of a host Trace; NaN for one without tokens."""
        if self.params is None:
            self.load()
        n, T = trace.tokens_BT.shape
        slots = -(-(T + 1) // self.model.block) * self.model.block
        tokens_nT = np.full((n, slots), self.model.mask_id, np.int32)
        tokens_nT[:, :T] = trace.tokens_BT
        # The place of the end token: the last one's, or after it where an answer was cut.
        end_n = trace.prompt_len_B + trace.len_B - trace.stopped_B
        tokens_nT[np.arange(slots)[None] >= end_n[:, None]] = self.model.mask_id
        score_n = np.full(n, np.nan, np.float32)
        for first in range(0, n, ROWS):
            rows = np.minimum(np.arange(first, first + ROWS), n - 1)
            with jax.set_mesh(self.mesh):
                score_B = self.score(self.params, tokens_nT[rows], end_n[rows])
            score_n[rows] = np.asarray(score_B)
        return np.where(trace.len_B > 0, score_n, np.nan)


def scores(params, tokens_BT, end_B, *, model):
    """Returns the value head's output at position `end` of each canvas, [B], f32.

    tokens_BT: the mask token from `end` on.
    """
    pos_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    seen = mask.clean(model.attention, pos_BT, end_B + 1, model.block)
    x_BTD = transformer.embed(params, tokens_BT, model)
    x_BTD, _, _ = transformer.trunk(params, x_BTD, pos_BT, seen, model)
    where_BU = (end_B - model.shift)[:, None]
    x_BUD = jnp.take_along_axis(x_BTD, where_BU[..., None], axis=1)
    return transformer.value(params, x_BUD)[:, 0]
