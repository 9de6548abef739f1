"""Problems and examples: files in, token ids out, and where in the data a run is.

Host code. Token ids are the truth from here to the loss: text is rendered by the
checkpoint's own chat template, tokenised once, and never tokenised again.

No module is named like a function, since the package's attribute of that name is the
function.
"""

from dllm_jax.data.conversations import Example, Examples, examples, ids, stacked
from dllm_jax.data.prompts import (
    BOXED,
    MATH,
    ROLES,
    BadGold,
    DataConfig,
    Looker,
    Problem,
    Unreadable,
    ask,
    check_known,
    conversation,
    ids_of,
    messages_of,
    of_record,
    problems,
    render,
    text,
)
from dllm_jax.data.stream import files, mixed, mixture, order
from dllm_jax.data.tokens import decoded, stop_ids, tokenizer

__all__ = [
    "BOXED",
    "MATH",
    "ROLES",
    "BadGold",
    "DataConfig",
    "Example",
    "Examples",
    "Looker",
    "Problem",
    "Unreadable",
    "ask",
    "check_known",
    "conversation",
    "decoded",
    "examples",
    "files",
    "ids",
    "ids_of",
    "messages_of",
    "mixed",
    "mixture",
    "of_record",
    "order",
    "problems",
    "render",
    "stacked",
    "stop_ids",
    "text",
    "tokenizer",
]
