# What the examples share; sourced, not run. Everything started here is stopped when the script ends.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
model=${1:?usage: $0 MODEL [options of SGLang]}
options=("${@:2}")
scratch=$(mktemp -d)
endpoint=ipc://$scratch/control
logs=${LOGS:-$scratch}

# CPU=1: what an SGLang without a GPU needs. It is given token ids, so that a model without a tokenizer will do.
if [ -n "${CPU:-}" ]; then
    export SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
    options=(--device cpu --attention-backend torch_native --dtype float32 --skip-tokenizer-init
        --max-total-tokens 8192 --context-length 4096 "${options[@]}")
fi

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

# run_sglang PORT. Options that follow the model come last, so that they win: --page-size 16, --tp 2.
run_sglang() {
    start "sglang-$1" sglang serve --model-path "$model" --host 127.0.0.1 --port "$1" \
        --page-size 64 --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic \
        --unified-cache-external-linker-config '{
            "linker": "LayerflowLinker", "linker_module_path": "layerflow.connectors.sglang",
            "linker_extra_config": {"endpoint": "'"$endpoint"'"}}' "${options[@]}"
}

# serving PORT...: wait until these servers answer.
serving() {
    local port
    for port in "$@"; do until_up "sglang-$port" fetch "http://127.0.0.1:$port/health"; done
}

fetch() {
    python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())' "$1"
}

# flush PORT: empties SGLang's own cache, so that what is cached afterwards is in layerflow's pool alone.
flush() {
    python3 -c 'import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[1], method="POST"), timeout=60)' \
        "http://127.0.0.1:$1/flush_cache"
}

# ask PORT PROMPT TOKENS: prints how many of the prompt's tokens were cached, where, and the answer.
ask() {
    python3 - "${CPU:-}" "$@" <<'PYTHON'
import json, sys, urllib.request

ids, port, prompt, tokens = sys.argv[1:]
given = {"input_ids": [3 + byte for byte in prompt.encode()]} if ids else {"text": prompt}
body = given | {"sampling_params": {"temperature": 0, "max_new_tokens": int(tokens)}}
url = f"http://127.0.0.1:{port}/generate"
request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=600))
meta = answer["meta_info"]
where = meta.get("cached_tokens_details") or {}
loaded, own = where.get("host", 0), where.get("device", 0)
print(f"port {port}: of {meta['prompt_tokens']} prompt tokens {loaded} from layerflow, {own} of SGLang's own cache; "
      f"{json.dumps(answer['output_ids'] if ids else answer['text'])}")
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
