"""How a run reads images and draws them, as its configuration says."""

import dataclasses
import functools

from dllm_jax import memory
from dllm_jax.models import repository
from dllm_jax.models.config import ModelConfig
from dllm_jax.models.vision import codes, prompts
from dllm_jax.sampling import answers, policy
from dllm_jax.sampling.config import SamplerConfig


def drawing(
    model: ModelConfig, sampler: SamplerConfig, made: codes.Format
) -> tuple[ModelConfig, SamplerConfig]:
    """Returns a model and a sampler whose answers are images of this format.

    An image is one block, of which a step unmasks a code at least. The empty caption is
    that of guidance. Raises ValueError for a model that cannot.
    """
    count, tokens = made.count, made.tokens
    sampler = dataclasses.replace(
        sampler,
        block=count,
        max_new=count,
        steps_per_block=min(sampler.steps_per_block, count),
        stop_ids=(),
        # Without guidance nobody reads it, and who sets it is warned.
        blank=tuple(tokens.drawing([])) if sampler.guidance else (),
        tail=(tokens.eoi,),
    )
    policy.choose(sampler, model.attention)
    return dataclasses.replace(model, block=count, drawn=tokens.drawn), sampler


def format_of(args, path, model: ModelConfig, tok) -> codes.Format:
    """Returns the format of a model's images; raises ValueError for one that has none.

    path: the model's folder; tok: its tokenizer, or None.
    """
    if not model.codebook:
        raise ValueError(
            f"sampler.answers='image': {str(path)!r} draws no images, as its config.json has "
            "no codebook_size"
        )
    if tok is None:
        raise ValueError(
            f"{str(path)!r} has no tokenizer, whose length tells images' ids"
        )
    return codes.format_of(
        path, tok, model.vocab, model.codebook, vq=args.vq, size=args.image_size
    )


def reader(args, sampler: SamplerConfig, model: ModelConfig, tok, learns=False):
    """Returns what makes prompts of records with images, or of captions; None for others.

    args: config.ModelArgs; model: what the checkpoint becomes; tok: its tokenizer, or None.
    learns: captions come with the image that is to be drawn. See
    models.vision.prompts.Reader. Raises ValueError for a tokenizer of images, and for what it
    is to do, beside a model without codes.
    """
    for name in () if model.codebook else ("vq", "image_size", "image_fit"):
        if (value := getattr(args, name)) != getattr(type(args), name):
            raise ValueError(
                f"model.{name}={value!r}: {args.path!r} has no codes of images, as its "
                "config.json has no codebook_size"
            )
    if model.soft:
        return prompts.Reader(model, keep_newline=args.keep_newline)
    if not model.codebook:
        return None
    made = functools.partial(format_of, args, repository.find(args.path), model, tok)

    def codec():  # for who asks for an image, and nobody else
        return codes.Codec(made(), args.image_fit)

    if sampler.answers == "text":
        return codes.Reader(codec)
    return codes.Captions(codec if learns else None, made().tokens)


def decoder(cfg, model: ModelConfig, tok):
    """Returns what makes of a Trace its answers as graders take them: pictures, or texts.

    cfg, model, tok: of `config.completed`.
    """
    if cfg.sampler.answers != "image":
        return functools.partial(answers.decode, tok=tok)
    made = format_of(cfg.model, repository.find(cfg.model.path), model, tok)
    return codes.Codec(made, cfg.model.image_fit).drawn


def claim(cfg, model: ModelConfig, tok, grader, beside: int) -> memory.Claim:
    """Returns what a run's graders take of a device, and what makes pictures for them.

    cfg, model, tok: see `decoder`; beside: bytes of a device that others have. A tokenizer
    of images stays there.
    """
    claims = [functools.partial(grader.claim, slots=cfg.sampler.slots)]
    if cfg.sampler.answers == "image":
        made = format_of(cfg.model, repository.find(cfg.model.path), model, tok)
        claims.append(lambda _: made.claim(draws=True))
    return memory.claimed(claims, beside)
