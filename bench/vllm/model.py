"""The benchmark's model: little compute, much KV, as long contexts of large models have.

24 layers of 8 KV heads of 128 in bfloat16: 96 KiB of KV per token (Llama 3 8B has 128 KiB), in a network small enough
for one CPU core. Weights are random, from a fixed seed; the initializer range is above the usual 0.02, with which the
answer would not depend on the prompt.

Run by vLLM's Python, which has transformers, with ``tests/vllm`` on its path: ``python model.py FOLDER``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

NAME = "kv-heavy"
LAYERS, KV_HEADS, HEAD = 24, 8, 128
VOCABULARY = 2048


def build(folder: Path) -> Path:
    """The model's path under `folder`; appears whole or not at all."""
    import torch  # noqa: PLC0415 - neither is in the environment that measures
    from models import tokenizer  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=16384,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        whole = Path(scratch) / NAME
        model.save_pretrained(whole, safe_serialization=True)
        tokenizer().save_pretrained(whole)
        whole.rename(path)
    return path


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
