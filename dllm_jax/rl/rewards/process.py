"""Process rewards: an answer is split, a judge gives a verdict on each chunk of it.

TraceRL's process rewards (arXiv 2509.06949, section 5; dLLM-RL's RLHF configurations):

    split      which chunk each token of an answer is of: a row of SPLITTERS
    ask        what the judge is asked of each, and its verdict; where it has none that
               holds, the answer's outcome stands: 1 right, -1 wrong
    borne      which tokens bear a chunk's reward: the last ones that it unmasked
    relative   each verdict compared with those of the same chunk of the group's answers

Rewards go by position, never by text: a trace is only meaningful on its own ids.
"""

import functools
from collections.abc import Callable, Iterable

import flax.struct
import numpy as np

from dllm_jax import data
from dllm_jax.rl import advantage
from dllm_jax.rl.rewards import judge

# Where a chunk's verdict comes from, in Chunks.source_nT.
NONE, JUDGED, DISAGREED, UNHEARD = range(4)


@flax.struct.dataclass
class Chunks:
    """The chunks of n answers and what is said of them; column k is chunk k."""

    # By position: the chunk whose reward the token bears; -1: none.
    chunk_nT: np.ndarray
    verdict_nT: np.ndarray  # by chunk; NaN: the answer has no such chunk
    source_nT: np.ndarray  # by chunk: NONE, JUDGED, DISAGREED or UNHEARD


# ---- Splitting -----------------------------------------------------------------------


def by_tokens(step_T, pieces: list[str], cfg):
    """Chunks of `reward.chunk` tokens."""
    return np.arange(len(step_T)) // cfg.chunk


def by_steps(step_T, pieces: list[str], cfg):
    """Chunks of what `reward.chunk` denoising steps unmasked, wherever it stands."""
    return np.unique(step_T, return_inverse=True)[1] // cfg.chunk


def by_marks(step_T, pieces: list[str], cfg):
    """Chunks that end with a token in whose text `reward.mark` is."""
    ends_T = np.array([cfg.mark in piece for piece in pieces])
    chunk_T = np.cumsum(ends_T) - ends_T
    last_T = chunk_T == chunk_T[-1]
    blank = not "".join(p for p, last in zip(pieces, last_T, strict=True) if last)
    if blank and chunk_T[-1]:  # the end token alone is no chunk
        chunk_T[last_T] -= 1
    return chunk_T


# (step_T, the text of each token, RewardConfig) -> chunk_T, the chunk [T] of each of an
# answer's tokens: 0 to the last, each of them there.
SPLITTERS = {"tokens": by_tokens, "steps": by_steps, "marks": by_marks}


def borne(chunk_T, step_T, tail: int) -> np.ndarray:
    """Returns the chunk [T] whose reward each token of an answer bears; -1: none.

    A chunk's is borne by those of its tokens that were unmasked last. With a tail by those
    of so many tokens up to its end, and the last chunk's by all of the answer's last step.
    """
    out_T = np.full(len(chunk_T), -1)
    last = chunk_T.max()
    for chunk in range(last if tail else last + 1):
        (inside,) = np.nonzero(chunk_T == chunk)
        if tail:
            inside = np.arange(max(inside[-1] + 1 - tail, 0), inside[-1] + 1)
        out_T[inside[step_T[inside] == step_T[inside].max()]] = chunk
    if tail:
        out_T[step_T == step_T.max()] = last
    return out_T


def excerpt(shown_T, ids_T, decode: Callable) -> str:
    """Returns the text of the tokens that are shown, with an ellipsis for each gap."""
    (shown,) = np.nonzero(shown_T)
    runs = np.split(shown, np.flatnonzero(np.diff(shown) > 1) + 1)
    return " … ".join(decode(ids_T[run].tolist()) for run in runs)


# ---- Asking --------------------------------------------------------------------------


def steps(cfg, asked: judge.Judge, tok) -> Callable:
    """Returns the function of (texts, problems, trace, right_n) that says their Chunks.

    cfg: rl.config.RewardConfig; tok: the policy's tokenizer. right_n: which answers are
    right, the outcome. Raises ValueError for a mark that no token has.
    """
    decode = functools.partial(data.decoded, tok)
    piece = functools.cache(lambda token: decode([token]))
    if cfg.split == "marks":
        check_mark(cfg.mark, map(piece, sorted(tok.get_vocab().values())))

    def questions(i, chunk_T, text, problem, trace, right) -> list[judge.Question]:
        first = trace.prompt_len_B[i]
        ids_T = trace.tokens_BT[i, first : first + len(chunk_T)]
        return [
            judge.Question(
                problem=problem.text,
                gold=problem.answer,
                solution=text,
                right=bool(right),
                images=judge.images_of(problem),
                excerpt=excerpt(chunk_T <= chunk, ids_T, decode),
                part=excerpt(chunk_T == chunk, ids_T, decode),
            )
            for chunk in range(chunk_T.max() + 1)
        ]

    def said(texts, problems, trace, right_n) -> Chunks:
        out = none_of(trace.tokens_BT.shape)
        every, places = [], []
        for i, (first, count) in enumerate(
            zip(trace.prompt_len_B, trace.len_B, strict=True)
        ):
            step_T = trace.step_BT[i, first : first + count]
            tokens = trace.tokens_BT[i, first : first + count].tolist()
            if not tokens:
                continue
            chunk_T = SPLITTERS[cfg.split](step_T, [piece(t) for t in tokens], cfg)
            out.chunk_nT[i, first : first + count] = borne(chunk_T, step_T, cfg.tail)
            asked_of = questions(i, chunk_T, texts[i], problems[i], trace, right_n[i])
            every += asked_of
            places += [(i, chunk) for chunk in range(len(asked_of))]
        answers = zip(places, asked.votes(every), strict=True)
        for place, votes in answers:
            silent = asked.boxed and judge.about_image(problems[place[0]])
            out.source_nT[place], agreed = agreement(votes, silent)
            outcome = 1.0 if right_n[place[0]] else -1.0
            out.verdict_nT[place] = outcome if agreed is None else agreed
        return out

    return said


def check_mark(mark: str, pieces: Iterable[str]) -> None:
    """Raises ValueError for a mark that is in none of a tokenizer's pieces."""
    if not any(mark in piece for piece in pieces):
        raise ValueError(
            f"reward.mark={mark!r} is in the text of no token, and no chunk would end before "
            "its answer does"
        )


def none_of(shape: tuple[int, int]) -> Chunks:
    """Returns the Chunks of answers that have none, on canvases of this shape."""
    return Chunks(
        chunk_nT=np.full(shape, -1, np.float32),
        verdict_nT=np.full(shape, np.nan, np.float32),
        source_nT=np.full(shape, NONE, np.float32),
    )


def agreement(
    votes: list[float | None], silent: bool = False
) -> tuple[int, float | None]:
    """Returns (the source, the verdict) of a chunk's votes: the one that all of them are.

    None in the place of a verdict where the outcome has to stand. silent: a vote of 0, which
    has neither 1 nor -1 in a box, is none; so it is in dLLM-RL of answers about images, where
    of texts three of them are a verdict.
    """
    if None in votes:
        return UNHEARD, None
    if len({*votes}) == 1 and (votes[0] or not silent):
        return JUDGED, votes[0]
    return DISAGREED, None


# ---- Rewards of tokens ---------------------------------------------------------------


def relative(chunks: Chunks, group_n, kind: str) -> np.ndarray:
    """Returns the rewards [n, T] of tokens: of chunk k, relative to the group's chunks k.

    kind: as advantage.relative's. A chunk that no other answer of its group has stays as it
    is judged.
    """
    verdict_nT = chunks.verdict_nT.copy()
    for column in np.flatnonzero(~np.isnan(verdict_nT).all(axis=0)):
        (rows,) = np.nonzero(~np.isnan(verdict_nT[:, column]))
        groups, count = np.unique(group_n[rows], return_counts=True)
        several = rows[np.isin(group_n[rows], groups[count > 1])]
        verdict_nT[several, column] = advantage.relative(
            verdict_nT[several, column], group_n[several], kind
        )
    chunk_nT = chunks.chunk_nT.astype(int)
    borne_nT = np.take_along_axis(verdict_nT, np.maximum(chunk_nT, 0), axis=1)
    return np.where(chunk_nT >= 0, borne_nT, 0.0).astype(np.float32)


def summary(chunks: Chunks) -> dict[str, float]:
    """Returns the metrics of a step's chunks: how many, what was said, and by whom."""
    there_nT = chunks.source_nT != NONE
    count = int(there_nT.sum())
    told = {"chunks": count, "chunks_unheard": int((chunks.source_nT == UNHEARD).sum())}
    if count:
        verdicts = chunks.verdict_nT[there_nT]
        told["chunks_judged"] = float((chunks.source_nT == JUDGED).sum() / count)
        told["reward/verdict"] = float(verdicts.mean())
    return told
