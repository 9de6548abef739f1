"""Problems that nobody learns from, and how well the policy answers them meanwhile."""

import jax
import numpy as np

from dllm_jax import data
from dllm_jax.rl import rollout
from dllm_jax.rl.networks import Weights
from dllm_jax.rl.sources import Settings, Tools


def problems(settings: Settings, tools: Tools) -> list[data.Problem]:
    """Returns the problems of data.heldout to evaluate on; [] where it is empty."""
    if not settings.data.heldout:
        return []
    every = data.problems(
        settings.data.heldout, tools.tok, settings.data, tools.grader, tools.reader
    )
    return every[: settings.heldout_problems or None]


def evaluate(
    step: int,
    weights: Weights,
    problems: list[data.Problem],
    settings: Settings,
    tools: Tools,
) -> dict[str, float] | None:
    """Returns the metrics heldout_... of the policy's answers after a step.

    None where a signal came meanwhile. All of it is time of "eval", the grading too. The
    answers are drawn with a key of their own, so that evaluating more or less often
    changes no step.
    """
    with tools.timer("eval"):
        rollouts = tools.answered(
            weights.acting(),
            problems,
            np.arange(len(problems)),
            jax.random.fold_in(jax.random.key(settings.seed + 1), step),
            temperature=settings.heldout_temperature,
            timer=lambda phase: tools.timer("eval"),
            stop=tools.stop,
        )
    if rollouts is None:
        return None
    summary = rollout.summary(rollouts)
    names = ("accuracy", "tokens_per_forward", "response_length", "nan_answers")
    return {f"heldout_{name}": summary[name] for name in names}
