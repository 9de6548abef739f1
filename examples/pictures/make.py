"""Makes questions about real pictures, and a tiny blank model that looks at them.

    .venv/bin/pip install easy-vqa==1.0
    .venv/bin/python examples/pictures/make.py
    .venv/bin/python -m dllm_jax.train --config=configs/sft.py:pictures
    .venv/bin/python -m dllm_jax.train --config=configs/tracerl.py:pictures

easy-VQA (Victor Zhou, MIT) has 5,000 pictures of 64 x 64 pixels, one shape on each, with
48,248 questions that have 13 answers. The script writes to runs/pictures

    blank/          a Hugging Face folder in LLaDA-V's layout with random weights: SigLIP's
                    tower, projector, language model. A picture is five tiles of 32 x 32
                    pixels, all of it and its four quarters, and 36 soft tokens
    images/         the pictures
    train.jsonl     question, answer, image: easy-VQA's, which questions and answers there are
    heldout.jsonl   one question each about pictures that no other file shows
    swapped.jsonl   heldout.jsonl, but that each question is shown the next one's picture: a
                    model that does not look is right as often as before
    told.jsonl      all questions about the other pictures whose questions tell their colour and
                    shape; every response says what is there before it answers, "red circle"
    described.jsonl the same, "color red shape circle": four tokens, which are a block, so that
                    the answer is behind them and not beside them
"""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import shutil
import sys

import numpy as np
import safetensors.numpy
import tokenizers

# Its notice that torch is missing is no news.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import transformers

from dllm_jax.models import families, hf

PACKAGE = "easy-vqa==1.0"
SHAPES = ("circle", "rectangle", "triangle")
COLORS = ("black", "blue", "brown", "gray", "green", "red", "teal", "yellow")
SPECIAL = ["<|endoftext|>", "<|startoftext|>", "<|mdm_mask|>", "<|eot_id|>"]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<unk>"]
WORDS = "user assistant \\boxed{ } ? \n yes no a color contain does image in is not of "
WORDS += "present shape the there what"
# LLaDA's, but that the system's message, which is always the same, is left out.
CHAT = (
    "{% for m in messages if m.role != 'system' %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "<|start_header_id|>assistant<|end_header_id|>"
)
SIDE = 32  # pixels of a tile; a picture has twice as many
CONFIG = {
    "architectures": ["LlavaLLaDAModelLM"],
    "model_type": "llava_llada",
    "attention_pattern": "block",  # LLaDA-V's is full
    "block_size": 4,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,  # prompts are short: more pairs of a head tell near places apart
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "image_aspect_ratio": "anyres_max_1",
    "image_grid_pinpoints": [
        [SIDE * i, SIDE * j] for i, j in ((1, 1), (1, 2), (2, 1), (2, 2))
    ],
    "mm_patch_merge_type": "spatial_unpad",
    "mm_projector_type": "mlp2x_gelu",
    "mm_vision_tower": "tiny-siglip",
    "vision_tower_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,  # the last one is not run
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": 8,
    },
}


# ---- Questions -------------------------------------------------------------------------


def read(folder: pathlib.Path) -> list[dict]:
    """Returns easy-VQA's questions: question, answer, and the picture's `file`."""
    return [
        {
            "question": question,
            "answer": answer,
            "file": folder / part / "images" / f"{number}.png",
        }
        for part in ("train", "test")
        for question, answer, number in json.loads(
            (folder / part / "questions.json").read_text()
        )
    ]


def described(rows: list[dict]) -> str:
    """Returns what the questions about one picture tell of it: "red circle".

    "" where they do not tell both its colour and its shape.
    """
    known = set()
    for row in rows:
        positive = "what" in row["question"] or (
            row["answer"] == "yes" and not re.search(r"\b(not|no)\b", row["question"])
        )
        if positive:
            known |= {row["answer"], *re.findall(r"[a-z]+", row["question"])}
    parts = [[x for x in names if x in known] for names in (COLORS, SHAPES)]
    return " ".join(x[0] for x in parts) if all(parts) else ""


def split(
    rows: list[dict], rng: np.random.Generator, heldout: int
) -> dict[str, list[dict]]:
    """Returns records to learn from ("train"), and "heldout".

    heldout: pictures that are set aside, each with one of its questions. `told` is what is
    there, and `file` where its picture is now.
    """
    of_file = {}
    for row in rows:
        of_file.setdefault(row["file"], []).append(row)
    files, parts = list(of_file), {"train": [], "heldout": []}
    for place, i in enumerate(rng.permutation(len(files))):
        own = of_file[files[i]]
        told = described(own)
        kept = own if place >= heldout else [own[rng.integers(len(own))]]
        rng.random(len(kept))  # keeps what is held out that of docs/tiny_images.md
        parts["train" if place >= heldout else "heldout"] += [
            {
                "question": row["question"],
                "answer": row["answer"],
                "image": f"images/{place}.png",
                "file": row["file"],
                "told": told,
            }
            for row in kept
        ]
    shuffled = rng.permutation(len(parts["train"]))
    return parts | {"train": [parts["train"][i] for i in shuffled]}


# ---- The blank model -------------------------------------------------------------------


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer of the questions' and answers' words, with a chat template."""
    words = [*SPECIAL, *WORDS.split(" "), *SHAPES, *COLORS]
    model = tokenizers.models.WordLevel({x: i for i, x in enumerate(words)}, "<unk>")
    tok = tokenizers.Tokenizer(model)
    piece = tokenizers.Regex(r"\\boxed\{|\w+|\n|[^\w\s]")
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Split(piece, "removed", invert=True)
    tok.add_special_tokens(SPECIAL[:-1])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tok,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        mask_token=SPECIAL[2],
        unk_token=SPECIAL[-1],
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def weigh(folder: pathlib.Path, parts: tuple, rng: np.random.Generator) -> None:
    """Writes the weights of a folder's model: normal, variance 1 / (a product's inputs).

    parts: of hf.parameters.
    """
    cfg, weights = families.read_config(folder), {}
    for _, spec, stored in hf.parameters(cfg, parts):
        for layers, place in stored.items():
            shape = hf.tensor_shape(spec, cfg, len(layers))
            if spec.init == "normal":
                inputs = np.prod(shape[1:] or shape)
                x = rng.normal(0, inputs**-0.5, shape)
            else:
                x = np.full(shape, float(spec.init == "ones"))
            weights[place.name] = x.astype(np.float32)
    safetensors.numpy.save_file(
        weights, folder / "model.safetensors", metadata={"format": "pt"}
    )


def blank(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Writes the model, with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tok = tokenizer()
    tok.save_pretrained(folder)
    config = CONFIG | {
        "vocab_size": len(tok),
        "mask_token_id": tok.mask_token_id,
        "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weigh(folder, ("lm", "vision"), rng)


def main():
    """Writes the pictures, the questions and the blank model."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", default="runs/pictures", help="folder to write to")
    p.add_argument("--data", type=pathlib.Path, help="of easy_vqa, where it lies apart")
    p.add_argument("--heldout", type=int, default=1000, help="pictures set aside")
    p.add_argument("--train", type=int, default=8000, help="questions of train.jsonl")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    if args.data is None:
        found = importlib.util.find_spec("easy_vqa")
        if found is None:
            sys.exit(
                f"error: the pictures are a package: .venv/bin/pip install {PACKAGE}"
            )
        args.data = pathlib.Path(found.origin).parent / "data"
    if not (args.data / "train" / "questions.json").is_file():
        p.error(f"--data={args.data}: no train/questions.json; it is {PACKAGE}'s data")
    rows = read(args.data)
    count = len({row["file"] for row in rows})
    if not 0 < args.heldout < count:
        p.error(f"--heldout must lie between 0 and {count}, the number of pictures")
    if args.train < 1:
        p.error("--train must be positive: without any there is nothing to learn")

    out, rng = pathlib.Path(args.out), np.random.default_rng(args.seed)
    (out / "images").mkdir(parents=True, exist_ok=True)
    parts = split(rows, rng, args.heldout)
    told = [row for row in parts["train"] if row["told"]]
    for name, words in (("told", "{} {}"), ("described", "color {} shape {}")):
        parts[name] = [
            row
            | {
                "response": f"{words.format(*row['told'].split())} "
                f"\\boxed{{{row['answer']}}}"
            }
            for row in told
        ]
    parts["train"] = parts["train"][: args.train]
    asked, others = parts["heldout"], parts["heldout"][1:] + parts["heldout"][:1]
    parts["swapped"] = [
        a | {"image": b["image"]} for a, b in zip(asked, others, strict=True)
    ]
    files = {
        row["image"]: row["file"]
        for x in ("told", "train", "heldout")
        for row in parts[x]
    }
    for image, file in files.items():
        shutil.copyfile(file, out / image)
    for name, part in parts.items():
        kept = ("question", "answer", "response", "image")
        kept = [{key: row[key] for key in kept if key in row} for row in part]
        text = "".join(json.dumps(row) + "\n" for row in kept)
        (out / f"{name}.jsonl").write_text(text)
        print(f"{out}/{name}.jsonl: {len(part)} questions")
    blank(out / "blank", rng)
    print(f"{out}/blank: a model to train")


if __name__ == "__main__":
    main()
