"""Owned threads: an error is noticed, told, and the work begins anew where it may."""

import threading

import pytest
from structlog.testing import capture_logs

from layerflow.system.threads import OwnedThread

PATIENCE_S = 30.0


class _Worker:
    """Fails as often as it is told to, then waits to be let go."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.running, self.let_go = threading.Event(), threading.Event()

    def run(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.running.set()
        self.let_go.wait(PATIENCE_S)


def test_work_that_returns_has_ended_well() -> None:
    lost: list[BaseException] = []
    thread = OwnedThread("layerflow-test", lambda: None, lost=lost.append, restart_s=0.0).start()
    assert thread.wait(PATIENCE_S)
    assert not lost
    assert thread.error is None
    assert not thread.alive


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_ends_it_is_told_and_logged_once(error: BaseException) -> None:
    lost: list[BaseException] = []
    with capture_logs() as logs:
        thread = OwnedThread("layerflow-test", _Worker(error).run, lost=lost.append).start()
        assert thread.wait(PATIENCE_S)
    assert lost == [error]
    assert thread.error is error
    assert [(entry["event"], entry["thread"], entry["restarts"]) for entry in logs] == [
        ("thread_failed", "layerflow-test", False)
    ]


def test_the_work_begins_anew_and_its_owner_hears_of_each_loss() -> None:
    worker, lost = _Worker(ValueError("one"), ValueError("one"), OSError("two")), []
    with capture_logs() as logs:
        thread = OwnedThread("layerflow-test", worker.run, lost=lost.append, restart_s=0.0).start()
        assert worker.running.wait(PATIENCE_S)
    assert [str(error) for error in lost] == ["one", "one", "two"]
    assert [entry["error"] for entry in logs] == ["ValueError: one", "OSError: two"], "one line for each kind in a row"
    assert thread.alive
    assert thread.error is None
    assert thread.restarts == 3
    worker.let_go.set()
    assert thread.join(PATIENCE_S)


def test_an_owner_that_cannot_be_told_does_not_end_it() -> None:
    worker = _Worker(ValueError("one"))

    def lost(_: BaseException) -> None:
        raise RuntimeError("the owner is gone")

    with capture_logs() as logs:
        thread = OwnedThread("layerflow-test", worker.run, lost=lost, restart_s=0.0).start()
        assert worker.running.wait(PATIENCE_S)
    assert [entry["event"] for entry in logs] == ["thread_failed", "thread_loss_not_told"]
    worker.let_go.set()
    assert thread.join(PATIENCE_S)


def test_work_that_was_told_to_end_does_not_begin_anew() -> None:
    failed = threading.Event()
    worker = _Worker(ValueError("one"))
    thread = OwnedThread("layerflow-test", worker.run, lost=lambda _: failed.set(), restart_s=PATIENCE_S).start()
    assert failed.wait(PATIENCE_S)
    assert thread.join(PATIENCE_S / 2), "its pause ends when it is told to end"
    assert not worker.running.is_set()


def test_on_the_thread_itself_nothing_is_waited_for() -> None:
    joined: list[bool] = []
    threads: list[OwnedThread] = []
    threads.append(OwnedThread("layerflow-test", lambda: joined.append(threads[0].join())))
    assert threads[0].join(), "it was not started"
    threads[0].start()
    assert threads[0].wait(PATIENCE_S)
    assert joined == [False]
