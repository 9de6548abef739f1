"""The embedding's lookup, whose gradient is summed in f32 whatever it computes in."""

import jax
import jax.numpy as jnp

from dllm_jax.sharding import constrain


def lookup(table_VD, tokens_BT, dtype: str):
    """Returns the tokens' rows of a table [B, T, D] in `dtype`."""
    table_VD = constrain(table_VD.astype(dtype), "VD")
    return constrain(table_VD[tokens_BT], "BTD")


def lookup_forward(table_VD, tokens_BT, dtype: str):
    """Returns (the rows, what `lookup_backward` needs)."""
    return lookup(table_VD, tokens_BT, dtype), (table_VD, tokens_BT)


def lookup_backward(dtype: str, table_and_tokens, grad_BTD):
    """Returns the table's gradient [V, D] in its own dtype, and none of the tokens.

    It is the transpose of the lookup in f32, whatever dtype the forward pass computed in.
    """
    table_VD, tokens_BT = table_and_tokens  # of the table only its shape and dtype
    sum_rows = jax.linear_transpose(
        lambda table_VD: lookup(table_VD, tokens_BT, "float32"),
        jax.ShapeDtypeStruct(table_VD.shape, jnp.float32),
    )
    (grad_VD,) = sum_rows(grad_BTD.astype(jnp.float32))
    return grad_VD.astype(table_VD.dtype), None


lookup_summed_in_f32 = jax.custom_vjp(lookup, nondiff_argnums=(2,))
lookup_summed_in_f32.defvjp(lookup_forward, lookup_backward)
