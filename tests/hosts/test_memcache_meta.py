"""memcache's MetaService as its hosts see it, without the packages: a listener, and a little HTTP."""

from __future__ import annotations

import json
import os
import resource
import socket

import pytest

from layerflow.hosts.backend import Unreachable
from layerflow.hosts.memcache.metaservice import MetaService

NOBODY = "tcp://127.0.0.1:1"


def test_its_term_is_that_of_its_http_port(answers):
    meta = MetaService(NOBODY, answers.url)
    assert meta.generation == 0
    assert meta.reach() == meta.generation == 1
    meta.close()
    assert meta.generation == 0
    assert meta.reach() == 2
    assert meta.lost == 1
    meta.close()


def test_a_descriptor_that_is_anothers_by_now_is_left_alone(listener, monkeypatch):
    """memfabric closes some of its own twice: what was opened in between, as here, is not there any more."""
    made, connect = [], socket.create_connection

    def kept(*arguments, **more):
        made.append(connect(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(socket, "create_connection", kept)
    meta = MetaService(NOBODY, f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert meta.reach() == meta.generation == 1
    with socket.socket() as another:
        os.dup2(another.fileno(), made[0].fileno())
        number = made[0].fileno()
        assert meta.generation == 0
        assert meta.reach() == meta.generation == 2
        os.close(number)  # it was not closed
    os.close(made[1].fileno())
    assert meta.generation == 0
    assert meta.reach() == meta.generation == 3
    meta.close()


def test_a_process_with_many_files(listener):
    """An engine has thousands; `select` knows 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2048), hard))
    many = [os.dup(listener.fileno()) for _ in range(1100)]
    try:
        meta = MetaService(NOBODY, f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert meta.reach() == meta.generation == 1
        meta.close()
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("said", "well"),
    [
        (json.dumps({"status": "ok"}).encode(), True),
        (json.dumps({"status": "ok", "service_ready": True}).encode(), True),
        (json.dumps({"status": "ok", "service_ready": False}).encode(), False),
        (json.dumps({"status": "starting"}).encode(), False),
        (json.dumps(["ok"]).encode(), False),
        (b"", False),
    ],
)
def test_it_is_well_only_where_it_says_so(answers, said, well):
    answers.bodies["/health"] = said
    meta = MetaService(NOBODY, answers.url)
    if well:
        meta.check()
    else:
        with pytest.raises(Unreachable, match="is not ready"):
            meta.check()
    answers.bodies.clear()
    with pytest.raises(Unreachable, match="answered 404"):
        meta.check()
    meta.close()


def test_nobody_at_its_http_port(listener):
    port = listener.getsockname()[1]
    listener.close()
    meta = MetaService(NOBODY, f"http://127.0.0.1:{port}")
    with pytest.raises(Unreachable, match=rf"127\.0\.0\.1:{port}: .*; start a MetaService there, or set .*metrics_url"):
        meta.check()


def test_without_http_it_is_knocked_at_and_no_connection_stays(listener):
    meta = MetaService(f"tcp://127.0.0.1:{listener.getsockname()[1]}", "")
    assert meta.reach() == meta.generation == 1
    assert meta.largest_segment() == meta.lost == 0
    meta.check()
    knocked, _ = listener.accept()
    with knocked:
        knocked.settimeout(5)
        assert knocked.recv(1) == b""
    listener.close()
    with pytest.raises(Unreachable, match=r"start one there, or set pool\.memcache\.meta_service_url"):
        meta.check()
    assert meta.generation == 1


def test_largest_segment_is_remembered_for_a_while(answers):
    answers.bodies["/metrics"] = (
        b'memcache_segment_capacity_bytes{segment="a"} 4096\nmemcache_segment_capacity_bytes{segment="b"} 1024\n'
        b'memcache_segment_used_bytes{segment="b"} 9999\n'
    )
    meta = MetaService(NOBODY, f"{answers.url}/")
    assert meta.largest_segment() == meta.largest_segment() == 4096
    assert answers.asked == ["/metrics"]
