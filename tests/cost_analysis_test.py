"""The counter of compiled programs, on small ones whose figures are known."""

import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks import cost_analysis, hlo

F32 = jnp.float32


def counted(f, *shapes, choose=None, devices=1, **options):
    """Returns what f does of arrays of these shapes, and its program."""
    args = [
        x if hasattr(x, "sharding") else jax.ShapeDtypeStruct(x, F32) for x in shapes
    ]
    program = hlo.parsed(jax.jit(f, **options).lower(*args).compile().as_text())
    return cost_analysis.count(program, program.entry, choose, devices), program


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
    assert cost_analysis.count(program, body).flops == 2 * 32**3


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
    found = [
        cost_analysis.count(hlo.parsed(text.format(x)), "main", devices=4)
        for x in texts
    ]
    assert found[0] == found[1]
    assert (found[0].read, found[0].written) == (256, made)


def test_room_that_others_write_is_not_written():
    text = TPU.replace(
        "  ROOT %f",
        '  %a = bf16[4096]{0} custom-call(), custom_call_target="AllocateBuffer"\n  ROOT %f',
    )
    found, plain = (cost_analysis.count(hlo.parsed(x), "main") for x in (text, TPU))
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
    found = cost_analysis.count(program, "main")
    assert found.flops == 2 * 16 * 64 * 128
    assert found.read == 2 * 64 * 128 + 4 and found.written == 2 * 16 * 128
    assert found.kernels == {"pages": 1}


ON_CHIP = """HloModule m
%taken (p: f32[4,64]) -> bf16[1,64] {
  %p = f32[4,64]{1,0} parameter(0)
  ROOT %s = bf16[1,64]{1,0:S(1)} slice(%p), slice={[0:1], [0:64]}
}

%put (q: f32[4,64], u: f32[1,64], z: s32[]) -> f32[4,64] {
  %q = f32[4,64]{1,0} parameter(0)
  %u = f32[1,64]{1,0:S(1)} parameter(1)
  %z = s32[]{:S(6)} parameter(2)
  ROOT %d = f32[4,64]{1,0} dynamic-update-slice(%q, %u, %z, %z)
}

ENTRY %main (a: f32[4,64], b: f32[1,64], z: s32[]) -> f32[4,64] {
  %a = f32[4,64]{1,0} parameter(0)
  %b = f32[1,64]{1,0:S(1)} parameter(1)
  %z = s32[]{:S(6)} parameter(2)
  %t = bf16[1,64]{1,0:S(1)} fusion(%a), kind=kLoop, calls=%taken
  %l = bf16[1,64]{1,0:S(1)} slice(%a), slice={[1:2], [0:64]}
  %k = f32[4,64]{1,0:S(1)} copy(%a)
  %m = f32[1,64]{1,0} slice(%k), slice={[1:2], [0:64]}
  %o = f32[4,64]{1,0} fusion(%a, %b, %z), kind=kLoop, calls=%put
  ROOT %r = f32[4,64]{1,0} dynamic-update-slice(%o, %b, %z, %z)
}
"""


def test_parts_that_come_to_the_chip_or_from_it_move_the_whole_arrays_numbers():
    """Read: twice a row of %a, rounded on its way, and %a by the copy; written: three rows."""
    found = cost_analysis.count(hlo.parsed(ON_CHIP), "main")
    row = 4 * 64
    assert (found.read, found.written) == (2 * row + 4 * row, 3 * row)


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
    found = cost_analysis.count(hlo.parsed(GROUPED), "main")
    assert found.flops == 2 * (2 * 64 * 32 * 16)
    x, w, y, ends = 2 * 64 * 32, 2 * 4 * 32 * 16, 2 * 64 * 16, 4 * 5
    assert found.read == 2 * x + w + y + 2 * ends + 4 * 4
    assert found.written == y + w + ends
    assert not found.kernels


def test_of_a_stack_of_experts_those_of_one_layer_are_read():
    program = hlo.parsed(GROUPED)
    whole, part = (cost_analysis.count(program, "main", experts=x) for x in (0, 1))
    assert whole.read - part.read == 3 / 4 * (2 * 4 * 32 * 16)  # of four, in bf16
    assert (part.flops, part.written) == (whole.flops, whole.written)


def test_a_convolution_counts_what_meets_an_element():
    text = "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f"
    line = hlo.Instruction(
        "c", "convolution", (hlo.Array("f32", (2, 5, 8), 0),), ("x", "w"), "", text
    )
    # Of 5 x 3 pairs the first and the last position lack one each.
    assert (
        cost_analysis.convolution_flops(line, (2, 5, 4), (3, 4, 8))
        == 2 * 2 * 4 * 8 * 13
    )
