"""Four steps of TraceRL on the bundled model: does everything hold together?

    python -m dllm_jax.train --config=configs/smoke.py

Result to expect: four steps in about a minute on two CPU cores, most of it compilation, with
a logprob_gap_max below 1e-4. Accuracies of 16 problems say nothing.
"""

from dllm_jax import config


def get_config():
    """Returns the configuration."""
    c = config.default()
    c.model.path = "examples/arithmetic/model"
    c.model.dtype = "float32"
    c.data.train = "examples/arithmetic/train.jsonl"
    c.data.heldout = "examples/arithmetic/heldout.jsonl"
    # A small prefill: fewer programs to compile.
    c.sampler.update(max_prompt=16, max_new=32, rows=16, prefill=4)
    c.batch.update(rows=8, tokens=128)
    c.rl.update(
        steps=4,
        prompts=4,
        group=4,
        updates=2,
        min_solved=0.0,
        max_solved=1.0,
    )
    c.policy_optim.lr = 1e-4
    c.value_optim.lr = 1e-4
    c.eval.update(every=2, problems=16)
    c.run.folder = "runs/smoke"
    return c
