"""Evaluates a checkpoint on problems with known answers: accuracy, pass@k, speed.

    python -m dllm_jax.eval --config=configs/eval.py [--config.a.b=value ...]
    python -m dllm_jax.eval compare RUN RUN2

It answers data.heldout (the first eval.problems of it) eval.answers times and grades the
answers as training does (those that were cut as rl.truncated says: configs/eval.py has
"graded", most runs have "wrong"). In run.folder it leaves eval.json, what it prints;
card.json, every score with its 95 % interval and all that it depends on; card.md, the same as
a row of a table; and eval.jsonl, a line for each answer with its trace (`step_map`): data of
trace SFT. Each is there soon after it is graded; started again, it goes on behind the last.

With eval.samplers="one:strategy=static/sure:threshold=0.99" these samplers answer, too, each
in a folder of its own. With eval.sweep="sampler.threshold=0.6,0.9" every value is evaluated,
in a folder of its own, and sweep.json, .md and .png have accuracy over tokens per forward, and
AUP.

`compare` tells how far the second of two evaluations is ahead on their common problems.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import sys
from typing import NamedTuple

import jax
import numpy as np
from absl import flags

from dllm_jax import (
    checks,
    command_line,
    compatible,
    compiler,
    config,
    data,
    exits,
    metrics,
    pictures,
    processes,
    sharding,
    statistics,
)
from dllm_jax.data import sets
from dllm_jax.folder import OVERWRITE, Answers, Folder, write
from dllm_jax.models import repository
from dllm_jax.records import hashed
from dllm_jax.rl import beside, heldout, rewards, rollout, scores
from dllm_jax.sampling import answers, placement, state
from dllm_jax.sampling.config import IDLE
from dllm_jax.viewer import compare, traces

TOGETHER = 16  # answers that are graded at once: of more a signal would wait for all
BEHIND = 256  # problems that are answered and not graded: then sampling waits
SCORES = ("card.json", "card.md", "eval.json")  # of a setting, in its folder
SWEPT = ("sweep.json", "sweep.md", "sweep.png")


class Setting(NamedTuple):
    """What is evaluated at once: the sampler, one of eval.samplers, or a sweep's value."""

    name: str  # "": that of the configuration itself
    cfg: config.Config  # completed
    folder: pathlib.Path
    sink: Answers

    def named(self, told: dict) -> dict:
        """Returns metrics with the setting's name in front, as in "one_accuracy"."""
        front = self.name and f"{self.name}_"
        return {f"{front}{key}": x for key, x in told.items()}


def evaluate(cfg: config.Config, run: Folder, overwrite: bool = False) -> dict:
    """Returns the metrics by name, of a sweep its AUP's; writes them and the answers.

    run: the folder `cfg.run.folder`. overwrite: what is there is not to stay. Raises
    ValueError when there are no problems, or the folder holds another evaluation, and
    exits.Stopped where a signal came.
    """
    # ---- The problems and the model ----------------------------------------------------
    timer = metrics.Timer()
    processes.watch(timer, cfg.run.stuck_after)
    stop = exits.StopSignal(timer.moving(sharding.anywhere))
    cfg, model, tok = config.completed(cfg)
    marks = repository.marks(repository.find(cfg.model.path))
    settings = settings_of(cfg, run.path, marks, overwrite)
    compiler.keep_compiled(cfg.run.compile_cache)
    mesh = sharding.make_mesh(**cfg.mesh.axes)
    jax.set_mesh(mesh)
    say = print if run.writes else lambda *args: None
    lines = config.size_warnings(cfg.sampler, model) + compatible.unasked(cfg)
    lines += config.check_kernels(model, cfg.sampler, cfg.run.compile_cache)
    for line in lines:
        say(line)
    grader = grader_of(cfg, tok, looks=model.looks)
    asked = asked_of(cfg, model, tok, say, grader)
    for setting in settings:
        check_same(setting.sink, asked.problems)
    for line in grader.begin():
        say(line)
    streams = streams_of(cfg, settings, model, tok, mesh, say, grader, marks)

    # ---- Each problem, answered so many times ------------------------------------------
    sharding.anywhere(False)  # all have read what is there
    run.begin(dataclasses.asdict(cfg), dataclasses.asdict(config.Config()), mesh)
    grading = functools.partial(
        beside.Beside,
        grader,
        pictures.decoder(cfg, model, tok),
        asked.problems,
        np.arange(len(asked.problems)) // cfg.eval.answers,
        most=TOGETHER,
    )
    if run.writes:
        begin(settings, len(asked.problems), run.path, sweeps=bool(cfg.eval.sweep))
    out, swept = {}, []
    for setting in settings:
        with timer("eval"):
            records = answered(setting, streams(setting), grading, timer, stop, run)
        found = scores.of_records(records, cfg.eval.answers, grader.vote)
        told = told_of(records, cfg.eval.answers, found) | spent(setting, timer)
        if run.writes:
            leave(told, scores.card(setting.cfg, records, asked, found, marks), setting)
        out |= setting.named(told)
        swept.append(records)
    for setting in settings if run.writes else ():  # none before all are
        setting.sink.done()
    return out if not cfg.eval.sweep else leave_sweep(cfg, run, settings, swept)


def grader_of(cfg: config.Config, tok, *, looks: bool) -> rewards.Grader:
    """Returns what grades answers; nobody learns from chunks here: their judge is not asked."""
    whole = dataclasses.replace(cfg.reward, split="none")
    return rewards.grader(
        cfg.rl.reward,
        whole,
        tok,
        cfg.sampler.answers,
        looks=looks,
        room=cfg.sampler.max_new,
    )


def settings_of(cfg: config.Config, folder: pathlib.Path, marks, overwrite: bool):
    """Returns the Settings of an evaluation. marks: of the checkpoint's files.

    Raises ValueError for a name that a file of the folder has, such as its lock.
    """
    for name, _ in config.settings(cfg):
        if name and (folder / name).is_file():
            raise ValueError(
                f"eval.samplers: {name!r} is a file in {folder}: another name"
            )
    return [
        Setting(
            name,
            own,
            folder / name,
            Answers(
                folder / name / "eval.jsonl", job_of(own, marks), overwrite=overwrite
            ),
        )
        for name, own in config.settings(cfg)
    ]


def begin(
    settings: list[Setting], total: int, folder: pathlib.Path, *, sweeps: bool = False
):
    """Makes the settings' folders, and their answers' files ready for `total` answers.

    Where some are missing the scores go that are there: they would stand beside others.
    sweeps: whether the settings are a sweep's, whose area is one of them.
    """
    whole = [len(setting.sink.lines) == total for setting in settings]
    gone = [folder / name for name in SWEPT if sweeps and not all(whole)]
    for setting, stays in zip(settings, whole, strict=True):
        gone += [setting.folder / name for name in SCORES if not stays]
    with exits.room(folder):
        for path in gone:
            path.unlink(missing_ok=True)
        for setting in settings:
            setting.folder.mkdir(exist_ok=True)
            setting.sink.begin(total)


def spent(setting: Setting, timer: metrics.Timer) -> dict[str, float]:
    """Returns the seconds of a setting; {} where some of its answers were there before.

    Where all were, those that its scores told then: `begin` has left these alone.
    """
    seconds = timer.pop()
    if not setting.sink.lines:
        return seconds
    before = traces.object_of(setting.folder / "eval.json")
    return {name: x for name, x in before.items() if name.startswith("seconds/")}


def streams_of(
    cfg: config.Config,
    settings: list[Setting],
    model,
    tok,
    mesh,
    say,
    grader: rewards.Grader,
    marks: dict,
):
    """Returns a function from a Setting to its `stream`, but for prompts, to be asked once.

    grader: what lies beside it. marks: of the checkpoint's files, which must have them still.
    All have the same weights. Raises ValueError, before anything is answered, for a sampler
    that does not suit the model.
    """
    model = dataclasses.replace(model, lora=None)
    answerer, params = placement.loaded(
        cfg.model.path,
        model=model,
        cfg=cfg.sampler,
        mesh=mesh,
        rollout=cfg.mesh.rollout,
        say=say,
        beside=pictures.claim(cfg, model, tok, grader, 0).resident,
    )
    command_line.check_weights(cfg.model.path, marks)

    samplers = {setting.name: setting.cfg.sampler for setting in settings}
    made = placement.others(answerer, model, samplers)

    def stream(setting: Setting):
        own = made.pop(setting.name)  # what it keeps on devices goes with it
        return functools.partial(
            own.stream,
            params,
            key=jax.random.key(cfg.seed),
            temperature=setting.cfg.eval.temperature,
        )

    return stream


def answered(setting: Setting, stream, grading, timer, stop, run: Folder):
    """Returns the records of all answers of a setting: see `missing` and `grown`.

    grading: makes a Beside of them, of which so many are `done`. The file is closed behind
    the last.
    """
    grading = grading(done=len(setting.sink.lines))
    unjudged = sum(not line.get("graded", True) for line in setting.sink.lines)
    if unjudged:
        exits.warn(
            f"{setting.sink.path}: of its answers nobody could judge {unjudged}, which stay "
            "so; --overwrite has all answered and judged anew"
        )
    groups = missing(stream, grading, setting, stop)
    with setting.sink.file or contextlib.nullcontext():
        waiting = Waiting(grading, setting, timer, writes=run.writes)
        return grown(groups, waiting, stop)


def leave(told: dict[str, float], card: dict, setting: Setting):
    """Writes what came out of a setting, and prints it."""
    text = scores.table([card])
    if card["groups"]:
        text = f"{scores.table_of_groups(card)}\n\n{text}"
    write(setting.folder / "eval.json", json.dumps(told, indent=2) + "\n")
    write(setting.folder / "card.json", json.dumps(card, indent=2) + "\n")
    write(setting.folder / "card.md", text + "\n")
    if setting.name:
        print(f"\n{setting.name}")
    for name, value in told.items():
        print(f"{name:24s} {value:.4g}")
    print("\n" + text)


def leave_sweep(
    cfg: config.Config, run: Folder, settings: list[Setting], swept
) -> dict:
    """Returns a sweep's points and AUP; writes and prints them."""
    key, values = cfg.eval.swept
    pairs = zip(values, swept, strict=True)
    points = [scores.setting(x, records, cfg.eval.answers) for x, records in pairs]
    told = scores.sweep(key, points, cfg.eval.best)
    if run.writes:
        cards = [
            json.loads((setting.folder / "card.json").read_text())
            for setting in settings
        ]
        text = f"{scores.table(cards)}\n\n{scores.sentence(told)}"
        write(run.path / "sweep.json", json.dumps(told, indent=2) + "\n")
        write(run.path / "sweep.md", text + "\n")
        with exits.room(run.path):
            scores.picture(told, cards, run.path / "sweep.png")
        print("\n" + text)
    return told


def asked_of(cfg: config.Config, model, tok, say, grader) -> scores.Asked:
    """Returns what is asked; says how many of the problems are too long.

    Raises ValueError where there are none.
    """
    if not cfg.data.heldout:
        raise ValueError("data.heldout is empty: name the file of problems to evaluate")
    reader = pictures.reader(cfg.model, cfg.sampler, model, tok)
    sets.check(cfg.data.heldout)
    if "," in cfg.data.heldout and not pathlib.Path(cfg.data.heldout).exists():
        raise ValueError(
            f"data.heldout={checks.shown(cfg.data.heldout)}: no such file; an evaluation is "
            "of one, and each of several has a folder of its own (run.folder)"
        )
    rows, sha256 = hashed(cfg.data.heldout)
    problems = data.problems(cfg.data.heldout, tok, cfg.data, grader, reader, rows)
    problems = problems[: cfg.eval.problems or None]
    for number, problem in enumerate(problems if cfg.eval.by else (), 1):
        with data.of_record(cfg.data.heldout, number):
            data.text(problem.record, cfg.eval.by, "eval.by")
    rollout.check_prompts(
        problems, cfg.sampler.max_prompt, model.vocab, say, cfg.data.heldout
    )
    heldout.repeated(problems, cfg.data.heldout, say)
    each = range(cfg.eval.answers)
    return scores.Asked([problem for problem in problems for _ in each], sha256)


def told_of(records: list[dict], each: int, found: dict) -> dict[str, float]:
    """Returns what all answers say, `each` of them to a problem; found: their Scores."""
    told = rollout.summary(rollout.of_records(records))
    # The card's, which leave out what nobody judged.
    known = {name: x for name, x in found.items() if x.method != statistics.OF_NONE}
    told |= {name: x.value for name, x in known.items()}
    return told | {"problems": len(records) // each, "answers": each}


def job_of(cfg: config.Config, marks: dict) -> dict:
    """Returns what the answers depend on, flat. marks: of the checkpoint's files."""
    leaves = config.flat(dataclasses.asdict(cfg))
    idle = ("run.", "mesh.", "reward.workers", *(f"sampler.{x}" for x in IDLE))
    # A setting is what it is in any sweep, and beside any others.
    idle += ("eval.sweep", "eval.samplers", "eval.best", "eval.by")
    job = marks | {key: x for key, x in leaves.items() if not key.startswith(idle)}
    return job | rewards.sources(cfg.rl.reward, cfg.reward, chunks=False)


def check_same(sink: Answers, asked: list[data.Problem]):
    """Raises ValueError where a line that is there is not of the problem asked.

    It answers another prompt, or was graded by another gold answer or record: its reward is
    what that said, and the card would tell of this file.
    """

    def wrong(number: int, line: dict) -> str:
        if number > len(asked) or not answers.answers_prompt(
            line, asked[number - 1].prompt_ids
        ):
            return f"it does not answer problem {number}"
        problem = asked[number - 1]
        gold = line.get("answer", problem.answer)
        if gold != problem.answer:
            was, now = checks.shown(gold), checks.shown(problem.answer)
            return f"it was graded by {was}, which is {now} now"
        mark = mark_of(problem)
        if line.get("problem", mark) != mark:  # lines of earlier versions have none
            return "the record that it was graded by has changed"
        return ""

    sink.check(wrong)


def mark_of(problem: data.Problem) -> str:
    """Returns what tells a problem's record from another: graders read any of its fields."""
    written = json.dumps(problem.record, sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()[:16]


def missing(stream, grading: beside.Beside, setting: Setting, stop):
    """Yields (the number of the first, a Trace) of the answers to each problem, in order.

    stream: an answerer's, but for the prompts. It ends where `stop` says so.
    """
    asked, done = grading.problems, len(setting.sink.lines)
    if done == len(asked):
        return
    # An answer depends on its number: what is there leaves a gap, which costs nothing.
    prompts = [[]] * done + [problem.prompt_ids for problem in asked[done:]]
    waiting = []
    ended = answers.checked(stream(prompts, stop=stop), len(prompts), done)
    for i, answer in answers.in_order(grading.watched(ended)):
        if i >= done:
            waiting.append(answer)
        if waiting and (i + 1) % setting.cfg.eval.answers == 0:
            yield i + 1 - len(waiting), state.stacked(waiting)
            waiting = []


class Waiting:
    """Answers that wait for their grading, in order, and the records of all before them."""

    def __init__(
        self, grading: beside.Beside, setting: Setting, timer, *, writes: bool
    ):
        """writes: whether this process adds records to the file."""
        self.grading, self.setting, self.timer = grading, setting, timer
        self.groups, self.writes = collections.deque(), writes
        self.records = list(setting.sink.lines)

    def write(self, most: int):
        """Writes what is graded, and waits for it where more than `most` problems wait."""
        while self.groups:
            late = not self.grading.ready(numbers(*self.groups[0]))
            if len(self.groups) <= most and sharding.anywhere(late):
                return
            with self.timer("reward"):
                more = graded(*self.groups.popleft(), self.grading, self.setting.cfg)
            self.records += more
            for record in more if self.writes else ():
                self.setting.sink.add(record)

    def take(self, group):
        """Takes what `missing` yields, has it graded where no thread does, and writes."""
        self.groups.append(group)
        if not self.grading.grader.aside and len(self.grading.waiting) >= TOGETHER:
            with self.timer("reward"):
                self.grading.work()
        self.write(BEHIND)

    def finish(self, stop):
        """Writes what is left; once `stop` says so no more than a thread is at."""
        while self.groups and not (self.grading.grader.aside and stop()):
            self.write(len(self.groups) - 1)
        if self.groups:
            self.grading.give_up()
            with self.timer("reward"):
                concurrent.futures.wait(self.grading.jobs)
            self.write(len(self.groups))


def grown(groups, waiting: Waiting, stop) -> list[dict]:
    """Returns the records of all answers: those there, and what `missing` yields, graded.

    They are graded meanwhile, and written as soon as they are; where no thread may, TOGETHER
    of them at once. What a signal finds waiting is not graded any more: it is answered again.
    stop: see `missing`. Raises exits.Stopped where some are missing still.
    """
    try:
        for group in groups:
            waiting.take(group)
    except Exception:
        if jax.process_count() == 1:  # others would have to agree
            with contextlib.suppress(Exception):
                waiting.finish(lambda: True)
        raise
    waiting.finish(stop)
    there, asked = len(waiting.records), len(waiting.grading.problems)
    if there < asked:
        raise exits.Stopped(
            f"by a signal after {there} of {asked} answers; start the same command again to "
            f"go on in {waiting.setting.sink.path.parent}"
        )
    return waiting.records


def numbers(first: int, trace: state.Trace) -> np.ndarray:
    """Returns the numbers of answers from the number `first` on."""
    return np.arange(first, first + len(trace.len_B))


def graded(
    first: int, trace: state.Trace, grading: beside.Beside, cfg: config.Config
) -> list[dict]:
    """Returns the records of answers from the number `first` on, graded."""
    number_n = numbers(first, trace)
    problems = [grading.problems[i] for i in number_n]
    texts, grades = grading.result(number_n)
    rollouts = rollout.settled(
        trace,
        texts,
        number_n // cfg.eval.answers,
        grades,
        truncated_wrong=cfg.rl.truncated_wrong,
        first=first,
    )
    pairs = zip(rollout.as_records(rollouts, problems), problems, strict=True)
    return [record | {"problem": mark_of(problem)} for record, problem in pairs]


# ---- Two evaluations ---------------------------------------------------------------------


def versus(paths: list[str]) -> str:
    """Returns what the second evaluation has ahead of the first, as a Markdown table.

    paths: their folders, or files of answers. Raises ValueError for two without a common
    problem.
    """
    if len(paths) != 2:
        raise ValueError(f"compare needs two evaluations, and not {len(paths)}")
    files = [traces.read(str(evaluated(path))) for path in paths]
    shared = compare.check_common(*files)
    told = compare.summary(files[0].rows, files[1].rows, shared)
    lines = [scores.line(["", *paths, "difference, 95 %"]), scores.line(["---"] * 4)]
    for name, first, second, gain, low, high in told["measures"]:
        ends = "" if low is None else f" [{low:+.4g}, {high:+.4g}]"
        cells = [f"{first:.4g}", f"{second:.4g}", f"{gain:+.4g}{ends}"]
        lines.append(scores.line([name, *cells]))
    lines += ["", f"{told['problems']} problems in common"]
    key_of = compare.key_for(files[0].rows, files[1].rows)
    asked = [len(compare.groups(file.rows, key_of)) for file in files]
    if max(asked) > told["problems"]:
        lines[-1] += f", of {asked[0]} and {asked[1]}"
    if told["wins"]:
        ahead = "; the first is ahead on {} of them, the second on {}"
        lines[-1] += ahead.format(*told["wins"])
        if sum(told["wins"]) < told["problems"]:
            lines[-1] += f"; graded in both: {sum(told['wins'])}"
    return "\n".join(lines)


def evaluated(path: str) -> pathlib.Path:
    """Returns the answers of an evaluation: a file, or that of a folder."""
    folder = pathlib.Path(path)
    if not folder.exists():
        raise ValueError(f"{path}: there is no such folder or file of an evaluation")
    file = folder / "eval.jsonl"
    if folder.is_dir() and not file.is_file():
        raise ValueError(f"{path}: no evaluation's folder: it has no eval.jsonl")
    return file if folder.is_dir() else folder


def main():
    """Parses the command line and evaluates, or compares."""
    if sys.argv[1:2] == ["compare"]:
        print(versus(sys.argv[2:]))
        return
    overwrite = flags.DEFINE_bool("overwrite", False, OVERWRITE)
    cfg = command_line.from_command_line(sys.argv, example="configs/eval.py")
    for arg, key, _ in command_line.overrides(sys.argv):
        if key == "sampler.temperature":
            exits.warn(
                f"{arg}: answers are drawn at eval.temperature={cfg.eval.temperature:g}"
            )
    with Folder(
        cfg.run.folder, writes=jax.process_index() == 0, agreed=sharding.anywhere
    ) as run:
        processes.see(run.path / "lock")
        run.refuse_trained()
        evaluate(cfg, run, overwrite.value)
        if run.writes:
            drawn = f"; its picture is {run.path / 'sweep.png'}"
            print(f"\nwritten to {run.path}{drawn if cfg.eval.sweep else ''}")


if __name__ == "__main__":
    options = command_line.OPTIONS | {"--overwrite": OVERWRITE}
    options["compare RUN RUN2"] = "two folders of evaluations, or files of answers"
    command_line.entry(main, command_line.usage(__doc__, options))
