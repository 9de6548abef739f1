"""What dLLM-RL's YAML files are refused for, in words of their own keys."""

import pytest
import yaml

from configs import from_yaml
from tests.configs.originals import FILES, frozen, written

JUDGED = "rl_trado_process_reward_rlhf_with_value"
TRACE = "training.method: trace\n"


def changed(name: str, text: str) -> dict:
    """Returns a file's leaves by dotted name with lines put in; null stays a value."""
    return from_yaml.config.flat(FILES[name]) | (yaml.safe_load(text) or {})


def told(tmp_path, content: dict) -> str:
    """Returns how a file is refused: one line that begins with its path."""
    path = written(tmp_path, "x", content)
    with pytest.raises(ValueError) as caught:
        from_yaml.ported(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text
    return text.removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("name", "change", "message", "keys"),
    [
        (
            "rl_trado",
            "experiment.total_step: 0",
            "rl.steps=0: must be >= 1",
            "experiment.total_step",
        ),
        (
            "rl_trado",
            "rollout.denoising_steps_per_block: 8",
            "sampler.steps_per_block=8",
            "rollout.denoising_steps_per_block",
        ),
        (
            "rl_trado",
            "training.lower_p: 0.95",
            "noise.lower=0.95",
            "training.lower_p",
        ),
        (
            "rl_trado",
            "training.max_grad_norm: 0",
            "policy_optim.max_grad_norm=0.0",
            "training.max_grad_norm",
        ),
        (
            "rl_trado",
            "evaluation.block_size: 0",
            "eval.samplers: dynamic: block=0",
            "evaluation, rollout.block_size",
        ),
        (
            "trado_eval",
            "rollout.temperature: -1",
            "eval.temperature=-1.0",
            "rollout.temperature",
        ),
        (
            "sft_trado",
            "training.seed: -1",
            "data.seed=-1: must be >= 0",
            "training.seed",
        ),
        (
            "sft_trado",
            "lr_scheduler.scheduler: polynomial\noptimizer.params.learning_rate: -1",
            "policy_optim.lr=-1.0",
            "optimizer.params.learning_rate",
        ),
    ],
)
def test_our_own_checks_name_the_file_and_its_key(
    name, change, message, keys, tmp_path
):
    text = told(tmp_path, changed(name, change))
    assert text.startswith(message) and text.endswith(f" (from {keys})")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rl_trado", "rollout.dynamic_threshold: high", "='high' is no number"),
        ("rl_trado", "training.lower_p: much", "='much' is no number"),
        (JUDGED, "rollout.block_size: [1, 2]", "=[1, 2] is no whole number"),
        ("rl_trado", "rollout.max_token: null", "=None is no whole number"),
        ("sft_trado", f"training.block_size: 0\n{TRACE}", "=0: must be >= 1"),
        ("sft_trado", f"training.shrink: 0\n{TRACE}", "=0: must be >= 1"),
        ("sft_llada", "training.mask_times_per_sample: 0", "=0: must be >= 1"),
        ("trado_eval", "rollout.temperature: []", "=[] is no number"),
        ("trado_eval", "rollout.top_k: [1]", "=[1] is no whole number"),
        ("trado_eval", "rollout.remasking_strategy: []", "=[]: needs one value"),
        ("rl_trado", "rollout.remasking_strategy: []", "=[]: needs one value"),
        ("rl_trado", "training.method: [trace]", "=['trace']: needs one value"),
        (
            "rl_trado",
            "rollout.remasking_strategy: [low_confidence_static, sequential]",
            "=['low_confidence_static', 'sequential']: needs one value",
        ),
        ("rl_trado", "experiment.project: null", "=None: needs one plain name, such"),
        ("rl_trado", "experiment.project: [a]", "=['a']: needs one plain name"),
        ("rl_trado", "experiment.project: ../../x", "='../../x': needs one plain"),
        ("rl_trado", "experiment.project: ''", "='': needs one plain name"),
        ("rl_trado", "dataset.train_dataset: true", "=True: needs one name, such as"),
        ("rl_trado", "evaluation.eval_dataset: ''", "='': needs one name, such as"),
        ("sft_trado", "dataset.optimization_data: ''", "='': needs one name"),
        ("trado_eval", "dataset.eval_dataset: {}", "={}: needs one name"),
        (
            "trado_eval",
            (
                "rollout.top_p: 2\n"
                "rollout.remasking_strategy: [sequential, low_confidence_static]"
            ),
            "=2.0: must be > 0",
        ),
        ("rl_trado", "rollout.start_with_think: 'False'", "='False': must be True or"),
        ("rl_trado", "rollout.tensor_parallel_size: -1", "=-1: must be >= 1"),
        ("trado_eval", "model: 5", "=5 is no text"),
        *(
            (name, f"{key}: {value}", f"={value}: must be >= 1")
            for name in ("sft_trado", "rl_trado")
            for key in ("training.gradient_accumulation_steps",)
            + ("training.batch_size_lm", "experiment.num_node")
            for value in (0, -1)
        ),
        ("rl_trado", "execute.num_chunk: {}", "={}: needs one value"),
    ],
)
def test_a_value_is_refused_under_its_own_key(name, change, message, tmp_path):
    key = change.split(":")[0]
    assert told(tmp_path, changed(name, change)).startswith(key + message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"rollout": {}, "training": {}}, "rollout={}: a section needs keys, such as"),
        ({"rollout": None}, "rollout=None: a section needs keys, such as rollout."),
        ({"training": 5}, "training=5: a section needs keys, such as training."),
        ({"rollout": {"reward_model": {}}}, "rollout.reward_model={}: a section needs"),
        (
            {"rollout.temperature": 0.5, "rollout": {"temperature": 1.0}},
            "'rollout.temperature' stands there twice, once with its dots",
        ),
        ({"dataset": {"data_type": "math"}, "roll": {}}, "unknown key 'roll'"),
    ],
)
def test_sections_have_keys_and_keys_stand_once(content, message, tmp_path):
    assert told(tmp_path, content).startswith(message)


def test_a_key_that_another_needs_is_named(tmp_path):
    content = changed("sft_trado", "")
    del content["training.batch_size_lm"]
    text = told(tmp_path, content)
    assert text.startswith("training.gradient_accumulation_steps=16: needs training.ba")


@pytest.mark.parametrize("key", ["dynamic_threshold", "top_p"])
def test_a_truth_value_of_an_evaluation_is_no_number(key, tmp_path):
    raw = changed("rl_trado", f"evaluation.{key}: true")
    reason = from_yaml.translate(raw)[1][f"evaluation.{key}"]
    assert f"alone: evaluation.{key}=True is no number" in reason


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rl_trado", "experiment.project: 2024"),
        ("rl_trado", "rollout.remasking_strategy: [low_confidence_static]"),
        ("rl_trado", "dataset.train_dataset: null"),
        ("rl_trado", "rollout.dynamic_threshold: '0.5'"),
        ("rl_trado", "rollout.max_token: '99'"),
        ("sft_trado", "training.shrink: null"),
    ],
)
def test_what_means_something_is_taken(name, change, tmp_path):
    path = written(tmp_path, "x", changed(name, change))
    assert frozen(from_yaml.ported(path))
