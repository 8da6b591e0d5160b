#!/usr/bin/env bash
# master.sh [HOST [PORT [HTTP_PORT]]] [options of mooncake_master]: one for all machines of a store. It keeps the
# directory of objects in memory, and no object. Runs in the foreground.
set -euo pipefail
defaults=(127.0.0.1 50051 9003)
for at in 0 1 2; do
    [[ ${1:---} == --* ]] && break
    defaults[at]=$1
    shift
done
# Both addresses: by default it listens on all of them, and it asks nobody who they are.
exec mooncake_master --rpc_address="${defaults[0]}" --rpc_port="${defaults[1]}" \
    --metrics_host="${defaults[0]}" --metrics_port="${defaults[2]}" --logtostderr "$@"
