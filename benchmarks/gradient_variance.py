"""What a critic does to the policy's gradient: its variance, and how much signal is left.

    python -m benchmarks.gradient_variance [--model=DIR] [--minibatches=40] [--seed=0]

Explained variance says how well a critic predicts returns; whether that helps is another
question, which the gradient alone answers. One policy, which stays as it is (a folder; the
bundled arithmetic model), answers the problems of configs/tracerl.py, minibatch after
minibatch. Of the same answers it takes the gradient without a critic and with the trace's
(rl.value="trace", which learns from the minibatches before), for several lambdas.

    variance   trace of the gradient's covariance over minibatches, by that without a critic
    signal     |E g|^2, unbiased (products of different minibatches), likewise
    answers    how many it takes until |E g|^2 is as large as the variance of their mean

The intervals are of 95 %, by a jackknife over minibatches. They are all of one policy, and
of the gradient before AdamW.

Letters: i minibatches, s their gradients' products with each other.
"""

import argparse
import dataclasses
import functools
import pathlib

import jax
import numpy as np

from benchmarks import report
from configs import tracerl
from dllm_jax import begin, command_line, config, metrics, sharding
from dllm_jax.rl import (
    batches,
    learner,
    networks,
    noise,
    rewards,
    ridge,
    sources,
)
from dllm_jax.sampling import placement

WARM = 12  # minibatches from which the critic only learns
LAMBDAS = (1.0, 0.95, 0.9, 0.5, 0.0)
LEAST = 3  # minibatches of a variance, of which each is once left out


def settled(path: str, seed: int) -> tuple[config.Config, tuple]:
    """Returns (a complete configuration, its model and tokenizer) of one small minibatch."""
    tree = tracerl.get_config()
    tree.seed, tree.data.heldout, tree.mesh.fsdp = seed, "", 1
    if path:
        tree.model.path = path
    tree.rl.update(prompts=8, group=8, updates=1, value="none", trusted_gap=1e-3)
    tree.sampler.rows = 64
    cfg, model, tok = config.completed(config.freeze(tree))
    return config.chosen(cfg, model)[0], (model, tok)


class Policy:
    """A policy that stays, its answers, and its gradients of them."""

    def __init__(self, path: str, seed: int):
        cfg, (self.model, tok) = settled(path, seed)
        self.mesh = sharding.make_mesh(fsdp=1, devices=jax.devices()[:1])
        jax.set_mesh(self.mesh)
        self.settings = begin.settings_of(cfg, self.model, 1)
        tools = sources.Tools(
            mesh=self.mesh,
            tok=tok,
            grader=rewards.grader(cfg.rl.reward, cfg.reward),
            truncated_wrong=cfg.rl.truncated_wrong,
            timer=metrics.Timer(),
            stop=lambda: False,
            say=lambda text: None,
            folder=pathlib.Path(),
            samples=0,
        )
        self.source = sources.RL(self.settings, tools)
        place = placement.place(
            model=self.model,
            cfg=cfg.sampler,
            mesh=self.mesh,
            rollout="replicated",
            beside=0,
            limit=None,
        )
        tools.answerer = place.answerer
        plans = self.source.plans(self.settings)
        shapes = {
            name: networks.abstract(self.model, plans[name], self.mesh)
            for name in plans
        }
        places = jax.tree.map(lambda x: x.sharding, shapes)
        key = jax.random.key(seed)
        states = networks.initial(
            cfg.model.path, self.model, plans, places, self.mesh, None, key
        )
        self.weights = networks.Weights(states, None, None, self.model, place.weights)
        self.score = jax.jit(
            functools.partial(learner.score, model=self.model, plans=plans)
        )
        self.gradients = jax.jit(
            functools.partial(
                learner.gradients,
                model=self.model,
                plan=plans["policy"],
                cfg=self.settings.objective,
            )
        )

    def answers(self, number: int):
        """Returns the graded Rollouts of a minibatch."""
        taken = number * self.settings.rl.prompts
        return self.source.asked(number + 1, taken, self.weights)[1]

    def batch(self, number: int, rollouts, value: str, lam: float, critic):
        """Returns (metrics, the batch) of a minibatch, or (.., None): nothing to learn."""
        rl = dataclasses.replace(self.settings.rl, value=value, lam=lam)
        told, made, _ = batches.of_rollouts(
            rollouts,
            np.random.default_rng([self.settings.seed, number]),
            rl=rl,
            objective=self.settings.objective,
            noised=noise.noised(
                rollouts.trace,
                self.settings.noise,
                self.settings.layout,
                np.random.default_rng(0),
            ),
            as_sampled=True,
            params=self.weights.scoring(),
            pack=self.source.pack,
            score=self.score,
            mesh=self.mesh,
            critic=critic,
        )
        return told, made[0] if made else None

    def gradient(self, batch) -> np.ndarray:
        """Returns the gradient of one batch as a vector, f32."""
        params = self.weights.states["policy"].params
        grads, _ = self.gradients(params, batch, None)
        return np.concatenate(
            [np.ravel(x) for x in jax.tree.leaves(sharding.fetch(grads))]
        )


def spread(gram_ii) -> tuple[float, float]:
    """Returns (trace of the covariance, unbiased |E g|^2) of gradients' products [i, i]."""
    count, own, every = len(gram_ii), np.trace(gram_ii), gram_ii.sum()
    signal = (every - own) / (count * (count - 1))
    return (own - every / count) / (count - 1), signal


def interval(of, *gram_ii) -> tuple[float, float]:
    """Returns (of(...), half of its 95 % interval): a jackknife over minibatches."""
    count, found = len(gram_ii[0]), of(*gram_ii)
    without = np.array(
        [
            of(*(np.delete(np.delete(x, i, 0), i, 1) for x in gram_ii))
            for i in range(count)
        ]
    )
    error = np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    return found, 1.96 * error


def measured(policy: Policy, minibatches: int):
    """Returns (products of gradients [i, i] by row, explained variance, answers of one)."""
    rows = {("none", 1.0): None} | {
        ("trace", lam): ridge.Ridge(policy.settings.sampler.max_new) for lam in LAMBDAS
    }
    grads, explained, answers = {row: [] for row in rows}, [], []
    for number in range(WARM + minibatches):
        rollouts, counted = policy.answers(number), number >= WARM
        for (value, lam), critic in rows.items():
            told, batch = policy.batch(number, rollouts, value, lam, critic)
            if batch is None or not counted:
                continue
            grads[value, lam].append(policy.gradient(batch))
            if (value, lam) == ("trace", 1.0):
                explained.append(told["explained_variance"])
                answers.append(told["groups_kept"] * policy.settings.rl.group)
    products = {row: np.stack(x) @ np.stack(x).T for row, x in grads.items()}
    return products, float(np.mean(explained)), float(np.mean(answers))


def table(products: dict, answers: float) -> list[str]:
    """Returns the lines of a table; products: see `measured`."""
    lines = [
        "| critic | lambda | variance | signal | answers |",
        "|---|---|---|---|---|",
    ]
    base_ii = products["none", 1.0]
    signal, half = interval(lambda one_ii: spread(one_ii)[1], base_ii)
    seen = signal > half
    for (value, lam), gram_ii in products.items():
        ratios = [ratio_of(part, gram_ii, base_ii) for part in (0, 1)]
        variance, signal = spread(gram_ii)
        needed = f"{answers * variance / signal:.0f}" if seen and signal > 0 else ""
        told = ratios[1] if seen else ""
        lines.append(f"| {value} | {lam:g} | {ratios[0]} | {told} | {needed} |")
    if not seen:
        lines.append("The signal cannot be told from 0: take more minibatches.")
    return lines


def ratio_of(part: int, gram_ii, base_ii) -> str:
    """Returns the ratio of variances (part 0) or signals (1), with its interval."""
    if gram_ii is base_ii:
        return "1"
    found, half = interval(
        lambda one_ii, base_ii: spread(one_ii)[part] / spread(base_ii)[part],
        gram_ii,
        base_ii,
    )
    return f"{found:.2f} ± {half:.2f}"


def main():
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="")
    parser.add_argument("--minibatches", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report.positive(parser, args)
    if args.minibatches < LEAST:
        least = f"an interval that leaves one out takes {LEAST}"
        parser.error(f"--minibatches={args.minibatches}: {least}")
    products, explained, answers = measured(
        Policy(args.model, args.seed), args.minibatches
    )
    print(
        f"{args.minibatches} minibatches of {answers:.0f} answers; explained variance "
        f"{explained:.3f}"
    )
    print("\n".join(table(products, answers)))


if __name__ == "__main__":
    command_line.entry(main)
