#!/usr/bin/env bash
# Trains on every worker of a Cloud TPU slice, from the commit checked out here.
#
#   launch/tpu_pod.sh TPU_NAME ZONE [CONFIG] [trainer flags...]
#
# Needs gcloud, logged in, with the project set. Output of all workers comes back here;
# to survive a lost connection, run this in tmux on a machine that stays up.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ $# -lt 2 ]]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
tpu=$1 zone=$2
shift 2
config=configs/tracerl.py
if [[ $# -gt 0 && $1 != -* ]]; then
    config=$1
    shift
fi

if [[ -n $(git status --porcelain) ]]; then
    echo "warning: the workers get the last commit, without the changes since" >&2
fi
archive=$(mktemp -t dllm_jax.XXXXXX)
trap 'rm -f "$archive"' EXIT
git archive --format=tar.gz --output="$archive" HEAD
gcloud compute tpus tpu-vm scp "$archive" "$tpu:dllm_jax.tar.gz" \
    --worker=all --zone="$zone"

# Quoted once more here because the remote shell splits the line again.
train=$(printf '%q ' .venv/bin/python -m dllm_jax.train --distributed --config="$config" "$@")

# TPU images bring an older Python; uv, from pip, adds one beside it, also where pip is told
# to leave the system's packages alone, as by Ubuntu 24.04. All workers must
# enter the collective program together, so one command does all and any failure shows.
# What an earlier commit brought goes first: a file that this one has no more would be there
# on some workers, and not on one that is new.
gcloud compute tpus tpu-vm ssh "$tpu" --worker=all --zone="$zone" --command="
    set -e
    mkdir -p dllm_jax && cd dllm_jax
    if [ -f .brought ]; then xargs -r -d '\n' rm -f < .brought; fi
    tar -tzf ../dllm_jax.tar.gz | grep -v '/\$' > .brought
    tar -xzf ../dllm_jax.tar.gz
    if ! make install EXTRAS=tpu; then
        PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
        python3 -m uv python install --quiet 3.12
        make install EXTRAS=tpu PYTHON=\$(python3 -m uv python find --managed-python 3.12)
    fi
    exec $train"
