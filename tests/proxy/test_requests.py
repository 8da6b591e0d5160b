"""What clients send, and what engines answer, that is odd: it passes as it came, or hurts its own request only."""

import contextlib
import json
import time
from collections.abc import AsyncIterator

import anyio
import httpx
import pytest

from layerflow.config.proxy import InstanceAddress, ProxySettings
from layerflow.errors import ProxyError, UpstreamError
from layerflow.proxy import orders, request
from layerflow.proxy.answers import ClientResponse
from layerflow.proxy.context import BodyBudget, make_context
from layerflow.proxy.exchange import Exchange
from layerflow.proxy.instances import Instance, InstanceRole, sleep_on_time
from layerflow.proxy.legs import post
from layerflow.proxy.metaserver import Metaserver
from layerflow.proxy.request import (
    CHAT,
    COMPLETIONS,
    MOST_HEADERS,
    MOST_NAMES,
    Body,
    parse_body,
    passed_on,
    prompts_in,
    read_request,
)
from layerflow_testing.stub_engine import Behaviour, StubEngine

from .raw_engine import RawEngine, raw_answer
from .scene import OPERATOR, ORDERS, ROOM, Scene, at, ended, events_of, numbered, proxied, said, settled


def indices(answer: httpx.Response) -> list[int]:
    return [choice["index"] for choice in answer.json()["choices"]]


@pytest.mark.parametrize("n", ["2", 2.0, "2.0", 2])
async def test_numbers_are_read_as_vllm_reads_them(n):
    with StubEngine() as prefiller, StubEngine() as decoder:
        decoder.answer_for = lambda seen: Behaviour(raw=_choices(int(float(seen.body["n"]))))
        async with proxied(prefiller, decoder) as scene:
            assert indices(await scene.complete(n=n, prompt=["a", "b"])) == [0, 1, 2, 3]


def _choices(count: int) -> bytes:
    choices = [{"index": index, "text": "x", "finish_reason": "stop"} for index in range(count)]
    return json.dumps({"choices": choices}).encode()


@pytest.mark.parametrize("stream", ["true", 1, "yes", True, "1"])
async def test_flags_are_read_as_vllm_reads_them(stream):
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder, order="prefill-first") as scene:
            assert said((await scene.complete(stream=stream)).text) == numbered(3)
            assert (await scene.complete(echo=stream)).status_code == 200
            assert len(prefiller.seen) == 1, "echo is for a decoder alone"


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (b'\xef\xbb\xbf{"prompt": "a"}', {"prompt": "a"}),
        ('{"prompt": "\u00e9"}'.encode("utf-16"), {"prompt": "\u00e9"}),
        ('{"prompt": "a"}'.encode("utf-32-le"), {"prompt": "a"}),
        (b'{"prompt": "a", "prompt": "b"}', {"prompt": "b"}),
        (b'{"prompt": "\\ud800", "\\ud800": 1}', {"prompt": "\ud800", "\ud800": 1}),
        (b'{"prompt": [1,\n 2], "logit_bias": {"1": 1e3}}', {"prompt": [1, 2], "logit_bias": {"1": 1000.0}}),
        (b'{"prompt": "a", "kv_transfer_params": {"do_remote_prefill": true}}', {"prompt": "a"}),
        (b'{"prompt": "a", "kv_transfer_p\\u0061rams": 1}', {"prompt": "a"}),
        (b'{"vllm_xargs": {"kv_transfer_p\\u0061rams": "x", "a": 1}}', {"vllm_xargs": {"a": 1}}),
        (b'{"vllm_xargs": {"kv_transfer_params": "x"}}', {"vllm_xargs": {}}),
        (b"{}", {}),
    ],
)
def test_bodies_are_passed_on_as_vllm_would_have_read_them(raw, read):
    assert json.loads(parse_body(raw).encode()) == read


def test_what_python_reads_and_json_has_not():
    assert parse_body(b'{"temperature": NaN, "top_p": Infinity}').encode() == b'{"temperature":NaN,"top_p":Infinity}'


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"7",
        b"{",
        b'{"a": 1} x',
        b"\xff\xfe{",
        b'{"\xff": 1}',
        b"{" * 100_000,
        b'{"a":' + b"[" * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(raw):
    with pytest.raises(ProxyError) as caught:
        parse_body(raw)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("prompt", "several"),
    [
        (["a", "b"], True),
        (["a"], False),
        (["]", '"],["', "\\", '\\"'], True),
        (["a\ud800", "b"], True),
        (["a\ud800", 1], False),
        ([[1, 2], [3], []], True),
        ([[1]], False),
        ([1, 2], False),
        ("a", False),
        ([], False),
        (None, False),
        ({}, False),
        ([["]", 1], ["a"]], False),
        ([[[1]], [2]], False),
        ([[1], "a"], False),
        (["a", [1]], False),
        ([[1], 2, 3], False),
        ([[1], None], False),
        (["a", 1], False),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_lists_of_prompts_are_taken_apart_only_where_each_is_one(prompt, several, indent):
    found = prompts_in(json.dumps(prompt, indent=indent).encode(), 10)
    assert [json.loads(one) for one in found] == (prompt if several else [])


@pytest.mark.parametrize("prompt", ["a", "\\", '"' * 5, [1, 2], []])
def test_a_request_has_so_many_prompts_at_most(prompt):
    raw = json.dumps({"prompt": [prompt] * 8}).encode()
    assert len(read_request(COMPLETIONS, [], raw, "id", 8).prompts) == 8
    with pytest.raises(ProxyError, match=r"more than 7 prompts \(proxy.max_prompts\)") as caught:
        read_request(COMPLETIONS, [], raw, "id", 7)
    assert caught.value.status == 400


@pytest.mark.parametrize("order", ORDERS)
async def test_a_list_of_a_million_prompts_costs_nobody_anything(order):
    body = b'{"prompt": [' + b",".join([b'"a"'] * 1_000_000) + b"]}"
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder, order=order) as scene:
            answer = await scene.client.post(COMPLETIONS, content=body)
            assert answer.status_code == 400 and "proxy.max_prompts" in answer.json()["error"]["message"]
        assert not prefiller.seen and not decoder.seen


async def test_long_lists_are_served_by_few_tasks():
    count = 130
    most = 0
    with StubEngine() as prefiller, StubEngine() as decoder:

        def behave(seen):
            nonlocal most
            most = max(most, sum(not one.ended.is_set() for one in decoder.seen))
            return Behaviour()

        decoder.answer_for = behave
        async with proxied(prefiller, decoder, order="prefill-first") as scene:
            answer = await scene.complete(prompt=["a"] * count, max_tokens=1)
            assert indices(answer) == list(range(count))
    assert len(decoder.seen) == count and most <= 64


MANY = b"{" + b",".join(b'"%06d":[0,{"a":1}]' % number for number in range(20_000)) + b"}"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":"hi",' + MANY[1:],
        b'{"prompt":"hi",' + b'"":0,' * 20_000 + b'"a":0}',
        b'{"prompt":"hi",' + b",".join(b'"%d":0' % number for number in range(MOST_NAMES)) + b"}",
        b'{"prompt":"hi","x":NaN,' + MANY[1:],
        (b'{"prompt":"hi",' + MANY[1:]).decode().encode("utf-16"),
    ],
    ids=["many", "one of no letters", "few bytes", "as Python reads it", "utf-16"],
)
def test_a_request_of_too_many_fields_is_refused_before_they_are_built(raw):
    with pytest.raises(ProxyError, match=f"more than {MOST_NAMES} fields") as caught:
        parse_body(raw)
    assert caught.value.status == 400


def test_names_below_the_fields_are_not_counted():
    raw = b'{"messages":' + MANY + b',"prompt":"' + b'\\"a\\":' * 20_000 + b'"}'
    assert parse_body(raw).encode() == raw


def test_many_fields_are_not_read_to_their_end(monkeypatch):
    """The rest of 64 MiB of them would be a second of the loop."""
    asked = []
    monkeypatch.setattr(request, "decode_values", asked.append)
    with pytest.raises(ProxyError, match="fields"):
        parse_body(MANY)
    assert not asked and request._counted.names == MOST_NAMES + 1


def test_large_extra_arguments_are_not_built():
    extra = b'{"a":"' + b"x" * (1 << 20) + b'"}'
    assert parse_body(b'{"vllm_xargs":' + extra + b"}").raw("vllm_xargs") == extra
    for steering in (b"\\n", b"kv_transfer_params"):
        with pytest.raises(ProxyError, match="vllm_xargs") as caught:
            parse_body(b'{"vllm_xargs":' + extra.replace(b"xx", steering, 1) + b"}")
        assert caught.value.status == 400


async def test_a_request_of_too_many_headers_is_sent_to_no_engine():
    """Each engine would get them, with each prompt of a list."""
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder) as scene:
            for more, status in ((-20, 200), (0, 400)):
                headers = [(f"x-{number}", "y") for number in range(MOST_HEADERS + more)]
                answer = await scene.client.post(
                    COMPLETIONS, json={"prompt": ["a", "b"], "max_tokens": 1}, headers=headers
                )
                assert answer.status_code == status, answer.text
                models = await scene.client.get("/v1/models", headers=headers)
                assert models.status_code == status, models.text
            for refused in (answer, models):
                assert f"more than {MOST_HEADERS} headers" in refused.json()["error"]["message"]
            assert len(decoder.seen) == 2, "the first one's prompts"


@pytest.mark.parametrize("order", ORDERS)
async def test_a_client_s_headers_are_read_once_for_all_legs(monkeypatch, order):
    """One `Connection` may name thousands."""
    read = []

    def count(headers):
        read.append(headers)
        return passed_on(headers)

    monkeypatch.setattr(request, "passed_on", count)
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder, order=order) as scene:
            headers = [("connection", "x-hop,x-other"), ("x-hop", "1"), ("x-kept", "2")]
            answer = await scene.client.post(
                COMPLETIONS, json={"prompt": ["a", "b", "c"], "max_tokens": 1}, headers=headers
            )
            assert answer.status_code == 200, answer.text
            legs = [*prefiller.seen, *decoder.seen]
            assert len(legs) >= 4, "three prefills, and the decoding of one list or of three prompts"
            assert all(leg.headers["x-kept"] == "2" and "x-hop" not in leg.headers for leg in legs)
    assert len(read) == 1


def test_headers_stand_beside_a_long_list_of_prompts():
    raw = b'{"prompt":[' + b",".join([b'"a"'] * 1000) + b"]}"
    few, many = ([(b"x", b"y" * size)] for size in (200_000, 300_000))
    assert len(read_request(COMPLETIONS, few, raw, "id", 1000).prompts) == 1000
    with pytest.raises(ProxyError, match="beside its 1000 prompts") as caught:
        read_request(COMPLETIONS, many, raw, "id", 1000)
    assert caught.value.status == 400


def test_what_stands_beside_a_long_list_of_prompts_is_bounded():
    """It is sent once for each of them."""
    prompts = b",".join([b'"a"'] * 1000)
    few, many = (b'{"user":"' + b"x" * size + b'","prompt":[' + prompts + b"]}" for size in (200_000, 300_000))
    assert len(read_request(COMPLETIONS, [], few, "id", 1000).prompts) == 1000
    with pytest.raises(ProxyError, match="beside its 1000 prompts") as caught:
        read_request(COMPLETIONS, [], many, "id", 1000)
    assert caught.value.status == 400


async def test_the_json_of_a_large_prompt_is_never_built():
    """A body is taken apart and put together by copying: its numbers become no objects."""
    ids = b"[" + b",".join([b"123"] * 500_000) + b"]"
    request = read_request(COMPLETIONS, [], b'{"n": 1, "prompt": ' + ids + b"}", "id", 8)
    assert request.body.raw("prompt") == ids and request.body.changed({"n": 2}).raw("prompt") is not None
    assert request.body.changed({"n": 2}).encode() == b'{"n":2,"prompt":' + ids + b"}"


ODD = b'{"tokens" : [1.50e0 ,\t-0.0, 1E+2],"top":[{"\\u0061":-1.000},{}], "far": 1e+040, "bytes":"\\u00e9"}'


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
async def test_what_a_choice_says_is_never_built(order, prompt):
    """Log probabilities are 25 MB of an answer: they pass in their bytes, which nobody would write again."""
    choice = b'{"text":"x", "logprobs": %b,"index" :%d, "finish_reason":"stop"}'
    count = len(prompt) if order == "decode-first" else 1
    choices = b",".join(choice % (ODD, index) for index in range(count))
    raw = b'{"id":"x", "prompt_logprobs":%b, "choices": [%b],"usage":{"prompt_tokens":2}}' % (ODD, choices)
    with StubEngine(Behaviour(cached=1)) as prefiller, StubEngine(Behaviour(raw=raw)) as decoder:
        async with proxied(prefiller, decoder, order=order) as scene:
            answer = await scene.complete(prompt=prompt)
    assert answer.status_code == 200 and answer.content.count(ODD) == len(prompt) + 1
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert [choice["index"] for choice in json.loads(answer.content)["choices"]] == list(range(len(prompt)))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_an_index_that_is_null_is_none(prompt, stream):
    raw = b'{"choices":[{"index":null,"text":"x","finish_reason":"stop"}]}'
    raw = b"data: %b\n\ndata: [DONE]\n\n" % raw if stream else raw
    with StubEngine() as prefiller, StubEngine(Behaviour(raw=raw)) as decoder:
        async with proxied(prefiller, decoder) as scene:
            answer = await scene.complete(prompt=prompt, stream=stream)
    assert answer.status_code == 200
    events = events_of(answer.text)[:-1] if stream else [answer.json()]
    found = [choice["index"] for event in events for choice in event["choices"]]
    assert sorted(found, key=str) == ([None] if prompt == "a" else [0, 1])


def _large(nbytes: int) -> bytes:
    return b'{"choices":[{"index":0,"text":"%b","finish_reason":"stop"}]}' % (b"x" * nbytes)


@pytest.mark.parametrize("order", ["concurrent", "prefill-first"])
@pytest.mark.parametrize("room", ["8MiB", "80MiB"])
async def test_the_answers_to_a_list_count_among_what_the_proxy_keeps(order, room):
    with StubEngine() as prefiller, StubEngine(Behaviour(raw=_large(1 << 20))) as decoder:
        async with proxied(prefiller, decoder, order=order, max_requests_bytes=room) as scene:
            answer = await scene.complete(prompt=["a"] * 64)
            if room == "8MiB":
                assert answer.status_code == 503 and "no room for an answer" in answer.json()["error"]["message"]
                assert "proxy.max_requests_bytes" in answer.json()["error"]["message"]
            else:
                assert indices(answer) == list(range(64)) and len(answer.content) > 64 << 20
            health = await settled(scene)
            assert await scene.metric("layerflow_proxy_request_bytes") == 0
            assert {one["state"] for one in health["prefill"] + health["decode"]} == {"up"}, "not the engines' fault"


@pytest.mark.parametrize("stream", [False, True])
async def test_work_that_is_done_is_not_thrown_away_where_bodies_take_all_the_room(stream):
    """What a prefill engine answers is read and let go of; the client's answer is an ordinary one."""
    decoded = Behaviour() if stream else Behaviour(raw=_large(60 << 10))
    with StubEngine(Behaviour(raw=_large(200 << 10))) as prefiller, StubEngine() as decoder:
        decoder.answer_for = lambda seen: Behaviour(first_s=60) if "b" in seen.body["prompt"] else decoded
        async with (
            proxied(prefiller, decoder, order="prefill-first", max_requests_bytes="100KiB") as scene,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(lambda: scene.complete(prompt="b" * 50_000))
            await at(decoder)
            answer = await scene.complete(prompt="a" * 30_000, stream=stream)
            assert answer.status_code == 200, answer.text
            refused = await scene.complete(prompt="a" * 50_000)
            assert refused.status_code == 503 and "room for the request's body" in refused.text
            tasks.cancel_scope.cancel()


def test_the_last_eighth_is_for_answers_and_each_request_has_room_for_an_ordinary_one():
    budget = BodyBudget(1 << 20)
    with budget.share() as full, budget.share() as coming, budget.share() as new:
        full.add((7 << 17) - 100)
        full.complete()
        with pytest.raises(ProxyError, match="no room for the request's body"):
            new.add(101)
        new.end()
        coming.add(100)
        full.part().add(1 << 17)
        assert budget.nbytes == 1 << 20, "all of it is used"
        with budget.share() as ordinary:
            ordinary.complete()
            first, second = ordinary.part(), ordinary.part()
            first.part().add(40 << 10)
            second.part().add(24 << 10)
            with pytest.raises(ProxyError, match="no room for an answer"):
                second.part().add(1)
            assert not coming.given_up, "its room would not have been enough"
            assert budget.nbytes == (1 << 20) + (64 << 10) + 1, "what is held counts"
            first.end()
            second.end()
            ordinary.part().add(64 << 10)
    assert budget.nbytes == 0


def test_an_answer_has_the_room_of_bodies_that_come():
    budget = BodyBudget(1 << 20)
    with budget.share() as whole, budget.share() as oldest, budget.share() as newer:
        whole.add(1 << 10)
        whole.complete()
        oldest.add(400 << 10)
        newer.add(400 << 10)
        with budget.share() as other:
            other.add(1 << 10)
            other.complete()
            whole.part().add(500 << 10)
            assert oldest.given_up and not newer.given_up
            assert budget.nbytes == (902 << 10)


async def test_the_answers_to_a_list_are_let_go_of_as_they_are_sent():
    kept, written = [], []
    with BodyBudget(1 << 30).share() as room:

        async def serve(part, sink):
            with sink.room.answer() as share:
                share.add(1 << 20)
                await sink.whole(Body({"choices": b'[{"text":"%b"}]' % (b"x" * (1 << 20))}), [], share)

        async def send(message):
            if body := message.get("body"):
                kept.append(room.budget.nbytes)
                written.append(body)

        request = read_request(COMPLETIONS, [], b'{"prompt": ["a", "b", "c", "d"]}', "id", 8)
        await orders.serve_list(request, ClientResponse(send, "id", 60, room), serve)
    assert max(map(len, written)) <= 64 << 10, "so much may wait uncounted for a slow client"
    assert sorted(set(kept), reverse=True) == [count << 20 for count in (4, 3, 2, 1, 0)][: len(set(kept))]
    assert kept == sorted(kept, reverse=True) and kept[-1] <= 1 << 20 < kept[0]
    assert [one["index"] for one in json.loads(b"".join(written))["choices"]] == [0, 1, 2, 3]


@contextlib.asynccontextmanager
async def asked_and_not_read(scene: Scene) -> AsyncIterator[None]:
    """A client that has asked, and takes no byte of its answer; gone behind the block."""
    host, port = scene.url.removeprefix("http://").split(":")
    async with await anyio.connect_tcp(host, int(port)) as silent:
        body = b'{"prompt": "a"}'
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        await silent.send(head.encode() + body)
        yield


async def test_an_answer_is_kept_for_a_client_that_takes_it_and_no_longer():
    with StubEngine() as prefiller, StubEngine(Behaviour(raw=_large(32 << 20))) as decoder:
        async with proxied(prefiller, decoder, idle_timeout_s=3) as scene, asked_and_not_read(scene):
            while await scene.metric("layerflow_proxy_request_bytes") < 32 << 20:
                pass
            while await scene.metric("layerflow_proxy_clients_gone_total") < 1:
                pass
            assert await scene.metric("layerflow_proxy_request_bytes") == 0


async def test_an_engine_whose_answer_has_been_read_is_not_busy_while_its_client_takes_it():
    with StubEngine() as prefiller, StubEngine(Behaviour(raw=_large(32 << 20))) as decoder:
        async with proxied(prefiller, decoder, idle_timeout_s=600) as scene:
            async with asked_and_not_read(scene):
                with anyio.fail_after(20):
                    while await scene.metric("layerflow_proxy_request_bytes") < 32 << 20:
                        pass
                    while await scene.metric("layerflow_proxy_instance_requests"):
                        pass
                assert await scene.metric("layerflow_proxy_instance_prompt_tokens") == 0
                assert (await scene.client.get("/health")).json()["open_requests"] == 1
            await settled(scene)
            assert await scene.metric("layerflow_proxy_instance_requests") == 0


async def test_time_in_which_the_loop_was_late_is_not_an_engines():
    """The loop stands still for longer than the sleep: the answer is there behind it."""
    answered = anyio.Event()
    in_time = False

    async def wait():
        nonlocal in_time
        await sleep_on_time(1.0)
        in_time = answered.is_set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.lowlevel.checkpoint()
        time.sleep(1.5)  # noqa: ASYNC251 - what the test is about
        await anyio.lowlevel.checkpoint()
        answered.set()
    assert in_time


VALUES = (b"Jose", "Jos\u00e9".encode(), "Jos\u00e9".encode("latin-1"))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("value", VALUES)
async def test_headers_pass_in_their_bytes_both_ways(order, value):
    completion = raw_answer(_choices(1), headers=[(b"x-said", value), (b"set-cookie", b"a=" + value)])
    with RawEngine(completion) as prefiller, RawEngine(completion) as decoder:
        async with proxied(prefiller.url, decoder.url, order=order) as scene:
            for _ in range(2):
                answer = await scene.client.post(
                    COMPLETIONS, json={"prompt": "a"}, headers=[(b"x-user", value), (b"x-request-id", b"id")]
                )
                scene.client.cookies.clear()  # the client of this test keeps them
                models = await scene.client.get("/v1/models", headers=[(b"x-user", value)])
                scene.client.cookies.clear()
                assert answer.status_code == models.status_code == 200
                for one in (answer, models):
                    assert (b"x-said", value) in one.headers.raw and (b"set-cookie", b"a=" + value) in one.headers.raw
    for head in (*decoder.heads, *(prefiller.heads if order != "decode-first" else ())):
        if b"/health" not in head:
            assert b"x-user: " + value + b"\r\n" in head and b"cookie" not in head.lower()


def test_headers_of_one_connection_stay_on_it():
    """RFC 9110 7.6.1: those that Connection names, too."""
    given = [(b"Connection", b"close, X-Hop ,"), (b"connection", b"x-other"), (b"x-hop", b"1"), (b"X-OTHER", b"2")]
    assert passed_on([*given, (b"x-kept", b"3")]) == [(b"x-kept", b"3")]


def test_no_leg_has_the_id_of_another_prompts():
    settings = ProxySettings(prefill="p:1", decode="d:1")
    made = make_context(settings, Metaserver())
    ids = []
    for number in range(3):
        request = read_request(COMPLETIONS, [], b'{"prompt": "a"}', f"x-{number}", 8)
        one = Exchange(made, request, ClientResponse(lambda _: None, "x", 1, ROOM))
        ids += [one.leg_id(InstanceRole.DECODE) for _ in range(3)]
    whole = Exchange(
        made, read_request(COMPLETIONS, [], b'{"prompt": "a"}', "x", 8), ClientResponse(print, "x", 1, ROOM)
    )
    for _ in range(3):
        leg = whole.leg_id(InstanceRole.DECODE)
        ids += [leg, *(whole.leg_id(InstanceRole.PREFILL, f"{leg}-{prompt}") for prompt in range(3, 6))]
    assert len(set(ids)) == len(ids) == 21


@pytest.mark.parametrize("odd", [b"a\x00b", b"a\n", b" a", b"\r\nx: y"])
async def test_a_header_that_cannot_be_passed_on_is_the_clients_fault(odd):
    """HTTP servers differ in what they let in."""
    with StubEngine() as engine:
        instance = Instance(
            InstanceRole.DECODE, "decode-1", InstanceAddress(engine.url), ProxySettings(), time.monotonic
        )
        with pytest.raises(UpstreamError, match="cannot be passed on") as caught, instance.breaker.watch():
            async with post(instance, COMPLETIONS, b"{}", [(b"x-odd", odd)], 1.0):
                pass
        await instance.close()
    assert (caught.value.status, caught.value.rejected, caught.value.counts) == (400, True, False)
    assert not engine.seen


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("order", ORDERS)
async def test_an_answer_without_an_end_is_not_kept(order, status):
    with StubEngine() as prefiller, RawEngine(raw_answer(b"", status=status), endless=True) as decoder:
        given = {"max_request_bytes": "64KiB", "attempts": 1, "breaker_failures": 1}
        async with proxied(prefiller, decoder.url, order=order, **given) as scene:
            answer = await scene.complete()
            assert answer.status_code == (502 if status == 200 else status) and len(answer.content) < 1 << 16
            assert decoder.sent <= 64 << 20
            state = (await scene.client.get("/health")).json()["decode"][0]["state"]
            assert state == ("open" if status == 500 else "up"), "a limit of the proxy's own speaks against nobody"


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_events_that_only_a_client_can_read_are_no_fault_of_the_proxys(prompt):
    last = b'{"choices":[{"index":0,"text":"a","finish_reason":"stop"}],"model":"\xff"}'
    usage = b'{"choices":[],"usage":{"prompt_tokens":1},"id":"\xff"}'
    raw = b"".join(b"data: " + event + b"\n\n" for event in (last, usage, b"[DONE]"))
    with StubEngine(Behaviour(cached=1)) as prefiller, StubEngine(Behaviour(raw=raw)) as decoder:
        async with proxied(prefiller, decoder, order="prefill-first") as scene:
            answer = await scene.complete(prompt=prompt, stream=True)
            assert answer.content == raw if prompt == "a" else answer.status_code in (200, 502)


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_that_stops_coming_is_given_up(status):
    with StubEngine() as prefiller, RawEngine(raw_answer(b"half", status=status, length=1000)) as decoder:
        async with proxied(prefiller, decoder.url, attempts=1, idle_timeout_s=0.2) as scene:
            assert (await scene.complete()).status_code == (504 if status == 200 else 500)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_that_holds_its_text_back_is_a_stream(path):
    """As vLLM's does, whose parsers of tools and reasoning hold tokens back."""
    count = 70_000
    role = b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}'
    token = b'{"choices":[{"index":0,"delta":{},"logprobs":{"content":[{"token":"x"}]}}]}'
    last = b'{"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}'
    events = [role] * 2000 + [token] * count + [last, b"[DONE]"]
    raw = b"".join(b"data: " + event + b"\n\n" for event in events)
    with StubEngine() as prefiller, StubEngine(Behaviour(raw=raw)) as decoder:
        async with proxied(prefiller, decoder) as scene:
            answer = await scene.client.post(path, json={"prompt": "a", "messages": [], "stream": True})
            assert answer.status_code == 200 and answer.content == raw


async def test_a_stream_of_comments_is_no_answer_and_no_failure_of_the_engine():
    raw = b": ping\n\n" * 1000 + b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n' * 70_000
    with StubEngine() as prefiller, StubEngine(Behaviour(raw=raw)) as decoder:
        async with proxied(prefiller, decoder, attempts=1, breaker_failures=1) as scene:
            answer = await scene.complete(stream=True)
            assert answer.status_code == 502 and "without a token" in answer.json()["error"]["message"]
            assert (await scene.client.get("/health")).json()["decode"][0]["state"] == "up"


@pytest.mark.usefixtures("prefills_are_waited_for")
async def test_servers_that_an_engine_tells_are_believed_until_it_tells_others():
    told = ["tcp://10.0.0.1:9465"]

    def behave(seen):
        servers = {"servers": list(told)} if told else {}
        answer = {**json.loads(_choices(1)), "kv_transfer_params": {"layerflow": {"v": 1, **servers}}}
        return Behaviour(raw=json.dumps(answer).encode(), health=health)

    health = 200
    with StubEngine() as prefiller, StubEngine() as decoder:
        prefiller.answer_for = behave
        async with proxied(prefiller, decoder, order="concurrent", probe_failures=1, probe_timeout_s=60) as scene:

            async def servers():
                await scene.complete()
                await ended(prefiller.seen[-1])
                return (await scene.client.get("/health", headers=OPERATOR)).json()["prefill"][0]["servers"]

            while await servers() != told:
                pass
            told[0] = "tcp://10.0.0.2:9465"
            while await servers() != told:
                pass
            believed = told.pop()
            assert await servers() == [believed], "an answer that names none says nothing"
            await scene.complete()
            assert decoder.seen[-1].params["layerflow"]["servers"] == [believed]
            prefiller.behaviour.health = 503
            while (found := (await scene.client.get("/health", headers=OPERATOR)).json()["prefill"][0])["servers"]:
                pass
            assert found["state"] == "down", "one that was down may come back with other servers"


async def test_configured_servers_are_not_replaced():
    answer = {**json.loads(_choices(1)), "kv_transfer_params": {"layerflow": {"v": 1, "servers": ["tcp://other:1"]}}}
    with StubEngine(Behaviour(raw=json.dumps(answer).encode())) as prefiller, StubEngine() as decoder:
        async with proxied(f"{prefiller.url}=tcp://p:1", decoder, order="concurrent") as scene:
            for _ in range(2):
                await scene.complete()
            assert decoder.seen[-1].params["layerflow"]["servers"] == ["tcp://p:1"]


@pytest.mark.parametrize("path", ["/instances/add", COMPLETIONS])
async def test_a_body_that_drips_has_a_time_in_all(path):
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder, idle_timeout_s=0.3, request_timeout_s=10) as scene:
            host, port = scene.url.removeprefix("http://").split(":")
            async with await anyio.connect_tcp(host, int(port)) as client, anyio.create_task_group() as tasks:
                head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: {OPERATOR['authorization']}\r\n"
                await client.send(f"{head}content-length: 100000\r\n\r\n".encode())

                async def drip():
                    while True:
                        await client.send(b" ")
                        await anyio.sleep(0.05)

                tasks.start_soon(drip)
                assert (await client.receive()).startswith(b"HTTP/1.1 408 ")
                tasks.cancel_scope.cancel()
