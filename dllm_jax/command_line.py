"""The command line: one language for all entries.

    --config=FILE[:PRESET] --config.a.b=value ...

A config file makes the tree of config.py, and any of its leaves can be overridden. The
known ends of a command are one line and an exit code (exits.py), wherever they are raised.
"""

import contextlib
import dataclasses
import difflib
import errno
import gc
import inspect
import io
import os
import pathlib
import re
import runpy
import select
import signal
import sys
import tempfile
import traceback

import jax
import ml_collections
from absl import flags
from ml_collections import config_flags

import dllm_jax
from dllm_jax import checks, compiler, config, data, exits, folder, processes
from dllm_jax.models import repository
from dllm_jax.rl import rewards

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
# Beside those of repository.marks.
MODEL_FILES = ("model.safetensors.index.json", "tokenizer.json")
MODEL_FILES += ("tokenizer_config.json", "chat_template.jinja")
HELP = {"--help", "-h", "--helpshort"}
OF_FILE = (
    "Every key of the configuration and its value in the file of --config. What a key means\n"
    "stands where it is declared: behind # are the class and its file."
)
EVERY_KEY = (
    "Every key of the configuration and its default (a config file may set others: name one\n"
    "beside --help). What a key means stands where it is declared: behind # are the class and\n"
    "its file."
)
NO_MEMORY = (
    "no memory left ({}): lower sampler.rows, sampler.max_prompt or sampler.max_new, in "
    "training batch.rows, batch.tokens or rl.prompts times rl.group, or let more devices "
    "share the weights (mesh.model, mesh.fsdp)"
)
NO_DEVICE = (
    "JAX finds no device here of JAX_PLATFORMS={!r}: unset it, or install what drives one: "
    "make install EXTRAS=cuda, or tpu"
)
UNREACHABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
OVERRIDES = "overrides are --config.a.b=value"
KINDS = {int: "a whole number", float: "a number", bool: "True or False"}


def end_of_imports() -> None:
    """Takes back what `dllm_jax` sets while a command imports."""
    # What was imported stays: to look through it again and again, while it grew and since,
    # took a fifth of the time to a first answer.
    gc.freeze()
    gc.enable()
    if signal.getsignal(signal.SIGINT) is dllm_jax.stop_importing:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def open_outputs() -> None:
    """Lets what is said go nowhere where the output was closed, as by >&-: Python has none.

    Characters that the output's encoding lacks, such as a table's ticks, are spelled out as
    Python does: a run that trained for days must not end by them, before its export.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@processes.together()
def entry(main, help_text: str = "", *, cleans: bool = False) -> None:
    """Runs a command: --help, or `main`, whose known ends are one line and a code: exits.

    help_text: what --help prints; "" where `main` has a help of its own. cleans: it listens to
    no exits.StopSignal, and SIGTERM ends it as Ctrl-C does, behind which nothing half stays.
    """
    end_of_imports()
    open_outputs()
    # What draws here has no window. In a notebook's shell it names the notebook's backend, of
    # which Matplotlib knows nothing where that is not installed: it cannot even be imported.
    os.environ["MPLBACKEND"] = "agg"
    if cleans:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    compiler.spare_threads()
    sys.argv[1:] = map(at_home, sys.argv[1:])
    asked = help_text and HELP & set(sys.argv[1:])
    try:
        with reachable(), read_or_not():
            if asked:
                print(help_text)
            else:
                of_32_bits(main)
    except exits.CannotGoOn as error:
        print(f"error: {error}", file=sys.stderr)
        exits.leave()
    except exits.Stopped as stop:
        if jax.process_index() == 0:
            print(f"stopped {stop}", file=sys.stderr)
        exits.cut_in_time(exits.STOPPED)  # a grader's thread may wait for its judge
        sys.exit(exits.STOPPED)
    except (KeyboardInterrupt, exits.StoppedAtOnce) as stop:
        # The former comes where no exits.StopSignal listens, and has no words.
        words = f": {stop}" if str(stop) else " by a signal"
        print(f"stopped{words}", file=sys.stderr)
        sys.exit(exits.STOPPED)
    except (jax.errors.JaxRuntimeError, MemoryError, ValueError) as error:
        if exits.exhausted(error):
            told = checks.shown(str(error))
            print(f"error: {NO_MEMORY.format(told)}", file=sys.stderr)
            exits.leave()
        fail(error)
    except (RuntimeError, AssertionError):
        if has_devices():
            raise
        print(f"error: {NO_DEVICE.format(jax.config.jax_platforms)}", file=sys.stderr)
        sys.exit(exits.REFUSED)


def of_32_bits(main):
    """Runs a command; raises ValueError where JAX would make its programs of 64 bits.

    Or none of them, as numbers of two kinds may not meet.
    """
    if jax.config.jax_enable_x64:
        raise ValueError("JAX_ENABLE_X64 is set, and programs are of 32 bits: unset it")
    if jax.config.jax_numpy_dtype_promotion != "standard":
        raise ValueError(
            "JAX_NUMPY_DTYPE_PROMOTION=strict, and programs have bfloat16 beside float32: "
            "unset it"
        )
    main()


@contextlib.contextmanager
def read_or_not():
    """Ends what is inside without a word where nobody reads any more what it prints."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        if not closed(sys.stdout):
            raise
        exits.unheard(sys.stdout)  # or Python would complain at its end


@contextlib.contextmanager
def reachable():
    """Refuses what is inside where a path cannot even be looked at.

    Wherever that is: a long text stands in place of a file's name, or a folder is somebody
    else's. A full disk, which the output may go to, is told as `exits.room` tells others.
    """
    try:
        yield
    except OSError as error:
        if error.errno in exits.FULL:
            if error.filename is None:  # Python would try again at its end
                exits.unheard(sys.stdout)
            place = error.filename or "what it prints or writes"
            raise exits.CannotGoOn(f"{place}: {error.strerror}") from None
        if error.errno not in UNREACHABLE or error.filename is None:
            raise
        raise ValueError(
            f"{checks.shown(str(error.filename))}: {error.strerror}"
        ) from None


def closed(stream) -> bool:
    """Returns whether a stream is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def has_devices() -> bool:
    """Returns whether JAX finds any of what JAX_PLATFORMS names."""
    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):  # it says so by either
        return False


def at_home(arg: str) -> str:
    """Returns an argument in which a path ~/... is spelled out: shells leave --key=~/..."""
    key, equals, path = arg.partition("=")
    if not (equals and key.startswith("-") and path.startswith("~/")):
        return arg
    return f"{key}={pathlib.Path(path).expanduser()}"


def usage(
    summary: str,
    options: dict[str, str],
    heading: str = EVERY_KEY,
    leaves: dict | None = None,
) -> str:
    """Returns what --help prints: a command's docstring, its flags, and its keys.

    options: each flag as it is written, and what is said of it. leaves: the keys that are
    listed below the heading, with their defaults; None for all of Config's, with the values
    of the --config file beside --help where one is named.
    """
    if leaves is None and (cfg := of_help()) is not None:
        heading, leaves = OF_FILE, config.flat(dataclasses.asdict(cfg))
    lines = "\n".join(f"  {flag:<27} {text}" for flag, text in options.items())
    return f"{summary}\nFlags:\n{lines}\n\n{heading}\n{describe(leaves)}\n"


def of_help() -> config.Config | None:
    """Returns what the --config file beside --help makes; None where there is none.

    Ends the program with one line where the file is refused.
    """
    words, file = without_file([at_home(arg) for arg in sys.argv[1:]])
    if not (file and HELP & set(words)):
        return None
    try:
        return config.freeze(of_file(file))
    except ValueError as error:
        fail(error)


def describe(leaves: dict | None = None) -> str:
    """Returns keys with their defaults, one a line; None: every key of Config."""
    leaves = (
        config.flat(dataclasses.asdict(config.Config())) if leaves is None else leaves
    )
    lines, declared = [], config.declared()
    for key, value in leaves.items():
        if place := declared.pop(key.rpartition(".")[0], ""):
            lines.append(f"  # {place}")
        lines.append(f"  --config.{key}={value!r}")
    return "\n".join(lines)


def from_command_line(argv: list[str], example: str) -> config.Config:
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
    tree, _ = parse(words, of_file(file) if file else config.default())
    if not file:
        raise ValueError(f"--config=FILE is required, such as {example}")
    if distributed.value or coordinator.value:
        processes.join(coordinator.value, count.value, index.value, seconds.value)
    elif idle := [f"--{flag.name}" for flag in (count, index, seconds) if flag.present]:
        raise ValueError(
            f"{' and '.join(idle)}: no other process is joined by that alone; add "
            "--coordinator=HOST:PORT of process 0, or --distributed, which finds it out"
        )
    cfg = config.freeze(tree)
    if processes.group is not None:
        processes.agree(facts(cfg))
    for line in of_other_methods(words, cfg.method):
        exits.warn(line)
    return cfg


# What RL's keys begin with, and of them those that other methods read, or their evaluation.
OF_RL = (
    "rl.",
    "value_optim.",
    *(f"objective.{key}" for key in ("loss", "clip", "beta", "kl", "value_weight")),
)
OF_ALL = ("rl.reward", "rl.truncated", "rl.entropy_floor")


def of_other_methods(argv: list[str], method: str) -> list[str]:
    """Returns a line for each key that is set on a command line and of another method.

    A config file may set them: whoever changes its method need not take them out.
    """
    foreign, own = (("sft.",), "rl.*") if method == "rl" else (OF_RL, "sft.*")
    if method == "dpo":
        own += ", and objective.reference_beta for its beta"
    return [
        f"--config.{key} is not read with method={method!r}, whose keys are {own}"
        for _, key, _ in overrides(argv)
        if key.startswith(foreign) and key not in OF_ALL
    ]


def facts(cfg: config.Config) -> dict[str, str]:
    """Returns what has to be the same in all processes of a run, by names for people."""
    leaves = config.flat(dataclasses.asdict(cfg))
    out = {f"config.{key}": repr(x) for key, x in leaves.items() if key not in LOCAL}
    train = data.mixture(cfg.data.train) if cfg.data.train else {}
    out["data.train's content"] = processes.contents(train)
    heldout = filter(None, data.files(cfg.data.heldout))
    out["data.heldout's content"] = " ".join(map(processes.content, heldout))
    model = snapshot(cfg.model.path)
    for name in MODEL_FILES if model.is_dir() else ():
        out[f"model.path's {name}"] = processes.content(model / name)
    for key in ("model.path", "model.vq", "rl.value_path", "reward.model"):
        checkpoint = model if key == "model.path" else pathlib.Path(leaves[key])
        if leaves[key] and (checkpoint / "config.json").is_file():
            with contextlib.suppress(OSError):  # what is damaged is refused by name
                for name, (size, crc) in repository.marks(checkpoint).items():
                    out[f"{key}'s {name}"] = f"{size:,} bytes with CRC-32 {crc:08x}"
        elif key in LOCAL:  # whoever reads it says what is wrong
            out[key] = repr(leaves[key])
    with contextlib.suppress(ValueError):  # whoever makes the grader says what is wrong
        out |= rewards.sources(cfg.rl.reward, cfg.reward)  # each process grades a share
    out["the source of dllm_jax"] = processes.sources()
    own = jax.local_devices()  # a host may have lost some of its chips
    out["devices"] = f"{len(own)} x {own[0].platform}"
    versions = folder.versions()
    return out | {name: versions[name] for name in folder.PACKAGES}


def snapshot(path: str) -> pathlib.Path:
    """Returns the folder of a checkpoint, by a hub's name too; the path where it is none."""
    with contextlib.suppress(ValueError):
        return repository.find(path)
    return pathlib.Path(path)


def check_weights(path: str, marks: dict) -> None:
    """Raises ValueError where a checkpoint, read by now, is no more what it was before.

    marks: of that time, repository.marks of its files: what is written down of the answers.
    """
    now = {}
    with contextlib.suppress(ValueError, OSError):  # where it is gone
        now = repository.marks(repository.find(path))
    changed = [x for x in {**marks, **now} if marks.get(x) != now.get(x)]
    if changed:
        raise ValueError(
            f"model.path={path!r}: {changed[0]} changed while it was read: nobody can tell "
            "which weights these are; start the same command again"
        )


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
    if pathlib.Path(named).is_file():  # its colons are of the path
        path, preset = named, ""
    if not pathlib.Path(path).is_file():
        raise ValueError(f"--config={path}: there is no such file")
    if path.endswith((".yaml", ".yml")):
        raise ValueError(
            f"--config={path}: a config file is Python; python -m dllm_jax.config {path} "
            "prints one that does what dLLM-RL's YAML does"
        )
    tree = config.default()
    try:
        get_config = runpy.run_path(path).get("get_config")
        if not callable(get_config):
            raise ValueError("it has no function get_config")  # noqa: TRY004 (refuses)
        made = get_config(*presets_of(get_config, preset))
        if type(made) is not ml_collections.ConfigDict:
            raise ValueError(f"get_config returns {made!r:.40}, which is no ConfigDict")
        for name, value in made.items():
            if is_section(tree.get(name)) and not is_section(value):
                raise ValueError(f"{name}={value!r:.40}: {name} is a section of keys")
        tree.update(made)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever its author wrote)
        raise ValueError(f"--config={path}{place_and_reason(error, path)}") from None
    return tree


def presets_of(get_config, preset: str) -> list[str]:
    """Returns the arguments of a file's get_config: the preset, if one is named.

    Raises ValueError where it takes none, does not do without one, or wants something else.
    """
    taken = inspect.signature(get_config)

    def takes(*given) -> bool:
        try:
            taken.bind(*given)
        except TypeError:
            return False
        return True

    given = [preset] if preset else []
    if takes(*given):
        return given
    if preset and takes():
        raise ValueError(f"it has no presets, and so no {preset!r}")
    if not takes("a preset"):
        raise ValueError(f"get_config{taken} takes other arguments than a preset")
    raise ValueError("name one of its presets: --config=FILE:PRESET")


def is_section(x) -> bool:
    """Returns whether a value in a tree has keys of its own."""
    return isinstance(x, ml_collections.ConfigDict)


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
    if isinstance(error, checks.Refused) and error.field == "preset":
        place = ""  # no error of the file's
    refused = type(error) in (ValueError, checks.Refused)
    kind = "" if refused else f"{type(error).__name__}: "
    hint = ""
    if isinstance(error, ModuleNotFoundError) and error.name == "configs":
        hint = (
            "; a file of the repository's configs/ needs that folder: run where it lies"
        )
    return f"{place}: {kind}{' '.join(str(error).split())}{hint}"


def parse(
    argv: list[str],
    tree: ml_collections.ConfigDict,
    flag_values: flags.FlagValues = flags.FLAGS,
    arguments: int = 0,
    meant: dict[str, str] | None = None,
) -> tuple[ml_collections.ConfigDict, list[str]]:
    """Parses absl's flags, and with them --config.a.b=value, changes of the tree.

    meant: see `unknown_flag`. Returns (the tree, what is no flag: at most so many
    `arguments`). Raises ValueError for anything unknown: a flag, a leaf of Config; and for a
    value that a leaf cannot have.
    """
    check_overrides(argv)
    given = {"flag_values": flag_values, "sys_argv": argv}
    try:
        holder = config_flags.DEFINE_config_dict("config", tree, **given)
        words = flag_values(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        raise ValueError(unknown_flag(error.flagname, flag_values, meant)) from None
    except (flags.Error, TypeError, ValueError) as error:
        raise ValueError(
            of_kind(argv, tree) or str(error).strip().splitlines()[-1]
        ) from None
    if len(words) > arguments:
        word = words[arguments]
        file = meant is None and word.partition(":")[0].endswith(".py")
        hint = f"did you mean --config={word}?" if file else OVERRIDES
        raise ValueError(f"unknown argument {word!r}; {hint}")
    return holder.value, words


def unknown_flag(
    name: str, known: flags.FlagValues, meant: dict[str, str] | None = None
) -> str:
    """Returns the message for a flag that does not exist, with what may be meant.

    meant: the keys that have an effect on the command, and flags that stand for some of
    them, by how each is written on its command line; None: all keys have one.
    """
    if meant is None:
        meant = {
            f"--config.{key}": key
            for key in config.keys(dataclasses.asdict(config.Config()))
        }
    bare = name.replace("-", "_")
    named = [
        x
        for x, key in meant.items()
        if bare in (key, key.rpartition(".")[2], key.replace(".", "_"))
    ]
    own = {x: f"--{x.replace('_', '-') if '-' in name else x}" for x in known}
    own |= {key: x for x, key in meant.items()}
    own |= {x[2:].replace("-", "_"): x for x in meant}
    dots = "." in bare  # it is to be a key, or else a flag
    alike = [x for x in own if ("." in x) == dots]
    begun = [x for x in alike if x.startswith(f"{bare}_")]
    # Keys have much in common.
    near = begun or difflib.get_close_matches(bare, alike, 1, 0.8 if dots else 0.6)
    found = named or [own[x] for x in near]
    hint = f"; did you mean {' or '.join(found)}?" if found else "; see --help"
    return f"Unknown command line flag {name!r}{hint}"


def of_kind(argv: list[str], tree: ml_collections.ConfigDict) -> str:
    """Returns the message for the first override whose value its leaf cannot have, or ""."""
    leaves = config.flat(tree.to_dict())
    for _, key, text in overrides(argv):
        kind = type(leaves.get(key))
        if text is not None and kind in KINDS and not parses(text, kind):
            return f"--config.{key}={checks.shown(text)[1:-1]}: must be {KINDS[kind]}"
    return ""


def parses(text: str, kind: type) -> bool:
    """Returns whether a text is a value of a kind, as absl's flags read them."""
    if kind is bool:
        return text.lower() in ("true", "t", "1", "false", "f", "0")
    try:
        kind(text)
    except ValueError:
        return False
    return True


def page_arguments(argv: list[str], named: str, out: str, **texts: str):
    """Parses the arguments of a command that writes a page of one path or of two.

    named: what the paths are. out: the help of --out, or -o; texts: the defaults and helps
    of further flags. Returns (the flags' values, the paths).
    """
    values = flags.FlagValues()
    values.set_gnu_getopt()  # flags may follow the paths
    flags.DEFINE_string("out", None, out, short_name="o", flag_values=values)
    for name, text in texts.items():
        flags.DEFINE_string(name, "", text, flag_values=values)
    try:
        _, *paths = values(argv)
    except flags.Error as error:
        raise ValueError(str(error).splitlines()[-1]) from None
    if len(paths) not in (1, 2):
        raise ValueError(f"name one or two {named}, not {len(paths)}")
    if values.out is not None:
        check_page(pathlib.Path(values.out))
    return values, paths


def check_page(out: pathlib.Path):
    """Raises ValueError where a page cannot go to `out`, or would replace what is no page."""
    if out.is_dir() or not out.parent.is_dir():
        reason = "a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise ValueError(f"--out={out}: {reason}; name a file, such as page.html")
    if out.is_file() and out.suffix not in (".html", ".htm"):
        raise ValueError(
            f"--out={out} is there, and no page: name a file that ends in .html"
        )
    try:  # before a page is made
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise ValueError(
            f"--out={out}: it cannot be written: {error.strerror}; name another file"
        ) from None


def overrides(argv: list[str]) -> list[tuple[str, str, str | None]]:
    """Returns (the argument, its key, its text) of each that sets one of the configuration's.

    The text is None where there is none in it: --noconfig.KEY, and one that follows.
    """
    found = (
        re.fullmatch(r"--?(?:no)?config\.([^=]*)(?:=(.*))?", x, re.DOTALL) for x in argv
    )
    return [(x[0], x[1], x[2]) for x in found if x]


def check_overrides(argv: list[str]):
    """Raises ValueError for a leaf that Config lacks."""
    known = config.keys(dataclasses.asdict(config.Config()))
    for _, key, _ in overrides(argv):
        if key not in known:
            raise ValueError(config.unknown(key, known))


def fail(error: Exception):
    """Ends the program with one line if it refuses something; any other is a defect."""
    if not exits.refuses(error):
        raise error
    print(f"error: {error}", file=sys.stderr)
    sys.exit(exits.REFUSED)
