"""Bytes of a device: sums of parts, the compiler's figure."""

import socket
import types

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax import memory, sharding


def test_arrays_take_a_devices_part():
    mesh = sharding.make_mesh(fsdp=4, model=2)
    placed = sharding.place_rows({"x": np.zeros((8, 16), np.float32)}, mesh)
    whole = sharding.place(np.zeros(3, np.int32), jax.sharding.PartitionSpec(), mesh)
    assert memory.array_bytes((placed, whole)) == 8 * 16 * 4 // 4 + 12
    assert memory.array_bytes({"embed": whole, "head": whole}) == 12


def test_what_a_program_needs_beside_its_arguments():
    def f(x, y):  # a donated x, two products that are alive together
        a, b = x @ y, y @ x
        return x + jnp.sort(a @ b, axis=0), a

    x = jnp.ones((256, 256))
    needs = memory.program_bytes(jax.jit(f, donate_argnums=0).lower(x, x).compile())
    assert 2 * x.nbytes <= needs <= 4 * x.nbytes


def test_a_cpu_device_has_a_part_of_the_host_or_of_its_container(monkeypatch, tmp_path):
    limit, here = tmp_path / "limit", socket.gethostname()
    monkeypatch.setattr(memory, "LIMITS", (tmp_path / "none", limit))
    host = memory.host_bytes()
    assert 2**20 < host < 2**50
    for text, size in (("max\n", host), ("4000000\n", 4000000), (str(2**63), host)):
        limit.write_text(text)
        assert memory.device_bytes() == size // jax.local_device_count()
    hosts = {0: "elsewhere", 1: here, 2: here}  # of a run of three processes
    monkeypatch.setattr(memory.processes, "group", types.SimpleNamespace(hosts=hosts))
    assert memory.device_bytes() == host // (2 * jax.local_device_count())


def test_guests_make_room_for_each_other():
    told = []

    def guest(always, working):
        def claim(beside):
            told.append(beside)
            return memory.Claim(always, working)

        return claim

    guests = (
        guest({"judge": 100, "pages": 7}, {"judge": 50}),
        guest({}, {}),
        guest({"judge": 100, "reward model": 30}, {"reward model": 60}),
    )
    claim = memory.claimed(guests, beside=1000)
    assert told == [1000, 1107, 1107]
    assert claim.always == {"judge": 200, "pages": 7, "reward model": 30}
    assert claim.resident == 237
    assert claim.working == {"reward model": 60}  # they do not work at once
    assert memory.claimed([], 5) == memory.NOTHING
