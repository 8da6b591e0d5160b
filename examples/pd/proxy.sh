#!/usr/bin/env bash
# proxy.sh MODEL [options of vLLM]: one vLLM prefills, another decodes, `layerflow proxy` is in front of both, and
# `layerflow run` between them. The proxy asks both at once: the decode engine follows the prefill engine's saves.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
prefill=${PORT:-8100} decode=${PORT2:-8200} proxy=${PROXY_PORT:-8000}

run_layerflow
run_engine "$prefill" kv_producer '{}'
run_engine "$decode" kv_consumer '{"deadline_s": 60}'
serving "$prefill" "$decode"
# Prompts of up to 256 tokens would go to the decode engine alone.
start proxy layerflow proxy --prefill "http://127.0.0.1:$prefill" --decode "http://127.0.0.1:$decode" \
    --order "${ORDER:-concurrent}" --host 127.0.0.1 --port "$proxy" --set proxy.short_prompt_tokens=0
until_up proxy fetch "http://127.0.0.1:$proxy/health"

ask "$proxy" "$prompt" 16
loaded "$decode"
