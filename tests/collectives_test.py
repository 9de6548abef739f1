"""Collectives: the devices that take part, and what each of them sends."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import collectives, hlo


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
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=split)

    def total(x):
        if kind == "all-gather":
            return x * 2
        return x.reshape(4, 16, 32).sum(axis=0)

    made = jax.jit(total, out_shardings=NamedSharding(mesh, out)).lower(x).compile()
    program = hlo.parsed(made.as_text())
    lines = program.computations[program.entry].lines
    found = [
        collectives.sent(line, [lines[x] for x in line.operands], 4, program.entry)
        for line in lines.values()
        if collectives.kind(line)
    ]
    assert found == [{(kind, (0, 1, 2, 3)): factor * 4 * 16 * 32}]


@pytest.mark.parametrize(
    "groups, want",
    [
        ("replica_groups={{0,2},{1,3}}", (0, 2)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", (0, 1, 4, 5)),
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
    assert collectives.group_of(groups, 8) == want


def test_of_data_that_change_places_the_first_that_leave_theirs_count():
    """As JAX's partitioner says that two axes are exchanged: the first device keeps its own."""
    pairs = "channel_id=1, source_target_pairs={{0,0},{1,1},{2,4},{3,5},{4,2},{5,3}}"
    assert collectives.group_of(pairs, 8) == (2, 4)
    text = f"  %c = f32[16]{{0}} collective-permute(%p), {pairs}, metadata={{}}"
    taken, _ = hlo.instruction("  %p = f32[16]{0} parameter(0)")
    line, _ = hlo.instruction(text)
    sent = collectives.sent(line, [taken], 8, "main")
    assert sent == {("collective-permute", (2, 4)): 64}
    kept = "source_target_pairs={{0,0},{1,1}}"
    assert len(collectives.group_of(kept, 2)) == 1


def test_devices_of_a_group_differ_along_its_axes():
    mesh = types.SimpleNamespace(shape={"data": 2, "fsdp": 2, "model": 2})
    assert collectives.axes_of((0, 1), mesh) == "model"
    assert collectives.axes_of((0, 2, 4, 6), mesh) == "data+fsdp"
