"""The check of kernels at a run's start: right ones are taken, wrong ones are told."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import sharding
from dllm_jax.models import selfcheck
from dllm_jax.pallas_kernels import (
    choice,
    reference,
    tiled_attention,
    tiled_head,
    tiled_matmul,
    tiles,
)
from dllm_jax.pallas_kernels.gpu import attention as gpu_attention
from dllm_jax.pallas_kernels.gpu import paged_attention as gpu_paged_attention
from dllm_jax.pallas_kernels.gpu import token_logprob as gpu_token_logprob
from dllm_jax.pallas_kernels.tpu import attention as tpu_attention
from dllm_jax.pallas_kernels.tpu import paged_attention as tpu_paged_attention
from dllm_jax.pallas_kernels.tpu import token_logprob as tpu_token_logprob

WIDE = selfcheck.Widths(
    heads=4,
    kv_heads=2,
    held_heads=2,
    head_dim=64,
    d_model=32,
    vocab=70,
    experts=0,
    expert_ffw=0,
    dtype="float32",
    block=4,
    page=8,
)


@pytest.fixture
def installed(monkeypatch):
    """Returns a function that gives this platform kernels: by op, a module."""
    monkeypatch.setattr(choice, "verdicts", {})
    monkeypatch.setattr(selfcheck, "seen", set())
    modules = {}
    known = choice.module
    monkeypatch.setattr(
        choice, "module", lambda op, name: modules.get((op, name)) or known(op, name)
    )

    def install(**kernels):
        for op, kernel in kernels.items():
            monkeypatch.setitem(choice.KERNELS, (op, "cpu"), "nowhere")
            modules[op, "cpu"] = kernel

    return install


# As good as any, and no module of the table.
RIGHT = types.SimpleNamespace(
    forward=tiled_attention.forward, backward=tiled_attention.backward
)


def pages(shift: float) -> types.SimpleNamespace:
    """Returns a kernel of paged attention that is off by a number."""

    def attend(*arrays, interpret):
        return reference.paged_attention(*arrays) + shift

    return types.SimpleNamespace(attend=attend)


def start_again():
    """Forgets what this process has looked at."""
    choice.verdicts.clear()
    selfcheck.seen.clear()


def taken(op: str) -> bool:
    """Returns whether `auto` takes this platform's kernel."""
    return choice.kernel(op, "auto", 64, 1024) is choice.module(op, "cpu")


@pytest.mark.parametrize(
    "parts, own",
    [
        (1, {"heads": 8, "kv_heads": 4, "vocab": 8192 + 808, "experts": 8}),
        (4, {"heads": 2, "kv_heads": 1, "vocab": 8192 + 202, "experts": 4}),
        (8, {"heads": 8, "kv_heads": 4, "vocab": 8192 + 4197, "experts": 2}),
        (1, {"experts": 6, "expert_ffw": 16}),
        (2, {"experts": 3, "expert_ffw": 16}),
        (4, {"experts": 6, "expert_ffw": 4}),
    ],
)
def test_kernels_are_checked_in_the_sizes_of_one_device(tiny, parts, own):
    """`model` splits heads only where key heads divide, too; experts, or else their width."""
    sizes = {"heads": 8, "kv_heads": 4, "vocab": 99_112}
    sizes["experts"] = 6 if "expert_ffw" in own else 16
    sparse = {"experts_per_token": 2, "expert_ffw": 16}
    model = dataclasses.replace(tiny[0], **sizes, **sparse)
    mesh = sharding.make_mesh(fsdp=1, model=parts, devices=jax.devices()[:parts])
    with jax.set_mesh(mesh):
        wide = selfcheck.widths(model, 4, 32)
    assert {name: getattr(wide, name) for name in own} == own


def test_what_is_right_is_taken_and_what_is_wrong_is_told(installed):
    installed(attention=RIGHT, paged_attention=pages(0.5))
    assert not taken("attention")  # nobody has looked yet
    (line,) = selfcheck.check("auto", WIDE)
    assert line.startswith(
        "warning: not used is cpu's kernel of paged_attention: it is "
    )
    assert line.endswith(" in 100.0% of the numbers")
    assert taken("attention") and not taken("paged_attention")
    installed(paged_attention=pages(0.0))
    other = dataclasses.replace(WIDE, block=2)  # of an evaluation's sampler, say
    assert selfcheck.check("auto", other) == []
    assert not taken("paged_attention")  # it was wrong for the first
    assert selfcheck.check("auto", WIDE) == []
    assert not taken("paged_attention")  # nor is it looked at again
    start_again()
    assert selfcheck.check("auto", WIDE) == []
    assert taken("paged_attention")


def test_a_gradient_that_is_wrong_is_seen(installed):
    def backward(*arrays, interpret):
        dq, dk, dv = tiled_attention.backward(*arrays, interpret=interpret)
        return dq, dk, dv.at[0, 0, 0, 0].add(jnp.nan)

    module = types.SimpleNamespace(forward=tiled_attention.forward, backward=backward)
    installed(attention=module)
    (line,) = selfcheck.check("auto", WIDE)
    assert "kernel of attention" in line


def one_behind(*arrays, **how):
    """Draws the next token."""
    token, *known = tiled_head.draw(*arrays, **how)
    return token + 1, *known


def above_zero(*arrays, **how):
    """Draws none of those whose score, with noise, is below zero."""
    token, noisy, *known = tiled_head.draw(*arrays, **how)
    return jnp.where(noisy > 0, token, 0), noisy, *known


def without_begin(run):
    """Returns a part of a kernel of attention to which all rows begin at 0."""

    def of_mask(q, k, v, seen, *arrays, interpret):
        zero_BT = jnp.zeros_like(seen.q_begin_BT)
        seen = seen.replace(q_begin_BT=zero_BT, tiles=None)
        return run(q, k, v, seen, *arrays, interpret=interpret)

    return of_mask


def with_first_mask(run):
    """Returns a part of a kernel of attention to which all rows are as the first one."""

    def of_mask(q, k, v, seen, *arrays, interpret):
        seen = seen.replace(tiles=None)
        seen = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), seen)
        return run(q, k, v, seen, *arrays, interpret=interpret)

    return of_mask


def within_pages(pages, layer, table_BA, start_B, keep_B, k, v, *, interpret):
    """Updates pages with no window that crosses a page's end."""
    keep_B &= start_B % pages[0].shape[2] + k.shape[1] <= pages[0].shape[2]
    return reference.cache_update(pages, layer, table_BA, start_B, keep_B, k, v)


def behind_groups(x_RD, w_EDF, sizes_E, number):
    """Multiplies, and leaves a number in rows of no group."""
    y_RF = tiled_matmul.multiply(x_RD, w_EDF, sizes_E, number)
    return jnp.where((jnp.arange(len(x_RD)) < sizes_E.sum())[:, None], y_RF, 1.0)


def still(x_RD, w_EDF, sizes_E, number):
    """Multiplies rows that have no gradient."""
    x_RD = jax.lax.stop_gradient(x_RD)
    return tiled_matmul.multiply(x_RD, w_EDF, sizes_E, number)


def unlearned(x_RD, w_EDF, sizes_E, number):
    """Multiplies by matrices that have no gradient."""
    w_EDF = jax.lax.stop_gradient(w_EDF)
    return tiled_matmul.multiply(x_RD, w_EDF, sizes_E, number)


def of_first_layer(x_RD, w_EDF, sizes_E, number):
    """Multiplies by the first layer's matrices, whichever is named."""
    number = None if number is None else 0
    return tiled_matmul.multiply(x_RD, w_EDF, sizes_E, number)


@pytest.mark.parametrize(
    ("op", "module"),
    [
        ("token_draw", {"draw": one_behind}),
        ("token_draw", {"draw": above_zero}),
        (
            "attention",
            {
                "forward": without_begin(tiled_attention.forward),
                "backward": without_begin(tiled_attention.backward),
            },
        ),
        (
            "attention",
            {
                "forward": with_first_mask(tiled_attention.forward),
                "backward": with_first_mask(tiled_attention.backward),
            },
        ),
        ("cache_update", {"update": within_pages}),
        ("grouped_matmul", {"multiply": behind_groups}),
        ("grouped_matmul", {"multiply": still}),
        ("grouped_matmul", {"multiply": unlearned}),
        ("grouped_matmul", {"multiply": of_first_layer}),
    ],
)
def test_what_is_wrong_for_some_inputs_is_seen(installed, op, module):
    """Ids one off, rows of two trajectories, each its own, windows across pages, experts."""
    installed(**{op: types.SimpleNamespace(**module)})
    (line,) = selfcheck.check("auto", WIDE)
    assert line.startswith(f"warning: not used is cpu's kernel of {op}: it is ")


def drawing(offset=0, moved=False):
    """Returns a kernel that draws of ids so much further on, or whose wanted rows are moved."""

    def draw(x, head, words, temperature, first, *, wanted_R, **how):
        # Of one of a single part the offset is no array.
        found = tiled_head.draw(
            x, head, words, temperature, first + offset, wanted_R=wanted_R, **how
        )
        return tuple(jnp.roll(y, 1) if moved else y for y in found)

    return types.SimpleNamespace(draw=draw)


def picking(offset=None, logit=0.0, behind=0.0):
    """Returns kernels of the head; offset: what they take it for; what they are off, nats."""

    def masked(x_RD, head_DV, first, forbidden):
        first = first if offset is None else offset
        id_1V = first + jnp.arange(head_DV.shape[1])[None]
        logits_RV = reference.logits(x_RD, head_DV)
        return jnp.where(id_1V == forbidden, reference.NEVER, logits_RV), id_1V

    def parts(x_RD, head_DV, token_R, first, forbidden):
        logits_RV, id_1V = masked(x_RD, head_DV, first, forbidden)
        is_RV = id_1V == token_R[:, None]
        lse_R = jax.nn.logsumexp(logits_RV, axis=1)
        mean_R = (jax.nn.softmax(logits_RV) * logits_RV).sum(axis=1)
        return lse_R, mean_R, jnp.where(is_RV, logits_RV, 0).sum(axis=1) + logit

    def pick(x_RD, head_DV, token_R, first, *, forbidden, interpret):
        return parts(x_RD, head_DV, token_R, first, forbidden)

    def pick_gradient(x_RD, head_DV, token_R, first, saved, *, forbidden, interpret):
        lse_R, mean_R, dlogp_R, dentropy_R, *border = saved

        def loss(x_RD, head_DV):
            logits_RV, id_1V = masked(x_RD, head_DV, first, forbidden)
            is_RV, still_RV = (
                id_1V == token_R[:, None],
                jax.lax.stop_gradient(logits_RV),
            )
            prob_RV = jnp.exp(still_RV - lse_R[:, None])
            d_RV = (is_RV - prob_RV) * dlogp_R[:, None]
            if border:
                limit_R1, behind_R1 = (y[:, None] for y in border)
                part_RV = jnp.exp(still_RV - behind_R1) * (still_RV <= limit_R1)
                d_RV += (
                    jnp.where(limit_R1 > 1.5 * reference.NEVER, part_RV, 0)
                    * dlogp_R[:, None]
                )
            d_RV -= prob_RV * (still_RV - mean_R[:, None]) * dentropy_R[:, None]
            return (logits_RV * d_RV).sum()

        return jax.grad(loss, argnums=(0, 1))(x_RD, head_DV)

    def behind_of(x_RD, head_DV, limit_R, first, *, forbidden, interpret):
        logits_RV, id_1V = masked(x_RD, head_DV, first, forbidden)
        near_RV = logits_RV <= limit_R[:, None]
        held_RV = jnp.where(near_RV, logits_RV, reference.BELOW_NEVER)
        ahead_R = (~near_RV & (id_1V != forbidden)).sum(axis=1) * 1.0
        return jax.nn.logsumexp(held_RV, axis=1) + behind, ahead_R

    return types.SimpleNamespace(
        pick=pick, pick_gradient=pick_gradient, behind=behind_of
    )


@pytest.mark.parametrize(
    ("split", "op", "module", "reason"),
    [
        (False, "token_draw", drawing(), ""),
        (True, "token_draw", drawing(), ""),
        (False, "token_draw", drawing(moved=True), "it is "),
        (True, "token_draw", drawing(offset=-70), "it is "),
        (False, "token_logprob", picking(), ""),
        (True, "token_logprob", picking(), ""),
        (True, "token_logprob", picking(offset=0), "it is "),
        (False, "token_logprob", picking(logit=0.02), "it is 0.02 off, where 0.01 is"),
        (False, "selection", picking(), ""),
        (True, "selection", picking(), ""),
        (True, "selection", picking(offset=0), "it is "),
        (False, "selection", picking(behind=0.05), "it is 0.05 off"),
        (False, "selection", picking(behind=np.nan), "of its numbers are not finite"),
    ],
)
def test_the_heads_numbers_are_right_in_nats_and_in_parts(
    installed, monkeypatch, split, op, module, reason
):
    """A log-prob that was off by 0.3 was 0.015 of the largest."""
    monkeypatch.setitem(selfcheck.NATS, "float32", 1e-2)
    installed(**{op: module})
    wide = dataclasses.replace(WIDE, split=split)
    found = selfcheck.check("auto", wide)
    assert bool(found) == bool(reason) and reason in "".join(found)


@pytest.mark.parametrize("off", [0.0, 0.5])
def test_a_parts_sum_is_compared_beside_rows_behind_whose_border_nothing_lies(
    installed, off
):
    """Of products that a chip rounds, too, of which a share of the largest is looked at."""
    installed(selection=picking(behind=off))
    rng = np.random.default_rng(0)
    x_BUD, head_DV = (selfcheck.normal(rng, x, "float32") for x in ((1, 2, 8), (8, 9)))
    border_BU = jnp.array([[1.0, -jnp.inf]])
    own, specified = (
        selfcheck.behind_of_part(name, x_BUD, head_DV, border_BU)
        for name in ("platform", "reference")
    )
    assert np.isfinite(specified[0]).all() and specified[0][0] != 0
    tolerance = selfcheck.TOLERANCE["float32"]
    assert bool(selfcheck.difference(own, specified, tolerance, 0.0)) == bool(off)


@pytest.mark.parametrize("block", [4, 1024])
def test_windows_over_cached_keys_are_looked_at_where_a_chip_is(monkeypatch, block):
    wide = dataclasses.replace(WIDE, block=block, head_dim=8)
    monkeypatch.setattr(selfcheck, "attention_sizes", lambda here, wide: [])
    rng = np.random.default_rng(0)
    run, (cases, windows) = selfcheck.attention(wide, rng)
    assert (cases, windows) == ([], [])
    monkeypatch.setattr(choice, "platform", lambda: "tpu")
    run, given = selfcheck.attention(wide, rng)
    own, specified = (run(name, *given) for name in ("any", "reference"))
    assert own[0].shape[:2] == (selfcheck.ROWS, min(block, 256))
    assert not selfcheck.difference(own, specified, 1e-5, 0.0)


@pytest.mark.parametrize("low, high", [(1, 40), (0, 39)])
def test_rows_without_pages_and_rows_of_all_are_looked_at(installed, low, high):
    def attend(q, pages, layer, table_BA, start_B, *own, interpret):
        start_B = jnp.clip(start_B, low, high)
        return reference.paged_attention(q, pages, layer, table_BA, start_B, *own)

    installed(paged_attention=types.SimpleNamespace(attend=attend))
    assert len(selfcheck.check("auto", WIDE)) == 1


@pytest.mark.parametrize("block, cases", [(4, 2), (16, 2), (32, 1), (64, 1)])
def test_two_blocks_are_asked_together_where_a_run_asks_them_so(block, cases):
    """Of two blocks of 64 some TPUs have no room for the queries, which no run has."""
    wide = dataclasses.replace(WIDE, block=block, page=max(block, 8))
    _, (asked, _) = selfcheck.paged_attention(wide, np.random.default_rng(0))
    assert [q.shape[1] // block for q, *_ in asked] == [2, 1][-cases:]


@pytest.mark.parametrize("block", [1, 32, 1024])
def test_rows_have_several_blocks_however_wide_these_are(block):
    wide = dataclasses.replace(WIDE, block=block)
    with np.errstate(all="raise"):
        *_, seen = selfcheck.packed_rows(wide, np.random.default_rng(0), 1, 320, 1)
    sees_T = (seen.q_end_BT - seen.q_begin_BT)[0, :160]
    assert len(np.unique(sees_T)) > 3 and np.unique(seen.q_begin_BT[0, :160]).size == 2
    assert len(np.unique(seen.q_group_BT)) > 4


def test_where_it_is_asked_for_a_wrong_one_is_refused(installed):
    def attend(*arrays, interpret):
        raise NotImplementedError("no such\ninstruction")

    installed(paged_attention=types.SimpleNamespace(attend=attend))
    words = "kernel of paged_attention: NotImplementedError: no such instruction; use 'auto'"
    for _ in range(2):
        with pytest.raises(ValueError, match=words):
            selfcheck.check("platform", WIDE)
    assert selfcheck.check("reference", WIDE) == []
    narrow = dataclasses.replace(WIDE, head_dim=8)  # which no kernel takes
    assert selfcheck.check("platform", narrow) == []


def test_a_chip_without_room_for_a_check_is_told(installed, monkeypatch):
    def full(wide, rng):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    installed(attention=RIGHT)
    monkeypatch.setitem(selfcheck.CHECKS, "attention", full)
    (line,) = selfcheck.check("auto", WIDE)
    assert line.endswith("JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory")
    assert not taken("attention")


def test_numbers_that_no_kernel_takes_are_one_word(installed, monkeypatch):
    installed(attention=RIGHT, paged_attention=pages(0.0))
    monkeypatch.setitem(choice.NUMBERS, "cpu", ("bfloat16", "float16"))
    (line,) = selfcheck.check("auto", WIDE)
    assert line == (
        "cpu's kernels take bfloat16, not float32: XLA's operations do instead"
    )
    assert not taken("attention")
    with pytest.raises(ValueError, match="'platform'.*not float32; set model.dtype"):
        selfcheck.check("platform", WIDE)


def test_what_was_right_is_remembered_and_what_was_not_is_looked_at_again(
    installed, tmp_path, monkeypatch
):
    installed(attention=RIGHT, paged_attention=pages(0.5))
    looked, fault = [], selfcheck.fault

    def noted(op, *args):
        looked.append(op)
        return fault(op, *args)

    def ops_looked_at() -> list[str]:
        """Returns what another start looks at; it says what is wrong each time."""
        looked.clear()
        start_again()
        lines = selfcheck.check("auto", WIDE, str(tmp_path))
        assert [taken("attention"), taken("paged_attention")] == [True, not lines]
        return sorted(looked)

    monkeypatch.setattr(selfcheck, "fault", noted)
    assert ops_looked_at() == ["attention", "paged_attention"]
    assert ops_looked_at() == ["paged_attention"] and not taken("paged_attention")
    installed(paged_attention=pages(0.0))  # as after a chip was out of memory
    assert ops_looked_at() == ["paged_attention"] and taken("paged_attention")
    assert ops_looked_at() == []
    (file,) = tmp_path.iterdir()
    for damaged in ("{", "3"):
        file.write_text(damaged)
        assert ops_looked_at() == ["attention", "paged_attention"]


def test_what_is_wrong_in_another_process_is_not_remembered(
    installed, tmp_path, monkeypatch
):
    installed(attention=RIGHT)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(selfcheck.sharding, "anywhere", lambda here: True)
        (line,) = selfcheck.check("auto", WIDE, str(tmp_path))
    assert line.endswith("wrong in another process") and [*tmp_path.iterdir()] == []


def test_a_kernel_that_hung_is_not_taken_where_another_run_found_it_right(
    installed, tmp_path
):
    installed(attention=RIGHT)
    assert selfcheck.check("auto", WIDE, str(tmp_path)) == []
    selfcheck.mark(str(tmp_path), WIDE, "attention").touch()
    start_again()
    (line,) = selfcheck.check("auto", WIDE, str(tmp_path))
    assert "did not get over its check" in line and not taken("attention")


def test_an_end_while_kernels_are_compiled_is_held_against_none(installed, tmp_path):
    installed(attention=RIGHT)
    selfcheck.mark(str(tmp_path), WIDE, selfcheck.ALL).touch()
    assert selfcheck.check("auto", WIDE, str(tmp_path)) == [] and taken("attention")
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


@pytest.mark.parametrize("op", sorted(selfcheck.CHECKS))
def test_a_check_tells_right_from_wrong(op):
    run, arrays = selfcheck.CHECKS[op](WIDE, np.random.default_rng(0))
    want, got = run("reference", *arrays), run("auto", *arrays)
    assert selfcheck.difference(got, want, 1e-4, 0.01) == ""
    wrong = jax.tree.map(lambda x: x + 1, got)
    assert "off" in selfcheck.difference(wrong, want, 1e-4, 0.05)


@pytest.mark.parametrize(
    "kernels, told", [("auto", 1), ("platform", 1), ("reference", 0)]
)
def test_a_chip_that_nobody_knows_does_without_and_says_so(monkeypatch, kernels, told):
    monkeypatch.setattr(choice, "platform", lambda: "abacus")
    lines = selfcheck.check(kernels, WIDE)
    assert len(lines) == told
    assert all("'abacus' is no chip with kernels" in line for line in lines)
    how = kernels, 64
    modules = {choice.kernel(op, *how) for op in ("attention", "token_draw")}
    names = {module and module.__name__.rpartition(".")[2] for module in modules}
    assert names <= {None, "tiled_attention", "tiled_head"}


# ---- The sizes of a chip -------------------------------------------------------------

# SDAR-1.7B, SDAR-8B and one of its key heads of eight devices, LLaDA-8B, blocks of 32.
SHAPES = [(16, 8, 128, 4), (32, 8, 128, 4), (4, 1, 128, 4), (32, 32, 128, 4)]
SHAPES += [(32, 8, 128, 32), (14, 2, 64, 4)]


def wide_of(heads: int, kv_heads: int, head_dim: int, block: int) -> selfcheck.Widths:
    """Returns Widths of bf16 and pages of 32."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "held_heads": kv_heads}
    sizes |= {"head_dim": head_dim, "page": 32}
    return dataclasses.replace(WIDE, dtype="bfloat16", block=block, **sizes)


@pytest.mark.parametrize("heads", [7, 8])
def test_pages_are_checked_with_the_heads_that_they_have(tiny, heads, monkeypatch):
    monkeypatch.setattr(selfcheck.cache, "platform", lambda: "tpu")
    model = dataclasses.replace(tiny[0], heads=heads, kv_heads=1, dtype="bfloat16")
    wide = selfcheck.widths(model, 4, 32)
    assert (wide.kv_heads, wide.held_heads) == (1, 2)
    (pool, _), *_, k, _ = selfcheck.pages(wide, np.random.default_rng(0))
    assert pool.shape[3] == k.shape[2] == 2
    _, (((q, *_), *_), _) = selfcheck.paged_attention(wide, np.random.default_rng(0))
    assert q.shape[2] == 8


@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu_rows_are_shared_out_and_whole_and_their_buffers_turn(shape):
    wide = wide_of(*shape)
    windows = [(*size, wide.block) for size in selfcheck.page_sizes("gpu", wide)]
    parts, tiles_of_keys = [], []  # by size; the tiles of one part at the least
    for rows, pages_held, width in windows[1:] + selfcheck.chunk_sizes("gpu", wide):
        _, tiles_of_queries = gpu_paged_attention.cut(width * shape[0] // shape[1])
        blocks, positions = rows * wide.kv_heads * tiles_of_queries, pages_held * 32
        parts.append(gpu_paged_attention.parts_of(blocks, positions))
        tiles_of_keys.append(-(-positions // gpu_paged_attention.TILE) // parts[-1])
        assert rows <= 133
        assert parts[-1] > 1 or blocks > gpu_paged_attention.BLOCKS
    assert [part > 1 for part in parts] == [True, False] * 2
    assert min(tiles_of_keys) > gpu_paged_attention.BUFFERS


@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_tpu_a_row_has_several_chunks(shape):
    wide = wide_of(*shape)
    page = wide.page, wide.kv_heads, wide.head_dim
    queries = wide.block * wide.heads // wide.kv_heads
    chunk = tpu_paged_attention.pages_of_chunk(*page, wide.dtype, queries)
    (_, (rows, held)) = selfcheck.page_sizes("tpu", wide)
    assert -(-held // chunk) == 4 and rows % 2 == 1
    assert 4 * held * np.prod(page) * 2 < 2**24  # bytes of a layer's keys
    ((rows, held, _),) = selfcheck.chunk_sizes("tpu", wide)
    assert rows * held > 2 * tpu_paged_attention.AT_ONCE


@pytest.mark.parametrize("block", [1, 4, 32, 1024])
def test_on_a_chip_sums_go_over_several_tiles_of_keys(block):
    """For some tile of queries forward, and for some of keys backward; some are seen whole."""
    wide = dataclasses.replace(WIDE, block=block)
    *_, (rows, slots, kv_heads) = selfcheck.attention_sizes("tpu", wide)
    rng = np.random.default_rng(0)
    *_, seen = selfcheck.packed_rows(wide, rng, rows, slots, kv_heads)
    forward, backward = tpu_attention.plan(seen, 2, WIDE.head_dim)
    for step_Bv, count_B in (forward, *backward):
        steps = [int(x) for x in step_Bv[0, : count_B[0]]]
        major = [tiles.place(x)[0] for x in steps]
        assert max(map(major.count, major)) > 1 and len(set(major)) > 1
        parts = {x >> tiles.KIND_BIT + 2 * n & 3 for x in steps for n in range(4)}
        assert parts == {0, 1, 2}
    for visit_Bij, count_Bi in gpu_attention.plan(seen):
        assert count_Bi.max() > gpu_attention.BUFFERS
        assert set(np.unique(visit_Bij % 2)) == {0, 1}


def test_on_a_chip_the_head_goes_over_several_tiles():
    """Of rows, over which a TPU sums the head's gradient; of the vocabulary, in a GPU's block."""
    rows = {here: selfcheck.ROWS * seats for here, seats in selfcheck.SEATS.items()}
    assert tpu_token_logprob.tile_sizes(rows["tpu"], 1024, 8192, 2)[0] < rows["tpu"]
    for name in gpu_token_logprob.TUNED:
        assert gpu_token_logprob.share_of(name, rows["gpu"], selfcheck.VOCAB) > 1


def test_a_cpu_checks_little():
    assert selfcheck.attention_sizes("cpu", WIDE) == [(4, 320, 2)]
    assert selfcheck.page_sizes("cpu", WIDE) == [(4, 5)]
    assert selfcheck.chunk_sizes("cpu", WIDE) == []


@pytest.mark.parametrize("here", ["gpu", "tpu"])
@pytest.mark.parametrize("op", ["attention", "paged_attention"])
def test_a_chips_check_tells_right_from_wrong(op, here, monkeypatch):
    """By XLA's operations: of right arrays of every size, and of one that is wrong."""
    with monkeypatch.context() as m:
        m.setattr(choice, "platform", lambda: here)
        run, arrays = selfcheck.CHECKS[op](WIDE, np.random.default_rng(0))
    want, got = (
        jax.jit(run, static_argnums=0)(x, *arrays) for x in ("reference", "any")
    )
    assert selfcheck.difference(got, want, 1e-4, 0.01) == ""
    *most, last = jax.tree.leaves(got)
    wrong = [*most, last.at[-1, -1].add(1)]
    assert "off" in selfcheck.difference(wrong, want, 1e-4, 0.0)


def test_every_op_with_a_kernel_is_checked():
    assert {op for op, _ in choice.KERNELS} == set(selfcheck.CHECKS)
