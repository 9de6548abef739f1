"""Evaluates a checkpoint on problems with known answers: accuracy, pass@k, speed.

    python -m dllm_jax.eval --config=configs/eval.py [--config.a.b=value ...]

It answers data.heldout (the first eval.problems of it) eval.answers times and grades the
answers as training does. In run.folder it leaves eval.json, what it prints, and
eval.jsonl, a line for each answer with its trace (`step_map`): data of trace SFT.
"""

import dataclasses
import json
import pathlib
import sys

import jax
import ml_collections.config_flags
import numpy as np
from absl import flags

from dllm_jax import config, data, metrics, sharding
from dllm_jax.models import hf
from dllm_jax.rl import rollout
from dllm_jax.rl.rewards import GRADERS
from dllm_jax.sampling import answers


def evaluate(cfg: config.Config) -> dict[str, float]:
    """Returns the metrics, and writes them and the answers.

    Raises ValueError when there are no problems.
    """
    if not cfg.data.heldout:
        raise ValueError("data.heldout is empty: name the file of problems to evaluate")
    sharding.keep_compiled(cfg.run.compile_cache)
    mesh = sharding.make_mesh(**dataclasses.asdict(cfg.mesh))
    jax.set_mesh(mesh)
    main = jax.process_index() == 0
    say = print if main else lambda *args: None
    cfg, model, tok = config.completed(cfg)
    timer = metrics.Timer()
    grader = GRADERS[cfg.rl.reward]
    problems = data.problems(cfg.data.heldout, tok, cfg.data, grader)
    problems = problems[: cfg.eval.problems or None]
    rollout.report_long(problems, cfg.sampler.max_prompt, say)

    _, params = hf.load(cfg.model.path, mesh=mesh, dtype=cfg.model.dtype, heads=("lm",))
    model = dataclasses.replace(model, lora=None)
    each = cfg.eval.answers
    with timer("eval"):
        rollouts = rollout.answered(
            answers.answerer(model=model, cfg=cfg.sampler, mesh=mesh),
            params,
            [p for p in problems for _ in range(each)],
            np.repeat(np.arange(len(problems)), each),
            jax.random.key(cfg.seed),
            tok=tok,
            temperature=cfg.eval.temperature,
            timer=timer,
            grader=grader,
            truncated_wrong=cfg.rl.truncated_wrong,
        )
    solved = (rollouts.reward_n >= 1).reshape(-1, each)
    told = rollout.summary(rollouts) | {
        f"pass@{k}": rollout.pass_at(solved, k)
        for k in sorted({2**i for i in range(each.bit_length())} | {each})
    }
    told |= {"problems": len(problems), "answers": each, **timer.pop()}
    if main:
        folder = pathlib.Path(cfg.run.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "eval.json").write_text(json.dumps(told, indent=2) + "\n")
        prompts = [p.prompt_ids for p in problems for _ in range(each)]
        with (folder / "eval.jsonl").open("w") as file:
            for row in rollout.as_records(rollouts, prompts):
                problem = problems[row["group"]]
                row |= {"question": problem.text, "answer": problem.answer}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        for name, value in told.items():
            say(f"{name:24s} {value:.4g}")
    return told


def main():
    """Parses the command line and evaluates."""
    file = ml_collections.config_flags.DEFINE_config_file(
        "config", None, "a file of configs/, optionally with :PRESET"
    )
    distributed = flags.DEFINE_bool("distributed", False, "join the other processes")
    if {"--help", "-h", "--helpshort"} & set(sys.argv[1:]):
        print(__doc__)
        return
    config.parse(sys.argv)
    if file.value is None:
        raise ValueError("--config=FILE is required, such as configs/eval.py")
    if distributed.value:
        jax.distributed.initialize()
    evaluate(config.freeze(file.value))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        config.fail(error)
