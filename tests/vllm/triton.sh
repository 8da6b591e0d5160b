#!/usr/bin/env bash
# triton.sh FOLDER: puts Triton there, for tests that run its kernels in its interpreter (second_runner.py). vLLM's own
# environment stays without it: a vLLM on the CPU that finds Triton takes other ways. Does nothing where it is there
# already. Exits 3, saying why, where it cannot.
set -euo pipefail
folder=$1
version=3.7.1
mkdir -p "$folder"
exec 9>"$folder/.lock"
flock 9
stamp=$folder/.ready-$version
[ -e "$stamp" ] && exit 0
"${PYTHON:-python3}" -m pip --disable-pip-version-check -q install --no-deps --upgrade --target "$folder" "triton==$version" || {
    echo "Triton $version cannot be had here: pip finds it on no index that it reaches" >&2
    exit 3
}
touch "$stamp"
