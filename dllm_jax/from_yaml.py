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
    "TraceRL": {"noise.kind": "trace"},
    "trace": {"noise.kind": "trace"},
    "random_masking": {"noise.kind": "bernoulli"},
    "coupled": {"noise.kind": "complement"},
    "semi-ar": {"noise.kind": "semi_ar"},
    "ar": {"noise.kind": "ar"},
}
DTYPES = {"bf16": "bfloat16", "no": "float32"}


def pick(leaf: str, table: dict):
    """Returns a row that translates a value by a table."""

    def row(value, key, raw):
        if value not in table:
            raise ValueError(f"{key}={value!r}: choose from {', '.join(table)}")
        return {leaf: table[value]}

    return row


def same(*leaves: str):
    """Returns a row that gives several leaves one value."""
    return lambda value, key, raw: dict.fromkeys(leaves, value)


def dataset(leaf: str):
    """Returns a row that names a file of data/."""
    return lambda value, key, raw: {leaf: f"data/{value}.json"}


def horizon(value, key, raw):
    """Translates further_horizon, which only its prefix cache has."""
    if not raw.get(key.rpartition(".")[0] + ".use_cache"):
        return "without a cache the whole canvas is re-run"
    longest = raw[key.rpartition(".")[0] + ".max_gen_length"]
    return {"sampler.horizon": longest if value is None else value}


def unless(usual, reason: str):
    """Returns a row for a key of which only the usual value can be had."""

    def row(value, key, raw):
        return reason if value in usual else f"NOT THE SAME: {reason}"

    return row


def method(value, key, raw):
    """Returns what a training method is here."""
    if value not in METHODS:
        raise ValueError(f"{key}={value!r}: choose from {', '.join(METHODS)}")
    return METHODS[value]


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
    reason = "training uses the blocks of sampling, sampler.block"
    return reason if value == raw["rollout.block_size"] else f"NOT THE SAME: {reason}"


def batch(value, key, raw):
    """Returns SFT's examples of an update: they ran eight processes on a node."""
    if "rollout.block_size" in raw:
        return "rl.updates says into how many updates a step's rollouts are dealt"
    nodes, rows = raw.get("experiment.num_node", 1), raw["training.batch_size_lm"]
    return {"sft.examples": int(value) * int(rows) * 8 * int(nodes)}


def schedule(value, key, raw):
    """Returns the schedule; theirs restarts at every step of RL."""
    if "rollout.block_size" in raw:
        return "theirs restarts at every RL step; policy_optim.schedule spans the run"
    return pick("policy_optim.schedule", SCHEDULES)(value, key, raw)


def switch(leaf: str, on, off):
    """Returns a row that translates a boolean."""
    return lambda value, key, raw: {leaf: on if value else off}


ONE_RUN = "one process samples, grades, trains and evaluates"
LAUNCH = "launch/ starts the processes; mesh.* says how devices are used"
FIXED = "the run folder has fixed names: checkpoints/ and export/"
JUDGE = "rewards come from graders; there is no process reward"
AS_TRAINED = "held-out problems are sampled as in training, at eval.temperature"
CHAT = "prompts are rendered by the checkpoint's chat template"

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
    "wandb.entity": "metrics go to metrics.jsonl and TensorBoard in the run folder",
    "wandb.resume": "metrics go to metrics.jsonl and TensorBoard in the run folder",
    "wandb.run_id": "metrics go to metrics.jsonl and TensorBoard in the run folder",
} | dict.fromkeys(
    ("system." + name for name in ("HTTP_PROXY", "HF_HOME", "env_name", "envs_dir")),
    "the environment's, where launch/ starts the processes",
)
COMMON["system.base_dir"] = COMMON["system.HF_HOME"]
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
    "alg_temp": lambda value, key, raw: {"sampler.rank_temperature": value or 0.0},
    "pad_target_penalty": lambda value, key, raw: {"sampler.pad_penalty": value or 1.0},
    "further_horizon": horizon,
    "use_cache": switch("sampler.cache", "prefix", "none"),
}
TRAINING = {
    "gradient_checkpointing_enable": switch("model.remat", "full", "none"),
    "gradient_accumulation_steps": batch,
    "batch_size_lm": "batch.rows and batch.tokens give a microbatch its fixed shape",
    "mixed_precision": pick("model.dtype", DTYPES),
    "enable_tf32": "XLA chooses how matmuls of model.dtype are computed",
    "seed": same("seed", "data.seed"),
    "num_train_epochs": unless(
        [1], "RL trains once on a rollout; SFT counts sft.steps"
    ),
    "max_grad_norm": same("policy_optim.max_grad_norm", "value_optim.max_grad_norm"),
    "method": method,
    "block_size": train_block,
    "shrink": "=noise.shrink",
    "post_num": unless([0], "an answer ends with its stop token; pads are not trained"),
    "max_prompt_len": "=sampler.max_prompt",
    "lower_p": "=noise.lower",
    "upper_p": "=noise.upper",
    "mask_times_per_sample": lambda value, key, raw: (
        {"noise.draws": value, "noise.rate": "scope"}
        if raw["training.method"] in ("random_masking", "coupled")
        else "the noise of this method is not drawn, or once for each example"
    ),
}
OPTIMIZER = {
    "optimizer.name": pick("", {"adamw": ""}),
    "optimizer.params.learning_rate": "=policy_optim.lr",
    "optimizer.params.policy_learning_rate": "=policy_optim.lr",
    "optimizer.params.value_learning_rate": "=value_optim.lr",
    "optimizer.params.scale_lr": "no script reads it",
    "optimizer.params.beta1": same("policy_optim.b1", "value_optim.b1"),
    "optimizer.params.beta2": same("policy_optim.b2", "value_optim.b2"),
    "optimizer.params.epsilon": same("policy_optim.eps", "value_optim.eps"),
    "optimizer.params.weight_decay": same(
        "policy_optim.weight_decay", "value_optim.weight_decay"
    ),
    "lr_scheduler.scheduler": schedule,
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
        "training.use_kl_estimator_k3": switch("objective.kl", "k3", "k1"),
        "training.gam": "=rl.gamma",
        "training.lam": "=rl.lam",
        "evaluation.eval_dataset": dataset("data.heldout"),
        "evaluation.data_type": "held-out problems have the grader of training, rl.reward",
        "evaluation.temperature": "=eval.temperature",
        "evaluation.num_response_per_task": "a held-out problem is answered once",
        **under(
            "evaluation",
            dict.fromkeys(
                SAMPLING.keys()
                - {"temperature", "num_task_per_step", "num_response_per_task"},
                AS_TRAINED,
            ),
        ),
        **under(
            "rollout.reward_model",
            dict.fromkeys(
                (
                    "reward_chunk_length",
                    "k_sample",
                    "max_model_len",
                    "max_generation_token",
                    "temperature",
                ),
                JUDGE,
            ),
        ),
    }
)
SFT = (
    COMMON
    | OPTIMIZER
    | under("training", TRAINING)
    | {
        "dataset.optimization_data": dataset("data.train"),
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
        "rollout.temperature": same("sampler.temperature", "eval.temperature"),
        "rollout.num_response_per_task": "=eval.answers",
    }
)
KINDS = {"rl": RL, "sft": SFT, "eval": EVAL}


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
            found = {row[1:]: value} if row.startswith("=") else row
        else:
            found = row(value, key, raw)
        if isinstance(found, str):
            unused[key] = found
        else:
            leaves |= {leaf: x for leaf, x in found.items() if leaf}
    return leaves, unused


# What the files do without saying it: [kind] -> leaves.
START = {
    "rl": {
        "data.answer": "ground_truth_answer",
        "rl.value": "none",
        "objective.aggregate": "constant",
    },
    "sft": {
        "method": "sft",
        "objective.aggregate": "constant",
    },
    "eval": {"data.answer": "ground_truth_answer"},
}
