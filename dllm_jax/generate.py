"""Answers prompts with a diffusion language model.

    python -m dllm_jax.generate --model=DIR "How many legs has a spider?"
    python -m dllm_jax.generate --model=DIR --image=FILE "What is this?"
    python -m dllm_jax.generate --model=DIR --prompts=FILE.jsonl --out=FILE.jsonl
    python -m dllm_jax.generate --model=DIR --image-out=FILE.png "A red circle"

A prompt on the command line is shown while it is unmasked, where the output is a
terminal. A line of a prompts file holds `prompt` or `question` (text, taken as the user's
turn), `messages` (a conversation) or `prompt_ids` (token ids: no tokenizer is needed), and
for a model that looks `image`, a path below the file's folder (of a pipe the working one) or
below --config.data.image_root=DIR, or several; the line written for it holds prompt_ids,
response_ids, step_map (the denoising step at which each token was unmasked, from 1), logprobs
(nats), confidence, forwards, finished ("stop", "length", "nan" where the model met a
number that is not finite, or "skipped" where the line's image cannot be read), text, the text
that was asked as question, images, and where the answers are images picture, a small one for
people.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
import tempfile
from typing import NamedTuple

import jax
import ml_collections
from absl import flags
from tqdm import tqdm

from dllm_jax import (
    command_line,
    compiler,
    config,
    data,
    exits,
    folder,
    images,
    pictures,
    sharding,
)
from dllm_jax.data.prompts import warn_special
from dllm_jax.data.tokens import NO_TOKENIZER
from dllm_jax.models import repository
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR
from dllm_jax.models.vision import codes
from dllm_jax.records import has_folder, records
from dllm_jax.sampling import answers, placement, state
from dllm_jax.sampling.config import DRAWING, IDLE, SamplerConfig
from dllm_jax.viewer.pieces import LOST

# A flag that people type daily: the key that it stands for, and what is said of it.
SHORT = {
    "model": ("model.path", "a Hugging Face folder"),
    "max-new-tokens": ("sampler.max_new", "of each answer"),
    "block": ("sampler.block", "tokens denoised together; 0: the checkpoint's"),
    "steps-per-block": ("sampler.steps_per_block", "0: a token a step"),
    "strategy": ("sampler.strategy", "which tokens a step unmasks"),
    "threshold": ("sampler.threshold", "of --strategy=dynamic"),
    "temperature": ("sampler.temperature", "0: arg-max"),
    "cache": ("sampler.cache", "which keys stay; auto: what the model allows"),
    "rows": ("sampler.rows", "prompts sampled together"),
    "seed": ("seed", "of all that is drawn"),
    "dtype": ("model.dtype", "of computation: bfloat16 or float32"),
    "vq": ("model.vq", "the folder of MAGVIT-v2, of a model that draws or reads codes"),
    "image-size": ("model.image_size", "pixels a side; 0: the vq's, or 512"),
    "guidance": ("sampler.guidance", "towards the caption, of --image-out"),
}
PROMPTS, OUT = "a .jsonl file of prompts", "where answers go; default: the terminal"
IMAGE = "what the prompt is about, for a model that looks; may be given again"
DRAWN = "a PNG of what the prompt describes, by a model that draws"
CONFIG = "a file of configs/: its keys in place of these"
# What a terminal would obey instead of showing it, but for line breaks and tabs.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# A flag that there is not, of former times or never: the key that is meant.
MOVED = {
    field.name.replace("_", "-"): f"sampler.{field.name}"
    for field in dataclasses.fields(SamplerConfig)
} | {"kernels": "model.kernels", "model-parallel": "mesh.model"}
MOVED["stop-ids"] += ", which adds to the checkpoint's"
# How the keys begin that have an effect here, and those among them that have none.
USED = ("seed", "model.", "sampler.", "mesh.", "run.compile_cache", "data.image")
UNUSED = ("model.remat", "model.lora", "model.tower", "sampler.max_prompt")


def defaults() -> ml_collections.ConfigDict:
    """Returns the configuration where no file is named: every device has all weights."""
    tree = config.default()
    tree.sampler.max_new = 256
    tree.mesh.update({"data": -1, "fsdp": 1})
    return tree


def help_text() -> str:
    """Returns what --help prints."""
    named = command_line.of_help()
    leaves = config.flat(dataclasses.asdict(named or config.freeze(defaults())))
    options = {
        "PROMPT": "one prompt, on a terminal shown as it is unmasked",
        "-- -PROMPT": "... one that begins with a dash",
    }
    for name, (key, text) in SHORT.items():
        default = leaves[key] or "DIR" if name == "model" else leaves[key]
        options[f"--{name}={default}"] = f"{text} (--config.{key})"
    options |= {"--image=FILE": IMAGE, "--image-out=FILE.png": DRAWN}
    options |= {
        "--prompts=FILE": PROMPTS,
        "--out=FILE": OUT,
        "--overwrite": folder.OVERWRITE,
    }
    options["--config=FILE[:PRESET]"] = CONFIG
    used = {key: value for key, value in leaves.items() if has_effect(key)}
    value = "its value in the file of --config" if named else "its default"
    heading = f"Every key that has an effect here, and {value}:"
    return command_line.usage(__doc__, options, heading, used)


def has_effect(key: str) -> bool:
    """Returns whether a key of the configuration has an effect on answers to prompts."""
    return key.startswith(USED) and not key.startswith(UNUSED)


# ---- The command line --------------------------------------------------------------------


def spelled_out(argv: list[str]) -> list[str]:
    """Returns the arguments with each short flag as the key that it stands for.

    Raises ValueError for a flag of former times, naming its key.
    """
    words = []
    for i, arg in enumerate(argv):
        if arg == "--":  # what follows is no flag
            return words + argv[i:]
        name, equals, value = arg.partition("=")
        # Other commands' flags have underscores: --max_new_tokens is meant, too.
        name = name[2:].replace("_", "-") if arg.startswith("--") else ""
        if name == "image-out":  # absl's names have no dash
            arg = f"--image_out{equals}{value}"
        elif name in SHORT:
            arg = f"--config.{SHORT[name][0]}{equals}{value}"
        elif name in MOVED:
            raise ValueError(f"--{name} is now --config.{MOVED[name]}")
        words.append(arg)
    return words


def report_idle(argv: list[str]):
    """Tells of overrides that have no effect here: nobody is to wait for one."""
    for arg, key, _ in command_line.overrides(argv):
        if not has_effect(key):
            exits.warn(f"{arg}: nothing of it is used to answer prompts")


def parsed(argv: list[str]):
    """Returns (the prompt or None, absl's flags: image, prompts, out and config).

    Raises ValueError as `command_line.of_file` and `parse` do, and for no or two sources
    of prompts.
    """
    words, file = command_line.without_file(["generate", *spelled_out(argv)])
    # Not absl's global ones: tests call this again and again.
    values = flags.FlagValues()
    values.set_gnu_getopt()  # flags may follow the prompt
    flags.DEFINE_multi_string("image", [], IMAGE, flag_values=values)
    flags.DEFINE_string("prompts", None, PROMPTS, flag_values=values)
    flags.DEFINE_string("out", None, OUT, flag_values=values)
    flags.DEFINE_bool("overwrite", False, folder.OVERWRITE, flag_values=values)
    flags.DEFINE_string("image_out", None, DRAWN, flag_values=values)
    tree = command_line.of_file(file) if file else defaults()
    # Behind "--" stands a prompt, whatever it looks like.
    named = words[: words.index("--")] if "--" in words else words
    if not file and any(re.match(r"--image_out(=|$)", word) for word in named):
        tree.sampler.update(DRAWING)
    keys = filter(has_effect, config.flat(tree.to_dict()))
    meant = {f"--config.{key}": key for key in keys}
    meant |= {f"--{name}": key for name, (key, _) in SHORT.items()}
    _, prompts = command_line.parse(words, tree, values, arguments=1, meant=meant)
    report_idle(words)
    if bool(prompts) == (values.prompts is not None):
        raise ValueError("give either one prompt or --prompts=FILE.jsonl")
    if values.image and not prompts:
        raise ValueError(
            "--image=FILE goes with one prompt; a file's lines name theirs"
        )
    if prompts and values.out:
        raise ValueError("--out=FILE goes with --prompts=FILE.jsonl")
    if prompts and bool(values.image_out) != (tree.sampler.answers == "image"):
        raise ValueError(
            "a prompt whose answer is an image needs --image-out=FILE.png, and no other does: "
            f"config.sampler.answers={tree.sampler.answers!r}"
        )
    if values.image_out and (not prompts or values.image):
        raise ValueError(
            "--image-out=FILE.png goes with one prompt, an image's caption, and no --image"
        )
    if values.image_out and not values.image_out.lower().endswith(".png"):
        raise ValueError(
            f"--image-out={values.image_out}: name a file that ends in .png"
        )
    return (prompts[0] if prompts else None), values


# ---- Prompts in --------------------------------------------------------------------------


def read(path: str, tok, vocab: int, reader=None, cfg: data.DataConfig | None = None):
    """Returns (prompt ids, the lines) of a prompts file.

    reader: models.vision.prompts.Reader of a model that looks; cfg: where a line names its
    images, and where they lie. A line whose image cannot be read is said, and has no prompt:
    it will be skipped. Raises ValueError naming the record that has none of these fields, and
    the one whose ids are not a list of ids below `vocab`.
    """
    rows = records(path)  # once: it may be a pipe
    prompts = [[] for _ in rows]
    looker = data.Looker(reader, path, cfg or data.DataConfig())
    for number, row, shown in looker.rows(rows):
        with data.of_record(path, number):
            prompts[number - 1] = prompt_ids(row, tok, vocab, shown)
    return prompts, rows


def prompt_ids(row: dict, tok, vocab: int, shown=None) -> list[int]:
    """Returns the ids of a line's prompt; raises ValueError where there is none.

    shown: see `data.render`.
    """
    if "prompt_ids" in row:
        if pictures := getattr(shown, "pictures", ()):
            raise ValueError(
                f"it has prompt_ids and {len(pictures)} image(s), which ids do not show: "
                "give the text that asks about them"
            )
        if not data.ids(row, "prompt_ids", vocab):
            raise ValueError(f"prompt_ids must be one or more ids in 0..{vocab - 1}")
        return row["prompt_ids"]
    if tok is None:
        raise ValueError("the model has no tokenizer, so each needs prompt_ids")
    if "messages" in row:
        messages = data.messages_of(row, tok)
        return data.check_known(data.render(tok, messages, shown), vocab)
    if (question := question_of(row)) is not None:
        return data.check_known(turn(tok, question, shown), vocab)
    raise ValueError(
        f"needs prompt, question, messages or prompt_ids, it has {sorted(row)}"
    )


def question_of(row: dict) -> str | None:
    """Returns the text that a line asks as the user's turn; None where it has none."""
    asked = {"prompt", "question"} & row.keys()
    if not asked or {"prompt_ids", "messages"} & row.keys():
        return None
    return data.text(row, min(asked))


def turn(tok, text: str, shown=None) -> list[int]:
    """Returns the ids of a conversation of one turn, the user's; shown: see `data.render`."""
    warn_special(tok, text, getattr(shown, "mark", ""))
    return data.render(tok, [{"role": "user", "content": text}], shown)


def load_tokenizer(path: pathlib.Path):
    """Returns the folder's tokenizer, or None where it has none."""
    if any(name.startswith("tokenizer") for name in os.listdir(path)):
        return data.tokenizer(path)
    return None


# ---- Answers out -------------------------------------------------------------------------


def show(stream, prompt: list[int], cfg: SamplerConfig, tok, stop):
    """Prints one canvas as it fills, then its answer.

    stream: an answerer's, but for the prompts and `watch`. stop: whether a signal came.
    Raises exits.Stopped after one.
    """
    people = sys.stdout.isatty()
    moves = people and os.environ.get("TERM") != "dumb"
    first, clear = len(prompt), "\033[2J\033[H" if moves else ""

    def watch(_, start, answer):
        text = "".join(
            "░" if answer.step_T[i] == FAR else tok.decode([answer.tokens_T[i]])
            for i in range(first, min(start + cfg.block, first + cfg.max_new))
        )
        print(clear + CONTROL.sub(LOST, text), flush=True)

    shown = stream([prompt], watch=watch if clear else None, stop=stop)
    ended = list(answers.checked(shown, 1))
    if not ended:
        raise exits.Stopped("by a signal, before the answer was whole")
    ((_, answer),) = ended
    tokens = answer.tokens_T[first : first + answer.len]
    text = data.decoded(tok, tokens)
    print(clear + (CONTROL.sub(LOST, text) if people else text))
    print(
        f"[{answer.len} tokens, {answer.forwards} forwards, "
        f"{answer.len / answer.forwards:.2f} tokens per forward]",
        file=sys.stderr,
    )


def draw(stream, prompt: list[int], codec: codes.Codec, out: str, stop):
    """Writes the image that a prompt describes; the arguments are those of `show`.

    out: a PNG file.
    """
    ended = list(answers.checked(stream([prompt], stop=stop), 1))
    if not ended:
        raise exits.Stopped("by a signal, before the image was whole")
    ((_, answer),) = ended
    (picture,) = codec.pictures([answer.tokens_T[len(prompt) :][: answer.len]])
    with exits.room(out, picture.nbytes):
        codes.write(out, picture)
    print(f"[{out}: {answer.len} codes, {answer.forwards} steps]", file=sys.stderr)


def again(out: str | None) -> bool:
    """Returns whether what is written to `out` can be read again: it is no pipe."""
    return bool(out) and (has_folder(out) or not os.path.exists(out))


def check_out(out: str, prompts: str | None, flag: str = "--out"):
    """Raises ValueError where answers cannot go to `out`, or would replace the prompts."""
    for file in (out, folder.note_of(out)):
        there = prompts and os.path.exists(prompts) and os.path.exists(file)
        if there and os.path.samefile(prompts, file):
            raise ValueError(f"--out={out}: these are the prompts; name another file")
    if pathlib.Path(out).is_fifo():
        return  # closed again, it would have ended for its reader
    there, place = os.path.exists(out), ""
    try:
        open(out, "a").close()
        if again(out):  # a lock and a note will stand beside it
            place = "its folder: "
            tempfile.TemporaryFile(dir=pathlib.Path(out).parent).close()
    except OSError as error:
        raise ValueError(f"{flag}={out}: {place}{error.strerror}") from None
    if not there:
        os.unlink(out)


def job_of(tree: ml_collections.ConfigDict, marks: dict) -> dict:
    """Returns what the answer to a prompt depends on, flat.

    marks: repository.marks of the checkpoint's files.
    """
    leaves = config.flat(tree.to_dict())
    job = {"model.path": leaves["model.path"], **marks}
    deciding = ("seed", "model.", "sampler.")
    idle = (*UNUSED, "model.path", *(f"sampler.{x}" for x in IDLE))
    if leaves["data.image_root"]:  # where a page of the answers finds their images
        deciding += ("data.image_root",)
    return job | {
        key: value
        for key, value in leaves.items()
        if key.startswith(deciding) and not key.startswith(idle)
    }


class Terminal:
    """What stands for folder.Answers where nothing can be read again."""

    lines = ()

    def __init__(self, out: str | None):
        self.path = out or "the terminal"
        self.file = sys.stdout
        if out:
            self.file = open(out, "a", encoding="utf-8")  # noqa: SIM115
        # A character that the terminal's encoding lacks becomes \xe9 there, which is no JSON.
        known = (getattr(self.file, "encoding", None) or "utf-8").lower()
        self.ascii = not known.startswith("utf")

    def begin(self, total: int) -> None:
        """Does nothing: all are answered."""

    def add(self, line: dict) -> None:
        """Writes an answer."""
        text = json.dumps(line, ensure_ascii=self.ascii)
        with exits.room(self.path, len(text)):
            try:
                print(text, file=self.file, flush=True)
            except BrokenPipeError:  # whoever read it, such as `| head`, has enough
                exits.unheard(self.file)
                sys.exit()

    def done(self) -> None:
        """Closes the file."""
        self.file.close()


def sink_of(options, marks: dict):
    """Returns what takes the answers to a file of prompts.

    options: see `parsed`; marks: see `job_of`.
    """
    if not again(options.out):
        return Terminal(options.out)
    job = job_of(options.config, marks)
    return folder.Answers(options.out, job, overwrite=options.overwrite)


def kept(sink, prompts: list[list[int]], rows: list[dict]) -> int:
    """Returns how many of the prompts' answers are there, which are the first.

    Raises ValueError for a line that does not answer the prompt of its number.
    """

    def wrong(number: int, line: dict) -> str:
        known = number <= len(rows) and line.get("id") == rows[number - 1].get("id")
        its = known and answers.answers_prompt(line, prompts[number - 1])
        return "" if its else f"it does not answer prompt {number}"

    if sink.lines:
        sink.check(wrong)
    return len(sink.lines)


def said(answer: state.Answer, tok, codec: codes.Codec | None) -> dict:
    """Returns what a line says of an answer besides its ids: its text, or its picture.

    tok: None where the model has none. codec: of answers that are images.
    """
    if codec is None:
        trace = state.stacked([answer])
        return {"text": answers.decode(trace, tok)[0] if tok else None}
    if not answer.len:
        return {"text": None}
    ids = answer.tokens_T[answer.prompt_len :][: answer.len]
    return {"text": None, "picture": images.embedded(codec.pictures([ids])[0])}


def write(stream, prompts: list[list[int]], rows: list[dict], sink, said, stop):
    """Writes a line for each prompt as soon as it and those before it are answered.

    stream: an answerer's, but for the prompts. rows: the lines of the prompts file. said: see
    above, of an answer. stop: whether a signal came. Raises exits.Stopped after one.
    """
    done = kept(sink, prompts, rows)
    sink.begin(len(prompts))
    # An answer depends on its number: what is there leaves a gap, which costs nothing.
    asked = [[]] * done + prompts[done:]
    answered = stream(asked, stop=stop) if done < len(prompts) else ()
    checked = answers.checked(answered, len(prompts), done)
    # disable=None: where errors do not go to a terminal
    shown = tqdm(checked, total=len(prompts), unit="prompt", disable=None)
    for i, answer in answers.in_order(shown):
        if stop():
            break
        if i < done:
            continue
        line = answers.record(answer, prompts[i]) | said(answer)
        if "id" in rows[i]:
            line["id"] = rows[i]["id"]
        # Of what was skipped nobody has looked whether it is a text.
        if prompts[i] and (question := question_of(rows[i])) is not None:
            line["question"] = question
        sink.add(line)
        done = i + 1
    if done < len(prompts) and stop():
        raise exits.Stopped(
            f"by a signal after {done} of {len(prompts)} answers, which are in "
            f"{sink.path}; with --out=FILE the same command goes on behind them"
        )
    if sink.file is not sys.stdout:
        sink.done()
        print(f"{done} answers in {sink.path}", file=sys.stderr)


def rounded(longest: int, block: int) -> int:
    """Returns for how long prompts the sampler is made: whole blocks that hold `longest`.

    Up to 32, 64, 128 ... 512 positions or a multiple of 512, so that what is compiled for
    one prompt serves the next.
    """
    size = max(longest, 32)
    unit = min(1 << (size - 1).bit_length(), 512)
    return -(-(-(-size // unit) * unit) // block) * block


class Settings(NamedTuple):
    """The groups of the configuration that have an effect here."""

    data: data.DataConfig
    model: config.ModelArgs
    mesh: config.MeshConfig
    sampler: SamplerConfig
    run: config.RunConfig


def settings(tree: ml_collections.ConfigDict) -> Settings:
    """Returns a tree's Settings; raises ValueError for a value that they refuse."""
    config.frozen(config.Config, {"seed": tree.seed})
    kinds = Settings.__annotations__.items()
    return Settings(**{k: config.frozen(kind, tree[k], f"{k}.") for k, kind in kinds})


def main(argv: list[str] | None = None):
    """Parses the command line and answers."""
    prompt, options = parsed(sys.argv[1:] if argv is None else argv)
    with contextlib.ExitStack() as stack:
        if options.out:
            check_out(options.out, options.prompts)
        if options.image_out:
            check_out(options.image_out, None, "--image-out")
        if again(options.out):
            file = pathlib.Path(f"{options.out}.lock")
            with exits.room(file.parent):
                lock = folder.Lock(file, of=options.out)
            stack.enter_context(contextlib.closing(lock))
        answer(prompt, options, exits.StopSignal())


def asked(prompt: str | None, options, given, path, model: ModelConfig, tok):
    """Returns (prompt ids, their lines) of the prompt, which has none, or of the file.

    given: Settings; path: the model's folder. What reads images leaves with the last of them.
    """
    reader = pictures.reader(given.model, given.sampler, model, tok)
    if options.image and reader is None:
        raise ValueError(
            f"--image=FILE: {str(path)!r} is no model that looks at images"
        )
    if prompt is None:
        return read(options.prompts, tok, model.vocab, reader, given.data)
    if tok is None:
        raise ValueError(f"{str(path)!r} {NO_TOKENIZER}, or use --prompts with ids")
    ids = turn(tok, prompt, reader and reader.of_files(options.image, None))
    return [data.check_known(ids, model.vocab)], []


def fitting(cfg: SamplerConfig, prompts: list, share: int) -> SamplerConfig:
    """Returns a sampler as wide as its prompts need, with rows that `share` devices share."""
    # An image begins where its prompt ends.
    grid = 1 if cfg.answers == "image" else cfg.block
    return dataclasses.replace(
        cfg,
        max_prompt=rounded(max(map(len, [*prompts, cfg.blank])), grid),
        rows=-(-min(cfg.rows, len(prompts)) // share) * share,
    )


def answer(prompt: str | None, options, stop):
    """Answers the prompt, or those of the file.

    options: see `parsed`. stop: whether a signal came.
    """
    given = settings(options.config)
    if not given.model.path:
        raise ValueError("--model=DIR is required: a Hugging Face folder")

    # ---- What it is to answer: nothing large is read before it is known to make sense ----
    path = repository.find(given.model.path)
    opened = config.of_checkpoint(path, given.model, given.sampler, load_tokenizer)
    model, cfg, tok, made = opened
    model = dataclasses.replace(model, lora=None)
    marks = repository.marks(path)
    sink = sink_of(options, marks)
    prompts, rows = asked(prompt, options, given, path, model, tok)
    codec = codes.Codec(made) if made else None

    # ---- The model, and a sampler as wide as they need -----------------------------------
    # To compile for one answer takes longer than its forwards, unless these draw of more ids:
    # 2 s of a core by a program that is made in haste, which saves several times that.
    if prompt and cfg.max_new * cfg.block * model.vocab <= 2**25:
        compiler.hasten()
    compiler.keep_compiled(given.run.compile_cache)
    mesh = sharding.make_mesh(**given.mesh.axes)
    jax.set_mesh(mesh)
    cfg = fitting(cfg, prompts, mesh.size // mesh.shape["model"])
    checked = config.check_kernels(model, cfg, given.run.compile_cache)
    longest = max(map(len, prompts))
    for line in (*config.size_warnings(cfg, model, longest), *checked):
        print(line, file=sys.stderr)
    answerer, params = placement.loaded(
        path,
        model=model,
        cfg=cfg,
        mesh=mesh,
        rollout=given.mesh.rollout,
        say=functools.partial(print, file=sys.stderr),
        beside=sum(x.nbytes for x in jax.tree.leaves(codec and codec.params)),
    )
    command_line.check_weights(given.model.path, marks)
    key = jax.random.key(options.config.seed)
    stream = functools.partial(
        answerer.stream, params, key=key, temperature=cfg.temperature
    )
    if prompt is None:
        line = functools.partial(said, tok=tok, codec=codec)
        write(stream, prompts, rows, sink, line, stop)
    elif codec:
        draw(stream, prompts[0], codec, options.image_out, stop)
    else:
        show(stream, prompts[0], cfg, tok, stop)


if __name__ == "__main__":
    command_line.entry(main, help_text())
