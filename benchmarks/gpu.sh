#!/usr/bin/env bash
# All measurements and tests on a GPU, in 15 minutes: benchmarks/gpu.sh [training] [losses] [ranks] [tests]
# By default all four parts. A part that is out of time is interrupted and has 15 seconds to save
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

# Versions of pytest and PyTorch may differ from the pinned ones, so warnings are not errors. With -v
# the name of a failed test is in the log at once.
options=(-v -p no:cacheprovider -o minversion=7 -W default --tb=short --maxfail=40)

tests() {
  "$python" -c "import xdist" 2> /dev/null && options+=(-n auto)
  part tests 360 pytest "${options[@]}" --device cuda tests/losses tests/representation/test_{head,pooling}.py
}

ranks() {
  part ranks 120 pytest "${options[@]}" tests/distributed/test_on_accelerators.py
}

losses() { # compiling all cases takes several times as long
  part losses 240 benchmarks --device cuda --suite gpu --no-compile --output "$results/cuda-gpu.csv"
}

training() {
  part training 120 benchmarks.studies.training_step --device cuda --output "$results/cuda-training.csv"
}

[ $# -gt 0 ] || set -- training losses ranks tests
for name; do
  case $name in
    training | losses | ranks | tests) "$name" ;;
    *) echo "expected parts training, losses, ranks or tests, got $name" >&2 && exit 2 ;;
  esac
done
exit "$failed"
