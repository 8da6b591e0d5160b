#!/usr/bin/env bash
# Runs the tests against the real backends, with their servers on 127.0.0.1, and those of peers over links that need
# packages. Skips, saying why, where they cannot be had. Arguments go to pytest.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
"$here/setup.sh"
case $? in 0) ;; 3) echo "backend tests: skipped"; exit 0 ;; *) exit 1 ;; esac
cd "$root" || exit 1
tests() { LAYERFLOW_TEST_BACKENDS=$1 "$here/with.sh" .venv/bin/python -m pytest -p no:cacheprovider --durations=10 "${@:2}"; }

# They wait for servers more than they compute. memcache's have one process, as a machine can have one MetaService; the
# others' start servers of their own, so that two run beside each other.
memcache=$(mktemp)
tests memcache tests/backends "$@" >"$memcache" 2>&1 &
beside=$!
trap 'kill $beside 2>/dev/null; rm -f "$memcache"' EXIT
tests others tests/backends tests/peers -n 2 --dist worksteal "$@"
others=$?
echo "tests of memcache:"
wait $beside
memcaches=$?
cat "$memcache"
nothing=5 # pytest's exit code where the arguments pick none
for code in $others $memcaches; do [ "$code" = 0 ] || [ "$code" = $nothing ] || exit "$code"; done
[ "$others" = 0 ] || [ "$memcaches" = 0 ]
