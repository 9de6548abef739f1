"""LoRA's adapters as a folder that PEFT reads, beside the original checkpoint.

Of each adapted tensor `base_model.model.MODULE.lora_A.weight` [rank, in] and `...lora_B.weight`
[out, rank], in safetensors; what PEFT's LoraConfig is to be, in adapter_config.json.

Letters: i a tensor's columns, o its rows.
"""

import collections
import dataclasses
import json
import pathlib
import shutil

import numpy as np
import safetensors.numpy

from dllm_jax import exits
from dllm_jax.models import export, hf
from dllm_jax.models.config import ModelConfig

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Families whose experts transformers 5 has in one tensor: PEFT takes the projections of dense
# layers, of the same names, for those of experts, and adds no adapters to them.
FUSED = ("qwen3_moe",)


def save(path, cfg: ModelConfig, trained: dict, like: str) -> None:
    """Writes adapters into a new folder.

    cfg: of what is trained, with its `lora`; trained: `lora.specs` says what is in it; like:
    the original, as PEFT is to find it. Heads of values are left out: PEFT knows none. Warns
    of adapters that PEFT would not add.
    """
    tensors, ranks = {}, {}
    for name, (rows, parts) in adapted(cfg, trained).items():
        module = name.removesuffix(".weight")
        a_Ci, b_oC = one_pair(parts, cfg.lora.rank, rows)
        ranks[module] = len(a_Ci)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a_Ci
        tensors[f"base_model.model.{module}.lora_B.weight"] = b_oC
    if cfg.family in FUSED and any(".mlp." in module for module in ranks):
        exits.warn(
            f"with transformers 5 PEFT adds no adapters to dense layers of {cfg.family}; use "
            "to-hf, which adds all"
        )
    wanted = sum(x.nbytes for x in tensors.values())
    with export.whole(pathlib.Path(path), wanted) as partial:
        partial.mkdir()
        text = json.dumps(config(cfg.lora, ranks, like), indent=2)
        (partial / CONFIG).write_text(text + "\n")
        safetensors.numpy.save_file(tensors, partial / WEIGHTS, {"format": "pt"})
        shutil.copymode(partial / CONFIG, partial / WEIGHTS)


def adapted(cfg: ModelConfig, trained: dict) -> dict[str, tuple[int, list]]:
    """Returns {tensor name: (its rows, parts)} of those that have adapters.

    parts: of each parameter in it that is adapted, where its rows begin, and its own A and B.
    """
    rows, parts = collections.Counter(), collections.defaultdict(list)
    whole = dataclasses.replace(cfg, lora=None)
    for (stack, *rest), spec, stored in hf.parameters(whole, ()):
        pair = trained.get(stack.key, {}).get(rest[0].key) if rest else None
        for index, place in stored.items():
            size = hf.tensor_shape(spec, whole, len(index))[0]
            rows[place.name] = place.row + size
            if pair:
                a, b = (np.asarray(pair[x][index], np.float32) for x in "ab")
                parts[place.name].append((place.row, a, b))
    return {name: (rows[name], its) for name, its in parts.items()}


def one_pair(parts: list, rank: int, rows: int):
    """Returns (A [C, in], B [out, C]) of a tensor of `rows` rows.

    parts: of `adapted`. Of several, such as queries and keys in one tensor, B has a block for
    each.
    """
    a_Ci = np.concatenate([a.reshape(-1, rank).T for _, a, _ in parts])
    b_oC = np.zeros((rows, len(a_Ci)), np.float32)
    for number, (first, _, b) in enumerate(parts):
        block = b.reshape(rank, -1).T
        b_oC[first : first + len(block), number * rank : (number + 1) * rank] = block
    return np.ascontiguousarray(a_Ci), b_oC


def config(lora, ranks: dict[str, int], like: str) -> dict:
    """Returns the LoraConfig; ranks: of each module's A and B.

    Modules have their whole names: of others that end alike, such as experts', PEFT would
    adapt all. No task is named, as PEFT's classes for tasks want methods that remote code of
    diffusion models lacks.
    """
    wide = {module: rank for module, rank in ranks.items() if rank != lora.rank}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": like,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(ranks),
        "rank_pattern": wide,
        "alpha_pattern": {
            module: lora.alpha * rank / lora.rank for module, rank in wide.items()
        },
    }
