"""RL on random masks: what TraceRL is compared with (arXiv 2509.06949, section 5).

    python -m dllm_jax.train --config=configs/random_masking.py

trains the bundled arithmetic model on a CPU in a few minutes. An answer's log-probs are
those of its masked tokens, one draw after the other. The clipped policy loss and
everything else are TraceRL's, without a value model.

Presets: arithmetic (default), full, sudoku, sums, countdown, process, code, pictures, codes, scenes, questions, smollm2, sdar-1.7b,
sdar-4b, sdar-8b, trado-4b, trado-8b, dream-7b, diffucoder-7b, llada-8b, llada-1.5-8b, mmada-8b, llada-v-8b,
mmada-8b-images; see configs/tracerl.py.

Result to expect. arithmetic, in the comparison of docs/methods.md (30 steps of 16 problems x
8 answers; here it is 60 of 32 x 8): accuracy from 0.605 to 0.782 ± 0.018, 2.77 tokens per
forward; three seeds. The other presets, and this one at its own length, are unrun.
"""

from configs import tracerl
from dllm_jax import config

PRESETS = tracerl.PRESETS


def get_config(preset: str = "arithmetic"):
    """Returns the configuration of a preset."""
    c = config.preset(PRESETS, preset)
    c.noise.update(kind="bernoulli", shrink=1)
    if c.noise.rate == "scope":  # full attention: dLLM-RL's 35 draws of an answer
        c.noise.draws = tracerl.DRAWS.get(preset, tracerl.MANY)
    c.rl.value = "none"
    c.run.folder = c.run.folder.replace("tracerl", "random_masking")
    return c
