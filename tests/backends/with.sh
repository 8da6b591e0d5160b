#!/usr/bin/env bash
# Runs a command that needs the real backends' packages: installs them, and lets it find their libraries.
#   tests/backends/with.sh .venv/bin/layerflow demo --pool mooncake
# Exits 3, saying why, where they cannot be had.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
[ -f "$root/.venv/.backends" ] || echo "the packages of the backends go into .venv, which takes some minutes, once"
"$here/setup.sh"
source "$root/tests/libraries.sh"
find_libraries "$root/.venv/sysroot"
exec "$@"
