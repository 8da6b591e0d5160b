#!/usr/bin/env bash
# single.sh MODEL [options of vLLM]: one layerflow, one vLLM. The second time, the prompt is loaded instead of computed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
port=${PORT:-8000}

run_layerflow
run_vllm "$port" kv_both
serving "$port"

ask "$port" "$prompt" 16
saved
ask "$port" "$prompt" 16
ask "$port" "$prompt And rule 41?" 16

layerflow status --endpoint "$endpoint"
fetch "http://127.0.0.1:$port/metrics" | grep -E '^layerflow_vllm_(load|save)_bytes_total'
