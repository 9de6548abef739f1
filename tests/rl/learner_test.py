"""The learner against dLLM-RL, the sampler, other layouts and other meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import train_step
from dllm_jax.models.mask import FAR
from dllm_jax.rl import learner, noise, views
from dllm_jax.rl.config import (
    BatchConfig,
    ObjectiveConfig,
    OptimConfig,
)
from dllm_jax.sampling import denoise
from tests.rl import dllm_rl
from tests.rl.common import (
    BLOCK,
    CUT,
    OBJECTIVE,
    OPTIM,
    PLANS,
    SAMPLERS,
    SLOTS_OF_CANVAS,
    N,
    Plans,
    begin,
    check_equal,
    check_loss,
    checkpoint,
    complete,
    cut,
    on_mesh,
    score,
    starting,
    theirs,
    update,
)

STAGES = {  # of SDAR, by their number
    i: run
    for i, run in enumerate(dllm_rl.read("train/end_to_end/case.json")["runs"])
    if run["family"] == "sdar"
}

# ---- dLLM-RL -------------------------------------------------------------------------


@dataclasses.dataclass
class Rows:
    """A golden case in our layout, and where the reference has each supervised slot."""

    batch: views.TrainBatch  # a microbatch of one row for each sample
    row_mBU: np.ndarray  # -1: not trained
    column_mBU: np.ndarray
    L1: int

    def pick(self, x_RC, rows):
        """Returns the reference's values at our slots; x has these of its rows."""
        full_RC = np.zeros((self.row_mBU.max() + 1, x_RC.shape[1]), np.float32)
        full_RC[rows] = x_RC
        return np.where(self.inside(rows), full_RC[self.row_mBU, self.column_mBU], 0)

    def inside(self, rows):
        """Returns which slots are trained in some of the reference's rows."""
        return (self.row_mBU >= 0) & np.isin(self.row_mBU, rows)

    def weights(self, rows):
        """Returns the reference's weights: the mean over rows of sums over L1."""
        return (self.inside(rows) / (len(rows) * self.L1)).astype(np.float32)


@functools.cache
def room() -> tuple[int, int]:
    """Returns (slots of a row, microbatches) that hold every golden case: one shape."""
    value = dllm_rl.read("sdar_value/value/case.json")
    shapes = [(value["L0"], value["L1"], value["block_size"], len(value["samples"]))]
    sft = dllm_rl.tensors("sdar/sft/goldens.safetensors")
    for case in dllm_rl.read("sdar/sft/case.json")["cases"]:
        rows, block = len(sft[f"{case['prefix']}p_mask"]), case["config"]["block_size"]
        shapes.append((case["L0"], case["L1"], block, rows))
    for run in STAGES.values():
        L0, L1 = (
            max(len(sample[part]) for sample in run["samples"])
            for part in ("prompt", "response")
        )
        block = run["training"]["block_size"]
        shapes.append((L0, L1, block, len(run["samples"])))
    # A clean copy, and of each block of the response at most a view for each position.
    slots = max(L0 + L1 + (L1 + block) * block for L0, L1, block, _ in shapes)
    return slots, max(count for *_, count in shapes)


def lay_out(traces, steps, *, mask_id, block, L0: int, L1: int) -> Rows:
    """Packs traces and numbers the reference's rows."""
    slots, count = room()
    batch, source = dllm_rl.pack_each(
        traces, steps, mask_id=mask_id, block=block, tokens=slots, count=count
    )
    row_nT = dllm_rl.row_numbers(batch, source, (len(traces), L0 + L1))
    prompt_n = np.array([one.prompt_len_B[0] for one in traces])
    held = source.row_mBU >= 0
    return Rows(
        batch,
        np.where(held, row_nT[source.row_mBU, source.pos_mBU], -1),
        np.where(held, source.pos_mBU + L0 - prompt_n[source.row_mBU], 0),
        L1,
    )


@functools.cache
def golden_rows() -> Rows:
    """Returns the batch that the cases of RL and of the value model share."""
    case = dllm_rl.read("sdar_value/value/case.json")
    assert case["samples"] == dllm_rl.read("sdar/rl_trace/case.json")["samples"]
    golden = dllm_rl.tensors("sdar_value/value/goldens.safetensors")
    traces = dllm_rl.padded(case["samples"], case["pad_id"], post_num=case["post_num"])
    rows = lay_out(
        traces,
        [dllm_rl.rounds_of(one, case["shrink"], case["block_size"]) for one in traces],
        mask_id=case["mask_id"],
        block=case["block_size"],
        L0=case["L0"],
        L1=case["L1"],
    )
    # Surplus pads have a row of ours, but the reference does not train them.
    trained = golden["p_mask"][rows.row_mBU, rows.column_mBU] & (rows.row_mBU >= 0)
    rows.row_mBU = np.where(trained, rows.row_mBU, -1)
    assert trained.sum() == golden["p_mask"].sum()
    return rows


def test_log_probs_are_the_references():
    cfg, params = checkpoint("sdar")
    rows, golden = golden_rows(), dllm_rl.tensors("sdar/rl_trace/goldens.safetensors")
    case = dllm_rl.read("sdar/rl_trace/case.json")
    plans = Plans(policy=learner.Plan(("policy", "value"), OptimConfig(), 1))
    out = score({"policy": params}, rows.batch, model=cfg, plans=plans)["policy"]
    every = np.arange(len(golden["p_mask_all_rows"]))
    inside = rows.inside(every)
    assert inside.sum() == golden["p_mask_all_rows"].sum()
    np.testing.assert_allclose(
        out["logp"][inside],
        rows.pick(golden["logp_old_all_rows"], every)[inside],
        atol=1e-4,
    )
    inside = rows.inside(case["rows"])
    assert inside.sum() == golden["p_mask"].sum()
    for name in ("logp", "entropy"):
        np.testing.assert_allclose(
            out[name][inside], rows.pick(golden[name], case["rows"])[inside], atol=1e-4
        )


def check_policy(subset, golden, told, old: str, config: dict, full: dict):
    """Asserts the policy loss over some of the reference's rows, and its gradient."""
    cfg, params = checkpoint("sdar")
    rows, adv = golden_rows(), golden["adv"]
    adv_RC = adv if adv.ndim == 2 else np.repeat(adv[:, None], golden[old].shape[1], 1)
    batch = rows.batch.replace(
        weight_BU=rows.weights(subset),
        adv_BU=rows.pick(adv_RC, subset),
        old_logp_BU=rows.pick(golden[old], subset),
    )
    objective = ObjectiveConfig(
        clip=config["eps"],
        beta=config["beta"],
        kl="k3" if config["use_kl_estimator_k3"] else "k1",
    )
    check_loss(
        params, cfg, batch, "policy", objective, told["grads"], told["loss"], full
    )


@pytest.mark.parametrize(
    "variant",
    range(len(dllm_rl.read("sdar/rl_trace/case.json")["loss_variants"])),
)
def test_policy_loss_is_the_references(variant):
    case = dllm_rl.read("sdar/rl_trace/case.json")
    golden = dllm_rl.tensors("sdar/rl_trace/goldens.safetensors")
    told = case["loss_variants"][variant]
    full = starting(golden, told.get("full_grads_prefix", "none."))
    assert bool(full) == ("full_grads_prefix" in told)
    check_policy(case["rows"], golden, told, told["old"], told["config"], full)


def test_policy_loss_with_token_advantages_is_the_references():
    case = dllm_rl.read("sdar_value/policy/case.json")
    golden = dllm_rl.tensors("sdar_value/policy/goldens.safetensors")
    full = starting(golden, "grad.")
    check_policy(golden["rows"], golden, case, "old_logp", case["config"], full)


def test_value_loss_is_the_references():
    cfg, params = checkpoint("sdar_value")
    case = dllm_rl.read("sdar_value/value/case.json")
    golden = dllm_rl.tensors("sdar_value/value/goldens.safetensors")
    rows, subset = golden_rows(), golden["loss_rows"]
    plans = Plans(policy=learner.Plan(("policy", "value"), OptimConfig(), 1))
    out = score({"policy": params}, rows.batch, model=cfg, plans=plans)["policy"]
    inside = rows.inside(subset)
    raw_RC = golden["loss_values_raw"][:, case["L1"] :]  # of the noisy copy
    np.testing.assert_allclose(
        out["value"][inside], rows.pick(raw_RC, subset)[inside], atol=1e-4
    )
    every = np.arange(len(golden["p_mask"]))
    inside = rows.inside(every)
    np.testing.assert_allclose(
        out["value"][inside], rows.pick(golden["old_values"], every)[inside], atol=1e-4
    )
    batch = rows.batch.replace(
        weight_BU=rows.weights(subset),
        ret_BU=rows.pick(golden["Return"], every),
        old_value_BU=rows.pick(golden["loss_old_values"], subset),
    )
    check_loss(
        params,
        cfg,
        batch,
        "value",
        ObjectiveConfig(clip=case["eps"]),
        case["grads"],
        case["value_loss"],
        starting(golden, "grad."),
    )


@pytest.mark.parametrize(
    "index", range(len(dllm_rl.read("sdar/sft/case.json")["cases"]))
)
def test_sft_loss_is_the_references(index):
    """Each of the reference's rows is a trajectory of ours with the same noise."""
    cfg, params = checkpoint("sdar")
    case = dllm_rl.read("sdar/sft/case.json")
    told = case["cases"][index]
    golden = starting(dllm_rl.tensors("sdar/sft/goldens.safetensors"), told["prefix"])
    L0, L1 = told["L0"], told["L1"]
    traces = []
    for ids, labels, trained in zip(
        golden["extended_input_ids"], golden["labels"], golden["p_mask"], strict=True
    ):
        left = (labels[:L0] == case["pad_id"]).sum()
        hidden = ids[L0 + L1 :] == case["mask_id"]
        step = np.where(trained[L0:], 1, np.where(hidden, FAR, 0))
        traces.append(
            dllm_rl.trace(
                [labels[left:]], [[*[0] * (L0 - left), *step]], [L0 - left], [L1]
            )
        )
    rows = lay_out(
        traces,
        [one.step_BT for one in traces],
        mask_id=case["mask_id"],
        block=told["config"]["block_size"],
        L0=L0,
        L1=L1,
    )
    subset = np.arange(len(traces))
    assert rows.inside(subset).sum() == golden["p_mask"].sum()
    check_loss(
        params,
        cfg,
        rows.batch.replace(weight_BU=rows.weights(subset)),
        "nll",
        ObjectiveConfig(),
        told["grads"],
        told["loss"],
        starting(golden, "grad."),
    )


# ---- dLLM-RL's optimizer -------------------------------------------------------------


@pytest.mark.parametrize("index", STAGES)
def test_a_training_stage_ends_at_the_references_weights(index):
    """Old log-probs, then every update of its stage: AdamW, accumulation, clipping.

    The first update may come after fewer microbatches and a tail is left out, as the
    reference's step counter has it; its RL scripts divide by the accumulation twice.
    """
    run = STAGES[index]
    golden = dllm_rl.tensors("train/end_to_end/goldens.safetensors")
    told, sft = run["training"], "sft" in run["script"]
    cfg, params = checkpoint("sdar")

    traces = dllm_rl.padded(run["samples"], run["pad_id"], post_num=told["post_num"])
    L1 = max(len(sample["response"]) for sample in run["samples"])
    rows = lay_out(
        traces,
        [dllm_rl.rounds_of(one, told["shrink"], told["block_size"]) for one in traces],
        mask_id=run["mask_id"],
        block=told["block_size"],
        L0=max(len(sample["prompt"]) for sample in run["samples"]),
        L1=L1,
    )
    every, size = np.arange(rows.row_mBU.max() + 1), told["batch_size_lm"]
    micro = [every[k : k + size] for k in range(0, len(every), size)]
    assert len(micro) == len(run["losses_passed_to_backward"])
    accumulate = told["gradient_accumulation_steps"]
    ends = [k for k in range(len(micro)) if (k + 2) % accumulate == 0]
    assert len(ends) == run["optimizer_steps"]

    optim = OptimConfig(
        lr=run["optimizer"]["learning_rate"],
        schedule=run["lr_scheduler"]["scheduler"],
        b1=run["optimizer"]["beta1"],
        b2=run["optimizer"]["beta2"],
        eps=run["optimizer"]["epsilon"],
        weight_decay=run["optimizer"]["weight_decay"],
        decay_norms=True,
        max_grad_norm=told["max_grad_norm"],
    )
    updates = -(-len(every) // (size * accumulate)) * told["num_train_epochs"] + 1
    plans = Plans(policy=learner.Plan(("nll" if sft else "policy",), optim, updates))
    objective = ObjectiveConfig(clip=told["eps"], beta=told["beta"])

    reward_m11 = np.zeros((len(rows.row_mBU), 1, 1), np.float32)
    reward_m11[: len(traces), 0, 0] = [sample["reward"] for sample in run["samples"]]
    both = Plans(policy=learner.Plan(("policy", "value"), OptimConfig(), 1))
    old = score({"policy": params}, rows.batch, model=cfg, plans=both)["policy"]["logp"]
    batch = rows.batch.replace(
        adv_BU=np.broadcast_to(reward_m11, rows.row_mBU.shape), old_logp_BU=old
    )
    states = {"policy": learner.begin(params, plans["policy"])}
    for first, last in zip([0, *[k + 1 for k in ends]], ends, strict=False):
        weight = sum(rows.weights(part) for part in micro[first : last + 1])
        weight /= accumulate if sft else accumulate**2
        states, metrics = update(
            states,
            batch.replace(weight_BU=weight),
            model=cfg,
            plans=plans,
            cfg=objective,
        )
        if sft or not told["beta"] or first == 0:  # without KL, or before it moves
            passed = sum(run["losses_passed_to_backward"][first : last + 1])
            assert float(metrics["loss" if sft else "policy_loss"]) == pytest.approx(
                passed / accumulate, rel=1e-4, abs=1e-5
            )
    ours, start = theirs(states["policy"].params, cfg), theirs(params, cfg)
    for name, stats in run["parameters"].items():
        delta = ours[name] - start[name]
        assert np.abs(delta).max() == pytest.approx(stats["delta_absmax"], abs=2e-5)
        assert np.linalg.norm(delta) == pytest.approx(stats["delta_l2"], rel=2e-3), name
    final = starting(golden, run["prefix"])
    assert final
    for name, tensor in final.items():
        np.testing.assert_allclose(ours[name], tensor, atol=2e-5, err_msg=name)


# ---- Training sees what sampling saw -------------------------------------------------


@pytest.fixture(scope="module")
def sampled(tiny):
    """Returns (ModelConfig, params with a value head, host traces by strategy)."""
    cfg, params = tiny
    value = jax.random.normal(jax.random.key(5), params["norm"].shape)
    params = dict(params, value=value)
    prompt_BT = jax.random.randint(jax.random.key(6), (N, 10), 7, 60)
    len_B = jnp.array([8, 5, 1, 0, 7, 4, 10, 9, 2, 3, 6, 10, 1, 5, 7, 8])
    traces = {}
    for name, sampler in SAMPLERS.items():
        generate = jax.jit(functools.partial(denoise.generate, model=cfg, cfg=sampler))
        traces[name] = jax.device_get(
            generate(
                params,
                prompt_BT,
                len_B,
                len_B + sampler.max_new,
                jnp.ones(N),
                jax.random.split(jax.random.key(7), N),
            )
        )
    return cfg, params, traces


@pytest.mark.parametrize("strategy", SAMPLERS)
def test_log_probs_are_those_recorded_in_sampling(strategy, sampled):
    cfg, params, traces = sampled
    trace = traces[strategy]
    answer_nT = noise.answers(trace)
    # Every kind of row is here: ragged prompts inside a block, rows that stopped inside a
    # block with the rest of it still masked, or unmasked, and rows cut at their limit.
    live_n = trace.len_B > 0
    assert live_n.sum() == N - 1
    assert len(set(trace.prompt_len_B[live_n] % BLOCK)) == BLOCK
    end_n = trace.prompt_len_B + trace.len_B
    tail_nT = np.arange(SLOTS_OF_CANVAS)[None] // BLOCK == (end_n[:, None] - 1) // BLOCK
    tail_nT &= (np.arange(SLOTS_OF_CANVAS)[None] >= end_n[:, None]) & live_n[:, None]
    assert (tail_nT & (trace.step_BT == FAR)).any()
    assert (tail_nT & (trace.step_BT != FAR)).any()
    assert trace.stopped_B.any() and not trace.stopped_B[live_n].all()
    sizes = np.unique(
        np.stack([np.nonzero(answer_nT)[0], trace.step_BT[answer_nT]]),
        axis=1,
        return_counts=True,
    )[1]
    assert sizes.max() > 1  # some step unmasked several tokens

    batch, source = cut(trace, cfg, CUT)
    plans = Plans(policy=learner.Plan(("policy", "value"), OptimConfig(), 1))
    out = score({"policy": params}, batch, model=cfg, plans=plans)["policy"]
    logp_nT = source.scatter(out["logp"], trace.step_BT.shape)
    assert (trace.logp_BT[answer_nT] < 0).all()
    np.testing.assert_allclose(
        logp_nT[answer_nT], trace.logp_BT[answer_nT], atol=1e-4, rtol=0
    )


# ---- The same update, however it is laid out -----------------------------------------


def run(params, cfg, batch):
    """Returns one update's (states, metrics) on the host."""
    return jax.device_get(
        update(begin(params), batch, model=cfg, plans=PLANS, cfg=OBJECTIVE)
    )


@pytest.fixture(scope="module")
def alone(sampled):
    """Returns what one device arrives at: batch, source and result of each update."""
    cfg, params, traces = sampled
    return on_mesh((1, 1, 1), cfg, params, traces["dynamic"])[0]


def test_one_row_per_round_gives_the_same_update(sampled, alone):
    """The packed layout against dLLM-RL's, made by a loop over rows."""
    cfg, params, traces = sampled
    trace = traces["dynamic"]
    packed, source, after = alone[0]
    shape = trace.step_BT.shape
    rows, rows_source = train_step.one_row_per_round(
        trace, trace.step_BT, mask_id=cfg.mask_id, block=BLOCK, rows=8
    )
    rows = complete(rows, rows_source, trace, source.scatter(packed.weight_BU, shape))
    plans = Plans(policy=learner.Plan(("policy", "value"), OptimConfig(), 1))
    # Values are up to 14: as many digits are equal.
    for name, atol in (("logp", 1e-5), ("entropy", 1e-5), ("value", 5e-5)):
        one, two = (
            s.scatter(
                score({"policy": params}, b, model=cfg, plans=plans)["policy"][name],
                shape,
            )
            for b, s in ((packed, source), (rows, rows_source))
        )
        np.testing.assert_allclose(one, two, atol=atol)
    check_equal(run(params, cfg, rows), after)
    # In fewer tokens, although these answers are nearly of one length.
    assert (packed.end_BT > 0).sum() < (rows.end_BT > 0).sum()


def test_the_cut_into_microbatches_leaves_the_update(sampled, alone):
    """Rows so short that trajectories are split, in microbatches of another size."""
    cfg, params, traces = sampled
    batch, source = cut(traces["dynamic"], cfg, BatchConfig(rows=3, tokens=28))
    assert batch.used > alone[0][0].used > 1
    batch = complete(batch, source, traces["dynamic"])
    check_equal(run(params, cfg, batch), alone[0][2])


@functools.partial(jax.jit, static_argnames="model")
def of_masters(params, batch, model):
    """Returns the policy's gradients where each microbatch rounds the weights itself."""

    def total(params):
        losses = (
            learner.loss(
                params,
                learner.microbatch(batch, i),
                model=model,
                plan=PLANS["policy"],
                cfg=OBJECTIVE,
            )[0]
            for i in range(2)
        )
        return sum(losses)

    return jax.grad(total)(params)


def test_weights_rounded_once_have_the_gradients_of_the_masters(sampled, alone):
    cfg, params, _ = sampled
    model = dataclasses.replace(cfg, dtype="bfloat16")
    batch = alone[0][0]
    batch = batch.replace(used=np.minimum(batch.used, 2))
    assert batch.used == 2
    of_copy = jax.jit(
        functools.partial(
            learner.gradients, model=model, plan=PLANS["policy"], cfg=OBJECTIVE
        )
    )
    found = of_copy(params, batch, None)[0]
    want = of_masters(params, batch, model)
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert one.dtype == two.dtype == jnp.float32
        size = np.linalg.norm(two)
        assert size > 0
        assert np.linalg.norm(one - two) < 0.01 * size


def test_an_update_moves_every_parameter_and_reports(sampled, alone):
    _, params, _ = sampled
    states, metrics = alone[0][2]
    for name, state in states.items():
        assert state.step == 1
        before = begin(params)[name].params
        for one, two in zip(
            jax.tree.leaves(before), jax.tree.leaves(state.params), strict=True
        ):
            assert (np.asarray(one) != two).mean() > 0.3
    assert metrics.keys() == {
        "policy_loss",
        "kl",
        "reference_kl",
        "clip_fraction",
        "entropy",
        "value_loss",
        "grad_norm",
        "learning_rate",
        "value_grad_norm",
        "value_learning_rate",
        "updates_skipped",
        "value_updates_skipped",
    }
    assert metrics["updates_skipped"] == metrics["value_updates_skipped"] == 0
    assert all(np.isfinite(v) for v in metrics.values())
    assert 0 < metrics["clip_fraction"] < 1
    assert 0 < metrics["entropy"] < np.log(66)
    assert metrics["grad_norm"] > OPTIM.max_grad_norm  # so that clipping is at work
    np.testing.assert_allclose(metrics["learning_rate"], 1e-2)


def test_an_update_that_is_not_sound_leaves_its_network_as_it_was(sampled, alone):
    cfg, params, _ = sampled
    batch, _, after = alone[0]
    before = begin(params)

    @jax.jit
    def update(states, batch, limits):
        how = {"model": cfg, "plans": PLANS, "cfg": OBJECTIVE}
        return learner.update(states, batch, None, limits, **how)

    def changed(batch, **limits):
        none = dict.fromkeys(before, 0.0)
        states, metrics = jax.device_get(update(before, batch, none | limits))
        skips = metrics["updates_skipped"], metrics["value_updates_skipped"]
        return states, skips, metrics

    whole, skips, metrics = changed(batch)
    check_equal((whole, metrics), after)
    assert skips == (0, 0)
    nan_BU = np.full_like(batch.adv_BU, np.nan)
    norm, value_norm = float(metrics["grad_norm"]), float(metrics["value_grad_norm"])
    cases = [  # of the networks those that stay as they were
        ([], changed(batch, policy=1.01 * norm, value=1.01 * value_norm)),
        (["policy"], changed(batch.replace(adv_BU=nan_BU))),
        (["value"], changed(batch, policy=1.01 * norm, value=0.99 * value_norm)),
        # The policy has a value head, too, on one trunk.
        (["policy", "value"], changed(batch.replace(ret_BU=nan_BU))),
    ]
    for stay, (states, skips, _) in cases:
        assert skips == ("policy" in stay, "value" in stay)
        for name, state in states.items():
            want = before[name] if name in stay else whole[name]
            jax.tree.map(np.testing.assert_array_equal, state, want)


# ---- On a mesh -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        (2, 2, 2),
        *(pytest.param(x, marks=pytest.mark.soak) for x in ((8, 1, 1), (1, 8, 1))),
        pytest.param((1, 1, 8), marks=pytest.mark.soak),
    ],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_an_update_is_the_same_on_every_mesh(sampled, alone, shape):
    """As on one device; traced once; parameters and moments lie where the table says."""
    cfg, params, traces = sampled
    _, fsdp, model = shape
    out, states, traced = on_mesh(shape, cfg, params, traces["dynamic"])
    assert traced == 1
    for (_, _, ours), (_, _, single) in zip(out, alone, strict=True):
        check_equal(ours, single)
    for state in states.values():
        adam = state.opt_state[1][0]
        for tree in (state.params, adam.mu, adam.nu):
            wq, embed = tree["layers"]["wq"], tree["embed"]
            axes = ("fsdp" if fsdp > 1 else None, "model" if model > 1 else None)
            assert (*wq.sharding.spec, None, None, None)[1:3] == axes
            assert wq.addressable_shards[0].data.size * fsdp * model == wq.size
            assert embed.addressable_shards[0].data.size * fsdp == embed.size
        assert state.step.sharding.is_fully_replicated
