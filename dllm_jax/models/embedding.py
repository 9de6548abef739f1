"""The embedding's lookup, whose gradient is summed in f32 whatever it computes in.

Where it trains, `fsdp` splits the table's width, and no table is gathered: each device looks
up its columns for the tokens of all, and sends each the columns of its own tokens. The gradient
goes the same way back. Who asks for no gradient has the whole table, as those who sample do, or
gathers it, as those who score.
"""

import jax
import jax.numpy as jnp

from dllm_jax.sharding import MODEL, PARAM, constrain

# Of positions, where each device has its columns for the rows of all that share by `fsdp`.
COLUMNS = {"B": "data", "D": "fsdp"} | MODEL


def lookup(table_VD, tokens_BT, dtype: str):
    """Returns the tokens' rows of a table [B, T, D] in `dtype`."""
    return constrain(constrain(table_VD.astype(dtype), "VD")[tokens_BT], "BTD")


def lookup_columns(table_VD, tokens_BT):
    """Returns the tokens' rows of a table, each device its columns."""
    tokens_BT = constrain(tokens_BT, "BT", COLUMNS)
    return constrain(constrain(table_VD, "VD", PARAM)[tokens_BT], "BTD", COLUMNS)


def lookup_forward(table_VD, tokens_BT, dtype: str):
    """Returns (the rows, what `lookup_backward` needs)."""
    x_BTD = lookup_columns(table_VD.astype(dtype), tokens_BT)
    return constrain(x_BTD, "BTD"), (table_VD, tokens_BT)


def lookup_backward(dtype: str, table_and_tokens, grad_BTD):
    """Returns the table's gradient [V, D] in its own dtype, and none of the tokens.

    It is the transpose of the lookup in f32, whatever dtype the forward pass computed in.
    """
    table_VD, tokens_BT = table_and_tokens  # of the table only its shape and dtype
    sum_rows = jax.linear_transpose(
        lambda table_VD: lookup_columns(table_VD, tokens_BT),
        jax.ShapeDtypeStruct(table_VD.shape, jnp.float32),
    )
    # It is sent before it is twice as wide.
    (grad_VD,) = sum_rows(constrain(grad_BTD, "BTD", COLUMNS).astype(jnp.float32))
    return grad_VD.astype(table_VD.dtype), None


lookup_summed_in_f32 = jax.custom_vjp(lookup, nondiff_argnums=(2,))
lookup_summed_in_f32.defvjp(lookup_forward, lookup_backward)
