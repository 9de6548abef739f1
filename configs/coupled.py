"""Coupled RL: a random mask and its complement (DiffuCoder, arXiv 2506.20639).

    python -m dllm_jax.train --config=configs/coupled.py

trains the bundled arithmetic model on a CPU in a few minutes. Every token of an answer is
supervised once in each pair, with about half of the others shown. The clipped policy loss
and everything else are TraceRL's, without a value model.

Presets: arithmetic (default), full, sudoku, sums, countdown, process, code, pictures, codes, scenes, questions, smollm2, sdar-1.7b,
sdar-4b, sdar-8b, trado-4b, trado-8b, dream-7b, diffucoder-7b, llada-8b, llada-1.5-8b, mmada-8b, llada-v-8b,
mmada-8b-images; see configs/tracerl.py.

Result to expect. arithmetic, in the comparison of docs/methods.md (30 steps of 16 problems x
8 answers; here it is 60 of 32 x 8): accuracy from 0.605 to 0.803 ± 0.017, 2.80 tokens per
forward; three seeds. The other presets, and this one at its own length, are unrun.
"""

from configs import tracerl
from dllm_jax import config

PRESETS = tracerl.PRESETS


def get_config(preset: str = "arithmetic"):
    """Returns the configuration of a preset."""
    c = config.preset(PRESETS, preset)
    c.noise.update(kind="complement", shrink=1)
    if c.noise.rate == "scope":  # full attention: dLLM-RL's 35 pairs of an answer
        c.noise.draws = tracerl.DRAWS.get(preset, 2 * tracerl.MANY) // 2
    c.rl.value = "none"
    c.run.folder = c.run.folder.replace("tracerl", "coupled")
    return c
