#!/usr/bin/env bash
# router.sh MODEL [options of vLLM]: the same engines behind vllm-router (pip install vllm-router), which asks one after
# the other: what the prefill engine answers goes to the decode engine. ORDER=concurrent asks both at once; the router
# then wants to know the prefill engine by its bootstrap port.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
prefill=${PORT:-8100} decode=${PORT2:-8200} router=${PROXY_PORT:-8000} bootstrap=${BOOTSTRAP_PORT:-8998}

run_layerflow
run_engine "$prefill" kv_producer '{"bootstrap_port": '"$bootstrap"'}'
run_engine "$decode" kv_consumer '{"deadline_s": 60}'
serving "$prefill" "$decode"
if [ "${ORDER:-}" = concurrent ]; then
    convention=(--prefill "http://127.0.0.1:$prefill" "$bootstrap" --kv-connector mooncake)
else
    convention=(--prefill "http://127.0.0.1:$prefill" --kv-connector nixl)
fi
start router vllm-router --vllm-pd-disaggregation "${convention[@]}" --decode "http://127.0.0.1:$decode" \
    --host 127.0.0.1 --port "$router" --prometheus-port "${ROUTER_METRICS_PORT:-29000}"
until_up router fetch "http://127.0.0.1:$router/health"

ask "$router" "$prompt" 16
loaded "$decode"
