#!/usr/bin/env bash
# What bench/vllm needs, and NIXL in vLLM's environment. Without NIXL the benchmark leaves its part out.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
"$root/bench/vllm/setup.sh"
python=$root/.venv-vllm/bin/python
"$python" -c 'import nixl' 2>/dev/null ||
    "$python" -m pip --disable-pip-version-check -q install --no-deps -r "$here/requirements.txt" ||
    echo "pip finds no nixl: the part nixl is left out" >&2
