"""Block diffusion in plain PyTorch, batched and cached, as model cards show it.

The other half of benchmarks/peer.py: it needs torch and transformers, not JAX. Makes a
random Qwen3-shaped model in FOLDER where there is none, says "ready", and then answers
each line of JSON on its input, {"prompts", "new", "rows"}, with its seconds.
"""

import json
import pathlib
import sys
import time

import torch
import transformers

BLOCK, MASK = 4, 0
FAR = torch.finfo(torch.float32).min


def make(folder: pathlib.Path, shape: dict):
    """Saves a random model, with the two fields that make it a block-diffusion one."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**shape, block_size=BLOCK, mask_token_id=MASK)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


@torch.no_grad()
def answer(model, prompts, new):
    """Answers a batch: prompts padded on the left to whole blocks, to the longest limit."""
    rows, pad = len(prompts), model.config.pad_token_id or 1
    length = -(-max(map(len, prompts)) // BLOCK) * BLOCK
    total = length + -(-max(new) // BLOCK) * BLOCK
    tokens = torch.full((rows, total), MASK)
    empty = torch.tensor([length - len(prompt) for prompt in prompts])
    for row, prompt in zip(tokens, prompts, strict=True):
        row[:length] = torch.tensor([pad] * (length - len(prompt)) + prompt)
    place = torch.arange(total)
    position = (place[None] - empty[:, None]).clamp(min=0)

    def seen(first, last):  # whole blocks up to a query's own, without the padding
        block = place[first:last] // BLOCK
        inside = place[None, :last] // BLOCK <= block[:, None]
        real = place[None, :last] >= empty[:, None]
        return torch.where(inside[None] & real[:, None], 0.0, FAR)[:, None]

    def forward(first, last, cache):
        return model(
            tokens[:, first:last],
            past_key_values=cache,
            attention_mask=seen(first, last),
            position_ids=position[:, first:last],
            use_cache=True,
        ).logits

    cache = transformers.DynamicCache()
    forward(0, length, cache)
    for first in range(length, total, BLOCK):
        span = slice(first, first + BLOCK)
        masked = torch.ones(rows, BLOCK, dtype=torch.bool)
        while masked.any():
            logits = forward(first, first + BLOCK, cache)
            cache.crop(-BLOCK)
            logits[..., MASK] = FAR
            drawn = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1)
            drawn = drawn.view(rows, BLOCK)
            leading = masked & (masked.cumsum(1) == 1)
            take = leading | (masked & (drawn % 2 == 0))
            tokens[:, span] = torch.where(take, drawn, tokens[:, span])
            masked &= ~take
        forward(first, first + BLOCK, cache)


def main(folder: pathlib.Path, shape: dict):
    """Serves requests until the input ends."""
    if not (folder / "config.json").exists():
        make(folder, shape)
    model = transformers.Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts, new, rows = asked["prompts"], asked["new"], asked["rows"]
        start = time.perf_counter()
        for first in range(0, len(prompts), rows):
            part = slice(first, first + rows)
            answer(model, prompts[part], new[part])
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]))
