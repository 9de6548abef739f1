"""Data: files in, ids out, and an order that is a function of the position alone."""

import copy
import dataclasses
import importlib.util
import json
import os
import pathlib
import shutil
import types
import warnings

import hypothesis
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from dllm_jax import data, limits
from dllm_jax.data import prompts, tokens
from dllm_jax.rl import heldout
from dllm_jax.rl.config import RewardConfig
from dllm_jax.rl.rewards import Grader, grader

ROOT = pathlib.Path(__file__).parents[1]
CFG = data.DataConfig()
MATH = grader("math", RewardConfig())


@pytest.fixture(scope="module")
def tok():
    """The tokenizer of the arithmetic example: a character is a token."""
    path = ROOT / "examples" / "arithmetic" / "make.py"
    spec = importlib.util.spec_from_file_location("make", path)
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    return make.tokenizer()


def write(path: pathlib.Path, *rows) -> str:
    """Writes records as lines; strings are lines as they are."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def test_a_tokenizer_that_comes_as_code(tmp_path):
    letters = sorted(ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*letters, "he"])}
    special = ["<|endoftext|>", "<|im_end|>", "<|mask|>"]
    settings = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {
            str(len(vocab) + i): {"content": token, "special": True}
            for i, token in enumerate(special)
        },
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "chat_template": "{{ messages[0].content }}<|im_end|>",
    }
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tok = data.tokenizer(str(tmp_path))
    ids = data.ask(tok, CFG, "hey<|mask|>")
    assert ids == [vocab["he"], vocab["y"], tok.mask_token_id, len(vocab) + 1]
    assert data.stop_ids(tok) == (len(vocab) + 1, len(vocab))
    assert tok.mask_token_id == len(vocab) + 2


# ---- Problems ------------------------------------------------------------------------


def test_a_missing_field_is_named_with_the_nearest(tmp_path, tok):
    path = write(
        tmp_path / "x.jsonl",
        {"question": "1+1", "answer": 2},
        {"question": "2+2", "anwser": 4},
    )
    with pytest.raises(ValueError, match=r"record 2: no field 'answer'.*'anwser'\?"):
        data.problems(path, tok, CFG, MATH)
    with pytest.raises(ValueError, match=r"no field 'zzz', it has \['answer', 'qu"):
        cfg = dataclasses.replace(CFG, question="zzz")
        data.problems(path, tok, cfg, MATH)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"answer": None}, "x.jsonl', record 2: field 'answer' is null"),
        ({"question": None}, "x.jsonl', record 2: field 'question' is null"),
        ({"answer": ""}, "x.jsonl', record 2: field 'answer': the gold answer '' is"),
        ({"answer": "####"}, "record 2: field 'answer': the gold answer '####' is"),
    ],
)
def test_a_bad_problem_is_named(tmp_path, tok, bad, message):
    good = {"question": "1+1", "answer": 2}
    with pytest.raises(ValueError, match=message):
        data.problems(write(tmp_path / "x.jsonl", good, good | bad), tok, CFG, MATH)


def test_golds_are_checked_and_nothing_is_graded(tmp_path, tok):
    checked = []
    grader = Grader(grade=None, check=checked.append)
    path = write(
        tmp_path / "x.jsonl", *({"question": "?", "answer": n} for n in (1, 2))
    )
    assert len(data.problems(path, tok, CFG, grader)) == 2
    assert [problem.answer for problem in checked] == ["1", "2"]
    assert [problem.record["answer"] for problem in checked] == [1, 2]


# ---- Order ---------------------------------------------------------------------------


@hypothesis.given(st.integers(1, 40), st.integers(0, 9), st.integers(0, 5))
def test_every_epoch_is_a_permutation(size, seed, epoch):
    got = data.order(size, epoch * size, size, seed=seed, shuffle=True)
    assert sorted(got) == list(range(size))
    plain = data.order(size, epoch * size, size, seed=seed, shuffle=False)
    assert list(plain) == list(range(size))


@hypothesis.given(
    size=st.integers(1, 20),
    counts=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    start=st.integers(0, 100),
    shuffle=st.booleans(),
)
def test_order_is_a_function_of_the_position(size, counts, start, shuffle):
    how = {"seed": 3, "shuffle": shuffle}
    parts, position = [], start
    for count in counts:
        parts.append(data.order(size, position, count, **how))
        position += count
    whole = data.order(size, start, sum(counts), **how)
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_epochs_and_seeds_differ():
    orders = [
        tuple(data.order(50, start, 50, seed=seed, shuffle=True))
        for seed in (0, 1)
        for start in (0, 50)
    ]
    assert len(set(orders)) == 4


# ---- Prompts -------------------------------------------------------------------------


def test_render_uses_the_chat_template(tok):
    ids = data.render(tok, [{"role": "user", "content": "1+2"}])
    assert tok.decode(ids) == (
        "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == tok.convert_tokens_to_ids("<|im_start|>")
    assert tok.unk_token_id not in ids


def test_chat_templates_are_told_the_same_day_for_ever(tmp_path):
    """And are otherwise what they are, also where a folder names several."""
    model = shutil.copytree(ROOT / "examples/arithmetic/model", tmp_path / "model")
    text = "\n {{ %s + '|' + messages[0].content }}"
    dated = text % "strftime_now('%d %b %Y %H:%M:%S %D')"
    plain = text % "'26 Jul 2024 00:00:00 07/26/24'"
    asked = []
    for template in (dated, plain):
        (model / "chat_template.jinja").write_text(template)
        tok = data.tokenizer(str(model))
        asked.append(prompts.by_template(tok, [{"role": "user", "content": "x"}]))
    assert asked[0] == asked[1] == "\n 26 Jul 2024 00:00:00 07/26/24|x"
    tok.chat_template = {"default": dated, "tools": plain}
    named = tokens.dated(tok.chat_template)
    assert named["default"].endswith(dated) and named["default"] != dated


@pytest.mark.parametrize("role", data.ROLES)
def test_words_that_the_chat_template_leaves_out_are_told(tok, role):
    """As Qwen's does of a developer's. Of thoughts that it leaves out nothing is said."""
    tok = copy.deepcopy(tok)
    shown = (
        "{% for m in messages if m.role == 'user' %}{{ m.content | trim }}{% endfor %}"
    )
    tok.chat_template = shown
    asked = [{"role": role, "content": "3"}, {"role": "user", "content": " 1+2\n"}]
    if role in ("system", "developer"):
        with pytest.raises(
            ValueError, match=f"^message 1: .*leaves out what role='{role}'"
        ):
            data.render(tok, asked)
    else:
        assert tok.decode(data.render(tok, asked)) == "3" * (role == "user") + "1+2"


def test_a_chat_template_may_alter_words(tok):
    """As SmolLM3's does a system message's /no_think, of which it makes another."""
    tok = copy.deepcopy(tok)
    tok.chat_template = (
        "{% for m in messages %}{{ m.content | replace('3', '4') }}{% endfor %}"
    )
    asked = [{"role": "system", "content": "3"}, {"role": "user", "content": "1+3"}]
    assert tok.decode(data.render(tok, asked)) == "41+4"


def test_what_a_model_that_looks_adds_is_no_message_of_the_record(tok):
    tok = copy.deepcopy(tok)
    tok.chat_template = "{{ messages[-1].content }}"
    before = {"role": "system", "content": "3"}
    shown = types.SimpleNamespace(
        plain=False, messages=lambda given: [before, *given], ids=data.prompts.ids_of
    )
    asked = [{"role": "developer", "content": "2"}, {"role": "user", "content": "1+1"}]
    assert tok.decode(data.render(tok, asked[1:], shown)) == "1+1"
    with pytest.raises(ValueError, match="^message 1: .*leaves out what role='dev"):
        data.render(tok, asked, shown)


def test_images_of_a_pipes_records_lie_below_the_working_folder(tmp_path):
    file, pipe = tmp_path / "x.jsonl", tmp_path / "pipe"
    file.touch()
    os.mkfifo(pipe)
    roots = [
        data.Looker(None, str(path), CFG).root for path in (file, pipe, "/dev/stdin")
    ]
    assert roots == [str(tmp_path), ".", "."]


def test_characters_that_the_model_does_not_know_are_said_once(tok, capsys):
    fresh = copy.deepcopy(tok)
    for text in ("1+2", "1+é2ñ", "ü"):
        data.render(fresh, [{"role": "user", "content": text}])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "warning: the tokenizer does not know 'éñ', such as in the p"
    )
    assert "1+é2ñ" in line and "'<unk>'" in line


def test_a_token_that_also_stands_for_unknown_characters_may_be_written(tok, capsys):
    """As GPT-2's and Qwen's own: the text's end."""
    fresh = copy.deepcopy(tok)
    fresh.unk_token = fresh.eos_token
    data.ids_of(fresh, f"3{fresh.eos_token}", "answer")
    assert capsys.readouterr().err == ""


def test_characters_of_raw_prompts_and_answers_that_it_does_not_know_are_said(
    tmp_path, tok, capsys
):
    raw = data.DataConfig(raw=True, template="é{question}")
    data.ask(copy.deepcopy(tok), raw, "1+2")
    path = write(tmp_path / "x.jsonl", {"question": "1+2", "response": "3ü"})
    data.examples(path, copy.deepcopy(tok), CFG, **FORM)
    prompt, answer = capsys.readouterr().err.splitlines()
    assert "does not know 'é', such as in the prompt 'é1+2'" in prompt
    assert "does not know 'ü', such as in the answer '3ü'" in answer


def test_the_text_that_stands_for_an_image_is_no_news(capsys):
    """Which is a special token of most tokenizers."""
    told = types.SimpleNamespace(special_names=["<image>", "<end>"])
    prompts.warn_special(told, "<image> What is it?", "<image>")
    assert capsys.readouterr().err == ""
    prompts.warn_special(told, "<image> What is <end>?", "<image>")
    assert "a question has '<end>' in its text" in capsys.readouterr().err
    prompts.warn_special(told, "<image> What is it?")  # told once
    assert capsys.readouterr().err == ""


def test_images_are_looked_for_in_a_folder(tmp_path):
    cfg = dataclasses.replace(CFG, image_root=str(tmp_path / "none"))
    prompts.Looker(None, "x.jsonl", cfg)  # who does not look needs none
    with pytest.raises(ValueError, match="data.image_root='.*none' is no folder"):
        prompts.Looker(object(), "x.jsonl", cfg)
    prompts.Looker(object(), "x.jsonl", dataclasses.replace(cfg, image_root=""))


@pytest.mark.parametrize("raw", [False, True])
def test_a_special_token_in_a_question_is_said_once(tok, capsys, raw):
    fresh = copy.deepcopy(tok)
    cfg = data.DataConfig(raw=raw, template="<|im_start|>{question}")
    for question in ("1+2", "1<|im_end|>2", "<|MASK|>"):
        ids = data.ask(fresh, cfg, question)
    assert tok.convert_tokens_to_ids("<|MASK|>") in ids
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "warning: a question has '<|im_end|>' in its text, which the"
    )
    assert line.endswith("as that token: '1<|im_end|>2'")


def test_a_text_that_is_too_long_is_not_the_templates_fault(tok, monkeypatch):
    monkeypatch.setattr(data.prompts.limits, "CHARACTERS", 100)
    with pytest.raises(ValueError, match="its text has 99 characters: .* at most 100 "):
        data.render(tok, [{"role": "user", "content": 99 * "1"}])
    monkeypatch.setattr(tok, "chat_template", 101 * "x")
    with pytest.raises(ValueError, match="its chat template writes without end"):
        data.render(tok, [{"role": "user", "content": "1+2"}])


def test_render_without_a_template_is_an_error(tok):
    bare = type(tok)(tokenizer_object=tok.backend_tokenizer)
    with pytest.raises(ValueError, match="no chat template"):
        data.render(bare, [{"role": "user", "content": "1+2"}])


def test_a_prompt_without_a_token_is_an_error(tmp_path, tok):
    """It would be answered as a prompt that was left out: by nothing."""
    tok = copy.deepcopy(tok)
    tok.chat_template = "\n"
    with pytest.raises(ValueError, match="no tokens.*its chat template writes"):
        data.render(tok, [{"role": "user", "content": "1+2"}])
    ones = tokenizers.Tokenizer(tokenizers.models.BPE({"1": 0}, []))
    path = write(tmp_path / "x.jsonl", {"question": "2", "answer": "2"})
    raw = dataclasses.replace(CFG, raw=True)
    with pytest.raises(
        ValueError, match="record 1: no token is made of its prompt: '2'"
    ):
        data.problems(path, type(tok)(tokenizer_object=ones), raw, MATH)


def test_problems_fill_the_template(tmp_path, tok):
    path = write(tmp_path / "x.jsonl", {"question": "1+2", "answer": 3})
    cfg = dataclasses.replace(CFG, template="{question}= {x}?")
    (problem,) = data.problems(path, tok, cfg, MATH)
    assert "user\n1+2= {x}?<|im_end|>" in tok.decode(problem.prompt_ids)
    assert (problem.text, problem.answer) == ("1+2", "3")


def test_images_that_the_model_does_not_look_at_are_told(tmp_path, tok, capsys):
    rows = [{"question": "1", "answer": "1"}, {"question": "2", "answer": "2"}]
    seen = write(tmp_path / "seen.jsonl", rows[0], rows[1] | {"picture": "a.png"})
    cfg = dataclasses.replace(CFG, image="picture")
    assert len(data.problems(seen, tok, cfg, MATH)) == 2
    told = capsys.readouterr().err
    assert "seen.jsonl" in told and "data.image='picture'" in told
    assert "looks at none" in told and told.count("\n") == 1
    data.problems(seen, tok, CFG, MATH)  # of another field
    empty = write(tmp_path / "empty.jsonl", rows[0] | {"picture": []})
    data.problems(empty, tok, cfg, MATH)
    assert capsys.readouterr().err == ""


def test_stop_ids_begin_with_the_end_of_the_turn(tok):
    turn = tok.convert_tokens_to_ids("<|im_end|>")
    end = tok.eos_token_id
    assert data.stop_ids(tok, end, 50) == (turn, end, 50)
    assert data.stop_ids(None, 7, 7, 8) == (7, 8)
    assert data.stop_ids(None) == ()
    gemmas = copy.deepcopy(tok)
    gemmas.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    own = gemmas.convert_tokens_to_ids("<end_of_turn>")
    assert data.stop_ids(gemmas) == (turn, own, end)


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no tokenizer: copy tokenizer.*json of"):
        data.tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.model").write_text("")
    with pytest.raises(ValueError, match="no usable tokenizer: .* install tiktoken"):
        data.tokenizer(str(tmp_path))


def test_a_tokenizer_says_nothing_of_keys_that_a_library_will_rename(tmp_path):
    """Published configurations have `rope_scaling`, which transformers warns of."""
    model = ROOT / "examples" / "arithmetic" / "model"
    for file in model.glob("tokenizer*"):
        (tmp_path / file.name).symlink_to(file)
    told = {"model_type": "Dream", "rope_scaling": None, "rope_theta": 1e6}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(data.tokenizer(tmp_path)) == len(data.tokenizer(model))


# ---- Examples of SFT -----------------------------------------------------------------


def stacked(path, tok, cfg, **form):
    """Returns (a file's examples as rows of a canvas, how many were left out)."""
    found, dropped = data.examples(path, tok, cfg, **form)
    return data.stacked(found, form["pad"], form["slots"]), dropped


@pytest.mark.parametrize("block", [1, 4, 5])
def test_examples_end_at_the_end_of_a_block(tmp_path, tok, block):
    path = write(
        tmp_path / "x.jsonl",
        {"question": "1+2", "response": "3"},
        {"question": "10+20", "response": "=30"},
    )
    end, pad, slots = 2, 0, 40
    got, dropped = stacked(
        path, tok, CFG, end=end, pad=pad, vocab=105, block=block, slots=slots
    )
    assert dropped == 0
    assert got.tokens_BT.shape == got.step_BT.shape == (2, slots)
    for i, text in enumerate(("3", "=30")):
        first, count = int(got.prompt_len_B[i]), int(got.len_B[i])
        assert (first + count) % block == 0
        answer = got.tokens_BT[i, first : first + count].tolist()
        written = tok(text, add_special_tokens=False)["input_ids"]
        assert answer[: len(written) + 1] == [*written, end]
        assert set(answer[len(written) + 1 :]) <= {pad}
        assert count - len(written) - 1 < block
        learned = np.flatnonzero(got.step_BT[i])
        np.testing.assert_array_equal(learned, np.arange(first, first + count))
        assert (got.tokens_BT[i, first + count :] == pad).all()


def test_a_tail_stands_behind_each_answer():
    ragged = [data.Example([5], [6, 7], [2, 1]), data.Example([5, 5], [6], [1])]
    got = data.stacked(ragged, 0, 6, tail=(8, 9))
    assert got.tokens_BT.tolist() == [[5, 6, 7, 8, 9, 0], [5, 5, 6, 8, 9, 0]]
    assert got.step_BT.tolist() == [[0, 2, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0]]
    assert (got.prompt_len_B.tolist(), got.len_B.tolist()) == ([1, 2], [2, 1])


def test_an_example_takes_the_room_of_its_own_tokens(tmp_path, tok):
    """Not that of a canvas: 200,000 in 8,192 positions each would be 13 GB."""
    row = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9]}
    (found,), _ = data.examples(write(tmp_path / "x.jsonl", row), tok, CFG, **FORM)
    assert sum(x.nbytes for x in found[:3]) == 4 * (2 + 3 + 3)
    assert (found.prompt.tolist(), found.answer.tolist()) == ([5, 6], [7, 8, 9])


def test_examples_of_conversations(tmp_path, tok):
    turns = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4"},
    ]
    path = write(tmp_path / "x.jsonl", {"messages": turns})
    got, _ = stacked(path, tok, CFG, **FORM)
    first = int(got.prompt_len_B[0])
    assert got.tokens_BT[0, :first].tolist() == data.render(tok, turns[:3])
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": ""}]
    path = write(
        tmp_path / "x.jsonl", {"messages": [*turns[:3], turns[3] | {"content": parts}]}
    )
    again, _ = stacked(path, tok, CFG, **FORM)
    np.testing.assert_array_equal(again.tokens_BT, got.tokens_BT)
    for wrong, message in (
        (turns[:3], "the last message is not the"),
        (turns[3:], "no message stands before the assistant's"),
        ([], "needs mess"),
    ):
        path = write(tmp_path / "x.jsonl", {"messages": wrong})
        with pytest.raises(ValueError, match=f"record 1: {message}"):
            data.examples(path, tok, CFG, **FORM)


TOOLS = (
    "{% for tool in tools or [] %}{{ tool.name }};{% endfor %}{% for m in messages %}"
    "{{ m.content }}{{ m.reasoning_content }}{{ m.tool_calls }}{% endfor %}"
)


@pytest.mark.parametrize("name", ["reasoning_content", "tool_calls"])
@pytest.mark.parametrize("text", ["7", ""])
def test_an_answer_that_is_more_than_its_text_is_refused(
    tmp_path, tok, monkeypatch, name, text
):
    """The template would write it, and nothing would learn it."""
    asked = {"role": "user", "content": "3+4"}
    more = {"role": "assistant", "content": text, name: "12"}
    plain = {"role": "assistant", "content": "7", name: None, "weight": 1}
    rows = {
        "messages": {"messages": [asked, more, asked, plain]},
        "chosen": {"prompt": "3+4", "chosen": [plain], "rejected": "8"},
    }
    monkeypatch.setattr(tok, "chat_template", TOOLS)
    for kind, row in rows.items():
        pairs = kind == "chosen"
        path = write(tmp_path / "a.jsonl", row)
        data.examples(path, tok, CFG, **FORM, pairs=pairs)
        path = write(tmp_path / "a.jsonl", row | {kind: [*row[kind][:-1], more]})
        if text or not pairs:
            with pytest.raises(ValueError, match=f"only the content.*{name}"):
                data.examples(path, tok, CFG, **FORM, pairs=pairs)


def test_tools_that_no_prompt_shows_are_refused(tmp_path, tok, monkeypatch):
    turns = [{"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}]
    path = write(tmp_path / "a.jsonl", {"messages": turns, "tools": [{"name": "12"}]})
    data.examples(path, tok, CFG, **FORM)  # this template tells of none
    monkeypatch.setattr(tok, "chat_template", TOOLS)
    with pytest.raises(ValueError, match="record 1: it has 'tools'"):
        data.examples(path, tok, CFG, **FORM)


def test_preferences_are_pairs(tmp_path, tok):
    def said(text):
        return [{"role": "assistant", "content": text}]

    asked = [{"role": "user", "content": "1+2"}]
    long = {"prompt": "1+2", "chosen": "3", "rejected": "4" * 100}
    path = write(
        tmp_path / "x.jsonl",
        {"prompt": "1+2", "chosen": "3", "rejected": "4"},
        long,
        {"prompt": asked, "chosen": said("3"), "rejected": asked + said("4")},
    )
    given = FORM | {"slots": 40, "pairs": True}
    got, dropped = stacked(path, tok, CFG, **given)
    assert (len(got.len_B), dropped) == (4, 1)  # both answers of a pair, or none
    for x in (got.tokens_BT, got.prompt_len_B, got.len_B):
        np.testing.assert_array_equal(x[:2], x[2:])
    for i, text in enumerate("34"):
        first = int(got.prompt_len_B[i])
        assert tok.decode(got.tokens_BT[i, first]) == text
    for wrong in (asked, [], 3):
        path = write(tmp_path / "x.jsonl", {**long, "rejected": wrong})
        with pytest.raises(ValueError, match="record 1: 'rejected'.* messages"):
            data.examples(path, tok, CFG, **given)


def test_a_pairs_conversation_is_the_prompt_again(tmp_path, tok):
    """Nothing that stands before an answer is left out unsaid."""
    asked = [{"role": "user", "content": "1+2"}]
    turns = [*asked, {"role": "assistant", "content": "3"}]
    longer = [*turns, {"role": "user", "content": "2+2"}]
    right = [{"role": "assistant", "content": "4"}]
    given = FORM | {"slots": 60, "pairs": True}
    row = {"prompt": "1+2 ", "chosen": turns, "rejected": "5"}
    got, _ = stacked(write(tmp_path / "x.jsonl", row), tok, CFG, **given)
    assert len(got.len_B) == 2
    row = {"prompt": longer, "chosen": longer + right, "rejected": "5"}
    data.examples(write(tmp_path / "x.jsonl", row), tok, CFG, **given)
    system = [{"role": "system", "content": "Add."}]
    for prompt, chosen in (("1+2", longer + right), (asked, system + turns)):
        row = {"prompt": prompt, "chosen": chosen, "rejected": "5"}
        path = write(tmp_path / "x.jsonl", row)
        with pytest.raises(ValueError, match="record 1: 'chosen' has messages before"):
            data.examples(path, tok, CFG, **given)


def test_examples_that_are_too_long_are_counted(tmp_path, tok):
    short = {"question": "1+2", "response": "3"}
    long = {"question": "1+2", "response": "3" * 100}
    path = write(tmp_path / "x.jsonl", short, long, long)
    got, dropped = stacked(path, tok, CFG, **FORM | {"slots": 40})
    assert (len(got.len_B), dropped) == (1, 2)
    with pytest.raises(ValueError, match="no record fits into 8 tokens and has an"):
        data.examples(path, tok, CFG, **FORM | {"slots": 8})


FORM = {"end": 2, "pad": 0, "vocab": 105, "block": 4, "slots": 80}


def test_examples_of_text_that_is_rendered_already(tmp_path, tok):
    row = {"prompt": "<|im_start|>user\n1+2", "response": "3<|im_end|>"}
    got, _ = stacked(
        write(tmp_path / "x.jsonl", row),
        tok,
        CFG,
        **FORM | {"end": tok("<|im_end|>")["input_ids"][0]},
    )
    first, count = int(got.prompt_len_B[0]), int(got.len_B[0])
    assert tok.decode(got.tokens_BT[0, :first]) == row["prompt"]
    answer = got.tokens_BT[0, first : first + count]
    assert tok.decode(answer[answer > 0]) == row["response"]  # no second end


def test_a_prompt_without_chat_tokens_is_told_once(tmp_path, tok, capsys):
    """`generate` and DPO take it for what the user says; here it is written by its author."""
    tok = copy.deepcopy(tok)
    chat = "<|im_start|>user\n3+4<|im_end|>\n<|im_start|>assistant\n"
    for given, told in (([chat], 0), ([chat, "3+4", "12"], 1), ([34], 0)):
        rows = [{"prompt": x, "response": "7"} for x in given]
        data.examples(write(tmp_path / "x.jsonl", *rows), tok, CFG, **FORM)
        said = capsys.readouterr().err
        assert said.count("without the chat template: '3+4'") == told
        assert said.count("warning") == told


@pytest.mark.parametrize(("post_num", "pads"), [(-1, 2), (0, 0), (1, 1), (5, 5)])
def test_pads_after_an_answer(tmp_path, tok, post_num, pads):
    path = write(tmp_path / "x.jsonl", {"prompt": "1+1", "response": "12"})
    cfg = dataclasses.replace(CFG, post_num=post_num)
    got, _ = stacked(path, tok, cfg, **FORM)
    assert int(got.len_B[0]) == 3 + pads
    np.testing.assert_array_equal(
        np.flatnonzero(got.step_BT[0]), 3 + np.arange(3 + pads)
    )


@pytest.mark.parametrize(("full", "pads"), [(False, 2), (True, 1)])
def test_pads_go_to_the_end_of_the_samplers_block(tmp_path, tok, full, pads):
    """With full attention blocks are counted from the answer's start, of 3 tokens here."""
    path = write(tmp_path / "x.jsonl", {"prompt": "1+1", "response": "12"})
    got, _ = stacked(path, tok, CFG, full=full, **FORM)
    assert int(got.len_B[0]) == 3 + pads
    # No pad is beyond the canvas.
    got, _ = stacked(path, tok, CFG, full=True, **FORM | {"slots": 6})
    assert int(got.len_B[0]) == 3


@pytest.mark.parametrize(
    ("last", "post_num", "pads"),
    [(9, -1, 0), (2, -1, 2), (0, -1, 2), (9, 3, 0), (2, 3, 3), (11, 3, 3)],
)
def test_no_pads_are_learned_after_an_answer_that_was_cut(
    tmp_path, tok, last, post_num, pads
):
    """Its limit ended it, as `generate` may leave one: 6 tokens, in blocks of 4.

    A sampler may know several ends: 2, and 11.
    """
    row = {"prompt_ids": [5, 6, 7], "response_ids": [8, 8, last]}
    cfg = dataclasses.replace(CFG, post_num=post_num)
    path = write(tmp_path / "x.jsonl", row)
    got, _ = stacked(path, tok, cfg, stops=(2, 11), **FORM)
    assert int(got.len_B[0]) == 3 + pads


@pytest.mark.parametrize("blank", ["", " \n"])
def test_blank_answers_teach_nothing(tmp_path, tok, blank):
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": blank}]
    path = write(
        tmp_path / "x.jsonl",
        {"prompt": "1+1", "response": "2"},
        {"prompt": "1+1", "response": blank},
        {"question": "1+1", "response": blank},
        {"messages": turns},
    )
    got, dropped = stacked(path, tok, CFG, **FORM)
    assert (len(got.len_B), dropped) == (1, 3)


def test_traces_are_read_as_generate_writes_them(tmp_path, tok):
    line = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "step_map": [3, 1, 2]}
    rebased = line | {"step_map": [2, 0, 1]}  # dLLM-RL counts from 0
    skipped = line | {"response_ids": [], "step_map": []}  # its prompt was too long
    path = write(tmp_path / "x.jsonl", line, skipped, rebased)
    got, dropped = stacked(path, tok, CFG, traced=True, **FORM)
    for ids, steps in zip(got.tokens_BT, got.step_BT, strict=True):
        assert ids[:6].tolist() == [5, 6, 7, 8, 9, 0]
        assert steps[:6].tolist() == [0, 0, 3, 1, 2, 0]
    assert got.len_B.tolist() == [3, 3] and dropped == 1
    text = {"prompt": "1+1", "response": "12", "step_map": [1, 0]}
    got, _ = stacked(
        write(tmp_path / "x.jsonl", text),
        tok,
        dataclasses.replace(CFG, post_num=1),
        traced=True,
        **FORM,
    )
    assert got.step_BT[0, 3:8].tolist() == [2, 1, 3, 4, 0]  # the end, a pad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_map": None}, "field .step_map. is null"),
        ({"step_map": [1, -1, 2]}, "step_map must be a list of numbers"),
        ({"step_map": [1, 2]}, "step_map has 2 steps for 3 tokens"),
        (
            {"step_map": [1, 2, 3], "response_ids": [7, 105, 9]},
            "vocabulary, 0..104; is it",
        ),
        ({"response_ids": "7"}, "response_ids must be a list of numbers"),
        ({}, "needs a step_map. Collect traces with python -m dllm_jax.generate"),
    ],
)
def test_a_bad_trace_is_named(tmp_path, tok, changes, message):
    line = {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], **changes}
    path = write(tmp_path / "x.jsonl", line)
    with pytest.raises(ValueError, match="record 1: .*" + message):
        data.examples(path, tok, CFG, traced=True, **FORM)


def test_a_template_without_end_is_ended(tok, monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.2)
    many = "{% for i in range(99999) %}"
    monkeypatch.setattr(tok, "chat_template", 2 * many + 2 * "{% endfor %}")
    with pytest.raises(ValueError, match="its chat template fails: it has not ended"):
        data.render(tok, [{"role": "user", "content": "1+2"}])


# ---- Several files at once -----------------------------------------------------------


def test_files_with_weights(tmp_path):
    odd = tmp_path / "a,b:2"
    odd.write_text("")
    for spec, want in (
        ("a.jsonl", {"a.jsonl": 1}),
        ("a.jsonl:3,b.jsonl:1", {"a.jsonl": 0.75, "b.jsonl": 0.25}),
        ("a.jsonl, b.jsonl", {"a.jsonl": 0.5, "b.jsonl": 0.5}),
        ("a:b.jsonl,c:0", {"a:b.jsonl": 1, "c": 0}),
        (str(odd), {str(odd): 1}),  # a name that is a file is that one
    ):
        assert data.mixture(spec) == want


def test_held_out_files_have_commas_between_or_in_their_name(tmp_path):
    for name in ("a", "b", "a,b"):
        (tmp_path / name).touch()
    assert data.files("") == []
    assert data.files(f"{tmp_path}/a, {tmp_path}/b") == [
        f"{tmp_path}/{x}" for x in "ab"
    ]
    assert data.files(f"{tmp_path}/a,b") == [f"{tmp_path}/a,b"]
    assert data.files("none,") == ["none", ""]
    assert heldout.files(f"{tmp_path}/a,b", []) == {"": f"{tmp_path}/a,b"}


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("a:0,b:0", "weights sum to 0"),
        ("a:0", "weights sum to 0"),
        ("a:1e308,b:1e308", "weights sum to more than a number holds"),
        ("a:-1,b:2", "'a:-1' is no FILE:WEIGHT"),
        ("a:nan,b", "'a:nan' is no FILE:WEIGHT"),
        ("a,,b", "'' is no FILE:WEIGHT"),
        ("a:1,a:2", "'a' stands twice"),
        ("", "is empty: name the file"),
    ],
)
def test_weights_that_make_no_sense(spec, says):
    with pytest.raises(ValueError, match="data.train.*" + says):
        data.mixture(spec)


@hypothesis.given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    start=st.integers(0, 100),
)
def test_a_mixture_is_a_function_of_the_position(sizes, counts, start):
    weights = list(np.arange(1, len(sizes) + 1) / sum(range(len(sizes) + 1)))
    how = {"seed": 3, "shuffle": True}
    whole = data.mixed(sizes, weights, start, sum(counts), **how)
    parts, position = [], start
    for count in counts:
        parts.append(data.mixed(sizes, weights, position, count, **how))
        position += count
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert ((whole >= 0) & (whole < sum(sizes))).all()
    if len(sizes) == 1:
        np.testing.assert_array_equal(
            whole, data.order(sizes[0], start, len(whole), **how)
        )


def test_a_mixture_draws_by_weight_and_takes_each_file_in_its_order():
    sizes, weights = [50, 7, 20], [0.25, 0.75, 0.0]
    index_n = data.mixed(sizes, weights, 0, 4000, seed=1, shuffle=True)
    second_n = index_n[(index_n >= 50) & (index_n < 57)] - 50
    assert index_n.max() < 57  # none of a file with weight 0
    assert len(second_n) / 4000 == pytest.approx(0.75, abs=0.03)
    want = data.order(7, 0, len(second_n), seed=2, shuffle=True)
    np.testing.assert_array_equal(second_n, want)  # every epoch once each
