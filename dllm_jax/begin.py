"""What a training run has before its first step, stage by stage.

`scene`: where it runs, and what is trained; `tools`: what answers are asked of, and who grades
them; `place`: where it samples; `programs`: what is compiled, once it fits a device;
`progress`: how far it has come, and its weights. Each stage says what it found, and refuses
what cannot be before the next begins.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from dllm_jax import (
    compiler,
    config,
    data,
    exits,
    memory,
    metrics,
    pictures,
    processes,
    sharding,
    trackers,
)
from dllm_jax.checkpoint import Checkpoints, Misfit, Newer, check_resume
from dllm_jax.folder import Folder
from dllm_jax.models import export, repository
from dllm_jax.models.config import ModelConfig
from dllm_jax.rl import best, budget, learner, networks, rewards, sources
from dllm_jax.sampling import looking, placement
from dllm_jax.sampling.config import IDLE, variants

# ---- Where it runs -------------------------------------------------------------------


# Keys, or the begin of some, that change nothing of what is learned; all others do.
SPARED = ("run.", "mesh.", "batch.", "eval.", "data.heldout", "data.image_root")
SPARED += ("model.path", "model.vq", "model.dtype", "model.kernels", "model.remat")
SPARED += ("rl.steps", "sft.steps", "rl.trusted_gap", *(f"sampler.{x}" for x in IDLE))
# Keys, or the begin of some, that say what an evaluation asks, and how it judges.
EVALUATED = ("sampler.", "eval.problems", "eval.temperature", "eval.samplers")
EVALUATED += ("data.template", "data.raw", "data.answer", "data.question")
EVALUATED += ("rl.reward", "reward.model", "reward.judge.", "reward.all_cases")
# But for how an endpoint is asked.
ASKING = tuple(
    f"reward.judge.{x}" for x in ("key", "rows", "seconds", "tries", "parallel")
)


@dataclasses.dataclass(frozen=True)
class Scene:
    """Where a run runs, and what it trains; the same in every process but for `main`.

    shapes: of the networks' states by name, with their shardings on `mesh`. defaults: of
    the keys when the run began, None where it begins now. boards: where its metrics go.
    main: whether this process is the one that writes and prints, by `say`.
    """

    cfg: config.Config
    model: ModelConfig
    tok: Any
    settings: sources.Settings
    plans: dict[str, learner.Plan]
    shapes: dict[str, learner.TrainState]
    mesh: jax.sharding.Mesh
    run: Folder
    defaults: dict | None
    boards: Any
    main: bool
    say: Callable
    timer: metrics.Timer
    stopping: exits.StopSignal

    @property
    def folder(self) -> pathlib.Path:
        """The run's folder."""
        return self.run.path

    @property
    def method(self):
        """The source of batches that the run learns by."""
        return sources.SOURCES[self.cfg.method]

    @property
    def samples(self) -> bool:
        """Whether it samples, be it for the held-out problems alone."""
        return self.method.samples or bool(self.cfg.data.heldout)

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        """The run's; they make their folder."""
        run = self.cfg.run
        return Checkpoints(
            self.folder / "checkpoints", run.keep, run.keep_every or None
        )

    @functools.cached_property
    def anchor(self):
        """The shapes of a reference that moves, else None: it is the checkpoint's."""
        moves = self.cfg.rl.reference_reset
        return networks.abstract_reference(self.model, self.mesh) if moves else None

    @property
    def saved(self):
        """What a checkpoint of the run holds, as shapes."""
        return self.shapes | ({"reference": self.anchor} if self.anchor else {})

    @property
    def places(self):
        """The shardings of `shapes`."""
        return jax.tree.map(lambda x: x.sharding, self.shapes)

    @property
    def whole(self) -> jax.sharding.NamedSharding:
        """The sharding of what every device holds."""
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())


def endless_warmups(plans: dict) -> list[str]:
    """Returns a warning for each network whose warm-up outlasts the run's updates."""
    return [
        f"warning: {name}_optim.warmup={plan.optim.warmup}: the run has {plan.updates} "
        f"updates, so that its rate never reaches {name}_optim.lr={plan.optim.lr:g}"
        for name, plan in plans.items()
        if plan.optim.warmup and plan.optim.warmup >= plan.updates
    ]


def scene(cfg: config.Config, run: Folder, resume: str) -> Scene:
    """Returns where a run runs: its configuration is complete, its mesh is set.

    Raises ValueError where the configuration makes no run, before anything is begun.
    """
    timer = metrics.Timer()
    processes.watch(timer, cfg.run.stuck_after)
    stopping = exits.StopSignal(timer.moving(sharding.anywhere))
    run.refuse_evaluated()
    has_steps = check_resume(run.path / "checkpoints", resume)
    defaults = run.defaults() if has_steps else None
    cfg, kept = config.keeping(cfg, defaults)
    cfg, model, tok = config.completed(cfg)
    cfg, choices = config.chosen(cfg, model)
    boards = trackers.named(cfg.run.trackers)
    check_targets(cfg, run.path)
    compiler.keep_compiled(cfg.run.compile_cache)
    mesh = sharding.make_mesh(**cfg.mesh.axes)
    jax.set_mesh(mesh)
    main = jax.process_index() == 0
    say = print if main else lambda *args: None
    rows_on = sharding.row_shards(mesh)
    checked = kernels_found_wrong(cfg, model)
    settings = settings_of(cfg, model, rows_on)
    plans = sources.SOURCES[cfg.method].plans(settings)
    warned = config.warnings(cfg, model, rows_on) + endless_warmups(plans)
    warned += budget.unsplit(model, mesh)
    for line in (*kept, *choices, *warned, *checked):
        say(line)
    shapes = {name: networks.abstract(model, plans[name], mesh) for name in plans}
    here = Scene(
        cfg=cfg,
        model=model,
        tok=tok,
        settings=settings,
        plans=plans,
        shapes=shapes,
        mesh=mesh,
        run=run,
        defaults=defaults,
        boards=boards,
        main=main,
        say=say,
        timer=timer,
        stopping=stopping,
    )
    if has_steps:
        check_fit(here)
    return here


def check_targets(cfg: config.Config, folder: pathlib.Path) -> None:
    """Raises ValueError where an export of the run could not be written at its end."""
    run = cfg.run
    exports = {"best": run.keep_best, "export": run.export, "value": run.export_value}
    for name, wanted in exports.items():
        if wanted:
            export.check_target(folder / name, cfg.model.path)


def check_fit(here: Scene) -> None:
    """Raises ValueError where the newest checkpoint is not of what is trained.

    Newer, which is one, where a newer version of the program has written it.

    Before anything is compiled. Of one that cannot be read `progress` tells, when it takes
    the one before it.
    """
    meta = {}
    try:
        for step in here.checkpoints.steps()[-1:]:
            meta = here.checkpoints.check_fit(step, here.saved)
    except Misfit as error:
        changed = config.changes(error.meta.get("config", {}), here.cfg)
        raise ValueError("\n  ".join([str(error), *changed.values()])) from None
    except Newer:
        raise
    except Exception:  # noqa: BLE001  (Orbax has another for each way of being damaged)
        return
    check_same(here.cfg, meta)


def check_same(cfg: config.Config, meta: dict) -> None:
    """Raises ValueError where a folder's run is of another method, or began elsewhere.

    It would go on from its own weights, and nothing of the new ones would be read.
    """
    method = meta.get("config", {}).get("method", cfg.method)
    weights, reason = origin(cfg.model.path), ""
    alpha = cfg.model.lora_alpha
    began = config.flat(meta.get("config", {})).get("model.lora_alpha", alpha)
    if method != cfg.method:
        reason = f"method was {method!r}, is now {cfg.method!r}"
    elif meta.get("model", weights) != weights:  # older checkpoints do not tell it
        reason = f"model.path={cfg.model.path!r} has other weights than it began with"
    elif cfg.model.lora_rank and began != alpha:
        reason = (
            f"model.lora_alpha was {began}, by which adapters learned, is now {alpha}"
        )
    if reason:
        raise ValueError(
            f"run.folder={cfg.run.folder} holds another run: {reason}; name another "
            "run.folder"
        )


@functools.cache
def origin(path: str) -> dict:
    """Returns what tells the weights that a run begins with from others, as JSON has it."""
    return repository.marks(repository.find(path))


def check_origin(path: str) -> None:
    """Raises exits.CannotGoOn where the weights that the run began with are there no more.

    An export adds adapters to them, and takes from there what the run does not train.
    """
    marks = None  # where the folder is gone, or a file in it
    with contextlib.suppress(ValueError, OSError):
        marks = repository.marks(repository.find(path))
    if marks != origin(path):
        raise exits.CannotGoOn(
            f"model.path={path!r}: its weights or its config.json are others than those that "
            "the run began with, and an export is made with these; put them back, and start "
            "the same command again"
        )


def check_unfinished(cfg: config.Config, meta: dict, steps: int) -> None:
    """Raises ValueError where a run whose steps are done is asked for with other keys.

    There is nothing left that they could change, and its folder would tell them of it.
    """
    known = config.flat(meta["config"])  # an older version did not know all keys
    for key, change in config.changes(meta["config"], cfg).items():
        if key in known and not key.startswith(SPARED):
            raise ValueError(
                f"run.folder={cfg.run.folder}: all {steps} steps of its run are done, and "
                f"{change}; name another run.folder"
            )


def kernels_found_wrong(cfg: config.Config, model: ModelConfig) -> dict[str, None]:
    """Returns the lines of the kernels' self-checks for all samplers, each of them once."""
    samplers = cfg.sampler, *variants(cfg.eval.samplers, cfg.sampler).values()
    return dict.fromkeys(
        line
        for sampler in samplers
        for line in config.check_kernels(model, sampler, cfg.run.compile_cache)
    )


def settings_of(
    cfg: config.Config, model: ModelConfig, devices: int
) -> sources.Settings:
    """Returns what a run's source reads of its configuration, which is complete.

    devices: that share rows, data x fsdp.
    """
    return sources.Settings(
        seed=cfg.seed,
        data=cfg.data,
        sampler=cfg.sampler,
        noise=cfg.noise,
        objective=cfg.objective,
        rl=cfg.rl,
        sft_steps=cfg.sft.steps,
        sft_examples=cfg.sft.examples,
        batch=config.shared_batch(cfg, model, devices),
        policy_optim=cfg.policy_optim,
        value_optim=cfg.value_optim,
        heldout_problems=cfg.eval.problems,
        heldout_temperature=cfg.eval.temperature,
        heldout_answers=cfg.eval.answers,
        samplers=variants(cfg.eval.samplers, cfg.sampler),
        model=model,
    )


# ---- What it learns from, and where it samples ---------------------------------------


def tools(here: Scene) -> sources.Tools:
    """Returns what a source and an evaluation work with; `place` adds what answers."""
    cfg, model, tok = here.cfg, here.model, here.tok
    judged = cfg.sampler.answers if here.samples else ""
    grader = rewards.grader(
        cfg.rl.reward,
        cfg.reward,
        tok,
        judged,
        looks=model.looks,
        room=cfg.sampler.max_new,
    )
    for line in grader.begin() if here.samples else ():
        here.say(line)
    return sources.Tools(
        mesh=here.mesh,
        tok=tok,
        grader=grader,
        truncated_wrong=cfg.rl.truncated_wrong,
        timer=here.timer,
        stop=here.stopping,
        say=here.say,
        folder=here.folder,
        samples=cfg.run.samples if here.main else 0,
        reader=pictures.reader(
            cfg.model, cfg.sampler, model, tok, learns=cfg.method == "sft"
        ),
        decode=pictures.decoder(cfg, model, tok) if here.samples else None,
    )


def place(here: Scene, tools: sources.Tools):
    """Gives `tools` what answers; returns (where a run samples, what its judges take)."""
    cfg, model, mesh = here.cfg, here.model, here.mesh
    tools.reader = None  # it has read all: a tokenizer of images makes room
    trained, guest = sum(resident(here).values()), memory.NOTHING
    if here.samples:
        guest = pictures.claim(cfg, model, here.tok, tools.grader, trained)
    sampling = placement.place(
        model=model,
        cfg=cfg.sampler,
        mesh=mesh,
        rollout=cfg.mesh.rollout,
        beside=trained + guest.resident,
        limit=memory.device_bytes() if here.samples else None,
    )
    tools.answerer = sampling.answerer
    tools.others = placement.others(sampling.answerer, model, here.settings.samplers)
    if here.samples and sampling.note:
        here.say(sampling.note)
    return sampling, guest


def resident(here: Scene) -> dict[str, int]:
    """Returns the bytes of a device that the run's networks take, by what they are."""
    anchored = bool(here.cfg.objective.reference_beta)
    return budget.resident(here.shapes, here.model, here.mesh, reference=anchored)


def room_beside(here: Scene, sampling, guest: memory.Claim, limit: int | None):
    """Returns the bytes of a device beside what is trained.

    Raises ValueError where what is there from begin to end has no room.
    """
    cfg, model, trained = here.cfg, here.model, resident(here)
    room = math.inf if limit is None else limit - sum(trained.values())
    if sampling is not None and here.samples:
        base = budget.checkpoint(model, here.mesh) if model.lora else None
        weights = budget.sampled(sampling, here.shapes, model, base)
        trained["weights that sample"] = weights
    keys = {
        "train adapters alone (model.lora_rank=16)": not model.lora,
        "set rl.value='trace' or 'none'": "value" in here.plans,
        placement.OF_WEIGHTS: "weights that sample" in trained and here.mesh.size > 1,
        "set objective.reference_beta=0": cfg.objective.reference_beta
        and cfg.method == "rl",
        "take more devices": True,
    }
    words = " or ".join(key for key, helps in keys.items() if helps)
    budget.check_least(trained, guest.always, limit, words)
    return room


# ---- What is compiled: each function is traced once in a run -------------------------


@dataclasses.dataclass(frozen=True)
class Programs:
    """A run's compiled functions.

    trainers: by the names of the networks that an update trains, all, or a value network
    alone: (states, batch, beside, limits) -> (states, metrics).
    """

    score: Callable
    trainers: dict[tuple[str, ...], Callable]


def programs(here: Scene, source, tools: sources.Tools, sampling, guest) -> Programs:
    """Returns what a run compiles, after its budget of memory is told.

    What fits a device is found by compiling it: the run then finds it compiled. Raises
    ValueError with the table where nothing fits.
    """
    cfg, model = here.cfg, here.model
    networks_scored = networks.scored(here.plans, source.reference)
    score = jax.jit(
        functools.partial(learner.score, model=model, plans=networks_scored)
    )

    def trainer(remat: str, names: tuple[str, ...]):
        update = functools.partial(
            learner.update,
            model=dataclasses.replace(model, remat=remat),
            plans={name: here.plans[name] for name in names},
            cfg=source.objective,
        )
        # It writes new states over the old ones, so that no device holds both.
        kept = {name: here.places[name] for name in names}, here.whole
        return jax.jit(update, donate_argnums=0, out_shardings=kept)

    def planned(remat: str):
        update = trainer(remat, tuple(here.plans))
        return update, budget.plan(
            source,
            states=here.shapes,
            model=model,
            mesh=here.mesh,
            sampling=sampling if here.samples else None,
            others=tuple(tools.others.values()),
            update=update,
            guest=guest,
        )

    def tried(**changes) -> tuple[str, ...]:
        batch = dataclasses.replace(here.settings.batch, **changes)
        return budget.remats(model, batch, here.mesh, room)

    limit = memory.device_bytes()
    room = room_beside(here, sampling, guest, limit)
    remats = tried() if cfg.model.remat == "auto" else (model.remat,)
    remat, update, needs = budget.first_that_fits(remats, planned, limit)
    if remat not in (cfg.model.remat, "none", "dots"):
        words = f"model.remat={remat!r}: what keeps more does not fit a device"
        each = sharding.row_shards(here.mesh)
        if here.settings.batch.rows > each and "dots" in tried(rows=each):
            words += f"; it may with batch.rows={each}, a row on each"
        here.say(words)
    here.say(budget.table(needs))
    trainers = {tuple(here.plans): update}
    if "value" in here.plans:
        trainers[("value",)] = trainer(remat, ("value",))
    return Programs(score, trainers)


# ---- How far it has come, and its weights --------------------------------------------


@dataclasses.dataclass
class Progress:
    """How far a run has come, and its weights at that moment.

    base: frozen, where the states hold adapters. step: the last that is done; meta: what
    its checkpoint says, of which `taken`, the records that are used, is always there.
    """

    states: dict[str, learner.TrainState]
    base: Any
    reference: Any
    like: Any
    model: ModelConfig
    step: int
    meta: dict

    def weights(self) -> networks.Weights:
        """Returns what the networks are now."""
        return networks.Weights(
            self.states, self.base, self.reference, self.model, self.like
        )

    def saved(self, moves: bool) -> dict:
        """Returns what a checkpoint holds; moves: whether the reference does."""
        return self.states | ({"reference": self.reference} if moves else {})


def progress(here: Scene, source, tools: sources.Tools, like) -> Progress:
    """Returns how far a run has come, its weights loaded; from here on its folder tells it.

    like: what samples, as shapes.
    """
    cfg, model, mesh = here.cfg, here.model, here.mesh
    for line in here.checkpoints.scarce(here.saved):
        here.say(line)
    restored = here.checkpoints.restore(here.saved)
    states, base, start, meta = begin_or_resume(here, restored)
    done = start and start >= source.steps
    if done:
        check_unfinished(cfg, meta, source.steps)
    of = None if done else evaluated(cfg)
    if of:
        say_other_problems(here, meta, of, start)
    meta["best"] = best.still(meta.get("best"), cfg.run.keep_best, of, here.say)
    source.recall(meta.get("memory", {}))
    defaults = here.defaults or dataclasses.asdict(config.Config())
    here.run.begin(dataclasses.asdict(cfg), defaults, mesh)
    tools.eyes = networks.eyes(cfg.model.path, model, mesh)
    if tools.eyes:
        tools.answerer = looking.Looking(tools.answerer, tools.eyes)
        tools.others = {
            name: looking.Looking(x, tools.eyes) for name, x in tools.others.items()
        }
    reference = states.pop("reference", None)  # it is saved where it moves
    if source.reference and reference is None:
        reference = networks.reference(cfg.model.path, model, mesh, base)
    here.say(
        f"{cfg.model.path}: {networks.sizes(states['policy'].params, base)} on "
        f"{mesh.size} x {jax.devices()[0].device_kind}, mesh {dict(mesh.shape)}"
    )
    return Progress(states, base, reference, like, model, start, meta)


def evaluated(cfg: config.Config) -> dict:
    """Returns what an evaluation's metrics are of, by the keys that say so, as JSON has it."""
    files = filter(None, data.files(cfg.data.heldout))
    idle = {f"sampler.{name}" for name in (*IDLE, "temperature")}
    asks = "judge" in rewards.weights(cfg.rl.reward)
    judges = ASKING if asks else ("reward.judge.",)
    # Of a checkpoint the weights are told, wherever it lies.
    if not rewards.own.names_function(cfg.reward.judge.at):
        idle.add("reward.judge.at")
    told = {
        key: value
        for key, value in config.leaves_of(cfg).items()
        if key.startswith(EVALUATED) and not (key in idle or key.startswith(judges))
    }
    return {
        **told,
        **rewards.sources(cfg.rl.reward, cfg.reward, chunks=False),
        "data.heldout": [processes.content(path) for path in files],
        "rl.truncated": cfg.rl.truncated_wrong,  # all that an evaluation reads of it
    }


def say_other_problems(here: Scene, meta: dict, of: dict, start: int):
    """Says where the files of held-out problems hold others than in the checkpoint's time.

    meta: of the checkpoint; of: of `evaluated`. Where they have other names that is told.
    """
    key, before = "data.heldout", (meta.get("best") or {}).get("of") or {}
    same = before.get(key, of[key]) == of[key]  # older checkpoints do not tell it
    if start and not same and key not in config.changes(meta["config"], here.cfg):
        here.say(
            f"warning: {key}={here.cfg.data.heldout!r} holds other problems than until step "
            f"{start}: evaluations before and after do not compare"
        )


def begin_or_resume(here: Scene, restored):
    """Returns (states, base, start, meta): see Progress.

    restored: Checkpoints.restore's, or None for a run that begins. Raises ValueError as
    `check_same`: it may be an earlier one than `check_fit` has seen.
    """
    cfg, model, mesh = here.cfg, here.model, here.mesh
    if restored is not None:
        check_same(cfg, restored[1])
    base, value = networks.frozen(cfg.model.path, model, mesh)
    content = processes.contents(data.mixture(cfg.data.train))
    began = {"data": content, "model": origin(cfg.model.path)}
    if restored is None:
        states = networks.initial(
            cfg.model.path,
            model,
            here.plans,
            here.places,
            mesh,
            value,
            jax.random.key(cfg.seed),
            value_path=cfg.rl.value_path,
        )
        return states, base, 0, {"taken": 0} | began
    states, meta, start = restored
    here.say(f"resuming {pathlib.Path(cfg.run.folder)} after step {start}")
    for change in config.changes(meta["config"], cfg).values():
        here.say(f"  {change}")
    if meta.get("data", content) != content:  # older checkpoints do not tell it
        here.say(
            f"warning: data.train={cfg.data.train!r} holds other records than until step "
            f"{start}: the run goes on at the same place of their order, so that some may "
            "come twice, and others not at all"
        )
        before = meta.get("memory", {})
        meta = meta | {"memory": sources.of_others(before)}
        if before.keys() - meta["memory"].keys():
            here.say("  which of them were solved how often is forgotten")
    return states, base, start, meta | began
