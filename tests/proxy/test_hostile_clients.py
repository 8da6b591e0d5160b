"""Requests that no decent client sends: each has an answer, and hurts nobody else."""

import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import pytest

from layerflow_testing.hostile_requests import HostileRequest, hostile_params, hostile_requests
from layerflow_testing.stub_engine import Behaviour, StubEngine

from .scene import ORDERS, Scene, proxied, settled

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


@dataclass
class Turn:
    """What a crowd of requests was answered, when each began, and how long a decent client's took meanwhile."""

    statuses: list[int]
    began: list[float]
    decent: list[float]


async def take_turn(scene: Scene, requests: Sequence[HostileRequest], not_before: Sequence[float]) -> Turn:
    """:param not_before: when each may begin, in seconds from the first."""
    turn = Turn([0] * len(requests), [0.0] * len(requests), [])
    waiting = iter(enumerate(requests))
    started = time.monotonic()

    async def client() -> None:
        for number, request in waiting:
            await anyio.sleep(max(0.0, not_before[number] - (time.monotonic() - started)))
            turn.began[number] = time.monotonic() - started
            turn.statuses[number] = await send(scene, request)

    async with anyio.create_task_group() as tasks:
        for _ in range(AT_ONCE):
            tasks.start_soon(client)
        while not all(turn.statuses):
            turn.decent.append(await decent(scene))
    return turn


async def attack(order: str, seed: int, count: int, *, compare: bool = False) -> dict[str, list[float]]:
    """How long decent requests took, by what was beside them.

    :param compare: also beside benign requests, which ask for as much work at the same rate.
    """
    took: dict[str, list[float]] = {"nothing": [], "hostile": [], "benign": []}
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder, order=order, breaker_failures=1, probe_timeout_s=60) as scene:
            for _ in range(20):
                took["nothing"].append(await decent(scene))
            requests = list(hostile_requests(seed, count))
            hostile = await take_turn(scene, requests, [0.0] * count)
            took["hostile"] += hostile.decent
            if compare:
                benign = [request.benign(status) for request, status in zip(requests, hostile.statuses, strict=True)]
                took["benign"] += (await take_turn(scene, benign, hostile.began)).decent
            assert 200 in hostile.statuses and 400 in hostile.statuses
            health = await settled(scene)
            for one in health["prefill"] + health["decode"]:
                assert (one["state"], one["active"]) == ("up", 0), "what clients do speaks against no engine"
    for engine in (prefiller, decoder):
        for seen in engine.seen:
            params = seen.params or {}
            assert set(map(type, params)) <= {str} and "prompt_token_ids" not in params, (
                "nobody outside steers a transfer"
            )
    return took


@pytest.mark.parametrize("order", ORDERS)
async def test_hostile_requests(order):
    await attack(order, 1, 150)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("order", ORDERS)
async def test_a_hundred_thousand_hostile_requests(order):
    """Prints a decent client's p95 beside hostile requests over its p95 beside benign ones.

    The benign ones of each seed follow its hostile ones: as many, each no earlier than its hostile one began, with the
    same prompts' lengths and outputs where that was answered, refused where that was refused. So the ratio has what a
    crowd of that size costs in it twice, and is what being hostile adds.
    """
    all_took: dict[str, list[float]] = {}
    for seed in range(34):
        for beside, times in (await attack(order, 100 + seed, 1000, compare=True)).items():
            all_took.setdefault(beside, []).extend(times)
    p95 = {beside: statistics.quantiles(times, n=20)[-1] for beside, times in all_took.items()}
    for beside, times in all_took.items():
        print(f"{order}, beside {beside}: {len(times)} decent requests, p95 {p95[beside] * 1000:.1f} ms")
    print(f"{order}: hostile over benign {p95['hostile'] / p95['benign']:.2f}")


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
