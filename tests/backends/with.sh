#!/usr/bin/env bash
# Runs a command that needs the real backends' packages: installs them, and lets it find their libraries.
#   tests/backends/with.sh .venv/bin/layerflow demo --pool mooncake
# Exits 3, saying why, where they cannot be had.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
[ -f "$root/.venv/.backends" ] || echo "the packages of the backends go into .venv, which takes some minutes, once"
"$here/setup.sh"
for folder in usr/lib lib; do
    libraries=$root/.venv/sysroot/$folder/x86_64-linux-gnu
    if [ -d "$libraries" ]; then export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}; fi
done
exec "$@"
