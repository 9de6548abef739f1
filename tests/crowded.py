"""Many programs in flight on devices of two processes, for processes_test.

A program with a collective operation, then one without, whose start waits for a thread: the
order in which XLA's pool runs out of threads, unless there are some to spare.
"""

import argparse

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dllm_jax import command_line, processes

ROUNDS = 60


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--coordinator")
    flags.add_argument("--processes", type=int)
    flags.add_argument("--process", type=int)
    told = flags.parse_args()
    processes.join(told.coordinator, told.processes, told.process)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    gather = jax.jit(lambda x: x + 1, out_shardings=whole)
    scatter = jax.jit(lambda x: 0.5 * x, out_shardings=split)
    x = jax.jit(lambda: jnp.ones(4096 * mesh.size), out_shardings=split)()
    with jax.set_mesh(mesh):
        for number in range(ROUNDS):
            gathered = gather(x)
            jax.random.key(number)
            gather(x)
            x = scatter(gathered)
        print(float(gather(x)[0]))


if __name__ == "__main__":
    command_line.entry(main)
