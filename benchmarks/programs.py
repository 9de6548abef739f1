"""The programs of a run, as `python -m dllm_jax.train` makes them, for chips not here.

A model of shapes.py with the settings of its preset in configs/tracerl.py, on a topology:
the mesh, where it samples, what it trains and the memory plan are decided by the run's own
code, from shapes. Kernels are chosen as by a run whose self-check found every one right.

    run = Run("sdar-8b", "h200:8")
    run.rollout(run.sampling)   # the engine's loop, compiled
    run.update()                # the update
"""

import contextlib
import dataclasses
import functools
import pathlib
from unittest import mock

import jax
import numpy as np

from benchmarks import topologies
from benchmarks.shapes import RELEASED
from configs import tracerl
from dllm_jax import begin, config, data, exits, memory, metrics, sharding
from dllm_jax.models import repository, transformer
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision import codes, look, magvit
from dllm_jax.pallas_kernels import choice, held_pages
from dllm_jax.rl import budget, learner, networks, rewards, sources
from dllm_jax.sampling import placement
from dllm_jax.sampling.config import SamplerConfig

TINY = "examples/arithmetic"
# Models, by the preset whose settings they take: none is named after the largest.
PRESETS = {name: name for name in ("sdar-1.7b", "sdar-4b", "sdar-8b")}
PRESETS |= {"tiny": "arithmetic", "sdar-30b-a3b": "sdar-8b", "llada-v-8b": "llada-v-8b"}
STOPS = (151645, 151643)  # of the released models' chats


@contextlib.contextmanager
def trusted(dtype: str):
    """Lets `auto` take every kernel, as where the self-check found all of them right.

    dtype: the model's. It finds none right of a GPU's in float32, which they refuse.
    """
    verdicts = {
        (op, here): dtype in choice.NUMBERS.get(here, (dtype,))
        for op, here in choice.KERNELS
    }
    for here in choice.NUMBERS.keys() | {*choice.TRUSTED}:
        choice.begin(here)
    with mock.patch.dict(choice.verdicts, verdicts):
        yield


@contextlib.contextmanager
def widest():
    """Leaves out programs of the engine that no figure counts.

    Of those for prompts the largest number of chunks remains, over the widest table; of
    those for blocks all but the one for rows that end. What remains does the same, and the
    loop holds as much (docs/scaling.md says how that was seen).
    """
    chunks, windows = SamplerConfig.chunk_counts, SamplerConfig.window_counts
    with (
        mock.patch.object(held_pages, "widths", lambda A, least=1: [A]),
        mock.patch.object(
            SamplerConfig, "chunk_counts", lambda *args: chunks(*args)[-1:]
        ),
        mock.patch.object(
            SamplerConfig, "window_counts", lambda *args: windows(*args)[-2:]
        ),
    ):
        yield


def settings(
    name: str, tokens: int = 0, **sampler
) -> tuple[config.Config, ModelConfig]:
    """Returns (a run's complete configuration, what its checkpoint becomes in it).

    tokens: of batch.tokens, 0: the preset's. sampler: fields of SamplerConfig that differ.
    """
    tree = tracerl.get_config(PRESETS[name])
    tree.sampler.update(sampler)
    tree.batch.tokens = tokens or tree.batch.tokens
    # The problems are none of the programs' affair, nor are their tokens and their grader.
    tree.data.update(data.DataConfig().__dict__)
    tree.data.update(train=f"{TINY}/train.jsonl")
    tree.rl.reward = "math"
    cfg = config.freeze(tree)
    if name == "tiny":
        cfg, model, _ = config.completed(cfg)
        return cfg, model
    model = cfg.model.adapted(RELEASED[name])
    block = cfg.sampler.block or model.block
    sampler = dataclasses.replace(cfg.sampler, block=block, stop_ids=STOPS)
    model = dataclasses.replace(model, block=block)
    cfg = dataclasses.replace(cfg, sampler=sampler)
    return (cfg if cfg.batch.tokens else config.chosen(cfg, model)[0]), model


class Run:
    """A run on a topology, up to where it would load weights."""

    def __init__(self, name: str, topology: str, tokens: int = 0, **sampler):
        """tokens, sampler: as of `settings`. Raises SkipReason without a compiler."""
        self.cfg, self.model = settings(name, tokens, **sampler)
        self.mesh = topologies.mesh(topology, **self.cfg.mesh.axes)
        self.limit = topologies.hbm_bytes(topology)
        self.rows_on = sharding.row_shards(self.mesh)
        with jax.set_mesh(self.mesh):
            self.settings = begin.settings_of(self.cfg, self.model, self.rows_on)
        self.last = None  # what was compiled last, to see whether it fits
        self.plans = sources.RL.plans(self.settings)
        # Not with the mesh in force: AdamW makes a zero, which no device is here to hold.
        self.states = {
            network: networks.abstract(self.model, plan, self.mesh)
            for network, plan in self.plans.items()
        }
        self.resident = budget.resident(
            self.states,
            self.model,
            self.mesh,
            reference=bool(self.cfg.objective.reference_beta),
        )

    @functools.cached_property
    def sampling(self) -> placement.Placement:
        """Where it samples, beside what it trains."""
        return self.placed(sum(self.resident.values()))

    @functools.cached_property
    def alone(self) -> placement.Placement:
        """Where it samples without training: as eval and generate do."""
        return self.placed(0)

    def placed(self, beside: int) -> placement.Placement:
        """Returns where it samples; beside: bytes of a device that others take."""
        sized = memory.program_bytes

        def keep(compiled) -> int:
            self.last = compiled
            return sized(compiled)

        kept = mock.patch.object(memory, "program_bytes", keep)
        with jax.set_mesh(self.mesh), trusted(self.model.dtype), kept:
            return placement.place(
                model=self.model,
                cfg=self.cfg.sampler,
                mesh=self.mesh,
                rollout=self.cfg.mesh.rollout,
                beside=beside,
                limit=self.limit,
            )

    def rollout(self, place: placement.Placement):
        """Returns the engine's loop over forwards, compiled."""
        devices = jax.tree.leaves(place.weights)[0].sharding.mesh
        if self.last is not None and devices in meshes_of(self.last):
            return self.last
        with trusted(self.model.dtype):
            lowered, _ = place.answerer.lower(place.weights)
        return lowered.compile()

    @functools.cached_property
    def source(self) -> sources.RL:
        """The run's source of batches, on problems that are no matter."""
        tools = sources.Tools(
            mesh=self.mesh,
            tok=data.tokenizer(repository.find(f"{TINY}/model")),
            grader=rewards.grader(self.cfg.rl.reward, self.cfg.reward),
            truncated_wrong=self.cfg.rl.truncated_wrong,
            timer=metrics.Timer(),
            stop=lambda: False,
            say=lambda *words: None,
            folder=pathlib.Path(),
            samples=0,
        )
        return sources.RL(self.settings, tools)

    def jitted_update(self, remat: str):
        """Returns learner.update, jitted as a run calls it."""
        replicated = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        places = jax.tree.map(lambda x: x.sharding, self.states)
        return jax.jit(
            functools.partial(
                learner.update,
                model=dataclasses.replace(self.model, remat=remat),
                plans=self.plans,
                cfg=self.source.objective,
            ),
            donate_argnums=0,
            out_shardings=(places, replicated),
        )

    def update(self):
        """Returns (the update of all networks, compiled; its model.remat, as a run chooses).

        Raises JaxRuntimeError where its compiler knows that it does not fit.
        """
        names = (self.model.remat,)
        if self.cfg.model.remat == "auto":
            room = self.limit - sum(self.resident.values())
            names = budget.remats(self.model, self.settings.batch, self.mesh, room)
        for name in names[:-1]:
            try:
                compiled = self.update_with(name)
            except jax.errors.JaxRuntimeError as error:
                if not exits.exhausted(error):
                    raise
                continue
            if topologies.peak_bytes(compiled) <= self.limit:
                return compiled, name
        return self.update_with(names[-1]), names[-1]

    def update_with(self, remat: str):
        """Returns the update with a model.remat, compiled; raises as `update` does."""
        base = None
        if self.model.soft:  # what a step's images are made of
            base = networks.beside(None, look.abstract(self.model, self.mesh))
        with jax.set_mesh(self.mesh), trusted(self.model.dtype):
            lowered = self.jitted_update(remat).lower(
                self.states, self.source.blank(), base, dict.fromkeys(self.states, 0.0)
            )
        return lowered.compile()

    def tower(self):
        """Returns the vision tower on a pass of tiles, compiled."""
        cfg, tiles = self.model.vision, look.BATCH * self.rows_on
        tower = transformer.abstract(
            self.model, self.mesh, self.model.dtype, ("vision",)
        )
        blank_BChw = np.zeros((tiles, 3, cfg.side, cfg.side), np.float32)
        pixels_BChw = sharding.shapes_of_rows(blank_BChw, self.mesh)
        with jax.set_mesh(self.mesh), trusted(self.model.dtype):
            lowered = look.features.lower(tower["vision"], pixels_BChw, cfg=cfg)
        return lowered.compile()


def codec(topology: str, images: int) -> dict:
    """Returns MAGVIT-v2's two programs, compiled as a run calls them: on one device.

    images: those that are encoded, or decoded, together; codes.SIZE pixels a side.
    """
    (device, *_) = topologies.devices(topology)
    place = jax.sharding.SingleDeviceSharding(device)

    def shape(dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    cfg = magvit.MagvitConfig()
    params = magvit.abstract(cfg, place)
    side = codes.SIZE // cfg.factor
    pixels_BChw = shape(np.float32, images, 3, codes.SIZE, codes.SIZE)
    codes_BN = shape(np.int32, images, side**2)
    return {
        "encode": magvit.codes_of.lower(params, pixels_BChw).compile(),
        "decode": magvit.image_of.lower(params, codes_BN, side, side).compile(),
    }


def meshes_of(compiled) -> list:
    """Returns the meshes on which a program's arguments lie."""
    places = jax.tree.leaves(compiled.input_shardings)
    return [place.mesh for place in places if hasattr(place, "mesh")]
