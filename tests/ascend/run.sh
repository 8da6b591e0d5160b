#!/usr/bin/env bash
# Runs vLLM-Ascend's own engine over the CANN emulator, its kernels' arithmetic on the host. Results are "CANN emulated":
# engine, scheduler, worker, attention and their hooks are real, the device and its kernels are not. Skips, saying why,
# where that cannot be had. Arguments go to pytest.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
skip() { echo "vLLM-Ascend tests (CANN emulated): skipped${1:+: $1}"; exit 0; }
command -v "${CC:-cc}" >/dev/null || skip "no C compiler to build the emulator with"
"$here/setup.sh"
case $? in 0) ;; 3) skip ;; *) exit 1 ;; esac
venv=$root/.venv-ascend
environment=$("$root/tests/npu/emulator/build.sh" "$venv/cann") || exit 1
eval "$environment"
export PYTHONPATH=$venv/vllm-ascend:$root/tests/vllm:$root/testing
echo "vLLM-Ascend tests (CANN emulated)"
cd "$root" && exec "$venv/bin/python" -m pytest -p no:cacheprovider -n 2 --dist loadgroup --timeout 600 --durations=10 \
    tests/ascend "$@"
