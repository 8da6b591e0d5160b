"""Health, metrics, models, and engines that come and go."""

import os
import re
import socketserver

import anyio
import httpx
import pytest

from layerflow.config.proxy import ProxySettings
from layerflow.config.settings import Settings
from layerflow.errors import ConfigError
from layerflow.proxy.serve import admin_socket_path, serve_proxy
from layerflow_testing.stub_engine import Behaviour, StubEngine

from .scene import GONE, OPERATOR, ORDERS, TOKEN, at, numbered, proxied, said, settled


@pytest.fixture
def engines():
    with StubEngine() as prefiller, StubEngine() as decoder:
        yield prefiller, decoder


async def test_health_says_who_is_there_and_to_operators_where(engines):
    prefiller, decoder = engines
    known = {"state": "up", "active": 0}
    said = {"status": "ok", "order": "concurrent", "open_requests": 0, "prefill_instances": 1, "decode_instances": 1}
    async with proxied(f"{prefiller.url}=tcp://p:1", decoder) as scene:
        for path in ("/health", "/healthcheck"):
            answer = await scene.client.get(path)
            assert answer.status_code == 200
            assert answer.json() == {
                **said,
                "prefill": [{"name": "prefill-1", **known}],
                "decode": [{"name": "decode-1", **known}],
            }
            answer = await scene.client.get(path, headers=OPERATOR)
            assert answer.json() == {
                **said,
                "prefill": [{"name": "prefill-1", **known, "url": prefiller.url, "servers": ["tcp://p:1"]}],
                "decode": [{"name": "decode-1", **known, "url": decoder.url, "servers": []}],
            }


@pytest.mark.parametrize("order", ORDERS)
async def test_clients_are_told_no_addresses(engines, order):
    prefiller, decoder = engines
    addresses = [prefiller.url.removeprefix("http://"), decoder.url.removeprefix("http://"), GONE, "tcp://p:1"]
    async with proxied(f"{prefiller.url}=tcp://p:1", decoder, order=order, probe_failures=1000) as scene:
        answers = [await scene.complete()]
        prefiller.behaviour = decoder.behaviour = Behaviour(dies_after=0)
        answers += [await scene.complete(), await scene.complete(stream=True)]
        answers += [await scene.client.get(path) for path in ("/health", "/metrics", "/nowhere", "/v1/completions")]
        for answer in answers:
            assert not any(address in answer.text for address in addresses), answer.text
        metrics = (await scene.client.get("/metrics", headers=OPERATOR)).text
        known = 'layerflow_proxy_instance_info{instance="decode-1",role="decode",url='
        assert f'{known}"{decoder.url}"}} 1.0' in metrics


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
                return await scene.client.post(
                    f"/instances/{what}", json={"type": role, "instances": list(urls)}, headers=OPERATOR
                )

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
                answer = await scene.client.post("/instances/add", json=bad, headers=OPERATOR)
                assert answer.status_code == 400 and "write" in answer.json()["error"]["message"]
            assert (await change("add", "decode")).status_code == 400


async def test_a_token_may_be_of_any_letters(engines):
    token = "p\u00e4ssw\u00f6rd \u2713"
    async with proxied(*engines, admin_token=token) as scene:
        for given, status in ((token.encode(), 200), (token.encode()[:-1], 401), ("p\u00e4ss".encode("latin-1"), 401)):
            answer = await scene.client.post("/reset_prefix_cache", headers={b"authorization": b"Bearer " + given})
            assert answer.status_code == status


@pytest.mark.parametrize("token", [" a", "a ", "a\tb", "a\nb", "a\0"])
def test_a_token_that_no_header_can_carry_is_refused(token):
    with pytest.raises(ConfigError, match=r"proxy.admin_token = \*\*\*: no header"):
        Settings(proxy={"admin_token": token})


async def test_prefix_caches_are_reset_everywhere(engines):
    async with proxied(*engines) as scene:
        answer = await scene.client.post("/reset_prefix_cache?reset_external=true", headers=OPERATOR)
        assert answer.status_code == 200 and set(answer.json()["instances"].values()) == {"ok"}
        assert [engine.resets for engine in engines] == [["reset_external=true"]] * 2
        await scene.client.post("/instances/add", json={"type": "decode", "instances": GONE}, headers=OPERATOR)
        answer = await scene.client.post("/reset_prefix_cache", headers=OPERATOR)
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


@pytest.mark.parametrize("path", ["/instances/add", "/instances/remove", "/reset_prefix_cache"])
async def test_without_a_token_a_place_is_no_proof(engines, path):
    """A server in front of the proxy, on the same machine, passes everybody's requests on from a loopback address."""
    change = {"type": "decode", "instances": ["d:1"]}
    async with proxied(*engines, admin_token="") as scene:
        for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer x"}):
            answer = await scene.client.post(path, json=change, headers=headers)
            assert answer.status_code == 403 and "proxy.admin_token" in answer.json()["error"]["message"]
        assert (await scene.client.get("/health")).json()["decode_instances"] == 1


@pytest.mark.parametrize("token", ["", TOKEN])
async def test_the_admin_socket_is_for_who_can_open_it(engines, token, tmp_path):
    prefiller, decoder = engines
    socket = tmp_path / "own" / "admin"
    socket.parent.mkdir(0o700)
    stale = socketserver.UnixStreamServer(str(socket), socketserver.BaseRequestHandler)
    stale.server_close()
    async with proxied(prefiller, decoder, admin_token=token, admin_socket=str(socket)) as scene:
        assert socket.stat().st_mode & 0o777 == 0o600
        transport = httpx.AsyncHTTPTransport(uds=str(socket))
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as operator:
            change = {"type": "decode", "instances": ["d:1"]}
            assert (await operator.post("/instances/add", json=change)).json()["decode"] == [decoder.url, "http://d:1"]
            assert (await operator.get("/health")).json()["decode"][0]["url"] == decoder.url
            assert decoder.url in (await operator.get("/metrics")).text
            assert (await operator.post("/instances/remove", json=change)).status_code == 200
            assert (await operator.post("/reset_prefix_cache")).status_code == 200
            assert (await operator.post("/v1/completions", json={})).status_code == 404
        again = ProxySettings(prefill=GONE, decode=GONE, port=0, admin_socket=str(socket))
        with pytest.raises(ConfigError, match=r"cannot listen on .*give proxy\.admin_socket another path"):
            await serve_proxy(again, lambda _: None, anyio.Event(), anyio.Event())
        assert (await scene.client.get("/health")).status_code == 200
    assert not socket.exists()


def test_the_admin_socket_of_each_proxy_has_a_name_of_its_own(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    folder = f"/run/user/7/layerflow-{os.getuid()}"
    assert str(admin_socket_path("auto", "127.0.0.1", 8000)) == f"{folder}/proxy-127.0.0.1:8000.sock"
    assert str(admin_socket_path("/a/b", "127.0.0.1", 8000)) == "/a/b"
    for bad in ("a/b", "/" + "a" * 107):
        with pytest.raises(ValueError, match="a path from the root of at most 107 bytes"):
            ProxySettings(admin_socket=bad)


async def test_what_no_path_answers_is_an_error_in_the_apis_form(engines):
    async with proxied(*engines) as scene:
        for method, path, status in (("GET", "/v1/nothing", 404), ("POST", "/", 404), ("DELETE", "/v1/models", 405)):
            answer = await scene.client.request(method, path)
            error = answer.json()["error"]
            assert answer.status_code == error["code"] == status and path in error["message"]
        assert answer.headers["allow"]


async def test_web_pages_of_allowed_origins_may_ask(engines):
    prefiller, decoder = engines
    page = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    page |= {"access-control-request-headers": "authorization,content-type"}
    async with proxied(prefiller, decoder, allowed_origins="https://chat.example, https://b.example") as scene:
        asked = await scene.client.options("/v1/chat/completions", headers=page)
        assert asked.status_code == 200 and asked.headers["access-control-allow-origin"] == page["origin"]
        answer = await scene.client.post("/v1/completions", json={"prompt": "a"}, headers={"origin": page["origin"]})
        assert answer.status_code == 200
        assert answer.headers.get_list("access-control-allow-origin") == ["https://chat.example"]
        page["origin"] = "https://evil.example"
        assert "access-control-allow-origin" not in (await scene.client.options("/v1/models", headers=page)).headers
    async with proxied(prefiller, decoder) as scene:
        assert (await scene.client.options("/v1/chat/completions", headers=page)).status_code == 405
    for bad in ("chat.example", "https://a/b"):
        with pytest.raises(ValueError, match="origins such as"):
            ProxySettings(allowed_origins=bad)


@pytest.mark.usefixtures("prefills_are_waited_for")
async def test_what_happened_is_counted(engines):
    engines[0].behaviour = Behaviour(cached=2)
    async with proxied(*engines) as scene:
        for _ in range(3):
            await scene.complete()
        await settled(scene)
        text = (await scene.client.get("/metrics")).text
        found = dict(re.findall(r"^(layerflow_proxy_\S+) (\S+)$", text, re.M))
    assert found['layerflow_proxy_requests_total{path="/v1/completions",status="200"}'] == "3.0"
    assert found["layerflow_proxy_prefill_seconds_count"] == "3.0"
    assert found["layerflow_proxy_cached_tokens_total"] == "6.0"
    assert found['layerflow_proxy_first_token_seconds_count{way="apart"}'] == "3.0"
    assert found['layerflow_proxy_instance_up{instance="decode-1",role="decode"}'] == "1.0"
    assert "_created" not in text
