"""Shapes of released models, for sizing and compiling ahead of time.

A checkpoint's own config.json always decides when weights are loaded.
"""

from dllm_jax.models.config import ModelConfig

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
}
