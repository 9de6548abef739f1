"""What a key of dLLM-RL's becomes, where its value and the rest of its file decide.

The tables in dllm_rl.py name these functions.
"""

import dataclasses
import re
from collections.abc import Callable

from configs.eval import PROMPTS
from dllm_jax.checks import shown
from dllm_jax.data import BOXED
from dllm_jax.data.templates import CHOICE, STDIO, TEMPLATES


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
# Kinds of models: a family of TEMPLATES. Kinds of data: a task of TEMPLATES.
FAMILIES = {
    "sdar": "block",
    "trado": "block",
    "dream": "dream",
    "llada": "llada",
    "mmada": "llada",
    "lladav": "llada",
}
TASKS = {"math": "math", "code": "stdio", "option": "choice"}
# As long as prompts of which task, a key of PROMPTS.
LONGEST = {"math": "math", "code": "stdio", "option": "stdio"}
# Positions of an image: LLaDA-V's has up to 3,800, MMaDA's 1,027. And of prompts with one,
# where nothing says how many words come on top.
IMAGE = {"lladav": 3800, "mmada": 1027}
WITH_IMAGES = {"lladav": 4608, "mmada": 1600}
TILES = 8  # of an image; those differ: one of 1024 x 768 pixels has seven
# What their prompts ask for where an answer is to begin with its reasons.
THINK = "Reason first, inside <think> </think>, and then answer.\n{question}"
REWARDS = {"math": "math", "code": "code", "option": "choice"}
# What is said of keys.
CHAT = "prompts are rendered by the checkpoint's chat template"
AS_TRAINED = (
    "held-out problems are answered with training's; eval.samplers varies no such key"
)
OFF = "evaluation.if_eval is off"


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
    """Returns the row of a key that names a file of data/, if it names one."""

    def make(value, key, raw) -> Row:
        if type(value) is list:
            raise ValueError(f"{key}={shown(value)}: needs one name, as theirs does")
        return Row(leaves={leaf: None if value is None else f"data/{value}.json"})

    return Row(make=make)


def only(*usual, why: str) -> Row:
    """Returns the row of a key of which only the usual values can be had."""
    return Row(make=lambda value, key, raw: Row(why=why, same=value in usual))


def whole(value, key: str) -> int:
    """Returns a whole number; raises ValueError for what only rounding makes one."""
    try:
        number = int(value)
        if not isinstance(value, bool) and number == float(value):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"{key}={shown(value)} is no whole number")


def number(value, key: str) -> float:
    """Returns a number, which YAML may take for a text, as 1e-6; raises ValueError for others."""
    try:
        if not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"{key}={shown(value)} is no number")


def samples(raw: dict) -> bool:
    """Returns whether a file is of a run that samples: RL or evaluation, not SFT."""
    return any(key.startswith("rollout.") for key in raw)


def trains(raw: dict) -> bool:
    """Returns whether a file is of a run that trains: RL or SFT, not evaluation."""
    return any(key.startswith("training.") for key in raw)


def attends_fully(raw: dict) -> bool:
    """Returns whether the model attends to its whole canvas, as far as a file tells."""
    if {"rollout.steps", "training.mask_times_per_sample"} & raw.keys():
        return True
    if FAMILIES.get(base_of(raw), "block") != "block":
        return True
    # These methods of SFT are of such models alone.
    return not samples(raw) and raw.get("training.method") in ("random_masking", "ar")


def base_of(raw: dict):
    """Returns the kind of model that a file is of, None where it names none.

    One of theirs is LLaDA-V's by its name and its checkpoint, and says mmada.
    """
    told = raw.get("model.model_base", raw.get("model_base"))
    if told == "mmada" and named_lladav(raw):
        return "lladav"
    return told if told is None else str(told)


def named_lladav(raw: dict) -> bool:
    """Returns whether a file's project, or its checkpoint, is called LLaDA-V."""
    names = (raw.get("experiment.project"), raw.get("model.pretrained_model"))
    return any("lladav" in re.sub(r"[^a-z]", "", str(x).lower()) for x in names)


def boxed(raw: dict) -> bool:
    """Returns whether a file asks for answers in a box."""
    return raw.get("reward.answer_must_in_box", raw.get("answer_must_in_box", True))


def looks(raw: dict) -> bool:
    """Returns whether a file is of questions about images.

    LLaDA-V has no others. Options are of texts, unless a file of MMaDA says where images are.
    """
    base, kind = base_of(raw), raw.get("dataset.data_type")
    if base == "lladav" or kind == "mmu":
        return True
    keys = ("dataset.image_root", "vq_model_path", "model.vq_model_path")
    named = any(raw.get(key) is not None for key in keys)
    return kind == "option" and base in WITH_IMAGES and named


def model_base(value, key, raw) -> Row:
    """Returns how a model is asked, and what else its kind decides."""
    counterpart(FAMILIES, value, key)
    if not looks(raw):
        return template(value, key, raw)
    base = base_of(raw)
    leaves = {"data.template": turn(raw)}
    if samples(raw) and raw.get("reward.strict_len_check") is None:
        leaves["rl.truncated"] = "graded"  # theirs is strict where told to be alone
    if base in WITH_IMAGES:
        words = whole(
            raw.get("training.max_prompt_len") or 0, "training.max_prompt_len"
        )
        leaves["sampler.max_prompt"] = max(WITH_IMAGES[base], IMAGE[base] + words)
    if base == "lladav":
        leaves |= of_a_tower(raw)
    why = turns_differ(raw)
    if base != value:
        why = "the file is LLaDA-V's by its name; theirs loads MMaDA's scripts, which fail"
    return Row(leaves=leaves, why=why, same=not why)


def template(value, key, raw) -> Row:
    """Returns the prompts of a family, chat tokens and all, as configs/eval.py has them."""
    if not samples(raw):
        return Row(why="`prompt` of data.train is all of a prompt, and taken as it is")
    family = FAMILIES[value]
    if family == "block" and raw.get("rollout.start_with_think"):
        family = "think"
    task = TASKS.get(raw.get("dataset.data_type"), "math")
    leaves = {"data.template": TEMPLATES[family, task], "data.raw": True}
    why = "their prompts lack the line break that ends data.template: their renderer drops it"
    return Row(leaves=leaves, why=why, same=False)


def turn(raw) -> str:
    """Returns what a user says about an image: the checkpoint's chat template does the rest.

    In SFT it is a record's prompt, which asks for a box already.
    """
    if not samples(raw):
        return "{question}"
    others = {"option": CHOICE, "code": STDIO}
    if asked := others.get(raw.get("dataset.data_type")):
        return asked
    if boxed(raw):
        return BOXED
    return THINK if raw.get("dataset.add_think_prompt") else "{question}"


def turns_differ(raw) -> str:
    """Returns how turns about images differ from theirs; "": they do not."""
    if base_of(raw) == "lladav":
        if not samples(raw):
            return "an answer's end is learned, which theirs cut off"
        twice = (
            "their evaluation writes MMaDA's chat tokens into LLaDA-V's questions, too"
        )
        return "" if trains(raw) else twice
    if samples(raw):
        return (
            "the checkpoint's chat template writes the turns; theirs have no line break "
            "behind the user's header, and <|startoftext|> before the assistant's"
        )
    return (
        "their prompts hold the chat's tokens, which the checkpoint's chat template writes "
        "here; where yours hold them, too, set data.raw=True"
    )


def of_a_tower(raw) -> dict:
    """Returns the leaves of LLaDA-V: a step's tiles, its sampler; in SFT it has no pads."""
    leaves = {"sampler.before_stop": True}
    if not samples(raw):
        count = examples_of(raw) if "training.gradient_accumulation_steps" in raw else 0
        leaves["data.post_num"] = 0
    else:
        key = "rollout.num_task_per_step"
        count = whole(raw.get(key) or 0, key)
    return leaves | ({"model.tiles": max(TILES * count, 40)} if count else {})


def images_type(value, key, raw) -> Row:
    """Returns what grades answers about images, and the groups that are learned from."""
    solved = {}
    if looks(raw) and "rollout.num_task_per_step" in raw:
        solved = {"rl.min_solved": 0.05, "rl.max_solved": 0.95}
    if value != "mmu":
        row = data_type(value, key, raw)
        return dataclasses.replace(row, leaves=row.leaves | solved)
    leaves = {"rl.reward": "choice" if boxed(raw) else "short"}
    if not samples(raw):
        return Row(
            leaves=leaves,
            why="it grades held-out answers alone, where data.heldout is set",
        )
    leaves |= solved
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
    if not samples(raw):
        return Row(ours=("sampler.max_prompt",))
    why = (
        "a longer prompt is not asked; theirs samples and grades its answers, and drops "
        "them from training alone"
    )
    return Row(ours=("sampler.max_prompt",), why=why, same=False)


def thinks(value, key, raw) -> Row:
    """Says what becomes of the request to reason first."""
    if value and looks(raw):
        return Row(why="data.template asks for it, in other words", same=False)
    return only(False, None, why=CHAT).make(value, key, raw)


def begins_thinking(value, key, raw) -> Row:
    """Says what becomes of an answer that begins with <think>: its prompt ends so."""
    if FAMILIES.get(base_of(raw)) == "block":
        return Row(why="data.template has it")
    return only(False, None, why=CHAT).make(value, key, raw)


def evaluates(raw: dict) -> bool:
    """Returns whether a run evaluates while it trains."""
    told = raw.get("evaluation.if_eval", True)
    return bool(told) and raw.get("evaluation.eval_dataset") is not None


def heldout(value, key, raw) -> Row:
    """Returns the held-out file, where a run evaluates."""
    if not evaluates(raw):
        return Row(why=OFF)
    return dataset("data.heldout").make(value, key, raw)


def heldout_answers(value, key, raw) -> Row:
    """Returns the answers to each held-out problem, where a run evaluates."""
    return Row(ours=("eval.answers",)) if evaluates(raw) else Row(why=OFF)


def answers_each(value, key, raw) -> Row:
    """Returns an evaluation's answers to each problem; theirs of MMaDA has exceptions."""
    ours, told = ("eval.answers",), raw.get("rollout.remasking_strategy")
    static = "low_confidence_static" in (told if isinstance(told, list) else [told])
    if not (looks(raw) and base_of(raw) == "mmada" and static) or value in (None, 1):
        return Row(ours=ours)
    why = "theirs gives one where the strategy is static"
    return Row(ours=ours, why=why, same=False)


def heldout_type(value, key, raw) -> Row:
    """Says whether training's grader is that of evaluation, too."""
    why = "held-out problems have training's grader, rl.reward"
    return Row(why=why, same=value in (None, raw.get("dataset.data_type")))


def one_rate(raw) -> bool:
    """Returns whether a block has one rate in [0, 1], as in LLaDA-V's SFT by blocks."""
    by_blocks = raw.get("training.method") == "semi-ar"
    return by_blocks and not samples(raw) and base_of(raw) == "lladav"


def method(value, key, raw) -> Row:
    """Returns the noise of a method; with a value model on images it is the trace."""
    if looks(raw) and raw.get("model.value_base_model") is not None:
        why = "with a value model their scripts for images train on traces, whatever it says"
        return Row(leaves={"noise.kind": "trace"}, why=why)
    leaves = {"noise.kind": counterpart(METHODS, value, key)}
    if one_rate(raw):
        leaves |= {"noise.rate": "scope", "noise.lower": 0.0, "noise.upper": 1.0}
    elif value in ("random_masking", "coupled") and attends_fully(raw):
        leaves["noise.rate"] = "scope"
    return Row(leaves=leaves)


def bound(leaf: str) -> Row:
    """Returns the row of a bound of masking rates, which LLaDA-V's blocks do not have."""

    def make(value, key, raw) -> Row:
        if one_rate(raw):
            return Row(why="a block of LLaDA-V's SFT has one rate, from 0 to 1")
        return Row(ours=(leaf,))

    return Row(make=make)


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
    if value and number(value, key):
        leaves |= {f"{name}.decay_norms": True for name in names}
    return Row(leaves=leaves)


def clip_norm(value, key, raw) -> Row:
    """Returns the norm that gradients are clipped at; theirs is DeepSpeed's own, 1.0."""
    ours = "policy_optim.max_grad_norm", "value_optim.max_grad_norm"
    if value is None or number(value, key) == 1:
        return Row(ours=ours)
    why = "their DeepSpeed files clip at 1.0, whatever it says"
    return Row(ours=ours, why=why, same=False)


def strategy_of(raw: dict):
    """Returns a file's strategy of rollouts, the first of several."""
    told = raw.get("rollout.remasking_strategy")
    return told[0] if isinstance(told, list) and told else told


def strategy(value, key, raw) -> Row:
    """Returns the strategy; ranks and thresholds, but LLaDA's, are of what is drawn from."""
    value = strategy_of(raw)
    leaves = {"sampler.strategy": counterpart(STRATEGIES, value, key)}
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    bent = any(raw.get(f"rollout.{k}") not in (None, x) for k, x in plain.items())
    if FAMILIES.get(base_of(raw)) == "llada":
        leaves["sampler.untempered_ranks"] = True
    elif bent and "dynamic" in value:
        leaves["sampler.tempered_threshold"] = True
    return Row(leaves=leaves)


def target(value, key, raw) -> Row:
    """Returns the score of positions; the sign of LLaDA's entropy is turned round there."""
    leaves = {"sampler.target": counterpart(TARGETS, value, key)}
    if value != "neg_entropy" or FAMILIES.get(base_of(raw)) != "llada":
        return Row(leaves=leaves)
    why = "theirs turns its sign round, and prefers what is least certain"
    return Row(leaves=leaves, why=why, same=False)


def rank_temperature(value, key, raw) -> Row:
    """Returns the temperature of ranks, which their dynamic strategy has not."""
    if value and strategy_of(raw) != "low_confidence_static":
        return Row(why="theirs reads it where the strategy is static")
    return Row(ours=("sampler.rank_temperature",))


def top_p(value, key, raw) -> Row:
    """Returns the row of top_p, which their Dream applies before top_k."""
    both = value not in (None, 1) and raw.get("rollout.top_k")
    first = {"sampler.top_p_first": True} if both and base_of(raw) == "dream" else {}
    return Row(ours=("sampler.top_p",), leaves=first)


def pad_penalty(value, key, raw) -> Row:
    """Returns the penalty; theirs is off where it is empty."""
    leaves = {"sampler.pad_penalty": value or 1.0}
    if value in (None, 0, 1) or raw.get("rollout.target") != "neg_entropy":
        return Row(leaves=leaves)
    why = "theirs divides scores by it, which raises those below 0; ours are lowered"
    return Row(leaves=leaves, why=why, same=False)


def horizon(value, key, raw) -> Row:
    """Returns the row of further_horizon, which only their prefix cache has."""
    if not raw.get("rollout.use_cache"):
        return Row(why="without a cache the whole canvas is re-run")
    canvas = raw["rollout.max_gen_length"]
    return Row(leaves={"sampler.horizon": canvas if value is None else value})


def steps(value, key, raw) -> Row:
    """Returns the steps of a block: theirs are those of the whole canvas.

    Of more steps than it has tokens the first ones unmask one, and the others nothing.
    """
    keys = ("rollout.max_gen_length", "rollout.block_size")
    new, block = (whole(raw[key], key) for key in keys)
    each, rest = divmod(min(whole(value, key), new) * block, new)
    if rest or not each:
        raise ValueError(
            f"{key}={value} cannot be shared out among the blocks of rollout.block_size="
            f"{block} in rollout.max_gen_length={new}; set it to a multiple of their number"
        )
    leaves = {"sampler.steps_per_block": each}
    few = each < block and strategy_of(raw) == "low_confidence_dynamic"
    if few and base_of(raw) != "lladav":
        why = (
            "where no score passes theirs unmasks one token, and may run out of steps; here "
            "every step unmasks its share of the block at least"
        )
        return Row(leaves=leaves, why=why, same=False)
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


def data_type(value, key, raw) -> Row:
    """Returns the grader; programs' rewards are shares of tests, and none is penalised."""
    leaves, why = {"rl.reward": counterpart(REWARDS, value, key)}, []
    if value == "code":
        leaves["rl.truncated"] = "graded"
        if "training.method" in raw:
            leaves["rl.filter"] = "varied"
        why.append(
            "prompts ask for a program that reads and prints; where records ask for "
            "functions, data.template is TEMPLATES[..., 'function'] of "
            "dllm_jax/data/templates.py"
        )
    if not trains(raw) and not looks(raw):
        leaves["sampler.max_prompt"] = PROMPTS[LONGEST[value]]
        why.append(
            "prompts above sampler.max_prompt are skipped, and earn nothing; theirs has no "
            "limit"
        )
    return Row(leaves=leaves, why=". ".join(why), same=not why)


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
        leaves["reward.tail"] = 0  # a chunk's own tokens bear its verdict
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
    answer = "rollout.reward_model.max_generation_token"
    room = whole(value, key) - whole(raw[answer], answer)
    if room < 1:
        raise ValueError(f"{key}={value} leaves no room beside max_generation_token")
    return Row(leaves={"reward.judge.prompt": room})


def kl_weight(value, key, raw) -> Row:
    """Returns beta, and that it weighs another sum: with full attention and no values."""
    valued = raw.get("model.value_base_model") is not None
    if attends_fully(raw) and value and not valued:
        why = "their KL is not divided by a step's size"
        return Row(ours=("objective.beta",), why=why, same=False)
    return Row(ours=("objective.beta",))


def cut_short(value, key, raw) -> Row:
    """Says whether training sees less of an answer than was sampled."""
    new = raw.get("rollout.max_token", raw.get("rollout.max_gen_length", 0))
    why = "sampler.max_new bounds sampling and training alike"
    return Row(why=why, same=value is None or value >= new)


def train_block(value, key, raw) -> Row:
    """Returns the training block of SFT; in RL it is the sampler's, or an enlarged one."""
    if raw.get("training.method") == "ar":
        return Row(why="each token is predicted from those before it, as there")
    if "rollout.block_size" not in raw:
        return Row(ours=("sampler.block", "sampler.steps_per_block"))
    sampled = raw["rollout.block_size"]
    if value == sampled or attends_fully(raw):
        why = "training uses the blocks of sampling, sampler.block"
        return Row(why=why, same=value == sampled)
    parts, rest = divmod(whole(value, key), whole(sampled, "rollout.block_size"))
    if METHODS.get(raw.get("training.method")) == "trace" and (rest or parts < 1):
        raise ValueError(
            f"{key}={value}: traces of rollout.block_size={sampled} are trained in blocks of "
            "a multiple of it"
        )
    return Row(ours=("noise.block",))


def draws(value, key, raw) -> Row:
    """Returns the draws of noise, where the method draws more than one."""
    if looks(raw) and raw.get("model.value_base_model") is not None:
        return Row(why="the noise of a trace is not drawn")
    if raw["training.method"] in ("random_masking", "coupled"):
        return Row(ours=("noise.draws",))
    return Row(why="the noise of this method is not drawn, or once for each example")


def rows_of(raw) -> tuple[int, bool]:
    """Returns (the rows that theirs has for an example, whether a short answer has fewer)."""

    def told(name: str, usual: int | None = None) -> int:
        key = f"training.{name}"
        value = raw.get(key) if usual else raw[key]
        return whole(usual if value is None else value, key)

    method, full = raw["training.method"], attends_fully(raw)
    if method in ("random_masking", "coupled"):
        return told("mask_times_per_sample", 1) * (1 + (method == "coupled")), False
    if method == "semi-ar" and full:
        count = -(-told("max_gen_length") // told("block_size"))
    elif method in ("trace", "TraceRL"):
        longest = told("max_gen_length") if full else told("block_size")
        count = -(-longest // told("shrink", 1))
    else:
        count = 1
    return count, count > 1


def rows_of_update(raw) -> int:
    """Returns the rows of an update of SFT: they ran eight processes on a node."""
    keys = ("gradient_accumulation_steps", "batch_size_lm")
    many, rows = (whole(raw[f"training.{key}"], f"training.{key}") for key in keys)
    nodes = whole(raw.get("experiment.num_node", 1), "experiment.num_node")
    return many * rows * 8 * nodes


def examples_of(raw) -> int:
    """Returns SFT's examples of an update, at least one."""
    return max(round(rows_of_update(raw) / rows_of(raw)[0]), 1)


def examples(value, key, raw) -> Row:
    """Returns SFT's examples of an update, of which theirs counts rows."""
    (each, fewer), count = rows_of(raw), examples_of(raw)
    leaves = {"sft.examples": count}
    if fewer:
        why = (
            f"their update has {rows_of_update(raw)} rows, of which an answer of "
            f"full length has {each} and a shorter one fewer: sft.examples={count} is for "
            "full ones"
        )
        return Row(leaves=leaves, why=why, same=False)
    if each * count == rows_of_update(raw):
        return Row(leaves=leaves)
    why = (
        f"their update has {rows_of_update(raw)} rows, {each} of an example, which is no "
        "whole number of examples"
    )
    return Row(leaves=leaves, why=why, same=False)


def pads_learned(value, key, raw) -> Row:
    """Returns SFT's pads after an answer."""
    if base_of(raw) == "lladav":
        return Row(why="LLaDA-V's SFT has no pads")
    if value is not None:
        return Row(ours=("data.post_num",))
    why = (
        "theirs learns all pads, up to the longest answer of the file; ours those up to the "
        "end of an answer's block"
    )
    return Row(leaves={"data.post_num": -1}, why=why, same=False)


def schedule(value, key, raw) -> Row:
    """Returns SFT's schedule; their polynomial is a line that ends at a rate of 1e-7."""
    leaves = {"policy_optim.schedule": counterpart(SCHEDULES, value, key)}
    named = "optimizer.params.learning_rate"
    # A rate that is none is refused by its own key.
    if value == "polynomial" and (rate := number(raw[named], named)) > 0:
        leaves["policy_optim.final"] = float(f"{1e-7 / rate:.6g}")
    return Row(leaves=leaves)


def warmup(value, key, raw) -> Row:
    """Returns the updates of the warm-up, which their plain constant does not have."""
    if raw.get("lr_scheduler.scheduler") == "constant":
        return Row(leaves={"policy_optim.warmup": 0}, why="their constant has none")
    if value and samples(raw):
        why = "theirs warms up anew in every RL step, ours once"
        ours = ("policy_optim.warmup", "value_optim.warmup")
        return Row(ours=ours, why=why, same=False)
    return Row(ours=("policy_optim.warmup",))


def temperature(value, key, raw) -> Row:
    """Returns the temperature of rollouts, and of an evaluation that names no other."""
    if raw.get("evaluation.temperature") is None:
        return Row(ours=("sampler.temperature", "eval.temperature"))
    return Row(ours=("sampler.temperature",))


def heldout_temperature(value, key, raw) -> Row:
    """Returns the temperature of evaluation; where it is empty it is the rollouts'."""
    usual = raw.get("rollout.temperature")
    return Row(leaves={"eval.temperature": usual if value is None else value})


def value_base(value, key, raw) -> Row:
    """Returns what the value network starts from, where it is not the policy's."""
    if value in (None, raw.get("model.pretrained_model")):
        return Row(why="the value model starts from model.path")
    return Row(ours=("rl.value_path",))
