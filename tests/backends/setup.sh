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

[ "$stamp" -nt "$here/setup.sh" ] && [ "$stamp" -nt "$here/requirements.txt" ] && exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || cannot "their wheels are for Linux on x86-64"
[ -x "$venv/bin/python" ] || { echo "run \`make setup\` first" >&2; exit 1; }

# Mooncake links libibverbs, RDMA or not. Without root its packages are unpacked beside the environment; run.sh then
# adds them to the libraries' path.
has_ibverbs() { "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; }
if ! has_ibverbs && [ ! -e "$sysroot/usr/lib/x86_64-linux-gnu/libibverbs.so.1" ]; then
    command -v apt-get >/dev/null || cannot "libibverbs.so.1 is missing; install rdma-core"
    if [ "$(id -u)" = 0 ]; then
        { apt-get update && apt-get install -y --no-install-recommends libibverbs1; } >/dev/null 2>&1 || true
    fi
    if ! has_ibverbs; then
        scratch=$(mktemp -d)
        trap 'rm -rf "$scratch"' EXIT
        (cd "$scratch" && apt-get download libibverbs1 libnl-3-200 libnl-route-3-200) >/dev/null 2>&1 ||
            cannot "libibverbs.so.1 is missing, and apt-get cannot fetch libibverbs1"
        mkdir -p "$sysroot"
        for package in "$scratch"/*.deb; do dpkg -x "$package" "$sysroot"; done
    fi
fi

"$venv/bin/python" -m pip install --disable-pip-version-check -q -r "$here/requirements.txt" ||
    cannot "pip finds no wheels for this Python"
touch "$stamp"
