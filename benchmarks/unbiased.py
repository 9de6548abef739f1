"""Whether a reward that says nothing pushes the policy: the mean of its gradient, squared.

    python -m benchmarks.unbiased --problems 250 --answers 16

The bundled arithmetic model answers training problems as configs/tracerl.py samples. Each
answer is worth 1, whatever it says; there is no baseline, no critic, no KL, no clip, and
lengths normalise nothing (aggregate "constant"). The gradient of an unbiased likelihood has
then the mean zero: E grad log P = 0. Of n problems' gradients g the square of the mean is
estimated by the inner products of different problems',

    |E g|^2  ~  sum_{i != j} w_i w_j <g_i, g_j>  /  sum_{i != j} w_i w_j,

without a bias, as all weights are 1; with the counts of a bootstrap over problems as weights
it gives the 95 % interval. Told for both likelihoods, on the same answers; and for real
rewards, z-scored within each problem, as a measure of what is large.

Letters: p problems.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from configs import tracerl
from dllm_jax import command_line, config, data
from dllm_jax.models import hf
from dllm_jax.rl import layout as layouts
from dllm_jax.rl import learner, noise, rewards, rollout, views
from dllm_jax.rl.config import ObjectiveConfig, OptimConfig
from dllm_jax.sampling import answers, denoise
from dllm_jax.sampling.answers import row_keys


def sampled(args, cfg, model, tok, params):
    """Returns (graded Rollouts, problems first; their problems' number)."""
    grader = rewards.grader(cfg.rl.reward, cfg.reward)
    problems = data.problems(cfg.data.train, tok, cfg.data, grader)[: args.problems]
    asked = [problem for problem in problems for _ in range(args.answers)]
    generate = functools.partial(denoise.generate, model=model, cfg=cfg.sampler)
    key, traces = jax.random.key(args.seed), []
    for first in range(0, len(asked), args.rows):
        prompts = [problem.prompt_ids for problem in asked[first : first + args.rows]]
        prompts += [[]] * (args.rows - len(prompts))
        prompt_BT = np.zeros((args.rows, cfg.sampler.max_prompt), np.int32)
        for row, ids in enumerate(prompts):
            prompt_BT[row, : len(ids)] = ids
        len_B = np.array([len(ids) for ids in prompts], np.int32)
        limit_B = len_B + cfg.sampler.max_new
        warmth_B = np.full(args.rows, cfg.sampler.temperature, np.float32)
        keys = row_keys(key, first + np.arange(args.rows, dtype=np.uint32))
        trace = generate(params, prompt_BT, len_B, limit_B, warmth_B, keys)
        traces.append(jax.device_get(trace))
    trace = jax.tree.map(lambda *x: np.concatenate(x)[: len(asked)], *traces)
    rollouts = rollout.graded(
        trace,
        answers.decode(trace, tok),
        asked,
        np.repeat(np.arange(len(problems)), args.answers),
        grader,
        truncated_wrong=False,
    )
    return rollouts, len(problems)


def gradients(args, cfg, model, params, rollouts, count: int, likelihood: str):
    """Returns the gradients of each problem's answers, by kind of reward: [p, weights]."""
    objective = ObjectiveConfig(loss="dipo", likelihood=likelihood)
    layout = layouts.of(model, cfg.sampler, cfg.noise, objective)
    rule = layout.selection.rule if layout.selection else None
    plan = learner.Plan(("dipo",), OptimConfig(), 1, rule=rule)
    most = layouts.microbatches(
        trajectories=args.answers,
        slots=cfg.sampler.slots,
        answer=cfg.sampler.max_new,
        rounds=noise.rounds(cfg.noise, layout, cfg.sampler.max_new),
        copies=1,
        layout=layout,
        cfg=cfg.batch,
    )

    @jax.jit
    def gradient(batch):
        grads, _ = learner.gradients(
            params, batch, None, model=model, plan=plan, cfg=objective
        )
        return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(grads)])

    kinds = {"constant": np.ones_like, "real": standardized}
    found = {kind: [] for kind in kinds}
    for p in range(count):
        rows = slice(p * args.answers, (p + 1) * args.answers)
        trace = jax.tree.map(lambda x, rows=rows: x[rows], rollouts.trace)
        batch, source = views.pack(
            trace,
            noise.noised(trace, cfg.noise, layout),
            mask_id=model.mask_id,
            layout=layout,
            cfg=cfg.batch,
            most=most,
            aggregate="constant",
        )
        for kind, worth in kinds.items():
            worth_n = worth(rollouts.reward_n[rows])
            worth_nT = np.broadcast_to(worth_n[:, None], trace.step_BT.shape)
            adv_BU = source.gather(worth_nT)
            zeros = dict.fromkeys(("old_logp_BU",), np.zeros_like(adv_BU))
            found[kind].append(
                np.asarray(gradient(batch.replace(adv_BU=adv_BU, **zeros)))
            )
    return {kind: np.stack(g) for kind, g in found.items()}


def standardized(reward_n):
    """Returns rewards z-scored within their group; 0 where all are equal."""
    return (reward_n - reward_n.mean()) / max(float(reward_n.std()), 1e-6)


def squared_mean(product_pp, weight_p) -> float:
    """Returns the estimate of |E g|^2; product: the inner products of gradients."""
    off_pp = np.outer(weight_p, weight_p) * (1 - np.eye(len(weight_p)))
    return float((off_pp * product_pp).sum() / off_pp.sum())


def interval(product_pp, draws: int, rng: np.random.Generator):
    """Returns (the estimate, the bounds of its 95 % interval by the bootstrap)."""
    count = len(product_pp)
    weights = (rng.multinomial(count, np.full(count, 1 / count)) for _ in range(draws))
    # Of a problem alone, which a draw of a few may be, there are no products.
    drawn = [squared_mean(product_pp, x) for x in weights if x.max() < count]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return squared_mean(product_pp, np.ones(count)), float(low), float(high)


def measure(args):
    """Yields a row of the table for each likelihood and reward."""
    tree = config.default()
    tracerl.arithmetic(tree)
    tree.sampler.target, tree.sampler.threshold = args.target, args.threshold
    cfg, model, tok = config.completed(config.freeze(tree))
    _, params = hf.load(cfg.model.path, dtype=jnp.float32, heads=("lm",))
    cfg = dataclasses.replace(
        cfg, sampler=dataclasses.replace(cfg.sampler, rows=args.rows)
    )
    rollouts, count = sampled(args, cfg, model, tok, params)
    for likelihood in args.likelihood:
        found = gradients(args, cfg, model, params, rollouts, count, likelihood)
        for kind, g_pw in found.items():
            product_pp = (g_pw @ g_pw.T).astype(np.float64)
            rng = np.random.default_rng(args.seed)
            mean, low, high = interval(product_pp, args.bootstrap, rng)
            yield {
                "likelihood": likelihood,
                "reward": kind,
                "target": args.target,
                "problems": count,
                "answers": len(rollouts.reward_n),
                "accuracy": round(float(rollouts.reward_n.mean()), 3),
                "squared_mean": float(f"{mean:.3g}"),
                "low": float(f"{low:.3g}"),
                "high": float(f"{high:.3g}"),
                "mean_square": float(f"{np.trace(product_pp) / count:.3g}"),
            }


def main():
    """Measures both likelihoods on the same answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=250)
    parser.add_argument("--answers", type=int, default=16, help="to each problem")
    parser.add_argument("--rows", type=int, default=250, help="sampled together")
    parser.add_argument("--target", default="confidence", help="sampler.target")
    parser.add_argument("--threshold", type=float, default=0.9)
    parser.add_argument(
        "--likelihood",
        nargs="+",
        default=["tokens", "selection"],
        choices=["tokens", "selection"],
    )
    parser.add_argument("--bootstrap", type=int, default=1000, help="draws")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report.positive(parser, args)
    if args.problems < 2:
        parser.error("--problems=1: gradients of different problems are multiplied")
    for row in measure(args):
        report.tell("unbiased", **row)


if __name__ == "__main__":
    command_line.entry(main)
