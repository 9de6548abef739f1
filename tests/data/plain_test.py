"""Tokenizers read without transformers, beside the same read by it."""

import json
import pathlib
import shutil
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pytest
import transformers

from dllm_jax import data
from dllm_jax.data import plain

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
MODELS = ("arithmetic", "functions", "puzzles/sudoku", "puzzles/sums")
MODELS = tuple(f"{name}/model" for name in MODELS)
PAIRS = {
    name: (
        plain.read(EXAMPLES / name),
        transformers.AutoTokenizer.from_pretrained(EXAMPLES / name),
    )
    for name in MODELS
}
pairs = pytest.mark.parametrize("ours, theirs", PAIRS.values(), ids=MODELS)


@pairs
def test_tokens_and_names_are_those_of_transformers(ours, theirs):
    assert isinstance(ours, plain.Tokenizer)
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    for name in plain.NAMED:
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    assert {*ours.all_special_ids} == {*theirs.all_special_ids}
    assert ours.chat_template == theirs.chat_template
    for token in (
        "<|im_end|>",
        "<|eot_id|>",
    ):  # one that there is, one that there is not
        want = theirs.convert_tokens_to_ids(token)
        assert ours.convert_tokens_to_ids(token) == want
    for number in (0, len(ours) - 1, len(ours)):
        want = theirs.convert_ids_to_tokens(number)
        assert ours.convert_ids_to_tokens(number) == want
    assert data.stop_ids(ours, 7) == data.stop_ids(theirs, 7)


def texts(theirs):
    """Texts of tokens, special ones too, and of any other characters."""
    part = st.sampled_from(sorted(theirs.get_vocab())) | st.text(max_size=4)
    return st.lists(part, max_size=12).map("".join)


@pairs
@hypothesis.given(choose=st.data())
def test_ids_and_texts_are_those_of_transformers(ours, theirs, choose):
    text = choose.draw(texts(theirs))
    want = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours(text, add_special_tokens=False)["input_ids"] == want
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    token = st.integers(0, len(theirs) + 2)  # the last are of no token
    rows = choose.draw(st.lists(st.lists(token, max_size=9), max_size=3))
    for skip in (False, True):
        how = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        want = [theirs.decode(row, **how) for row in rows]
        assert ours.batch_decode(rows, **how) == want
    role = st.sampled_from(data.ROLES)
    turns = choose.draw(st.lists(st.tuples(role, texts(theirs)), min_size=1))
    messages = [{"role": role, "content": content} for role, content in turns]
    for ends in (False, True):
        how = {"tokenize": False, "add_generation_prompt": ends}
        want = theirs.apply_chat_template(messages, **how)
        assert ours.apply_chat_template(messages, **how) == want


BLANKS = "{% for m in messages -%}\n  {{ m['role'] + ': ' + m.content }}\n{% endfor %}"
ENDS = (
    "{% for m in messages %}{% if m.role == 'user' and not loop %}a{% endif %}"
    "{% endfor %}  \n  {% if add_generation_prompt %}  {{ eos_token }}{% endif %}\n"
)


@pytest.mark.parametrize("template", [BLANKS, ENDS])
def test_a_template_is_written_as_transformers_writes_it(tmp_path, template):
    """Blanks and line ends are where two environments would differ."""
    folder = shutil.copytree(EXAMPLES / MODELS[0], tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    ours = plain.read(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": role, "content": f" {role}\n"} for role in ("user", "tool")]
    for ends in (False, True):
        how = {"tokenize": False, "add_generation_prompt": ends}
        want = theirs.apply_chat_template(messages, **how)
        assert ours.apply_chat_template(messages, **how) == want


def settings(**changes):
    """Returns what changes tokenizer_config.json."""
    return "tokenizer_config.json", lambda old: old | changes


@pytest.mark.parametrize(
    "file, change",
    [
        settings(add_bos_token=True),
        settings(clean_up_tokenization_spaces=True),
        settings(extra_special_tokens={"image_token": "<image>"}),
        settings(tokenizer_class="Qwen2Tokenizer"),
        settings(eos_token="<new>"),
        settings(eos_token="user"),  # transformers makes it special
        ("config.json", lambda old: old | {"model_type": "qwen2"}),
        ("tokenizer.json", lambda old: old | {"padding": {"pad_id": 0}}),
        ("added_tokens.json", lambda _: {"<new>": 105}),
        ("chat_template.jinja", "{{ messages | tojson }}"),
        ("chat_template.jinja", "{{ messages[0].content.strip() }}"),
        ("chat_template.jinja", "{{ messages[0].tool_calls }}"),
        ("chat_template.jinja", "{{ tools }}"),
        ("chat_template.jinja", "{% set x = 1 %}{{ x }}"),
        ("chat_template.jinja", "{{ 'a' * 9 }}"),
        ("chat_template.jinja", "{% generation %}{% endgeneration %}"),
        ("chat_template.jinja", "{% for m in messages %}"),
    ],
)
def test_what_asks_for_more_is_left_to_transformers(tmp_path, file, change):
    """Each of these changes ids or texts, or may: nothing is guessed."""
    folder = shutil.copytree(EXAMPLES / MODELS[0], tmp_path / "model")
    assert plain.read(folder) is not None
    path = folder / file
    if callable(change):
        old = json.loads(path.read_text()) if path.exists() else {}
        change = json.dumps(change(old))
    path.write_text(change)
    assert plain.read(folder) is None


def test_what_is_damaged_is_said_as_before(tmp_path):
    folder = shutil.copytree(EXAMPLES / MODELS[0], tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    assert plain.read(folder) is None and plain.read("owner/name") is None
    with pytest.raises(ValueError, match="no usable tokenizer"):
        data.tokenizer(folder)


def test_the_bundled_models_need_no_transformers():
    program = (
        "import sys; from dllm_jax import data; tok = data.tokenizer(sys.argv[1]);"
        "print(data.render(tok, [{'role': 'user', 'content': '1+1'}]));"
        "print('transformers' in sys.modules)"
    )
    folder = str(EXAMPLES / MODELS[0])
    found = subprocess.check_output([sys.executable, "-c", program, folder], text=True)
    want = data.render(PAIRS[MODELS[0]][1], [{"role": "user", "content": "1+1"}])
    assert found == f"{want}\nFalse\n"
