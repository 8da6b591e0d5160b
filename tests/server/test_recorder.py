"""Recordings of a running server: what is in them, how they begin and end, and what they leave alone."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from e2e.known import KnownWorker, eventually, small_spec
from structlog.testing import capture_logs

from layerflow.agent import Control
from layerflow.config.settings import Settings
from layerflow.errors import ConfigError, RemoteError
from layerflow.flow import events as told
from layerflow.observe.trace import unpack_spans
from layerflow.recording.format import (
    LEAST_BYTES,
    LookedUp,
    ModelSeen,
    Purged,
    Record,
    ServerSample,
    SessionGone,
    SessionSeen,
    SettingsInForce,
    StepMeasured,
    StepSeen,
    StepSpans,
    Told,
    Wanted,
)
from layerflow.recording.reader import Recording
from layerflow.server import EmbeddedServer, spans
from layerflow.server.clients import ClientSession
from layerflow.server.recorder import RecordingThread
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message
from server.support import Embed, observe, worker_on

SPEC = small_spec(content="digest-of-the-weights")


def status_of(server: EmbeddedServer) -> Any:
    return server.call(server.server.recorder.status)


def apply(server: EmbeddedServer, **record: object) -> None:
    settings = server.server.settings
    record_section = type(settings.record)(**record)
    server.call(server.server.apply, settings.model_copy(update={"record": record_section}))


def of(records: list[Record], kind: Any) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


def events(records: list[Record], kind: Any) -> list[Any]:
    return [record.event for record in of(records, Told) if isinstance(record.event, kind)]


def contents(path: Path) -> list[Record]:
    return list(Recording(path).records())


@pytest.fixture
def recorded(embed: Embed, tmp_path: Path) -> tuple[Path, list[Record], KnownWorker]:
    """Two requests of one prompt: the first is saved, the second loads it and saves the rest."""
    path = tmp_path / "served.lfr"
    server = embed(record={"path": path})
    with worker_on(server, spec=SPEC, name="vllm-0") as worker:
        prompt = worker.prompt(64)
        worker.serve(prompt)
        longer = worker.prompt(96, prompt, 64)
        assert worker.serve(longer).hit.tokens == 64
        assert eventually(lambda: len(of(contents(path), StepSpans)) == 2)
        assert eventually(lambda: len(of(contents(path), ServerSample)) > 0)
    assert eventually(lambda: len(of(contents(path), SessionGone)) == 2)
    apply(server)
    assert eventually(lambda: not status_of(server)["on"])
    return path, contents(path), worker


def test_a_purge_is_told_with_what_it_found(embed: Embed, tmp_path: Path) -> None:
    server = embed(record={"path": tmp_path / "served.lfr"})
    with worker_on(server, spec=SPEC, name="vllm-0") as worker:
        worker.serve(worker.prompt(64))
        with closing(observe(server)) as control:
            held = control.status()["pool"]["objects"]
            assert control.purge() == held > 0
    assert eventually(lambda: of(contents(tmp_path / "served.lfr"), Purged))
    [purged] = of(contents(tmp_path / "served.lfr"), Purged)
    assert purged.objects == held


def test_models_sessions_and_settings_come_first(recorded: Any) -> None:
    _, records, worker = recorded
    settings, limits = of(records, SettingsInForce)[0], events(records, told.LimitsChanged)[0]
    assert settings.sections["transfer"]["max_inflight_bytes"] == 256 << 20
    assert settings.sections["transfer"]["mode"] == "auto" and "endpoint" not in settings.sections["server"]
    assert limits.limits.max_transfer_bytes == 64 << 20
    (model,) = of(records, ModelSeen)
    assert (model.spec.groups, model.spec.content) == (worker.spec.groups, "")
    sessions = of(records, SessionSeen)
    assert {session.name for session in sessions} == {"vllm-0"} and {session.engine for session in sessions} == {1}
    assert sorted(session.memory for session in sessions) == [False, True]
    assert {gone.session for gone in of(records, SessionGone)} == {session.session for session in sessions}


def test_lookups_and_steps_name_chunks_and_requests_by_numbers(recorded: Any) -> None:
    _, records, _ = recorded
    first, second = of(records, StepSeen)
    assert not first.loads and first.saves[0].chunks == (1, 2, 3, 4) and set(first.saves[0].tokens) == {16}
    assert second.loads[0].chunks == (1, 2, 3, 4) and second.loads[0].request != first.saves[0].request
    assert second.saves[0].chunks == (5, 6)
    (lookup,) = [lookup for lookup in of(records, LookedUp) if lookup.hit]
    assert lookup.chunks[:4] == (1, 2, 3, 4) and (lookup.tokens, lookup.hit) == (96, 64)
    assert lookup.request == second.loads[0].request
    assert lookup.resident == lookup.objects == 4 and lookup.at <= lookup.answered


def test_what_the_core_was_told_and_what_moved_is_there(recorded: Any) -> None:
    _, records, _ = recorded
    assert len(events(records, told.StepOpened)) == len(events(records, told.StepClosed)) == 2
    assert {int(part.request) for step in events(records, told.StepOpened) for part in (*step.loads, *step.saves)} <= {
        part.request for step in of(records, StepSeen) for part in (*step.loads, *step.saves)
    }
    granted = {record.command.batch for record in of(records, Wanted) if hasattr(record.command, "batch")}
    assert granted and {event.batch for event in events(records, told.BatchDone)} == granted
    measured = of(records, StepMeasured)
    assert [step.new_tokens for step in measured] == [64, 32] and measured[1].context_tokens == 64
    assert measured[1].load_bytes > 0 and all(step.layer_s > 0 for step in measured)


def test_spans_tell_each_layer_of_a_step(recorded: Any) -> None:
    _, records, worker = recorded
    second = of(records, StepSpans)[1]
    spans = unpack_spans(second.spans, second.at)
    layers = set(range(worker.spec.num_layers))
    for lane in ("compute", "load", "save"):
        assert {span.layer for span in spans if span.lane == lane} - {-1} <= layers
    assert {span.layer for span in spans if span.lane == "compute"} == layers
    assert sum(span.nbytes for span in spans if span.lane == "load") == of(records, StepMeasured)[1].load_bytes


def test_no_digest_no_token_and_no_name_of_a_request_is_in_the_file(recorded: Any) -> None:
    import msgspec

    path, records, worker = recorded
    told_of = msgspec.msgpack.encode(records)
    chain = worker.agent.chain(range(16))
    assert b"request-" not in told_of and worker.spec.content.encode() not in told_of
    assert not any(digest in told_of for digest in chain.digests)
    assert path.stat().st_mode & 0o077 == 0, "for its user alone"


def test_a_client_begins_and_ends_a_recording(embed: Embed, tmp_path: Path) -> None:
    server, path = embed(), tmp_path / "asked.lfr"
    control = observe(server)
    begun = control.record(path, 3600, LEAST_BYTES)
    assert begun["on"] and begun["path"] == str(path) and begun["left_s"] > 3000
    with pytest.raises(RemoteError, match="recorded already"):
        control.record(tmp_path / "another", 60, LEAST_BYTES)
    assert server.call(server.server.status)["recording"]["on"]
    ended = control.end_recording()
    assert not ended["on"] and ended["reason"] == "it was asked to"
    assert Recording(path).header.began > 0
    with pytest.raises(RemoteError, match="no recording"):
        control.end_recording()
    control.close()


def test_a_recording_ends_when_its_time_is_up(embed: Embed, tmp_path: Path) -> None:
    server = embed()
    control = observe(server)
    control.record(tmp_path / "short", 0.3, LEAST_BYTES)
    assert eventually(lambda: not status_of(server)["on"])
    assert status_of(server)["reason"] == "its time is up"
    control.close()


@pytest.mark.parametrize(
    ("path", "seconds", "nbytes", "words"),
    [
        ("relative", 60, 1 << 20, "absolute path"),
        ("/x", 0, 1 << 20, "give a time"),
        ("/x", 60, 5, "1MiB to 1TiB"),
        ("/x", 60, 1 << 50, "1MiB to 1TiB"),
    ],
)
def test_what_cannot_be_asked(embed: Embed, path: str, seconds: float, nbytes: int, words: str) -> None:
    control = observe(embed())
    with pytest.raises(RemoteError, match=words):
        control.record(Path(path), seconds, nbytes)
    control.close()


def test_a_file_that_cannot_be_made_is_told_at_once(embed: Embed, tmp_path: Path) -> None:
    server = embed()
    control = observe(server)
    with pytest.raises(RemoteError, match="cannot record here: No such file"):
        control.record(tmp_path / "no" / "folder", 60, LEAST_BYTES)
    assert not status_of(server)["on"]
    control.close()


def test_the_settings_switch_it_while_the_server_runs(embed: Embed, tmp_path: Path) -> None:
    server = embed()
    assert not status_of(server)["on"]
    apply(server, path=tmp_path / "a")
    assert eventually((tmp_path / "a").exists) and status_of(server)["path"] == str(tmp_path / "a")
    apply(server, path=tmp_path / "b")
    assert status_of(server)["path"] == str(tmp_path / "b")
    apply(server)
    assert not status_of(server)["on"] and status_of(server)["reason"] == "the settings have changed"
    assert eventually((tmp_path / "b").exists), "its own thread makes it, be it over by then"
    assert eventually(lambda: list(Recording(tmp_path / "a").records()) and list(Recording(tmp_path / "b").records()))


def test_the_end_of_the_server_completes_the_file(embed: Embed, tmp_path: Path) -> None:
    server = embed(record={"path": tmp_path / "x"})
    with worker_on(server, spec=SPEC) as worker:
        worker.serve(worker.prompt(64))
    server.close()
    assert events(contents(tmp_path / "x"), told.StepClosed)


@pytest.fixture
def full_disk() -> Iterator[Callable[[], None]]:
    """Files of this process cannot grow past 256 KiB from now on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_the_recording_and_nothing_else(
    embed: Embed, tmp_path: Path, full_disk: Callable[[], None]
) -> None:
    server = embed(record={"path": tmp_path / "x"})
    noise = [os.urandom(64) for _ in range(8)]
    with worker_on(server, spec=SPEC) as worker, capture_logs() as logs:
        worker.serve(worker.prompt(64))
        full_disk()
        number = 0
        while status_of(server)["on"]:
            current = server.server.recorder.current
            if current is not None:
                for _ in range(500):
                    number += 1
                    current.note(StepSpans(1.0, number, number, noise[number % 8] + os.urandom(64)))
            assert number < 1_000_000
        assert "File too large" in status_of(server)["reason"] or "No space" in status_of(server)["reason"]
        assert status_of(server)["failed"]
        worker.serve(worker.prompt(64))
    ended = [entry for entry in logs if entry["event"] == "recording_ended"]
    assert len(ended) == 1 and ended[0]["log_level"] == "warning"
    assert contents(tmp_path / "x"), "what was written can be read"


def test_a_writer_that_dies_is_noticed_and_nothing_else_stops(
    embed: Embed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(RecordingThread, "_take", broken)
    server = embed(record={"path": tmp_path / "x"})
    assert eventually(lambda: not status_of(server)["on"])
    assert "RuntimeError: a bug" in status_of(server)["reason"]
    with worker_on(server, spec=SPEC) as worker:
        worker.serve(worker.prompt(64))


def test_a_writer_that_hangs_costs_events_not_memory(
    embed: Embed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layerflow.server.recorder.MOST_NOTES", 40)
    monkeypatch.setattr("layerflow.server.recorder.PERIOD_S", 3600.0)
    server = embed(record={"path": tmp_path / "x"})
    with worker_on(server, spec=SPEC) as worker:
        for _ in range(6):
            worker.serve(worker.prompt(64))
    assert status_of(server)["dropped"] > 0
    figures = server.call(server.server.status)["figures"]
    assert figures["unrecorded_events_total"] == status_of(server)["dropped"]
    server.close()
    assert sum(record.events for record in contents(tmp_path / "x") if hasattr(record, "events")) > 0


def test_a_trace_of_the_last_steps_needs_no_recording(embed: Embed) -> None:
    server = embed()
    control = Control(server.endpoint, "tool", context=server.context)
    with worker_on(server, spec=SPEC, name="vllm-0") as worker:
        for _ in range(6):
            worker.serve(worker.prompt(64))
        assert eventually(lambda: len(control.trace(600)["steps"]) == 6)
        found = control.trace(600, "vllm-0")
        assert [step["step"] for step in found["steps"]] == [1, 2, 3, 4, 5, 6]
        assert {step["engine"] for step in found["steps"]} == {"vllm-0"} and found["silent"] == []
        assert control.trace(0.0)["steps"] == []
        with pytest.raises(RemoteError, match="there are vllm-0"):
            control.trace(60, "vllm-1")
    assert eventually(lambda: not server.call(lambda: [s for s in server.server.sessions if s.memory]))
    with pytest.raises(RemoteError, match="no engine worker"):
        control.trace(60)
    control.close()


def test_settings_refuse_a_file_that_is_too_small() -> None:
    with pytest.raises(ConfigError, match=r"record\.max_bytes"):
        Settings(record={"max_bytes": "1KiB"})


def test_of_more_spans_than_an_answer_takes_the_newest_are_told(embed: Embed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerflow.server.spans.MOST_TRACE_BYTES", 2000)
    server = embed()
    control = Control(server.endpoint, "tool", context=server.context)
    with worker_on(server, spec=SPEC) as worker:
        for _ in range(12):
            worker.serve(worker.prompt(64))

        def found() -> Any:
            return control.trace(600)

        assert eventually(lambda: (told := found())["left_out"] + len(told["steps"]) == 12)
        steps = [step["step"] for step in found()["steps"]]
        assert 0 < len(steps) < 12 and steps == list(range(13 - len(steps), 13))
    control.close()


def test_a_question_that_a_worker_never_answers_ends_with_its_recording(
    embed: Embed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = embed()
    questions = server.server._server_context.span_questions
    asked: list[wire.SpansWanted] = []
    with worker_on(server, spec=SPEC):
        monkeypatch.setattr(questions, "_send", lambda _, message: asked.append(message))
        for number in range(3):
            apply(server, path=tmp_path / str(number))
            assert eventually(lambda number=number: len(asked) == number + 1)  # type: ignore[misc]
            apply(server)
            assert server.call(lambda: len(questions._asked)) == 0
        worker = server.call(lambda: next(session for session in server.server.sessions if session.memory))
        late = wire.Spans(asked[0].id, 1, [wire.StepSpans(1, 1.0, b"")])
        server.call(lambda: questions.answered(worker, late))
    assert not of(contents(tmp_path / "2"), StepSpans)


async def test_steps_without_spans_count_too() -> None:
    """A worker may tell of as many as it likes."""
    worker = cast(ClientSession, SimpleNamespace(number=1, name="e", spec=None))

    def answer(_: ClientSession, asked: Message) -> None:
        assert isinstance(asked, wire.SpansWanted)
        steps = [wire.StepSpans(number, float(number), b"") for number in range(100)]
        questions.answered(worker, wire.Spans(asked.id, 100, steps))

    questions = spans.SpanQuestions(answer)
    found = await spans.trace_workers(questions, [worker], 60.0, 10 * spans.STEP_BYTES)
    assert [step["step"] for step in found["steps"]] == list(range(90, 100)) and found["left_out"] == 90
