"""Keys of vLLM's real requests: two share what vLLM's own prefix cache would share between them, and no more.

Multimodal inputs are made up here, without a model: what an input shows follows from its identifier.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lora import adapter
from scenario import feature

from layerflow.connectors.common.computation import rotary_facts
from layerflow.connectors.vllm.identity.identity import RequestKeys, arithmetic_of
from layerflow.connectors.vllm.reuse import kind_of, obstacle
from layerflow.errors import Unsupported
from layerflow.spec import GroupSpec, ModelSpec, Plane

BLOCK = 16
SPEC = ModelSpec("m", "weights", (GroupSpec("full", BLOCK, (0,), (Plane("kv", "uint8", (8,)),)),), chunk_tokens=BLOCK)


@functools.cache
def _hasher() -> Any:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


def request(tokens: Sequence[int], images: Sequence[tuple[int, int, str]] = (), **more: Any) -> Any:
    """vLLM's own, with the block hashes that it finds its cache by."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    seen = [feature(*image) for image in images]
    return Request(
        "r", list(tokens), SamplingParams(max_tokens=1), None, mm_features=seen, block_hasher=_hasher(), **more
    )


def shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many they begin with in common."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def hit(keys: RequestKeys, one: Any, other: Any) -> int:
    """Tokens in whole blocks that `other` finds of what `one` has stored."""
    return shared(keys.chain(SPEC, one).digests, keys.chain(SPEC, other).digests) * BLOCK


TOKENS = [7] * 160
CAT = (40, 30, "cat")  # its placeholders begin within the third block and end within the fifth
DOG = (100, 20, "dog")


@pytest.mark.parametrize(
    ("images", "tokens"),
    [
        ((CAT, DOG), 160),
        (((40, 30, "lion"), DOG), 32),
        ((CAT, (100, 20, "wolf")), 96),
        (((40, 30, "dog"), (100, 20, "cat")), 32),
        (((41, 30, "cat"), DOG), 32),
        ((CAT, (116, 20, "dog")), 96),
        ((CAT,), 96),
        ((DOG,), 32),
        ((), 32),
    ],
)
def test_images(images: tuple[tuple[int, int, str], ...], tokens: int) -> None:
    keys, stored, asked = RequestKeys(), request(TOKENS, (CAT, DOG)), request(TOKENS, images)
    assert hit(keys, stored, asked) == tokens
    assert shared(stored.block_hashes, asked.block_hashes) * BLOCK == tokens


def test_what_vllm_shares_between_requests_and_nothing_else(tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    adapters = [None]
    for number, name in enumerate("ab", 1):
        adapters.append(LoRARequest(name, number, str(adapter(tmp_path / name, number))))
    keys, source = RequestKeys(), random.Random(7)

    def vary(images: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
        changed = [
            (max(0, start + source.choice((0, 0, 0, 1))), length, source.choice((name, name, name, "other")))
            for start, length, name in images
            if source.random() < 0.9
        ]
        return [image for image in changed if image[0] + image[1] <= len(TOKENS)]

    outcomes = set()
    for _ in range(400):
        starts = sorted(source.sample(range(0, 150, 15), source.randrange(4)))
        images = [(start, source.randrange(1, 14), source.choice(("cat", "dog"))) for start in starts]
        tokens = [source.randrange(3) for _ in TOKENS]
        cut = source.randrange(len(TOKENS) + 1)
        salt, lora = source.choice((None, "s")), source.choice(adapters)
        one = request(tokens, images, cache_salt=salt, lora_request=lora)
        two = request(
            tokens if source.random() < 0.5 else [*tokens[:cut], *[9] * (len(tokens) - cut)],
            vary(images),
            cache_salt=salt if source.random() < 0.8 else source.choice((None, "s", "t")),
            lora_request=lora if source.random() < 0.8 else source.choice(adapters),
        )
        outcomes.add(found := hit(keys, one, two))
        assert found == shared(one.block_hashes, two.block_hashes) * BLOCK, (images, two.mm_features)
    assert len(outcomes) > len(TOKENS) // BLOCK // 2


def test_an_image_of_a_session_that_goes_on_is_not_guessed() -> None:
    with pytest.raises(Unsupported, match="session"):
        RequestKeys().chain(SPEC, request(TOKENS, resumable=True))


def config(*, lora: Any = None, **media: Any) -> Any:
    """The parts of vLLM's configuration that requests' keys depend on."""
    seeing = SimpleNamespace(**media)
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=seeing, quantization=None, dtype="float32"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        lora_config=lora,
    )


def test_an_image_of_which_only_the_name_is_known_has_no_key() -> None:
    """With vLLM's cache in shared memory its scheduler has an address; in other cases nothing."""
    asked = request(TOKENS, (CAT, DOG))
    asked.mm_features[1].data = None
    assert len(RequestKeys().chain(SPEC, asked)) == DOG[0]


def test_an_image_is_known_by_what_it_shows() -> None:
    keys, named, other = RequestKeys(), request(TOKENS, (CAT,)), request(TOKENS, (CAT,))
    named.mm_features[0].identifier = "what a client calls it"
    assert hit(keys, request(TOKENS, (CAT,)), named) == 160
    other.mm_features[0].data["pixel_values"].data += 1
    other.mm_features[0].identifier = "another"
    assert hit(keys, request(TOKENS, (CAT,)), other) == 32


def test_every_pooler_of_vllms_is_told_apart() -> None:
    from vllm.config.pooler import SEQ_POOLING_TYPES, TOK_POOLING_TYPES

    kinds = {(seq, tok) for seq in SEQ_POOLING_TYPES for tok in TOK_POOLING_TYPES}

    def pooling(seq: str, tok: str) -> Any:
        pooler = SimpleNamespace(seq_pooling_type=seq, tok_pooling_type=tok)
        model = SimpleNamespace(runner_type="pooling", pooler_config=pooler, is_prefix_caching_supported=True)
        return SimpleNamespace(model_config=model, cache_config=SimpleNamespace())

    assert [kind for kind in sorted(kinds) if not obstacle(pooling(*kind), [])] == [("LAST", "ALL")]


def test_the_cache_of_a_prefix_lm_is_no_other_requests() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    sizes = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    model = SimpleNamespace(runner_type="generate", pooler_config=None, is_prefix_caching_supported=True)
    engine = SimpleNamespace(model_config=model, cache_config=SimpleNamespace())
    causal, prefix = FullAttentionSpec(**sizes), FullAttentionSpec(**sizes, non_causal=True)
    assert obstacle(engine, [causal]) == ""
    assert "later ones" in obstacle(engine, [causal, prefix])
    assert (kind_of(causal), kind_of(MLAAttentionSpec(**sizes))) == ("full", "mla")
    with pytest.raises(Unsupported, match="non_causal=True"):
        kind_of(prefix)
    with pytest.raises(Unsupported, match="non_causal_multi_token_decode=True"):
        kind_of(MLAAttentionSpec(**sizes, non_causal_multi_token_decode=True))


def test_vllms_rotary_embeddings_are_keyed_by_their_parameters() -> None:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    scalings: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 2.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": {"factor": 4.0},
        "dynamic": {"factor": 2.0},
    }
    facts: dict[str, Any] = {}
    with set_current_vllm_config(VllmConfig()):
        for name, more in scalings.items():
            for theta, length in ((1e4, 2048), (1e4, 4096), (2e4, 2048)):
                told = {"rope_type": name, "rope_theta": theta, "original_max_position_embeddings": 1024, **more}
                facts[f"{name} {theta:g} {length}"] = rotary_facts(get_rope(64, length, True, told, torch.float32))
    for name in scalings:
        assert (facts[f"{name} 10000 2048"] == facts[f"{name} 10000 4096"]) is (name != "dynamic"), name
    assert len({str(each) for each in facts.values()}) == 2 * len(scalings) + 1


def test_how_images_are_read_and_adapters_applied_is_keyed() -> None:
    from vllm.config import LoRAConfig

    def told(**changed: Any) -> str:
        return arithmetic_of(config(**changed), "0.32")

    def with_adapters(**changed: Any) -> str:
        return told(lora=dataclasses.replace(LoRAConfig(lora_dtype="float16"), **changed))

    same = told()
    assert told(mm_processor_kwargs=None) == same
    assert told(lora=LoRAConfig()) == same, "requests without an adapter are shared"
    every = [same, told(mm_processor_kwargs={"min_pixels": 4}), with_adapters()]
    every += [with_adapters(target_modules=["q_proj"]), with_adapters(enable_tower_connector_lora=True)]
    assert len(set(every)) == len(every)
