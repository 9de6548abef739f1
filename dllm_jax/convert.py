"""Converts checkpoints: Hugging Face folders to Orbax and back.

    python -m dllm_jax.convert to-orbax HF_DIR OUT_DIR
    python -m dllm_jax.convert to-hf ORBAX_DIR OUT_DIR --like=HF_DIR [--step=N]
        [--network=value]
    python -m dllm_jax.convert to-peft RUN_DIR OUT_DIR --like=HF_DIR [--step=N]

`to-orbax` writes the weights as step 0, laid out as in a run's checkpoints. `to-hf` reads
what it wrote, or a run's folder; of a training state only the weights of one network are
read, and LoRA's adapters are added to those of the original. What a run has made of the
original (its attention, shift, block and mask token) is told in the export's config.json.
`to-peft` writes LoRA's adapters alone, for PEFT, which adds them to the original; of what else
a run has made of the original, adapters tell nothing.
"""

import argparse
import contextlib
import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from dllm_jax import command_line, config, exits, folder, memory, sharding
from dllm_jax.checkpoint import Checkpoints, check_path, misfit
from dllm_jax.models import export, hf, lora, peft, repository, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.families import changes
from dllm_jax.models.vision.config import TOWERS
from dllm_jax.rl import best


class Parser(argparse.ArgumentParser):
    """A command line whose errors are ValueErrors, one line as all others."""

    def error(self, message):
        """Raises ValueError."""
        raise ValueError(message)


def parser() -> Parser:
    """Returns the command line."""
    p = Parser(
        prog="python -m dllm_jax.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = p.add_subparsers(dest="command", required=True)
    orbax = commands.add_parser("to-orbax", help="Hugging Face folder -> Orbax")
    orbax.add_argument("source", metavar="HF_DIR", help="a Hugging Face folder")
    orbax.add_argument("out", metavar="OUT_DIR", help="a new folder of checkpoints")
    orbax.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        help="of the weights, but for routers and heads of values, which compute in "
        "float32; default: as they are stored",
    )
    for command, made in (
        ("to-hf", "Hugging Face folder"),
        ("to-peft", "PEFT adapters"),
    ):
        out = commands.add_parser(command, help=f"Orbax -> {made}")
        out.add_argument(
            "source", metavar="ORBAX_DIR", help="a run's folder, or what to-orbax wrote"
        )
        out.add_argument("out", metavar="OUT_DIR", help="a new folder")
        out.add_argument(
            "--like",
            metavar="HF_DIR",
            required=True,
            help="the original, whose names, dtypes and other files an export takes over",
        )
        out.add_argument(
            "--step", type=int, help="which checkpoint; default: the newest"
        )
        if command == "to-hf":
            out.add_argument(
                "--network",
                default="policy",
                metavar="NAME",
                help="which network of a run: policy (default) or value",
            )
    return p


def to_orbax(source: str, out: str, dtype: str | None = None) -> None:
    """Writes a Hugging Face folder's weights as step 0 of a folder of checkpoints."""
    language_model(source)
    check_path(pathlib.Path(out))  # before minutes are spent
    _, params = hf.load(source, mesh=sharding.make_mesh(), dtype=dtype)
    with export.whole(pathlib.Path(out), memory.array_bytes(params)) as partial:
        checkpoints = Checkpoints(partial)
        checkpoints.save(0, {"policy": {"params": params}}, {"source": source})
        checkpoints.close()


def to_hf(source: str, out: str, like: str, step=None, network="policy") -> None:
    """Writes the weights of an Orbax checkpoint's network as a Hugging Face folder.

    source: a run's folder, or what `to_orbax` wrote. like: the original, whose names, dtypes
    and other files the export takes over. step: None for the newest. Raises ValueError for
    what is not there, is damaged, or does not fit the original.
    """
    export.check_target(out, like)
    found, original, cfg = opened(source, like, step)
    hf.check(repository.find(like), original, heads=())  # before minutes are spent
    mesh = sharding.make_mesh()
    params = read_network(*found, network, cfg, mesh, like)
    if cfg.lora:
        _, base = hf.load(like, mesh=mesh)
        params = lora.merge(lora.join(base, params, cfg.lora))
    checkpoints, _, step = found
    trained = "config" in checkpoints.meta(step)  # of a run
    cfg = dataclasses.replace(cfg, lora=None)
    hf.save(out, cfg, params, like=like, trained=trained)


def to_peft(source: str, out: str, like: str, step=None) -> None:
    """Writes the adapters of a run as a folder of PEFT's; see `to_hf`.

    Raises ValueError also where the run has trained all weights.
    """
    found, original, cfg = opened(source, like, step)
    if not cfg.lora:  # before anything large is read
        raise ValueError(f"{source} has no adapters, but all weights: use to-hf")
    changed = changes(cfg, original)
    if changed:
        told = ", ".join(f"{key}={value}" for key, value in changed.items())
        exits.warn(f"adapters do not tell what the run made of {like}: {told}")
    params = read_network(*found, "policy", cfg, sharding.make_mesh(), like)
    peft.save(out, cfg, params, like)


def opened(source: str, like: str, step: int | None):
    """Returns ((checkpoints, their folder, the step to read), original, policy).

    source, like, step: see `to_hf`. The original and the step's policy are ModelConfigs. No
    weights are read.
    """
    folder = pathlib.Path(source)
    if (folder / "checkpoints").is_dir():
        folder /= "checkpoints"
    if not folder.is_dir():
        raise ValueError(f"{source} is not a folder")
    original = language_model(like)
    checkpoints = Checkpoints(folder, keep=None)
    step = whole_step(checkpoints, folder, step)
    cfg = as_trained(original, checkpoints, step)
    if cfg.lora:
        check_base(checkpoints.meta(step), like)
    return (checkpoints, folder, step), original, cfg


def check_base(meta: dict, like: str) -> None:
    """Raises ValueError where adapters were trained beside other weights than `like` has.

    meta: of the run's step. What is no file of weights may have changed.
    """
    known = meta.get("model", {})  # older checkpoints do not tell it
    for name, mark in repository.marks(repository.find(like)).items():
        if name.endswith(".safetensors") and known and known.get(name) != mark:
            path = meta["config"]["model"].get("path")
            raise ValueError(
                f"--like={like}: its {name} is another than that which the run's adapters "
                f"were trained beside, of model.path={path!r}; name that"
            )


def language_model(path: str) -> ModelConfig:
    """Returns the ModelConfig of a Hugging Face folder; raises ValueError for another's."""
    cfg = hf.read_config(repository.find(path))
    if cfg.family in TOWERS:
        raise ValueError(f"{path}: a vision tower, {cfg.family}, is no language model")
    return cfg


def whole_step(checkpoints: Checkpoints, folder, step: int | None) -> int:
    """Returns which step to read; raises ValueError if it is not there, or damaged."""
    steps = checkpoints.steps()
    if not steps:
        raise ValueError(f"{folder} holds no checkpoints")
    if step not in (None, *steps):
        raise ValueError(f"{folder} has the steps {steps}; asked for {step}")
    step = steps[-1] if step is None else step
    if checkpoints.damaged(step):
        raise ValueError(f"{folder / str(step)} is damaged; --step= takes another")
    return step


def as_trained(original: ModelConfig, checkpoints: Checkpoints, step: int):
    """Returns what a run made of the original: its ModelConfig, as the run's step tells."""
    run = checkpoints.meta(step).get("config", {})  # none where `to-orbax` wrote
    args = config.frozen(config.ModelArgs, run.get("model", {}), "model.")
    cfg = args.adapted(original)
    block = run.get("sampler", {}).get("block") or cfg.block
    return dataclasses.replace(cfg, block=block)


def read_network(
    checkpoints: Checkpoints,
    folder: pathlib.Path,
    step: int,
    network: str,
    cfg: ModelConfig,
    mesh,
    like: str,
):
    """Returns the parameters of a step's network, on the mesh; no optimizer state is read.

    folder: of the checkpoints, as the user named it. network: "policy" or "value". cfg: what
    the parameters must be those of. like: for the message, where they are not.
    """
    name = folder / str(step)
    saved = checkpoints.shapes(step).items()
    networks = {name: x["params"] for name, x in saved if "params" in x}
    if network not in networks:
        raise ValueError(
            f"{name} has no network {network!r}; choose from "
            + ", ".join(sorted(networks))
        )
    stored = networks[network]
    heads = ("lm",) if network == "policy" or "head" in stored else ()
    heads += tuple(name for name in ("value", "record", "vision") if name in stored)
    expected = transformer.abstract(cfg, mesh, jnp.float32, heads)
    if fault := misfit(stored, expected):
        raise ValueError(f"{name} does not hold the weights of {like}: {fault}")
    if network == "policy" and not best.holds(folder.parent, step):
        mark = folder.parent / best.MARK
        exits.warn(f"this is step {step}; best/ is of another, or of none: see {mark}")
    target = jax.tree.map(
        lambda x, placed: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=placed.sharding
        ),
        stored,
        expected,
    )
    part = checkpoints.load_part(step, {network: {"params": target}})
    return part[network]["params"]


def main(argv=None):
    """Parses the command line and converts."""
    args = parser().parse_args(argv)
    out, named = pathlib.Path(args.out), f"OUT_DIR={args.out!r}"
    with contextlib.ExitStack() as stack:
        refuse_there(out)
        try:  # before minutes are spent
            out.mkdir(parents=True)
            out.rmdir()
            lock = folder.Lock(out.with_name(f".{out.name}.lock"), of=named)
        except OSError as error:
            raise ValueError(
                f"{named} cannot be made: {error.strerror}; name another folder"
            ) from None
        stack.enter_context(contextlib.closing(lock))
        refuse_there(out)  # another command may have made it meanwhile
        if args.command == "to-orbax":
            to_orbax(args.source, args.out, args.dtype)
        elif args.command == "to-hf":
            to_hf(args.source, args.out, args.like, args.step, args.network)
        else:
            to_peft(args.source, args.out, args.like, args.step)
    print(args.out)


def refuse_there(out: pathlib.Path) -> None:
    """Raises ValueError where a folder is there: no command replaces it."""
    if out.exists():
        raise ValueError(f"OUT_DIR={str(out)!r} exists; name a new folder")


if __name__ == "__main__":
    command_line.entry(main, cleans=True)
