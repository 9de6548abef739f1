r"""Wrong inputs, each to the command that reads it: one line, and nothing is left behind.

A case is what is wrong and what the line must say. Where a table is written as text, a line
is a name (or a key), and behind it what it becomes; `\u0000` and the like are JSON's.
"""

import dataclasses
import gzip
import json
import math
import pathlib

import absl.flags
import hypothesis
import pytest
from hypothesis import strategies as st

from dllm_jax import command_line, config, data, generate
from dllm_jax.rl import rewards
from dllm_jax.rl.config import RewardConfig
from tests import properties, served

ROOT = pathlib.Path(__file__).parents[1]
MODEL = ROOT / "examples" / "arithmetic" / "model"
GOOD = {"question": "1+1", "answer": "2", "response": "2"}
FEW = "examples/arithmetic/heldout.jsonl"  # problems, so soon read
TURN = {"role": "user", "content": "1+1"}


@pytest.fixture
def refused(tmp_path):
    """Returns a function that runs a command and asks for its refusal."""

    def run(entry: str, *flags, says: str | tuple[str, ...]):
        before = sorted(tmp_path.rglob("*"))
        done = served.run(entry, [str(flag) for flag in flags])
        assert done.returncode == 2, done.stderr[-2000:] + done.stdout[-500:]
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, (
            done.stderr[-2000:]
        )
        for words in (says,) if isinstance(says, str) else says:
            assert words in done.stderr
        assert len(done.stderr) < 1000
        assert sorted(tmp_path.rglob("*")) == before

    return run


def lines(table: str):
    """Yields (name, what stands behind it) of a table's lines."""
    for line in table.strip().split("\n"):
        name, _, content = line.strip().partition(" ")
        yield name, content.strip()


def written(path: pathlib.Path, content) -> pathlib.Path:
    """Writes bytes, a text, or records as lines."""
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def train(folder: pathlib.Path, method: str = "rl") -> list[str]:
    """Returns the flags of a run on the bundled model, in a folder."""
    flags = ["--config=configs/smoke.py", f"--config.run.folder={folder / 'run'}"]
    flags += ["--config.run.compile_cache=", "--config.data.heldout="]
    flags += [f"--config.data.train={FEW}"]
    return flags + [f"--config.{key}" for key in METHODS[method]]


METHODS = {
    "rl": (),
    "sft": ("method=sft", "noise.kind=bernoulli"),
    "trace": ("method=sft",),
    "dpo": (
        *("method=dpo", "noise.kind=subset", "objective.aggregate=elbo"),
        "objective.reference_beta=0.2",
    ),
}

# ---- Values ----------------------------------------------------------------------------

VALUES = """
    seed -1 4294967296 1.5 one
    method ppo
    model.path none/at/all /dev/null
    model.dtype int8
    model.remat some
    model.kernels gpu
    model.attention sideways
    model.shift 2 -2
    model.mask_id 112 -2 2147483648
    model.lora_rank -1 99999999999
    model.lora_alpha nan inf 0 -1
    model.lora_targets wq
    model.tiles -1 2147483648
    model.tower True
    model.image_size -1 5000
    model.image_fit stretch
    data.template none
    data.post_num -2 2147483648
    data.seed -1 2147483648
    sampler.block -1 2147483648
    sampler.steps_per_block -1
    sampler.strategy greedy
    sampler.threshold nan inf -inf
    sampler.target best
    sampler.rank_temperature nan inf -1
    sampler.pad_penalty nan inf 0.5
    sampler.entropy_bound nan inf -1
    sampler.cache most
    sampler.horizon -1 5
    sampler.answers sound image
    sampler.unmasking slow
    sampler.guidance nan inf -1 2
    sampler.rank_cooling True
    sampler.temperature nan inf -1 1e39 1e-9 0
    sampler.top_k -1
    sampler.top_p nan 0 1.5 1e-40
    sampler.max_prompt 0 -5
    sampler.max_new 0 2147483648
    sampler.stop_ids -1 112 3
    sampler.rows 0 -1
    sampler.page 0 65537
    sampler.pages -1
    sampler.prefill 0
    noise.kind blur
    noise.draws 0 2 1025
    noise.shrink 0
    noise.rounds -1 2
    noise.pick entropy
    noise.rate step
    noise.lower nan -0.1 0.95
    noise.upper nan 0 1.1
    noise.grid round
    noise.block -1 6
    objective.loss best
    objective.clip nan inf -1 0
    objective.clip_high nan -0.1
    objective.beta nan inf -1
    objective.reference_beta nan inf -0.1
    objective.upper_weight nan -0.1 1.1
    objective.upper_power nan inf 0.5
    objective.kl k9
    objective.aggregate sum
    objective.value_weight nan inf -1
    objective.value_clip -0.5
    objective.reference_beta_final 0.1
    objective.entropy_bonus -0.1
    objective.likelihood steps
    objective.importance_cap nan inf -1 0.5
    objective.nll_weight nan inf -0.1
    rl.steps 0 -1 2147483648
    rl.prompts 0
    rl.group 0 1
    rl.reward foo
    rl.value both
    rl.gamma nan inf -3 1.01
    rl.lam nan -inf 7 -0.1
    rl.advantage none_at_all
    rl.speed nan inf -1
    rl.filter best
    rl.min_solved nan -0.1 1.1
    rl.max_solved nan 1.5
    rl.updates 0 9999
    rl.max_prompts 1
    rl.rest_after -1
    rl.rest_for 0 9
    rl.curriculum 1.5
    rl.truncated true
    rl.truncated_tail 5
    rl.answers_per_update 9999
    rl.epochs 0
    rl.target_kl -0.01
    rl.entropy_floor nan
    rl.value_warmup 2147483647
    rl.value_epochs 0
    rl.reference_reset -1 4
    rl.value_path nowhere
    rl.trusted_gap nan inf -2 -0.5
    batch.rows 0 -8
    batch.tokens -1 40
    policy_optim.lr nan inf -1 1e39
    policy_optim.schedule step
    policy_optim.warmup -1
    policy_optim.horizon -5
    policy_optim.final nan -2 1.5
    policy_optim.b1 nan 2 1 -0.1
    policy_optim.b2 nan 1 -1
    policy_optim.eps nan inf 0 -1 1e-40
    policy_optim.weight_decay nan inf -1
    policy_optim.max_grad_norm nan inf 0 -1
    value_optim.lr nan inf -1
    value_optim.b1 2
    value_optim.max_grad_norm 0 -1
    sft.steps 0
    sft.examples 0 -1
    eval.every 0
    eval.problems -1
    eval.temperature nan inf -1
    eval.answers 0
    eval.best nan inf -1 101
    eval.samplers wide a:rows=3 a:block=x a:block=0
    eval.sweep sampler.block=2 threshold=0.5 sampler.threshold= sampler.threshold=x
    mesh.data 0 -2
    mesh.fsdp 0 -2
    mesh.model 0 -2 3
    mesh.rollout sideways
    run.save_every 0
    run.keep 0
    run.keep_every -1
    run.keep_best reward heldout_acuracy
    run.patience 3
    run.samples -1
    rl.gruop 8
    rl 5
"""


def refusal(flags: list[str]) -> str:
    """Returns what a run says of its keys before it looks at anything else, or ""."""
    words, file = command_line.without_file(["train", *flags])
    try:
        tree, _ = command_line.parse(
            words, command_line.of_file(file), absl.flags.FlagValues()
        )
        config.freeze(tree)
    except ValueError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 1000
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("key", "value", "first"),
    [
        (key, value, value == values.split()[0])
        for key, values in lines(VALUES)
        for value in values.split()
    ],
)
def test_a_value_that_makes_no_sense(refused, tmp_path, key, value, first):
    """The first of each key by the command, and what is not refused sooner."""
    group, _, leaf = key.partition(".")
    if (key, value) == ("rl", "5"):
        leaf = "rl."  # a group has no value
    elif key == "model.path":
        leaf = value
    flags = [*train(tmp_path), f"--config.{key}={value}"]
    if not first and (said := refusal(flags)):
        assert (leaf or group) in said
    else:
        refused("dllm_jax.train", *flags, says=leaf or group)


@pytest.mark.parametrize("name", ["policy_optim", "value_optim"])
def test_a_value_is_named_with_its_place(refused, tmp_path, name):
    flags = [*train(tmp_path), f"--config.{name}.lr=nan"]
    refused(
        "dllm_jax.train", *flags, says=f"error: {name}.lr=nan: must be a number (0, or"
    )


TOGETHER = """
    noise.kind=bernoulli rl.value='own': a value model would see the future
    noise.kind=complement rl.value='own'
    noise.grid=response noise.grid='response'
    noise.kind=bernoulli,rl.value=head rl.value='head': a value model would see
    objective.loss=spg spg and dpo train evidence bounds
    method=dpo spg and dpo train evidence bounds
    rl.trusted_gap=0.1,rl.value=head rl.trusted_gap=0.1
    rl.trusted_gap=0.1,noise.kind=ar rl.trusted_gap
    rl.trusted_gap=0.1,sampler.int8=true set it to 0
    batch.tokens=1 set it to 52 or more
    batch.tokens=48 set it to 52 or more
    sampler.block=8,batch.tokens=1 set it to 56 or more
    sampler.steps_per_block=5 block of 4
    sampler.target=random sampler.threshold
    sampler.max_prompt=2 no prompt fits into sampler.max_prompt=2
    rl.group=1 rl.advantage='zscore' compares
    rl.group=1,rl.advantage=none,rl.filter=varied no group of one answer is varied
    rl.group=1,rl.advantage=none,rl.min_solved=0.2,rl.max_solved=0.8 rl.group=1 answers is solved so often
    rl.value=head,policy_optim.lr=0 the head has the policy's optimizer
    sampler.temperature=1e9 sampler.temperature=1000000000.0
    model.attention=causal,noise.kind=subset,rl.value=none but the model's attention is causal
    model.attention=causal the model's shift is 0
    model.lora_rank=2,model.lora_targets=nothing no weight 'nothing'
    model.lora_rank=129 at most 128, the model's width
    mesh.data=2,mesh.fsdp=1 does not cover
    mesh.model=3 mesh.model=3 does not divide
    data.question=nothing no field 'nothing', it has ['answer', 'question', 'response']; data.question names
    data.answer=anwser did you mean 'answer'?; data.answer names the field
    data.train=MATH_train.json python -m dllm_jax.data get math_train downloads
    data.train= data.train is empty: name the file
    data.heldout=nothing.jsonl 'nothing.jsonl': no such file
"""


@pytest.mark.parametrize(("keys", "says"), list(lines(TOGETHER)))
def test_values_that_do_not_go_together(refused, tmp_path, keys, says):
    data = written(tmp_path / "x.jsonl", [GOOD])
    flags = [*train(tmp_path), f"--config.data.train={data}"]
    flags += [f"--config.{key}" for key in keys.split(",")]
    refused("dllm_jax.train", *flags, says=says)


@pytest.mark.parametrize("entry", ["train", "eval"])
@pytest.mark.parametrize("folder", ["", "README.md", "README.md/run", "/proc/run"])
def test_a_folder_that_cannot_be_written(refused, tmp_path, entry, folder):
    file = {"train": "smoke", "eval": "eval"}[entry]
    flags = [f"--config=configs/{file}.py", f"--config.run.folder={folder}"]
    refused(f"dllm_jax.{entry}", *flags, says="run.folder=")


# ---- The command line, and config files ------------------------------------------------

COMMANDS = """
    train --bogus  'bogus'
    train --resume=maybe  <auto|must|never>
    train --resume=must  has no checkpoint
    train more  'more'
    train --rl.steps=3  did you mean --config.rl.steps?
    train --steps=3  did you mean --config.rl.steps or --config.sft.steps?
    train --rl-steps=3  did you mean --config.rl.steps?
    train --rl.step=3  did you mean --config.rl.steps?
    train --conf.rl.steps=3  did you mean --config.rl.steps?
    train --no.such=3  'no.such'; see --help
    train configs/tracerl.py:sums  did you mean --config=configs/tracerl.py:sums?
    train --resum=must  did you mean --resume?
    train --config.rl  'rl' is a section: set its keys, such as 'rl.steps'
    train --config.rl.prompts=2.5  --config.rl.prompts=2.5: must be a whole number
    train --config.rl.gamma=1x  --config.rl.gamma=1x: must be a number
    train --config.rl.whiten=yes  --config.rl.whiten=yes: must be True or False
    train --config.data.train=examples  'examples': a folder; name a file in it
    train --config.model.path=~/none/at/all  /none/at/all
    train --config=  --config=FILE is required
    train --config=configs  --config=configs: there is no such file
    train --config=configs/none.py  --config=configs/none.py: there is no such file
    train --config=configs/smoke.py:preset  configs/smoke.py: it has no presets, and so no 'preset'
    train --config=configs/smoke.py --config.=3  unknown config key ''
    train --config=configs/tracerl.py:none  --config=configs/tracerl.py: preset='none': choose from
    train --config.mesh=1  'mesh'
    train --config.sampler.stop_ids=abc  stop_ids
    train --config.data.shuffle=perhaps  shuffle
    train --config=configs/sft.py --config.model.path=runs/none/blank  the command that makes it was not run
    train --config=configs/sft.py:trace --config.data.train=runs/none.jsonl  the command that makes it was not run
    eval --bogus  'bogus'
    eval more  'more'
    eval --config=configs/none.py  --config=configs/none.py: there is no such file
    eval --config.data.heldout=  data.heldout is empty
    eval --config.data.heldout=none.jsonl  'none.jsonl': no such file
    eval --config.eval.answers=nan  eval.answers
    eval --config.seed=-1  seed=-1
    generate  either one prompt or --prompts
    generate hello  --model=DIR is required
    generate --model= hello  --model=DIR is required
    generate --model=none/at/all hello  is not a folder, nor a hub repository like org/name; looked for in
    generate --model=tests hello  tests is not a checkpoint
    generate --model=MODEL  either one prompt or --prompts
    generate --model=MODEL hello world  'world'
    generate --modle=MODEL hello  'modle'
    generate --model=MODEL hello --top_p=0.5  --top-p is now --config.sampler.top_p
    generate --model=MODEL hello --imgae-out=x.png  did you mean --image-out?
    trace  name one or two files of answers, not 0
    trace x.jsonl --out=none/at/all.html  there is no folder none/at
    trace x.jsonl --out=tests  --out=tests: a folder
    trace README.md --out=README.md  --out=README.md is there, and no page
    report runs --out=pyproject.toml  --out=pyproject.toml is there, and no page
    generate --model=MODEL hello --prompts=x.jsonl  either one prompt or --prompts
    generate --model=MODEL hello --tempered-threshold  sampler.tempered_threshold
    generate --model=MODEL hello --temperature=nan  sampler.temperature=nan
    generate --model=MODEL hello --temperature=-1  sampler.temperature=-1
    generate --model=MODEL hello --threshold=nan  sampler.threshold=nan
    generate --model=MODEL hello --max-new-tokens=0  sampler.max_new=0
    generate --model=MODEL hello --block=-4  sampler.block=-4
    generate --model=MODEL hello --seed=-1  seed=-1
    generate --model=MODEL hello --seed=2147483648  seed=2147483648
    generate --model=MODEL hello --rows=0  sampler.rows=0
    generate --model=MODEL hello --rows=many  many
    generate --model=MODEL hello --strategy=greedy  sampler.strategy='greedy'
    generate --model=MODEL hello --dtype=int8  model.dtype='int8'
    generate --model=MODEL hello --config.mesh.data=0  mesh.data=0
    eval --config.sampler.rows=2000000  lower sampler.rows or sampler.pages, or raise mesh.model
    generate --model=MODEL hello --config.sampler.stop_ids=112  112 never ends
    generate --model=MODEL hello --config.sampler.stop_ids=3  3 never ends
    generate --model=MODEL hello --config=configs/none.py  configs/none.py: there is no
    generate --model=MODEL --prompts=none.jsonl  'none.jsonl': no such file
    generate --model=MODEL --prompts=none --out=none/x.jsonl  none/x.jsonl
    convert  command
    convert to-nothing  to-nothing
    convert to-orbax  HF_DIR
    convert to-orbax none/at/all OUT  'none/at/all' is not a folder
    convert to-orbax tests OUT  tests is not a checkpoint
    convert to-orbax MODEL tests  'tests' exists
    convert to-hf tests tests --like=MODEL  'tests' exists
    convert to-orbax MODEL OUT --dtype=int8  int8
    convert to-hf none/at/all OUT --like=MODEL  none/at/all is not a folder
    convert to-hf tests OUT --like=none/at/all  'none/at/all' is not a folder
    convert to-hf tests OUT --like=MODEL  no checkpoints
    convert to-hf tests OUT  --like
    convert to-hf tests OUT --like=MODEL --step=one  one
    config  a YAML file
    config none.yaml  none.yaml: there is no such file
    config tests  tests: there is no such file
"""
FILES = {"train": "smoke", "eval": "eval"}


def commands():
    """Yields (arguments, what the refusal says) of a line: two spaces stand between."""
    for line in COMMANDS.strip().split("\n"):
        command, _, says = line.strip().partition("  ")
        yield command, says


@pytest.mark.parametrize(("command", "says"), list(commands()))
def test_a_command_that_cannot_be_followed(refused, tmp_path, command, says):
    entry, *flags = command.replace("MODEL", str(MODEL)).split()
    flags = [flag.replace("OUT", str(tmp_path / "out")) for flag in flags]
    if entry in FILES:
        own = [f"--config.run.folder={tmp_path / 'run'}"]
        flags = [f"--config=configs/{FILES[entry]}.py", *own, *flags]
    refused(f"dllm_jax.{entry}", *flags, says=says)


HEAD = "from dllm_jax import config\ndef get_config():\n    c = config.default()\n"
CONFIG_FILES = {
    "x.py": ("def get_config(:\n", "x.py, line 1: SyntaxError"),
    "import.py": ("import nosuchmodule\n", "line 1: ModuleNotFoundError"),
    "outside.py": (
        "raise ModuleNotFoundError(name='configs')\n",
        "needs that folder: run where it lies",
    ),
    "raises.py": (HEAD + "    1 / 0\n", "line 4: ZeroDivisionError"),
    "key.py": (HEAD + "    c.none.x = 1\n", "line 4: AttributeError"),
    "new.py": (HEAD + "    c.rl.gruop = 1\n    return c\n", "'rl.gruop'"),
    "kind.py": (HEAD + "    c.rl.steps = 'one'\n    return c\n", "line 4: TypeError"),
    "huge.py": (HEAD + "    c.seed = 10**5000\n    return c\n", "4300 digits"),
    "true.py": (HEAD + "    c.seed = True\n    return c\n", "seed=True"),
    "nan.py": (HEAD + "    c.rl.gamma = float('nan')\n    return c\n", "rl.gamma=nan"),
    "nul.py": (HEAD + "    c.model.path = 'a\\0b'\n    return c\n", "model.path="),
    "ids.py": (HEAD + "    c.sampler.stop_ids = ('a',)\n    return c\n", "stop_ids"),
    "part.py": (HEAD + "    return c.sampler\n", "unknown config key"),
    "section.py": (HEAD + "    return c.rl\n", "reward='math': reward is a section"),
    "none.py": (HEAD, "get_config returns None"),
    "five.py": ("def get_config():\n    return 5\n", "get_config returns 5"),
    "dict.py": ("def get_config():\n    return {}\n", "get_config returns {}"),
    "group.py": (HEAD + "    c.rl = 5\n    return c\n", "group.py, line 4: TypeError"),
    "exit.py": ("import sys\nsys.exit(0)\n", "line 2: SystemExit"),
    "deep.py": ("def f():\n    f()\nf()\n", "RecursionError"),
    "empty.py": ("", "empty.py: it has no function get_config"),
    "number.py": ("get_config = 5\n", "number.py: it has no function get_config"),
    "one.py": (
        "def get_config(name):\n    return 5\n",
        "one.py: name one of its presets",
    ),
    "two.py": (
        "def get_config(name, more):\n    return 5\n",
        "two.py: get_config(name, more) takes other arguments than a preset",
    ),
    "x.yaml": ("a: 1\n", "python -m dllm_jax.config"),
    "binary.py": (b"\x80\xff\x00\x01", "binary.py"),
    "nulls.py": (b"x = 1\n\x00", "nulls.py"),
    "utf16.py": ("x = 1\n".encode("utf-16"), "utf16.py"),
    "tabs.py": ("if 1:\n\tx = 1\n        y = 2\n", "tabs.py, line 3"),
}


@pytest.mark.parametrize("name", CONFIG_FILES)
def test_a_config_file_with_an_error_of_its_own(refused, tmp_path, name):
    content, says = CONFIG_FILES[name]
    entry = "train" if len(name) % 2 else "eval"  # which read it in one place
    file = written(tmp_path / name, content)
    refused(f"dllm_jax.{entry}", f"--config={file}", says=says)


# ---- Files of records ------------------------------------------------------------------

LINE = json.dumps(GOOD) + "\n"
DATASETS = {
    "utf16.jsonl": (LINE.encode("utf-16"), "line 1: UTF-16"),
    "latin1.jsonl": (LINE.encode() + b'{"question": "\xe9"}\n', "line 2: no UTF-8"),
    "surrogate.jsonl": ('{"question": "\\ud800", "answer": "1"}\n', "line 1: it has a"),
    "digits.jsonl": (
        '{"question": 1, "answer": ' + "9" * 5000 + "}",
        "line 1: not JSON",
    ),
    "nan.jsonl": ('{"question": "1", "answer": NaN}', "NaN is no number"),
    "infinity.jsonl": ('{"question": "1", "answer": -Infinity}', "-Infinity is no"),
    "1e999.jsonl": ('{"question": "1", "answer": 1e999}', "1e999 is no number"),
    "deep.jsonl": ("[" * 100_000 + "]" * 100_000, "line 1: not JSON"),
    "deep.json": ("[" * 100_000 + "]" * 100_000, "deep.json'"),
    "cut.jsonl": (LINE + LINE[:-9], "line 2: not JSON"),
    "cut.json": ("[" + LINE, "not JSON"),
    "list.jsonl": (LINE + "[1]\n", "record 2 is not a JSON object"),
    "null.jsonl": ("null\n", "record 1 is not a JSON object"),
    "object.json": (LINE, "must hold a list of records"),
    "text.json": ('"text"', "must hold a list of records"),
    "empty.jsonl": ("", "it is empty"),
    "blank.jsonl": ("\n\r\n", "it is empty"),
    "empty.json": ("[]", "it is empty"),
    "x.parquet": (b"PAR1 and no more", "x.parquet'"),
    "cut.jsonl.gz": (gzip.compress(LINE.encode() * 99)[:-20], "cannot be read"),
    "bad.json.gz": (gzip.compress(b"{}"), "must hold a list of records"),
    "nul.jsonl": (LINE + "\0\n", "line 2: not JSON"),
    "zip.jsonl": (b"PK\x03\x04\x80", "line 1"),
}


@pytest.mark.parametrize("name", DATASETS)
def test_a_file_that_holds_no_records(refused, tmp_path, name):
    content, says = DATASETS[name]
    file = written(tmp_path / name, content)
    flags = [*train(tmp_path), f"--config.data.train={file}"]
    refused("dllm_jax.train", *flags, says=says)


NESTED = '[{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]'
RECORDS = {
    "rl": r"""
        {"question": null}              field 'question' is null
        {"question": [1]}               field 'question' is [1]
        {"question": {"a": 1}}          field 'question' is {'a': 1}
        {"question": true}              field 'question' is True
        {"question": ""}                the question is empty
        {"question": " \n"}             the question is empty
        {"answer": null}                field 'answer' is null
        {"answer": ""}                  field 'answer': the gold answer '' is empty
        {"answer": "####"}              the gold answer '####' is empty
        {"answer": [2]}                 field 'answer' is [2]
        {"answer": false}               field 'answer' is False
        {"answer": "DIGITS"}            more than 4300 digits
        """,
    "sft": r"""
        {"response": null}              field 'response' is null
        {"response": ["a"]}             field 'response' is ['a']
        {"response": "<|MASK|>"}        its answer has the mask token
        {"messages": 5}                 needs messages
        {"messages": "hello"}           needs messages
        {"messages": null}              needs messages
        {"messages": []}                needs messages
        {"messages": {}}                needs messages
        {"messages": ["hello"]}         message 1 is 'hello'
        {"messages": [{}]}              message 1 is {}
        {"messages": [[]]}              message 1 is []
        {"messages": [{"role": "user"}]}            message 1 is {'role': 'user'}
        {"messages": [{"role": "human", "content": "1"}]}       role='human'
        {"messages": [{"role": ["user"], "content": "1"}]}      role=['user']
        {"messages": [{"role": "user", "content": "1"}]}        is not the assistant's
        {"messages": [{"role": "user", "content": null}]}       its content is None
        {"messages": [{"role": "user", "content": 5}]}          its content is 5
        {"messages": [{"role": "user", "content": []}]}         its content is []
        {"messages": [{"role": "user", "content": [5]}]}        part of type
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}  'image_url'
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]}       'text'
        {"prompt_ids": [5], "response_ids": [true]}     response_ids must be a list
        {"prompt_ids": [5], "response_ids": [1.0]}      response_ids must be a list
        {"prompt_ids": [5], "response_ids": [-1]}       response_ids must be a list
        {"prompt_ids": [5], "response_ids": ["a"]}      response_ids must be a list
        {"prompt_ids": [5], "response_ids": {}}         response_ids must be a list
        {"prompt_ids": [5], "response_ids": [112]}      beyond the model's vocabulary
        {"prompt_ids": [5], "response_ids": [2147483648]}       response_ids must be
        {"prompt_ids": [5], "response_ids": [3]}        the mask token
        {"prompt_ids": [], "response_ids": [5]}         its prompt has no tokens
        {"prompt_ids": null, "response_ids": [5]}       field 'prompt_ids' is null
        """,
    "trace": r"""
        {"prompt_ids": [5], "response_ids": [6]}                        needs a step_map
        {"prompt_ids": [5], "response_ids": [6], "step_map": [1099511627776]}   step_map
        {"prompt_ids": [5], "response_ids": [6], "step_map": [-1]}      step_map must
        {"prompt_ids": [5], "response_ids": [6], "step_map": [true]}    step_map must
        {"prompt_ids": [5], "response_ids": [6], "step_map": [1.5]}     step_map must
        {"prompt_ids": [5], "response_ids": [6], "step_map": []}        step_map has 0
        {"prompt_ids": [5], "response_ids": [6, 7], "step_map": [1]}    step_map has 1
        {"prompt_ids": [5], "response_ids": [6], "step_map": "1"}       step_map must
        """,
    "dpo": r"""
        {}                                              no field 'prompt'
        {"prompt": "1", "chosen": "a"}                  no field 'rejected'
        {"prompt": "1", "chosen": "1", "rejected": "1"}     'rejected' are the same
        {"prompt": "1", "chosen": "1", "rejected": "1<|im_end|>"}   'rejected' are the same
        {"prompt": "1", "chosen": "", "rejected": "1"}      'chosen' is neither a text
        {"prompt": "1", "chosen": "1", "rejected": " "}     'rejected' is neither a text
        {"prompt": "1", "chosen": ["1"], "rejected": "2"}   'chosen': needs messages
        {"prompt": "1", "chosen": [], "rejected": "2"}      'chosen': needs messages
        {"prompt": "1", "chosen": {}, "rejected": "2"}      'chosen' is neither a text
        {"prompt": "1", "chosen": 1, "rejected": "2"}       'chosen' is neither a text
        {"prompt": {}, "chosen": "1", "rejected": "2"}      field 'prompt' is {}
        {"prompt": ["1"], "chosen": "1", "rejected": "2"}   needs messages
        {"prompt": null, "chosen": "1", "rejected": "2"}    field 'prompt' is null
        {"prompt": "", "chosen": "1", "rejected": "2"}      the question is empty
        """,
}


@pytest.mark.parametrize(
    ("method", "line"),
    [
        (method, line.strip())
        for method, table in RECORDS.items()
        for line in table.strip().split("\n")
    ],
)
def test_a_record_that_cannot_be_used(refused, tmp_path, method, line):
    change, end = json.JSONDecoder().raw_decode(line)
    if change.get("answer") == "DIGITS":
        change["answer"] = "9" * 4301
    own = method == "dpo" or change.keys() & {"messages", "response_ids"}
    good = {"prompt_ids": [5], "response_ids": [6], "step_map": [1]}
    good |= GOOD | {"prompt": "1", "chosen": "1", "rejected": "2"}
    if method != "trace":
        good = {k: good[k] for k in (*GOOD, "prompt", "chosen", "rejected")}
    rows = [good, change if own else GOOD | change]
    file = written(tmp_path / "x.jsonl", rows)
    flags = [*train(tmp_path, method), f"--config.data.train={file}"]
    refused("dllm_jax.train", *flags, says=("record 2: ", line[end:].strip()))


PROMPTS = r"""
    {}                              needs prompt, question, messages or prompt_ids
    {"text": "hello"}               it has ['text']
    {"prompt": null}                field 'prompt' is null
    {"prompt": 1.5e300, "x": [[]], "prompt_ids": []}    prompt_ids must be one or more
    {"prompt": []}                  field 'prompt' is []
    {"prompt": {"a": 1}}            field 'prompt' is {'a': 1}
    {"prompt": false}               field 'prompt' is False
    {"messages": []}                needs messages
    {"messages": [{"role": "user"}]}        message 1 is
    {"messages": [{"role": "usr", "content": "1"}]}     role='usr'
    {"prompt_ids": []}              prompt_ids must be one or more
    {"prompt_ids": [112]}           prompt_ids must be
    {"prompt_ids": [-1]}            prompt_ids must be
    {"prompt_ids": [true]}          prompt_ids must be
    {"prompt_ids": [1.0]}           prompt_ids must be
    {"prompt_ids": "abc"}           prompt_ids must be
    {"prompt_ids": 5}               prompt_ids must be
    {"prompt_ids": null}            prompt_ids
    {"prompt_ids": [[5]]}           prompt_ids must be
"""


@pytest.mark.parametrize("line", [line.strip() for line in PROMPTS.strip().split("\n")])
def test_a_prompt_that_cannot_be_asked(refused, tmp_path, line):
    row, end = json.JSONDecoder().raw_decode(line)
    file = written(tmp_path / "x.jsonl", [{"prompt": "1+1"}, row])
    flags = [f"--model={MODEL}", f"--prompts={file}"]
    refused("dllm_jax.generate", *flags, says=line[end:].strip())


@pytest.mark.parametrize("name", ["utf16.jsonl", "surrogate.jsonl", "deep.jsonl"])
def test_a_file_that_holds_no_prompts(refused, tmp_path, name):
    content, says = DATASETS[name]
    file = written(tmp_path / name, content)
    refused("dllm_jax.generate", f"--model={MODEL}", f"--prompts={file}", says=says)


# ---- Checkpoints -----------------------------------------------------------------------

CONFIG_JSON = r"""
    {"model_type": null}                model_type None
    {"model_type": ["sdar"]}            model_type ['sdar']
    {"model_type": "gpt2"}              model_type 'gpt2'
    {"num_attention_heads": 0}          num_attention_heads=0
    {"num_attention_heads": "4"}        num_attention_heads='4'
    {"num_attention_heads": 3}          num_key_value_heads=2 does not go with
    {"num_attention_heads": true}       num_attention_heads=True
    {"num_key_value_heads": 0}          num_key_value_heads=0
    {"num_key_value_heads": -2}         num_key_value_heads=-2
    {"hidden_size": 0}                  hidden_size=0
    {"hidden_size": -128}               hidden_size=-128
    {"hidden_size": 128.0}              hidden_size=128.0
    {"hidden_size": 2147483648}         hidden_size=2147483648
    {"hidden_size": 64}                 has shape
    {"hidden_size": null}               hidden_size
    {"head_dim": 31}                    31 dimensions of a head rotate
    {"head_dim": 0}                     head_dim=0
    {"vocab_size": 0}                   vocab_size=0
    {"vocab_size": 3}                   outside the vocabulary
    {"intermediate_size": "wide"}       intermediate_size='wide'
    {"num_hidden_layers": 0}            num_hidden_layers=0
    {"num_hidden_layers": 4}            missing model.layers.3
    {"num_hidden_layers": 2}            unknown model.layers.2
    {"num_hidden_layers": 10000000}     num_hidden_layers=10000000
    {"rms_norm_eps": NaN}               config.json
    {"rms_norm_eps": -1}                rms_norm_eps=-1
    {"rms_norm_eps": "small"}           rms_norm_eps='small'
    {"rope_theta": 0.0001, "rope_scaling": {"rope_type": "yarn"}}   'yarn'
    {"rope_theta": -1}                  rope_theta=-1
    {"rope_theta": "1e4"}               rope_theta='1e4'
    {"rope_scaling": "linear"}          rope_scaling='linear'
    {"rope_scaling": [1]}               rope_scaling=[1]
    {"rope_scaling": {"rope_type": "llama3", "factor": 8}}      rope_scaling=
    {"block_size": 0}                   block_size=0
    {"block_size": "4"}                 block_size='4'
    {"block_size": -4}                  block_size=-4
    {"tie_word_embeddings": "yes"}      tie_word_embeddings='yes'
    {"mask_token_id": 112}              mask token 112 is outside
    {"mask_token_id": "mask"}           mask_token_id='mask'
    {"mask_token_id": -1}               mask token -1 is outside
    {"eos_token_id": 112}               eos_token_id=112
    {"eos_token_id": "end"}             eos_token_id='end'
    {"eos_token_id": -1}                eos_token_id=-1
    {"eos_token_id": [[0]]}             eos_token_id=[0]
    {"pad_token_id": 500}               pad_token_id=500
    {"pad_token_id": {}}                pad_token_id={}
    {"max_position_embeddings": "many"} max_position_embeddings='many'
    {"max_position_embeddings": -1}     max_position_embeddings=-1
    {"attention_bias": true}            attention_bias=True
    {"attention_pattern": 5}            attention_pattern=5
    {"logit_shift": 2}                  logit_shift=2
"""


def checkpoint(folder: pathlib.Path, **files) -> pathlib.Path:
    """Returns a copy of the bundled model in which some files hold something else.

    A file's name is written with two underscores for its dot; None: it is not there.
    """
    copy = folder / "model"
    copy.mkdir()
    for file in MODEL.iterdir():
        (copy / file.name).symlink_to(file)
    for name, content in files.items():
        file = copy / name.replace("__", ".")
        file.unlink(missing_ok=True)
        if content is not None:
            written(file, content)
    return copy


@pytest.mark.parametrize(
    "line", [line.strip() for line in CONFIG_JSON.strip().split("\n")]
)
def test_a_config_json_that_makes_no_model(refused, tmp_path, line):
    change, end = json.JSONDecoder().raw_decode(line)
    told = json.loads((MODEL / "config.json").read_text()) | change
    model = checkpoint(tmp_path, config__json=json.dumps(told))
    flags = [f"--model={model}", "1+1"]
    if end % 2:  # what one entry refuses all do: they read it in one place
        flags = [*train(tmp_path), f"--config.model.path={model}"]
    entry = "dllm_jax.train" if end % 2 else "dllm_jax.generate"
    refused(entry, *flags, says=line[end:].strip())


DOUBLES = """
    {% set n = namespace(x='x') %}
    {% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}
    {{ n.x }}
"""
TEMPLATES = {
    "raises": ("{{ raise_exception('no system role') }}", "fails: no system role"),
    "syntax": ("{{ messages", "fails: "),
    "undefined": ("{{ nothing.at_all }}", "'nothing' is undefined"),
    "escape": ("{{ ''.__class__.__mro__ }}", "__class__"),
    "import": ("{{ messages.__init__.__globals__ }}", "__init__"),
    "divides": ("{{ 1 / 0 }}", "division by zero"),
    "include": ("{% include '/etc/passwd' %}", "fails: "),
    "huge": ("{{ 'x' * 3000000000 }}", "writes without end"),
    "wide": ("{{ 'x'.center(3000000000) }}", "writes without end"),
    "long": ("{{ 'x' * 20000000 }}", "writes without end"),
    "doubles": (DOUBLES, "writes without end"),
    "digits": ("{{ 10 ** 5000 }}", "fails: Exceeds the limit"),
    "deep": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion depth"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_cannot_be_rendered(refused, tmp_path, name):
    template, says = TEMPLATES[name]
    model = checkpoint(tmp_path, chat_template__jinja=template)
    refused("dllm_jax.generate", f"--model={model}", "1+1", says=says)


OWN = json.loads((MODEL / "config.json").read_text())
MASKLESS = json.dumps({key: x for key, x in OWN.items() if key != "mask_token_id"})
ODD = '{"added_tokens_decoder": {"one": {"content": "<mask>"}}}'


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config__json": None}, "has no config.json"),
        ({"config__json": ""}, "config.json: cannot be read"),
        ({"config__json": "[]"}, "config.json: cannot be read: it holds no JSON obj"),
        ({"config__json": b"\xff\xfe{}"}, "config.json: cannot be read: line 1"),
        ({"config__json": "[" * 100_000}, "config.json: cannot be read"),
        ({"chat_template__jinja": None}, "template; add chat_template.jinja to it, or"),
        ({"tokenizer__json": "{}"}, "holds no usable tokenizer"),
        ({"tokenizer__json": "not JSON"}, "holds no usable tokenizer"),
        ({"tokenizer__json": b"\xff\x00"}, "holds no usable tokenizer"),
        ({"tokenizer_config__json": "[]"}, "holds no usable tokenizer"),
        ({"tokenizer_config__json": "{"}, "holds no usable tokenizer"),
        (
            {"config__json": MASKLESS, "tokenizer_config__json": ODD},
            "id that is no num",
        ),
        ({"model__safetensors": None}, "is not a checkpoint: it has neither"),
        ({"model__safetensors": ""}, "model.safetensors: cannot be read"),
        ({"model__safetensors": "no header"}, "model.safetensors: cannot be read"),
        ({"model__safetensors": b"\xff" * 64}, "model.safetensors: cannot be read"),
    ],
    ids=str,
)
def test_a_damaged_checkpoint(refused, tmp_path, files, says):
    model = checkpoint(tmp_path, **files)
    refused("dllm_jax.generate", f"--model={model}", "1+1", says=says)


@pytest.mark.parametrize("text", ["\udcff", "1+\udc80"])
def test_a_prompt_of_other_bytes(refused, text):
    refused("dllm_jax.generate", f"--model={MODEL}", text, says="lone surrogate")


# ---- dLLM-RL's YAML ---------------------------------------------------------------------

BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
YAML = {
    "empty": ("", "it has no keys"),
    "comment": ("# nothing\n", "it has no keys"),
    "list": ("- 1\n- 2\n", "it has no keys"),
    "scalar": ("5\n", "it has no keys"),
    "text": ("hello", "it has no keys"),
    "broken": ("a: [1\n", "not YAML"),
    "tabs": ("a:\n\t- 1\n", "not YAML"),
    "recursive": ("a: &x\n  b: *x\n", "aliases are not read"),
    "bomb": (BOMB, "aliases are not read"),
    "twice": ("rollout:\n  top_k: 1\nrollout:\n  top_k: 2\n", "'rollout' stands there"),
    "deep": ("[" * 100_000, "not YAML"),
    "binary": (b"\x80\xff", "line 1: no UTF-8"),
    "python": ("a: !!python/object/apply:os.getcwd []\n", "not YAML"),
    "documents": ("a: 1\n---\nb: 2\n", "not YAML"),
    "unknown": ("rollouts:\n  top_k: 1\n", "'rollouts.top_k'"),
    "nan": ("rollout:\n  temperature: .nan\n", "temperature=nan"),
    "infinity": ("rollout:\n  top_p: .inf\n", "top_p=inf"),
    "negative": ("rollout:\n  max_active: -1\n", "rows=-1"),
    "kind": ("rollout:\n  top_k: many\n", "rollout.top_k='many' is no whole number"),
    "list_value": ("rollout:\n  top_k: [1]\n", "rollout.top_k=[1] is no whole number"),
    "unhashable": ("rollout:\n  remasking_strategy: [a]\n", "remasking_strategy="),
    "steps": ("rollout:\n  steps: 4\n", "rollout.steps=4"),
    "zero": (
        "rollout:\n  steps: 4\n  max_gen_length: 0\n  block_size: 4\n",
        "rollout.max_gen_length=0: must be >= 1",
    ),
    "refers": ("rollout:\n  top_k: ${rollout.none}\n", "refers to no value"),
    "number": ("1: 2\n", "unknown key '1'"),
}


@pytest.mark.parametrize("name", YAML)
def test_a_yaml_file_that_is_none_of_theirs(refused, tmp_path, name):
    content, says = YAML[name]
    file = written(tmp_path / f"{name}.yaml", content)
    module = "configs.from_yaml" if len(name) % 2 else "dllm_jax.config"
    refused(module, file, says=says)


# ---- Anything at all ---------------------------------------------------------------------

texts = st.text(st.characters(codec=None, categories=None), max_size=6)
scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    st.sampled_from([2**31, 2**63, -(2**40), 1e300, 1e-300, math.nan, math.inf, ""]),
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(texts, inner, max_size=3)
        | st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(data.ROLES) | inner, "content": inner}
            ),
            max_size=3,
        )
    ),
    max_leaves=6,
)
WHOLE = {
    "rl": GOOD,
    "sft": GOOD,
    "messages": {"messages": [TURN, {"role": "assistant", "content": "2"}]},
    "raw": {"prompt": "1+1", "response": "2"},
    "trace": {"prompt_ids": [5], "response_ids": [6, 7], "step_map": [1, 2]},
    "dpo": {"prompt": "1+1", "chosen": "2", "rejected": "3"},
    "generate": {"prompt": "1+1"},
    "ids": {"prompt_ids": [5, 6]},
}


@pytest.fixture(scope="module")
def tok():
    """The bundled model's tokenizer."""
    return data.tokenizer(MODEL)


def ids_in(kind: str, file: str, tok) -> list[list[int]]:
    """Returns the ids that a command reads from a file of records of this kind."""
    if kind in ("generate", "ids"):
        return generate.read(file, tok, 112)[0]
    cfg = data.DataConfig()
    if kind == "rl":
        problems = data.problems(file, tok, cfg, rewards.grader("math", RewardConfig()))
        assert all(problem.text.strip() and problem.answer for problem in problems)
        return [problem.prompt_ids for problem in problems]
    form = {"end": 2, "pad": 0, "mask": 3, "vocab": 112, "block": 4, "slots": 256}
    told = {"pairs": kind == "dpo", "traced": kind == "trace"}
    found, _ = data.examples(file, tok, cfg, **form, **told)
    examples = data.stacked(found, form["pad"], form["slots"])
    assert examples.len_B.min() > 0 and examples.prompt_len_B.min() > 0
    assert examples.step_BT.min() >= 0
    return examples.tokens_BT.tolist()


@pytest.mark.parametrize(
    ("kind", "field"), [(kind, field) for kind, row in WHOLE.items() for field in row]
)
def test_any_value_in_a_record_is_read_or_refused_in_one_line(
    kind, field, tok, tmp_path_factory
):
    file = tmp_path_factory.mktemp("any") / "x.jsonl"

    @properties.examples(2)
    @hypothesis.given(anything)
    def any_value(value):
        written(file, [WHOLE[kind] | {field: value}])
        try:
            rows = ids_in(kind, str(file), tok)
        except ValueError as error:
            assert "x.jsonl" in str(error) and "\n" not in str(error)
        else:
            assert rows and all(0 <= token < 112 for row in rows for token in row)

    any_value()


LEAVES = config.flat(dataclasses.asdict(config.Config()))


@properties.examples(20)
@hypothesis.given(st.sampled_from(sorted(LEAVES)), anything)
def test_any_value_of_a_key_is_taken_or_refused_in_one_line(key, value):
    tree = dataclasses.asdict(config.Config())
    *groups, leaf = key.split(".")
    node = tree
    for group in groups:
        node = node[group]
    node[leaf] = value
    try:
        cfg = config.frozen(config.Config, tree)
    except ValueError as error:
        named = str(error).startswith(f"{key}=")  # or it does not go with another key
        assert named or any(name in str(error) for name in LEAVES if "." in name)
        assert "\n" not in str(error) and len(str(error)) < 500
        return
    taken = config.flat(dataclasses.asdict(cfg))[key]
    usual = LEAVES[key]
    assert isinstance(taken, (int, float) if type(usual) is float else type(usual))
    assert isinstance(taken, bool) == isinstance(usual, bool)
    if isinstance(taken, (int, float)):
        assert abs(taken) < 1e31
