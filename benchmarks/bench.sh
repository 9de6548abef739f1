# What all_gpu.sh and all_tpu.sh share; they source it. $1: the folder of the results.
if [[ $# -gt 1 || $1 == -* ]]; then
    echo "usage: $0 [FOLDER]" >&2
    exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$(realpath -m "${1:-$root/runs/benchmarks}")
cd "$root" || exit 1
set -o pipefail
python=${PYTHON:-python3}
if ! "$python" -c "import jax, ml_collections"; then
    echo "error: $python lacks what dllm_jax needs: activate its environment, or set PYTHON" >&2
    exit 1
fi
if ! { mkdir -p "$out" && : > "$out/results.jsonl"; }; then
    echo "error: nothing can be written to $out: name another folder, $0 FOLDER" >&2
    exit 1
fi
export PYTHONUNBUFFERED=1

bench() { # seconds, module, arguments: its lines of JSON are kept; its status is returned
    local limit=$1
    shift
    echo "== $*"
    timeout "$limit" "$python" -m "benchmarks.$@" 2> >(tail -n 20 >&2) |
        tee >(grep '^{' >> "$out/results.jsonl") | sed '/^{/d'
    local status=$?
    if [[ $status -eq 124 ]]; then
        echo "== cut off after $limit s; what it told before is kept"
    elif [[ $status -ne 0 ]]; then
        echo "== ended with $status"
    fi
    return "$status"
}

checked() { # sets $with: the kernels if the self-check finds all right, else none
    with=--kernels=${KERNELS:-platform}
    # A minute and more on an H200 for two models, one op after the other: side by side now.
    if ! bench 110 selfchecks --model "$@"; then
        with=--kernels=${KERNELS:-reference}
        echo "== not all were found right in time: what follows is with $with"
    fi
}

one_step() { # seconds: a whole step of RL, where its packages are there
    if "$python" -c "import ml_collections, tensorboardX" 2> /dev/null; then
        bench "$1" rl_step --config.model.dtype=bfloat16 "--config.model.${with#--}"
    else
        echo "== rl_step SKIPPED: needs ml_collections and tensorboardX"
    fi
}

reported() { # the tables of these results and of docs/benchmarks.jsonl's
    sleep 1
    "$python" -m benchmarks.report "$out/results.jsonl" docs/benchmarks.jsonl \
        > "$out/benchmarks.md" && cp "$out/benchmarks.md" docs/benchmarks.md
    local status=$?
    echo "== lines in $out/results.jsonl, tables in $out/benchmarks.md"
    return $status
}
