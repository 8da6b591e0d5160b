#!/usr/bin/env bash
# A real vLLM as for tests/vllm, a router that somebody else wrote, and the libraries of the links between servers. Exits
# 3, saying why, where vLLM cannot be had.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
"$here/../vllm/setup.sh"
venv=$root/.venv-vllm
pinned=$(cat "$here/requirements.txt" "$here/requirements-links.txt")
[ -f "$venv/.pd" ] && [ "$(cat "$venv/.pd")" = "$pinned" ] && exit 0
"$venv/bin/python" -m pip --disable-pip-version-check -q install --no-deps -r "$here/requirements.txt" ||
    { echo "the pinned vllm-router cannot be installed; the tests with it are skipped" >&2; exit 0; }
"$venv/bin/python" -m pip --disable-pip-version-check -q install --no-deps -r "$here/requirements-links.txt" ||
    { echo "the links' libraries cannot be installed; the tests of those links are skipped" >&2; exit 0; }
echo "$pinned" >"$venv/.pd"
