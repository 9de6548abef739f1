"""MMaDA's answers about images through the sampler core, against a loop that defines them.

The loop is that of MMaDA's `mmu_generate`: blocks from left to right, each unmasked by
confidence, a share of it at every step; or, as dLLM-RL's rollouts have it, all that is surer
than a threshold, and where that is fewer, the share. Of the product's it takes logits alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from dllm_jax import config, data, pictures
from dllm_jax.models import hf, mask, transformer
from dllm_jax.models.vision import codes
from dllm_jax.sampling import denoise
from dllm_jax.sampling.config import SamplerConfig
from tests.models.vision import common, drawers
from tests.sampling.common import padded, row_keys

WIDTH, NEW, BLOCK, LARGE = 100, 8, 4, 10**9
RESERVED = len(drawers.SPECIAL)  # the id of the first reserved token
SAMPLER = SamplerConfig(
    block=BLOCK,
    max_new=NEW,
    max_prompt=WIDTH,
    strategy="static",
    target="confidence",
    cache="none",
)
CASES = {  # strategy, steps of a block, temperature
    "one a step": ("static", 4, 0.0),
    "two a step": ("static", 2, 0.0),
    "two a step, drawn": ("static", 2, 1.0),
    "three, then one, drawn at 0.7": ("static", 3, 0.7),
    "surer than a half": ("dynamic", 4, 0.0),
    "surer than a half, drawn": ("dynamic", 4, 1.0),
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Returns (ModelConfig, params, prompts): about two images, and about none."""
    folder = tmp_path_factory.mktemp("place")
    drawers.folder(folder / "model")
    cfg, params = hf.load(folder / "model")
    tok = data.tokenizer(str(folder / "model"))
    args = config.ModelArgs(path=str(folder / "model"))
    made = pictures.format_of(args, folder / "model", cfg, tok)
    codec = codes.Codec(made)
    reader, prompts = codes.Reader(lambda: codec), []
    for i, text in enumerate(("a?", "What is it?")):
        file = common.picture(folder / f"{i}.png", (9, 7 + i), seed=i)
        shown = reader.of_files([file.name], folder)
        said = [{"role": "user", "content": text}]
        prompts.append(list(data.render(tok, said, shown)))
        # <|mmu|> <|soi|> codes <|eoi|>, and behind them the chat.
        ids = codec.ids(np.asarray(Image.open(file)))
        layout = [RESERVED + 5, RESERVED, *ids, RESERVED + 1, *data.render(tok, said)]
        assert prompts[-1] == layout
        assert min(ids) >= drawers.LENGTH
    prompts.append(list(data.render(tok, [{"role": "user", "content": "No?"}])))
    return cfg, params, prompts


# ---- The definition ------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="cfg")
def all_logits(params, tokens_1T, count, *, cfg):
    """Returns f32 logits of one canvas; nobody sees what lies behind `count` positions."""
    pos_1T = jnp.arange(tokens_1T.shape[1])[None]
    seen = mask.full(pos_1T, count[None])
    x_1TD = transformer.embed(params, tokens_1T, cfg)
    x_1TD, *_ = transformer.trunk(params, x_1TD, pos_1T, seen, cfg)
    return (x_1TD @ params["head"].astype(jnp.float32))[0]


def log_softmax(z):
    """Returns the log-probs of logits."""
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def defined(params, model, prompt, key, strategy, steps, temperature, stop_ids):
    """Returns (ids, steps, log-probs, forwards) of an answer, up to its end."""
    first = len(prompt)
    ids = np.array([*prompt, *[model.mask_id] * NEW])
    step, logp, forwards = [0] * NEW, [0.0] * NEW, 0
    share, rest = divmod(BLOCK, steps)
    for at in range(0, NEW, BLOCK):
        quotas = [share + (t < rest) for t in range(steps)]
        while masked := [i for i in range(at, at + BLOCK) if not step[i]]:
            canvas = np.zeros((1, WIDTH + NEW), int)
            canvas[0, : len(ids)] = ids
            z = np.array(
                all_logits(params, canvas, np.int32(len(ids)), cfg=model), np.float64
            )[first + at : first + at + BLOCK]
            z[:, model.mask_id] = -LARGE  # no answer has it, as the reference's might
            of_model, of_draw = log_softmax(z), log_softmax(z / (temperature or 1))
            noise = jax.random.gumbel(jax.random.fold_in(key, forwards), z.shape)
            drawn = np.argmax(of_draw + (noise if temperature else 0), axis=-1)
            quota = quotas.pop(0) if quotas else 1
            best = sorted(masked, key=lambda i: -of_draw[i - at, drawn[i - at]])
            taken = set(best[:quota])
            if strategy == "dynamic":
                taken |= {
                    i for i in masked if np.exp(of_model[i - at, drawn[i - at]]) > 0.5
                }
            forwards += 1
            for i in taken:
                ids[first + i], step[i] = drawn[i - at], forwards
                logp[i] = of_model[i - at, drawn[i - at]]
            # An answer is over with a stop before which nothing is masked.
            known = next((i for i in range(NEW) if not step[i]), NEW)
            ends = [i + 1 for i in range(known) if ids[first + i] in stop_ids]
            if ends:
                count = ends[0]
                return ids[first:][:count], step[:count], logp[:count], forwards
    return ids[first:], step, logp, forwards


# ---- Tests ---------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("model", "cfg"))
def generate(params, *inputs, model, cfg):
    """Returns a Trace."""
    return denoise.generate(params, *inputs, model=model, cfg=cfg)


@pytest.mark.parametrize("name", CASES)
def test_answers_and_traces_are_those_of_the_loop(asked, name):
    model, params, prompts = asked
    strategy, steps, temperature = CASES[name]
    # Some of the answers end before their last block, some do not end.
    stop_ids = tuple(range(0, model.vocab, 9))
    cfg = dataclasses.replace(
        SAMPLER, strategy=strategy, steps_per_block=steps, threshold=0.5
    )
    cfg = dataclasses.replace(cfg, stop_ids=stop_ids)
    prompt_BT, len_B = padded(prompts, WIDTH, rows=4)
    heat_B, keys = (
        np.full(4, temperature, np.float32),
        row_keys(jax.random.key(5), np.arange(4)),
    )
    trace = jax.device_get(
        generate(
            params,
            prompt_BT,
            len_B,
            len_B + NEW * (len_B > 0),
            heat_B,
            keys,
            model=model,
            cfg=cfg,
        )
    )
    assert trace.len_B[:3].all()
    for row, prompt in enumerate(prompts):
        ids, steps_of, logp, forwards = defined(
            params, model, prompt, keys[row], strategy, steps, temperature, stop_ids
        )
        span = slice(len(prompt), len(prompt) + len(ids))
        assert trace.len_B[row] == len(ids)
        assert trace.tokens_BT[row, span].tolist() == list(ids)
        assert trace.step_BT[row, span].tolist() == list(steps_of)
        np.testing.assert_allclose(trace.logp_BT[row, span], logp, atol=1e-4)
        assert trace.forwards_B[row] == forwards
