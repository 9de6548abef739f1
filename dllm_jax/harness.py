"""Evaluates a checkpoint by the tasks of lm-evaluation-harness.

    python -m dllm_jax.harness --config=configs/eval.py:llada-8b --tasks=arc_easy,gsm8k

It answers and scores with the sampler and the weights that `python -m dllm_jax.eval` uses, and
leaves run.folder/lm_eval.json. Likelihoods are evidence bounds (128 draws of noise) where a
model is not autoregressive, so that they make sense for base models and not for those that were
taught to follow instructions. Tasks that execute what a model writes are refused: eval runs
code in a jail (configs/eval.py:humaneval). Needs make install EXTRAS=lm-eval.
"""

import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import sys

import jax
from absl import flags

from dllm_jax import checks, command_line, compiler, config, data, sharding
from dllm_jax.data.prompts import by_template
from dllm_jax.folder import Folder, write
from dllm_jax.models import hf, repository
from dllm_jax.rl.likelihood import Likelihood
from dllm_jax.sampling import answers, placement

TASKS = "names of tasks, with commas"
TASK_FOLDER = "a folder with the YAML files of further tasks"
LIMIT = "documents of each task, from its start; default: all"
FEWSHOT = "examples before each question; default: what the task's file says, or none"
DRAWS = "of noise, for likelihoods"
CHAT = "write conversations by the checkpoint's chat template"
# What its libraries fail with where the hub, or a task's own file, is not there.
LOST = (ConnectionError, TimeoutError, FileNotFoundError)
# By which a task says how long an answer may be: the first that it names counts.
LONGEST = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
UNSAFE = (
    "--tasks: {} would execute what the model writes, without a jail: use "
    "configs/eval.py:humaneval or :mbpp of python -m dllm_jax.eval"
)


class Model:
    """What the harness asks of a language model; `adapted` makes it one of its own."""

    def __init__(self, cfg: config.Config, draws: int, say=print):
        """cfg: as the command line makes it. draws: of noise, for likelihoods."""
        super().__init__()
        self.cfg, model, self.tok = config.completed(cfg)
        self.model = dataclasses.replace(model, lora=None)
        self.draws, self.say = draws, say
        self.cut = 0  # prompts that lost their beginning: see `ending`
        self.mesh = sharding.make_mesh(**cfg.mesh.axes)
        checked = self.model, self.cfg.sampler, cfg.run.compile_cache
        with jax.set_mesh(self.mesh):
            for line in config.check_kernels(*checked):
                say(line)

    # Each is loaded when it is first asked for: many tasks need but one of them.

    @functools.cached_property
    def stream(self):
        """The `stream` of an answerer, but for prompts and temperature."""
        with jax.set_mesh(self.mesh):
            answerer, params = placement.loaded(
                self.cfg.model.path,
                model=self.model,
                cfg=self.cfg.sampler,
                mesh=self.mesh,
                rollout=self.cfg.mesh.rollout,
                say=self.say,
            )
        key = jax.random.key(self.cfg.seed)
        return functools.partial(answerer.stream, params, key=key)

    @functools.cached_property
    def likelihood(self) -> Likelihood:
        """What scores given answers."""
        path = repository.find(self.cfg.model.path)
        _, params = hf.load(path, mesh=self.mesh, dtype=self.model.dtype, heads=("lm",))
        return Likelihood(
            params,
            model=self.model,
            cfg=self.cfg.sampler,
            batch=self.cfg.batch,
            draws=self.draws,
            seed=self.cfg.seed,
            mesh=self.mesh,
        )

    # ---- What the harness calls ----------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer, for the harness's caches."""
        return str(self.tok.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history, add_generation_prompt=True) -> str:
        """Returns a conversation as text, which ends where the assistant is to go on.

        add_generation_prompt: False where the last message is how its answer begins, as
        tasks with a gen_prefix have it.
        """
        messages, begun = data.conversation(chat_history), ""
        if not add_generation_prompt and messages[-1]["role"] == "assistant":
            # By the template its turn would end behind what has begun.
            begun = messages.pop()["content"]
            add_generation_prompt = True
        return by_template(self.tok, messages, opens=add_generation_prompt) + begun

    def generate_until(self, requests) -> list[str]:
        """Returns an answer to each request, cut before the first of its stop strings."""
        for line in self.unlike([request.args[1] for request in requests]):
            self.say(line)
        prompts = [self.prompt_of(request.args[0]) for request in requests]
        self.tell_cut(len(prompts))
        answered = self.sampled(prompts, self.cfg.eval.temperature)
        texts = []
        for request, tokens in zip(requests, answered, strict=True):
            wanted = request.args[1]
            taken = tokens[: most_of(wanted) or len(tokens)]
            text = data.decoded(self.tok, taken)
            texts.append(until(text, wanted.get("until") or []))
        return texts

    def unlike(self, wanted: list[dict]) -> list[str]:
        """Returns a warning for what tasks want of sampling, and the configuration does not."""
        lines, cfg = [], self.cfg
        longest = max(map(most_of, wanted), default=0)
        if longest > cfg.sampler.max_new:
            lines.append(
                f"warning: tasks ask for up to {longest} tokens; answers end at "
                f"sampler.max_new={cfg.sampler.max_new}"
            )
        warm = {*map(temperature_of, wanted)}
        if warm - {cfg.eval.temperature}:
            lines.append(
                f"warning: tasks ask for temperature {', '.join(map(str, sorted(warm)))}; "
                f"sampled is with eval.temperature={cfg.eval.temperature:g}"
            )
        return lines

    def loglikelihood(self, requests) -> list[tuple[float, bool]]:
        """Returns each continuation's log-likelihood, and whether greedy sampling says it.

        Raises ValueError for one without a token, or with too many.
        """
        pairs = [self.pair_of(*request.args) for request in requests]
        self.tell_cut(len(pairs))
        longest = max((len(answer) for _, answer in pairs), default=0)
        if longest > self.cfg.sampler.max_new:  # before anything is sampled
            raise ValueError(
                f"sampler.max_new={self.cfg.sampler.max_new}: tasks ask for the likelihood "
                f"of up to {longest} tokens; set it to so many"
            )
        # What is sampled behind a continuation's end would tell nothing of it.
        asked = [(tuple(prompt), self.length_of(answer)) for prompt, answer in pairs]
        distinct = list(dict.fromkeys(asked))
        prompts = [list(prompt) for prompt, _ in distinct]
        greedy = self.sampled(prompts, 0.0, new=[length for _, length in distinct])
        said = dict(zip(distinct, greedy, strict=True))
        return [
            (self.likelihood.of(prompt, answer), said[key] == answer)
            for key, (prompt, answer) in zip(asked, pairs, strict=True)
        ]

    def loglikelihood_rolling(self, requests) -> list[float]:
        """Returns the log-likelihood of each whole text, a window of max_new at a time."""
        found = []
        for request in requests:
            ids, total = data.ids_of(self.tok, request.args[0]), 0.0
            width = self.cfg.sampler.max_new
            for first in range(0, len(ids), width):
                before = [self.first_token(), *ids[:first]]
                prompt = before[-self.cfg.sampler.max_prompt :]
                total += self.likelihood.of(prompt, ids[first : first + width])
            found.append(total)
        return found

    # ---- Texts and tokens ----------------------------------------------------------------

    def first_token(self) -> int:
        """Returns the token that stands before a text without a context."""
        known = self.tok.bos_token_id, self.tok.eos_token_id, self.model.eos_id
        return next(token for token in known if token is not None)

    def prompt_of(self, context: str) -> list[int]:
        """Returns a context's tokens, the last of them where they are too many."""
        ids = data.ids_of(self.tok, context) or [self.first_token()]
        return self.ending(ids)

    def ending(self, ids: list[int]) -> list[int]:
        """Returns a prompt, of one above sampler.max_prompt the last tokens; counts those."""
        most = self.cfg.sampler.max_prompt
        self.cut += len(ids) > most
        return ids[-most:]

    def tell_cut(self, asked: int) -> None:
        """Says how many of the last `asked` prompts were cut: examples may be lost with it."""
        if self.cut:
            self.say(
                f"warning: {self.cut} of {asked} prompts lose their beginning: they have more "
                f"than sampler.max_prompt={self.cfg.sampler.max_prompt} tokens"
            )
        self.cut = 0

    def pair_of(self, context: str, answer: str) -> tuple[list[int], list[int]]:
        """Returns the tokens of a context and of its continuation, tokenised together.

        Blanks that end the context are the continuation's, as tokens begin with blanks.
        Where a token would be of both, each has its own. Raises ValueError for a
        continuation that has none.
        """
        kept = context.rstrip(" ")
        whole = data.ids_of(self.tok, context + answer)
        before = data.ids_of(self.tok, kept) if kept else []
        prompt, after = whole[: len(before)], whole[len(before) :]
        if not after:
            prompt = before
            after = data.ids_of(self.tok, context[len(kept) :] + answer)
        if not after:
            raise ValueError(
                f"a task asks for the likelihood of nothing behind {checks.shown(context)}"
            )
        prompt = prompt or [self.first_token()]
        return self.ending(prompt), after

    def length_of(self, answer: list[int]) -> int:
        """Returns how many tokens are to be sampled to compare them with an answer."""
        return min(max(len(answer), 1), self.cfg.sampler.max_new)

    def sampled(
        self, prompts: list[list[int]], temperature: float, new: list[int] | None = None
    ) -> list[list[int]]:
        """Returns the tokens of an answer to each prompt; new: see sampling/answers.py."""
        stream = self.stream(prompts, temperature=temperature, new=new)
        found = dict(answers.checked(stream, len(prompts)))
        return [
            answer.tokens_T[answer.prompt_len : answer.prompt_len + answer.len].tolist()
            for _, answer in sorted(found.items())
        ]


def most_of(wanted: dict) -> int:
    """Returns the most tokens of an answer by a task's settings; 0: they do not say."""
    return next((int(wanted[name]) for name in LONGEST if wanted.get(name)), 0)


def temperature_of(wanted: dict) -> float:
    """Returns the temperature that a task's settings ask for, as the harness reads them."""
    samples, given = wanted.get("do_sample"), wanted.get("temperature")
    if samples is False or (given is None and not samples):
        return 0.0
    return 1.0 if given is None else float(given)


def until(text: str, stops: list[str] | str) -> str:
    """Returns a text up to the first of the strings that end it."""
    stops = [stops] if isinstance(stops, str) else stops
    ends = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(ends)] if ends else text


# ---- The harness -------------------------------------------------------------------------


def adapted(cfg: config.Config, draws: int, say=print):
    """Returns a Model that is a language model of the harness.

    Raises ValueError where that is not installed.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise ValueError(
            "lm-evaluation-harness is missing: make install EXTRAS=lm-eval"
        ) from None
    return type("Adapted", (Model, LM), {})(cfg, draws, say)


def executing(names: list[str], index: dict) -> list[str]:
    """Returns which tasks execute what a model writes, as their files say (unsafe_code).

    names: of tasks, groups and tags. index: the harness's entries, by name, whose `cfg` is
    what the file says; a tag has none.
    """
    said = {name: x.cfg or {"task": [*x.tags]} for name, x in index.items()}
    found, left = set(), list(names)
    while left:
        told = left.pop()
        if isinstance(told, str):
            told = said.pop(told, {})  # each once: a task's file names itself
        if told.get("unsafe_code"):
            found.add(told.get("group") or told["task"])
        for parts in (told.get("task") or [], told.get("group") or []):
            left += parts if isinstance(parts, list) else [parts]
    return sorted(found)


def evaluate(model, tasks: list[str], folder: str = "", **options) -> dict:
    """Returns what the harness finds: results by task, their versions, their settings.

    folder: of further tasks; options: of lm_eval.simple_evaluate. Raises ValueError for an
    unknown task, for one that executes what the model writes, before anything is
    downloaded, and for one whose data cannot be.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=folder or None)
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise ValueError(f"the harness has no task {', '.join(unknown)}")
    if unsafe := executing(tasks, manager.task_index):
        raise ValueError(UNSAFE.format(", ".join(unsafe)))
    try:
        found = lm_eval.simple_evaluate(
            model=model, tasks=tasks, task_manager=manager, **options
        )
    except ValueError as error:  # of a task that is a class, which has no such file
        if "unsafe" not in str(error):
            raise
        raise ValueError(UNSAFE.format(", ".join(tasks))) from None
    except LOST as error:
        raise ValueError(
            f"--tasks={','.join(tasks)}: cannot get what they need: "
            f"{' '.join(str(error).split())}; without a network, let HF_HOME name a cache "
            "of the Hugging Face hub that holds it"
        ) from None
    names = ("results", "versions", "n-shot", "n-samples", "configs")
    return {name: found[name] for name in names if name in found}


def main():
    """Parses the command line, evaluates, and prints the results."""
    tasks = flags.DEFINE_list("tasks", [], TASKS)
    folder = flags.DEFINE_string("task_folder", "", TASK_FOLDER)
    limit = flags.DEFINE_integer("limit", None, LIMIT, lower_bound=1)
    fewshot = flags.DEFINE_integer("num_fewshot", None, FEWSHOT, lower_bound=0)
    draws = flags.DEFINE_integer("draws", 128, DRAWS, lower_bound=1)
    chat = flags.DEFINE_bool("chat", False, CHAT)
    cfg = command_line.from_command_line(sys.argv, example="configs/eval.py")
    if not tasks.value:
        raise ValueError("--tasks=NAME,... is required, such as --tasks=arc_easy")
    if jax.process_count() > 1:
        raise ValueError("the harness asks one process: start it without --distributed")
    if folder.value and not pathlib.Path(folder.value).is_dir():
        raise ValueError(f"--task_folder={folder.value}: there is no such folder")
    # Its bootstrap has a pool of processes: a fork of this one, which has JAX's threads, may
    # wait for ever for what one of them held.
    multiprocessing.set_start_method("forkserver", force=True)
    with Folder(cfg.run.folder) as run:
        run.refuse_trained()
        compiler.keep_compiled(cfg.run.compile_cache)
        model = adapted(cfg, draws.value)
        defaults = dataclasses.asdict(config.Config())
        run.begin(dataclasses.asdict(model.cfg), defaults, model.mesh)
        file = run.path / "lm_eval.json"
        if file.exists():  # maybe of other weights: config.json tells of these
            before = file.with_stem("lm_eval.before")
            print(f"{file}: what was found before is in {before.name} now")
            os.replace(file, before)
        found = evaluate(
            model,
            tasks.value,
            folder.value,
            limit=limit.value,
            num_fewshot=fewshot.value,
            apply_chat_template=chat.value,
            log_samples=False,
        )
        write(file, json.dumps(found, indent=2, default=str) + "\n")
        for task, scores in found["results"].items():
            for name, value in scores.items():
                if isinstance(value, float):
                    print(f"{task:24s} {name:32s} {value:.4g}")


if __name__ == "__main__":
    options = command_line.OPTIONS | {"--tasks=NAME,...": TASKS}
    options |= {"--task_folder=DIR": TASK_FOLDER, "--limit=N": LIMIT}
    options |= {"--num_fewshot=N": FEWSHOT}
    options |= {"--draws=128": DRAWS, "--chat": CHAT}
    command_line.entry(main, command_line.usage(__doc__, options), cleans=True)
