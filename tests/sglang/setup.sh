#!/usr/bin/env bash
# setup.sh: makes .venv-sglang with a real, unmodified SGLang on the CPU, stand-ins for the kernels that it has for no
# such machine, layerflow from this tree, and the tests' tiny models. Does nothing where it is there already. Exits 3,
# saying why, where it cannot.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
pins=$here/requirements-0.5.23.txt
venv=$root/.venv-sglang
cannot() { echo "a real SGLang cannot be installed here: $1" >&2; exit 3; }

stamp=$venv/.ready
fresh() {
    local input
    for input in "$here"/{setup.sh,requirements-contenders.txt,models.py,kernels/*,kernels/sgl_kernel/*.py} "$pins" "$root"/{constraints.txt,pyproject.toml,src/layerflow/ops/_copy.c}; do
        [ "$stamp" -nt "$input" ] || return 1
    done
}
fresh && exit 0

python=${PYTHON:-python3}
[ "$(uname -sm)" = "Linux x86_64" ] || cannot "its wheels are for Linux on x86-64 only"
command -v "$python" >/dev/null || cannot "there is no $python"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || cannot "$python is not 3.11, for which the wheels are pinned"
command -v "${CC:-cc}" >/dev/null || cannot "layerflow's copy extension needs a C compiler"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo '*' >"$venv/.gitignore.new" && mv "$venv/.gitignore.new" "$venv/.gitignore"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }

# Each package is pinned and nothing else is wanted: what SGLang declares would bring CUDA builds that do not load here.
torch=$(grep '^torch==' "$pins")
pip install --no-deps "$torch" ||
    pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch" ||
    cannot "$torch is on no index that pip reaches"
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
grep -v '^torch==' "$pins" >"$wanted"
grep -E '^(execnet|iniconfig|pluggy|pytest|pytest-asyncio|PyNaCl|pytest-rerunfailures|pytest-timeout|pytest-xdist)==' "$root/constraints.txt" >>"$wanted"
pip install --no-deps -r "$wanted" || cannot "pip finds not all of $pins"

# What is measured or tried beside layerflow. Without one of them its tests are skipped.
source "$root/tests/libraries.sh"
if why=$(provide_libraries "$venv/bin/python" "$venv/sysroot"); then
    pip install --no-deps -r "$here/requirements-contenders.txt" ||
        echo "pip finds not all of $here/requirements-contenders.txt: the tests of what is missing are skipped" >&2
else
    pip install --no-deps "$(grep '^sglang-router==' "$here/requirements-contenders.txt")" ||
        echo "pip finds no sglang-router: its test is skipped" >&2
    echo "no Mooncake, its test is skipped: $why" >&2
fi

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$site/sgl_kernel"
cp -r "$here"/kernels/* "$site/"
info=$site/sglang_cpu_plugin-0.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: sglang-cpu-plugin\nVersion: 0\n' >"$info/METADATA"
printf '[sglang.srt.plugins]\ncpu = cpu_plugin:register\n' >"$info/entry_points.txt"
echo stand-in >"$info/INSTALLER"

pip install --no-deps -e "$root"
"$venv/bin/python" - <<'PYTHON' || cannot "layerflow's copy extension did not build"
import sys
from layerflow.ops.copier import copy_native
sys.exit(copy_native is None)
PYTHON
# SGLang compiles its page hash in the first process that needs it, and others beside it wait.
TORCH_EXTENSIONS_DIR=$venv/extensions SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -c \
    'from array import array; from sglang.srt.mem_cache.utils import get_hash_str; get_hash_str(array("q", [1]), None, page_size=1)' \
    >/dev/null 2>&1 || true
rm -rf "$venv/models"
HF_HUB_OFFLINE=1 "$venv/bin/python" "$here/models.py" "$venv/models" >/dev/null 2>&1 || { echo "the tests' models could not be built" >&2; exit 1; }
touch "$stamp"
