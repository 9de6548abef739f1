"""The model that lm-evaluation-harness sees, with and without the harness."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

from configs import tracerl
from dllm_jax import config, harness
from tests import served

ROOT = pathlib.Path(__file__).parents[1]


def request(*args):
    """Returns what the harness asks with."""
    return types.SimpleNamespace(args=args)


def settings() -> config.Config:
    """Returns those of the bundled model, which adds numbers."""
    tree = tracerl.get_config()
    tree.model.path = str(ROOT / tree.model.path)
    tree.sampler.update(rows=4, max_new=8, max_prompt=32)
    tree.batch.update(rows=2, tokens=0)
    tree.eval.temperature = 0.0
    return config.freeze(tree)


@pytest.fixture(scope="module")
def model():
    return harness.Model(settings(), draws=4, say=lambda *args: None)


def test_kernels_are_checked_before_they_are_used(monkeypatch):
    monkeypatch.setattr(config, "check_kernels", lambda *args: ["those of a chip"])
    said = []
    harness.Model(settings(), draws=4, say=said.append)
    assert said == ["those of a chip"]


def test_its_weights_are_those_of_the_checkpoint_in_the_dtype_that_computes():
    cfg = settings()
    own = dataclasses.replace(cfg.model, lora_rank=2, dtype="bfloat16")
    made = harness.Model(dataclasses.replace(cfg, model=own), 1, lambda *args: None)
    assert made.model.lora is None
    assert made.likelihood.params["policy"]["embed"].dtype == "bfloat16"


def test_texts_end_before_the_first_stop_string():
    assert harness.until("one. two\nthree", ["\n", "."]) == "one"
    assert harness.until("one", "x") == "one"
    assert harness.until("one", ["", "n"]) == "o"
    assert harness.until("one", []) == "one"


def test_blanks_that_end_a_context_are_the_continuations(model):
    prompt, answer = model.pair_of("1+1 ", "2")
    assert model.tok.decode(prompt) == "1+1" and model.tok.decode(answer) == " 2"
    prompt, answer = model.pair_of("", "2")
    assert prompt == [model.first_token()] and model.tok.decode(answer) == "2"
    long, _ = model.pair_of("9" * 100, "2")
    assert len(long) == 32


def test_a_token_of_both_context_and_continuation_leaves_each_its_own():
    """A tokenizer that knows "ab", too: together they are one token."""
    known = {"ab": [9], "a": [1], "b": [2], " b": [3], "a b": [1, 3], "": []}
    lone = types.SimpleNamespace(
        tok=lambda text, **_: {"input_ids": known[text]},
        cfg=settings(),
        first_token=lambda: 0,
        ending=lambda ids: ids,
    )
    assert harness.Model.pair_of(lone, "a", "b") == ([1], [2])
    assert harness.Model.pair_of(lone, "a ", "b") == ([1], [3])
    assert harness.Model.pair_of(lone, "", "ab") == ([0], [9])
    with pytest.raises(ValueError, match="the likelihood of nothing behind 'a'"):
        harness.Model.pair_of(lone, "a", "")


def test_what_tasks_want_and_do_not_get_is_told(model):
    greedy = {"do_sample": False, "temperature": 1.0, "max_gen_toks": 8}
    assert model.unlike([greedy, {"until": []}]) == model.unlike([]) == []
    warm, long = {"do_sample": True, "temperature": 0.7}, {"max_gen_toks": 9}
    told = model.unlike([greedy, warm, long])
    assert "up to 9 tokens; answers end at sampler.max_new=8" in told[0]
    assert "temperature 0.0, 0.7; sampled is with eval.temperature=0" in told[1]
    assert not model.unlike([{"do_sample": True, "temperature": 0}])
    assert "temperature 1.0;" in model.unlike([{"do_sample": True}])[0]
    assert "temperature 0.5;" in model.unlike([{"temperature": 0.5}])[0]
    assert "up to 9 tokens" in model.unlike([{"max_new_tokens": 9}])[0]


def test_prompts_that_lose_their_beginning_are_told(model, monkeypatch):
    said = []
    monkeypatch.setattr(model, "cut", 0)  # another test's
    monkeypatch.setattr(model, "say", said.append)
    monkeypatch.setattr(
        model, "sampled", lambda prompts, *args, **new: [[1]] * len(prompts)
    )
    short, long = request("1+1", {}), request("9" * 33, {})
    model.generate_until([short, long, long])
    model.generate_until([short, request("9" * 32, {})])
    told = "warning: {} prompts lose their beginning: they have more than sampler.max_p"
    assert len(said) == 1 and said[0].startswith(told.format("2 of 3"))
    model.loglikelihood([request("9" * 40, "2" * 8)])
    assert len(said) == 2 and said[1].startswith(told.format("1 of 1"))
    model.generate_until([request("1+1", {"max_gen_toks": 9})])
    assert len(said) == 3 and "answers end at sampler.max_new=8" in said[2]


def test_the_length_of_an_answer_has_several_names_in_tasks():
    assert harness.most_of({"max_new_tokens": "7", "max_tokens": 5}) == 7
    assert harness.most_of({"max_gen_toks": 3, "max_new_tokens": 7}) == 3
    assert harness.most_of({"max_completion_tokens": 4}) == 4
    assert harness.most_of({"until": []}) == harness.most_of({"max_tokens": None}) == 0


def test_requests_are_answered_in_order(model):
    ask = [{"role": "user", "content": "1+2"}]
    context = model.apply_chat_template(ask)
    assert context.endswith("assistant\n")
    (whole,) = model.generate_until([request(context, {"until": []})])
    assert whole
    texts = model.generate_until(
        [
            request(context, {"until": [whole[1]], "max_gen_toks": 64}),
            request(context, {"until": [], "max_new_tokens": 1}),
            request(context, {"until": []}),
        ]
    )
    assert texts[0] == whole.partition(whole[1])[0] and texts[2] == whole
    assert whole.startswith(texts[1]) and 0 < len(texts[1]) < len(whole)

    (said, greedy), (other, wrong) = model.loglikelihood(
        [request(context, whole), request(context, "~~~")]
    )
    assert greedy and not wrong and said > other and other < said <= 0
    (rolled,) = model.loglikelihood_rolling([request("1+2=3, 4")])
    assert rolled < 0


def test_an_assistants_turn_that_has_begun_stays_open(model):
    """As the harness asks where a task says how its answers begin (gen_prefix)."""
    ask = [{"role": "user", "content": "1+2"}]
    begun = [*ask, {"role": "assistant", "content": "=3"}]
    written = model.apply_chat_template(ask)
    text = model.apply_chat_template(begun, add_generation_prompt=False)
    assert text == written + "=3"
    # A turn that has ended is no such turn.
    examples = [*begun, *ask]
    closed = model.apply_chat_template(examples)
    assert closed.startswith(text) and closed != text
    assert closed.count("=3") == 1 and closed.endswith("assistant\n")
    assert [message["content"] for message in begun] == ["1+2", "=3"]  # as it was
    rules = [{"role": "system", "content": "be brief"}]
    ruled = model.apply_chat_template(rules + begun, add_generation_prompt=False)
    assert ruled == model.apply_chat_template(rules + ask) + "=3"
    # Nor is one begun that nobody asks for.
    closed = model.apply_chat_template(ask, add_generation_prompt=False)
    assert written == closed + "<|im_start|>assistant\n"


def test_a_conversation_that_no_template_writes_is_told(model, monkeypatch):
    ask, name = [{"role": "user", "content": "1+2"}], re.escape(model.tok.name_or_path)
    monkeypatch.setattr(model.tok, "chat_template", None)
    with pytest.raises(ValueError, match=f"tokenizer '{name}' has no chat template"):
        model.apply_chat_template(ask)


def test_a_text_without_a_context_is_behind_the_token_that_some_file_names(
    model, monkeypatch
):
    for token in ("bos_token_id", "eos_token_id"):
        monkeypatch.setattr(model.tok, token, None)
    assert model.first_token() == model.model.eos_id
    (answer,) = model.generate_until([request("", {})])
    assert isinstance(answer, str)


def test_texts_are_those_of_every_other_command(model, monkeypatch):
    """Also where a tokenizer would take blanks away."""

    def decode(ids, skip_special_tokens, clean_up_tokenization_spaces=True):
        return "x!" if clean_up_tokenization_spaces else "x !"

    monkeypatch.setattr(model.tok, "decode", decode)
    assert model.generate_until([request("1+2", {})]) == ["x !"]


def test_no_more_is_sampled_than_what_is_compared(model):
    """Of each prompt and length once; the same tokens as of a whole answer."""
    context = model.apply_chat_template([{"role": "user", "content": "11+22"}])
    prompt, stream, asked = model.prompt_of(context), model.stream, []
    (whole,) = model.sampled([prompt], 0.0)

    def noted(prompts, *, temperature, new):
        asked.append((prompts, new))
        return stream(prompts, temperature=temperature, new=new)

    one, two = (model.tok.decode(whole[:n]) for n in (1, 2))
    wrong = "~" * 2
    model.__dict__["stream"] = noted
    try:
        found = model.loglikelihood(
            [request(context, text) for text in (two, wrong, one, two)]
        )
    finally:
        model.__dict__["stream"] = stream
    assert [greedy for _, greedy in found] == [True, False, True, True]
    assert asked == [([prompt, prompt], [2, 1])]
    with pytest.raises(
        ValueError, match="max_new=8: .* up to 9 tokens; set it to so many"
    ):
        model.loglikelihood([request(context, text) for text in ("~", "~" * 9)])
    assert len(asked) == 1  # before anything is sampled
    assert model.length_of([]) == 1 and model.length_of([1] * 9) == 8
    short = model.sampled([prompt, prompt], 0.0, new=[2, 1])
    assert short == [whole[:2], whole[:1]]  # of a model that fills blocks


def test_without_the_harness_the_command_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ValueError, match="make install EXTRAS=lm-eval"):
        harness.adapted(None, 1)
    done = served.run("dllm_jax.harness", ["--config=configs/eval.py"])
    assert done.returncode == 2 and "--tasks=NAME,... is required" in done.stderr


# A harness that tells what it is asked, and how its processes would start.
STUB = """
import multiprocessing, types

class TaskManager:
    def __init__(self, include_path):
        self.all_tasks = ["sums"]
        entry = types.SimpleNamespace(cfg={"task": "sums"}, tags=())
        self.task_index = {"sums": entry}
        self.folder = include_path

def simple_evaluate(model, tasks, task_manager, **options):
    told = options | {"folder": task_manager.folder, "draws": model.draws}
    print(tasks, told, multiprocessing.get_start_method())
    return {"results": {"sums": {"alias": "sums", "acc": 0.25}}, "samples": 1}
"""


def test_flags_reach_the_harness_whose_processes_are_no_forks_of_jax(tmp_path):
    package, tasks = tmp_path / "lm_eval", tmp_path / "own"
    for name, text in {
        "__init__": STUB,
        "tasks": "from lm_eval import TaskManager",
        "api/__init__": "",
        "api/model": "class LM:\n    pass",
    }.items():
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    words = ["--config=configs/eval.py", f"--config.run.folder={tmp_path}/run"]
    words += ["--tasks=sums", f"--task_folder={tasks}", "--limit=3", "--num_fewshot=2"]
    words += ["--draws=7"]
    done = served.run("dllm_jax.harness", words)
    assert done.returncode == 2 and f"={tasks}: there is no such folder" in done.stderr
    tasks.mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", "dllm_jax.harness", *words, "--chat"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    asked, *_, printed = ran.stdout.splitlines()
    options = {"limit": 3, "num_fewshot": 2, "apply_chat_template": True}
    options |= {"log_samples": False, "folder": str(tasks), "draws": 7}
    assert asked == f"['sums'] {options} forkserver"
    assert printed.split() == ["sums", "acc", "0.25"]
    kept = json.loads((tmp_path / "run" / "lm_eval.json").read_text())
    assert kept == {"results": {"sums": {"alias": "sums", "acc": 0.25}}}
    used = json.loads((tmp_path / "run" / "config.json").read_text())
    assert used["run"]["folder"] == f"{tmp_path}/run"
    # Of another model that does not come to its end, nothing of the first one is told as its own.
    (package / "__init__.py").write_text(
        STUB.replace("return {", "1 / 0\n    return {")
    )
    ran = subprocess.run(
        [sys.executable, "-m", "dllm_jax.harness", *words],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 1 and "is in lm_eval.before.json now" in ran.stdout
    assert not (tmp_path / "run" / "lm_eval.json").exists()
    assert json.loads((tmp_path / "run" / "lm_eval.before.json").read_text()) == kept
    (tmp_path / "run" / "metrics.jsonl").touch()
    done = served.run("dllm_jax.harness", words)
    assert done.returncode == 2 and "is a training run's: name another" in done.stderr


def test_what_would_execute_answers_is_found_in_groups_and_tags_too():
    def entry(**cfg):
        return types.SimpleNamespace(cfg=cfg or None, tags={"runs", "asks"})

    index = {
        "runs": entry(task="runs", unsafe_code=True),
        "asks": entry(task="asks"),
        "group": entry(group="group", task=["asks", {"group": "in", "task": ["runs"]}]),
        "beside": entry(group="beside", task=[{"group": "group"}]),
        "changed": entry(group="changed", task=[{"task": "asks", "unsafe_code": True}]),
        "tag": entry(),
    }
    found = {name: harness.executing([name], index) for name in index}
    assert found.pop("asks") == [] and found.pop("changed") == ["asks"]
    assert found == {name: ["runs"] for name in ("runs", "group", "beside", "tag")}


def test_what_the_harness_cannot_do_is_told_by_its_flag(monkeypatch):
    """As tasks say it which are classes, and a hub that is not there."""
    asked, answers = [], []

    class TaskManager:
        all_tasks, task_index = ("sums", "other"), {}

        def __init__(self, include_path):
            asked.append(include_path)

    def simple_evaluate(**given):
        asked.append(given["tasks"])
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    stub = types.SimpleNamespace(simple_evaluate=simple_evaluate)
    monkeypatch.setitem(sys.modules, "lm_eval", stub)
    tasks = types.SimpleNamespace(TaskManager=TaskManager)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    with pytest.raises(ValueError, match="the harness has no task one, two$"):
        harness.evaluate(None, ["one", "sums", "two"])
    assert asked == [None]
    for error, told in (
        (ValueError("it runs unsafe code"), "--tasks: sums, other would execute what"),
        (ValueError("a defect"), "^a defect$"),
        (ConnectionError("no\n  hub"), "^--tasks=sums,other: cannot get .*: no hub; "),
    ):
        answers.append(error)
        with pytest.raises(ValueError, match=told):
            harness.evaluate(None, ["sums", "other"], "folder")
    answers.append({"results": {"sums": 1}, "samples": [1], "versions": 2})
    found = harness.evaluate(None, ["sums"])
    assert found == {"results": {"sums": 1}, "versions": 2}
    assert asked[1:] == ["folder", ["sums", "other"]] * 3 + [None, ["sums"]]


TASK = """
task: sums
dataset_path: json
dataset_kwargs:
  data_files: {{"test": "{path}"}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
{more}
metric_list:
  - metric: {metric}
"""


def test_tasks_of_the_harness(model, tmp_path):
    pytest.importorskip("lm_eval")
    rows = [{"question": f"{i}+1=", "answer": i + 1, "wrong": "x"} for i in range(3)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = {
        "generate_until": (
            '"{{answer}}"',
            "exact_match",
            'generation_kwargs: {until: [","]}',
        ),
        "multiple_choice": ("0", "acc", 'doc_to_choice: "{{[answer|string, wrong]}}"'),
    }
    for kind, (target, metric, more) in kinds.items():
        folder = tmp_path / kind
        folder.mkdir()
        text = TASK.format(
            path=file, kind=kind, target=target, metric=metric, more=more
        )
        (folder / "sums.yaml").write_text(text)
        adapted = harness.adapted(model.cfg, 2, say=lambda *args: None)
        adapted.__dict__ |= {"stream": model.stream, "likelihood": model.likelihood}
        found = harness.evaluate(adapted, ["sums"], str(folder), log_samples=False)
        assert 0 <= found["results"]["sums"][f"{metric},none"] <= 1
    with pytest.raises(ValueError, match="the harness has no task nothing"):
        harness.evaluate(adapted, ["nothing"], str(folder))
    # Its metric is not fetched, though it is a function of a file that would.
    with pytest.raises(ValueError, match="humaneval_64 would execute what the model"):
        harness.evaluate(adapted, ["sums", "humaneval_64"], str(folder))
    file.unlink()
    with pytest.raises(ValueError, match="--tasks=sums: cannot get what they need: "):
        harness.evaluate(adapted, ["sums"], str(folder))
    assert "torch" not in sys.modules
