"""Servers, engines and peers of this version and of the one before, in every combination."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from e2e.known import eventually

from layerflow.agent import Control
from layerflow.errors import VersionMismatch
from upgrade.conftest import NOW, Version, VersionServer, VersionWorker
from upgrade.worker import TOKENS

Serve, Work = Callable[..., VersionServer], Callable[[Version, str, str], VersionWorker]

WHOLE = TOKENS - 1
"""Of a prompt that is stored, all but a token is loaded: something has to be computed."""

ROUNDS = int(os.environ.get("LAYERFLOW_ROUNDS", "2"))


def good(told: dict[str, Any]) -> dict[str, Any]:
    """:raises AssertionError: something was wrong, failed or did not end."""
    assert "error" not in told, told["error"]
    assert (told["wrong"], told["failed"], told["ended"]) == (0, [], True), told
    return told


@pytest.fixture(params=["server before", "engines before"])
def sides(request: pytest.FixtureRequest, before: Version) -> tuple[Version, Version]:
    """Versions of the server, and of the engines."""
    return (before, NOW) if request.param == "server before" else (NOW, before)


def test_an_engine_of_one_version_is_served_by_the_other(
    sides: tuple[Version, Version], serve: Serve, work: Work
) -> None:
    """What is stored by engines of one version hits for those of the other; a hand-off passes between them."""
    served, engines = sides
    server = serve(served)
    first, other = work(engines, server.endpoint, "first"), work(served, server.endpoint, "other")
    assert good(first.ask("serve", seed=1))["hit"] == 0
    assert good(other.ask("serve", seed=1))["hit"] == WHOLE
    assert good(other.ask("serve", seed=2))["hit"] == 0
    assert good(first.ask("serve", seed=2))["hit"] == WHOLE
    for prefiller, decoder in itertools.permutations((first, other)):
        seed = 3 if prefiller is first else 4
        decoder.begin("decode", seed=seed)
        assert good(prefiller.ask("prefill", seed=seed))["state"] == "open"
        assert good(decoder.hear())["hit"] == WHOLE
    versions = {each["engine"]: each.get("version") for each in first.ask("status")["sessions"] if each["memory"]}
    assert versions.keys() == {"first", "other"}
    if served is NOW:
        assert versions["first"] == "" != versions["other"]


def test_what_only_the_newer_knows_is_not_asked_of_an_older_server(before: Version, serve: Serve) -> None:
    """It is refused on this side, with what to do; all else goes on."""
    control = Control(serve(before).endpoint, "observer", lookup_timeout_s=20.0)
    with contextlib.closing(control):
        with pytest.raises(VersionMismatch, match="protocol 1, which has no TrySettings: upgrade the server first"):
            control.try_settings(b"", 1.0)
        with pytest.raises(VersionMismatch, match="protocol 1, which has no ReadChunks: upgrade the server first"):
            control.read_chunks()
        with pytest.raises(VersionMismatch, match="protocol 1, which has no DescribeChunks: upgrade the server first"):
            control.describe_chunks([])
        assert control.status(20.0)["healthy"]


@pytest.mark.parametrize("reads", ["reader before", "owner before"])
def test_a_server_of_one_version_reads_from_the_other(reads: str, before: Version, serve: Serve, work: Work) -> None:
    """Hits, and a hand-off from an engine of the one to an engine of the other."""
    lends, reader = (NOW, before) if reads == "reader before" else (before, NOW)
    owner = serve(lends, peers__serve="true")
    attach = json.dumps([{"name": "owner", "address": owner.endpoint}])
    here = serve(reader, peers__attach=attach)
    p, d = work(lends, owner.endpoint, "p"), work(reader, here.endpoint, "d")
    assert eventually(lambda: d.ask("status")["peers"]["reads"]["peers"][0]["state"] == "up")
    assert good(p.ask("serve", seed=1))["hit"] == 0
    assert eventually(lambda: good(d.ask("serve", seed=1, look=True))["hit"] == WHOLE)
    d.begin("decode", seed=2, servers=[owner.endpoint])
    assert good(p.ask("prefill", seed=2))["state"] == "open"
    assert good(d.hear())["hit"] == WHOLE


def test_a_server_is_upgraded_and_taken_back_under_load(before: Version, serve: Serve, work: Work) -> None:
    """Killed and replaced by the other version, again and again: engines of both go on, and load what is right."""
    rounds_with_kills(before, serve, work, ROUNDS)


@pytest.mark.campaign
def test_a_server_is_upgraded_and_taken_back_fifty_times(before: Version, serve: Serve, work: Work) -> None:
    """The long form."""
    rounds_with_kills(before, serve, work, 50)


def rounds_with_kills(before: Version, serve: Serve, work: Work, rounds: int) -> None:
    """Both engines serve prompts that they share, and hand one over; meanwhile the server is killed."""
    chance = random.Random(5)
    server = serve(before)
    both = [work(version, server.endpoint, version.name) for version in (before, NOW)]
    seeds = itertools.count(100)
    hits = 0
    for number in range(rounds):
        seed, handed = next(seeds), next(seeds)
        kill_at = chance.randrange(4)
        steps: list[Callable[[], None]] = [
            lambda seed=seed: both[0].begin("serve", seed=seed),
            lambda handed=handed: both[0].begin("prefill", seed=handed),
            lambda handed=handed: both[1].begin("decode", seed=handed),
            lambda seed=seed: both[1].begin("serve", seed=seed),
        ]
        for at, step in enumerate(steps):
            step()
            if at == kill_at:
                server.kill()
        for told in [both[0].hear(), both[0].hear(), both[1].hear(), both[1].hear()]:
            assert told.get("wrong", 0) == 0, told
        server.version = NOW if number % 2 == 0 else before
        server.restart()
        assert all(eventually(lambda worker=worker: worker.ask("attached")["attached"]) for worker in both)
        seed = next(seeds)
        assert good(both[number % 2].ask("serve", seed=seed))["hit"] == 0
        hits += good(both[1 - number % 2].ask("serve", seed=seed))["hit"] == WHOLE
    assert hits == rounds
