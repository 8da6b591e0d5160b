"""``layerflow status --watch``: one connection, a screen of its own, and no word in the server's log."""

import io

import pytest
from rich.console import Console
from structlog.testing import capture_logs

from layerflow.agent.observer import Observer
from layerflow.config.settings import Settings
from layerflow.errors import ServerLost
from layerflow.server import EmbeddedServer
from layerflow_cli.commands import status as command

STATUS = {"version": "9.9", "healthy": True, "sessions": []}
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


def test_it_asks_over_one_connection_and_leaves_no_line_in_the_log(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    # Between two questions nothing is heard of it, on a busy machine for long.
    settings = Settings(pool={"size": "4MiB", "warm": False}, server={"liveness_ms": 60_000})
    monkeypatch.setattr(command, "TIMEOUT_S", 60.0)
    with capture_logs() as logs:
        with (
            EmbeddedServer(settings, f"ipc://{tmp_path}/control") as server,
            command.asking(server.endpoint, over_http=False) as ask,
        ):
            found = [ask() for _ in range(5)]
        seen = [[(each["session"], each["name"]) for each in one["sessions"]] for one in found]
        assert seen == [seen[0]] * 5 and [name for _, name in seen[0]] == ["status"]
    told = [entry for entry in logs if entry["event"].startswith("session_")]
    assert {entry["log_level"] for entry in told} <= {"debug"}


def test_it_finds_a_server_that_was_started_anew(tmp_path):
    tmp_path.chmod(0o700)
    endpoint, pids = f"ipc://{tmp_path}/control", []
    with Observer(endpoint) as observer:
        for _ in range(2):
            with EmbeddedServer(Settings(pool={"size": "4MiB", "warm": False}), endpoint):
                pids.append(observer.status(30)["pid"])
    assert len(pids) == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_it_shows_what_it_hears_until_it_is_interrupted(monkeypatch, terminal):
    answers = iter([STATUS, STATUS | {"version": "10.0"}, ServerLost("the server went away"), KeyboardInterrupt()])

    def ask():
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    shown = io.StringIO()
    screen = Console(file=shown, force_terminal=terminal, width=80, height=24, color_system=None)
    monkeypatch.setattr("layerflow_cli.output.console", lambda: screen)
    # A program that reads along is told by the exit code that the server is gone; a person is shown when it is back.
    with pytest.raises(KeyboardInterrupt if terminal else ServerLost):
        command.watch_status(ask, 0.0, None, everything=False)
    text = shown.getvalue()
    assert "layerflow 9.9" in text and "layerflow 10.0" in text
    assert ("the server went away" in text) == terminal
    assert (ENTER in text, LEAVE in text) == (terminal, terminal)
