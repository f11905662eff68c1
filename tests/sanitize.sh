#!/usr/bin/env bash
# The kernel tests under compute-sanitizer's memcheck, where it is installed and runs: sanitize.sh PYTHON
# It ends with status 77 where it is skipped.
set -euo pipefail

if ! command -v compute-sanitizer >/dev/null; then
  echo "compute-sanitizer is not installed: skipped"
  exit 77
fi
export PYTHONPATH=. PYTORCH_NO_CUDA_MEMORY_CACHING=1  # else an access past an allocation hits the next one
if ! compute-sanitizer --report-api-errors no --error-exitcode 9 "$1" -c "import torch; torch.ones(3, device='cuda').sum().item()" >/dev/null; then
  echo "compute-sanitizer does not run on this machine: skipped"
  exit 77
fi
compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 "$1" -m pytest -q -m gpu -p no:cacheprovider \
  tests/kernels/test_operations.py -k "not reference and (bad_element or gaps or in_place or copy)"
