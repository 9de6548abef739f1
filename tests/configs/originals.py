"""dLLM-RL's YAML files, written from the facts about them, and what makes them configs."""

import types

import yaml

from dllm_jax import config
from tests.configs.common import but

BLOCK = """
    {0}.tensor_parallel_size: 1
    {0}.max_active: 256
    {0}.num_response_per_task: 16
    {0}.temperature: 1.0
    {0}.max_token: 2000
    {0}.block_size: 4
    {0}.denoising_steps_per_block: 4
    {0}.top_p: 1.0
    {0}.top_k: 0
    {0}.remasking_strategy: low_confidence_dynamic
    {0}.dynamic_threshold: 0.9
    {0}.start_with_think: False
"""
FULL = """
    {0}.num_response_per_task: 8
    {0}.temperature: 0.8
    {0}.alg_temp: 0
    {0}.pad_target_penalty: 1.0
    {0}.steps: 1024
    {0}.max_gen_length: 1024
    {0}.batch_size: 2
    {0}.top_p: 0.9
    {0}.top_k: 50
    {0}.remasking_strategy: low_confidence_static
    {0}.target: confidence
    {0}.dynamic_threshold: 0.95
    {0}.block_size: 32
    {0}.further_horizon: 32
    {0}.use_cache: True
"""
TRAINED = """
    training.gradient_accumulation_steps: 32
    training.batch_size_lm: 1
    training.mixed_precision: bf16
    training.enable_tf32: True
    training.seed: 10086
    training.num_train_epochs: 1
    training.max_grad_norm: 1.0
    training.method: TraceRL
    training.lower_p: 0.1
    training.upper_p: 0.9
    training.shrink: 1
    training.post_num: 0
    training.max_gen_length: 2000
    training.max_prompt_len: 784
    optimizer.name: adamw
    optimizer.params.learning_rate: 1e-6
    optimizer.params.scale_lr: False
    optimizer.params.beta1: 0.9
    optimizer.params.beta2: 0.999
    optimizer.params.weight_decay: 0.0
    optimizer.params.epsilon: 1e-8
    lr_scheduler.scheduler: cosine
    lr_scheduler.params.learning_rate: ${optimizer.params.learning_rate}
    lr_scheduler.params.warmup_steps: 0
    lr_scheduler.params.min_lr_scale: 1.0
"""
REINFORCED = """
    wandb.resume: auto
    experiment.project: rl_trado
    experiment.function: train
    experiment.start_from_scratch: True
    experiment.total_step: 80
    experiment.save_every: 10
    experiment.eval_every: 10
    experiment.current_epoch: 1
    experiment.deepspeed_file: 1_node_8_gpus_deepspeed_zero3
    experiment.num_node: 1
    experiment.node_index: 0
    model.pretrained_model: /some/model
    model.optimized_name: optimized
    model.model_base: trado
    dataset.train_dataset: MATH_train
    dataset.optimization_data: rl_data
    dataset.data_type: math
    rollout.num_task_per_step: 64
    execute.num_chunk: 128
    training.eps: 0.2
    training.beta: 0.01
    training.use_kl_estimator_k3: True
    evaluation.eval_dataset: MATH500
    evaluation.data_type: math
"""
NODES = """
    system.HTTP_PROXY: http://some:1
    system.HF_HOME: /some/home
    system.env_name: env
    system.envs_dir: /some/envs
    system.base_dir: /some/base
    experiment.num_node: 4
"""
VALUE = """
    experiment.train_value_every: 1
    model.value_base_model: /some/model
    model.optimized_value_name: optimized_value
    training.lower_p: null
    training.upper_p: null
    training.gam: 1.0
    training.lam: 1.0
    optimizer.params.learning_rate: null
    optimizer.params.policy_learning_rate: 1e-6
    optimizer.params.value_learning_rate: 5e-6
    lr_scheduler.params.learning_rate: ${optimizer.params.policy_learning_rate}
"""
JUDGE = """
    model.process_reward_model: /some/judge
    experiment.total_step: 100
    experiment.save_every: 30
    experiment.eval_every: 5
    rollout.num_task_per_step: 32
    rollout.reward_model.reward_chunk_length: 200
    rollout.reward_model.k_sample: 3
    rollout.reward_model.max_model_len: 15000
    rollout.reward_model.max_generation_token: 10000
    rollout.reward_model.temperature: 0.6
    training.gradient_accumulation_steps: 16
    training.gam: 0.99
"""
EVALUATED = """
    experiment.project: trado_eval
    experiment.num_node: 1
    experiment.node_index: 0
    model: /some/model
    model_base: trado
    dataset.eval_dataset: MATH500
    dataset.data_type: math
    execute.num_chunk: 128
    rollout.output_unmasking_history: True
"""
LLADA = """
    rollout.alg_temp: null
    rollout.pad_target_penalty: null
    rollout.top_p: null
    rollout.top_k: null
    rollout.steps: 512
    rollout.max_gen_length: 512
    rollout.further_horizon: 128
"""
trado = but(
    but({}, REINFORCED.strip() + TRAINED),
    BLOCK.format("rollout").strip()
    + BLOCK.format("evaluation")
    + """
    evaluation.num_response_per_task: 3
    evaluation.top_k: [0, 1]
    evaluation.remasking_strategy: [low_confidence_dynamic, low_confidence_static]
    training.gradient_checkpointing_enable: True
    training.block_size: 4
    """.rstrip(),
)
dream = but(
    but({}, REINFORCED.strip() + TRAINED),
    FULL.format("rollout").strip()
    + FULL.format("evaluation")
    + """
    experiment.project: rl_dream
    experiment.total_step: 50
    model.model_base: dream
    rollout.num_task_per_step: 32
    training.gradient_accumulation_steps: 128
    training.batch_size_lm: 2
    training.shrink: 8
    training.mask_times_per_sample: 35
    training.max_gen_length: ${rollout.max_gen_length}
    training.max_prompt_len: 512
    evaluation.temperature: 0.1
    evaluation.remasking_strategy: [low_confidence_static]
    evaluation.block_size: [32]
    """.rstrip(),
)
sft = but(
    but({}, TRAINED),
    """
    experiment.project: sft_trado
    experiment.num_node: 1
    model.pretrained_model: /some/model
    model.optimized_name: optimized
    dataset.optimization_data: openr1
    training.gradient_checkpointing_enable: True
    training.gradient_accumulation_steps: 16
    training.method: semi-ar
    training.block_size: 4
    optimizer.params.learning_rate: 1e-5
    """,
)
sft_full = but(
    sft,
    """
    experiment.num_node: 4
    training.gradient_accumulation_steps: 2
    training.batch_size_lm: 2
    training.shrink: null
    training.block_size: 16
    training.max_gen_length: 1024
    training.mask_times_per_sample: 35
    """,
)
with_value = but(trado, VALUE)
trado_eval = but({}, EVALUATED.strip() + BLOCK.format("rollout"))
dream_eval = but({}, EVALUATED.strip() + FULL.format("rollout"))
THINKING = """
    rollout.max_active: 2
    rollout.max_token: 30000
    rollout.start_with_think: True
    rollout.stop_token_list: ["<|im_end|>"]
"""
FILES = {
    "rl_trado": trado,
    "rl_sdar_code": but(trado, "dataset.data_type: code"),
    "rl_trado_with_value": with_value,
    "rl_trado_process_reward_rlhf_with_value": but(with_value, JUDGE),
    "multinode_rl_trado": but(trado, NODES),
    "rl_dream": dream,
    "multinode_rl_dream": but(dream, NODES),
    "rl_llada": but(dream, LLADA),
    "multinode_rl_llada": but(dream, LLADA + "training.post_num: 4"),
    "sft_trado": sft,
    "sft_dream": sft_full,
    "sft_llada": but(sft_full, "training.method: random_masking"),
    "trado_eval": trado_eval,
    "trado_multinode_eval": but(trado_eval, NODES),
    "trado_longcot_eval": but(trado_eval, THINKING),
    "dream_eval": dream_eval,
    "llada_eval": but(dream_eval, LLADA),
}


def written(tmp_path, name: str, content: dict | None = None) -> str:
    """Returns the path of a YAML file."""
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(FILES[name] if content is None else content))
    return str(path)


def frozen(text: str) -> config.Config:
    """Returns the configuration that a printed config file makes."""
    module = types.ModuleType("printed")
    code = compile(text, "printed", "exec")
    types.FunctionType(code, vars(module))()
    return config.freeze(module.get_config())
