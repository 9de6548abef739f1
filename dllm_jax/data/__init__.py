"""Problems and examples: files in, token ids out, and where in the data a run is.

Host code. Token ids are the truth from here to the loss: text is rendered by the
checkpoint's own chat template, tokenised once, and never tokenised again.
"""

import contextlib
import dataclasses
import difflib
import os
import re
from typing import NamedTuple

import flax.struct
import numpy as np

from dllm_jax import checks, limits
from dllm_jax.data import sets
from dllm_jax.exits import warn
from dllm_jax.records import records

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|role_end|>")  # of an assistant
# How dLLM-RL asks problems of models that attend by blocks, and of the others.
MATH = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
BOXED = (
    "You need to put your final answer in \\boxed{}. This is the problem:\n{question}"
)
# Tokenizers that checkpoints bring as code, and the library's own that is the same.
CLONES = {"DreamTokenizer": "Qwen2Tokenizer"}
ROLES = ("system", "developer", "user", "assistant", "tool")
STEPS = 2**30  # those of a trace are below it


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Files of problems (RL) or examples (SFT), of the formats that `records` reads."""

    # Several with weights as in "a.jsonl:3,b.jsonl:1": items are drawn from them so often,
    # each file in its own order (data.mixture).
    train: str = ""
    # Problems to evaluate on; "": no evaluation. A run takes several files, with commas:
    # heldout_accuracy is of the first, heldout_NAME_accuracy of NAME.jsonl among the others.
    heldout: str = ""
    question: str = "question"  # field with the problem, the user's turn
    answer: str = "answer"  # field with the gold answer
    response: str = "response"  # SFT: field with the text to learn
    template: str = "{question}"  # the user's turn; {question} is replaced
    # The template is all of the prompt, chat tokens too; {prefix} is a field of the record,
    # with which the answer begins.
    raw: bool = False
    image: str = (
        "image"  # field with an image's path, or several; of a model that looks
    )
    image_root: str = ""  # the folder that images must not leave; "": the dataset's
    # SFT: pads to learn after an answer's end. -1: up to the end of its block, which a
    # sampler meets whenever an answer ends inside one; none if the answer has a trace.
    post_num: int = -1
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self):
        checks.fields(self, post_num=">= -1", seed=">= 0")
        if "{question}" not in self.template:
            raise ValueError("data.template must contain {question}")
        if "{prefix}" in self.template and not self.raw:
            raise ValueError("data.template: {prefix} needs data.raw=True")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question as the model sees it, and what its answer is graded against."""

    prompt_ids: list[int]
    text: str
    answer: str  # the gold one; "" where its grader needs none
    record: dict = dataclasses.field(default_factory=dict)  # all that the file says
    begun: str = ""  # how the answer begins, which the prompt says already


class Unreadable(ValueError):
    """An image that cannot be read: its record is left out, and said to be."""


class BadGold(ValueError):
    """A gold answer that nobody can judge by."""


@contextlib.contextmanager
def of_record(path: str, number: int):
    """Names the record in a ValueError that is raised inside."""
    try:
        yield
    except Unreadable:  # said with its record by whoever leaves it out
        raise
    except ValueError as error:
        raise ValueError(f"dataset {path!r}, record {number}: {error}") from None


def field(row: dict, name: str):
    """Returns a record's field; raises ValueError naming what it has instead."""
    if name not in row:
        near = difflib.get_close_matches(name, row, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no field {name!r}, it has {sorted(row)}{hint}")
    if row[name] is None:
        raise ValueError(f"field {name!r} is null")
    return row[name]


def text(row: dict, name: str) -> str:
    """Returns a record's text, a number as it is written; raises ValueError for others."""
    given = field(row, name)
    if type(given) not in (str, int, float):
        raise ValueError(f"field {name!r} is {checks.shown(given)}, which is no text")
    return str(given)


def tokenizer(path: str):
    """Returns the checkpoint's tokenizer.

    Raises ValueError when the folder holds none.
    """
    # Imported here: it takes a quarter of the start, and not all need a tokenizer.
    # Its notice that torch is missing is no news.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    try:
        kind = get_tokenizer_config(path).get("tokenizer_class")
        if kind in CLONES:
            return getattr(transformers, CLONES[kind]).from_pretrained(path)
        return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 (a damaged file raises anything)
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{str(path)!r} holds no usable tokenizer: {reason[:600]}"
        ) from None


def stop_ids(tok, *others: int) -> tuple[int, ...]:
    """Returns the ids that end an answer: the turn's end first, then the text's.

    The tokenizer may be None; `others` are the model's own and the user's.
    """
    ids = []
    if tok is not None:
        ends = [tok.convert_tokens_to_ids(name) for name in TURN_ENDS]
        ids = [i for i in ends if i is not None and i != tok.unk_token_id]
        ids.append(tok.eos_token_id)
    return tuple(dict.fromkeys(i for i in (*ids, *others) if i is not None))


def conversation(messages) -> list[dict]:
    """Returns messages with the text of each as its content, parts of it joined.

    Raises ValueError naming a message that has no role, or no text.
    """
    if not (isinstance(messages, list) and messages):
        raise ValueError("needs messages, each with a role and a content")
    plain = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(
                f"needs messages, each with a role and a content; message {number} is "
                + checks.shown(message)
            )
        if message["role"] not in ROLES:
            raise ValueError(
                f"message {number}: role={checks.shown(message['role'])}: choose from "
                + ", ".join(ROLES)
            )
        try:
            plain.append(message | {"content": content(message["content"])})
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from None
    return plain


def content(given) -> str:
    """Returns the text of a message's content; raises ValueError if it has another kind."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        raise ValueError(f"its content is {checks.shown(given)}, which is no text")
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else checks.shown(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"its content has a part of type {checks.shown(kind)}; only texts are read"
            )
    return "".join(part["text"] for part in given)


def render(tok, messages: list[dict], shown=None) -> list[int]:
    """Returns the ids of a conversation whose next turn is the assistant's.

    shown: models.vision.prompts.Shown of its images, for a model that looks, or another with
    its members; one that is `plain` knows no conversations, but the text of the last turn.
    Raises ValueError when the tokenizer has no chat template, or a bad one, and when these
    are no messages.
    """
    messages = conversation(messages)
    if shown is not None:
        messages = shown.messages(messages)
    plain = shown is not None and shown.plain
    written = messages[-1]["content"] if plain else by_template(tok, messages)
    ids = ids_of(tok, written) if shown is None else shown.ids(tok, written)
    if tok.unk_token_id is not None and tok.unk_token_id in ids:
        warn_unknown(tok, written)
    return ids


def by_template(tok, messages: list[dict]) -> str:
    """Returns a conversation as the tokenizer's chat template writes it; see `render`."""
    name = f"tokenizer {str(tok.name_or_path)!r}"
    if not tok.chat_template:
        raise ValueError(f"{name} has no chat template")
    try:
        with limits.bounded():
            written = tok.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        if len(written) > limits.CHARACTERS:
            raise MemoryError
    except MemoryError:
        raise ValueError(f"{name}: its chat template writes without end") from None
    except Exception as error:  # noqa: BLE001 (whatever its author wrote)
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{name}: its chat template fails: {reason}") from None
    return written


def warn_unknown(tok, text: str) -> None:
    """Says, once for a tokenizer, which characters of a prompt the model does not know."""
    if getattr(tok, "unknown_said", False):
        return
    tok.unknown_said = True
    unknown = [
        char
        for char in dict.fromkeys(text)
        if tok.unk_token_id in tok(char, add_special_tokens=False)["input_ids"]
    ]
    warn(
        f"the tokenizer does not know {''.join(unknown)!r}, such as in the prompt "
        f"{text[:200]!r}: the model reads {tok.unk_token!r} instead"
    )


def ids_of(tok, text: str) -> list[int]:
    """Returns a text's token ids; raises ValueError for what is no text."""
    if not checks.encodes(text):
        raise ValueError(
            f"{checks.shown(text)} has a lone surrogate, half of a character"
        )
    return tok(text, add_special_tokens=False)["input_ids"]


def ask(tok, cfg: DataConfig, question: str, prefix: str = "", shown=None) -> list[int]:
    """Returns the prompt ids of one question.

    prefix: how its answer begins; shown: see `render`.
    """
    drawn = shown is not None and shown.plain  # guidance leads away from no caption
    if not question.strip() and not drawn:
        raise ValueError("the question is empty")
    if cfg.raw:
        known = {"{question}": question, "{prefix}": prefix}
        parts = re.split(r"(\{question\}|\{prefix\})", cfg.template)
        return ids_of(tok, "".join(known.get(part, part) for part in parts))
    content = cfg.template.replace("{question}", question)
    return render(tok, [{"role": "user", "content": content}], shown)


class Looker:
    """Shows the images of one dataset's records, and leaves out those that it cannot.

    Without a reader nothing is shown, and what records say of images is nobody's affair.
    """

    def __init__(self, reader, path: str, cfg: DataConfig):
        """reader: models.vision.prompts.Reader, or None for a model that does not look."""
        self.reader, self.path, self.cfg = reader, path, cfg
        self.root = cfg.image_root or os.path.dirname(path) or "."
        if reader is not None and not os.path.isdir(self.root):
            raise ValueError(f"data.image_root={self.root!r} is no folder")
        self.skipped, self.count = [], 0

    def rows(self):
        """Yields (a record's number, the record, its images) of those that can be shown."""
        for number, row in enumerate(records(self.path), 1):
            self.count = number
            shown = None
            try:
                if self.reader is not None:
                    with of_record(self.path, number):
                        shown = self.reader.shown(row, self.cfg.image, self.root)
            except Unreadable as error:
                self.skipped.append(f"record {number}: {error}")
                continue
            yield number, row, shown
        self.report()

    def report(self):
        """Says which records were left out; raises ValueError where all were."""
        if not self.skipped:
            return
        more = f" and {len(self.skipped) - 8} more" if len(self.skipped) > 8 else ""
        line = (
            f"dataset {self.path!r}: {len(self.skipped)} of {self.count} records are "
            f"skipped, as an image cannot be read: {'; '.join(self.skipped[:8])}{more}"
        )
        if len(self.skipped) == self.count:
            raise ValueError(line)
        warn(line)


def problems(path: str, tok, cfg: DataConfig, grader, reader=None) -> list[Problem]:
    """Returns the file's problems; raises ValueError naming a missing or bad field.

    grader: the Grader that they are for (rl.rewards); it refuses problems that it cannot
    judge by. None is graded here: a run may begin with thousands of problems. reader: see
    Looker.
    """
    out = []
    sets.check(path)
    for number, row, shown in Looker(reader, path, cfg).rows():
        with of_record(path, number):
            question = text(row, cfg.question)
            answer = text(row, cfg.answer) if grader.gold else ""
            begun = text(row, "prefix") if "{prefix}" in cfg.template else ""
            prompt = ask(tok, cfg, question, begun, shown)
            problem = Problem(prompt, question, answer, row, begun=begun)
            try:
                grader.check(problem)
            except BadGold as error:
                raise ValueError(f"field {cfg.answer!r}: {error}") from None
            out.append(problem)
    return out


@flax.struct.dataclass
class Examples:
    """Tokenised conversations: an answer to learn after each prompt. A host Trace."""

    tokens_BT: np.ndarray
    step_BT: np.ndarray  # of the answers' tokens, from 1; 0 elsewhere
    prompt_len_B: np.ndarray
    len_B: np.ndarray  # of the answers
    # Of each prompt, for a model that looks; (): none has any. Not dealt out with the rows.
    pictures: tuple = flax.struct.field(pytree_node=False, default=())


class Example(NamedTuple):
    """One of them, still of any length: ids, and the step of each token of the answer."""

    prompt: list[int]
    answer: list[int]
    step: list[int]


def supervised(row: dict, tok, cfg: DataConfig, shown=None):
    """Returns (prompt ids, [its answer, text or ids]) of an SFT record.

    It has `messages`; or prompt_ids and response_ids, as `generate` writes; or the fields
    of question and response; or dLLM-RL's `prompt` and `response`, which are tokenised as
    they are, chat tokens and all, unless the model looks: then they are what the user says.
    shown: see `render`.
    """
    if "response_ids" in row:
        prompt, answer = (ids(row, name) for name in ("prompt_ids", "response_ids"))
        return prompt, [answer] if answer else []  # `generate` had no room for some
    if "messages" in row:
        *before, last = conversation(row["messages"])
        if last["role"] != "assistant":
            raise ValueError("the last message is not the assistant's")
        return render(tok, before, shown), [last["content"]]
    if "prompt" not in row or cfg.question in row:
        prompt = ask(tok, cfg, text(row, cfg.question), shown=shown)
    elif shown is None:
        prompt = ids_of(tok, text(row, "prompt"))
    else:
        prompt = ask(tok, cfg, text(row, "prompt"), shown=shown)
    if shown is not None and shown.plain:  # a caption, which an image answers
        if not shown.answer:
            raise ValueError(f"it has no {cfg.image!r}, the image that is to be drawn")
        return prompt, [list(shown.answer)]
    return prompt, [text(row, cfg.response)]


def ids(row: dict, name: str, most: int = STEPS) -> list[int]:
    """Returns a record's list of numbers below `most`; raises ValueError for others."""
    given = field(row, name)
    if not isinstance(given, list) or not all(
        type(t) is int and 0 <= t < most for t in given
    ):
        raise ValueError(f"{name} must be a list of numbers in 0..{most - 1}")
    return given


def steps_of(row: dict, answer: list[int]) -> list[int]:
    """Returns the step at which each token of the answer was unmasked, from 1.

    The end token, if it was added to a text, comes last; steps beyond the answer are those
    of a canvas's rest. Raises ValueError when there are none, or too few.
    """
    if "step_map" not in row:
        raise ValueError(
            "noise.kind='trace' needs a step_map. "
            "Collect traces with python -m dllm_jax.generate --model=DIR "
            "--prompts=FILE.jsonl --out=TRACES.jsonl, and set data.train=TRACES.jsonl"
        )
    steps = ids(row, "step_map")
    # A text has no step for the end token, which was added to it.
    needed = len(answer) if "response_ids" in row else len(answer) - 1
    if not steps or len(steps) < needed:
        raise ValueError(
            f"step_map has {len(steps)} steps for {len(answer)} tokens; python -m "
            "dllm_jax.generate --out writes a step for each of response_ids"
        )
    steps = (steps + [max(steps) + 1])[: len(answer)]
    return [step - min(steps) + 1 for step in steps]


def preference(row: dict, tok, cfg: DataConfig, shown=None):
    """Returns (prompt ids, [the better answer, the worse one]) of a preference record.

    `prompt`, `chosen` and `rejected` are texts or lists of messages, of which an answer is
    the last.
    """
    prompt = field(row, "prompt")
    answers = []
    for name in ("chosen", "rejected"):
        given = field(row, name)
        if isinstance(given, list):
            try:
                last = conversation(given)[-1]
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from None
            given = last["content"] if last["role"] == "assistant" else None
        if type(given) is not str or not given.strip():
            raise ValueError(
                f"{name!r} is neither a text nor messages that end with the assistant's"
            )
        answers.append(given)
    if answers[0] == answers[1]:
        raise ValueError("'chosen' and 'rejected' are the same: nothing to prefer")
    if isinstance(prompt, list):
        return render(tok, prompt, shown), answers
    return ask(tok, cfg, text(row, "prompt"), shown=shown), answers


def examples(
    path: str,
    tok,
    cfg: DataConfig,
    *,
    end: int,
    pad: int,
    vocab: int,
    block: int,
    slots: int,
    mask: int = -1,
    pairs: bool = False,
    traced: bool = False,
    reader=None,
    drawn: tuple[int, ...] = (),
    tail: tuple[int, ...] = (),
):
    """Returns (Examples, how many records were empty or too long for `slots`, and left out).

    A text gets the end token unless it has it, and pads after it (DataConfig.post_num).

    end, pad, mask: the tokens; no answer has the mask. vocab: the model's ids are below it.
    block: positions of a block,
    slots: of a canvas. pairs: a record is a preference and gives two: chosen, then rejected.
    traced: the steps are those of the record's step_map; otherwise all tokens are of one.
    reader: see Looker. drawn: of images, which are whole blocks, the first id and that behind
    the last; tail: the ids that stand behind them.
    """
    read = preference if pairs else supervised
    kept, dropped = [], 0
    slots -= len(tail)
    sets.check(path)
    for number, row, shown in Looker(reader, path, cfg).rows():
        candidates = []
        with of_record(path, number):
            prompt, answers = read(row, tok, cfg, shown)
            for answer in answers:
                example = example_of(row, prompt, answer, tok, end=end, traced=traced)
                free = slots - length(example)
                if drawn:
                    refuse_undrawn(example, drawn, block)
                else:
                    count = pads_after(
                        example, cfg.post_num, block, free, traced=traced
                    )
                    example = padded(example, count, pad=pad, traced=traced)
                refuse_foreign(example, vocab, mask)
                candidates.append(example)
        if candidates and max(map(length, candidates)) <= slots:
            kept += candidates
        else:
            dropped += 1
    if not kept:
        raise ValueError(f"dataset {path!r}: no record fits into {slots} tokens")
    return stacked(kept, pad, slots, tail), dropped


def length(example: Example) -> int:
    """Returns how many positions a conversation takes."""
    return len(example.prompt) + len(example.answer)


def example_of(row: dict, prompt, answer, tok, *, end: int, traced: bool) -> Example:
    """Returns a record's prompt with one of its answers, text or ids, and its steps."""
    if isinstance(answer, str):
        answer = ids_of(tok, answer)
        if answer[-1:] != [end]:
            answer.append(end)
    steps = steps_of(row, answer) if traced else [1] * len(answer)
    return Example(prompt, answer, steps)


def pads_after(
    example: Example, post_num: int, block: int, free: int, *, traced
) -> int:
    """Returns how many pads are learned after an answer: see DataConfig.post_num."""
    if post_num >= 0:
        return max(min(post_num, free), 0)
    return 0 if traced else -length(example) % block


def padded(example: Example, count: int, *, pad: int, traced: bool) -> Example:
    """Returns the example with pads to learn, in a trace at a step of their own."""
    step = max(example.step) + 1 if traced else 1
    return Example(
        example.prompt, example.answer + [pad] * count, example.step + [step] * count
    )


def refuse_foreign(example: Example, vocab: int, mask: int) -> None:
    """Raises ValueError for ids that the model does not have, or cannot answer with."""
    if not example.prompt:
        raise ValueError("its prompt has no tokens")
    if mask in example.answer:
        raise ValueError(
            f"its answer has the mask token, {mask}, which stands for none"
        )
    images = sum(x.rows for x in getattr(example.prompt, "pictures", ()))
    if max(example.prompt) >= vocab + images or max(example.answer, default=0) >= vocab:
        raise ValueError(
            f"a token id is beyond the model's vocabulary, 0..{vocab - 1}; is it "
            "another model's trace or tokenizer?"
        )


def refuse_undrawn(example: Example, drawn: tuple[int, ...], count: int) -> None:
    """Raises ValueError for an answer that is no image of so many ids in this range."""
    first, end = drawn
    if len(example.answer) != count:
        raise ValueError(
            f"its image has {len(example.answer)} codes; model.image_size asks for {count}"
        )
    for token in example.answer:
        if not first <= token < end:
            raise ValueError(
                f"its image has the id {token}; those of codes are {first}..{end - 1}"
            )


def stacked(
    examples: list[Example], pad: int, slots: int, tail: tuple[int, ...] = ()
) -> Examples:
    """Returns examples as rows of `slots` positions and the tail's, filled up with pads."""
    shape = len(examples), slots + len(tail)
    tokens_BT, step_BT = np.full(shape, pad, np.int32), np.zeros(shape, np.int32)
    pictures = tuple(getattr(x.prompt, "pictures", ()) for x in examples)
    for i, example in enumerate(examples):
        first, end = len(example.prompt), length(example)
        tokens_BT[i, : end + len(tail)] = [*example.prompt, *example.answer, *tail]
        step_BT[i, first:end] = example.step
    return Examples(
        tokens_BT=tokens_BT,
        step_BT=step_BT,
        prompt_len_B=np.array([len(x.prompt) for x in examples], np.int32),
        len_B=np.array([len(x.answer) for x in examples], np.int32),
        pictures=pictures if any(pictures) else (),
    )


def order(size: int, start: int, count: int, *, seed: int, shuffle: bool):
    """Returns the indices of items start .. start + count of an endless stream.

    Every epoch is a permutation of its own; the stream is a function of the seed alone,
    so the number of items taken so far is all that a checkpoint has to remember.
    """
    out = []
    for epoch in range(start // size, (start + count - 1) // size + 1):
        rng = np.random.default_rng([seed, epoch])
        out.append(rng.permutation(size) if shuffle else np.arange(size))
    first = start % size
    return np.concatenate(out)[first : first + count]


# ---- Several files at once -----------------------------------------------------------


def mixture(spec: str) -> dict[str, float]:
    """Returns the weights of the files that data.train names, which sum to 1.

    "a.jsonl:3,b.jsonl:1"; a weight that is not said is 1. A name that is a file as it
    stands is that one. Raises ValueError for weights that are none, or sum to 0.
    """
    if os.path.exists(spec) or not {",", ":"} & set(spec):
        return {spec: 1.0}
    weights = {}
    for part in spec.split(","):
        path, colon, said = part.strip().rpartition(":")
        if not colon or os.path.exists(part.strip()):
            path, said = part.strip(), "1"
        try:
            weight = float(said)
        except ValueError:
            path, weight = part.strip(), 1.0
        if not (path and 0 <= weight < float("inf")):
            raise ValueError(
                f"data.train={checks.shown(spec)}: {checks.shown(part)} is no FILE:WEIGHT "
                "with a weight of 0 or more"
            )
        if path in weights:
            raise ValueError(f"data.train={checks.shown(spec)}: {path!r} stands twice")
        weights[path] = weight
    total = sum(weights.values())
    if not total > 0:
        raise ValueError(
            f"data.train={checks.shown(spec)}: the weights sum to 0; one must be above"
        )
    return {path: weight / total for path, weight in weights.items()}


def mixed(
    sizes: list[int], weights: list[float], start: int, count: int, *, seed, shuffle
) -> np.ndarray:
    """Returns the indices of items start .. start + count of a stream of several files.

    sizes: items of each, which follow each other; weights: sum to 1. Each place draws its
    file, and a file's items come in the order of its own stream: `order`. Like that, a
    function of the seed alone.
    """
    if len(sizes) == 1:
        return order(sizes[0], start, count, seed=seed, shuffle=shuffle)
    rng = np.random.default_rng([seed, 0, 1])
    file_n = rng.choice(len(sizes), start + count, p=weights)
    index_n = np.zeros(count, int)
    for number, size in enumerate(sizes):
        here_n = file_n[start:] == number
        if here_n.any():
            taken = int((file_n[:start] == number).sum())
            own = order(
                size, taken, int(here_n.sum()), seed=seed + number, shuffle=shuffle
            )
            index_n[here_n] = sum(sizes[:number]) + own
    return index_n
