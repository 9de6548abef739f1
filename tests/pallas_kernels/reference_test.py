"""The ops' specification against independent formulas; the tiled head against it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from dllm_jax import pallas_kernels
from dllm_jax.models import mask
from dllm_jax.models.mask import FAR, Mask
from dllm_jax.pallas_kernels import reference

B, T, N, H = 2, 12, 4, 8

attention = jax.jit(reference.attention)


def normal(*shape, seed=0):
    """Returns standard normal numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# ---- Who sees whom -------------------------------------------------------------------
# Each row of the design's mask table: the Mask, and independently what it must mean as
# a rule on (query t, key s).

POS = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
LEN = np.array([[T], [7]], np.int32)  # the second row ends in padding


def padded() -> Mask:
    """Returns full attention over the first LEN positions of each row."""
    return mask.ranged(jnp.broadcast_to(LEN, (B, T)), jnp.where(POS < LEN, POS, FAR))


# One packed row: a clean copy of 5 tokens in blocks of 4 (slots 0-4) and its block 1
# noised (5-8); another trajectory's only block (9-10), and a noised one of it (11).
OWN = np.array([0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 9, 9])
BEGIN = np.broadcast_to(OWN, (B, T)).astype(np.int32)
END = np.array([4, 4, 4, 4, 5, 4, 4, 4, 4, 11, 11, 9], np.int32)
GROUP = np.array([-1, -1, -1, -1, -1, 0, 0, 0, 0, -1, -1, 3], np.int32)


def packed_rule(t, s):
    """A noised token sees its group and the clean blocks before; a clean one those."""
    if GROUP[s] >= 0:
        return GROUP[s] == GROUP[t]
    return OWN[s] == OWN[t] and OWN[t] <= s < END[t]


MASKS = {
    "block of 4": (
        lambda: mask.block(jnp.array(POS), 4),
        lambda b, t, s: s // 4 <= t // 4,
    ),
    "block of 1 is causal": (
        lambda: mask.block(jnp.array(POS), 1),
        lambda b, t, s: s <= t,
    ),
    "full, padded": (padded, lambda b, t, s: s < LEN[b, 0]),
    "packed": (
        lambda: mask.packed(
            jnp.array(BEGIN),
            jnp.broadcast_to(jnp.array(END), (B, T)),
            jnp.broadcast_to(jnp.array(GROUP), (B, T)),
        ),
        lambda b, t, s: packed_rule(t, s),
    ),
}


def by_rule(rule, T, S):
    """Returns the dense mask [B, T, S] of a rule."""
    pairs = np.ndindex(B, T, S)
    return np.array([rule(*pair) for pair in pairs]).reshape(B, T, S)


@pytest.mark.parametrize("K", [1, 2, N])
@pytest.mark.parametrize("name", MASKS)
def test_attention_is_dot_product_attention(name, K):
    seen, rule = MASKS[name]
    q, k, v = normal(B, T, N, H), normal(B, T, K, H, seed=1), normal(B, T, K, H, seed=2)
    sees = by_rule(rule, T, T)
    assert sees.any(-1).all()
    assert not sees.all()
    want = jax.nn.dot_product_attention(q, k, v, mask=sees[:, None])
    np.testing.assert_allclose(attention(q, k, v, seen()), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("K", [1, 2, N])
def test_attention_over_cached_keys(K):
    S, start = 20, np.array([8, 16])
    q, k, v = normal(B, 4, N, H), normal(B, 4, K, H, seed=1), normal(B, 4, K, H, seed=2)
    cached = normal(B, S, K, H, seed=3), normal(B, S, K, H, seed=4)
    pos = start[:, None] + np.arange(4)
    own = mask.full(jnp.array(pos), jnp.array(start) + 4)
    seen = mask.beside(own, jnp.arange(S)[None] < start[:, None])
    found = attention(q, k, v, seen, cached=cached)

    sees = by_rule(lambda b, t, s: s >= S or s < start[b], 4, S + 4)
    keys, values = (
        np.concatenate(pair, axis=1) for pair in zip(cached, (k, v), strict=True)
    )
    want = jax.nn.dot_product_attention(q, keys, values, mask=sees[:, None])
    np.testing.assert_allclose(found, want, atol=1e-5, rtol=1e-5)

    # What lies beyond `start` in the cache is never read.
    beyond = np.arange(S)[None, :, None, None] >= start[:, None, None, None]
    dirty = [np.where(beyond, 1e6, x).astype(np.float32) for x in cached]
    again = attention(q, k, v, seen, cached=dirty)
    np.testing.assert_array_equal(again, found)


def test_attention_gradient():
    q, k, v = normal(B, T, N, H), normal(B, T, 2, H, seed=1), normal(B, T, 2, H, seed=2)
    seen, rule = MASKS["packed"]
    sees, weight = by_rule(rule, T, T)[:, None], normal(B, T, N, H, seed=3)

    def ours(q, k, v):
        return jnp.sum(weight * reference.attention(q, k, v, seen()))

    def theirs(q, k, v):
        return jnp.sum(weight * jax.nn.dot_product_attention(q, k, v, mask=sees))

    both = (jax.jit(jax.grad(f, argnums=(0, 1, 2))) for f in (ours, theirs))
    found, want = (grad(q, k, v) for grad in both)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-4)


def test_a_query_that_sees_nothing_is_finite():
    seen = mask.packed(*(jnp.full((B, T), x) for x in (0, 0, -1)))
    out = attention(normal(B, T, N, H), normal(B, T, 2, H), normal(B, T, 2, H), seen)
    assert np.isfinite(out).all()


def test_attention_keeps_the_dtype_and_softmax_in_f32():
    q, k, v = (
        jnp.array(normal(B, T, n, H, seed=n), jnp.bfloat16) for n in (N, N // 2, 2)
    )
    seen = mask.block(jnp.array(POS), 4)
    out = attention(q, k, v, seen)
    exact = attention(*(x.astype(jnp.float32) for x in (q, k, v)), seen)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), exact, atol=0.03)


# ---- The head ------------------------------------------------------------------------

D, V, FORBIDDEN = 16, 37, 5


def head_inputs(rows: int, count: int):
    """Returns (x_BUD, head_DV, token_BU), no token being the forbidden one."""
    token = np.random.default_rng(7).integers(FORBIDDEN + 1, V, (rows, count))
    return normal(rows, count, D), normal(D, V, seed=1), token.astype(np.int32)


def test_token_logprob_is_log_softmax_without_the_mask():
    x, head, token = (y[0] if y.ndim == 3 else y for y in head_inputs(1, 9))
    token = token[0]
    logp, entropy = reference.token_logprob(x, head, token, FORBIDDEN)
    kept = np.delete(np.arange(V), FORBIDDEN)
    want = np.array(jax.nn.log_softmax(x @ head[:, kept]))
    np.testing.assert_allclose(
        logp, want[np.arange(9), np.searchsorted(kept, token)], atol=1e-5
    )
    np.testing.assert_allclose(entropy, -(np.exp(want) * want).sum(-1), atol=1e-5)
    never, _ = reference.token_logprob(x, head, np.full(9, FORBIDDEN), FORBIDDEN)
    assert (never < -1e20).all()


def test_logits_of_bf16_operands_are_not_rounded():
    x, head, token = head_inputs(1, 9)
    x, head = jnp.asarray(8 * x[0], jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    want = np.asarray(x, np.float64) @ np.asarray(head, np.float64)
    assert np.abs(want).max() > 16  # where bf16's neighbours are 1/8 apart
    np.testing.assert_allclose(reference.logits(x, head), want, atol=1e-4)

    def loss(x, head):
        return reference.token_logprob(x, head, token[0], FORBIDDEN)[0].sum()

    found = jax.grad(loss, (0, 1))(x, head)
    exact = jax.grad(loss, (0, 1))(x.astype(jnp.float32), head.astype(jnp.float32))
    for low, full in zip(found, exact, strict=True):
        assert low.dtype == jnp.bfloat16
        np.testing.assert_allclose(low.astype(jnp.float32), full, rtol=0.02, atol=0.05)


def test_entropy_of_a_flat_head_is_the_logarithm():
    x, _, token = head_inputs(1, 3)
    logp, entropy = reference.token_logprob(x[0], jnp.zeros((D, V)), token[0], 0)
    np.testing.assert_allclose(entropy, np.log(V - 1), rtol=1e-6)
    np.testing.assert_allclose(logp, -np.log(V - 1), rtol=1e-6)


@pytest.mark.parametrize("tile, count", [(4, 10), (4, 8), (16, 10), (1, 3)])
def test_tiles_change_neither_answer_nor_gradient(tile, count, monkeypatch):
    monkeypatch.setattr(pallas_kernels.head, "HEAD_TILE", tile)
    x, head, token = head_inputs(3, count)
    weight = normal(2, 3, count, seed=2)

    def tiled(x, head):
        return pallas_kernels.token_logprob(x, head, token, forbidden=FORBIDDEN)

    def whole(x, head):
        flat = x.reshape(-1, D), head, token.reshape(-1)
        out = reference.token_logprob(*flat, FORBIDDEN)
        return tuple(y.reshape(token.shape) for y in out)

    def score(f, x, head):
        out = f(x, head)
        return sum(jnp.sum(w * y) for w, y in zip(weight, out, strict=True)), out

    found, want = (
        jax.jit(jax.grad(functools.partial(score, f), argnums=(0, 1), has_aux=True))
        for f in (tiled, whole)
    )
    (grads, out), (want_grads, want_out) = found(x, head), want(x, head)
    for one, other in zip(out, want_out, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=1e-5)
    for one, other in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-4)


def test_a_tile_of_which_no_token_is_asked_is_skipped(monkeypatch):
    """Of 10 positions in tiles of 3, one row asks for 4 and the other for none."""
    monkeypatch.setattr(pallas_kernels.head, "FEW", 3)
    x, head, token = head_inputs(2, 10)
    asked = (jnp.arange(10)[None] < 4) & jnp.array([[True], [False]])

    def found(x, head, token):
        out = pallas_kernels.token_logprob(x, head, token, forbidden=FORBIDDEN)
        return sum(jnp.sum(jnp.where(asked, y, 0)) for y in out), out

    run = jax.jit(jax.grad(found, argnums=(0, 1), has_aux=True))
    some, (logp, _) = run(x, head, jnp.where(asked, token, -1))
    every, (want, _) = run(x, head, token)
    assert logp.shape == (2, 10) and (logp[:, 6:] == 0).all() and (want < 0).all()
    np.testing.assert_allclose(logp[:, :6][asked[:, :6]], want[asked], rtol=1e-6)
    for one, other in zip(some, every, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_logits_are_never_alive_whole(monkeypatch):
    monkeypatch.setattr(pallas_kernels.head, "HEAD_TILE", 4)
    x, head, token = head_inputs(3, 20)

    def loss(x, head):
        logp, _ = pallas_kernels.token_logprob(x, head, token, forbidden=FORBIDDEN)
        return logp.sum()

    def shapes(jaxpr):
        for eqn in jaxpr.eqns:
            yield from (var.aval.shape for var in eqn.outvars)
            for inner in jaxprs_in_params(eqn.params):
                yield from shapes(inner)

    largest = 3 * 4 * V  # rows x tile x vocabulary
    made = shapes(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, head).jaxpr)
    wide = [shape for shape in made if V in shape or V - 1 in shape]
    assert wide
    assert max(np.prod(shape) for shape in wide) <= max(largest, D * V)


# ---- Pages ---------------------------------------------------------------------------


def paged(L=2, P=7, O=4, K=2):
    """Returns a pool of pages (k, v) and a table of two rows that share their first."""
    table_BA = np.array([[3, 0, 5], [3, 6, 1]], np.int32)
    pages = tuple(jnp.array(normal(L, P, O, K, H, seed=seed)) for seed in (1, 2))
    return pages, table_BA


def test_paged_attention_sees_what_lies_before_and_its_own():
    pages, table_BA = paged()
    start_B, W = np.array([6, 9]), 3
    q, k, v = (normal(B, W, n, H, seed=n) for n in (N, 2, 2))
    v = v + 1
    found = jax.jit(reference.paged_attention)(q, pages, 1, table_BA, start_B, k, v)
    for b in range(B):
        old = [x[1, table_BA[b]].reshape(-1, 2, H)[: start_B[b]] for x in pages]
        keys, values = (np.concatenate(pair) for pair in zip(old, (k[b], v[b])))
        want = jax.nn.dot_product_attention(q[b], keys, values)
        np.testing.assert_allclose(found[b], want, atol=1e-5)


def test_cache_update_writes_a_window_and_nothing_else():
    pages, table_BA = paged()
    start_B, W = np.array([2, 6]), 3  # the first row's window crosses a page's end
    k, v = normal(B, W, 2, H, seed=8), normal(B, W, 2, H, seed=9)
    for keep in ([True, True], [False, True], [False, False]):
        found = reference.cache_update(
            pages, 1, table_BA, start_B, np.array(keep), k, v
        )
        for old, new, got in zip(pages, (k, v), found, strict=True):
            want = np.array(old)
            for b in np.flatnonzero(keep):
                for w in range(W):
                    page = table_BA[b, (start_B[b] + w) // 4]
                    want[1, page, (start_B[b] + w) % 4] = new[b, w]
            np.testing.assert_array_equal(got, want)
