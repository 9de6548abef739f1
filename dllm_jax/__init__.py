"""Reinforcement learning for diffusion language models, in JAX."""
