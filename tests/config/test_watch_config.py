import asyncio
import contextlib
import hashlib
from pathlib import Path
from typing import Any

import pytest

from layerflow.config.settings import Settings
from layerflow.errors import ConfigError
from layerflow.server import watch
from layerflow.server.watch import watch_config

PATIENCE_S = 20


class Events:
    """A logger whose events can be awaited."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, str, dict[str, Any]]] = asyncio.Queue()

    def info(self, event: str, **fields: Any) -> None:
        self._queue.put_nowait(("info", event, fields))

    def warning(self, event: str, **fields: Any) -> None:
        self._queue.put_nowait(("warning", event, fields))

    async def next(self) -> tuple[str, str, dict[str, Any]]:
        async with asyncio.timeout(PATIENCE_S):
            return await self._queue.get()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "layerflow.toml"
    path.write_text("[transfer]\nprefetch_layers = 1\n")
    return path


@contextlib.asynccontextmanager
async def watching(path, events, applied, overrides=None, apply=None, current=None, tell=lambda _: None):
    current = current or Settings.load(path, overrides or {})
    task = asyncio.create_task(
        watch_config(path, overrides or {}, apply or applied.append, events, current=current, tell=tell)
    )
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_good_edits_apply_and_bad_ones_are_refused(path):
    events, applied = Events(), []
    async with watching(path, events, applied):
        path.write_text("[transfer]\nprefetch_layers = 2\n")
        assert await events.next() == (
            "info",
            "config_applied",
            {"path": str(path), "changes": {"transfer.prefetch_layers": 2}},
        )
        path.write_text("[transfer]\nprefetch_layer = 3\n")
        level, event, fields = await events.next()
        assert (level, event) == ("warning", "config_refused")
        assert "did you mean transfer.prefetch_layers?" in fields["problems"][0]
        path.write_text("[transfer\n")
        assert "not valid TOML" in (await events.next())[2]["problems"][0]
        path.write_text("[transfer]\nprefetch_layers = 4\n")
        assert (await events.next())[1] == "config_applied"
    assert [settings.transfer.prefetch_layers for settings in applied] == [2, 4]


async def test_a_change_that_needs_a_restart_changes_nothing(path):
    events, applied = Events(), []
    async with watching(path, events, applied):
        path.write_text('[transfer]\nprefetch_layers = 2\n[pool]\nsize = "2GiB"\n')
        level, event, fields = await events.next()
        assert (level, event) == ("warning", "config_refused") and "pool.size" in fields["problems"][0]
    assert applied == []


async def test_a_replaced_and_a_deleted_file(path):
    events, applied = Events(), []
    async with watching(path, events, applied):
        fresh = path.with_suffix(".new")
        fresh.write_text("[transfer]\nprefetch_layers = 5\n")
        fresh.rename(path)
        assert (await events.next())[1] == "config_applied"
        path.unlink()
        assert (await events.next())[:2] == ("warning", "config_gone")
        path.write_text("[transfer]\nprefetch_layers = 6\n")
        assert (await events.next())[1] == "config_applied"
    assert [settings.transfer.prefetch_layers for settings in applied] == [5, 6]


async def test_a_symlink_that_turns(path):
    """How a mounted ConfigMap changes."""
    folder = path.parent
    for version, layers in (("one", 1), ("two", 7)):
        (folder / version).mkdir()
        (folder / version / "layerflow.toml").write_text(f"[transfer]\nprefetch_layers = {layers}\n")
    (folder / "data").symlink_to("one")
    link = folder / "link.toml"
    link.symlink_to("data/layerflow.toml")
    events, applied = Events(), []
    async with watching(link, events, applied):
        (folder / "fresh").symlink_to("two")
        (folder / "fresh").rename(folder / "data")
        assert (await events.next())[2]["changes"] == {"transfer.prefetch_layers": 7}


async def test_flags_keep_winning(path):
    events, applied = Events(), []
    async with watching(path, events, applied, {"transfer.prefetch_layers": 9}):
        path.write_text("[transfer]\nprefetch_layers = 2\nh2d_stagger_us = 1\n")
        assert (await events.next())[2]["changes"] == {"transfer.h2d_stagger_us": 1}
    assert [settings.transfer.prefetch_layers for settings in applied] == [9]


async def test_an_edit_before_the_watch_began_is_not_missed(path):
    events, applied = Events(), []
    before = Settings.load(path, {})
    path.write_text("[transfer]\nprefetch_layers = 2\n")
    async with watching(path, events, applied, current=before):
        assert (await events.next())[2]["changes"] == {"transfer.prefetch_layers": 2}


async def test_a_refusal_by_the_server_is_reported_and_asynchronous_apply_awaited(path):
    events, applied = Events(), []

    async def apply(settings: Settings) -> None:
        if settings.transfer.prefetch_layers == 2:
            raise ConfigError("not now")
        applied.append(settings)

    async with watching(path, events, applied, apply=apply):
        path.write_text("[transfer]\nprefetch_layers = 2\n")
        assert (await events.next())[2]["problems"] == ["not now"]
        path.write_text("[transfer]\nprefetch_layers = 3\n")
        assert (await events.next())[1] == "config_applied"
    assert len(applied) == 1


async def test_an_edit_that_only_its_application_refuses_ends_nothing(path):
    """Whatever it raises: the watch runs in the server's own task group."""
    events, applied, told = Events(), [], []

    def apply(settings: Settings) -> None:
        if settings.transfer.prefetch_layers == 2:
            raise OverflowError("can't serialize")
        applied.append(settings)

    async with watching(path, events, applied, apply=apply, tell=told.append):
        path.write_text("[transfer]\nprefetch_layers = 2\n")
        level, event, fields = await events.next()
        assert (level, event, fields["problems"]) == (
            "warning",
            "config_refused",
            ["OverflowError: can't serialize"],
        )
        assert fields["exc_info"] is not None and told[-1].problems == ("OverflowError: can't serialize",)
        path.write_text("[transfer]\nprefetch_layers = 3\n")
        assert (await events.next())[1] == "config_applied"
    assert len(applied) == 1


@pytest.mark.parametrize(
    "edit",
    [
        f"[transfer]\nh2d_stagger_us = 0x{'F' * 5000}\n",
        f"[pool]\nsize = 0x{'F' * 5000}\n",
        f"[pool]\nlink_gbps = 0x{'F' * 5000}\n",
        f"use_layerwise = 0x{'F' * 5000}\n",
        f"[other]\nlist = [1, [{{ deep = 0x{'F' * 5000} }}]]\n",
        '[transfer]\nmax_inflight_bytes = "100000000TiB"\n',
        f'[transfer]\nmax_inflight_bytes = "{"9" * 2_000_000}GiB"\n',
        '[record]\npath = "/tmp/a\\u0000b"\n',
    ],
    ids=lambda edit: edit[:30],
)
async def test_numbers_beyond_all_bounds_are_refused(path, edit):
    events, applied = Events(), []
    async with watching(path, events, applied):
        path.write_text(edit)
        level, event, fields = await events.next()
        assert (level, event) == ("warning", "config_refused") and fields["exc_info"] is None
        assert sum(len(problem) for problem in fields["problems"]) < 1000
    assert applied == []


async def test_a_system_that_reports_no_changes_is_looked_at(path, monkeypatch):
    def none_left(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(watch, "awatch", none_left)
    monkeypatch.setattr(watch, "LOOK_MS", 10)
    events, applied = Events(), []
    async with watching(path, events, applied):
        level, event, fields = await events.next()
        assert (level, event) == ("warning", "config_unwatched") and "Too many open files" in fields["error"]
        path.write_text("[transfer]\nprefetch_layers = 2\n")
        assert (await events.next())[1] == "config_applied"


async def test_the_files_state_is_told(path):
    """Which bytes hold, since when others are refused, and why; the same bytes again end the refusal."""
    events, applied, told = Events(), [], asyncio.Queue()

    async def state():
        async with asyncio.timeout(PATIENCE_S):
            return await told.get()

    good = path.read_bytes()
    async with watching(path, events, applied, tell=told.put_nowait):
        first = await state()
        assert (first.path, first.sha256) == (str(path), hashlib.sha256(good).hexdigest())
        assert first.applied_at > 0 and (first.refused_at, first.problems, first.refusals) == (0, (), 0)
        path.write_text("[transfer]\nprefetch_layer = 3\n")
        bad = await state()
        assert (bad.sha256, bad.applied_at) == (first.sha256, first.applied_at)
        assert bad.refused_at >= first.applied_at and "did you mean" in bad.problems[0]
        path.write_text('[pool]\nsize = "2GiB"\n')
        worse = await state()
        assert (worse.refused_at, worse.refusals) == (bad.refused_at, 2) and "pool.size" in worse.problems[0]
        path.unlink()
        assert (await state()).problems == ("the file is gone",)
        path.write_bytes(good)
        again = await state()
        assert (again.sha256, again.refused_at, again.problems, again.refusals) == (first.sha256, 0, (), 3)
        assert again.applied_at >= first.applied_at
    assert applied == []


async def test_the_state_is_that_of_the_bytes_whose_settings_hold(path, monkeypatch):
    """Also where the file is replaced just after it was read."""
    events, applied, told = Events(), [], []
    later, read = b"[transfer]\nprefetch_layers = 7\n", watch._read

    def read_and_replaced(file):
        found = read(file)
        if b"prefetch_layers = 2" in (found or b""):
            path.write_bytes(later)
        return found

    monkeypatch.setattr(watch, "_read", read_and_replaced)
    async with watching(path, events, applied, tell=told.append):
        path.write_text("[transfer]\nprefetch_layers = 2\n")
        for layers in (2, 7):
            assert (await events.next())[2]["changes"] == {"transfer.prefetch_layers": layers}
    digests = [hashlib.sha256(b"[transfer]\nprefetch_layers = %d\n" % layers).hexdigest() for layers in (2, 7)]
    assert [state.sha256 for state in told][-2:] == digests
    assert [settings.transfer.prefetch_layers for settings in applied] == [2, 7]
