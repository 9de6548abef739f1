#!/bin/bash
# Everything that fits ten minutes on one GPU, in one call:
#
#     benchmarks/all_gpu.sh [FOLDER]
#
# First the self-check: what it finds wrong is told, and then all is timed without kernels.
# Lines of JSON go to FOLDER/results.jsonl (runs/benchmarks); with those of other devices in
# docs/benchmarks.jsonl they make docs/benchmarks.md. Add them there to keep them.
# Each command has its own limit: one that takes too long costs only what it has not told;
# so the rows that matter most come first. KERNELS=auto leaves out those for GPU.
. "$(dirname "$0")/bench.sh"
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}

checked sdar-8b
decode="decode $with --prefill 4096 --repeats 1"
steady="$decode --steady --prompt 512 --new 640"
bench 75 $steady --model=sdar-4b --rows 128
bench 115 $steady --model=sdar-8b --rows 128 1
train="train_step $with --packed-only --remat=dots --max-prompt 300 --max-answer 1000 --mean-answer 500 --trajectories 128 --repeats 2"
bench 50 $train --model=sdar-1.7b --rows 4 --tokens 4096
bench 70 kernels --only paged cache queries token_draw chunk top_p
bench 60 $decode --engine-only --prompt 1024 --new 256 --model=sdar-4b --rows 128
one_step 90
reported
