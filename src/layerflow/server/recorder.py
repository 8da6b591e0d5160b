"""Records what happens in the server, while somebody wants it: switched by ``[record]`` and by ``layerflow record``."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_origin

import structlog

from layerflow.config.fields import format_size
from layerflow.errors import ConfigError, ProtocolError
from layerflow.flow.commands import Command
from layerflow.flow.events import Event
from layerflow.recording.format import LEAST_BYTES, MOST_BYTES, Dropped, ServerSample, SettingsInForce, StepSpans
from layerflow.recording.notes import Note, SessionNote, Transcript, weight
from layerflow.recording.writer import RecordingWriter
from layerflow.server.account import Refused
from layerflow.system.threads import OwnedThread

if TYPE_CHECKING:
    from layerflow.config.fields import Section
    from layerflow.config.settings import RecordSettings, Settings
    from layerflow.flow.state import FlowStatistics
    from layerflow.pool.base import PoolStatistics
    from layerflow.server.clients import ClientSession
    from layerflow.server.spans import SpanQuestions
    from layerflow.wire import messages as wire

MOST_NOTES: Final = 1 << 16
"""Notes that wait for the writer; those past it are dropped and counted."""

MOST_WAITING_BYTES: Final = 64 << 20
"""Of digests that waiting notes keep."""

PERIOD_S: Final = 0.1
"""How often the writer looks for notes."""

SLICE: Final = 128
"""Notes that the writer takes before it lets the interpreter go, for :data:`PAUSE_S`: some 0.2 ms of it at a time."""

PAUSE_S: Final = 0.001
FLUSH_S: Final = 1.0
SAMPLE_S: Final = 1.0
JOIN_S: Final = 2.0
LAST_SPANS_S: Final = 0.5
"""How long a recording that was asked to end waits for workers to tell of their last steps."""

log = structlog.get_logger("layerflow.server.recorder")


@dataclass(frozen=True, slots=True)
class RecorderStatistics:
    """A snapshot.

    :param on: something is being recorded. :param path: of the recording, or of the last one; "" = there was none.
    :param began: monotonic seconds. :param until: when it ends by itself; infinite = it does not.
    :param events: records written. :param dropped: events that are missing. :param nbytes: of the file.
    :param reason: why the last one has ended; "" = it has not. :param failed: it was not meant to.
    """

    on: bool = False
    path: str = ""
    began: float = 0.0
    until: float = math.inf
    events: int = 0
    dropped: int = 0
    nbytes: int = 0
    reason: str = ""
    failed: bool = False


class RecordingThread:
    """One recording: the notes that wait, and the thread that writes them.

    The loop appends notes and reads the counts; everything else belongs to the thread.

    :ivar failure: why the thread has ended by itself; "" = it has not. :ivar done: the file is closed.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.began = time.monotonic()
        self.began_unix = time.time()
        self.dropped = self.records = self.nbytes = 0
        self.failure = ""
        self.done = False
        self._max_bytes = max_bytes
        self._notes: deque[Any] = deque()
        self._weight_added = 0  # by the loop
        self._weight_taken = 0  # by the thread
        self._told_dropped = 0
        self._ending = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._opened, self._closed = asyncio.Event(), asyncio.Event()
        self._thread = OwnedThread("layerflow-record", self._run, lost=self._lost)

    def start(self) -> None:
        """Open the file and begin, on the thread."""
        self._thread.start()

    def core(self, at: float, event: Event, commands: Sequence[Command]) -> None:
        """The core was told an event. Called for each of them: this appends and no more."""
        if len(self._notes) < MOST_NOTES:
            self._notes.append((at, event, commands))
        else:
            self.dropped += 1

    def note(self, note: Note) -> None:
        """Something else has happened."""
        heavy = weight(note)
        waiting = self._weight_added - self._weight_taken
        if len(self._notes) >= MOST_NOTES or (heavy and waiting + heavy > MOST_WAITING_BYTES):
            self.dropped += 1
            return
        self._weight_added += heavy
        self._notes.append(note)

    async def opened(self) -> None:
        """Wait until the file is there.

        :raises ConfigError: it cannot be made.
        """
        await self._opened.wait()
        if self.failure:
            raise ConfigError(self.failure)

    def end(self) -> None:
        """Nothing more is to be recorded: the thread writes what waits, and closes the file."""
        self._ending.set()

    async def closed(self) -> None:
        """Wait until the file is closed."""
        await self._closed.wait()

    def join(self) -> bool:
        """Wait for the thread for a moment; False = it hangs, on its disk."""
        return self._thread.join(JOIN_S)

    def _run(self) -> None:
        transcript = Transcript()
        try:
            writer = RecordingWriter(
                self.path, self._max_bytes, now=self.began, unix=self.began_unix, standing=transcript.standing
            )
        except ConfigError as error:
            self.failure, self.done = str(error), True
            self._tell(self._opened, self._closed)
            return
        self._tell(self._opened)
        try:
            self._write(writer, transcript)
        except OSError as error:
            self.failure = f"{self.path}: {error.strerror}"
        finally:
            writer.close()
            self._notes.clear()
            self.done = True
            self._tell(self._closed)

    def _write(self, writer: RecordingWriter, transcript: Transcript) -> None:
        flushed = time.monotonic()
        while True:
            ending = self._ending.wait(PERIOD_S)
            while self._notes:
                self._take(writer, transcript)
                if self._notes:
                    self._ending.wait(PAUSE_S)
            self._tell_dropped(writer)
            if ending or time.monotonic() - flushed >= FLUSH_S:
                writer.flush()
                flushed = time.monotonic()
            self.records, self.nbytes = writer.records, writer.nbytes
            if ending:
                return

    def _take(self, writer: RecordingWriter, transcript: Transcript) -> None:
        waiting = self._notes
        notes = [waiting.popleft() for _ in range(min(SLICE, len(waiting)))]
        for note in notes:
            if type(note) is not tuple:
                self._weight_taken += weight(note)
        last = notes[-1]
        writer.add(transcript.records_of(notes), last[0] if isinstance(last, tuple) else last.at)

    def _tell_dropped(self, writer: RecordingWriter) -> None:
        missing = self.dropped - self._told_dropped
        if missing:
            self._told_dropped += missing
            now = time.monotonic()
            writer.add([Dropped(now, missing)], now)

    def _lost(self, error: BaseException) -> None:
        self.failure, self.done = f"{self.path}: {type(error).__name__}: {error}", True
        self._tell(self._opened, self._closed)

    def _tell(self, *events: asyncio.Event) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            for event in events:
                self._loop.call_soon_threadsafe(event.set)


class Recorder:
    """The server's recording, if there is one. For the server's loop.

    :param standing: what holds when a recording begins: sessions, settings, limits.
    :param questions: asks workers what took time in their steps. :param workers: those that are attached.

    :ivar current: takes notes; None = nothing is recorded.
    """

    def __init__(
        self,
        standing: Callable[[float], Iterable[Note]],
        questions: SpanQuestions,
        workers: Callable[[], Iterable[ClientSession]],
    ) -> None:
        self.current: RecordingThread | None = None
        self._standing = standing
        self._questions = questions
        self._workers = workers
        self._settings: RecordSettings | None = None
        self._asked = False  # by a client, not by the settings
        self._until = math.inf
        self._last = RecorderStatistics()
        self._ended: list[RecordingThread] = []
        self._sample_due = 0.0
        self._measured: dict[int, int] = {}  # by session, how many of its steps have told their spans
        self._asking: dict[int, int] = {}  # by session, the question that it has not answered yet
        self._all_told = asyncio.Event()

    def follow(self, settings: RecordSettings) -> None:
        """Take the section ``[record]`` of new settings."""
        if settings == self._settings:
            return
        configured, self._settings = self._settings, settings
        if configured is not None and configured.path is None and settings.path is None:
            return
        if self.current is not None:
            self._end("the settings have changed")
        if settings.path is not None:
            self._begin(settings.path, settings.max_bytes)

    async def asked(self, message: wire.RecordRequest) -> dict[str, Any]:
        """What a client asks: begin a recording, or end the one that it has begun.

        :raises Refused: there is another one, or none.
        :raises ConfigError: the file cannot be made.
        """
        current = self.current
        if not message.path:
            if current is None or not self._asked:
                raise Refused("not_recording", "no recording that `layerflow record` has begun is being made")
            await self._last_spans(current)
            if self.current is current:
                self._end("it was asked to")
            await current.closed()
            self._forget_ended()
            return self.status()
        if current is not None:
            how = "another `layerflow record`" if self._asked else "record.path"
            raise Refused("recording", f"{current.path} is being recorded already, by {how}; end that first")
        if not message.path.startswith("/"):
            raise ProtocolError(f"recording to {message.path!r}: give an absolute path")
        if not 0 < message.seconds < math.inf:
            raise ProtocolError(f"recording for {message.seconds} s: give a time")
        if not LEAST_BYTES <= message.max_bytes <= MOST_BYTES:
            raise ProtocolError(
                f"a recording of at most {format_size(message.max_bytes)}: give {format_size(LEAST_BYTES)} to "
                f"{format_size(MOST_BYTES)}"
            )
        begun = self._begin(Path(message.path), message.max_bytes, time.monotonic() + message.seconds)
        self._asked = True
        try:
            await begun.opened()
        except ConfigError:
            self.check(time.monotonic())
            raise
        return self.status()

    def check(self, now: float) -> None:
        """End what has run for its time, and notice a thread that has ended by itself."""
        self._forget_ended()
        current = self.current
        if current is None:
            return
        if current.failure:
            self._end(current.failure)
        elif now >= self._until:
            self._end("its time is up")

    async def _last_spans(self, current: RecordingThread) -> None:
        """Before a recording ends: what workers have measured since they were last asked. They may take a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_SPANS_S):
                while self.current is current:
                    before = set(self._asking)  # asked before their last steps had ended
                    self._all_told.clear()
                    self.ask_workers(self._workers())
                    if self._asking:
                        await self._all_told.wait()
                    if not before:
                        return

    def ask_workers(self, workers: Iterable[ClientSession]) -> None:
        """Ask workers for the spans of what they have measured since the last time."""
        current = self.current
        if current is None:
            return
        for worker in workers:
            number = worker.number
            if number in self._asking:
                continue
            self._asking[number] = self._questions.ask(
                worker,
                after=self._measured.get(number, 0),
                since=current.began,
                tell=functools.partial(self._take_spans, current, number),
            )

    def sample_due(self, now: float) -> bool:
        """Is it time for a :class:`layerflow.recording.format.ServerSample`? Once a second."""
        if self.current is None or now < self._sample_due:
            return False
        self._sample_due = now + SAMPLE_S
        return True

    def close(self) -> None:
        """End the recording, and wait a moment for its file."""
        if self.current is not None:
            self._end("the server has ended")
        for each in self._ended:
            if not each.join():
                log.warning("recording_stuck", path=str(each.path))

    def statistics(self) -> RecorderStatistics:
        """Return the recording's state, or how the last one has ended."""
        current = self.current
        if current is None:
            return self._last
        return RecorderStatistics(
            True,
            str(current.path),
            current.began,
            self._until,
            current.records,
            current.dropped,
            current.nbytes,
        )

    def status(self) -> dict[str, Any]:
        """What the server's status says as ``recording``."""
        found, now = self.statistics(), time.monotonic()
        return {
            "on": found.on,
            "path": found.path,
            "began_s_ago": round(now - found.began, 3) if found.path else None,
            "left_s": round(found.until - now, 3) if found.on and found.until < math.inf else None,
            "events": found.events,
            "dropped": found.dropped,
            "bytes": found.nbytes,
            "reason": found.reason,
            "failed": found.failed,
        }

    def _begin(self, path: Path, max_bytes: int, until: float = math.inf) -> RecordingThread:
        self.current = begun = RecordingThread(path, max_bytes)
        self._until, self._asked = until, False
        self._measured.clear()
        self._sample_due = 0.0
        for note in self._standing(begun.began):
            begun.note(note)
        begun.start()
        log.info("recording_begun", path=str(path), max_bytes=max_bytes)
        return begun

    def _end(self, reason: str) -> None:
        assert self.current is not None
        ended, self.current = self.current, None
        for question in self._asking.values():
            self._questions.withdraw(question)
        self._asking.clear()
        self._ended.append(ended)
        self._last = RecorderStatistics(
            False,
            str(ended.path),
            ended.began,
            self._until,
            ended.records,
            ended.dropped,
            ended.nbytes,
            reason,
            bool(ended.failure),
        )
        ended.end()
        level = log.warning if ended.failure else log.info
        level("recording_ended", path=str(ended.path), reason=reason, events=ended.records, dropped=ended.dropped)

    def _forget_ended(self) -> None:
        """Let go of threads that have closed their files; the last one's counts are final then."""
        for each in list(self._ended):
            if not each.done:
                continue
            self._ended.remove(each)
            if self.current is None and self._last.path == str(each.path) and self._last.began == each.began:
                self._last = dataclasses.replace(
                    self._last, events=each.records, dropped=each.dropped, nbytes=each.nbytes
                )

    def _take_spans(self, asker: RecordingThread, session: int, answer: wire.Spans | None) -> None:
        if answer is None or not answer.more:
            del self._asking[session]
            if not self._asking:
                self._all_told.set()
        if answer is None:
            self._measured.pop(session, None)
            return
        self._measured[session] = answer.upto
        for step in answer.steps:
            asker.note(StepSpans(step.origin, session, step.step, step.spans))


# What of the server's state a recording has.


def session_note(session: ClientSession, at: float) -> SessionNote | None:
    """A client that is attached; None = it is not."""
    spec = session.spec
    if spec is None:
        return None
    return SessionNote(at, session.number, session.engine, session.name, spec, session.memory, session.direct)


RECORDED_SECTIONS: Final = ("pool", "transfer", "pd", "peers", "server")


def settings_in_force(settings: Settings, at: float) -> SettingsInForce:
    """The settings that say how much and how fast: numbers, switches, and texts that are one of a few."""
    return SettingsInForce(at, {name: _plain(getattr(settings, name)) for name in RECORDED_SECTIONS})


def _plain(section: Section) -> dict[str, bool | int | float | str]:
    found: dict[str, bool | int | float | str] = {}
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, bool | int | float) or get_origin(field.annotation) is Literal:
            found[key] = value
    return found


def server_sample(pool: PoolStatistics, flow: FlowStatistics, now: float, lag: float) -> ServerSample:
    """How full the server is, and what it has counted."""
    return ServerSample(
        now,
        used_bytes=pool.used_bytes,
        objects=pool.objects,
        pinned=pool.pinned,
        commits=pool.commits,
        evictions=pool.evictions,
        evicted_bytes=pool.evicted_bytes,
        full=pool.full,
        shed=flow.shed_parts,
        load_inflight_bytes=flow.load_inflight_bytes,
        save_inflight_bytes=flow.save_inflight_bytes,
        lag_s=lag,
    )
