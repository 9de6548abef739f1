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
import numpy as np

from dllm_jax import config, data, metrics, processes, sharding
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
    # ---- The problems and the model ----------------------------------------------------
    sharding.keep_compiled(cfg.run.compile_cache)
    mesh = sharding.make_mesh(**dataclasses.asdict(cfg.mesh))
    jax.set_mesh(mesh)
    main = jax.process_index() == 0
    say = print if main else lambda *args: None
    cfg, model, tok = config.completed(cfg)
    grader = GRADERS[cfg.rl.reward]
    problems = data.problems(cfg.data.heldout, tok, cfg.data, grader)
    problems = problems[: cfg.eval.problems or None]
    rollout.report_long(problems, cfg.sampler.max_prompt, say)
    _, params = hf.load(cfg.model.path, mesh=mesh, dtype=cfg.model.dtype, heads=("lm",))
    model = dataclasses.replace(model, lora=None)

    # ---- Each problem, answered so many times ------------------------------------------
    timer, samples = metrics.Timer(), cfg.eval.answers
    processes.watch(timer, cfg.run.stuck_after)
    with timer("eval"):
        rollouts = rollout.answered(
            answers.answerer(model=model, cfg=cfg.sampler, mesh=mesh),
            params,
            [problem for problem in problems for _ in range(samples)],
            np.repeat(np.arange(len(problems)), samples),
            jax.random.key(cfg.seed),
            tok=tok,
            temperature=cfg.eval.temperature,
            timer=timer,
            grader=grader,
            truncated_wrong=cfg.rl.truncated_wrong,
        )

    # ---- What came out -----------------------------------------------------------------
    scores = rollout.summary(rollouts) | rollout.passed(rollouts, samples)
    scores |= {"problems": len(problems), "answers": samples, **timer.pop()}
    if main:
        write(pathlib.Path(cfg.run.folder), scores, rollouts, problems)
        for name, value in scores.items():
            say(f"{name:24s} {value:.4g}")
    return scores


def write(folder: pathlib.Path, scores, rollouts: rollout.Rollouts, problems):
    """Writes eval.json, the scores, and eval.jsonl, a line for each answer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "eval.json").write_text(json.dumps(scores, indent=2) + "\n")
    prompts = [problems[group].prompt_ids for group in rollouts.group_n]
    with (folder / "eval.jsonl").open("w") as file:
        for line in rollout.as_records(rollouts, prompts):
            problem = problems[line["group"]]
            line |= {"question": problem.text, "answer": problem.answer}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def main():
    """Parses the command line and evaluates."""
    evaluate(config.from_command_line(sys.argv, example="configs/eval.py"))


if __name__ == "__main__":
    config.entry(main, config.usage(__doc__, config.OPTIONS))
