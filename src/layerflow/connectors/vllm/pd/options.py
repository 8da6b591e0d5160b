"""The object ``pd`` of the connector's extra config: how this engine hands prompts over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from layerflow.connectors.vllm.pd.conventions.parts import DEFAULT_DEADLINE_S, DEFAULT_LEASE_S
from layerflow.errors import ConfigError

_WHERE = "kv_connector_extra_config: pd"
_KEYS = (
    "answer", "max_recompute_tokens", "deadline_s", "lease_s", "servers", "other_servers", "prefill_servers",
    "bootstrap_port",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PdOptions:
    """Checked.

    :param answer: the keys of NIXL, Mooncake and vLLM-Ascend are answered; None = outside a MultiConnector.
    :param max_recompute_tokens: a decode engine that would have to compute more of a prompt than this, because its
        prefill is lost, ends the request with an error instead; 0 = it computes whatever is missing.
    :param deadline_s: how long a decode engine waits for a hand-off, from the request's arrival.
    :param lease_s: how long a hand-off that nobody claims stays; 0 = the server's ``pd.handoff_lease_s``.
    :param servers: control addresses at which other hosts reach the servers of this engine's workers; () = every engine
        that hands over to this one uses the same server.
    :param other_servers: control addresses of the servers to which workers of this engine on other hosts are attached,
        as this engine's own server reaches them.
    :param prefill_servers: those of the prefill engines, for conventions that do not tell them.
    :param bootstrap_port: a prefill engine answers ``GET /query`` here; 0 = nowhere.
    """

    answer: bool | None = None
    max_recompute_tokens: int = 0
    deadline_s: float = DEFAULT_DEADLINE_S
    lease_s: float = DEFAULT_LEASE_S
    servers: tuple[str, ...] = ()
    other_servers: tuple[str, ...] = ()
    prefill_servers: tuple[str, ...] = ()
    bootstrap_port: int = 0


def parse_pd(extra: Mapping[str, Any]) -> PdOptions:
    """Parse the options of a whole extra config. ``"pd": true`` and ``false`` say `answer` alone.

    :raises ConfigError: an unknown key, or a value of the wrong kind.
    """
    told = extra.get("pd", {})
    if isinstance(told, bool):
        return PdOptions(answer=told)
    if not isinstance(told, Mapping):
        raise ConfigError(f"{_WHERE} = {told!r}: should be true, false or an object with {', '.join(_KEYS)}")
    if unknown := sorted(set(told) - set(_KEYS)):
        raise ConfigError(f"{_WHERE}: unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}")
    answer = told.get("answer")
    if answer is not None and not isinstance(answer, bool):
        raise ConfigError(f"{_WHERE}: answer = {answer!r}: should be true or false")
    return PdOptions(
        answer=answer,
        max_recompute_tokens=int(_number(told, "max_recompute_tokens", 0, 1 << 40)),
        deadline_s=_number(told, "deadline_s", DEFAULT_DEADLINE_S, 86400),
        lease_s=_number(told, "lease_s", DEFAULT_LEASE_S, 86400),
        servers=_addresses(told, "servers"),
        other_servers=_addresses(told, "other_servers"),
        prefill_servers=_addresses(told, "prefill_servers"),
        bootstrap_port=int(_number(told, "bootstrap_port", 0, 65535)),
    )


def check_policy(role: str, policy: str) -> None:
    """A decode engine must be able to compute what it was to be given.

    :param role: vLLM's ``kv_role``.
    :param policy: its ``kv_load_failure_policy``.
    :raises ConfigError: a decode engine cannot.
    """
    if role == "kv_consumer" and policy == "fail":
        raise ConfigError(
            "kv_load_failure_policy is 'fail', vLLM's default: this decode engine would end each request whose prefill "
            "is lost with an error; set it to 'recompute' in --kv-transfer-config (max_recompute_tokens of "
            "kv_connector_extra_config: pd bounds what is computed)"
        )


def _number(told: Mapping[str, Any], key: str, default: float, most: float) -> float:
    value = told.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ConfigError(f"{_WHERE}: {key} = {value!r}: should be a number from 0 to {most:g}")
    return value


def _addresses(told: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = told.get(key, ())
    if isinstance(value, str) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{_WHERE}: {key} = {value!r}: should be a list of control addresses")
    for each in value:
        if urlsplit(each).scheme not in ("tcp", "ipc"):
            raise ConfigError(f"{_WHERE}: {key}: {each!r} should be a server's control address, tcp:// or ipc://")
    return tuple(value)
