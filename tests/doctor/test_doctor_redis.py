"""What the doctor says of Redis: of a real server where the machine has one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from layerflow.config.settings import Settings
from layerflow.doctor import Finding, Severity, examine, examine_backend
from layerflow_cli.bench.pool.services import behind


def redis(url: str) -> dict[str, Finding]:
    pool = Settings(pool={"backend": "redis", "size": "1MiB", "redis": {"url": url}}).pool
    return {finding.check: finding for finding in examine_backend(pool, running=False)}


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    [found] = redis("redis://127.0.0.1:6379").values()
    assert (found.check, found.state) == ("redis package", Severity.PROBLEM)
    assert "layerflow[redis]" in found.advice


def test_the_server_is_away(closed_port: int) -> None:
    pytest.importorskip("redis")
    wanted = Settings(pool={"backend": "redis", "redis": {"url": f"redis://:hunter2@127.0.0.1:{closed_port}"}})
    found = {finding.check: finding for finding in examine(wanted)}
    assert found["redis server"].state is Severity.PROBLEM and "pool.redis.url" in found["redis server"].advice
    assert not any("hunter2" in text for finding in found.values() for text in (finding.found, finding.advice))


@pytest.mark.skipif(
    not (shutil.which("redis-server") or shutil.which("valkey-server")), reason="no redis-server and no valkey-server"
)
def test_a_server_that_works_is_full_for_ever_or_refuses(tmp_path: Path) -> None:
    client = pytest.importorskip("redis").Redis
    with behind("redis", tmp_path, 1 << 20) as pool:
        url = str(pool.settings["pool.redis.url"])
        works = redis(url)
        assert {finding.state for finding in works.values()} == {Severity.OK}, works
        assert "allkeys-lru" in works["redis memory"].found
        with client.from_url(url) as admin:
            admin.config_set("maxmemory-policy", "noeviction")
            assert redis(url)["redis memory"].state is Severity.WARNING
            admin.config_set("maxmemory", 0)
            assert "no maxmemory" in redis(url)["redis memory"].found
            admin.config_set("requirepass", "hunter2")
            refused = redis(url)["redis server"]
            assert refused.state is Severity.PROBLEM and "password" in refused.advice
