"""The command that answers prompts, on a random checkpoint without a tokenizer."""

import dataclasses
import importlib.util
import io
import json
import os
import pathlib
import shutil
import signal
import sys
import types

import huggingface_hub.constants
import jax
import numpy as np
import pytest
import safetensors.numpy

from dllm_jax import compiler, config, exits, folder, generate, memory, sharding
from dllm_jax.models import hf
from dllm_jax.sampling import denoise
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.viewer import traces

ROOT = pathlib.Path(__file__).parents[1]
# A program that two tests share.
SHOWN = ("--strategy=static", "--steps-per-block=2", "--temperature=0")
# A page a row, and a chunk a prompt: for every other number more is compiled.
TEN = ("--max-new-tokens=10", "--dtype=float32", "--config.sampler.page=64")
TEN += ("--config.sampler.prefill=32",)
STOPS = (signal.SIGTERM, signal.SIGINT)
PROMPTS = [
    {"prompt_ids": [5, 6, 7], "id": "first"},
    {"prompt_ids": [8] * 9},
    {"prompt_ids": [9, 106, 11, 12]},  # 106 is the mask token: here it is text
]


@pytest.fixture(scope="module", autouse=True)
def no_mesh_left_behind():
    """Puts mesh and signals back: the command sets its own for the whole process."""
    handlers = {number: signal.getsignal(number) for number in STOPS}
    with jax.set_mesh(sharding.make_mesh()):
        yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def one_device(request, monkeypatch):
    """Lets the command see one device: a mesh multiplies what is compiled and run."""
    if "every_device" not in request.fixturenames:
        found = jax.devices()[:1]
        monkeypatch.setattr(sharding.jax, "devices", lambda *_: found)


@pytest.fixture
def every_device():
    """Asked for by tests that sample on a mesh."""


@pytest.fixture(scope="module")
def make():
    """The script of the arithmetic example."""
    path = ROOT / "examples" / "arithmetic" / "make.py"
    spec = importlib.util.spec_from_file_location("make", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory, make):
    """The folder of a tiny SDAR checkpoint that is sure of some answers."""
    folder = tmp_path_factory.mktemp("model")
    make.SHAPE.update(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        head_dim=8,
        vocab_size=107,
    )
    raw = {"model_type": "sdar", "block_size": 4, "mask_token_id": 106}
    # The mask token is never an answer: one ends by sampler.stop_ids alone.
    raw |= {"eos_token_id": 106, "pad_token_id": 0, "rms_norm_eps": 1e-6}
    raw |= {"rope_theta": 10000, "tie_word_embeddings": False} | make.SHAPE
    (folder / "config.json").write_text(json.dumps(raw))
    weights = make.weights(np.random.default_rng(0), make.SHAPE)
    for name, x in weights.items():
        weights[name] = x if "norm" in name else 20 * x
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def ask(model, tmp_path):
    """Returns a function that runs the command and reads what it wrote."""

    def run(*flags, prompts=PROMPTS, again="--overwrite") -> list[dict]:
        file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in prompts))
        generate.main(
            [f"--model={model}", f"--prompts={file}", f"--out={out}", again]
            + [*TEN, *flags]
        )
        return [json.loads(line) for line in out.read_text().splitlines()]

    return run


def answers(lines) -> list:
    """Returns the answers with their traces."""
    return [(line["response_ids"], line["step_map"]) for line in lines]


def test_lines_hold_the_answer_and_its_trace(ask, every_device):
    lines = ask()
    assert [line.get("id") for line in lines] == ["first", None, None]
    for line, row in zip(lines, PROMPTS, strict=True):
        assert line.keys() - {"id"} == {
            *("prompt_ids", "response_ids", "step_map", "logprobs", "confidence"),
            *("forwards", "finished", "text"),
        }
        assert line["prompt_ids"] == row["prompt_ids"]
        assert len(line["response_ids"]) == 10
        assert len(line["step_map"]) == len(line["logprobs"]) == 10
        assert min(line["step_map"]) == 1
        assert max(line["step_map"]) <= line["forwards"]
        assert max(line["logprobs"]) <= 0
        assert all(0 <= token < 106 for token in line["response_ids"])  # never a mask
        assert line["finished"] == "length"
        assert line["text"] is None


def test_answers_follow_from_the_seed_alone(ask):
    first = ask("--seed=1")
    assert ask("--seed=1") == first
    assert answers(ask("--seed=2")) != answers(first)
    # Neither from the neighbours nor from how many are sampled together.
    many = ask("--seed=1", "--rows=2", prompts=PROMPTS[:1] * 8 + PROMPTS)
    few = ask("--seed=1", "--rows=3", prompts=PROMPTS[:1] * 8 + PROMPTS)
    assert answers(many) == answers(few)
    assert answers(many)[:1] == answers(first)[:1]


@pytest.mark.parametrize("cache", ["block", "none"])
def test_a_job_goes_on_behind_its_last_answer(ask, tmp_path, cache, capsys):
    flags = ("--seed=1", f"--cache={cache}", "--rows=2")
    whole, out = ask(*flags), tmp_path / "out.jsonl"
    text = out.read_bytes()
    first = text.index(b"\n") + 1
    for cut in (first, first + 40, 10, 0):
        out.write_bytes(text[:cut])
        # The overwrite that is not asked for.
        assert answers(ask(*flags, again="--nooverwrite")) == answers(whole)
        assert out.read_bytes()[:first] == text[:first]
    assert "1 of 3 answers are there, and stay" in capsys.readouterr().err
    for file in (out, tmp_path / "out.job.json"):
        assert "partial" not in file.name and file.exists()
    assert not (tmp_path / "out.jsonl.lock").exists()


def test_a_finished_job_samples_nothing(ask, tmp_path, monkeypatch):
    whole = ask("--seed=1")
    note = json.loads((tmp_path / "out.job.json").read_text())
    assert not note.keys() & folder.OVERWRITING.keys()  # which overwrote nothing
    monkeypatch.setattr(generate.answers.Engine, "stream", lambda *_, **__: 1 / 0)
    assert ask("--seed=1", again="--nooverwrite") == whole
    images = f"--config.data.image_root={tmp_path}"  # by their marks, wherever they lie
    assert ask("--seed=1", images, again="--nooverwrite") == whole
    idle = [f"--config.sampler.{x}" for x in ("rows=3", "prefill=64", "page=64")]
    assert ask("--seed=1", *idle, again="--nooverwrite") == whole


def test_answers_of_another_job_are_refused_and_stay(ask, tmp_path):
    whole = ask("--seed=1")
    go_on = {"again": "--nooverwrite"}
    with pytest.raises(
        ValueError, match="another job: seed was 1, is now 2; name anoth"
    ):
        ask("--seed=2", **go_on)
    with pytest.raises(
        ValueError, match="another job: sampler.temperature was 1.0, is n"
    ):
        ask("--seed=1", "--temperature=0.5", **go_on)
    other = [PROMPTS[0], {"prompt_ids": [8]}]
    with pytest.raises(
        ValueError, match="line 2: it does not answer prompt 2; name an"
    ):
        ask("--seed=1", prompts=other, **go_on)
    with pytest.raises(
        ValueError, match="line 3: it does not answer prompt 3; name an"
    ):
        ask("--seed=1", prompts=PROMPTS[:2], **go_on)
    with pytest.raises(
        ValueError, match="line 1: it does not answer prompt 1; name an"
    ):
        ask("--seed=1", prompts=[PROMPTS[0] | {"id": 1}, *PROMPTS[1:]], **go_on)
    assert (tmp_path / "out.jsonl").read_text().count("\n") == 3
    more = ask("--seed=1", prompts=[*PROMPTS, {"prompt_ids": [3]}], **go_on)
    assert more[:3] == whole and len(more) == 4


def test_a_page_of_answers_finds_their_images_by_the_note(tmp_path):
    """It looked for them beside the answers, wherever --config.data.image_root said."""
    tree, file = generate.defaults(), tmp_path / "out.jsonl"
    before = generate.job_of(tree, {})
    assert "data.image_root" not in before
    tree.data.image_root = "pictures"
    job = generate.job_of(tree, {})
    folder.note_of(file).write_text(json.dumps(job))
    assert traces.settings(file, []).roots == ("pictures",)
    assert job == before | {"data.image_root": "pictures"}


def test_a_checkpoint_that_says_nothing_of_blocks_is_no_sampler_of_one_token(
    ask, model, tmp_path
):
    copied = shutil.copytree(model, tmp_path / "model")
    raw = json.loads((copied / "config.json").read_text()) | {"block_size": 1}
    (copied / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="sampler.block=0: .* has no block; set it"):
        ask(f"--model={copied}", "--block=0")


def test_answers_of_other_weights_are_refused(ask, model, tmp_path):
    whole = ask()
    copied = shutil.copytree(model, tmp_path / "model")
    assert ask(f"--model={copied}", again="--nooverwrite") == whole  # the same ones
    file = copied / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="another job: model.safetensors was"):
        ask(f"--model={copied}", again="--nooverwrite")


def test_weights_that_change_while_they_are_read_are_refused(
    ask, model, tmp_path, monkeypatch
):
    """What stands beside the answers is of the files as they were before."""
    copied = shutil.copytree(model, tmp_path / "model")
    loaded = generate.placement.loaded

    def late(*args, **options):
        found = loaded(*args, **options)
        with (copied / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\1")
        return found

    monkeypatch.setattr(generate.placement, "loaded", late)
    with pytest.raises(ValueError, match="safetensors changed while it was read: nob"):
        ask(f"--model={copied}")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("link", ["", "symbolic", "hard"])
def test_the_prompts_are_never_replaced(model, tmp_path, link):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [5]}\n')
    out = tmp_path / "out.jsonl" if link else prompts
    if link == "symbolic":
        out.symlink_to(prompts)
    if link == "hard":
        out.hardlink_to(prompts)
    for flag in ("--overwrite", "--nooverwrite"):
        with pytest.raises(
            ValueError, match="--out=.*: these are the prompts; name an"
        ):
            generate.main(
                [f"--model={model}", f"--prompts={prompts}", f"--out={out}", flag]
            )
    assert prompts.read_text() == '{"prompt_ids": [5]}\n'


def test_a_refusal_leaves_no_file(model, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt_ids": [500]}\n')
    with pytest.raises(
        ValueError, match="prompt_ids must be a list of numbers in 0..106"
    ):
        generate.main([f"--model={model}", f"--prompts={prompts}", f"--out={out}"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_a_signal_ends_a_job_between_answers_and_it_goes_on(ask, monkeypatch, tmp_path):
    whole = ask("--seed=1")
    (tmp_path / "out.jsonl").unlink()
    add = generate.folder.Answers.add

    def told(sink, line):
        add(sink, line)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(generate.folder.Answers, "add", told)
        with pytest.raises(exits.Stopped, match="after 1 of 3 answers"):
            ask("--seed=1", again="--nooverwrite")
    assert (tmp_path / "out.jsonl").read_text().count("\n") == 1
    assert answers(ask("--seed=1", again="--nooverwrite")) == answers(whole)


def test_a_signal_ends_an_answer_that_is_shown(make, model, tmp_path, monkeypatch):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(model / file)
    make.tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(exits.StopSignal, "__call__", lambda stop: True)
    monkeypatch.setattr(denoise, "TURN", 1)  # too few forwards for ten tokens
    with pytest.raises(exits.Stopped, match="before the answer was whole"):
        generate.main([f"--model={tmp_path}", *SHOWN, *TEN, "--cache=block", "1+2"])


def test_weights_that_give_no_numbers_are_refused(ask, model, monkeypatch):
    load = hf.load

    def loud(*args, **how):
        made, params = load(*args, **how)
        return made, jax.tree.map(lambda x: 1e30 * x, params)

    monkeypatch.setattr(hf, "load", loud)
    with pytest.raises(exits.NotFinite, match="weights of an absurd scale"):
        ask()


def test_temperature_0_is_the_arg_max(ask):
    first = ask("--temperature=0")
    assert answers(ask("--temperature=0", "--seed=3")) == answers(first)


def test_stop_ids_end_an_answer(ask):
    long = ask("--temperature=0")[0]["response_ids"]
    stop = long[3]
    line = ask("--temperature=0", f"--config.sampler.stop_ids=0,{stop}")[0]
    assert line["response_ids"] == long[: long.index(stop) + 1]
    assert line["finished"] == "stop"


def test_strategies_and_steps(ask):
    """Other steps are test_a_prompt_is_shown_while_it_unmasks', strategies engine_test's."""
    flags = ("--temperature=0", "--max-new-tokens=9")
    bounded = ask(
        *flags, "--strategy=entropy_bounded", "--config.sampler.entropy_bound=100"
    )[0]
    assert max(bounded["step_map"]) == 3  # a block at a step
    wide = ask(*flags, "--strategy=sequential", "--block=8", "--steps-per-block=4")[0]
    assert wide["step_map"] == [1, 1, 2, 2, 3, 4, 4, 5, 5]  # blocks begin at 8


def test_every_flag_reaches_the_sampler(ask, every_device, monkeypatch):
    seen = {}

    class Nobody:
        def stream(self, params, prompts, **_):
            return iter(())

    def answerer(*, model, cfg, mesh):
        seen.update(dataclasses.asdict(cfg), dtype=model.dtype, mesh=dict(mesh.shape))
        seen["kernels"] = model.kernels
        return Nobody()

    monkeypatch.setattr(generate.answers, "answerer", answerer)
    monkeypatch.setattr(memory, "device_bytes", lambda: None)  # nobody has a program
    ask("--dtype=bfloat16")
    defaults = dict(seen)
    assert defaults["block"] == 4  # the checkpoint's
    flags = {
        "--max-new-tokens=7": ("max_new", 7),
        "--block=8": ("block", 8),
        "--steps-per-block=3": ("steps_per_block", 3),
        "--strategy=static": ("strategy", "static"),
        "--threshold=0.7": ("threshold", 0.7),
        "--cache=prefix": ("cache", "prefix"),
        "--temperature=0.6": ("temperature", 0.6),
        "--rows=4": ("rows", 4),  # 3 prompts on 4 devices
        "--dtype=float32": ("dtype", "float32"),
        "--config.sampler.entropy_bound=0.2": ("entropy_bound", 0.2),
        "--config.sampler.horizon=5": ("horizon", 5),
        "--config.sampler.target=random": ("target", "random"),
        "--config.sampler.rank_temperature=0.3": ("rank_temperature", 0.3),
        "--config.sampler.pad_penalty=2.5": ("pad_penalty", 2.5),
        "--config.sampler.tempered_threshold": ("tempered_threshold", True),
        "--config.sampler.untempered_ranks": ("untempered_ranks", True),
        "--config.sampler.top_k=9": ("top_k", 9),
        "--config.sampler.top_p=0.8": ("top_p", 0.8),
        "--config.sampler.top_p_first": ("top_p_first", True),
        "--config.sampler.stop_ids=3,4": ("stop_ids", (106, 3, 4)),
        "--config.model.kernels=platform": ("kernels", "platform"),
        "--config.mesh.model=2": ("mesh", {"data": 4, "fsdp": 1, "model": 2}),
    }
    ask(*flags)
    for name, value in flags.values():
        assert seen[name] == value != defaults[name], name
    seen.clear()
    ask(*" ".join(flags).replace("=", " ").split())  # --flag value
    for name, value in flags.values():
        assert seen[name] == value, name


def test_the_defaults_of_the_short_flags():
    prompt, options = generate.parsed(["hello", "--model=DIR"])
    assert prompt == "hello"
    assert (options.prompts, options.out) == (None, None)
    assert options.config.model.path == "DIR"
    assert options.config.model.dtype == "bfloat16"
    assert options.config.seed == 0
    usual = dataclasses.replace(SamplerConfig(block=0), max_new=256)
    assert config.frozen(SamplerConfig, options.config.sampler) == usual


def test_a_config_file_may_be_named_anywhere_and_keys_go_behind_it():
    file = f"--config={ROOT}/configs/smoke.py"
    _, options = generate.parsed(["--rows=3", "1+2", file])
    assert options.config.model.path == "examples/arithmetic/model"
    assert (options.config.sampler.rows, options.config.sampler.max_new) == (3, 32)


def test_a_prompt_may_name_the_flag_of_images():
    name, text = "--model=DIR", "--image-out=a.png, says --image-out"
    for words in ([name, "--", text], ["what is --image-out?", name]):
        prompt, values = generate.parsed(words)
        assert prompt == (text if words[-1] == text else words[0])
        assert values.image_out is None and values.config.sampler.answers == "text"
    for words in (["--image-out=x.png"], ["--image-out", "x.png"]):
        prompt, values = generate.parsed([name, *words, "--", "--image_out"])
        assert (prompt, values.image_out) == ("--image_out", "x.png")
        assert values.config.sampler.answers == "image"


def test_a_short_flag_may_be_written_with_underscores():
    _, options = generate.parsed(["--model=DIR", "--max_new_tokens=8", "a_b"])
    assert options.config.sampler.max_new == 8
    with pytest.raises(
        ValueError, match="^--stop-ids is now --config.sampler.stop_ids"
    ):
        generate.parsed(["--model=DIR", "--stop_ids=3", "hello"])


@pytest.mark.parametrize(
    ("flag", "key"),
    [pair for pair in generate.MOVED.items() if pair[0] not in generate.SHORT],
)
def test_a_flag_of_former_times_is_refused_with_its_key(flag, key):
    name = key.split(",")[0]
    assert name in config.keys(config.default().to_dict())
    for arg in (f"--{flag}", f"--{flag}=1"):
        with pytest.raises(ValueError, match=f"^--{flag} is now --config.{key}$"):
            generate.parsed(["--model=DIR", arg, "hello"])


@pytest.mark.parametrize(
    ("flags", "hastens"),
    [
        (["1+2"], True),
        (["1+2", "--max-new-tokens=1000000"], False),  # it draws of too many ids
        (["--prompts=FILE"], False),
    ],
)
def test_for_one_short_answer_it_compiles_in_haste(
    flags, hastens, tmp_path, monkeypatch
):
    file, calls = tmp_path / "prompts.jsonl", []
    file.write_text('{"prompt_ids": [5]}')
    monkeypatch.setattr(compiler, "hasten", lambda: calls.append("hasten"))
    # The backend starts at the mesh, and that is early enough.
    monkeypatch.setattr(sharding, "make_mesh", lambda **axes: calls.append("mesh") or 0)
    model = ROOT / "examples/arithmetic/model"
    with pytest.raises(ValueError, match="Expected mesh"):  # 0 is none
        generate.main(
            [f"--model={model}", *(x.replace("FILE", str(file)) for x in flags)]
        )
    assert calls == ["hasten"] * hastens + ["mesh"]


def test_haste_is_for_cpus_alone_and_flags_that_are_set_win(monkeypatch):
    monkeypatch.setattr(compiler.util, "find_spec", lambda name: None)
    own = "--xla_backend_optimization_level=2"
    for plugins, flags in (((), f"{compiler.HASTE} {own}"), (("cuda",), own)):
        monkeypatch.setenv("XLA_FLAGS", own)
        monkeypatch.setattr(
            compiler.metadata, "entry_points", lambda group, found=plugins: found
        )
        for _ in range(2):
            compiler.hasten()
        assert os.environ["XLA_FLAGS"] == flags


@pytest.mark.parametrize("cache", ["block", "none", "prefix", "dual"])
def test_a_prompt_is_shown_while_it_unmasks(
    cache, make, model, tmp_path, ask, capsys, monkeypatch
):
    (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
    told = json.loads((model / "config.json").read_text())
    if cache != "block":
        told["attention_pattern"] = "full"
    (tmp_path / "config.json").write_text(json.dumps(told))
    make.tokenizer().save_pretrained(tmp_path)
    flags = [f"--model={tmp_path}", *SHOWN, f"--cache={cache}"]
    (line,) = ask(*flags, prompts=[{"prompt": "1+2"}])
    # Blocks of 4, 4 and 2 tokens, of which each step unmasks two; on the grid the prompt
    # ends one short of a block, and they are of 1, 4, 4 and 1 and what is not shown.
    steps, masks = [1, 1, 2, 2, 3, 3, 4, 4, 5, 5], [2, 4, 2, 2, 0]
    if cache == "block":
        # The prompt has a forward of its own, which shows nothing new.
        steps = [1, 2, 2, 3, 3, 4, 4, 5, 5, 7]
        masks = [1, 4, 2, 4, 2, 1, 1, 0]
    assert sorted(line["step_map"]) == steps
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    generate.main([*flags, *TEN, "1+2"])
    assert capsys.readouterr().out.strip() == line["text"].strip()
    monkeypatch.setenv("TERM", "xterm")
    generate.main([*flags, *TEN, "1+2"])
    *frames, last = capsys.readouterr().out.split("\033[2J\033[H")[1:]
    assert [frame.count("░") for frame in frames] == masks
    assert last.strip() == line["text"].strip()


@pytest.mark.parametrize("people", [True, False])
def test_a_terminal_obeys_no_answer(people, capsys, monkeypatch):
    tok = types.SimpleNamespace(decode=lambda ids, **_: "a\x1b[2Jb\n\tc\x9b")
    answer = types.SimpleNamespace(
        tokens_T=np.arange(3), len=2, forwards=1, bad=False, prompt_len=1
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: people, raising=False)
    monkeypatch.setenv("TERM", "dumb")

    def stream(prompts, **_):
        return [(0, answer)]

    generate.show(stream, [0], SamplerConfig(), tok, lambda: False)
    shown = "a\ufffd[2Jb\n\tc\ufffd\n" if people else "a\x1b[2Jb\n\tc\x9b\n"
    assert capsys.readouterr().out == shown


def test_text_prompts_use_the_chat_template(make, model, tmp_path, ask, capsys):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(model / file)
    make.tokenizer().save_pretrained(tmp_path)
    turn = {"role": "user", "content": "1+2"}
    flags = (f"--model={tmp_path}", "--temperature=0")
    with pytest.raises(
        ValueError, match="prompt_ids must be a list of numbers in 0..106"
    ):
        ask(*flags, prompts=[{"prompt_ids": [107]}])
    for bad in ({"messages": []}, {"messages": [{"role": "user"}]}):
        with pytest.raises(ValueError, match="record 1: needs messages, each with a"):
            ask(*flags, prompts=[bad])
    lines = ask(*flags, prompts=[{"prompt": "!!"}, {"messages": [turn]}])
    text = "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n"
    assert make.tokenizer().decode(lines[1]["prompt_ids"]) == text
    assert isinstance(lines[1]["text"], str)
    assert [line.get("question") for line in lines] == ["!!", None]
    assert f"2 answers in {tmp_path / 'out.jsonl'}\n" in capsys.readouterr().err
    generate.main([*flags, *TEN, "1+2"])
    told = capsys.readouterr()
    assert told.out.strip() == lines[1]["text"].strip()
    assert "tokens per forward" in told.err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hello"}, "record 2: the model has no tokenizer"),
        ({"prompt": "hello"}, "record 2: the model has no tokenizer"),
        ({"prompt_ids": []}, r"record 2: prompt_ids must be .* in 0\.\.106"),
        ({"prompt_ids": [3, 107]}, "record 2: prompt_ids must be"),
        ({"prompt_ids": "abc"}, "record 2: prompt_ids must be"),
        ({"prompt_ids": 5}, "record 2: prompt_ids must be"),
    ],
)
def test_bad_lines_are_named(ask, row, message):
    with pytest.raises(ValueError, match=message):
        ask(prompts=[{"prompt_ids": [5]}, row])


def test_bad_flags_are_named(ask, model, tmp_path):
    with pytest.raises(ValueError, match="either one prompt or --prompts"):
        generate.main([f"--model={model}"])
    with pytest.raises(ValueError, match="either one prompt or --prompts"):
        ask("and a prompt")
    with pytest.raises(ValueError, match="--out=FILE goes with --prompts=FILE"):
        generate.main([f"--model={model}", "hello", "--out=x.jsonl"])
    with pytest.raises(ValueError, match="has no tokenizer: copy .*, or use --prompts"):
        generate.main([f"--model={model}", "hello"])
    with pytest.raises(ValueError, match="steps_per_block=5"):
        ask("--steps-per-block=5")
    with pytest.raises(ValueError, match="sampler.block=-4: must be >= 0"):
        ask("--block=-4")
    for out in (tmp_path / "none" / "x.jsonl", tmp_path):
        with pytest.raises(ValueError, match=f"--out={out}: "):
            generate.main(["--model=none", "--prompts=none", f"--out={out}"])
    with pytest.raises(
        ValueError, match="sampler.temperature=-1.0: must be 0 or >= 1e-6"
    ):
        ask("--temperature=-1")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        generate.main([f"--model={tmp_path}", "hello"])
    with pytest.raises(ValueError, match="^--model=DIR is required"):
        generate.main(["hello"])
    for flag, message in {
        "--strategy=greedy": "sampler.strategy='greedy': choose from",
        "--dtype=int8": "model.dtype='int8': choose from",
        "--rows=many": "--config.sampler.rows=many",
        "--unknown=1": "'unknown'",
        "--config.sampler.treshold=1": "the nearest is 'sampler.threshold'",
    }.items():
        with pytest.raises(ValueError, match=message):
            ask(flag)
    with pytest.raises(ValueError, match="unknown argument 'two'"):
        ask("one", "two")


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--steps=4", "; did you mean --steps-per-block?"),  # not rl.steps
        ("--lr=1", "; see --help"),  # no key that is used here
        ("--templature=1", "; did you mean --temperature?"),
        ("--max_tokens=8", "; did you mean --max-new-tokens?"),
        ("--compile_cache=DIR", "; did you mean --config.run.compile_cache?"),
        ("--image-outt=x.png", "; did you mean --image-out?"),
    ],
)
def test_an_unknown_flag_is_told_what_has_an_effect_here(flag, meant, model):
    with pytest.raises(ValueError, match="^Unknown command line flag") as told:
        generate.main([f"--model={model}", flag, "1+1"])
    assert str(told.value).endswith(meant)


def test_a_hub_name_brings_its_tokenizer(tmp_path, monkeypatch, capsys):
    bundled = ROOT / "examples" / "arithmetic" / "model"
    commit = "0123456789abcdef0123456789abcdef01234567"
    stored = tmp_path / "models--org--tiny"
    shutil.copytree(bundled, stored / "snapshots" / commit)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    flags = [*TEN, "--temperature=0", "12+34"]
    answers = []
    for model in ("org/tiny", bundled):
        generate.main([f"--model={model}", *flags])
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != ""
    with pytest.raises(ValueError, match="'org/none' is not a folder, and the hub did"):
        generate.main(["--model=org/none", *flags])


def test_a_special_token_in_a_question_is_told(tmp_path, capsys):
    bundled, file = ROOT / "examples" / "arithmetic" / "model", tmp_path / "x.jsonl"
    file.write_text('{"question": "1+<|im_end|>"}\n{"prompt": "2+<|im_end|>"}\n')
    generate.main([f"--model={bundled}", f"--prompts={file}", *TEN])
    told = capsys.readouterr().err
    assert told.count("a question has '<|im_end|>' in its text") == 1


def test_a_canvas_beyond_the_models_positions_is_told(model, tmp_path, ask, capsys):
    (tmp_path / "model.safetensors").symlink_to(model / "model.safetensors")
    raw = json.loads((model / "config.json").read_text())
    raw["max_position_embeddings"] = 16
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ask(f"--model={tmp_path}")
    told = "the model was made for 16 (max_position_embeddings)"
    assert told in capsys.readouterr().err
    short = SamplerConfig(max_prompt=8, max_new=8)
    assert not config.size_warnings(short, hf.read_config(tmp_path))
    assert config.size_warnings(short, hf.read_config(tmp_path), 9)


def test_a_block_wider_than_an_answer_is_told(ask, capsys):
    ask("--block=16", "--max-new-tokens=8")
    assert (
        "warning: sampler.block=16: every forward computes" in capsys.readouterr().err
    )
    ask("--block=8", "--max-new-tokens=8")
    assert "warning" not in capsys.readouterr().err


def test_prompts_of_like_lengths_are_sampled_by_one_program():
    """Whole blocks of 32, 64 ... 512 positions, or of a multiple of 512."""
    sizes = {1: 32, 32: 32, 33: 64, 300: 512, 513: 1024, 1100: 1536}
    assert {size: generate.rounded(size, 4) for size in sizes} == sizes
    assert generate.rounded(30, 5) == 35


def test_a_sampler_has_room_for_the_prompt_that_asks_for_nothing():
    cfg = SamplerConfig(cache="none", guidance=1.0, blank=(1,) * 40)
    assert generate.fitting(cfg, [[1, 2]], 1).max_prompt == 64


def test_a_reader_that_has_enough_ends_the_command(monkeypatch):
    """As `| head -1` leaves: no error, and nothing more is answered."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(SystemExit) as ended:
            generate.Terminal(None).add({"text": "2"})
    assert not ended.value.code


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_lines_are_json_in_whatever_the_output_writes(monkeypatch, encoding):
    """A terminal's errors would be spelled as JSON spells nothing."""
    taken = io.BytesIO()
    out = io.TextIOWrapper(taken, encoding=encoding, errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", out)
    line = {"text": "\xe9 \u4e00 \U0001f600"}
    generate.Terminal(None).add(line)
    assert json.loads(taken.getvalue().decode(encoding)) == line


def test_a_folder_that_takes_nothing_beside_the_answers_is_refused(
    tmp_path, monkeypatch
):
    def full(**_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "out.jsonl").touch()
    monkeypatch.setattr(generate.tempfile, "TemporaryFile", full)
    with pytest.raises(ValueError, match="out.jsonl: its folder: Permission denied$"):
        generate.check_out(f"{tmp_path}/out.jsonl", None)
    generate.check_out("/dev/stdout", None)


def test_answers_may_go_to_a_pipe_and_to_what_a_shell_opened(tmp_path):
    """Nothing is written beside them, and a pipe is not closed before the first answer."""
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    places = {"file": True, "link": True, "none": True, "pipe": False}
    assert {name: generate.again(f"{tmp_path}/{name}") for name in places} == places
    generate.check_out(f"{tmp_path}/pipe", None)  # it would wait for a reader
    with (tmp_path / "file").open("a") as file:
        assert not generate.again(f"/dev/fd/{file.fileno()}")
    assert not generate.again("/dev/stdout") and not generate.again(None)


def test_prompts_may_come_through_a_pipe():
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:
        pipe.write('{"prompt_ids": [1, 2]}\n{"prompt_ids": [3]}\n')
    prompts, rows = generate.read(f"/dev/fd/{read}", None, 9)
    os.close(read)
    assert prompts == [row["prompt_ids"] for row in rows] == [[1, 2], [3]]


def test_what_has_no_effect_is_told(capsys):
    keys = ("rl.steps=3", "sampler.max_prompt=5", "model.lora_rank=2", "run.folder=x")
    generate.report_idle(["--config.seed=1", *(f"--config.{x}" for x in keys)])
    said = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in said] == [f"--config.{x}" for x in keys]
