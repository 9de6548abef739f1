"""A run's configuration: the floors' dataclasses assembled into one tree.

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
import pathlib
import re
import runpy
import sys
import traceback

import jax
import ml_collections
from absl import flags
from ml_collections import config_flags

from dllm_jax import checks, exits, folder, pallas_kernels, processes, sharding
from dllm_jax.data import DataConfig, stop_ids, tokenizer
from dllm_jax.models import families, hf
from dllm_jax.models.config import Lora, ModelConfig
from dllm_jax.models.transformer import REMAT
from dllm_jax.rl.config import (
    BatchConfig,
    NoiseConfig,
    ObjectiveConfig,
    OptimConfig,
    RLConfig,
)
from dllm_jax.rl.noise import KINDS
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.placement import ROLLOUTS


@dataclasses.dataclass(frozen=True)
class ModelArgs:
    """Which checkpoint, and how it is computed."""

    path: str = ""  # a Hugging Face folder, or a hub repository's name
    dtype: str = "bfloat16"  # of computation; masters are f32
    remat: str = "none"  # what the backward pass recomputes: none, full or dots
    # "platform": the chip's own, trusted yet or not; "reference": none (docs/kernels.md)
    kernels: str = "auto"
    # What training turns the checkpoint into; the export says so, and loads again.
    attention: str = ""  # block, full or causal; "": the checkpoint's
    shift: int = -1  # the hidden state at i - shift answers for i; -1: the checkpoint's
    mask_id: int = -1  # a token that no text uses; -1: the checkpoint's
    lora_rank: int = 0  # of adapters that are trained instead; 0: all weights are
    lora_alpha: float = 32.0  # they are added with weight alpha / rank
    # Such as ("wq", "wv"); (): every projection, but for those of routed experts.
    lora_targets: tuple[str, ...] = ()

    @property
    def lora(self) -> Lora | None:
        """What `lora_rank` and its neighbours say."""
        if not self.lora_rank:
            return None
        return Lora(self.lora_rank, self.lora_alpha, tuple(self.lora_targets))

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
            remat=self.remat,
            kernels=self.kernels,
            lora=self.lora,
        )

    def __post_init__(self):
        checks.fields(
            self,
            dtype=("bfloat16", "float32"),
            remat=tuple(REMAT),
            kernels=pallas_kernels.CHOICES,
            mask_id=">= -1",
            lora_rank=">= 0",
            lora_alpha="> 0",
        )
        self.lora  # noqa: B018  (refuses what is wrong)


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
    answers: int = 1  # to each problem, of `python -m dllm_jax.eval`: pass@k up to it

    def __post_init__(self):
        checks.fields(
            self, every=">= 1", problems=">= 0", temperature=">= 0", answers=">= 1"
        )


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

    folder: str = "runs/default"
    save_every: int = 1  # steps between checkpoints: what a crash can lose
    keep: int = 2  # newest checkpoints that stay
    keep_every: int = 0  # multiples of it stay for good; 0: none
    samples: int = 8  # rollouts written out at every step
    max_skips: int = 5  # updates skipped in a row, as not finite or too large: it ends
    # Where compiled programs stay for the next start; "": nowhere.
    compile_cache: str = "~/.cache/dllm_jax"
    # Seconds: when nothing has moved for so long the terminal is told where; 0: never.
    stuck_after: float = 1800.0
    export: bool = True  # write a Hugging Face folder at the end

    def __post_init__(self):
        checks.fields(
            self,
            save_every=">= 1",
            keep=">= 1",
            keep_every=">= 0",
            samples=">= 0",
            max_skips=">= 1",
            stuck_after=">= 0",
        )
        if not self.folder:
            raise checks.Refused("folder", "='': name the run's folder")


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    method: str = "rl"  # "rl", "sft", or "dpo": SFT's loop on pairs of answers
    seed: int = 0
    model: ModelArgs = dataclasses.field(default_factory=ModelArgs)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    sampler: SamplerConfig = dataclasses.field(
        default_factory=lambda: SamplerConfig(block=0)
    )
    noise: NoiseConfig = dataclasses.field(default_factory=NoiseConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    rl: RLConfig = dataclasses.field(default_factory=RLConfig)
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
        checks.fields(self, method=("rl", "sft", "dpo"), seed=">= 0")
        spg = self.method == "rl" and self.objective.loss == "spg"
        bounds = self.noise.kind == "subset" and self.objective.aggregate == "elbo"
        if (spg or self.method == "dpo") and not bounds:
            raise ValueError(
                "spg and dpo train evidence bounds: they need noise.kind='subset' and "
                "objective.aggregate='elbo'"
            )
        if self.rl.trusted_gap and self.noise.kind != "trace":
            raise ValueError(
                f"rl.trusted_gap: what the sampler recorded is of noise.kind='trace', not "
                f"{self.noise.kind!r}; set it to 0"
            )
        if self.method == "dpo" and not self.objective.reference_beta > 0:
            raise ValueError("dpo needs objective.reference_beta > 0, such as 0.2")
        kind = KINDS[self.noise.kind]
        if (
            self.method == "rl"
            and self.rl.value != "none"
            and (kind.random or self.noise.grid == "response")
        ):
            raise ValueError(
                f"rl.value={self.rl.value!r}: a value model would see the future with "
                f"noise.kind={self.noise.kind!r} and noise.grid={self.noise.grid!r}; set "
                "rl.value='none', or noise.kind='trace' with noise.grid='absolute'"
            )
        room = self.sampler.slots + self.sampler.block
        if self.sampler.block and self.batch.tokens < room:  # 0: asked again, completed
            raise ValueError(
                f"batch.tokens={self.batch.tokens} cannot hold one trajectory of "
                f"{self.sampler.slots} tokens (sampler.max_prompt + sampler.max_new) and "
                f"a noised block; set it to {room} or more"
            )


def completed(cfg: Config):
    """Returns (cfg with its sampler's block and stop ids, its ModelConfig, tokenizer).

    The model is what the checkpoint becomes in this run. Raises ValueError for what it
    cannot become.
    """
    path = hf.find(cfg.model.path)
    stored = hf.read_config(path)
    model = cfg.model.adapted(stored)
    block = cfg.sampler.block or model.block
    if block == 1 and not cfg.sampler.block and model.attention != "causal":
        raise ValueError(
            f"sampler.block=0: {path} has no block; set it, to 4 for example"
        )
    hf.check(path, stored)
    tok = tokenizer(path)
    stops = stops_of(cfg.sampler, model, tok)
    sampler = dataclasses.replace(cfg.sampler, block=block, stop_ids=stops)
    model = dataclasses.replace(model, block=block)
    return dataclasses.replace(cfg, sampler=sampler), model, tok


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
    return stop_ids(tok, model.eos_id, *cfg.stop_ids)


def too_long(positions: int, model: ModelConfig) -> list[str]:
    """Returns a warning, where a canvas is longer than its model was made for."""
    if not 0 < model.positions < positions:
        return []
    line = (
        f"warning: prompt and answer may take {positions} positions, and the model was made "
        f"for {model.positions} (max_position_embeddings): beyond them it guesses"
    )
    return [line]


def warnings(cfg: Config, model: ModelConfig, devices: int) -> list[str]:
    """Returns a line for each setting that works and is hardly what was meant.

    cfg, model: of `completed`; devices: that share rows, data x fsdp.
    """
    lines = too_long(cfg.sampler.slots, model)
    if cfg.method == "rl" and cfg.rl.advantage == cfg.rl.value == "none":
        lines.append(
            "warning: rl.advantage='none' without a value model: what is rewarded becomes "
            "likelier and nothing less likely; rl.advantage='zscore' compares answers"
        )
    rows = cfg.batch.on(devices).rows
    if rows != cfg.batch.rows:
        lines.append(
            f"batch.rows={cfg.batch.rows} becomes {rows}: {devices} devices (data x fsdp) "
            "share the rows of a microbatch"
        )
    return lines


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
        values[name] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**values)
    except checks.Refused as error:  # it knows its name, and not where it stands
        raise ValueError(f"{prefix}{error}") from None


def unknown(name: str, known: list[str]) -> str:
    """Returns the message for a key that does not exist, with the nearest that does."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"unknown config key {name!r}; the nearest is {near[0]!r}"


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
    """Returns the keys' values, flat and as JSON has them: there a tuple is a list."""
    return flat(json.loads(json.dumps(dataclasses.asdict(cfg))))


def changes(old: dict, cfg: Config) -> list[str]:
    """Returns which keys differ from those of a run that began with `old`, a line each."""
    new, old = leaves_of(cfg), flat(old)
    return [
        f"config.{key} was {old.get(key)!r}, is now {value!r}"
        for key, value in new.items()
        if old.get(key) != value
    ]


def flat(tree: dict, prefix: str = "") -> dict:
    """Returns nested dictionaries as one, with dotted names."""
    leaves = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def keys(tree: dict) -> list[str]:
    """Returns the dotted names of all leaves."""
    return list(flat(tree))


# ---- The command line: one language for all entries --------------------------------------

DISTRIBUTED = "join the other processes of this SLURM job, pod or mpirun"
OPTIONS = {  # of a command that runs a config file: what --help says of them
    "--config=FILE[:PRESET]": "required; see configs/",
    "--distributed": DISTRIBUTED,
    "--coordinator=HOST:PORT": "of process 0, where --distributed cannot find it out,",
    "--processes=N --process=I": "... with their number, and which one this is: 0 to N-1",
    "--join_within=300": "seconds that processes wait for each other at the start",
}
# Keys that may differ between the processes of a run. Of files the content counts.
LOCAL = ("run.compile_cache", "data.train", "data.heldout", "model.path")
MODEL_FILES = ("config.json", "model.safetensors.index.json", "tokenizer.json")
MODEL_FILES += ("tokenizer_config.json", "chat_template.jinja")
EVERY_KEY = (
    "Every key of the configuration and its default (a config file may set others):"
)


@processes.together()
def entry(main, help_text: str = "") -> None:
    """Runs a command: --help, or `main`, whose known ends are one line and a code: exits.

    help_text: what --help prints; "" where `main` has a help of its own.
    """
    if help_text and {"--help", "-h", "--helpshort"} & set(sys.argv[1:]):
        print(help_text)
        return
    try:
        main()
    except ValueError as error:
        fail(error)
    except exits.CannotGoOn as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(exits.STUCK)
    except exits.Stopped as stop:
        if jax.process_index() == 0:
            print(stop, file=sys.stderr)
        sys.exit(exits.STOPPED)


def usage(
    summary: str,
    options: dict[str, str],
    heading: str = EVERY_KEY,
    leaves: dict | None = None,
) -> str:
    """Returns what --help prints: a command's docstring, its flags, and its keys.

    options: each flag as it is written, and what is said of it. leaves: the keys that are
    listed below the heading, with their defaults; None for all of Config's.
    """
    lines = "\n".join(f"  {flag:<27} {text}" for flag, text in options.items())
    return f"{summary}\nFlags:\n{lines}\n\n{heading}\n{describe(leaves)}\n"


def describe(leaves: dict | None = None) -> str:
    """Returns keys with their defaults, one a line; None: every key of Config."""
    leaves = flat(dataclasses.asdict(Config())) if leaves is None else leaves
    return "\n".join(f"  --config.{key}={value!r}" for key, value in leaves.items())


def from_command_line(argv: list[str], example: str) -> Config:
    """Returns the configuration that --config=FILE[:PRESET] and --config.a.b=value make.

    With --distributed it joins the other processes first. A command's further flags are
    defined before. Raises ValueError as `parse` and `freeze` do, and without a file, for
    which `example` is named.
    """
    distributed = flags.DEFINE_bool("distributed", False, DISTRIBUTED)
    coordinator = flags.DEFINE_string("coordinator", None, "HOST:PORT")
    count = flags.DEFINE_integer("processes", None, "how many", lower_bound=1)
    index = flags.DEFINE_integer("process", None, "which one", lower_bound=0)
    seconds = flags.DEFINE_integer("join_within", 300, "seconds", lower_bound=1)
    words, file = without_file(argv)
    tree, _ = parse(words, of_file(file) if file else default())
    if not file:
        raise ValueError(f"--config=FILE is required, such as {example}")
    if distributed.value or coordinator.value:
        processes.join(coordinator.value, count.value, index.value, seconds.value)
    cfg = freeze(tree)
    if processes.group is not None:
        processes.agree(facts(cfg))
    return cfg


def facts(cfg: Config) -> dict[str, str]:
    """Returns what has to be the same in all processes of a run, by names for people."""
    leaves = flat(dataclasses.asdict(cfg))
    out = {f"config.{key}": repr(x) for key, x in leaves.items() if key not in LOCAL}
    for key in ("data.train", "data.heldout"):
        out[f"{key}'s content"] = processes.content(leaves[key]) if leaves[key] else ""
    model = pathlib.Path(cfg.model.path)
    for name in MODEL_FILES if model.is_dir() else ():
        out[f"model.path's {name}"] = processes.content(model / name)
    out["the source of dllm_jax"] = processes.sources()
    versions = folder.versions()
    return out | {name: versions[name] for name in folder.PACKAGES}


def without_file(argv: list[str]) -> tuple[list[str], str]:
    """Returns (arguments without --config=FILE[:PRESET], the last FILE[:PRESET] or "")."""
    words, file = [], ""
    waiting = iter(argv)
    for arg in waiting:
        if arg == "--":  # what follows is no flag
            return [*words, arg, *waiting], file
        if named := re.fullmatch(r"--?config(?:=(.*))?", arg, re.DOTALL):
            file = next(waiting, "") if named[1] is None else named[1]
        else:
            words.append(arg)
    return words, file


def of_file(named: str) -> ml_collections.ConfigDict:
    """Returns the defaults with what a config file sets, named as FILE[:PRESET].

    Raises ValueError naming the file, and the line where it has an error of its own.
    """
    path, _, preset = named.partition(":")
    if not pathlib.Path(path).is_file():
        raise ValueError(f"--config={path}: there is no such file")
    if path.endswith((".yaml", ".yml")):
        raise ValueError(
            f"--config={path}: a config file is Python; python -m dllm_jax.config {path} "
            "prints one that does what dLLM-RL's YAML does"
        )
    tree = default()
    try:
        get_config = runpy.run_path(path).get("get_config")
        if get_config is None:
            raise ValueError("it has no function get_config")
        made = get_config(*([preset] if preset else []))
        if type(made) is not ml_collections.ConfigDict:
            raise ValueError(f"get_config returns {made!r:.40}, which is no ConfigDict")
        tree.update(made)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever its author wrote)
        raise ValueError(f"--config={path}{place_and_reason(error, path)}") from None
    return tree


def place_and_reason(error: BaseException, path: str) -> str:
    """Returns ", line N: Kind: what", in one line; N is the last line of the file's own."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == path
    ]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines = [error.lineno]
    place = f", line {lines[-1]}" if lines and lines[-1] else ""
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return f"{place}: {kind}{' '.join(str(error).split())}"


def parse(
    argv: list[str],
    tree: ml_collections.ConfigDict,
    flag_values: flags.FlagValues = flags.FLAGS,
    arguments: int = 0,
) -> tuple[ml_collections.ConfigDict, list[str]]:
    """Parses absl's flags, and with them --config.a.b=value, changes of the tree.

    Returns (the tree, what is no flag: at most so many `arguments`). Raises ValueError for
    anything unknown: a flag, a leaf of Config; and for a value that a leaf cannot have.
    """
    check_overrides(argv)
    given = {"flag_values": flag_values, "sys_argv": argv}
    try:
        holder = config_flags.DEFINE_config_dict("config", tree, **given)
        words = flag_values(argv)[1:]
    except (flags.Error, TypeError, ValueError) as error:
        raise ValueError(str(error).strip().splitlines()[-1]) from None
    if words[arguments:]:
        raise ValueError(
            f"unknown argument {words[arguments]!r}; overrides are --config.a.b=value"
        )
    return holder.value, words


def check_overrides(argv: list[str]):
    """Raises ValueError for a leaf that Config lacks."""
    known = keys(dataclasses.asdict(Config()))
    for arg in argv[1:]:
        leaf = re.match(r"--?(?:no)?config\.([^=]+)", arg)
        if leaf and leaf[1] not in known:
            raise ValueError(unknown(leaf[1], known))


def fail(error: ValueError):
    """Ends the program with one line if this package refused something of the user's.

    So may the files of configs/. Any other ValueError is a defect, and keeps its traceback.
    """
    raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    package = pathlib.Path(__file__).parent
    if not {package, package.parent / "configs"} & set(raised_in.parents):
        raise error
    print(f"error: {error}", file=sys.stderr)
    sys.exit(exits.REFUSED)


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
    entry(main, __doc__)
