#!/usr/bin/env bash
# Runs the tests of prefill and decode apart against real vLLMs on the CPU. Skips, saying why, where vLLM cannot be had.
# Arguments go to pytest.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
"$here/setup.sh"
case $? in 0) ;; 3) echo "prefill/decode tests: skipped"; exit 0 ;; *) exit 1 ;; esac
cd "$root" && exec "$root/.venv-vllm/bin/python" -m pytest tests/pd -p no:cacheprovider --timeout 300 --durations=15 "$@"
