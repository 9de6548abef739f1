#!/bin/bash
# Everything that fits ten minutes on one accelerator, in one call:
#
#     benchmarks/all_gpu.sh [FOLDER]
#
# Lines of JSON go to FOLDER/results.jsonl (runs/benchmarks); with those of other devices in
# docs/benchmarks.jsonl they make docs/benchmarks.md. Add them there to keep them.
# Each command has its own limit: one that takes too long costs only what it has not told;
# so the rows that matter most come first. KERNELS=auto leaves out those for GPU, which
# `kernels` compares with their specification before anything else runs.
cd "$(dirname "$0")/.." || exit 1
out=${1:-runs/benchmarks}
python=${PYTHON:-python3}
mkdir -p "$out"
: > "$out/results.jsonl"
export PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}

bench() { # seconds, module, arguments
    local limit=$1
    shift
    echo "== $*"
    timeout "$limit" "$python" -m "benchmarks.$@" 2> >(tail -n 20 >&2) |
        tee >(grep '^{' >> "$out/results.jsonl") | grep -v '^{'
}

bench 90 kernels
with="--kernels=${KERNELS:-platform}"
decode="decode $with --engine-only --prompt 1024 --new 256 --prefill 4096 --repeats 1"
bench 90 $decode --model=sdar-1.7b --rows 64 1 256 128
bench 100 $decode --model=sdar-4b --rows 128 64 1 256
bench 120 $decode --model=sdar-8b --rows 64 128 1 256
train="train_step $with --packed-only --remat=full --max-prompt 300 --max-answer 1000 --mean-answer 500"
bench 50 $train --model=sdar-1.7b --rows 4 --tokens 4096
bench 50 $train --model=sdar-4b --rows 2 --tokens 4096 --trajectories 16
if "$python" -c "import ml_collections, tensorboardX" 2> /dev/null; then
    bench 50 rl_step --config.model.dtype=bfloat16 --config.model.kernels="${KERNELS:-platform}"
else
    echo "== rl_step SKIPPED: needs ml_collections and tensorboardX"
fi
sleep 1
"$python" -m benchmarks.report "$out/results.jsonl" docs/benchmarks.jsonl \
    > "$out/benchmarks.md" && cp "$out/benchmarks.md" docs/benchmarks.md
