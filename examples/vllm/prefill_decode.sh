#!/usr/bin/env bash
# prefill_decode.sh MODEL [options of vLLM]: one vLLM computes prompts and saves them, another loads them and decodes.
# Here both are on one machine and meet in layerflow's pool.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
producer=${PORT:-8000} consumer=${PORT2:-8001}

run_layerflow
run_vllm "$producer" kv_producer
run_vllm "$consumer" kv_consumer
serving "$producer" "$consumer"

ask "$producer" "$prompt" 1 # one token: the prompt is what is wanted
saved
ask "$consumer" "$prompt" 16
