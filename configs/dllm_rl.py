"""dLLM-RL's keys: which of them is which of ours, and which has no effect here.

A file is one of three kinds, told by its sections: RL has rollout and training, SFT has
training alone, evaluation has rollout alone. Each kind has a table of the keys that its
released files have, and every key is a `Row`: what it becomes.
"""

import dataclasses
import re
from collections.abc import Callable

from dllm_jax.data import BOXED, MATH, TURN_ENDS


@dataclasses.dataclass(frozen=True)
class Row:
    """What one of their keys becomes.

    ours: our leaves that take its value as it is.
    leaves: our leaves with the values that they get instead.
    why: what is to be said of the key: why it has no effect here, or another one.
    same: False where what runs is not the same; that is said before `why`.
    make: the Row of a value, where it depends on it: a function (value, key, raw), raw being
        the leaves of the whole file. Raises ValueError for a value without a counterpart.
    """

    ours: tuple[str, ...] = ()
    leaves: dict = dataclasses.field(default_factory=dict)
    why: str = ""
    same: bool = True
    make: Callable[..., "Row"] | None = None


# ---- Rows that depend on the value, and on the rest of the file -------------------------

STRATEGIES = {
    "low_confidence_dynamic": "dynamic",
    "low_confidence_static": "static",
    "entropy_bounded": "entropy_bounded",
    "sequential": "sequential",
}
TARGETS = {
    "confidence": "confidence",
    "margin_confidence": "margin",
    "neg_entropy": "neg_entropy",
    "random": "random",
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
TEMPLATES = {
    "sdar": MATH,
    "trado": MATH,
    "dream": BOXED,
    "llada": BOXED,
    "mmada": BOXED,
    "lladav": BOXED,
}
# Positions of prompts with an image: LLaDA-V's has up to 3,800, MMaDA's 1,027, and words come
# on top. And tiles of an image, which differ: those of 1024 x 768 pixels are seven.
WITH_IMAGES = {"lladav": 4608, "mmada": 1600}
TILES = 8
# What their prompts ask for where an answer is to begin with its reasons.
THINK = "Reason first, inside <think> </think>, and then answer.\n{question}"

CODE = (
    "{question}\nPut the whole program into one ```python block; it reads with input() "
    "and writes with print()."
)
REWARDS = {"math": "math", "code": "code", "option": "choice"}


def counterpart(table: dict, value, key: str):
    """Returns the table's entry; raises ValueError with the known values."""
    if value not in table:
        known = ", ".join(map(str, table))
        raise ValueError(f"{key}={value!r}: choose from {known}")
    return table[value]


def pick(leaf: str, table: dict) -> Row:
    """Returns the row of a key whose values a table translates."""
    return Row(
        make=lambda value, key, raw: Row(leaves={leaf: counterpart(table, value, key)})
    )


def dataset(leaf: str) -> Row:
    """Returns the row of a key that names a file of data/."""
    return Row(make=lambda value, key, raw: Row(leaves={leaf: f"data/{value}.json"}))


def only(*usual, why: str) -> Row:
    """Returns the row of a key of which only the usual values can be had."""
    return Row(make=lambda value, key, raw: Row(why=why, same=value in usual))


def attends_fully(raw: dict) -> bool:
    """Returns whether the model attends to its whole canvas, as far as a file tells."""
    return bool({"rollout.steps", "training.mask_times_per_sample"} & raw.keys())


def base_of(raw: dict):
    """Returns the kind of model that a file is of, None where it names none.

    One of theirs is LLaDA-V's by its name and its checkpoint, and says mmada.
    """
    told = raw.get("model.model_base", raw.get("model_base"))
    return "lladav" if told == "mmada" and named_lladav(raw) else told


def named_lladav(raw: dict) -> bool:
    """Returns whether a file's project, or its checkpoint, is called LLaDA-V."""
    names = (raw.get("experiment.project"), raw.get("model.pretrained_model"))
    return any("lladav" in re.sub(r"[^a-z]", "", str(x).lower()) for x in names)


def boxed(raw: dict) -> bool:
    """Returns whether a file asks for answers in a box."""
    return raw.get("reward.answer_must_in_box", raw.get("answer_must_in_box", True))


def looks(raw: dict) -> bool:
    """Returns whether a file is of questions about images."""
    return raw.get("dataset.data_type") == "mmu"


def model_base(value, key, raw) -> Row:
    """Returns how a model is asked, and what else its kind decides."""
    leaves, base = dict(template(value, key, raw).leaves), base_of(raw)
    if looks(raw) and not boxed(raw):
        thinks = raw.get("dataset.add_think_prompt")
        leaves["data.template"] = THINK if thinks else "{question}"
    if base == "lladav" or looks(raw) and base in WITH_IMAGES:
        leaves["sampler.max_prompt"] = WITH_IMAGES[base]
    if base == "lladav":
        leaves["sampler.before_stop"] = True
        if tasks := raw.get("rollout.num_task_per_step"):
            leaves["model.tiles"] = max(TILES * int(tasks), 40)
    if base == value:
        return Row(leaves=leaves)
    why = "the file is LLaDA-V's by its name; theirs loads MMaDA's scripts, which fail"
    return Row(leaves=leaves, why=why, same=False)


def images_type(value, key, raw) -> Row:
    """Returns what grades answers about images, and the groups that are learned from."""
    if value != "mmu":
        return data_type(value, key, raw)
    leaves = {"rl.reward": "choice" if boxed(raw) else "short"}
    if not any(key.startswith("rollout.") for key in raw):
        return Row(
            leaves=leaves,
            why="it grades held-out answers alone, where data.heldout is set",
        )
    if "rollout.num_task_per_step" in raw:
        leaves |= {"rl.min_solved": 0.05, "rl.max_solved": 0.95}
    why = (
        "answers are letters of options, or short where no box is asked for; theirs are "
        "compared as mathematics (docs/rewards.md)"
    )
    return Row(leaves=leaves, why=why, same=False)


def of_lladav(usual: Row, why: str) -> Row:
    """Returns the row of a key that LLaDA-V's scripts do not read: `why` is said of them."""

    def make(value, key, raw):
        if base_of(raw) == "lladav":
            return Row(why=why)
        return usual.make(value, key, raw) if usual.make else usual

    return Row(make=make)


def of_codes(value, key, raw) -> Row:
    """Returns the row of a key of MMaDA's image tokenizer."""
    if value is None or base_of(raw) == "lladav":
        return Row(why="LLaDA-V's images are features, not codes")
    leaf = "model.vq" if key.endswith("vq_model_path") else "model.image_size"
    return Row(ours=(leaf,))


def of_words(value, key, raw) -> Row:
    """Returns the longest prompt; beside an image it would bound nothing but words."""
    if looks(raw):
        return Row(why="it bounds words; sampler.max_prompt all, an image with them")
    return Row(ours=("sampler.max_prompt",))


def thinks(value, key, raw) -> Row:
    """Says what becomes of the request to reason first."""
    if value and looks(raw):
        return Row(why="data.template asks for it, in other words", same=False)
    return only(False, None, why=CHAT).make(value, key, raw)


def heldout(value, key, raw) -> Row:
    """Returns the held-out file, where a run evaluates."""
    if not raw.get("evaluation.if_eval", True):
        return Row(why="evaluation.if_eval is off")
    return dataset("data.heldout").make(value, key, raw)


def method(value, key, raw) -> Row:
    """Returns the noise of a method; with a value model on images it is the trace."""
    if looks(raw) and raw.get("model.value_base_model") is not None:
        why = "with a value model their scripts for images train on traces, whatever it says"
        return Row(leaves={"noise.kind": "trace"}, why=why)
    return pick("noise.kind", METHODS).make(value, key, raw)


def project(value, key, raw) -> Row:
    """Returns the row of the project's name, which names the run's folder."""
    return Row(leaves={"run.folder": f"runs/{value}"})


def optimizer(value, key, raw) -> Row:
    """Returns a row without effect: there is only one."""
    counterpart({"adamw": "adamw"}, value, key)
    return Row()


def weight_decay(value, key, raw) -> Row:
    """Returns the decay of both optimizers: theirs shrinks norms too."""
    names = [f"{name}_optim" for name in ("policy", "value")]
    leaves = {f"{name}.weight_decay": value for name in names}
    if value and float(value):
        leaves |= {f"{name}.decay_norms": True for name in names}
    return Row(leaves=leaves)


def strategy(value, key, raw) -> Row:
    """Returns the strategy; thresholds, but LLaDA's, are of what is drawn from."""
    why = ""
    if isinstance(value, list) and value:
        value, *others = value
        text = ", ".join(map(str, others))
        why = (
            f"one evaluation has one strategy; not asked here: {text}" if others else ""
        )
    leaves = {"sampler.strategy": counterpart(STRATEGIES, value, key)}
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    bent = any(raw.get(f"rollout.{k}") not in (None, x) for k, x in plain.items())
    theirs = ("llada", "mmada", "lladav")
    if bent and base_of(raw) not in theirs and "dynamic" in value:
        leaves["sampler.tempered_threshold"] = True
    return Row(leaves=leaves, why=why, same=not why)


def pad_penalty(value, key, raw) -> Row:
    """Returns the penalty; theirs is off where it is empty."""
    return Row(leaves={"sampler.pad_penalty": value or 1.0})


def horizon(value, key, raw) -> Row:
    """Returns the row of further_horizon, which only their prefix cache has."""
    if not raw.get("rollout.use_cache"):
        return Row(why="without a cache the whole canvas is re-run")
    canvas = raw["rollout.max_gen_length"]
    return Row(leaves={"sampler.horizon": canvas if value is None else value})


def steps(value, key, raw) -> Row:
    """Returns the steps of a block: theirs are those of the whole canvas."""
    new, block = int(raw["rollout.max_gen_length"]), int(raw["rollout.block_size"])
    each, rest = divmod(int(value) * block, new)
    if rest or not each:
        raise ValueError(
            f"{key}={value} cannot be shared out among the blocks of rollout.block_size="
            f"{block} in rollout.max_gen_length={new}; set it to a multiple of their number"
        )
    leaves = {"sampler.steps_per_block": each}
    if base_of(raw) != "dream":
        return Row(leaves=leaves)
    why = (
        "their Dream unmasks a block's first token alone and shares the others out by a "
        "time grid; here every step takes its share of the block"
    )
    return Row(leaves=leaves, why=why, same=False)


def as_trained(value, key, raw) -> Row:
    """Compares a key of evaluation with the rollout's; a list is several evaluations."""
    usual = raw.get(key.replace("evaluation.", "rollout."))
    return Row(why=AS_TRAINED, same=value in (None, usual, [usual]))


def strict_length(value, key, raw) -> Row:
    """Returns what becomes of an answer that was cut at its limit."""
    return Row(leaves={"rl.truncated": "wrong" if value else "graded"})


def template(value, key, raw) -> Row:
    """Returns the template of a family's prompts, or that of programs."""
    chosen = counterpart(TEMPLATES, value, key)
    code = raw.get("dataset.data_type") == "code"
    return Row(leaves={"data.template": CODE if code else chosen})


def data_type(value, key, raw) -> Row:
    """Returns the grader; programs' rewards are shares of tests, and none is penalised."""
    leaves = {"rl.reward": counterpart(REWARDS, value, key)}
    if value != "code":
        return Row(leaves=leaves)
    leaves["rl.truncated"] = "graded"
    if "training.method" in raw:
        leaves["rl.filter"] = "varied"
    why = (
        "prompts ask for a program that reads and prints; where records ask for functions, "
        "set data.template"
    )
    return Row(leaves=leaves, why=why, same=False)


def judge(value, key, raw) -> Row:
    """Returns the judge of chunks, whose verdicts alone are learned from, as there."""
    if value is None:
        return Row(why="there is no judge: answers have their outcome alone")
    leaves = {
        "reward.judge.at": value,
        "reward.split": "tokens",
        "reward.tail": raw["rollout.block_size"],
        "rl.outcome": 0.0,
    }
    if looks(raw):
        leaves |= {"reward.judge.at": "http://localhost:8000/v1"}
        leaves |= {"reward.judge.model": value, "reward.judge.tokens": 10_000}
        why = (
            "the judge is served, reward.judge.at is its URL; it is shown the image, and "
            "asked the same in other words"
        )
        return Row(leaves=leaves, why=why, same=False)
    why = (
        "the engine samples the judge beside the policy, in one process; where it is "
        "served, reward.judge.at is its URL. It is asked the same in other words"
    )
    return Row(leaves=leaves, why=why, same=False)


def judged(leaf: str) -> Row:
    """Returns the row of a key that says how the judge is asked."""

    def make(value, key, raw) -> Row:
        if raw.get("model.process_reward_model") is None:
            return Row(why="there is no judge")
        return Row(ours=(leaf,))

    return Row(make=make)


def judge_prompt(value, key, raw) -> Row:
    """Returns the longest question to a judge: what its longest answer leaves of all."""
    if raw.get("model.process_reward_model") is None:
        return Row(why="there is no judge")
    room = int(value) - int(raw["rollout.reward_model.max_generation_token"])
    if room < 1:
        raise ValueError(f"{key}={value} leaves no room beside max_generation_token")
    return Row(leaves={"reward.judge.prompt": room})


def kl_weight(value, key, raw) -> Row:
    """Returns beta, and where attention is full that it weighs another sum."""
    if attends_fully(raw) and value:
        why = "their KL is not divided by a step's size"
        return Row(ours=("objective.beta",), why=why, same=False)
    return Row(ours=("objective.beta",))


def cut_short(value, key, raw) -> Row:
    """Says whether training sees less of an answer than was sampled."""
    new = raw.get("rollout.max_token", raw.get("rollout.max_gen_length", 0))
    why = "sampler.max_new bounds sampling and training alike"
    return Row(why=why, same=value is None or value >= new)


def train_block(value, key, raw) -> Row:
    """Returns the training block of SFT; in RL it is the sampler's."""
    if "rollout.block_size" not in raw:
        return Row(ours=("sampler.block", "sampler.steps_per_block"))
    why = "training uses the blocks of sampling, sampler.block"
    return Row(why=why, same=value == raw["rollout.block_size"])


def draws(value, key, raw) -> Row:
    """Returns the draws of noise, where the method draws more than one."""
    if looks(raw) and raw.get("model.value_base_model") is not None:
        return Row(why="the noise of a trace is not drawn")
    if raw["training.method"] in ("random_masking", "coupled"):
        return Row(leaves={"noise.draws": value, "noise.rate": "scope"})
    return Row(why="the noise of this method is not drawn, or once for each example")


def examples(value, key, raw) -> Row:
    """Returns SFT's examples of an update: they ran eight processes on a node."""
    rows, nodes = raw["training.batch_size_lm"], raw.get("experiment.num_node", 1)
    return Row(leaves={"sft.examples": int(value) * int(rows) * 8 * int(nodes)})


def pads_learned(value, key, raw) -> Row:
    """Returns SFT's pads after an answer; theirs are a block's rest where it is empty."""
    return Row(leaves={"data.post_num": -1 if value is None else value})


# ---- The tables --------------------------------------------------------------------------

AS_TRAINED = (
    "held-out problems are answered once, by the sampler of training; python -m "
    "dllm_jax.eval can have another, and several answers"
)
ONE_RUN = Row(why="one process samples, grades, trains and evaluates")
LAUNCH = Row(why="launch/ starts the processes; mesh.* says how devices are used")
FIXED = Row(why="the run folder has fixed names: checkpoints/ and export/")
THEIRS_TOO = Row(why="the rollout's is used, there as here")
BOX = Row(why="data.template asks for it")
NO_CACHE = "LLaDA-V's rollouts have no cache; sampler.cache can"
HOOKS = Row(why="their rollouts do not change with it")
CHAT = "prompts are rendered by the checkpoint's chat template"
HOST = Row(why="the environment's, where launch/ starts the processes")
BOARD = Row(why="metrics go to metrics.jsonl and TensorBoard in the run folder")
UPDATES = Row(
    why="they take gradient_accumulation_steps x batch_size_lm x GPUs rows for an update, as "
    "many as there are (5 to 8 in a step of their single-node files); rl.updates is how many "
    "updates a step's rollouts are dealt into",
    same=False,
)
EPOCHS = Row(
    why="sft.steps counts updates; set it to num_train_epochs x the lines of data.train / "
    "sft.examples",
    same=False,
)


def under(section: str, rows: dict) -> dict:
    """Returns rows with the section's name before each key."""
    return {f"{section}.{key}": row for key, row in rows.items()}


def all_of(section: str, row: Row, *keys: str) -> dict:
    """Returns one row for several keys of a section."""
    return under(section, dict.fromkeys(keys, row))


COMMON = {
    "experiment.project": Row(make=project),
    "experiment.function": ONE_RUN,
    **all_of("experiment", LAUNCH, "num_node", "node_index", "deepspeed_file"),
    "model.pretrained_model": Row(ours=("model.path",)),
    "model.model_base": Row(make=model_base),
    "model_base": Row(make=model_base),
    **all_of("model", FIXED, "optimized_name", "optimized_value_name"),
    "dataset.data_type": Row(make=images_type),
    "dataset.image_root": Row(ours=("data.image_root",)),
    "dataset.add_think_prompt": Row(make=thinks),
    **all_of("reward", BOX, "answer_must_in_box"),
    "answer_must_in_box": BOX,
    "reward.strict_len_check": Row(make=strict_length),
    **all_of("model", Row(make=of_codes), "vq_model_path", "image_resolution"),
    **dict.fromkeys(("vq_model_path", "image_resolution"), Row(make=of_codes)),
    "model.process_reward_chunk_size": judged("reward.chunk"),
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
    "max_active": Row(ours=("sampler.rows",)),
    "batch_size": of_lladav(
        Row(ours=("sampler.rows",)), "sampler.rows prompts are sampled together"
    ),
    "num_task_per_step": Row(ours=("rl.prompts",)),
    "num_response_per_task": Row(ours=("rl.group",)),
    "temperature": Row(ours=("sampler.temperature",)),
    "max_token": Row(ours=("sampler.max_new",)),
    "max_gen_length": Row(ours=("sampler.max_new",)),
    "block_size": Row(ours=("sampler.block",)),
    "denoising_steps_per_block": Row(ours=("sampler.steps_per_block",)),
    "steps": Row(make=steps),
    "top_p": Row(ours=("sampler.top_p",)),
    "top_k": Row(ours=("sampler.top_k",)),
    "remasking_strategy": Row(make=strategy),
    "dynamic_threshold": Row(ours=("sampler.threshold",)),
    "start_with_think": only(False, why=CHAT),
    "stop_token_list": only(
        *(None, [], *([end] for end in TURN_ENDS)),
        why="a turn's end stops already; sampler.stop_ids adds the ids of other tokens",
    ),
    "output_unmasking_history": Row(why="every rollout is written with its trace"),
    "target": pick("sampler.target", TARGETS),
    "alg_temp": Row(ours=("sampler.rank_temperature",)),
    "pad_target_penalty": Row(make=pad_penalty),
    "further_horizon": of_lladav(Row(make=horizon), NO_CACHE),
    "use_cache": of_lladav(
        pick("sampler.cache", {True: "prefix", False: "none"}), NO_CACHE
    ),
}
TRAINING = {
    "gradient_checkpointing_enable": pick("model.remat", {True: "auto", False: "none"}),
    "mixed_precision": pick("model.dtype", DTYPES),
    "enable_tf32": Row(why="XLA chooses how matmuls of model.dtype are computed"),
    "seed": Row(ours=("seed", "data.seed")),
    "num_train_epochs": only(1, why="RL trains once on a rollout"),
    "max_grad_norm": Row(
        ours=("policy_optim.max_grad_norm", "value_optim.max_grad_norm")
    ),
    "method": Row(make=method),
    "block_size": Row(make=train_block),
    "shrink": Row(ours=("noise.shrink",)),
    "post_num": only(0, why="an answer ends with its stop token; pads are not trained"),
    "max_prompt_len": Row(make=of_words),
    "lower_p": Row(ours=("noise.lower",)),
    "upper_p": Row(ours=("noise.upper",)),
    "mask_times_per_sample": Row(make=draws),
}
OPTIMIZER = {
    "optimizer.name": Row(make=optimizer),
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
            "weight_decay": Row(make=weight_decay),
        },
    ),
    **under(
        "lr_scheduler.params",
        {
            "learning_rate": Row(why="the optimizer's is meant"),
            "warmup_steps": Row(ours=("policy_optim.warmup",)),
            "min_lr_scale": Row(why="theirs ignores it; policy_optim.final is ours"),
        },
    ),
}
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
        "experiment.train_value_every": only(1, why="the value model always trains"),
        "experiment.checkpoints_total_limit": Row(ours=("run.keep",)),
        "model.value_base_model": Row(why="the value model starts from model.path"),
        "model.process_reward_model": Row(make=judge),
        "dataset.train_dataset": dataset("data.train"),
        "dataset.optimization_data": Row(why="rollouts do not pass through a file"),
        "training.max_gen_length": Row(make=cut_short),
        "training.eps": Row(ours=("objective.clip",)),
        "training.beta": Row(make=kl_weight),
        "training.use_kl_estimator_k3": pick("objective.kl", {True: "k3", False: "k1"}),
        "training.gam": Row(ours=("rl.gamma",)),
        "training.lam": Row(ours=("rl.lam",)),
        **all_of("training", UPDATES, "gradient_accumulation_steps", "batch_size_lm"),
        "lr_scheduler.scheduler": Row(
            why="restarts at every RL step; ours spans the run"
        ),
    }
    | all_of("evaluation", Row(make=as_trained), *SAMPLING)
    | all_of("evaluation", ONE_RUN, "tensor_parallel_size", "max_active", "batch_size")
    | all_of("evaluation", THEIRS_TOO, "max_gen_length", "alg_temp", "start_with_think")
    | {
        "evaluation.data_type": Row(
            why="held-out problems have training's grader, rl.reward"
        ),
        "evaluation.eval_dataset": Row(make=heldout),
        "evaluation.if_eval": Row(why="without data.heldout nothing is evaluated"),
        "evaluation.temperature": Row(ours=("eval.temperature",)),
        "evaluation.num_response_per_task": only(1, why=AS_TRAINED),
    }
    | under(
        "rollout.reward_model",
        {
            "reward_chunk_length": judged("reward.chunk"),
            "k_sample": judged("reward.judge.votes"),
            "max_model_len": Row(make=judge_prompt),
            "max_generation_token": judged("reward.judge.tokens"),
            "temperature": judged("reward.judge.temperature"),
        },
    )
)
SFT = (
    COMMON
    | OPTIMIZER
    | under("training", TRAINING)
    | {
        "dataset.optimization_data": dataset("data.train"),
        "lr_scheduler.scheduler": pick("policy_optim.schedule", SCHEDULES),
        # The three together say sft.examples.
        "training.gradient_accumulation_steps": Row(make=examples),
        "training.batch_size_lm": Row(),
        "experiment.num_node": Row(),
        "training.num_train_epochs": EPOCHS,
        "training.max_gen_length": Row(ours=("sampler.max_new",)),
        "training.post_num": Row(make=pads_learned),
    }
)
EVAL = (
    COMMON
    | under("rollout", SAMPLING)
    | {
        "model": Row(ours=("model.path",)),
        "dataset.eval_dataset": dataset("data.heldout"),
        "rollout.temperature": Row(ours=("sampler.temperature", "eval.temperature")),
        "rollout.num_response_per_task": Row(ours=("eval.answers",)),
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
