#!/usr/bin/env bash
# shared.sh MODEL [options of vLLM]: one layerflow, two vLLMs. What the first has computed, the second loads.
# Two engines on one GPU need room: shared.sh MODEL --gpu-memory-utilization 0.4
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
first=${PORT:-8000} second=${PORT2:-8001}

run_layerflow
run_vllm "$first" kv_both
run_vllm "$second" kv_both
serving "$first" "$second"

ask "$first" "$prompt" 16
saved
ask "$second" "$prompt" 16
