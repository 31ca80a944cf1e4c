#!/usr/bin/env bash
# NVIDIA's compute-sanitizer over small calls of every kernel: bash tests/sanitize_gpu.sh [TOOL ...]
# TOOL: memcheck (addresses), racecheck (shared memory), synccheck (barriers); default: all three. PYTHON names the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=src:tests PYTORCH_NO_CUDA_MEMORY_CACHING=1 CUDA_LAUNCH_BLOCKING=1
python=${PYTHON:-python3}
status=0
# Once without, so that every kernel is compiled before the checker slows the process down.
$python tests/gpu_workload.py || exit 1
for tool in "${@:-memcheck racecheck synccheck}"; do
  for one in $tool; do
    echo "== $one"
    compute-sanitizer --tool "$one" --error-exitcode 9 $python tests/gpu_workload.py || status=1
  done
done
exit $status
