"""What operators write for a connector is read key by key, and each problem is named with its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from layerflow.connectors.common.options import WrittenOptions
from layerflow.errors import ConfigError


def written(**options: Any) -> WrittenOptions:
    return WrittenOptions("extra", options)


def test_what_is_not_written_has_its_default() -> None:
    options = written()
    assert (options.text("a"), options.switch("a", True), options.number("a", 2.5)) == ("", True, 2.5)
    assert options.endpoint() == ""
    assert "a" not in options


def test_what_is_written_is_returned() -> None:
    options = written(a="x", b=False, c=3, d={"k": 1}, endpoint="ipc:///run/user/1/control")
    assert (options.text("a"), options.switch("b", True), options.number("c", 0)) == ("x", False, 3)
    assert options.table("d", "[d]") == {"k": 1}
    assert options.endpoint() == "ipc:///run/user/1/control"
    assert "a" in options
    options.refuse_unknown(["a", "b", "c", "d", "endpoint", "more"])


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda: written(a=1).text("a"), "extra: a = 1: should be text"),
        (lambda: written(a="yes").switch("a", True), "extra: a = 'yes': should be true or false"),
        (lambda: written(a=1).switch("a", True), "extra: a = 1: should be true or false"),
        (lambda: written(a="1").number("a", 0), "extra: a = '1': should be a number"),
        (lambda: written(a=True).number("a", 0), "extra: a = True: should be a number"),
        (lambda: written(a=11).number("a", 0, least=1, most=10), "extra: a = 11: should be 1 to 10"),
        (lambda: written(a=0).number("a", 2, least=1), "extra: a = 0: should be 1 to inf"),
        (lambda: written(a=float("nan")).number("a", 2, least=1, most=10), "extra: a = nan: should be 1 to 10"),
        (lambda: written(a=[1]).table("a", "[pool.disk]"), "extra: a = [1]: should be an object with the keys of"),
        (lambda: written(endpoint="tcp://10.0.0.1:1").endpoint(), "must run on this machine"),
        (lambda: written(endpoint="ipc://run/control").endpoint(), "extra: endpoint: "),
        (lambda: written(endpoint="ipc://$HOME/control").endpoint(), "$ is not replaced"),
        (lambda: written(endpont="").refuse_unknown(["endpoint"]), "unknown key 'endpont'; did you mean endpoint?"),
        (lambda: written(zzz="").refuse_unknown(["b", "a"]), "extra: unknown key 'zzz'; known are a, b"),
        (lambda: written(chunk_size=1).refuse_unknown(["a"]), "extra: chunk_size has no use here: "),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(read: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_unknown_key_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        written(endpont="", zzz=1).refuse_unknown(["endpoint"])
    assert [line.split("'")[1] for line in str(caught.value).splitlines()] == ["endpont", "zzz"]
