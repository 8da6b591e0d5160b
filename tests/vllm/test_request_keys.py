"""Keys of vLLM's real requests: two share what vLLM's own prefix cache would share between them, and no more.

Made-up multimodal inputs: no model of these tests has eyes.
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

from layerflow.connectors.vllm.identity.adapters import Adapters
from layerflow.connectors.vllm.identity.identity import RequestKeys, arithmetic_of, media_salt_of
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


def config(*, cache_gb: float = 4, prefix_caching: bool = True, lora: Any = None, **media: Any) -> Any:
    """The parts of vLLM's configuration that requests' keys depend on."""
    seeing = SimpleNamespace(mm_processor_cache_gb=cache_gb, **media)
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=seeing, quantization=None, dtype="float32"),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching, cache_dtype="auto"),
        lora_config=lora,
    )


def test_images_that_vllm_only_counts_are_no_other_engines() -> None:
    """Without both of its caches vLLM calls the first image of every engine the same."""
    first = request(TOKENS, [(40, 30, "renderer0-mm-1-image-0")])
    named = [RequestKeys(Adapters(), media_salt_of(config())) for _ in range(2)]
    counted = [RequestKeys(Adapters(), media_salt_of(config(cache_gb=0, prefix_caching=False))) for _ in range(2)]
    assert shared(*[keys.chain(SPEC, first).digests for keys in named]) == 10
    assert shared(*[keys.chain(SPEC, first).digests for keys in counted]) == 2
    assert hit(counted[0], first, first) == 160
    for one_is_on in (config(cache_gb=0), config(prefix_caching=False)):
        assert media_salt_of(one_is_on) == ""


def test_how_images_are_read_and_adapters_applied_is_keyed() -> None:
    from vllm.config import LoRAConfig

    def with_adapters(**changed: Any) -> str:
        return arithmetic_of(config(lora=dataclasses.replace(LoRAConfig(lora_dtype="float16"), **changed)))

    same = arithmetic_of(config())
    assert arithmetic_of(config(mm_processor_kwargs=None, lora=None)) == same
    assert arithmetic_of(config(lora=LoRAConfig())) == same, "requests without an adapter are shared"
    every = [same, arithmetic_of(config(mm_processor_kwargs={"min_pixels": 4})), with_adapters()]
    every += [with_adapters(target_modules=["q_proj"]), with_adapters(enable_tower_connector_lora=True)]
    assert len(set(every)) == len(every)
