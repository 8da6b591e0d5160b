"""Requests that no decent client sends: each has an answer, and hurts nobody else."""

import json
import random
import statistics
import time

import anyio
import pytest

from layerflow_testing.hostile_requests import HostileRequest, hostile_params, hostile_requests
from layerflow_testing.stub_engine import Behaviour, StubEngine

from .scene import ORDERS, Scene, proxied

AT_ONCE = 16
STATUSES = range(200, 600)


async def send(scene: Scene, request: HostileRequest) -> int:
    answer = await scene.client.post(request.path, content=request.body, headers=list(request.headers))
    assert answer.status_code in STATUSES, request.about
    if answer.status_code != 200:
        assert "the proxy failed" not in answer.text, request.about
        assert answer.status_code in (400, 404, 422, 503), f"{request.about} -> {answer.status_code} {answer.text}"
    return answer.status_code


async def decent(scene: Scene) -> float:
    """Another client's request: how long it took, in seconds."""
    began = time.monotonic()
    answer = await scene.complete(prompt="another client's", stream=True)
    assert answer.status_code == 200 and "[DONE]" in answer.text
    return time.monotonic() - began


async def attack(order: str, seed: int, count: int) -> tuple[list[float], list[float]]:
    """Times of decent requests alone, and beside the hostile ones."""
    alone: list[float] = []
    beside: list[float] = []
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder, order=order, breaker_failures=1, probe_timeout_s=60) as scene:
            for _ in range(20):
                alone.append(await decent(scene))
            waiting = hostile_requests(seed, count)
            statuses: list[int] = []

            async def hostile() -> None:
                for request in waiting:
                    statuses.append(await send(scene, request))

            async with anyio.create_task_group() as tasks:
                for _ in range(AT_ONCE):
                    tasks.start_soon(hostile)
                while len(statuses) < count:
                    beside.append(await decent(scene))
            assert 200 in statuses and 400 in statuses
            health = (await scene.client.get("/health")).json()
            assert health["open_requests"] == 0
            for one in health["prefill"] + health["decode"]:
                assert (one["state"], one["active"]) == ("up", 0), "what clients do speaks against no engine"
    for engine in (prefiller, decoder):
        for seen in engine.seen:
            params = seen.params or {}
            assert set(map(type, params)) <= {str} and "prompt_token_ids" not in params, (
                "nobody outside steers a transfer"
            )
    return alone, beside


@pytest.mark.parametrize("order", ORDERS)
async def test_hostile_requests(order):
    await attack(order, 1, 150)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("order", ORDERS)
async def test_a_hundred_thousand_hostile_requests(order):
    for seed in range(34):
        alone, beside = await attack(order, 100 + seed, 1000)
        p95 = [statistics.quantiles(times, n=20)[-1] for times in (alone, beside)]
        print(f"{order}, seed {100 + seed}: p95 alone {p95[0] * 1000:.1f} ms, beside {p95[1] * 1000:.1f} ms")


@pytest.mark.parametrize("seed", range(3))
async def test_hostile_posts_of_a_decoder(seed):
    """It has the request's address, and posts what it likes: its own request may fail, and no other."""
    dice = random.Random(seed)
    with StubEngine(Behaviour(asks_metaserver=False)) as prefiller, StubEngine() as decoder:
        decoder.answer_for = lambda seen: Behaviour(asks_metaserver=False, first_s=60 if seen.params else 0)
        async with proxied(prefiller, decoder, order="decode-first", breaker_failures=1) as scene:
            for number in range(20):
                async with anyio.create_task_group() as tasks:
                    name = f"seed-{seed}-{number}"
                    body, headers = {"prompt": "a", "max_tokens": 1, "user": name}, {"x-request-id": name}
                    tasks.start_soon(lambda: scene.client.post("/v1/completions", json=body, headers=headers))  # noqa: B023
                    while not (asked := [one for one in decoder.seen if one.params and one.body["user"] == name]):  # noqa: ASYNC110
                        await anyio.sleep(0.002)  # another thread's list, which has no event
                    url = asked[0].params["metaserver"]
                    params = hostile_params(dice)
                    posted = params if isinstance(params, dict) else {"x": params}
                    posted |= {"request_id": dice.choice((f"cmpl-{name}-0", f"7_cmpl-{name}-0", name))}
                    content = json.dumps(posted).encode()
                    answer = await scene.client.post(url, content=content)
                    assert answer.status_code in (200, 400, 404, 502), content
                    assert "the proxy failed" not in answer.text, content
                    tasks.cancel_scope.cancel()
            health = (await scene.client.get("/health")).json()
            assert {one["state"] for one in health["prefill"] + health["decode"]} == {"up"}
