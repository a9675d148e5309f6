#!/usr/bin/env bash
# vLLM 0.33.0 with and without our plug-in: right tokens, GPU time of the layers, throughput.
#
#   bash scripts/engine_check.sh [check|profile|bench ...]    default: all three, about 20 minutes
#   ENGINE_CPU=1 bash scripts/engine_check.sh check dense     small models in a CPU engine
#
# Needs vLLM and kernels that were built ahead (QLA_PREBUILT, or a wheel) for $ENGINE_PYTHON, default
# python3, and FlashInfer for the rival of that name. Names after a part are its own, such as
# scenarios. CHECK_S, PROFILE_S and BENCH_S are limits in seconds. Logs and JSON are in $OUT, or
# out/engine. A part's last lines are its table; benchmarks/engine says what the numbers are.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${ENGINE_PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OUT="${OUT:-$PWD/out/engine}" OMP_NUM_THREADS=1
mkdir -p "$OUT"
failed=0
run() { # run SECONDS PART ARGUMENTS ...
  local limit=$1 part=$2
  shift
  echo "== $* (at most $limit s)"
  timeout -k 5 "$limit" "$python" -m benchmarks.engine "$@" 2>&1 | tee "$OUT/$part.txt" | cut -c1-240 ||
    failed=1
}
parts=() names=()
for word in "$@"; do
  case $word in check | profile | bench) parts+=("$word") ;; *) names+=("$word") ;; esac
done
[ ${#parts[@]} -gt 0 ] || parts=(check profile bench)
for part in "${parts[@]}"; do
  case $part in
    check)
      run "${CHECK_S:-900}" check ${ENGINE_CPU:+--cpu --beside 1} --budget "$((${CHECK_S:-900} * 2 / 3))" \
        "${names[@]}"
      ;;
    profile) run "${PROFILE_S:-400}" profile --rivals "${RIVALS:-off:triton,off}" "${names[@]}" ;;
    bench)
      run "${BENCH_S:-560}" bench --rivals "${RIVALS:-off:triton,off}" \
        --budget "$((${BENCH_S:-560} - 40))" "${names[@]}"
      ;;
  esac
done
exit $failed
