"""models.py FOLDER: tiny models with random weights and adapters of one of them, and the tokens that transformers makes
of one prompt with each.

Weights are far larger than a trained model's, so that equal tokens mean equal caches.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TOKENS = 8
PROMPT = random.Random(5).choices(range(3, 500), k=300)

_COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32", "hidden_act": "silu",
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    },
    # Three layers of gated delta net and one of attention.
    "qwen35": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "rms_norm_eps": 1e-6,
        "full_attention_interval": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "attn_output_gate": True, "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "num_experts": 0, "mamba_ssm_dtype": "float32",
    },
}  # fmt: skip
CONFIGS["llama-other"] = CONFIGS["llama"]
# 64 KiB a token, half of Llama 3.1 8B's 128 KiB.
CONFIGS["llama-wide"] = CONFIGS["llama"] | {"num_hidden_layers": 8, "num_key_value_heads": 8, "head_dim": 128}

FIRST_SEEDS = {"llama-other": 64}
"""What ``llama`` becomes by a weight update begins with another seed than it did."""

ADAPTERS = {"lora-one": 1, "lora-two": 2}
"""Adapters of ``llama``, with the seeds of their weights."""

EAGLE = "llama-eagle"
"""An EAGLE draft model of ``llama``: that model itself over again, as far as EAGLE's has the parts. So it guesses well,
where its cache is right.
"""

RANK, ADAPTED = 8, ("q_proj", "k_proj", "v_proj", "o_proj")


def build(folder: Path) -> None:
    """Write every model and adapter, and ``expected.json``."""
    expected = {}
    for name, own in CONFIGS.items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        config = json.dumps(_COMMON | own, indent=1)
        (place / "config.json").write_text(config)
        # Some weights make one token for ever, which would hide a wrong cache.
        seeds = iter(range(first := FIRST_SEEDS.get(name, 0), first + 64))
        while len(set(expected.setdefault(name, []))) < TOKENS - 2:
            expected[name] = _weights(place, next(seeds))
        (place / "config.json").write_text(config)  # as SGLang reads it; transformers' own has another architecture
    _eagle(folder / EAGLE, folder / "llama")
    for name, seed in ADAPTERS.items():
        expected[name] = _adapter(folder / name, folder / "llama", seed)
    (folder / "expected.json").write_text(json.dumps(expected))


def _weights(place: Path, seed: int) -> list[int]:
    """Write weights; the tokens that follow the prompt with them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place)).float().eval()
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.08)
        model.save_pretrained(place)
        return _tokens(model)


def _eagle(place: Path, base: Path) -> None:
    """Write an EAGLE draft model.

    It computes with the token's embedding alone, not with the model's output. EAGLE's first layer does not normalise
    what it gets; here what that would do is in the layer's weights. At its end it has no norm, which moves no maximum.
    """
    weights = load_file(base / "model.safetensors")
    size = weights["model.embed_tokens.weight"].pow(2).mean().sqrt()
    drafts = {name.removeprefix("model."): weight for name, weight in weights.items() if "layers." in name}
    del drafts["layers.0.input_layernorm.weight"]
    for part in ("q_proj", "k_proj", "v_proj"):
        drafts[f"layers.0.self_attn.{part}.weight"] = drafts[f"layers.0.self_attn.{part}.weight"] / size
    width = _COMMON["hidden_size"]
    drafts["fc.weight"] = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)
    drafts["fc.bias"] = torch.zeros(width)
    place.mkdir(exist_ok=True)
    save_file(drafts, place / "model.safetensors")
    config = _COMMON | CONFIGS["llama"] | {"architectures": ["LlamaForCausalLMEagle"]}
    (place / "config.json").write_text(json.dumps(config, indent=1))


def _adapter(place: Path, base: Path, seed: int) -> list[int]:
    """Write an adapter as peft does; the tokens that follow the prompt with it, merged into its model."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(base).float().eval()
    source, weights = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in ADAPTED:
                out, inner = module.weight.shape
                down, up = (0.2 * torch.randn(size, generator=source) for size in ((RANK, inner), (out, RANK)))
                weights |= {
                    f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up,
                }  # fmt: skip
                module.weight += up @ down
    place.mkdir(exist_ok=True)
    save_file(weights, place / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0,
        "bias": "none", "target_modules": list(ADAPTED), "base_model_name_or_path": str(base),
    }  # fmt: skip
    (place / "adapter_config.json").write_text(json.dumps(config, indent=1))
    return _tokens(model)


def _tokens(model: Any) -> list[int]:
    """What follows the prompt."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return out[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


if __name__ == "__main__":
    build(Path(sys.argv[1]))
