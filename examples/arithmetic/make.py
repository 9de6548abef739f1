"""Makes what the default run needs besides weights, and a blank checkpoint for SFT.

    python examples/arithmetic/make.py

writes train.jsonl and heldout.jsonl (disjoint problems: sums of two numbers below 1000)
beside this file, and a randomly initialised SDAR-format checkpoint with a character
tokenizer to runs/arithmetic/blank, from which `configs/sft.py` trains the bundled model.

The responses to learn from come in two manners: half answer at once, half work it out
digit by digit. A model trained on both does both, and is mostly wrong where it guesses;
which manner pays is left to reinforcement learning. `--worked=1 --folder=DIR` writes the same
problems, all of them worked out, to another folder.
"""

import argparse
import json
import os
import pathlib

import ml_dtypes  # noqa: F401  (teaches numpy about bfloat16)
import numpy as np
import safetensors.numpy
import tokenizers

# Its notice that torch is missing is no news.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import transformers

HERE = pathlib.Path(__file__).parent
PAIRS = 1_000_000  # of numbers below 1000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"]
WORDS = ["<unk>", "user", "assistant", "system", "\\boxed{"]
CHARS = [chr(c) for c in range(32, 127)] + ["\n"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 112,  # 105 tokens, filled up to a multiple of 16
}


def respond(a: int, b: int, *, worked: bool) -> str:
    """Returns the text that answers a + b, at once or digit by digit from the right."""
    steps, carry, x, y = "", 0, a, b
    while worked and (x or y or not steps):
        digits = x % 10 + y % 10 + carry
        steps += f"{x % 10}+{y % 10}{'+1' if carry else ''}={digits},"
        carry, x, y = digits // 10, x // 10, y // 10
    return f"{steps}\\boxed{{{a + b}}}"


def problems(rng: np.random.Generator, count: int, share: float) -> list[dict]:
    """Returns different problems in random order; a `share` of responses is worked."""
    pairs = rng.choice(PAIRS, size=count, replace=False)
    return [
        {
            "question": f"{a}+{b}",
            "answer": str(a + b),
            "response": respond(a, b, worked=bool(rng.random() < share)),
        }
        for a, b in zip((pairs // 1000).tolist(), (pairs % 1000).tolist(), strict=True)
    ]


def tokenizer(
    words: tuple = (), chat: str = CHAT
) -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer of single characters and a few words, with a chat template.

    words: further ones, whose ids follow those of the characters.
    """
    vocab = {token: i for i, token in enumerate([*SPECIAL, *WORDS, *CHARS, *words])}
    tok = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[], unk_token="<unk>")
    )
    tok.decoder = tokenizers.decoders.Fuse()
    tok.add_special_tokens(SPECIAL)
    added = [*WORDS[1:], *words]
    tok.add_tokens([tokenizers.AddedToken(w, normalized=False) for w in added])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tok,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        mask_token="<|MASK|>",
        unk_token="<unk>",
        chat_template=chat,
        clean_up_tokenization_spaces=False,
    )


def weights(rng: np.random.Generator, shape: dict) -> dict[str, np.ndarray]:
    """Returns random SDAR weights under their Hugging Face names: normal, std 0.02.

    shape: the sizes that config.json has, with the keys of SHAPE.
    """
    d, f, h = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * h, shape["num_key_value_heads"] * h
    shapes = {"model.embed_tokens.weight": (shape["vocab_size"], d)}
    for i in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "self_attn.q_proj.weight": (q, d),
            layer + "self_attn.k_proj.weight": (kv, d),
            layer + "self_attn.v_proj.weight": (kv, d),
            layer + "self_attn.o_proj.weight": (d, q),
            layer + "self_attn.q_norm.weight": (h,),
            layer + "self_attn.k_norm.weight": (h,),
            layer + "mlp.gate_proj.weight": (f, d),
            layer + "mlp.up_proj.weight": (f, d),
            layer + "mlp.down_proj.weight": (d, f),
            layer + "input_layernorm.weight": (d,),
            layer + "post_attention_layernorm.weight": (d,),
        }
    shapes["model.norm.weight"] = (d,)
    shapes["lm_head.weight"] = (shape["vocab_size"], d)
    return {
        name: np.ones(size, np.float32)
        if "norm" in name
        else rng.normal(0, 0.02, size).astype(np.float32)
        for name, size in shapes.items()
    }


def write_blank(folder: pathlib.Path, rng, shape: dict, tok, **told) -> None:
    """Writes a checkpoint of random weights, in the format of SDAR unless told otherwise.

    rng: draws the weights; shape: see `weights`; tok: its tokenizer; told: further keys of
    config.json, of which torch_dtype is the one that weights are stored in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tok.save_pretrained(folder)
    config = {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "block_size": 4,
        "mask_token_id": tok.mask_token_id,
        "bos_token_id": tok.eos_token_id,
        "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **shape,
        **told,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stored = {
        x: w.astype(config["torch_dtype"]) for x, w in weights(rng, shape).items()
    }
    safetensors.numpy.save_file(
        stored, folder / "model.safetensors", metadata={"format": "pt"}
    )
    print(f"{folder}: a model to train")


def write_records(folder: pathlib.Path, rows: list[dict], heldout: int) -> None:
    """Writes the first rows to heldout.jsonl, and the others to train.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("heldout", rows[:heldout]), ("train", rows[heldout:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text)
        print(f"{folder / name}.jsonl: {len(part)} problems")


def check_counts(p: argparse.ArgumentParser, args, most: int) -> None:
    """Ends the command where --heldout or --train is below 1, or both ask for too many.

    most: how many different problems there are.
    """
    counts = args.heldout, args.train
    if min(counts) < 1 or sum(counts) > most:
        p.error(f"--heldout and --train: 1 or more each, of {most:,} problems")


def check_share(p: argparse.ArgumentParser, args, name: str) -> None:
    """Ends the command where an argument is no share."""
    share = getattr(args, name)
    if not 0 <= share <= 1:
        p.error(f"--{name}={share}: a share, from 0 to 1")


def main():
    """Writes the problems and the blank checkpoint."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--blank", default="runs/arithmetic/blank", help="checkpoint folder")
    p.add_argument("--heldout", type=int, default=256, help="problems set aside")
    p.add_argument("--train", type=int, default=8000, help="problems to train on")
    p.add_argument(
        "--worked", type=float, default=0.5, help="share of worked responses"
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--folder", type=pathlib.Path, default=HERE, help="where the problems go"
    )
    args = p.parse_args()
    check_counts(p, args, PAIRS)
    check_share(p, args, "worked")
    rng = np.random.default_rng(args.seed)

    rows = problems(rng, args.heldout + args.train, args.worked)
    write_records(args.folder, rows, args.heldout)
    write_blank(pathlib.Path(args.blank), rng, SHAPE, tokenizer())


if __name__ == "__main__":
    main()
