#!/usr/bin/env bash
# Makes .venv-npu: torch and torch_npu of one version, memcache's packages, layerflow, by whose entry points backends are
# found, and what its device path needs.
# Does nothing where it is there already. Exits 3 where the wheels cannot be installed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$root/.venv-npu
[ "$venv/.ready" -nt "$here/setup.sh" ] && [ "$venv/.ready" -nt "$root/pyproject.toml" ] && exit 0
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
echo '*' >"$venv/.gitignore"
if ! "$venv/bin/python" -m pip install --disable-pip-version-check -q -c "$root/constraints.txt" \
    torch==2.13.0 torch_npu==2.13.0 memcache_hybrid==1.3.0 memfabric_hybrid==1.3.0 \
    numpy pyyaml pytest pytest-asyncio pytest-rerunfailures pytest-timeout \
    anyio cryptography httpx msgspec prometheus-client pydantic pydantic-settings pynacl pyzmq rich starlette structlog typer uvicorn watchfiles xxhash; then
    echo "the wheels of torch_npu and memcache cannot be installed here" >&2
    exit 3
fi
"$venv/bin/python" -m pip install --disable-pip-version-check -q --no-deps -e "$root"
touch "$venv/.ready"
