"""A tiny LLaDA-V folder with random weights, and pictures to show it."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import safetensors.numpy
import tokenizers
import transformers
from PIL import Image

from dllm_jax.models import families, hf
from tests import served

SPECIAL = ["<|endoftext|>", "<|startoftext|>", "<|mdm_mask|>", "<|eot_id|>"]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<unk>"]
CHARS = [chr(c) for c in range(32, 127)] + ["\n"]
# LLaDA's: contents are trimmed, and the assistant's turn is opened whatever is asked.
CHAT = (
    "<|startoftext|>{% for m in messages %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
SIDE = 12  # pixels of a tile: 3 x 3 patches of 4
CONFIG = {
    "model_type": "llava_llada",
    "vocab_size": 112,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "mask_token_id": 2,
    "tie_word_embeddings": False,
    "image_aspect_ratio": "anyres_max_2",
    "image_grid_pinpoints": [[SIDE * i, SIDE * j] for i in (1, 2) for j in (1, 2)],
    "mm_patch_merge_type": "spatial_unpad",
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_tower": "tiny-siglip",
    "vision_tower_config": {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 4,
    },
}


def tokenizer(
    reserved=(), bos: str | None = None
) -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer of single characters with LLaDA's special tokens.

    reserved: more of these, behind them; bos: the one that begins a prompt.
    """
    vocab = {token: i for i, token in enumerate([*SPECIAL, *reserved, *CHARS])}
    model = tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>")
    tok = tokenizers.Tokenizer(model)
    tok.decoder = tokenizers.decoders.Fuse()
    tok.add_special_tokens([*SPECIAL[:-1], *reserved])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token=bos,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        mask_token=SPECIAL[2],
        unk_token="<unk>",
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def folder(path: pathlib.Path, **changes) -> pathlib.Path:
    """Writes a checkpoint that is sure of some answers; returns its folder.

    changes: of CONFIG.
    """
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    tokenizer().save_pretrained(path)
    cfg, rng = families.read_config(path), np.random.default_rng(0)
    weights = {}
    for _, spec, stored in hf.parameters(cfg, ("lm", "vision")):
        for index, place in stored.items():
            x = 0.3 * rng.normal(size=hf.tensor_shape(spec, cfg, len(index)))
            x = 1 + 0.2 * x if spec.init == "ones" else x
            weights[place.name] = x.astype(np.float32)
    # Stored with every release, and not computed with.
    weights[families.LLAVA_TOWER + "post_layernorm.weight"] = np.ones(16, np.float32)
    safetensors.numpy.save_file(weights, path / "model.safetensors")
    return path


def picture(file: pathlib.Path, size=(20, 16), seed=0) -> pathlib.Path:
    """Writes a picture of (width, height) pixels of noise; returns where it is."""
    rng = np.random.default_rng(seed)
    rgb = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(rgb).save(file)
    return file


def variety(texts, problems, trace):
    """Returns a reward in which an untrained model's answers differ: what their ids add to."""
    spans = zip(trace.tokens_BT, trace.prompt_len_B, trace.len_B, strict=True)
    return [int(row[first:][:count].sum()) % 10 / 10 for row, first, count in spans]


def metrics(folder) -> list[dict]:
    """Returns the rows of metrics, without what a clock decides."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {k: x for k, x in json.loads(line).items() if "second" not in k}
        for line in lines
    ]


def cut(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Copies a run of two steps as if it had been killed after the first; returns it."""
    shutil.copytree(source, target)
    for newest in (target / "checkpoints").glob("*2"):
        shutil.rmtree(newest)
    lines = (target / "metrics.jsonl").read_text().splitlines(True)
    kept = [line for line in lines if json.loads(line)["step"] <= 1]
    (target / "metrics.jsonl").write_text("".join(kept))
    shutil.rmtree(target / "export")
    return target


def weights(folder) -> dict:
    """Returns the tensors that a run has exported."""
    return safetensors.numpy.load_file(folder / "export" / "model.safetensors")


def check_same(one: pathlib.Path, two: pathlib.Path) -> None:
    """Asserts that two runs found the same and left the same weights, bit for bit."""
    assert metrics(one) == metrics(two)
    left, right = weights(one), weights(two)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


EIGHT = ["mesh.data=2", "mesh.fsdp=2", "mesh.model=2"]  # how eight devices are laid out


def check_alike(one: pathlib.Path, many: pathlib.Path) -> None:
    """Asserts that a run on other devices answered the same and learned it to rounding."""
    asked, answered = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (at / "samples" / "step_000001.jsonl" for at in (one, many))
    )
    assert len(asked) == len(answered) > 0
    for left, right in zip(asked, answered, strict=True):
        for name in ("prompt_ids", "response_ids", "step_map"):
            assert left[name] == right[name], name
    left, right = (
        next(row for row in metrics(at) if row["step"] == 1) for at in (one, many)
    )
    for name in ("reward", "advantage_std", "grad_norm", "entropy", "groups_kept"):
        assert left[name] == pytest.approx(right[name], rel=1e-4), name


def run(place, folder, *overrides, devices: int = 1, code: int = 0) -> str:
    """Trains the model in `place` on its train.jsonl, to the end; returns what it printed."""
    keys = [
        f"model.path={place / 'model'}",
        f"data.train={place / 'train.jsonl'}",
        f"run.folder={folder}",
        f"run.compile_cache={place / 'compiled'}",
        *("model.dtype=float32", "model.remat=none", "run.samples=2"),
        *overrides,
    ]
    command = served.start(
        "dllm_jax.train",
        [
            f"--config={served.ROOT / 'configs' / 'smoke.py'}",
            *(f"--config.{x}" for x in keys),
        ],
        env={
            "XLA_FLAGS": f"{served.HASTY} "
            f"--xla_force_host_platform_device_count={devices}"
        },
    )
    told, _ = command.communicate(timeout=900)
    assert command.returncode == code, told
    return told
