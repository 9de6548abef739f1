#!/usr/bin/env bash
# Trains on this machine, on every accelerator that it has.
#
#   launch/local.sh [CONFIG] [trainer flags...]
#
# EXTRAS=cuda or EXTRAS=tpu installs JAX for the accelerator; without it, the CPU is used.
set -euo pipefail
cd "$(dirname "$0")/.."

config=configs/tracerl.py
if [[ $# -gt 0 && $1 != -* ]]; then
    config=$1
    shift
fi
make install EXTRAS="${EXTRAS:-}"
exec .venv/bin/python -m dllm_jax.train --config="$config" "$@"
