"""The counter of compiled programs, on small ones whose figures are known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import hlo

F32 = jnp.float32


def counted(f, *shapes, choose=hlo.most_costly, devices=1, **options):
    """Returns what f does of arrays of these shapes, and its program."""
    args = [
        x if hasattr(x, "sharding") else jax.ShapeDtypeStruct(x, F32) for x in shapes
    ]
    program = hlo.parsed(jax.jit(f, **options).lower(*args).compile().as_text())
    return hlo.count(program, program.entry, choose, devices), program


def test_a_product_is_two_flops_a_pair():
    found, _ = counted(jnp.dot, (64, 32), (32, 16))
    assert found.flops == 2 * 64 * 32 * 16
    assert found.read == 4 * (64 * 32 + 32 * 16) and found.written == 4 * 64 * 16


@pytest.mark.parametrize("length", [3, 7])
def test_a_loop_counts_as_often_as_it_runs(length):
    def f(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    found, program = counted(f, (8, 32), (length, 32, 32))
    assert found.flops == length * 2 * 8 * 32 * 32
    assert not hlo.loops(program, program.entry)
    # A round reads its own weights and not the stack.
    weights = length * 4 * 32 * 32
    assert weights <= found.read < 3.5 * weights


def test_a_loop_of_unknown_length_counts_once():
    def f(x, n):
        return jax.lax.fori_loop(0, n.astype(int)[0], lambda _, x: jnp.tanh(x @ x), x)

    found, program = counted(f, (32, 32), (1,))
    assert found.flops == 2 * 32**3
    (body,) = hlo.loops(program, program.entry)
    assert hlo.count(program, body).flops == 2 * 32**3


LOOP = """HloModule m

%body (s: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %s = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %c = s32[] copy(%i)
  %x = f32[8,8]{1,0} get-tuple-element(%s), index=1
  %y = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %o = s32[] constant(STEP)
  %j = s32[] add(%c, %o)
  ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%j, %y)
}

%condition (s: (s32[], f32[8,8])) -> pred[] {
  %s = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(7)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %z = s32[] constant(FIRST)
  %z.1 = s32[] copy(%z)
  %t = (s32[], f32[8,8]{1,0}) tuple(%z.1, %p)
  %w = (s32[], f32[8,8]{1,0}) while(%t), condition=%condition, body=%body
  ROOT %r = f32[8,8]{1,0} get-tuple-element(%w), index=1
}
"""


@pytest.mark.parametrize(
    ("first", "step", "times"),
    [("0", "1", 7), ("3", "1", 4), ("0", "2", 4), ("-1", "3", 3), ("9", "1", 0)],
)
def test_a_loop_of_a_tpus_text_runs_from_its_counters_start_in_its_steps(
    first, step, times
):
    program = hlo.parsed(LOOP.replace("FIRST", first).replace("STEP", step))
    assert hlo.count(program, "main").flops == times * 2 * 8**3
    assert not hlo.loops(program, "main")


def test_a_counter_that_no_constant_begins_is_taken_to_begin_at_0():
    text = LOOP.replace("constant(FIRST)", "parameter(1)").replace("STEP", "1")
    assert hlo.count(hlo.parsed(text), "main").flops == 7 * 2 * 8**3


def test_a_branch_is_named_or_the_most_costly():
    def f(x, i):
        work = [
            lambda x, n=n: functools.reduce(jnp.dot, [x] * (n + 2)) for n in range(3)
        ]
        return jax.lax.switch(i.astype(int)[0], work, x)

    one = 2 * 32**3
    for index in range(3):
        found, _ = counted(f, (32, 32), (1,), choose=lambda depth, count, i=index: i)
        assert found.flops == one * (index + 1)
    assert counted(f, (32, 32), (1,))[0].flops == 3 * one


def test_an_update_in_place_writes_what_it_changes():
    def f(pool, row):
        return jax.lax.dynamic_update_slice(pool, row * 2, (5, 0))

    found, _ = counted(f, (1024, 64), (1, 64), donate_argnums=0)
    assert found.written <= 2 * 4 * 64 and found.read <= 3 * 4 * 64 + 64


@pytest.mark.parametrize(
    "kind, out, factor",
    [
        ("all-reduce", PartitionSpec(), 2 * 3 / 4),
        ("all-gather", PartitionSpec(), 3),
    ],
)
def test_a_collective_sends_what_a_ring_does(kind, out, factor):
    mesh = Mesh(np.array(jax.devices()[:4]), "d")
    split = NamedSharding(mesh, PartitionSpec("d"))
    x = jax.ShapeDtypeStruct((64, 32), F32, sharding=split)

    def total(x):
        if kind == "all-gather":
            return x * 2
        return x.reshape(4, 16, 32).sum(axis=0)

    found, _ = counted(total, x, devices=4, out_shardings=NamedSharding(mesh, out))
    ((name, group),) = found.sent
    assert name == kind and group == (0, 1, 2, 3)
    assert found.sent[name, group] == factor * 4 * 16 * 32


ENDS = [  # a collective at once, in two parts, and the bytes that it makes
    ("all-reduce(%p), to_apply=%add", "f32[64]{0}", "f32[64]{0}", 256),
    (
        "all-reduce(%p), to_apply=%add",
        "f32[64]{0}",
        "((f32[64]{0}), (f32[64]{0}))",
        256,
    ),
    (
        "all-gather(%p), dimensions={0}",
        "f32[256]{0}",
        "(f32[64]{0}, f32[256]{0})",
        1024,
    ),
    (
        "reduce-scatter(%p), to_apply=%add",
        "f32[16]{0}",
        "((f32[64]{0}), f32[16]{0})",
        64,
    ),
]


@pytest.mark.parametrize(("call", "shape", "both", "made"), ENDS)
def test_a_collective_in_two_parts_moves_what_it_moves_at_once(call, shape, both, made):
    kind, _, rest = call.partition("(")
    text = "HloModule m\n\nENTRY %main (p: f32[64]) -> f32[64] {{\n{}\n}}\n"
    head = "  %p = f32[64]{0} parameter(0)\n"
    start = f"{head}  %s = {both} {kind}-start({rest}\n"
    texts = (
        f"{head}  ROOT %r = {shape} {call}",
        f"{start}  ROOT %r = {shape} {kind}-done(%s)",
    )
    found = [hlo.count(hlo.parsed(text.format(x)), "main", devices=4) for x in texts]
    assert found[0] == found[1]
    assert (found[0].read, found[0].written) == (256, made)


def test_room_that_others_write_is_not_written():
    text = TPU.replace(
        "  ROOT %f",
        '  %a = bf16[4096]{0} custom-call(), custom_call_target="AllocateBuffer"\n  ROOT %f',
    )
    found, plain = (hlo.count(hlo.parsed(x), "main") for x in (text, TPU))
    assert found == plain


TPU = """HloModule m
%inner (p: bf16[4,64,128], i: s32[], x: bf16[16,64]) -> bf16[16,128] {
  %p = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %x = bf16[16,64]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  %z = s32[] constant(0)
  %s = bf16[1,64,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p, %i, %z, %z), dynamic_slice_sizes={1,64,128}
  %b = bf16[64,128]{1,0} bitcast(%s)
  ROOT %c = bf16[16,128]{1,0:T(8,128)(2,1)} convolution(%x, %b), dim_labels=bf_io->bf
}

ENTRY %main (p: bf16[4,64,128], i: s32[], x: bf16[16,64]) -> bf16[16,128] {
  %p = bf16[4,64,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %x = bf16[16,64]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  %k = bf16[16,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/pages/pallas_call"}
  ROOT %f = bf16[16,128]{1,0:T(8,128)(2,1)} fusion(%p, %i, %x), kind=kOutput, calls=%inner
}
"""


def test_a_fused_slice_of_a_stack_and_what_stays_on_the_chip():
    program = hlo.parsed(TPU)
    found = hlo.count(program, "main")
    assert found.flops == 2 * 16 * 64 * 128
    assert found.read == 2 * 64 * 128 + 4 and found.written == 2 * 16 * 128
    assert found.kernels == {"pages": 1}


GROUPED = """HloModule m
ENTRY %main (x: bf16[64,32], w: bf16[4,32,16], y: bf16[64,16], s: s32[4]) -> bf16[4,32,16] {
  %x = bf16[64,32]{1,0} parameter(0)
  %w = bf16[4,32,16]{2,1,0} parameter(1)
  %y = bf16[64,16]{1,0} parameter(2)
  %s = s32[4]{0} parameter(3)
  %ragged-dot-metadata = s32[5]{0} custom-call(%s), custom_call_target="tpu_custom_call"
  %ragged-dot-none.1 = bf16[64,16]{1,0} custom-call(%ragged-dot-metadata, %x, %w), custom_call_target="tpu_custom_call", frontend_attributes={ragged_dot_tiling="128,32,16"}, metadata={op_name="jit(f)/ragged_dot_general/ragged-dot-none"}
  ROOT %ragged-dot-none = bf16[4,32,16]{2,1,0} custom-call(%ragged-dot-metadata, %x, %y), custom_call_target="tpu_custom_call", frontend_attributes={ragged_dot_tiling="128,32,16"}
}
"""


def test_products_of_groups_of_rows_are_two_flops_a_pair_of_each_row():
    found = hlo.count(hlo.parsed(GROUPED), "main")
    assert found.flops == 2 * (2 * 64 * 32 * 16)
    x, w, y, ends = 2 * 64 * 32, 2 * 4 * 32 * 16, 2 * 64 * 16, 4 * 5
    assert found.read == 2 * x + w + y + 2 * ends + 4 * 4
    assert found.written == y + w + ends
    assert not found.kernels


def test_of_a_stack_of_experts_those_of_one_layer_are_read():
    program = hlo.parsed(GROUPED)
    whole, part = (hlo.count(x, "main") for x in (program, program._replace(experts=1)))
    assert whole.read - part.read == 3 / 4 * (2 * 4 * 32 * 16)  # of four, in bf16
    assert (part.flops, part.written) == (whole.flops, whole.written)


@pytest.mark.parametrize(
    "groups, want",
    [
        ("replica_groups={{0,2},{1,3}}", (0, 2)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("source_target_pairs={{3,1},{1,3}}", (1, 3)),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data'}", (0, 4)),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['data'=4,'fsdp'=2] {'data','fsdp'}", tuple(range(8))),
        ("replica_groups=mesh['all'=8] {'all':(1)2}", (0, 4)),
        ("replica_groups=mesh['all'=8] {'all':(2)4}", (0, 1, 2, 3)),
        ("replica_groups={}", (0, 1, 2, 3, 4, 5, 6, 7)),
    ],
)
def test_groups_are_read_as_xla_writes_them(groups, want):
    assert hlo.group_of(groups, 8) == want


def test_a_convolution_counts_what_meets_an_element():
    text = "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f"
    line = hlo.Instruction(
        "c", "convolution", (hlo.Array("f32", (2, 5, 8), 0),), ("x", "w"), "", text
    )
    # Of 5 x 3 pairs the first and the last position lack one each.
    assert hlo.convolution_flops(line, (2, 5, 4), (3, 4, 8)) == 2 * 2 * 4 * 8 * 13


@pytest.mark.parametrize(
    "line",
    [
        '%dq.7 = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"',
        '%x = f32[8] custom-call(), custom_call_target="mosaic_gpu", op_name="f/jvp(dq)/x"',
    ],
)
def test_a_kernel_has_its_own_name_in_a_gradient_too(line):
    found, _ = hlo.instruction("  " + line)
    assert hlo.kernel_name(found) == "dq"
