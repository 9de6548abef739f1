"""Trains a diffusion language model: RL on verifiable rewards, SFT, or DPO on pairs.

    python -m dllm_jax.train --config=configs/tracerl.py [--config.a.b=value ...]

One step of RL: sample a group of answers to each problem, grade them, turn rewards into
advantages, pack what the sampler saw into training batches, update the policy and the
value model, log, save. SFT and DPO are the same loop with other sources of batches. A run
lives in one folder and goes on from its newest checkpoint when started again.
"""

import dataclasses
import functools
import math
import pathlib
import sys

import jax
from absl import flags

from dllm_jax import (
    command_line,
    config,
    curves,
    exits,
    memory,
    metrics,
    pictures,
    processes,
    sharding,
    trackers,
)
from dllm_jax.checkpoint import Checkpoints, check_resume
from dllm_jax.folder import Folder
from dllm_jax.models import hf
from dllm_jax.models.config import ModelConfig
from dllm_jax.rl import (
    best,
    budget,
    guard,
    heldout,
    learner,
    networks,
    rewards,
    sources,
)
from dllm_jax.sampling import looking, placement
from dllm_jax.sampling.config import variants
from dllm_jax.viewer import leave

RESUME = (
    "go on from the folder's newest checkpoint: if there is one, or else fail, or never"
)


def train(cfg: config.Config, run: Folder, resume: str = "auto") -> None:
    """Runs to the last step, or to the first error of the user's.

    run: the folder `cfg.run.folder`. resume: as the flag says it. The same in every
    process; the first one alone writes and prints. Raises exits.Stopped where SIGTERM or
    SIGINT came, once all is saved.
    """
    # ---- Where it runs ---------------------------------------------------------------
    timer = metrics.Timer()
    processes.watch(timer, cfg.run.stuck_after)
    stopping = exits.StopSignal(timer.moving(sharding.anywhere))
    folder = run.path
    has_steps = check_resume(folder / "checkpoints", resume)
    defaults = run.defaults() if has_steps else None
    cfg, kept = config.keeping(cfg, defaults)
    cfg, model, tok = config.completed(cfg)  # refuses, before anything is begun
    cfg, choices = config.chosen(cfg, model)
    boards = trackers.named(cfg.run.trackers)
    if cfg.run.export:
        hf.check_target(folder / "export", cfg.model.path)
    sharding.keep_compiled(cfg.run.compile_cache)
    mesh = sharding.make_mesh(**cfg.mesh.axes)
    jax.set_mesh(mesh)
    main = jax.process_index() == 0
    say = print if main else lambda *args: None

    # ---- What is trained: networks, as shapes with shardings until they fit -----------
    rows_on = mesh.shape["data"] * mesh.shape["fsdp"]
    samplers = cfg.sampler, *variants(cfg.eval.samplers, cfg.sampler).values()
    checked = dict.fromkeys(
        line
        for one in samplers
        for line in config.check_kernels(model, one, cfg.run.compile_cache)
    )
    for line in (*kept, *choices, *config.warnings(cfg, model, rows_on), *checked):
        say(line)
    settings = settings_of(cfg, model, rows_on)
    method = sources.SOURCES[cfg.method]
    plans = method.plans(settings)
    shapes = {name: networks.abstract(model, plans[name], mesh) for name in plans}
    places = jax.tree.map(lambda x: x.sharding, shapes)

    # ---- What it learns from, and what it is evaluated on ----------------------------
    samples = method.samples or bool(cfg.data.heldout)
    judged = cfg.sampler.answers if samples else "text"
    grader = rewards.grader(cfg.rl.reward, cfg.reward, tok, judged, looks=model.looks)
    for line in grader.begin() if samples else ():
        say(line)
    tools = sources.Tools(
        mesh=mesh,
        tok=tok,
        grader=grader,
        truncated_wrong=cfg.rl.truncated_wrong,
        timer=timer,
        stop=stopping,
        say=say,
        folder=folder,
        samples=cfg.run.samples if main else 0,
        reader=pictures.reader(
            cfg.model, cfg.sampler, model, tok, learns=cfg.method == "sft"
        ),
        decode=pictures.decoder(cfg, model, tok) if samples else None,
    )
    problems = heldout.sets(settings, tools)
    source = method(settings, tools)
    tools.reader = None  # it has read all: a tokenizer of images makes room

    # ---- Where it samples ------------------------------------------------------------
    limit = memory.device_bytes()
    resident = sum(
        budget.resident(
            shapes, model, mesh, reference=bool(cfg.objective.reference_beta)
        ).values()
    )
    guest = memory.NOTHING
    if samples:
        guest = pictures.claim(cfg, model, tok, grader, resident)
    sampling = placement.place(
        model=model,
        cfg=cfg.sampler,
        mesh=mesh,
        rollout=cfg.mesh.rollout,
        beside=resident + guest.resident,
        limit=limit if samples else None,
    )
    tools.answerer = sampling.answerer
    tools.others = {
        name: placement.placed(
            dataclasses.replace(model, block=one.block), one, sampling.answerer.mesh
        ).answerer
        for name, one in settings.samplers.items()
    }
    if samples and sampling.note:
        say(sampling.note)

    # ---- The compiled functions: each is traced once in a run ------------------------
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    scored = networks.scored(plans, source.reference)
    score = jax.jit(functools.partial(learner.score, model=model, plans=scored))

    def planned(remat: str):
        trained = dataclasses.replace(model, remat=remat)
        update = functools.partial(
            learner.update, model=trained, plans=plans, cfg=source.objective
        )
        # It writes new states over the old ones, so that no device holds both.
        update = jax.jit(update, donate_argnums=0, out_shardings=(places, replicated))
        return update, budget.plan(
            source,
            states=shapes,
            model=model,
            mesh=mesh,
            sampling=sampling if samples else None,
            others=tuple(tools.others.values()),
            update=update,
            guest=guest,
        )

    # ---- Whether it fits a device: compiled now, found compiled when called -----------
    remats = (model.remat,)
    if cfg.model.remat == "auto":
        slots = settings.batch.rows // rows_on * settings.batch.tokens
        remats = budget.remats(model, slots, mesh, limit)
    remat, update, needs = budget.first_that_fits(remats, planned, limit)
    if remat != model.remat:
        say(f"model.remat={remat!r}: what keeps more does not fit a device")
    say(budget.table(needs))

    # By the networks that an update trains: all, or a value network alone.
    trainers = {tuple(plans): update}
    if "value" in plans:
        alone = functools.partial(
            learner.update,
            model=dataclasses.replace(model, remat=remat),
            plans={"value": plans["value"]},
            cfg=source.objective,
        )
        kept_places = {"value": places["value"]}, replicated
        trainers[("value",)] = jax.jit(
            alone, donate_argnums=0, out_shardings=kept_places
        )

    # ---- How far it has come, and its weights -----------------------------------------
    checkpoints = Checkpoints(
        folder / "checkpoints", cfg.run.keep, cfg.run.keep_every or None
    )
    moves = cfg.rl.reference_reset  # else the reference is the checkpoint's
    anchor = networks.abstract_reference(model, mesh) if moves else None
    target = shapes | ({"reference": anchor} if moves else {})
    for line in checkpoints.scarce(target):
        say(line)
    restored = None if resume == "never" else checkpoints.restore(target)
    states, base, start, meta = begin_or_resume(
        restored, cfg=cfg, model=model, plans=plans, places=places, mesh=mesh, say=say
    )
    source.recall(meta.get("memory", {}))
    champion = best.Best(cfg.run.keep_best, cfg.run.patience, meta.get("best"))
    resolved = dataclasses.asdict(cfg)
    run.begin(resolved, defaults or dataclasses.asdict(config.Config()), mesh)
    tools.eyes = networks.eyes(cfg.model.path, model, mesh)
    if tools.eyes:
        tools.answerer = looking.Looking(sampling.answerer, tools.eyes)
        tools.others = {
            name: looking.Looking(x, tools.eyes) for name, x in tools.others.items()
        }
    reference = states.pop("reference", None)  # it is saved where it moves
    if source.reference and reference is None:
        reference = networks.reference(cfg.model.path, model, mesh, base)
    weights = functools.partial(
        networks.Weights,
        base=base,
        reference=reference,
        model=model,
        like=sampling.weights,
    )
    say(
        f"{cfg.model.path}: {networks.sizes(states['policy'].params, base)} on "
        f"{mesh.size} x {jax.devices()[0].device_kind}, mesh {dict(mesh.shape)}"
    )

    # ---- The loop --------------------------------------------------------------------
    taken = meta["taken"]
    rows = checkpoints.rows(start) if start else {}
    # Whether the last step was not evaluated yet, since a signal came.
    pending = bool(problems) and meta.get("pending", start == 0)
    row = rows.pop(start, {}) if pending else {}
    writer = metrics.Writer(
        folder,
        source.steps,
        start,
        rows,
        enabled=main,
        trackers=lambda next_step: trackers.Trackers(
            boards, trackers.Run(folder, next_step, config.flat(resolved))
        ),
    )
    watch = guard.Guard(
        plans, checkpoints, folder, cfg.run.max_skips, start, meta.get("norms", {})
    )
    evaluate = functools.partial(
        heldout.evaluate_sets, sets=problems, settings=settings, tools=tools
    )

    def keep_if_best(step: int, answered: dict):
        if champion.note(step, answered):
            policy = states["policy"].params
            with timer("best"):
                networks.export(folder / "best", policy, cfg.model.path, model, mesh)

    def saving() -> dict:
        return states | ({"reference": reference} if moves else {})

    if not (problems or source.samples):
        with watch.sampling(start):
            networks.check_forward(weights(states).scoring()["policy"], model)
    if pending:
        with watch.sampling(start):
            answered = evaluate(start, weights(states))
        if answered is not None:
            keep_if_best(start, answered)
            writer.write(start, row | answered | timer.pop())
    done = saved = start

    for step in range(start + 1, source.steps + 1):
        # Everything random is a function of the seed and the step: what is resumed goes on
        # as if it had not stopped. None, or `stopping`: a signal came meanwhile.
        if champion.done:
            say(
                f"no {champion.name} above {champion.value:.4g}, of step {champion.step}, "
                f"in {cfg.run.patience} evaluations: the run ends after step {done}"
            )
            break
        timer.step = step
        with watch.sampling(step):
            step_batches = source.batches(step, taken, weights(states), score)
        if step_batches is None or stopping():
            break
        row, pending = dict(step_batches.metrics), False
        if step == start + 1 and step_batches.batches:
            for line in config.half_empty(row.get("packed_fill", 1.0), settings.batch):
                say(line)
        if step_batches.batches:
            with timer("update"):
                updates, trained_on, table = [], [], step_batches.table
                beside = networks.beside(base, table and table.seen)
                for names, batch in source.passes(step, step_batches):
                    moved = {name: states[name] for name in names}
                    moved, told = trainers[names](moved, batch, beside, watch.limits())
                    states = states | moved
                    updates.append(told)
                    trained_on.append(batch)
                    if source.far(told):
                        break
                updates = sharding.fetch(updates)
                row |= metrics.mean(
                    [x for x in updates if x.keys() == updates[0].keys()]
                )
                row |= watch.note(step, updates, trained_on)
        if moves and step % moves == 0:
            reference = networks.as_reference(states["policy"].params, anchor)
            weights = functools.partial(weights, reference=reference)
        used = step_batches.taken or source.taken_per_step
        if row.get("entropy", math.inf) < cfg.rl.entropy_floor:
            row["entropy_low"] = 1.0
            say(
                f"warning: step {step}: entropy {row['entropy']:.3g} nats a token, below "
                f"rl.entropy_floor={cfg.rl.entropy_floor}: hardly anything new is tried"
            )
        row |= step_batches.rates(timer.seconds)
        del step_batches  # its batches make room for the next rollout
        if problems and (step % cfg.eval.every == 0 or step == source.steps):
            with watch.sampling(step):
                answered = evaluate(step, weights(states))
            row, pending = row | (answered or {}), answered is None
            if answered is not None:
                keep_if_best(step, answered)
        row = {name: float(x) for name, x in (row | timer.pop()).items()}
        # From here on the step is done: it is saved now, or when a signal comes. The row is
        # saved with it, as a run may be killed before it is written.
        done, taken = step, taken + used
        meta = {"taken": taken, "config": resolved, "row": row}
        meta |= {"norms": watch.norms, "pending": pending}
        meta |= {"memory": source.memory, "best": champion.memory}
        if step % cfg.run.save_every == 0 or step == source.steps:
            with timer("checkpoint"):
                saved = watch.save(step, saving(), meta) or saved
        if not pending:
            writer.write(step, row | timer.pop())
        watch.check()
        if stopping():
            break

    # ---- What is left behind ---------------------------------------------------------
    if done > saved:  # a signal came before a save was due
        watch.save(done, saving(), meta)
    checkpoints.close()
    writer.close()
    if main:
        with exits.room(folder):
            curves.draw(metrics.history(folder), folder / "curves.png")
        leave.after_run(folder, tok, say)
    if stopping():
        raise exits.Stopped(
            f"stopped by a signal; start the same command again to go on in {folder}"
        )
    if cfg.run.export:
        del base, reference, weights  # the export loads weights as precise as stored
        policy = states["policy"].params
        if champion.name and champion.step < done:
            if main:
                best.publish(folder)
            say(
                f"{champion.name} was highest, {champion.value:.4g}, after step "
                f"{champion.step}: those weights are exported"
            )
        else:
            networks.export(folder / "export", policy, cfg.model.path, model, mesh)
        say(f"exported to {folder / 'export'}")
    if cfg.run.export_value:
        critic = states["value"].params
        networks.export(folder / "value", critic, cfg.model.path, model, mesh)
        say(f"the value network is in {folder / 'value'}")


def begin_or_resume(
    restored, *, cfg: config.Config, model: ModelConfig, plans, places, mesh, say
):
    """Returns (states, base, start, meta) of a run that begins, or goes on.

    restored: Checkpoints.restore's, or None for a run that begins; places: the states'
    shardings. base: see `networks.frozen`; start: the last step that is done; meta: what
    its checkpoint says, of which `taken` is always there.
    """
    base, value = networks.frozen(cfg.model.path, model, mesh)
    if restored is None:
        states = networks.initial(
            cfg.model.path,
            model,
            plans,
            places,
            mesh,
            value,
            jax.random.key(cfg.seed),
            value_path=cfg.rl.value_path,
        )
        return states, base, 0, {"taken": 0}
    states, meta, start = restored
    say(f"resuming {pathlib.Path(cfg.run.folder)} after step {start}")
    for change in config.changes(meta["config"], cfg):
        say(f"  {change}")
    return states, base, start, meta


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
        batch=cfg.batch.on(devices),
        policy_optim=cfg.policy_optim,
        value_optim=cfg.value_optim,
        heldout_problems=cfg.eval.problems,
        heldout_temperature=cfg.eval.temperature,
        heldout_answers=cfg.eval.answers,
        samplers=variants(cfg.eval.samplers, cfg.sampler),
        model=model,
    )


def main():
    """Parses the command line and trains."""
    resume = flags.DEFINE_enum("resume", "auto", ["auto", "must", "never"], RESUME)
    cfg = command_line.from_command_line(sys.argv, example="configs/tracerl.py")
    with Folder(
        cfg.run.folder, writes=jax.process_index() == 0, agreed=sharding.anywhere
    ) as run:
        train(cfg, run, resume.value)


if __name__ == "__main__":
    options = command_line.OPTIONS | {"--resume=auto|must|never": RESUME}
    command_line.entry(main, command_line.usage(__doc__, options))
