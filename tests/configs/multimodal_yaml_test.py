"""dLLM-RL's YAML files for LLaDA-V, written from the facts about them."""

import types

import pytest
import yaml

from configs import from_yaml
from dllm_jax import config
from dllm_jax.data.templates import CHOICE, TEMPLATES
from tests.configs.common import but

SAMPLED = """
    {0}.num_response_per_task: 8
    {0}.steps: 256
    {0}.max_gen_length: 256
    {0}.batch_size: 1
    {0}.temperature: 0.8
    {0}.remasking_strategy: low_confidence_dynamic
    {0}.dynamic_threshold: 0.9
    {0}.block_size: 32
    {0}.target: confidence
    {0}.further_horizon: 128
    {0}.use_cache: True
"""
RL = but(
    {},
    SAMPLED.format("rollout")
    + SAMPLED.format("evaluation")
    + """
    experiment.project: rl_lladav
    experiment.total_step: 100
    model.pretrained_model: LLaDA-V
    model.model_base: lladav
    model.image_resolution: 512
    dataset.train_dataset: SEEDBench_IMG_32
    dataset.data_type: mmu
    dataset.image_root: /pictures
    rollout.num_task_per_step: 128
    reward.answer_must_in_box: True
    reward.strict_len_check: False
    execute.num_chunk: 128
    training.method: random_masking
    training.mask_times_per_sample: 2
    training.lower_p: 0.1
    training.upper_p: 0.9
    training.shrink: 8
    training.post_num: 1
    training.max_prompt_len: 512
    training.beta: 0.01
    evaluation.if_eval: True
    evaluation.eval_dataset: SEEDBench_IMG_32
    evaluation.data_type: mmu
    system.reward_env_name: judge
""",
)
VALUE = but(
    RL,
    """
    model.value_base_model: LLaDA-V-value
    training.method: TraceRL
    training.mask_times_per_sample: 35
    training.shrink: 48
    training.max_prompt_len: null
    experiment.train_value_every: 1
""",
)
EVAL = but(
    {},
    SAMPLED.format("rollout")
    + """
    experiment.project: lladav_eval
    model: LLaDA-V
    model_base: lladav
    answer_must_in_box: True
    dataset.eval_dataset: SEEDBench_IMG_32
    dataset.data_type: mmu
    dataset.image_root: /pictures
""",
)
SFT = but(
    {},
    """
    experiment.project: sft_lladav
    model.pretrained_model: LLaDA-V
    model.model_base: lladav
    dataset.optimization_data: sft_test_v
    dataset.data_type: mmu
    dataset.image_root: /pictures
    training.method: semi-ar
    training.block_size: 16
    training.mask_times_per_sample: 2
    training.max_gen_length: 512
    training.gradient_accumulation_steps: 2
    training.batch_size_lm: 1
""",
)


def translated(tree: dict, folder) -> config.Config:
    """Returns the configuration that a file becomes."""
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump(tree))
    module = types.ModuleType("translated")
    exec(from_yaml.ported(str(file)), module.__dict__)  # noqa: S102
    return config.freeze(module.get_config())


@pytest.mark.parametrize("tree, kind", [(RL, "bernoulli"), (VALUE, "trace")])
def test_rl_of_lladav(tree, kind, tmp_path):
    cfg = translated(tree, tmp_path)
    assert cfg.noise.kind == kind
    assert cfg.rl.value == ("own" if tree is VALUE else "none")
    assert (cfg.rl.reward, cfg.rl.min_solved, cfg.rl.max_solved) == (
        "choice",
        0.05,
        0.95,
    )
    assert cfg.sampler.before_stop and cfg.sampler.cache == "auto"
    assert cfg.sampler.max_prompt > 3800
    assert cfg.data.image_root == "/pictures"
    assert cfg.data.heldout == "data/SEEDBench_IMG_32.json"
    assert "boxed" in cfg.data.template and not cfg.rl.truncated_wrong
    unread = translated(but(tree, "evaluation.if_eval: False"), tmp_path)
    assert unread.data.heldout == ""


@pytest.mark.parametrize(("tree", "differs"), [(RL, True), (VALUE, False)])
def test_the_kl_is_a_mean_with_a_value_model(tree, differs):
    """Theirs sums it over a row without one, and takes the mean with one."""
    reason = from_yaml.translate(config.flat(tree))[1].get("training.beta", "")
    assert ("not divided by a step's size" in reason) == differs


def test_images_are_graded_as_theirs_whatever_is_asked(tmp_path):
    lax = translated(but(RL, "reward.strict_len_check: null"), tmp_path)
    strict = translated(but(RL, "reward.strict_len_check: True"), tmp_path)
    assert (lax.rl.truncated, strict.rl.truncated) == ("graded", "wrong")
    rl = translated(but(RL, "dataset.data_type: math"), tmp_path).rl
    assert (rl.reward, rl.min_solved, rl.max_solved) == ("math", 0.05, 0.95)


def test_evaluation_and_sft_of_lladav(tmp_path):
    cfg = translated(EVAL, tmp_path)
    assert cfg.sampler.before_stop and cfg.eval.answers == 8
    bare = translated(but(EVAL, "answer_must_in_box: False"), tmp_path)
    assert bare.data.template == "{question}"
    cfg = translated(SFT, tmp_path)
    assert (cfg.method, cfg.noise.kind, cfg.sampler.block) == ("sft", "semi_ar", 16)
    assert cfg.data.train == "data/sft_test_v.json"
    # Its prompts ask for a box already; it has no pads.
    assert (cfg.data.template, cfg.data.post_num) == ("{question}", 0)
    given = translated(but(SFT, "training.post_num: 5"), tmp_path)
    assert given.data.post_num == 0


def test_blocks_of_lladavs_sft_have_one_rate(tmp_path):
    bounds = "training.lower_p: 0.1\ntraining.upper_p: 0.9\n"
    for change in ("", bounds):
        noise = translated(but(SFT, change), tmp_path).noise
        assert (noise.rate, noise.lower, noise.upper) == ("scope", 0, 1)
    for change, rate in (
        ("model.model_base: mmada\nexperiment.project: x", "token"),
        ("training.method: random_masking", "scope"),
    ):
        tree = but(SFT, bounds + change)
        if rate == "token":
            tree["model"]["pretrained_model"] = "MMaDA"
        noise = translated(tree, tmp_path).noise
        assert (noise.rate, noise.lower, noise.upper) == (rate, 0.1, 0.9)


@pytest.mark.parametrize(
    ("change", "count", "tiles"),
    [
        ("training.method: random_masking", 8, 64),  # two rows of each
        ("training.method: random_masking\ntraining.mask_times_per_sample: 1", 16, 128),
        ("", 1, 40),  # as many rows as blocks
    ],
)
def test_tiles_of_sft_are_those_of_an_update(change, count, tiles, tmp_path):
    cfg = translated(but(SFT, change), tmp_path)
    assert (cfg.sft.examples, cfg.model.tiles) == (count, tiles)


@pytest.mark.parametrize(
    ("change", "longest", "raw"),
    [
        ("model_base: mmada\nvq_model_path: VQ", 1600, False),
        ("model_base: mmada\ndataset.image_root: /pictures", 1600, False),
        ("model_base: lladav", 4608, False),
        ("model_base: mmada", 2048, True),  # texts
    ],
)
def test_options_about_images(change, longest, raw, tmp_path):
    tree = but(
        EVAL, "dataset.image_root: null\nexperiment.project: x\nmodel: some/model"
    )
    cfg = translated(but(tree, f"{change}\ndataset.data_type: option"), tmp_path)
    assert (cfg.sampler.max_prompt, cfg.data.raw) == (longest, raw)
    asked = TEMPLATES["llada", "choice"] if raw else CHOICE
    assert (cfg.data.template, cfg.rl.reward) == (asked, "choice")
