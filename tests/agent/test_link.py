"""The engine's thread uses the link's socket when the link is not at it, and nothing gets lost between the two."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from e2e.known import KnownWorker, eventually
from server.support import Embed, worker_on

from layerflow.agent.link import Link
from layerflow.errors import ServerLost
from layerflow.wire.messages import Abort, StatusRequest


def link_of(worker: KnownWorker) -> Link:
    return worker.agent._dispatcher.link


def heard_on(link: Link, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The kind of every message that the agent hears from now on, and on which thread."""
    heard: list[tuple[str, int]] = []
    hear = link._listener.message_received

    def noted(message: Any) -> None:
        heard.append((type(message).__name__, threading.get_ident()))
        hear(message)

    monkeypatch.setattr(link._listener, "message_received", noted)
    return heard


def test_a_message_leaves_on_the_thread_that_sends_it(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> None:
    with worker_on(embed()) as worker:
        link = link_of(worker)
        posted: list[int] = []
        post = link._post
        monkeypatch.setattr(link, "_post", lambda dealer: (posted.append(threading.get_ident()), post(dealer)))

        def posted_here() -> bool:
            link.send(Abort([]))
            return threading.get_ident() in posted

        assert eventually(posted_here)
        assert eventually(lambda: not link._outbox)


def test_a_report_leaves_on_the_thread_that_tells_or_is_left_to_the_link(
    embed: Embed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worker_on(embed()) as worker:
        link = link_of(worker)
        reported: list[int] = []
        flush = link._flush
        monkeypatch.setattr(link, "_flush", lambda dealer: (reported.append(threading.get_ident()), flush(dealer)))

        def told_here() -> bool:
            link.flush()
            return threading.get_ident() in reported

        assert eventually(told_here)
        with link._turn:
            reported.clear()
            link.flush()
            assert threading.get_ident() not in reported
        assert eventually(lambda: link._thread.ident in reported)


def test_where_the_link_is_at_it_a_message_is_left_to_it(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> None:
    with worker_on(embed()) as worker:
        link = link_of(worker)
        heard = heard_on(link, monkeypatch)
        with link._turn:
            link.send(StatusRequest(1))
            link.pump()
            assert link._outbox and "Status" not in {kind for kind, _ in heard}
        assert eventually(lambda: ("Status", link._thread.ident) in heard)


def test_what_came_while_something_was_sent_is_heard(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket's descriptor has told the sending thread of it, and tells nobody else."""
    with worker_on(embed()) as worker:
        link = link_of(worker)
        heard = heard_on(link, monkeypatch)
        for number in range(300):
            link.send(StatusRequest(number))
        assert eventually(lambda: sum(kind == "Status" for kind, _ in heard) == 300)


def test_what_has_come_is_heard_on_the_thread_that_attends(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> None:
    with worker_on(embed()) as worker:
        link = link_of(worker)
        heard = heard_on(link, monkeypatch)
        mine = threading.get_ident()
        number = 0
        read = link._read

        def read_what_comes(dealer: Any) -> None:
            if threading.get_ident() == mine:
                dealer.poll(200)  # with the link's turn: it cannot be quicker
            read(dealer)

        monkeypatch.setattr(link, "_read", read_what_comes)

        def asked_and_heard_here() -> bool:
            nonlocal number
            number += 1
            link.send(StatusRequest(number))
            link.pump()
            return any(thread == mine for _, thread in heard)

        assert eventually(asked_and_heard_here)
        assert eventually(lambda: sum(kind == "Status" for kind, _ in heard) == number), "each once, whoever heard it"


@pytest.mark.parametrize("error", [ServerLost("not known"), ValueError("a bug")])
def test_what_goes_wrong_on_another_thread_ends_the_attachment_and_not_that_thread(
    embed: Embed, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with worker_on(embed()) as worker:
        link, attachments = link_of(worker), worker.agent.statistics().attachments

        mine, read, failed = threading.get_ident(), link._read, False

        def fail_here(dealer: Any) -> None:
            nonlocal failed
            if threading.get_ident() == mine and not failed:
                failed = True
                raise error
            read(dealer)

        def attended() -> bool:
            link.pump()
            return failed

        monkeypatch.setattr(link, "_read", fail_here)
        assert eventually(attended)
        assert eventually(lambda: worker.agent.statistics().attachments > attachments)
        assert worker.agent.wait_attached(10)
