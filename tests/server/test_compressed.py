"""Groups that keep one row for several tokens, beside a window and full attention: hit lengths and bytes."""

from __future__ import annotations

import pytest
from e2e.known import KnownWorker

from layerflow.errors import SpecError
from layerflow.server import EmbeddedServer
from layerflow.spec import GroupSpec, ModelSpec, Plane
from server.support import Embed, worker_on

CHUNK, RATIO = 32, 8
PATIENT = {"transfer__step_timeout_ms": 60_000, "transfer__save_timeout_ms": 60_000}
ROW = (Plane("kv", "uint8", (16,)),)


def compressed(window: int) -> ModelSpec:
    """Layers of ratio 2 and 8, in blocks of other sizes than those of the window's, and a state of the compressor."""
    groups = (
        GroupSpec("mla", 16, (0, 2), ROW, ratio=2),
        GroupSpec("mla", 32, (1,), (Plane("kv", "uint8", (12,)), Plane("scale", "uint8", (4,))), ratio=RATIO),
        GroupSpec("sliding", 8, (3, 4), ROW, window=window),
        GroupSpec("sliding", 4, (5,), ROW, window=window),
    )
    return ModelSpec("compressed", "known", groups, chunk_tokens=CHUNK)


def make(server: EmbeddedServer, window: int = 8, **more: object) -> KnownWorker:
    return worker_on(server, spec=compressed(window), blocks=128, lookup_timeout_s=30.0, **more)


@pytest.mark.parametrize("window", [8, 17, 100])
def test_every_length_round_trips_to_its_alignment(embed: Embed, window: int) -> None:
    """A prompt of any length is found to the last multiple of the ratios that leaves a token to compute."""
    with make(embed(**PATIENT), window) as worker:
        for tokens in range(1, 3 * CHUNK + 2):
            chain = worker.prompt(tokens)
            assert worker.serve(chain).hit.tokens == 0, tokens
            hit = worker.serve(chain).hit.tokens
            assert hit % RATIO == 0 and hit < tokens
            if window == 100:
                assert hit == (tokens - 1) // RATIO * RATIO, tokens


def test_windows_of_which_only_the_end_is_kept_end_hits_with_their_chunk(embed: Embed) -> None:
    with make(embed(**PATIENT), 8) as worker:
        chain = worker.prompt(2 * CHUNK)
        worker.serve(chain)
        assert worker.serve(chain).hit.tokens == CHUNK, "before the end of its last chunk no window was kept"
        assert worker.serve(worker.prompt(2 * CHUNK + 1, like=chain, shared=2 * CHUNK)).hit.tokens == 2 * CHUNK


@pytest.mark.parametrize("window", [8, 100])
def test_a_continuation_finds_what_is_aligned_of_the_tail(embed: Embed, window: int) -> None:
    with make(embed(**PATIENT), window) as worker:
        for tokens in (5, RATIO, 20, CHUNK + 3, CHUNK + RATIO, 2 * CHUNK - 1):
            first = worker.prompt(tokens)
            worker.serve(first)
            hit = worker.serve(worker.prompt(tokens + 40, like=first, shared=tokens)).hit.tokens
            aligned = tokens // RATIO * RATIO
            assert hit == aligned or (window == 8 and aligned != tokens and hit == tokens // CHUNK * CHUNK), tokens


def test_groups_that_share_their_memory(embed: Embed) -> None:
    """Blocks of all groups lie over each other, as where vLLM packs them: each has only what it must have."""
    with make(embed(**PATIENT), 8, aliased=True) as worker:
        for tokens in (CHUNK + 1, 3 * CHUNK + 9, 2 * CHUNK + RATIO + 1):
            chain = worker.prompt(tokens)
            worker.serve(chain)
            assert worker.serve(chain).hit.tokens >= tokens // CHUNK * CHUNK


@pytest.mark.parametrize(("kind", "size", "ratio"), [("mla", 16, 3), ("mla", 16, 0), ("state", 16, 2)])
def test_an_impossible_ratio_is_refused(kind: str, size: int, ratio: int) -> None:
    with pytest.raises(SpecError, match="ratio"):
        GroupSpec(kind, size, (0,), ROW, ratio=ratio)


def test_a_ratio_of_one_has_the_keys_that_it_had() -> None:
    spec = ModelSpec("m", "c", (GroupSpec("full", 16, (0,), ROW),))
    assert spec.fingerprint != ModelSpec("m", "c", (GroupSpec("full", 16, (0,), ROW, ratio=2),)).fingerprint
    assert spec.fingerprint.hex() == "eaf015c62439f5f57328a416b0c679c1"
