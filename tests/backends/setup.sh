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

# Mooncake links these, RDMA or not. Without root their packages are unpacked beside the environment; run.sh then adds
# them to the libraries' path.
libraries=(libibverbs.so.1 libcurl.so.4 libnuma.so.1)
packages=(libibverbs1 libcurl4 libnuma1)
loads() { "$venv/bin/python" -c 'import ctypes, sys; [ctypes.CDLL(name) for name in sys.argv[1:]]' "$@" 2>/dev/null; }
unpacked() { export LD_LIBRARY_PATH=$sysroot/usr/lib/x86_64-linux-gnu:$sysroot/lib/x86_64-linux-gnu:${LD_LIBRARY_PATH:-}; }
if ! loads "${libraries[@]}"; then
    command -v apt-get >/dev/null || cannot "install rdma-core, libcurl and numactl: ${libraries[*]} are missing"
    if [ "$(id -u)" = 0 ]; then
        { apt-get update && apt-get install -y --no-install-recommends "${packages[@]}"; } >/dev/null 2>&1 || true
    fi
    if ! loads "${libraries[@]}" && ! (unpacked && loads "${libraries[@]}"); then
        scratch=$(mktemp -d)
        trap 'rm -rf "$scratch"' EXIT
        (cd "$scratch" && apt-get download "${packages[@]}" libnl-3-200 libnl-route-3-200) >/dev/null 2>&1 ||
            cannot "apt-get can neither install nor fetch ${packages[*]}"
        mkdir -p "$sysroot"
        for package in "$scratch"/*.deb; do dpkg -x "$package" "$sysroot"; done
        (unpacked && loads "${libraries[@]}") || cannot "${libraries[*]} do not load; install ${packages[*]}"
    fi
fi

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
