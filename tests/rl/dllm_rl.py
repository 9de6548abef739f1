"""dLLM-RL's training rows: goldens as our host traces, and our batches as its rows.

The reference trains on rows [prompt | clean response | noisy response], one for each
round: row r supervises the r-th step of every block. Its prompts are padded on the left
to L0 and its responses on the right to L1, and its blocks start at the response
(`grid="response"`).
"""

import dataclasses

import jax
import numpy as np

from dllm_jax.rl import noise, views
from dllm_jax.rl.config import BatchConfig, NoiseConfig
from dllm_jax.rl.layout import Layout
from dllm_jax.sampling.state import GIVEN, Trace
from tests.goldens import reader

read, tensors = reader.read, reader.tensors


def trace(tokens_nT, step_nT, prompt_len_n, len_n) -> Trace:
    """Returns a host trace without what only the sampler knows."""
    tokens_nT, step_nT = np.asarray(tokens_nT), np.asarray(step_nT)
    zero_nT = np.zeros(tokens_nT.shape, np.float32)
    zero_n = np.zeros(len(tokens_nT), np.int32)
    return Trace(
        tokens_BT=tokens_nT.astype(np.int32),
        step_BT=step_nT.astype(np.int32),
        logp_BT=zero_nT,
        conf_BT=zero_nT,
        prompt_len_B=np.asarray(prompt_len_n, np.int32),
        len_B=np.asarray(len_n, np.int32),
        steps_B=zero_n,
        forwards_B=zero_n,
        stopped_B=zero_n.astype(bool),
        bad_B=zero_n.astype(bool),
    )


def padded(samples, pad_id: int, *, post_num, max_prompt=784, max_gen=2000):
    """Returns one trace for each sample, padded as the reference pads the whole set.

    Pads are a last step of their own. They belong to the answer unless `post_num` is 0.
    Steps are counted one higher, as ours start at 1.
    """
    kept = [s for s in samples if len(s["prompt"]) <= max_prompt]
    L1 = min(max(len(s["response"]) for s in kept), max_gen)
    out = []
    # Steps are not filtered with the prompts: the reference shifts them.
    for sample, stepped in zip(kept, samples, strict=False):
        response = sample["response"][:L1]
        response += [pad_id] * (L1 - len(response))
        steps = stepped.get("step_map")
        steps = list(range(L1)) if steps is None else steps[:L1]
        steps += [max(steps) + 1] * (L1 - len(steps))
        answer = L1 if post_num != 0 else sum(t != pad_id for t in response)
        prompt = sample["prompt"]
        out.append(
            trace(
                [prompt + response],
                [[GIVEN] * len(prompt) + [step + 1 for step in steps]],
                [len(prompt)],
                [answer],
            )
        )
    return out


def pack(one: Trace, noised, *, mask_id: int, block: int, tokens=None):
    """Returns (TrainBatch, Source) of one row, on the reference's grid."""
    T = one.tokens_BT.shape[1]
    return views.pack(
        one,
        noised if isinstance(noised, noise.Noise) else noise.of_steps(noised),
        mask_id=mask_id,
        layout=layout(block),
        cfg=BatchConfig(rows=1, tokens=tokens or T * (block + 1)),
        most=1,
        aggregate="token",
    )


def layout(block: int) -> Layout:
    """Returns the reference's grid."""
    return Layout(block=block, grid="response")


def pack_each(traces, noises, *, mask_id: int, block: int, tokens: int, count=0):
    """Returns (TrainBatch, Source): a microbatch for each trace, and empty ones after.

    The traces differ in length, as the reference's blocks end where a response is cut.
    """
    packs = [
        pack(one, noised, mask_id=mask_id, block=block, tokens=tokens)
        for one, noised in zip(traces, noises, strict=True)
    ]
    empty = trace([[0]], [[GIVEN]], [1], [0])
    for _ in range(count - len(packs)):
        packs.append(
            pack(empty, empty.step_BT, mask_id=mask_id, block=block, tokens=tokens)
        )

    def join(*parts):
        return np.int32(len(traces)) if parts[0].ndim == 0 else np.concatenate(parts)

    rows = [np.where(source.row_mBU < 0, -1, i) for i, (_, source) in enumerate(packs)]
    source = views.Source(
        np.concatenate(rows), np.concatenate([source.pos_mBU for _, source in packs])
    )
    return jax.tree.map(join, *[batch for batch, _ in packs]), source


def row_numbers(batch, source, shape):
    """Returns the reference's row, [n, T], of every supervised token; -1 elsewhere."""
    out_nT, first = np.full(shape, -1), 0
    found = apart(batch, source)
    for i in range(shape[0]):
        parts = rounds([view for view in found if view.row == i])
        for r, part in enumerate(parts):
            for view in part:
                out_nT[i, view.supervised] = first + r
        first += len(parts)
    return out_nT


def rounds_of(one: Trace, shrink: int, block: int):
    """Returns the reference's TraceRL noise of a trace."""
    return noise.noised(one, NoiseConfig(shrink=shrink), layout(block))


@dataclasses.dataclass
class View:
    """A noised block of a batch."""

    row: int  # trajectory
    pos: np.ndarray  # its positions in the canvas
    shown: np.ndarray  # what stands there
    supervised: np.ndarray  # positions
    target: np.ndarray


def apart(batch, source) -> list[View]:
    """Takes a batch apart into its noised blocks, in order."""
    out = []
    for a, b in np.ndindex(batch.group_BT.shape[:2]):
        group_T, where_U = batch.group_BT[a, b], batch.where_BU[a, b]
        held_U = source.row_mBU[a, b] >= 0
        for group in np.unique(group_T[group_T >= 0]):
            slots = np.flatnonzero(group_T == group)
            seats = np.flatnonzero(held_U & np.isin(where_U, slots))
            (row,) = np.unique(source.row_mBU[a, b, seats])
            pos = source.pos_mBU[a, b, seats]
            np.testing.assert_array_equal(batch.pos_BT[a, b, where_U[seats]], pos)
            out.append(
                View(
                    row=int(row),
                    pos=batch.pos_BT[a, b, slots],
                    shown=batch.tokens_BT[a, b, slots],
                    supervised=pos,
                    target=batch.target_BU[a, b, seats],
                )
            )
    return out


def rounds(found: list[View]) -> list[list[View]]:
    """Returns one trajectory's views by round: the r-th views of all blocks."""
    out = []
    for start in sorted({view.pos[0] for view in found}):
        for r, view in enumerate(v for v in found if v.pos[0] == start):
            out += [[]] * (r + 1 - len(out))
            out[r] = [*out[r], view]
    return out


def first_pads(selected_L, is_pad_L, post_num):
    """Returns a row's selected positions, of the pads at most `post_num` from the left."""
    if post_num is None:
        return selected_L
    surplus_L = np.cumsum(selected_L & is_pad_L) > post_num
    return selected_L & ~(is_pad_L & surplus_L)
