"""Text-to-image through the sampler core, against a loop in Python that defines it.

The loop is that of MaskGIT as Show-o and MMaDA have it: everything is drawn at every step,
what is least sure is masked again, and what was kept before never changes.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax.models import hf, mask, transformer
from dllm_jax.models.mask import FAR
from dllm_jax.sampling import answers, denoise, policy, schedules
from dllm_jax.sampling.config import SamplerConfig
from tests.goldens import reader
from tests.sampling.common import CODES as N
from tests.sampling.common import DRAWING as CFG
from tests.sampling.common import DRAWN, ONE, padded, row_keys
from tests.sampling.common import DRAWN_WIDTH as WIDTH

FIRST, END = 40, 57  # the ids that codes may have
TAIL, PROMPTS = list(CFG.tail), DRAWN[:3]
CASES = {
    "guided": {},
    "unguided": {"guidance": 0.0},
    "linear, without noise": {"unmasking": "linear", "rank_temperature": 0.0},
    "squares, drawn at 0.7": {"unmasking": "pow2"},
    "sigmoid, two steps": {"unmasking": "sigmoid", "steps_per_block": 2},
    "beside a blank prompt longer than two": {"blank": (7, 3, 8, 9, 2, 6)},
}


@pytest.fixture(scope="module")
def model(tiny):
    """Returns the tiny model with full attention, of which only images may be drawn."""
    cfg, params = tiny
    return dataclasses.replace(cfg, attention="full", drawn=(FIRST, END)), params


# ---- The definition ------------------------------------------------------------------

SHARES = {
    "cosine": lambda t: math.cos(math.pi * t / 2),
    "linear": lambda t: 1 - t,
    "pow2": lambda t: 1 - t**2,
    "sigmoid": lambda t: (
        (1 / (1 + math.exp(-3)) - 1 / (1 + math.exp(-(6 * t - 3))))
        / (1 / (1 + math.exp(-3)) - 1 / (1 + math.exp(3)))
    ),
}


@functools.partial(jax.jit, static_argnames="cfg")
def all_logits(params, tokens_BT, pads_B, *, cfg):
    """Returns f32 logits of the whole vocabulary; nobody sees the pads on the left."""
    pos_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    seen = mask.full(pos_BT, jnp.full(len(tokens_BT), tokens_BT.shape[1]))
    seen = seen.replace(q_begin_BT=jnp.broadcast_to(pads_B[:, None], tokens_BT.shape))
    x_BTD = transformer.embed(params, tokens_BT, cfg)
    x_BTD, *_ = transformer.trunk(params, x_BTD, pos_BT, seen, cfg)
    return x_BTD @ params["head"].astype(jnp.float32)


def log_softmax(z):
    """Returns the log-probs of logits."""
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def defined(params, model, prompt, key, cfg: SamplerConfig, draw_temperature: float):
    """Returns (ids, steps, log-probs) of the N codes of one image."""

    def canvas(text, codes):
        pads = [0] * (WIDTH - len(text))
        return [*pads, *text, *codes, *TAIL]

    codes, steps, logp = [model.mask_id] * N, [0] * N, [0.0] * N
    known, temperature = [False] * N, cfg.rank_temperature
    for k in range(cfg.steps_per_block):
        rows = [canvas(prompt, codes), canvas(cfg.blank, codes)]
        pads = np.array([WIDTH - len(prompt), WIDTH - len(cfg.blank)])
        z = np.asarray(all_logits(params, np.array(rows), pads, cfg=model), np.float64)
        z = z[:, WIDTH : WIDTH + N, FIRST:END]
        z = (1 + cfg.guidance) * z[0] - cfg.guidance * z[1]
        model_logp = log_softmax(z)
        of_step = jax.random.fold_in(key, k)
        noise = jax.random.gumbel(of_step, (N, END - FIRST))
        drawn_logp = log_softmax(z / draw_temperature)
        drawn = np.argmax(drawn_logp + noise, axis=-1)
        rank_noise = jax.random.gumbel(jax.random.fold_in(of_step, 2**30 + 1), (N,))
        ratio = (k + 1) / cfg.steps_per_block
        unknown = N - sum(known)
        again = math.floor(N * SHARES[cfg.unmasking](ratio))
        again = max(1, min(unknown - 1, again)) if ratio < 1 else 0
        temperature *= 1 - ratio
        sure = [
            math.inf
            if known[i]
            else drawn_logp[i, drawn[i]] + temperature * rank_noise[i]
            for i in range(N)
        ]
        masked = set(sorted(range(N), key=lambda i: sure[i])[:again])
        for i in range(N):
            if not known[i] and i not in masked:
                codes[i], steps[i] = FIRST + int(drawn[i]), k + 1
                logp[i], known[i] = model_logp[i, drawn[i]], True
    return codes, steps, logp


# ---- Tests ---------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("model", "cfg"))
def generate(params, *inputs, model, cfg):
    """Returns a Trace."""
    return denoise.generate(params, *inputs, model=model, cfg=cfg)


def sampled(params, model, cfg, temperature: float, key):
    """Returns the host Trace of PROMPTS, behind which there is a filler."""
    prompt_BT, len_B = padded(PROMPTS, WIDTH, rows=4)
    heat_B = np.full(4, temperature, np.float32)
    keys = row_keys(key, np.arange(4))
    out = generate(
        params, prompt_BT, len_B, len_B + N, heat_B, keys, model=model, cfg=cfg
    )
    return jax.device_get(out), keys


@pytest.mark.parametrize("name", CASES)
def test_images_and_traces_are_those_of_the_loop(model, name):
    cfg, params = model
    change = CASES[name]
    sampler = (
        dataclasses.replace(CFG, **change, rank_cooling=True)
        if (change.get("rank_temperature") != 0)
        else dataclasses.replace(CFG, **change, rank_cooling=False)
    )
    heat = 0.7 if "0.7" in name else 1.0
    trace, keys = sampled(params, cfg, sampler, heat, jax.random.key(5))
    for row, prompt in enumerate(PROMPTS):
        codes, steps, logp = defined(params, cfg, prompt, keys[row], sampler, heat)
        span = slice(len(prompt), len(prompt) + N)
        assert trace.tokens_BT[row, span].tolist() == codes
        assert trace.step_BT[row, span].tolist() == steps
        np.testing.assert_allclose(trace.logp_BT[row, span], logp, atol=1e-4)
        assert trace.tokens_BT[row, span.stop] == TAIL[0]
        assert (trace.step_BT[row, span.stop + 1 :] == FAR).all()
        assert max(steps) == sampler.steps_per_block == trace.forwards_B[row]
    assert trace.len_B.tolist() == [N, N, N, 0]
    assert not trace.bad_B.any()


@pytest.mark.parametrize(
    "changes, words",
    [({"blank": (7,) * 9}, "blank has 9 tokens, .*max_prompt=8")]
    + [({"blank": (7, 67)}, r"blank=\(7, 67\): ids are 0..66")]
    + [({"tail": (67,)}, r"tail=\(67,\): ids are 0..66")],
)
def test_a_blank_prompt_or_a_tail_that_no_canvas_holds_is_refused(
    model, changes, words
):
    with pytest.raises(ValueError, match="sampler." + words):
        answers.answerer(
            model=model[0], cfg=dataclasses.replace(CFG, **changes), mesh=ONE()
        )


def test_guidance_changes_what_is_drawn(model):
    cfg, params = model
    traces = [
        sampled(
            params, cfg, dataclasses.replace(CFG, guidance=g), 1.0, jax.random.key(5)
        )
        for g in (0.0, 1.5)
    ]
    assert (traces[0][0].tokens_BT[:3] != traces[1][0].tokens_BT[:3]).any()


def test_the_fused_head_and_the_filtered_one_draw_the_same(model):
    cfg, params = model
    outs = [
        sampled(params, cfg, dataclasses.replace(CFG, top_k=k), 1.0, jax.random.key(5))[
            0
        ]
        for k in (0, END - FIRST)
    ]
    np.testing.assert_array_equal(outs[0].tokens_BT, outs[1].tokens_BT)
    np.testing.assert_array_equal(outs[0].step_BT, outs[1].step_BT)
    np.testing.assert_allclose(outs[0].logp_BT, outs[1].logp_BT, atol=1e-4)


@functools.cache
def golden():
    """Returns (ModelConfig, params) of the original's checkpoint."""
    cfg, params = hf.load(reader.checkpoint("mmada"))
    return dataclasses.replace(cfg, dtype="float32"), params


@pytest.mark.parametrize(
    "case",
    [c for c in reader.read("mmada/sample.json")["cases"] if "image_codes" in c],
    ids=lambda case: case["name"],
)
def test_images_are_the_originals(case):
    cfg, params = golden()
    args, columns = case["args"], case["args"]["resolution"] + 1
    count, first = args["num_vq_tokens"], args["text_vocab"]

    def seen(ids):  # its prompts are padded on the left
        return [t for t, on in zip(ids[:columns], case["attention_mask"]) if on]

    prompt = seen(case["input_ids"])
    sampler = dataclasses.replace(
        CFG,
        block=count,
        max_new=count,
        max_prompt=columns,
        steps_per_block=args["timesteps"],
        rank_temperature=0.0,
        rank_cooling=False,
        guidance=float(args["guidance_scale"]),
        blank=tuple(seen(case["uncond_input_ids"])),
        tail=tuple(case["input_ids"][columns + count :]),
    )
    drawn = (first, first + args["codebook_size"])
    cfg = dataclasses.replace(cfg, drawn=drawn, mask_id=args["mask_token_id"])
    prompt_BT, len_B = padded([prompt], columns)
    keys = row_keys(jax.random.key(0), np.arange(1))
    trace = generate(
        params,
        prompt_BT,
        len_B,
        len_B + count,
        np.zeros(1),
        keys,
        model=cfg,
        cfg=sampler,
    )
    image = trace.tokens_BT[0, len(prompt) : len(prompt) + count] - first
    assert image.tolist() == case["image_codes"]


@pytest.mark.parametrize("name", ["even", *schedules.MASKED, "pow2", "pow0.5"])
def test_every_schedule_unmasks_something_at_every_step(name):
    for block in (1, 2, 7, 16, 100):
        for steps in range(1, block + 1):
            counts = schedules.counts(name, block, steps)
            assert sum(counts) == block
            assert len(counts) == steps
            # Nothing is left to the last steps where a single position was before.
            busy = steps - counts.count(0)
            assert min(counts[:busy]) >= 1
            assert busy == steps or name not in ("even", "cosine")


def test_counts_by_hand():
    # floor(16 cos(pi t / 2)) stay masked: 15, 13, 11, 7 (cos(pi / 3) is below 1/2 in f32), 4
    assert schedules.counts("cosine", 16, 6) == (1, 2, 2, 4, 3, 4)
    assert schedules.counts("linear", 8, 4) == (2, 2, 2, 2)
    assert schedules.counts("pow2", 8, 4) == (1, 1, 3, 3)  # 7.5, 6, 3.5 stay
    assert schedules.counts("even", 10, 4) == (3, 3, 2, 2)
    assert schedules.cooled(2.0, 4) == pytest.approx((1.5, 0.75, 0.1875, 0.0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"unmasking": "cosin"}, "unmasking='cosin': choose from even, cosine, linear"),
        ({"unmasking": "pow0"}, "unmasking='pow0'"),
        ({"guidance": -0.5}, "guidance=-0.5: must be >= 0"),
        ({"guidance": math.inf}, "guidance=inf"),
        ({"blank": ()}, "sampler.blank"),
        ({"rank_temperature": 0.0}, "sampler.rank_cooling=True"),
        ({"strategy": "dynamic"}, "log_confidence"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, words):
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        dataclasses.replace(CFG, **change)
    assert words in str(error.value)


@pytest.mark.parametrize("change", [{}, {"guidance": 0.0}, {"tail": ()}])
def test_other_attention_and_caches_are_refused(change):
    cfg = dataclasses.replace(CFG, **change)
    assert policy.choose(cfg, "full").canvas == "step"
    with pytest.raises(ValueError, match="whole canvases are run"):
        policy.choose(dataclasses.replace(cfg, cache="dual"), "full")
    with pytest.raises(ValueError, match="whole canvases are run"):
        policy.choose(dataclasses.replace(cfg, cache="auto"), "block")
