"""dLLM-RL's sixteen YAML files for models with images: each becomes a run that validates.

They are written from a description of their keys (public facts, no source): six for RL on one
node, their twins for several, two for evaluation, two for SFT.
"""

import dataclasses
import types

import pytest
import yaml

from configs import eval as evaluations
from configs import from_yaml, rlhf, sft, tracerl
from dllm_jax import config
from tests.configs.common import but
from tests.models.vision import common, drawers

SAME = """
    wandb.entity: null
    wandb.resume: auto
    system.HF_HOME: null
    system.env_name: dllm
    experiment.function: train
    experiment.start_from_scratch: True
    experiment.current_epoch: 1
    experiment.num_node: 1
    experiment.node_index: 0
    model.optimized_name: optimized
    model.image_resolution: 512
    dataset.train_dataset: SEEDBench_IMG_32
    dataset.optimization_data: rl_data
    dataset.data_type: mmu
    dataset.image_root: /pictures
    rollout.temperature: 0.8
    rollout.remasking_strategy: low_confidence_dynamic
    rollout.target: confidence
    rollout.further_horizon: 128
    rollout.use_cache: True
    reward.strict_len_check: False
    execute.num_chunk: 128
    training.mixed_precision: bf16
    training.enable_tf32: True
    training.num_train_epochs: 1
    training.max_grad_norm: 1.0
    training.lower_p: 0.1
    training.upper_p: 0.9
    training.post_num: 1
    training.eps: 0.20
    training.beta: 0.01
    training.use_kl_estimator_k3: True
    optimizer.name: adamw
    optimizer.params.learning_rate: 1e-6
    optimizer.params.scale_lr: False
    optimizer.params.beta1: 0.9
    optimizer.params.beta2: 0.999
    optimizer.params.weight_decay: 0.0
    optimizer.params.epsilon: 1e-8
    lr_scheduler.scheduler: cosine
    lr_scheduler.params.learning_rate: 1e-6
    lr_scheduler.params.warmup_steps: 0
    lr_scheduler.params.min_lr_scale: 1.0
    evaluation.eval_dataset: SEEDBench_IMG_32
    evaluation.data_type: mmu
    evaluation.temperature: 0.1
    evaluation.target: confidence
    evaluation.further_horizon: 128
    evaluation.use_cache: True
"""
NAMES = (
    "rl_lladav",
    "rl_lladav_with_value",
    "rl_lladav_process_reward_rlhf_with_value",
    "rl_mmada_v",
    "rl_mmada_v_with_value",
    "rl_mmada_v_process_reward_rlhf_with_value",
)
BOTH = "[low_confidence_static, low_confidence_dynamic]"
# A column for each of NAMES; null: the file lacks the key.
DIFFERENT = f"""
    experiment.total_step | 160 | 50 | 160 | 50 | 100 | 40
    experiment.save_every | 10 | 10 | 10 | 5 | 5 | 20
    experiment.eval_every | 5 | 1 | 3 | 10 | 10 | 10
    experiment.deepspeed_file | zero2 | zero2 | zero2 | zero3 | zero3 | zero3
    experiment.train_value_every | null | 1 | 1 | null | 1 | 1
    model.model_base | lladav | lladav | mmada | mmada | mmada | mmada
    model.value_base_model | null | V | V | null | V | V
    model.optimized_value_name | null | v | v | null | v | v
    model.process_reward_model | null | null | Qwen3-VL | null | null | Qwen3-VL
    model.process_reward_chunk_size | null | null | 64 | null | null | 64
    dataset.add_think_prompt | null | null | null | null | null | True
    system.reward_env_name | null | null | judge | null | null | judge
    rollout.num_task_per_step | 128 | 32 | 32 | 512 | 256 | 32
    rollout.num_response_per_task | 8 | 8 | 8 | 16 | 12 | 8
    rollout.steps | 256 | 512 | 192 | 128 | 2 | 128
    rollout.max_gen_length | 256 | 512 | 192 | 128 | 2 | 128
    rollout.batch_size | 1 | 1 | 1 | 2 | 2 | 2
    rollout.dynamic_threshold | 0.90 | 0.95 | 0.90 | 0.95 | 0.95 | 0.95
    rollout.block_size | 32 | 64 | 64 | 64 | 2 | 32
    reward.answer_must_in_box | True | True | True | False | False | False
    training.gradient_accumulation_steps | 128 | 16 | 4 | 4 | 2 | 16
    training.batch_size_lm | 1 | 1 | 1 | 2 | 2 | 2
    training.seed | 10086 | 10086 | 10086 | 10086 | 10086 | 12345
    training.method | random_masking | TraceRL | TraceRL | random_masking | random_masking | TraceRL
    training.shrink | 8 | 48 | 16 | 8 | 1 | 8
    training.mask_times_per_sample | 2 | 35 | 8 | 2 | 2 | 2
    training.max_prompt_len | 512 | null | 512 | 512 | 512 | 512
    training.max_gen_length | 256 | 512 | 192 | 128 | 2 | 128
    training.gam | null | 1 | 1 | null | 1 | 1
    training.lam | null | 1 | 1 | null | 1 | 1
    training.gradient_checkpointing_enable | null | False | False | null | False | False
    optimizer.params.value_learning_rate | null | 5e-6 | 5e-6 | null | 5e-6 | 5e-6
    evaluation.if_eval | True | True | True | False | False | True
    evaluation.num_response_per_task | 3 | 3 | 1 | 3 | 3 | 3
    evaluation.steps | 256 | 512 | 192 | 1024 | 1024 | 128
    evaluation.max_gen_length | 256 | 512 | 192 | 512 | 512 | 128
    evaluation.batch_size | 1 | 1 | 1 | 2 | 2 | 2
    evaluation.remasking_strategy | {BOTH} | {BOTH} | [low_confidence_dynamic] | {BOTH} | {BOTH} | [low_confidence_static]
    evaluation.dynamic_threshold | 0.90 | 0.95 | 0.90 | 0.95 | 0.95 | 0.95
    evaluation.block_size | 32 | 64 | 64 | 32 | 32 | 32
"""
EVAL = f"""
    experiment.project: NAME_eval
    dataset.eval_dataset: SEEDBench_IMG_32
    dataset.data_type: mmu
    dataset.image_root: /pictures
    rollout.num_response_per_task: 3
    rollout.temperature: 0.1
    rollout.target: confidence
    rollout.batch_size: 2
    rollout.block_size: 32
    rollout.remasking_strategy: {BOTH}
    rollout.further_horizon: 128
    rollout.use_cache: True
    rollout.output_unmasking_history: True
    execute.num_chunk: 128
"""
EVALS = {
    "lladav_eval": """
        model_base: lladav
        answer_must_in_box: True
        rollout.steps: 128
        rollout.max_gen_length: 128
        rollout.dynamic_threshold: 0.90
    """,
    "mmada_v_eval": """
        model_base: mmada
        answer_must_in_box: False
        vq_model_path: VQ
        image_resolution: 512
        rollout.steps: 512
        rollout.max_gen_length: 512
        rollout.dynamic_threshold: 0.95
    """,
}
SFT = """
    model.optimized_name: optimized
    dataset.optimization_data: sft_test
    dataset.data_type: mmu
    dataset.image_root: /pictures
    training.method: random_masking
    training.lower_p: 0.1
    training.upper_p: 0.9
    training.block_size: 16
    training.mask_times_per_sample: 2
    training.gradient_checkpointing_enable: False
    training.gradient_accumulation_steps: 2
    training.seed: 10086
    training.num_train_epochs: 1
    training.max_grad_norm: 1.0
    training.mixed_precision: bf16
    optimizer.name: adamw
    optimizer.params.learning_rate: 1e-5
    lr_scheduler.scheduler: cosine
    lr_scheduler.params.warmup_steps: 0
"""
SFTS = {
    "sft_lladav": """
        model.model_base: lladav
        training.max_gen_length: 512
        training.batch_size_lm: 1
    """,
    "sft_mmada_v": """
        model.model_base: mmada
        model.vq_model_path: VQ
        model.image_resolution: 512
        training.max_gen_length: 1024
        training.max_prompt_len: 784
        training.post_num: 0
        training.batch_size_lm: 2
    """,
}


def rl_file(column: int, multinode: bool) -> dict:
    """Returns the tree of one of NAMES."""
    lines = [line.split("|") for line in DIFFERENT.strip().split("\n")]
    own = "".join(f"{line[0].strip()}: {line[column + 1].strip()}\n" for line in lines)
    name = f"multinode_{NAMES[column]}" if multinode else NAMES[column]
    tree = but(but({}, SAME), own + f"experiment.project: {name}\n")
    if multinode:
        tree["experiment"]["num_node"] = 2 if "process" in name else 4
    if "mmada" in name:
        tree["model"]["vq_model_path"] = "VQ"
    return tree


def files() -> dict[str, dict]:
    """Returns the sixteen, by name."""
    made = {}
    for multinode in (False, True):
        for column, name in enumerate(NAMES):
            made[("multinode_" if multinode else "") + name] = rl_file(
                column, multinode
            )
    made |= {name: but(but({}, EVAL), own) for name, own in EVALS.items()}
    return made | {name: but(but({}, SFT), own) for name, own in SFTS.items()}


FILES = files()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Returns the folders of a tiny LLaDA-V, of a tiny MMaDA, and of its MAGVIT-v2."""
    place = tmp_path_factory.mktemp("models")
    looker = common.folder(place / "looker")
    drawer = drawers.folder(place / "drawer")
    (vq,) = (file.parent for file in drawer.glob("*/config.json"))
    return {"lladav": looker, "mmada": drawer, "vq": vq}


def translated(name: str, folders: dict, place) -> tuple[config.Config, str]:
    """Returns (the configuration that a file becomes, completed; what is said of its keys)."""
    tree = but({}, "")
    tree.update(
        {k: dict(v) if isinstance(v, dict) else v for k, v in FILES[name].items()}
    )
    path = str(folders["lladav" if "lladav" in name else "mmada"])
    if name.endswith("eval"):
        tree["model"] = path
    else:
        tree["model"] |= {"pretrained_model": path}
    tree.setdefault("experiment", {})["project"] = name
    if "mmada" in name:
        flat = tree if name.endswith("eval") else tree["model"]
        flat |= {"vq_model_path": str(folders["vq"]), "image_resolution": 8}
    file = place / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    module = types.ModuleType("translated")
    text = from_yaml.ported(str(file))
    exec(text, module.__dict__)  # noqa: S102
    cfg, _, _ = config.completed(config.freeze(module.get_config()))
    return cfg, text


@pytest.mark.parametrize("name", FILES)
def test_each_file_becomes_a_run_that_validates(name, tiny, tmp_path):
    cfg, text = translated(name, tiny, tmp_path)
    tree = FILES[name]
    assert cfg.data.image_root == "/pictures" and cfg.run.folder == f"runs/{name}"
    assert cfg.model.path == str(tiny["lladav" if "lladav" in name else "mmada"])
    longest = 1027 + 784 if name == "sft_mmada_v" else 1600
    assert cfg.sampler.max_prompt == (4608 if "lladav" in name else longest)
    assert cfg.sampler.before_stop == ("lladav" in name)
    if "mmada" in name:
        assert (cfg.model.vq, cfg.model.image_size) == (str(tiny["vq"]), 8)
    if "rollout" not in tree:
        assert (cfg.method, cfg.noise.kind) == ("sft", "bernoulli")
        assert "theirs are compared" not in text  # nothing is graded
        assert cfg.data.template == "{question}" and cfg.data.post_num == 0
        assert cfg.noise.draws * cfg.sft.examples == 16 * (1 + ("mmada" in name))
        assert name != "sft_lladav" or cfg.model.tiles == 8 * cfg.sft.examples
        said = (
            "hold the chat's tokens"
            if "mmada" in name
            else "an answer's end is learned"
        )
        assert said in text
        return
    assert "theirs are compared as mathematics" in text
    assert "training" not in tree or "chat tokens into LLaDA-V's" not in text
    new, block = tree["rollout"]["max_gen_length"], tree["rollout"]["block_size"]
    assert (cfg.sampler.max_new, cfg.sampler.block) == (new, block)
    assert cfg.sampler.steps_per_block == block  # a token a step, of all of them
    boxed = "lladav" in name
    assert cfg.rl.reward == ("choice" if boxed else "short")
    assert ("boxed" in cfg.data.template) == boxed
    if "training" not in tree:
        assert cfg.eval.answers == 3 and cfg.sampler.strategy == "static"
        assert cfg.eval.samplers == "dynamic:strategy=dynamic"
        assert ("one where the strategy is static" in text) == ("mmada" in name)
        assert ("chat tokens into LLaDA-V's" in text) == ("lladav" in name)
        return
    assert (cfg.rl.prompts, cfg.rl.group) == (
        tree["rollout"]["num_task_per_step"],
        tree["rollout"]["num_response_per_task"],
    )
    valued = "value_base_model" in tree["model"]
    assert cfg.rl.value == ("own" if valued else "none")
    assert cfg.rl.value_path == ("V" if valued else "")
    assert cfg.noise.kind == ("trace" if valued else "bernoulli")
    assert cfg.noise.shrink == tree["training"]["shrink"]
    assert (cfg.rl.min_solved, cfg.rl.max_solved) == (0.05, 0.95)
    assert (cfg.data.heldout != "") == tree["evaluation"]["if_eval"]
    if "process" in name:
        assert (cfg.reward.split, cfg.reward.chunk, cfg.rl.outcome) == ("tokens", 64, 0)
        assert cfg.reward.judge.model == "Qwen3-VL"
        assert "it is shown the image" in text
    if "lladav_process" in name:
        assert "NOT THE SAME: the file is LLaDA-V's by its name" in text
    if "mmada_v_process" in name:
        assert "<think>" in cfg.data.template


LOOKING = ("llada-v-8b", "mmada-8b-images")


@pytest.mark.parametrize("name", LOOKING)
@pytest.mark.parametrize("made", [tracerl, sft, rlhf, evaluations])
def test_presets_of_the_released_models_validate(name, made):
    cfg = config.freeze(made.get_config(name))
    assert cfg.data.image_root and cfg.sampler.max_prompt > 1027
    assert (cfg.model.vq != "") == ("mmada" in name)
    assert made is sft or cfg.rl.truncated == "graded"


@pytest.mark.parametrize("name", [name for name in NAMES if "process" in name])
def test_presets_with_a_judge_are_as_its_files(name, tiny, tmp_path):
    theirs, _ = translated(name, tiny, tmp_path)
    preset = LOOKING["mmada" in name]
    ours = config.freeze(rlhf.get_config(preset))
    for section in ("sampler", "noise", "objective", "rl"):
        one, other = (dataclasses.asdict(getattr(x, section)) for x in (ours, theirs))
        different = {key for key in one if one[key] != other[key]}
        # Read from a checkpoint; of the host; as "auto" has it; of noise that is drawn; which
        # their files say by the sizes of batches; another folder in the files above.
        known = {"stop_ids", "rows", "cache", "rate", "updates", "value_path"}
        assert different <= known, (section, different)
    judge = dataclasses.replace(theirs.reward.judge, model="")
    assert dataclasses.replace(theirs.reward, judge=judge) == ours.reward
    assert theirs.data.template == ours.data.template


def test_seedbench_is_asked_of_models_that_look():
    for name in (*LOOKING, ""):
        cfg = config.freeze(evaluations.get_config(f"{name}/seedbench".strip("/")))
        assert (
            cfg.data.heldout == "data/SEEDBench_IMG_32.json" and cfg.eval.answers == 3
        )
        assert cfg.run.folder.endswith("/seedbench") and cfg.sampler.block == 32
    for refused in ("trado-4b/seedbench", "llada-v-8b/math500"):
        with pytest.raises(ValueError, match="choose from"):
            evaluations.get_config(refused)
