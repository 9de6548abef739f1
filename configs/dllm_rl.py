"""dLLM-RL's keys: which of them is which of ours, and which has no effect here.

A file is one of three kinds, told by its sections: RL has rollout and training, SFT has
training alone, evaluation has rollout alone. Each kind has a table of the keys that its
released files have, and every key is a `Row`: what it becomes.
"""

import dataclasses
import re

from configs import dllm_rl_rows as rows
from configs.dllm_rl_rows import Row
from dllm_jax.checks import Refused, shown
from dllm_jax.data.tokens import TURN_ENDS
from dllm_jax.sampling.config import VARIED, SamplerConfig

ONE_RUN = Row(why="one process samples, grades, trains and evaluates")
LAUNCH = Row(why="launch/ starts the processes; mesh.* says how devices are used")
FIXED = Row(why="the run folder has fixed names: checkpoints/ and export/")
THEIRS_TOO = Row(why="the rollout's is used, there as here")
BOX = Row(why="data.template asks for it")
NO_CACHE = "LLaDA-V's rollouts have no cache; sampler.cache can"
HOOKS = Row(why="their rollouts do not change with it")
HOST = Row(why="the environment's, where launch/ starts the processes")
BOARD = Row(why="metrics go to metrics.jsonl and TensorBoard in the run folder")
EACH_GPU = Row(
    ours=("sampler.rows",), why="of each GPU there; sampler.rows is of all devices"
)
UPDATES = Row(
    why="they take gradient_accumulation_steps x batch_size_lm x GPUs rows for an update, as "
    "many as there are (5 to 8 in a step of their single-node files); rl.updates is how many "
    "updates a step's rollouts are dealt into",
    same=False,
)
EPOCHS = Row(
    why="sft.steps counts updates; set it to num_train_epochs x the records of data.train / "
    "sft.examples",
    same=False,
)


def under(section: str, table: dict) -> dict:
    """Returns a table of rows with the section's name before each key."""
    return {f"{section}.{key}": row for key, row in table.items()}


def all_of(section: str, row: Row, *keys: str) -> dict:
    """Returns one row for several keys of a section."""
    return under(section, dict.fromkeys(keys, row))


COMMON = {
    "experiment.project": Row(make=rows.project),
    "experiment.function": ONE_RUN,
    **all_of("experiment", LAUNCH, "num_node", "node_index", "deepspeed_file"),
    "model.pretrained_model": Row(ours=("model.path",)),
    "model.model_base": Row(make=rows.model_base),
    "model_base": Row(make=rows.model_base),
    **all_of("model", FIXED, "optimized_name", "optimized_value_name"),
    "dataset.data_type": Row(make=rows.images_type),
    "dataset.image_root": Row(ours=("data.image_root",)),
    "dataset.add_think_prompt": Row(make=rows.thinks),
    **all_of("reward", BOX, "answer_must_in_box"),
    "answer_must_in_box": BOX,
    "reward.strict_len_check": Row(make=rows.strict_length),
    **all_of("model", Row(make=rows.of_codes), "vq_model_path", "image_resolution"),
    **dict.fromkeys(("vq_model_path", "image_resolution"), Row(make=rows.of_codes)),
    "model.process_reward_chunk_size": rows.judged("reward.chunk"),
    "model.clip_model_path": Row(why="captions are not scored by CLIP", same=False),
    **all_of("rollout", HOOKS, "use_fast_dllm", "use_dllm_cache", "transfer_ratio"),
    **all_of("rollout", HOOKS, "prompt_interval_steps", "gen_interval_steps"),
    "execute.num_chunk": Row(
        why="reward.workers is how many programs run at once; by default one less than "
        "there are cores"
    ),
    **all_of("wandb", BOARD, "entity", "resume", "run_id"),
    **all_of(
        "system",
        HOST,
        "HTTP_PROXY",
        "HF_HOME",
        "env_name",
        "reward_env_name",
        "envs_dir",
        "base_dir",
    ),
}
SAMPLING = {
    "tensor_parallel_size": Row(ours=("mesh.model",)),
    "max_active": EACH_GPU,
    "batch_size": rows.of_lladav(EACH_GPU, "sampler.rows prompts are sampled together"),
    "num_task_per_step": Row(ours=("rl.prompts",)),
    "num_response_per_task": Row(ours=("rl.group",)),
    "temperature": Row(ours=("sampler.temperature",)),
    "max_token": Row(ours=("sampler.max_new",)),
    "max_gen_length": Row(ours=("sampler.max_new",)),
    "block_size": Row(ours=("sampler.block",)),
    "denoising_steps_per_block": Row(ours=("sampler.steps_per_block",)),
    "steps": Row(make=rows.steps),
    "top_p": Row(make=rows.top_p),
    "top_k": Row(ours=("sampler.top_k",)),
    "remasking_strategy": Row(make=rows.strategy),
    "dynamic_threshold": Row(ours=("sampler.threshold",)),
    "start_with_think": Row(make=rows.begins_thinking),
    "stop_token_list": rows.only(
        *(None, [], *([end] for end in TURN_ENDS)),
        why="a turn's end stops already; sampler.stop_ids adds the ids of other tokens",
    ),
    "output_unmasking_history": Row(why="every rollout is written with its trace"),
    "target": Row(make=rows.target),
    "alg_temp": Row(make=rows.rank_temperature),
    "pad_target_penalty": Row(make=rows.pad_penalty),
    "further_horizon": rows.of_lladav(Row(make=rows.horizon), NO_CACHE),
    "use_cache": rows.of_lladav(
        rows.pick("sampler.cache", {True: "prefix", False: "none"}), NO_CACHE
    ),
}
TRAINING = {
    "gradient_checkpointing_enable": rows.pick(
        "model.remat", {True: "auto", False: "none"}
    ),
    "mixed_precision": rows.pick("model.dtype", rows.DTYPES),
    "enable_tf32": Row(why="XLA chooses how matmuls of model.dtype are computed"),
    "seed": Row(ours=("seed", "data.seed")),
    "num_train_epochs": Row(ours=("rl.epochs",)),
    "max_grad_norm": Row(make=rows.clip_norm),
    "method": Row(make=rows.method),
    "block_size": Row(make=rows.train_block),
    "shrink": Row(ours=("noise.shrink",)),
    "post_num": rows.only(
        0, why="an answer ends with its stop token; pads are not trained"
    ),
    "max_prompt_len": Row(make=rows.of_words),
    "lower_p": rows.bound("noise.lower"),
    "upper_p": rows.bound("noise.upper"),
    "mask_times_per_sample": Row(make=rows.draws),
}
OPTIMIZER = {
    "optimizer.name": Row(make=rows.optimizer),
    **under(
        "optimizer.params",
        {
            "learning_rate": Row(ours=("policy_optim.lr",)),
            "policy_learning_rate": Row(ours=("policy_optim.lr",)),
            "value_learning_rate": Row(ours=("value_optim.lr",)),
            "scale_lr": Row(why="no script reads it"),
            "beta1": Row(ours=("policy_optim.b1", "value_optim.b1")),
            "beta2": Row(ours=("policy_optim.b2", "value_optim.b2")),
            "epsilon": Row(ours=("policy_optim.eps", "value_optim.eps")),
            "weight_decay": Row(make=rows.weight_decay),
        },
    ),
    **under(
        "lr_scheduler.params",
        {
            "learning_rate": Row(why="the optimizer's is meant"),
            "warmup_steps": Row(make=rows.warmup),
            "min_lr_scale": Row(why="theirs ignores it; policy_optim.final is ours"),
        },
    ),
}


# ---- Samplers of evaluation --------------------------------------------------------------

# Keys of evaluation that eval.samplers can vary.
OTHERWISE = ("block_size", "denoising_steps_per_block", "steps", "top_p", "top_k")
OTHERWISE += ("remasking_strategy", "dynamic_threshold", "target", "further_horizon")
OTHERWISE += ("use_cache",)
OF_SAMPLERS = (
    "eval.samplers has what differs from the rollouts' sampler, which also answers: its "
    "metrics are heldout_NAME_..."
)


def as_rollouts(raw: dict) -> list[dict]:
    """Returns, for each strategy of evaluation, a file whose rollouts are that evaluation's.

    Raises ValueError where another key has not as many values.
    """
    # A temperature decides of which distribution scores are.
    told = {name: raw.get(f"evaluation.{name}") for name in (*OTHERWISE, "temperature")}
    told = {f"rollout.{name}": x for name, x in told.items() if x is not None}
    strategies = told.pop("rollout.remasking_strategy", rows.strategy_of(raw))
    strategies = strategies if isinstance(strategies, list) else [strategies]
    files = [{"rollout.remasking_strategy": x} for x in strategies]
    for key, value in told.items():
        values = value if isinstance(value, list) else [value] * len(files)
        if len(values) != len(files):
            raise ValueError(
                f"{key}={value!r}: needs {len(files)}, one for each strategy"
            )
        for file, one in zip(files, values, strict=True):
            file[key] = one
    return [raw | file for file in files]


def sampler_of(raw: dict) -> SamplerConfig:
    """Returns the sampler of a file's rollouts, where it tells its fields.

    Raises ValueError naming the key of a value that a field cannot have.
    """
    kinds = {field.name: field.type for field in dataclasses.fields(SamplerConfig)}
    readers, told = {int: rows.whole, float: rows.number}, {}
    for name, row in SAMPLING.items():
        key = f"rollout.{name}"
        if key in raw:
            made = row.make(raw[key], key, raw) if row.make else row
            leaves = dict.fromkeys(made.ours, raw[key]) | made.leaves
            told |= {
                leaf.removeprefix("sampler."): (x, key) for leaf, x in leaves.items()
            }
    fields = {}
    for field, (value, key) in told.items():
        if field in kinds and value is not None:
            read = readers.get(kinds[field])
            fields[field] = read(value, key) if read else value
    try:
        return SamplerConfig(**fields)
    except Refused as error:
        key = told[error.field][1] if error.field in told else error.field
        raise ValueError(f"{key}{error.text}") from None


def samplers(raw: dict, others: list[dict]) -> str:
    """Returns eval.samplers: what the rollouts of other files do otherwise.

    Raises ValueError for what makes no sampler.
    """
    usual, parts = sampler_of(raw), {}
    for other in others:
        made = sampler_of(other)
        pairs = {name: getattr(made, name) for name in VARIED}
        pairs = {k: x for k, x in pairs.items() if x != getattr(usual, k)}
        name = made.strategy.partition("_")[0]
        if pairs and pairs not in parts.values():
            known = sum(re.fullmatch(rf"{name}\d*", x) is not None for x in parts)
            parts[f"{name}{known + 1 if known else ''}"] = pairs
    return "/".join(
        f"{name}:" + ",".join(f"{key}={value}" for key, value in pairs.items())
        for name, pairs in parts.items()
    )


def evaluated(value, key, raw) -> Row:
    """Returns the samplers of evaluation that are not the rollouts', where a run evaluates."""
    if not rows.evaluates(raw):
        return Row(why=rows.OFF)
    try:
        found = samplers(raw, as_rollouts(raw))
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        reason = str(error).replace("rollout.", "evaluation.")
        why = f"held-out problems are answered by training's sampler alone: {reason}"
        return Row(why=why, same=False)
    if not found:
        return Row(why="held-out problems are answered by training's sampler, as there")
    return Row(leaves={"eval.samplers": found}, why=OF_SAMPLERS)


def strategies(value, key, raw) -> Row:
    """Returns the strategy of an evaluation; several are several samplers."""
    row = rows.strategy(value, key, raw)
    others = value[1:] if isinstance(value, list) else []
    found = others and samplers(raw, [raw | {key: other} for other in others])
    if not found:
        return row
    return Row(leaves=row.leaves | {"eval.samplers": found})


# ---- The tables of the three kinds -------------------------------------------------------

RL = (
    COMMON
    | OPTIMIZER
    | under("rollout", SAMPLING)
    | under("training", TRAINING)
    | {
        "experiment.start_from_scratch": Row(
            why="--resume=auto, never or must decides"
        ),
        "experiment.current_epoch": Row(why="a run goes on from its newest checkpoint"),
        "experiment.total_step": Row(ours=("rl.steps",)),
        "experiment.save_every": Row(ours=("run.keep_every",)),
        "experiment.eval_every": Row(ours=("eval.every",)),
        "experiment.train_value_every": rows.only(
            1, why="the value model always trains"
        ),
        "experiment.checkpoints_total_limit": Row(ours=("run.keep",)),
        "model.value_base_model": Row(make=rows.value_base),
        "model.process_reward_model": Row(make=rows.judge),
        "dataset.train_dataset": rows.dataset("data.train"),
        "dataset.optimization_data": Row(why="rollouts do not pass through a file"),
        "training.max_gen_length": Row(make=rows.cut_short),
        "training.eps": Row(ours=("objective.clip",)),
        "training.beta": Row(make=rows.kl_weight),
        "training.use_kl_estimator_k3": rows.pick(
            "objective.kl", {True: "k3", False: "k1"}
        ),
        "training.gam": Row(ours=("rl.gamma",)),
        "training.lam": Row(ours=("rl.lam",)),
        **all_of("training", UPDATES, "gradient_accumulation_steps", "batch_size_lm"),
        "lr_scheduler.scheduler": rows.only(
            "constant",
            why="theirs restarts at every RL step; here the rate is constant, and "
            "policy_optim.schedule spans the run",
        ),
        "rollout.temperature": Row(make=rows.temperature),
    }
    | all_of("evaluation", Row(make=rows.as_trained), *SAMPLING)
    | all_of("evaluation", Row(make=evaluated), *OTHERWISE)
    | all_of("evaluation", ONE_RUN, "tensor_parallel_size", "max_active", "batch_size")
    | all_of("evaluation", THEIRS_TOO, "max_gen_length", "alg_temp", "start_with_think")
    | {
        "evaluation.data_type": Row(make=rows.heldout_type),
        "evaluation.eval_dataset": Row(make=rows.heldout),
        "evaluation.if_eval": Row(why="without data.heldout nothing is evaluated"),
        "evaluation.temperature": Row(make=rows.heldout_temperature),
        "evaluation.num_response_per_task": Row(make=rows.heldout_answers),
    }
    | under(
        "rollout.reward_model",
        {
            "reward_chunk_length": rows.judged("reward.chunk"),
            "k_sample": rows.judged("reward.judge.votes"),
            "max_model_len": Row(make=rows.judge_prompt),
            "max_generation_token": rows.judged("reward.judge.tokens"),
            "temperature": rows.judged("reward.judge.temperature"),
        },
    )
)
SFT = (
    COMMON
    | OPTIMIZER
    | under("training", TRAINING)
    | {
        "dataset.optimization_data": rows.dataset("data.train"),
        "lr_scheduler.scheduler": Row(make=rows.schedule),
        # The three together say sft.examples.
        "training.gradient_accumulation_steps": Row(make=rows.examples),
        "training.batch_size_lm": Row(),
        "experiment.num_node": Row(),
        "training.num_train_epochs": EPOCHS,
        "training.max_gen_length": Row(ours=("sampler.max_new",)),
        "training.post_num": Row(make=rows.pads_learned),
    }
)
EVAL = (
    COMMON
    | under("rollout", SAMPLING)
    | {
        "model": Row(ours=("model.path",)),
        "dataset.eval_dataset": rows.dataset("data.heldout"),
        "rollout.temperature": Row(ours=("sampler.temperature", "eval.temperature")),
        "rollout.num_response_per_task": Row(make=rows.answers_each),
        "rollout.remasking_strategy": Row(make=strategies),
    }
)
KINDS = {"rl": RL, "sft": SFT, "eval": EVAL}
THEIRS = {"data.answer": "ground_truth_answer"}
# What the files do without saying it: [kind] -> leaves.
START = {
    "rl": THEIRS | {"rl.value": "none", "objective.aggregate": "constant"},
    "sft": {"method": "sft", "objective.aggregate": "constant"},
    "eval": THEIRS | {"rl.truncated": "graded"},
}

# ---- Values, before any row reads them ---------------------------------------------------

# Whole numbers, at least 1, that a file with the key has to tell; or that may be empty.
TOLD = ("rollout.max_token", "rollout.max_gen_length", "rollout.block_size")
TOLD += ("training.gradient_accumulation_steps", "training.batch_size_lm")
TOLD += ("experiment.num_node",)
COUNTS = ("training.block_size", "training.shrink", "training.max_gen_length")
COUNTS += ("training.mask_times_per_sample", "rollout.tensor_parallel_size")
WHOLE = ("rollout.top_k", "rollout.denoising_steps_per_block", "rollout.steps")
NUMBERS = ("rollout.temperature", "rollout.top_p", "rollout.dynamic_threshold")
NUMBERS += ("rollout.alg_temp", "rollout.pad_target_penalty", "training.beta")
FLAGS = ("rollout.start_with_think", "rollout.use_cache", "evaluation.if_eval")
FLAGS += ("answer_must_in_box", "reward.answer_must_in_box", "reward.strict_len_check")
FLAGS += ("dataset.add_think_prompt", "training.use_kl_estimator_k3")
# Names of files and folders: what they look like, and one of them.
NAMES = {
    "experiment.project": (r"\w[\w .+-]*", "plain name, such as rl_trado"),
    "dataset.train_dataset": (r"\w.*", "name, such as MATH_train"),
    "evaluation.eval_dataset": (r"\w.*", "name, such as MATH500"),
    "dataset.eval_dataset": (r"\w.*", "name, such as MATH500"),
    "dataset.optimization_data": (r"\w.*", "name, such as rl_data"),
}


def settled(raw: dict, kind: str) -> dict:
    """Returns a file's leaves with its numbers as such, which YAML or quotes may make texts.

    Rows read other keys than their own: what is wrong with a value is said here, of its own
    key. Raises ValueError for a value of a kind that its key cannot have.
    """
    numbers = {}
    for key, value in raw.items():
        if key in NAMES:
            refuse_no_name(key, value)
        elif key in TOLD or (key in COUNTS and value is not None):
            numbers[key] = rows.whole(value, key)
            if numbers[key] < 1:
                raise ValueError(f"{key}={value}: must be >= 1")
        elif key in WHOLE + NUMBERS and value is not None:
            numbers[key] = (rows.whole if key in WHOLE else rows.number)(value, key)
        elif key in FLAGS and value not in (True, False, None):
            raise ValueError(f"{key}={shown(value)}: must be True or False")
        elif isinstance(value, dict) or not may_be_list(key, value, kind):
            raise ValueError(f"{key}={shown(value)}: needs one value")
    return raw | numbers


def refuse_no_name(key: str, value):
    """Raises ValueError for a value of NAMES that names nothing; some may be empty."""
    form, example = NAMES[key]
    named = type(value) in (str, int) and re.fullmatch(form, str(value))
    if not named and (value is not None or key == "experiment.project"):
        raise ValueError(f"{key}={shown(value)}: needs one {example}")


def may_be_list(key: str, value, kind: str) -> bool:
    """Returns whether a value is no list, or one where theirs has lists."""
    if key == "rollout.remasking_strategy" and isinstance(value, list):
        return len(value) == 1 or (kind == "eval" and len(value) > 1)
    listed = key.startswith("evaluation.") or key == "rollout.stop_token_list"
    return listed or not isinstance(value, list)
