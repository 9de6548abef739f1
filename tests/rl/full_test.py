"""The losses of full-attention families against dLLM-RL's, through the same learner."""

import jax
import numpy as np
import pytest

from dllm_jax.models.mask import FAR
from dllm_jax.rl import noise, objectives, views
from dllm_jax.rl.config import BatchConfig, ObjectiveConfig
from dllm_jax.rl.layout import Layout
from tests.rl import dllm_rl
from tests.rl.common import check_loss, checkpoint, starting

FAMILIES = ["dream", "llada", "mmada"]


def rows(cfg, golden, start: int, pad_id: int, attention: str = "full"):
    """Returns (batch, source, left): each of the reference's rows is a view of ours.

    Its LLaDA and MMaDA see the pads before a prompt, its Dream does not.
    """
    parts, R = [], len(golden["labels"])
    T = golden["labels"].shape[1]
    left_n = np.zeros(R, int)
    if cfg.shift:  # Dream
        left_n = (golden["labels"][:, :start] == pad_id).sum(axis=1)
    hidden = golden["input_ids"] != golden["labels"]
    step = np.where(golden["p_mask"], 1, np.where(hidden, FAR, 0))
    for x, fill in ((golden["labels"], 0), (step, FAR)):
        moved = [np.roll(row, -n) for row, n in zip(x, left_n, strict=True)]
        parts.append(np.where(np.arange(T) < T - left_n[:, None], moved, fill))
    tokens_nT, step_nT = parts
    layout = Layout(attention=attention, shift=cfg.shift, longest=T - start)
    batch, source = views.pack(
        dllm_rl.trace(tokens_nT, step_nT, start - left_n, np.full(R, T - start)),
        noise.of_steps(step_nT),
        mask_id=int(golden["input_ids"][hidden][0]) if hidden.any() else 0,
        layout=layout,
        cfg=BatchConfig(rows=max(R, 4), tokens=T),
        most=1,
        aggregate="token",
    )
    assert (source.row_mBU >= 0).sum() == golden["p_mask"].sum()
    return one(batch), source, left_n


def one(batch):
    """Returns the microbatch in the form that `check_loss` takes: rows in front."""
    return jax.tree.map(lambda x: np.swapaxes(x, 0, 1) if np.ndim(x) else x, batch)


def mean(source, golden, *, per_token: bool):
    """Returns the weights of a mean over rows of sums, or of means, over a row's tokens."""
    count_n = (
        golden["p_mask"].sum(axis=1) if per_token else np.ones(len(golden["p_mask"]))
    )
    weight = 1 / (len(count_n) * count_n[source.row_mBU])
    return np.swapaxes(np.where(source.row_mBU >= 0, weight, 0), 0, 1).astype(
        np.float32
    )


def padding(cfg, case):
    """Returns the rows of tensors that get no gradient: torch's padding index."""
    return [("model.embed_tokens.weight", case["pad_id"])] * cfg.shift


@pytest.mark.parametrize(
    ("family", "index"),
    [
        (family, i)
        for family in FAMILIES
        for i, _ in enumerate(dllm_rl.read(f"{family}/sft/case.json")["cases"])
    ],
)
def test_sft_losses_are_the_references(family, index):
    cfg, params = checkpoint(family)
    case = dllm_rl.read(f"{family}/sft/case.json")
    told = case["cases"][index]
    golden = starting(
        dllm_rl.tensors(f"{family}/sft/goldens.safetensors"), told["prefix"]
    )
    attention = "causal" if told["method"] == "ar" else "full"
    batch, source, _ = rows(cfg, golden, told["start_pos"], case["pad_id"], attention)
    check_loss(
        params,
        cfg,
        batch.replace(weight_BU=mean(source, golden, per_token=True)),
        "nll",
        ObjectiveConfig(),
        told["grads"],
        told["loss"],
        starting(golden, "grad."),
        padding(cfg, case),
    )


@pytest.mark.parametrize(
    ("family", "index"),
    [
        (family, i)
        for family in FAMILIES
        for i, _ in enumerate(dllm_rl.read(f"{family}/rl/case.json")["loss_variants"])
    ],
)
def test_policy_losses_are_the_references(family, index):
    """Its surrogate is a mean over a row's tokens, its KL a sum."""
    cfg, params = checkpoint(family)
    case = dllm_rl.read(f"{family}/rl/case.json")
    told = case["loss_variants"][index]
    golden = dllm_rl.tensors(f"{family}/rl/goldens.safetensors")
    batch, source, left_n = rows(cfg, golden, case["start_pos"], case["pad_id"])
    column = source.pos_mBU + left_n[source.row_mBU] - cfg.shift
    held = source.row_mBU >= 0
    old = np.where(
        held, golden["old_logp"][source.row_mBU, np.where(held, column, 0)], 0
    )
    adv = np.where(held, golden["adv"][source.row_mBU], 0)
    batch = batch.replace(
        weight_BU=mean(source, golden, per_token=True),
        old_logp_BU=np.swapaxes(old, 0, 1),
        adv_BU=np.swapaxes(adv, 0, 1).astype(np.float32),
    )
    summed = mean(source, golden, per_token=False)[:, 0]
    settings = told["config"]

    def term(out, batch, cfg):
        pulled, sums = objectives.policy(out, batch, cfg_of(0.0))
        kl = batch.replace(weight_BU=summed, adv_BU=0 * batch.adv_BU)
        return pulled + objectives.policy(out, kl, cfg)[0], sums

    def cfg_of(beta):
        kind = "k3" if settings["use_kl_estimator_k3"] else "k1"
        return ObjectiveConfig(clip=settings["eps"], beta=beta, kl=kind)

    check_loss(
        params,
        cfg,
        batch,
        term,
        cfg_of(settings["beta"]),
        told["grads"],
        told["loss"],
        starting(golden, f"grad{index}."),
        padding(cfg, case),
    )
