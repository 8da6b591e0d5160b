"""Engines that fail: what the client is told, who is asked next, and what is never done."""

import json
import time
from functools import partial

import anyio
import anyio.lowlevel
import httpx
import pytest

from layerflow.config.proxy import InstanceAddress, ProxySettings
from layerflow.errors import UpstreamError
from layerflow.proxy import exchange, legs, orders, serve
from layerflow.proxy.answers import ClientResponse, make_event
from layerflow.proxy.context import make_context
from layerflow.proxy.instances import Instance, InstanceRole, probe_all
from layerflow.proxy.legs import DecodeCall, Prefilled, PrefillUsage, decode
from layerflow.proxy.metaserver import Metaserver
from layerflow.proxy.request import read_request
from layerflow_testing.stub_engine import Behaviour, StubEngine

from .scene import GONE, ORDERS, ROOM, at, ended, events_of, numbered, proxied, said

BROKEN_BEFORE_A_TOKEN = {
    "500": (Behaviour(status=500), 500),
    "503": (Behaviour(status=503), 503),
    "dies": (Behaviour(dies_after=0), 502),
    "empty": (Behaviour(empty=True), 502),
    "nonsense": (Behaviour(raw=b"<html>"), 502),
    "says nothing": (Behaviour(raw=b'{"choices": []}'), 502),
    "hangs": (Behaviour(hangs=True), 504),
}
BROKEN_STREAM = {
    "done at once": (Behaviour(raw=b"data: [DONE]\n\n"), 502),
    "error first": (Behaviour(error_event=0), 500),
    "no stream": (Behaviour(content_type="application/json"), 502),
    "dies after the role": (Behaviour(raw=b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n'), 502),
    "a token and its end in one piece": (Behaviour(raw=b'data: {"choices":[{"text":"a"}]}\n\ndata: x\n\n'), 502),
}


def patience_for(how: Behaviour, **other):
    """Only an engine that hangs is worth a short deadline: others are slow where the machine is.

    The deadline is every engine's of that side: long enough for one that is well.
    """
    return {**({"first_token_timeout_s": 2.5, "prefill_timeout_s": 2.5} if how.hangs else {}), **other}


def cases(broken):
    return pytest.mark.parametrize(("how", "status"), broken.values(), ids=broken.keys())


def again(seen):
    """Whether the engine is asked again."""
    return ".r" in seen.headers["x-request-id"]


def error_of(answer):
    assert answer.headers["content-type"].startswith("application/json")
    return answer.json()["error"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stream", [False, True])
@cases(BROKEN_BEFORE_A_TOKEN)
async def test_another_decoder_answers(order, stream, how, status):
    if how.hangs and not stream:
        pytest.skip("an answer that is no stream may take as long as the request may; see the probes")
    with StubEngine(Behaviour(cached=1)) as prefiller, StubEngine(how) as bad, StubEngine() as good:
        async with proxied(prefiller, [bad, good], order=order, **patience_for(how, prefill_timeout_s=60)) as scene:
            answer = await scene.complete(stream=stream)
            assert answer.status_code == 200
            text = said(answer.text) if stream else answer.json()["choices"][0]["text"]
            assert text == numbered(3)
            assert len(bad.seen) == 1 and len(good.seen) == 1
            assert await scene.metric("layerflow_proxy_retries_total{") == 1
            assert await scene.metric("layerflow_proxy_instance_failures_total{") == 1


@pytest.mark.parametrize("order", ["concurrent", "prefill-first"])
@pytest.mark.parametrize(
    ("how", "again"),
    [(Behaviour(status=500), True), (Behaviour(raw=b"<html>"), True), (Behaviour(status=429), False),
     (Behaviour(dies_after=0), False)],
    ids=["500", "nonsense", "429", "dies"],
)  # fmt: skip
@pytest.mark.usefixtures("prefills_are_waited_for")
async def test_a_decoder_that_is_there_has_given_its_handoff_back(order, how, again):
    """The next one gets a hand-off of its own, whose prompt is cached; one that is gone has left it as it was."""
    cached = iter((1, 3))
    with StubEngine() as prefiller, StubEngine(how) as bad, StubEngine() as good:
        prefiller.answer_for = lambda _: Behaviour(cached=next(cached))
        async with proxied(prefiller, [bad, good], order=order) as scene:
            answer = await scene.complete()
            assert answer.status_code == 200
            if order == "prefill-first":
                assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}, "what it found at first"
                assert len(prefiller.seen) == 1 + again
                return
            claimed, used = bad.seen[0].params["transfer_id"], good.seen[0].params["transfer_id"]
            assert (claimed != used) is again
            # The first may have been given up before it arrived.
            assert used in {seen.params["transfer_id"] for seen in prefiller.seen}


@pytest.mark.parametrize("order", ORDERS)
@cases(BROKEN_BEFORE_A_TOKEN | BROKEN_STREAM)
async def test_without_another_decoder_the_status_is_true(order, how, status):
    with StubEngine() as prefiller, StubEngine(how) as decoder:
        async with proxied(prefiller, decoder, order=order, **patience_for(how, prefill_timeout_s=60)) as scene:
            answer = await scene.complete(stream=True)
    assert answer.status_code == status and error_of(answer)["message"]
    if status == 500:
        assert "stub" in error_of(answer)["message"], "the engine's own words"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_passed_on_and_nobody_else_asked(order, stream):
    with StubEngine() as prefiller, StubEngine(Behaviour(status=400)) as one, StubEngine(Behaviour(status=400)) as two:
        async with proxied(prefiller, [one, two], order=order, breaker_failures=1) as scene:
            for _ in range(3):
                answer = await scene.complete(stream=stream)
                assert answer.status_code == 400 and error_of(answer)["message"] == "stub says 400"
            assert len(one.seen) + len(two.seen) == 3
            assert (await scene.client.get("/health")).status_code == 200


@pytest.mark.parametrize("order", ORDERS)
async def test_too_many_requests_are_for_another_engine(order):
    with StubEngine() as prefiller, StubEngine(Behaviour(status=429)) as full, StubEngine() as free:
        async with proxied(prefiller, [full, free], order=order, breaker_failures=1) as scene:
            assert (await scene.complete()).status_code == 200
            assert (await scene.client.get("/health")).json()["decode"][0]["state"] == "up"


@pytest.mark.parametrize("order", ORDERS)
async def test_a_refusal_by_the_prefill_is_the_answer(order):
    slow = Behaviour(first_s=20 if order == "concurrent" else 0)
    with StubEngine(Behaviour(status=422)) as prefiller, StubEngine(slow) as decoder:
        async with proxied(prefiller, decoder, order=order) as scene:
            answer = await scene.complete(stream=True)
    assert answer.status_code == 422 and error_of(answer)["message"] == "stub says 422"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ending", ["dies", "error", "stops"])
async def test_after_the_first_token_an_error_event_ends_the_stream(order, ending):
    how = {
        "dies": Behaviour(dies_after=4, between_s=0.01),
        "error": Behaviour(error_event=4, between_s=0.01),
        "stops": Behaviour(done=False, finish=False, between_s=0.01),
    }[ending]
    with StubEngine() as prefiller, StubEngine(how) as bad, StubEngine(how) as other:
        async with proxied(prefiller, [bad, other], order=order) as scene:
            answer = await scene.complete(stream=True, max_tokens=8)
            assert await scene.metric("layerflow_proxy_cut_streams_total") == 1
        events = events_of(answer.text)
        assert answer.status_code == 200
        assert events[-1]["error"]["message"] and events[-1]["error"]["code"] in (500, 502)
        assert "[DONE]" not in events
        assert said(answer.text) == numbered(8 if ending == "stops" else 4), "what came before it, once"
        assert len(bad.seen) + len(other.seen) == 1, "nothing is started again"


async def test_a_stream_that_falls_silent_is_cut():
    with StubEngine() as prefiller, StubEngine(Behaviour(between_s=30)) as decoder:
        async with proxied(prefiller, decoder, idle_timeout_s=0.3) as scene:
            answer = await scene.complete(stream=True)
            assert (await ended(decoder.seen[0])).aborted
    assert said(answer.text) == "t0 " and events_of(answer.text)[-1]["error"]["code"] == 504


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_has_a_deadline(stream):
    with StubEngine(Behaviour(hangs=True)) as prefiller, StubEngine(Behaviour(first_s=30)) as decoder:
        async with proxied(prefiller, decoder, request_timeout_s=2) as scene:
            answer = await scene.complete(stream=stream)
            assert answer.status_code == 504 and "proxy.request_timeout_s" in error_of(answer)["message"]
            for engine in (prefiller, decoder):
                assert (await ended(await at(engine))).aborted


@pytest.mark.parametrize("order", ORDERS)
@cases(BROKEN_BEFORE_A_TOKEN)
@pytest.mark.usefixtures("prefills_are_waited_for")
async def test_a_lost_prefill_is_tried_elsewhere(order, how, status):
    with StubEngine(how) as bad, StubEngine(Behaviour(cached=9)) as good, StubEngine() as decoder:
        decoder.answer_for = lambda seen: Behaviour(first_s=60 if order == "concurrent" and not again(seen) else 0)
        async with proxied([bad, good], decoder, order=order, **patience_for(how, first_token_timeout_s=60)) as scene:
            answer = await scene.complete()
            assert answer.json()["choices"][0]["text"] == numbered(3)
            assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 9}
            assert (len(bad.seen), len(good.seen)) == (1, 1)
            assert await scene.metric("layerflow_proxy_recomputed_total") == 0
    if order == "concurrent":
        # The first is given up: it may reach the engine after the second, or never.
        lost, ran = bad.seen[0].params["transfer_id"], good.seen[0].params["transfer_id"]
        seen = {seen.params["transfer_id"]: seen for seen in decoder.seen}
        assert ran in seen and seen.keys() <= {lost, ran} and lost != ran and len(seen) == len(decoder.seen)
        assert seen.pop(ran).finished
        for given_up in seen.values():
            assert (await ended(given_up)).aborted


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", ["retry", "recompute"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_that_is_lost_for_good_is_recomputed(order, policy, stream):
    with StubEngine(Behaviour(status=500)) as one, StubEngine(Behaviour(status=500)) as two, StubEngine() as decoder:
        decoder.answer_for = lambda seen: Behaviour(first_s=20 if order == "concurrent" and seen.params else 0)
        async with proxied([one, two], decoder, order=order, on_prefill_failure=policy) as scene:
            answer = await scene.complete(stream=stream)
            assert answer.status_code == 200
            text = said(answer.text) if stream else answer.json()["choices"][0]["text"]
            assert text == numbered(3)
            assert len(one.seen) + len(two.seen) == (2 if policy == "retry" else 1)
            (recomputed,) = (seen for seen in decoder.seen if seen.params is None)
            assert (await ended(recomputed)).finished
            assert await scene.metric("layerflow_proxy_recomputed_total") == 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("prefill", ["gone", "failing"])
async def test_long_prompts_are_not_recomputed(order, prefill):
    with StubEngine(Behaviour(status=500)) as failing, StubEngine() as decoder:
        decoder.answer_for = lambda seen: Behaviour(first_s=20 if order == "concurrent" else 0)
        async with proxied(
            GONE if prefill == "gone" else failing, decoder, order=order, max_recompute_tokens=10
        ) as scene:
            answer = await scene.complete(prompt=[1] * 11)
            assert answer.status_code == 503 and "proxy.max_recompute_tokens" in error_of(answer)["message"]
            assert answer.headers["retry-after"]
            decoder.answer_for = lambda seen: Behaviour(first_s=20 if order == "concurrent" and seen.params else 0)
            assert (await scene.complete(prompt=[1] * 10)).status_code == 200


VLLM_ENDED = (
    b'{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}'
)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("in_the_stream", [False, True])
async def test_a_handoff_that_the_decoder_has_lost_is_a_503(order, stream, in_the_stream):
    """The prefill went well; the decoder cannot read it, and ends the request as vLLM does."""
    refusing = Behaviour(status=500, status_body=VLLM_ENDED)
    if in_the_stream and stream:
        refusing = Behaviour(raw=b"data: " + VLLM_ENDED + b"\n\ndata: [DONE]\n\n")
    with StubEngine() as prefiller, StubEngine(refusing) as one, StubEngine(refusing) as two:
        async with proxied(prefiller, [one, two], order=order, breaker_failures=1) as scene:
            for _ in range(2):
                answer = await scene.complete(stream=stream)
                assert answer.status_code == 503 and "max_recompute_tokens" in error_of(answer)["message"]
                assert answer.headers["retry-after"]
            assert len(one.seen) == len(two.seen) == 2, "the engines are well: no circuit breaker has opened"
            one.behaviour = two.behaviour = Behaviour()
            assert (await scene.complete(stream=stream)).status_code == 200


async def test_without_a_handoff_a_500_is_the_engines_own():
    refusing = Behaviour(status=500, status_body=VLLM_ENDED)
    with StubEngine() as prefiller, StubEngine(refusing) as decoder:
        async with proxied(prefiller, decoder, short_prompt_tokens=100) as scene:
            answer = await scene.complete()
    assert answer.status_code == 500 and error_of(answer)["message"] == "Internal server error"
    assert not prefiller.seen


@pytest.mark.parametrize("order", ORDERS)
async def test_with_nobody_there(order):
    # Only the probes find them down: a circuit breaker that opens first would be what the answer tells.
    async with proxied(GONE, GONE, order=order, probe_failures=2, breaker_failures=1000) as scene:
        answer = await scene.complete()
        # 504 where the probes find the decoder down while it is tried.
        assert answer.status_code in (502, 503, 504) and error_of(answer)["message"]
        while (await scene.client.get("/health")).status_code == 200:
            pass
        answer = await scene.complete()
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert "decode-1 down" in error_of(answer)["message"] and GONE not in answer.text


async def test_a_failing_engine_is_left_alone_and_comes_back(monkeypatch):
    later_s = 0.0
    monkeypatch.setattr(serve, "make_context", partial(make_context, clock=lambda: time.monotonic() + later_s))
    with StubEngine() as prefiller, StubEngine(Behaviour(status=500)) as bad, StubEngine() as good:
        async with proxied(prefiller, [bad, good], breaker_failures=2, breaker_open_s=1000) as scene:
            for _ in range(10):
                assert (await scene.complete()).status_code == 200
            assert len(bad.seen) == 2
            assert await scene.metric("layerflow_proxy_instance_breaker_open") == 1
            bad.behaviour = Behaviour()
            later_s = 1000.0
            while len(bad.seen) == 2:
                assert (await scene.complete()).status_code == 200
            assert await scene.metric("layerflow_proxy_instance_breaker_open") == 0


async def test_requests_that_engines_answer_with_500_shut_no_engine_for_others():
    """vLLM answers so what it did not foresee in a request."""

    def behave(seen):
        return Behaviour(status=500 if seen.body["prompt"] == "bad" else 200)

    async def state(scene):
        health = (await scene.client.get("/health")).json()
        return [one["state"] for one in health["prefill"] + health["decode"]]

    for decoders in (1, 2):
        with StubEngine() as prefiller, StubEngine() as one, StubEngine() as two:
            one.answer_for = two.answer_for = prefiller.answer_for = behave
            async with proxied(prefiller, [one, two][:decoders], order="prefill-first", breaker_failures=1) as scene:
                for _ in range(4):
                    assert (await scene.complete(prompt="bad")).status_code == 500
                    assert (await scene.client.get("/health")).status_code == 200
                    assert (await scene.complete(prompt="good")).status_code == 200
                    assert await state(scene) == ["up"] * (decoders + 1)


@pytest.mark.parametrize("health", [503, 0])
async def test_probes_find_engines_that_are_down_and_up_again(health):
    with StubEngine() as prefiller, StubEngine(Behaviour(health=health or 200)) as bad, StubEngine() as good:
        if health == 0:
            bad.stop()
        async with proxied(prefiller, [bad, good], probe_failures=2) as scene:

            async def state():
                return (await scene.client.get("/health")).json()["decode"][0]["state"]

            while await state() != "down":
                pass
            for _ in range(4):
                assert (await scene.complete()).status_code == 200
            assert not bad.seen
            assert await scene.metric('layerflow_proxy_instance_up{instance="decode-1",role="decode"}') == 0
            if health:
                bad.behaviour = Behaviour()
            else:
                bad.__enter__()
            while await state() != "up":
                pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_at_an_engine_that_the_probes_find_dead_goes_elsewhere(stream):
    """One that hangs would otherwise keep an answer that is no stream for as long as a request may take."""
    with StubEngine() as prefiller, StubEngine(Behaviour(hangs=True)) as bad, StubEngine() as good:
        bad.answer_for = lambda seen: bad.behaviour
        async with proxied(prefiller, [bad, good], probe_failures=2, order="prefill-first") as scene:

            def dies_while_asked(seen):
                bad.behaviour.health = 503
                return bad.behaviour

            bad.answer_for = dies_while_asked
            answer = await scene.complete(stream=stream)
            assert answer.status_code == 200 and len(bad.seen) == len(good.seen) == 1
            assert (await ended(bad.seen[0])).aborted


async def test_a_kept_connection_that_the_engine_closed_costs_nothing():
    """Restarted on the same port: the connections that the proxy has kept are dead, the engine is not."""
    with StubEngine() as prefiller:
        decoder = StubEngine()
        with decoder:
            async with proxied(prefiller, decoder, probe_interval_s=60) as scene:
                assert (await scene.complete()).status_code == 200
                decoder.stop()
                decoder.__enter__()
                for _ in range(3):
                    assert (await scene.complete()).status_code == 200
                assert await scene.metric("layerflow_proxy_instance_failures_total{") == 0


@pytest.mark.parametrize(("within_s", "sent"), [(60.0, 2), (-1.0, 1)])
async def test_a_kept_connection_that_breaks_later_is_a_failure_and_nothing_is_sent_again(monkeypatch, within_s, sent):
    """The engine may have read the request, and be computing it."""
    monkeypatch.setattr(legs, "_CLOSED_BEFORE_S", within_s)
    instance = Instance(InstanceRole.DECODE, "decode-1", InstanceAddress("http://d:1"), ProxySettings(), lambda: 0.0)
    asked = []

    def breaks(request):
        asked.append(request)
        raise httpx.ReadError("")

    instance.transport = httpx.MockTransport(breaks)
    with pytest.raises(UpstreamError, match="broke the connection"):
        async with legs.post(instance, "/v1/completions", b"{}", [], 60):
            pass
    assert len(asked) == sent


async def test_a_url_that_cannot_be_asked_is_the_engines_failure_and_ends_no_probe():
    """Neither the client's, nor the other engines', however it came to be."""
    settings = ProxySettings(prefill="p:1", decode="d:1", probe_interval_s=0.01, probe_failures=1)
    context = make_context(settings, Metaserver())
    bad = context.instances.add(InstanceRole.DECODE, InstanceAddress("http://b\u00fccher..de:1"))
    for instance in context.instances.all:
        if instance is not bad:
            instance.transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=httpx.ByteStream(b"")))
    with pytest.raises(UpstreamError, match="URL") as caught:
        async with legs.post(bad, "/v1/completions", b"{}", [], 60):
            pass
    assert not caught.value.rejected and caught.value.counts
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(probe_all, context.instances, settings)
        with anyio.fail_after(20):
            while not bad.down:  # noqa: ASYNC110 - the probes set no event
                await anyio.sleep(0.005)
        tasks.cancel_scope.cancel()
    assert [one.down for one in context.instances.all] == [False, False, True]


@pytest.mark.parametrize(
    ("raw", "status"), [(b"", 400), (b"{", 400), (b"[]", 400), (b'{"prompt": "' + b"a" * 5000 + b'"}', 413)]
)
async def test_bad_requests(raw, status):
    with StubEngine() as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder, max_request_bytes=4096) as scene:
            answer = await scene.client.post("/v1/completions", content=raw, headers={"x-request-id": "mine"})
            assert answer.status_code == status and error_of(answer)["code"] == status
            assert answer.headers["x-request-id"] == "mine"
            assert (await scene.client.get("/v1/completions")).status_code == 405
            assert not prefiller.seen and not decoder.seen


async def test_one_failing_prompt_of_a_list_ends_all():
    def behave(seen):
        return Behaviour(status=500) if seen.body["prompt"] == "bad" else Behaviour(first_s=60)

    with StubEngine() as prefiller, StubEngine() as decoder:
        decoder.answer_for = behave
        async with proxied(prefiller, decoder) as scene:
            answer = await scene.complete(prompt=["one", "bad", "two"])
            assert answer.status_code == 500 and error_of(answer)["message"] == "stub says 500"
            for seen in decoder.seen:
                assert (await ended(seen)).aborted or seen.body["prompt"] == "bad"


@pytest.mark.parametrize("fails", ["prefill", "decode"])
async def test_a_prompt_of_a_streamed_list_is_started_again_though_another_one_streams(monkeypatch, fails):
    """What the client has of one prompt says nothing of the others: its decoder would wait for a hand-off in vain."""
    streams, sent = anyio.Event(), []

    async def prefill(instance, path, body, headers, settings):
        if fails == "prefill" and b'"bad"' in body:
            await streams.wait()
            raise UpstreamError("it is gone", 500)
        return Prefilled(None, 0, 10)

    async def decode(instance, call, sink, *, usage, settings, first_token):
        bad = b'"bad"' in call.body
        if bad:
            sent.append(call.handoff)
        if bad and len(sent) == 1:
            await streams.wait()
            if fails == "decode":
                raise UpstreamError("it is gone", 503)
            await anyio.sleep_forever()
        await sink.events([make_event(b'{"choices":[{"index":0,"text":"x"}]}')], [])
        streams.set()

    async def send(message):
        told.append(message.get("body", b""))

    told = []
    monkeypatch.setattr(exchange, "prefill", prefill)
    monkeypatch.setattr(exchange, "decode", decode)
    settings = ProxySettings(prefill="p:1", decode="d:1, e:1", short_prompt_tokens=0, on_prefill_failure="recompute")
    request = read_request("/v1/completions", [], b'{"stream": true, "prompt": ["good", "bad"]}', "id", 8)
    with anyio.fail_after(20):
        await orders.serve(make_context(settings, Metaserver()), request, ClientResponse(send, "id", 60, ROOM))
    assert said(b"".join(told).decode(), 0) == said(b"".join(told).decode(), 1) == "x"
    assert sent == [True, fails == "decode"]


async def test_an_engines_answer_is_an_error_in_json_whatever_it_says():
    with StubEngine() as prefiller, StubEngine(Behaviour(status=500, status_body=b"<h1>oops</h1>")) as decoder:
        async with proxied(prefiller, decoder) as scene:
            answer = await scene.complete()
    assert answer.status_code == 500 and "oops" in error_of(answer)["message"]
    assert json.loads(answer.text)["error"]["type"] == "proxy_error"


async def test_a_call_that_was_given_up_sends_nothing_even_if_its_data_came_in_the_same_turn():
    """The prefill fails and the decoder's first token arrives in one turn of the loop: only the retry is heard."""
    calls = []

    class Client:
        begun = False

        async def events(self, events, headers):
            calls.append(events)

    token = b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    got = anyio.Event()

    class Pieces(httpx.AsyncByteStream):
        async def __aiter__(self):
            got.set()
            await released.wait()
            yield token

    settings = ProxySettings()
    instance = Instance(InstanceRole.DECODE, "decode-1", InstanceAddress("http://d:1"), settings, lambda: 0.0)
    answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Pieces())
    instance.transport = httpx.MockTransport(lambda _: answer)
    released = anyio.Event()
    call = DecodeCall("/v1/completions", b"{}", [], stream=True)
    async with anyio.create_task_group() as tasks:

        async def leg():
            await decode(instance, call, Client(), usage=PrefillUsage(), settings=settings, first_token=lambda: None)

        tasks.start_soon(leg)
        await got.wait()
        await anyio.lowlevel.checkpoint()
        released.set()
        tasks.cancel_scope.cancel()
    assert calls == []
