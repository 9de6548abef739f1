"""dLLM-RL's YAML files, written from the facts about them, and what they become."""

import ast
import json
import re
import sys

import pytest

from configs import eval as evaluations
from configs import from_yaml, tracerl
from dllm_jax import config
from dllm_jax.data.templates import TEMPLATES
from dllm_jax.models.config import ModelConfig
from dllm_jax.rl.config import JudgeConfig, RewardConfig
from tests import served
from tests.configs.common import but
from tests.configs.originals import (
    FILES,
    dream,
    dream_eval,
    frozen,
    trado,
    with_value,
    written,
)

OTHER = "NOT THE SAME: "


@pytest.mark.parametrize("name", FILES)
def test_every_file_becomes_a_config_file(name, tmp_path):
    path = written(tmp_path, name)
    text = from_yaml.ported(path)
    cfg = frozen(text)
    assert cfg.model.path == "/some/model"
    raw = from_yaml.read(path)
    leaves, unused, _ = from_yaml.translate(raw)
    assert set(leaves) <= set(config.keys(config.default().to_dict()))
    told = text.split('"""')[1].replace("\n", " ").replace(",", "").split()
    for key in raw:  # a reason for each that has no effect, and for no other
        assert (key in unused) == (key in told), key
    assert all(len(reason) > 10 for reason in unused.values())


def test_rl_on_a_block_model(tmp_path):
    cfg = frozen(from_yaml.ported(written(tmp_path, "rl_trado")))
    assert (cfg.method, cfg.seed, cfg.run.folder) == ("rl", 10086, "runs/rl_trado")
    assert (cfg.rl.steps, cfg.rl.prompts, cfg.rl.group) == (80, 64, 16)
    assert (cfg.rl.value, cfg.rl.advantage) == ("none", "zscore")
    s = cfg.sampler
    assert (s.block, s.steps_per_block, s.max_prompt, s.max_new) == (4, 4, 784, 2000)
    assert (s.strategy, s.threshold, s.top_k, s.rows) == ("dynamic", 0.9, 0, 256)
    assert (cfg.noise.kind, cfg.noise.shrink) == ("trace", 1)
    assert cfg.objective == config.ObjectiveConfig(aggregate="constant")
    assert cfg.policy_optim.lr == 1e-6
    assert (cfg.model.dtype, cfg.model.remat) == ("bfloat16", "auto")
    assert cfg.data.train == "data/MATH_train.json"
    assert cfg.data.heldout == "data/MATH500.json"
    assert (cfg.eval.every, cfg.eval.temperature, cfg.run.keep_every) == (10, 1.0, 10)


def test_enlarged_blocks_are_trained(tmp_path):
    """The paper's recipe: rollouts in blocks of 4, training in blocks of 8."""
    usual = frozen(from_yaml.ported(written(tmp_path, "rl_trado")))
    assert usual.noise.block == 0
    for name in ("rl_trado", "rl_trado_with_value"):
        larger = but(FILES[name], "training.block_size: 8")
        path = written(tmp_path, "larger", larger)
        cfg = frozen(from_yaml.ported(path))
        assert (cfg.sampler.block, cfg.noise.block) == (4, 8)
        assert "training.block_size" not in from_yaml.translate(from_yaml.read(path))[1]
    masks = "training.block_size: 6\ntraining.method: random_masking"
    path = written(tmp_path, "masks", but(trado, masks))
    assert frozen(from_yaml.ported(path)).noise.block == 6
    path = written(tmp_path, "six", but(trado, "training.block_size: 6"))
    with pytest.raises(ValueError, match="training.block_size=6: traces of roll"):
        from_yaml.ported(path)


def test_rl_with_a_value_model(tmp_path):
    path = written(tmp_path, "rl_trado_process_reward_rlhf_with_value")
    cfg = frozen(from_yaml.ported(path))
    assert (cfg.rl.value, cfg.rl.gamma, cfg.rl.lam) == ("own", 0.99, 1.0)
    assert (cfg.policy_optim.lr, cfg.value_optim.lr) == (1e-6, 5e-6)
    _, unused, _ = from_yaml.translate(from_yaml.read(path))
    assert unused["model.process_reward_model"].startswith("NOT THE SAME: ")
    assert "rollout.reward_model.k_sample" not in unused
    assert (cfg.reward.split, cfg.reward.chunk, cfg.reward.tail) == ("tokens", 200, 4)
    assert cfg.rl.outcome == 0
    assert cfg.reward.judge == JudgeConfig(
        at="/some/judge", votes=3, temperature=0.6, tokens=10000, prompt=5000
    )
    without = but(FILES["rl_trado_process_reward_rlhf_with_value"], "")
    without["model"]["process_reward_model"] = None
    path = written(tmp_path, "without", without)
    assert frozen(from_yaml.ported(path)).reward == RewardConfig()
    small = but(
        FILES["rl_trado_process_reward_rlhf_with_value"],
        "rollout.reward_model.max_model_len: 10000",
    )
    with pytest.raises(ValueError, match="max_model_len=10000 leaves no room"):
        from_yaml.ported(written(tmp_path, "small", small))


def test_rl_on_programs(tmp_path):
    path = written(tmp_path, "rl_sdar_code")
    cfg = frozen(from_yaml.ported(path))
    assert (cfg.rl.reward, cfg.rl.filter) == ("code", "varied")
    assert not cfg.rl.truncated_wrong and "print()" in cfg.data.template
    trado = frozen(from_yaml.ported(written(tmp_path, "rl_trado")))
    assert (trado.rl.reward, trado.rl.filter) == ("math", "solvable")
    option = but(FILES["trado_eval"], "dataset.data_type: option")
    cfg = frozen(from_yaml.ported(written(tmp_path, "option", option)))
    assert cfg.rl.reward == "choice"
    image = but(FILES["rl_trado"], "dataset.data_type: image")
    with pytest.raises(ValueError, match="data_type='image': choose from math, code"):
        from_yaml.ported(written(tmp_path, "image", image))


def test_rl_on_a_full_attention_model(tmp_path):
    cfg = frozen(from_yaml.ported(written(tmp_path, "rl_dream")))
    s = cfg.sampler
    assert (s.block, s.steps_per_block, s.max_new, s.rows) == (32, 32, 1024, 2)
    assert (s.strategy, s.top_k, s.top_p, s.temperature) == ("static", 50, 0.9, 0.8)
    assert s.top_p_first
    assert (s.cache, s.horizon) == ("prefix", 32)
    assert (cfg.noise.kind, cfg.noise.shrink, cfg.noise.draws) == ("trace", 8, 1)
    assert cfg.objective.aggregate == "step"
    half = but(FILES["rl_dream"], "rollout.steps: 512")
    cfg = frozen(from_yaml.ported(written(tmp_path, "half", half)))
    assert cfg.sampler.steps_per_block == 16


def test_sft(tmp_path):
    cfg = frozen(from_yaml.ported(written(tmp_path, "sft_dream")))
    assert (cfg.method, cfg.data.train) == ("sft", "data/openr1.json")
    # So that `prompt` is taken as it is: their files hold rendered conversations.
    assert cfg.data.question != "prompt"
    assert cfg.sft.examples == 2 * 2 * 8 * 4 // (1024 // 16)
    assert (cfg.sampler.block, cfg.sampler.max_new) == (16, 1024)
    assert (cfg.noise.kind, cfg.noise.lower, cfg.noise.upper) == ("semi_ar", 0.1, 0.9)
    assert (cfg.policy_optim.lr, cfg.policy_optim.schedule) == (1e-5, "cosine")
    random = but(FILES["sft_llada"], "training.mask_times_per_sample: 5")
    assert frozen(from_yaml.ported(written(tmp_path, "x", random))).noise.draws == 5


@pytest.mark.parametrize(
    ("name", "change", "count", "reason"),
    [
        ("sft_trado", "", 16 * 8, ""),
        ("sft_trado", "training.method: trace", 32, "128 rows.* full length has 4 and"),
        ("sft_trado", "training.method: trace\ntraining.shrink: 3", 64, "has 2 and"),
        ("sft_trado", "training.method: trace\ntraining.shrink: 4", 128, ""),
        ("sft_dream", "", 2, "128 rows, of which an answer of full length has 64"),
        ("sft_dream", "training.method: ar", 128, ""),
        ("sft_dream", "training.mask_times_per_sample: null", 128, ""),
        (
            "sft_dream",
            "training.mask_times_per_sample: null\nmodel.model_base: dream",
            2,
            "has 64",
        ),
        ("sft_llada", "", 4, "128 rows, 35 of an example, which is no whole"),
        ("sft_llada", "training.mask_times_per_sample: 1", 128, ""),
        ("sft_llada", "training.mask_times_per_sample: 4", 32, ""),
        ("sft_llada", "training.mask_times_per_sample: null", 128, ""),
        ("sft_llada", "training.mask_times_per_sample: 999", 1, "no whole number"),
        (
            "sft_llada",
            "training.mask_times_per_sample: 4\ntraining.method: coupled",
            16,
            "",
        ),
    ],
)
def test_an_update_of_sft_counts_rows_there(name, change, count, reason, tmp_path):
    path = written(tmp_path, name, but(FILES[name], change))
    leaves, unused, _ = from_yaml.translate(from_yaml.read(path))
    assert leaves["sft.examples"] == count
    said = unused.get("training.gradient_accumulation_steps", "")
    assert said.startswith(OTHER) == bool(reason) and re.search(reason, said)


def test_full_attention_has_one_rate_for_an_answer(tmp_path):
    def rate(name, change):
        path = written(tmp_path, name, but(FILES[name], change))
        return frozen(from_yaml.ported(path)).noise.rate

    once = "training.mask_times_per_sample: null"
    assert rate("sft_llada", once) == rate("sft_llada", "") == "scope"
    assert rate("rl_llada", f"{once}\ntraining.method: coupled") == "scope"
    assert rate("rl_trado", "training.method: random_masking") == "token"


def test_pads_and_schedules_of_sft(tmp_path):
    def of(change):
        content = but(FILES["sft_trado"], change)
        path = written(tmp_path, "x", content)
        cfg = frozen(from_yaml.ported(path))
        return cfg, from_yaml.translate(from_yaml.read(path))[1]

    empty = but(FILES["sft_trado"], "")
    empty["training"]["post_num"] = None
    path = written(tmp_path, "empty", empty)
    leaves, unused, _ = from_yaml.translate(from_yaml.read(path))
    assert leaves["data.post_num"] == -1
    assert unused["training.post_num"].startswith(OTHER + "theirs learns all pads")
    cfg, unused = of("training.post_num: 3")
    assert cfg.data.post_num == 3 and "training.post_num" not in unused

    warm = "lr_scheduler.params.warmup_steps: 7\nlr_scheduler.scheduler: "
    for scheduler, kind, warmup, final in (
        ("constant", "constant", 0, 0),
        ("constant_with_warmup", "constant", 7, 0),
        ("cosine", "cosine", 7, 0),
        ("linear", "linear", 7, 0),
        ("polynomial", "linear", 7, 0.01),  # 1e-7 of a rate of 1e-5
    ):
        optim = of(warm + scheduler)[0].policy_optim
        assert (optim.schedule, optim.warmup, optim.final) == (kind, warmup, final)


def test_schedules_and_passes_of_rl(tmp_path):
    def of(change):
        path = written(tmp_path, "x", but(trado, change))
        return frozen(from_yaml.ported(path)), from_yaml.translate(
            from_yaml.read(path)
        )[1]

    cfg, unused = of("training.num_train_epochs: 3")
    assert cfg.rl.epochs == 3 and "training.num_train_epochs" not in unused
    warm = "lr_scheduler.params.warmup_steps: 7"
    cfg, unused = of(warm)
    assert cfg.policy_optim.warmup == cfg.value_optim.warmup == 7
    assert unused["lr_scheduler.params.warmup_steps"].startswith(OTHER)
    assert unused["lr_scheduler.scheduler"].startswith(OTHER)
    cfg, unused = of(warm + "\nlr_scheduler.scheduler: constant")
    assert cfg.policy_optim.warmup == cfg.value_optim.warmup == 0
    assert not unused["lr_scheduler.scheduler"].startswith(OTHER)


def test_evaluation_has_the_temperature_of_rollouts_where_it_names_none(tmp_path):
    absent = but(dream, "evaluation.temperature: null")
    empty = but(dream, "")
    empty["evaluation"]["temperature"] = None
    for content, value in ((dream, 0.1), (absent, 0.8), (empty, 0.8)):
        cfg = frozen(from_yaml.ported(written(tmp_path, "x", content)))
        assert (cfg.sampler.temperature, cfg.eval.temperature) == (0.8, value)


@pytest.mark.parametrize(
    ("name", "change", "samplers"),
    [
        ("rl_trado", "", "static:strategy=static,top_k=1"),
        ("rl_trado", "evaluation.top_k: null", "static:strategy=static"),
        ("rl_trado", "evaluation.eval_dataset: null", ""),
        ("rl_trado", "evaluation.if_eval: False", ""),
        ("rl_trado", "evaluation.top_k: [0, 1, 2]", ""),  # and told: not one for each
        (
            "rl_trado",
            "evaluation.block_size: 8\nevaluation.dynamic_threshold: 0.8",
            (
                "dynamic:block=8,threshold=0.8/static:block=8,strategy=static,"
                "threshold=0.8,top_k=1"
            ),
        ),
        (
            "rl_trado",
            (
                "evaluation.remasking_strategy: [sequential, low_confidence_static]\n"
                "evaluation.top_k: null"
            ),
            "sequential:strategy=sequential/static:strategy=static",
        ),
        ("rl_dream", "", ""),
        ("rl_dream", "evaluation.use_cache: False", "static:cache=none,horizon=0"),
        ("rl_dream", "evaluation.steps: 512", "static:steps_per_block=16"),
        (
            "rl_dream",
            (
                "evaluation.remasking_strategy: "
                "[low_confidence_static, low_confidence_dynamic]\n"
                "evaluation.block_size: [32, 4]"
            ),
            "dynamic:block=4,steps_per_block=4,strategy=dynamic,tempered_threshold=True",
        ),
    ],
)
def test_evaluation_has_its_own_samplers(name, change, samplers, tmp_path):
    path = written(tmp_path, name, but(FILES[name], change))
    cfg = frozen(from_yaml.ported(path))
    assert cfg.eval.samplers == samplers
    heldout = bool(cfg.data.heldout)
    assert cfg.eval.answers == (
        FILES[name]["evaluation"]["num_response_per_task"] if heldout else 1
    )
    unused = from_yaml.translate(from_yaml.read(path))[1]
    differs = "[0, 1, 2]" in change
    assert unused["evaluation.dynamic_threshold"].startswith(OTHER) == differs


def test_an_evaluation_of_several_strategies_has_a_sampler_of_each(tmp_path):
    both = "[low_confidence_dynamic, low_confidence_static]"
    change = f"rollout.remasking_strategy: {both}\nmodel_base: dream"
    path = written(tmp_path, "x", but(dream_eval, change))
    cfg = frozen(from_yaml.ported(path))
    assert (cfg.sampler.strategy, cfg.sampler.tempered_threshold) == ("dynamic", True)
    assert cfg.eval.samplers == "static:strategy=static,tempered_threshold=False"


@pytest.mark.parametrize(
    ("name", "change", "key", "leaf", "value", "reason"),
    [
        (
            "rl_llada",
            "model.model_base: llada\nrollout.target: neg_entropy",
            *(
                "rollout.target",
                "sampler.target",
                "neg_entropy",
                "turns its sign round",
            ),
        ),
        (
            "rl_dream",
            "rollout.target: neg_entropy",
            *("rollout.target", "sampler.target", "neg_entropy", ""),
        ),
        (
            "rl_dream",
            "rollout.target: neg_entropy\nrollout.pad_target_penalty: 2.0",
            *("rollout.pad_target_penalty", "sampler.pad_penalty", 2.0, "raises those"),
        ),
        (
            "rl_dream",
            "rollout.pad_target_penalty: 2.0",
            *("rollout.pad_target_penalty", "sampler.pad_penalty", 2.0, ""),
        ),
        (
            "rl_dream",
            "rollout.alg_temp: 0.5",
            *("rollout.alg_temp", "sampler.rank_temperature", 0.5, ""),
        ),
        (
            "rl_llada",
            (
                "model.model_base: llada\nrollout.steps: 256\n"
                "rollout.remasking_strategy: low_confidence_dynamic"
            ),
            *("rollout.steps", "sampler.steps_per_block", 16, "may run out of steps"),
        ),
        (
            "rl_llada",
            "model.model_base: llada\nrollout.steps: 256",
            *("rollout.steps", "sampler.steps_per_block", 16, ""),
        ),
    ],
)
def test_samplers_that_are_not_theirs_say_so(
    name, change, key, leaf, value, reason, tmp_path
):
    path = written(tmp_path, name, but(FILES[name], change))
    leaves, unused, _ = from_yaml.translate(from_yaml.read(path))
    said = unused.get(key, "")
    assert leaves[leaf] == value and reason in said
    assert said.startswith(OTHER) == bool(reason)


def test_a_value_may_be_a_part_of_another(tmp_path):
    change = "system.base_dir: /base\nmodel.pretrained_model: ${system.base_dir}/some"
    path = written(tmp_path, "x", but(trado, change))
    assert frozen(from_yaml.ported(path)).model.path == "/base/some"


def test_a_value_does_not_end_the_docstring(tmp_path):
    strange = '\\N"""'
    change = f"evaluation.denoising_steps_per_block: {json.dumps(strange)}"
    path = written(tmp_path, "x", but(trado, change))
    told = from_yaml.ported(path)
    assert frozen(told)
    assert repr(strange) in ast.get_docstring(ast.parse(told))


def test_dreams_ranks_have_a_temperature_where_the_strategy_is_static(tmp_path):
    change = "rollout.alg_temp: 0.5\nrollout.remasking_strategy: low_confidence_dynamic"
    path = written(tmp_path, "x", but(dream, change))
    cfg = frozen(from_yaml.ported(path))
    assert cfg.sampler.rank_temperature == 0
    assert cfg.eval.samplers == (
        "static:strategy=static,tempered_threshold=False,rank_temperature=0.5"
    )


def test_a_value_model_may_start_elsewhere(tmp_path):
    def cfg(content):
        return frozen(from_yaml.ported(written(tmp_path, "x", content)))

    assert cfg(with_value).rl.value_path == ""
    other = cfg(but(with_value, "model.value_base_model: /another/model"))
    assert (other.rl.value, other.rl.value_path) == ("own", "/another/model")
    null = but(with_value, "")
    null["model"]["value_base_model"] = None
    assert (cfg(null).rl.value, cfg(null).rl.value_path) == ("none", "")


@pytest.mark.parametrize(
    ("name", "change", "longest"),
    [
        ("trado_eval", "", 784),
        ("trado_eval", "dataset.data_type: code", 2048),
        ("trado_eval", "dataset.data_type: option", 2048),
        ("rl_trado", "", 784),
        ("rl_dream", "", 512),
    ],
)
def test_prompts_that_are_too_long(name, change, longest, tmp_path):
    path = written(tmp_path, name, but(FILES[name], change))
    assert frozen(from_yaml.ported(path)).sampler.max_prompt == longest
    unused = from_yaml.translate(from_yaml.read(path))[1]
    rl = name.startswith("rl")
    reason = unused["training.max_prompt_len" if rl else "dataset.data_type"]
    assert reason.startswith(OTHER) and ("not asked" in reason) == rl
    assert rl or "above sampler.max_prompt are skipped" in reason


@pytest.mark.parametrize(
    ("name", "change", "key", "differs"),
    [
        ("sft_dream", "", "training.num_train_epochs", True),
        ("rl_trado", "", "model.model_base", True),
        ("rl_trado", "", "training.gradient_accumulation_steps", True),
        ("rl_trado", "", "evaluation.remasking_strategy", False),
        ("rl_trado", "", "evaluation.block_size", False),
        ("rl_trado", "evaluation.block_size: 8", "evaluation.block_size", False),
        ("rl_trado", "evaluation.block_size: 2", "evaluation.block_size", True),
        ("rl_trado", "evaluation.max_token: 1000", "evaluation.max_token", True),
        ("rl_trado", "", "evaluation.data_type", False),
        ("rl_sdar_code", "", "evaluation.data_type", True),
        ("rl_dream", "", "evaluation.block_size", False),
        ("rl_dream", "evaluation.block_size: [32, 4]", "evaluation.block_size", True),
        (
            "rl_dream",
            "evaluation.max_gen_length: 9",
            "evaluation.max_gen_length",
            False,
        ),
        ("rl_dream", "evaluation.batch_size: 9", "evaluation.batch_size", False),
        ("rl_trado", "training.max_grad_norm: 0.5", "training.max_grad_norm", True),
        ("rl_trado", "", "training.max_gen_length", False),
        ("rl_trado", "training.max_gen_length: 1000", "training.max_gen_length", True),
        ("rl_dream", "", "training.beta", True),
        ("trado_longcot_eval", "", "rollout.stop_token_list", False),
        (
            "trado_longcot_eval",
            "rollout.stop_token_list: ['</answer>']",
            "rollout.stop_token_list",
            True,
        ),
    ],
)
def test_what_is_not_the_same_says_so(name, change, key, differs, tmp_path):
    path = written(tmp_path, name, but(FILES[name], change))
    _, unused, _ = from_yaml.translate(from_yaml.read(path))
    assert unused[key].startswith(OTHER) == differs, unused[key]
    assert (OTHER in from_yaml.ported(path)) >= differs


def test_prompts_losses_and_scores_are_theirs(tmp_path):
    def cfg(name, change=""):
        path = written(tmp_path, name, but(FILES[name], change))
        return frozen(from_yaml.ported(path))

    for name, preset in (("rl_trado", "trado-4b"), ("rl_dream", "dream-7b")):
        theirs, ours = cfg(name).data, evaluations.get_config(f"{preset}/math500").data
        assert (theirs.template, theirs.raw) == (ours.template, ours.raw) and ours.raw
    asked = cfg("dream_eval", "model_base: dream").data.template
    assert asked == cfg("rl_dream").data.template
    for base, kind, key in (
        ("llada", "math", ("llada", "math")),
        ("mmada", "math", ("llada", "math")),
        ("sdar", "option", ("block", "choice")),
        ("dream", "option", ("dream", "choice")),
        ("llada", "option", ("llada", "choice")),
        ("dream", "code", ("dream", "stdio")),
    ):
        change = f"model_base: {base}\ndataset.data_type: {kind}"
        assert cfg("dream_eval", change).data.template == TEMPLATES[key]
    thinks = cfg("trado_longcot_eval").data.template
    assert thinks == TEMPLATES["think", "math"]
    named = cfg("sft_trado", "model.model_base: trado").data
    assert (named.template, named.raw) == ("{question}", False)
    for name in ("sft_dream", "sft_llada", "rl_llada"):
        assert cfg(name).objective.aggregate == "step"
    for name in ("sft_trado", "rl_trado"):
        assert cfg(name).objective.aggregate == "constant"
    assert (
        cfg("rl_dream", "rollout.target: margin_confidence").sampler.target == "margin"
    )
    assert "training.beta" not in from_yaml.translate(config.flat(trado))[1]
    assert (
        cfg("rl_trado").rl.truncated_wrong and not cfg("dream_eval").rl.truncated_wrong
    )
    ar = cfg("sft_dream", "training.method: ar")
    assert (ar.model.attention, ar.noise.kind) == ("causal", "ar")
    assert (ar.sampler.block, ar.sampler.steps_per_block) == (1, 1)
    assert config.chosen(ar, ModelConfig(attention="causal", shift=1))
    dynamic = "rollout.remasking_strategy: low_confidence_dynamic"
    assert cfg("dream_eval", dynamic).sampler.tempered_threshold
    llada = f"{dynamic}\nmodel_base: llada"
    assert not cfg("dream_eval", llada).sampler.tempered_threshold
    assert not cfg("dream_eval").sampler.tempered_threshold
    assert not cfg("rl_trado").sampler.tempered_threshold


def test_evaluation(tmp_path):
    text = from_yaml.ported(written(tmp_path, "trado_longcot_eval"))
    assert "python -m dllm_jax.eval --config=FILE" in text
    cfg = frozen(text)
    assert (cfg.eval.temperature, cfg.sampler.max_new) == (1.0, 30000)
    assert cfg.batch.tokens == 0  # a width that holds them is chosen
    for base, differs in (("trado", False), ("dream", True)):
        tree = but(FILES["trado_longcot_eval"], f"model_base: {base}")
        reason = from_yaml.translate(config.flat(tree))[1]["rollout.start_with_think"]
        assert reason.startswith("NOT THE SAME: ") == differs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.shirnk: 2", "unknown key 'training.shirnk'.* 'training.shrink'"),
        ("rollout.remasking_strategy: best", "'best': choose from low_confidence"),
        ("training.method: PPO", "training.method='PPO': choose from TraceRL"),
        ("optimizer.name: sgd", "optimizer.name='sgd': choose from adamw"),
        ("rollout.top_k: many", "rollout.top_k='many' is no whole number"),
        ("rollout.top_k: 0.5", "rollout.top_k=0.5 is no whole number"),
        ("rollout.max_token: 2000.7", "rollout.max_token=2000.7 is no whole number"),
        ("training.shrink: true", "training.shrink=True is no whole number"),
        ("training.eps: true", "training.eps=True is no number"),
        (
            "model.pretrained_model: [a, b]",
            r"pretrained_model=\['a', 'b'\]: needs one v",
        ),
        (
            "dataset.train_dataset: [a, b]",
            r"train_dataset=\['a', 'b'\]: needs one name",
        ),
        ("evaluation.eval_dataset: [a, b]", r"eval_dataset=\['a', 'b'\]: needs one"),
        ("training.eps: much", "training.eps='much' is no number"),
        (
            "optimizer.params.weight_decay: much",
            "optimizer.params.weight_decay='much' is no number",
        ),
        (
            "model.model_base: [trado]",
            r"model.model_base=\['trado'\]: needs one value",
        ),
        ("training.max_grad_norm: true", "training.max_grad_norm=True is no number"),
        ("training.eps: ${training.epsilon}", "training.eps=.* refers to no value"),
        ("model.pretrained_model: ${a.b}/x", "pretrained_model=.* refers to no value"),
        ("evaluation.top_k: ['${rollout.top_k}']", "top_k=.* refers to no value"),
        ("rollout.block_size: 2", "sampler.steps_per_block=4"),
    ],
)
def test_what_cannot_be_read_is_named(change, message, tmp_path):
    path = written(tmp_path, "x", but(trado, change))
    with pytest.raises(ValueError, match=message):
        from_yaml.ported(path)


@pytest.mark.parametrize(
    ("name", "preset"),
    [("rl_trado", "trado-4b"), ("rl_dream", "dream-7b"), ("rl_llada", "llada-8b")],
)
def test_presets_sample_as_the_files_do(name, preset, tmp_path):
    leaves, _, _ = from_yaml.translate(from_yaml.read(written(tmp_path, name)))
    sampler = tracerl.get_config(preset).sampler
    told = {leaf: value for leaf, value in leaves.items() if value is not None}
    told = {k[8:]: value for k, value in told.items() if k.startswith("sampler.")}
    assert {"block", "threshold", "max_new"} < told.keys()
    for key in told.keys() - {"rows"}:  # how many canvases a device has room for
        assert sampler[key] == told[key], key


@pytest.mark.parametrize(("base", "same"), [("dream", False), ("llada", True)])
def test_dreams_steps_are_shared_out_by_another_rule(base, same, tmp_path):
    content = but(FILES["rl_dream"], f"model.model_base: {base}")
    raw = from_yaml.read(written(tmp_path, "x", content))
    reason = from_yaml.translate(raw)[1].get("rollout.steps", "")
    assert reason.startswith("NOT THE SAME: their Dream") == (not same)


@pytest.mark.parametrize("asked", [1024, 1040, 2048])
def test_more_steps_than_tokens_are_a_token_a_step(asked, tmp_path):
    content = but(FILES["rl_llada"], f"rollout.steps: {asked}")
    cfg = frozen(from_yaml.ported(written(tmp_path, "x", content)))
    assert (cfg.sampler.steps_per_block, cfg.sampler.max_new) == (32, 512)


@pytest.mark.parametrize("key", ["steps", "max_gen_length", "block_size"])
def test_steps_are_whole(key, tmp_path):
    path = written(tmp_path, "x", but(dream, f"rollout.{key}: 512.5"))
    with pytest.raises(ValueError, match=f"rollout.{key}=512.5 is no whole number"):
        from_yaml.ported(path)


@pytest.mark.parametrize(("base", "own"), [("dream", False), ("llada", True)])
def test_ranks_of_llada_are_of_the_model(base, own, tmp_path):
    content = but(FILES["rl_dream"], f"model.model_base: {base}")
    cfg = frozen(from_yaml.ported(written(tmp_path, "x", content)))
    assert cfg.sampler.untempered_ranks == own


@pytest.mark.parametrize(
    ("base", "change", "first"),
    [
        ("dream", "", True),
        ("dream", "rollout.top_k: 0", False),  # one filter has no order
        ("dream", "rollout.top_p: 1", False),
        ("dream", "rollout.top_p: null", False),
        ("llada", "", False),
    ],
)
def test_dream_applies_top_p_before_top_k(base, change, first, tmp_path):
    content = but(FILES["rl_dream"], f"model.model_base: {base}\n{change}")
    cfg = frozen(from_yaml.ported(written(tmp_path, "x", content)))
    assert cfg.sampler.top_p_first == first


@pytest.mark.parametrize("recipes", [tracerl, evaluations])
def test_presets_of_dream_apply_top_p_before_top_k(recipes):
    for name in ("dream-7b", "diffucoder-7b"):
        sampler = config.freeze(recipes.get_config(name)).sampler
        assert sampler.top_p_first and sampler.top_k and sampler.top_p < 1
    for name in ("llada-8b", "sdar-4b"):
        assert not config.freeze(recipes.get_config(name)).sampler.top_p_first


def test_steps_that_blocks_cannot_share_are_named(tmp_path):
    path = written(tmp_path, "x", but(dream, "rollout.steps: 1000"))
    with pytest.raises(ValueError, match="rollout.steps=1000 cannot be .* a multiple"):
        from_yaml.ported(path)


@pytest.mark.parametrize("module", ["configs.from_yaml", "dllm_jax.config"])
def test_the_command(module, tmp_path):
    done = served.run(module, [written(tmp_path, "sft_trado")])
    assert frozen(done.stdout).method == "sft" and not done.stderr
    (tmp_path / "broken.yaml").write_text("a: ''b")
    for name, message in (("broken", "not YAML"), ("none", "there is no such file")):
        done = served.run(module, [str(tmp_path / f"{name}.yaml")])
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ") and message in done.stderr
        assert done.stderr.count("\n") == 1


def test_without_the_repository_its_file_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "configs", None)  # as where a wheel is installed
    with pytest.raises(
        ValueError, match="the translator is configs/from_yaml.py of the"
    ):
        config.main()
