"""What a run lends its source, without a run: the bundled tokenizer, a model's answers."""

import dataclasses
import functools
import json
import pathlib

import jax
import numpy as np

from dllm_jax import data, metrics, sharding
from dllm_jax.models import hf
from dllm_jax.rl import rollout
from dllm_jax.rl.config import (
    BatchConfig,
    NoiseConfig,
    ObjectiveConfig,
    OptimConfig,
    RLConfig,
)
from dllm_jax.rl.rewards import Grader, Grades
from dllm_jax.rl.sources import Settings, Tools
from dllm_jax.sampling import answers, state
from dllm_jax.sampling.config import SamplerConfig

ARITHMETIC = pathlib.Path(__file__).parents[2] / "examples" / "arithmetic"
TOK = data.tokenizer(str(ARITHMETIC / "model"))
decode = functools.partial(answers.decode, tok=TOK)
MODEL = hf.read_config(ARITHMETIC / "model")
ANSWER = 6  # tokens, a step each


class Answerer:
    """Answers every prompt with the same tokens, drawn from its index and the weights."""

    def __init__(self, slots: int, max_prompt: int):
        self.slots, self.max_prompt = slots, max_prompt

    def release(self):
        """Nothing is kept."""

    def stream(self, params, prompts, key, *, temperature, watch=None, stop=None):
        """Yields (i, Answer i)."""
        for i, prompt in enumerate(prompts):
            blank = state.no_answer(self.slots)
            if len(prompt) > self.max_prompt:
                yield i, blank
                continue
            first, end = len(prompt), len(prompt) + ANSWER
            tokens_T, step_T = blank.tokens_T.copy(), blank.step_T.copy()
            tokens_T[:first] = prompt
            tokens_T[first:end] = np.random.default_rng([params, i]).integers(
                5, 9, ANSWER
            )
            step_T[:first] = state.GIVEN
            step_T[first:end] = np.arange(1, ANSWER + 1)
            yield (
                i,
                blank._replace(
                    tokens_T=tokens_T,
                    step_T=step_T,
                    prompt_len=np.int32(first),
                    len=np.int32(ANSWER),
                    forwards=np.int32(ANSWER),
                    stopped=np.bool_(True),
                ),
            )


class Weights:
    """Weights that are a number: those of networks.Weights, for answers and scores."""

    def __init__(self, number: int = 1):
        self.number = number

    def acting(self) -> int:
        """Returns what samples."""
        return self.number

    def scoring(self) -> dict[str, int]:
        """Returns what scores."""
        return dict.fromkeys(("policy", "value", "reference"), self.number)


def score(params: dict, batch) -> dict:
    """Returns what every network says: the same of all tokens."""
    full = np.full(batch.where_BU.shape, -0.1, np.float32)
    return {
        name: {"logp": full * number, "entropy": full, "value": full}
        for name, number in params.items()
    }


def grade(texts, problems, trace) -> Grades:
    """Returns a reward that differs within a group."""
    return Grades(np.array([float(i % 3 == 0) for i in range(len(texts))]))


def settings(**changes) -> Settings:
    """Returns what sources read of a small run; RL, unless `changes` say otherwise."""
    stops = data.stop_ids(TOK, MODEL.eos_id)
    few = {
        "seed": 3,
        "data": data.DataConfig(
            train=str(ARITHMETIC / "heldout.jsonl"),  # few, so soon read
            heldout=str(ARITHMETIC / "heldout.jsonl"),
            seed=5,
        ),
        "sampler": SamplerConfig(
            block=MODEL.block, max_prompt=16, max_new=16, rows=4, stop_ids=stops
        ),
        "noise": NoiseConfig(),
        "objective": ObjectiveConfig(),
        "rl": RLConfig(
            steps=7, prompts=4, group=4, updates=2, min_solved=0.0, max_solved=1.0
        ),
        "sft_steps": 9,
        "sft_examples": 6,
        "batch": BatchConfig(rows=4, tokens=64),
        "policy_optim": OptimConfig(),
        "value_optim": OptimConfig(),
        "heldout_problems": 3,
        "heldout_temperature": 0.0,
        "model": MODEL,
    }
    return Settings(**(few | changes))


def tools(settings: Settings, folder, **changes) -> Tools:
    """Returns the tools of a run whose answers are made up."""
    sampler = settings.sampler
    made = Tools(
        mesh=sharding.make_mesh(),
        tok=TOK,
        grader=Grader(grade=grade, check=lambda problem: None, aside=False),
        truncated_wrong=True,
        answerer=Answerer(sampler.slots, sampler.max_prompt),
        timer=metrics.Timer(),
        stop=lambda: False,
        say=lambda text: None,
        folder=folder,
        samples=0,
    )
    return dataclasses.replace(made, **changes)


def write_pairs(path: pathlib.Path) -> str:
    """Writes preferences to a file: the right sum over a wrong one."""
    rows = [json.loads(line) for line in (ARITHMETIC / "heldout.jsonl").open()]
    with path.open("w") as file:
        for row in rows[:20]:
            pair = {"chosen": row["answer"], "rejected": "0"}
            file.write(json.dumps({"prompt": row["question"], **pair}) + "\n")
    return str(path)


def answer(text: str, prompt: int = 2, room: int = 40, steps=None):
    """Returns a text as an Answer; each token's step is its place, unless they are given."""
    ids = TOK(text, add_special_tokens=False)["input_ids"]
    tokens_T, step_T = np.zeros((2, prompt + room), np.int32)
    tokens_T[prompt : prompt + len(ids)] = ids
    step_T[prompt : prompt + len(ids)] = steps or 1 + np.arange(len(ids))
    return state.no_answer(prompt + room)._replace(
        tokens_T=tokens_T,
        step_T=step_T,
        prompt_len=np.int32(prompt),
        len=np.int32(len(ids)),
        stopped=np.bool_(True),
    )


def graded(trace, texts, problems, group_n, grader, *, truncated_wrong):
    """Returns the Rollouts of answers; the Grader is asked of this process's at once."""
    share = sharding.dealt()
    own = jax.tree.map(lambda x: x[share], trace)
    grades = grader.grade(texts[share], problems[share], own)
    return rollout.settled(
        trace, texts, group_n, grades, truncated_wrong=truncated_wrong
    )
