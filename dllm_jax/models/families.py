"""The families: what each calls its tensors, and how its config.json is read.

A checkpoint of another family is a row of FAMILIES, which is made of three kinds of tables:
names (our parameter -> the checkpoint's tensor), fields (a field of ModelConfig -> its key
in config.json) and plain keys (a key of config.json -> the one value that we compute).
"""

import dataclasses
import pathlib

from dllm_jax.checks import Refused, one_of, shown, suits
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.special import (
    find_ends,
    find_eos_id,
    find_mask_id,
    read_json,
    token_id,
)
from dllm_jax.models.vision import config as vision

# ---- Names: our parameter -> the checkpoint's tensor -----------------------------------

# Llama, Qwen and what is trained from them.
LLAMA_NAMES = {
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
    "record": "value_record.weight",
}
EXPERT_NAMES = {  # in the layers that have experts
    "layers.router": "model.layers.{}.mlp.gate.weight",
    "layers.e_gate": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "layers.e_up": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "layers.e_down": "model.layers.{}.mlp.experts.{}.down_proj.weight",
}
DENSE_NAMES = {  # in the layers of the same tower that have none
    key.replace("layers.", "first."): name
    for key, name in LLAMA_NAMES.items()
    if key.startswith("layers.")
}
QWEN_MOE_NAMES = LLAMA_NAMES | EXPERT_NAMES | DENSE_NAMES
LLADA_NAMES = {  # those of OLMo, from whose code LLaDA's is made
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
    "record": "value_record.weight",
}
SIGLIP_LAYER = "encoder.layers.{}."
SIGLIP_NAMES = {
    "patch": "embeddings.patch_embedding.weight",
    "b_patch": "embeddings.patch_embedding.bias",
    "position": "embeddings.position_embedding.weight",
    "layers.attn_norm": SIGLIP_LAYER + "layer_norm1.weight",
    "layers.attn_norm_bias": SIGLIP_LAYER + "layer_norm1.bias",
    "layers.wq": SIGLIP_LAYER + "self_attn.q_proj.weight",
    "layers.bq": SIGLIP_LAYER + "self_attn.q_proj.bias",
    "layers.wk": SIGLIP_LAYER + "self_attn.k_proj.weight",
    "layers.bk": SIGLIP_LAYER + "self_attn.k_proj.bias",
    "layers.wv": SIGLIP_LAYER + "self_attn.v_proj.weight",
    "layers.bv": SIGLIP_LAYER + "self_attn.v_proj.bias",
    "layers.wo": SIGLIP_LAYER + "self_attn.out_proj.weight",
    "layers.bo": SIGLIP_LAYER + "self_attn.out_proj.bias",
    "layers.ffw_norm": SIGLIP_LAYER + "layer_norm2.weight",
    "layers.ffw_norm_bias": SIGLIP_LAYER + "layer_norm2.bias",
    "layers.w_up": SIGLIP_LAYER + "mlp.fc1.weight",
    "layers.b_up": SIGLIP_LAYER + "mlp.fc1.bias",
    "layers.w_down": SIGLIP_LAYER + "mlp.fc2.weight",
    "layers.b_down": SIGLIP_LAYER + "mlp.fc2.bias",
}
LLAVA_TOWER = "model.vision_tower.vision_tower.vision_model."
LLAVA_NAMES = LLAMA_NAMES | {
    "projector.w_in": "model.mm_projector.0.weight",
    "projector.b_in": "model.mm_projector.0.bias",
    "projector.w_out": "model.mm_projector.2.weight",
    "projector.b_out": "model.mm_projector.2.bias",
    "newline": "model.image_newline",
    **{f"vision.{key}": LLAVA_TOWER + name for key, name in SIGLIP_NAMES.items()},
}
LLADA2_ATTENTION_NAMES = {  # the same in the dense layers and in those with experts
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "wq": "model.layers.{}.attention.query_key_value.weight",
    "wk": "model.layers.{}.attention.query_key_value.weight",
    "wv": "model.layers.{}.attention.query_key_value.weight",
    "wo": "model.layers.{}.attention.dense.weight",
    "q_norm": "model.layers.{}.attention.query_layernorm.weight",
    "k_norm": "model.layers.{}.attention.key_layernorm.weight",
    "ffw_norm": "model.layers.{}.post_attention_layernorm.weight",
}
LLADA2_NAMES = {
    "embed": "model.word_embeddings.weight",
    **{f"first.{key}": name for key, name in LLADA2_ATTENTION_NAMES.items()},
    "first.w_gate": "model.layers.{}.mlp.gate_proj.weight",
    "first.w_up": "model.layers.{}.mlp.up_proj.weight",
    "first.w_down": "model.layers.{}.mlp.down_proj.weight",
    **{f"layers.{key}": name for key, name in LLADA2_ATTENTION_NAMES.items()},
    **EXPERT_NAMES,
    "layers.router_bias": "model.layers.{}.mlp.gate.expert_bias",
    "layers.w_gate": "model.layers.{}.mlp.shared_experts.gate_proj.weight",
    "layers.w_up": "model.layers.{}.mlp.shared_experts.up_proj.weight",
    "layers.w_down": "model.layers.{}.mlp.shared_experts.down_proj.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "value": "value_head.weight",
    "record": "value_record.weight",
}
LLADA2_MERGED_NAMES = LLADA2_NAMES | {  # a layer's experts in one tensor
    "layers.e_gate": "model.layers.{}.mlp.experts.gate_proj",
    "layers.e_up": "model.layers.{}.mlp.experts.up_proj",
    "layers.e_down": "model.layers.{}.mlp.experts.down_proj",
}

# ---- Fields: a field of ModelConfig -> its key in config.json --------------------------

# How a model attends and predicts. `adapt` may change it, and then an export tells it: the
# keys are ours, where a family has none of its own.
DIFFUSION_FIELDS = {
    "attention": "attention_pattern",
    "shift": "logit_shift",
    "block": "block_size",
}
LLAMA_FIELDS = DIFFUSION_FIELDS | {
    "vocab": "vocab_size",
    "d_model": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffw": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "positions": "max_position_embeddings",
}
FAST_DLLM_FIELDS = LLAMA_FIELDS | {"block": "bd_size"}
EXPERT_FIELDS = LLAMA_FIELDS | {
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffw": "moe_intermediate_size",
}
# The codes of SDAR and LLaDA2 sum weights to one whatever norm_topk_prob says.
SDAR_MOE_FIELDS = EXPERT_FIELDS | {"sparse_step": "decoder_sparse_step"}
QWEN_MOE_FIELDS = SDAR_MOE_FIELDS | {"router_norm": "norm_topk_prob"}
LLADA2_FIELDS = EXPERT_FIELDS | {
    "rotary": "partial_rotary_factor",
    "dense_layers": "first_k_dense_replace",
    "shared_experts": "num_shared_experts",
    "router_scale": "routed_scaling_factor",
    "router_groups": "n_group",
    "router_best_groups": "topk_group",
}
LLADA_FIELDS = DIFFUSION_FIELDS | {
    "vocab": "embedding_size",
    "d_model": "d_model",
    "layers": "n_layers",
    "heads": "n_heads",
    "kv_heads": "n_kv_heads",
    "ffw": "mlp_hidden_size",
    "norm_eps": "rms_norm_eps",
    "tied": "weight_tying",
    "positions": "max_sequence_length",
    "codebook": "codebook_size",  # MMaDA's, whose released checkpoints say "llada"
    "rope_f32": "rope_full_precision",
}
# Without these, where a family's table has them, no checkpoint can be read.
NEEDED = {
    "vocab",
    "d_model",
    "layers",
    "heads",
    "ffw",
    "experts",
    "experts_per_token",
    "expert_ffw",
}

# ---- Plain keys of config.json: absent, or the one value that we compute ---------------

TOWER_PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
LLAMA_PLAIN = TOWER_PLAIN | {"partial_rotary_factor": 1}
QWEN_MOE_PLAIN = LLAMA_PLAIN | {"mlp_only_layers": []}
LLAVA_PLAIN = LLAMA_PLAIN | {
    "mm_patch_merge_type": "spatial_unpad",
    "mm_projector_type": "mlp2x_gelu",
    "mm_resampler_type": None,
    "mm_use_im_patch_token": False,
    "mm_use_im_start_end": False,
    "mm_vision_select_feature": "patch",
    "mm_vision_select_layer": -2,
}
LLADA2_PLAIN = TOWER_PLAIN | {
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "norm_head": False,
}
LLADA_PLAIN = {
    "activation_type": "silu",
    "block_group_size": 1,
    "block_type": "llama",
    "layer_norm_type": "rms",
    "rope": True,
    **dict.fromkeys(("alibi", "include_bias", "include_qkv_bias"), False),
    **dict.fromkeys(("attention_layer_norm", "input_emb_norm", "scale_logits"), False),
    # LLaDA-MoE has experts, and says "llada", too.
    **dict.fromkeys(("clip_qkv", "multi_query_attention", "num_experts"), None),
}

# ---- The families ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Family:
    """How the checkpoints of one model_type are read and written: see FAMILIES."""

    assumed: dict = dataclasses.field(default_factory=dict)
    names: dict = dataclasses.field(default_factory=lambda: LLAMA_NAMES)
    fields: dict = dataclasses.field(default_factory=lambda: LLAMA_FIELDS)
    plain: dict = dataclasses.field(default_factory=lambda: LLAMA_PLAIN)
    unread: str = r"rotary_emb\.inv_freq$"


LLADA = Family(
    assumed={
        "attention": "full",
        "block": 32,
        "norm_eps": 1e-5,
        "qk_norm": False,
        "rope_f32": True,
        "tied": True,
    },
    names=LLADA_NAMES,
    fields=LLADA_FIELDS,
    plain=LLADA_PLAIN,
)
LLADA2 = Family(
    assumed={
        "block": 32,  # neither it nor the mask token is in its config.json
        "mask_id": 156895,
        "norm_eps": 1e-5,
        "rotary": 0.5,
        "router": "sigmoid",
        "router_bias": True,
        "router_best_groups": 4,
        "router_groups": 8,
        "router_scale": 2.5,
    },
    names=LLADA2_NAMES,
    fields=LLADA2_FIELDS,
    plain=LLADA2_PLAIN,
)
# The contract of a row, which belongs to a model_type of config.json. It says only what
# differs. What it leaves out is Llama's in the tables, and ModelConfig's default in the
# fields: attention by blocks, no shift, a norm of queries and keys, no bias.
#
# assumed  values of fields of ModelConfig, for what config.json does not tell, as the
#          original class has them; what it tells comes first.
# names    a name for every parameter that transformer.specs declares for such a model,
#          and perhaps for more. Each {} stands for a leading dimension: a layer, by its
#          place in the tower, then an expert. Parameters that share a name follow each
#          other in that tensor, in the order of the table.
# fields   what config.json tells. An export writes DIFFUSION_FIELDS under these keys.
# plain    keys that are refused when they say anything else.
# unread   a regular expression: tensors that have it in their names are exported as they
#          were, and nothing is computed with them.
FAMILIES = {
    "sdar": Family(),  # and TraDo
    "sdar_moe": Family(
        names=QWEN_MOE_NAMES, fields=SDAR_MOE_FIELDS, plain=QWEN_MOE_PLAIN
    ),
    "llada": LLADA,
    "mmada": dataclasses.replace(LLADA, assumed=LLADA.assumed | {"codebook": 8192}),
    "llava_llada": Family(  # LLaDA-V
        assumed={
            "attention": "full",
            "block": 32,
            "qk_norm": False,
            "mask_id": 126336,
        },
        names=LLAVA_NAMES,
        plain=LLAVA_PLAIN,
        unread=r"rotary_emb\.inv_freq$|vision_model\.post_layernorm\.|vision_model\.head\.",
    ),
    "llada2_moe": LLADA2,
    "llada2_moe_veomni": dataclasses.replace(LLADA2, names=LLADA2_MERGED_NAMES),
    # Qwen2.5 that fills the whole canvas; DiffuCoder is one too.
    "Dream": Family(
        assumed={
            "attention": "full",
            "shift": 1,
            "block": 32,
            "qk_norm": False,
            "qkv_bias": True,
        },
    ),
    # Qwen2.5 that fills blocks.
    "Fast_dLLM_Qwen": Family(
        assumed={
            "shift": 1,
            "block": 32,
            "mask_id": 151665,
            "qk_norm": False,
            "qkv_bias": True,
        },
        fields=FAST_DLLM_FIELDS,
    ),
    # Autoregressive models; with a block_size in config.json they fill blocks instead.
    "qwen2": Family(
        assumed={
            "attention": "causal",
            "shift": 1,
            "block": 1,
            "qk_norm": False,
            "qkv_bias": True,
        },
    ),
    "qwen3": Family(assumed={"attention": "causal", "shift": 1, "block": 1}),
    "qwen3_moe": Family(
        assumed={"attention": "causal", "shift": 1, "block": 1, "router_norm": False},
        names=QWEN_MOE_NAMES,
        fields=QWEN_MOE_FIELDS,
        plain=QWEN_MOE_PLAIN,
    ),
    "llama": Family(
        assumed={"attention": "causal", "shift": 1, "block": 1, "qk_norm": False},
    ),
}
ATTENTIONS = ("block", "full", "causal")  # see mask.clean
SIGLIP = Family(
    names={key: "vision_model." + name for key, name in SIGLIP_NAMES.items()},
    # Of the layers the last is not run; which that is, depends on the tower.
    unread=r"^(text_model|logit_)|vision_model\.(post_layernorm|head|encoder\.layers\.\d+)\.",
)


def family_of(cfg) -> Family:
    """Returns the row of a ModelConfig or VisionConfig."""
    return SIGLIP if cfg.family in vision.TOWERS else FAMILIES[cfg.family]


# ---- config.json -----------------------------------------------------------------------

# Keys of rope_scaling whose rope_type is "llama3", in the order of ModelConfig.rope_llama3.
LLAMA3_ROPE = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def read_config(folder: pathlib.Path) -> ModelConfig:
    """Returns the ModelConfig of a folder's config.json; of SigLIP's the VisionConfig.

    Raises ValueError naming what is missing or not supported.
    """
    file = folder / "config.json"
    if (folder / "adapter_config.json").is_file():
        way = "add them to their model with peft's merge_and_unload and save_pretrained"
        raise ValueError(f"{folder}: adapter_config.json: adapters are not read; {way}")
    if not file.is_file():
        raise ValueError(f"{folder} is not a checkpoint: it has no config.json")
    raw = read_json(file)
    kind = raw.get("model_type")
    if kind in vision.TOWERS:
        return vision.of_siglip(raw, file)
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"{folder}: model_type {shown(kind)} is not supported; supported are "
            + ", ".join(sorted(FAMILIES, key=str.lower))
        )
    family = FAMILIES[kind]
    raw, rope_llama3 = raw_fields(raw, file)
    refuse_other_than_plain(raw, family, file)
    fields = model_fields(raw, family, file)
    fields["mask_id"] = find_mask_id(folder, raw, fields)
    pad_id = token_id(raw, "pad_token_id")
    eos_id = find_eos_id(folder, raw)
    keys = family.fields | {"mask_id": "mask_token_id", "eos_id": "eos_token_id"}
    keys |= {"pad_id": "pad_token_id", "ends": "eos_token_id"}
    keys |= {"rope_llama3": "rope_scaling"}
    try:
        cfg = ModelConfig(
            family=kind,
            rope_theta=10000.0 if raw.get("rope_theta") is None else raw["rope_theta"],
            rope_llama3=rope_llama3,
            eos_id=eos_id,
            ends=find_ends(folder, raw, eos_id),
            pad_id=eos_id if pad_id is None else pad_id,
            vision=vision.of_llava(raw, file) if "newline" in family.names else None,
            **fields,
        )
    except Refused as error:
        key = keys.get(error.field, error.field)
        raise ValueError(f"{file}: {key}{error.text}") from None
    refuse_unsupported(cfg, file)
    return cfg


def raw_fields(raw: dict, file: pathlib.Path) -> tuple[dict, tuple[float, ...]]:
    """Returns (config.json with its synonyms resolved, ModelConfig.rope_llama3).

    Newer versions of transformers write rope_parameters, with rope_theta and
    partial_rotary_factor, and num_local_experts. Raises ValueError for scaled positions
    other than Llama 3.1's, for a factor alone, and where two synonyms say two things: which
    one is meant depends on the version that reads them.
    """
    told = [raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key)]
    rope = told[0] if told else {}
    if told and rope != told[-1]:
        other = (
            f"{shown(rope)} beside another rope_parameters: leave the one that is meant"
        )
        raise ValueError(f"{file}: rope_scaling={other}")
    if type(rope) is not dict:
        raise ValueError(f"{file}: rope_scaling={shown(rope)} is not supported")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    scaled = LLAMA3_ROPE if rope_type == "llama3" else ()
    llama3 = tuple(rope.get(key) for key in scaled)
    by_layer = any(isinstance(x, dict) for x in rope.values())  # each kind its own
    plain = rope_type == "default" and rope.get("factor") in (None, 1)
    if not (plain or llama3) or None in llama3 or by_layer:
        raise ValueError(f"{file}: rope_scaling={shown(rope)} is not supported")
    synonyms = rope | {"num_experts": raw.get("num_local_experts")}
    for key, x in synonyms.items():
        if x is not None and raw.get(key) not in (None, x):
            both = f"{shown(raw[key])} beside {shown(x)}, which another key says"
            raise ValueError(f"{file}: {key}={both}: leave the one that is meant")
    said = {key: x for key, x in raw.items() if x is not None or key not in synonyms}
    return synonyms | said, llama3


def refuse_other_than_plain(raw: dict, family: Family, file: pathlib.Path) -> None:
    """Raises ValueError naming a key of config.json that asks for what is not computed."""
    if raw.get("use_sliding_window") and raw.get("sliding_window"):
        raise ValueError(
            f"{file}: sliding_window={raw['sliding_window']!r} is not supported"
        )
    kinds = raw.get("layer_types") or []
    if type(kinds) is not list or any(kind != "full_attention" for kind in kinds):
        raise ValueError(f"{file}: layer_types={shown(kinds)} is not supported")
    if raw.get("quantization_config"):
        raise ValueError(
            f"{file}: quantization_config is not supported: name the checkpoint whose "
            "weights were quantized, in bfloat16, float16 or float32"
        )
    for key, value in family.plain.items():
        if raw.get(key, value) != value:
            raise ValueError(f"{file}: {key}={shown(raw[key])} is not supported")


def model_fields(raw: dict, family: Family, file: pathlib.Path) -> dict:
    """Returns the fields of ModelConfig that config.json tells or the family assumes.

    Raises ValueError naming a key that is needed and missing.
    """
    assumed = family.assumed
    if assumed.get("attention") == "causal" and raw.get("block_size") is not None:
        # An autoregressive model's class that fills blocks: what SDAR's is.
        assumed = assumed | {"attention": "block", "shift": 0}
    stated = {field: raw.get(key) for field, key in family.fields.items()}
    fields = assumed | {k: value for k, value in stated.items() if value is not None}
    for field, key in family.fields.items():
        if field in NEEDED and field not in fields:
            raise ValueError(f"{file}: no field {key!r}")
    fields.setdefault("kv_heads", fields["heads"])
    if "head_dim" not in fields:
        width, heads = fields["d_model"], fields["heads"]
        whole = suits(width, int) and suits(heads, int) and heads > 0
        fields["head_dim"] = width // heads if whole else 1  # they are refused below
    if raw.get("is_causal") is False and fields.get("attention") == "causal":
        said = "is_causal=False is not supported; what it means is attention_pattern='full'"
        raise ValueError(f"{file}: {said}")
    return fields


def refuse_unsupported(cfg: ModelConfig, file: pathlib.Path) -> None:
    """Raises ValueError naming keys of config.json whose values make no model."""
    keys = FAMILIES[cfg.family].fields

    def stated(field):
        return f"{keys[field]}={getattr(cfg, field)!r}"

    for field, choices in (("attention", ATTENTIONS), ("shift", (0, 1))):
        if getattr(cfg, field) not in choices:
            raise ValueError(f"{file}: {stated(field)} is not supported")
    groups, best_groups = cfg.router_groups, cfg.router_best_groups
    each = range(min(cfg.experts, 1), cfg.experts // groups * best_groups + 1)
    for field, other_field, refused in (
        ("kv_heads", "heads", cfg.heads % cfg.kv_heads),
        ("experts_per_token", "experts", cfg.experts_per_token not in each),
        ("router_groups", "experts", groups > 1 and cfg.experts % groups),
        ("router_groups", "experts", groups > 1 and cfg.experts < 2 * groups),
        ("router_best_groups", "router_groups", best_groups > groups),
        ("sparse_step", "layers", cfg.sparse_step > cfg.layers),
        ("dense_layers", "layers", cfg.dense_layers >= cfg.layers),
    ):
        if refused:
            raise ValueError(
                f"{file}: {stated(field)} does not go with {stated(other_field)}"
            )
    factor, low, high, length = cfg.rope_llama3 or (1, 0, 1, 1)
    if factor <= 0 or low >= high or length <= 0:
        rope = dict(zip(LLAMA3_ROPE, cfg.rope_llama3, strict=True))
        raise ValueError(f"{file}: rope_scaling={shown(rope)} is not supported")
    rotated = int(cfg.head_dim * cfg.rotary)
    if not rotated or rotated % 2:
        raise ValueError(
            f"{file}: {rotated} dimensions of a head rotate; rotary positions need pairs"
        )
    for name, token in ("eos", cfg.eos_id), ("pad", cfg.pad_id):
        if token >= cfg.vocab:
            raise ValueError(
                f"{file}: {name}_token_id={token} is outside the vocabulary of {cfg.vocab}"
            )
    # A causal model has perhaps no mask token: the id behind the vocabulary forbids none.
    last = cfg.vocab if cfg.attention == "causal" else cfg.vocab - 1
    if not 0 <= cfg.mask_id <= last:
        raise ValueError(
            f"{file.parent}: mask token {cfg.mask_id} is outside the vocabulary of "
            f"{cfg.vocab}"
        )


def adapt(cfg: ModelConfig, *, attention="", shift=-1, mask_id=-1) -> ModelConfig:
    """Returns what a checkpoint becomes by training; "" and -1 leave what it is.

    So an autoregressive model turns into one that fills blocks or the whole canvas: it
    needs a mask token, which any token can be that no text uses.

    Raises ValueError naming the field of the model's configuration.
    """
    if cfg.family in vision.TOWERS:
        raise ValueError(
            f"model.path: a vision tower, {cfg.family}, is no language model"
        )
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
    diffusion = {field: getattr(cfg, field) for field in (*DIFFUSION_FIELDS, "mask_id")}
    became = dataclasses.replace(was, **diffusion)
    if cfg.attention != "block":
        became = dataclasses.replace(became, block=was.block)
    if became == was:
        return {}
    if cfg.mask_id == cfg.vocab:  # no token, which no key says
        del diffusion["mask_id"]
    keys = FAMILIES[cfg.family].fields | {"mask_id": "mask_token_id"}
    return {keys[field]: value for field, value in diffusion.items()}
