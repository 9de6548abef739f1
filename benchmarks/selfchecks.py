"""A run's self-check of this machine's kernels, op by op: before anything is timed.

    python -m benchmarks.selfchecks --model=sdar-1.7b sdar-8b

For the widths of each model every op is computed by its kernel and by the specification, as
models/selfcheck.py does at a run's start; what is wrong is told, and the command then ends
with 1. One that hangs for half a minute, or breaks the device, is told, and the end at once. A
platform without kernels has no rows.
"""

import argparse
import sys

from benchmarks import report
from benchmarks.decode import SHAPES
from dllm_jax import exits
from dllm_jax.models import first_run, selfcheck
from dllm_jax.pallas_kernels import choice


def main():
    """Prints a row for each op and model."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", nargs="+", choices=sorted(SHAPES), required=True)
    p.add_argument("--block", type=int, default=4)
    args = p.parse_args()
    report.positive(p, args)
    here, wrong = choice.platform(), False
    # Within the limit of all_gpu.sh, so that it is told which one hangs.
    first_run.LONGEST_S = 30.0
    for name in args.model:
        wide = selfcheck.widths(SHAPES[name], args.block, 32)
        ops = selfcheck.ops_of(here, wide)
        for op, fault in selfcheck.faults(ops, here, wide).items():
            wrong = wrong or bool(fault)
            report.tell("selfchecks", model=name, op=op, fault=fault or "none")
    sys.exit(int(wrong))


if __name__ == "__main__":
    try:
        main()
    except exits.CannotGoOn as error:
        sys.exit(f"error: {error}")
