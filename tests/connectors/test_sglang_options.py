"""``linker_extra_config``, and which SGLang it is for."""

from __future__ import annotations

from typing import Any

import pytest

from layerflow.connectors.sglang.options import ENVIRONMENT, SglangOptions, options_of_environment, parse_options
from layerflow.connectors.sglang.versions import KNOWN, check_version
from layerflow.endpoint import default_endpoint
from layerflow.errors import ConfigError, Unsupported


def test_nothing_set_takes_the_server_of_this_machine_and_does_everything() -> None:
    assert parse_options({}) == SglangOptions(endpoint=default_endpoint())
    assert (SglangOptions().load, SglangOptions().save, SglangOptions().load_timeout_s) == (True, True, None)
    assert SglangOptions().lookup_timeout_s == 0.05


def test_every_option_can_be_set() -> None:
    options = parse_options(
        {
            "endpoint": "ipc:///run/layerflow/control",
            "name": "left",
            "load": False,
            "save": False,
            "save_by_layer": False,
            "model_content": "@/run/weights",
            "lookup_timeout_ms": 5,
            "load_timeout_ms": 1500,
            "handoff_deadline_s": 30,
            "allow_unknown_sglang": True,
        }
    )
    assert options == SglangOptions(
        endpoint="ipc:///run/layerflow/control",
        name="left",
        load=False,
        save=False,
        save_by_layer=False,
        model_content="@/run/weights",
        lookup_timeout_s=0.005,
        load_timeout_s=1.5,
        handoff_deadline_s=30,
        allow_unknown=True,
    )


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"endpont": "ipc:///run/control"}, "unknown key 'endpont'; did you mean endpoint?"),
        ({"load_timeout": 5}, "did you mean load_timeout_ms?"),
        ({"allow_unknown_vllm": True}, "did you mean allow_unknown_sglang?"),
        ({"zzz": 1}, "unknown key 'zzz'; known are allow_unknown_sglang, endpoint, "),
        ({"endpoint": "tcp://10.0.0.1:5555"}, "must run on this machine"),
        ({"endpoint": 5}, "endpoint = 5: should be text"),
        ({"name": 5}, "name = 5: should be text"),
        ({"model_content": 5}, "model_content = 5: should be text"),
        ({"load": "yes"}, "load = 'yes': should be true or false"),
        ({"save": 1}, "save = 1: should be true or false"),
        ({"save_by_layer": 0}, "save_by_layer = 0: should be true or false"),
        ({"allow_unknown_sglang": 1}, "allow_unknown_sglang = 1: should be true or false"),
        ({"lookup_timeout_ms": 0}, "lookup_timeout_ms = 0: should be 1 to 10000"),
        ({"lookup_timeout_ms": "50"}, "lookup_timeout_ms = '50': should be a number"),
        ({"load_timeout_ms": 0}, "load_timeout_ms = 0: should be 1 to 3.6e+06"),
        ({"handoff_deadline_s": 0}, "handoff_deadline_s = 0: should be 1 to 86400"),
        ({"load_timeout_ms": None}, "load_timeout_ms = None: should be a number"),
    ],
)
def test_what_is_refused_names_the_key(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(extra)
    assert str(caught.value).startswith("linker_extra_config: ")
    assert says in str(caught.value)


def test_an_sglang_that_was_not_tested_is_refused_with_what_to_do_and_can_be_let_in() -> None:
    for version in KNOWN:
        check_version(version)
    with pytest.raises(Unsupported, match=r"SGLang 9\.9\.9: .*allow_unknown_sglang = true in linker_extra_config"):
        check_version("9.9.9")
    check_version("9.9.9", allow_unknown=True)


def test_a_transfer_backend_has_its_options_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert options_of_environment() == parse_options({})
    monkeypatch.setenv(ENVIRONMENT, '{"handoff_deadline_s": 5}')
    assert options_of_environment().handoff_deadline_s == 5


@pytest.mark.parametrize("written", ["{", "[]", "5", '{"endpont": ""}', '{"handoff_deadline_s": "5"}'])
def test_options_that_are_wrong_there_name_the_variable(monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    monkeypatch.setenv(ENVIRONMENT, written)
    with pytest.raises(ConfigError, match=ENVIRONMENT):
        options_of_environment()
