#!/usr/bin/env bash
# Everything CI runs: lint, types, tests, tables of benchmarks. Sets up .venv when needed.
#
#   bash scripts/test.sh
#   bash scripts/test.sh --with-libraries  only the tests with TRL, veRL, FLA and transformers, in
#                                          .venv-libraries: versions of constraints/libraries.txt
#   bash scripts/test.sh --newest          the same with the newest releases, in .venv-newest
#
# Runs every step whatever came before it, ends with a table, and exits with 1 if a step failed.
# A GPU is not used: scripts/device_check.sh is for machines that have one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
case "$*" in
  "") setup_env ;;
  --with-libraries) setup_env tested ;;
  --newest) setup_env newest ;;
  *) fail "test.sh $*" "--with-libraries, --newest or nothing" "leave the rest out" ;;
esac
cd "$root"

workers=$(nproc)
[ "$workers" -le 8 ] || workers=8 # each holds a GB: torch and TileLang
export OMP_NUM_THREADS=1 EMU_WORKERS=1 # the workers share the cores already
export CUDA_VISIBLE_DEVICES=           # the same tests on every machine

trap 'exit 130' INT # pytest ends tidily on Ctrl-C; so do we

table=()
notes=()
failed=0

step() { # name, command...
  local name=$1 started=$SECONDS result=ok
  shift
  printf '\n== %s\n' "$name"
  "$@" || { result=FAILED; failed=1; }
  table+=("$(printf '%-22s %-7s %4d s' "$name" "$result" $((SECONDS - started)))")
}

finish() { # exits
  printf '\n'
  printf '%s\n' "${table[@]}" "total $SECONDS s"
  [ ${#notes[@]} = 0 ] || printf '%s\n' "${notes[@]}"
  exit $failed
}

if [ $# -gt 0 ]; then
  names="torch|transformers|accelerate|trl|verl|peft|tensordict"
  notes+=("with $("$python" -m pip freeze | grep -E "^($names)==" | tr '\n' ' ' || :)")
  fla=(env PYTHONPATH="$venv/fla" "$python" -W ignore)
  # without them their tests would skip themselves
  step "imports" "$python" -W ignore -c "import trl.experimental.async_grpo, peft, \
    verl.workers.engine.fsdp.transformer_impl"
  step "imports of FLA" "${fla[@]}" -c "import fla.ops.gated_delta_rule, fla.backends, \
    megatron.core.ssm.gated_delta_net"
  # not the folder: libraries install packages with names of ours, such as `scripts`
  step "pytest" "$python" -m pytest -q -m "libraries and not hopper" -n "$workers" \
    --dist worksteal --durations=5 $(grep -l "pytest.mark.libraries" tests/host/*.py)
  step "pytest with FLA" "${fla[@]}" -m pytest -q -m libraries \
    tests/host/test_integrations_fla.py tests/host/test_gdn_zigzag.py tests/host/test_gdn_api.py \
    tests/host/test_megatron.py
  finish
fi

# Their tests skip themselves; a line at the end keeps that from going unnoticed.
missing=$("$python" -c 'from qla_kernels.runtime import jit; jit.nvcc()' 2>&1) ||
  notes+=("NOT RUN: the static tier. ${missing##*$'\n'}")
command -v g++ >/dev/null || notes+=("NOT RUN: the emulated tier. no g++; apt install g++")

exec 3< <("$python" -m mypy 2>&1) # on one core, beside the steps before its own
mypy=$!
trap 'kill "$mypy" 2>/dev/null || :' EXIT

checked_types() {
  cat <&3
  wait "$mypy"
}

step "ruff check" "$python" -m ruff check .
step "ruff format" "$python" -m ruff format --check .
step "pytest" "$python" -m pytest -q -m "not hopper" -n "$workers" --dist worksteal --durations=10
step "performance tables" "$python" -m benchmarks.show --check
step "mypy" checked_types

finish
