"""Writes the goldens once more with other numbers: DLLM_GOLDENS must not tell the difference.

    python -m tests.goldens.disguise OUT
    DLLM_GOLDENS=OUT make test

Every value stays what the reference computed, because what changes is of no effect: token
ids are renamed, feed-forward layers get units of weight zero and attention a group of
heads of weight zero, a layer that adds nothing stands between the first and the second,
the shards are three, and the last of many cases is left out.
"""

import json
import pathlib
import re
import shutil
import sys

import numpy as np
import safetensors.numpy

HERE = pathlib.Path(__file__).parent
AT = 1  # the layer that does nothing
UNITS = 5  # more in each feed-forward layer and expert
TINY = 1e-30  # of weights of which two are multiplied at least: nothing is left of them
IDS = {"prompt", "prompts", "response", "response_ids", "output", "completions"}
IDS |= {"sequences", "generated", "input_ids", "labels", "extended_input_ids"}
IDS |= {"stop_words", "stopping_criteria_idx", "eot_token", "draws"}
IDS |= {f"{x}_id" for x in ("pad", "mask")}
IDS |= {f"{x}_token_id" for x in ("pad", "mask", "eos", "bos")}
WIDTHS = {"intermediate_size", "mlp_hidden_size", "moe_intermediate_size"}
LAYERS = {"num_hidden_layers", "n_layers", "max_window_layers"}
TABLES = r"(.*embed.*|.*wte|lm_head|model\.transformer\.ff_out)\.weight"
FEW = 4  # cases that are all needed


def renamed(vocab: int, folder: pathlib.Path) -> np.ndarray:
    """Returns the new id of every old one; codes of images, a range of ids, stay where they are."""
    file = folder / "sample.json"
    told = json.loads(file.read_text()) if file.exists() else {}
    args = [case.get("args", {}) for case in told.get("cases", ())]
    words = min((x["text_vocab"] for x in args if "text_vocab" in x), default=vocab)
    new = np.random.default_rng(vocab).permutation(words)
    return np.concatenate([new, np.arange(words, vocab)])


class Family:
    """How the numbers of one family's fixtures change."""

    def __init__(self, folder: pathlib.Path):
        path = folder / "checkpoint/config.json"
        path = path if path.exists() else HERE / "sdar/checkpoint/config.json"
        self.config = json.loads(path.read_text())
        self.new = renamed(self.config["vocab_size"], folder)
        # In a fused projection the new rows would have to stand in between.
        self.grows = self.config["model_type"] != "llada2_moe"
        # A router would count the new layer's tokens, and a bias have a gradient.
        self.deeper = self.config["model_type"] not in (
            "sdar_moe",
            "llada2_moe",
            "Dream",
        )
        self.more_heads = self.grows and "head_dim" in self.config

    def name(self, name: str) -> str:
        """Returns what a tensor is called, one layer later if behind the new one."""

        def later(match):
            number = int(match[2])
            return f"{match[1]}.{number + (number >= AT)}."

        return re.sub(r"(layers|blocks)\.(\d+)\.", later, name) if self.deeper else name

    def weight(self, name: str, x: np.ndarray) -> np.ndarray:
        """Returns a weight, or its gradient, with renamed rows or rows of zeros more."""
        if re.fullmatch(TABLES, name):
            return x[np.argsort(self.new)]
        if not self.grows:
            return x
        group = self.config.get("head_dim", 0) * self.more_heads
        q = self.config.get("num_attention_heads", 1)
        q = q // self.config.get("num_key_value_heads", q) * group
        for pattern, axis, more in (
            (r".*\.(gate_proj|up_proj|ff_proj)\.weight", 0, UNITS),
            (r".*(\.down_proj|blocks\.\d+\.ff_out)\.weight", 1, UNITS),
            (r".*\.[kv]_proj\..*", 0, group),
            (r".*\.q_proj\..*", 0, q),
            (r".*\.(o_proj|attn_out)\.weight", 1, q),
        ):
            if re.fullmatch(pattern, name):
                pad = [(0, more * (i == axis)) for i in range(x.ndim)]
                return np.pad(x, pad)
        return x

    def weights(self, tensors: dict) -> dict:
        """Returns a checkpoint's tensors, with those of the layer that does nothing."""
        out = {self.name(k): self.weight(k, x) for k, x in tensors.items()}
        for name, x in list(out.items()) if self.deeper else ():
            if re.search(r"(layers|blocks)\.0\.", name):
                still = np.zeros_like(x)
                if not name.endswith(".bias"):
                    still.flat[: 1 if x.ndim > 1 else None] = TINY
                out[name.replace(".0.", f".{AT}.", 1)] = still
        return out

    def arrays(self, tensors: dict) -> dict:
        """Returns a case's arrays: ids, logits, hidden states, weights and gradients."""
        out = {}
        for name, x in tensors.items():
            if re.search(r"input_ids|labels", name):
                x = self.new[x].astype(x.dtype)
            elif "router_logits" not in name and "logits" in name:
                x = x[..., np.argsort(self.new)]
            elif "hidden_states" in name and self.deeper:
                x = np.insert(x, AT + 1, x[AT], axis=0)
            elif weight := re.search(r"(model\.|lm_head).*", name):
                x = self.weight(weight[0], x)
            out[self.name(name)] = np.ascontiguousarray(x)
        return out

    def says(self, x, key: str = ""):
        """Returns what a JSON file says, under a key."""
        if isinstance(x, dict):
            out = {self.name(k): self.says(v, k) for k, v in x.items()}
            still = key in ("grads", "parameters") and self.deeper
            for name in list(out) if still else ():
                zeros = name.replace(".0.", f".{AT}.", 1)
                if zeros != name:
                    out[zeros] = dict.fromkeys(out[name] or (), 0.0)
            return out
        if isinstance(x, list):
            cut = key in ("cases", "loss_variants") and len(x) > FEW
            return [self.says(v, key) for v in (x[:-1] if cut else x)]
        if key in IDS and type(x) is int:
            return int(self.new[x])
        return x

    def told(self) -> dict:
        """Returns config.json."""
        out = self.says(self.config)
        for key in WIDTHS & out.keys() if self.grows else ():
            out[key] += UNITS
        for key in LAYERS & out.keys() if self.deeper else ():
            out[key] += 1
        if self.more_heads:
            heads, groups = out["num_attention_heads"], out["num_key_value_heads"]
            out["num_attention_heads"] += heads // groups
            out["num_key_value_heads"] += 1
        return out


def checkpoint(family: Family, folder: pathlib.Path, out: pathlib.Path):
    """Writes a checkpoint: in one file as it was, or in three shards."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.numpy.load_file(file)
    tensors = family.weights(tensors)
    count = 3 if (folder / "model.safetensors.index.json").exists() else 1
    shards = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    shards = shards if count > 1 else ["model.safetensors"]
    file_of = dict(zip(tensors, (shards * len(tensors))[: len(tensors)], strict=True))
    for shard in shards:
        part = {name: x for name, x in tensors.items() if file_of[name] == shard}
        safetensors.numpy.save_file(part, out / shard, metadata={"format": "pt"})
    if count > 1:
        size = {"total_size": sum(x.nbytes for x in tensors.values())}
        index = {"metadata": size, "weight_map": file_of}
        text = json.dumps(index, indent=2) + "\n"
        (out / "model.safetensors.index.json").write_text(text)


def main(out: pathlib.Path):
    """Writes the disguised goldens into a folder that is not there yet."""
    shutil.copytree(HERE, out, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for top in sorted(path for path in out.iterdir() if path.name != "hf_configs"):
        family = Family(HERE / top.name)
        for file in sorted(top.rglob("*.json")):
            if file.name == "config.json":
                file.write_text(json.dumps(family.told(), indent=2) + "\n")
            elif top.name not in ("rewards", "sampling") and "index" not in file.name:
                file.write_text(json.dumps(family.says(json.loads(file.read_text()))))
        for file in sorted(top.rglob("goldens.safetensors")):
            arrays = family.arrays(safetensors.numpy.load_file(file))
            safetensors.numpy.save_file(arrays, file)
        if (top / "checkpoint").exists():
            for file in (top / "checkpoint").glob("*.safetensors*"):
                file.unlink()
            checkpoint(family, HERE / top.name / "checkpoint", top / "checkpoint")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
