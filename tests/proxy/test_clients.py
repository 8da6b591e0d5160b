"""Clients that leave, and a proxy that stops."""

import contextlib
import os
import signal
import subprocess
import sys

import anyio
import anyio.lowlevel
import httpx
import pytest

from layerflow import http_server
from layerflow.config.proxy import ProxySettings
from layerflow.proxy import exchange, routes, serve
from layerflow.proxy.answers import make_event
from layerflow.proxy.context import make_context
from layerflow.proxy.metaserver import Metaserver
from layerflow.proxy.request import Body
from layerflow_testing.stub_engine import Behaviour, StubEngine

from .scene import COMPLETIONS, ORDERS, at, ended, events_of, numbered, proxied, said, settled


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_both_legs(order, stream):
    slow = Behaviour(hangs=True)
    with StubEngine(slow) as prefiller, StubEngine(Behaviour(first_s=60)) as decoder:
        if order == "decode-first":
            decoder.behaviour = Behaviour()  # it asks for its prefill, which hangs
        async with proxied(prefiller, decoder, order=order, breaker_failures=1) as scene:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: scene.complete(stream=stream))
                await at(prefiller)
                if order != "prefill-first":
                    await at(decoder)
                tasks.cancel_scope.cancel()
            assert (await ended(prefiller.seen[0])).aborted
            if order != "prefill-first":
                assert (await ended(decoder.seen[0])).aborted
            while await scene.metric("layerflow_proxy_clients_gone_total") < 1:
                pass
            health = (await scene.client.get("/health")).json()
            assert health["open_requests"] == 0
            assert [one["active"] for one in health["prefill"] + health["decode"]] == [0, 0]
            assert {one["state"] for one in health["prefill"] + health["decode"]} == {"up"}, "not the engines' fault"


@pytest.mark.parametrize("order", ORDERS)
async def test_a_client_that_leaves_in_the_middle_of_a_stream_aborts_it(order):
    with StubEngine() as prefiller, StubEngine(Behaviour(between_s=0.05)) as decoder:
        async with proxied(prefiller, decoder, order=order) as scene:
            body = {"prompt": "a", "max_tokens": 10_000, "stream": True}
            async with scene.client.stream("POST", COMPLETIONS, json=body) as answer:
                async for _ in answer.aiter_raw():
                    break
            assert (await ended(decoder.seen[0])).aborted


async def test_a_client_that_takes_nothing_is_left():
    with StubEngine() as prefiller, StubEngine(Behaviour(per_write=500)) as decoder:
        async with proxied(prefiller, decoder, idle_timeout_s=0.5) as scene:
            host, port = scene.url.removeprefix("http://").split(":")
            body = b'{"prompt": "a", "stream": true, "max_tokens": 300000}'
            async with await anyio.connect_tcp(host, int(port)) as silent:
                head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
                await silent.send(head.encode() + body)
                assert (await ended(await at(decoder))).aborted


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_has_its_whole_answer_has_not_left(monkeypatch, stream):
    """A server tells of a complete response as of a client that leaves; its prefill may be running still."""
    gone, told = anyio.Event(), []

    async def prefill(*_, **__):
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
                await anyio.lowlevel.checkpoint()

    async def decode(instance, call, sink, **_):
        if stream:
            await sink.events([make_event(b"x")], [])
        else:
            with sink.room.answer() as kept:
                await sink.whole(Body({"choices": b"[]"}), [], kept)

    async def receive():
        if not told:
            told.append("request")
            return {"type": "http.request", "body": b'{"prompt": "a", "stream": %s}' % str(stream).lower().encode()}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        if message["type"] == "http.response.body" and not message.get("more_body"):
            gone.set()

    monkeypatch.setattr(exchange, "prefill", prefill)
    monkeypatch.setattr(exchange, "decode", decode)
    context = make_context(ProxySettings(prefill="p:1", decode="d:1", short_prompt_tokens=0), Metaserver())
    with anyio.fail_after(20):
        await routes.Completions(context, COMPLETIONS)({"headers": []}, receive, send)
    assert gone.is_set()
    found = context.metrics.render(addresses=False)
    assert b'layerflow_proxy_requests_total{path="/v1/completions",status="200"} 1.0' in found
    assert b"layerflow_proxy_clients_gone_total 0.0" in found


async def answered(stream) -> bytes:
    """All that comes over a connection."""
    content = b""
    with contextlib.suppress(anyio.EndOfStream):
        while True:
            content += await stream.receive()
    return content


async def test_bodies_that_come_slowly_make_room_for_others():
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder, max_requests_bytes=5000) as scene:
            host, port = scene.url.removeprefix("http://").split(":")
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 4000\r\n\r\n"
            connections = [await anyio.connect_tcp(host, int(port)) for _ in range(2)]
            async with connections[0] as oldest, connections[1] as old:
                for count, slow in ((1, oldest), (2, old)):
                    await slow.send(head.encode() + b'{"prompt": "' + b"a" * 1988)
                    while await scene.metric("layerflow_proxy_request_bytes") != 2000 * count:
                        pass
                assert (await scene.complete(prompt="b" * 1500)).status_code == 200
                assert b"503" in (await answered(oldest)).partition(b"\r\n")[0]
                assert await scene.metric("layerflow_proxy_request_bytes") == 2000
                await old.send(b"a" * 1998 + b'"}')
                assert b"200" in (await answered(old)).partition(b"\r\n")[0]
            await settled(scene)
            assert await scene.metric("layerflow_proxy_request_bytes") == 0


async def test_bodies_that_drip_take_no_connection_from_others(monkeypatch):
    """One client holds every connection with a body that never ends."""
    monkeypatch.setattr(serve, "_most_connections", lambda: 4)
    monkeypatch.setattr(http_server, "BODY_GRACE_S", -1.0)
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder) as scene, contextlib.AsyncExitStack() as open_ones:
            host, port = scene.url.removeprefix("http://").split(":")
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n".encode()
            dripping = []
            for count in range(1, 5):
                dripping.append(await open_ones.enter_async_context(await anyio.connect_tcp(host, int(port))))
                await dripping[-1].send(head + b"{")
                while count < 4 and await scene.metric("layerflow_proxy_request_bytes") != count:
                    pass
            async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
                answer = await client.post(scene.url + COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
            assert answer.status_code == 200
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await dripping[0].receive()


async def test_one_address_takes_no_other_its_place_however_often_it_begins(monkeypatch):
    """Each of its connections renews its body before that is late."""
    monkeypatch.setattr(serve, "_most_connections", lambda: 4)
    monkeypatch.setattr(http_server, "BODY_GRACE_S", 600.0)
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder) as scene, contextlib.AsyncExitStack() as open_ones:
            host, port = scene.url.removeprefix("http://").split(":")
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n".encode()
            crowd = []
            for count in range(1, 5):
                crowd.append(await open_ones.enter_async_context(await anyio.connect_tcp(host, int(port))))
                await crowd[-1].send(head + b"{")
                while count < 4 and await scene.metric("layerflow_proxy_request_bytes") != count:
                    pass
            elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
            async with httpx.AsyncClient(transport=elsewhere, trust_env=False, timeout=20) as client:
                answer = await client.post(scene.url + COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
            assert answer.status_code == 200
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await crowd[0].receive()


async def test_while_bodies_of_open_requests_take_all_the_room_others_are_told():
    with StubEngine() as prefiller, StubEngine(Behaviour(first_s=60)) as decoder:
        async with proxied(prefiller, decoder, max_requests_bytes=3000) as scene, anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: scene.complete(prompt="a" * 2000))
            await at(decoder)
            answer = await scene.complete(prompt="b" * 2000)
            assert answer.status_code == 503 and "proxy.max_requests_bytes" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"]
            tasks.cancel_scope.cancel()
        async with proxied(prefiller, prefiller, max_requests_bytes=1024) as scene:
            assert (await scene.complete(prompt="a" * 2000)).status_code == 200, "one alone has its own bound"


async def test_while_it_drains_open_streams_finish_and_new_requests_are_told():
    with StubEngine() as prefiller, StubEngine(Behaviour(between_s=0.5)) as decoder:
        async with proxied(prefiller, decoder) as scene:
            got = []

            async def ask():
                got.append(await scene.complete(stream=True, max_tokens=40))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await at(decoder)
                scene.shutdown.set()
                while (health := await scene.client.get("/health")).status_code == 200:
                    pass
                assert health.status_code == 503 and health.json()["status"] == "draining"
                refused = await scene.complete()
                assert refused.status_code == 503 and "stopping" in refused.json()["error"]["message"]
                decoder.behaviour.between_s = 0.0
            assert said(got[0].text) == numbered(40) and events_of(got[0].text)[-1] == "[DONE]"


@pytest.mark.parametrize("begun", [False, True])
async def test_what_is_open_at_the_end_of_the_drain_is_told(begun):
    with StubEngine() as prefiller, StubEngine(Behaviour(between_s=60, first_s=0 if begun else 60)) as decoder:
        async with proxied(prefiller, decoder, drain_timeout_s=0.2) as scene:
            body = {"prompt": "a", "stream": True}
            async with anyio.create_task_group() as tasks:

                async def stop():
                    await at(decoder)
                    if not begun:
                        scene.shutdown.set()

                tasks.start_soon(stop)
                async with scene.client.stream("POST", COMPLETIONS, json=body) as answer:
                    text = ""
                    async for piece in answer.aiter_text():
                        text += piece
                        scene.shutdown.set()
            if begun:
                assert said(text) == "t0 " and events_of(text)[-1]["error"]["code"] == 503
            else:
                assert answer.status_code == 503 and "stopped" in text
            assert (await ended(decoder.seen[0])).aborted


def test_the_command_serves_until_sigterm():
    with StubEngine() as prefiller, StubEngine(Behaviour(between_s=0.02)) as decoder:
        command = [sys.executable, "-m", "layerflow_cli", "proxy", "--prefill", prefiller.url, "--decode", decoder.url]
        process = subprocess.Popen(
            [*command, "--port", "0", "--order", "prefill-first", "--set", "proxy.short_prompt_tokens=0"],
            stdout=subprocess.PIPE,
            text=True,
            env=dict(os.environ),
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            body = {"prompt": "a", "max_tokens": 30, "stream": True}
            with httpx.stream("POST", url + COMPLETIONS, json=body, timeout=60, trust_env=False) as answer:
                text = ""
                for piece in answer.iter_text():
                    if not text:
                        process.send_signal(signal.SIGTERM)
                    text += piece
            assert said(text) == numbered(30)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate()
    assert prefiller.seen


def test_the_proxy_loads_no_engine():
    code = (
        "import sys\nimport layerflow.proxy.serve\n"
        "engines = {'torch', 'zmq', 'vllm', 'layerflow.agent', 'layerflow.server'}\n"
        "sys.exit(','.join(engines & set(sys.modules)) or None)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_command_refuses_what_it_cannot_use():
    def refused(*arguments: str) -> str:
        ended = subprocess.run(
            [sys.executable, "-m", "layerflow_cli", "proxy", *arguments], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 2
        return ended.stderr

    assert "no prefill engine: give --prefill URL" in refused("--decode", "http://d:1")
    assert "no decode engine" in refused("--prefill", "http://p:1")
    assert "proxy.order" in refused("--prefill", "p:1", "--decode", "d:1", "--order", "sideways")
    assert 'should be "http://host:port"' in refused("--prefill", "p", "--decode", "d:1")
    taken = refused("--prefill", "p:1", "--decode", "d:1", "--host", "192.0.2.1")
    assert "cannot listen on 192.0.2.1:8000" in taken and "proxy.port" in taken
