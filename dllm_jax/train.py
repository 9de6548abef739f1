"""Trains a diffusion language model: RL on verifiable rewards, SFT, or DPO on pairs.

    python -m dllm_jax.train --config=configs/tracerl.py [--config.a.b=value ...]

One step of RL: sample a group of answers to each problem, grade them, turn rewards into
advantages, pack what the sampler saw into training batches, update the policy and the
value model, log, save. SFT and DPO are the same loop with other sources of batches. A run
lives in one folder and goes on from its newest checkpoint when started again.
"""

import dataclasses
import functools
import json
import pathlib
import signal
import sys

import jax
import ml_collections.config_flags
import numpy as np
from absl import flags, logging

from dllm_jax import config, curves, data, memory, metrics, sharding
from dllm_jax.checkpoint import Checkpoints, check_resume
from dllm_jax.models import hf, lora, transformer
from dllm_jax.rl import experience, learner, networks, noise, rollout, views
from dllm_jax.rl import layout as layouts
from dllm_jax.rl.rewards import GRADERS
from dllm_jax.sampling import answers, state

CONFIG = ml_collections.config_flags.DEFINE_config_file(
    "config", None, "a file of configs/, optionally with :PRESET"
)
RESUME = flags.DEFINE_enum(
    "resume",
    "auto",
    ["auto", "must", "never"],
    "go on from the folder's newest checkpoint: if there is one, or else fail, or never",
)
DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "join the other processes of this SLURM job, pod or mpirun"
)
HELP = f"""{__doc__}
Flags:
  --config=FILE[:PRESET]      required; see configs/
  --resume=auto|must|never    {flags.FLAGS["resume"].help}
  --distributed               {flags.FLAGS["distributed"].help}

Every key of the configuration and its default (a config file may set others):
{config.describe()}
"""


def train(cfg: config.Config, resume: str = "auto") -> None:
    """Runs to the last step, to SIGTERM, or to the first error of the user's."""
    # ---- What is trained, and where ---------------------------------------------------
    stopping = StopSignal()
    sharding.keep_compiled(cfg.run.compile_cache)
    mesh = sharding.make_mesh(**dataclasses.asdict(cfg.mesh))
    jax.set_mesh(mesh)
    folder = pathlib.Path(cfg.run.folder)
    main = jax.process_index() == 0
    say = print if main else lambda *args: None
    kept = folder / "checkpoints"  # nothing is made there before it is known to fit
    check_resume(kept, resume)
    rl, dpo = cfg.method == "rl", cfg.method == "dpo"

    steps = cfg.rl.steps if rl else cfg.sft.steps
    cfg, model, tok = config.completed(cfg)
    sampler = cfg.sampler
    layout = layouts.Layout(
        attention=model.attention,
        shift=model.shift,
        block=sampler.block,
        grid=cfg.noise.grid,
        longest=sampler.max_new,
    )
    noise.check(cfg.noise, layout)
    plans = networks.plans(
        {"rl": cfg.objective.loss, "sft": "nll", "dpo": "dpo"}[cfg.method],
        cfg.rl.value if rl else "none",
        cfg.policy_optim,
        cfg.value_optim,
        updates=steps * cfg.rl.updates if rl else steps,
    )
    wanted = {name: networks.abstract(model, plans[name], mesh) for name in plans}
    places = jax.tree.map(lambda x: x.sharding, wanted)

    # ---- The compiled functions: each is traced once in a run ------------------------
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    scored = dict(plans)
    if cfg.objective.reference_beta and cfg.method != "sft":
        scored["reference"] = dataclasses.replace(plans["policy"], terms=("policy",))
    objective = cfg.objective  # DPO's gradient has the reference in its factors
    if dpo:
        objective = dataclasses.replace(objective, reference_beta=0.0)
    answerer = answers.answerer(model=model, cfg=sampler, mesh=mesh)
    score = jax.jit(functools.partial(learner.score, model=model, plans=scored))
    update = jax.jit(
        functools.partial(learner.update, model=model, plans=plans, cfg=objective),
        donate_argnums=0,
        out_shardings=(places, whole),
    )
    cast = jax.jit(
        lambda params: jax.tree.map(lambda x: x.astype(model.dtype), params),
        out_shardings=places["policy"].params,
    )

    def whole_of(name, change=lambda params: params):
        """Returns a network's parameters, its trained ones changed, with the frozen."""
        return lora.join(base, change(states[name].params), model.lora)

    # ---- The data --------------------------------------------------------------------
    grader, heldout = GRADERS[cfg.rl.reward], []
    if cfg.data.heldout:
        heldout = data.problems(cfg.data.heldout, tok, cfg.data, grader)
    heldout = heldout[: cfg.eval.problems or None]
    if rl:
        source = data.problems(cfg.data.train, tok, cfg.data, grader)
        rollout.report_long(source, sampler.max_prompt, say)
    else:
        source, dropped = data.examples(
            cfg.data.train,
            tok,
            cfg.data,
            end=sampler.stop_ids[0],
            pad=model.pad_id,
            vocab=model.vocab,
            block=sampler.block,
            slots=sampler.slots,
            pairs=dpo,
            traced=cfg.noise.kind == "trace",
        )
        say(f"{len(source.len_B)} examples, {dropped} empty or too long and left out")
    rollout.report_long(heldout, sampler.max_prompt, say)
    timer = metrics.Timer()

    answer = functools.partial(
        rollout.answered,
        answerer,
        tok=tok,
        timer=timer,
        grader=grader,
        truncated_wrong=cfg.rl.truncated_wrong,
    )

    def evaluate(step):
        """Returns the held-out metrics of the present policy."""
        with timer("eval"):
            key = jax.random.fold_in(jax.random.key(cfg.seed + 1), step)
            n = np.arange(len(heldout))
            acting = whole_of("policy", cast)
            temperature = cfg.eval.temperature
            how = {"temperature": temperature, "timer": lambda _: timer("eval")}
            told = rollout.summary(answer(acting, heldout, n, key, **how))
        names = ("accuracy", "tokens_per_forward", "response_length")
        return {f"heldout_{name}": told[name] for name in names}

    per_update = -(-cfg.rl.prompts * cfg.rl.group // cfg.rl.updates)
    longest = sampler.max_new if rl else int(source.len_B.max())
    traced = not rl and cfg.noise.kind == "trace"
    turns = max(np.unique(x[x > 0]).size for x in source.step_BT) if traced else longest
    most = layouts.microbatches(
        per_update if rl else cfg.sft.examples * (1 + dpo),
        sampler.slots,
        longest,
        noise.rounds(cfg.noise, layout, longest, turns),
        cfg.noise.copies,
        layout,
        cfg.batch,
    )
    pack = functools.partial(
        views.pack,
        mask_id=model.mask_id,
        layout=layout,
        cfg=cfg.batch,
        most=most,
        aggregate=cfg.objective.aggregate,
        copies=cfg.noise.copies,
        draws=cfg.noise.draws,
    )

    # ---- What it takes: compiled now, found compiled later; nothing is there yet ------
    plain = dataclasses.replace(model, lora=None)
    stored = transformer.abstract(plain, mesh, model.dtype)
    beside = stored if model.lora else None
    always = {
        "parameters": memory.held([state.params for state in wanted.values()]),
        "optimizer": memory.held([state.opt_state for state in wanted.values()]),
        "frozen": memory.held(stored if model.lora or scored != plans else ()),
    }
    phases = {}
    if rl or heldout:
        own = wanted["policy"].params
        own = jax.tree.map(lambda x: x.update(dtype=model.dtype), own)
        acting = lora.join(beside, own, model.lora)
        lowered, rows = answerer.lower(acting, jax.random.key(cfg.seed))
        always["rows and pages"] = memory.held(rows)
        phases["rollout"] = {
            "weights": memory.held(own),
            "activations": memory.working(lowered, "rollout"),
        }
    nobody = state.stacked([state.no_answer(sampler.slots)])
    fields = experience.FIELDS if rl else experience.FIELDS[:dpo]
    batch = experience.blank(nobody, cfg.noise, layout, pack, mesh, fields)
    gradients = max(memory.held(state.params) for state in wanted.values())
    activations = memory.working(update.lower(wanted, batch, beside), "update")
    phases["update"] = {
        "batches": memory.held(batch) * (cfg.rl.updates if rl else 1),
        "gradients": gradients,
        "activations": activations - gradients,
    }
    del batch
    memory.check(always, phases, memory.limit())
    say(memory.table(always, phases))

    # ---- How far it has come, and its weights -----------------------------------------
    checkpoints = Checkpoints(kept, cfg.run.keep, cfg.run.keep_every or None)
    found = None if resume == "never" else checkpoints.restore(wanted)
    base, value = networks.frozen(cfg.model.path, model, mesh)
    if found is not None:
        states, meta, first = found
        taken = meta["taken"]
        say(f"resuming {folder} after step {first}")
        for change in config.changes(meta["config"], cfg):
            say(f"  {change}")
    else:
        key, first, taken = jax.random.key(cfg.seed), 0, 0
        states = networks.first(cfg.model.path, model, plans, places, mesh, value, key)
    described = dataclasses.asdict(cfg)
    if main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    reference = {}
    if scored != plans:
        reference["reference"] = base
        if base is None:
            _, reference["reference"] = hf.load(
                cfg.model.path, mesh=mesh, dtype=model.dtype, heads=("lm",)
            )
    others = f"beside {networks.count(base):,} frozen ones " if base else ""
    say(
        f"{cfg.model.path}: {networks.count(states['policy'].params):,} parameters "
        f"{others}on {mesh.size} x {jax.devices()[0].device_kind}, "
        f"mesh {dict(mesh.shape)}"
    )

    # ---- The loop --------------------------------------------------------------------
    size = len(source) if rl else len(source.len_B) // (1 + dpo)
    count = cfg.rl.prompts if rl else cfg.sft.examples
    last = None if found is None else meta.get("row")
    writer = metrics.Writer(folder, steps, first, last, enabled=main)
    if first == 0 and heldout:
        writer.write(0, {**evaluate(0), **timer.pop()})
    done = saved = first

    for step in range(first + 1, steps + 1):
        rng = np.random.default_rng([cfg.seed, step])
        told, batches = {}, []
        chosen = data.order(
            size, taken, count, seed=cfg.data.seed, shuffle=cfg.data.shuffle
        )
        if rl:
            key = jax.random.fold_in(jax.random.key(cfg.seed), step)
            problems = [source[i] for i in chosen for _ in range(cfg.rl.group)]
            group_n = np.repeat(np.arange(cfg.rl.prompts), cfg.rl.group)
            with timer("rollout"):
                acting = whole_of("policy", cast)
                how = {"temperature": sampler.temperature, "stop": stopping}
                rollouts = answer(acting, problems, group_n, key, **how)
                del acting
            if rollouts is None:
                break
            told = rollout.summary(rollouts)
            sampled = int(rollouts.trace.len_B.sum())
            if main and cfg.run.samples:
                rollout.write(folder, step, rollouts, problems, cfg.run.samples)
            if stopping():
                break
            with timer("score"):
                params = {name: whole_of(name) for name in states} | reference
                more, batches = experience.of_rollouts(
                    rollouts,
                    rng,
                    rl=cfg.rl,
                    noised=noise.noised(rollouts.trace, cfg.noise, layout, rng),
                    as_sampled=cfg.noise.kind == "trace",
                    objective=cfg.objective,
                    params=params,
                    pack=pack,
                    score=score,
                    mesh=mesh,
                )
            told |= more
            if not batches:
                why = f"no group is {cfg.rl.filter}"
                if cfg.rl.filter == "solvable":
                    why += f" in [{cfg.rl.min_solved}, {cfg.rl.max_solved}]"
                if not sampled:
                    why = "all its prompts are longer than sampler.max_prompt"
                say(f"step {step}: {why}, nothing to learn; the step is skipped")
        else:
            # A pair is two rows, one after the other.
            rows = experience.rows_of(chosen, 2) if dpo else chosen
            part = experience.take(source, rows)
            noised = noise.noised(part, cfg.noise, layout, rng)
            params = {"policy": whole_of("policy")} | reference if dpo else None
            told, batches = experience.of_examples(
                part,
                noised=noised,
                copies=cfg.noise.copies,
                draws=cfg.noise.draws,
                beta=cfg.objective.reference_beta,
                pack=pack,
                score=functools.partial(score, params) if dpo else None,
                mesh=mesh,
            )
        if stopping():
            break

        if batches:
            with timer("update"):
                parts = []
                for batch in batches:
                    states, part = update(states, batch, base)
                    parts.append(part)
                parts = sharding.fetch(parts)
            for name in parts[0]:
                told[name] = float(np.mean([part[name] for part in parts]))
        worked = timer.seconds if batches else ("rollout", "reward")
        for phase in worked if rl else ():
            told[f"tokens_per_second/{phase}"] = sampled / timer.seconds[phase]

        if heldout and (step % cfg.eval.every == 0 or step == steps):
            told |= evaluate(step)
        row = {name: float(x) for name, x in (told | timer.pop()).items()}
        done, taken = step, taken + len(chosen)
        meta = {"taken": taken, "config": described, "row": row}
        if step % cfg.run.save_every == 0 or step == steps:
            with timer("checkpoint"):
                checkpoints.save(step, states, meta)
            saved = step
        writer.write(step, row | timer.pop())
        if stopping():
            break

    # ---- What is left behind ---------------------------------------------------------
    if done > saved:  # a signal came before a save was due
        checkpoints.save(done, states, meta)
    checkpoints.close()
    writer.close()
    if main:
        curves.draw(metrics.history(folder), folder / "curves.png")
    if stopping():
        say(f"stopped by a signal; start the same command again to go on in {folder}")
        return
    if cfg.run.export:
        if base is not None:  # as precise as it is stored
            _, base = hf.load(cfg.model.path, mesh=mesh)
        policy = lora.merge(whole_of("policy"))
        hf.save(folder / "export", plain, policy, like=cfg.model.path)
        say(f"exported to {folder / 'export'}")


class StopSignal:
    """True once SIGTERM or SIGINT has come; every process learns it at the same call."""

    def __init__(self):
        self.seen = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.note)

    def note(self, *_):
        """Remembers the signal; a second one ends the program at once."""
        if self.seen:
            sys.exit(1)
        self.seen = True

    def __call__(self) -> bool:
        """Returns whether to stop now."""
        if jax.process_count() == 1:
            return self.seen
        return bool(np.any(sharding.everywhere(np.array([self.seen]))))


def main():
    """Parses the command line and trains."""
    config.parse(sys.argv)
    logging.set_verbosity(logging.ERROR)  # Orbax tells every file it touches
    if CONFIG.value is None:
        raise ValueError("--config=FILE is required, such as configs/tracerl.py")
    if DISTRIBUTED.value:
        jax.distributed.initialize()
    train(config.freeze(CONFIG.value), RESUME.value)


if __name__ == "__main__":
    if {"--help", "-h", "--helpshort"} & set(sys.argv[1:]):
        print(HELP)
        sys.exit(0)
    try:
        main()
    except ValueError as error:
        config.fail(error)
