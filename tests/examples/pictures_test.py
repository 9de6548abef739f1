"""Questions about pictures: what the example makes of easy-VQA's, and shows of answers."""

import importlib.util
import json
import sys

import jax
import numpy as np
import pytest
from PIL import Image

from dllm_jax import data, generate, sharding
from dllm_jax.models import hf
from examples.pictures import make as pictures
from examples.pictures import show

ASKED = [
    ("what color is the shape?", "red"),
    ("is there not a red shape?", "no"),
    ("is no teal shape present?", "yes"),
    ("what is the red shape?", "circle"),
]


@pytest.fixture(scope="module")
def easy_vqa(tmp_path_factory):
    """A folder like that of easy-VQA's data: four pictures to train on, two to test."""
    folder = tmp_path_factory.mktemp("easy_vqa")
    for part, numbers in (("train", range(4)), ("test", range(2))):
        (folder / part / "images").mkdir(parents=True)
        rows = [[*pair, number] for number in numbers for pair in ASKED]
        (folder / part / "questions.json").write_text(json.dumps(rows))
        for number in numbers:
            rgb = np.full((64, 64, 3), 40 * number + len(part), np.uint8)
            Image.fromarray(rgb).save(folder / part / "images" / f"{number}.png")
    return folder


def made(monkeypatch, *flags):
    """Runs the script of the pictures."""
    monkeypatch.setattr(sys, "argv", ["make.py", *map(str, flags)])
    pictures.main()


def records(file):
    """Returns the records of a file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_pictures_are_split_and_their_blank_model_answers(
    easy_vqa, tmp_path, monkeypatch, capsys
):
    flags = [f"--data={easy_vqa}", "--heldout=2"]
    for name in ("one", "same"):
        made(monkeypatch, *flags, f"--out={tmp_path / name}")
    one, same = (tmp_path / name for name in ("one", "same"))
    parts = {name: records(one / f"{name}.jsonl") for name in ("train", "heldout")}
    assert parts["train"] == records(same / "train.jsonl")
    shown = [{row["image"] for row in part} for part in parts.values()]
    assert not shown[0] & shown[1] and [len(x) for x in shown] == [4, 2]
    assert [len(part) for part in parts.values()] == [16, 2]
    pixels = [np.asarray(Image.open(one / row["image"])) for row in parts["train"]]
    assert len({x.tobytes() for x in pixels}) == 4
    told = records(one / "told.jsonl")
    assert {row["image"] for row in told} == shown[0] and len(told) == 16
    for row in told:
        assert row["response"] == f"red circle \\boxed{{{row['answer']}}}"
    for row, short in zip(records(one / "described.jsonl"), told, strict=True):
        words = f"color red shape circle \\boxed{{{row['answer']}}}"
        assert row == short | {"response": words}
    swapped = records(one / "swapped.jsonl")
    assert [row["image"] for row in swapped] == ["images/1.png", "images/0.png"]
    assert [row["question"] for row in swapped] == [
        row["question"] for row in parts["heldout"]
    ]
    tok = data.tokenizer(one / "blank")
    for text in (row["response"] for row in told):
        ids = data.ids_of(tok, text)
        assert tok.unk_token_id not in ids
        assert tok.decode(ids).replace(" ", "") == text.replace(" ", "")
    cfg, params = hf.load(one / "blank")
    again, _ = hf.load(same / "blank")
    assert cfg == again and cfg.vocab == len(tok) and params["vision"]

    capsys.readouterr()
    asking = [
        f"--model={one / 'blank'}",
        f"--image={one / parts['heldout'][0]['image']}",
    ]
    with jax.set_mesh(sharding.make_mesh()):
        generate.main([*asking, "--max-new-tokens=8", "--dtype=float32", ASKED[0][0]])
    assert capsys.readouterr().out.strip()


def test_a_sheet_shows_pictures_with_answers(tmp_path, monkeypatch, capsys):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    row = {"question": "what shape is present?", "answer": "circle", "image": "a.png"}
    (tmp_path / "asked.jsonl").write_text(json.dumps(row))
    answered = tmp_path / "answered.jsonl"
    said = {"text": "$\\boxed{ circle }$\u2028or so"}  # no formula of a figure's
    answered.write_text(json.dumps(said, ensure_ascii=False))
    flags = [str(tmp_path / "asked.jsonl"), f"--out={tmp_path / 'sheet.png'}"]
    monkeypatch.setattr(sys, "argv", ["show.py", *flags, f"now={answered}"])
    show.main()
    assert Image.open(tmp_path / "sheet.png").width > 300
    answered.write_text(f"{json.dumps(said)}\n" * 2)
    with pytest.raises(SystemExit):
        show.main()
    assert "2 answers to 1 questions" in capsys.readouterr().err
    answered.write_text("")
    with pytest.raises(SystemExit, match="it is empty"):
        show.main()


def test_pictures_say_what_is_missing(easy_vqa, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install easy-vqa==1\.0"):
        made(monkeypatch)
    with pytest.raises(SystemExit):
        made(monkeypatch, f"--data={tmp_path}")
    assert "no train/questions.json" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        made(monkeypatch, f"--data={easy_vqa}", "--heldout=6")
    assert "between 0 and 6" in capsys.readouterr().err
    for train in (0, -5):
        with pytest.raises(SystemExit):
            made(monkeypatch, f"--data={easy_vqa}", "--heldout=2", f"--train={train}")
        assert "--train must be positive" in capsys.readouterr().err


def test_a_picture_is_described_by_what_is_true_of_it():
    rows = [{"question": question, "answer": answer} for question, answer in ASKED]
    assert pictures.described(rows) == "red circle"
    assert pictures.described(rows[:3]) == ""  # its shape is not known
