"""Whether a server listens at an endpoint, without a word to it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerflow.endpoint import check_free, check_listened, running_endpoints
from layerflow.errors import ConfigError, SessionError


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A control socket in the place of the default endpoint, with the arena's beside it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"layerflow-{os.getuid()}"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as control, socket.socket(socket.AF_UNIX) as arena:
        for each, name in ((control, "control"), (arena, "control.arena")):
            each.bind(str(folder / name))
            each.listen(8)
        yield folder / "control"


def test_a_server_that_listens_is_let_be_and_in_the_way(server: Path) -> None:
    check_listened(f"ipc://{server}")
    with pytest.raises(ConfigError, match=f"another server is running at ipc://{server} \\(process {os.getpid()}\\)"):
        check_free(f"ipc://{server}")


def test_no_socket_names_those_that_are_there(server: Path, tmp_path: Path) -> None:
    wanted = f"ipc://{tmp_path}/elsewhere/control"
    check_free(wanted)
    with pytest.raises(SessionError) as caught:
        check_listened(wanted)
    assert str(caught.value).startswith(f"no server at {wanted}: there is no socket; servers listen at ")
    assert f"ipc://{server}" in str(caught.value)


def test_a_socket_that_was_left_behind(server: Path) -> None:
    left = server.with_name("left")
    for name in ("left", "left.arena"):
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(server.with_name(name)))
    check_free(f"ipc://{left}")
    assert f"ipc://{left}" not in list(running_endpoints(f"ipc://{left}"))
    with pytest.raises(SessionError, match="the process that listened there has ended"):
        check_listened(f"ipc://{left}")


def test_a_server_that_takes_nobody_listens_all_the_same(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as full:
        full.bind(str(tmp_path / "control"))
        full.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(str(tmp_path / "control"))
            check_listened(f"ipc://{tmp_path}/control")


def test_other_endpoints_are_not_looked_at() -> None:
    for endpoint in ("inproc://x", "tcp://127.0.0.1:1"):
        check_free(endpoint)
        check_listened(endpoint)
