"""Pictures that an example reads as codes: its trained tokenizer, and its blank model."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from configs import tracerl
from dllm_jax import config, data
from dllm_jax.models import hf
from dllm_jax.models.vision import magvit
from examples.pictures import codes, probe, tokenizer

ROWS = [
    {"question": "is there not a gray shape in the image?", "answer": "no"},
    {"question": "is there not a gray shape in the image?", "answer": "yes"},
    {"question": "is there not a gray shape in the image?", "answer": "yes"},
    {"question": "what is the color of the rectangle?", "answer": "red"},
]


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with four pictures of one colour each, for a tokenizer of 4 x 4 pixels, 3 bits."""
    tower = tokenizer.TOWER | {"ch_mult": [1], "num_res_blocks": [1]}
    tower |= {"z_channels": 3, "resolution": 4}
    made = tokenizer.CONFIG | {"encoder": tower, "decoder": tower}
    monkeypatch.setattr(tokenizer, "CONFIG", made)
    monkeypatch.setattr(tokenizer, "SIDE", 4)
    monkeypatch.setattr(tokenizer, "BITS", 3)
    monkeypatch.setitem(codes.CONFIG, "codebook_size", 2**3)
    (tmp_path / "images").mkdir()
    rows = [
        row | {"response": row["answer"], "image": f"images/{i}.png"}
        for i, row in enumerate(ROWS)
    ]
    for i, row in enumerate(rows):
        rgb = np.full((8, 8, 3), [60 * i, 200 - 60 * i, 100], np.uint8)
        Image.fromarray(rgb).save(tmp_path / row["image"])
    for name in ("train", "heldout", "told"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    return tmp_path


def entropy_of(p):
    """Returns the entropy of a distribution, nats."""
    return -sum(x * np.log(x) for x in p)


def test_a_channel_is_quantised_with_a_gradient_and_two_terms():
    z_Bhwr = np.array([[[[0.3, -1.2]], [[-0.4, 0.1]]]], np.float32)
    signs_Bhwr, commitment, term = tokenizer.quantised(z_Bhwr)
    np.testing.assert_allclose(signs_Bhwr, np.sign(z_Bhwr), rtol=1e-6)
    assert np.isclose(commitment, np.mean((0.7**2, 0.2**2, 0.6**2, 0.9**2)))

    entries = [np.array([a, b]) for a in (-1, 1) for b in (-1, 1)]
    cells = []
    for z in z_Bhwr.reshape(-1, 2):
        odds = [np.exp(-np.square(z - entry).sum()) for entry in entries]
        cells.append(np.array(odds) / sum(odds))
    wanted = np.mean([entropy_of(p) for p in cells]) - entropy_of(np.mean(cells, 0))
    assert np.isclose(term, wanted, atol=1e-5)

    def told(z_Bhwr):
        return (jnp.array([[[[3.0, 5.0]]]]) * tokenizer.quantised(z_Bhwr)[0]).sum()

    got = jax.grad(told)(jnp.asarray(z_Bhwr))
    np.testing.assert_array_equal(got, np.broadcast_to([3.0, 5.0], got.shape))


def test_a_tokenizer_is_trained_and_lies_in_a_model_that_reads_its_codes(
    tiny, monkeypatch, capsys
):
    argv = ["codes.py", f"--out={tiny}", "--steps=30", "--batch=4"]
    monkeypatch.setattr(sys, "argv", argv)
    codes.main()
    said = capsys.readouterr().out
    assert "4 held-out pictures" in said and "75.0%" in said
    assert Image.open(tiny / "codes" / "rebuilt.png").size == (4 * 4, 2 * 4)

    blank = tiny / "codes" / "blank"
    cfg, params = hf.load(blank / "vq")
    assert (cfg.bits, cfg.factor, cfg.told_size) == (3, 1, 4)
    pixels = tokenizer.pictures(tiny, codes.records(tiny / "train.jsonl"))
    learned = tokenizer.objective(params, pixels)[1][0]
    tokenizer.blank(tiny / "new", np.random.default_rng(0))
    assert learned < tokenizer.objective(hf.load(tiny / "new")[1], pixels)[1][0] / 2
    found, made = tokenizer.rebuilt(params, pixels)
    np.testing.assert_array_equal(found, magvit.encode(params, pixels))
    assert made.shape == pixels.shape and np.abs(made).max() <= 1

    told = codes.records(tiny / "codes" / "train.jsonl")
    assert [row["question"] for row in told] == [row["question"] for row in ROWS]

    tok = data.tokenizer(blank)
    model, _ = hf.load(blank)
    assert model.codebook == 8 and model.vocab >= len(tok) + 8
    assert all(token in tok.get_vocab() for token in codes.IMAGE)


def test_pictures_become_ids_of_their_codes_half_of_them_mirrored(tiny, monkeypatch):
    """Codes here say which columns are bright: those of the third picture's left half."""
    rows = codes.records(tiny / "told.jsonl") * 20
    rgb = np.zeros((8, 8, 3), np.uint8)
    rgb[:, :4] = 255
    Image.fromarray(rgb).save(tiny / rows[2]["image"])
    monkeypatch.setattr(tokenizer, "encoded", lambda _, x: (x[:, 0, 0] > 0).astype(int))
    made = codes.encoded(rows, tiny, None, 1)
    assert made == codes.encoded(rows, tiny, None, 1)
    first = len(codes.text_tokenizer())
    sides = [tuple(np.array(row["image_token_ids"]) - first) for row in made[2::4]]
    assert set(sides) == {(1, 1, 0, 0), (0, 0, 1, 1)}
    others = {tuple(row["image_token_ids"]) for row in made[3::4]}
    assert len(others) == 1  # of one colour, so that its mirror image is the same
    for row, one in zip(rows, made, strict=True):
        assert one["response"] == row["response"] and "image" not in one


def test_a_question_and_its_codes_are_within_the_presets_bound():
    tok, c = codes.text_tokenizer(), config.preset(tracerl.PRESETS, "codes")
    longest = max(
        len(data.render(tok, [{"role": "user", "content": row["question"]}]))
        for row in ROWS
    )
    around = 3  # of an image
    image = (tokenizer.SIDE // 4) ** 2 + around
    assert image + longest <= c.sampler.max_prompt


def test_a_probe_of_counts_does_not_know_how_codes_lie_and_one_of_the_grid_does():
    rng = np.random.default_rng(0)
    codes_nN, class_n = np.zeros((256, 16), int), rng.integers(2, size=256)
    for row, side in zip(codes_nN, class_n, strict=True):
        place = rng.integers(4) * 4 + rng.integers(3)
        row[place : place + 2] = (255, 15) if side else (15, 255)
    right = {}
    for score, params in probe.weights(2, rng).items():
        params = probe.fitted(score, params, codes_nN, class_n, 60, rng)
        said_n = np.asarray(score(params, codes_nN)).argmax(axis=1)
        right[score.__name__] = (said_n == class_n).mean()
    assert right["counted"] == max(class_n.mean(), 1 - class_n.mean())
    assert right["convolved"] > 0.95


def test_a_guess_without_a_picture_is_the_commonest_answer_of_its_question():
    others = [{"question": "never asked", "answer": "yes"}]
    assert codes.blind(ROWS, ROWS) == 3 / 4
    assert codes.blind(ROWS, ROWS[:1] + others) == 0


def test_pictures_that_are_not_made_yet_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["codes.py", f"--out={tmp_path}"])
    with pytest.raises(SystemExit, match=r"make\.py writes it"):
        codes.main()


def test_a_probe_learns_something(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["probe.py", "--steps=0"])
    with pytest.raises(SystemExit):
        probe.main()
    assert "--steps must be positive" in capsys.readouterr().err
