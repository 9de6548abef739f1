"""Block diffusion, canvases and updates in plain PyTorch, as fast as it can be written.

The other half of benchmarks/peer.py: it needs torch and transformers, not JAX. Makes a
random Qwen3-shaped model in FOLDER where there is none, says "ready", and then answers
each line of JSON on its input, {"task": a key of TASKS, ...}, with its seconds and what a
task returns.

Sampling is batched and ragged: every row is at its own block, a block's keys are kept by
the forward that begins the next one, and a batch shrinks as its rows end. No forward
computes what no row needs. An update packs nothing: a row for every round, eight rows a
microbatch, nothing recomputed.
"""

import json
import pathlib
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
import transformers

BLOCK, MASK = 4, 0
MICRO = 8  # rows of an update's microbatch


def make(folder: pathlib.Path, shape: dict):
    """Saves a random model, with the two fields that make it a block-diffusion one."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**shape, block_size=BLOCK, mask_token_id=MASK)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


def rms_norm(x, weight):
    """Scales the last dimension to unit mean square."""
    return F.rms_norm(x, weight.shape, weight, 1e-6)


class Tower:
    """The weights of a Qwen3 decoder in a flat list a layer, and what is done with them."""

    def __init__(self, model):
        """model: transformers' own; q, k, v and gate, up become one matrix each."""
        cfg = model.config
        self.heads, self.kv = cfg.num_attention_heads, cfg.num_key_value_heads
        self.size, self.theta = cfg.head_dim, 1e4
        parameters = getattr(cfg, "rope_parameters", None) or {}
        self.theta = parameters.get("rope_theta", getattr(cfg, "rope_theta", 1e4))
        self.embed = model.model.embed_tokens.weight.detach().clone()
        self.norm = model.model.norm.weight.detach().clone()
        self.layers = [self.layer(x) for x in model.model.layers]
        turning = torch.arange(0, self.size, 2) / self.size
        self.frequency = self.theta**-turning

    @staticmethod
    def layer(x) -> dict:
        """Returns a layer's weights by name."""
        a, m = x.self_attn, x.mlp
        named = {
            "in": x.input_layernorm.weight,
            "qkv": torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]),
            "q": a.q_norm.weight,
            "k": a.k_norm.weight,
            "out": a.o_proj.weight,
            "post": x.post_attention_layernorm.weight,
            "up": torch.cat([m.gate_proj.weight, m.up_proj.weight]),
            "down": m.down_proj.weight,
        }
        return {name: weight.detach().clone() for name, weight in named.items()}

    def parameters(self):
        """Returns all weights."""
        return [self.embed, self.norm, *(w for p in self.layers for w in p.values())]

    def rotate(self, x, angle):
        """Rotates heads [R, n, H], the first half of a head's dimensions with the second."""
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def trunk(self, tokens, position, mask, cache=None, real=None):
        """Returns hidden states [B, W, D].

        mask: boolean, [B or 1, 1, W, S]. cache: a list of (k, v), each [B, K, S, H], where
        the own keys are written at their positions before it is read as far as the mask is
        wide; None: the own keys are all there are. real: [B, W], what is to be computed,
        None for all: the rest is seen by attention alone, and comes back as 0.
        """
        B, W = tokens.shape
        at = slice(None) if real is None else real.flatten().nonzero()[:, 0]
        row, place = torch.arange(B).repeat_interleave(W)[at], position.flatten()[at]

        def spread(x):
            if real is None:
                return x.view(B, W, *x.shape[1:])
            out = x.new_zeros(B * W, *x.shape[1:])
            out[at] = x
            return out.view(B, W, *x.shape[1:])

        x = self.embed[tokens.flatten()[at]]
        angle = place[:, None] * self.frequency
        split = [self.heads * self.size, self.kv * self.size, self.kv * self.size]
        for number, p in enumerate(self.layers):
            parts = (rms_norm(x, p["in"]) @ p["qkv"].T).split(split, dim=-1)
            q, k, v = (y.view(len(x), -1, self.size) for y in parts)
            q = self.rotate(rms_norm(q, p["q"]), angle)
            k = self.rotate(rms_norm(k, p["k"]), angle)
            if cache is None:
                k, v = (spread(y).transpose(1, 2) for y in (k, v))
            else:
                for kept, fresh in zip(cache[number], (k, v), strict=True):
                    kept[row, :, place] = fresh
                k, v = (kept[:, :, : mask.shape[-1]] for kept in cache[number])
            y = F.scaled_dot_product_attention(
                spread(q).transpose(1, 2),
                k,
                v,
                attn_mask=mask,
                enable_gqa=self.kv < self.heads,
            )
            y = y.transpose(1, 2).reshape(B * W, -1)[at]
            x = x + y @ p["out"].T
            gate, up = (rms_norm(x, p["post"]) @ p["up"].T).chunk(2, dim=-1)
            x = x + (F.silu(gate) * up) @ p["down"].T
        return spread(rms_norm(x, self.norm))

    def logits(self, x):
        """Returns logits; the mask token is forbidden."""
        z = x @ self.embed.T
        z[..., MASK] = torch.finfo(z.dtype).min
        return z

    def empty(self, rows: int, slots: int):
        """Returns a cache of so many positions."""
        shape = rows, self.kv, slots, self.size
        return [(torch.zeros(shape), torch.zeros(shape)) for _ in self.layers]


# ---- Sampling ------------------------------------------------------------------------


def forced(logits, masked):
    """Returns (drawn, take): a step's tokens at the forced rate of benchmarks/decode.py."""
    drawn = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1).view(masked.shape)
    leading = masked & (masked.cumsum(1) == 1)
    return drawn, leading | (masked & (drawn % 2 == 0))


@torch.no_grad()
def answer(tower: Tower, prompts, new):
    """Answers a batch: rows at their own blocks, fewer and fewer of them."""
    length = torch.tensor([len(prompt) for prompt in prompts])
    total = -(-(length + torch.tensor(new)) // BLOCK) * BLOCK
    S = int(total.max())
    tokens = torch.full((len(prompts), S), MASK)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    cache, slot = tower.empty(len(prompts), S), torch.arange(S)
    # Whole blocks of prompts, as wide as the longest; what lies behind is overwritten.
    begin = length // BLOCK * BLOCK
    if W := int(begin.max()):
        mask = (slot[None, :W] // BLOCK <= slot[:W, None] // BLOCK)[None, None]
        place = slot[None, :W].expand(len(prompts), W)
        tower.trunk(tokens[:, :W], place, mask, cache, place < begin[:, None])
    # Whether the block before `begin` is due.
    keep = torch.zeros(len(prompts), dtype=torch.bool)
    wide = torch.arange(2 * BLOCK) - BLOCK
    while len(begin):
        # A window is the block before, where its keys are due, and the block itself.
        first = 0 if keep.any() else BLOCK
        place = (begin[:, None] + wide[None, first:]).clamp(min=0)
        end = int(begin.max()) + BLOCK
        seen = slot[None, None, :end] // BLOCK <= place[..., None] // BLOCK
        window = tokens.gather(1, place)
        due = torch.cat(
            [keep[:, None].expand(-1, BLOCK), keep[:, None].new_ones(len(keep), BLOCK)],
            1,
        )
        x = tower.trunk(window, place, seen[:, None], cache, due[:, first:])
        own = place[:, -BLOCK:]
        masked = (tokens.gather(1, own) == MASK) & (own >= length[:, None])
        drawn, take = forced(tower.logits(x[:, -BLOCK:]), masked)
        tokens.scatter_(1, own, torch.where(take, drawn, tokens.gather(1, own)))
        keep = ~(masked & ~take).any(1)
        begin = begin + BLOCK * keep
        live = begin < total
        if not live.all():
            tokens, begin, total, length, keep = (
                y[live] for y in (tokens, begin, total, length, keep)
            )
            cache = [tuple(y[live] for y in pair) for pair in cache]


def sample(tower, asked):
    """Answers all prompts, so many rows at a time."""
    for first in range(0, len(asked["prompts"]), asked["rows"]):
        part = slice(first, first + asked["rows"])
        answer(tower, asked["prompts"][part], asked["new"][part])


@torch.no_grad()
def canvas(tower, asked):
    """Fills canvases under full attention, two tokens of a block a step (LLaDA).

    cache "prefix": what lies before the block is computed when the block begins, which
    also is its first step, and its keys are read until the next one.
    """
    rows, prompt, new, block = (asked[k] for k in ("rows", "prompt", "new", "block"))
    T = prompt + new
    tokens = torch.full((rows, T), MASK)
    tokens[:, :prompt] = torch.randint(2, len(tower.embed), (rows, prompt))
    place = torch.arange(T)[None].expand(rows, T)
    for begin in range(prompt, T, block):
        cache = tower.empty(rows, T) if asked["cache"] == "prefix" else None
        for step in range(block // 2):
            first = begin if cache is not None and step else 0
            mask = torch.ones(1, 1, T - first, T, dtype=torch.bool)
            at = place[:, first:]
            x = tower.trunk(tokens[:, first:], at, mask, cache)
            logits = tower.logits(x[:, begin - first : begin - first + block])
            prob = logits.softmax(-1)
            drawn = torch.multinomial(prob.flatten(0, 1), 1).view(rows, block)
            sure = prob.gather(-1, drawn[..., None])[..., 0]
            own = tokens[:, begin : begin + block]
            sure = torch.where(own == MASK, sure, -1.0)
            chosen = sure.topk(2, dim=1).indices
            own.scatter_(1, chosen, drawn.gather(1, chosen))


# ---- The update ----------------------------------------------------------------------


def update(tower, asked):
    """One AdamW step of the clipped policy loss on rows that the other side laid out.

    asked["file"]: an .npz of tokens, pos, end, group [n, T], where, target, weight, adv and
    old [n, U], a row for every round. A slot sees the clean ones before `end` and its group.
    """
    arrays = np.load(asked["file"])
    data = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    if not hasattr(tower, "optimizer"):
        for weight in tower.parameters():
            weight.requires_grad_(True)
        # The same work, and the next step's gradient is of the same weights.
        tower.optimizer = torch.optim.AdamW(tower.parameters(), lr=0.0)
    slot = torch.arange(data["tokens"].shape[1])
    for first in range(0, len(data["tokens"]), MICRO):
        row = {name: x[first : first + MICRO] for name, x in data.items()}
        clean = row["group"] < 0
        sees = (slot < row["end"][..., None]) & clean[:, None]
        same = row["group"][..., None] == row["group"][:, None]
        mask = (sees | (same & ~clean[:, None]))[:, None]
        x = tower.trunk(row["tokens"], row["pos"], mask)
        where = row["where"][..., None].expand(-1, -1, x.shape[-1])
        real = row["weight"] > 0
        z = tower.logits(x.gather(1, where)[real])
        logp = z.log_softmax(-1).gather(-1, row["target"][real][:, None])[:, 0]
        adv, old, weight = (row[name][real] for name in ("adv", "old", "weight"))
        ratio = (logp - old).exp()
        surrogate = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        kl = (old - logp).exp() - 1 - (old - logp)
        (weight * (0.01 * kl - surrogate)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(tower.parameters(), 1.0)
    tower.optimizer.step()
    tower.optimizer.zero_grad()
    return {"gradient_norm": float(norm)}


TASKS = {"sample": sample, "canvas": canvas, "update": update}


def main(folder: pathlib.Path, shape: dict):
    """Serves requests until the input ends."""
    if not (folder / "config.json").exists():
        make(folder, shape)
    tower = Tower(
        transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    )
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        for weight in tower.parameters():
            weight.requires_grad_(asked["task"] == "update")
        start = time.perf_counter()
        found = TASKS[asked["task"]](tower, asked) or {}
        found["seconds"] = time.perf_counter() - start
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]))
