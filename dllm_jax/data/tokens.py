"""Tokenizers of checkpoints: their chat templates, and the ids that end an answer."""

import datetime
import json
import os
import pathlib
import warnings

from dllm_jax.data import plain

# Of an assistant.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|role_end|>", "<end_of_turn>")
# How MMaDA's own code writes conversations: its tokenizer brings no template.
MMADA_CHAT = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n' }}{% endif %}"
)
# Templates that ask what day it is are told one: prompts are the same when a run goes on, and
# in all its processes. It is the one that Llama's name where nobody tells them.
DAY = datetime.datetime(2024, 7, 26)
FORMATS = "aAbBcdDeFHIjmMpSTxXyYZ"
TODAY = "".join(
    ["{%- macro strftime_now(format) -%}{{ format"]
    + [f"|replace('%{x}', '{DAY.strftime(f'%{x}')}')" for x in ("-d", "-m", *FORMATS)]
    + [" }}{%- endmacro %}\n"]
)
# Tokenizers that checkpoints bring as code, and the library's own that is the same.
CLONES = {"DreamTokenizer": "Qwen2Tokenizer"}
# Files of a folder that has a tokenizer, or code that makes one.
HOLDERS = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken", "tokenization*.py")
NO_TOKENIZER = (
    "has no tokenizer: copy tokenizer*.json of the model it was made from into it"
)


def tokenizer(path: str):
    """Returns the checkpoint's tokenizer; MMaDA's has a chat template in any case.

    Raises ValueError when the folder holds none.
    """
    if (tok := plain.read(path)) is not None:
        return tok
    tok = by_transformers(path)
    tok.chat_template = dated(tok.chat_template)
    if not tok.chat_template and has_codes(path):
        tok.chat_template = MMADA_CHAT
    return tok


def dated(template):
    """Returns a chat template, or several by name, with TODAY where it asks for that."""
    if isinstance(template, dict):
        return {name: dated(x) for name, x in template.items()}
    return TODAY + template if "strftime_now" in (template or "") else template


def has_codes(path: str) -> bool:
    """Returns whether a checkpoint's folder says that it has codes of images, as MMaDA's."""
    file = pathlib.Path(path) / "config.json"
    try:
        said = json.loads(file.read_text("utf-8"))
        return bool(said.get("codebook_size")) or said.get("model_type") == "mmada"
    # Whoever reads the model says what is wrong with it.
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def by_transformers(path: str):
    """Returns a tokenizer as transformers reads it; raises ValueError where it cannot."""
    # Imported here: it takes a quarter of the start, and not all need it.
    # Its notice that torch is missing is no news.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    try:
        with warnings.catch_warnings():  # of keys in config.json that it will rename
            warnings.simplefilter("ignore", FutureWarning)
            kind = get_tokenizer_config(path).get("tokenizer_class")
            if kind in CLONES:
                return getattr(transformers, CLONES[kind]).from_pretrained(path)
            load = transformers.AutoTokenizer.from_pretrained
            return load(path, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 (a damaged file raises anything)
        folder = pathlib.Path(path)
        if folder.is_dir() and not any(any(folder.glob(x)) for x in HOLDERS):
            raise ValueError(f"{str(path)!r} {NO_TOKENIZER}") from None
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{str(path)!r} holds no usable tokenizer: {reason[:600]}"
        ) from None


def decoded(tok, ids) -> str:
    """Returns the text of token ids, without special tokens; blanks are left as they are."""
    return tok.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


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


def special_names(tok) -> list[str]:
    """Returns the names of a tokenizer's special tokens, looked for once."""
    if not hasattr(tok, "special_names"):
        added = getattr(tok, "backend_tokenizer", None)
        added = added.get_added_tokens_decoder() if added is not None else {}
        tok.special_names = [x.content for x in added.values() if x.special]
    return tok.special_names
