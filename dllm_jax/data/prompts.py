"""What a model is asked: a file's records to problems, texts and conversations to ids.

Text is rendered by the checkpoint's own chat template and tokenised once.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import os
import re

from dllm_jax import checks, limits, processes
from dllm_jax.data import sets, tokens
from dllm_jax.exits import warn
from dllm_jax.images import paths_of
from dllm_jax.records import has_folder, records

# How dLLM-RL asks problems of models that attend by blocks, and of the others.
MATH = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
BOXED = (
    "You need to put your final answer in \\boxed{}. This is the problem:\n{question}"
)
TEXTS = (str, int, float)  # what is a text, or can be written as one
ROLES = ("system", "developer", "user", "assistant", "tool")


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
    # Field with an image's path, or several; of a model that looks.
    image: str = "image"
    image_root: str = ""  # the folder that images must not leave; "": the dataset's
    # SFT: pads to learn after an answer's end; none where sampled ids have none, but were
    # cut. -1: up to the end of its block, which a sampler meets whenever an answer ends
    # inside one; none if the answer has a trace.
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


def field(row: dict, name: str, key: str = ""):
    """Returns a record's field; raises ValueError naming what it has instead.

    key: of the configuration, which names the field.
    """
    if name not in row:
        near = difflib.get_close_matches(name, row, n=1, cutoff=0.75)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        if key:
            hint += f"; {key} names the field"
        raise ValueError(f"no field {name!r}, it has {sorted(row)}{hint}")
    if row[name] is None:
        raise ValueError(f"field {name!r} is null")
    return row[name]


def text(row: dict, name: str, key: str = "") -> str:
    """Returns a record's text, a number as Python writes it; raises ValueError for others.

    key: see `field`.
    """
    given = field(row, name, key)
    if type(given) not in TEXTS:
        raise ValueError(f"field {name!r} is {checks.shown(given)}, which is no text")
    return str(given)


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


def messages_of(row: dict, tok) -> list[dict]:
    """Returns the `conversation` of a record's messages.

    Raises ValueError also for tools that the chat template would tell of: nothing gives them
    to it.
    """
    if row.get("tools") and "tools" in str(tok.chat_template):
        raise ValueError(
            "it has 'tools', which no prompt shows here; write what they are into a system "
            "message, and leave the field out"
        )
    return conversation(row["messages"])


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
    given = conversation(messages)
    messages = given if shown is None else shown.messages(given)
    plain = shown is not None and shown.plain
    written = messages[-1]["content"] if plain else by_template(tok, messages)
    ids = ids_of(tok, written, "prompt") if shown is None else shown.ids(tok, written)
    if not ids:
        raise ValueError(
            f"its prompt has no tokens: tokenizer {str(tok.name_or_path)!r} makes none of "
            f"{checks.shown(written)}, which its chat template writes"
        )
    if not plain:
        refuse_left_out(tok, messages, written, len(given))
    return ids


def refuse_left_out(tok, messages: list[dict], written: str, count: int) -> None:
    """Raises ValueError for one of the last `count` messages of which nothing is written.

    Not for an assistant's or a tool's. Words that the chat template alters, or obeys as
    SmolLM3's does /no_think, are not left out.
    """
    for number, message in enumerate(messages[-count:], 1):
        if message["role"] in ROLES[3:] or message["content"].strip() in written:
            continue
        other = [x | {"content": "?"} if x is message else x for x in messages]
        if by_template(tok, other) == written:
            raise ValueError(
                f"message {number}: the chat template of tokenizer {str(tok.name_or_path)!r} "
                f"leaves out what role={message['role']!r} says; change the role or template"
            )


def by_template(tok, messages: list[dict], *, opens: bool = True) -> str:
    """Returns a conversation as the tokenizer's chat template writes it; see `render`.

    opens: whether the assistant's next turn is begun.
    """
    name = f"tokenizer {str(tok.name_or_path)!r}"
    if not tok.chat_template:
        raise ValueError(
            f"{name} has no chat template; add chat_template.jinja to it, or, to train or "
            "evaluate, set data.raw=True with data.template"
        )
    try:
        with limits.bounded():
            written = tok.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=opens
            )
        if len(written) > limits.CHARACTERS:
            raise MemoryError
    except MemoryError:
        given = sum(len(message["content"]) for message in messages)
        if 2 * given > limits.CHARACTERS:  # it is the most of what was to be written
            raise ValueError(
                f"its text has {given:,} characters: with what the chat template adds, "
                f"at most {limits.CHARACTERS:,} are taken"
            ) from None
        raise ValueError(f"{name}: its chat template writes without end") from None
    except Exception as error:  # noqa: BLE001 (whatever its author wrote)
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{name}: its chat template fails: {reason}") from None
    return written


def warn_unknown(tok, ids: list[int], text: str, kind: str) -> None:
    """Says, once for a tokenizer, which characters of a text the model does not know.

    ids: the text's; kind: what it is.
    """
    unknown = getattr(tok, "unk_token_id", None)  # a stand-in may have none
    if unknown is None or unknown not in ids or getattr(tok, "unknown_said", False):
        return
    # Written out it is no unknown character: in some tokenizers it is the end's, too.
    rest = text.replace(tok.unk_token, "")
    if unknown not in tok(rest, add_special_tokens=False)["input_ids"]:
        return
    chars = [
        char
        for char in dict.fromkeys(rest)
        if unknown in tok(char, add_special_tokens=False)["input_ids"]
    ]
    if not chars:
        return
    tok.unknown_said = True
    warn(
        f"the tokenizer does not know {''.join(chars)!r}, such as in the {kind} "
        f"{text[:200]!r}: the model reads {tok.unk_token!r} instead"
    )


def warn_special(tok, question: str, mark: str = "") -> None:
    """Says, once for a tokenizer, which question has a special token by its name.

    It becomes that token, as everywhere: whoever asks may end the turn. mark: the text that
    stands for an image, which may have such a name.
    """
    if getattr(tok, "special_said", False):
        return
    found = [x for x in tokens.special_names(tok) if x != mark and x in question]
    if found:
        tok.special_said = True
        warn(
            f"a question has {found[0]!r} in its text, which the model reads as that token: "
            f"{question[:200]!r}"
        )


def warn_bare(tok, prompt: str) -> None:
    """Says, once for a tokenizer, that a prompt to learn from has no chat token.

    Elsewhere `prompt` is what the user says; here it stands as it is.
    """
    if getattr(tok, "bare_said", False) or not tok.chat_template:
        return
    if not any(x in prompt for x in tokens.special_names(tok)):
        tok.bare_said = True
        warn(
            f"a 'prompt' has no chat token and is learned from as it is, without the chat "
            f"template: {prompt[:200]!r}; data.question=prompt makes it the user's turn"
        )


def ids_of(tok, text: str, kind: str = "text") -> list[int]:
    """Returns a text's token ids; raises ValueError for what is no text.

    kind: what it is, for a warning of characters that the tokenizer does not know.
    """
    if not checks.encodes(text):
        raise ValueError(
            f"{checks.shown(text)} has a lone surrogate, half of a character"
        )
    ids = tok(text, add_special_tokens=False)["input_ids"]
    warn_unknown(tok, ids, text, kind)
    return ids


def ask(tok, cfg: DataConfig, question: str, prefix: str = "", shown=None) -> list[int]:
    """Returns the prompt ids of one question.

    prefix: how its answer begins; shown: see `render`.
    """
    drawn = shown is not None and shown.plain  # guidance leads away from no caption
    if not question.strip() and not drawn:
        raise ValueError("the question is empty")
    warn_special(tok, question, getattr(shown, "mark", ""))
    if cfg.raw:
        if shown is None:
            return ids_of(tok, filled(cfg.template, question, prefix), "prompt")
        if shown.mark not in cfg.template:  # else the template says where images stand
            question = placed(shown, question)
            return shown.ids(tok, filled(cfg.template, question, prefix))
        return shown.ids(tok, placed(shown, filled(cfg.template, question, prefix)))
    content = cfg.template.replace("{question}", question)
    return render(tok, [{"role": "user", "content": content}], shown)


def beginning(row: dict, cfg: DataConfig) -> str:
    """Returns how a record's answer begins, where the template says it; else ""."""
    name = "Prefix" if "prefix" not in row and "Prefix" in row else "prefix"
    return text(row, name) if "{prefix}" in cfg.template else ""


def filled(template: str, question: str, prefix: str) -> str:
    """Returns a template with the question and how its answer begins."""
    known = {"{question}": question, "{prefix}": prefix}
    parts = re.split(r"(\{question\}|\{prefix\})", template)
    return "".join(known.get(part, part) for part in parts)


def placed(shown, text: str) -> str:
    """Returns what a user says with a mark where each image stands; see `render`."""
    return shown.messages([{"role": "user", "content": text}])[-1]["content"]


class Looker:
    """Shows the images of one dataset's records, and leaves out those that it cannot.

    Without a reader nothing is shown, and who names images in vain is told so.
    """

    def __init__(self, reader, path: str, cfg: DataConfig):
        """reader: models.vision.prompts.Reader, or None for a model that does not look."""
        self.reader, self.path, self.cfg = reader, path, cfg
        # A pipe's are below the working folder.
        beside = os.path.dirname(path) if has_folder(path) else ""
        self.root = cfg.image_root or beside or "."
        if reader is not None and not os.path.isdir(self.root):
            raise ValueError(f"data.image_root={self.root!r} is no folder")
        self.skipped, self.count, self.found = {}, 0, False
        self.seen = hashlib.sha256()  # of the images' marks

    def rows(self, given: list[dict] | None = None):
        """Yields (a record's number, the record, its images) of those that can be shown.

        given: the file's records, of who has read it.
        """
        for number, row in enumerate(given or records(self.path), 1):
            self.count = number
            shown = None
            try:
                if self.reader is None:
                    self.found |= bool(paths_of(row, self.cfg.image))
                else:
                    with of_record(self.path, number):
                        shown = self.reader.shown(row, self.cfg.image, self.root)
                    self.found |= shown is not None and not shown.blind
            except Unreadable as error:
                self.skipped[number] = f"record {number}: {error}"
                continue
            marks = [picture.mark for picture in getattr(shown, "pictures", ())]
            marks += getattr(shown, "answer", ())  # or the codes of one to be drawn
            self.seen.update(repr((number, marks)).encode())
            yield number, row, shown
        self.report()

    def agree(self):
        """Raises ValueError, in every process, where they cannot show the same images."""
        name = f"dataset {os.path.basename(self.path)!r}"
        numbers = ", ".join(map(str, self.skipped)) or "none"
        processes.agree(
            {
                f"records of {name} without a readable image": numbers[:200],
                f"what the images of {name} show": self.seen.hexdigest()[:12],
            }
        )

    def report(self):
        """Says which records were left out, and whether images are missing, or not seen.

        Raises ValueError where all were left out, and as `agree` does: processes with other
        problems would fill batches with what belongs to none.
        """
        if self.reader is not None:
            self.agree()
        elif self.found:
            warn(
                f"dataset {self.path!r}: records have images in data.image="
                f"{self.cfg.image!r}, and this model looks at none; it is asked without them"
            )
        if not self.skipped:
            if self.reader is not None and self.count and not self.found:
                warn(
                    f"dataset {self.path!r}: no record has an image in "
                    f"data.image={self.cfg.image!r}; the model is asked without any"
                )
            return
        more = f" and {len(self.skipped) - 8} more" if len(self.skipped) > 8 else ""
        first = "; ".join(list(self.skipped.values())[:8])
        line = (
            f"dataset {self.path!r}: {len(self.skipped)} of {self.count} records are "
            f"skipped, as an image cannot be read: {first}{more}"
        )
        if len(self.skipped) == self.count:
            raise ValueError(line)
        warn(line)


def check_known(ids, vocab: int) -> list[int]:
    """Returns a prompt's or an answer's ids; raises ValueError for one that no model has.

    vocab: the model's are below it; rows of a prompt's images have ids behind them.
    """
    images = sum(picture.rows for picture in getattr(ids, "pictures", ()))
    if max(ids, default=0) >= vocab + images:
        raise ValueError(
            f"a token id is beyond the model's vocabulary, 0..{vocab - 1}; is it "
            "another model's trace or tokenizer?"
        )
    return ids


def problems(
    path: str, tok, cfg: DataConfig, grader, reader=None, given=None
) -> list[Problem]:
    """Returns the file's problems; raises ValueError naming a missing or bad field.

    grader: the Grader that they are for (rl.rewards); it refuses problems that it cannot
    judge by. None is graded here: a run may begin with thousands of problems. reader: see
    Looker; given: see its `rows`.
    """
    out = []
    sets.check(path)
    for number, row, shown in Looker(reader, path, cfg).rows(given):
        with of_record(path, number):
            question = text(row, cfg.question, "data.question")
            told = grader.told and type(row.get(cfg.answer)) in TEXTS
            gold = grader.gold or told
            answer = text(row, cfg.answer, "data.answer") if gold else ""
            begun = beginning(row, cfg)
            prompt = ask(tok, cfg, question, begun, shown)
            if not prompt:  # a tokenizer may know none of a text's characters
                raise ValueError(f"no token is made of its prompt: {question[:200]!r}")
            problem = Problem(prompt, question, answer, row, begun=begun)
            try:
                grader.check(problem)
            except BadGold as error:
                raise ValueError(f"field {cfg.answer!r}: {error}") from None
            out.append(problem)
    return out
