"""Problems that nobody learns from, and how well the policy answers them meanwhile."""

import dataclasses
import pathlib
from collections.abc import Iterable

import jax
import numpy as np

from dllm_jax import data
from dllm_jax.models.vision.prompts import identity
from dllm_jax.rl import rollout
from dllm_jax.rl.networks import Weights
from dllm_jax.rl.step import Settings, Tools

# Of rollout.summary, what an evaluation tells.
TOLD = ("accuracy", "tokens_per_forward", "response_length", "nan_answers")
TOLD += ("graded_timeouts",)
MOST_UNJUDGED = 0.1  # of an evaluation's answers, where it is compared with others


def problems(settings: Settings, tools: Tools) -> list[data.Problem]:
    """Returns the problems of data.heldout to evaluate on; [] where it is empty."""
    if not settings.data.heldout:
        return []
    every = data.problems(
        settings.data.heldout, tools.tok, settings.data, tools.grader, tools.reader
    )
    return every[: settings.heldout_problems or None]


def sets(settings: Settings, tools: Tools) -> dict[str, list[data.Problem]]:
    """Returns the problems of every file of `files`, by the same names."""
    found = {}
    for name, path in files(settings.data.heldout, settings.samplers).items():
        alone = dataclasses.replace(settings.data, heldout=path)
        one = dataclasses.replace(settings, data=alone)
        found[name] = problems(one, tools)
        rollout.check_prompts(
            found[name],
            settings.sampler.max_prompt,
            settings.model.vocab,
            tools.say,
            path,
        )
        repeated(found[name], path, tools.say)
    return found


def repeated(problems: list[data.Problem], path: str, say) -> None:
    """Says where problems of a file are asked more than once.

    An interval takes problems for independent, and copies tell nothing new.
    """
    distinct = {identity(problem.prompt_ids) for problem in problems}
    if count := len(problems) - len(distinct):
        say(
            f"warning: {count} of {len(problems)} problems of {path!r} are asked before in "
            "it: they count again, and intervals are narrower than they should be"
        )


def shared(settings: Settings, sets: dict, prompts: Iterable[list[int]]) -> list[str]:
    """Returns a warning for each file of held-out problems that has some of data.train.

    sets: of `sets`; prompts: of what is learned from. Those about an image are the same if
    it is, too.
    """

    learned = set(map(identity, prompts)) if sets else set()
    paths, lines = files(settings.data.heldout, settings.samplers), []
    for name, held in sets.items():
        if count := sum(identity(problem.prompt_ids) in learned for problem in held):
            lines.append(
                f"warning: {count} of {len(held)} problems of {paths[name]!r} are in "
                "data.train, too: what they say of others is less than it seems"
            )
    return lines


def files(heldout: str, samplers) -> dict[str, str]:
    """Returns the files that `heldout`, data.heldout, names with commas.

    By what stands between heldout_ and the name of a metric: nothing for the first file,
    the name of the file for each other. samplers: names of eval.samplers. Raises ValueError
    where two files have one name, or files and samplers would give two metrics one.
    """
    found, paths = {}, data.files(heldout)
    if len(set(paths)) < len(paths) or (heldout and not all(paths)):
        raise ValueError(
            f"data.heldout={heldout!r}: files with commas between, each once"
        )
    for path in filter(None, paths):
        name = f"{pathlib.Path(path).name.partition('.')[0]}_" if found else ""
        if name in found:
            raise ValueError(
                f"data.heldout={heldout!r}: two files named {name[:-1]!r}, "
                "and their metrics would be, too"
            )
        found[name] = path
    fronts = [front(name, x) for name in found for x in ("", *samplers)]
    if twice := {x for x in fronts if fronts.count(x) > 1}:
        raise ValueError(
            f"data.heldout={heldout!r}: a file and eval.samplers would both have "
            f"metrics named heldout_{min(twice)}...: rename one of them"
        )
    return found


def front(name: str, sampler: str) -> str:
    """Returns what stands behind heldout_ in a metric's name.

    name: of the file, as `files` has it. sampler: "" for that of the run itself.
    """
    return f"{name}{sampler and f'{sampler}_'}"


def metrics_of(heldout: str, samplers, answers: int) -> list[str]:
    """Returns the names of all that evaluations tell.

    heldout, samplers: as `files` takes them; answers: eval.answers.
    """
    told = [*TOLD, "problems"]
    if answers > 1:
        told += [f"pass@{k}" for k in rollout.sizes(answers)]
    names = files(heldout, samplers)
    fronts = [front(name, x) for x in ("", *samplers) for name in names]
    return [f"heldout_{before}{name}" for before in fronts for name in told]


def unjudged(row: dict, metric: str, answers: int) -> str:
    """Returns why a metric of an evaluation is not compared with others, or "".

    Of too many of its answers nobody found out what they are worth. row: of `evaluate_sets`;
    answers: eval.answers.
    """
    fronts = (x.removesuffix("problems") for x in row if x.endswith("problems"))
    front = max(filter(metric.startswith, fronts), key=len, default="")
    if not (front and metric.removeprefix(front).startswith(("accuracy", "pass@"))):
        return ""  # no metric of what is right
    asked, missing = row[f"{front}problems"] * answers, row[f"{front}graded_timeouts"]
    if missing <= MOST_UNJUDGED * asked:
        return ""
    return f"{missing} of {asked} answers of {metric} were judged by nobody"


def evaluate_sets(
    step: int, weights: Weights, sets: dict, settings: Settings, tools: Tools
) -> dict[str, float] | None:
    """Returns `evaluate`'s metrics of every set of `sets`, each by its name.

    And of every further sampler, whose name stands behind the set's.
    """
    row = {}
    for sampler, answerer in {"": tools.answerer, **tools.others}.items():
        lent = dataclasses.replace(tools, answerer=answerer)
        for name, asked in sets.items():
            metrics = evaluate(step, weights, asked, settings, lent)
            if metrics is None:
                return None
            prefix = f"heldout_{front(name, sampler)}"
            told = {key.removeprefix("heldout_"): x for key, x in metrics.items()}
            row |= {f"{prefix}{key}": x for key, x in told.items()}
    return row


def evaluate(
    step: int,
    weights: Weights,
    problems: list[data.Problem],
    settings: Settings,
    tools: Tools,
) -> dict[str, float] | None:
    """Returns the metrics heldout_... of the policy's answers after a step.

    With eval.answers above 1 each problem is answered so often: the accuracy is their mean,
    and pass@k is told besides.

    None where a signal came meanwhile. All of it is time of "eval", the grading too. The
    answers are drawn with a key of their own, so that evaluating more or less often
    changes no step.
    """
    with tools.timer("eval"):
        rollouts = tools.answered(
            weights.acting(),
            [problem for problem in problems for _ in range(settings.heldout_answers)],
            np.repeat(np.arange(len(problems)), settings.heldout_answers),
            jax.random.fold_in(jax.random.key(settings.seed + 1), step),
            temperature=settings.heldout_temperature,
            timer=lambda phase: tools.timer("eval"),
            stop=tools.stop,
        )
    if rollouts is None:
        return None
    summary = rollout.summary(rollouts)
    metrics = {f"heldout_{name}": summary[name] for name in TOLD if name in summary}
    metrics["heldout_problems"] = len(problems)
    if settings.heldout_answers > 1:
        passed = rollout.passed(rollouts, settings.heldout_answers)
        metrics |= {f"heldout_{name}": share for name, share in passed.items()}
        if passed:
            metrics["heldout_accuracy"] = passed["pass@1"]
    return metrics
