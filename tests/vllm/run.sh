#!/usr/bin/env bash
# Runs the tests against a real vLLM on the CPU; VLLM_VERSION picks another than the default. Without arguments, some of
# them run with the newest release too. Skips, saying why, where a vLLM cannot be had. An engine has one thread, so two
# tests run beside each other: each process has half of the files in their order, and who is done takes over half of what
# the other has left. Arguments go to pytest.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
newest=0.33.0
at_newest=(
    tests/vllm/test_sleep.py
    tests/vllm/test_reset.py::test_pausing_as_reinforcement_learning_does
    "tests/vllm/test_step_loads.py::test_a_load_that_fails_in_the_step_is_taken_back[gptoss-True]"
)

run_with() {
    local version=$1 venv=$root/.venv-vllm${1:+-$1}
    shift
    "$here/setup.sh" ${version:+"$version"}
    case $? in 0) ;; 3) echo "vLLM tests${version:+ with $version}: skipped"; return 0 ;; *) return 1 ;; esac
    (cd "$root" && "$venv/bin/python" -m pytest -p no:cacheprovider -n 2 --dist worksteal --timeout 300 --durations=15 "$@")
}

if [ -n "${VLLM_VERSION:-}" ] || [ $# -gt 0 ]; then
    run_with "${VLLM_VERSION:-}" tests/vllm "$@"
    exit
fi
run_with "" tests/vllm
default=$?
run_with "$newest" "${at_newest[@]}"
exit $((default | $?))
