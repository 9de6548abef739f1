#!/bin/bash
# Everything that fits ten minutes on one TPU chip of 95 GiB, in one call:
#
#     benchmarks/all_tpu.sh [FOLDER]
#
# As all_gpu.sh, which says more: the self-check first, then what is timed, one limit each.
# On a host of several chips it takes one: TPU_VISIBLE_CHIPS says which. On chips of 16 or
# 32 GiB the commands of 4B and 8B end for want of memory, and the others tell theirs.
. "$(dirname "$0")/bench.sh"
export TPU_VISIBLE_CHIPS=${TPU_VISIBLE_CHIPS:-0} TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1
export TPU_PROCESS_BOUNDS=1,1,1

checked sdar-1.7b sdar-8b
decode="decode $with --engine-only --prompt 1024 --new 256 --prefill 4096 --repeats 1"
bench 100 $decode --model=sdar-8b --rows 64 128 1
bench 80 $decode --model=sdar-4b --rows 64 1 128
bench 60 $decode --model=sdar-1.7b --rows 64 1 256
train="train_step $with --packed-only --remat=dots --max-prompt 300 --max-answer 1000 --mean-answer 500"
bench 60 $train --model=sdar-1.7b --rows 4 --tokens 4096
bench 50 $train --model=sdar-4b --rows 2 --tokens 4096 --trajectories 16
bench 70 kernels
one_step 40
reported
