"""Makes a tiny MMaDA that is to answer questions about real pictures, which it reads as codes.

    .venv/bin/python examples/pictures/make.py
    .venv/bin/python -m examples.pictures.codes
    .venv/bin/python -m dllm_jax.train --config=configs/sft.py:codes
    .venv/bin/python -m dllm_jax.train --config=configs/tracerl.py:codes

The questions and the pictures are those of make.py, and so is what is held out. The script
trains a MAGVIT-v2 on the pictures of train.jsonl (tokenizer.py) and writes to runs/pictures

    codes/blank/        an MMaDA of random weights, and in vq/ the trained MAGVIT-v2
    codes/train.jsonl   the questions of told.jsonl, with the codes of their pictures, half of
                        which are mirrored: a model of random weights needs many
    codes/rebuilt.png   held-out pictures, and below them what their 64 codes say of each

It says how far off the reconstructions of the held-out pictures are, and of how many held-out
questions a guess that knows the question alone is right.
"""

import argparse
import collections
import json
import os
import pathlib
import sys

import numpy as np

# Its notice that torch is missing is no news.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import transformers

from dllm_jax.models.vision import codes
from examples.pictures import make, tokenizer

IMAGE = ["<|soi|>", "<|eoi|>", "<|t2i|>", "<|mmu|>"]
SHOWN = 12  # pictures of rebuilt.png
CONFIG = {
    "model_type": "mmada",
    "attention_pattern": "block",  # MMaDA's is full
    "block_size": 4,
    "codebook_size": 2**tokenizer.BITS,
    "d_model": 64,
    "mlp_hidden_size": 192,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,  # prompts are short: more pairs of a head tell near places apart
    "weight_tying": False,
    "max_sequence_length": 256,
}


def text_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Returns the tokenizer of make.py, with what stands around images."""
    tok = make.tokenizer()
    tok.add_special_tokens(
        {"bos_token": make.SPECIAL[1], "additional_special_tokens": IMAGE}
    )
    return tok


def blank(folder: pathlib.Path, rng: np.random.Generator) -> None:
    """Writes the model, with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tok = text_tokenizer()
    tok.save_pretrained(folder)
    config = CONFIG | {
        "embedding_size": -(-(len(tok) + CONFIG["codebook_size"]) // 16) * 16,
        "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id,
        "mask_token_id": tok.mask_token_id,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    make.weigh(folder, ("lm",), rng)


def records(file: pathlib.Path) -> list[dict]:
    """Returns the records of a file of make.py's; ends the program where there is none."""
    if not file.is_file():
        sys.exit(f"error: {file}: examples/pictures/make.py writes it")
    return [json.loads(line) for line in file.read_text().splitlines()]


def blind(learned: list[dict], asked: list[dict]) -> float:
    """Returns the share of questions that their own commonest answer is right for.

    Which it is, is learned: per question, word for word, as no picture is looked at.
    """
    answers = collections.defaultdict(collections.Counter)
    for row in learned:
        answers[row["question"]][row["answer"]] += 1
    said = [answers[row["question"]].most_common(1) for row in asked]
    right = [
        bool(word) and word[0][0] == row["answer"]
        for word, row in zip(said, asked, strict=True)
    ]
    return sum(right) / len(right)


def encoded(rows: list[dict], folder: pathlib.Path, params, seed: int) -> list[dict]:
    """Returns records with the ids of their pictures' codes in place of files.

    A coin of its own decides whether a record's picture is mirrored, left to right: colour
    and shape stay what they are.
    """
    names = list(dict.fromkeys(row["image"] for row in rows))
    pixels_nChw = tokenizer.pictures(folder, rows)
    seen = [
        dict(zip(names, tokenizer.encoded(params, x), strict=True))
        for x in (pixels_nChw, pixels_nChw[..., ::-1])
    ]
    first, made = len(text_tokenizer()), []
    coins = np.random.default_rng(seed).integers(2, size=len(rows))
    for row, coin in zip(rows, coins, strict=True):
        ids = [first + int(code) for code in seen[coin][row["image"]]]
        kept = {key: row[key] for key in ("question", "answer", "response")}
        made.append(kept | {"image_token_ids": ids})
    return made


def main():
    """Trains the tokenizer of images, writes it and the blank model, and reports."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", default="runs/pictures", help="folder that make.py wrote")
    p.add_argument(
        "--steps", type=int, default=1200, help="of the tokenizer's training"
    )
    p.add_argument("--batch", type=int, default=8, help="pictures of a step")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    out, rng = pathlib.Path(args.out), np.random.default_rng(args.seed)
    learned, asked, told = (
        records(out / f"{name}.jsonl") for name in ("train", "heldout", "told")
    )
    seen, unseen = (tokenizer.pictures(out, rows) for rows in (learned, asked))
    if not (args.steps > 0 and 0 < args.batch <= len(seen)):
        p.error(f"--steps and --batch must be positive, --batch at most {len(seen)}")
    folder = out / "codes" / "blank"
    blank(folder, rng)
    params = tokenizer.trained(folder / "vq", seen, args.steps, args.batch, rng)
    found, made = tokenizer.rebuilt(params, unseen)
    error = np.square(made - unseen).mean(axis=(1, 2, 3))
    print(
        f"{len(unseen)} held-out pictures: mean squared error {error.mean():.5f}, worst "
        f"{error.max():.5f}, of pixels in [-1, 1]; {len(np.unique(found))} codes of "
        f"{2**tokenizer.BITS}\nguesses from the question alone: {blind(learned, asked):.1%}"
    )
    rows = encoded(told, out, params, args.seed)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (out / "codes" / "train.jsonl").write_text(text)
    rows = [codes.shown(x[:SHOWN]) for x in (unseen, made)]
    tokenizer.sheet(*rows).save(out / "codes" / "rebuilt.png")


if __name__ == "__main__":
    main()
