"""Settings that a client tries, against a file that is followed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from layerflow.config.settings import Settings
from layerflow.errors import ProtocolError
from layerflow.server.trial import Trials
from layerflow.wire.messages import MAX_TRIED_S, TrySettings

FILE = '[transfer]\nprefetch_layers = 1\n[record]\npath = "/x/own.lfr"\n[log]\nlevel = "warning"\n'
TUNED = b"[transfer]\nprefetch_layers = 4\n"


@dataclass(frozen=True)
class Client:
    number: int = 1
    name: str = "client"


class Followed:
    """A file that is followed, and what is in force."""

    def __init__(self, path: Path) -> None:
        path.write_text(FILE)
        self.own = self.in_force = Settings.load(path)
        self.trials = Trials()
        self.trials.watched(path, {}, self.own, self._apply)

    def _apply(self, settings: Settings) -> None:
        self.in_force = settings

    async def asked(self, content: bytes, seconds: float, *, dry: bool = False) -> dict[str, object]:
        return await self.trials.asked(TrySettings(1, content, seconds, dry), Client(), lambda: False)


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path / "layerflow.toml")


@pytest.mark.parametrize("more", [b"", b'[record]\nmax_bytes = "8MiB"\n[log]\nlevel = "debug"\n'])
async def test_the_files_recording_and_log_hold_on(followed: Followed, more: bytes) -> None:
    told = await followed.asked(TUNED + more, 10)
    assert told["changes"] == {"transfer.prefetch_layers": 4}
    assert followed.in_force.transfer.prefetch_layers == 4
    assert (followed.in_force.record, followed.in_force.log) == (followed.own.record, followed.own.log)


@pytest.mark.parametrize("seconds", [0, 5])
async def test_dry_changes_nothing(followed: Followed, seconds: float) -> None:
    told = await followed.asked(TUNED, seconds, dry=True)
    assert told["changes"] == {"transfer.prefetch_layers": 4} and followed.in_force == followed.own
    await followed.asked(TUNED, 10)
    trial = followed.trials.current
    await followed.asked(b"", seconds, dry=True)
    assert followed.trials.current is trial and followed.in_force.transfer.prefetch_layers == 4
    await followed.asked(b"", 0)
    assert followed.trials.current is None and followed.in_force == followed.own


@pytest.mark.parametrize("seconds", [-1.0, MAX_TRIED_S * 1.01, float("nan")])
@pytest.mark.parametrize("dry", [True, False])
async def test_times_that_are_refused(followed: Followed, seconds: float, dry: bool) -> None:
    with pytest.raises(ProtocolError, match="up to 3600 s"):
        await followed.asked(TUNED, seconds, dry=dry)
    assert followed.trials.current is None and followed.in_force == followed.own
