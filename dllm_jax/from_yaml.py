"""dLLM-RL's YAML files: which of its keys is which of ours, and which has no effect here.

A file is one of three kinds, told by its sections: RL has rollout and training, SFT has
training alone, evaluation has rollout alone. Every key of every released file is a row of
a table: the name of our leaf, a function of the value, or the reason why it does nothing.
"""

import difflib
import pathlib
import re

import yaml

from dllm_jax.sampling.confidence import TARGETS

STRATEGIES = {
    "low_confidence_dynamic": "dynamic",
    "low_confidence_static": "static",
    "entropy_bounded": "entropy_bounded",
    "sequential": "sequential",
}
SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
    "linear": "linear",
    "polynomial": "linear",
}
METHODS = {
    "TraceRL": "trace",
    "trace": "trace",
    "random_masking": "bernoulli",
    "coupled": "complement",
    "semi-ar": "semi_ar",
    "ar": "ar",
}
DTYPES = {"bf16": "bfloat16", "no": "float32"}


def pick(leaf: str, table: dict):
    """Returns a row that translates a value by a table."""

    def row(value, key, raw):
        if value not in table:
            names = ", ".join(map(str, table))
            raise ValueError(f"{key}={value!r}: choose from {names}")
        return {leaf: table[value]}

    return row


def dataset(leaf: str):
    """Returns a row that names a file of data/."""
    return lambda value, key, raw: {leaf: f"data/{value}.json"}


def unless(usual, reason: str):
    """Returns a row for a key of which only the usual value can be had."""
    return lambda value, key, raw: (
        f"{'' if value in usual else 'NOT THE SAME: '}{reason}"
    )


def horizon(value, key, raw):
    """Translates further_horizon, which only its prefix cache has."""
    if not raw.get("rollout.use_cache"):
        return "without a cache the whole canvas is re-run"
    return {
        "sampler.horizon": raw["rollout.max_gen_length"] if value is None else value
    }


def steps(value, key, raw):
    """Returns the steps of a block: theirs are those of the whole canvas."""
    new, block = int(raw["rollout.max_gen_length"]), int(raw["rollout.block_size"])
    each, rest = divmod(int(value) * block, new)
    if rest or not each:
        raise ValueError(
            f"{key}={value} cannot be shared out among the blocks of rollout.block_size="
            f"{block} in rollout.max_gen_length={new}; set it to a multiple of their number"
        )
    return {"sampler.steps_per_block": each}


def train_block(value, key, raw):
    """Returns the training block of SFT; in RL it is the sampler's."""
    if "rollout.block_size" not in raw:
        return {"sampler.block": value, "sampler.steps_per_block": value}
    usual = [raw["rollout.block_size"]]
    return unless(usual, "training uses the blocks of sampling, sampler.block")(
        value, key, raw
    )


def draws(value, key, raw):
    """Returns the draws of noise, where the method draws more than one."""
    if raw["training.method"] in ("random_masking", "coupled"):
        return {"noise.draws": value, "noise.rate": "scope"}
    return "the noise of this method is not drawn, or once for each example"


def batch(value, key, raw):
    """Returns SFT's examples of an update: they ran eight processes on a node."""
    rows, nodes = raw["training.batch_size_lm"], raw.get("experiment.num_node", 1)
    return {"sft.examples": int(value) * int(rows) * 8 * int(nodes)}


ONE_RUN = "one process samples, grades, trains and evaluates"
LAUNCH = "launch/ starts the processes; mesh.* says how devices are used"
FIXED = "the run folder has fixed names: checkpoints/ and export/"
JUDGE = "rewards come from graders; there is no process reward"
AS_TRAINED = "held-out problems are sampled as in training, at eval.temperature"
CHAT = "prompts are rendered by the checkpoint's chat template"
HOST = "the environment's, where launch/ starts the processes"
BOARD = "metrics go to metrics.jsonl and TensorBoard in the run folder"
SHAPE = "batch.rows and batch.tokens give a microbatch its fixed shape"

COMMON = {
    "experiment.project": lambda value, key, raw: {"run.folder": f"runs/{value}"},
    "experiment.function": ONE_RUN,
    "experiment.num_node": LAUNCH,
    "experiment.node_index": LAUNCH,
    "experiment.deepspeed_file": LAUNCH,
    "model.pretrained_model": "=model.path",
    "model.model_base": "the checkpoint's config.json says what it is",
    "model.optimized_name": FIXED,
    "model.optimized_value_name": FIXED,
    "dataset.data_type": unless(["math"], "answers are graded as rl.reward says, math"),
    "execute.num_chunk": "no code is executed",
    "wandb.entity": BOARD,
    "wandb.resume": BOARD,
    "wandb.run_id": BOARD,
    "system.HTTP_PROXY": HOST,
    "system.HF_HOME": HOST,
    "system.env_name": HOST,
    "system.envs_dir": HOST,
    "system.base_dir": HOST,
}
SAMPLING = {
    "tensor_parallel_size": "=mesh.model",
    "max_active": "=sampler.rows",
    "batch_size": "=sampler.rows",
    "num_task_per_step": "=rl.prompts",
    "num_response_per_task": "=rl.group",
    "temperature": "=sampler.temperature",
    "max_token": "=sampler.max_new",
    "max_gen_length": "=sampler.max_new",
    "block_size": "=sampler.block",
    "denoising_steps_per_block": "=sampler.steps_per_block",
    "steps": steps,
    "top_p": "=sampler.top_p",
    "top_k": "=sampler.top_k",
    "remasking_strategy": pick("sampler.strategy", STRATEGIES),
    "dynamic_threshold": "=sampler.threshold",
    "start_with_think": unless([False], CHAT),
    "stop_token_list": "a turn's end stops already; sampler.stop_ids adds ids",
    "output_unmasking_history": "every rollout is written with its trace",
    "target": pick("sampler.target", {name: name for name in TARGETS}),
    "alg_temp": "=sampler.rank_temperature",
    "pad_target_penalty": lambda value, key, raw: {"sampler.pad_penalty": value or 1.0},
    "further_horizon": horizon,
    "use_cache": pick("sampler.cache", {True: "prefix", False: "none"}),
}
TRAINING = {
    "gradient_checkpointing_enable": pick("model.remat", {True: "full", False: "none"}),
    "mixed_precision": pick("model.dtype", DTYPES),
    "enable_tf32": "XLA chooses how matmuls of model.dtype are computed",
    "seed": "=seed data.seed",
    "num_train_epochs": unless(
        [1], "RL trains once on a rollout; SFT counts sft.steps"
    ),
    "max_grad_norm": "=policy_optim.max_grad_norm value_optim.max_grad_norm",
    "method": pick("noise.kind", METHODS),
    "block_size": train_block,
    "shrink": "=noise.shrink",
    "post_num": unless([0], "an answer ends with its stop token; pads are not trained"),
    "max_prompt_len": "=sampler.max_prompt",
    "lower_p": "=noise.lower",
    "upper_p": "=noise.upper",
    "mask_times_per_sample": draws,
}
OPTIMIZER = {
    "optimizer.name": pick("", {"adamw": ""}),
    "optimizer.params.learning_rate": "=policy_optim.lr",
    "optimizer.params.policy_learning_rate": "=policy_optim.lr",
    "optimizer.params.value_learning_rate": "=value_optim.lr",
    "optimizer.params.scale_lr": "no script reads it",
    "optimizer.params.beta1": "=policy_optim.b1 value_optim.b1",
    "optimizer.params.beta2": "=policy_optim.b2 value_optim.b2",
    "optimizer.params.epsilon": "=policy_optim.eps value_optim.eps",
    "optimizer.params.weight_decay": "=policy_optim.weight_decay value_optim.weight_decay",
    "lr_scheduler.params.learning_rate": "the optimizer's is meant",
    "lr_scheduler.params.warmup_steps": "=policy_optim.warmup",
    "lr_scheduler.params.min_lr_scale": "theirs ignores it; policy_optim.final is ours",
}


def under(section: str, rows: dict) -> dict:
    """Returns rows with the section's name before each key."""
    return {f"{section}.{key}": row for key, row in rows.items()}


RL = (
    COMMON
    | OPTIMIZER
    | under("rollout", SAMPLING)
    | under("training", TRAINING)
    | {
        "experiment.start_from_scratch": "--resume=auto, never or must decides",
        "experiment.current_epoch": "a run goes on from its newest checkpoint",
        "experiment.total_step": "=rl.steps",
        "experiment.save_every": "=run.keep_every",
        "experiment.eval_every": "=eval.every",
        "experiment.train_value_every": unless(
            [1], "the value model trains at every step"
        ),
        "experiment.checkpoints_total_limit": "=run.keep",
        "model.value_base_model": "the value model starts from model.path",
        "model.process_reward_model": unless([None], JUDGE),
        "dataset.train_dataset": dataset("data.train"),
        "dataset.optimization_data": "rollouts do not pass through a file",
        "training.max_gen_length": "sampler.max_new bounds sampling and training alike",
        "training.eps": "=objective.clip",
        "training.beta": "=objective.beta",
        "training.use_kl_estimator_k3": pick("objective.kl", {True: "k3", False: "k1"}),
        "training.gam": "=rl.gamma",
        "training.lam": "=rl.lam",
        **under("evaluation", dict.fromkeys(SAMPLING, AS_TRAINED)),
        "evaluation.eval_dataset": dataset("data.heldout"),
        "evaluation.data_type": "held-out problems have the grader of training, rl.reward",
        "evaluation.temperature": "=eval.temperature",
        "evaluation.num_response_per_task": "a held-out problem is answered once",
        "rollout.reward_model.reward_chunk_length": JUDGE,
        "rollout.reward_model.k_sample": JUDGE,
        "rollout.reward_model.max_model_len": JUDGE,
        "rollout.reward_model.max_generation_token": JUDGE,
        "rollout.reward_model.temperature": JUDGE,
        "training.gradient_accumulation_steps": (
            "rl.updates says into how many updates a step's rollouts are dealt"
        ),
        "training.batch_size_lm": SHAPE,
        "lr_scheduler.scheduler": (
            "theirs restarts at every RL step; policy_optim.schedule spans the run"
        ),
    }
)
SFT = (
    COMMON
    | OPTIMIZER
    | under("training", TRAINING)
    | {
        "dataset.optimization_data": dataset("data.train"),
        "lr_scheduler.scheduler": pick("policy_optim.schedule", SCHEDULES),
        # Together they say sft.examples.
        "training.gradient_accumulation_steps": batch,
        "training.batch_size_lm": lambda value, key, raw: {},
        "experiment.num_node": lambda value, key, raw: {},
        "training.max_gen_length": "=sampler.max_new",
        "training.post_num": lambda value, key, raw: {
            "data.post_num": -1 if value is None else value
        },
    }
)
EVAL = (
    COMMON
    | under("rollout", SAMPLING)
    | {
        "model": "=model.path",
        "model_base": COMMON["model.model_base"],
        "dataset.eval_dataset": dataset("data.heldout"),
        "rollout.temperature": "=sampler.temperature eval.temperature",
        "rollout.num_response_per_task": "=eval.answers",
    }
)
KINDS = {"rl": RL, "sft": SFT, "eval": EVAL}
THEIRS = {"data.answer": "ground_truth_answer"}
# What the files do without saying it: [kind] -> leaves.
START = {
    "rl": THEIRS | {"rl.value": "none", "objective.aggregate": "constant"},
    "sft": {"method": "sft", "objective.aggregate": "constant"},
    "eval": THEIRS,
}


def read(path: str) -> dict:
    """Returns the leaves of a YAML file by dotted name, `${a.b}` replaced by its value.

    Raises ValueError naming a file that is not there, and what is not YAML in it.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"{path}: there is no such file")
    try:
        tree = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    raw = flat(tree) if isinstance(tree, dict) else {}
    for key, value in raw.items():
        if found := re.fullmatch(r"\$\{(.+)\}", str(value)):
            if str(raw.get(found[1], "${")).startswith("${"):
                raise ValueError(f"{path}: {key}={value} refers to no value")
            raw[key] = raw[found[1]]
    return raw


def flat(tree: dict, prefix: str = "") -> dict:
    """Returns nested dictionaries as one, with dotted names."""
    out = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out


def translate(raw: dict) -> tuple[dict, dict]:
    """Returns (our leaves with their values, the reasons of keys without effect).

    Raises ValueError naming an unknown key with the nearest known one, and a value that
    has no counterpart.
    """
    sections = {key.split(".")[0] for key in raw}
    kind = "eval" if "training" not in sections else "sft"
    kind = "rl" if {"rollout", "training"} <= sections else kind
    every = {key for rows in KINDS.values() for key in rows}
    leaves, unused = dict(START[kind]), {}
    if raw.get("model.value_base_model") is not None:
        leaves["rl.value"] = "own"
    if any(key.endswith(".steps") for key in raw):  # a mean over each row's targets
        leaves["objective.aggregate"] = "step"
    for key, value in raw.items():
        if key not in every:
            near = difflib.get_close_matches(key, every, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown key {key!r}; the nearest is {near!r}")
        row = KINDS[kind].get(key, f"it means nothing in a file of kind {kind}")
        if isinstance(row, str):
            found = dict.fromkeys(row[1:].split(), value) if row[0] == "=" else row
        else:
            found = row(value, key, raw)
        if isinstance(found, str):
            unused[key] = found
        else:
            leaves |= {leaf: x for leaf, x in found.items() if leaf}
    return leaves, unused
