"""A run's configuration, the floors' in one tree; and what dLLM-RL's YAML is in it.

A config file under `configs/` starts from `default()`, sets what differs and returns an
ml_collections ConfigDict, so that any leaf can be overridden on the command line;
`freeze` turns it into the static tree that the program reads.

    python -m dllm_jax.config FILE.yaml > configs/mine.py

prints the config file that does what a YAML file of dLLM-RL does: configs/from_yaml.py.
"""

import dataclasses
import difflib
import functools
import json
import numbers
import signal

import ml_collections

from dllm_jax import checks, compatible, compiler, pallas_kernels, pictures, sharding
from dllm_jax.data import DataConfig, stop_ids, tokenizer
from dllm_jax.models import families, hf, repository, selfcheck, special
from dllm_jax.models.config import Lora, ModelConfig
from dllm_jax.models.transformer import REMAT
from dllm_jax.models.vision import codes
from dllm_jax.pallas_kernels import choice
from dllm_jax.rl import layout, noise, selection
from dllm_jax.rl.config import (
    BatchConfig,
    NoiseConfig,
    ObjectiveConfig,
    OptimConfig,
    RewardConfig,
    RLConfig,
)
from dllm_jax.sampling import policy
from dllm_jax.sampling.config import SamplerConfig, variants
from dllm_jax.sampling.placement import ROLLOUTS
from dllm_jax.sampling.strategy import STRATEGIES

# Nats. In f32 the sampler and training differ by 2e-5 where kernels sum in other orders.
TRUSTED_GAP = 1e-3


# Keys that a sweep of `python -m dllm_jax.eval` may name: programs take their values as
# arrays, so that none is compiled anew.
SWEPT = ("sampler.threshold", "sampler.entropy_bound", "eval.temperature")


@dataclasses.dataclass(frozen=True)
class ModelArgs:
    """Which checkpoint, and how it is computed."""

    path: str = ""  # a Hugging Face folder, or a hub repository's name
    dtype: str = "bfloat16"  # of computation; masters are f32
    # What the backward pass recomputes of a layer. none: nothing. dots: all but attention and
    # products with weights. attention: all but attention. full: all. offload: as attention,
    # with layers' inputs in the host's memory. auto: the first that fits of none (on a CPU
    # alone), dots, attention and full.
    remat: str = "auto"
    # "platform": the chip's own, trusted yet or not; "reference": none (docs/kernels.md)
    kernels: str = "auto"
    # What training turns the checkpoint into; the export says so, and loads again.
    attention: str = ""  # block, full or causal; "": the checkpoint's
    shift: int = -1  # the hidden state at i - shift answers for i; -1: the checkpoint's
    mask_id: int = -1  # a token that no text uses; -1: the checkpoint's
    lora_rank: int = 0  # of adapters that are trained instead; 0: all weights are
    lora_alpha: float = 32.0  # they are added with weight alpha / rank
    # Such as ("wq", "wv"), or wq,wv on a command line; (): every projection, but for those
    # of routed experts.
    lora_targets: tuple[str, ...] = ()
    # Of a model that reads and draws images as codes (MMaDA): the folder of its MAGVIT-v2;
    # "": one inside of the model's.
    vq: str = ""
    image_size: int = 0  # pixels a side; 0: what the vq's config.json says, or 512
    # An image that is no square: on white, or its middle as MMaDA trained.
    image_fit: str = "pad"
    # Tiles of the images that are looked at together, such as a step's: a table's size. Of
    # a model with a vision tower; an image of 640 x 480 pixels has five. 0: no images.
    tiles: int = 40
    tower: bool = False  # trains the vision tower, too; its projector always is
    # Of a text's newline behind an image. False: dropped, as LLaDA-V's own sampler does.
    keep_newline: bool = True

    @property
    def lora(self) -> Lora | None:
        """What `lora_rank` and its neighbours say."""
        if not self.lora_rank:
            return None
        names = ",".join(self.lora_targets).split(",")
        targets = tuple(name.strip() for name in names if name.strip())
        return Lora(self.lora_rank, self.lora_alpha, targets)

    def adapted(self, model: ModelConfig) -> ModelConfig:
        """Returns what a checkpoint's model becomes in training."""
        return dataclasses.replace(
            families.adapt(
                model,
                attention=self.attention,
                shift=self.shift,
                mask_id=self.mask_id,
            ),
            dtype=self.dtype,
            remat="none" if self.remat == "auto" else self.remat,  # train.py chooses
            kernels=self.kernels,
            lora=self.lora,
            tiles=self.tiles if model.vision else 0,
            train_tower=bool(model.vision) and self.tower,
        )

    def __post_init__(self):
        checks.fields(
            self,
            image_size=">= 0, <= 4096",
            image_fit=codes.FITS,
            tiles=">= 0, <= 100000",
            dtype=("bfloat16", "float32"),
            remat=("auto", *REMAT),
            kernels=pallas_kernels.CHOICES,
            mask_id=">= -1",
            lora_rank=">= 0",
            lora_alpha="> 0",
        )
        self.lora  # noqa: B018  (refuses what is wrong)
        if self.lora_targets and not self.lora_rank:
            raise checks.Refused(
                "lora_targets",
                f"={checks.shown(self.lora_targets)}: there are no adapters with "
                "lora_rank=0, and all weights are trained; set model.lora_rank, to 16 for "
                "example",
            )
        if self.tower and (self.lora_rank or not self.tiles):
            raise ValueError(
                "model.tower=True trains all of a vision tower: it needs model.lora_rank=0 "
                "and model.tiles above 0"
            )


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Supervised fine-tuning."""

    steps: int = 1000  # updates
    examples: int = 64  # of one update; pairs of them with method "dpo"

    def __post_init__(self):
        checks.fields(self, steps=">= 1", examples=">= 1")


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation while training."""

    every: int = 10  # steps; the first and the last step always evaluate
    problems: int = 0  # of the held-out file, from its start; 0: all
    temperature: float = 0.0
    answers: int = 1  # to each problem: pass@k up to it
    # Further samplers, each with metrics of its own, as in
    # "one:strategy=static/wide:block=8": heldout_one_accuracy, heldout_wide_accuracy.
    samplers: str = ""
    # The rest is of `python -m dllm_jax.eval` alone; it knows `samplers`, too.
    # A key of SWEPT and its values, as in "sampler.threshold=0.6,0.9": each is evaluated.
    sweep: str = ""
    # The best accuracy of all that is compared by AUP, %; 0: of this sweep.
    best: float = 0.0
    by: str = ""  # a field of the problems: accuracy for each of its values, too

    def __post_init__(self):
        checks.fields(
            self,
            every=">= 1",
            problems=">= 0",
            temperature=checks.TEMPERATURE,
            answers=">= 1, <= 65536",
            best=">= 0, <= 100",
        )
        self.swept  # noqa: B018  (refuses what is wrong)

    @property
    def swept(self) -> tuple[str, tuple[float, ...]]:
        """The key that `sweep` names, and its values; ("", ()) for none."""
        key, _, given = self.sweep.partition("=")
        if not self.sweep:
            return "", ()
        if key not in SWEPT:
            raise checks.Refused(
                "sweep",
                f"={checks.shown(self.sweep)}: programs are compiled for each value of "
                f"{checks.shown(key)}, or it is no key; sweep {', '.join(SWEPT)}, as in "
                f"{SWEPT[0]}=0.6,0.9",
            )
        try:
            values = tuple(float(x) for x in given.split(","))
        except ValueError:
            values = ()
        named = {f"{x:g}" for x in values}  # as their folders are
        if not values or len(named) < len(values):
            raise checks.Refused(
                "sweep",
                f"={checks.shown(self.sweep)}: {key} needs different numbers with commas",
            )
        return key, values


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1: what is left. See sharding.py."""

    data: int = 1
    fsdp: int = -1
    model: int = 1
    # The weights that sample. replicated: whole on each device, but for what `model`
    # splits. model: neighbours along fsdp share them. auto: the first that fits.
    rollout: str = "auto"

    def __post_init__(self):
        sizes = dict.fromkeys(sharding.AXES, ">= -1, != 0")
        checks.fields(self, rollout=ROLLOUTS, **sizes)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes, as `sharding.make_mesh` takes them."""
        return {name: getattr(self, name) for name in sharding.AXES}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a run leaves behind, and how it survives."""

    folder: str = "runs/default"  # no *, ?, [ or \ in its path
    save_every: int = 1  # steps between checkpoints: what a crash can lose
    keep: int = 2  # newest checkpoints that stay
    # Multiples of it stay for good, and it is one of save_every; 0: none.
    keep_every: int = 0
    # A metric of the evaluation, such as heldout_accuracy: the weights with the highest one
    # stay in best/, and are what is exported at the end; "": the last ones are.
    keep_best: str = ""
    # Evaluations in a row without a higher one, after which the run ends; 0: it goes on.
    patience: int = 0
    samples: int = 8  # rollouts written out at every step
    # Where metrics go beside metrics.jsonl: tensorboard, wandb, trackio, mlflow, with commas.
    trackers: str = "tensorboard"
    max_skips: int = 5  # updates skipped in a row, as not finite or too large: it ends
    # Where compiled programs stay for the next start; "": nowhere.
    compile_cache: str = "~/.cache/dllm_jax"
    # Seconds: when nothing has moved for so long the terminal is told where; 0: never.
    stuck_after: float = 600.0
    # A step of which profile/ shows what device and host did, for TensorBoard's xprof plugin
    # and Perfetto; the first one after a start compiles. 0: none.
    profile: int = 0
    export: bool = True  # write a Hugging Face folder at the end
    export_value: bool = False  # and the own value network, value/, for rl.value_path

    def __post_init__(self):
        checks.fields(
            self,
            save_every=">= 1",
            keep=">= 1",
            keep_every=">= 0",
            patience=">= 0",
            samples=">= 0",
            max_skips=">= 1",
            stuck_after=">= 0",
            profile=">= 0",
        )
        if not self.folder:
            raise checks.Refused("folder", "='': name the run's folder")
        if "://" in self.folder:
            raise checks.Refused(
                "folder",
                f"={checks.shown(self.folder)}: an address, of which none is read: name a "
                "folder",
            )
        if self.keep_best and not self.keep_best.startswith("heldout"):
            raise checks.Refused(
                "keep_best",
                f"={checks.shown(self.keep_best)}: a metric of the evaluation, such as "
                "heldout_accuracy",
            )
        if self.keep_every % self.save_every:
            raise checks.Refused(
                "keep_every",
                f"={self.keep_every}: checkpoints come every run.save_every="
                f"{self.save_every} steps; a multiple of that",
            )
        if self.patience and not self.keep_best:
            raise checks.Refused(
                "patience",
                f"={self.patience}: of which metric? set run.keep_best, such as to "
                "heldout_accuracy",
            )


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    # rl, sft; dpo: SFT's loop on pairs of answers; reward: a reward model, on pairs, too.
    method: str = "rl"
    seed: int = 0
    model: ModelArgs = dataclasses.field(default_factory=ModelArgs)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    sampler: SamplerConfig = dataclasses.field(
        default_factory=lambda: SamplerConfig(block=0)
    )
    noise: NoiseConfig = dataclasses.field(default_factory=NoiseConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    rl: RLConfig = dataclasses.field(default_factory=RLConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    sft: SFTConfig = dataclasses.field(default_factory=SFTConfig)
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    policy_optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    value_optim: OptimConfig = dataclasses.field(
        default_factory=lambda: OptimConfig(lr=5e-6)
    )
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)

    def __post_init__(self):
        checks.fields(self, method=("rl", "sft", "dpo", "reward"), seed=">= 0")
        compatible.check(self)
        guided = self.sampler.guidance and self.noise.guided
        beside = self.sampler.slots_beside if guided else 0
        room = self.sampler.slots + max(self.sampler.block, self.noise.block, beside)
        # Blocks of 0: asked again, completed.
        if self.sampler.block and 0 < self.batch.tokens < room:
            raise ValueError(
                f"batch.tokens={self.batch.tokens} cannot hold one trajectory of "
                f"{self.sampler.slots} tokens (sampler.max_prompt + sampler.max_new) and "
                f"a noised block; set it to {room} or more"
            )


def settings(cfg: Config) -> list[tuple[str, Config]]:
    """Returns (its name, its Config) of each setting that eval.sweep names.

    Without a sweep: cfg itself, named "", and what eval.samplers makes of it. Raises
    ValueError for both together, for a value that its key cannot have, and for a key that
    the sampler does not read.
    """
    key, values = cfg.eval.swept
    if not key:
        others = variants(cfg.eval.samplers, cfg.sampler).items()
        made = [(name, dataclasses.replace(cfg, sampler=x)) for name, x in others]
        return [("", cfg), *made]
    if cfg.eval.samplers:
        raise ValueError("eval.sweep and eval.samplers: set one of them")
    reads = {
        "sampler.threshold": STRATEGIES[cfg.sampler.strategy].reads_sure,
        "sampler.entropy_bound": STRATEGIES[cfg.sampler.strategy].reads_bound,
    }
    if not reads.get(key, True):
        raise ValueError(
            f"eval.sweep: {key} changes nothing with sampler.strategy="
            f"{cfg.sampler.strategy!r}"
        )
    section, name = key.split(".")
    tree = dataclasses.asdict(cfg)
    out = []
    for value in values:
        tree[section][name] = value
        out.append((f"{name}={value:g}", freeze(tree)))
    return out


def completed(cfg: Config):
    """Returns (cfg with its sampler's block and stop ids, its ModelConfig, tokenizer).

    The model is what the checkpoint becomes in this run. Raises ValueError for what it
    cannot become.
    """
    path = repository.find(cfg.model.path)
    model, sampler, tok, _ = of_checkpoint(path, cfg.model, cfg.sampler, tokenizer)
    return dataclasses.replace(cfg, sampler=sampler), model, tok


def of_checkpoint(path, given: ModelArgs, sampler: SamplerConfig, tokenizer):
    """Returns (a checkpoint's ModelConfig, the sampler with block and stop ids, its tokenizer,
    the codes.Format of the images that are its answers, or None).

    tokenizer: loads one. Raises ValueError for what does not go together.
    """
    stored = hf.read_config(path)
    model = given.adapted(stored)
    if given.tower and not model.vision:
        raise ValueError(f"model.tower=True: {path} has no vision tower")
    block = sampler.block or model.block
    draws = sampler.answers == "image"
    if not (draws or sampler.block) and block == 1 and model.attention != "causal":
        raise ValueError(f"sampler.block=0: {path} has no block; set it, such as to 4")
    hf.check(path, stored)
    tok = tokenizer(path)
    if draws:
        made = pictures.format_of(given, path, model, tok)
        return *pictures.drawing(model, sampler, made), tok, made
    stops = stops_of(sampler, model, tok)
    sampler = dataclasses.replace(sampler, block=block, stop_ids=stops)
    return dataclasses.replace(model, block=block), sampler, tok, None


def chosen(cfg: Config, model: ModelConfig) -> tuple[Config, list[str]]:
    """Returns (cfg with values for what the program is to choose, a line for each choice).

    cfg, model: of `completed`. Raises ValueError where the noise does not suit the model,
    and where nothing could be learned from groups.
    """
    compatible.check_groups(cfg)
    rl, batch, lines = cfg.rl, cfg.batch, []
    if cfg.method == "sft" and cfg.sampler.guidance and cfg.noise.guided:
        # A loss of guided logits would teach that the answers are unlikely behind the blank
        # prompt.
        unguided = dataclasses.replace(cfg.noise, guided=False)
        cfg = dataclasses.replace(cfg, noise=unguided)
        lines.append("noise.guided=False: sampler.guidance is for evaluations in SFT")
    shown = layout.of(model, cfg.sampler, cfg.noise, cfg.objective)
    noise.check(cfg.noise, shown)
    reason = selection.refused(cfg.sampler, model.attention)
    if shown.selection and reason:
        raise ValueError(f"objective.likelihood='selection': {reason}")
    if cfg.method == "rl" and rl.trusted_gap < 0:
        reason = scored_anew(cfg, model)
        rl = dataclasses.replace(rl, trusted_gap=0.0 if reason else TRUSTED_GAP)
        said = "what the sampler recorded stands for old log-probs while it is so near"
        if reason:
            said = f"old log-probs are scored anew, as {reason}"
        lines.append(f"rl.trusted_gap={rl.trusted_gap}: {said}")
    if not batch.tokens:
        rounds = noise.rounds(cfg.noise, shown, cfg.sampler.max_new)
        width = shown.width(cfg.sampler.slots, rounds)
        batch = dataclasses.replace(batch, tokens=width)
        lines.append(f"batch.tokens={width}: a row holds the longest prompt and answer")
    return dataclasses.replace(cfg, rl=rl, batch=batch), lines


def half_empty(fill: float, batch: BatchConfig) -> list[str]:
    """Returns a warning, where most of the slots of an update's rows hold nothing."""
    if fill >= 0.5:
        return []
    rows = f"batch.rows={batch.rows} or " if batch.rows > 1 else ""
    line = (
        f"warning: {1 - fill:.0%} of the first update's slots are empty, and are computed "
        f"all the same: lower {rows}batch.tokens={batch.tokens}, or give an update more "
        "answers"
    )
    return [line]


def scored_anew(cfg: Config, model: ModelConfig) -> str:
    """Returns why the sampler's log-probs cannot stand for old ones, "": they can.

    They can where it looked at the very tokens that training shows, with its very weights,
    and drew from the model's own distribution.
    """
    drawn, sampler = cfg.noise, cfg.sampler
    filters = sampler.temperature != 1 or sampler.top_k or sampler.top_p < 1
    stale = policy.choose(sampler, model.attention).stale
    reasons = {
        "the noise is not the trace as it is": not drawn.as_traced
        or compatible.enlarged(cfg),
        "noise.guided=False trains another distribution": not drawn.guided
        and sampler.guidance > 0,
        "nothing recorded the probability of steps": cfg.objective.likelihood
        == "selection",
        "rl.value='head' is scored with them": cfg.rl.value == "head",
        "weights are rounded for sampling (int8)": sampler.int8,
        f"weights are rounded for sampling ({model.dtype})": model.dtype != "float32",
        "temperature, top_k or top_p change what is drawn from": filters,
        f"sampler.cache={sampler.cache!r} has stale keys": stale,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def stops_of(cfg: SamplerConfig, model: ModelConfig, tok) -> tuple[int, ...]:
    """Returns the ids that end an answer; raises ValueError for one that never can.

    tok: the tokenizer, or None.
    """
    for token in cfg.stop_ids:
        if token >= model.vocab or token == model.mask_id:
            raise ValueError(
                f"sampler.stop_ids={cfg.stop_ids}: {token} never ends an answer; ids are "
                f"0..{model.vocab - 1}, and {model.mask_id} is the mask token"
            )
    stops = stop_ids(tok, model.eos_id, *model.ends, *cfg.stop_ids)
    return special.looked_at(stops, model.mask_id) if tok is not None else stops


def size_warnings(
    sampler: SamplerConfig, model: ModelConfig, prompt: int = 0
) -> list[str]:
    """Returns warnings: of canvases longer than the model was made for, of blocks than answers.

    prompt: the longest one's tokens; 0: as long as they may be.
    """
    lines, positions = [], prompt + sampler.max_new if prompt else sampler.slots
    if 0 < model.positions < positions:
        lines.append(
            f"warning: prompt and answer may take {positions} positions, and the model was "
            f"made for {model.positions} (max_position_embeddings): beyond them it guesses"
        )
    if model.attention == "block" and sampler.block > sampler.max_new:
        lines.append(
            f"warning: sampler.block={sampler.block}: every forward computes a whole block, "
            f"and answers have sampler.max_new={sampler.max_new} tokens at most"
        )
    return lines


def warnings(cfg: Config, model: ModelConfig, devices: int) -> list[str]:
    """Returns a line for each setting that works and is hardly what was meant.

    cfg, model: of `completed`; devices: that share rows, data x fsdp.
    """
    lines = size_warnings(cfg.sampler, model)
    if cfg.method == "rl" and cfg.rl.advantage == cfg.rl.value == "none":
        lines.append(
            "warning: rl.advantage='none' without a value model: what is rewarded becomes "
            "likelier and nothing less likely; rl.advantage='zscore' compares answers"
        )
    lines += [*compatible.same_answers(cfg), *compatible.unread(cfg)]
    lines += [
        f"warning: eval.{name} is read by python -m dllm_jax.eval alone"
        for name in ("sweep", "best", "by")
        if getattr(cfg.eval, name) != getattr(EvalConfig, name)
    ]
    shared = shared_batch(cfg, model, devices)
    if shared != cfg.batch:
        why = f"{devices} devices (data x fsdp) share the rows of a microbatch"
        if shared.rows < cfg.batch.rows:
            why = "a CPU is as fast with one at a time, and then computes no empty ones"
        lines.append(
            f"batch.rows={cfg.batch.rows} becomes {shared.rows}, of {shared.tokens} slots "
            f"each: {why}"
        )
    return lines


def shared_batch(cfg: Config, model: ModelConfig, devices: int) -> BatchConfig:
    """Returns the shape of microbatches whose rows so many devices share.

    cfg, model: of `chosen`; the platform is that of the mesh in force.

    With more devices than rows a microbatch grows, and so does what the last one of an
    update, which is seldom full, leaves empty. Then a row is no wider
    than 5/3 of the longest prompt and answer, in whole tiles: of the recipe's lengths
    74 % of the slots of 64 devices then hold something, on average, 59 % of rows of 8,192,
    and less of narrower and wider ones, too (benchmarks/fill.py). Canvases are many, and
    would fill narrow rows badly.
    """
    batch, slots = cfg.batch.on(devices, choice.platform()), cfg.sampler.slots
    shown = layout.of(model, cfg.sampler, cfg.noise, cfg.objective)
    if shown.facts.by_block and devices > cfg.batch.rows:
        whole = 5 * slots // 3 // layout.WHOLE * layout.WHOLE
        narrow = max(whole, shown.width(slots + shown.block, rounds=0))
        batch = dataclasses.replace(batch, tokens=min(batch.tokens, narrow))
    return batch


def check_kernels(model: ModelConfig, sampler: SamplerConfig, folder: str):
    """Returns the lines of `selfcheck.check` for a run on the mesh in force.

    Before it, how its products are rounded is settled. folder: run.compile_cache.
    """
    compiler.keep_exact(model.dtype)
    wide = selfcheck.widths(model, sampler.block, sampler.page_slots)
    return selfcheck.check(model.kernels, wide, folder)


def default() -> ml_collections.ConfigDict:
    """Returns the defaults as a ConfigDict for config files to change."""
    return ml_collections.ConfigDict(
        dataclasses.asdict(Config()), convert_dict=True, type_safe=True
    )


def preset(table: dict, name: str, tree=None) -> ml_collections.ConfigDict:
    """Returns the defaults (or `tree`) changed by the named function of a config file.

    Raises ValueError with the known names.
    """
    checks.one_of("preset", name, tuple(table))
    tree = default() if tree is None else tree
    table[name](tree)
    return tree


def freeze(tree) -> Config:
    """Returns the static Config; a dataclass that refuses a value says which."""
    return frozen(Config, tree)


def frozen(kind: type, tree, prefix: str = ""):
    """Returns a dataclass with a tree's values; the rest of its fields have defaults.

    prefix: the dotted name of the tree. Raises ValueError for an unknown key, naming the
    nearest that exists, and for a value that the dataclass refuses.
    """
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    if type(tree) not in (dict, ml_collections.ConfigDict):
        raise ValueError(f"{prefix}: needs keys, such as {prefix}{min(fields)}")
    values = {}
    for name, value in dict(tree).items():
        if name not in fields:
            raise ValueError(unknown(prefix + name, [prefix + x for x in fields]))
        if dataclasses.is_dataclass(fields[name]):
            value = frozen(fields[name], value, f"{prefix}{name}.")
        values[name] = plain(value)
    try:
        return kind(**values)
    except checks.Refused as error:  # it knows its name, and not where it stands
        raise ValueError(f"{prefix}{error}") from None


def plain(value):
    """Returns a number as Python's own, which JSON holds, and a list as a tuple of them.

    NumPy's, and fractions, come from config files that compute.
    """
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def unknown(name: str, known: list[str]) -> str:
    """Returns the message for a key that does not exist, with the nearest that do.

    Those are of another section, if they have its last name there.
    """
    inside = [key for key in known if key.startswith(f"{name}.")]
    if inside:
        return f"config key {name!r} is a section: set its keys, such as {inside[0]!r}"
    last = name.rpartition(".")[2]
    same = [key for key in known if key.rpartition(".")[2] == last]
    near = difflib.get_close_matches(name, same or known, 3 if same else 1, 0.0)
    found = " or ".join(map(repr, near))
    return f"unknown config key {name!r}; the nearest is {found}"


def keeping(cfg: Config, defaults: dict | None) -> tuple[Config, list[str]]:
    """Returns (cfg with the defaults that its run began with, a line for each that differs).

    defaults: those of that time, None where they are not known. A key keeps its old default
    where it has today's, which nobody can tell from a value that was set to the same.
    """
    begun, today = flat(defaults or {}), leaves_of(Config())
    tree, lines = json.loads(json.dumps(dataclasses.asdict(cfg))), []
    for key, value in leaves_of(cfg).items():
        if value == today[key] != begun.get(key, value):
            *path, name = key.split(".")
            functools.reduce(dict.get, path, tree)[name] = begun[key]
            lines.append(
                f"config.{key} stays {begun[key]!r}, its default when the run began; by now "
                f"it is {value!r}"
            )
    return freeze(tree) if lines else cfg, lines


def leaves_of(cfg: Config) -> dict:
    """Returns the keys' values, flat and as JSON has them."""
    return as_json(dataclasses.asdict(cfg))


def as_json(tree: dict) -> dict:
    """Returns a tree flat, and as JSON has it: there a tuple is a list."""
    return flat(json.loads(json.dumps(tree)))


def changes(old: dict, cfg: Config) -> dict[str, str]:
    """Returns a line of each key that differs from that of a run that began with `old`."""
    new, old = leaves_of(cfg), as_json(old)
    return {
        key: f"config.{key} was {old.get(key)!r}, is now {value!r}"
        for key, value in new.items()
        if old.get(key) != value
    }


def pairs(tree: dict, prefix: str = ""):
    """Yields the dotted name and the value of each leaf; a section without any is one."""
    for name, value in tree.items():
        if value and isinstance(value, dict):
            yield from pairs(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def flat(tree: dict) -> dict:
    """Returns nested dictionaries as one, with dotted names."""
    return {name: value for name, value in pairs(tree) if value != {}}


def declared() -> dict[str, str]:
    """Returns where each section's keys are declared: "Class in dllm_jax/...py", by name.

    "" is the keys of no section.
    """
    found, waiting = {}, [("", Config)]
    for section, kind in waiting:
        found[section] = f"{kind.__name__} in {kind.__module__.replace('.', '/')}.py"
        waiting += [
            (f"{section}.{field.name}".lstrip("."), field.type)
            for field in dataclasses.fields(kind)
            if dataclasses.is_dataclass(field.type)
        ]
    return found


def keys(tree: dict) -> list[str]:
    """Returns the dotted names of all leaves."""
    return list(flat(tree))


def main():
    """Prints the translation of one YAML file; the translator is a config file's affair."""
    try:
        from configs import from_yaml
    except ImportError as error:
        if error.name != "configs":
            raise
        raise ValueError(
            "the translator is configs/from_yaml.py of the repository: in its folder, run "
            "python -m configs.from_yaml FILE.yaml"
        ) from None
    from_yaml.main()


if __name__ == "__main__":
    from dllm_jax import command_line  # which assembles this module

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    command_line.entry(main, __doc__)
