"""Which kernel an op takes: the table of kernels, and the choice by name or platform."""

import jax

from dllm_jax.pallas_kernels.gpu import attention as gpu_attention
from dllm_jax.pallas_kernels.gpu import paged_attention as gpu_paged_attention
from dllm_jax.pallas_kernels.gpu import token_logprob as gpu_token_logprob
from dllm_jax.pallas_kernels.tpu import attention as tpu_attention
from dllm_jax.pallas_kernels.tpu import cache_update as tpu_cache_update
from dllm_jax.pallas_kernels.tpu import paged_attention as tpu_paged_attention
from dllm_jax.pallas_kernels.tpu import token_logprob as tpu_token_logprob

KERNELS = {
    ("attention", "gpu"): gpu_attention,
    ("attention", "tpu"): tpu_attention,
    ("cache_update", "tpu"): tpu_cache_update,
    ("paged_attention", "gpu"): gpu_paged_attention,
    ("paged_attention", "tpu"): tpu_paged_attention,
    ("token_draw", "gpu"): gpu_token_logprob,
    ("token_draw", "tpu"): tpu_token_logprob,
    ("token_logprob", "gpu"): gpu_token_logprob,
    ("token_logprob", "tpu"): tpu_token_logprob,
}
# Whose kernels "auto" takes. Those for GPU compile, and are right when interpreted, but
# have not been run on one: they are to be asked for.
TRUSTED = ("tpu",)
CHOICES = ("auto", "reference", "platform")  # of a whole run
HEAD_SIZES = (64, 128)  # of the kernels that have heads


def platform() -> str:
    """Returns the platform that is compiled for: the mesh's in force, or the default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def kernel(op: str, implementation: str, head_size: int | None = None):
    """Returns the module that implements `op`, or None for the specification.

    Raises ValueError for an implementation that the op, or its head size, does not have.
    """
    if implementation == "reference":
        return None
    takes = head_size is None or head_size in HEAD_SIZES
    if implementation in CHOICES:
        wanted = implementation == "platform" or platform() in TRUSTED
        return KERNELS.get((op, platform())) if takes and wanted else None
    found = KERNELS.get((op, implementation))
    if found is None:
        have = [name for other, name in KERNELS if other == op]
        raise ValueError(
            f"pallas_kernels.{op}: implementation={implementation!r} does not exist; "
            f"choose from {[*CHOICES, *have]}"
        )
    if not takes:
        raise ValueError(
            f"pallas_kernels.{op}: implementation={implementation!r} takes heads of "
            f"size {HEAD_SIZES}, not {head_size}; use 'reference'"
        )
    return found
