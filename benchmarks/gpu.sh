#!/usr/bin/env bash
# What a GPU is asked for, in 12 minutes: benchmarks/gpu.sh [tests] [compare] [training] [graphs]
# By default all four parts. A part that is out of time is interrupted and has 15 seconds to save
# what it has. PYTHON is the interpreter, LOGS the folder for outputs, OLD a folder with an older
# sparse_losses (git archive COMMIT sparse_losses | tar x -C build/old).
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} logs=${LOGS:-build/gpu} results=${RESULTS:-benchmarks/results}
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
# the name of a failed test is in the log at once. The head comes first: its gradient waits for a copy.
options=(-v -p no:cacheprovider -o minversion=7 -W default --tb=short --maxfail=40)

tests() {
  "$python" -c "import xdist" 2> /dev/null && options+=(-n auto)
  part tests 120 pytest "${options[@]}" --device cuda tests/representation/test_{head,pooling}.py tests/losses
}

compare() { # old against new, interleaved
  part compare 285 benchmarks.run.old_and_new "${OLD:-build/old}" --device cuda --suite gpu --budget 270 \
    --output "$results/cuda-old-new.csv"
}

training() { # a step at the two ends: few active entries, and the start of a training
  local active
  for active in 0.01 1; do
    part "training-$active" 120 benchmarks.studies.training_step --device cuda --active "$active" \
      --output "$results/cuda-training-$active.csv"
  done
}

graphs() {
  part graphs 60 benchmarks.run.graphs
}

[ $# -gt 0 ] || set -- tests compare training graphs
for name; do
  case $name in
    tests | compare | training | graphs) "$name" ;;
    *) echo "expected parts tests, compare, training or graphs, got $name" >&2 && exit 2 ;;
  esac
done
exit "$failed"
