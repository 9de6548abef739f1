"""Prompts with images, the tables that they are put into, and answers to them."""

import dataclasses
import functools
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import config, data, generate, processes, sharding
from dllm_jax.models import hf
from dllm_jax.models.vision import look, prompts, soft
from dllm_jax.rl import learner, views
from dllm_jax.rl.config import ObjectiveConfig, OptimConfig
from dllm_jax.sampling import answers, looking, pages
from dllm_jax.sampling.config import SamplerConfig
from tests.models.vision import common
from tests.sampling import loop

SIZES = [(20, 16), (9, 30), (12, 12), (40, 9)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and pictures 0.png, 1.png ..."""
    folder = tmp_path_factory.mktemp("place")
    common.folder(folder / "model")
    for i, size in enumerate(SIZES):
        common.picture(folder / f"{i}.png", size, seed=i)
    return folder


@pytest.fixture(scope="module")
def loaded(place):
    """(ModelConfig, params, tokenizer), in f32, for tables of 12 tiles."""
    cfg, params = hf.load(place / "model")
    cfg = dataclasses.replace(cfg, tiles=12, block=8)
    return cfg, params, data.tokenizer(place / "model")


def one_device():
    """Returns the mesh of the device that holds the parameters."""
    return sharding.make_mesh(devices=jax.devices()[:1])


def asked(loaded, place, text, *names, keep_newline=True):
    """Returns the Prompt of a question about these pictures."""
    cfg, _, tok = loaded
    reader = prompts.Reader(cfg, keep_newline=keep_newline)
    shown = reader.of_files(list(names), place)
    return data.render(tok, [{"role": "user", "content": text}], shown)


def test_a_mark_becomes_the_rows_of_its_image(loaded, place):
    cfg, _, tok = loaded
    first = asked(loaded, place, "What?", "0.png")
    assert first == asked(loaded, place, "<image>\nWhat?", "0.png")
    (picture,) = first.pictures
    assert picture.rows == len(soft.arrangement(SIZES[0], cfg.vision))
    rows = [i for i in first if i >= cfg.vocab]
    assert rows == list(range(cfg.vocab, cfg.vocab + picture.rows))
    at = first.index(rows[0])
    said = tok.decode(first[:at]) + "<image>" + tok.decode(first[at + len(rows) :])
    assert said == (
        f"<|startoftext|><|start_header_id|>system<|end_header_id|>\n\n{prompts.SYSTEM}"
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n<image>\nWhat?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    # As LLaDA-V samples: what begins a piece behind an image is lost.
    dropped = asked(loaded, place, "What?", "0.png", keep_newline=False)
    assert dropped == first[: at + len(rows)] + first[at + len(rows) + 1 :]
    two = asked(loaded, place, "Is <image> like <image>?", "0.png", "1.png")
    counts = [picture.rows for picture in two.pictures]
    rows = [i for i in two if i >= cfg.vocab]
    assert rows == list(range(cfg.vocab, cfg.vocab + sum(counts)))
    plain = asked(loaded, place, "No picture?")
    assert max(plain) < cfg.vocab and tok.decode(plain).count(prompts.SYSTEM) == 1


def test_prompts_share_the_ids_of_rows(loaded):
    """A number takes four times as much as its place in a list, and there are many prompts."""
    reader = prompts.Reader(dataclasses.replace(loaded[0], vocab=126_464))
    one, two = reader.ids(0, 3), reader.ids(2, 700)
    assert one == [126_464, 126_465, 126_466] and two == [*range(126_466, 127_166)]
    assert one[2] is two[0] and reader.ids(700, 2)[1] is two[-1]


@pytest.mark.parametrize(
    "template", ["USER {question} BOT", "USER <image>\n{question} BOT"]
)
def test_a_raw_template_shows_images_where_its_text_does(loaded, place, template):
    cfg, _, tok = loaded
    raw = data.DataConfig(template=template, raw=True)
    shown = prompts.Reader(cfg).of_files(["0.png"], place)
    prompt = data.ask(tok, raw, "What?", shown=shown)
    rows = [i for i in prompt if i >= cfg.vocab]
    assert rows == list(range(cfg.vocab, cfg.vocab + shown.pictures[0].rows))
    at = prompt.index(rows[0])
    assert tok.decode(prompt[:at]) == "USER "
    assert tok.decode(prompt[at + len(rows) :]) == "\nWhat? BOT"
    with pytest.raises(ValueError, match="[23] times <image> for 1"):
        data.ask(tok, raw, "<image><image>", shown=shown)


@pytest.mark.parametrize(
    "text, names, message",
    [
        ("<image> <image>?", ["0.png"], "2 times <image> for 1 image"),
        ("<image>?", [], "1 times <image> for 0 image"),
        ("<image>?", ["0.png", "1.png"], "1 times <image> for 2 image"),
        ("What?", ["4.png"], "'4.png': No such file"),
        ("What?", ["../4.png"], "outside of the image root"),
        ("What?", [7], "must be a file's path"),
        ("What?", ["0.png", "1.png", "2.png", "3.png"], "more than model.tiles=12"),
    ],
)
def test_prompts_that_cannot_be_made(loaded, place, text, names, message):
    with pytest.raises(ValueError, match=message) as caught:
        asked(loaded, place, text, *names)
    assert "\n" not in str(caught.value)


def test_records_without_their_image_are_left_out_and_named(loaded, place, capsys):
    cfg, _, tok = loaded
    (place / "half.png").write_bytes((place / "0.png").read_bytes()[:200])
    rows = [
        {"question": "Which?", "response": "A", "image": "0.png"},
        {"question": "Which?", "response": "A", "image": "half.png"},
        {"question": "Which?", "response": "A", "image_path": "gone.png"},
        {"prompt": "<image>\nWhich?", "response": "A", "image": ["1.png"]},
        {"question": "And now?", "response": "B"},
    ]
    file = place / "rows.jsonl"

    def examples(rows):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return data.examples(
            str(file),
            tok,
            data.DataConfig(),
            end=3,
            pad=0,
            vocab=cfg.vocab,
            block=8,
            slots=400,
            reader=prompts.Reader(cfg),
        )

    found, dropped = examples(rows)
    assert [len(x.pictures) for x in found] == [1, 1, 0] and dropped == 0
    told = capsys.readouterr().err
    assert "2 of 5 records are skipped" in told
    assert "record 2: image 'half.png' cannot" in told
    assert "record 3: image 'gone.png': No such file" in told
    assert "no record has an image" not in told
    examples([{"question": "Which?", "response": "A", "picture": "0.png"}])
    assert "no record has an image in data.image='image'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="2 of 2 records are skipped"):
        examples(rows[1:3])
    with pytest.raises(ValueError, match="record 1: it has 2 times <image> for 1"):
        examples([rows[0] | {"question": "<image><image>"}])


def test_processes_must_see_the_same_images(place, loaded, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(processes, "agree", told.append)
    rows = [{"image": "0.png"}, {"image": "1.png"}, {}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    there = [tmp_path / name for name in ("whole", "lacking", "other")]
    for root, second in zip(there, ("1.png", None, "2.png"), strict=True):
        root.mkdir()
        shutil.copy(place / "0.png", root)
        if second:
            shutil.copy(place / second, root / "1.png")
    for root in (place, *there):
        wanted = data.DataConfig(image_root=str(root))
        list(data.Looker(prompts.Reader(loaded[0]), str(file), wanted).rows())
    first, *alike = told
    assert [facts == first for facts in alike] == [True, False, False]
    assert "2" in alike[1].values()  # the record that this process lacks


def test_generate_names_what_it_cannot_show(loaded, place, capsys):
    cfg, _, tok = loaded
    flags = [f"--model={place / 'model'}", f"--image={place / '0.png'}"]
    with pytest.raises(ValueError, match="is no model that looks at images"):
        generate.main([*flags, "--config.model.tiles=0", "What?"])
    with pytest.raises(ValueError, match="--image=FILE goes with one prompt"):
        generate.main([*flags, "--prompts=rows.jsonl"])
    with pytest.raises(ValueError, match=r"none\.png': No such file"):
        generate.main([flags[0], f"--image={place / 'none.png'}", "What?"])
    file = place / "asked.jsonl"
    rows = [{"question": "A?", "image": name} for name in ("0.png", "none.png")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown, lines = generate.read(str(file), tok, cfg.vocab, prompts.Reader(cfg))
    assert lines == rows and shown[1] == []  # it has a line, which says: skipped
    assert shown[0] == asked(loaded, place, "A?", "0.png")
    assert "record 2: image 'none.png'" in capsys.readouterr().err


def test_prompts_name_images_where_they_are_told_to(
    loaded, place, tmp_path, monkeypatch
):
    cfg, _, tok = loaded
    wanted = asked(loaded, place, "A?", "0.png")
    file, row = tmp_path / "asked.jsonl", {"question": "A?", "shot": "0.png"}
    file.write_text(json.dumps(row))
    told = data.DataConfig(image="shot", image_root=str(place))
    found, _ = generate.read(str(file), tok, cfg.vocab, prompts.Reader(cfg), told)
    assert found == [wanted]
    flags = [f"--config.data.{key}" for key in ("image=shot", f"image_root={place}")]
    _, options = generate.parsed([f"--prompts={file}", *flags])
    assert generate.settings(options.config).data == told
    monkeypatch.chdir(place)  # a pipe is in no folder of images
    ends = os.pipe()
    os.write(ends[1], json.dumps({"question": "A?", "image": "0.png"}).encode())
    os.close(ends[1])
    pipe = f"/dev/fd/{ends[0]}"
    assert generate.read(pipe, tok, cfg.vocab, prompts.Reader(cfg))[0] == [wanted]
    os.close(ends[0])


def test_ids_of_a_prompt_do_not_hide_its_image(loaded, place):
    cfg, _, tok = loaded
    (file := place / "asked.jsonl").write_text(
        json.dumps({"prompt_ids": [5, 6], "image": ["0.png", "1.png"]})
    )
    with pytest.raises(ValueError, match=r"prompt_ids and 2 image\(s\)"):
        generate.read(str(file), tok, cfg.vocab, prompts.Reader(cfg))


def test_an_image_is_seen_once(loaded, place, tmp_path):
    cfg, params, _ = loaded
    eyes = look.Eyes(params["vision"], cfg, one_device())
    some = [asked(loaded, place, "A?", "0.png"), asked(loaded, place, "B?", "1.png")]
    table = eyes.look(some * 4)
    passes = eyes.passes
    assert passes == 1
    (tmp_path / "same.png").write_bytes((place / "0.png").read_bytes())
    again = asked(loaded, tmp_path, "C?", "same.png")
    other = eyes.look([again, some[1]])
    assert other is table and eyes.look([some[1]]) is not table
    assert eyes.passes == passes
    rows = [i - cfg.vocab for i in table.placed(some[1], cfg.vocab) if i >= cfg.vocab]
    first = some[0].pictures[0].rows
    assert rows == list(range(first, first + some[1].pictures[0].rows))
    common.picture(tmp_path / "same.png", SIZES[0], seed=9)
    eyes.features_of.clear()
    with pytest.raises(ValueError, match=r"same\.png' has changed"):
        eyes.look([again])
    assert eyes.chunks([*some, asked(loaded, place, "D?", "3.png", "2.png")]) == [
        [0, 1],
        [2],
    ]


def test_a_record_answers_a_prompt_with_its_images_as_they_are(loaded, place):
    prompt = asked(loaded, place, "A?", "0.png")
    line = {"prompt_ids": list(prompt)} | answers.images_of(prompt)
    assert answers.answers_prompt(line, prompt)
    (picture,) = prompt.pictures
    repainted = dataclasses.replace(picture, mark="other")
    assert not answers.answers_prompt(line, prompts.Prompt(prompt, (repainted,)))
    assert not answers.answers_prompt(line, prompt[:-1])
    assert answers.answers_prompt({"prompt_ids": [1]}, [1])


def test_answers_about_images_are_learned_with_their_traces(loaded, place, tmp_path):
    cfg, _, tok = loaded
    prompt = asked(loaded, place, "Is <image> like <image>?", "1.png", "0.png")
    line = {"prompt_ids": list(prompt), "response_ids": [5, 6], "step_map": [2, 1]}
    line |= answers.images_of(prompt)
    file = tmp_path / "traces.jsonl"

    def examples(*lines):
        file.write_text("".join(json.dumps(x) + "\n" for x in lines))
        return data.examples(
            str(file),
            tok,
            data.DataConfig(image_root=str(place)),
            end=3,
            pad=0,
            vocab=cfg.vocab,
            block=8,
            slots=400,
            traced=True,
            reader=prompts.Reader(cfg),
        )[0]

    (found,) = examples(line)
    assert found.pictures == prompt.pictures
    assert found.prompt.tolist() == prompt
    assert found.step[:2].tolist() == [2, 1]
    other = [line["images"][0] | {"mark": "another's"}, line["images"][1]]
    with pytest.raises(ValueError, match="1.png' has changed since it was looked at"):
        examples(line | {"images": other})
    with pytest.raises(ValueError, match="do not have the .* rows of its images"):
        examples(line | {"images": line["images"][:1]})
    with pytest.raises(ValueError, match="a list of objects with a file and a mark"):
        examples(line | {"images": ["1.png"]})


def test_pages_bear_the_images_names():
    ids = list(range(100, 116))
    plain = pages.page_names(ids, 8)
    one, two = (pages.page_names(ids, 8, (mark,)) for mark in ("a", "b"))
    assert len({*plain, *one, *two}) == 6
    assert one == pages.page_names(ids, 8, ("a",))


def answered(loaded, asked_for, tiles, **how):
    """Returns the answers to these prompts, with tables of so many tiles; how: of `stream`."""
    cfg, params, _ = loaded
    cfg = dataclasses.replace(cfg, tiles=tiles)
    mesh = one_device()
    sampler = SamplerConfig(
        block=8,
        rows=4,
        max_prompt=max(map(len, asked_for)),
        max_new=16,
        threshold=0.3,
    )
    inner = answers.Batches(model=cfg, cfg=sampler, mesh=mesh)
    eyes = look.Eyes(params["vision"], cfg, mesh)
    outer = looking.Looking(inner, eyes)
    shown = params | {looking.LOOK: looking.parts(params)}
    key = jax.random.key(0)
    stream = outer.stream(shown, asked_for, key, temperature=1.0, **how)
    found = dict(stream)
    return [answers.record(found[i], asked_for[i]) for i in range(len(asked_for))], eyes


def test_tables_of_any_size_give_the_same_answers(loaded, place):
    some = [
        asked(loaded, place, "A?", "0.png"),
        asked(loaded, place, "B?"),
        asked(loaded, place, "A?", "1.png"),
        asked(loaded, place, "A?", "0.png"),
        asked(loaded, place, "A?", "3.png"),
    ]
    whole, _ = answered(loaded, some, 13)
    parts, eyes = answered(loaded, some, 10)
    assert len(eyes.chunks(some)) > 1
    for one, two in zip(whole, parts, strict=True):
        assert one["response_ids"] == two["response_ids"]
        assert one["step_map"] == two["step_map"]
        assert one.get("images") == two.get("images")
    assert (
        len({tuple(x["response_ids"]) for x in whole}) == 5
    )  # the images are looked at


def test_an_answer_has_its_own_length_whatever_its_table(loaded, place):
    some = [asked(loaded, place, "A?", f"{i}.png") for i in (0, 1, 3)]
    new = [1, 5, 16]
    found, eyes = answered(loaded, some, 10, new=new)
    assert len(eyes.chunks(some)) > 1
    for line, most in zip(found, new, strict=True):
        assert 0 < len(line["response_ids"]) <= most
        ended = line["finished"] == "stop" or len(line["response_ids"]) == most
        assert ended


STALE = {"prefix": {"horizon": 8}, "dual": {}, "none": {}}


@pytest.mark.parametrize("cache", STALE)
def test_caches_with_images_are_a_loop_over_whole_canvases(loaded, place, cache):
    cfg, params, _ = loaded
    some = [
        asked(loaded, place, "A?", "0.png"),
        asked(loaded, place, "No picture?"),
        asked(loaded, place, "A, B?", "1.png", "2.png"),
    ]
    sampler = SamplerConfig(
        block=8,
        rows=4,
        max_prompt=max(map(len, some)),
        max_new=12,
        cache=cache,
        threshold=0.3,
        **STALE[cache],
    )
    inner = answers.Batches(model=cfg, cfg=sampler, mesh=one_device())
    outer = looking.Looking(inner, look.Eyes(params["vision"], cfg, inner.mesh))
    made_of, key = looking.parts(params), jax.random.key(3)
    shown = params | {looking.LOOK: made_of}
    found = dict(outer.stream(shown, some, key, temperature=1.0))
    table = outer.eyes.look(some)
    shown = params | {"soft": look.rows(made_of, table.seen, cfg=cfg)}
    for i, prompt in enumerate(some):
        tokens_T, step_T, logp_T, length, count = loop.define(
            shown,
            table.placed(prompt, cfg.vocab),
            len(prompt) + sampler.max_new,
            1.0,
            jax.random.fold_in(key, i),
            model=cfg,
            cfg=sampler,
        )
        answer = found[i]
        assert (answer.len, answer.forwards) == (length, count)
        span = slice(len(prompt), len(prompt) + length)
        np.testing.assert_array_equal(answer.tokens_T[span], tokens_T[span])
        np.testing.assert_array_equal(answer.step_T[span], step_T[span])
        np.testing.assert_allclose(answer.logp_T[span], logp_T[span], atol=1e-4)


def test_a_gradient_reaches_projector_newline_and_tower(loaded, place):
    cfg, params, _ = loaded
    mesh = one_device()
    asked_for = [asked(loaded, place, "A?", "0.png", "1.png")]
    frozen, trained = (
        look.Eyes(tower, cfg, mesh).look(asked_for).seen
        for tower in (params["vision"], None)
    )
    made = jax.jit(soft.rows, static_argnames="cfg")
    np.testing.assert_allclose(
        made(params, frozen, cfg=cfg), made(params, trained, cfg=cfg), atol=1e-5
    )

    def total(params, seen):
        return jnp.sum(jnp.sin(soft.rows(params, seen, cfg)))

    gradient = jax.jit(jax.grad(total))
    for seen, parts in ((frozen, soft.PARAMETERS), (trained, ("vision", "newline"))):
        grads = gradient(params, seen)
        for name in parts:
            assert all(jnp.abs(x).max() > 0 for x in jax.tree.leaves(grads[name]))
    assert not any(x.any() for x in jax.tree.leaves(gradient(params, frozen)["vision"]))


def test_microbatches_share_one_pass_of_tower_and_projector(loaded, place):
    cfg, params, _ = loaded
    cfg = dataclasses.replace(cfg, train_tower=True)
    some = [asked(loaded, place, "A?", "0.png"), asked(loaded, place, "B?", "1.png")]
    table = look.Eyes(None, cfg, one_device()).look(some)
    ids = [table.placed(prompt, cfg.vocab) for prompt in some]
    width = max(map(len, ids)) + 3
    rows_m1T = np.array([[x + [cfg.mask_id] * (width - len(x))] for x in ids], np.int32)
    place_m1T = np.broadcast_to(np.arange(width, dtype=np.int32), rows_m1T.shape)
    batch = views.TrainBatch(
        used=np.int32(2),
        tokens_BT=rows_m1T,
        pos_BT=place_m1T,
        begin_BT=np.zeros_like(rows_m1T),
        end_BT=np.full_like(rows_m1T, width),
        group_BT=np.full_like(rows_m1T, -1),
        where_BU=place_m1T[:, :, -3:],
        target_BU=np.array([[[9, 10, 11]], [[12, 13, 14]]], np.int32),
        weight_BU=np.ones((2, 1, 3), np.float32),
    )
    batch = jax.tree.map(jnp.asarray, batch)
    how = {
        "model": cfg,
        "plan": learner.Plan(("nll",), OptimConfig(), 1),
        "cfg": ObjectiveConfig(),
    }
    base = {"seen": table.seen}

    def alone(params):
        parts = (learner.microbatch(batch, i) for i in range(2))
        return sum(learner.loss(params, part, base, **how)[0] for part in parts)

    together = functools.partial(learner.gradients, **how)
    want, (found, _) = jax.jit(
        lambda params: (jax.grad(alone)(params), together(params, batch, base))
    )(params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), found, want)
    assert all(jnp.abs(x).max() > 0 for x in jax.tree.leaves(found["vision"]))
    # Only the projector has a GELU by erf: it is outside of the loop over microbatches.
    jaxpr = jax.make_jaxpr(together)(params, batch, base)
    loops = [x for x in jaxpr.eqns if x.primitive.name == "while"]
    assert loops and "erf" in str(jaxpr)
    assert not any("erf" in str(loop) for loop in loops)


def test_settings_that_do_not_go_together():
    with pytest.raises(ValueError, match="model.tower=True"):
        config.ModelArgs(tower=True, lora_rank=4)
    with pytest.raises(ValueError, match="tiles=-1"):
        config.ModelArgs(tiles=-1)
