"""A compiled program's text, read: what is called, and how often loops run."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import hlo

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


def rounds_of(text: str):
    """Returns how often the one loop of a text runs."""
    program = hlo.parsed(text)
    main = program.computations["main"]
    assert bool(hlo.loops(program, "main")) == (
        hlo.trip_count(program, main, main.lines["w"]) is None
    )
    return hlo.trip_count(program, main, main.lines["w"])


@pytest.mark.parametrize(
    ("first", "step", "times"),
    [("0", "1", 7), ("3", "1", 4), ("0", "2", 4), ("-1", "3", 3), ("9", "1", 0)],
)
def test_a_loop_of_a_tpus_text_runs_from_its_counters_start_in_its_steps(
    first, step, times
):
    assert rounds_of(LOOP.replace("FIRST", first).replace("STEP", step)) == times


def test_a_counter_that_no_constant_begins_is_taken_to_begin_at_0():
    text = LOOP.replace("constant(FIRST)", "parameter(1)").replace("STEP", "1")
    assert rounds_of(text) == 7


FUSED = """%fused (a: s32[], b: s32[]) -> pred[] {
  %b = s32[] parameter(1)
  %a = s32[] parameter(0)
  ROOT %f = pred[] compare(%a, %b), direction=LT
}

%condition ("""


@pytest.mark.parametrize(
    ("limit", "times"), [("constant(7)", 4), ("get-tuple-element(%s), index=0", None)]
)
def test_a_condition_may_be_fused_and_its_limit_be_data(limit, times):
    text = LOOP.replace("FIRST", "3").replace("STEP", "1")
    text = text.replace("constant(7)", limit).replace("%condition (", FUSED)
    compared = "compare(%i, %n), direction=LT"
    assert compared in text
    assert rounds_of(text.replace(compared, "fusion(%i, %n), calls=%fused")) == times


@pytest.mark.parametrize("length, known", [(7, True), (None, False)])
def test_loops_of_a_program_are_those_whose_rounds_are_data(length, known):
    def f(x, n):
        end = length or n.astype(int)[0]
        return jax.lax.fori_loop(0, end, lambda _, x: jnp.tanh(x @ x), x)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (1,))]
    program = hlo.parsed(jax.jit(f).lower(*args).compile().as_text())
    assert len(hlo.loops(program, program.entry)) == (0 if known else 1)
    (loop,) = (
        line
        for line in program.computations[program.entry].lines.values()
        if line.opcode == "while"
    )
    body = program.callee(loop, "body").name
    inside, whole = (
        len(list(hlo.all_lines(program, x))) for x in (body, program.entry)
    )
    assert len(program.computations[body].lines) <= inside < whole


@pytest.mark.parametrize(
    "attributes, names",
    [
        ("branch_computations={%a, %b.1, %c}", ["a", "b.1", "c"]),
        ("true_computation=%yes, false_computation=%no", ["no", "yes"]),
    ],
)
def test_branches_come_in_the_order_of_their_index(attributes, names):
    text = f"  %x = f32[] conditional(%i, %p, %p), {attributes}"
    line, is_root = hlo.instruction(text)
    assert hlo.branches(line) == names and not is_root


def test_a_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parsed("HloModule m\n")


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
