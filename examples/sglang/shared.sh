#!/usr/bin/env bash
# shared.sh MODEL [options of SGLang]: one layerflow, two SGLangs. What the first has computed, the second loads.
# Two engines on one GPU need room: shared.sh MODEL --mem-fraction-static 0.4
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
first=${PORT:-30000} second=${PORT2:-30001}

run_layerflow
run_sglang "$first"
run_sglang "$second"
serving "$first" "$second"

ask "$first" "$prompt" 16
saved
ask "$second" "$prompt" 16
