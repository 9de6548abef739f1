"""The public ops: arrays in, arrays out; nothing here knows a config or parameters.

Each op has a specification in `reference`, and may have a kernel for TPU and one for GPU.
`implementation` names one, or "platform": the kernel of the platform that is compiled for,
where `choice.KERNELS` has one for such heads, else what it has for "any" platform, made of
XLA's operations and taken where it is faster, else the specification; or "auto": the same,
with kernels alone that were right on this machine (`choice.verdicts`), or where nothing was
checked those of the platforms in `choice.TRUSTED`; or "reference": the specification.
A kernel that is named and missing raises ValueError, as does one for other numbers or
pages. `interpret=True` runs a kernel anywhere, slowly, for tests.

A kernel's module is imported when it is taken: Mosaic's took a quarter of the package's start.

An op's arguments, sharding and derivative are in attend.py, head.py and experts.py: no
module is named like an op, since the package's attribute of that name is the function.
"""

from dllm_jax.pallas_kernels.attend import (
    attention,
    cache_update,
    cached_at,
    chunk_attention,
    paged_attention,
    paired_attention,
    planned,
)
from dllm_jax.pallas_kernels.choice import CHOICES
from dllm_jax.pallas_kernels.experts import grouped_matmul
from dllm_jax.pallas_kernels.head import selection, token_draw, token_logprob
from dllm_jax.pallas_kernels.reference import Rule

__all__ = [
    "CHOICES",
    "Rule",
    "attention",
    "cache_update",
    "cached_at",
    "chunk_attention",
    "grouped_matmul",
    "paged_attention",
    "paired_attention",
    "planned",
    "selection",
    "token_draw",
    "token_logprob",
]
