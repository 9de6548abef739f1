"""Shapes of released models, for sizing and compiling ahead of time.

A checkpoint's own config.json always decides when weights are loaded.
"""

from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision.config import VisionConfig

RELEASED = {
    "sdar-1.7b": ModelConfig(d_model=2048, layers=28, heads=16, ffw=6144),
    "sdar-4b": ModelConfig(d_model=2560, layers=36, heads=32, ffw=9728),
    "sdar-8b": ModelConfig(d_model=4096, layers=36, heads=32, ffw=12288),
    "sdar-30b-a3b": ModelConfig(
        d_model=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        ffw=6144,
        experts=128,
        experts_per_token=8,
        expert_ffw=768,
    ),
    "llada-v-8b": ModelConfig(
        family="llava_llada",
        vocab=126464,
        d_model=4096,
        layers=32,
        heads=32,
        kv_heads=32,
        ffw=12288,
        norm_eps=1e-5,
        rope_theta=500000.0,
        qk_norm=False,
        attention="full",
        positions=16384,
        block=32,
        mask_id=126336,
        eos_id=126081,
        pad_id=126081,
        vision=VisionConfig(
            canvases=tuple(
                (384 * wide, 384 * high) for wide in range(1, 7) for high in range(1, 7)
            ),
            cap=4,
        ),
    ),
}
