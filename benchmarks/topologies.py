"""Chips that are not here: devices to compile for, known by name only.

`libtpu` and `jax-cuda13-plugin` hold whole compilers that need no chip. A topology is
`chip:shape`: `v5e:4x4`, `v5p:4x4x4`, `v6e:2x4` are slices; `h200:8` is a node of eight
GPUs and `h200:2x8` two of them; `h100` likewise. Programs are lowered from `jax.ShapeDtypeStruct`s whose
shardings lie on `mesh(...)`, compiled, and never run:

    target = topologies.mesh("v5p:4x4x4", fsdp=16, model=4)
    with jax.set_mesh(target):
        compiled = jax.jit(step, donate_argnums=0).lower(*structs).compile()
    assert topologies.peak_bytes(compiled) < topologies.hbm_bytes("v5p:4x4x4")

`python -m benchmarks.topologies [TOPOLOGY ...]` compiles a small train step on each.
"""

import argparse
import importlib.util
import os
import re
import sys
import time
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from benchmarks import chips
from benchmarks.chips import CHIPS
from dllm_jax import command_line, exits, sharding

# This process computes nothing, so it is to claim no accelerator. Not by the variable
# JAX_PLATFORMS: an importer may have imported JAX before.
jax.config.update("jax_platforms", "cpu")

GIB = 2**30

GPU_SHARE = (
    0.75  # of those that JAX takes, where XLA_PYTHON_CLIENT_MEM_FRACTION is not set
)
HOPPERS = ("h100", "h200")

# libtpu looks for a slice, and takes a machine-wide lock, unless told otherwise.
TPU_ENV = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}

DEFAULTS = ("v5e:2x2", "v6e:2x4", "v5p:4x4x4", "h200:8")


class SkipReason(exits.CannotGoOn):
    """Says which part of a compiler this environment lacks."""


@cache
def devices(topology: str) -> tuple[jax.Device, ...]:
    """Returns the devices of `chip:shape`, for compilation only.

    Raises SkipReason when the chip's compiler is not installed, and ValueError for a
    chip or a shape that does not exist.
    """
    chip, _, shape = topology.partition(":")
    if chip not in CHIPS or not shape:
        raise ValueError(
            f"topology {topology!r}: want CHIP:SHAPE, CHIP in {list(CHIPS)}"
        )
    described = _hopper(chip, shape) if chip in HOPPERS else _tpu(topology)
    return tuple(described.devices)


def mesh(topology: str, *, data: int = 1, fsdp: int = -1, model: int = 1) -> Mesh:
    """Returns the trainer's own mesh over the devices of a topology."""
    return sharding.make_mesh(
        data=data, fsdp=fsdp, model=model, devices=list(devices(topology))
    )


def hbm_bytes(topology: str) -> int:
    """Returns the memory of one device that a program may use."""
    chip = topology.partition(":")[0]
    return int(CHIPS[chip].memory * (GPU_SHARE if chip in HOPPERS else 1))


def peak_bytes(compiled) -> int:
    """Returns the most memory that a compiled program holds at once, on one device."""
    return compiled.memory_analysis().peak_memory_in_bytes


def _tpu(topology: str):
    if importlib.util.find_spec("libtpu") is None:
        raise SkipReason(f"{topology}: libtpu is not installed (extra 'aot')")
    os.environ.update(TPU_ENV)
    # A host has four chips unless told otherwise, and no axis is a ring: in a cube of v5p
    # without them each all-gather became an all-reduce, which sends twice as much.
    more = {"chips_per_host_bounds": [1, 1, 1]} if topology.endswith(":1x1") else {}
    if any(chips.rings(topology)):
        more["wrap"] = (*chips.rings(topology), False)[:3]
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=topology, **more
        )
    except jax.errors.JaxRuntimeError as e:
        raise ValueError(f"topology {topology!r}: {e}") from e


def _hopper(chip: str, shape: str):
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise SkipReason(f"{chip}: jax-cuda13-plugin is not installed (extra 'aot')")
    parts = re.fullmatch(r"(?:(\d+)x)?(\d+)", shape)
    if parts is None:
        raise ValueError(
            f"topology '{chip}:{shape}': want {chip}:GPUS or {chip}:NODESxGPUS"
        )
    nodes, gpus = parts.groups(default="1")
    name = CHIPS[chip].kinds[0]
    config = Path(__file__).with_name("hopper.txtpb").read_text()
    for key, value in (
        ("NAME", name),
        ("MEMORY", CHIPS[chip].memory),
        ("BANDWIDTH", int(CHIPS[chip].bandwidth)),
    ):
        config = config.replace(f"${key}", str(value))
    described = topologies.get_topology_desc(
        platform="cuda",
        topology_name=name.split()[-1],
        target_config=config,
        topology=f"1x{nodes}x{gpus}",  # slices, nodes, GPUs of a node
    )
    _check_cuda_toolkit(described.devices[0])
    return described


@cache
def _check_cuda_toolkit(device):
    # XLA looks for ptxas and libdevice in many places; only a compilation tells.
    x = jax.ShapeDtypeStruct(
        (8,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device)
    )
    try:
        jax.jit(jnp.tanh).lower(x).compile()
    except jax.errors.JaxRuntimeError as e:
        raise SkipReason(f"GPU: no ptxas or libdevice (extra 'aot'): {e}") from e


def _toy(target: Mesh):
    """Returns a jitted SGD step of two scanned, rematerialised layers, and its structs."""
    sizes = {"L": 2, "B": 64, "T": 256, "D": 512, "F": 2048, "V": 8192}

    def struct(dims, rules, dtype=jnp.float32):
        shape = tuple(sizes[letter] for letter in dims)
        return jax.ShapeDtypeStruct(
            shape, dtype, sharding=sharding.named(dims, shape, rules, target)
        )

    params = {
        "embed": struct("VD", sharding.PARAM),
        "up": struct("LDF", sharding.PARAM),
        "down": struct("LFD", sharding.PARAM),
    }
    tokens = struct("BT", sharding.ACT, jnp.int32)

    def gather(w, dims):  # bf16 over fsdp; the model axis stays split
        return sharding.constrain(w.astype(jnp.bfloat16), dims)

    @jax.checkpoint
    def layer(x_BTD, p):
        score_BTS = jnp.einsum("BTD,BSD->BTS", x_BTD, x_BTD) * 0.05
        mixed_BTD = jnp.einsum("BTS,BSD->BTD", jax.nn.softmax(score_BTS), x_BTD)
        hidden_BTF = jax.nn.silu(
            jnp.einsum("BTD,DF->BTF", mixed_BTD, gather(p["up"], "DF"))
        )
        x_BTD += jnp.einsum("BTF,FD->BTD", hidden_BTF, gather(p["down"], "FD"))
        return sharding.constrain(x_BTD, "BTD"), None

    def loss(params, tokens_BT):
        embed_VD = gather(params["embed"], "VD")
        x_BTD = sharding.constrain(embed_VD[tokens_BT], "BTD")
        layers = {"up": params["up"], "down": params["down"]}
        x_BTD, _ = jax.lax.scan(layer, x_BTD, layers)
        logits_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, embed_VD)
        logits_BTV = sharding.constrain(logits_BTV, "BTV").astype(jnp.float32)
        logp_BTV = jax.nn.log_softmax(logits_BTV)
        return -jnp.take_along_axis(logp_BTV, tokens_BT[..., None], axis=-1).mean()

    def step(params, tokens_BT):
        value, grads = jax.value_and_grad(loss)(params, tokens_BT)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return jax.jit(step, donate_argnums=0), (params, tokens)


def checked(parser: argparse.ArgumentParser, topology: str) -> None:
    """Ends a command with its usage and a line if there is no such topology."""
    try:
        devices(topology)
    except ValueError as error:
        parser.error(str(error))


def main():
    """Compiles on each topology, and tells what the program takes."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("topology", nargs="*", default=DEFAULTS)
    for topology in p.parse_args().topology:
        try:
            checked(p, topology)
            model = 2 if len(devices(topology)) <= 16 else 4
            target = mesh(topology, model=model)
        except SkipReason as reason:
            print(f"{topology:10} SKIPPED {reason}")
            continue
        step, structs = _toy(target)
        start = time.perf_counter()
        with jax.set_mesh(target):
            compiled = step.lower(*structs).compile()
        seconds = time.perf_counter() - start
        memory = compiled.memory_analysis()
        print(
            f"{topology:10} fsdp={target.shape['fsdp']:<3} model={model}"
            f" {seconds:5.1f} s, GiB a device:"
            f" arguments {memory.argument_size_in_bytes / GIB:.2f},"
            f" temporaries {memory.temp_size_in_bytes / GIB:.2f},"
            f" peak {peak_bytes(compiled) / GIB:.2f} of {hbm_bytes(topology) / GIB:.1f}"
        )
        if peak_bytes(compiled) >= hbm_bytes(topology):
            sys.exit(f"{topology}: the program does not fit")


if __name__ == "__main__":
    command_line.entry(main)
