"""Layouts: how noised views of a trajectory are shown to the model, and what they cost.

block   one clean copy, then noised blocks: each sees the clean tokens before it and itself
full    a canvas of its own for every view: the prompt and the noised answer see each other
causal  the clean copy alone: each token sees those before it

The layout follows from the model's attention. In terms of `models.mask.packed`: begin is
the first slot, and a group the id of a noised block. Host numpy.
"""

import dataclasses

import numpy as np

from dllm_jax.models.mask import FAR
from dllm_jax.rl.config import BatchConfig


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a view looks like."""

    attention: str = "block"  # ModelConfig.attention
    shift: int = 0  # ModelConfig.shift: position i - shift answers for position i
    block: int = 4  # Q
    grid: str = "absolute"  # NoiseConfig.grid
    longest: int = 512  # tokens of an answer's canvas, whatever its length

    def numbers(self, T: int, prompt_len: int):
        """Returns the block of each position, counted from 0.

        "absolute" is the sampler's grid pos // Q. "response" starts a block at the answer's
        first token, as dLLM-RL trains: blocks of the prompt are counted back from its end.
        """
        phase = prompt_len % self.block if self.grid == "response" else 0
        return (np.arange(T) - phase) // self.block + (phase > 0)

    def scope(self, T: int, prompt_len: int):
        """Returns what is noised together: a block's number, or 0 for a whole canvas."""
        if self.attention == "block":
            return self.numbers(T, prompt_len)
        return np.zeros(T, int)

    def seats(self, cfg: BatchConfig) -> int:
        """Returns how many slots of a row can be supervised."""
        return cfg.tokens // 2 if self.attention == "block" else cfg.tokens


@dataclasses.dataclass
class Piece:
    """A part of a trajectory that goes into one row: a clean copy and noised views."""

    clean: int = 0  # length of the clean copy: up to the last noised block's start
    rows: list = dataclasses.field(default_factory=list)  # per view: its noise
    spans: list = dataclasses.field(default_factory=list)  # per view: its positions
    rounds: list = dataclasses.field(default_factory=list)  # per view: its step
    cost: int = 0
    supervised: int = 0


def cut(rows, prompt_len, length, noise, wanted_nT, layout: Layout, cfg: BatchConfig):
    """Returns the Pieces of a trajectory, none of which exceeds a row of the batch.

    rows: its noise. A view belongs to every (scope, round) in which a token is supervised.
    Raises ValueError when a clean copy and one block, or one canvas, do not fit into a row.
    """
    out, T = [], wanted_nT.shape[1]
    seats = layout.seats(cfg)
    scope_T = layout.scope(T, prompt_len)
    last = max(prompt_len + length, min(T, prompt_len + layout.longest))
    if layout.attention == "causal":
        last = prompt_len + length
    which, pos = np.nonzero(wanted_nT[rows])
    row = np.asarray(rows)[which]
    step = noise.step_nT[row, pos]
    if layout.attention == "causal":  # nothing is masked: one view has them all
        step = np.full_like(step, FAR + 1)
    views, counts = np.unique(
        np.stack([scope_T[pos], row, step]), axis=1, return_counts=True
    )
    edges = np.searchsorted(scope_T, [views[0], views[0] + 1])
    for first, stop, row, step, count in np.vstack(
        [edges, views[1:], counts]
    ).T.tolist():
        end = stop if layout.attention == "block" else last
        grow = first - out[-1].clean + end - first if out else 0
        if (
            not out
            or layout.attention != "block"
            or out[-1].cost + grow > cfg.tokens
            or out[-1].supervised + count > seats
        ):
            out.append(Piece())
            grow = end
        if grow > cfg.tokens or count > seats:
            raise ValueError(
                f"batch.tokens={cfg.tokens} is too small for a trajectory of "
                f"{end} tokens and one noised view of {end - first}"
            )
        piece = out[-1]
        piece.clean = first
        piece.rows.append(row)
        piece.spans.append((first, end))
        piece.rounds.append(step)
        piece.cost += grow
        piece.supervised += count
    return out


@dataclasses.dataclass
class Shown:
    """A piece in its slots, counted from its first one; seats are supervised tokens."""

    pos_T: np.ndarray
    masked_T: np.ndarray
    end_T: np.ndarray
    group_T: np.ndarray
    slot_U: np.ndarray
    row_U: np.ndarray  # noise
    pos_U: np.ndarray
    size_U: np.ndarray  # supervised tokens of its view


def present(piece: Piece, prompt_len, noise, wanted_nT, layout: Layout) -> Shown:
    """Returns what a piece looks like."""
    c, T = piece.clean, wanted_nT.shape[1]
    lengths = [end - first for first, end in piece.spans]
    which = np.repeat(np.arange(len(lengths)), lengths)
    noised = np.concatenate([np.arange(*span) for span in piece.spans])
    row = np.asarray(piece.rows)[which]
    now = np.asarray(piece.rounds)[which]
    step = noise.step_nT[row, noised]
    hit = wanted_nT[row, noised] & ((step == now) | (now > FAR))

    group_T = np.full(c + len(noised), -1)
    if layout.attention == "block":
        number_T = layout.scope(T, prompt_len)
        end_T = np.concatenate(
            [
                np.searchsorted(number_T, number_T[:c], side="right"),
                np.searchsorted(number_T, number_T[noised]),
            ]
        )
        # Ids only have to differ within a row: the view's first slot is one.
        group_T[c:] = c + np.searchsorted(which, which)
    elif layout.attention == "full":
        end_T = np.full(len(noised), len(noised))
    else:
        end_T = noised + 1

    hit = np.flatnonzero(hit)
    before = noised[hit] - layout.shift  # the position that answers
    first = np.asarray(piece.spans)[which[hit], 0]
    return Shown(
        pos_T=np.concatenate([np.arange(c), noised]),
        masked_T=np.concatenate([np.zeros(c, bool), step >= now]),
        end_T=end_T,
        group_T=group_T,
        # A block's first token is answered by the clean copy, if by a position before it.
        slot_U=np.where(before < first, before, c + hit - layout.shift),
        row_U=row[hit],
        pos_U=noised[hit],
        size_U=np.bincount(which[hit], minlength=len(lengths))[which[hit]],
    )


def microbatches(
    trajectories: int, slots: int, answer: int, rounds: int, copies: int,
    layout: Layout, cfg: BatchConfig,
) -> int:  # fmt: skip
    """Returns how many microbatches always suffice for so many trajectories.

    `slots` is a canvas, `answer` the longest answer, `rounds` the most rounds of a scope,
    in all of a trajectory's `copies` of noise.
    """
    if layout.attention != "block":
        # No view is longer than a canvas, so all rows but the last hold as many as fit.
        views = trajectories * (rounds if layout.attention == "full" else 1)
        return -(-views // max(cfg.tokens // slots, 1) // cfg.rows)
    seats = layout.seats(cfg)
    noised = (-(-answer // layout.block) + 1) * layout.block * rounds
    supervised = min(noised, answer * copies)
    cuts = 0
    if slots + noised > cfg.tokens:
        cuts += noised // max(cfg.tokens - slots, layout.block)
    if supervised > seats:
        cuts += supervised // max(seats - layout.block + 1, 1)
    load = (noised + (cuts + 1) * slots) / cfg.tokens + supervised / seats
    # First fit: two rows together hold more than one row's load of tokens or seats.
    rows = 2 * int(np.ceil(trajectories * load)) + 1
    return -(-min(rows, trajectories * (cuts + 1)) // cfg.rows)
