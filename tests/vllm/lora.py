"""LoRA adapters with random weights for the tests' Llama model, in peft's format."""

from __future__ import annotations

import json
from pathlib import Path


def adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter of :func:`models.llama` in peft's format, the same for the same seed; replaces what is there."""
    import torch
    from safetensors.torch import save_file

    source = torch.Generator().manual_seed(seed)
    rank, hidden, outputs = 8, 256, {"q_proj": 256, "k_proj": 64, "v_proj": 64}
    weights = {}
    for layer in range(8):
        for module, width in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=source) * 0.05
            weights[f"{name}.lora_B.weight"] = torch.randn(width, rank, generator=source) * 0.05
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "bias": "none"}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": sorted(outputs)}))
    return folder
