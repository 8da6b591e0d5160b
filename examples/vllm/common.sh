# What the examples share; sourced, not run. Everything started here is stopped when the script ends.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
model=${1:?usage: $0 MODEL [options of vLLM]}
options=("${@:2}")
scratch=$(mktemp -d)
endpoint=ipc://$scratch/control
logs=${LOGS:-$scratch}

declare -A children=()
stop() {
    trap - EXIT
    kill "${children[@]}" 2>/dev/null && wait 2>/dev/null
    rm -rf "$scratch"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# start NAME COMMAND...: in the background; its output goes to NAME.log.
start() {
    echo "starting $1"
    "${@:2}" >"$logs/$1.log" 2>&1 &
    children[$1]=$!
}

# until_up NAME COMMAND...: wait until the command succeeds; give up when what was started as NAME has died.
until_up() {
    until "${@:2}" >/dev/null 2>&1; do
        kill -0 "${children[$1]}" 2>/dev/null || { tail -n 20 "$logs/$1.log" >&2; exit 1; }
        sleep 0.5
    done
}

run_layerflow() {
    start layerflow layerflow run --config "$here/layerflow.toml" --endpoint "$endpoint" --http-port "${HTTP_PORT:-9464}"
    until_up layerflow layerflow status --endpoint "$endpoint"
}

# run_vllm PORT ROLE: kv_both, kv_producer (saves) or kv_consumer (loads). vLLM's own prefix cache is off, so that the
# cached tokens you see are layerflow's; leave it on in production: layerflow serves what it does not have.
run_vllm() {
    start "vllm-$1" python3 -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name model \
        --host 127.0.0.1 --port "$1" --no-enable-prefix-caching --enable-prompt-tokens-details --kv-transfer-config '{
            "kv_connector": "LayerflowConnector", "kv_connector_module_path": "layerflow.connectors.vllm",
            "kv_role": "'"$2"'", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"endpoint": "'"$endpoint"'", "mode": "layerwise"}}' "${options[@]}"
}

# serving PORT...: wait until these vLLMs answer.
serving() {
    local port
    for port in "$@"; do until_up "vllm-$port" fetch "http://127.0.0.1:$port/health"; done
}

fetch() {
    python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())' "$1"
}

# ask PORT PROMPT TOKENS: prints how many of the prompt's tokens were cached, and the answer.
ask() {
    python3 - "$@" <<'PYTHON'
import json, sys, urllib.request

port, prompt, tokens = sys.argv[1:]
body = {"model": "model", "prompt": prompt, "max_tokens": int(tokens), "temperature": 0}
url = f"http://127.0.0.1:{port}/v1/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=600))
usage = answer["usage"]
cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
print(f"port {port}: {cached} of {usage['prompt_tokens']} prompt tokens cached; {json.dumps(answer['choices'][0]['text'])}")
PYTHON
}

# Saves go on behind an answer; this returns when they have ended.
saved() {
    local status
    while status=$(layerflow status --endpoint "$endpoint" --json) || exit; do
        python3 -c '
import json, sys
status = json.loads(sys.argv[1])
sys.exit(bool(status["flow"]["steps"] or status["pool"]["half_written"]))' "$status" && return
        sleep 0.1
    done
}

prompt=$(printf 'Rule %s: every rule of this house is numbered, and a guest reads all of them.\n' $(seq 1 40))
