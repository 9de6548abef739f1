"""What keys of several groups of a configuration say to each other.

Each function takes a whole config.Config and raises ValueError, in a line that names a key
and what it may be, where two groups go ill together; or it returns warnings. What a key may
be by itself, its dataclass says.
"""

import dataclasses

from dllm_jax import checks
from dllm_jax.rl import rewards
from dllm_jax.rl.config import NETWORKS
from dllm_jax.rl.noise import KINDS
from dllm_jax.rl.objectives import OBJECTIVES
from dllm_jax.sampling.config import variants
from dllm_jax.sampling.strategy import STRATEGIES

# Of losses of whole answers, by whether the noise gives evidence bounds: their aggregates.
RATIOS = {False: ("sequence",), True: ("elbo_sequence", "elbo_answer")}


def check(cfg):
    """Raises ValueError for the first that goes ill."""
    for one in (
        check_bounds,
        check_reward,
        check_gap,
        check_likelihood,
        check_rounds,
        check_value,
        check_head,
        check_block,
        check_samplers,
        check_levers,
        check_idle,
    ):
        one(cfg)


def check_gap(cfg):
    """Raises ValueError where no log-prob was recorded that could be trusted."""
    if cfg.rl.trusted_gap > 0 and cfg.noise.kind != "trace":
        raise ValueError(
            f"rl.trusted_gap: what the sampler recorded is of noise.kind='trace', not "
            f"{cfg.noise.kind!r}; set it to 0"
        )
    if cfg.rl.trusted_gap > 0 and cfg.sampler.int8:
        raise ValueError(
            f"rl.trusted_gap={cfg.rl.trusted_gap}: sampler.int8=True records log-probs of "
            "other weights than those that learn; set it to 0"
        )


def check_value(cfg):
    """Raises ValueError where a value model would see the future; for DPO without anchor."""
    if cfg.method == "dpo" and not cfg.objective.reference_beta > 0:
        raise ValueError("dpo needs objective.reference_beta > 0, such as 0.2")
    kind = KINDS[cfg.noise.kind]
    foreign = kind.ordered and cfg.noise.kind != "trace"  # an order nobody sampled in
    if (
        cfg.method == "rl"
        and cfg.rl.value != "none"
        and (kind.random or foreign or cfg.noise.grid == "response")
    ):
        raise ValueError(
            f"rl.value={cfg.rl.value!r}: a value model would see the future with "
            f"noise.kind={cfg.noise.kind!r} and noise.grid={cfg.noise.grid!r}; set "
            "rl.value='none', or noise.kind='trace' with noise.grid='absolute'"
        )


def check_head(cfg):
    """Raises ValueError for what a head on the policy's trunk reads of no optimizer."""
    if (cfg.method, cfg.rl.value) != ("rl", "head"):
        return
    if cfg.value_optim.lr and not cfg.policy_optim.lr:
        raise ValueError(
            "policy_optim.lr=0 with rl.value='head': the head has the policy's optimizer, and "
            "would not learn either; set value_optim.lr=0, too, or rl.value='own'"
        )
    for field in dataclasses.fields(cfg.value_optim):
        value = getattr(cfg.value_optim, field.name)
        if field.name != "lr" and value != field.default:
            raise ValueError(
                f"value_optim.{field.name}={value}: with rl.value='head' the head has the "
                "policy's optimizer, policy_optim, and only value_optim.lr is its own; "
                f"leave it at {field.default}"
            )


def enlarged(cfg) -> bool:
    """Returns whether other blocks are trained than the sampler's, as far as is known."""
    sampled = cfg.sampler.block or cfg.noise.block  # 0: asked again, completed
    return cfg.noise.block not in (0, sampled)


def check_block(cfg):
    """Raises ValueError where a trace does not say how larger blocks were unmasked."""
    if not enlarged(cfg):
        return
    key = f"noise.block={cfg.noise.block}"
    if cfg.noise.kind == "trace" and cfg.noise.block % cfg.sampler.block:
        raise ValueError(
            f"{key}: a trace's steps lie in blocks of sampler.block={cfg.sampler.block}; "
            "with noise.kind='trace' set it to a multiple, or to 0"
        )
    wrong = {
        "rl.trusted_gap": cfg.rl.trusted_gap > 0 and 0,
        "objective.likelihood": cfg.objective.likelihood != "tokens" and "tokens",
        "objective.importance_cap": cfg.objective.importance_cap > 0 and 0,
    }
    for name, right in wrong.items():
        if right is not False:
            raise ValueError(
                f"{key}: {name} is of tokens in the sampler's blocks, of "
                f"{cfg.sampler.block}; set {name}={right!r}, or noise.block=0"
            )


def check_samplers(cfg):
    """Raises ValueError for further samplers of an evaluation that there is not."""
    try:
        found = variants(cfg.eval.samplers, cfg.sampler)
    except ValueError as error:
        raise ValueError(f"eval.samplers: {error}") from None
    if found and (not cfg.data.heldout or cfg.sampler.answers == "image"):
        raise ValueError(
            f"eval.samplers={cfg.eval.samplers!r}: they answer held-out problems in words; "
            "set data.heldout, or leave it empty"
        )


def check_reward(cfg):
    """Raises ValueError for what a reward model, or a judge, makes no sense with."""
    if (cfg.method == "reward") != (cfg.noise.kind == "end"):
        raise ValueError(
            "a reward model judges an answer at its end: method='reward' and "
            "noise.kind='end' go together"
        )
    if cfg.method == "reward" and cfg.objective.aggregate != "token":
        raise ValueError(
            f"objective.aggregate={cfg.objective.aggregate!r}: pairs of a reward "
            "model count alike; set it to 'token'"
        )
    if cfg.method == "reward" and cfg.data.heldout:
        raise ValueError(
            f"data.heldout={cfg.data.heldout!r}: a reward model answers nothing; "
            "leave it empty"
        )
    if cfg.method != "rl" and cfg.reward.split != "none":
        raise ValueError(
            f"reward.split={cfg.reward.split!r}: only method='rl' learns from the "
            f"rewards of chunks, not {cfg.method!r}"
        )
    if cfg.reward.split != "none" and cfg.sampler.answers == "image":
        raise ValueError(
            f"reward.split={cfg.reward.split!r}: a judge reads excerpts of texts, and "
            "sampler.answers='image' draws; set it to 'none'"
        )
    if cfg.reward.split != "none" and OBJECTIVES[cfg.objective.loss].by_answer:
        raise ValueError(
            f"reward.split={cfg.reward.split!r}: objective.loss="
            f"{cfg.objective.loss!r} has one advantage for each answer; set it to "
            "'policy' or 'dipo'"
        )


def check_bounds(cfg):
    """Raises ValueError where a loss does not get what it is a loss of."""
    loss, aggregate = cfg.objective.loss, cfg.objective.aggregate
    bounds = KINDS[cfg.noise.kind].bounds
    bounded = " or ".join(repr(name) for name, kind in KINDS.items() if kind.bounds)
    spg = cfg.method == "rl" and loss == "spg"
    if (spg or cfg.method == "dpo") and not (bounds and aggregate == "elbo"):
        raise ValueError(
            f"spg and dpo train evidence bounds: they need noise.kind={bounded} and "
            "objective.aggregate='elbo'"
        )
    if cfg.method != "rl" or loss not in ("stable", "sequence"):
        return
    if loss == "stable" and not (bounds and aggregate == "elbo_answer"):
        raise ValueError(
            "objective.loss='stable' weighs answers by their evidence bounds: it needs "
            f"noise.kind={bounded} and objective.aggregate='elbo_answer'"
        )
    if loss == "sequence" and aggregate not in RATIOS[bounds]:
        raise ValueError(
            f"objective.loss='sequence' with noise.kind={cfg.noise.kind!r}: ratios of "
            f"answers need objective.aggregate={' or '.join(map(repr, RATIOS[bounds]))}"
        )
    if cfg.rl.value != "none":
        raise ValueError(
            f"objective.loss={loss!r} has one advantage for each answer; set "
            "rl.value='none'"
        )


def check_rounds(cfg):
    """Raises ValueError where picked rounds would not stand for all of them."""
    if not cfg.noise.rounds:
        return
    wrong = {
        "rl.value": cfg.method == "rl" and cfg.rl.value != "none" and "none",
        "objective.aggregate": cfg.objective.aggregate == "group" and "token",
        "objective.likelihood": cfg.objective.likelihood != "tokens" and "tokens",
        "objective.loss": cfg.objective.loss == "sequence" and "policy",
        "method": cfg.method != "rl" and "rl",
    }
    for key, right in wrong.items():
        if right:
            raise ValueError(
                f"noise.rounds={cfg.noise.rounds} leaves rounds out, which {key} as it "
                f"is set needs; set {key}={right!r}, or noise.rounds=0"
            )


def check_likelihood(cfg):
    """Raises ValueError for likelihoods that nothing records."""
    exact = cfg.objective.likelihood == "selection"
    if not (exact or cfg.objective.importance_cap):
        return
    key = "likelihood='selection'" if exact else "importance_cap"
    if cfg.method != "rl" or not cfg.noise.as_traced:
        raise ValueError(
            f"objective.{key} is of what was sampled: it needs method='rl', "
            "noise.kind='trace', noise.shrink=1 and noise.grid='absolute'"
        )
    if exact and cfg.sampler.guidance and not cfg.noise.guided:
        raise ValueError(
            f"objective.{key}: noise.guided=False scores another distribution than the one "
            "whose draws were thrown away; set it to True"
        )
    if exact and cfg.rl.trusted_gap > 0:
        raise ValueError(
            f"objective.{key}: the sampler does not record the probability of its "
            "steps; set rl.trusted_gap=0"
        )


def check_levers(cfg):
    """Raises ValueError where keys of several groups go ill together."""
    loss = cfg.objective.loss
    if cfg.rl.epochs > 1 and loss not in ("policy", "sequence"):
        raise ValueError(
            f"rl.epochs={cfg.rl.epochs}: objective.loss={loss!r} has no ratio to the policy "
            "that sampled; it goes with objective.loss='policy' or 'sequence'"
        )
    if cfg.rl.target_kl and loss != "policy":
        raise ValueError(
            f"rl.target_kl={cfg.rl.target_kl}: objective.loss={loss!r} tells no KL to the "
            "policy that sampled; it goes with objective.loss='policy'"
        )
    if cfg.objective.reference_beta_final >= 0 and (
        cfg.method != "rl" or OBJECTIVES[loss].answers
    ):
        raise ValueError(
            f"objective.reference_beta_final={cfg.objective.reference_beta_final}: the "
            f"weight stays with method={cfg.method!r} and objective.loss={loss!r}; set it "
            "to -1"
        )
    if cfg.rl.reference_reset and (
        cfg.method != "rl" or not cfg.objective.reference_beta or cfg.model.lora_rank
    ):
        raise ValueError(
            f"rl.reference_reset={cfg.rl.reference_reset}: it needs method='rl', a reference "
            "(objective.reference_beta above 0), and one of its own (model.lora_rank=0)"
        )
    if cfg.rl.value_path and cfg.model.lora_rank:
        raise ValueError(
            "rl.value_path: with model.lora_rank the value network is adapters on the "
            "policy's weights, and starts with none"
        )
    if cfg.run.export_value and (cfg.method, cfg.rl.value) != ("rl", "own"):
        raise ValueError(
            "run.export_value: there is a value network to write only with method='rl' "
            f"and rl.value='own', not {cfg.method!r} and {cfg.rl.value!r}"
        )
    check_best(cfg)


def check_best(cfg):
    """Raises ValueError for a best of what no evaluation tells (rl.heldout)."""
    run, heldout = cfg.run, cfg.data.heldout
    if (run.keep_best or run.patience) and not heldout:
        raise ValueError(
            "run.keep_best and run.patience compare evaluations: set data.heldout"
        )
    if not run.keep_best:
        return
    # Not at the top: with it comes all that trains.
    from dllm_jax.rl.heldout import metrics_of

    samplers = variants(cfg.eval.samplers, cfg.sampler)
    known = metrics_of(heldout, samplers, cfg.eval.answers)
    if run.keep_best not in known:
        raise ValueError(
            f"run.keep_best={checks.shown(run.keep_best)} is no metric of the evaluation: "
            f"choose from {', '.join(known)}"
        )


def check_groups(cfg):
    """Raises ValueError where training compares answers that cannot differ.

    Of a run that trains: an evaluation has a temperature of its own, and no groups.
    """
    rl, sampler = cfg.rl, cfg.sampler
    if cfg.method != "rl":
        return
    compares = rl.advantage != "none"
    if compares and not sampler.temperature and not sampler.draws_order:
        raise ValueError(
            "sampler.temperature=0: all answers to a problem are the same, and "
            f"rl.advantage={rl.advantage!r} compares them; set it to 1.0 for example"
        )
    everything = rl.filter == "solvable" and rl.min_solved <= 0 and rl.max_solved >= 1
    if (
        not (rl.filter == "varied" or everything)
        and next(iter(rewards.weights(rl.reward))) == "reward_model"
    ):
        raise ValueError(
            f"rl.filter={rl.filter!r}: scores of a reward model say of no answer that it is "
            "right; use 'varied', or let a grader that does come first, as in "
            "rl.reward='math:0,reward_model'"
        )
    # Where answers are compared, a group of which all are right, or none, teaches nothing.
    few = 1 if compares else 0
    shares = [right / rl.group for right in range(few, rl.group + 1 - few)]
    if rl.filter == "solvable" and not any(
        rl.min_solved <= share <= rl.max_solved for share in shares
    ):
        raise ValueError(
            f"rl.min_solved={rl.min_solved}, rl.max_solved={rl.max_solved}: no group of "
            f"rl.group={rl.group} answers{' that differ' * compares} is solved so often; "
            "widen the range"
        )
    if rl.filter != "solvable" and rl.group == 1:
        raise ValueError(
            f"rl.group=1: no group of one answer is {rl.filter} (rl.filter); use 'solvable', "
            "or more answers"
        )


def check_idle(cfg):
    """Raises ValueError for keys of RL that nothing reads as others are set."""
    rl, learns, row = cfg.rl, cfg.method == "rl", OBJECTIVES[cfg.objective.loss]
    bounded, clips = learns and row.bounds, learns and row.clips
    of_loss = f"method={cfg.method!r} and objective.loss={cfg.objective.loss!r}"
    free = not row.pulled if learns else cfg.method != "dpo"
    why = {
        "objective.nll_weight": not learns and "only method='rl' adds it; set it to 0",
        "objective.entropy_bonus": not learns
        and "only method='rl' adds it; set it to 0",
        "objective.reference_beta": free
        and f"no reference pulls with {of_loss}; set it to 0",
        "objective.beta": learns
        and not clips
        and cfg.objective.beta > 0
        and f"no KL to the policy that sampled is in the loss with {of_loss}; set it to 0",
        "objective.clip_high": not clips
        and f"no ratio is clipped with {of_loss}; set it to 0",
        "objective.upper_weight": not bounded
        and f"there is no upper bound with {of_loss}; leave it at 0.5",
        "objective.upper_power": not bounded
        and f"there is no upper bound with {of_loss}; leave it at 1.5",
        "rl.rest_for": not rl.rest_after and "no problem rests; set rl.rest_after",
        "objective.value_clip": not (learns and rl.value in NETWORKS)
        and f"no value network learns with rl.value={rl.value!r}; leave it at -1",
        "noise.pick": not cfg.noise.rounds and "no rounds are picked; set noise.rounds",
        "rl.target_kl": rl.most_updates * rl.epochs == 1
        and "no update follows a step's first; raise rl.epochs, or set it to 0",
        "rl.value_all": cfg.reward.split != "none"
        and "no judge is asked about what rl.filter drops; set it to False, or "
        "reward.split='none'",
        "rl.truncated_tail": rl.truncated_tail > cfg.sampler.max_new
        and f"at most sampler.max_new={cfg.sampler.max_new}, an answer's tokens",
    }
    for key, wrong in why.items():
        value, default = value_of(cfg, key)
        if wrong and value != default:
            raise ValueError(f"{key}={value!r}: {wrong}")


def value_of(cfg, key: str) -> tuple:
    """Returns (a key's value, its default)."""
    section, name = key.split(".")
    group = getattr(cfg, section)
    return getattr(group, name), getattr(type(group), name)


# ---- What works, and changes nothing -----------------------------------------------------


def same_answers(cfg) -> list[str]:
    """Returns a warning, where an evaluation asks for one answer several times."""
    drawn = cfg.eval.temperature or cfg.sampler.draws_order
    if drawn or cfg.eval.answers == 1 or not cfg.data.heldout:
        return []
    line = (
        f"warning: eval.answers={cfg.eval.answers}: with eval.temperature=0 all answers to a "
        "problem are the same"
    )
    return [line]


def unasked(cfg) -> list[str]:
    """Returns the warnings of an evaluation, which reads nothing of how a run learns."""
    return same_answers(cfg) + unread(cfg, "sampler.")


def unread(cfg, front: str = "") -> list[str]:
    """Returns a warning for each key whose value waits for another's.

    front: what the keys begin with that are looked at.
    """
    graders, idle = rewards.weights(cfg.rl.reward), []
    if cfg.reward.split == "none" and "judge" not in graders and cfg.reward.judge.at:
        why = "rl.reward names no judge, and reward.split is 'none'"
        idle.append(("reward.judge.at", cfg.reward.judge.at, why))
    if "reward_model" not in graders and cfg.reward.model:
        why = "rl.reward names no reward_model"
        idle.append(("reward.model", cfg.reward.model, why))
    for key, why in waiting(cfg, graders).items():
        value, default = value_of(cfg, key)
        if value != default:
            idle.append((key, value, why))
    for name in ("policy_optim", "value_optim"):
        optim = getattr(cfg, name)
        for key in ("horizon", "final") if optim.schedule == "constant" else ():
            if value := getattr(optim, key):
                why = f"{name}.schedule is 'constant'"
                idle.append((f"{name}.{key}", value, why))
    return [
        f"warning: {key}={x!r} is not read, as {why}"
        for key, x, why in idle
        if key.startswith(front)
    ]


# Keys of the sampler, and what of its strategy says that they are read.
OF_STRATEGY = {"entropy_bound": "reads_bound", "tempered_threshold": "reads_sure"}
OF_STRATEGY |= dict.fromkeys(
    ("target", "untempered_ranks", "rank_temperature", "pad_penalty"), "ranks"
)


def waiting(cfg, graders) -> dict[str, str]:
    """Returns the keys that are not read, and why: those that no preset sets in vain.

    graders: of rl.reward.
    """
    learns, split, rl = cfg.method == "rl", cfg.reward.split, cfg.rl
    # One's own grader may give tokens rewards.
    tokens = split != "none" or any(":" in name for name in graders)
    outcome, coins = rl.outcome or split == "none", KINDS[cfg.noise.kind].coins
    samplers = cfg.sampler, *variants(cfg.eval.samplers, cfg.sampler).values()
    taken = [STRATEGIES[x.strategy] for x in samplers]
    loss, row = cfg.objective, OBJECTIVES[cfg.objective.loss]
    clips = row.clips or (rl.value in NETWORKS and loss.value_clip < 0)
    pulls = (row.clips and loss.beta) or (row.pulled and loss.reference_beta)
    pull = "beta" if row.clips else "reference_beta" if row.pulled else "loss"
    asked = {  # key: (whether it is read, the key that says so)
        "noise.lower": (coins, "noise.kind"),
        "noise.upper": (coins, "noise.kind"),
        "reward.chunk": (split in ("tokens", "steps"), "reward.split"),
        "reward.mark": (split == "marks", "reward.split"),
        "reward.tail": (split != "none", "reward.split"),
        "sampler.blank": (cfg.sampler.guidance, "sampler.guidance"),
        **{
            f"sampler.{key}": (any(getattr(x, fact) for x in taken), "sampler.strategy")
            for key, fact in OF_STRATEGY.items()
        },
        "rl.max_solved": (rl.filter == "solvable", "rl.filter"),
        "rl.min_solved": (rl.filter == "solvable", "rl.filter"),
        "rl.outcome": (tokens or not learns, "reward.split"),
        "rl.speed": (outcome, "rl.outcome"),
        "rl.truncated": (outcome or rl.truncated != "soft", "rl.outcome"),
        "rl.truncated_tail": (outcome, "rl.outcome"),
        "rl.updates": (not rl.answers_per_update, "rl.answers_per_update"),
        "rl.gamma": (tokens or not learns or rl.value != "none", "rl.value"),
        "rl.lam": (tokens or not learns or rl.value != "none", "rl.value"),
        "objective.value_weight": (not learns or rl.value == "head", "rl.value"),
        "objective.clip": (not learns or clips, "objective.loss"),
        "objective.kl": (not learns or pulls, f"objective.{pull}"),
    }
    why = {}
    for key, (read, of) in asked.items():
        section, name = of.split(".")
        if not read:
            why[key] = f"{of} is {getattr(getattr(cfg, section), name)!r}"
    return why
