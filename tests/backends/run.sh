#!/usr/bin/env bash
# Runs the tests against the real backends, with their servers on 127.0.0.1, and those of peers over links that need
# packages. Skips, saying why, where they cannot be had. Arguments go to pytest.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
"$here/setup.sh"
case $? in 0) ;; 3) echo "backend tests: skipped"; exit 0 ;; *) exit 1 ;; esac
export LAYERFLOW_TEST_BACKENDS=1
cd "$root" && exec "$here/with.sh" .venv/bin/python -m pytest tests/backends tests/peers -n 2 --dist loadgroup -p no:cacheprovider \
    --durations=10 "$@"
