"""What a model learns from: a file's records to prompts with an answer, or a pair of them."""

from typing import NamedTuple

import flax.struct
import numpy as np

from dllm_jax.data import sets
from dllm_jax.data.prompts import (
    DataConfig,
    Looker,
    ask,
    beginning,
    by_template,
    check_known,
    conversation,
    field,
    ids_of,
    messages_of,
    of_record,
    render,
    text,
    warn_bare,
)

STEPS = 2**30  # those of a trace are below it


@flax.struct.dataclass
class Examples:
    """Rows of tokenised conversations, an answer to learn in each. A host Trace."""

    tokens_BT: np.ndarray
    step_BT: np.ndarray  # of the answers' tokens, from 1; 0 elsewhere
    prompt_len_B: np.ndarray
    len_B: np.ndarray  # of the answers


class Example(NamedTuple):
    """One of them, of any length: ids, and the step of each token of the answer, from 1."""

    prompt: list[int] | np.ndarray
    answer: list[int] | np.ndarray
    step: list[int] | np.ndarray
    pictures: tuple = ()  # of the prompt, for a model that looks


def supervised(row: dict, tok, cfg: DataConfig, shown=None):
    """Returns (prompt ids, [its answer, text or ids]) of an SFT record.

    It has `messages`; or prompt_ids and response_ids, as `generate` writes; or the fields
    of question and response; or dLLM-RL's `prompt` and `response`, which are tokenised as
    they are, chat tokens and all, unless the model looks: then they are what the user says.
    shown: see `render`.
    """
    if "response_ids" in row:
        prompt, answer = (ids(row, name) for name in ("prompt_ids", "response_ids"))
        prompt = prompt if shown is None else shown.sampled(prompt)
        return prompt, [answer] if answer else []  # `generate` had no room for some
    if "messages" in row:
        *before, last = messages_of(row, tok)
        if last["role"] != "assistant":
            raise ValueError("the last message is not the assistant's")
        if not before:
            raise ValueError("no message stands before the assistant's, to be answered")
        prompt = render(tok, before, shown)
        refuse_unlearned(tok, before, last)
        return prompt, said(last["content"])
    if "prompt" not in row or cfg.question in row:
        question = text(row, cfg.question, "data.question")
        prompt = ask(tok, cfg, question, beginning(row, cfg), shown)
    elif shown is None:
        written = text(row, "prompt")
        warn_bare(tok, written)
        prompt = ids_of(tok, written, "prompt")
    else:
        prompt = ask(tok, cfg, text(row, "prompt"), beginning(row, cfg), shown)
    if shown is not None and shown.plain:  # a caption, which an image answers
        if not shown.answer:
            raise ValueError(f"it has no {cfg.image!r}, the image that is to be drawn")
        return prompt, [list(shown.answer)]
    return prompt, said(text(row, cfg.response, "data.response"))


def refuse_unlearned(tok, before: list[dict], last: dict) -> None:
    """Raises ValueError where an answer is more than its content: tool calls, reasons.

    That is what the chat template writes of a message's other fields, if it reads them.
    """
    bare = {name: last[name] for name in ("role", "content")}
    more = [name for name in last if last[name] and name not in bare]
    if not (more and tok.chat_template):
        return
    if by_template(tok, [*before, last]) != by_template(tok, [*before, bare]):
        raise ValueError(
            f"of the last message only the content is learned, and the chat template writes "
            f"more of it: it has {', '.join(map(repr, more))}; write that into its content, "
            "as the model is to say it"
        )


def said(answer: str) -> list[str]:
    """Returns an answer as a list of answers: a blank one is none, nothing to learn."""
    return [answer] if answer.strip() else []


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
    the last; what stands before it is the prompt again.
    """
    prompt = field(row, "prompt")
    user = [{"role": "user", "content": str(prompt)}]
    answers, asked = [], prompt if isinstance(prompt, list) else user
    for name in ("chosen", "rejected"):
        given = field(row, name)
        if isinstance(given, list):
            try:
                *before, last = conversation(given)
            except ValueError as error:
                raise ValueError(f"{name!r}: {error}") from None
            if before and turns(before) != turns(conversation(asked)):
                raise ValueError(
                    f"{name!r} has messages before its answer that are not those of "
                    "'prompt', which is all that is shown; make 'prompt' the list of them"
                )
            given = last["content"] if last["role"] == "assistant" else None
            if given is not None:
                refuse_unlearned(tok, conversation(asked), last)
        if type(given) is not str or not given.strip():
            raise ValueError(
                f"{name!r} is neither a text nor messages that end with the assistant's, "
                "and neither may be blank"
            )
        answers.append(given)
    if isinstance(prompt, list):
        return render(tok, prompt, shown), answers
    return ask(tok, cfg, text(row, "prompt"), beginning(row, cfg), shown), answers


def turns(messages: list[dict]) -> list[tuple[str, str]]:
    """Returns who says what in a conversation, whatever blanks stand around it."""
    return [(message["role"], message["content"].strip()) for message in messages]


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
    full: bool = False,
    mask: int = -1,
    pairs: bool = False,
    traced: bool = False,
    reader=None,
    drawn: tuple[int, ...] = (),
    tail: tuple[int, ...] = (),
    stops: tuple[int, ...] = (),
):
    """Returns ([Example], how many records were empty or too long for `slots`, and left out).

    A text gets the end token unless it has it, and pads after it (DataConfig.post_num). So do
    ids that end with one; after those of an answer that was cut, pads would teach to stop there.

    end, pad, mask: the tokens; no answer has the mask. stops: other ends of sampled ones.
    vocab: the model's ids are below it.
    block: positions of a block, with `full` attention counted from the answer's start;
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
                if drawn:
                    refuse_undrawn(example, drawn, block)
                elif example.answer[-1] in (end, pad, *stops):  # it may be cut
                    place = length(example) - (len(example.prompt) if full else 0)
                    count = pads_after(place, cfg.post_num, block, traced=traced)
                    count = max(min(count, slots - length(example)), 0)
                    example = padded(example, count, pad=pad, traced=traced)
                refuse_foreign(example, vocab, mask)
                candidates.append(example)
            if pairs:
                refuse_alike(*candidates)
        if candidates and max(map(length, candidates)) <= slots:
            kept += map(compact, candidates)
        else:
            dropped += 1
    if not kept:
        raise ValueError(
            f"dataset {path!r}: no record fits into {slots} tokens and has an answer"
        )
    return kept, dropped


def compact(example: Example) -> Example:
    """Returns the example in arrays: as lists a token would take some ten times the room."""
    arrays = (np.array(ids, np.int32) for ids in example[:3])
    return Example(*arrays, getattr(example.prompt, "pictures", ()))


def length(example: Example) -> int:
    """Returns how many positions a conversation takes."""
    return len(example.prompt) + len(example.answer)


def example_of(row: dict, prompt, answer, tok, *, end: int, traced: bool) -> Example:
    """Returns a record's prompt with one of its answers, text or ids, and its steps."""
    if isinstance(answer, str):
        answer = ids_of(tok, answer, "answer")
        if answer[-1:] != [end]:
            answer.append(end)
    steps = steps_of(row, answer) if traced else [1] * len(answer)
    return Example(prompt, answer, steps)


def pads_after(place: int, post_num: int, block: int, *, traced: bool) -> int:
    """Returns how many pads are learned after an answer: see DataConfig.post_num.

    place: of its end, from where blocks are counted.
    """
    if post_num >= 0:
        return post_num
    return 0 if traced else -place % block


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
    check_known(example.prompt, vocab)
    check_known(example.answer, vocab)


def refuse_alike(chosen: Example, rejected: Example) -> None:
    """Raises ValueError for a preference of whose answers neither is the better one."""
    if chosen.answer == rejected.answer:
        raise ValueError("'chosen' and 'rejected' are the same: nothing to prefer")


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
    """Returns examples as rows of `slots` positions, filled up with pads.

    tail: the ids that stand behind an answer, see `examples`.
    """
    shape = len(examples), slots
    tokens_BT, step_BT = np.full(shape, pad, np.int32), np.zeros(shape, np.int32)
    for i, example in enumerate(examples):
        first, end = len(example.prompt), length(example)
        tokens_BT[i, :first] = example.prompt
        tokens_BT[i, first:end] = example.answer
        tokens_BT[i, end : end + len(tail)] = tail
        step_BT[i, first:end] = example.step
    return Examples(
        tokens_BT=tokens_BT,
        step_BT=step_BT,
        prompt_len_B=np.array([len(x.prompt) for x in examples], np.int32),
        len_B=np.array([len(x.answer) for x in examples], np.int32),
    )
