"""The noise of `jax.random.gumbel`, one element at a time, for use inside a kernel.

Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", SC 2011), counted as JAX counts: element i of a draw is the exclusive or of the two
words that the key makes of (0, i). In int32, whose sums wrap as those of uint32 do.
"""

import jax
import jax.numpy as jnp

ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
PARITY = 0x1BD11BDA


def words(key_B):
    """Returns the two words of each key, [B, 2], int32.

    Raises ValueError for keys of another generator than Threefry.
    """
    if str(jax.random.key_impl(key_B)) != "threefry2x32":
        raise ValueError(
            "pallas_kernels: keys must be of 'threefry2x32', which the kernels compute "
            f"themselves, not {jax.random.key_impl(key_B)}"
        )
    return jax.lax.bitcast_convert_type(jax.random.key_data(key_B), jnp.int32)


def bits(first, second, index):
    """Returns 32 random bits for each index (< 2^32), given the words of its key.

    first, second, index: int32 arrays that broadcast together; int32 in their shape.
    """
    keys = first, second, first ^ second ^ PARITY
    x, y = jnp.zeros_like(index) + keys[0], index + keys[1]
    for n in range(5):
        for turn in ROTATIONS[n % 2]:
            x = x + y
            y = (y << turn) | jax.lax.shift_right_logical(y, 32 - turn)
            y = x ^ y
        x, y = x + keys[(n + 1) % 3], y + keys[(n + 2) % 3] + (n + 1)
    return x ^ y


def gumbel(first, second, index):
    """Returns jax.random.gumbel(key, shape)[index], `index` in the flattened shape.

    first, second, index: as in `bits`; f32 in their shape.
    """
    mantissa = jax.lax.shift_right_logical(bits(first, second, index), 9)
    uniform = jax.lax.bitcast_convert_type(mantissa | 0x3F800000, jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))
