"""Calls to a MetaService that ends meanwhile."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from layerflow.hosts.backend import Unreachable
from layerflow.hosts.memcache.client import AbandonableCaller

PATIENCE_S = 30.0


def name() -> str:
    return threading.current_thread().name


def number() -> int:
    return threading.get_ident()


def test_answers_and_errors_come_back():
    asker = AbandonableCaller(lambda: 1)
    assert asker.ask(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        asker.ask(lambda: 1 // 0)
    with pytest.raises(SystemExit):
        asker.ask(sys.exit)
    assert asker.ask(name) == "layerflow-meta"
    asker.close()
    assert asker.ask(lambda: 8) == 8, "it can be used again"
    asker.close()


def test_a_call_is_given_up_once_the_meta_service_has_ended():
    terms, gate, returned = [1], threading.Event(), threading.Event()
    asker = AbandonableCaller(lambda: terms[-1], answer_s=0.01, look_s=0.01)

    def ends_meanwhile() -> None:
        terms.append(0)
        assert gate.wait(PATIENCE_S)
        returned.set()

    first = asker.ask(number)
    with pytest.raises(Unreachable, match="ended while it was asked"):
        asker.ask(ends_meanwhile)
    terms.append(2)
    assert asker.ask(number) != first, "the thread that hangs is another's no more"
    gate.set()
    assert returned.wait(PATIENCE_S)
    assert asker.ask(lambda: 7) == 7
    asker.close()


def test_a_call_that_begins_when_it_has_ended_is_not_waited_for_either():
    terms, gate = [0], threading.Event()
    asker = AbandonableCaller(lambda: terms[-1], answer_s=0.01, look_s=0.01)
    with pytest.raises(Unreachable):
        asker.ask(lambda: gate.wait(PATIENCE_S))
    gate.set()
    terms.append(1)  # an answer is waited for again, however late
    assert asker.ask(lambda: 7) == 7
    asker.close()


def test_a_call_is_given_up_at_its_deadline():
    gate = threading.Event()
    asker = AbandonableCaller(lambda: 1)
    with pytest.raises(Unreachable, match="did not answer in time"):
        asker.ask(lambda: gate.wait(PATIENCE_S), time.monotonic() + 0.02)
    assert asker.ask(lambda: 7, time.monotonic() + PATIENCE_S) == 7
    gate.set()
    asker.close()


def test_a_slow_answer_of_a_living_meta_service_is_waited_for():
    looks, enough = [], threading.Event()

    def generation() -> int:
        looks.append(1)
        if len(looks) > 5:
            enough.set()
        return 1

    asker = AbandonableCaller(generation, answer_s=0.0, look_s=0.001)
    assert asker.ask(lambda: enough.wait(PATIENCE_S))
    asker.close()


def test_every_thread_has_its_own():
    askers, found, both = AbandonableCaller(lambda: 1), [], threading.Barrier(3)

    def ask() -> None:
        found.append(askers.ask(number))
        both.wait(PATIENCE_S)  # a thread that has ended gives its number to the next

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    mine = [askers.ask(number), askers.ask(number)]
    both.wait(PATIENCE_S)
    for thread in threads:
        thread.join()
    assert len({*found, *mine}) == 3
    askers.close()
