"""Hand-offs in the scheduler's side: what is opened, followed, answered, released, and what is computed instead."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_scheduler import House, fakes
from vllm_fakes import BLOCK, FULL, output, request

from layerflow.agent.values import Handoff, Hit
from layerflow.connectors.vllm.pd import decoding, side
from layerflow.connectors.vllm.pd.conventions import concurrent
from layerflow.connectors.vllm.pd.options import PdOptions
from layerflow.connectors.vllm.pd.side import TRUNCATED, HandoffSide
from layerflow.connectors.vllm.plan import WorkerReport
from layerflow.connectors.vllm.scheduler import search
from layerflow.spec import GroupSpec, Plane

__all__ = ["fakes"]

TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
TO_DECODE = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": "x"}
PREFILL_FIRST = TO_PREFILL | {"remote_host": None}
STATE = GroupSpec("state", BLOCK, (2,), (Plane("kv", "uint8", (8,)),))
TOKENS = 150
HIT = 128
IDLE = output({})


class FakeCall:
    """An HTTP call that a test ends."""

    def __init__(self, kind: str, url: str, body: Any = None) -> None:
        self.kind, self.url, self.body = kind, url, body
        self.done, self.error, self.answer = False, "", None
        self.waits: list[float] = []
        self._then: list[Callable[[], None]] = []

    def end(self, answer: Any = None, error: str = "") -> None:
        self.done, self.answer, self.error = True, answer, error
        for then in self._then:
            then()

    def when_done(self, then: Callable[[], None]) -> None:
        self._then.append(then)

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return self.done


class FakeCalls:
    """Which HTTP calls were begun."""

    def __init__(self) -> None:
        self.calls: list[FakeCall] = []
        self.forgotten: list[str] = []

    def post(self, name: str, url: str, body: Any, until: float) -> FakeCall:
        self.calls.append(FakeCall("POST", url, body))
        return self.calls[-1]

    def get(self, url: str) -> FakeCall:
        self.calls.append(FakeCall("GET", url))
        return self.calls[-1]

    def forget(self, name: str) -> None:
        self.forgotten.append(name)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> FakeCalls:
    made = FakeCalls()
    monkeypatch.setattr(decoding, "HttpCalls", lambda: made)
    return made


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why requests were ended with an error."""
    reasons: list[str] = []
    monkeypatch.setattr(side, "can_end_with_error", lambda: True)
    monkeypatch.setattr(side, "end_with_error", lambda request, reason: reasons.append(reason))
    return reasons


def house(*groups: GroupSpec, options: PdOptions | None = None, **more: Any) -> House:
    return House(*groups, handoffs=HandoffSide(options, "engine"), **more)


def finish(made: SimpleNamespace, status: str = "FINISHED_LENGTH_CAPPED", computed: int | None = None) -> None:
    made.status = SimpleNamespace(name=status)
    made.num_computed_tokens = made.num_prompt_tokens if computed is None else computed


class TestPrefill:
    def test_a_hand_off_of_the_whole_prompt_is_opened_at_once(self) -> None:
        p = house()
        p.arrive(tokens=TOKENS, kv_transfer_params=PREFILL_FIRST)
        assert [(each.tokens, each.handoff.endswith(":r")) for each in p.lookups.opened] == [(TOKENS, True)]

    def test_the_servers_of_its_other_ranks_keep_their_parts(self) -> None:
        p = house(options=PdOptions(other_servers=("tcp://b:1", "tcp://c:1")))
        p.arrive(tokens=TOKENS, kv_transfer_params=PREFILL_FIRST)
        assert [each.servers for each in p.lookups.opened] == [("tcp://b:1", "tcp://c:1")]

    def test_the_first_step_waits_for_the_servers_answer(self) -> None:
        p = house()
        made = p.arrive(hit=Hit(0), kv_transfer_params=PREFILL_FIRST)
        assert p.side.matched(made, 0) == (None, False)
        p.lookups.opened[0].state = Handoff("h", "open", TOKENS)
        assert p.side.matched(made, 0) == (0, False)

    def test_its_saves_are_promised(self) -> None:
        p = house()
        p.arrive("promised", hit=Hit(0), kv_transfer_params=PREFILL_FIRST)
        p.arrive("r", hit=Hit(0))
        assert p.plan("r", TOKENS, 0).awaited is False
        assert p.plan("promised", TOKENS, 0).awaited is True

    def test_the_response_leads_to_it_once_the_prompt_is_computed(self) -> None:
        p = house()
        made = p.arrive(hit=Hit(0), kv_transfer_params=PREFILL_FIRST)
        p.lookups.opened[0].state = Handoff("h", "open", TOKENS)
        p.side.matched(made, 0)
        finish(made)
        _, told = p.side.finished(made, ([1, 2],))
        assert told is not None
        name = p.lookups.opened[0].handoff
        assert p.lookups.ended == [(name, TOKENS, "")]
        assert (told["do_remote_prefill"], told["remote_block_ids"]) == (True, [[1, 2]])
        assert told["layerflow"].items() >= {"handoff": name, "tokens": TOKENS, "hit_tokens": 0}.items()

    @pytest.mark.parametrize(
        ("status", "computed"),
        [("FINISHED_ABORTED", TOKENS), ("FINISHED_ERROR", TOKENS), ("FINISHED_LENGTH_CAPPED", TOKENS - 1)],
    )
    def test_a_prompt_that_did_not_end_as_planned_is_not_handed_over(self, status: str, computed: int) -> None:
        p = house()
        made = p.arrive(hit=Hit(0), kv_transfer_params=PREFILL_FIRST)
        finish(made, status, computed)
        _, told = p.side.finished(made)
        assert told == {"layerflow": {"hit_tokens": 0}}
        assert [(tokens, bool(reason)) for _, tokens, reason in p.lookups.ended] == [(0, True)]

    @pytest.mark.parametrize("how", ["embedded", "not-saved"])
    def test_what_is_not_opened_is_told_so(self, how: str) -> None:
        """A decoder may wait for it already."""
        p = house(save=how != "not-saved")
        p.arrive(
            prompt_embeds=object() if how == "embedded" else None,
            kv_transfer_params=TO_PREFILL | {"transfer_id": "x"},
        )
        assert p.lookups.opened == []
        assert [(name.startswith("x:"), tokens) for name, tokens, _ in p.lookups.ended] == [(True, 0)]

    def test_one_that_is_not_opened_in_time_is_given_up(self) -> None:
        """Its server may open it all the same, and nobody would complete it."""
        p = house()
        made = p.arrive(hit=Hit(0), kv_transfer_params=PREFILL_FIRST)
        p.lookups.opened[0].state = Handoff("h", "unknown", 0, "no answer")
        assert p.side.matched(made, 0) == (0, False)
        (ended,) = p.lookups.ended
        assert ended[:2] == (p.lookups.opened[0].handoff, 0) and "no answer" in ended[2]
        finish(made)
        p.side.finished(made, ([1, 2],))
        assert len(p.lookups.ended) == 1

    def test_a_refused_one_is_an_ordinary_prompt(self) -> None:
        p = house()
        made = p.arrive(hit=Hit(0), kv_transfer_params=PREFILL_FIRST)
        p.lookups.opened[0].state = Handoff("h", "refused", 0, "no room")
        assert p.side.matched(made, 0) == (0, False)
        finish(made)
        assert p.side.finished(made)[1] == {"layerflow": {"hit_tokens": 0}}
        assert p.lookups.ended == []

    def test_with_both_legs_at_once_the_response_says_nothing(self) -> None:
        p = house()
        made = p.arrive(hit=Hit(0), kv_transfer_params=TO_PREFILL | {"transfer_id": "x"})
        finish(made)
        assert "do_remote_prefill" not in (p.side.finished(made)[1] or {})
        assert [tokens for _, tokens, _ in p.lookups.ended] == [TOKENS]

    def test_whole_chunks_alone_where_partial_ones_are_not_saved(self) -> None:
        p = house(save_partial=False)
        p.arrive(tokens=TOKENS, kv_transfer_params=PREFILL_FIRST)
        assert [each.tokens for each in p.lookups.opened] == [128]

    def test_of_a_recurrent_model_the_last_token_is_left_once(self) -> None:
        p = house(FULL, STATE)
        params = dict(PREFILL_FIRST)
        made = request("r", TOKENS, kv_transfer_params=params, _all_token_ids=list(range(TOKENS)), max_tokens=8)
        p.side.arrived(made)
        p.side.arrived(made)
        assert (made.num_prompt_tokens, len(made.prompt_token_ids), len(made._all_token_ids)) == (149, 149, 149)
        assert (made.max_tokens, params[TRUNCATED]) == (1, True)
        assert [each.tokens for each in p.lookups.opened] == [149, 149]

    def test_new_weights_end_it(self) -> None:
        p = house()
        p.arrive(hit=Hit(0), kv_transfer_params=PREFILL_FIRST)
        p.side.reset()
        assert "weights" in p.lookups.ended[0][2]

    @pytest.mark.parametrize("options", [None, PdOptions(answer=False)])
    def test_among_other_connectors_it_is_an_ordinary_prompt_and_theirs_to_answer(
        self, options: PdOptions | None
    ) -> None:
        p = house(siblings=(), options=options)
        made = p.arrive(hit=Hit(0), kv_transfer_params=PREFILL_FIRST)
        finish(made)
        assert p.lookups.opened == []
        assert p.side.finished(made)[1] is None

    def test_alone_it_says_what_it_loaded_whatever_it_answers(self) -> None:
        p = house(options=PdOptions(answer=False))
        made = p.arrive(hit=Hit(0), kv_transfer_params=PREFILL_FIRST)
        finish(made)
        assert p.lookups.opened == []
        assert p.side.finished(made)[1] == {"layerflow": {"hit_tokens": 0}}

    def test_among_other_connectors_where_it_is_told_to_answer(self) -> None:
        p = house(siblings=(), options=PdOptions(answer=True))
        made = p.arrive(hit=Hit(0))
        finish(made)
        assert p.side.finished(made)[1] == {"layerflow": {"hit_tokens": 0}}
        p.arrive("other", kv_transfer_params=PREFILL_FIRST)
        assert len(p.lookups.opened) == 1

    def test_among_other_connectors_a_hand_off_of_its_own_is_told(self) -> None:
        d = house(siblings=())
        made = d.arrive(hit=Hit(0), kv_transfer_params=TO_DECODE | {"layerflow": {"handoff": "x", "incarnation": "1"}})
        finish(made)
        told = d.side.finished(made)[1]
        assert told is not None and "handoff" in told["layerflow"]


class TestDecode:
    def test_it_follows_and_waits_until_there_is_a_hit(self) -> None:
        d = house()
        made = d.arrive(kv_transfer_params=TO_DECODE)
        inquiry = d.lookups.asked[0]
        assert inquiry.follow is not None
        assert inquiry.follow.handoff.startswith("x:")
        assert d.side.matched(made, 0) == (None, False)
        inquiry.hit = Hit(HIT, following=True)
        assert d.side.matched(made, 0) == (HIT, True)
        d.admit(made, HIT)
        plan = d.plan(scheduled=1, computed=HIT)
        assert list(plan.background) == ["r"]
        assert 0 < plan.timeouts["r"] <= PdOptions().deadline_s

    def test_a_prefill_is_not_waited_for_while_others_compute(self) -> None:
        d = house()
        made = d.arrive(kv_transfer_params=TO_DECODE)
        d.side.matched(made, 0)
        assert d.lookups.waits == [0.0]
        d.plan(scheduled=1)
        assert d.lookups.waits == [0.0]
        d.side.matched(made, 0)
        d.side.plan(IDLE)
        assert d.lookups.waits[1:] == [0.0, d.side.options.lookup_wait_s]

    def test_loaded_it_is_released_at_once(self) -> None:
        d = self.loading()
        d.hear(None, arrived={"r"})
        assert len(d.lookups.released) == 1
        finish(d.requests["r"])
        _, told = d.side.finished(d.requests["r"])
        assert told == {"layerflow": {"hit_tokens": HIT, "handoff": "loaded"}}
        assert len(d.lookups.released) == 1

    def test_it_is_released_at_every_server_that_keeps_it(self) -> None:
        d, servers = house(), ("tcp://a:1", "tcp://b:1")
        own = {"v": 1, "servers": list(servers)}
        made = d.arrive(kv_transfer_params={**TO_DECODE, "layerflow": own})
        d.side.matched(made, 0)
        [inquiry] = d.lookups.asked
        assert inquiry.follow is not None and inquiry.follow.servers == servers
        finish(made, "FINISHED_ABORTED")
        d.side.finished(made)
        assert d.lookups.released_at == [servers]

    @pytest.mark.parametrize("tokens", [1, TOKENS], ids=["rejected", "aborted"])
    def test_a_routers_address_does_not_hide_who_keeps_it(self, tokens: int) -> None:
        d = house()
        own = {"v": 1, "handoff": "h", "servers": ["tcp://10.0.0.1:7"]}
        told = {"do_remote_prefill": True, "remote_host": "router", "layerflow": own}
        made = d.arrive(tokens=tokens, kv_transfer_params=told)
        d.side.matched(made, 0)
        finish(made, "FINISHED_ABORTED", 0)
        d.side.finished(made)
        assert d.lookups.released_at == [("tcp://router:7", "tcp://10.0.0.1:7")]

    def test_one_of_several_samples_leaves_it_to_the_others(self) -> None:
        d = self.loading("0_r")
        d.hear(None, arrived={"0_r"})
        finish(d.requests["0_r"])
        d.side.finished(d.requests["0_r"])
        assert d.lookups.released == []

    def test_an_abort_cuts_the_load_off_and_releases_the_prefill(self) -> None:
        d = self.loading()
        finish(d.requests["r"], "FINISHED_ABORTED")
        stays, _ = d.side.finished(d.requests["r"])
        assert not stays  # vLLM keeps the blocks of a load until every rank has told its end
        assert len(d.lookups.released) == 1
        d.arrive("other", hit=Hit(0))
        assert d.plan("other").aborted == ("r",)
        assert d.plan("other").aborted == ()

    def test_a_rejected_request_releases_the_prefill(self) -> None:
        d = house()
        own = {"v": 1, "handoff": "h", "prompt": "of the prompt that was rejected"}
        made = d.arrive(tokens=1, kv_transfer_params={"do_remote_prefill": True, "layerflow": own})
        finish(made, "FINISHED_ABORTED", 0)
        d.side.finished(made)
        assert d.lookups.released == ["h"]

    def test_what_needs_no_load_releases_the_prefill(self) -> None:
        d = house()
        d.arrive(kv_transfer_params=TO_DECODE, skip_reading_prefix_cache=True)
        d.arrive("embeds", kv_transfer_params=TO_DECODE, prompt_embeds=object())
        assert len(d.lookups.released) == 2

    def test_a_lost_prefill_leaves_what_is_stored(self) -> None:
        d = house()
        made = d.arrive(hit=Hit(64, reason="failed: the prefill engine is gone"), kv_transfer_params=TO_DECODE)
        assert d.side.matched(made, 0) == (64, False)
        d.lookups.asked[0].asked_at -= search.STALE_S + 1
        d.side.matched(made, 0)
        assert d.lookups.asked[1].follow is None
        finish(made)
        assert "prefill engine is gone" in (d.side.finished(made)[1] or {})["layerflow"]["lost"]

    def test_after_a_failed_load_what_is_stored_is_looked_up_once(self) -> None:
        d = self.loading()
        d.hear(WorkerReport(failed={"r": 1.0}), arrived={"r"})
        d.lookups.answers["r"] = Hit(64)
        made = d.requests["r"]
        assert d.side.matched(made, 0) == (64, False)
        assert d.lookups.asked[-1].follow is None
        d.admit(made, 64)
        d.plan(scheduled=TOKENS - 64, computed=64)
        d.hear(WorkerReport(failed={"r": 1.0}))
        assert d.side.matched(made, 0) == (0, False)

    def test_another_layout_is_not_even_waited_for(self) -> None:
        d = house()
        params = {"do_remote_prefill": True, "layerflow": {"v": 1, "handoff": "h", "layout": {"weights": "others"}}}
        made = d.arrive(hit=Hit(0), kv_transfer_params=params)
        assert d.lookups.asked[0].follow is None
        assert d.side.matched(made, 0) == (0, False)
        finish(made)
        assert "weights" in (d.side.finished(made)[1] or {})["layerflow"]["lost"]

    def test_the_true_address_is_tried_after_the_routers(self) -> None:
        d = house()
        own = {"v": 1, "handoff": "h", "servers": ["tcp://10.0.0.1:7"]}
        made = d.arrive(kv_transfer_params={"do_remote_prefill": True, "remote_host": "router", "layerflow": own})
        assert d.lookups.asked[0].follow.servers == ("tcp://router:7",)  # type: ignore[union-attr]
        d.lookups.asked[0].hit = Hit(0, reason="no server at tcp://router:7")
        assert d.side.matched(made, 0) == (None, False)
        assert d.side.matched(made, 0) == (None, False)
        assert d.lookups.asked[1].follow.servers == ("tcp://10.0.0.1:7",)  # type: ignore[union-attr]
        d.lookups.asked[1].hit = Hit(HIT)
        assert d.side.matched(made, 0) == (HIT, True)

    @staticmethod
    def loading(name: str = "r") -> House:
        """A decode engine that loads its hand-off."""
        d = house()
        made = d.arrive(name, hit=Hit(HIT, following=True), kv_transfer_params=TO_DECODE)
        assert d.side.matched(made, 0) == (HIT, True)
        d.admit(made, HIT)
        d.plan(name, scheduled=1, computed=HIT)
        return d


class TestDecodeFirst:
    PARAMS = {"do_remote_prefill": True, "metaserver": "http://proxy/v1/metaserver"}  # noqa: RUF012

    def test_the_prefill_is_asked_for_as_the_request_arrives(self, calls: FakeCalls) -> None:
        d = house()
        d.arrive(kv_transfer_params=self.PARAMS)
        (call,) = calls.calls
        assert (call.kind, call.url) == ("POST", self.PARAMS["metaserver"])
        assert call.body["layerflow"]["handoff"] == d.lookups.asked[0].follow.handoff  # type: ignore[union-attr]

    def test_a_metaserver_that_refuses_ends_the_wait(self, calls: FakeCalls) -> None:
        d = house()
        made = d.arrive(kv_transfer_params=self.PARAMS)
        assert d.side.matched(made, 0) == (None, False)
        calls.calls[0].error, calls.calls[0].done = "status 502", True
        d.lookups.answers["r"] = Hit(0)
        assert d.side.matched(made, 0) == (0, False)
        assert d.lookups.asked[1].follow is None

    def test_its_answer_alone_says_nothing(self, calls: FakeCalls) -> None:
        d = house()
        made = d.arrive(kv_transfer_params=self.PARAMS)
        calls.calls[0].done = True
        assert d.side.matched(made, 0) == (None, False)

    def test_the_posts_connection_ends_with_the_request(self, calls: FakeCalls) -> None:
        d = house()
        made = d.arrive(kv_transfer_params=self.PARAMS)
        finish(made, "FINISHED_ABORTED")
        d.side.finished(made)
        assert calls.forgotten == d.lookups.released

    def test_each_of_several_samples_has_a_hand_off_of_its_own(self, calls: FakeCalls) -> None:
        """Loaded, it is released, and nothing is kept of what was posted for it."""
        d = house()
        made = d.arrive("0_r", hit=Hit(HIT, following=True), kv_transfer_params=self.PARAMS)
        assert d.side.matched(made, 0) == (HIT, True)
        d.admit(made, HIT)
        d.plan("0_r", scheduled=1, computed=HIT)
        d.hear(None, arrived={"0_r"})
        assert len(d.lookups.released) == 1
        assert calls.forgotten == d.lookups.released

    def test_an_abort_before_the_metaserver_answers_tells_the_servers_that_the_options_name(self) -> None:
        d = house(options=PdOptions(prefill_servers=("tcp://p:7",)))
        made = d.arrive(kv_transfer_params=self.PARAMS)
        finish(made, "FINISHED_ABORTED")
        d.side.finished(made)
        assert d.lookups.released_at == [("tcp://p:7",)]


class TestBootstrap:
    PARAMS = TO_DECODE | {"remote_bootstrap_addr": "http://p:8998", "remote_engine_id": "p0"}

    def test_the_servers_are_asked_for_before_the_lookup(self, calls: FakeCalls) -> None:
        d = house()
        made = d.arrive(kv_transfer_params=self.PARAMS)
        assert d.lookups.asked == []
        assert d.side.matched(made, 0) == (None, False)
        calls.calls[0].answer = concurrent.query_answer({0: "p0"}, ("tcp://p:7",), "i")
        calls.calls[0].done = True
        assert d.side.matched(made, 0) == (None, False)
        assert d.lookups.asked[0].follow.servers == ("tcp://p:7",)  # type: ignore[union-attr]

    def test_an_engine_with_nothing_to_compute_waits_for_the_answer(self, calls: FakeCalls) -> None:
        d = house()
        made = d.arrive(kv_transfer_params=self.PARAMS)
        d.side.matched(made, 0)
        d.side.plan(IDLE)
        assert calls.calls[0].waits == [d.side.options.lookup_wait_s]

    def test_without_an_answer_in_time_the_prompt_is_computed(self, calls: FakeCalls) -> None:
        """Who asked first at this address may wait for longer than this request."""
        d = house()
        hurried = self.PARAMS | {"layerflow": {"deadline_s": 1e-3}}
        made = d.arrive(hit=Hit(0), kv_transfer_params=hurried)
        until = time.monotonic() + 1e-3
        while time.monotonic() <= until:
            time.sleep(1e-3)
        assert not calls.calls[0].done
        assert d.side.matched(made, 0) == (0, False)

    def test_without_an_answer_the_prompt_is_computed(self, calls: FakeCalls) -> None:
        d = house()
        made = d.arrive(hit=Hit(0), kv_transfer_params=self.PARAMS)
        calls.calls[0].error, calls.calls[0].done = "refused", True
        assert d.side.matched(made, 0) == (0, False)

    @pytest.mark.parametrize("tokens", [1, TOKENS], ids=["rejected", "aborted"])
    def test_an_answer_that_comes_after_an_abort_names_who_else_is_told(self, tokens: int, calls: FakeCalls) -> None:
        d = house()
        made = d.arrive(tokens=tokens, kv_transfer_params=self.PARAMS)
        finish(made, "FINISHED_ABORTED", 0)
        d.side.finished(made)
        [name] = d.lookups.released
        assert (d.lookups.released_at, d.control.released) == ([()], [])
        calls.calls[0].end(concurrent.query_answer({0: "p0"}, ("tcp://p:7", "tcp://q:7"), "i"))
        assert d.control.released == [(name, ("tcp://p:7", "tcp://q:7"))]

    @pytest.mark.parametrize("servers", [(), None], ids=["its-own", "refused"])
    def test_an_answer_after_an_abort_that_names_none_tells_nobody(
        self, servers: tuple[str, ...] | None, calls: FakeCalls
    ) -> None:
        d = house()
        made = d.arrive(kv_transfer_params=self.PARAMS)
        finish(made, "FINISHED_ABORTED", 0)
        d.side.finished(made)
        if servers is None:
            calls.calls[0].end(error="refused")
        else:
            calls.calls[0].end(concurrent.query_answer({0: "p0"}, servers, "i"))
        assert d.control.released == []

    def test_a_prefill_whose_servers_are_known_is_not_released_twice(self, calls: FakeCalls) -> None:
        d = house()
        made = d.arrive(kv_transfer_params=self.PARAMS)
        calls.calls[0].end(concurrent.query_answer({0: "p0"}, ("tcp://p:7",), "i"))
        d.side.matched(made, 0)
        finish(made, "FINISHED_ABORTED", 0)
        d.side.finished(made)
        assert (d.lookups.released_at, d.control.released) == ([("tcp://p:7",)], [])


class TestErrors:
    def test_too_much_to_compute_ends_the_request(self, refused: list[str]) -> None:
        d = house(options=PdOptions(max_recompute_tokens=100))
        lost = Hit(0, reason="failed: gone")
        made = d.arrive(hit=lost, kv_transfer_params=TO_DECODE)
        assert d.side.matched(made, 0) == (None, False)
        assert len(refused) == 1
        assert "gone" in refused[0]

    def test_what_is_stored_and_what_vllm_has_count(self, refused: list[str]) -> None:
        d = house(options=PdOptions(max_recompute_tokens=100))
        made = d.arrive(hit=Hit(64, reason="failed: gone"), kv_transfer_params=TO_DECODE)
        assert d.side.matched(made, 0)[0] == 64
        made = d.arrive("local", hit=Hit(0, reason="failed: gone"), kv_transfer_params=TO_DECODE)
        assert d.side.matched(made, 64) == (0, False)
        assert refused == []

    def test_a_failed_load_is_told_as_a_whole_then(self) -> None:
        d = house(options=PdOptions(max_recompute_tokens=100))
        d.arrive(hit=Hit(0))
        assert d.plan().restarts is True

    def test_an_ordinary_miss_is_computed(self, refused: list[str]) -> None:
        d = house(options=PdOptions(max_recompute_tokens=100))
        made = d.arrive(hit=Hit(0))
        assert d.side.matched(made, 0) == (0, False)
        assert refused == []

    def test_a_foreign_decode_engine_gets_an_error(self, refused: list[str]) -> None:
        p = house()
        made = p.arrive(kv_transfer_params=TO_PREFILL | {"remote_host": "10.0.0.9", "remote_block_ids": [[1]]})
        assert p.side.matched(made, 0) == (None, False)
        assert "10.0.0.9" in refused[0]

    def test_a_vllm_without_a_way_to_computes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(side, "can_end_with_error", lambda: False)
        d = house(options=PdOptions(max_recompute_tokens=100))
        made = d.arrive(hit=Hit(0, reason="failed: gone"), kv_transfer_params=TO_DECODE)
        assert d.side.matched(made, 0) == (0, False)


def test_a_hand_off_in_time_is_not_stale_however_long_it_took() -> None:
    d = house()
    made = d.arrive(kv_transfer_params=TO_DECODE)
    d.lookups.asked[0].asked_at -= search.STALE_S + 1
    d.lookups.asked[0].hit = Hit(HIT)
    for _ in range(2):
        assert d.side.matched(made, 0) == (HIT, True)
    assert len(d.lookups.asked) == 1
