#!/usr/bin/env bash
# Puts the real backends' packages into .venv, and what they need of the system. Does nothing where they are there
# already. Exits 3, saying why, where they cannot be had.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$root/.venv
stamp=$venv/.backends
sysroot=$venv/sysroot
cannot() { echo "the backends cannot be installed here: $1" >&2; exit 3; }

[ "$stamp" -nt "$here/setup.sh" ] && [ "$stamp" -nt "$here/requirements.txt" ] && [ "$stamp" -nt "$root/tests/libraries.sh" ] && exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || cannot "their wheels are for Linux on x86-64"
[ -x "$venv/bin/python" ] || { echo "run \`make setup\` first" >&2; exit 1; }

source "$root/tests/libraries.sh"
why=$(provide_libraries "$venv/bin/python" "$sysroot") || cannot "$why"

# Redis's tests need a server; without one they are skipped, saying so.
if ! command -v redis-server >/dev/null && ! command -v valkey-server >/dev/null && [ "$(id -u)" = 0 ] &&
    command -v apt-get >/dev/null; then
    { apt-get update && apt-get install -y --no-install-recommends redis-server; } >/dev/null 2>&1 || true
fi

"$venv/bin/python" -m pip install --disable-pip-version-check -q -r "$here/requirements.txt" ||
    cannot "pip finds no wheels for this Python"
# As it says itself NIXL needs both CUDA versions of its library; here one will do. Without it its links are skipped.
"$venv/bin/python" -m pip install --disable-pip-version-check -q --no-deps nixl==1.5.1 nixl-cu12==1.5.1 ||
    echo "pip finds no nixl: the tests of peers over it are skipped" >&2
touch "$stamp"
