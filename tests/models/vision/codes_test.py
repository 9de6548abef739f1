"""Images as tokens: ids, layouts and preparation; the commands that read and draw them."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from PIL import Image

from dllm_jax import config, data, generate, images, pictures, sharding
from dllm_jax.models import hf
from dllm_jax.models.vision import codes, magvit
from dllm_jax.sampling import answers
from dllm_jax.sampling.config import DRAWING, SamplerConfig
from dllm_jax.viewer import traces
from tests.models.vision import drawers
from tests.models.vision.common import picture

ID = {token: i for i, token in enumerate(drawers.SPECIAL + drawers.RESERVED)}
SOI, EOI, T2I, MMU = (ID[f"<|reserved_token_{i}|>"] for i in (0, 1, 4, 5))
BOS, EOS = ID["<|startoftext|>"], ID["<|endoftext|>"]


@pytest.fixture(scope="module", autouse=True)
def no_mesh_left_behind():
    """Puts the mesh back: the command sets its own for the whole process."""
    with jax.set_mesh(sharding.make_mesh()):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny model."""
    return drawers.folder(tmp_path_factory.mktemp("drawer") / "model")


@pytest.fixture(scope="module")
def made(model):
    """The tiny model's Format, and its Codec."""
    tok = data.tokenizer(str(model))
    cfg = hf.read_config(model)
    made = pictures.format_of(config.ModelArgs(path=str(model)), model, cfg, tok)
    return made, codes.Codec(made)


def test_codes_are_of_who_says_so_whatever_its_model_type(tmp_path):
    """MMaDA's released checkpoints say that they are LLaDA."""
    for kind, codes_told, count in (
        ("llada", 32, 32),
        ("mmada", 32, 32),
        ("llada", None, 0),
        ("mmada", None, 8192),
    ):
        told = {"model_type": kind, "codebook_size": codes_told}
        (tmp_path / "config.json").write_text(json.dumps(drawers.CONFIG | told))
        cfg = hf.read_config(tmp_path)
        assert cfg.codebook == count and cfg.looks == bool(count)


def test_a_tokenizer_of_images_needs_a_model_with_codes(model):
    cfg, tok = hf.read_config(model), drawers.tokenizer()
    args = config.ModelArgs(path=str(model), vq=str(model / "vq"))
    assert isinstance(pictures.reader(args, SamplerConfig(), cfg, tok), codes.Reader)
    plain = dataclasses.replace(cfg, codebook=0)
    with pytest.raises(ValueError, match=r"model\.vq=.*has no codebook_size"):
        pictures.reader(args, SamplerConfig(), plain, tok)
    without = dataclasses.replace(args, vq="")
    for name, value in (("image_size", 64), ("image_fit", "crop")):
        with pytest.raises(ValueError, match=rf"model\.{name}=.*has no codebook_size"):
            told = dataclasses.replace(without, **{name: value})
            pictures.reader(told, SamplerConfig(), plain, tok)
    assert pictures.reader(without, SamplerConfig(), plain, tok) is None


@pytest.mark.parametrize(
    ("guidance", "blank"), [(0.0, ()), (1.5, (T2I, BOS, EOS, SOI))]
)
def test_the_empty_caption_is_there_where_guidance_reads_it(
    guidance, blank, model, made
):
    """Else a run would warn of `sampler.blank`, which nobody has set."""
    given = SamplerConfig(block=0, **DRAWING | {"guidance": guidance})
    _, sampler = pictures.drawing(hf.read_config(model), given, made[0])
    assert sampler.blank == blank


def header(role: str) -> str:
    """Returns how a turn begins in MMaDA's own code."""
    return f"<|start_header_id|>{role}<|end_header_id|>\n"


def test_without_a_chat_template_a_conversation_is_as_mmadas_code_writes_it(tmp_path):
    bare = drawers.tokenizer()
    bare.chat_template = None
    told = [{"role": "system", "content": " a\n"}, {"role": "user", "content": "b c"}]
    turns = f"{header('system')}a<|eot_id|>{header('user')}b c<|eot_id|>"
    written = bare.bos_token + turns + header("assistant")
    place = drawers.folder(tmp_path / "model", vq=False, tok=bare)
    tok = data.tokenizer(str(place))
    assert data.render(tok, told) == data.ids_of(tok, written)
    how = {"tokenize": False, "add_generation_prompt": False}
    assert tok.apply_chat_template(told, **how) == bare.bos_token + turns
    tok.bos_token = None  # then nothing begins it
    assert tok.apply_chat_template(told, **how) == turns
    # Its own comes first, and other models have none.
    (place / "chat_template.jinja").write_text("its own")
    assert data.tokenizer(str(place)).chat_template == "its own"
    (place / "chat_template.jinja").unlink()
    for raw, written in (
        (drawers.CONFIG | {"model_type": "mmada", "codebook_size": None}, True),
        (drawers.CONFIG | {"codebook_size": None}, False),
    ):
        (place / "config.json").write_text(json.dumps(raw))
        assert bool(data.tokenizer(str(place)).chat_template) == written


def test_ids_follow_from_the_tokenizers_length(made):
    tokens = made[0].tokens
    assert tokens.drawn == (drawers.LENGTH, drawers.LENGTH + 2**drawers.BITS)
    assert tokens.ids([0, 31]) == [drawers.LENGTH, drawers.LENGTH + 31]
    far = dataclasses.replace(tokens, first=126_349)  # they are the same in all prompts
    assert far.ids([5])[0] is far.ids(np.array([5, 0]))[0] and far.ids([5]) == [126_354]
    assert tokens.codes([drawers.LENGTH + 31]) == [31]
    assert (made[0].size, made[0].factor, made[0].count) == (8, 2, 16)
    for odd in (drawers.LENGTH - 1, drawers.LENGTH + 32):
        with pytest.raises(ValueError, match=f"{odd} is no image's"):
            tokens.codes([drawers.LENGTH, odd])


def test_the_layouts_are_mmadas(made):
    tokens = made[0].tokens
    assert tokens.looking([3], [90, 91]) == [MMU, SOI, drawers.LENGTH + 3, EOI, 90, 91]
    assert tokens.drawing([90, 91]) == [T2I, BOS, 90, 91, EOS, SOI]
    assert tokens.drawing([BOS, 90]) == [T2I, BOS, 90, EOS, SOI]
    assert tokens.drawing([]) == [T2I, BOS, EOS, SOI]


def test_tokens_by_their_own_names_come_first():
    named = [*drawers.RESERVED[:6], "<|soi|>"]
    tokens = codes.tokens_of(drawers.tokenizer(named), 999, 5)
    assert tokens.soi == len(drawers.SPECIAL) + 6
    assert tokens.eoi == EOI


def test_an_image_is_put_on_white_or_cut():
    wide = np.zeros((2, 5, 3), np.uint8)
    wide[:, 2] = 200
    padded = codes.prepared(wide, 5, "pad")
    assert padded.shape == (3, 5, 5) and padded.dtype == np.float32
    want = np.full((5, 5), 1.0)
    want[1:3] = -1  # an odd row more below
    want[1:3, 2] = 200 / 255 * 2 - 1
    np.testing.assert_allclose(padded[0], want, atol=1e-6)
    cut = codes.prepared(wide, 2, "crop")
    assert cut.shape == (3, 2, 2)
    np.testing.assert_allclose(cut[1].max(), 200 / 255 * 2 - 1, atol=1e-6)
    # Pillow's bicubic, as the original resizes.
    rgb = np.random.default_rng(0).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    small = np.asarray(Image.fromarray(rgb).resize((4, 4), Image.Resampling.BICUBIC))
    np.testing.assert_allclose(
        codes.prepared(rgb, 4, "pad"),
        (small.transpose(2, 0, 1).astype(np.float32) / 255 - 0.5) / 0.5,
        atol=1e-6,
    )


@pytest.mark.parametrize("fit", codes.FITS)
@pytest.mark.parametrize("size", [(65_536, 1), (1, 20_000), (20_000, 40)])
def test_a_line_of_pixels_takes_bounded_memory(fit, size, monkeypatch):
    made = []
    new = Image.new

    def counted(mode, size, *colour):
        made.append(size[0] * size[1])
        return new(mode, size, *colour)

    monkeypatch.setattr(Image, "new", counted)
    rgb = np.full((*size[::-1], 3), 40, np.uint8)
    square = codes.prepared(rgb, 16, fit)
    assert max(made, default=0) <= images.PIXELS
    assert square.shape == (3, 16, 16)
    corner = 1 if fit == "pad" else 40 / 255 * 2 - 1  # white, or the line itself
    np.testing.assert_allclose(square[:, 0, 0], corner, atol=1e-5)


def test_pixels_are_shown_as_the_original_does():
    pixels = np.array([-2.0, -1, 0, 0.5, 1, 3]).reshape(1, 1, 1, 6).repeat(3, 1)
    assert codes.shown(pixels)[0, 0, :, 0].tolist() == [0, 0, 127, 191, 255, 255]


def test_questions_about_an_image(model, made, tmp_path, capsys):
    file = picture(tmp_path / "a.png", (7, 5))
    generate.main(
        [f"--model={model}", f"--image={file}", "--dtype=float32", "--max-new-tokens=4"]
        + ["--block=4", "What is this?"]
    )
    assert "4 tokens" in capsys.readouterr().err
    # The prompt is what the layout says, for a line of a file too.
    lines = [{"question": "ab", "image": "a.png"}, {"question": "ab"}]
    ids = made[1].ids(np.asarray(Image.open(file)))
    lines.append({"question": "ab", "image_token_ids": ids})
    lines.append({"question": "a<image>b", "image": "lost.png"})
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    generate.main(
        [f"--model={model}", f"--prompts={tmp_path / 'in.jsonl'}", "--dtype=float32"]
        + ["--max-new-tokens=4", "--block=4", f"--out={tmp_path / 'out.jsonl'}"]
        + ["--temperature=0"]
    )
    rows = [json.loads(x) for x in (tmp_path / "out.jsonl").read_text().splitlines()]
    chat = data.render(drawers.tokenizer(), [{"role": "user", "content": "ab"}])
    assert rows[0]["prompt_ids"] == [MMU, SOI, *ids, EOI, *chat]
    assert rows[1]["prompt_ids"] == chat
    assert rows[2]["prompt_ids"] == rows[0]["prompt_ids"]
    assert rows[3]["response_ids"] == []  # its image is missing
    assert rows[0]["response_ids"] == rows[2]["response_ids"]
    assert rows[0]["response_ids"] != rows[1]["response_ids"]
    assert len(ids) == 16
    assert min(ids) >= drawers.LENGTH
    # A record answers its prompt, so that an evaluation that was cut goes on.
    reader = codes.Reader(lambda: made[1])
    shown = reader.of_files([file], None)
    assert reader.read(file, None)[1] is reader.read(str(file), None)[1]  # encoded once
    asked = data.render(drawers.tokenizer(), [{"role": "user", "content": "ab"}], shown)
    assert answers.answers_prompt(rows[0], asked)
    assert not answers.answers_prompt(rows[2], asked)  # nobody knows of its file
    # Its file is told, so that a page can show it; where ids were given nobody knows of one.
    mark = images.mark(images.read(file))
    assert rows[0]["images"] == [{"file": str(file.resolve()), "mark": mark}]
    assert not {"images"} & {*rows[1], *rows[2]}
    read = traces.read(str(tmp_path / "out.jsonl"))
    packed = traces.packed(read, drawers.tokenizer())
    assert packed["rows"][0]["i"] == [0] and "ab" in packed["rows"][0]["q"]
    assert len(packed["rows"][0]["q"]) == len(packed["rows"][1]["q"])


def test_a_raw_template_and_bad_codes(made, tmp_path):
    tok, reader = (
        data.tokenizer(str(made[0].folder.parent)),
        codes.Reader(lambda: made[1]),
    )
    raw = data.DataConfig(template="Q: {question}", raw=True)
    ids = made[1].ids(np.asarray(Image.open(picture(tmp_path / "a.png"))))
    shown = reader.shown({"image_token_ids": ids}, "image", tmp_path)
    prompt = data.ask(tok, raw, "<image>\nab", shown=shown)
    assert prompt == [MMU, SOI, *ids, EOI, *data.ids_of(tok, "Q: ab")]
    caption = codes.Captions(None, made[0].tokens).shown({}, "image", tmp_path)
    drawn = data.ask(tok, raw, "ab", shown=caption)
    assert drawn == [T2I, BOS, *data.ids_of(tok, "Q: ab"), EOS, SOI]
    with pytest.raises(ValueError, match="has 3 codes, and an image of the model's 16"):
        reader.shown({"image_token_ids": ids[:3]}, "image", tmp_path)
    with pytest.raises(
        ValueError, match="<image> in its text, and no image in 'image'"
    ):
        reader.shown({"question": "<image> ab"}, "image", tmp_path)


MARKED = [{"role": "user", "content": "<image>\nab"}]


@pytest.mark.parametrize(
    "row",
    [
        {"question": "<image> ab", "response": "c"},
        {"messages": [*MARKED, {"role": "assistant", "content": "c"}]},
        {"messages": [{"role": "user", "content": [{"text": "<image>"}]}]},
        {"prompt": MARKED, "chosen": "c", "rejected": "d"},
    ],
)
def test_a_mark_without_an_image_is_refused_wherever_it_asks(row):
    with pytest.raises(
        ValueError, match="<image> in its text, and no image in 'image'"
    ):
        codes.Reader(lambda: None).shown(row, "image", ".")


@pytest.mark.parametrize(
    "row",
    [
        {"question": "ab", "response": "an <image> of RSS"},
        {"messages": [{"role": "assistant", "content": "<image>"}]},
    ],
)
def test_a_mark_in_an_answer_is_a_text(row):
    assert codes.Reader(lambda: None).shown(row, "image", ".") is None


def test_answers_about_images_are_learned_with_their_traces(made, tmp_path):
    tok = drawers.tokenizer()
    shown = codes.Reader(lambda: made[1]).of_files([picture(tmp_path / "a.png")], None)
    prompt = data.render(tok, MARKED, shown)
    line = {"prompt_ids": list(prompt), "response_ids": [40, 41], "step_map": [2, 1]}
    line |= answers.images_of(prompt) | {"question": "<image>\nab"}
    (tmp_path / "traces.jsonl").write_text(json.dumps(line))
    found, dropped = data.examples(
        str(tmp_path / "traces.jsonl"),
        tok,
        data.DataConfig(),
        end=3,
        pad=0,
        vocab=hf.read_config(made[0].folder.parent).vocab,
        block=8,
        slots=200,
        traced=True,
        reader=codes.Reader(lambda: made[1]),
    )
    assert [*found[0].prompt, *found[0].answer][: len(prompt) + 2] == [*prompt, 40, 41]
    assert dropped == 0
    # Its question asked anew lacks the image, which is not passed over.
    shown = codes.Reader(lambda: made[1]).shown(line, "image", tmp_path)
    with pytest.raises(ValueError, match="1 times <image> for 0 image"):
        data.ask(tok, data.DataConfig(), line["question"], shown=shown)


def test_a_caption_is_drawn(model, made, tmp_path, capsys):
    out = tmp_path / "drawn.png"
    command = [
        f"--model={model}",
        "--dtype=float32",
        "--config.sampler.steps_per_block=5",
    ]
    generate.main([*command, f"--image-out={out}", "a red circle"])
    assert "16 codes, 5 steps" in capsys.readouterr().err
    image = Image.open(out)
    assert (image.format, image.size, image.mode) == ("PNG", (8, 8), "RGB")
    first = np.asarray(image)
    # It is that of the ids that a file of captions gets, and follows from the seed.
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "a red circle"}))
    flags = [
        f"--config.sampler.{k}={v}" for k, v in DRAWING.items() if "steps" not in k
    ]
    generate.main(
        [*command, *flags, f"--prompts={tmp_path / 'in.jsonl'}"]
        + [f"--out={tmp_path / 'out.jsonl'}"]
    )
    row = json.loads((tmp_path / "out.jsonl").read_text())
    caption = drawers.tokenizer()("a red circle", add_special_tokens=False)["input_ids"]
    assert row["prompt_ids"] == [T2I, BOS, *caption, EOS, SOI]
    assert max(row["step_map"]) == 5
    assert row["text"] is None
    np.testing.assert_array_equal(made[1].pictures([row["response_ids"]])[0], first)
    assert row["picture"] == images.embedded(first)
    generate.main([*command, f"--image-out={out}", "--seed=4", "a red circle"])
    assert (np.asarray(Image.open(out)) != first).any()


def test_an_images_codes_survive_a_way_there_and_back(made):
    codec = made[1]
    rgb = np.random.default_rng(1).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    ids = codec.ids(rgb)
    picture = codec.pictures([ids])[0]
    decoded = magvit.decode(codec.params, np.array([codec.format.tokens.codes(ids)]))
    np.testing.assert_array_equal(picture, codes.shown(np.asarray(decoded))[0])


def refused(words: str, *argv):
    """Asserts that the command refuses in one line."""
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        generate.main([*argv])
    assert words in str(error.value)


def test_what_its_tokenizer_takes_of_a_device_is_told_from_shapes(made):
    """Weights on every device of the process, which share the images that are decoded."""
    format, codec = made
    size = sum(x.nbytes for x in jax.tree.leaves(codec.params))
    assert {len(x.devices()) for x in jax.tree.leaves(codec.params)} == {8}
    claims = {draws: format.claim(draws=draws) for draws in (False, True)}
    image = 4 * 3 * format.size**2  # bytes of its pixels, as they come back
    for claim in claims.values():
        assert claim.always == {"tokenizer of images": size}
        assert image <= claim.working["tokenizer of images"] < 2**22


def test_what_is_refused(model, tmp_path):
    name = f"--model={model}"
    bare = drawers.folder(tmp_path / "bare", vq=False)
    png = f"--image-out={tmp_path / 'x.png'}"
    file = picture(tmp_path / "a.png")
    needs = "needs the tokenizer of its images"
    refused(needs, f"--model={bare}", png, "a")
    refused(needs, f"--model={bare}", f"--image={file}", "a")
    refused("is no MAGVITv2", f"--model={bare}", png, f"--vq={bare}", "a")
    refused("model.image_size=7", name, png, "--image-size=7", "a")
    refused("guidance=-1", name, png, "--guidance=-1", "a")
    refused("unmasking='fast'", name, png, "--config.sampler.unmasking=fast", "a")
    refused("ends in .png", name, f"--image-out={tmp_path / 'x.jpg'}", "a")
    refused("No such file", name, f"--image-out={tmp_path / 'no' / 'x.png'}", "a")
    refused("and no --image", name, png, f"--image={file}", "a")
    refused("needs --image-out", name, "--config.sampler.answers=image", "a")
    refused("it has 2 images", name, f"--image={file}", f"--image={file}", "a")
    refused("2 times <image> for 1", name, f"--image={file}", "<image> <image>")
    refused("1 times <image> for 0", name, "<image> What?")
    refused("lost.png", name, "--image=lost.png", "a")
    refused("full attention", name, png, "--cache=prefix", "a")
    other = drawers.folder(tmp_path / "other", codebook_size=64)
    refused("has 32 codes, and", f"--model={other}", png, "a")
    small = drawers.folder(tmp_path / "small", embedding_size=drawers.LENGTH + 31)
    refused("go beyond the vocabulary", f"--model={small}", png, "a")
    tok = drawers.tokenizer([f"<|reserved_token_{i}|>" for i in range(4)])
    lacking = drawers.folder(tmp_path / "lacking", tok=tok)
    refused(
        "has neither <|t2i|> nor <|reserved_token_4|>", f"--model={lacking}", png, "a"
    )
    assert not (tmp_path / "x.png").exists()


def test_a_config_that_draws_without_a_blank_prompt_is_completed(model):
    tree = config.default()
    tree.model.path = str(model)
    tree.sampler.update(DRAWING)
    cfg, becomes, _ = config.completed(config.freeze(tree))
    assert cfg.sampler.block == cfg.sampler.max_new == becomes.block == 16
    assert cfg.sampler.steps == 16  # of 18: an image has no more codes
    assert cfg.sampler.blank == (T2I, BOS, EOS, SOI)
    assert cfg.sampler.tail == (EOI,)
    assert becomes.drawn == (drawers.LENGTH, drawers.LENGTH + 32)
    with pytest.raises(ValueError, match=r"sampler\.blank"):
        SamplerConfig(guidance=1.0)
