"""The likelihood of steps: enumerated, against one row per round, and its gradient."""

import dataclasses
import functools
import itertools
import types
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models import mask, transformer
from dllm_jax.models.mask import FAR
from dllm_jax.pallas_kernels import reference
from dllm_jax.rl import batches, learner, noise, selection, views
from dllm_jax.rl import layout as layouts
from dllm_jax.rl.config import BatchConfig, NoiseConfig, ObjectiveConfig, OptimConfig
from dllm_jax.rl.layout import Layout
from dllm_jax.sampling import confidence, denoise, logits, state
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.strategy import STRATEGIES
from tests.rl.common import Plans, score

PAD, FORBIDDEN = 1, 6
Q, V = 3, 6  # positions of a block, tokens beside the forbidden one
MODEL = types.SimpleNamespace(pad_id=PAD)
scored = jax.jit(reference.selection, static_argnames=("rule", "forbidden"))

# ---- Every outcome of one step -------------------------------------------------------


def every_draw(logits_QV, cfg: SamplerConfig):
    """Returns (tokens [n, Q], their probabilities [n], the Draw of each [n, Q])."""
    temper = jax.nn.log_softmax(
        logits.keep(
            logits_QV / cfg.temperature,
            top_k=cfg.top_k,
            top_p=cfg.top_p,
            top_p_first=cfg.top_p_first,
        )
    )
    own = jax.nn.log_softmax(logits_QV)
    compared = temper if cfg.tempered_threshold else own
    token_nQ = jnp.asarray(list(itertools.product(range(V), repeat=Q)))
    n = len(token_nQ)

    def wide(x_QV):
        return jnp.broadcast_to(x_QV[None], (n, *x_QV.shape))

    def told(target, x_QV):
        key_n = jax.random.split(jax.random.key(3), n)
        return confidence.TARGETS[target].score(wide(x_QV), token_nQ, key_n)

    logp_nQ = jnp.log(told("confidence", temper))
    drawn = logits.Draw(
        token_BW=token_nQ,
        logp_BW=jnp.log(told("confidence", own)),
        conf_BW=jnp.exp(logp_nQ),
        entropy_BW=-told("neg_entropy", temper),
        score_BW=told(cfg.target, temper),
        sure_BW=told(cfg.target, compared),
    )
    keys, step_n = jax.random.split(jax.random.key(0), n), jnp.zeros(n, int)
    drawn = confidence.weigh(drawn, keys, step_n, PAD, cfg)
    return np.asarray(token_nQ), np.exp(logp_nQ.sum(axis=1)), drawn


def outcomes(logits_QV, cfg: SamplerConfig, quota: int):
    """Returns {(taken positions, their tokens): probability}, and what was drawn there."""
    token_nQ, p_n, drawn = every_draw(logits_QV, cfg)
    quota_n = jnp.full(len(p_n), quota)
    masked = jnp.ones(token_nQ.shape, bool)
    take_nQ = np.asarray(STRATEGIES[cfg.strategy].take(drawn, masked, quota_n, cfg))
    found, conf = {}, {}
    for token_Q, p, take_Q, conf_Q in zip(
        token_nQ, p_n, take_nQ, np.asarray(drawn.conf_BW), strict=True
    ):
        if p > 0:
            key = tuple(np.flatnonzero(take_Q)), tuple(token_Q[take_Q])
            found[key], conf[key] = found.get(key, 0) + p, conf_Q
    return found, conf


def told_by_the_trace(logits_QV, cfg: SamplerConfig, quota: int, found, conf):
    """Returns what the trainer says of each outcome, from its trace alone."""
    exact = selection.of(dataclasses.replace(cfg, block=Q), MODEL)
    exact = dataclasses.replace(exact, schedule=(quota,) * Q)
    layout = Layout(block=Q, selection=exact)
    tokens, step, confs = np.zeros((3, len(found), Q))
    for i, (positions, drawn) in enumerate(found):
        at = list(positions)
        tokens[i, at], step[i], step[i, at] = drawn, FAR, 1
        confs[i, at] = conf[positions, drawn][at]
    trace = types.SimpleNamespace(
        tokens_BT=tokens.astype(int),
        step_BT=step.astype(int),
        conf_BT=confs.astype(np.float32),
        prompt_len_B=np.zeros(len(found), int),
    )
    border, place = selection.borders(trace, layout)
    taken = step == 1
    lead = np.arange(len(found))[:, None], taken.argmax(axis=1)[:, None]
    limit = selection.limits(border[lead], place[lead], np.arange(Q)[None])
    limit = np.where(taken, np.inf, limit)
    head = jnp.concatenate([logits_QV, jnp.full((Q, 1), 50.0)], axis=1)  # the forbidden
    logp, _, _ = scored(
        jnp.tile(jnp.eye(Q), (len(found), 1)),
        head,
        jnp.asarray(tokens.reshape(-1), jnp.int32),
        jnp.asarray(limit.reshape(-1), jnp.float32),
        rule=exact.rule,
        forbidden=FORBIDDEN,
    )
    logp = np.asarray(logp).reshape(len(found), Q)
    return np.exp(np.where(taken | exact.skips, logp, 0).sum(axis=1))


def ties():
    """Returns logits of which two positions are alike, and two tokens of each."""
    x = np.random.default_rng(5).normal(size=(Q, V)).astype(np.float32)
    x[2], x[:, 4] = x[0], x[:, 3]
    return x


RULES = {
    "sequential": {"strategy": "sequential"},
    "static": {"strategy": "static"},
    "dynamic": {"threshold": 0.35},
    "no_border": {"threshold": 0.99},
    "all": {"threshold": 0.0},
    "entropy_bounded": {"strategy": "entropy_bounded", "entropy_bound": 2.6},
    "margin": {"target": "margin", "threshold": 0.2},
    "top": {"target": "top", "threshold": 0.4},
    "neg_entropy": {"target": "neg_entropy", "threshold": -1.4},
    "log": {"target": "log_confidence", "threshold": -1.05},
    "static_log": {"target": "log_confidence", "strategy": "static"},
    "static_margin": {"strategy": "static", "target": "margin"},
    "warm": {"threshold": 0.35, "temperature": 1.7},
    "cold": {"threshold": 0.35, "temperature": 0.6, "tempered_threshold": True},
    "cold_own": {"threshold": 0.3, "temperature": 0.5},
    "top_k": {"threshold": 0.35, "top_k": 3},
    "top_p": {"threshold": 0.35, "top_p": 0.7, "temperature": 0.8},
    "both": {"strategy": "static", "top_k": 4, "top_p": 0.8},
    "top_p first": {
        "strategy": "static",
        "top_k": 3,
        "top_p": 0.8,
        "top_p_first": True,
    },
    "pads": {"threshold": 0.3, "pad_penalty": 3.0},
    "static_pads": {"strategy": "static", "pad_penalty": 2.0, "temperature": 0.7},
}


@pytest.mark.parametrize("quota", [1, 2])
@pytest.mark.parametrize("name", RULES)
def test_every_outcome_has_its_probability(name, quota):
    """Of all that may be drawn in a block: also with ties, from the left."""
    cfg = SamplerConfig(block=Q, **RULES[name])
    assert not selection.refused(cfg, "block")
    free = np.random.default_rng(2).normal(size=(Q, V), scale=1.5).astype(np.float32)
    selected = set()
    for logits_QV in (free, ties()):
        found, conf = outcomes(jnp.asarray(logits_QV), cfg, quota)
        told = told_by_the_trace(jnp.asarray(logits_QV), cfg, quota, found, conf)
        np.testing.assert_allclose(told, list(found.values()), rtol=2e-4, atol=1e-7)
        assert told.sum() == pytest.approx(1, abs=1e-5)
        selected |= {positions for positions, _ in found}
    assert len(selected) > 2 or not cfg.filters_draws or name == "all"


@pytest.mark.parametrize(
    ("changes", "attention", "message"),
    [
        ({"temperature": 0.0}, "block", "temperature=0 has no density"),
        ({"rank_temperature": 0.5}, "block", "rank_temperature=0.5 has no closed form"),
        ({"cache": "prefix"}, "full", "cache='prefix' has stale keys"),
        (
            {"pad_penalty": 2.0, "target": "margin"},
            "block",
            "nothing records the border",
        ),
        ({"int8": True}, "block", "int8=True rounds what ranks are of"),
        ({"pad_penalty": 2.0, "strategy": "sequential"}, "block", ""),
        (
            {"pad_penalty": 2.0, "target": "margin", "strategy": "sequential"},
            "block",
            "",
        ),
        ({"before_stop": True}, "block", "before_stop=True leaves out places"),
        ({"before_stop": True, "target": "top"}, "block", ""),
        ({"cache": "none"}, "full", ""),
    ],
)
def test_what_has_no_likelihood_says_why(changes, attention, message):
    told = selection.refused(SamplerConfig(**changes), attention)
    assert message in told and bool(message) == bool(told)


def test_a_prompt_that_was_skipped_has_no_borders():
    layout = Layout(block=Q, selection=selection.of(SamplerConfig(block=Q), MODEL))
    blank = state.stacked([state.no_answer(2 * Q)])
    for found_nT in selection.borders(blank, layout):
        assert found_nT.shape == (1, 2 * Q) and not found_nT.any()


def test_a_score_at_random_leaves_its_order_a_constant():
    cfg = SamplerConfig(block=Q, strategy="static", target="random")
    assert not cfg.filters_draws
    assert SamplerConfig().filters_draws


# ---- Whole trajectories, packed, against one canvas per step ---------------------------

FAMILIES = {  # attention, shift, what its sampler has beside the defaults
    "block": ("block", 0, {}),
    "block, shifted": ("block", 1, {"strategy": "static"}),
    "block, uneven": ("block", 0, {"strategy": "static", "steps_per_block": 3}),
    "full": ("full", 0, {}),
    "full, shifted": ("full", 1, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}),
}
NEW, N, STOPS = 10, 3, tuple(range(2, 66, 5))
BATCH = BatchConfig(rows=2, tokens=112)
CLIPPED = ObjectiveConfig(likelihood="selection", clip=0.02, beta=0.05)


@pytest.fixture(scope="module")
def sampled(tiny):
    """Returns a function of a family: (host trace, ModelConfig, SamplerConfig, params)."""
    return functools.cache(functools.partial(trajectories, tiny=tiny))


def trajectories(family: str, tiny):
    """Returns a few rows, with what sampled them."""
    attention, shift, changes = FAMILIES[family]
    model, params = tiny
    model = dataclasses.replace(model, attention=attention, shift=shift)
    cfg = SamplerConfig(
        block=4, threshold=0.5, max_prompt=6, max_new=NEW, stop_ids=STOPS, **changes
    )
    generate = functools.partial(denoise.generate.__wrapped__, model=model, cfg=cfg)
    len_B = jnp.array([5, 2, 6])
    prompt_BT = jax.random.randint(jax.random.key(6), (N, 6), 7, 60)
    keys = jax.random.split(jax.random.key(12), N)
    warmth_B = jnp.full(N, cfg.temperature)
    trace = jax.jit(generate)(params, prompt_BT, len_B, len_B + NEW, warmth_B, keys)
    return jax.device_get(trace), model, cfg, params


def rows_of_steps(trace, model, cfg):
    """Returns one row for each step that was sampled: its canvas, and who was asked."""
    rows = {name: [] for name in ("shown", "taken", "over", "token", "limit", "border")}
    at = []
    for i, step_T in enumerate(trace.step_BT):
        start = int(trace.prompt_len_B[i]) if model.attention == "full" else 0
        limit = int(trace.prompt_len_B[i]) + NEW
        pos_T = np.arange(len(step_T))
        block_T, steps = (pos_T - start) // cfg.block, Counter()
        for t in sorted({*step_T[(step_T > 0) & (step_T != FAR)].tolist()}):
            (block,) = set(block_T[step_T == t].tolist())
            room_T = pos_T < limit if model.attention == "full" else True
            over_T = (step_T > t) & (block_T == block) & room_T
            shown_T = np.where(step_T >= t, model.mask_id, trace.tokens_BT[i])
            share = cfg.schedule[steps[block]]
            steps[block] += 1
            best = np.sort(trace.conf_BT[i, step_T == t])[::-1]
            border = np.log(
                best[min(share, len(best)) - 1]
            )  # if fewer, nothing is over
            of_row = shown_T, step_T == t, over_T, trace.tokens_BT[i], limit, border
            for column, x in zip(rows.values(), of_row, strict=True):
                column.append(x)
            at.append((i, int(np.argmax(step_T == t))))
    return {name: np.stack(column) for name, column in rows.items()}, at


def log_prob_of_steps(params, rows, model, cfg):
    """Returns (log P of each row's step, how near a token lies to its border, nats)."""
    R, T = rows["shown"].shape
    pos_RT = jnp.broadcast_to(jnp.arange(T)[None], (R, T))
    seen = mask.clean(model.attention, pos_RT, rows["limit"], cfg.block)
    x_RTD = transformer.embed(params, rows["shown"], model)
    x_RTD = transformer.trunk(params, x_RTD, pos_RT, seen, model)[0]
    logits_RTV = transformer.logits(params, jnp.roll(x_RTD, model.shift, 1), model)
    own_RTV = jax.nn.log_softmax(logits_RTV)
    warm_RTV = logits_RTV / cfg.temperature
    if cfg.top_k:
        warm_RTV = logits.keep(warm_RTV, top_k=cfg.top_k, top_p=cfg.top_p)
    drawn_RTV = jax.nn.log_softmax(warm_RTV)
    logp_RT = jnp.take_along_axis(drawn_RTV, rows["token"][..., None], axis=-1)[..., 0]
    border_R11 = jnp.asarray(rows["border"])[:, None, None]
    behind_RTV = drawn_RTV < border_R11
    near_RTV = jnp.abs(drawn_RTV - border_R11)
    if cfg.strategy == "dynamic":
        behind_RTV &= own_RTV <= np.log(cfg.threshold)
        near_RTV = jnp.minimum(near_RTV, jnp.abs(own_RTV - np.log(cfg.threshold)))
    mass_RT = jnp.where(behind_RTV, jnp.exp(drawn_RTV), 0).sum(axis=-1)
    over_RT = jnp.asarray(rows["over"])
    mass_RT = jnp.log(jnp.where(over_RT, mass_RT, 1))
    near_R = jnp.where(over_RT, near_RTV.min(axis=-1), jnp.inf).min(axis=1)
    return jnp.where(rows["taken"], logp_RT, 0).sum(axis=1) + mass_RT.sum(
        axis=1
    ), near_R


def packed(trace, model, cfg, aggregate="token"):
    """Returns (TrainBatch, Source, Rule) of a trace as the product packs it."""
    layout = layouts.of(model, cfg, NoiseConfig(), CLIPPED)
    most = layouts.microbatches(
        trajectories=N,
        slots=cfg.slots,
        answer=NEW,
        rounds=noise.rounds(NoiseConfig(), layout, NEW),
        copies=1,
        layout=layout,
        cfg=BATCH,
    )
    batch, source = views.pack(
        trace,
        noise.noised(trace, NoiseConfig(), layout),
        mask_id=model.mask_id,
        layout=layout,
        cfg=BATCH,
        most=most,
        aggregate=aggregate,
        group_n=np.array([0, 0, 1]),
    )
    return batch, source, layout.selection.rule


def stepped(trace, model, cfg, params):
    """Returns (packed's, what `score` says, plain log P of the steps, nearness, places)."""
    batch, source, rule = packed(trace, model, cfg)
    plans = Plans(policy=learner.Plan(("policy",), OptimConfig(), 1, rule=rule))
    out = score({"policy": params}, batch, model=model, plans=plans)["policy"]
    rows, at = rows_of_steps(trace, model, cfg)
    plain = jax.jit(functools.partial(log_prob_of_steps, model=model, cfg=cfg))
    return batch, source, out, *jax.device_get(plain(params, rows)), at


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_steps_are_those_of_one_canvas_each(sampled, family):
    """Tokens and draws behind the stop token are part of them; every token stands once."""
    trace, model, cfg, params = sampled(family)
    batch, source, out, logp_R, near_R, at = stepped(trace, model, cfg, params)
    shape = trace.step_BT.shape
    logp_nT = source.scatter(out["logp"], shape)
    found_R = np.array([logp_nT[place] for place in at])
    clear_R = near_R > 1e-3
    assert clear_R.mean() > 0.8
    np.testing.assert_allclose(found_R[clear_R], logp_R[clear_R], atol=1e-4)
    assert learner.supervised_units(batch) == len(at)
    taught_nT = source.scatter(np.ones(batch.weight_BU.shape), shape)
    np.testing.assert_array_equal(taught_nT > 0, noise.unmasked(trace.step_BT))
    end_n1 = (trace.prompt_len_B + trace.len_B)[:, None]
    if model.attention == "block":
        assert (np.arange(shape[1])[None] >= end_n1)[taught_nT > 0].any()
    skips = (batch.unit_BU >= 0).sum() - taught_nT.sum()
    assert skips == rows_of_steps(trace, model, cfg)[0]["over"].sum() > 0
    # The tokens' own log-probs are those of what they were drawn from.
    recorded = source.gather(batches.drawn_logp(trace))
    taken = source.row_mBU >= 0
    np.testing.assert_allclose(out["token_logp"][taken], recorded[taken], atol=1e-4)


@pytest.mark.parametrize("aggregate", views.AGGREGATES)
def test_aggregates_count_steps(sampled, aggregate):
    trace, model, cfg, _ = sampled("block")
    batch, source, _ = packed(trace, model, cfg, aggregate)
    steps = np.array([np.unique(s[noise.unmasked(s)]).size for s in trace.step_BT])
    want = {
        "token": 1 / steps.sum() * np.ones(N),
        "sequence": 1 / (N * steps),
        "step": np.full(N, 1 / N),
        "constant": np.full(N, 1 / (N * NEW)),
        "group": 1 / (2 * np.array([steps[:2].sum()] * 2 + [steps[2]])),
        "elbo": 1 / steps.sum() * np.ones(N),
        "elbo_sequence": 1 / (N * steps),
        "elbo_answer": np.full(N, 1 / N),
    }[aggregate]
    weight_nT = source.scatter(batch.weight_BU, trace.step_BT.shape)
    np.testing.assert_allclose(weight_nT.sum(axis=1), want * steps, rtol=1e-5)
    nobodys_BU = source.row_mBU < 0  # filling, and draws that were thrown away
    assert nobodys_BU.any() and not batch.weight_BU[nobodys_BU].any()


def test_the_gradient_is_that_of_a_plain_loss(sampled):
    """Of three trajectories: ratio, clip and KL of whole steps, old weights apart."""
    trace, model, cfg, params = sampled("block")
    old = jax.tree.map(lambda x: x * 1.01, params)
    batch, source, out, old_R, near_R, at = stepped(trace, model, cfg, old)
    shape, rng = trace.step_BT.shape, np.random.default_rng(0)
    adv_nT = np.repeat(rng.normal(size=(N, 1)), shape[1], 1)
    batch = batch.replace(
        adv_BU=source.gather(adv_nT),
        old_logp_BU=source.gather(source.scatter(out["logp"], shape)),
        ahead_BU=out["ahead"],
    )
    rows, _ = rows_of_steps(trace, model, cfg)
    adv_R = np.array([adv_nT[place] for place in at])

    def plain(params):
        logp_R, _ = log_prob_of_steps(params, rows, model, cfg)
        delta_R = logp_R - old_R
        ratio_R = jnp.exp(delta_R)
        near = jnp.minimum(ratio_R * adv_R, jnp.clip(ratio_R, 0.98, 1.02) * adv_R)
        return jnp.mean(-near + 0.05 * (jnp.exp(-delta_R) - 1 + delta_R))

    plan = learner.Plan(
        ("policy",), OptimConfig(), 1, rule=packed(trace, model, cfg)[2]
    )
    grads, sums = jax.jit(
        functools.partial(learner.gradients, model=model, plan=plan, cfg=CLIPPED)
    )(params, batch, None)
    loss, want = jax.jit(jax.value_and_grad(plain))(params)
    assert near_R.min() > 1e-3 and 0 < sums["clip_fraction"] < len(at)
    assert 0 <= sums["borders_crossed"] < len(at)
    np.testing.assert_allclose(sums["total"], loss, rtol=1e-4)
    assert learner.supervised_units(batch) == len(at)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max()),
        grads,
        want,
    )


def test_ratios_of_answers_are_of_their_steps(sampled):
    """objective.loss="sequence": the mean over an answer's steps, clipped as one."""
    trace, model, cfg, params = sampled("block")
    old = jax.tree.map(lambda x: x * 1.01, params)
    _, _, out, old_R, near_R, at = stepped(trace, model, cfg, old)
    batch, source, rule = packed(trace, model, cfg, "sequence")
    shape, A_n = trace.step_BT.shape, np.array([1.0, 0.5, -1.0])
    batch = batch.replace(
        adv_BU=source.gather(np.repeat(A_n[:, None], shape[1], 1)),
        old_logp_BU=source.gather(source.scatter(out["logp"], shape)),
        ref_logp_BU=np.zeros_like(batch.weight_BU),  # nothing pulls
        answer_BU=source.gather(np.repeat(np.arange(N)[:, None], shape[1], 1)),
        ahead_BU=out["ahead"],
    )
    rows, _ = rows_of_steps(trace, model, cfg)
    answer_R = np.array([i for i, _ in at])
    steps_n = np.bincount(answer_R)

    def plain(params):
        logp_R, _ = log_prob_of_steps(params, rows, model, cfg)
        delta_n = jnp.zeros(N).at[answer_R].add(logp_R - old_R) / steps_n
        ratio_n = jnp.exp(delta_n)
        near_n = jnp.minimum(ratio_n * A_n, jnp.clip(ratio_n, 0.98, 1.02) * A_n)
        pull_n = 0.05 * delta_n**2 / 2
        return jnp.mean(-near_n + pull_n), -jnp.mean(near_n)

    objective = dataclasses.replace(CLIPPED, loss="sequence", kl="k2")
    plan = learner.Plan(("sequence",), OptimConfig(), 1, rule=rule)
    grads, sums = jax.jit(
        functools.partial(learner.gradients, model=model, plan=plan, cfg=objective)
    )(params, batch, None)
    want, policy_loss = jax.jit(jax.grad(plain, has_aux=True))(params)
    assert near_R.min() > 1e-3 and 0 < sums["answer_clip_fraction"] < 1
    np.testing.assert_allclose(sums["policy_loss"], policy_loss, rtol=1e-4)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max()),
        grads,
        want,
    )


def test_a_border_that_is_crossed_is_counted():
    unit_BU = jnp.array([[0, 0, 2, 2, 2, -1]])
    batch = types.SimpleNamespace(unit_BU=unit_BU, ahead_BU=jnp.zeros((1, 6)))
    out = {"ahead": jnp.array([[0, 0, 0, 1.0, 2, 5]])}
    assert selection.crossed(out, batch) == 1
    assert selection.crossed(out, types.SimpleNamespace(ahead_BU=None)) == 0
