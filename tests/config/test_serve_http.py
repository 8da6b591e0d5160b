import asyncio
import contextlib
import re
import signal
import socket
from types import SimpleNamespace

import anyio
import httpx
import pytest

from layerflow.errors import ConfigError
from layerflow.server.transport.http import serve_http

METRICS = b"# TYPE layerflow_x_bytes gauge\nlayerflow_x_bytes 3.0\n"
HEALTH = {"status": "ok", "tier": {"backend": "disk", "up": False}}
STATUS = {"sessions": [], "overlap": float("nan"), "pool": {"used_bytes": 5}}


@contextlib.asynccontextmanager
async def serving(host="127.0.0.1", port=0, status=lambda: STATUS):
    state = SimpleNamespace(health=HEALTH, shutdown=anyio.Event())
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve_http(
            host,
            port,
            status=status,
            metrics=lambda: METRICS,
            health=lambda: state.health,
            started=url.set_result,
            shutdown=state.shutdown,
        )
    )
    await asyncio.wait({task, url}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    async with httpx.AsyncClient(base_url=await url, trust_env=False, timeout=60) as client:
        state.client = client
        yield state
        state.shutdown.set()
        async with asyncio.timeout(20):
            await task


async def test_endpoints():
    async with serving() as state:
        metrics = await state.client.get("/metrics")
        assert metrics.content == METRICS and metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        status = await state.client.get("/status")
        assert status.json() == {"sessions": [], "overlap": None, "pool": {"used_bytes": 5}}
        health = await state.client.get("/healthz")
        assert (health.status_code, health.json()) == (200, HEALTH)
        state.health = {"status": "draining"}
        health = await state.client.get("/healthz")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert (await state.client.get("/nothing")).status_code == 404
        assert (await state.client.post("/status")).status_code == 405
        assert "server" not in health.headers


async def test_the_page_shows_what_status_says_and_loads_nothing():
    status = {
        "version": "9.9",
        "healthy": True,
        "endpoint": "ipc:///x/<control>",
        "sessions": [{"memory": True, "name": "m/<b>/dp0", "engine": "e", "model": "m", "tp": "0/2", "steps": 1234}],
        "tier": {"backend": "disk", "up": False, "reason": "a & b"},
    }
    async with serving(status=lambda: status) as state:
        page = await state.client.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    for told in (
        "layerflow 9.9",
        "&lt;b&gt;/dp0",
        "0/2",
        "1,234",
        "disk is down: a &amp; b",
        "ipc:///x/&lt;control&gt;",
    ):
        assert told in page.text
    assert [path for path in ("metrics", "healthz", "status") if f'href="{path}"' in page.text] == [
        "metrics", "healthz", "status",
    ]  # fmt: skip
    links = set(re.findall(r'(?:src|href)\s*=\s*"([^"]*)"', page.text))
    assert (
        links == {"data:,", "metrics", "healthz", "status"} and "<script" not in page.text and "url(" not in page.text
    )


async def test_the_url_has_the_real_port_and_shutdown_frees_it():
    for _ in range(5):  # what is free is given to others, too
        async with serving() as state:
            port = state.client.base_url.port
            assert port
            await state.client.get("/healthz")  # leaves a kept-alive connection behind
        with socket.socket() as again, contextlib.suppress(OSError):
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
            return
    pytest.fail("the port is not free")


async def test_signal_handlers_stay_the_hosts():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with serving():
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_a_port_in_use_is_said_clearly():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: Address already in use; .*server\.http_port"):
            async with serving(port=port):
                pass


async def test_a_host_that_is_not_ours_is_said_clearly():
    with pytest.raises(ConfigError, match=r"server\.http_host"):
        async with serving(host="256.0.0.1"):
            pass


async def test_cancelling_closes_the_listener():
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve_http(
            "127.0.0.1",
            0,
            status=dict,
            metrics=lambda: b"",
            health=lambda: True,
            started=url.set_result,
            shutdown=anyio.Event(),
        )
    )
    address = httpx.URL(await url)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.get(address)
