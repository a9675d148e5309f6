#!/usr/bin/env bash
# What CI cannot do: run a family's kernels on a Hopper GPU, and put on record that they ran.
#
#   bash scripts/device_check.sh [family]    default: gdn; at most ten minutes
#
# Compiles, runs the device tests, the self-test under compute-sanitizer and a short benchmark; each
# under a time limit. Appends a line to benchmarks/results/checks.jsonl; logs are in out/device_check.
# Uses python3 where that has torch and TileLang already (offline machines), else .venv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
driver_found || fail "no NVIDIA driver" "a machine with a Hopper GPU" "bash scripts/test.sh needs none"
if python3 -c "import torch, tilelang" 2>/dev/null; then
  python=$(command -v python3)
else
  setup_env
fi
cd "$root"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
export PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin" # compute-sanitizer
exec "$python" scripts/device_check.py "$@"
