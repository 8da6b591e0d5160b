#!/usr/bin/env bash
# Runs the npu tests on the real torch_npu over the CANN emulator. Results are "CANN emulated": the API, the order
# of the calls and the data are real, the device is host memory. Skips, saying why, where that cannot be had.
# With "past-the-arena" first: those of memcache's direct lane instead, which take a MetaService and a minute.
set -uo pipefail
kind=device
[ "${1:-}" = past-the-arena ] && kind=$1 && shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
skip() { echo "npu tests (CANN emulated): skipped: $1"; exit 0; }
[ "$(uname -sm)" = "Linux x86_64" ] || skip "the emulator is built for Linux on x86-64"
command -v "${CC:-cc}" >/dev/null || skip "no C compiler to build the emulator with"
[ -f "$root/.venv-npu/.ready" ] || echo "npu tests: torch_npu goes into .venv-npu, which takes some minutes, once"
"$here/setup.sh" || { [ $? = 3 ] && skip "torch_npu cannot be installed here"; exit 1; }
environment=$("$here/emulator/build.sh" "$root/.venv-npu/cann") || exit 1
eval "$environment"
export CANN_EMU_EVENT_DELAY_US=3000 LAYERFLOW_TEST_NPU=1 PYTHONPATH=$root/src:$root/cli
pytest=("$root/.venv-npu/bin/python" -m pytest -p no:cacheprovider)
cd "$root" || exit 1

if [ "$kind" = device ]; then
    echo "npu tests (CANN emulated)"
    exec "${pytest[@]}" tests/device/test_accelerators.py tests/agent/test_agent_on_accelerator.py \
        tests/npu/test_ascend_hooks.py tests/npu/test_npu_demo.py "$@"
fi

# memcache keeps a lock in /tmp, one for the machine, and its memory in /dev/shm under names that two pools would share:
# a mount namespace of their own where that is permitted. The clone stays where it is, be it below /tmp.
export root
apart() {
    local mounts='mount --bind "$root" /mnt && mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm &&
        mkdir -p "$root" && mount --bind /mnt "$root" && cd "$root" && exec "$@"'
    if unshare --mount true 2>/dev/null; then
        unshare --mount --propagation private sh -c "$mounts" -- "$@"
    elif unshare --user --map-root-user --mount true 2>/dev/null; then
        unshare --user --map-root-user --mount --propagation private sh -c "$mounts" -- "$@"
    else
        "$@"
    fi
}
echo "npu tests past the arena (CANN emulated)"
apart "${pytest[@]}" tests/npu/test_direct.py "$@"
