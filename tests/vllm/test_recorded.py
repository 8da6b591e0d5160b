"""A recorded vLLM, replayed: what is predicted of its own configuration beside what was recorded."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from comparison import prompt
from engines import Engine, connector

from layerflow.agent.control import Control
from layerflow.sim.replay import Replay
from layerflow_cli.bench.harness import ServerProcess

CHUNK = 64

Serve = Callable[..., ServerProcess]
Start = Callable[..., Engine]


def recorded(serve: Serve, vllm: Start, path: Path, concurrency: int, pool_bytes: int) -> Replay:
    """Prefixes that come again, each time with another suffix, so many at once."""
    server = serve(pool__size=pool_bytes)
    engine = vllm("llama", kv_transfer_config=connector(server.endpoint, mode="layerwise", chunk_tokens=CHUNK))
    draws = random.Random(concurrency)
    prefixes = [prompt(seed, draws.choice([320, 640, 1280])) for seed in range(8)]
    engine.generate(prompt(99, 128), max_tokens=2)
    control = Control(server.endpoint, "recorder")
    control.record(path, 600, 64 << 20)
    for turn in range(48 // concurrency):
        asked = [draws.choice(prefixes) + prompt(1000 * turn + place, 100) for place in range(concurrency)]
        engine.generate(*asked, max_tokens=4)
        time.sleep(0.05)
    control.end_recording()
    control.close()
    return Replay.read(path)


@pytest.mark.campaign
@pytest.mark.parametrize("concurrency", [1, 4, 8])
def test_its_own_configuration_is_predicted(
    concurrency: int, serve: Serve, vllm: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = recorded(serve, vllm, tmp_path / "vllm.lfr", concurrency, 64 << 20)
    with capsys.disabled():
        print(f"\nvLLM, {concurrency} at once: trusted {replay.trust.trusted}")
        for row in replay.trust.rows:
            print(f"{row.name:32}{row.recorded:10.2f}{row.predicted:10.2f}{row.fitted:10.2f}")
    # Of several at once there are few steps, and few of them make no p99.
    assert replay.recorded.hits > 0 and all("too few to compare" in why for why in replay.trust.reasons)
    assert replay.own.hit_rate == pytest.approx(replay.recorded.hit_rate, abs=0.02)
    assert replay.own.prefill.p50 == pytest.approx(replay.recorded.prefill.p50, rel=0.15)


@pytest.mark.campaign
def test_a_smaller_pool_is_predicted(
    serve: Serve, vllm: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One prompt at a time: of several at once, how many tokens vLLM takes into a pass is not known to a recording."""
    concurrency = 1
    roomy = recorded(serve, vllm, tmp_path / "roomy.lfr", concurrency, 64 << 20)
    small = roomy.run.samples[-1].used_bytes // 5
    told = roomy.under(roomy.configured(None, {"pool.size": small}))
    tight = recorded(serve, vllm, tmp_path / "tight.lfr", concurrency, small).recorded
    with capsys.disabled():
        print(f"\nvLLM, {concurrency} at once, pool of {small:,} bytes: measured, predicted; as recorded")
        for name in ("hit_rate", "evictions"):
            print(f"{name:32}{getattr(tight, name):10.3f}{getattr(told, name):10.3f}{getattr(roomy.own, name):10.3f}")
        for which in ("p50", "p99", "mean"):
            figures = [getattr(each.prefill, which) * 1e3 for each in (tight, told, roomy.own)]
            print(f"prefill, {which} (ms){'':16}" + "".join(f"{value:10.2f}" for value in figures))
    assert tight.hit_rate < roomy.recorded.hit_rate
    assert told.hit_rate == pytest.approx(tight.hit_rate, abs=0.05)
