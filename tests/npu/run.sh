#!/usr/bin/env bash
# Runs the npu tests on the real torch_npu over the CANN emulator. Results are "CANN emulated": the API, the order
# of the calls and the data are real, the device is host memory. Skips, saying why, where that cannot be had.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
skip() { echo "npu tests (CANN emulated): skipped: $1"; exit 0; }
[ "$(uname -sm)" = "Linux x86_64" ] || skip "the emulator is built for Linux on x86-64"
command -v "${CC:-cc}" >/dev/null || skip "no C compiler to build the emulator with"
"$here/setup.sh" || { [ $? = 3 ] && skip "torch_npu cannot be installed here"; exit 1; }
environment=$("$here/emulator/build.sh" "$root/.venv-npu/cann") || exit 1
eval "$environment"
export CANN_EMU_EVENT_DELAY_US=3000 LAYERFLOW_TEST_NPU=1 PYTHONPATH=$root/src
echo "npu tests (CANN emulated)"
cd "$root" && exec .venv-npu/bin/python -m pytest tests/device/test_accelerators.py tests/agent/test_agent_on_accelerator.py -p no:cacheprovider "$@"
