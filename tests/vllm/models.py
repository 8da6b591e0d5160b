"""Tiny models with random weights, one per cache layout that vLLM knows, built once into a folder.

Seeds are fixed, so every machine builds the same weights. The initializer ranges are far above the usual 0.02: with
that one a random model repeats one token whatever it read, and equal tokens would prove nothing. Weights are float32
except where vLLM's kernels want bfloat16.

Run as a program to build every model: ``python models.py FOLDER``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 2048
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 256, "bos_token_id": 1, "eos_token_id": 2}
COMMON |= {"max_position_embeddings": 4096, "initializer_range": 0.08, "tie_word_embeddings": False}
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
SEEING = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
"""Tokens of models that see, behind the special ones."""
IMAGE = len(SPECIAL)
"""Stands for an image, and for each of its places."""
EYES = {"image_size": 112, "patch_size": 14, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
EYES |= {"num_attention_heads": 2}
PLACES = (EYES["image_size"] // EYES["patch_size"]) ** 2
"""Of an image; three more tokens stand around them."""


def llama() -> Any:
    """Full attention with grouped queries: 8 layers, 2 KV heads of 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    return LlamaForCausalLM(LlamaConfig(**COMMON, **heads, intermediate_size=688, num_hidden_layers=8))


def mla() -> Any:
    """DeepSeek-V2's latent attention: one plane of 512 + 64 values a token; its layers are dense."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    latent = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "qk_nope_head_dim": 128, "v_head_dim": 128}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 4}
    groups = {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 128}
    sizes = {"intermediate_size": 512, "num_hidden_layers": 4}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**COMMON, **latent, **heads, **experts, **groups, **sizes))


def deepseek32() -> Any:
    """DeepSeek-V3.2's sparse attention: latent attention over the 256 tokens that an indexer with a cache of its own
    finds; its layers are dense."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    latent = {"kv_lora_rank": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "qk_nope_head_dim": 128, "v_head_dim": 128}
    index = {"index_topk": 256, "index_n_heads": 4, "index_head_dim": 128}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 4}
    groups = {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 128}
    sizes = {"intermediate_size": 512, "num_hidden_layers": 4}
    return DeepseekV32ForCausalLM(DeepseekV32Config(**COMMON, **latent, **heads, **index, **experts, **groups, **sizes))


def gemma3() -> Any:
    """Two sliding layers (window 64) to one full: vLLM makes three KV cache groups of it."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_window": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "query_pre_attn_scalar": 64}
    sizes = {"intermediate_size": 512, "num_hidden_layers": 6}
    return Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, **kinds, **heads, **sizes))


def gptoss() -> Any:
    """Sliding (window 64) and full layers in turn, attention sinks, experts; bfloat16."""
    from transformers import GptOssConfig, GptOssForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 64}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    sizes = {"intermediate_size": 256, "num_hidden_layers": 4, "pad_token_id": 0}
    return GptOssForCausalLM(GptOssConfig(**COMMON, **heads, **experts, **sizes)).bfloat16()


def qwen3moe() -> Any:
    """Full attention under a mixture of experts; bfloat16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    sizes = {"intermediate_size": 512, "num_hidden_layers": 4}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **heads, **experts, **sizes)).bfloat16()


def qwen3next(dense: tuple[int, ...] = ()) -> Any:
    """Three gated delta net layers (recurrent state) to one full attention layer; bfloat16.

    :param dense: layers without experts.
    """
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    state = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    state |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
    sizes = {"intermediate_size": 512, "shared_expert_intermediate_size": 128, "num_hidden_layers": 4}
    common = COMMON | {"initializer_range": 0.05, "mlp_only_layers": list(dense)}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**common, **heads, **state, **experts, **sizes)).bfloat16()


def qwen3nextdense() -> Any:
    """The same without experts."""
    return qwen3next((0, 1, 2, 3))


def phi3() -> Any:
    """LongRoPE: an engine whose prompts may exceed 1024 tokens rotates all of them by the long factors."""
    from transformers import Phi3Config, Phi3ForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 1024}
    rope |= {"short_factor": [1.0] * 32, "long_factor": [float(4 + i) for i in range(32)]}
    sizes = {"intermediate_size": 512, "num_hidden_layers": 3, "original_max_position_embeddings": 1024}
    sizes |= {"pad_token_id": 0}
    return Phi3ForCausalLM(Phi3Config(**COMMON, **heads, **sizes, rope_parameters=rope))


def idefics3() -> Any:
    """Images anywhere in the prompt of a Llama. What vLLM's other small models see by wants torchvision."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    text = LlamaConfig(**COMMON, **heads, intermediate_size=512, num_hidden_layers=4)
    eyes = {"model_type": "idefics3_vision", **EYES}
    config = {"image_token_id": IMAGE, "scale_factor": 1, "tie_word_embeddings": False, "pad_token_id": 0}
    return Idefics3ForConditionalGeneration(Idefics3Config(text_config=text, vision_config=eyes, **config))


def hrmtext() -> Any:
    """A prefix-LM: tokens of a prompt attend to those behind them. Two stacks of one layer, two cycles of two steps."""
    from transformers import HrmTextConfig, HrmTextForCausalLM

    heads = {"num_attention_heads": 4, "head_dim": 64}
    cycles = {"num_hidden_layers": 1, "H_cycles": 2, "L_cycles": 2}
    return HrmTextForCausalLM(HrmTextConfig(**COMMON, **heads, **cycles, intermediate_size=512))


def classifier() -> Any:
    """A Llama that tells three classes apart."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    sizes = {"intermediate_size": 512, "num_hidden_layers": 4, "num_labels": 3, "pad_token_id": 0}
    return LlamaForSequenceClassification(LlamaConfig(**COMMON, **heads, **sizes))


MODELS: dict[str, Callable[[], Any]] = {
    maker.__name__: maker
    for maker in (
        *(llama, mla, deepseek32, gemma3, gptoss, qwen3moe, qwen3next, qwen3nextdense),
        *(phi3, idefics3, hrmtext, classifier),
    )
}


def build(name: str, folder: Path) -> Path:
    """The path of model ``name`` under ``folder``, built if it is not there; appears whole or not at all."""
    path = folder / name
    if path.is_dir():
        return path
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = MODELS[name]()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        whole = Path(scratch) / name
        model.save_pretrained(whole, safe_serialization=True)
        processor(name).save_pretrained(whole)
        whole.rename(path)
    return path


def processor(model: str) -> Any:
    """A model's tokenizer, with what cuts its images into patches where it sees."""
    if model != "idefics3":
        return tokenizer()
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    edge = {"longest_edge": EYES["image_size"]}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    return Idefics3Processor(images, tokenizer(*SEEING), image_seq_len=PLACES)


def tokenizer(*more: str) -> Any:
    """A byte-level BPE of the models' vocabulary, trained on Python's own sources.

    :param more: special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE(unk_token=None))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    whole = [*SPECIAL.values(), *more]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=whole, initial_alphabet=alphabet)
    bpe.train([str(path) for path in sorted(Path(os.__file__).parent.glob("a*.py"))], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, **SPECIAL)
    made.chat_template = "{% for m in messages %}{{m['role']}}: {{m['content']}}\n{% endfor %}assistant:"
    return made


if __name__ == "__main__":
    for each in MODELS:
        print(build(each, Path(sys.argv[1])))
