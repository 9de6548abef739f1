"""Views: which noised blocks a trajectory is trained on, packed into fixed rows.

A *round* of a block supervises the tokens that one (shrunk) step unmasked, with those of
this and later steps masked and earlier ones shown: what the sampler saw when it drew them
(TraceRL, arXiv 2509.06949, section 4.1). A trajectory is laid out as one clean copy
followed by its noised blocks, one for each round; a noised block sees the clean tokens
before it and itself (`models.mask.packed`). Several trajectories share a row.

Everything here is numpy on the host; the result is a TrainBatch of one fixed shape.
"""

import dataclasses

import flax.struct
import numpy as np

from dllm_jax.models.mask import FAR
from dllm_jax.rl.config import BatchConfig, NoiseConfig
from dllm_jax.sampling.state import GIVEN


@flax.struct.dataclass
class TrainBatch:
    """B rows of T slots, of which U are supervised.

    As packed it is a stack of A microbatches: every array has a leading A, and the first
    `used` of them hold something. Optional fields are what an objective asks for.
    """

    used: np.ndarray  # int32 scalar
    tokens_BT: np.ndarray
    pos_BT: np.ndarray  # rotary position: restarts with every trajectory
    begin_BT: np.ndarray  # models.mask.packed
    end_BT: np.ndarray
    group_BT: np.ndarray
    where_BU: np.ndarray  # slot of each supervised token
    target_BU: np.ndarray  # the token to predict there
    weight_BU: np.ndarray  # its share of the loss; 0: filling
    adv_BU: np.ndarray | None = None
    old_logp_BU: np.ndarray | None = None
    ref_logp_BU: np.ndarray | None = None
    ret_BU: np.ndarray | None = None
    old_value_BU: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """Where each supervised slot comes from: (trajectory, position), -1 for filling."""

    row_ABU: np.ndarray
    pos_ABU: np.ndarray

    def gather(self, x_nT):
        """Returns the [n, T] array's values in the batch's order; 0 for filling."""
        return np.where(self.row_ABU >= 0, x_nT[self.row_ABU, self.pos_ABU], 0).astype(
            np.float32
        )

    def scatter(self, x_ABU, shape):
        """Returns an [n, T] array with the batch's values in place; 0 elsewhere."""
        out_nT = np.zeros(shape, np.float32)
        held = self.row_ABU >= 0
        out_nT[self.row_ABU[held], self.pos_ABU[held]] = np.asarray(x_ABU)[held]
        return out_nT


def grid(T: int, prompt_len: int, block: int, kind: str):
    """Returns the block number of each position, counted from 0.

    "absolute" is the sampler's grid pos // Q. "response" starts a block at the answer's
    first token, as dLLM-RL trains: blocks of the prompt are counted back from its end.
    """
    phase = prompt_len % block if kind == "response" else 0
    return (np.arange(T) - phase) // block + (phase > 0)


def shrink(step_T, grid_T, size: int):
    """Merges each block's neighbouring steps, `size` at a time, into the largest.

    What was never unmasked is no step: a token merged with it would be lost.
    """
    out_T = step_T.copy()
    taken_T = (step_T != GIVEN) & (step_T != FAR)
    for block in np.unique(grid_T[taken_T]):
        inside = taken_T & (grid_T == block)
        steps, index = np.unique(step_T[inside], return_inverse=True)
        last = np.minimum((index // size + 1) * size, len(steps)) - 1
        out_T[inside] = steps[last]
    return out_T


def bernoulli(step_T, rng: np.random.Generator, cfg: NoiseConfig):
    """Masks each token that is not given by a coin of its own; masked ones are step 1."""
    rate_T = rng.uniform(cfg.lower, cfg.upper, step_T.shape)
    masked_T = (rng.random(step_T.shape) < rate_T) & (step_T != GIVEN)
    return np.where(masked_T, 1, GIVEN).astype(step_T.dtype)


def subset(step_T, answer_T, grid_T, rng: np.random.Generator):
    """Masks l of the n answer tokens of each block, l uniform in 1 .. n; they are step 1.

    With weight n / l for each (weights "elbo") the log-probs sum to an unbiased estimate
    of the evidence lower bound (LLaDA, arXiv 2502.09992, Eq. 6), a block after the other.
    What follows the answer stays masked.
    """
    out_T = np.where(answer_T | (step_T == GIVEN), GIVEN, FAR).astype(step_T.dtype)
    for block in np.unique(grid_T[answer_T]):
        inside = rng.permutation(np.flatnonzero(answer_T & (grid_T == block)))
        out_T[inside[: rng.integers(len(inside)) + 1]] = 1
    return out_T


def noised_steps(trace, cfg: NoiseConfig, block: int, rng=None):
    """Returns the step map [n, T] that decides the rounds of every trajectory."""
    T = trace.tokens_BT.shape[1]
    if cfg.kind == "bernoulli":
        return np.stack([bernoulli(row, rng, cfg) for row in trace.step_BT])
    if cfg.kind == "subset":
        rows = zip(trace.step_BT, answers(trace), trace.prompt_len_B, strict=True)
        return np.stack(
            [subset(s, a, grid(T, p, block, cfg.grid), rng) for s, a, p in rows]
        )
    if cfg.shrink == 1:
        return trace.step_BT
    return np.stack(
        [
            shrink(row, grid(T, prompt, block, cfg.grid), cfg.shrink)
            for row, prompt in zip(trace.step_BT, trace.prompt_len_B, strict=True)
        ]
    )


def answers(trace):
    """Returns where [n, T] each trajectory's answer is: the tokens to supervise."""
    pos_1T = np.arange(trace.tokens_BT.shape[1])[None]
    first_n1 = trace.prompt_len_B[:, None]
    return (pos_1T >= first_n1) & (pos_1T < first_n1 + trace.len_B[:, None])


@dataclasses.dataclass
class Piece:
    """A part of a trajectory that goes into one row: a clean copy and noised blocks."""

    row: int
    clean: int  # length of the clean copy: up to the last noised block's start
    slots: list  # per noised block: its positions
    rounds: list  # per noised block: the step that it supervises
    cost: int
    supervised: int


def pieces(row: int, step_T, answer_T, grid_T, capacity: int, slots: int) -> list:
    """Returns the trajectory's noised blocks, cut where a row of `capacity` is full.

    A noised block belongs to every (block, step) in which an answer token was unmasked.
    A piece supervises at most `slots` tokens. Raises ValueError when a clean copy and one
    block do not fit into a row.
    """
    out = []
    wanted_T = answer_T & (step_T != GIVEN) & (step_T != FAR)
    for block in np.unique(grid_T[wanted_T]):
        inside = np.flatnonzero(grid_T == block)
        for step in np.unique(step_T[inside][wanted_T[inside]]):
            count = int((wanted_T[inside] & (step_T[inside] == step)).sum())
            grow = inside[0] - out[-1].clean + len(inside) if out else 0
            if (
                not out
                or out[-1].cost + grow > capacity
                or out[-1].supervised + count > slots
            ):
                out.append(Piece(row, 0, [], [], 0, 0))
                grow = int(inside[0]) + len(inside)
            if grow > capacity or count > slots:
                raise ValueError(
                    f"batch.tokens={capacity} is too small for a trajectory of "
                    f"{int(inside[-1]) + 1} tokens and one noised block of {len(inside)}"
                )
            piece = out[-1]
            piece.clean = int(inside[0])
            piece.slots.append(inside)
            piece.rounds.append(step)
            piece.cost += int(grow)
            piece.supervised += count
    return out


def fit(items: list[Piece], capacity: int, slots: int) -> list[list[Piece]]:
    """Packs pieces into rows, first fit, longest first."""
    rows, room, free = [], [], []
    for item in sorted(items, key=lambda piece: -piece.cost):
        for i in range(len(rows)):
            if item.cost <= room[i] and item.supervised <= free[i]:
                break
        else:
            i = len(rows)
            rows.append([])
            room.append(capacity)
            free.append(slots)
        rows[i].append(item)
        room[i] -= item.cost
        free[i] -= item.supervised
    return rows


def microbatches(
    trajectories: int,
    slots: int,
    answer: int,
    block: int,
    rounds: int,
    cfg: BatchConfig,
) -> int:
    """Returns how many microbatches always suffice for so many trajectories.

    `slots` is a canvas, `answer` the longest answer, `rounds` the most rounds of a block.
    """
    noised = (-(-answer // block) + 1) * block * rounds
    if slots + noised <= cfg.tokens:
        cost = slots + noised
    else:
        cost = -(-noised // max(cfg.tokens - slots, block)) * cfg.tokens
    rows = 2 * -(-trajectories * cost // cfg.tokens) + 1  # first fit fills half a row
    return -(-min(rows, trajectories * -(-cost // cfg.tokens)) // cfg.rows)


def pack(
    trace,
    step_nT,
    *,
    mask_id: int,
    block: int,
    grid_kind: str,
    cfg: BatchConfig,
    most: int,
    aggregate: str,
    longest: int,
    group_n=None,
):
    """Returns (TrainBatch, Source) of `most` microbatches for one update.

    trace: a host Trace of n trajectories; step_nT: `noised_steps` of it; aggregate,
    longest (tokens) and group_n (None: each its own): how tokens are weighed, see
    ObjectiveConfig.
    """
    n, T = step_nT.shape
    answer_nT = answers(trace)
    half = cfg.tokens // 2
    items, grids = [], []
    for i in range(n):
        grids.append(grid(T, int(trace.prompt_len_B[i]), block, grid_kind))
        items += pieces(i, step_nT[i], answer_nT[i], grids[i], cfg.tokens, half)
    rows = fit(items, cfg.tokens, half)
    if len(rows) > most * cfg.rows:
        raise ValueError(
            f"{len(rows)} packed rows do not fit {most} microbatches of "
            f"batch.rows={cfg.rows}; raise batch.tokens"
        )

    def filled(width, value=0):
        return np.full((most * cfg.rows, width), value, np.int32)

    # What stays as it is, with end = begin, sees nothing, and nothing sees it.
    tokens, pos, begin = (filled(cfg.tokens) for _ in range(3))
    end, group = filled(cfg.tokens), filled(cfg.tokens, -1)
    where, target = filled(half), filled(half)
    row, at, size = filled(half, -1), filled(half), filled(half, 1)
    of = filled(
        half, 1
    )  # the block's answer tokens, of which a round supervises `size`
    for r, packed in enumerate(rows):
        first, supervised = 0, 0  # next free slot, next free supervised slot
        for piece in packed:
            i, c = piece.row, piece.clean
            grid_T, tokens_T, step_T = grids[i], trace.tokens_BT[i], step_nT[i]
            starts = np.searchsorted(grid_T, grid_T)  # of each position's block
            ends = np.searchsorted(grid_T, grid_T, side="right")
            noised = np.concatenate(piece.slots)
            which = np.repeat(
                np.arange(len(piece.slots)), [len(s) for s in piece.slots]
            )
            round_of = np.asarray(piece.rounds)[which]
            all_pos = np.concatenate([np.arange(c), noised])
            span = slice(first, first + len(all_pos))
            masked = step_T[noised] >= round_of
            tokens[r, span] = np.concatenate(
                [tokens_T[:c], np.where(masked, mask_id, tokens_T[noised])]
            )
            pos[r, span] = all_pos
            begin[r, span] = first
            end[r, span] = first + np.concatenate([ends[:c], starts[noised]])
            # Ids only have to differ within a row: the block's first slot is one.
            group[r, first + c : span.stop] = first + c + np.searchsorted(which, which)

            hit = np.flatnonzero((step_T[noised] == round_of) & answer_nT[i][noised])
            seat = slice(supervised, supervised + len(hit))
            where[r, seat] = first + c + hit
            target[r, seat] = tokens_T[noised[hit]]
            row[r, seat], at[r, seat] = i, noised[hit]
            count = len(piece.slots)
            size[r, seat] = np.bincount(which[hit], minlength=count)[which[hit]]
            inside = which[answer_nT[i][noised]]
            of[r, seat] = np.bincount(inside, minlength=count)[which[hit]]
            first, supervised = span.stop, seat.stop
    held = row >= 0
    group_n = np.arange(n) if group_n is None else group_n
    weight = weights(aggregate, row, size, of, trace, longest, held, group_n)
    weight = np.where(held, weight, 0.0)

    def cut(x):
        return x.reshape(most, cfg.rows, -1)

    batch = TrainBatch(
        used=np.int32(-(-len(rows) // cfg.rows)),
        tokens_BT=cut(tokens),
        pos_BT=cut(pos),
        begin_BT=cut(begin),
        end_BT=cut(end),
        group_BT=cut(group),
        where_BU=cut(where),
        target_BU=cut(target),
        weight_BU=cut(weight.astype(np.float32)),
    )
    return batch, Source(row_ABU=cut(row), pos_ABU=cut(at))


def weights(aggregate: str, row, size, of, trace, longest: int, held, group_n):
    """Returns each supervised token's share of an update's loss."""
    n = len(trace.len_B)
    if aggregate == "token":
        return 1.0 / max(held.sum(), 1)
    if aggregate == "sequence":
        return 1.0 / (n * np.maximum(trace.len_B, 1)[row])
    if aggregate == "step":
        return 1.0 / (n * size)
    if aggregate == "group":  # DiPO (arXiv 2512.22234) Eq. 7
        steps = np.bincount(group_n[row[held]], 1.0 / size[held], group_n.max() + 1)
        groups = max(np.count_nonzero(steps), 1)
        return 1.0 / (groups * np.maximum(steps, 1)[group_n[row]])
    if aggregate == "elbo":
        return of / size / max(trace.len_B.sum(), 1)
    return 1.0 / (n * longest)
