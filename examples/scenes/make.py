"""Makes a tiny model that is to draw scenes, its tokenizer of images, and what it learns from.

    python -m examples.scenes.make
    python -m dllm_jax.train --config=configs/sft.py:scenes
    python -m dllm_jax.train --config=configs/tracerl.py:scenes
    python -m dllm_jax.train --config=configs/sft.py:questions
    python -m dllm_jax.train --config=configs/tracerl.py:questions

In runs/scenes it leaves blank/, an MMaDA of random weights with a MAGVIT-v2 for mosaics
inside; pictures/; sft.jsonl, captions with the picture that each asks for, a tenth of them
without a word, as guidance needs; train.jsonl and heldout.jsonl, captions and what the checker
is to find: 36 scenes and 12 others. questions.jsonl asks two questions about three in four of
all different pictures, asked.jsonl about the others.
"""

import argparse
import json
import os
import pathlib

import numpy as np
import safetensors.numpy
import tokenizers

# Its notice that torch is missing is no news.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import transformers

from dllm_jax.models import families, hf
from dllm_jax.models.vision import codes
from dllm_jax.rl.rewards import scenes
from examples.scenes import drawer, tokenizer

SPECIAL = ["<|endoftext|>", "<|startoftext|>", "<|mdm_mask|>", "<|eot_id|>"]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<unk>"]
SPECIAL += ["<|soi|>", "<|eoi|>", "<|t2i|>", "<|mmu|>"]
CHARS = [chr(c) for c in range(32, 127)] + ["\n"]
WORDS = sorted(
    {word for caption in scenes.ALL for word in caption.split()}
    | {"user", "assistant", "what", "colour", "how", "many"}
)
CHAT = (
    "<|startoftext|>{% for m in messages %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "<|start_header_id|>assistant<|end_header_id|>\n"
)
HELDOUT = 12  # captions


def text_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer of the captions' words, and of characters for all others."""
    vocab = {token: i for i, token in enumerate(SPECIAL + CHARS)}
    model = tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>")
    tok = tokenizers.Tokenizer(model)
    tok.decoder = tokenizers.decoders.Fuse()
    tok.add_special_tokens([token for token in SPECIAL if token != "<unk>"])
    whole = {"single_word": True, "lstrip": True, "normalized": False}
    tok.add_tokens([tokenizers.AddedToken(word, **whole) for word in WORDS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token="<|startoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        mask_token="<|mdm_mask|>",
        unk_token="<unk>",
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def blank(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Writes an MMaDA of random weights: normal, std 0.02, norms 1."""
    folder.mkdir(parents=True, exist_ok=True)
    tok = text_tokenizer()
    tok.save_pretrained(folder)
    rows = len(tok) + 2**tokenizer.BITS
    config = {
        "model_type": "mmada",
        "embedding_size": -(-rows // 16) * 16,
        "codebook_size": 2**tokenizer.BITS,
        "d_model": 128,
        "mlp_hidden_size": 256,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id,
        "mask_token_id": tok.mask_token_id,
        "weight_tying": False,
        "max_sequence_length": 256,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    cfg, weights = families.read_config(folder), {}
    for _, spec, stored in hf.parameters(cfg, ("lm",)):
        for index, place in stored.items():
            shape = hf.tensor_shape(spec, cfg, len(index))
            x = np.ones(shape) if spec.init == "ones" else rng.normal(0, 0.02, shape)
            weights[place.name] = x.astype(np.float32)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")


def split(rng: np.random.Generator) -> tuple[list[str], list[str]]:
    """Returns (captions to learn, captions set aside), in random order."""
    names = rng.permutation(list(drawer.ALL)).tolist()
    return names[HELDOUT:], names[:HELDOUT]


def questions(scene: scenes.Scene) -> list[dict]:
    """Returns what is asked about a picture of a scene, and the answers in one word."""
    answers = {
        "what colour": scene.colour,
        "how many": scenes.COUNTS[scene.count - 1],
    }
    return [
        {"question": question, "answer": word, "response": word}
        for question, word in answers.items()
    ]


def asked(out: pathlib.Path, rng: np.random.Generator) -> tuple[list[dict], list[dict]]:
    """Writes all pictures of every scene; returns (questions to learn from, held-out ones).

    One in four of all different pictures is held out, whatever it shows.
    """
    sides, known = ([], []), {}
    for scene in drawer.ALL.values():
        for rgb in drawer.every(scene):
            known.setdefault(rgb.tobytes(), (scene, rgb))
    for number, place in enumerate(rng.permutation(len(known)).tolist()):
        scene, rgb = list(known.values())[place]
        file = f"pictures/asked_{number:03}.png"
        codes.write(out / file, rgb)
        rows = [one | {"image": file} for one in questions(scene)]
        sides[number % 4 == 0].extend(rows)
    return sides


def lines(file: pathlib.Path, rows: list[dict]) -> None:
    """Writes records, a line each."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{file}: {len(rows)} records")


def main():
    """Writes pictures, records, the tokenizer of images and the blank model."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", default="runs/scenes", help="folder")
    p.add_argument("--pictures", type=int, default=32, help="of each caption")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    if args.pictures < 1:
        p.error("--pictures must be positive: without any there is nothing to learn")
    out, rng = pathlib.Path(args.out), np.random.default_rng(args.seed)
    (out / "pictures").mkdir(parents=True, exist_ok=True)

    learned, aside = split(rng)
    for name, captions in (("train", learned), ("heldout", aside)):
        rows = [{"question": caption, "answer": caption} for caption in captions]
        lines(out / f"{name}.jsonl", rows)
    examples = []
    for number, caption in enumerate(learned * args.pictures):
        file = f"pictures/{number:05}.png"
        codes.write(out / file, drawer.draw(scenes.ALL[caption], rng))
        said = caption if rng.random() > 0.1 else ""
        examples.append({"question": said, "answer": said, "image": file})
        rng.integers(2)  # keeps the pictures those that docs/tiny_images.md tells of
    lines(out / "sft.jsonl", examples)

    blank(out / "blank", rng)
    tokenizer.write(out / "blank" / "vq")
    print(f"{out}/blank: a model to train")

    for name, rows in zip(("questions", "asked"), asked(out, rng), strict=True):
        lines(out / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
