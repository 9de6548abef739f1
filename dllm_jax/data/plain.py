"""Tokenizers that are one file, read without the library that reads all others.

To import transformers takes over a second, more than all that a first answer needs of it. A
folder whose settings change neither ids nor texts, and whose chat template does nothing but
loop, compare and write, is read here; its ids and texts are the same.
"""

import json
import pathlib

import tokenizers

# Classes of transformers that are what tokenizer.json says.
CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Models that transformers does not know: of others it may take another class than is named.
MODELS = ("sdar", "sdar_moe")
# Files that say more of a tokenizer than tokenizer.json and its settings do.
OTHERS = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates")
KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
NAMED = tuple(f"{kind}_token" for kind in KINDS)
# Settings of no effect on what is asked of a tokenizer here.
IDLE = ("backend", "tokenizer_class", "model_max_length", "padding_side")
IDLE += ("clean_up_tokenization_spaces",)  # where it is false
NODES = ("Template", "Output", "TemplateData", "For", "If", "Name", "Getattr", "Const")
NODES += ("Getitem", "Compare", "Operand", "And", "Or", "Not", "Add")
# What a template may read: its variables, and fields of a message.
VARIABLES = {"messages", "add_generation_prompt", *NAMED}
FIELDS = ("role", "content")


def read(path):
    """Returns the folder's Tokenizer, or None where it is for transformers to read."""
    folder = pathlib.Path(path)
    if not folder.is_dir() or any((folder / name).exists() for name in OTHERS):
        return None
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        file = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        model = json.loads((folder / "config.json").read_text("utf-8"))["model_type"]
        template = folder / "chat_template.jinja"
        text = template.read_text("utf-8") if template.exists() else None
        if model not in MODELS or not suffices(settings, file):
            return None
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        return Tokenizer(path, backend, settings, text, text and compiled(text))
    except Exception:  # noqa: BLE001 (whatever is wrong, transformers says it)
        return None


def suffices(settings: dict, file: dict) -> bool:
    """Returns whether tokenizer.json says all: settings are of tokenizer_config.json.

    A token with a name is special, which transformers makes of one that the file calls plain.
    """
    added = {token["content"] for token in file["added_tokens"] if token["special"]}
    return (
        settings["tokenizer_class"] in CLASSES
        and settings.keys() <= {*IDLE, *NAMED}
        and not settings.get("clean_up_tokenization_spaces")
        and all(settings.get(name) in {None, *added} for name in NAMED)
        and file["truncation"] is file["padding"] is None
    )


def compiled(text: str):
    """Returns a chat template; raises ValueError for one that does more than it may here."""
    # Imported here: not all need one.
    from jinja2 import meta, nodes, sandbox

    # As transformers has them, but for what such a template cannot name.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True
    )
    tree = environment.parse(text)
    read_of = [node.attr for node in tree.find_all(nodes.Getattr)]
    read_of += [node.arg.as_const() for node in tree.find_all(nodes.Getitem)]
    kinds = {type(node).__name__ for node in tree.find_all(nodes.Node)}
    if not (
        kinds <= {*NODES}
        and meta.find_undeclared_variables(tree) <= VARIABLES
        and all(field in FIELDS for field in read_of)
    ):
        raise ValueError("this template is for transformers")
    return environment.from_string(text)


class Tokenizer:
    """A tokenizer with those members of transformers' that are used in this package.

    Tokens with a name, and their ids, are attributes: eos_token, eos_token_id and the other
    NAMED ones, None where there is none.
    """

    def __init__(self, path, backend, settings: dict, text: str | None, template):
        """text: of the chat template, as `template` is compiled from; None: there is none."""
        self.name_or_path, self.backend_tokenizer = str(path), backend
        self.chat_template, self.template = text, template
        self.named = {name: settings[name] for name in NAMED if settings.get(name)}
        for name in NAMED:
            token = self.named.get(name)
            setattr(self, name, token)
            setattr(self, f"{name}_id", token and backend.token_to_id(token))
        self.all_special_ids = [backend.token_to_id(x) for x in self.named.values()]

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict:
        """Returns {"input_ids": a text's ids}, as transformers does."""
        found = self.backend_tokenizer.encode(
            text, add_special_tokens=add_special_tokens
        )
        return {"input_ids": found.ids}

    def get_vocab(self) -> dict[str, int]:
        """Returns the id of every token, added ones too."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Returns a token's id; of an unknown one that of unk_token."""
        found = self.backend_tokenizer.token_to_id(token)
        return self.unk_token_id if found is None else found

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """Returns what a token is called, None beyond the vocabulary."""
        return self.backend_tokenizer.id_to_token(int(token))

    def decode(
        self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    ) -> str:
        """Returns the text of token ids; blanks are left as they are."""
        assert not clean_up_tokenization_spaces
        ids = [int(token) for token in ids]
        return self.backend_tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, rows, **how) -> list[str]:
        """Returns `decode` of each row."""
        return [self.decode(ids, **how) for ids in rows]

    def apply_chat_template(
        self, messages: list[dict], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        """Returns a conversation as text: `data.conversation` has made it."""
        assert not tokenize
        return self.template.render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            **self.named,
        )
