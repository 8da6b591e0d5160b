"""LoRA in real servers: a prompt's prefix is loaded with the adapter that it was computed with, and with no other."""

from __future__ import annotations

import pytest
from engines import EXPECTED, MODELS, Shape
from models import ADAPTERS, PROMPT
from pairs import start_pair
from servers import Servers, pages

LORA = (
    "--lora-paths", *(f"{name}={MODELS / name}" for name in ADAPTERS), "--lora-backend", "torch_native",
    "--max-loras-per-batch", "3",
)  # fmt: skip
ENVIRONMENT = (("PIN_NOTHING", "1"),)
A, B = (Shape(f"lora-{name}", flags=LORA, environment=ENVIRONMENT) for name in "ab")


@pytest.mark.campaign
def test_adapters_hit_their_own_prefixes_only(servers: Servers) -> None:
    servers.stop_serving()
    servers.serve()
    a, b = servers.start(A, B)
    one, two = ADAPTERS
    assert servers.store(a, PROMPT, lora_path=one).tokens == EXPECTED[one]
    for name, adapter in ((two, {"lora_path": two}), ("llama", {})):
        assert servers.store(b, PROMPT, **adapter).tokens == EXPECTED[name], "computed, not loaded"
    for name, adapter in ((one, {"lora_path": one}), (two, {"lora_path": two}), ("llama", {})):
        for engine in (a, b):
            engine.flush()
            loaded = engine.generate(PROMPT, **adapter)
            assert (loaded.tokens, loaded.host) == (EXPECTED[name], pages(engine, len(PROMPT))), name


@pytest.mark.campaign
def test_a_prompt_is_handed_over_with_its_adapter(servers: Servers) -> None:
    """Prefill and decode read an adapter's bytes with its first prompt, which waits for that."""
    servers.stop_serving()
    servers.serve()
    pair = start_pair(servers, "llama", prefill=LORA, decode=LORA, environment=ENVIRONMENT)
    try:
        for name in (*ADAPTERS, "llama", *ADAPTERS):
            answer = pair.generate(PROMPT, **({"lora_path": name} if name in ADAPTERS else {}))
            assert answer.tokens == EXPECTED[name], (name, answer)
    finally:
        pair.close()
