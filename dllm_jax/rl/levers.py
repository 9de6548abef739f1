"""Which of RL's levers go together, across the groups of keys."""

from dllm_jax.rl.objectives import OBJECTIVES


def check(cfg) -> None:
    """Raises ValueError where keys of several groups go ill together.

    cfg: the whole run's, config.Config.
    """
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
    if (cfg.run.keep_best or cfg.run.patience) and not cfg.data.heldout:
        raise ValueError(
            "run.keep_best and run.patience compare evaluations: set data.heldout"
        )
