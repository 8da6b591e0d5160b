"""What one request says hurts that request only: no exception leaves a hook, and the requests beside it are served."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs
from test_pd_side import FakeCalls
from test_vllm_scheduler import BLOCKS, House, fakes
from vllm_fakes import BLOCK, FULL, output

from layerflow.agent.values import Hit
from layerflow.connectors.common.guard import _told
from layerflow.connectors.vllm.pd import decoding, side
from layerflow.connectors.vllm.pd.conventions.parts import MAX_ID
from layerflow.connectors.vllm.pd.decoding import MOST_KNOWN, HttpCalls
from layerflow.connectors.vllm.pd.options import PdOptions
from layerflow.connectors.vllm.pd.side import HandoffSide
from layerflow.connectors.vllm.plan import UnkeptLoad

__all__ = ["fakes"]

HIT = 128
KEYS = (
    "do_remote_prefill", "do_remote_decode", "metaserver", "transfer_id", "remote_bootstrap_addr", "remote_engine_id",
    "remote_host", "remote_port", "remote_block_ids", "remote_request_id", "layerflow",
)  # fmt: skip
OWN_KEYS = (
    "v",
    "handoff",
    "servers",
    "incarnation",
    "layout",
    "prompt",
    "tokens",
    "lease_s",
    "deadline_s",
    "load",
    "save",
)
TEXTS = (
    "", "x", "http://[::1/x", "http://proxy:x/v1/metaserver", "http://[fe80::zz]:8998", "http://p:99999999/", "\ud800",
    "http://\udfff/", "tcp://p:1", "tcp://p:-1", "tcp://[", "//", "http://h:8998",
    "http://" + "a" * 70_000, "x" * 2_000, "\x00",
    "http://ho st/", "https://\u2100.com/", "http://h/\n\r", "\u017f" * 600,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**63, 10**400, -(10**400), 10**5000, 1.5, math.inf, -math.inf, math.nan, 1e308, (),
    [], [[]], {}, {"": {}}, b"x", [None], ["tcp://h:1"], ["\ud800"], [1], {1: 2}, {"a": "b"}, {"a": "\ud800"},
    1j, object,
)  # fmt: skip


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "HttpCalls", FakeCalls)
    monkeypatch.setattr(side, "can_end_with_error", lambda: False)
    _told.clear()


def value(chance: random.Random) -> Any:
    return chance.choice(TEXTS if chance.random() < 0.5 else VALUES)


def params(chance: random.Random) -> Any:
    """What a client may write, mostly with some of what a proxy would."""
    if chance.random() < 0.03:
        return value(chance)
    found: dict[Any, Any] = {key: value(chance) for key in KEYS if chance.random() < 0.3}
    if chance.random() < 0.8:
        found[chance.choice(KEYS[:2])] = True
    if chance.random() < 0.5:
        own: dict[Any, Any] = {key: value(chance) for key in OWN_KEYS if chance.random() < 0.3}
        if chance.random() < 0.5:
            own["handoff"] = "h"
        found["layerflow"] = own
    return found


def house() -> House:
    options = PdOptions(prefill_servers=("tcp://p:1",))
    return House(mode="layerwise", handoffs=HandoffSide(options, "engine"))


def serve(house: House, name: str, said: Any) -> None:
    """All hooks of one request, with whatever it says; a request beside it is loaded and saved."""
    made = house.arrive(name, 150, Hit(HIT), kv_transfer_params=said)
    beside = house.arrive("beside", 150, Hit(HIT))
    for _ in range(2):
        tokens, _ = house.side.matched(made, 0)
        assert tokens is None or 0 <= tokens <= 150
        if tokens is not None:
            house.admit(made, tokens)
            break
    assert house.side.matched(beside, 0) == (HIT, False), said
    house.admit(beside, HIT)
    made.num_computed_tokens, beside.num_computed_tokens = 128, HIT
    plan = house.side.plan(
        output({name: 22, "beside": 22}, new=[(each, house.tables, 128) for each in (name, "beside")])
    )
    assert "beside" in {part.request for part in plan.loads}, said
    assert "beside" in plan.saves.requests, said
    assert "beside" in {part.request for part in plan.saves.parts}, said
    house.hear(None)
    for each in (made, beside):
        each.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
        _, told = house.side.finished(each, house.tables)
        assert told is None or isinstance(told, dict)
    del house.lookups.asked[:]


def campaign(count: int, seed: int) -> None:
    chance, made = random.Random(seed), house()
    with capture_logs() as logs:
        for number in range(count):
            if number % 500 == 0:
                made = house()
                logs[:] = [entry for entry in logs if entry["event"] == "hook_failed"]
            name = chance.choice([f"r{number}", "x" * 3_000 + str(number), f"\udc80{number}", f"\u017f{number}"])
            serve(made, name, params(chance))
    assert not [entry for entry in logs if entry["event"] == "hook_failed"], (
        "each is a wrong value, found where it is read"
    )


@pytest.mark.parametrize("seed", range(2))
def test_generated_requests(seed: int) -> None:
    campaign(600, seed)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(10))
def test_many_generated_requests(seed: int) -> None:
    campaign(10_000, 1_000 + seed)


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


@pytest.mark.parametrize(("part", "method"), [("_handoffs", "read"), ("_keys", "chain"), ("_search", "find")])
def test_an_error_in_a_hook_costs_its_request_only(monkeypatch: pytest.MonkeyPatch, part: str, method: str) -> None:
    made = house()
    owner = getattr(made.side, part)
    real = getattr(owner, method)

    def only_r(subject: Any, *more: Any) -> Any:
        asked = getattr(subject, "request_id", getattr(subject, "id", ""))
        return fail() if asked == "r" else real(subject, *more)

    monkeypatch.setattr(owner, method, only_r)
    with capture_logs() as logs:
        serve(made, "r", None)
    failed = [entry for entry in logs if entry["event"] == "hook_failed"]
    assert [entry["request"] for entry in failed] == ["'r'"]
    assert "r" not in made.side._tracked


def test_a_promised_load_that_cannot_be_planned_is_told_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = house()
    asked = made.arrive("r", 150, Hit(HIT))
    assert made.side.matched(asked, 0) == (HIT, False)
    made.admit(asked, HIT)
    monkeypatch.setattr(made.side._search, "take", fail)
    plan = made.plan("r")
    assert not plan.loads
    assert plan.unkept == {"r": UnkeptLoad(False, tuple(BLOCKS[: HIT // BLOCK]))}
    assert not plan.empty
    assert not made.side.plan(output({})).unkept, "once"


def test_a_plan_that_cannot_be_made_loads_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = House(FULL, mode="bulk")
    asked = made.arrive("r", 150, Hit(HIT))
    made.advisor.mode = "bulk"  # type: ignore[assignment]
    tokens, background = made.side.matched(asked, 0)
    assert tokens == HIT
    made.admit(asked, HIT)
    with monkeypatch.context() as patch:
        patch.setattr(made.side._saves, "fresh", fail)
        plan = made.side.plan(output({}))
    assert plan.unkept == {"r": UnkeptLoad(background, tuple(BLOCKS[: HIT // BLOCK]))}
    assert not plan.background and not plan.loads
    assert made.side.finished(asked, made.tables)[0] is False
    made.arrive("next", 150, Hit(HIT))
    assert made.side.matched(made.requests["next"], 0)[0] == HIT, "the steps behind it are planned as always"


def test_one_request_whose_saves_cannot_be_outlined_does_not_cost_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made = house()
    for name in ("r", "beside"):
        made.admit(made.arrive(name, 150), 0)
    planner: Any = made.side._saves
    parts = planner._parts
    monkeypatch.setattr(
        planner, "_parts", lambda asked: fail() if any(one.request == "r" for one, *_ in asked) else parts(asked)
    )
    plan = made.side.plan(output({"r": 150, "beside": 150}, new=[(each, made.tables, 0) for each in ("r", "beside")]))
    assert {part.request for part in plan.saves.parts} == {"beside"}


def test_addresses_that_requests_name_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    http = HttpCalls()
    ended = SimpleNamespace(error="", done=True, cancel=lambda: None)
    monkeypatch.setattr(http, "_begin", lambda call: (call.close(), ended)[1])
    for number in range(3 * MOST_KNOWN):
        http.get(f"http://h{number}:8998/query")
    assert len(http._known) == MOST_KNOWN
    assert http.get(f"http://h{3 * MOST_KNOWN - 1}:8998/query") is ended


def test_a_name_of_a_hand_off_has_a_bound() -> None:
    made = house()
    with capture_logs() as logs:
        made.arrive("r", 150, kv_transfer_params={"do_remote_prefill": True, "transfer_id": "x" * (MAX_ID + 1)})
    assert [entry["event"] for entry in logs] == ["handoff_not_followed"]
