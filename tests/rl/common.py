"""What several test files of rl share: compiled functions, losses of goldens, updates."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import sharding
from dllm_jax.models import hf, transformer
from dllm_jax.rl import layout as layouts
from dllm_jax.rl import learner, noise, objectives, views
from dllm_jax.rl.config import (
    BatchConfig,
    NoiseConfig,
    ObjectiveConfig,
    OptimConfig,
)
from dllm_jax.rl.rollout import Rollouts
from dllm_jax.sampling.config import SamplerConfig
from dllm_jax.sampling.state import GIVEN
from tests.goldens import reader
from tests.rl import dllm_rl

score = jax.jit(learner.score, static_argnames=("model", "plans"))
update = jax.jit(learner.update, static_argnames=("model", "plans", "cfg"))


class Plans(dict):
    """Plans by name, hashable as a static argument."""

    def __hash__(self):
        return hash(tuple(self.items()))


# ---- dLLM-RL's losses ----------------------------------------------------------------

HEADS = ("lm", "value")


@functools.cache
def checkpoint(family: str):
    """Returns (ModelConfig, params) of a golden checkpoint, with both heads.

    The reference lets the mask token be an answer; ours forbids it. An id beyond the
    vocabulary forbids nothing.
    """
    cfg, params = hf.load(reader.checkpoint(family), heads=HEADS)
    return dataclasses.replace(cfg, mask_id=cfg.vocab, dtype="float32"), params


def theirs(params, cfg) -> dict:
    """Returns parameters, or their gradients, under the checkpoint's names."""
    out = {}
    for path, spec, name in hf.leaves(cfg, HEADS):
        leaf = params
        for step in path:
            leaf = leaf[step.key]
        layered = spec.dims.startswith("L")
        for i, one in enumerate(np.asarray(leaf) if layered else [np.asarray(leaf)]):
            out[name.format(i)] = hf.to_file(one, spec, cfg)
    return out


@functools.partial(jax.jit, static_argnames="model")
def pull(params, batch, cotangents, *, model):
    """Returns (outputs, gradient of sum(cotangents x outputs)) of one microbatch."""
    out, back = jax.vjp(
        lambda params: learner.outputs(params, batch, model, HEADS), params
    )
    return out, back(cotangents)[0]


def check_loss(params, cfg, batch, term, objective, told, loss, full, hidden=()):
    """Asserts an objective's loss and its gradient, within 2e-4 of the largest entry.

    The objective's own derivative is taken apart, so that all cases share one program.
    """
    batch = flat(batch)
    bare = batch.replace(
        **dict.fromkeys(("adv_BU", "old_logp_BU", "ret_BU", "old_value_BU"))
    )
    zeros = dict.fromkeys(("logp", "entropy", "value"), jnp.zeros(batch.where_BU.shape))
    out, _ = pull(params, bare, zeros, model=cfg)
    (found, _), cotangents = jax.value_and_grad(
        lambda out: objectives.OBJECTIVES.get(term, term)(out, batch, objective),
        has_aux=True,
    )(out)
    assert float(found) == pytest.approx(loss, rel=1e-4, abs=1e-5)
    _, grads = pull(params, bare, cotangents, model=cfg)
    ours = theirs(grads, cfg)
    assert told.keys() | ({"lm_head.weight", "value_head.weight"} & ours.keys()) == (
        ours.keys()
    )
    for tensor, row in hidden:  # the reference gives it no gradient
        ours[tensor] = np.array(ours[tensor])
        ours[tensor][row] = 0
    for tensor, grad in ours.items():
        stats = told.get(tensor)
        if stats is None:
            assert not grad.any(), tensor
            continue
        near = 2e-4 * stats["absmax"]
        assert np.abs(grad).max() == pytest.approx(stats["absmax"], abs=near), tensor
        assert np.linalg.norm(grad) == pytest.approx(stats["l2"], rel=2e-4), tensor
    for tensor, golden in full.items():
        near = 2e-4 * np.abs(golden).max()
        np.testing.assert_allclose(ours[tensor], golden, atol=near, err_msg=tensor)


def flat(batch):
    """Returns the microbatches of one row each as one microbatch."""
    return jax.tree.map(lambda x: x[:, 0] if np.ndim(x) else x, batch)


def starting(golden, prefix: str) -> dict:
    """Returns the arrays whose name starts so, without it."""
    return {
        name.removeprefix(prefix): x
        for name, x in golden.items()
        if name.startswith(prefix)
    }


# ---- What a sampler left, packed -----------------------------------------------------

SAMPLERS = {
    "static": SamplerConfig(
        strategy="static",
        steps_per_block=2,
        max_prompt=10,
        max_new=14,
        stop_ids=(3, 4, 5, 6),
    ),
    "dynamic": SamplerConfig(
        strategy="dynamic",
        threshold=0.5,
        max_prompt=10,
        max_new=14,
        stop_ids=(3, 4, 5, 6),
    ),
}
BLOCK, SLOTS_OF_CANVAS, N = 4, 24, 16

CUT = BatchConfig(rows=8, tokens=40)


def cut(trace, cfg, batch_cfg: BatchConfig, most=None):
    """Returns (batch, source) of a trace as the product packs it."""
    layout = layouts.Layout(block=BLOCK, longest=14)
    most = most or layouts.microbatches(
        trajectories=N,
        slots=SLOTS_OF_CANVAS,
        answer=14,
        rounds=BLOCK,
        copies=1,
        layout=layout,
        cfg=batch_cfg,
    )
    return views.pack(
        trace,
        noise.noised(trace, NoiseConfig(), layout),
        mask_id=cfg.mask_id,
        layout=layout,
        cfg=batch_cfg,
        most=most,
        aggregate="token",
    )


# ---- An update of two networks, on one device or a mesh ------------------------------

OPTIM = OptimConfig(
    lr=1e-2, schedule="linear", eps=1e-3, weight_decay=0.1, max_grad_norm=0.5
)
PLANS = Plans(
    policy=learner.Plan(("policy", "value"), OPTIM, 10),  # a head on its trunk
    value=learner.Plan(("value",), OPTIM, 10),  # its own network
)
OBJECTIVE = ObjectiveConfig(reference_beta=0.1, value_weight=0.5)


def begin(params, plans=PLANS):
    """Returns the states of the plans' networks, whose parameters differ."""
    value = jax.tree.map(lambda x: 0.9 * x, params)
    value = {k: v for k, v in value.items() if k != "head"}
    networks = {"policy": params, "value": value}
    return {name: learner.begin(networks[name], plan) for name, plan in plans.items()}


def complete(batch, source, trace, weight_nT=None):
    """Returns the batch with everything that the objectives ask for, the same by token."""
    rng = np.random.default_rng(3)
    shape = trace.step_BT.shape
    adv_nT, old_nT, ref_nT, ret_nT, value_nT = rng.normal(size=(5, *shape))
    if weight_nT is not None:
        batch = batch.replace(weight_BU=source.gather(weight_nT))
    return batch.replace(
        adv_BU=source.gather(adv_nT),
        old_logp_BU=source.gather(trace.logp_BT + 0.3 * old_nT),
        ref_logp_BU=source.gather(trace.logp_BT + 0.3 * ref_nT),
        ret_BU=source.gather(ret_nT),
        old_value_BU=source.gather(value_nT),
    )


def check_equal(one, two):
    """Asserts two (states, metrics) equal to rounding."""
    jax.tree.map_with_path(
        lambda path, x, y: np.testing.assert_allclose(
            x, y, rtol=1e-4, atol=2e-5 * max(np.abs(y).max(), 1e-3), err_msg=str(path)
        ),
        one,
        two,
    )


def begin_on(mesh, cfg, params, plans):
    """Returns (the states on the mesh, their shardings)."""
    states, places = {}, {}
    for name, state in begin(params, plans).items():
        placed = jax.tree.map(
            lambda x, like: jax.device_put(np.asarray(x), like.sharding),
            state.params,
            transformer.abstract(cfg, mesh, jnp.float32, plans[name].heads),
        )
        start = functools.partial(learner.begin, plan=plans[name])
        abstract = jax.eval_shape(start, placed).replace(params=placed)
        places[name] = learner.shardings(abstract, plans[name], mesh)
        states[name] = jax.jit(start, out_shardings=places[name])(placed)
    return states, places


def on_mesh(shape, cfg, params, trace, plans=PLANS):
    """Returns ((batch, source, result) of each of two updates, the states, traces).

    The second batch holds fewer microbatches than the first; the last number says how
    often `update` was traced.
    """
    data, fsdp, model = shape
    devices = jax.devices()[: data * fsdp * model]
    mesh = sharding.make_mesh(data=data, fsdp=fsdp, model=model, devices=devices)
    traced = collections.Counter()

    def counted(states, batch):
        traced["update"] += 1
        return learner.update(states, batch, model=cfg, plans=plans, cfg=OBJECTIVE)

    with jax.set_mesh(mesh):
        states, places = begin_on(mesh, cfg, params, plans)
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        step = jax.jit(counted, donate_argnums=0, out_shardings=(places, whole))
        out = []
        for count in (N, N // 3):
            part = jax.tree.map(lambda x, count=count: x[:count], trace)
            batch, source = cut(part, cfg, CUT, most=8)
            batch = complete(batch, source, part)
            states, metrics = step(states, sharding.place_rows(batch, mesh, axis=1))
            out.append((batch, source, jax.device_get((states, metrics))))
        assert out[0][0].used > out[1][0].used
    return out, states, traced["update"]


# ---- Rollouts without a sampler ------------------------------------------------------

PROMPT, ANSWER = 3, 9  # of short_trace
LAYOUT = layouts.Layout(block=4, longest=12)


def one_device():
    """Returns a mesh of one device."""
    return sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])


def packed(trace, noised, copies=1):
    """Returns (TrainBatch, Source) of rows of 48 slots."""
    return views.pack(
        trace,
        noised,
        mask_id=99,
        layout=LAYOUT,
        cfg=BatchConfig(rows=2, tokens=48),
        most=4,
        aggregate="token",
        copies=copies,
    )


def rollouts() -> Rollouts:
    """Returns 8 answers of 8 tokens, each unmasked alone, to prompts of 4 on 16 slots."""
    rng, shape = np.random.default_rng(0), (8, 16)
    step_nT = np.full(shape, GIVEN)
    step_nT[:, 4:12] = 1 + np.arange(8)
    trace = dllm_rl.trace(
        rng.integers(1, 50, shape), step_nT, np.full(8, 4), np.full(8, 8)
    )
    logp_nT = -rng.random(shape).astype(np.float32)
    return Rollouts(
        trace=trace.replace(logp_BT=logp_nT),
        group_n=np.repeat([0, 1], 4),
        text=[""] * 8,
        reward_n=np.array([1, 0, 0, 0, 1, 1, 1, 0], np.float32),
        late_n=np.zeros(8, bool),
    )


def short_trace(seed=0, n=3):
    """Returns n answers of 9 tokens to prompts of 3, of 1 to 4 tokens a step."""
    rng = np.random.default_rng(seed)
    shape = n, PROMPT + ANSWER
    step_nT = np.full(shape, GIVEN)
    for i in range(n):
        for first in (3, 4, 8):  # blocks of 4 on the absolute grid
            stop = min(first // 4 * 4 + 4, shape[1])
            steps = np.sort(rng.integers(1, 4, stop - first)) + 4 * (first // 4)
            step_nT[i, first:stop] = rng.permutation(steps)
    made = dllm_rl.trace(
        rng.integers(1, 50, shape), step_nT, np.full(n, PROMPT), np.full(n, ANSWER)
    )
    return made.replace(logp_BT=-rng.exponential(0.7, shape).astype(np.float32))
