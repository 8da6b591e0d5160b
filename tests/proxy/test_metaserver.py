"""``/v1/metaserver``, where decoders ask for their prefill: once each, with a true status."""

import ipaddress
import json
import socket
import threading

import anyio
import anyio.lowlevel
import msgspec
import pytest

from layerflow.errors import ProxyError
from layerflow.proxy import hosts, orders
from layerflow.proxy.metaserver import DecodeRequest, Metaserver, read_posted
from layerflow.proxy.request import ClientRequest, parse_body
from layerflow_testing.stub_engine import Behaviour, StubEngine

from .scene import CHAT, COMPLETIONS, at, ended, proxied, settled

ASKING = {"order": "decode-first"}
BY_HAND = Behaviour(asks_metaserver=False, first_s=30)


async def post(scene, decoder, child: str, **more):
    """As the decoder does that was given the request's address."""
    url = (await at(decoder)).params["metaserver"]
    return await scene.client.post(url, json={"request_id": child, **more})


def test_children_are_found_by_every_name_that_decoders_use():
    prompts = [b'"a"', b'"b"']
    several = ClientRequest(COMPLETIONS, parse_body(b'{"n": "4"}'), [], "id", prompts)
    decoding = DecodeRequest(several, "id", lambda *_: None)
    assert decoding.child("cmpl-id-1") == decoding.child("cmpl-id-1-0123abcd") == (1, 0)
    assert decoding.child("3_cmpl-id-0") == decoding.child("3_cmpl-id-0-0123abcd") == (0, 3)
    for unknown in ("id", "cmpl-id", "cmpl-id-2", "chatcmpl-id", "", "4_cmpl-id-0", "-1_cmpl-id-0", "9" * 99 + "_"):
        assert decoding.child(unknown) is None
    chat = DecodeRequest(ClientRequest(CHAT, parse_body(b"{}"), [], "id"), "id", lambda *_: None)
    assert chat.child("chatcmpl-id") == chat.child("chatcmpl-id-01234567") == (0, 0)
    assert chat.child("1_chatcmpl-id") is None


def test_an_address_is_the_one_of_its_request_only():
    metaserver = Metaserver()
    one, other = (
        DecodeRequest(ClientRequest(CHAT, parse_body(b"{}"), [], name), name, lambda *_: None)
        for name in ("abc", "abc-12345678")
    )
    with metaserver.expecting(one) as ticket, metaserver.expecting(other) as others:
        assert metaserver.find(ticket) is one and metaserver.find(others) is other
        number, secret = ticket.split(".")
        for wrong in (
            "",
            ".",
            number,
            f"{number}.",
            f"{number}.x",
            f"{others.split('.')[0]}.{secret}",
            f".{secret}",
            "\xe9",
        ):
            assert metaserver.find(wrong) is None
    assert metaserver.find(ticket) is None
    assert one.child("chatcmpl-abc-12345678") == (0, 0), "vLLM's digits behind its own name"
    assert other.child("chatcmpl-abc") is None


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"request_id": "cmpl-x-0"}', 404),
        (b"{}", 400),
        (b"[1]", 400),
        (b"{", 400),
        (b'{"request_id": 3}', 400),
        (b"[" * 100_000, 400),
        (b" " * (5 << 20), 413),
        (b'{"request_id": "cmpl-x-0", "more": ["%s"]}' % (b'x", "' * 110_000), 413),
    ],
)
async def test_what_belongs_to_no_request_is_refused(body, status):
    with StubEngine() as prefiller, StubEngine(BY_HAND) as decoder:
        async with proxied(prefiller, decoder, **ASKING) as scene, anyio.create_task_group() as tasks:
            tasks.start_soon(scene.complete)
            url = (await at(decoder)).params["metaserver"]
            answer = await scene.client.post(url, content=body)
            assert answer.status_code == status and answer.json()["error"]["code"] == status
            for foreign in ("/v1/metaserver", "/v1/metaserver/", "/v1/metaserver/1.x", url[:-1]):
                answer = await scene.client.post(foreign, content=body)
                assert answer.status_code == 404 and answer.json()["error"]["code"] == 404
            tasks.cancel_scope.cancel()
        assert not prefiller.seen


async def test_a_client_cannot_steer_a_transfer_by_its_own_or_a_guessed_id():
    """It knows the id, and so the child's name; it does not know the address."""
    with StubEngine() as prefiller, StubEngine(BY_HAND) as decoder:
        async with proxied(prefiller, decoder, **ASKING) as scene, anyio.create_task_group() as tasks:
            headers = {"x-request-id": "order-17"}
            tasks.start_soon(lambda: scene.client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers))
            await at(decoder)
            for path in ("/v1/metaserver", "/v1/metaserver/1", "/v1/metaserver/1."):
                posted = {"request_id": "cmpl-order-17-0", "remote_host": "attacker.example", "remote_port": 4444}
                assert (await scene.client.post(path, json=posted)).status_code == 404
            tasks.cancel_scope.cancel()
        assert not prefiller.seen


@pytest.mark.parametrize(
    "posted",
    [
        {"remote_host": "attacker.example"},
        {"remote_host": "192.0.2.7"},
        {"remote_multi_nodes_meta_mapping": {"0": {"host": "192.0.2.7"}}},
        {"layerflow": {"servers": ["tcp://127.0.0.1:1", "tcp://192.0.2.7:1"]}},
        {"other": ["2001:db8::7"]},
        {"metaserver": "http://[::1/x"},
        {"hosts": [f"tcp://localhost{number}.example:1" for number in range(33)]},
    ],
)
async def test_a_decoder_names_no_other_host(posted):
    with StubEngine() as prefiller, StubEngine() as decoder:
        decoder.answer_for = lambda seen: BY_HAND if seen.params else Behaviour()
        async with proxied(prefiller, decoder, **ASKING) as scene, anyio.create_task_group() as tasks:
            answers = []

            async def ask():
                answers.append(await scene.complete())

            tasks.start_soon(ask)
            child = f"cmpl-{(await at(decoder)).headers['x-request-id']}-0"
            told = await post(scene, decoder, child, **posted)
            assert told.status_code == 502 and "it names" in told.json()["error"]["message"]
        assert answers[0].status_code == 200, "a decoder computes the prompt"
    assert not prefiller.seen


async def test_what_a_decoder_posts_of_its_own_host_goes_on_as_it_is():
    posted = {
        "remote_host": "localhost",
        "remote_port": 7,
        "remote_engine_id": "127.0.0.1:x",
        "servers": ["tcp://127.0.0.1:1", "ipc:///run/x", "tcp://d.example:1"],
        "new": None,
    }
    with StubEngine() as prefiller, StubEngine(BY_HAND) as decoder:
        given = f"{decoder.url}=tcp://d.example:9470"
        async with proxied(prefiller, given, **ASKING) as scene, anyio.create_task_group() as tasks:
            tasks.start_soon(scene.complete)
            child = f"cmpl-{(await at(decoder)).headers['x-request-id']}-0"
            assert (await post(scene, decoder, child, **posted)).status_code == 200
            tasks.cancel_scope.cancel()
    assert prefiller.seen[0].params == {"request_id": child, **posted}


async def test_a_resolver_that_does_not_answer_costs_the_post_that_asked_it(monkeypatch):
    """Not another decoder's, nor the engine's connections; and a name that is asked for again takes no thread."""
    answers, asked, resolve = threading.Event(), [], socket.getaddrinfo

    def slow(host, *args, **more):
        if str(host).endswith(".slow.example"):
            asked.append(host)
            assert answers.wait(60)
        return resolve(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(hosts, "RESOLVE_S", 0.5)
    names = {f"n{number}.slow.example" for number in range(20)}
    slow_one, other = hosts.Resolver(), hosts.Resolver()
    try:
        for _ in range(2):
            with pytest.raises(ProxyError, match="not resolved in"):
                await hosts.check_hosts({"hosts": [f"tcp://{name}" for name in names]}, {"127.0.0.1"}, slow_one)
        while len(asked) < 20:  # noqa: ASYNC110 - of other threads, which have no event
            await anyio.sleep(0.005)
        assert set(asked) == names and len(asked) == 20, "side by side, each once"
        monkeypatch.setattr(hosts, "RESOLVE_S", 30.0)
        await hosts.check_hosts({"remote_host": "localhost"}, {"127.0.0.1"}, other)
        assert await anyio.getaddrinfo("localhost", 1), "the loop's own threads are free"
    finally:
        answers.set()


async def test_where_a_post_comes_from_is_what_its_connection_says(monkeypatch):
    """And no header, which anybody can write."""
    seen = []

    async def check(posted, own, resolver):
        seen.append(set(own))

    monkeypatch.setattr(orders, "check_hosts", check)
    with StubEngine() as prefiller, StubEngine(Behaviour(asks_metaserver=False, first_s=60)) as decoder:
        async with proxied(prefiller, decoder, order="decode-first") as scene, anyio.create_task_group() as tasks:
            tasks.start_soon(scene.complete)
            asked = await at(decoder)
            posted = {"request_id": f"cmpl-{asked.headers['x-request-id']}-0"}
            headers = {"x-forwarded-for": "192.0.2.9", "forwarded": "for=192.0.2.9"}
            answer = await scene.client.post(asked.params["metaserver"], json=posted, headers=headers)
            assert answer.status_code == 200
            tasks.cancel_scope.cancel()
    assert seen == [{"127.0.0.1"}]


def test_an_address_that_can_be_bound_is_not_always_this_machines(monkeypatch):
    """As where the machine may take over another one's (``net.ipv4.ip_nonlocal_bind``)."""

    class Anywhere(socket.socket):
        def bind(self, address):
            super().bind(("", 0))

    monkeypatch.setattr(socket, "socket", Anywhere)
    local = [
        address
        for text in ("127.0.0.1", "127.9.9.9", "192.0.2.9", "0.0.0.0", "2001:db8::9", "::")
        if hosts._is_local(address := ipaddress.ip_address(text))
    ]
    assert [str(address) for address in local] == ["127.0.0.1", "127.9.9.9"]


async def test_lists_of_blocks_go_on_unread_and_texts_are_looked_at_in_turns():
    blocks = list(range(200_000))
    posted = read_posted(json.dumps({"request_id": "x", "blocks": [blocks, [1.5]], "tags": ["a"] * 50_000}).encode())
    assert isinstance(posted["blocks"], msgspec.Raw) and json.loads(bytes(posted["blocks"])) == [blocks, [1.5]]
    turns, over = [], anyio.Event()

    async def others():
        while not over.is_set():
            turns.append(1)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(others)
        await hosts.check_hosts(posted, {"127.0.0.1"}, hosts.Resolver())
        over.set()
    assert len(turns) > 100


async def test_names_beyond_the_threads_of_a_decoder_wait_for_one(monkeypatch):
    let_go, asked = threading.Semaphore(0), []

    def slow(host, *_args, **_more):
        asked.append(host)
        assert let_go.acquire(timeout=60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(hosts, "RESOLVE_S", 60.0)
    resolver = hosts.Resolver()
    names = [f"n{number}.example" for number in range(40)]
    async with anyio.create_task_group() as tasks:
        for part in (names[:20], names[20:]):
            tasks.start_soon(hosts.check_hosts, {"host": part}, {"127.0.0.1"}, resolver)
        while len(asked) < 32:  # noqa: ASYNC110 - of other threads, which have no event
            await anyio.sleep(0.005)
        let_go.release(40)
    assert sorted(asked) == sorted(names)


async def test_a_request_has_as_many_prefills_as_children():
    with StubEngine() as prefiller, StubEngine(BY_HAND) as decoder:
        async with proxied(prefiller, decoder, **ASKING) as scene, anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: scene.complete(n=2, prompt=["a", "b"]))
            name = (await at(decoder)).headers["x-request-id"]
            statuses = [
                (await post(scene, decoder, f"{choice}_cmpl-{name}-{prompt}{digits}")).status_code
                for choice in range(3)
                for prompt in range(3)
                for digits in ("", "-0123abcd", "-89abcdef")
            ]
            tasks.cancel_scope.cancel()
    assert statuses == [200] * 6 + [404] * 3 + [200] * 6 + [404] * 3 + [404] * 9
    assert len(prefiller.seen) == 4


async def test_posts_that_wait_for_one_prefill_are_bounded():
    with StubEngine(Behaviour(hangs=True)) as prefiller, StubEngine(BY_HAND) as decoder:
        async with proxied(prefiller, decoder, **ASKING) as scene, anyio.create_task_group() as tasks:
            tasks.start_soon(scene.complete)
            child = f"cmpl-{(await at(decoder)).headers['x-request-id']}-0"
            statuses = []
            refused = anyio.Event()

            async def ask():
                statuses.append((await post(scene, decoder, child)).status_code)
                refused.set()

            for _ in range(5):
                tasks.start_soon(ask)
            await refused.wait()
            assert statuses == [429]
            tasks.cancel_scope.cancel()


async def test_asking_again_prefills_once():
    with StubEngine(Behaviour(first_s=0.1)) as prefiller, StubEngine(BY_HAND) as decoder:
        async with proxied(prefiller, decoder, **ASKING) as scene, anyio.create_task_group() as tasks:
            tasks.start_soon(scene.complete)
            child = f"cmpl-{(await at(decoder)).headers['x-request-id']}-0"
            statuses = []

            async def ask():
                statuses.append((await post(scene, decoder, child, tag=1)).status_code)

            async with anyio.create_task_group() as asking:
                for _ in range(3):
                    asking.start_soon(ask)
            await ask()
            assert statuses == [200] * 4
            assert [seen.params for seen in prefiller.seen] == [{"request_id": child, "tag": 1}]
            assert (await post(scene, decoder, f"{child}-0123abcd")).status_code == 200
            assert len(prefiller.seen) == 1, "the same child under its other name"
            tasks.cancel_scope.cancel()


async def test_a_prefill_that_fails_is_told_and_the_decoder_is_asked_without_one():
    """vLLM-Ascend's decoder takes a 502 as success, and waits for ever: so its request is ended."""
    with StubEngine(Behaviour(status=500)) as prefiller, StubEngine() as decoder:
        decoder.answer_for = lambda seen: BY_HAND if seen.params else Behaviour()
        async with proxied(prefiller, decoder, **ASKING) as scene, anyio.create_task_group() as tasks:
            answers = []

            async def ask():
                answers.append(await scene.complete())

            tasks.start_soon(ask)
            child = f"cmpl-{(await at(decoder)).headers['x-request-id']}-0"
            told = await post(scene, decoder, child)
            assert told.status_code == 502 and "stub says 500" in told.json()["error"]["message"]
            assert (await ended(decoder.seen[0])).aborted
        assert answers[0].status_code == 200
        assert decoder.seen[1].params is None and decoder.seen[1].finished
        assert len({seen.headers["x-request-id"] for seen in decoder.seen}) == 2


async def test_a_prefill_that_does_not_end_in_time_is_told():
    with StubEngine(Behaviour(hangs=True)) as prefiller, StubEngine(BY_HAND) as decoder:
        given = {**ASKING, "prefill_timeout_s": 1.5, "on_prefill_failure": "recompute", "max_recompute_tokens": 0}
        async with proxied(prefiller, decoder, **given) as scene, anyio.create_task_group() as tasks:
            answers = []

            async def ask():
                answers.append(await scene.complete())

            tasks.start_soon(ask)
            child = f"cmpl-{(await at(decoder)).headers['x-request-id']}-0"
            assert (await post(scene, decoder, child)).status_code in (502, 504)
            assert (await ended(await at(prefiller))).aborted
        assert answers[0].status_code == 503


async def test_a_request_that_has_ended_asks_in_vain():
    with StubEngine() as prefiller, StubEngine(Behaviour(asks_metaserver=False)) as decoder:
        async with proxied(prefiller, decoder, **ASKING) as scene:
            answer = await scene.complete()
            await settled(scene)
            assert (await post(scene, decoder, f"cmpl-{answer.headers['x-request-id']}-0")).status_code == 404
        assert not prefiller.seen


async def test_the_metaservers_address_may_be_given():
    with StubEngine() as prefiller, StubEngine(Behaviour(asks_metaserver=False)) as decoder:
        url = "http://proxy.example:80/v1/metaserver"
        async with proxied(prefiller, decoder, **ASKING, metaserver_url=url, host="0.0.0.0") as scene:
            await scene.client.post(scene.url.replace("0.0.0.0", "127.0.0.1") + COMPLETIONS, json={"prompt": "a"})
        assert decoder.seen[0].params["metaserver"].startswith(f"{url}/")


async def test_a_wildcard_address_is_told_as_the_decoder_sees_it():
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder, **ASKING, host="0.0.0.0") as scene:
            local = scene.url.replace("0.0.0.0", "127.0.0.1")
            assert (await scene.client.post(local + COMPLETIONS, json={"prompt": "a"})).status_code == 200
        assert decoder.seen[0].params["metaserver"].startswith(f"{local}/v1/metaserver/")
        assert decoder.seen[0].asked == [200]
