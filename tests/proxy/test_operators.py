"""Health, metrics, models, and engines that come and go."""

import re

import anyio
import httpx
import pytest

from layerflow.config.proxy import ProxySettings
from layerflow.proxy.context import make_context
from layerflow.proxy.metaserver import Metaserver
from layerflow_testing.stub_engine import Behaviour, StubEngine

from .scene import GONE, at, numbered, proxied, said


@pytest.fixture
def engines():
    with StubEngine() as prefiller, StubEngine() as decoder:
        yield prefiller, decoder


async def test_health_says_who_is_there(engines):
    prefiller, decoder = engines
    async with proxied(f"{prefiller.url}=tcp://p:1", decoder) as scene:
        for path in ("/health", "/healthcheck"):
            answer = await scene.client.get(path)
            assert answer.status_code == 200
            assert answer.json() == {
                "status": "ok",
                "order": "concurrent",
                "open_requests": 0,
                "prefill": [{"url": prefiller.url, "state": "up", "active": 0, "servers": ["tcp://p:1"]}],
                "decode": [{"url": decoder.url, "state": "up", "active": 0, "servers": []}],
                "prefill_instances": 1,
                "decode_instances": 1,
            }


async def test_models_are_a_decoders(engines):
    _, decoder = engines
    async with proxied(engines[0], [GONE, decoder]) as scene:
        for _ in range(3):
            answer = await scene.client.get("/v1/models")
            assert answer.status_code == 200 and answer.json()["data"][0]["root"] == decoder.url
    async with proxied(engines[0], GONE) as scene:
        assert (await scene.client.get("/v1/models")).status_code == 503


async def test_engines_come_and_go_while_it_runs(engines):
    prefiller, decoder = engines
    with StubEngine(Behaviour(between_s=0.02)) as other:
        async with proxied(prefiller, decoder) as scene:

            async def change(what, role, *urls):
                return await scene.client.post(f"/instances/{what}", json={"type": role, "instances": list(urls)})

            added = await change("add", "decode", other.url.removeprefix("http://"))
            assert added.status_code == 200 and added.json()["decode"] == [decoder.url, other.url]
            assert (await change("add", "decode", other.url)).status_code == 409
            assert (await change("remove", "decode", decoder.url)).json()["decode"] == [other.url]
            assert (await change("remove", "decode", decoder.url)).status_code == 404
            got = []

            async def ask():
                got.append(await scene.complete(stream=True, max_tokens=20))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await at(other)
                await change("remove", "decode", other.url)
                assert (await scene.complete()).status_code == 503
            assert said(got[0].text) == numbered(20), "it finishes what it has"
            await change("add", "decode", decoder.url)
            assert (await scene.complete()).status_code == 200
            for bad in ({}, {"type": "x", "instances": ["a:1"]}, {"type": "decode", "instances": ["a"]}, []):
                answer = await scene.client.post("/instances/add", json=bad)
                assert answer.status_code == 400 and "write" in answer.json()["error"]["message"]
            assert (await change("add", "decode")).status_code == 400


async def test_prefix_caches_are_reset_everywhere(engines):
    async with proxied(*engines) as scene:
        answer = await scene.client.post("/reset_prefix_cache?reset_external=true")
        assert answer.status_code == 200 and set(answer.json()["instances"].values()) == {"ok"}
        assert [engine.resets for engine in engines] == [["reset_external=true"]] * 2
        await scene.client.post("/instances/add", json={"type": "decode", "instances": GONE})
        answer = await scene.client.post("/reset_prefix_cache")
        assert answer.status_code == 502 and "ConnectError" in answer.json()["instances"][GONE]


async def test_changes_are_for_those_who_may(engines):
    change = {"type": "decode", "instances": ["d:1"]}
    async with proxied(*engines, admin_token="secret") as scene:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            for path in ("/instances/add", "/instances/remove", "/reset_prefix_cache"):
                assert (await scene.client.post(path, json=change, headers=headers)).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await scene.client.post("/instances/add", json=change, headers=headers)).status_code == 200
    assert "secret" not in repr(ProxySettings(admin_token="secret"))


async def test_without_a_token_changes_come_from_this_machine():
    from layerflow.proxy.app import make_app

    context = make_context(ProxySettings(prefill="p:1", decode="d:1"), Metaserver())
    transport = httpx.ASGITransport(make_app(context), client=("192.0.2.7", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
        answer = await client.post("/instances/add", json={"type": "decode", "instances": ["e:1"]})
    assert answer.status_code == 403 and "proxy.admin_token" in answer.json()["error"]["message"]


async def test_what_happened_is_counted(engines):
    prefiller, decoder = engines
    prefiller.behaviour = Behaviour(cached=2)
    async with proxied(*engines) as scene:
        for _ in range(3):
            await scene.complete()
        text = (await scene.client.get("/metrics")).text
        found = dict(re.findall(r"^(layerflow_proxy_\S+) (\S+)$", text, re.M))
    assert found['layerflow_proxy_requests_total{path="/v1/completions",status="200"}'] == "3.0"
    assert found["layerflow_proxy_prefill_seconds_count"] == "3.0"
    assert found["layerflow_proxy_cached_tokens_total"] == "6.0"
    assert found['layerflow_proxy_first_token_seconds_count{way="apart"}'] == "3.0"
    assert found[f'layerflow_proxy_instance_up{{instance="{decoder.url}",role="decode"}}'] == "1.0"
    assert "_created" not in text
