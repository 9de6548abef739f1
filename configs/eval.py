"""Evaluation: accuracy, pass@k and tokens per forward of a checkpoint.

    python -m dllm_jax.eval --config=configs/eval.py
    python -m dllm_jax.eval --config=configs/eval.py:trado-4b --config.model.path=DIR \\
        --config.data.heldout=MATH500.json

Presets: arithmetic (default), smollm2, sdar-1.7b, sdar-4b, sdar-8b, trado-4b, trado-8b,
dream-7b, diffucoder-7b, llada-8b, llada-1.5-8b, mmada-8b: three answers to each problem, at
the temperature, and by the sampler, with which dLLM-RL evaluates. An answer that was cut at
its limit is graded as any other.

TraDo-8B-Thinking has no preset: dLLM-RL's prompt opens a think tag in the answer's turn,
which only a checkpoint's chat template can do. With such a template, it is trado-8b with

    --config.model.path=Gen-Verse/TraDo-8B-Thinking --config.eval.answers=1 \\
        --config.sampler.max_new=30000 --config.batch.tokens=32768

Result to expect. arithmetic, in half a minute on a CPU: accuracy (pass@1) 0.621, pass@2
0.793, pass@3 0.875, 2.28 tokens per forward (256 problems, three answers to each; twelve to
each say 0.605). The other presets are unrun.
"""

from configs import tracerl
from dllm_jax import config

PRESETS = tracerl.PRESETS


def get_config(preset: str = "arithmetic"):
    """Returns the configuration of a preset."""
    c = config.preset(PRESETS, preset)
    c.eval.update(problems=0, answers=3)
    c.rl.truncated = "graded"
    if c.sampler.cache == "prefix":  # full attention
        c.sampler.update(max_new=1024, horizon=128)
        dream = {"top_k": 40, "top_p": 0.95}
        c.sampler.update(dream if c.sampler.top_k else {"strategy": "dynamic"})
    c.run.folder = c.run.folder.replace("tracerl", "eval")
    return c
