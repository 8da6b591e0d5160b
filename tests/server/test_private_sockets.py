"""No other user reaches the server's sockets, whatever the umask, the endpoint or the directory."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerflow.config.settings import ServerSettings, make_private_directory
from layerflow.errors import ConfigError
from layerflow.server import EmbeddedServer, server
from layerflow.system.unix_sockets import listen_privately
from server.support import Embed


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize("endpoint", ["ipc://@layerflow", "ipc://*"])
def test_sockets_without_a_directory_are_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="without a private directory"):
        ServerSettings(endpoint=endpoint)


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777])
def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 700"):
        make_private_directory(f"ipc://{tmp_path}/control")


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    make_private_directory(f"ipc://{tmp_path}/control")
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    with pytest.raises(ConfigError, match="another user owns"):
        make_private_directory(f"ipc://{tmp_path}/control")


@pytest.mark.usefixtures("open_umask")
def test_sockets_are_the_user_s_own_whatever_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    with EmbeddedServer(endpoint=f"ipc://{folder}/control"):
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"control": 0o600, "control.arena": 0o600}


def test_the_process_s_umask_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of an embedding engine's other threads, too."""
    monkeypatch.setattr(os, "umask", lambda _: pytest.fail("the umask was changed"))
    with EmbeddedServer(endpoint=f"ipc://{tmp_path}/own/control"):
        pass


def test_an_embedded_server_looks_at_its_directory_too(
    embed: Embed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setattr(server.Server, "fd_server_path", property(lambda _: tmp_path / "x.arena"))
    with pytest.raises(ConfigError, match="another user"):
        embed()


@pytest.fixture
def crowded(tmp_path: Path) -> Iterator[Path]:
    """A socket whose process accepts nobody, with as many waiting as there may be."""
    path = tmp_path / "control"
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
        listener.bind(str(path))
        listener.listen(0)
        for _ in range(4):
            visitor = waiting.enter_context(socket.socket(socket.AF_UNIX))
            visitor.setblocking(False)
            visitor.connect_ex(str(path))
        yield path


@pytest.mark.timeout(60)
def test_a_server_that_accepts_nobody_is_told_of_and_not_waited_for(crowded: Path) -> None:
    with pytest.raises(ConfigError, match="another server running there"):
        listen_privately(crowded)
    assert crowded.is_socket()


def test_a_file_at_the_endpoint_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="another server running there"):
        listen_privately(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"
