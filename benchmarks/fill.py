"""How much of an update's slots hold something, by the width of a row and the devices.

    python -m benchmarks.fill

Simulated with the run's own packer, of the published recipe's lengths: prompts of 392 to 784
tokens, answers of 500 on average and 2,000 at most, blocks of 4 in 2.2 steps. An update has
256 answers, or as few as 64 where groups are dropped: told is the mean over 64, 88 .. 256. A
microbatch has a row on each device, and 8 at least; the last one is seldom full.
"""

import argparse
import itertools
from types import SimpleNamespace

import numpy as np

from benchmarks import report, roofline
from dllm_jax import command_line
from dllm_jax.models.mask import FAR
from dllm_jax.rl import layout, views
from dllm_jax.rl.config import BatchConfig

BLOCK, PROMPT, ANSWER = 4, 784, 2000
STEPS = (0.3, 0.3, 0.3, 0.1)  # how often a block takes 1, 2, 3 or 4
COUNTS = range(64, 257, 24)


def drawn(count: int, rng):
    """Returns (trace, noise, supervised_nT) of so many answers, as views.pieces_of takes."""
    assert np.isclose(np.dot(STEPS, range(1, BLOCK + 1)), roofline.STEPS)
    prompt_n = rng.integers(PROMPT // 2, PROMPT + 1, count)
    len_n = np.clip(rng.gamma(2, roofline.ANSWER / 2, count), 8, ANSWER).astype(int)
    pos_T = np.arange(PROMPT + ANSWER)
    end_n = prompt_n + len_n
    answer_nT = (pos_T >= prompt_n[:, None]) & (pos_T < end_n[:, None])
    steps_nJ = rng.choice(BLOCK, (count, len(pos_T) // BLOCK), p=STEPS) + 1
    # Each of a block's steps takes a token at least.
    order_nJQ = rng.permuted(np.tile(np.arange(BLOCK), (*steps_nJ.shape, 1)), axis=-1)
    step_nJQ = order_nJQ % steps_nJ[..., None]
    step_nT = 1 + BLOCK * (pos_T // BLOCK) + step_nJQ.reshape(count, -1)
    step_nT = np.where(answer_nT, step_nT, np.where(pos_T < prompt_n[:, None], 0, FAR))
    trace = SimpleNamespace(prompt_len_B=prompt_n, len_B=len_n)
    return trace, SimpleNamespace(step_nT=step_nT), answer_nT


def main():
    """Prints a row for each number of devices."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--devices", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    p.add_argument(
        "--widths", type=int, nargs="+", default=[3584, 4096, 4608, 5632, 8192]
    )
    p.add_argument("--draws", type=int, default=1, help="of each number of answers")
    args = p.parse_args()
    report.positive(p, args)
    shown, shares = layout.Layout(block=BLOCK, longest=ANSWER), {}
    for width in args.widths:
        cfg = BatchConfig(tokens=width)
        for seed, count in itertools.product(range(args.draws), COUNTS):
            made = drawn(count, np.random.default_rng(seed))
            whole = views.pieces_of(*made, shown, BatchConfig(tokens=10**6), 1)
            held = sum(piece.cost for piece in whole)
            pieces = views.pieces_of(*made, shown, cfg, 1)
            rows = len(views.fit(pieces, width, shown.seats(cfg)))
            for devices in args.devices:
                size = max(devices, cfg.rows)
                computed = -(-rows // size) * size * width
                shares.setdefault((devices, width), []).append(held / computed)
    print("| devices |", *(f" {width:,} slots |" for width in args.widths))
    print("| --- |" + " --- |" * len(args.widths))
    for devices in args.devices:
        found = (np.mean(shares[devices, width]) for width in args.widths)
        print(f"| {devices} |", *(f" {share:.2f} |" for share in found))


if __name__ == "__main__":
    command_line.entry(main)
