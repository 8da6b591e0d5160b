#!/usr/bin/env bash
# setup.sh: the benchmark's environments and model: .venv-vllm of the tests, beside it .venv-lmcache, the same vLLM with
# LMCache, and the model that `model.py` builds. Does nothing where they are there already. Exits 3, saying why, where
# there can be no vLLM; without LMCache the benchmark runs with what is left.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
vllm=$root/.venv-vllm
venv=$root/.venv-lmcache
models=$vllm/bench-models
without() { rm -f "$venv/.ready"; echo "no LMCache here: $1; the benchmark leaves it out" >&2; exit 0; }

"$root/tests/vllm/setup.sh"
if [ ! "$models/.ready" -nt "$here/model.py" ]; then
    rm -rf "$models"
    PYTHONPATH=$root/tests/vllm "$vllm/bin/python" "$here/model.py" "$models"
    touch "$models/.ready"
fi

fresh() {
    local input
    for input in "$vllm/.ready" "$here/setup.sh" "$here/requirements-lmcache.txt"; do
        [ "$venv/.ready" -nt "$input" ] || return 1
    done
}
fresh && exit 0

# Linked, not installed again: 2.5 GB and two minutes. pip and sed replace files, so the first environment keeps its own.
rm -rf "$venv"
cp -al "$vllm" "$venv"
rm -rf "$venv/.ready" "$venv/models" "$venv/bench-models"
"$venv/bin/python" -m pip --disable-pip-version-check -q install --no-deps -r "$here/requirements-lmcache.txt" ||
    without "pip cannot install $here/requirements-lmcache.txt"

# LMCache imports numba before vLLM scans all modules for Triton kernels. A ctypes function that the scan meets there
# has a __dict__ that is no dict, and vLLM 0.32.0 stops with an AttributeError.
dispatcher=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm/triton_utils/dispatcher.py
sed -i 's/^\( *\)if hasattr(value, "__dict__"):$/\1if isinstance(getattr(value, "__dict__", None), dict):/' "$dispatcher"
grep -q 'isinstance(getattr(value, "__dict__", None), dict)' "$dispatcher" ||
    without "vLLM's dispatcher.py is not the one that the fix is for"
# Its help leaves the server's options out where one of its imports is missing.
"$venv/bin/lmcache" server --help 2>/dev/null | grep -e --shm-name >/dev/null || without "its server lacks an import"
touch "$venv/.ready"
