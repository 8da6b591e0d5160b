# What the examples share; sourced, not run. Everything started here is stopped when the script ends.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../vllm/common.sh"

# run_engine PORT ROLE PD: a prefill (kv_producer) or decode engine (kv_consumer) on this machine's layerflow server.
# PD: the object `pd` of the connector's extra config. vLLM's own prefix cache is off so that what you see is layerflow's;
# leave it on in production.
run_engine() {
    start "vllm-$1" python3 -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name model \
        --host 127.0.0.1 --port "$1" --no-enable-prefix-caching --kv-transfer-config '{
            "kv_connector": "LayerflowConnector", "kv_connector_module_path": "layerflow.connectors.vllm",
            "kv_role": "'"$2"'", "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"endpoint": "'"$endpoint"'", "pd": '"$3"'}}' "${options[@]}"
}

# loaded PORT: prompt tokens that this engine has loaded instead of computing them, by vLLM's own count.
loaded() {
    python3 - "$1" <<'PYTHON'
import re, sys, urllib.request

text = urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics", timeout=10).read().decode()
found = re.findall(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", text, re.M)
print(f"the decode engine has loaded {sum(map(float, found)):.0f} prompt tokens")
PYTHON
}
