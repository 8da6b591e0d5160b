"""What each engine is told in each order, and what the client gets."""

import json

import anyio
import anyio.lowlevel
import httpx
import pytest

from layerflow.errors import ProxyError
from layerflow.proxy import instances, legs, orders
from layerflow.proxy.answers import ClientResponse
from layerflow.proxy.request import read_request
from layerflow_testing.stub_engine import SIX_KEYS, Behaviour, StubEngine

from .scene import CHAT, COMPLETIONS, ORDERS, ROOM, at, events_of, numbered, proxied, said


@pytest.fixture
def engines(prefills_are_waited_for):
    with StubEngine(Behaviour(cached=5)) as prefiller, StubEngine() as decoder:
        yield prefiller, decoder


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_gets_the_decoders_answer(engines, order, path, stream):
    prompt = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    asked = {**prompt, "max_tokens": 4, "max_completion_tokens": 4, "temperature": 0.25, "unknown": {"kept": 1}}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 2, "n": 1}
    async with proxied(*engines, order=order) as scene:
        answer = await scene.client.post(path, json=asked, headers={"X-Mine": "1", "Authorization": "Bearer me"})
    assert answer.status_code == 200
    if stream:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert said(answer.text) == numbered(4) and events_of(answer.text)[-1] == "[DONE]"
        usage = events_of(answer.text)[-2]["usage"]
    else:
        (choice,) = answer.json()["choices"]
        assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == numbered(4)
        usage = answer.json()["usage"]
    assert usage["completion_tokens"] == 4 and usage["prompt_tokens_details"] == {"cached_tokens": 5}
    (prefilled,), (decoded,) = (engine.seen for engine in engines)
    assert {name: decoded.body[name] for name in asked} == asked
    assert prefilled.body["max_tokens"] == prefilled.body["max_completion_tokens"] == prefilled.body["n"] == 1
    assert prefilled.body["stream"] is False and prefilled.body["unknown"] == {"kept": 1}
    assert prefilled.body.keys() & {"stream_options", "min_tokens"} == set()
    for leg in (prefilled, decoded):
        assert leg.path == path
        assert leg.headers["x-mine"] == "1" and leg.headers["authorization"] == "Bearer me"
        assert leg.headers["x-request-id"] == answer.headers["x-request-id"]


async def test_prefill_first_passes_the_prefills_answer_verbatim(engines):
    prefiller, decoder = engines
    async with proxied(*engines, order="prefill-first") as scene:
        await scene.complete()
        prefiller.behaviour = Behaviour(hands_over=False)
        await scene.complete()
    assert prefiller.seen[0].params == {name: None for name in SIX_KEYS} | {
        "do_remote_decode": True,
        "do_remote_prefill": False,
    }
    assert decoder.seen[0].params["remote_block_ids"] == [[1, 2, 3]]
    assert decoder.seen[0].params["layerflow"] == {"v": 1, "xfer": decoder.seen[0].params["remote_request_id"]}
    assert "kv_transfer_params" not in decoder.seen[1].body, "nothing was handed over: nothing is said of it"


async def test_concurrent_legs_share_a_transfer_id(engines):
    prefiller, decoder = engines
    async with proxied(f"{prefiller.url}=tcp://p:1+tcp://p:2", decoder, prefill_timeout_s=40) as scene:
        await scene.complete()
        await scene.complete()
    first, second = (seen.params for seen in prefiller.seen)
    assert first["transfer_id"] != second["transfer_id"] and first["transfer_id"].startswith("xfer-")
    assert first == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": first["transfer_id"],
        "layerflow": {"v": 1, "deadline_s": 40.0},
    }
    assert decoder.seen[0].params == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": first["transfer_id"],
        "layerflow": {"v": 1, "handoff": first["transfer_id"], "servers": ["tcp://p:1", "tcp://p:2"]},
    }


async def test_concurrent_without_addresses_means_one_server(engines):
    async with proxied(*engines) as scene:
        await scene.complete()
    assert "servers" not in engines[1].seen[0].params["layerflow"]


async def test_a_prefillers_servers_are_learnt_from_its_answer(engines):
    prefiller, decoder = engines
    told = (
        b'{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"layerflow":{"v":1,"servers":["tcp://p:1"]}}}'
    )
    prefiller.behaviour = Behaviour(raw=told)
    decoder.behaviour = Behaviour(first_s=0.3)
    async with proxied(*engines) as scene:
        while not decoder.seen or "servers" not in decoder.seen[-1].params["layerflow"]:
            assert (await scene.complete()).status_code == 200
    assert decoder.seen[-1].params["layerflow"]["servers"] == ["tcp://p:1"]


async def test_concurrent_legs_run_at_once():
    """The decoder answers only after the prefill has, and the prefill is slow: in sequence neither would begin."""
    with StubEngine(Behaviour(hangs=True)) as prefiller, StubEngine() as decoder:
        async with proxied(prefiller, decoder) as scene:
            assert (await scene.complete()).status_code == 200
            await at(prefiller)
        assert decoder.seen[0].finished


async def test_decode_first_passes_what_the_decoder_posted_verbatim(engines):
    prefiller, decoder = engines
    async with proxied(*engines, order="decode-first") as scene:
        answer = await scene.complete()
        params = decoder.seen[0].params
        assert params.pop("metaserver").startswith(f"{scene.url}/v1/metaserver/")
        assert params == {"do_remote_decode": False, "do_remote_prefill": True}
    child = f"cmpl-{answer.headers['x-request-id']}-0"
    assert decoder.seen[0].asked == [200]
    assert prefiller.seen[0].params == {
        "request_id": child,
        "token_ids": [],
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "stub",
        "layerflow": {"v": 1, "handoff": child},
    }


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["one", "two", "three"], [[1, 2], [3], [4, 5, 6]]])
async def test_a_list_of_prompts_has_a_hand_off_each(engines, order, stream, prompts):
    prefiller, decoder = engines
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    async with proxied(*engines, order=order) as scene:
        answer = await scene.complete(prompt=prompts, n=2, **more)
    request_id = answer.headers["x-request-id"]
    if stream:
        events = events_of(answer.text)
        assert [said(answer.text, index) for index in range(6)] == [numbered(3)] * 6
        assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
        assert {event["id"] for event in events[:-1]} == {f"cmpl-{request_id}"}
        usages = [event["usage"] for event in events[:-1] if event.get("usage")]
        assert len(usages) == 1
        usage = usages[0]
    else:
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(6))
        assert {choice["text"] for choice in answer.json()["choices"]} == {numbered(3)}
        usage = answer.json()["usage"]
    assert usage["completion_tokens"] == 18
    assert usage["prompt_tokens"] == sum(map(len, prompts)) or order == "decode-first"
    assert usage["prompt_tokens_details"] == {"cached_tokens": 15}, "each prompt's, once"
    choices = 2 if order == "decode-first" else 1  # there each choice asks for itself
    assert sorted(str(seen.body["prompt"]) for seen in prefiller.seen) == sorted(map(str, prompts * choices))
    assert len({seen.headers["x-request-id"] for seen in prefiller.seen}) == 3 * choices
    handed = {str(seen.params.get("transfer_id") or seen.params.get("request_id")) for seen in prefiller.seen}
    assert len(handed) == 3 * choices or order == "prefill-first"
    assert len(decoder.seen) == (1 if order == "decode-first" else 3)


@pytest.mark.parametrize("order", ORDERS)
async def test_what_prompts_of_a_list_share_is_read_once(engines, monkeypatch, order):
    built = []
    canonical = instances._canonical
    monkeypatch.setattr(instances, "_canonical", lambda raw: built.append(raw) or canonical(raw))
    async with proxied(*engines, order=order) as scene:
        answer = await scene.complete(prompt=["a"] * 70, cache_salt="s", tools=[{"x": 1}], max_tokens=1)
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 70
    assert built == [b'"stub"', b'"s"', b'[{"x":1}]']


async def test_prompts_of_a_list_begin_in_turns_of_the_loop_of_their_own():
    turn, begun, all_begun = 0, [], anyio.Event()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await anyio.lowlevel.checkpoint()

    async def serve(_, sink) -> None:
        begun.append(turn)
        if len(begun) == 64:
            all_begun.set()
        await all_begun.wait()
        raise ProxyError("enough", 503)

    request = read_request(COMPLETIONS, [], json.dumps({"prompt": ["a"] * 64}).encode(), "id", 64)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count_turns)
        with pytest.raises(ProxyError, match="enough"):
            await orders.serve_list(request, ClientResponse(print, "id", 1, ROOM), serve)
        tasks.cancel_scope.cancel()
    assert len(set(begun)) == 64


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("more", [{"echo": True}, {"prompt_logprobs": 0}, {"use_beam_search": True}, {"max_tokens": 0}])
async def test_what_needs_the_prompts_logits_skips_the_prefill(engines, order, more):
    prefiller, decoder = engines
    async with proxied(*engines, order=order) as scene:
        assert (await scene.complete(prompt=["a", "b"], **more)).status_code == 200
        assert await scene.metric("layerflow_proxy_prefill_skipped_total") == 1
    assert not prefiller.seen and "kv_transfer_params" not in decoder.seen[0].body


async def test_short_prompts_skip_the_prefill_and_long_ones_do_not(engines):
    prefiller, decoder = engines
    async with proxied(*engines, short_prompt_tokens=64) as scene:
        await scene.complete(prompt=[7] * 64)
        assert not prefiller.seen and decoder.seen[0].params is None
        await scene.complete(prompt=[7] * 65)
    assert len(prefiller.seen) == 1 and decoder.seen[1].params


async def test_a_client_does_not_steer_the_transfer(engines):
    async with proxied(*engines, short_prompt_tokens=1000) as scene:
        await scene.complete(kv_transfer_params={"do_remote_prefill": True, "remote_host": "evil"})
    assert "kv_transfer_params" not in engines[1].seen[0].body


@pytest.mark.parametrize("order", ORDERS)
async def test_the_clients_request_id_is_kept_and_two_alike_do_not_meet(engines, order):
    async with proxied(*engines, order=order) as scene:
        url = httpx.URL(scene.url).join(COMPLETIONS)
        engines[1].behaviour = Behaviour(first_s=0.2)
        answers = []

        async def ask(client):
            body = {"prompt": "hi", "max_tokens": 2}
            answers.append(await client.post(url, json=body, headers={"x-request-id": "mine"}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, scene.client)
            tasks.start_soon(ask, scene.client)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert [answer.headers.get_list("x-request-id") for answer in answers] == [["mine"], ["mine"]]
    assert len(engines[0].seen) == 2
    assert all(seen.headers["x-request-id"].startswith("mine") for engine in engines for seen in engine.seen)


@pytest.mark.usefixtures("prefills_are_waited_for")
async def test_the_wanted_prefiller_is_taken():
    with StubEngine() as one, StubEngine() as two, StubEngine() as decoder:
        async with proxied([one, two], decoder) as scene:
            for _ in range(4):
                body = {"prompt": "hi", "max_tokens": 1}
                headers = {"x-prefiller-host-port": two.url.removeprefix("http://")}
                await scene.client.post(COMPLETIONS, json=body, headers=headers)
        assert (len(one.seen), len(two.seen)) == (0, 4)


@pytest.mark.usefixtures("prefills_are_waited_for")
async def test_the_same_prompt_goes_to_the_same_prefiller():
    with StubEngine() as one, StubEngine() as two, StubEngine() as decoder:
        async with proxied([one, two], decoder) as scene:
            for letter in "abab" * 3:
                await scene.complete(prompt=letter * 5000)
        for engine in (one, two):
            assert len({seen.body["prompt"][0] for seen in engine.seen}) == 1 and len(engine.seen) == 6


async def test_usage_waits_for_a_prefill_that_is_tried_elsewhere(prefills_are_waited_for):
    usage = legs.PrefillUsage()
    usage.expect()
    told: list[int | None] = []

    async def wait() -> None:
        told.append(await usage.cached_tokens())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        usage.prefill_ended(None)
        usage.expect()
        await anyio.wait_all_tasks_blocked()
        usage.prefill_ended(9)
    assert told == [9]
