"""HTTP of the scheduler's sides: posts and questions that nobody waits for, and ``GET /query``."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from e2e.known import eventually

from layerflow.connectors.vllm.pd import decoding, side
from layerflow.connectors.vllm.pd.conventions.concurrent import query_answer
from layerflow.connectors.vllm.pd.decoding import MOST_ANSWER_BYTES, HttpCall, HttpCalls
from layerflow.connectors.vllm.pd.side import BootstrapServer
from layerflow.errors import ConfigError
from layerflow_testing.lossy_relay import HANGS, Loss, LossyRelay
from layerflow_testing.ports import held_ports

SOON_S = 20.0


class Answering:
    """A server that answers as a test says.

    :param status: of its answers; None = it never answers, until it is closed.
    """

    def __init__(self, status: int | None = 200, body: bytes = b'{"status": "ok"}') -> None:
        self.heard: list[tuple[str, str, Any]] = []
        self.asked, self.closing = threading.Event(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                said = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.heard.append((self.command, self.path, json.loads(said) if said else None))
                outer.asked.set()
                if status is None:
                    outer.closing.wait()
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def answering() -> Iterator[Callable[..., Answering]]:
    made: list[Answering] = []

    def start(*given: Any, **named: Any) -> Answering:
        made.append(Answering(*given, **named))
        return made[-1]

    yield start
    for server in made:
        server.close()


@pytest.fixture
def calls() -> Iterator[HttpCalls]:
    made = HttpCalls()
    yield made
    made.close()


def ended(call: HttpCall) -> HttpCall:
    assert call.wait(SOON_S)
    return call


def soon() -> float:
    return time.monotonic() + SOON_S


class TestCalls:
    def test_a_post_arrives_as_json(self, answering: Callable[..., Answering], calls: HttpCalls) -> None:
        server = answering()
        call = ended(calls.post("h", f"{server.url}/v1/metaserver", {"a": [1]}, soon()))
        assert (call.error, call.answer) == ("", {"status": "ok"})
        assert server.heard == [("POST", "/v1/metaserver", {"a": [1]})]

    def test_the_same_hand_off_is_posted_once(self, answering: Callable[..., Answering], calls: HttpCalls) -> None:
        server = answering()
        first = calls.post("h", server.url, {}, soon())
        assert ended(calls.post("h", server.url, {}, soon())) is first
        ended(calls.post("other", server.url, {}, soon()))
        assert len(server.heard) == 2

    def test_its_end_is_told_once_and_at_once_where_it_has_ended(
        self, answering: Callable[..., Answering], calls: HttpCalls
    ) -> None:
        told, server = threading.Event(), answering()
        call = calls.get(server.url)
        call.when_done(told.set)
        assert told.wait(SOON_S) and call.done
        seen: list[bool] = []
        call.when_done(lambda: seen.append(call.done))
        assert seen == [True]

    @pytest.mark.parametrize("status", [404, 500, 502, 302])
    def test_another_status_is_a_failure(
        self, status: int, answering: Callable[..., Answering], calls: HttpCalls
    ) -> None:
        assert f"status {status}" in ended(calls.post("h", answering(status).url, {}, soon())).error

    def test_no_json_is_a_failure(self, answering: Callable[..., Answering], calls: HttpCalls) -> None:
        assert "no JSON" in ended(calls.get(answering(body=b"hello").url)).error

    def test_nobody_there_is_a_failure(self, calls: HttpCalls) -> None:
        call = ended(calls.post("h", f"http://127.0.0.1:{held_ports(1)[0]}", {}, soon()))
        assert "ConnectError" in call.error

    def test_the_deadline_ends_it(self, answering: Callable[..., Answering], calls: HttpCalls) -> None:
        server = answering(None)
        call = calls.post("h", server.url, {}, time.monotonic() + 0.05)
        assert "deadline" in ended(call).error

    @pytest.mark.parametrize("loss", [loss for loss in Loss if loss not in HANGS])
    def test_an_answer_that_is_lost_on_its_way_is_a_failure_at_once(
        self, loss: Loss, answering: Callable[..., Answering], calls: HttpCalls
    ) -> None:
        server = answering()
        with LossyRelay(server.url.removeprefix("http://"), loss) as relay:
            call = calls.post("h", f"http://127.0.0.1:{relay.port}", {"a": [1] * 99}, time.monotonic() + 600)
            assert re.search("RemoteProtocolError|ReadError|WriteError", ended(call).error), call.error
            assert relay.questions == 1, "what may have been heard is not asked again"

    @pytest.mark.parametrize("loss", HANGS)
    def test_an_answer_that_never_comes_is_a_failure_at_the_deadline(
        self, loss: Loss, answering: Callable[..., Answering], calls: HttpCalls
    ) -> None:
        target = answering().url.removeprefix("http://")
        for seconds in (0.2, 2.0, SOON_S / 2):  # on a busy machine the question may not even have been sent by then
            with LossyRelay(target, loss) as relay:
                call = calls.post(
                    f"h{seconds}", f"http://127.0.0.1:{relay.port}", {"a": [1]}, time.monotonic() + seconds
                )
                assert "no answer by the deadline" in ended(call).error
                if relay.questions:
                    break
        assert relay.questions == 1

    def test_one_that_hangs_holds_up_no_other(self, answering: Callable[..., Answering], calls: HttpCalls) -> None:
        hung, well = answering(None), answering()
        waiting = calls.post("a", hung.url, {}, soon())
        assert not ended(calls.post("b", well.url, {}, soon())).error
        assert not waiting.done
        calls.forget("a")
        assert "cancelled" in ended(waiting).error

    def test_closing_ends_what_is_under_way(self, answering: Callable[..., Answering]) -> None:
        server, calls = answering(None), HttpCalls()
        call = calls.post("h", server.url, {}, soon())
        assert server.asked.wait(SOON_S)
        calls.close()
        assert call.done

    def test_an_answer_is_believed_for_a_while(self, answering: Callable[..., Answering], calls: HttpCalls) -> None:
        server = answering()
        ended(calls.get(server.url))
        ended(calls.get(server.url))
        assert len(server.heard) == 1

    def test_a_failure_is_not(self, answering: Callable[..., Answering], calls: HttpCalls) -> None:
        server = answering(500)
        ended(calls.get(server.url))
        ended(calls.get(server.url))
        assert len(server.heard) == 2

    def test_nobody_s_memory_is_filled_by_whom_a_request_names(
        self, answering: Callable[..., Answering], calls: HttpCalls
    ) -> None:
        endless = answering(body=b" " * (2 * MOST_ANSWER_BYTES))
        assert "more than" in ended(calls.get(endless.url)).error
        assert "more than" in ended(calls.post("h", endless.url, {}, soon())).error

    def test_addresses_that_do_not_answer_are_not_asked_for_all_at_once(
        self, answering: Callable[..., Answering], calls: HttpCalls, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(decoding, "MOST_KNOWN", 2)
        silent, well = answering(None), answering()
        first, second = (calls.get(f"{silent.url}/{number}") for number in range(2))
        assert not ended(calls.get(well.url)).error
        assert "cancelled" in ended(first).error
        assert not second.done

    def test_what_is_no_address_is_a_failure(self, calls: HttpCalls) -> None:
        assert "InvalidURL" in ended(calls.get(f"http://a/{'x' * (1 << 17)}")).error


class TestBootstrap:
    def test_query(self) -> None:
        server = BootstrapServer(0, lambda: query_answer({0: "p0"}, (), "i"), "127.0.0.1")
        try:
            url = f"http://127.0.0.1:{server.port}"
            with urllib.request.urlopen(f"{url}/query", timeout=SOON_S) as answer:
                assert json.load(answer)["0"]["engine_id"] == "p0"
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{url}/other", timeout=SOON_S)
        finally:
            server.close()

    def test_a_crowd_that_says_nothing_keeps_few_threads_and_nobody_out(self) -> None:
        server = BootstrapServer(0, lambda: query_answer({0: "p0"}, (), "i"), "127.0.0.1")
        before = threading.active_count()
        silent = []
        try:
            for _ in range(4 * side.MOST_QUESTIONS):
                silent.append(socket.create_connection(("127.0.0.1", server.port), SOON_S))
                silent[-1].sendall(b"G")

            def answered() -> bool:
                """Refused as long as those that were cut off for it have not ended."""
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/query", timeout=SOON_S) as answer:
                        return bool(json.load(answer)["0"]["engine_id"] == "p0")
                except (OSError, http.client.HTTPException):
                    return False

            assert eventually(answered, SOON_S)
            assert threading.active_count() - before <= 4 * side.MOST_QUESTIONS  # each has a timer beside it
            for one in silent[: 3 * side.MOST_QUESTIONS]:
                assert one.recv(1) == b"", "others have its place"
        finally:
            for one in silent:
                one.close()
            server.close()

    def test_a_client_that_drips_has_a_time_in_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(side, "QUESTION_S", 0.3)
        server = BootstrapServer(0, dict, "127.0.0.1")
        try:
            with socket.create_connection(("127.0.0.1", server.port), SOON_S) as slow, contextlib.suppress(OSError):
                slow.settimeout(0.02)
                for _ in range(round(SOON_S / 0.02)):
                    slow.sendall(b"x")
                    try:
                        assert slow.recv(1) == b""
                        break
                    except TimeoutError:
                        continue
                else:
                    pytest.fail("it may go on for as long as it likes")
        finally:
            server.close()

    def test_descriptors_are_left_for_the_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(side, "leaves", lambda *_: False)
        server = BootstrapServer(0, dict, "127.0.0.1")
        try:
            with pytest.raises((urllib.error.URLError, ConnectionError)):
                urllib.request.urlopen(f"http://127.0.0.1:{server.port}/query", timeout=SOON_S)
        finally:
            server.close()

    def test_a_port_that_is_taken_is_named(self) -> None:
        first = BootstrapServer(0, dict, "127.0.0.1")
        try:
            with pytest.raises(ConfigError, match=f"bootstrap_port = {first.port}"):
                BootstrapServer(first.port, dict, "127.0.0.1")
        finally:
            first.close()
