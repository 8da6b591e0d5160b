"""The vocabulary refuses contradictions and fingerprints what changes bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from layerflow.errors import SpecError
from layerflow.kinds import KINDS, RecurrentState, Sliding
from layerflow.objects import check_header, object_bytes, pack_header, plane_offsets
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard, first_mismatch, model_facts

K, V = Plane("k", "bfloat16", (2, 64)), Plane("v", "bfloat16", (2, 64))


def group(**changes: Any) -> GroupSpec:
    facts: dict[str, Any] = {"kind": "full", "block_size": 16, "layers": (0, 1), "planes": (K, V)}
    return GroupSpec(**(facts | changes))


def model(**changes: Any) -> ModelSpec:
    return ModelSpec(**({"name": "m", "content": "c", "groups": (group(),)} | changes))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Plane("k", "float12", (1,)), "unknown dtype"),
        (lambda: Plane("k", "int8", ()), "positive"),
        (lambda: Plane("k", "int8", (2, 0)), "positive"),
        (lambda: group(kind="ring"), "unknown"),
        (lambda: group(block_size=0), "positive"),
        (lambda: group(layers=(1, 0)), "ascending"),
        (lambda: group(layers=()), "ascending"),
        (lambda: group(planes=(K, K)), "unique"),
        (lambda: group(window=64), "window"),
        (lambda: group(kind="sliding"), "window"),
        (lambda: group(kind="state", window=64), "window"),
        (lambda: group(block_bytes=4096), "add up to 8192"),
        (lambda: Shard(2, 2), "below its size"),
        (lambda: Shard(0, 3000, 0, 1000), "at most 1024 shards"),
        (lambda: model(groups=()), "no cache group"),
        (lambda: model(groups=(group(), group(layers=(1, 2)))), "layer 1 is in groups 0 and 1"),
        (lambda: model(groups=(group(layers=(0, 2)),)), "without a gap"),
        (lambda: model(chunk_tokens=100), "multiple"),
        (lambda: model(chunk_tokens=0), "positive"),
    ],
)
def test_contradictions_are_refused(make: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        make()


def test_a_refused_spec_is_a_decoding_error_on_the_wire() -> None:
    raw = msgspec.msgpack.encode(model()).replace(b"bfloat16", b"bfloat99")
    with pytest.raises(msgspec.ValidationError, match="unknown dtype"):
        msgspec.msgpack.decode(raw, type=ModelSpec)


@pytest.mark.parametrize(
    "other",
    [
        model(content="d"),
        model(groups=(group(block_size=32),)),
        model(groups=(group(planes=(K,)),)),
        model(groups=(group(layers=(0, 1, 2)),)),
        model(groups=(group(kind="sliding", window=64),)),
        model(groups=(group(kind="state"),)),
        model(groups=(group(kind="state", block_size=32),)),
        model(shard=Shard(0, 2)),
        model(attention="flash/HND"),
        model(quantization="fp8"),
        model(chunk_tokens=512),
    ],
)
def test_what_changes_the_bytes_changes_the_fingerprint(other: ModelSpec) -> None:
    assert other.fingerprint != model().fingerprint


def test_names_and_ranks_do_not() -> None:
    assert model(name="other").fingerprint == model().fingerprint
    assert model(shard=Shard(0, 2)).fingerprint == model(shard=Shard(1, 2)).fingerprint


HALF = (Plane("k", "bfloat16", (1, 64)), Plane("v", "bfloat16", (1, 64)))
"""What each of two ranks holds of the planes above."""


@pytest.mark.parametrize(
    ("other", "fact"),
    [
        (model(content="d", chunk_tokens=512), "weights"),
        (model(quantization="fp8"), "dtype and quantisation"),
        (model(attention="flash/HND"), "attention backend and layout"),
        (model(chunk_tokens=512), "chunk_tokens"),
        (model(groups=(group(block_size=32),)), "cache groups"),
        (model(groups=(group(kind="state"),)), "cache groups"),
        (model(groups=(group(planes=(Plane("k", "float16", (2, 64)), V)),)), "dtypes"),
        (model(shard=Shard(0, 2)), "tensor size"),
        (model(shard=Shard(0, 1, 0, 2)), "pipeline size"),
        (model(groups=(group(layers=(0, 1, 2)),)), "fingerprint"),
    ],
)
def test_the_first_fact_that_differs_is_found(other: ModelSpec, fact: str) -> None:
    found = first_mismatch(model_facts(model()), model_facts(other))
    assert found == (fact, model_facts(model())[fact], model_facts(other)[fact])


def test_facts_are_those_of_the_model_whoever_holds_it() -> None:
    whole = model(shard=Shard(heads=(2,), stages=((2,),)))
    half = model(name="other", groups=(group(planes=HALF),), shard=Shard(1, 2, heads=(2,), stages=((2,),)))
    assert first_mismatch(model_facts(whole), model_facts(half)) is None


def test_without_stages_workers_read_only_objects_of_their_tensor_size() -> None:
    half = model(groups=(group(planes=HALF),), shard=Shard(1, 2, heads=(2,)))
    found = first_mismatch(model_facts(model(shard=Shard(heads=(2,)))), model_facts(half))
    assert found == ("tensor size", "1", "2")


def test_a_fact_that_one_engine_does_not_tell_does_not_differ() -> None:
    assert first_mismatch(model_facts(model()), {"chunk_tokens": "256", "unheard of": "x"}) is None


def test_layers_know_their_places() -> None:
    spec = model(groups=(group(layers=(0, 2)), group(kind="sliding", window=64, layers=(1,))))
    assert spec.num_layers == 3
    assert spec.layer_places() == ((0, 0), (1, 0), (0, 1))


def test_an_object_is_layer_major_with_planes_apart() -> None:
    spec = group(planes=(K, Plane("scale", "float16", (1,))))
    assert plane_offsets(spec) == (0, K.token_bytes * 16)
    assert object_bytes(spec, 3) == 64 + 2 * 3 * (K.token_bytes + 2) * 16


def test_a_header_vouches_for_one_object() -> None:
    key = bytes(range(24))
    raw = pack_header(key, blocks=4, tokens=50, payload=1000)
    check_header(raw, key, 4)
    for bad in (raw[:3] + b"?" + raw[4:], bytes(64)):
        with pytest.raises(Exception, match="no valid header"):
            check_header(bad, key, 4)
    for wrong in ((key[::-1], 4), (key, 5)):
        with pytest.raises(Exception, match="treated as a miss"):
            check_header(raw, *wrong)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_needs_and_keeps_whole_ranges(name: str) -> None:
    kind = KINDS[name](16, 40 if name == "sliding" else 0)
    for tokens in range(1, 600):
        need, keep = kind.need(tokens, 256), kind.keep(min(tokens, 256))
        assert need.stop == -(-tokens // 256)
        assert keep.stop == -(-min(tokens, 256) // 16)
        assert 0 <= kind.first_token(tokens) <= tokens


def test_a_window_needs_what_the_next_query_sees() -> None:
    kind = Sliding(16, window=40)
    # The query at position 300 sees 261..300, so 261..299 come from the cache: chunk 1 alone, with 256-token chunks.
    assert kind.first_token(300) == 261
    assert kind.need(300, 256) == range(1, 2)
    assert kind.need(260, 256) == range(0, 2)


@pytest.mark.parametrize("tokens", range(1, 257))
def test_a_window_keeps_what_a_hit_at_its_end_or_one_before_reads(tokens: int) -> None:
    kind = Sliding(16, window=40)
    kept = range(kind.keep(tokens).start * 16, tokens)
    for hit in (tokens, tokens - 1):
        assert all(position in kept for position in range(kind.first_token(hit), hit))


@pytest.mark.parametrize("size", [1, 16, 48])
def test_a_state_is_read_and_kept_at_one_position_only(size: int) -> None:
    kind = RecurrentState(size)
    for boundary in range(size, 960, size):
        assert kind.need(boundary, 96) == range((boundary - 1) // 96, (boundary - 1) // 96 + 1)
        assert kind.first_token(boundary) // size == boundary // size - 1, "the block of the boundary's last token"
        assert kind.keep(boundary) == range(boundary // size - 1, boundary // size)
    assert kind.need(0, 96) == range(0, 0)


def test_a_block_of_state_is_one_state_however_many_tokens_it_stands_for() -> None:
    state = Plane("ssm", "float32", (4, 8))
    for size in (16, 1024):
        spec = group(kind="state", block_size=size, planes=(state, K), block_bytes=128 + K.token_bytes)
        assert (spec.entries, spec.bytes_per_block) == (1, 128 + K.token_bytes)
        assert plane_offsets(spec) == (0, 128)
        assert object_bytes(spec, 1) == 64 + 2 * (128 + K.token_bytes)


def test_only_a_hit_without_state_can_be_shortened() -> None:
    hybrid = model(groups=(group(), group(kind="state", layers=(2,))))
    for spec in (model(), hybrid):
        assert spec.usable(31, 32) == 31
        assert spec.exact == (spec is hybrid)
    assert [model().usable(32, 32), hybrid.usable(32, 32)] == [31, None]
