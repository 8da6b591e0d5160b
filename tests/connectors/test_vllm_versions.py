"""Which vLLM is let in: known releases, newer ones where the operator says so, and only with a known interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import pytest
from structlog.testing import capture_logs

from layerflow.connectors.common.interface import check_call, check_interface, missing_symbol
from layerflow.connectors.vllm.options import allows_unknown, parse_options
from layerflow.connectors.vllm.versions import check_version, release
from layerflow.errors import ConfigError, Unsupported


@pytest.mark.parametrize("version", ["0.27.0", "0.27.1+cpu", "0.30.0rc1", "0.32.0", "0.32.9.dev3+gabc", "0.33.0"])
def test_known(version: str) -> None:
    with capture_logs() as logs:
        check_version(version)
    assert not logs


@pytest.mark.parametrize("version", ["0.26.9", "0.34.0", "1.0.0", "0.3.2", "dev", ""])
def test_unknown_are_told_what_to_do(version: str) -> None:
    with pytest.raises(Unsupported, match=r"0\.27 to 0\.33"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.34.0rc1", "0.40.2", "1.0.0"])
def test_newer_are_let_in_with_a_warning_where_the_operator_says_so(version: str) -> None:
    with pytest.raises(Unsupported, match="allow_unknown_vllm = true"):
        check_version(version)
    with capture_logs() as logs:
        check_version(version, allow_unknown=True)
    assert [(each["event"], each["log_level"], each["version"]) for each in logs] == [
        ("vllm_unknown", "warning", version)
    ]


@pytest.mark.parametrize("version", ["0.26.9", "dev"])
def test_older_never_are(version: str) -> None:
    with pytest.raises(Unsupported) as error:
        check_version(version, allow_unknown=True)
    assert "allow_unknown_vllm" not in str(error.value)


def test_the_setting_is_a_switch() -> None:
    assert not allows_unknown({})
    assert allows_unknown({"allow_unknown_vllm": True})
    parse_options({"allow_unknown_vllm": True}, producer=True, consumer=True)
    with pytest.raises(ConfigError, match="allow_unknown_vllm = 'yes'"):
        parse_options({"allow_unknown_vllm": "yes"}, producer=True, consumer=True)


def test_release() -> None:
    assert release("0.33.0rc1+cpu") == (0, 33)


class Hooks(ABC):
    """A base class of vLLM's."""

    @property
    def told(self) -> bool:
        return True

    @abstractmethod
    def load(self, context: Any, **told: Any) -> None: ...

    def save(self, layer: str, cache: Any) -> None:
        return

    @classmethod
    def facts(cls, config: Any) -> str:
        return ""

    def end(self, *, crashed: bool = False) -> None:
        return


class Connector(Hooks):
    """One that implements it."""

    @property
    def told(self) -> bool:
        return False

    def load(self, context: Any, **told: Any) -> None: ...

    def save(self, layer: str, cache: Any, more: int = 0) -> None: ...

    @classmethod
    def facts(cls, config: Any) -> str:
        return "x"

    def end(self, *, crashed: bool = False) -> None: ...

    def own(self, anything: Any) -> None: ...


def test_a_connector_that_implements_its_base_class() -> None:
    check_interface(Connector, "vLLM 0.99")


def _with(**changed: Any) -> type[Any]:
    base = type("Base", (Hooks,), changed)
    return type("Ours", (base,), {name: each for name, each in vars(Connector).items() if not name.startswith("_")})


def _load(self: Any, context: Any, plan: Any, **told: Any) -> None: ...
def _save(self: Any, layer: str, cache: Any, *, event: Any = None) -> None: ...
def _save_any(self: Any, layer: str, cache: Any, **told: Any) -> None: ...
def _save_renamed(self: Any, name: str, cache: Any) -> None: ...
def _end(self: Any) -> None: ...
def _facts(cls: Any, config: Any, role: str = "") -> str: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"load": _load}, r"load\(\) with 'plan' as argument 2"),
        ({"save": _save}, r"save\(\) with 'event'"),
        ({"save": _save_any}, r"save\(\) with any named arguments \(\*\*told\)"),
        ({"save": _save_renamed}, r"save\(\) with 'name' as argument 1"),
        ({"facts": classmethod(_facts)}, r"facts\(\) with 'role' as argument 2"),
    ],
)
def test_an_argument_that_it_does_not_take_is_named(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(Unsupported, match=rf"vLLM 0\.99: it calls {named}, which this connector does not take"):
        check_interface(_with(**changed), "vLLM 0.99")


def test_fewer_arguments_are_well_where_ours_has_defaults() -> None:
    check_interface(_with(end=_end), "vLLM 0.99")


def test_a_method_that_it_does_not_have_is_named() -> None:
    def drain(self: Any) -> None: ...

    with pytest.raises(Unsupported, match="its connectors must have drain"):
        check_interface(_with(drain=abstractmethod(drain)), "vLLM 0.99")


def test_what_it_calls_takes_what_it_gives() -> None:
    def hashed(request: Any, start: int, stop: int) -> None: ...

    check_call(hashed, "vLLM 0.99", None, 1, 2)
    with pytest.raises(Unsupported, match=r"hashed\(\) cannot be called .*: too many positional"):
        check_call(hashed, "vLLM 0.99", None, 1, 2, 0)


def test_a_name_that_vllm_does_not_have_any_more_is_named() -> None:
    with pytest.raises(ImportError) as error:
        from json import Nothing  # type: ignore[attr-defined]  # noqa: F401
    assert "Nothing" in str(missing_symbol(error.value, "vLLM 0.99"))
