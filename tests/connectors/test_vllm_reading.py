"""Weights are read behind an engine's start."""

from __future__ import annotations

import threading

import pytest

from layerflow.connectors.common.weights import Checkpoint, WeightsReading
from layerflow.connectors.vllm.layout import Layout
from layerflow.errors import ConfigError
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard

PATIENCE_S = 20.0


def test_a_start_waits_no_longer_than_it_is_told() -> None:
    go = threading.Event()
    reading = WeightsReading(lambda _: go.wait(PATIENCE_S) and "content")
    assert not reading.wait(0)
    go.set()
    assert reading.wait(PATIENCE_S) and reading.found == "content"


def test_weights_that_cannot_be_read_are_told_to_who_asks() -> None:
    def read(_: threading.Event) -> str:
        raise ConfigError("the disk is gone")

    reading = WeightsReading(read)
    assert reading.wait(PATIENCE_S)
    with pytest.raises(ConfigError, match="disk is gone"):
        _ = reading.found


def test_an_error_that_is_nobodys_ends_the_wait() -> None:
    def read(_: threading.Event) -> str:
        raise ZeroDivisionError

    reading = WeightsReading(read)
    assert reading.wait(PATIENCE_S)
    with pytest.raises(ConfigError, match="failed"):
        _ = reading.found


def test_a_shutdown_ends_it() -> None:
    seen = threading.Event()
    reading = WeightsReading(lambda stop: seen.set() or stop.wait(PATIENCE_S))
    assert seen.wait(PATIENCE_S)
    reading.close()
    assert reading.found is True


def drafting(*names: str) -> Layout:
    """A worker's cache whose second group is a draft model's, before its weights are read."""
    groups = tuple(GroupSpec("full", 16, (layer,), (Plane("kv", "uint8", (8,)),)) for layer in range(2))
    spec = ModelSpec("m", "", groups, Shard(drafts=("", "shape")), chunk_tokens=16)
    return Layout(spec, {}, {}, (0, 0), *(Checkpoint(name) for name in names))


def test_weights_and_those_of_a_draft_model_are_in_the_keys_of_their_own_layers() -> None:
    base = drafting("weights", "draft").with_content()
    tuned, redrafted = drafting("tuned", "draft").with_content(), drafting("weights", "other").with_content()
    assert base.spec.content != tuned.spec.content
    assert base.spec.shard.drafts == tuned.spec.shard.drafts != redrafted.spec.shard.drafts
    assert base.spec.own == redrafted.spec.own, "engines with another draft model share the model's own layers"


def test_a_cache_that_is_made_anew_keeps_the_names_of_its_weights() -> None:
    """The scheduler's side goes on with those; the files may be others by now, or slow to read."""
    first = drafting("weights", "draft").with_content()
    assert drafting("elsewhere", "else").named_as(first).spec == first.spec
