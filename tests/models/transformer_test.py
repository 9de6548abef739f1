"""The language tower against dLLM-RL's numbers, and under its own options."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cost_analysis, hlo
from dllm_jax import pallas_kernels, sharding
from dllm_jax.models import cache as kv
from dllm_jax.models import hf, layer, mask, moe, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.mask import FAR, Mask
from dllm_jax.pallas_kernels.cpu_products import Transposed
from dllm_jax.pallas_kernels.reference import NEVER
from tests.goldens import reader
from tests.models.common import primitives

FAMILIES = ["sdar", "sdar_tied"]
FULL = ["dream", "llada", "mmada"]  # full attention
NEAR = {"atol": 1e-4, "rtol": 0}


@functools.cache
def checkpoint(family: str):
    """Returns (ModelConfig, params) of a golden checkpoint."""
    return hf.load(reader.checkpoint(family))


@functools.cache
def goldens(case: str) -> dict:
    """Returns the tensors of a golden case."""
    return reader.tensors(f"{case}/goldens.safetensors")


init = jax.jit(transformer.init, static_argnums=(1, 2, 3))


def forward(params, tokens_BT, pos_BT, mask, cache=None, *, cfg):
    """Returns the normed hidden states of a forward pass, and its keys and values."""
    x_BTD = transformer.embed(params, tokens_BT, cfg)
    return transformer.trunk(params, x_BTD, pos_BT, mask, cfg, cache)[:2]


hidden = jax.jit(forward, static_argnames="cfg")


def logits(params, *args, cfg):
    """Returns the logits of a forward pass."""
    return np.array(transformer.logits(params, hidden(params, *args, cfg=cfg)[0], cfg))


def assert_logits(found, golden, cfg):
    """Asserts equal logits, and that the mask token is never an answer."""
    assert (found[..., cfg.mask_id] == NEVER).all()
    keep = np.arange(cfg.vocab) != cfg.mask_id
    np.testing.assert_allclose(found[..., keep], golden[..., keep], **NEAR)


def dense(mask: Mask) -> np.ndarray:
    """Returns who sees whom as booleans [B, T, S], one pair at a time."""
    m = jax.tree.map(np.asarray, mask)
    sees = np.zeros((*m.q_end_BT.shape, m.k_pos_BS.shape[1]), bool)
    for b, t, s in np.ndindex(*sees.shape):
        in_range = m.q_begin_BT[b, t] <= m.k_pos_BS[b, s] < m.q_end_BT[b, t]
        sees[b, t, s] = in_range or m.q_group_BT[b, t] == m.k_group_BS[b, s]
    return sees


def ranges(sees_BTS) -> Mask:
    """Returns the Mask of a dense one: each query's first run, and groups of the rest."""
    B, T, S = sees_BTS.shape
    begin, end, q_group = (np.full((B, T), x, np.int32) for x in (0, 0, -1))
    k_pos = np.broadcast_to(np.arange(S, dtype=np.int32), (B, S)).copy()
    k_group = np.full((B, S), -2, np.int32)
    for b, t in np.ndindex(B, T):
        keys = np.flatnonzero(sees_BTS[b, t])
        run = keys[: np.argmax(np.append(np.diff(keys) > 1, True)) + 1]
        begin[b, t], end[b, t] = run[0], run[-1] + 1
        if len(run) < len(keys):
            rest = keys[len(run) :]
            q_group[b, t] = rest[0]
            k_pos[b, rest], k_group[b, rest] = FAR, rest[0]
    out = Mask(begin, end, q_group, k_pos, k_group)
    np.testing.assert_array_equal(dense(out), sees_BTS)
    return out


def positions(B: int, T: int):
    """Returns the positions of rows that start at 0."""
    return jnp.broadcast_to(jnp.arange(T)[None], (B, T))


@pytest.mark.parametrize(
    ("family", "block"),
    [(x, block) for x in FAMILIES for block in reader.numbered(x, "logits_bs")],
)
def test_block_attention_of_the_reference(family, block):
    cfg, params = checkpoint(family)
    g = goldens(f"{family}/forward")
    tokens, golden = g["input_ids"], g[f"logits_bs{block}"]
    pos = positions(*tokens.shape)
    seen = mask.block(pos, block)
    np.testing.assert_array_equal(dense(seen)[0], g[f"mask_bs{block}"] > 0)
    assert_logits(logits(params, tokens, pos, seen, cfg=cfg), golden, cfg)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_hidden_state_of_the_reference(family):
    cfg, params = checkpoint(family)
    g = goldens(f"{family}/forward")
    (block,) = reader.numbered(family, "hidden_states_bs")
    tokens, golden = g["input_ids"], jnp.array(g[f"hidden_states_bs{block}"])
    pos = positions(*tokens.shape)
    seen = mask.block(pos, block)
    x = transformer.embed(params, tokens, cfg)
    np.testing.assert_array_equal(x, golden[0])
    assert len(golden) == cfg.layers + 1
    for depth, want in enumerate(golden[1:], 1):
        layers = jax.tree.map(lambda x, n=depth: x[:n], params["layers"])
        x, _ = hidden(params | {"layers": layers}, tokens, pos, seen, cfg=cfg)
        if depth < cfg.layers:  # theirs is before the final norm, except the last
            want = layer.rms_norm(want, params["norm"], cfg.norm_eps)
        np.testing.assert_allclose(x, want, **NEAR)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_attention_of_the_reference(family):
    cfg, params = checkpoint(family)
    g = goldens(f"{family}/forward")
    B, T = g["input_ids"].shape
    pos = positions(B, T)
    seen = mask.ranged(jnp.full((B, T), T), pos)
    found = logits(params, g["input_ids"], pos, seen, cfg=cfg)
    assert_logits(found, g["logits_full"], cfg)


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_of_the_reference(family):
    cfg, params = checkpoint(family)
    g = goldens(f"{family}/forward")
    seen = ranges(g["mask_leftpad"] > 0)
    pos = g["position_ids_leftpad"]
    found = logits(params, g["input_ids"], pos, seen, cfg=cfg)
    assert_logits(found, g["logits_leftpad"], cfg)


@pytest.mark.parametrize("family", FULL)
def test_the_families_of_full_attention(family):
    cfg, params = checkpoint(family)
    g = goldens(f"{family}/forward")
    tokens = g["input_ids"]
    B, T = tokens.shape
    pos = positions(B, T)
    whole = mask.clean(cfg.attention, pos, jnp.full(B, T), cfg.block)
    found = logits(params, tokens, pos, whole, cfg=cfg)
    assert_logits(found, g["logits_full"], cfg)
    # Beyond its length a row sees nothing of what follows: padding changes nothing.
    more = np.pad(tokens, ((0, 0), (0, 3)), constant_values=7)
    pos = positions(B, T + 3)
    whole = mask.clean(cfg.attention, pos, jnp.full(B, T), cfg.block)
    found = logits(params, more, pos, whole, cfg=cfg)[:, :T]
    assert_logits(found, g["logits_full"], cfg)


@pytest.mark.parametrize("family", ["llada", "mmada"])
def test_every_hidden_state_of_full_attention(family):
    cfg, params = checkpoint(family)
    g = goldens(f"{family}/forward")
    tokens, golden = g["input_ids"], jnp.array(g["hidden_states"])
    pos = positions(*tokens.shape)
    seen = mask.full(pos, jnp.full(len(tokens), tokens.shape[1]))
    for depth, want in enumerate(golden):
        layers = jax.tree.map(lambda x, n=depth: x[:n], params["layers"])
        x, _ = hidden(params | {"layers": layers}, tokens, pos, seen, cfg=cfg)
        if depth < cfg.layers:  # theirs is before the final norm, except the last
            want = layer.rms_norm(want, params["norm"], cfg.norm_eps)
        np.testing.assert_allclose(x, want, **NEAR)
    assert depth == cfg.layers


def test_pads_and_causal_attention_of_dream():
    cfg, params = checkpoint("dream")
    g = goldens("dream/forward")
    tokens = g["input_ids"]
    pos = positions(*tokens.shape)
    begin = np.argmax(g["key_bias_pad"], axis=1)  # the first key that is no pad
    whole = mask.full(pos, jnp.full(len(tokens), tokens.shape[1]))
    for seen, name in ((whole, "pad_masked"), (mask.causal(pos), "causal")):
        seen = seen.replace(q_begin_BT=jnp.zeros_like(pos) + begin[:, None])
        found = logits(params, tokens, pos, seen, cfg=cfg)
        live = ~g["causal_dead_rows"]  # the others saw no key there, or answer nothing
        assert_logits(found[live], g[f"logits_{name}"][live], cfg)
        if name == "causal":  # also what Qwen2 is, which has no mask token to forbid
            plain = dataclasses.replace(cfg, mask_id=cfg.vocab)
            found = logits(params, tokens, pos, seen, cfg=plain)
            np.testing.assert_allclose(found[live], g["logits_causal"][live], **NEAR)
            np.testing.assert_array_equal(dense(seen), g["causal_visible"])


@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_cached_block_of_the_reference(family, spare):
    cfg, params = checkpoint(family)
    g = goldens(f"{family}/forward")
    golden, tokens = g["logits_cached_block"], g["input_ids"][:1]
    block = golden.shape[-2]
    pos, start = positions(*tokens.shape), tokens.shape[1] - block
    slots = start + spare
    before = pos[:, :start]
    _, fresh = hidden(
        params, tokens[:, :start], before, mask.block(before, block), cfg=cfg
    )
    cache = kv.write(
        kv.empty(cfg, 1, slots), fresh, jnp.zeros(1, jnp.int32), jnp.array([True])
    )
    own = mask.full(pos[:, start:], pos[:, -1] + 1)
    seen = mask.beside(own, jnp.arange(slots)[None] < start)
    found = logits(params, tokens[:, start:], pos[:, start:], seen, cache, cfg=cfg)
    assert_logits(found, golden, cfg)


def test_values_of_the_reference():
    cfg, params = checkpoint("sdar_value")
    g = goldens("sdar_value/forward")
    seen = ranges(g["mask"] > 0)
    x, _ = hidden(params, g["input_ids"], g["position_ids"], seen, cfg=cfg)
    np.testing.assert_allclose(transformer.value(params, x), g["values"], **NEAR)


def test_golden_cases_are_those_we_compare():
    for family in FAMILIES:
        told = reader.read(f"{family}/forward/case.json")
        blocks = reader.numbered(family, "logits_bs")
        compared = {"full", "leftpad", "cached_block", *(f"bs{x}" for x in blocks)}
        assert len(blocks) > 1
        names = {n.removeprefix("logits_") for n in told["tensors"] if "logits" in n}
        assert names == compared


# ---- Options that must not change the answer -----------------------------------------


@functools.partial(jax.jit, static_argnames="cfg")
@jax.grad
def gradient(params, tokens_BT, cfg):
    """Returns the gradient of a number that depends on every parameter."""
    pos = positions(*tokens_BT.shape)
    x, _ = forward(params, tokens_BT, pos, mask.block(pos, cfg.block), cfg=cfg)
    logp, entropy = transformer.token_logprob(params, x, tokens_BT, cfg)
    return jnp.mean(logp) + 0.1 * jnp.mean(entropy)


def test_remat_leaves_the_gradient(tiny):
    cfg, params = tiny
    tokens = np.arange(24).reshape(2, 12)
    grads = {
        kind: gradient(params, tokens, cfg=dataclasses.replace(cfg, remat=kind))
        for kind in transformer.REMAT
    }
    for kind in set(grads) - {"none"}:
        pairs = map(jax.tree.leaves, (grads["none"], grads[kind]))
        for plain, again in zip(*pairs, strict=True):
            assert np.abs(plain).max() > 0
            np.testing.assert_allclose(plain, again, atol=1e-6)


@pytest.mark.parametrize(
    ("remat", "loops"),
    [("none", 2), ("dots", 2), ("full", 3), ("attention", 2), ("offload", 2)],
)
def test_tiles_are_sorted_once_and_attention_is_kept(tiny, remat, loops):
    """Of a row wide enough to go by tiles: its loop forward, perhaps again, and backward."""
    cfg, params = tiny
    cfg = dataclasses.replace(cfg, remat=remat)
    tokens = np.arange(192)[None] % 60
    plain = functools.partial(gradient.__wrapped__, cfg=cfg)
    made = jax.make_jaxpr(plain)(params, tokens)
    found = [x for x in primitives(made.jaxpr) if x[0] in ("sort", "while")]
    assert [
        around for name, around in found if name == "sort" and "scan" in around
    ] == []
    assert sum(name == "sort" for name, _ in found) == 1
    assert sum(name == "while" for name, _ in found) == loops


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "model": 2}])
def test_a_mesh_leaves_the_logits(tiny, sizes):
    cfg, params = tiny
    tokens = np.arange(96).reshape(8, 12) % 60
    pos = positions(*tokens.shape)
    alone = logits(params, tokens, pos, mask.block(pos, 4), cfg=cfg)
    mesh = sharding.make_mesh(**{"fsdp": 1} | sizes)
    placed = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding),
        params,
        transformer.abstract(cfg, mesh, jnp.float32),
    )
    with jax.set_mesh(mesh):
        spread = logits(placed, tokens, pos, mask.block(pos, 4), cfg=cfg)
    np.testing.assert_allclose(spread, alone, atol=2e-5, rtol=1e-5)


def test_bfloat16_computes_near_its_f32_masters(tiny):
    cfg, params = tiny
    tokens = np.arange(24).reshape(2, 12)
    pos = positions(*tokens.shape)
    seen = mask.block(pos, 4)
    exact, _ = hidden(params, tokens, pos, seen, cfg=cfg)
    low = dataclasses.replace(cfg, dtype="bfloat16")
    x, fresh = hidden(params, tokens, pos, seen, cfg=low)
    assert x.dtype == fresh.k_LBSKH.dtype == jnp.bfloat16
    weight_DV, _, forbidden = transformer.head(params, low)
    want = np.delete(np.asarray(x, np.float64) @ weight_DV, forbidden, axis=-1)
    lies = Transposed(jnp.moveaxis(weight_DV, -1, 0), contracted=1)
    for other in (params, params | {"head": lies}):  # neither rounds its sums to bf16
        found = np.delete(transformer.logits(other, x, low), forbidden, axis=-1)
        np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6)
    assert np.abs(x - exact).mean() < 0.05 * np.abs(exact).mean()


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_the_embeddings_gradient_is_summed_in_f32(tiny, master):
    """Thousands of masks are one row's addends, of which bfloat16 soon adds no more."""
    cfg, params = tiny
    low = dataclasses.replace(cfg, dtype="bfloat16")
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random((8, 1024)) < 0.9, cfg.mask_id, rng.integers(60, 65))
    cotangent = jnp.asarray(1 + rng.normal(size=(8, 1024, cfg.d_model)), jnp.bfloat16)
    params = params | {"embed": params["embed"].astype(master)}
    rows, backward = jax.vjp(lambda p: transformer.embed(p, tokens, low), params)
    assert rows.dtype == jnp.bfloat16
    found = backward(cotangent)[0]["embed"]
    assert found.dtype == master
    exact = np.zeros(found.shape)
    np.add.at(exact, tokens, np.asarray(cotangent, np.float64))
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=0.01)


def test_in_f32_the_embeddings_gradient_is_the_plain_one(tiny):
    cfg, params = tiny
    rng = np.random.default_rng(0)
    tokens = rng.integers(60, 65, (8, 64))
    cotangent = jnp.asarray(rng.normal(size=(8, 64, cfg.d_model)), jnp.float32)
    rows, plain = jax.vjp(lambda table: table[tokens], params["embed"])
    again, summed = jax.vjp(lambda p: transformer.embed(p, tokens, cfg), params)
    np.testing.assert_array_equal(again, rows)
    np.testing.assert_array_equal(summed(cotangent)[0]["embed"], plain(cotangent)[0])


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2), (2, 4, 1)])
def test_a_table_whose_width_is_split_is_not_sent(tiny, shape):
    """What is sent of it and of its gradient are a few tokens' columns."""
    cfg, params = tiny
    data, fsdp, model = shape
    mesh = sharding.make_mesh(data=data, fsdp=fsdp, model=model)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, cfg.vocab, (8, 2)).astype(np.int32)
    cotangent = rng.normal(size=(8, 2, cfg.d_model)).astype(np.float32)

    def run(table, tokens, cotangent):
        x, pull = jax.vjp(lambda t: transformer.embed({"embed": t}, tokens, cfg), table)
        return x, pull(cotangent)[0]

    want = run(params["embed"], tokens, cotangent)
    placed = sharding.named("VD", params["embed"].shape, sharding.PARAM, mesh)
    table = jax.device_put(params["embed"], placed)
    rows = sharding.place_rows((tokens, cotangent), mesh)
    with jax.set_mesh(mesh):
        ran = jax.jit(run, out_shardings=(rows[1].sharding, placed))
        program = hlo.parsed(ran.lower(table, *rows).compile().as_text())
        x, grad = ran(table, *rows)
    np.testing.assert_array_equal(x, want[0])
    np.testing.assert_allclose(grad, want[1], rtol=1e-6, atol=1e-6)
    sent = cost_analysis.count(program, program.entry).sent
    group = tuple(device.id for device in mesh.devices[0, :, 0])
    over_fsdp = {name: n for (name, of), n in sent.items() if of == group}
    assert "all-to-all" in over_fsdp, sent
    assert sum(over_fsdp.values()) < table.nbytes / model / 4, sent


@pytest.mark.parametrize("rotary", [1.0, 0.5])
def test_halves_that_change_places_are_what_is_turned(tiny, rotary):
    cfg = dataclasses.replace(tiny[0], rotary=rotary, dtype="bfloat16")
    x_BTNH = jax.random.normal(jax.random.key(0), (2, 3, 4, cfg.head_dim), "bfloat16")
    turn = layer.turns(positions(2, 3) + 7, cfg)
    want, found = (f(x_BTNH, turn) for f in (layer.rope, layer.rope_swapping))
    np.testing.assert_array_equal(found, want)
    assert (np.asarray(found) != np.asarray(x_BTNH)).any()


@pytest.mark.parametrize("rotary", [1.0, 0.5])
def test_rope_in_f32_rounds_once(tiny, rotary):
    cfg = dataclasses.replace(tiny[0], rotary=rotary, dtype="bfloat16")
    exact = dataclasses.replace(cfg, rope_f32=True)
    x_BTNH = jax.random.normal(jax.random.key(0), (2, 3, 4, cfg.head_dim), "bfloat16")
    pos_BT = positions(2, 3) + 1000
    angle_BTh = np.asarray(pos_BT)[..., None] * np.asarray(layer.frequencies(cfg))
    cos, sin = (f(angle_BTh.astype(np.float32))[:, :, None] for f in (np.cos, np.sin))
    h = cos.shape[-1]
    a, b, still = np.split(np.asarray(x_BTNH, np.float32), (h, 2 * h), axis=-1)
    want = np.concatenate([a * cos - b * sin, b * cos + a * sin, still], axis=-1)
    for rope in (layer.rope, layer.rope_swapping):
        found = rope(x_BTNH, layer.turns(pos_BT, exact))
        rounded = rope(x_BTNH, layer.turns(pos_BT, cfg))
        assert found.dtype == rounded.dtype == jnp.bfloat16
        # Half a unit in the last place of eight bits, or where f32 itself is not exact more.
        far = abs(np.asarray(found, np.float32) - want)
        assert (far <= abs(want) * 2**-8 + 1e-6).all()
        assert (abs(np.asarray(rounded, np.float32) - want) > far).any()


def test_a_norm_of_what_is_too_large_says_so():
    """Its own gradient, too, is that of the formula."""
    x_TD = jnp.array([[3.0, 4.0], [2e38, 1.0], [1e-3, 0.0]])
    found = np.asarray(layer.rms_norm(x_TD, jnp.array([1.0, 2.0]), 1e-6))
    np.testing.assert_allclose(found[0], [3 / 12.5**0.5, 8 / 12.5**0.5], rtol=1e-6)
    assert np.isnan(found[1]).all() and np.isfinite(found[2]).all()

    def plain(x_D):
        return x_D / jnp.sqrt(jnp.mean(x_D * x_D) + 1e-6)

    ones = jnp.ones(2)
    want, got = (
        jax.jacobian(f)(x_TD[0])
        for f in (plain, lambda x_D: layer.rms_norm(x_D, ones, 1e-6))
    )
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_frequencies_of_llama_3_1(tiny):
    scaling = 8.0, 1.0, 4.0, 64.0
    cfg = dataclasses.replace(tiny[0], head_dim=32, rope_theta=1e4)
    plain = np.asarray(layer.frequencies(cfg))
    np.testing.assert_allclose(plain, 1e4 ** -(np.arange(0, 32, 2) / 32), rtol=1e-6)
    found = layer.frequencies(dataclasses.replace(cfg, rope_llama3=scaling))
    kinds = set()
    for f, got in zip(plain, found, strict=True):
        wave = 2 * np.pi / f  # positions per turn
        if wave < 64 / 4:
            kind, want = "kept", f
        elif wave > 64 / 1:
            kind, want = "scaled", f / 8
        else:
            smooth = (64 / wave - 1) / (4 - 1)
            kind, want = "between", (1 - smooth) * f / 8 + smooth * f
        kinds.add(kind)
        assert float(got) == pytest.approx(want, rel=1e-5)
    assert kinds == {"kept", "scaled", "between"}


def test_a_theta_may_be_a_whole_number_beyond_32_bits(tiny):
    cfg = dataclasses.replace(tiny[0], head_dim=8, rope_theta=10**10)
    found = layer.frequencies(cfg)
    np.testing.assert_allclose(found, 1e10 ** -(np.arange(0, 8, 2) / 8), rtol=1e-6)
    long = dataclasses.replace(cfg, rope_llama3=(8, 1, 4, 10**10))
    assert np.isfinite(layer.frequencies(long)).all()


def test_bias_and_norm_are_fields(tiny):
    cfg = tiny[0]
    bare = dataclasses.replace(cfg, qk_norm=False)
    biased = dataclasses.replace(bare, qkv_bias=True)
    names = {c: set(transformer.specs(c)["layers"]) for c in (cfg, bare, biased)}
    assert names[cfg] - names[bare] == {"q_norm", "k_norm"}
    assert names[biased] - names[bare] == {"bq", "bk", "bv"}
    fresh = init(jax.random.key(0), biased)
    assert not fresh["layers"]["bq"].any()
    tokens = np.arange(24).reshape(2, 12)
    pos = positions(*tokens.shape)
    seen = mask.block(pos, 4)
    plain, _ = hidden(fresh, tokens, pos, seen, cfg=bare)
    same, _ = hidden(fresh, tokens, pos, seen, cfg=biased)
    np.testing.assert_array_equal(plain, same)
    fresh["layers"] |= {"bv": fresh["layers"]["bv"] + 1}
    other, _ = hidden(fresh, tokens, pos, seen, cfg=biased)
    assert np.abs(other - plain).max() > 1e-3


def test_init_follows_the_specs(tiny):
    cfg = tiny[0]
    heads = ("lm", "value")
    params = init(jax.random.key(0), cfg, jnp.bfloat16, heads)
    mesh = sharding.make_mesh()
    want = transformer.abstract(cfg, mesh, jnp.bfloat16, heads)
    assert jax.tree.structure(params) == jax.tree.structure(want)
    for x, like in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
    assert not params["value"].any()
    assert (params["norm"] == 1).all()
    assert float(params["embed"].std()) == pytest.approx(0.02, rel=0.1)
    assert params["head"].shape == (cfg.d_model, cfg.vocab)


def test_every_op_is_told_which_kernels_to_take(tiny, monkeypatch):
    told = {}
    ops = {name: getattr(pallas_kernels, name) for name in pallas_kernels.__all__}
    del ops["CHOICES"], ops["Rule"], ops["cached_at"]  # which has one way
    for name, op in ops.items():

        def note(*args, name=name, op=op, **how):
            told[name] = how.get("implementation")
            return op(*args, **how)

        monkeypatch.setattr(pallas_kernels, name, note)
    monkeypatch.setattr(moe, "grouped_matmul", pallas_kernels.grouped_matmul)
    experts = {"experts": 4, "experts_per_token": 2, "expert_ffw": 8}
    cfg = dataclasses.replace(tiny[0], kernels="reference", **experts)

    def everything():
        params = transformer.init(jax.random.key(0), cfg)
        tokens_BT, pos_BT = jnp.zeros((2, 4), int), positions(2, 4)
        row_B = jnp.zeros(2, int)
        x_BTD = transformer.embed(params, tokens_BT, cfg)
        seen = mask.clean("block", pos_BT, row_B + 4, 4)
        transformer.trunk(params, x_BTD, pos_BT, seen, cfg)
        table_BA, pool = row_B[:, None], kv.pool(cfg, 4, 4)
        window = kv.Window(table_BA, row_B, row_B[:, None] > 0)
        chunk = kv.chunk(table_BA, pos_BT, row_B + 4, 4, pool)
        pairs = kv.Pairs(table_BA, row_B, jnp.zeros((2, 2), int), row_B)
        whole = mask.full(pos_BT, row_B + 4)
        canvas = kv.canvas(table_BA, whole, row_B + 4, pool)
        stale = window.replace(end_B=row_B + 4)
        for seen in (window, window.replace(pairs=pairs), chunk, canvas, stale):
            transformer.trunk(params, x_BTD, pos_BT, seen, cfg, pool)
        keys, hot_B = jax.random.split(jax.random.key(1)), jnp.ones(2)
        transformer.token_draw(params, x_BTD, keys, hot_B, cfg)
        border_BT, rule = jnp.zeros((2, 4)), pallas_kernels.Rule()
        transformer.selection(params, x_BTD, tokens_BT, border_BT, cfg, rule)
        return transformer.token_logprob(params, x_BTD, tokens_BT, cfg)

    jax.eval_shape(everything)
    assert told == dict.fromkeys(ops, "reference")


@pytest.mark.parametrize(
    "name, dtype, heads, kv_heads, parts, times",
    [
        ("tpu", "bfloat16", 8, 1, 1, 2),
        ("tpu", "bfloat16", 32, 4, 4, 2),
        ("tpu", "bfloat16", 32, 4, 2, 1),
        ("tpu", "bfloat16", 28, 4, 4, 2),  # 7 queries to a key
        ("tpu", "float32", 8, 1, 1, 1),
        ("gpu", "bfloat16", 8, 1, 1, 1),
    ],
)
def test_a_key_head_alone_on_a_tpu_is_held_twice(
    name, dtype, heads, kv_heads, parts, times, monkeypatch
):
    monkeypatch.setattr(kv, "platform", lambda: name)
    cfg = ModelConfig(layers=1, heads=heads, kv_heads=kv_heads, dtype=dtype)
    mesh = sharding.make_mesh(fsdp=1, model=parts, devices=jax.devices()[:parts])
    with jax.set_mesh(mesh):
        made = jax.eval_shape(lambda: kv.pool(cfg, 2, 4))
    assert made.k_LPOKH.shape[3] == times * kv_heads


@pytest.mark.parametrize("queries", [1, 2, 3])
def test_heads_held_twice_answer_the_same(tiny, queries):
    cfg, rows = tiny[0], 2
    cfg = dataclasses.replace(cfg, heads=queries * cfg.kv_heads)
    params = transformer.init(jax.random.key(0), cfg)
    tokens_BT, pos_BT = jnp.arange(rows * 8).reshape(rows, 8), positions(rows, 8)
    x_BTD = transformer.embed(params, tokens_BT, cfg)
    table_BA = jnp.arange(rows * 3).reshape(rows, 3)

    @jax.jit
    def answered(pool):
        chunk = kv.chunk(table_BA, pos_BT, jnp.full(rows, 8), 4, pool)
        _, pool, _ = transformer.trunk(params, x_BTD, pos_BT, chunk, cfg, pool)
        start_B, found = jnp.full(rows, 8), []
        window = kv.Window(table_BA, start_B, jnp.ones((rows, 1), bool))
        for seen in (window, window.replace(end_B=start_B + 4)):
            x, pool, _ = transformer.trunk(
                params, x_BTD[:, :4], pos_BT[:, :4] + 8, seen, cfg, pool
            )
            found.append(x)
        return found, pool

    plain = kv.pool(cfg, 6, 4)
    twice = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=3), plain)
    (want, held), (found, held_twice) = answered(plain), answered(twice)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    for x, y in zip(jax.tree.leaves(held_twice), jax.tree.leaves(held), strict=True):
        assert y.any()
        np.testing.assert_allclose(x, np.repeat(y, 2, axis=3), atol=1e-5)


def test_weights_are_rounded_where_a_forward_pass_would_round_them(tiny):
    sparse = {"experts": 4, "experts_per_token": 2, "expert_ffw": 8}
    cfg = dataclasses.replace(
        tiny[0], dtype="bfloat16", router="sigmoid", router_bias=True, **sparse
    )
    shapes = jax.eval_shape(
        lambda key: transformer.init(key, cfg, jnp.float32, ("lm", "value")),
        jax.random.key(0),
    )
    found = jax.eval_shape(lambda x: transformer.rounded(x, cfg), shapes)
    exact = {"embed", "value", "router", "router_bias"}
    for name, x in (found | found["layers"]).items():
        if name != "layers":
            assert x.dtype == ("float32" if name in exact else "bfloat16"), name
    plain = dataclasses.replace(cfg, dtype="float32")
    program = jax.make_jaxpr(lambda x: transformer.rounded(x, plain))(shapes)
    assert not program.eqns  # a run in f32 computes what it did


def test_heads_of_one_product_are_queries_then_a_key_and_a_value():
    """Of three queries a key head, where others have two."""
    rows = np.arange(2 * 5 * 4).reshape(1, 1, 2, 5, 4)
    queries, key, value = layer.of_heads(rows)
    np.testing.assert_array_equal(queries, rows[..., [0, 1, 2], :])
    np.testing.assert_array_equal(key, rows[..., 3, :])
    np.testing.assert_array_equal(value, rows[..., 4, :])
