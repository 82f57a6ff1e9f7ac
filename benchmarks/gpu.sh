#!/usr/bin/env bash
# All tests and measurements on a GPU, in 24 minutes: benchmarks/gpu.sh [tests] [losses] [training]
# By default all three parts. A part that is out of time is interrupted and has 15 seconds to save
# what it has; a second run of the losses continues there. PYTHON is the interpreter, LOGS the folder for outputs.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} logs=${LOGS:-build/gpu} results=benchmarks/results
export OMP_WAIT_POLICY=PASSIVE PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$logs"
failed=0

part() { # name, seconds, module, options
  local name=$1 seconds=$2
  shift 2
  echo "== $name, at most $seconds s"
  timeout --signal=INT --kill-after=15 "$seconds" "$python" -m "$@" 2>&1 | tee "$logs/$name.log"
  case ${PIPESTATUS[0]} in
    0) echo "== $name: done" ;;
    124 | 137) echo "== $name: out of time; what it had is kept" ;;
    *) echo "== $name: FAILED" && failed=1 ;;
  esac
}

tests() {
  # Versions of pytest and PyTorch may differ from the pinned ones, so warnings are not errors.
  local options=(-q --device cuda -p no:cacheprovider -o minversion=7 -W default --tb=short --maxfail=40)
  "$python" -c "import xdist" 2> /dev/null && options+=(-n 8)
  part tests 320 pytest "${options[@]}" tests/losses tests/representation tests/objective
}

losses() {
  part losses 880 benchmarks --device cuda --suite gpu --output "$results/cuda-gpu.csv"
}

training() {
  part training 240 benchmarks.studies.training_step --device cuda --output "$results/cuda-training.csv"
}

[ $# -gt 0 ] || set -- tests losses training
for name; do
  case $name in
    tests | losses | training) "$name" ;;
    *) echo "expected parts tests, losses or training, got $name" >&2 && exit 2 ;;
  esac
done
exit "$failed"
