"""A device that does what was enqueued later, in an order of its own, and records every call.

Streams, events and copies as torch's cuda module and its runtime have them, on host memory. Work of one stream runs in
order; between streams only events order anything. Nothing runs until :meth:`Machine.run` or :meth:`Machine.running`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from layerflow.device import accelerator
from layerflow.device.accelerator import Accelerator, BatchCopied, Int64
from layerflow.errors import Unsupported

DEVICE = torch.device("cuda", 0)
POOL = 32  # streams that torch hands out in turn


@dataclass(eq=False)
class Work:
    """One thing that a stream does."""

    run: Callable[[], object]
    after: Work | None = None
    done: bool = False
    held: bool = False

    @property
    def ready(self) -> bool:
        return not self.held and (self.after is None or self.after.done)


class Stream:
    """In the order enqueued."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine = machine
        self.cuda_stream = number
        self.queue: deque[Work] = deque()

    def put(self, run: Callable[[], object] = lambda: None, after: Work | None = None, *, held: bool = False) -> Work:
        with self.machine.lock:
            self.queue.append(Work(run, after, held=held))
            return self.queue[-1]

    def wait_event(self, event: Event) -> None:
        self.machine.called("wait_event")
        self.machine.waits.append((self, event))
        if event.work is not None:  # on one that was never recorded, cuda waits for nothing
            self.put(after=event.work)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        event = Event(self.machine)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.machine.called("synchronize")
        self.machine.run_until(lambda: not self.queue)


class Event:
    """A point in a stream."""

    def __init__(self, machine: Machine, enable_timing: bool = False) -> None:
        self.machine = machine
        self.timed = enable_timing
        self.at_s = 0.0
        self.stream: Stream | None = None
        self.work: Work | None = None

    def record(self, stream: Stream) -> None:
        self.machine.called("record")
        self.stream, self.work = stream, stream.put()

    def elapsed_time(self, end: Event) -> float:
        if not (self.timed and end.timed):
            raise ValueError("both events must be created with argument 'enable_timing=True'")
        return (end.at_s - self.at_s) * 1e3

    def query(self) -> bool:
        self.machine.called("query")
        if self.machine.broken:
            raise RuntimeError("the device has failed")
        return self.work is None or self.work.done

    def synchronize(self) -> None:
        self.machine.called("synchronize")
        self.machine.run_until(lambda: self.machine.broken or self.work is None or self.work.done)
        if self.machine.broken:
            raise RuntimeError("the device has failed")


@dataclass(frozen=True)
class BatchCall:
    """A native call.

    :param thread: that made it.
    """

    stream: Stream
    ranges: int
    to_device: bool
    thread: str


@dataclass
class Machine:
    """torch's module of the device, and the runtime's library, in one.

    :ivar code: what the next batch call answers; 0 = it copies.
    :ivar capturing: a graph is captured, on a stream of torch's.
    :ivar invalidated: calls that would have invalidated the graph which is being captured.
    :ivar during: calls that were made while one was captured, whether or not they would have.
    :ivar own_streams: that the driver makes beside torch's at most.
    :ivar lockable: bytes that may be pinned.
    :ivar pins: how many further ranges may be pinned before the driver takes its time; None = it never does.
    :ivar registered: bytes of each pinned range, by address.
    :ivar current: threads that have made the device their own.
    :ivar torn: ranges of batches that lie in no one pinned range.
    :ivar cores: they have a kernel that copies ranges.
    :ivar kernels: the stream of each launch of it.
    :ivar breaks: what a kernel does to the bytes that it has copied; None = nothing.
    """

    seed: int = 0
    most: int = 1 << 62
    unsupported: frozenset[int] = frozenset((801,))
    code: int = 0
    broken: bool = False
    capturing: bool = False
    calls: list[BatchCall] = field(default_factory=list)
    waits: list[tuple[Stream, Event]] = field(default_factory=list)
    invalidated: list[str] = field(default_factory=list)
    during: list[str] = field(default_factory=list)
    own_streams: int = 1 << 62
    lockable: int = 1 << 62
    pins: threading.Semaphore | None = None
    registered: dict[int, int] = field(default_factory=dict)
    torn: list[int] = field(default_factory=list)
    current: list[str] = field(default_factory=list)
    cores: bool = False
    kernels: list[Stream] = field(default_factory=list)
    breaks: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        accelerator._pins.clear()  # what lies pinned at these addresses was another machine's
        self.lock = threading.RLock()
        self.default = Stream(self, 0)
        self.streams = [self.default, *(Stream(self, number + 1) for number in range(POOL))]
        self._accelerator: Accelerator | None = None
        self._handed_out = itertools.cycle(self.streams[1:])
        self._capturing_on = self.streams[POOL // 2].cuda_stream
        self._random = random.Random(self.seed)
        self._thread = threading.local()

    def accelerator(self) -> Accelerator:
        """The device of an engine whose tensors lie in host memory; the same for all who ask."""
        self._accelerator = self._accelerator or Accelerator(DEVICE, module=self, native=self, make_kernel=self._kernel)
        return self._accelerator

    def _kernel(self, device: torch.device, native: object) -> Machine:
        if not self.cores:
            raise Unsupported("no kernel runs on this simulated device")
        return self

    # -- torch.cuda -------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def Stream(self, device: object = None) -> Stream:
        self.called("stream")
        with self.lock:
            return next(self._handed_out)

    def ExternalStream(self, handle: int, device: object = None) -> Stream:
        return next(each for each in self.streams if each.cuda_stream == handle)

    def Event(self, enable_timing: bool = False) -> Event:
        self.called("event")
        return Event(self, enable_timing)

    def current_stream(self, device: object = None) -> Stream:
        return getattr(self._thread, "stream", self.default)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def set_device(self, device: object) -> None:
        self.current.append(threading.current_thread().name)

    def device(self, device: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def cudart(self) -> Machine:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.called("register")
        if self.pins is not None:
            assert self.pins.acquire(timeout=60), "the test is to let the driver go on"
        if nbytes + sum(self.registered.values()) > self.lockable:
            return 1
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.called("unregister")
        return 0 if self.registered.pop(address, 0) else 1

    # -- the runtime's library --------------------------------------------------------------------------

    def copy_batch(self, dst: Int64, src: Int64, nbytes: Int64, stream: int, to_device: bool) -> BatchCopied:
        assert stream, "the default stream takes no batches"
        if self.code:
            return BatchCopied(self.code, 1)
        on = next(each for each in self.streams if each.cuda_stream == stream)
        self.torn += self._in_no_pinned_range(src if to_device else dst, nbytes)
        self.calls.append(BatchCall(on, dst.size, to_device, threading.current_thread().name))
        dst, src, nbytes = dst.copy(), src.copy(), nbytes.copy()  # the driver reads the lists during the call

        def copy() -> None:
            for at in self._random.sample(range(dst.size), dst.size):
                ctypes.memmove(int(dst[at]), int(src[at]), int(nbytes[at]))

        on.put(copy)
        return BatchCopied(0)

    def reads_pinned(self, index: int) -> bool:
        return True

    def launch(self, listed: torch.Tensor, count: int, width: int) -> None:
        """The kernel, which reads its list when its stream comes to it."""
        stream = self.current_stream()
        self.kernels.append(stream)

        def copy() -> None:
            dst, src, words = listed.numpy().reshape(3, count).copy()
            assert not ((dst | src | words * 8) % 16).any() and int(words.max()) * 8 <= width
            for at in self._random.sample(range(count), count):
                ctypes.memmove(int(dst[at]), int(src[at]), int(words[at]) * 8)
                if self.breaks is not None:
                    self.breaks(int(dst[at]), int(words[at]) * 8)

        stream.put(copy)

    def new_stream(self) -> int:
        self.called("stream")
        with self.lock:
            if len(self.streams) > POOL + self.own_streams:
                return 0
            self.streams.append(Stream(self, max(each.cuda_stream for each in self.streams) + 1))
            return self.streams[-1].cuda_stream

    def end_stream(self, stream: int) -> int:
        with self.lock:
            ended = next(each for each in self.streams[1 + POOL :] if each.cuda_stream == stream)
            assert not ended.queue, "a stream is given back with work on it"
            self.streams.remove(ended)
        return 0

    def leave_captures(self) -> None:
        self._thread.relaxed = True

    def is_capturing(self, stream: int) -> bool:
        return self.capturing and stream == self._capturing_on

    def _in_no_pinned_range(self, host: Int64, nbytes: Int64) -> list[int]:
        pinned = sorted(self.registered.items())
        starts = np.array([start for start, _ in pinned], np.int64)
        ends = np.array([start + size for start, size in pinned], np.int64)
        of = np.searchsorted(starts, host, side="right") - 1
        held = (of >= 0) & (host + nbytes <= ends[of]) if pinned else np.zeros(host.size, bool)
        return [int(address) for address in host[~held]]

    def called(self, name: str) -> None:
        if self.capturing:
            self.during.append(name)
        if self.capturing and not getattr(self._thread, "relaxed", False):
            self.invalidated.append(f"{name} by {threading.current_thread().name}")

    # -- what the tests do ------------------------------------------------------------------------------

    def event_at(self, seconds: float) -> Event:
        """A timed one, done at that moment of the device's clock."""
        event = Event(self, enable_timing=True)
        event.at_s = seconds
        return event

    def step(self) -> bool:
        """Do one thing, of any stream that can; False if none can."""
        with self.lock:
            ready = [stream for stream in self.streams if stream.queue and stream.queue[0].ready]
            if not ready:
                return False
            work = self._random.choice(ready).queue.popleft()
            work.run()
            work.done = True
            return True

    def run(self) -> None:
        """All that can be done."""
        while self.step():
            pass

    def run_until(self, reached: Callable[[], bool]) -> None:
        """For a thread that waits for the device."""
        patience = threading.Event()
        for _ in range(20_000):
            if reached():
                return
            if not self.step():
                patience.wait(0.001)
        raise AssertionError("the device hangs: a stream waits for what nothing does")

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """It works, beside the test."""
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                if not self.step() or self._random.random() < 0.2:
                    stop.wait(0.0005)

        thread = threading.Thread(target=work, name="device")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def filled(nbytes: int, seed: int) -> np.ndarray:
    """Known bytes."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
