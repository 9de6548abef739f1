"""Evaluates a checkpoint on problems with known answers: accuracy, pass@k, speed.

    python -m dllm_jax.eval --config=configs/eval.py [--config.a.b=value ...]

It answers data.heldout (the first eval.problems of it) eval.answers times and grades the
answers as training does. In run.folder it leaves eval.json, what it prints, and
eval.jsonl, a line for each answer with its trace (`step_map`): data of trace SFT. Each is
there as soon as it is graded; started again, it goes on behind the last.
"""

import dataclasses
import functools
import json
import pathlib
import sys

import jax
import numpy as np
from absl import flags

from dllm_jax import command_line, config, data, exits, metrics, processes, sharding
from dllm_jax.folder import Answers, Folder, write
from dllm_jax.models import hf
from dllm_jax.rl import rewards, rollout
from dllm_jax.sampling import answers, placement, state

OVERWRITE = "answer all anew; default: what is there stays, and the evaluation goes on"


def evaluate(cfg: config.Config, run: Folder, overwrite: bool = False) -> dict:
    """Returns the metrics by name, and writes them and the answers.

    run: the folder `cfg.run.folder`. overwrite: what is there is not to stay. Raises
    ValueError when there are no problems, or the folder holds another evaluation, and
    exits.Stopped where a signal came.
    """
    # ---- The problems and the model ----------------------------------------------------
    timer = metrics.Timer()
    processes.watch(timer, cfg.run.stuck_after)
    stop = exits.StopSignal(timer.moving(sharding.anywhere))
    cfg, model, tok = config.completed(cfg)
    sink = Answers(
        run.path / "eval.jsonl",
        job_of(cfg, hf.marks(hf.find(cfg.model.path))),
        overwrite=overwrite,
    )
    sharding.keep_compiled(cfg.run.compile_cache)
    mesh = sharding.make_mesh(**cfg.mesh.axes)
    jax.set_mesh(mesh)
    say = print if run.writes else lambda *args: None
    checked = config.check_kernels(model, cfg.sampler, cfg.run.compile_cache)
    for line in (*config.too_long(cfg.sampler.slots, model), *checked):
        say(line)
    grader = rewards.grader(cfg.rl.reward, cfg.reward, cfg.sampler.answers)
    asked = asked_of(
        cfg, tok, say, grader, config.reader(cfg.model, cfg.sampler, model, tok)
    )
    check_same(sink, asked)
    for line in grader.begin():
        say(line)
    model = dataclasses.replace(model, lora=None)
    stream = stream_of(cfg, model, mesh, say)

    # ---- Each problem, answered so many times ------------------------------------------
    sharding.anywhere(False)  # all have read what is there
    run.begin(dataclasses.asdict(cfg), dataclasses.asdict(config.Config()), mesh)
    if run.writes:
        sink.begin(len(asked))
    grade = functools.partial(
        graded,
        grader=grader,
        truncated_wrong=cfg.rl.truncated_wrong,
        decode=config.pictures(cfg, model, tok)
        or functools.partial(answers.decode, tok=tok),
    )
    each = cfg.eval.answers
    with timer("eval"):
        groups = missing(stream, asked, len(sink.lines), each, stop)
        records = grown(groups, sink, asked, each, grade, timer, writes=run.writes)

    # ---- What came out -----------------------------------------------------------------
    scores = scores_of(records, each) | timer.pop()
    if run.writes:
        leave(scores, run.path / "eval.json")
    return scores


def stream_of(cfg: config.Config, model, mesh, say):
    """Returns the `stream` of an answerer with the checkpoint's weights, but for prompts."""
    answerer, params = placement.loaded(
        cfg.model.path,
        model=model,
        cfg=cfg.sampler,
        mesh=mesh,
        rollout=cfg.mesh.rollout,
        say=say,
    )
    return functools.partial(
        answerer.stream,
        params,
        key=jax.random.key(cfg.seed),
        temperature=cfg.eval.temperature,
    )


def leave(scores: dict[str, float], file: pathlib.Path):
    """Writes what came out, and prints it."""
    write(file, json.dumps(scores, indent=2) + "\n")
    for name, value in scores.items():
        print(f"{name:24s} {value:.4g}")


def asked_of(cfg: config.Config, tok, say, grader, reader) -> list[data.Problem]:
    """Returns the problem of each answer; says how many of them are too long.

    Raises ValueError where there are none.
    """
    if not cfg.data.heldout:
        raise ValueError("data.heldout is empty: name the file of problems to evaluate")
    problems = data.problems(cfg.data.heldout, tok, cfg.data, grader, reader)
    problems = problems[: cfg.eval.problems or None]
    rollout.report_long(problems, cfg.sampler.max_prompt, say, cfg.data.heldout)
    return [problem for problem in problems for _ in range(cfg.eval.answers)]


def scores_of(records: list[dict], each: int) -> dict[str, float]:
    """Returns what all answers say, `each` of them to a problem."""
    rollouts = rollout.of_records(records)
    scores = rollout.summary(rollouts) | rollout.passed(rollouts, each)
    return scores | {"problems": len(records) // each, "answers": each}


def job_of(cfg: config.Config, marks: dict) -> dict:
    """Returns what the answers depend on, flat. marks: of the checkpoint's files."""
    leaves = config.flat(dataclasses.asdict(cfg))
    idle = ("run.", "mesh.", "sampler.rows", "sampler.pages", "reward.workers")
    return marks | {key: x for key, x in leaves.items() if not key.startswith(idle)}


def check_same(sink: Answers, asked: list[data.Problem]):
    """Raises ValueError where a line that is there does not answer the problem asked."""
    for number, line in enumerate(sink.lines, 1):
        if (
            number > len(asked)
            or line.get("prompt_ids") != asked[number - 1].prompt_ids
        ):
            raise sink.foreign(number, f"it does not answer problem {number}")


def missing(stream, asked: list[data.Problem], done: int, each: int, stop):
    """Yields (the number of the first, a Trace) of the answers to each problem, in order.

    stream: an answerer's, but for the prompts. asked: the problem of each answer. done: how
    many are there. each: answers to a problem. It ends where `stop` says so.
    """
    if done == len(asked):
        return
    # An answer depends on its number: what is there leaves a gap, which costs nothing.
    prompts = [[]] * done + [problem.prompt_ids for problem in asked[done:]]
    waiting = []
    ended = answers.checked(stream(prompts, stop=stop), len(prompts))
    for i, answer in answers.in_order(ended):
        if i >= done:
            waiting.append(answer)
        if waiting and (i + 1) % each == 0:
            yield i + 1 - len(waiting), state.stacked(waiting)
            waiting = []


def grown(groups, sink: Answers, asked, each: int, grade, timer, *, writes: bool):
    """Returns the records of all answers: those there, and what `missing` yields, graded.

    writes: whether this process adds them to the file. Raises exits.Stopped where some are
    missing still.
    """
    records = list(sink.lines)
    for first, trace in groups:
        with timer("reward"):
            more = grade(trace, asked, first, each)
        records += more
        for record in more if writes else ():
            sink.add(record)
    if len(records) < len(asked):
        raise exits.Stopped(
            f"stopped by a signal after {len(records)} of {len(asked)} answers; start the "
            f"same command again to go on in {sink.path.parent}"
        )
    return records


def graded(
    trace: state.Trace, asked, first: int, each: int, *, grader, truncated_wrong, decode
) -> list[dict]:
    """Returns the records of answers from the number `first` on, graded.

    decode: of a Trace, its answers as graders take them. The further arguments are those of
    `missing` and `rollout.graded`.
    """
    numbers = np.arange(first, first + len(trace.len_B))
    problems = [asked[i] for i in numbers]
    rollouts = rollout.graded(
        trace,
        decode(trace),
        problems,
        numbers // each,
        grader,
        truncated_wrong=truncated_wrong,
    )
    return rollout.as_records(rollouts, problems)


def main():
    """Parses the command line and evaluates."""
    overwrite = flags.DEFINE_bool("overwrite", False, OVERWRITE)
    cfg = command_line.from_command_line(sys.argv, example="configs/eval.py")
    with Folder(
        cfg.run.folder, writes=jax.process_index() == 0, agreed=sharding.anywhere
    ) as run:
        evaluate(cfg, run, overwrite.value)


if __name__ == "__main__":
    options = command_line.OPTIONS | {"--overwrite": OVERWRITE}
    command_line.entry(main, command_line.usage(__doc__, options))
