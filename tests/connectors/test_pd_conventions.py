"""What requests ask for by the keys that proxies send, and what the engines answer: exact JSON, both ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layerflow.connectors.vllm.pd.conventions import concurrent, metaserver, twophase
from layerflow.connectors.vllm.pd.conventions.parts import (
    PLAIN,
    Convention,
    DecodePart,
    HandoffTerms,
    NoHandoff,
    Part,
    PrefillPart,
    RefusedPart,
    RequestParams,
    Sizes,
    layout_mismatch,
    prompt_digest,
    terms_in,
)
from layerflow.connectors.vllm.pd.conventions.reading import part_of
from layerflow.connectors.vllm.pd.options import PdOptions, check_policy, parse_pd
from layerflow.errors import ConfigError, ProtocolError
from layerflow.spec import GroupSpec, ModelSpec, Plane, Shard, model_facts

PROMPT = [11, 12, 13]
DIGEST = prompt_digest(PROMPT)
SIX_KEYS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
SIZES = Sizes(engine_id="p0", host="10.0.0.1", port=7070, tp_size=4, pp_size=2, block_sizes=(128, 64))


def words(params: dict[str, Any], request: str = "cmpl-1", prompt: list[int] = PROMPT, **more: Any) -> RequestParams:
    return RequestParams(params, None, request, prompt, "e:1", **more)


def read(params: dict[str, Any], **more: Any) -> Part:
    roles = {name: more.pop(name, True) for name in ("answers", "producer", "consumer")}
    return part_of(words(params, **more), **roles)


class TestWhoDoesWhat:
    def test_six_empty_keys_make_a_prefill_engine_that_names_the_hand_off(self) -> None:
        part = read(SIX_KEYS)
        assert part == PrefillPart(handoff="e:1:cmpl-1", convention=Convention.TWO_PHASE, prompt=DIGEST)

    def test_without_the_address_keys_too(self) -> None:
        assert isinstance(read({"do_remote_decode": True}), PrefillPart)

    def test_what_it_answers_makes_the_decode_engine(self) -> None:
        terms = HandoffTerms(handoff="h", servers=("tcp://10.0.0.1:7070",), prompt=DIGEST, tokens=3, deadline_s=9)
        part = read(twophase.response(terms, SIZES, [[1, 2], [3]]))
        assert isinstance(part, DecodePart)
        assert (part.handoff, part.servers, part.otherwise) == ("h", ("tcp://10.0.0.1:7070",), ())
        assert (part.prefiller, part.deadline_s) == (terms, 9)

    def test_a_host_that_a_router_has_put_in_is_tried_first(self) -> None:
        terms = HandoffTerms(handoff="h", servers=("tcp://10.0.0.1:7070", "tcp://10.0.0.2:7070"))
        part = read(twophase.response(terms, SIZES, [[1]]) | {"remote_host": "prefill.svc"})
        assert isinstance(part, DecodePart)
        assert part.servers == ("tcp://prefill.svc:7070", "tcp://10.0.0.2:7070")
        assert part.otherwise == (terms.servers,)

    def test_of_one_server_a_router_cannot_change_the_address(self) -> None:
        answer = twophase.response(HandoffTerms(handoff="h"), SIZES, [[1]]) | {"remote_host": "prefill.svc"}
        part = read(answer)
        assert isinstance(part, DecodePart)
        assert (part.servers, part.otherwise) == ((), ())

    def test_of_a_list_of_prompts_only_the_first_has_the_hand_off_that_the_response_names(self) -> None:
        answer = twophase.response(HandoffTerms(handoff="h", prompt=DIGEST), SIZES, [[1]])
        part = read(answer, prompt=[1, 2])
        assert isinstance(part, NoHandoff)
        assert "another prompt" in part.reason

    def test_a_rejected_request_is_one_token_of_vllms_and_still_has_the_hand_off(self) -> None:
        part = read(twophase.response(HandoffTerms(handoff="h", prompt=DIGEST), SIZES, [[1]]), prompt=[0])
        assert isinstance(part, DecodePart)
        assert part.handoff == "h"

    def test_a_shared_id_names_the_hand_off_on_both_sides_and_by_prompt(self) -> None:
        prefill = read({"do_remote_decode": True, "transfer_id": "xfer-1"})
        decode = read({"do_remote_prefill": True, "transfer_id": "xfer-1", "remote_bootstrap_addr": "http://p:8998"})
        assert isinstance(prefill, PrefillPart)
        assert isinstance(decode, DecodePart)
        assert prefill.handoff == decode.handoff == f"xfer-1:{DIGEST}"
        assert decode.bootstrap == "http://p:8998/query"
        other = read({"do_remote_decode": True, "transfer_id": "xfer-1"}, prompt=[5])
        assert isinstance(other, PrefillPart)
        assert other.handoff != prefill.handoff

    def test_what_layerflows_own_proxy_sends(self) -> None:
        asked = {"do_remote_decode": True, "transfer_id": "x", "layerflow": {"v": 1, "deadline_s": 7}}
        claimed = {
            "do_remote_prefill": True,
            "transfer_id": "x",
            "layerflow": {"v": 1, "handoff": "x", "servers": ["s"]},
        }
        prefill, decode = read(asked), read(claimed, answers=False)
        assert isinstance(prefill, PrefillPart)
        assert isinstance(decode, DecodePart)
        assert (prefill.handoff, prefill.deadline_s) == (decode.handoff, 7)
        assert decode.servers == ("s",)

    def test_told_servers_need_no_question(self) -> None:
        params = {"do_remote_prefill": True, "transfer_id": "x", "remote_bootstrap_addr": "http://p:8998"}
        told = read(params | {"layerflow": {"v": 1, "servers": ["tcp://p:1"]}})
        here = read(params | {"layerflow": {"v": 1, "servers": []}})
        assert isinstance(told, DecodePart)
        assert isinstance(here, DecodePart)
        assert (told.servers, told.bootstrap) == (("tcp://p:1",), "")
        assert (here.servers, here.bootstrap) == ((), "")

    def test_a_metaserver_makes_a_decode_engine_that_names_the_hand_off(self) -> None:
        params = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": "http://proxy:1/v1/metaserver"}
        part = read(params, prefill_servers=("tcp://p:1",))
        assert isinstance(part, DecodePart)
        assert (part.handoff, part.metaserver, part.servers) == ("e:1:cmpl-1", params["metaserver"], ("tcp://p:1",))

    def test_what_it_posts_makes_the_prefill_engine(self) -> None:
        terms = HandoffTerms(handoff="h", prompt=DIGEST, layout={"chunk_tokens": "64"})
        part = read(metaserver.body("cmpl-1-0-0123abcd", terms, SIZES))
        assert isinstance(part, PrefillPart)
        assert (part.handoff, part.convention, part.decoder) == ("h", Convention.METASERVER, terms)

    def test_a_decode_engine_of_another_system_is_refused(self) -> None:
        part = read({"do_remote_decode": True, "remote_host": "10.0.0.9", "remote_block_ids": [[1, 2]]})
        assert isinstance(part, RefusedPart)
        assert "10.0.0.9" in part.reason

    @pytest.mark.parametrize(
        "params",
        [
            {},
            {"layerflow": {"load": False}},
            {"do_remote_prefill": True},
            {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": None},
            {"do_remote_prefill": False, "do_remote_decode": False},
        ],
    )
    def test_no_address_is_the_pool(self, params: dict[str, Any]) -> None:
        assert read(params) == PLAIN

    def test_a_prefill_engine_of_another_system_is_the_pool_and_says_so(self) -> None:
        part = read({"do_remote_prefill": True, "remote_engine_id": "n0", "remote_host": "h", "remote_port": 5600})
        assert isinstance(part, NoHandoff)
        assert "n0" in part.reason

    def test_roles_bind(self) -> None:
        assert read(SIX_KEYS, producer=False) == PLAIN
        assert read({"do_remote_prefill": True, "transfer_id": "x"}, consumer=False) == PLAIN

    @pytest.mark.parametrize("params", [SIX_KEYS, {"do_remote_decode": True, "transfer_id": "x"},
                                        {"do_remote_prefill": True, "transfer_id": "x"},
                                        {"do_remote_prefill": True, "metaserver": "http://m"}])  # fmt: skip
    def test_among_other_connectors_their_keys_are_left_alone(self, params: dict[str, Any]) -> None:
        assert read(params, answers=False) == PLAIN

    def test_among_other_connectors_a_hand_off_of_ours_is_followed(self) -> None:
        answer = twophase.response(HandoffTerms(handoff="h"), SIZES, [[1]])
        assert isinstance(read(answer, answers=False), DecodePart)

    @pytest.mark.parametrize(
        ("params", "about"),
        [
            ({"do_remote_prefill": True, "metaserver": 5}, "metaserver"),
            ({"do_remote_prefill": True, "metaserver": "ftp://x"}, "metaserver"),
            ({"do_remote_prefill": True, "transfer_id": "x", "remote_bootstrap_addr": "nowhere"}, "bootstrap"),
            ({"do_remote_prefill": True, "layerflow": {"v": 2, "handoff": "h"}}, "version"),
            ({"do_remote_prefill": True, "transfer_id": "x", "layerflow": {"servers": 5}}, "servers"),
            ({"do_remote_decode": True, "transfer_id": "x", "layerflow": {"deadline_s": 0}}, "deadline_s"),
            ({"do_remote_prefill": True, "layerflow": {"handoff": ""}}, "handoff"),
            ({"do_remote_prefill": True, "layerflow": {"handoff": 7}}, "handoff"),
            ({"do_remote_prefill": True, "layerflow": {"handoff": "h", "servers": "x"}}, "servers"),
            ({"do_remote_prefill": True, "layerflow": {"handoff": "h", "deadline_s": -1}}, "deadline_s"),
            ({"do_remote_prefill": True, "layerflow": {"handoff": "h", "layout": {"a": 1}}}, "layout"),
        ],
    )
    def test_bad_words_are_named_and_change_nothing(self, params: dict[str, Any], about: str) -> None:
        part = read(params)
        assert isinstance(part, NoHandoff)
        assert about in part.reason


class TestJson:
    def test_terms_come_back_as_they_went(self) -> None:
        terms = HandoffTerms(handoff="h", servers=("tcp://a:1",), incarnation="i", layout={"a": "b"}, prompt="p",
                             tokens=7, lease_s=3.5, deadline_s=4)  # fmt: skip
        assert terms_in({"layerflow": terms.to_json()}) == terms
        assert terms_in({"layerflow": {"load": False}}) is None

    def test_the_response_has_all_that_nixl_answers(self) -> None:
        answer = twophase.response(HandoffTerms(handoff="h", tokens=3), SIZES, [[1, 2], [3]])
        own = answer.pop("layerflow")
        assert own["handoff"] == "h"
        assert answer == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2], [3]],
            "remote_engine_id": "p0",
            "remote_request_id": "h",
            "remote_host": "10.0.0.1",
            "remote_port": 7070,
            "tp_size": 4,
            "pp_size": 2,
            "dcp_size": 1,
            "remote_num_tokens": 3,
            "transfer_mode": "layerflow",
        }

    def test_the_post_has_all_that_vllm_ascend_posts(self) -> None:
        body = metaserver.body(
            "chatcmpl-1b4e28ba-2fa1-11d2-883f-0016d3cca427-0123abcd", HandoffTerms(handoff="h"), SIZES
        )
        own = body.pop("layerflow")
        assert own["handoff"] == "h"
        assert body == {
            "token_ids": [],
            "request_id": "chatcmpl-1b4e28ba-2fa1-11d2-883f-0016d3cca427",
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [[], []],
            "remote_block_size": [128, 64],
            "remote_engine_id": "p0",
            "remote_host": "10.0.0.1",
            "remote_port": 7070,
            "remote_tp_size": 4,
            "remote_pcp_size": 1,
            "remote_dcp_size": 1,
            "remote_cached_tokens": 0,
        }

    def test_the_post_tells_over_how_many_ranks_tokens_are_spread(self) -> None:
        body = metaserver.body("r", HandoffTerms(handoff="h"), replace(SIZES, dcp_size=2, pcp_size=4))
        assert (body["remote_dcp_size"], body["remote_pcp_size"]) == (2, 4)

    def test_an_id_without_vllms_digits_is_left_whole(self) -> None:
        body = metaserver.body("chatcmpl-1b4e28ba-2fa1-11d2-883f-0016d3cca427", HandoffTerms(handoff="h"), SIZES)
        assert body["request_id"] == "chatcmpl-1b4e28ba-2fa1-11d2-883f-0016d3cca427"

    def test_query_names_engines_by_rank_and_their_servers(self) -> None:
        answer = concurrent.query_answer({0: "p_dp0", 1: "p_dp1"}, ("tcp://a:1",), "i")
        assert answer["1"]["engine_id"] == "p_dp1"
        assert concurrent.servers_in(answer, "p_dp1") == ("tcp://a:1",)
        assert concurrent.servers_in(answer, "") == ("tcp://a:1",)

    @pytest.mark.parametrize(
        ("answer", "about"),
        [
            ({}, "does not name"),
            ([], "does not name"),
            ({"0": {"engine_id": "p", "worker_addr": {}}}, "does not speak layerflow"),
            ({"0": {"engine_id": "p", "layerflow": {"servers": "x"}}}, "should be a list"),
            ({"0": {"engine_id": "p", "layerflow": {"servers": ["\ud800"]}}}, "surrogate"),
            ({"0": {"engine_id": "p", "layerflow": {"servers": ["a"] * 2000}}}, "at most"),
            ({"0": {"engine_id": "p", "layerflow": {}}}, "does not tell its servers"),
        ],
    )
    def test_an_answer_of_another_kind_is_an_error(self, answer: Any, about: str) -> None:
        with pytest.raises(ProtocolError, match=about):
            concurrent.servers_in(answer, "p")


def spec(**changed: Any) -> ModelSpec:
    group = GroupSpec("full", 32, (0, 1), (Plane("kv", changed.pop("dtype", "float32"), (8,)),))
    return ModelSpec("m", changed.pop("content", "w"), (group,), **({"chunk_tokens": 64} | changed))


class TestLayouts:
    @pytest.mark.parametrize(
        ("other", "about"),
        [
            (spec(content="v"), "weights"),
            (spec(quantization="fp8"), "quantisation"),
            (spec(attention="flash/NHD"), "attention backend"),
            (spec(chunk_tokens=128), "chunk_tokens: '64' here, '128'"),
            (spec(dtype="bfloat16"), "cache groups"),
            (spec(shard=Shard(0, 2, 0, 1)), "tensor size: '1' here, '2'"),
        ],
    )
    def test_the_first_fact_that_differs_is_named(self, other: ModelSpec, about: str) -> None:
        assert about in layout_mismatch(model_facts(spec()), model_facts(other))

    def test_equal_and_untold_facts_do_not_differ(self) -> None:
        assert not layout_mismatch(model_facts(spec()), model_facts(spec()))
        assert not layout_mismatch(model_facts(spec()), {})


class TestOptions:
    def test_a_switch_says_whose_keys_are_answered(self) -> None:
        assert parse_pd({"pd": True}) == PdOptions(answer=True)
        assert parse_pd({}) == PdOptions()

    def test_all_of_it(self) -> None:
        told = {"answer": False, "max_recompute_tokens": 100, "deadline_s": 5, "lease_s": 2.5,
                "servers": ["tcp://a:1"], "other_servers": ["tcp://c:1"],
                "prefill_servers": ["tcp://b:1"], "bootstrap_port": 8998}  # fmt: skip
        options = parse_pd({"pd": told})
        assert (options.answer, options.max_recompute_tokens, options.servers) == (False, 100, ("tcp://a:1",))

    @pytest.mark.parametrize(
        "told",
        [5, {"unknown": 1}, {"answer": 1}, {"deadline_s": -1}, {"servers": "tcp://a:1"}, {"servers": ["http://a"]},
         {"bootstrap_port": 70000}],
    )  # fmt: skip
    def test_a_bad_value_is_refused(self, told: Any) -> None:
        with pytest.raises(ConfigError, match="pd"):
            parse_pd({"pd": told})

    def test_a_decode_engine_must_be_able_to_compute(self) -> None:
        with pytest.raises(ConfigError, match="recompute"):
            check_policy("kv_consumer", "fail")
        check_policy("kv_consumer", "recompute")
        check_policy("kv_both", "fail")
