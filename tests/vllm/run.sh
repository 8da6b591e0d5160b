#!/usr/bin/env bash
# Runs the tests against a real vLLM on the CPU; VLLM_VERSION picks another than the default. Skips, saying why,
# where that vLLM cannot be had. An engine has one thread, so two tests run beside each other: each process has half
# of the files in their order, and who is done takes over half of what the other has left. Arguments go to pytest.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$root/.venv-vllm${VLLM_VERSION:+-$VLLM_VERSION}
"$here/setup.sh" ${VLLM_VERSION:+"$VLLM_VERSION"}
case $? in 0) ;; 3) echo "vLLM tests: skipped"; exit 0 ;; *) exit 1 ;; esac
cd "$root" && exec "$venv/bin/python" -m pytest tests/vllm -p no:cacheprovider -n 2 --dist worksteal --timeout 300 --durations=15 "$@"
