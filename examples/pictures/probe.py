"""Asks how much of colour and shape the codes of pictures tell, without a language model.

    .venv/bin/python -m examples.pictures.codes
    .venv/bin/python -m examples.pictures.probe

Two classifiers learn from the codes of four fifths of the pictures that told.jsonl describes,
and are right about so many of the others: one that is linear in how often each code occurs,
and two convolutions over the bits of the grid of codes, with the maximum over places. A
language model that reads its codes can be right as often.

Letters: k classes, r bits of a code.
"""

import argparse
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.pictures import codes, make, tokenizer

WIDTHS = (32, 64)  # channels of the convolutions
BATCH = 256


def counted(params, codes_BN):
    """Returns scores [B, k] that are linear in how often each code occurs."""
    return params["each"][codes_BN].sum(axis=1) + params["bias"]


def convolved(params, codes_BN):
    """Returns scores [B, k] of what two convolutions find somewhere in the picture."""
    side = int(codes_BN.shape[1] ** 0.5)
    places_BNr = jnp.arange(tokenizer.BITS)[None, None]
    bits_BNr = (codes_BN[..., None] >> places_BNr) & 1
    x_Bhwr = (2.0 * bits_BNr - 1).reshape(-1, side, side, tokenizer.BITS)
    for name in ("first", "second"):
        x_Bhwr = jax.lax.conv_general_dilated(
            x_Bhwr,
            params[name],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x_Bhwr = jax.nn.relu(x_Bhwr)
    return x_Bhwr.max(axis=(1, 2)) @ params["each"] + params["bias"]


def weights(classes: int, rng: np.random.Generator) -> dict:
    """Returns the parameters to begin with, by classifier."""
    ins = (tokenizer.BITS, *WIDTHS)
    first, second = (
        rng.normal(0, (9 * a) ** -0.5, (3, 3, a, b)).astype(np.float32)
        for a, b in zip(ins, WIDTHS, strict=False)
    )
    end = rng.normal(0, WIDTHS[1] ** -0.5, (WIDTHS[1], classes)).astype(np.float32)
    none = np.zeros((1, classes), np.float32)
    each = np.zeros((2**tokenizer.BITS, classes), np.float32)
    return {
        counted: {"each": each, "bias": none},
        convolved: {"first": first, "second": second, "each": end, "bias": none},
    }


def fitted(score, params: dict, codes_nN, class_n, steps: int, rng) -> dict:
    """Returns the parameters after so many steps of AdamW."""
    adam = optax.adamw(optax.cosine_decay_schedule(5e-3, steps), weight_decay=1e-3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, codes_BN, class_B):
        def loss(params):
            scores_Bk = score(params, codes_BN)
            return optax.softmax_cross_entropy_with_integer_labels(
                scores_Bk, class_B
            ).mean()

        changes, state = adam.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, changes), state

    params = jax.tree.map(jnp.asarray, params)
    state = adam.init(params)
    for _ in range(steps):
        some = rng.choice(len(codes_nN), min(BATCH, len(codes_nN)), replace=False)
        params, state = update(params, state, codes_nN[some], class_n[some])
    return params


def described(out: pathlib.Path) -> tuple[np.ndarray, list[list[str]]]:
    """Returns the codes [n, N] of each picture, as it is or mirrored, and what is there."""
    first, found = len(codes.text_tokenizer()), {}
    told, read = (codes.records(out / x) for x in ("told.jsonl", "codes/train.jsonl"))
    for row, ids in zip(told, read, strict=True):
        found[row["image"]] = ids["image_token_ids"], row["response"].split()[:2]
    return np.array([x[0] for x in found.values()]) - first, [
        x[1] for x in found.values()
    ]


def main():
    """Reads the command line, and says how often each classifier is right."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", default="runs/pictures", help="folder that codes.py wrote")
    p.add_argument("--steps", type=int, default=300, help="of each classifier")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    if args.steps < 1:
        p.error("--steps must be positive")
    rng = np.random.default_rng(args.seed)
    codes_nN, said = described(pathlib.Path(args.out))
    order = rng.permutation(len(codes_nN))
    learned, asked = np.split(order, [len(order) * 4 // 5])
    for part, names in enumerate((make.COLORS, make.SHAPES)):
        class_n = np.array([names.index(words[part]) for words in said])
        for score, params in weights(len(names), rng).items():
            params = fitted(
                score, params, codes_nN[learned], class_n[learned], args.steps, rng
            )
            right = score(params, codes_nN[asked]).argmax(axis=1) == class_n[asked]
            print(
                f"{('colour', 'shape')[part]}, {score.__name__}: right about "
                f"{float(right.mean()):.1%} of {len(asked)} pictures",
                flush=True,
            )


if __name__ == "__main__":
    main()
