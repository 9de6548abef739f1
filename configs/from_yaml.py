"""dLLM-RL's YAML files: which of its keys is which of ours, and which has no effect here.

    python -m configs.from_yaml FILE.yaml > configs/mine.py

prints the config file that does what a YAML file of dLLM-RL does; its docstring names each
key that has no effect here, or another one, and why.

A file is one of three kinds, told by its sections: RL has rollout and training, SFT has
training alone, evaluation has rollout alone. Every key of every released file is a row of
a table: the name of our leaf, a function of the value, or the reason why it does nothing
or is NOT THE SAME.
"""

import difflib
import pathlib
import re
import sys
import textwrap

import yaml

from dllm_jax import config
from dllm_jax.data import BOXED, MATH, TURN_ENDS
from dllm_jax.sampling.config import SamplerConfig


def names(text: str) -> dict:
    """Returns their names with ours, from words theirs=ours, or one word for both."""
    return {a: b or a for a, _, b in (word.partition("=") for word in text.split())}


STRATEGIES = names(
    "low_confidence_dynamic=dynamic low_confidence_static=static entropy_bounded sequential"
)
TARGETS = names("confidence margin_confidence=margin neg_entropy random")
SCHEDULES = names(
    "constant constant_with_warmup=constant cosine linear polynomial=linear"
)
METHODS = names(
    "TraceRL=trace trace random_masking=bernoulli coupled=complement semi-ar=semi_ar ar"
)
DTYPES = names("bf16=bfloat16 no=float32")
ASKED = {"sdar": MATH, "trado": MATH, "dream": BOXED, "llada": BOXED, "mmada": BOXED}


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


def told(same: bool, reason: str) -> str:
    """Returns a reason that says whether something differs."""
    return reason if same else f"NOT THE SAME: {reason}"


def unless(usual, reason: str):
    """Returns a row for a key of which only the usual value can be had."""
    return lambda value, key, raw: told(value in usual, reason)


def full(raw: dict) -> bool:
    """Returns whether the model attends to its whole canvas, as far as a file tells."""
    return bool({"rollout.steps", "training.mask_times_per_sample"} & raw.keys())


def strategy(value, key, raw):
    """Returns the strategy; thresholds, but LLaDA's, are of what is drawn from."""
    out = pick("sampler.strategy", STRATEGIES)(value, key, raw)
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    bent = any(raw.get(f"rollout.{k}") not in (None, x) for k, x in plain.items())
    base = raw.get("model.model_base", raw.get("model_base"))
    if bent and base not in ("llada", "mmada") and "dynamic" in value:
        out["sampler.tempered_threshold"] = True
    return out


def as_trained(value, key, raw):
    """Compares a key of evaluation with the rollout's; a list is several evaluations."""
    usual = raw.get(key.replace("evaluation.", "rollout."))
    return told(value in (None, usual, [usual]), AS_TRAINED)


def kl_weight(value, key, raw):
    """Returns beta, and where attention is full that it weighs another sum."""
    theirs = "NOT THE SAME: their KL is not divided by a step's size"
    return {"objective.beta": value, "": theirs if full(raw) and value else ""}


def cut_short(value, key, raw):
    """Says whether training sees less of an answer than was sampled."""
    new = raw.get("rollout.max_token", raw.get("rollout.max_gen_length", 0))
    reason = "sampler.max_new bounds sampling and training alike"
    return told(value is None or value >= new, reason)


def horizon(value, key, raw):
    """Translates further_horizon, which only its prefix cache has."""
    if not raw.get("rollout.use_cache"):
        return "without a cache the whole canvas is re-run"
    whole = raw["rollout.max_gen_length"]
    return {"sampler.horizon": whole if value is None else value}


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
    same = value == raw["rollout.block_size"]
    return told(same, "training uses the blocks of sampling, sampler.block")


def draws(value, key, raw):
    """Returns the draws of noise, where the method draws more than one."""
    if raw["training.method"] in ("random_masking", "coupled"):
        return {"noise.draws": value, "noise.rate": "scope"}
    return "the noise of this method is not drawn, or once for each example"


def batch(value, key, raw):
    """Returns SFT's examples of an update: they ran eight processes on a node."""
    rows, nodes = raw["training.batch_size_lm"], raw.get("experiment.num_node", 1)
    return {"sft.examples": int(value) * int(rows) * 8 * int(nodes)}


def under(section: str, rows: dict) -> dict:
    """Returns rows with the section's name before each key."""
    return {f"{section}.{key}": row for key, row in rows.items()}


def idle(section: str, names: str, reason: str) -> dict:
    """Returns rows of keys that are without effect for one reason."""
    return under(section, dict.fromkeys(names.split(), reason))


ONE_RUN = "one process samples, grades, trains and evaluates"
LAUNCH = "launch/ starts the processes; mesh.* says how devices are used"
FIXED = "the run folder has fixed names: checkpoints/ and export/"
JUDGE = "rewards come from graders; there is no process reward"
THEIRS_TOO = "the rollout's is used, there as here"
AS_TRAINED = (
    "held-out problems are answered once, by the sampler of training; python -m "
    "dllm_jax.eval can have another, and several answers"
)
CHAT = "prompts are rendered by the checkpoint's chat template"
HOST = "the environment's, where launch/ starts the processes"
BOARD = "metrics go to metrics.jsonl and TensorBoard in the run folder"
UPDATES = (
    "NOT THE SAME: they take gradient_accumulation_steps x batch_size_lm x GPUs rows for an "
    "update, as many as there are (5 to 8 in a step of their single-node files); "
    "rl.updates is how many updates a step's rollouts are dealt into"
)

COMMON = {
    "experiment.project": lambda value, key, raw: {"run.folder": f"runs/{value}"},
    "experiment.function": ONE_RUN,
    **idle("experiment", "num_node node_index deepspeed_file", LAUNCH),
    "model.pretrained_model": "=model.path",
    **dict.fromkeys(("model.model_base", "model_base"), pick("data.template", ASKED)),
    **idle("model", "optimized_name optimized_value_name", FIXED),
    "dataset.data_type": unless(["math"], "answers are graded as rl.reward says, math"),
    "execute.num_chunk": "no code is executed",
    **idle("wandb", "entity resume run_id", BOARD),
    **idle("system", "HTTP_PROXY HF_HOME env_name envs_dir base_dir", HOST),
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
    "remasking_strategy": strategy,
    "dynamic_threshold": "=sampler.threshold",
    "start_with_think": unless([False], CHAT),
    "stop_token_list": unless(
        (None, [], *([end] for end in TURN_ENDS)),
        "a turn's end stops already; sampler.stop_ids adds the ids of other tokens",
    ),
    "output_unmasking_history": "every rollout is written with its trace",
    "target": pick("sampler.target", TARGETS),
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
    "num_train_epochs": unless([1], "RL trains once on a rollout"),
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
        "experiment.train_value_every": unless([1], "the value model always trains"),
        "experiment.checkpoints_total_limit": "=run.keep",
        "model.value_base_model": "the value model starts from model.path",
        "model.process_reward_model": unless([None], JUDGE),
        "dataset.train_dataset": dataset("data.train"),
        "dataset.optimization_data": "rollouts do not pass through a file",
        "training.max_gen_length": cut_short,
        "training.eps": "=objective.clip",
        "training.beta": kl_weight,
        "training.use_kl_estimator_k3": pick("objective.kl", {True: "k3", False: "k1"}),
        "training.gam": "=rl.gamma",
        "training.lam": "=rl.lam",
        **under("evaluation", dict.fromkeys(SAMPLING, as_trained)),
        **idle("evaluation", "tensor_parallel_size max_active batch_size", ONE_RUN),
        **idle("evaluation", "max_gen_length alg_temp start_with_think", THEIRS_TOO),
        "evaluation.data_type": "held-out problems have training's grader, rl.reward",
        "evaluation.eval_dataset": dataset("data.heldout"),
        "evaluation.temperature": "=eval.temperature",
        "evaluation.num_response_per_task": unless([1], AS_TRAINED),
        **idle("rollout.reward_model", "reward_chunk_length k_sample", JUDGE),
        **idle("rollout.reward_model", "max_model_len max_generation_token", JUDGE),
        "rollout.reward_model.temperature": JUDGE,
        **idle("training", "gradient_accumulation_steps batch_size_lm", UPDATES),
        "lr_scheduler.scheduler": "restarts at every RL step; ours spans the run",
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
        "training.num_train_epochs": (
            "NOT THE SAME: sft.steps counts updates; set it to num_train_epochs x the lines "
            "of data.train / sft.examples"
        ),
        "training.max_gen_length": "=sampler.max_new",
        "training.post_num": lambda x, *_: {"data.post_num": -1 if x is None else x},
    }
)
EVAL = (
    COMMON
    | under("rollout", SAMPLING)
    | {
        "model": "=model.path",
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
    "eval": THEIRS | {"rl.truncated_wrong": False},
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
    raw = config.flat(tree) if isinstance(tree, dict) else {}
    for key, value in raw.items():
        if found := re.fullmatch(r"\$\{(.+)\}", str(value)):
            if str(raw.get(found[1], "${")).startswith("${"):
                raise ValueError(f"{path}: {key}={value} refers to no value")
            raw[key] = raw[found[1]]
    return raw


def kind_of(raw: dict) -> str:
    """Returns the kind of a file, a key of KINDS, by its sections."""
    parts = {key.split(".")[0] for key in raw}
    return "eval" if "training" not in parts else "rl" if "rollout" in parts else "sft"


def translate(raw: dict) -> tuple[dict, dict]:
    """Returns (our leaves with their values, the reasons of keys that are not only leaves).

    Raises ValueError naming an unknown key with the nearest known one, and a value that
    has no counterpart.
    """
    kind = kind_of(raw)
    every = {key for rows in KINDS.values() for key in rows}
    leaves, unused = dict(START[kind]), {}
    if raw.get("model.value_base_model") is not None:
        leaves["rl.value"] = "own"
    if kind != "eval" and full(raw):  # a mean over each row's targets
        leaves["objective.aggregate"] = "step"
    if raw.get("training.method") == "ar":
        leaves["model.attention"] = "causal"
    for key, value in raw.items():
        if key not in every:
            near = difflib.get_close_matches(key, every, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown key {key!r}; the nearest is {near!r}")
        row = KINDS[kind].get(key, f"it means nothing in a file of kind {kind}")
        found = row(value, key, raw) if callable(row) else row
        if isinstance(found, str):
            ours = found[0] == "="
            found = dict.fromkeys(found[1:].split(), value) if ours else {"": found}
        if reason := found.pop("", ""):
            unused[key] = reason
        leaves |= found
    return leaves, unused


def ported(path: str) -> str:
    """Returns a config file that does what a YAML file of dLLM-RL does.

    Its docstring names each key that has no effect here, or another one, and why.
    """
    try:
        raw = read(path)
        leaves, unused = translate(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}".replace(f"{path}: {path}", path)) from None
    tree, lines = config.default(), []
    known = config.flat(tree.to_dict())
    for leaf, value in leaves.items():
        if value is None:  # theirs for "off", where ours is the default
            continue
        try:
            value = type(known[leaf])(value)  # 1e-6 is a text in YAML
        except (TypeError, ValueError):
            raise ValueError(f"{path}: {value!r} is no value for {leaf}") from None
        if value != known[leaf]:
            tree.update_from_flattened_dict({leaf: value})
            lines.append(f"    c.{leaf} = {value!r}")
    slots = SamplerConfig(**tree.sampler).slots + tree.sampler.block
    if tree.batch.tokens < slots:
        tree.batch.tokens = slots
        lines.append(f"    c.batch.tokens = {slots}  # one trajectory")
    config.freeze(tree)
    notes = []
    # What is NOT THE SAME comes first.
    for reason in sorted(set(unused.values()), key=lambda r: (r[:3] != "NOT", r)):
        names = ", ".join(key for key, why in unused.items() if why == reason)
        notes += [
            reason,
            *textwrap.wrap(names, 84, initial_indent="    ", subsequent_indent="    "),
        ]
    name, notes = pathlib.Path(path).name, "\n".join(notes)
    entry = "eval" if kind_of(raw) == "eval" else "train"
    body = "".join(f"{line}\n" for line in lines)
    return f'''"""{name} of dLLM-RL, translated.

    python -m dllm_jax.{entry} --config=FILE

Its keys without effect here, or with another:

{notes}
"""

from dllm_jax import config


def get_config():
    """Returns the configuration."""
    c = config.default()
{body}    return c'''


def main():
    """Prints the translation of one YAML file."""
    if len(sys.argv) != 2:
        raise ValueError("one argument: a YAML file of dLLM-RL")
    print(ported(sys.argv[1]))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        config.fail(error)
