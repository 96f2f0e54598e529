#!/usr/bin/env bash
# Checks and times every kernel on this machine's GPU, in under 8 minutes on an H200.
#   bash profiles/gpu_session.sh [--output DIR] [--seed N] [--rehearse]
# Needs PyTorch with CUDA, Triton and transformers; `python3` (or $PYTHON) must find them. profiles/README.md says more.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m profiles.gpu_session "$@"
