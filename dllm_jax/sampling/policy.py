"""Cache policies: what a step re-runs, and whose keys it remembers.

    policy   whole canvas is re-run   a step re-runs    keys that it finds in the cache
    none     at every step            the canvas        none
    block    once, at prefill         the block         of the blocks before: exact
    prefix   when a block begins      block + horizon   of what lies before the block
    dual     when a block begins      the block         of all the rest of the canvas

`block` serves families with block or causal attention, `prefix` and `dual` those with
full attention: there every key depends on the whole canvas, so what is cached is stale
until the next block begins. `none` is exact for all. With a shift, what answers for a
block's first position lies before the window of `prefix` and `dual`: that one is
unmasked when the block begins, whatever the strategy says (as in dLLM-RL).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class CachePolicy:
    """A row of POLICIES: facts for the sampler core; nobody asks for its name."""

    canvas: str  # when the whole of it is run: "step", "block" or "prefill"
    serves: tuple[str, ...]  # values of ModelConfig.attention
    ahead: bool = False  # a step re-runs `horizon` positions after its block, too
    suffix: bool = False  # keys after the block are remembered, too

    @property
    def cached(self) -> bool:
        """Whether keys are remembered at all."""
        return self.canvas != "step"

    @property
    def final(self) -> bool:
        """Whether a key that is kept stays right: then rows may share pages of them."""
        return self.canvas == "prefill"

    @property
    def stale(self) -> bool:
        """Whether keys are remembered that are not those of the canvas as it is now."""
        return self.canvas == "block"


# `sampler.cache` names a row. `canvas` picks what a step looks at (denoise.LOOKS), so
# that a row of other facts needs no code, and a canvas of another kind needs a function
# there; the engine asks for the facts (forwards.py, canvases.py). Whatever a policy remembers, a row's first step looks at its whole canvas, and
# with a model of one layer, whose keys depend on no other token, its answers are those
# of `none`.
POLICIES = {
    "none": CachePolicy("step", ("full", "block", "causal")),
    "block": CachePolicy("prefill", ("block", "causal")),
    "prefix": CachePolicy("block", ("full",), ahead=True),
    "dual": CachePolicy("block", ("full",), suffix=True),
}


def first_block(prompt_len, attention: str, Q: int):
    """Returns the position at which the first block of a prompt's answer begins.

    Blocks of full attention are counted from the answer's start: its keys are never
    shared, so there is no grid to keep to.
    """
    return prompt_len if attention == "full" else prompt_len // Q * Q


def name_of(cfg, attention: str) -> str:
    """Returns the row of POLICIES that `cfg.cache` names, fitting or not.

    "auto" is the exact one of the family. attention: ModelConfig.attention.
    """
    if cfg.cache == "auto":
        return "none" if attention == "full" else "block"
    return cfg.cache


def choose(cfg, attention: str) -> CachePolicy:
    """Returns the policy that `name_of` names.

    attention: ModelConfig.attention. Raises ValueError for a policy, or a block, that
    does not serve the family.
    """
    if attention == "causal" and cfg.block > 1:
        raise ValueError(
            f"sampler.block={cfg.block}: a model with causal attention answers token "
            "by token; set sampler.block=1 and sampler.steps_per_block=1"
        )
    name = name_of(cfg, attention)
    policy = POLICIES[name]
    beyond = {"guidance": cfg.guidance, "tail": cfg.tail}
    for key, value in beyond.items():
        if value and (attention != "full" or policy.cached):
            raise ValueError(
                f"sampler.{key}={value}: only where whole canvases are run, with full "
                f"attention and sampler.cache='none'; this is {attention}, {name!r}"
            )
    if attention not in policy.serves:
        fitting = [key for key, row in POLICIES.items() if attention in row.serves]
        raise ValueError(
            f"sampler.cache={name!r} does not serve a model with {attention} "
            f"attention; choose from auto (the exact one), {', '.join(fitting)}"
        )
    return policy
