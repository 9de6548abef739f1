"""Checkpoints of PyTorch's transformers in, ours and adapters out, with equal logits.

Its own environment, without JAX: `make test-torch` names the interpreter that has it in
DLLM_PYTHON.
"""

import copy
import os
import pathlib
import subprocess
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

ROOT = pathlib.Path(__file__).parents[2]
SHAPE = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "eos_token_id": 1,  # without one a checkpoint is refused
}
ROPE = {"rope_type": "default", "rope_theta": 5e5}
LLAMA3 = ROPE | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 0.1,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # some frequencies of each of three kinds
}
# A mask token and blocks of one position are causal attention too.
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
BLOCKS = {"block_size": 1, "mask_token_id": 66, "logit_shift": 1}


def original(kind: str, **fields):
    """Returns a model of transformers in which every parameter is random."""
    config = transformers.AutoConfig.for_model(kind, **SHAPE | fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def logits(model, ids) -> np.ndarray:
    """Returns a model's logits."""
    with torch.no_grad():
        return model(torch.tensor(ids, dtype=torch.long)).logits.numpy()


def off_in_bfloat16(model, ids) -> float:
    """Returns how far a gradient in bfloat16 is from that in float32, over its norm."""
    ids, found = torch.tensor(ids, dtype=torch.long), []
    for dtype in (torch.float32, torch.bfloat16):
        rounded = copy.deepcopy(model).to(dtype)
        logp = torch.log_softmax(rounded(ids).logits[:, :-1].float(), -1)
        logp = logp.gather(-1, ids[:, 1:, None])[..., 0]
        (torch.tensor([[1.0], [-1.0]]) * logp).mean().backward()
        found += [torch.cat([x.grad.float().ravel() for x in rounded.parameters()])]
    exact, low = found
    return float((low - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("qwen3", {"head_dim": 24, "tie_word_embeddings": False}),
        ("qwen3", {"head_dim": 8, "tie_word_embeddings": True} | BLOCKS),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3_moe", {"head_dim": 8, "tie_word_embeddings": False} | EXPERTS),
        (
            "qwen3_moe",
            {"head_dim": 8, "tie_word_embeddings": True, "decoder_sparse_step": 2}
            | EXPERTS,
        ),
        ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
        ("llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3}),
    ],
)
def test_logits_of_import_and_export(kind, fields, tmp_path):
    theirs = original(kind, **{"rope_parameters": ROPE} | fields)
    theirs.save_pretrained(tmp_path / "origin", max_shard_size="40KB")
    assert len(list((tmp_path / "origin").glob("*.safetensors"))) > 1
    script = ROOT / "tests" / "torch" / "make_export.py"
    subprocess.run([os.environ["DLLM_PYTHON"], script, tmp_path], check=True, cwd=ROOT)

    ours = np.load(tmp_path / "ours.npz")
    answers = np.arange(SHAPE["vocab_size"]) != ours["mask_id"]
    exported, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", output_loading_info=True, attn_implementation="eager"
    )
    assert type(exported) is type(theirs)
    assert not any(told.values()), told
    for model, found in ((theirs, ours["before"]), (exported, ours["after"])):
        want = logits(model, ours["ids"])
        assert want.std() > 0.1
        np.testing.assert_allclose(
            found[..., answers], want[..., answers], atol=1e-4, rtol=1e-4
        )
    assert np.abs(ours["after"] - ours["before"])[..., answers].max() > 0.1
    # Rounding, of which an expert more or less makes most; not a rounding of our own.
    assert 1e-3 < ours["off"] < 2 * off_in_bfloat16(theirs, ours["ids"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of tensors that are not there
        adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters").eval()
    want = logits(adapted, ours["ids"])
    assert np.abs(want - ours["before"])[..., answers].max() > 0.1
    np.testing.assert_allclose(
        ours["adapted"][..., answers], want[..., answers], atol=1e-4, rtol=1e-4
    )
