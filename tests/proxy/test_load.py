"""Many streams at once over slow, broken and lying engines: every client gets all of its answer, or is told."""

import itertools
import json
import threading

import anyio
import pytest

from layerflow_testing.stub_engine import Behaviour, StubEngine

from .scene import CHAT, COMPLETIONS, ORDERS, events_of, proxied, said

STREAMS = 64
TROUBLE = (
    Behaviour(status=500),
    Behaviour(dies_after=0),
    Behaviour(empty=True),
    Behaviour(raw=b"data: [DONE]\n\n"),
    Behaviour(error_event=0),
    Behaviour(dies_after=3),
    Behaviour(error_event=5),
    Behaviour(done=False),
    Behaviour(raw=b'{"choices": []}'),
    Behaviour(status=400),
)
WELL = (Behaviour(per_write=0), Behaviour(), Behaviour(per_write=7), Behaviour(first_s=0.05, between_s=0.0005))


class Turns:
    """Each request is treated as the next of a list says; one list for all engines."""

    def __init__(self, *behaviours: Behaviour) -> None:
        self._next = itertools.cycle(behaviours)
        self._lock = threading.Lock()

    def __call__(self, _) -> Behaviour:
        with self._lock:
            return next(self._next)


def check(status: int, text: str, tokens: int) -> str:
    """What became of one stream. Anything that is neither a whole answer nor a true error fails."""
    if status != 200:
        assert status in (400, 500, 502, 503, 504) and json.loads(text)["error"]["message"]
        return "refused"
    events = events_of(text)
    numbers = [int(token[1:]) for token in said(text).split()]
    assert numbers == list(range(len(numbers))), "lost, doubled or reordered"
    assert numbers, "200 without content"
    if events[-1] == "[DONE]":
        assert len(numbers) == tokens and events.count("[DONE]") == 1
        assert not any("error" in event for event in events[:-1])
        return "whole"
    assert events[-1]["error"]["message"] and "[DONE]" not in events
    return "cut"


async def run(order: str, tokens: int, behaviours: tuple[Behaviour, ...]) -> dict[str, int]:
    found = {"whole": 0, "cut": 0, "refused": 0}
    with StubEngine() as p1, StubEngine() as p2, StubEngine() as d1, StubEngine() as d2, StubEngine() as d3:
        turns = Turns(*behaviours)
        for decoder in (d1, d2, d3):
            decoder.answer_for = turns
        p1.answer_for = p2.answer_for = Turns(
            Behaviour(), Behaviour(status=500), *[Behaviour()] * 5, Behaviour(empty=True)
        )
        # All of it shares one interpreter: what is slow here is the test.
        patient = {"breaker_failures": 1000, "probe_timeout_s": 60, "connect_timeout_s": 300}
        patient |= {"idle_timeout_s": 300, "first_token_timeout_s": 300}
        async with proxied([p1, p2], [d1, d2, d3], order=order, **patient) as scene:

            async def stream(number: int) -> None:
                path = (COMPLETIONS, CHAT)[number % 2]
                body = {"max_tokens": tokens, "stream": True, "prompt": f"p{number}"}
                if path == CHAT:
                    body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
                answer = await scene.client.post(path, json=body, timeout=600)
                found[check(answer.status_code, answer.text, tokens)] += 1

            async with anyio.create_task_group() as tasks:
                for number in range(STREAMS):
                    tasks.start_soon(stream, number)
            health = (await scene.client.get("/health")).json()
            assert health["open_requests"] == 0
            assert {one["active"] for one in health["prefill"] + health["decode"]} == {0}
    assert sum(found.values()) == STREAMS
    return found


@pytest.mark.parametrize("order", ORDERS)
async def test_streams_over_engines_that_are_well_lose_nothing(order):
    found = await run(order, 40, WELL)
    assert found == {"whole": STREAMS, "cut": 0, "refused": 0}


@pytest.mark.parametrize("order", ORDERS)
async def test_streams_over_engines_in_trouble(order):
    found = await run(order, 20, (*TROUBLE, *WELL, *WELL))
    assert all(found.values()), f"each end should occur: {found}"


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("trouble", [False, True])
async def test_a_hundred_thousand_events(order, trouble):
    found = await run(order, 1600, (*TROUBLE, *WELL, *WELL) if trouble else WELL)
    assert found["whole"] == STREAMS or (trouble and all(found.values()))
