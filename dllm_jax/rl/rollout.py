"""What answers are worth: rollouts, their rewards, and what a step tells of them.

The same in every process. Each grades its share, and what it found holds for all: a
grader's time-out cannot split a run in two.

Letters: s answers to one problem.
"""

import collections
import dataclasses
import json
import pathlib
from typing import NamedTuple

import jax
import numpy as np

from dllm_jax import data, images, sharding, statistics
from dllm_jax.data import Problem
from dllm_jax.exits import room
from dllm_jax.rl import beside
from dllm_jax.rl.rewards import Grader, Grades
from dllm_jax.rl.rewards.process import Chunks, none_of
from dllm_jax.sampling import answers, state
from dllm_jax.sampling.state import Trace


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """n answers with their rewards; a group is the answers to one problem."""

    trace: Trace  # numpy, first dimension n
    group_n: np.ndarray
    text: list  # decoded once, for graders and people: texts, or pictures [h, w, 3]
    reward_n: np.ndarray
    late_n: np.ndarray  # whether it says 0 since nobody found out what it is worth
    # What several graders said, by name, before weights; the first says what is right. NaN:
    # that grader could not tell, be it of no weight and the reward known all the same.
    parts: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    reward_nT: np.ndarray | None = None  # of tokens by position, as graders give them
    chunks: Chunks | None = None  # what a judge says of pieces of answers

    @property
    def first_n(self) -> np.ndarray:
        """What the first grader said, which says what is right."""
        return next(iter(self.parts.values()), self.reward_n)

    @property
    def solved_n(self) -> np.ndarray:
        """Which answers are right."""
        return self.first_n >= 1

    @property
    def judged_n(self) -> np.ndarray:
        """Of which answers somebody found out whether they are right."""
        return ~self.late_n & ~np.isnan(self.first_n)


def settled(
    trace: Trace,
    texts: list[str],
    group_n: np.ndarray,
    grades: Grades,
    *,
    truncated_wrong: bool,
    first: int = 0,
) -> Rollouts:
    """Returns Rollouts with the rewards that every process found for its share.

    grades: of this process's; first: the number of the first answer (sharding.dealt). Rows
    without an answer (their prompt was too long), and with `truncated_wrong` those that were
    cut at their limit, earn 0, or what the worst of their group does where that is less, and
    what its tokens lose: no answer gains by having no end.
    """
    earns_n = (trace.len_B > 0) & (trace.stopped_B | (not truncated_wrong))

    def earned(own):
        rewards_n = of_all(own, len(texts), first)
        rewards_n[~earns_n] = 0
        for group in np.unique(group_n[~earns_n]):
            inside_n = group_n == group
            least = np.nanmin(rewards_n[inside_n])
            rewards_n[inside_n & ~earns_n] = least
        return rewards_n

    reward_n = earned(grades.reward_n)
    late_n, reward_nT = np.isnan(reward_n), None
    # Those of a process without answers are none, and empty.
    names, tokens = beside.agreed(grades)
    if tokens:
        own_nT = grades.reward_nT
        if own_nT is None:
            own_nT = np.zeros((0, trace.tokens_BT.shape[1]))
        reward_nT = of_all(own_nT, len(texts), first)
        reward_nT[~earns_n] = np.fmin(reward_nT[~earns_n], 0)
        late_n |= np.isnan(reward_nT).any(axis=1)
        reward_nT = np.nan_to_num(reward_nT)
    parts = {x: earned(grades.parts.get(x, grades.reward_n)) for x in names}
    return Rollouts(
        trace, group_n, texts, np.nan_to_num(reward_n), late_n, parts, reward_nT
    )


def of_all(own, count: int, first: int = 0) -> np.ndarray:
    """Returns what each process says of its share of `count` answers, in all of them."""
    out = np.zeros((count, *np.shape(own)[1:]), np.float32)
    out[sharding.dealt(first)] = own
    return sharding.gathered(out, first)


def split(rollouts: Rollouts, problems, grader: Grader, keep_n) -> Rollouts:
    """Returns Rollouts with what the grader says of the chunks of those that are kept.

    Each process asks of its share of the answers. The same where no grader splits them. Of
    an answer that may be right or not nobody is asked: chunks are judged by the outcome.
    """
    if grader.steps is None:
        return rollouts
    keep_n = keep_n & rollouts.judged_n
    own = np.arange(len(keep_n))[sharding.dealt()]
    asked = own[keep_n[own]]
    said = grader.steps(
        [rollouts.text[i] for i in asked],
        [problems[i] for i in asked],
        jax.tree.map(lambda x: x[asked], rollouts.trace),
        rollouts.solved_n[asked],
    )

    def every(nothing, some):
        nothing[keep_n[own]] = some
        return of_all(nothing, len(keep_n))

    nothing = none_of((len(own), rollouts.trace.tokens_BT.shape[1]))
    chunks = jax.tree.map(every, nothing, said)
    return dataclasses.replace(rollouts, chunks=chunks)


def joined(first: Rollouts | None, second: Rollouts) -> Rollouts:
    """Returns the rollouts of both; the groups of the second follow those of the first.

    Raises ValueError where they were not graded alike.
    """
    if first is None:
        return second
    beside.check_alike([beside.said(first), beside.said(second)])
    numbers_n = second.group_n + first.group_n.max() + 1
    second = dataclasses.replace(second, group_n=numbers_n)

    def both(name: str):
        one, other = getattr(first, name), getattr(second, name)
        if isinstance(one, list):
            return one + other
        if name == "parts":
            # jax.tree.map would sort them, and the first says what is right.
            return {key: np.concatenate([x, other[key]]) for key, x in one.items()}
        return jax.tree.map(lambda x, y: np.concatenate([x, y]), one, other)

    names = [field.name for field in dataclasses.fields(Rollouts)]
    return Rollouts(**{name: both(name) for name in names})


def answered(
    answerer,
    params,
    problems: list[Problem],
    group_n: np.ndarray,
    key,
    *,
    temperature: float,
    decode,
    timer,
    grader: Grader,
    truncated_wrong: bool,
    stop=None,
) -> Rollouts | None:
    """Returns Rollouts: one answer to each problem, sampled, decoded and graded.

    Groups are graded as they end, beside sampling; the phase "reward" is what is left of
    it then. None where sampling was stopped: see `answers.collect`. Raises
    exits.NotFinite where no answer is made of finite numbers.

    answerer, params, temperature, stop: see `sampling.answers`. group_n: which of the n
    problems are one and the same. key: of all draws; problem i has fold_in(key, i). decode:
    of a Trace, its answers as graders take them: texts, or pictures. timer: a
    metrics.Timer, told of the phase "reward". truncated_wrong: see `graded`.
    """
    prompts = [problem.prompt_ids for problem in problems]
    stream = answerer.stream(params, prompts, key, temperature=temperature, stop=stop)
    grading = beside.Beside(grader, decode, problems, group_n)
    stream = grading.watched(answers.checked(stream, len(prompts)))
    trace = answers.collect(stream, len(prompts))
    answerer.release()  # an update makes more of that memory
    if trace is None:
        grading.give_up()
        return None
    with timer("reward"):
        texts, grades = grading.result(range(len(prompts)))
        return settled(trace, texts, group_n, grades, truncated_wrong=truncated_wrong)


def check_prompts(problems: list[Problem], max_prompt: int, vocab: int, say, path: str):
    """Says how many prompts are too long; they are skipped with a reward of 0.

    Raises ValueError naming the file, `path`, where all are, and where one has ids that
    are not below the model's `vocab`.
    """
    for number, problem in enumerate(problems, 1):
        with data.of_record(path, number):
            data.check_known(problem.prompt_ids, vocab)
    skipped = sum(len(problem.prompt_ids) > max_prompt for problem in problems)
    if problems and skipped == len(problems):
        shortest = min(len(problem.prompt_ids) for problem in problems)
        raise ValueError(
            f"dataset {path!r}: no prompt fits into sampler.max_prompt={max_prompt} "
            f"tokens; the shortest has {shortest}"
        )
    if skipped:
        say(
            f"{skipped} of {len(problems)} prompts are longer than sampler.max_prompt="
            f"{max_prompt} tokens: they are skipped and earn 0"
        )


def sizes(samples: int) -> list[int]:
    """Returns for which k pass@k is told: 1, 2, 4 ... and all `samples` answers."""
    return sorted({2**i for i in range(samples.bit_length())} | {samples})


def passed(rollouts: Rollouts, samples: int) -> dict[str, float]:
    """Returns pass@k of n problems with `samples` answers each, which follow each other.

    What nobody judged counts as `scores.of_records` counts it: pass@1 is the mean of the
    problems' shares of judged answers. Where no answer was judged nothing is told.
    """
    solved_ns = (rollouts.solved_n & rollouts.judged_n).reshape(-1, samples)
    known_n = rollouts.judged_n.reshape(-1, samples).sum(axis=1)
    share_n = solved_ns.sum(axis=1) / np.maximum(known_n, 1)
    counted = {"pass@1": (share_n, known_n > 0)}
    every_n = np.full(len(share_n), known_n.any())
    for k in sizes(samples)[1:]:
        counted[f"pass@{k}"] = statistics.pass_at(solved_ns, k), every_n
    return means(counted)


def means(of: dict) -> dict[str, float]:
    """Returns the mean of each (values, which of them count); none of those without any."""
    return {
        name: float(x_n[of_n].mean()) for name, (x_n, of_n) in of.items() if of_n.any()
    }


def speed(trace: Trace) -> np.ndarray:
    """Returns each row's tokens per forward; 0 for a row without an answer."""
    return trace.len_B / np.maximum(trace.forwards_B, 1)


def summary(rollouts: Rollouts) -> dict[str, float]:
    """Returns the metrics of a step's rollouts: means over its answers.

    reward and accuracy are those of the answers that were judged; where there are several
    graders, reward/NAME is what each says of those that it could judge. What is of no
    answer is not told: 0 would be what wrong ones get.

    tokens_per_forward counts the forwards that a row was denoised in. On the engine
    there are no others: the keys of blocks and prompts are computed beside these.
    """
    trace = rollouts.trace
    answers_given = np.maximum((trace.len_B > 0).sum(), 1)
    cut_B = ~trace.stopped_B & (trace.len_B > 0)
    known_n, judged_n = ~rollouts.late_n, rollouts.judged_n
    counted = {
        "reward": (rollouts.reward_n, known_n),
        "accuracy": (rollouts.solved_n, judged_n),
    }
    for name, x_n in rollouts.parts.items():
        counted[f"reward/{name}"] = x_n, known_n & ~np.isnan(x_n)
    return means(counted) | {
        "graded_timeouts": int((~judged_n).sum()),
        "response_length": float(trace.len_B.sum() / answers_given),
        "tokens_per_forward": float(trace.len_B.sum() / max(trace.forwards_B.sum(), 1)),
        "truncated": float(cut_B.mean()),
        "nan_answers": int(trace.bad_B.sum()),
    }


class Notes(NamedTuple):
    """What a step found of its rollouts, for people to look at."""

    keep_n: np.ndarray  # which are learned from
    adv_nT: np.ndarray  # of a trajectory's first row of noise, as are the values
    value_nT: np.ndarray | None  # None where no network tells them


def write(
    folder: pathlib.Path,
    step: int,
    rollouts: Rollouts,
    problems: list[Problem],
    count: int,
    notes: Notes | None = None,
):
    """Writes `count` of a step's rollouts with their traces, spread over its problems.

    notes: of those that are learned from, each token's advantage and value are written,
    too.
    """
    path = folder / "samples" / f"step_{step:06d}.jsonl"
    told = {"advantage": notes.adv_nT, "value": notes.value_nT} if notes else {}
    lines = []
    for i in spread(rollouts.group_n, count):
        record = as_record(rollouts, i, problems[i])
        first = rollouts.trace.prompt_len_B[i]
        end = first + rollouts.trace.len_B[i]
        for name, x_nT in told.items():
            if x_nT is not None and notes.keep_n[i]:
                record[name] = [round(float(x), 4) for x in x_nT[i, first:end]]
        lines.append(json.dumps(record) + "\n")
    with room(path.parent):
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(lines))


def cut(folder: pathlib.Path, step: int) -> None:
    """Removes the samples of steps beyond one, which a killed run has left.

    They may not be taken again: the run may end before, by its patience or by rl.steps.
    """
    with room(folder):
        for path in (folder / "samples").glob("step_*.jsonl"):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > step:
                path.unlink()


def spread(group_n, count: int) -> list[int]:
    """Returns `count` indices in order: the first of each group, then the second of each."""
    seen = collections.Counter()
    ranks = []
    for i, group in enumerate(np.asarray(group_n).tolist()):
        ranks.append((seen[group], i))
        seen[group] += 1
    return sorted(i for _, i in sorted(ranks)[:count])


def as_records(rollouts: Rollouts, problems: list[Problem]) -> list[dict]:
    """Returns the `as_record` of each answer; problems: what each of them answers."""
    return [as_record(rollouts, i, problem) for i, problem in enumerate(problems)]


def as_record(rollouts: Rollouts, i: int, problem: Problem) -> dict:
    """Returns a JSON-able record of answer i to a problem, as `generate` writes it."""
    return (
        {
            **answers.record(state.answer(rollouts.trace, i), problem.prompt_ids),
            "text": x if isinstance(x := rollouts.text[i], str) else "",
            "reward": float(rollouts.reward_n[i]),
            "group": int(rollouts.group_n[i]),
            "question": problem.text,
            "answer": problem.answer,
        }
        | ({"graded": False} if rollouts.late_n[i] else {})
        | ({"rewards": parts_of(rollouts, i)} if rollouts.parts else {})
        | drawn(rollouts, i)
    )


def drawn(rollouts: Rollouts, i: int) -> dict[str, str]:
    """Returns the picture that an answer is, small, for people; {} where it is a text."""
    if isinstance(rollouts.text[i], str) or not rollouts.trace.len_B[i]:
        return {}
    return {"picture": images.embedded(rollouts.text[i])}


def parts_of(rollouts: Rollouts, i: int) -> dict[str, float | None]:
    """Returns what each of several graders said of an answer; None: it could not tell."""
    said = {name: float(x_n[i]) for name, x_n in rollouts.parts.items()}
    return {name: None if np.isnan(x) else x for name, x in said.items()}


def of_records(records: list[dict]) -> Rollouts:
    """Returns Rollouts of which `summary` and `passed` say what they say of the records'.

    Their traces hold lengths alone. Raises ValueError where graders of other names judged
    some of them.
    """
    graders = {tuple(record.get("rewards", ())) for record in records}
    if len(graders) > 1:
        told = " and ".join(sorted(", ".join(names) or "one" for names in graders))
        raise ValueError(
            f"some answers were graded by {told}: the graders have changed, and "
            "--overwrite asks and grades all anew"
        )
    rows = [
        state.no_answer(0)._replace(
            len=np.int32(len(record["response_ids"])),
            forwards=np.int32(record["forwards"]),
            stopped=np.bool_(record["finished"] == "stop"),
            bad=np.bool_(record["finished"] == "nan"),
        )
        for record in records
    ]
    return Rollouts(
        trace=state.stacked(rows),
        group_n=np.array([record["group"] for record in records]),
        text=[record["text"] for record in records],
        reward_n=np.array([record["reward"] for record in records], np.float32),
        late_n=np.array([not record.get("graded", True) for record in records]),
        parts={  # as an array None is NaN
            name: np.array([record["rewards"][name] for record in records], np.float32)
            for names in graders
            for name in names
        },
    )
