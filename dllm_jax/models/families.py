"""The families: what each calls its tensors, and how its config.json is read.

A name table maps our parameter to the checkpoint's tensor, `{}` standing for the layer,
and a second one for the expert.
A field table maps a field of ModelConfig to its key in config.json.
"""

import dataclasses
import json
import pathlib

from dllm_jax.checks import one_of
from dllm_jax.models.config import ModelConfig

DECODER = {
    "embed": "model.embed_tokens.weight",
    "layers.attn_norm": "model.layers.{}.input_layernorm.weight",
    "layers.wq": "model.layers.{}.self_attn.q_proj.weight",
    "layers.wk": "model.layers.{}.self_attn.k_proj.weight",
    "layers.wv": "model.layers.{}.self_attn.v_proj.weight",
    "layers.wo": "model.layers.{}.self_attn.o_proj.weight",
    "layers.bq": "model.layers.{}.self_attn.q_proj.bias",
    "layers.bk": "model.layers.{}.self_attn.k_proj.bias",
    "layers.bv": "model.layers.{}.self_attn.v_proj.bias",
    "layers.q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "layers.k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "layers.ffw_norm": "model.layers.{}.post_attention_layernorm.weight",
    "layers.w_gate": "model.layers.{}.mlp.gate_proj.weight",
    "layers.w_up": "model.layers.{}.mlp.up_proj.weight",
    "layers.w_down": "model.layers.{}.mlp.down_proj.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "value": "value_head.weight",
}
EXPERTS = {  # in the layers that have them
    "layers.router": "model.layers.{}.mlp.gate.weight",
    "layers.e_gate": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "layers.e_up": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "layers.e_down": "model.layers.{}.mlp.experts.{}.down_proj.weight",
}
LLADA = {
    "embed": "model.transformer.wte.weight",
    "layers.attn_norm": "model.transformer.blocks.{}.attn_norm.weight",
    "layers.wq": "model.transformer.blocks.{}.q_proj.weight",
    "layers.wk": "model.transformer.blocks.{}.k_proj.weight",
    "layers.wv": "model.transformer.blocks.{}.v_proj.weight",
    "layers.wo": "model.transformer.blocks.{}.attn_out.weight",
    "layers.ffw_norm": "model.transformer.blocks.{}.ff_norm.weight",
    "layers.w_gate": "model.transformer.blocks.{}.ff_proj.weight",
    "layers.w_up": "model.transformer.blocks.{}.up_proj.weight",
    "layers.w_down": "model.transformer.blocks.{}.ff_out.weight",
    "norm": "model.transformer.ln_f.weight",
    "head": "model.transformer.ff_out.weight",
    "value": "value_head.weight",
}
ATTENTION = {  # of LLaDA2, in all layers; the experts come after some dense ones
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "wq": "model.layers.{}.attention.query_key_value.weight",
    "wk": "model.layers.{}.attention.query_key_value.weight",
    "wv": "model.layers.{}.attention.query_key_value.weight",
    "wo": "model.layers.{}.attention.dense.weight",
    "q_norm": "model.layers.{}.attention.query_layernorm.weight",
    "k_norm": "model.layers.{}.attention.key_layernorm.weight",
    "ffw_norm": "model.layers.{}.post_attention_layernorm.weight",
}
LLADA2 = {
    "embed": "model.word_embeddings.weight",
    **{f"first.{key}": name for key, name in ATTENTION.items()},
    "first.w_gate": "model.layers.{}.mlp.gate_proj.weight",
    "first.w_up": "model.layers.{}.mlp.up_proj.weight",
    "first.w_down": "model.layers.{}.mlp.down_proj.weight",
    **{f"layers.{key}": name for key, name in ATTENTION.items()},
    **EXPERTS,
    "layers.router_bias": "model.layers.{}.mlp.gate.expert_bias",
    "layers.w_gate": "model.layers.{}.mlp.shared_experts.gate_proj.weight",
    "layers.w_up": "model.layers.{}.mlp.shared_experts.up_proj.weight",
    "layers.w_down": "model.layers.{}.mlp.shared_experts.down_proj.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "value": "value_head.weight",
}
MERGED = {  # a layer's experts in one tensor
    "layers.e_gate": "model.layers.{}.mlp.experts.gate_proj",
    "layers.e_up": "model.layers.{}.mlp.experts.up_proj",
    "layers.e_down": "model.layers.{}.mlp.experts.down_proj",
}

KIND = {  # of attention and prediction: what `adapt` may change, and an export tells
    "attention": "attention_pattern",
    "shift": "logit_shift",
    "block": "block_size",
}
FIELDS = KIND | {
    "vocab": "vocab_size",
    "d_model": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffw": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
EXPERT_FIELDS = {
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffw": "moe_intermediate_size",
    "router_norm": "norm_topk_prob",
}
LLADA2_FIELDS = {
    "rotary": "partial_rotary_factor",
    "dense_layers": "first_k_dense_replace",
    "shared_experts": "num_shared_experts",
    "router_scale": "routed_scaling_factor",
    "router_groups": "n_group",
    "router_best_groups": "topk_group",
}
LLADA_FIELDS = KIND | {
    "vocab": "embedding_size",
    "d_model": "d_model",
    "layers": "n_layers",
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "ffw": "mlp_hidden_size",
    "norm_eps": "rms_norm_eps",
    "tied": "weight_tying",
}

# Keys of config.json that we read as one value only; a key may also be absent.
PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
EXPERT_PLAIN = {"decoder_sparse_step": 1, "mlp_only_layers": []}  # experts everywhere
LLADA2_PLAIN = {
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "norm_head": False,
}
LLADA_PLAIN = {
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "multi_query_attention": None,
    "rope": True,
    "scale_logits": False,
}


@dataclasses.dataclass(frozen=True)
class Family:
    """How the checkpoints of one model_type are read and written."""

    fixed: dict  # fields of ModelConfig that config.json does not tell, or may not
    names: dict = dataclasses.field(default_factory=lambda: DECODER)
    fields: dict = dataclasses.field(default_factory=lambda: FIELDS)
    plain: dict = dataclasses.field(default_factory=lambda: PLAIN)


QWEN2 = {"qk_norm": False, "qkv_bias": True}
FULL = {"attention": "full", "qk_norm": False, "block": 32}
CAUSAL = {"attention": "causal", "shift": 1, "block": 1}  # autoregressive
BLOCKS = {"attention": "block", "shift": 0}  # such a model, once it has a block_size
MOE = {
    "names": DECODER | EXPERTS,
    "fields": FIELDS | EXPERT_FIELDS,
    "plain": PLAIN | EXPERT_PLAIN,
}
LING = {  # LLaDA2.0's config.json tells neither the block nor the mask token
    "fixed": {"router": "sigmoid", "router_bias": True, "block": 32, "mask_id": 156895},
    "fields": FIELDS | EXPERT_FIELDS | LLADA2_FIELDS,
    "plain": PLAIN | LLADA2_PLAIN,
}
OLMO = {"names": LLADA, "fields": LLADA_FIELDS, "plain": LLADA_PLAIN}
FAMILIES = {  # by model_type
    "sdar": Family({}),  # and TraDo
    "sdar_moe": Family({}, **MOE),
    "llada2_moe": Family(**LING, names=LLADA2),
    "llada2_moe_veomni": Family(**LING, names=LLADA2 | MERGED),
    "Fast_dLLM_Qwen": Family(
        QWEN2 | {"shift": 1, "block": 32, "mask_id": 151665},
        fields=FIELDS | {"block": "bd_size"},
    ),
    "Dream": Family(FULL | QWEN2 | {"shift": 1}),  # and DiffuCoder
    "llada": Family(FULL, **OLMO),
    "mmada": Family(FULL, **OLMO),  # the vocabulary ends with the image codes
    "qwen2": Family(CAUSAL | QWEN2),
    "qwen3": Family(CAUSAL),
    "qwen3_moe": Family(CAUSAL | {"router_norm": False}, **MOE),
    "llama": Family(CAUSAL | {"qk_norm": False}),
}
LLAMA3 = (  # of rope_scaling, in the order of ModelConfig.rope_llama3
    *("factor", "low_freq_factor", "high_freq_factor"),
    "original_max_position_embeddings",
)
ATTENTIONS = ("block", "full", "causal")  # see mask.clean
NEEDED = {"vocab", "d_model", "layers", "heads", "ffw"}  # of these fields, without
NEEDED |= {"experts", "experts_per_token", "expert_ffw"}  # which nothing can be read
MASKS = ("<|MASK|>", "<|mask|>", "|<MASK>|", "<|mdm_mask|>", "[MASK]")  # its names


def read_json(file: pathlib.Path) -> dict:
    """Returns what a JSON file holds; raises ValueError naming a file that is broken."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None


def read_config(folder: pathlib.Path) -> ModelConfig:
    """Returns the ModelConfig of a folder's config.json.

    Raises ValueError naming what is missing or not supported.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} is not a checkpoint: it has no config.json")
    raw = read_json(file)
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"{folder}: model_type {kind!r} is not supported; supported are "
            + ", ".join(sorted(FAMILIES, key=str.lower))
        )
    family = FAMILIES[kind]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    # As newer ones write.
    raw = rope | {"num_experts": raw.get("num_local_experts")} | raw
    turn = rope.get("rope_type", rope.get("type", "default"))
    scaled = tuple(rope.get(key) for key in LLAMA3) if turn == "llama3" else ()
    if turn not in ("default", "llama3") or None in scaled:
        raise ValueError(f"{file}: rope_scaling={rope!r} is not supported")
    if raw.get("use_sliding_window") and raw.get("sliding_window"):
        raise ValueError(
            f"{file}: sliding_window={raw['sliding_window']!r} is not supported"
        )
    for key, value in family.plain.items():
        if raw.get(key, value) != value:
            raise ValueError(f"{file}: {key}={raw[key]!r} is not supported")
    fixed = family.fixed
    if fixed.get("attention") == "causal" and "block_size" in raw:
        fixed = fixed | BLOCKS
    told = {field: raw.get(key) for field, key in family.fields.items()}
    told = fixed | {k: value for k, value in told.items() if value is not None}
    for field in family.fields:
        if field in NEEDED and field not in told:
            raise ValueError(f"{file}: no field {family.fields[field]!r}")
    told.setdefault("kv_heads", told["heads"])
    told.setdefault("head_dim", told["d_model"] // told["heads"])
    pad = first(raw.get("pad_token_id"), None)
    eos = first(raw.get("eos_token_id"), pad or 0)
    masked = told.get("attention") != "causal"  # or no token, which forbids none
    default = told.get("mask_id", None if masked else told["vocab"])
    told["mask_id"] = mask_id(folder, raw, default)
    cfg = ModelConfig(
        family=kind,
        rope_theta=float(raw.get("rope_theta") or 10000.0),
        rope_llama3=scaled,
        eos_id=eos,
        pad_id=eos if pad is None else pad,
        **told,
    )
    for field, choices in (("attention", ATTENTIONS), ("shift", (0, 1))):
        if getattr(cfg, field) not in choices:
            key, value = family.fields[field], told[field]
            raise ValueError(f"{file}: {key}={value!r} is not supported")
    groups, best = cfg.router_groups, cfg.router_best_groups
    open_experts = cfg.experts // groups * best
    for one, other, bad in (
        ("kv_heads", "heads", cfg.heads % cfg.kv_heads),
        ("experts_per_token", "experts", cfg.experts_per_token > open_experts),
        ("router_groups", "experts", groups > 1 and cfg.experts % groups),
        ("router_groups", "experts", groups > 1 and cfg.experts < 2 * groups),
        ("router_best_groups", "router_groups", best > groups),
    ):
        if bad:
            one, other = (f"{family.fields[x]}={told[x]!r}" for x in (one, other))
            raise ValueError(f"{file}: {one} does not go with {other}")
    if not 0 <= cfg.mask_id < cfg.vocab + (not masked):
        raise ValueError(
            f"{folder}: mask token {cfg.mask_id} is outside the vocabulary of {cfg.vocab}"
        )
    return cfg


def adapt(cfg: ModelConfig, *, attention="", shift=-1, mask_id=-1) -> ModelConfig:
    """Returns what a checkpoint becomes by training; "" and -1 leave what it is.

    So an autoregressive model turns into one that fills blocks or the whole canvas: it
    needs a mask token, which any token can be that no text uses.

    Raises ValueError naming the field of the model's configuration.
    """
    one_of("model.attention", attention or cfg.attention, ATTENTIONS)
    if shift not in (-1, 0, 1):
        raise ValueError(f"model.shift={shift}: 0 or 1, or -1 for the checkpoint's")
    if not -1 <= mask_id < cfg.vocab:
        raise ValueError(f"model.mask_id={mask_id}: the vocabulary has {cfg.vocab} ids")
    cfg = dataclasses.replace(
        cfg,
        attention=attention or cfg.attention,
        shift=cfg.shift if shift < 0 else shift,
        mask_id=cfg.mask_id if mask_id < 0 else mask_id,
    )
    if cfg.attention != "causal" and cfg.mask_id == cfg.vocab:
        raise ValueError(
            f"model.attention={cfg.attention!r} needs a mask token, and the checkpoint has "
            "none: set model.mask_id to a token that no text uses"
        )
    return cfg


def changes(cfg: ModelConfig, was: ModelConfig) -> dict:
    """Returns what config.json must say besides, for `cfg` to be read where `was` was.

    The block of a model that does not attend by blocks is the sampler's affair.
    """
    kind = {field: getattr(cfg, field) for field in (*KIND, "mask_id")}
    same = dataclasses.replace(was, **kind)
    if cfg.attention != "block":
        same = dataclasses.replace(same, block=was.block)
    if same == was:
        return {}
    if cfg.mask_id == cfg.vocab:
        del kind["mask_id"]
    keys = FAMILIES[cfg.family].fields | {"mask_id": "mask_token_id"}
    return {keys[field]: value for field, value in kind.items()}


def first(value, default):
    """Returns an id that may be given as a list, or not at all."""
    value = value[0] if isinstance(value, list) and value else value
    return default if value is None or value == [] else int(value)


def mask_id(folder: pathlib.Path, raw: dict, default: int | None) -> int:
    """Returns the mask token's id, from config.json or the tokenizer's files."""
    if raw.get("mask_token_id") is not None:
        return int(raw["mask_token_id"])
    added = folder / "added_tokens.json"
    known = read_json(added) if added.is_file() else {}
    table = folder / "tokenizer.json"
    if table.is_file():
        for token in read_json(table).get("added_tokens", []):
            known[token["content"]] = token["id"]
    settings = folder / "tokenizer_config.json"
    settings = read_json(settings) if settings.is_file() else {}
    for number, token in settings.get("added_tokens_decoder", {}).items():
        known[token["content"]] = int(number)
    name = settings.get("mask_token")
    name = name["content"] if isinstance(name, dict) else name
    for token in (name, *MASKS):
        if token in known:
            return int(known[token])
    if default is not None:
        return default
    raise ValueError(
        f"{folder}: tokenizer without mask token; config.json needs mask_token_id, or the "
        "tokenizer a mask_token"
    )
