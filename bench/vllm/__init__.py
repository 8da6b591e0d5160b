"""layerflow in a real vLLM, beside vLLM's own prefix cache and LMCache's server: ``python -m bench.vllm``."""
