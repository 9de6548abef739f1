"""Attention over keys and values, in rows and in pages, and the update of pages."""

import functools

import jax
import jax.numpy as jnp

from dllm_jax import sharding
from dllm_jax.pallas_kernels import reference
from dllm_jax.pallas_kernels.choice import kernel

FEW = 64  # queries below which a key head's queries fill a tile together


def attention(
    q_BTNH, k_BSKH, v_BSKH, mask, *, cached=None, implementation="auto", interpret=False
):
    """Returns the grouped-query attention of q over k, v under a range-or-group mask.

    See `reference.attention`. The kernels differ in what a query that sees nothing gets:
    zero. Differentiable in q, k and v, and split over rows and key heads of the mesh.
    """
    found = kernel("attention", implementation, q_BTNH.shape[3])
    if found is None:
        return reference.attention(q_BTNH, k_BSKH, v_BSKH, mask, cached=cached)
    if cached is not None:
        pairs = zip(cached, (k_BSKH, v_BSKH), strict=True)
        k_BSKH, v_BSKH = (jnp.concatenate(pair, axis=1) for pair in pairs)
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    if T > FEW:
        return flash(found, interpret, q_BTNH, k_BSKH, v_BSKH, mask)
    # Few queries leave a tile half empty: a key head's G heads become queries of one.
    q_BGTKH = jnp.moveaxis(q_BTNH.reshape(B, T, K, N // K, H), 3, 1)
    folded = mask.replace(
        **{
            name: jnp.tile(getattr(mask, name), (1, N // K))
            for name in ("q_begin_BT", "q_end_BT", "q_group_BT")
        }
    )
    q_BTKH = q_BGTKH.reshape(B, -1, K, H)
    out_BTKH = flash(found, interpret, q_BTKH, k_BSKH, v_BSKH, folded)
    return jnp.moveaxis(out_BTKH.reshape(q_BGTKH.shape), 1, 3).reshape(B, T, N, H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def flash(found, interpret, q_BTNH, k_BSKH, v_BSKH, mask):
    """Returns the attention that the module `found` computes."""
    return flash_forward(found, interpret, q_BTNH, k_BSKH, v_BSKH, mask)[0]


def flash_dims(q_BTNH, k_BSKH, mask):
    """Returns the letters of q, k and the mask, without heads that cannot be split alike."""
    mesh = jax.sharding.get_abstract_mesh()
    split = mesh.shape.get("model", 1)
    keep = q_BTNH.shape[2] % split == 0 and k_BSKH.shape[2] % split == 0
    q, k = ("BTNH", "BSKH") if keep else ("BTnH", "BSkH")
    return q, k, type(mask)("BT", "BT", "BT", "BS", "BS")


def flash_forward(found, interpret, *args):
    q, k, mask = flash_dims(args[0], args[1], args[3])
    run = functools.partial(found.forward, interpret=interpret)
    lse = "B" + q[2] + "T"
    out, lse_BNT = sharding.per_device(run, (q, k, k, mask), (q, lse), *args)
    return out, (*args, out, lse_BNT)


def flash_backward(found, interpret, saved, dout_BTNH):
    q, k, mask = flash_dims(saved[0], saved[1], saved[3])
    run = functools.partial(found.backward, interpret=interpret)
    dims = (q, k, k, mask, q, "B" + q[2] + "T", q)
    return *sharding.per_device(run, dims, (q, k, k), *saved, dout_BTNH), None


flash.defvjp(flash_forward, flash_backward)


def paged_dims(q_BWNH, k_BWKH):
    """Returns the letters of q, of the pages, of fresh keys and of the table."""
    split = jax.sharding.get_abstract_mesh().shape.get("model", 1)
    keep = q_BWNH.shape[2] % split == 0 and k_BWKH.shape[2] % split == 0
    N, K = "NK" if keep else "nk"
    pool = f"LPO{K}H"
    return f"BW{N}H", (pool, pool), f"BW{K}H", "BA"


def paged_attention(
    q_BWNH, pages, layer, table_BA, start_B, k_BWKH, v_BWKH,
    *, implementation="auto", interpret=False,
):  # fmt: skip
    """Returns each row's window attention; see `reference.paged_attention`.

    On a mesh, rows and pages are split alike: a table names pages of its own device.
    """
    run = reference.paged_attention
    if found := kernel("paged_attention", implementation, q_BWNH.shape[3]):
        run = functools.partial(found.attend, interpret=interpret)
    q, pool, k, table = paged_dims(q_BWNH, k_BWKH)
    args = q_BWNH, pages, layer, table_BA, start_B, k_BWKH, v_BWKH
    return sharding.per_device(run, (q, pool, "", table, "B", k, k), q, *args)


def cache_update(
    pages, layer, table_BA, start_B, keep_B, k_BWKH, v_BWKH,
    *, implementation="auto", interpret=False,
):  # fmt: skip
    """Returns `pages` with the kept windows written; see `reference.cache_update`.

    The kernel writes in place: no copy is made of pages that nobody else holds. On GPU
    the specification does so too, as XLA scatters into what is donated.
    """
    run = reference.cache_update
    if found := kernel("cache_update", implementation, k_BWKH.shape[3]):
        run = functools.partial(found.update, interpret=interpret)
    _, pool, k, table = paged_dims(k_BWKH, k_BWKH)
    args = pages, layer, table_BA, start_B, keep_B, k_BWKH, v_BWKH
    return sharding.per_device(run, (pool, "", table, "B", "B", k, k), pool, *args)
