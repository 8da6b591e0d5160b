#!/usr/bin/env bash
# Runs the tests against a real SGLang on the CPU. Skips, saying why, where one cannot be had. Arguments go to pytest.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
"$here/setup.sh"
case $? in 0) ;; 3) echo "SGLang tests: skipped"; exit 0 ;; *) exit 1 ;; esac
source "$root/tests/libraries.sh"
find_libraries "$root/.venv-sglang/sysroot"
cd "$root" && .venv-sglang/bin/python -m pytest -p no:cacheprovider -n 0 --timeout 600 --durations=15 tests/sglang "$@"
