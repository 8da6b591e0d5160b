#!/usr/bin/env bash
# single.sh MODEL [options of SGLang]: one layerflow, one SGLang. Once SGLang's own cache is empty, the prompt is loaded
# instead of computed.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
port=${PORT:-30000}

run_layerflow
run_sglang "$port"
serving "$port"

ask "$port" "$prompt" 16
saved
flush "$port"
ask "$port" "$prompt" 16
ask "$port" "$prompt And rule 41?" 16

layerflow status --endpoint "$endpoint"
