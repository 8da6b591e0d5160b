#!/usr/bin/env bash
# Builds the CANN emulator into DIR and prints the environment that activates it.
#   eval "$(tests/npu/emulator/build.sh DIR)"
# memcache_hybrid needs, beyond that, LD_PRELOAD=DIR/lib64/libdriver_version.so.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
mkdir -p "$out"/{lib64,runtime,compiler,opp,driver}
if [ -n "$(find "$here" -newer "$out/.built" 2>&1)" ]; then
    echo 'Innerversion=V100R001C23SPC005B219' >"$out/driver/version.info"
    ${CC:-cc} -O2 -Wall -Wextra -shared -fPIC -o "$out/lib64/libascendcl.so" "$here/cann.c" -lpthread
    ${CC:-cc} -O2 -Wall -Wextra -U_FORTIFY_SOURCE -shared -fPIC \
        -o "$out/lib64/libdriver_version.so" "$here/driver_version.c" -ldl
    for lib in ascend_hal ra tsdclient hccl hccl_plf hcomm runtime acl_op_compiler ge_runner graph acl_tdt_channel; do
        cp -f "$out/lib64/libascendcl.so" "$out/lib64/lib$lib.so"
    done
    touch "$out/.built"
fi
cat <<END
export ASCEND_HOME_PATH=$out ASCEND_OPP_PATH=$out/opp CANN_EMU_VERSION_INFO=$out/driver/version.info
export LD_LIBRARY_PATH=$out/lib64\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH} TORCH_DEVICE_BACKEND_AUTOLOAD=0
END
