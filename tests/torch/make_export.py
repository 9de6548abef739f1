"""The JAX half of the cross-check: imports FOLDER/origin, changes it, exports it.

    python tests/torch/make_export.py FOLDER

Writes FOLDER/export, FOLDER/adapters and FOLDER/ours.npz: `ids`, and our logits `before` and
`after` the change, and `adapted` ones; and how far a gradient in bfloat16 is `off`.
"""

import dataclasses
import functools
import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.models import hf, lora, mask, peft, transformer
from dllm_jax.models.config import Lora


def main(folder: pathlib.Path) -> None:
    """Runs the JAX half in a folder that holds `origin`."""
    jax.config.update("jax_default_matmul_precision", "highest")
    cfg, params = hf.load(folder / "origin")
    assert cfg.block == cfg.shift == 1
    rng = np.random.default_rng(0)
    ids = rng.integers(0, cfg.vocab - 1, (2, 17)).astype(np.int32)
    pos = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)

    def hidden(params, cfg):
        x = transformer.embed(params, ids, cfg)
        length = jnp.full(len(ids), ids.shape[1])
        seen = mask.clean(cfg.attention, pos, length, cfg.block)
        return transformer.trunk(params, x, pos, seen, cfg)[0]

    @jax.jit
    def logits(params):
        return transformer.logits(params, hidden(params, cfg), cfg)

    @functools.partial(jax.jit, static_argnames="dtype")
    @jax.grad
    def gradient(params, dtype):
        low = dataclasses.replace(cfg, dtype=dtype)
        params = transformer.rounded(params, low)
        x = hidden(params, low)[:, :-1]
        logp, _ = transformer.token_logprob(params, x, ids[:, 1:], low)
        return jnp.mean(jnp.array([[1.0], [-1.0]]) * logp)  # of advantages

    trained = jax.tree.map(
        lambda x: x + 0.1 * rng.normal(size=x.shape).astype(x.dtype), params
    )
    hf.save(folder / "export", cfg, trained, like=folder / "origin")
    # Of dense layers beside experts PEFT adds no adapters (peft.FUSED).
    targets = ("wq", "wk", "wv", "wo") if cfg.sizes["Y"] else ()
    low = dataclasses.replace(cfg, lora=Lora(3, 6.0, targets))
    pairs = transformer.init(jax.random.key(0), low)
    pairs = jax.tree.map(
        lambda x: x + 0.3 * rng.normal(size=x.shape).astype("f4"), pairs
    )
    peft.save(folder / "adapters", low, pairs, str(folder / "origin"))
    adapted = lora.join(params, pairs, low.lora)
    out = {"before": logits(params), "after": logits(trained)}
    out["adapted"] = logits(adapted)
    exact, low = (
        jnp.concatenate([x.ravel() for x in jax.tree.leaves(gradient(params, dtype))])
        for dtype in ("float32", "bfloat16")
    )
    out["off"] = jnp.linalg.norm(low - exact) / jnp.linalg.norm(exact)
    np.savez(folder / "ours.npz", ids=ids, mask_id=cfg.mask_id, **out)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
