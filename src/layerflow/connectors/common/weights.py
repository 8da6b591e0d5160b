"""An engine's weights: where they lie, their digest, and what they are called once they are replaced.

They are read on a thread of their own: no start, and no request, waits long for their digest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import structlog

from layerflow.content import name_in, renewed_content, weight_files, weights_content
from layerflow.errors import ConfigError, LayerflowError, SpecError
from layerflow.system.threads import OwnedThread

NAME_IT = "; set model_content in the connector's options to a name that changes whenever the weights do"

log = structlog.get_logger("layerflow.connector")

START_WAIT_S = 10.0
"""How long a start waits for the digest of its weights. Later, the engine shares nothing until that is known."""

JOIN_S = 2.0
"""How long a shutdown waits for the reader to leave its present file."""

Found = TypeVar("Found")


class WeightsReading(Generic[Found]):
    """Calls `read` on a thread of its own.

    :param read: takes an event that ends it when set.
    """

    def __init__(self, read: Callable[[threading.Event], Found]) -> None:
        self._read = read
        self._stop, self._done = threading.Event(), threading.Event()
        self._found: list[Found] = []
        self._error: ConfigError | None = None
        self._thread = OwnedThread("layerflow-weights", self._run, lost=lambda _: self._done.set()).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False after `timeout_s`."""
        return self._done.wait(timeout_s)

    @property
    def found(self) -> Found:
        """What `read` has returned, once it has ended.

        :raises ConfigError: it found nothing.
        """
        if not self._found:
            raise self._error or ConfigError("the thread that read the weights has failed")
        return self._found[0]

    def close(self) -> None:
        """End it."""
        self._stop.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            self._found.append(self._read(self._stop))
        except ConfigError as error:
            self._error = error
        self._done.set()


def folder_of(name: str, revision: str | None) -> Path:
    """A checkpoint's folder: a path, or a hub's name of something the engine has downloaded already."""
    path = Path(name).expanduser()
    if path.is_dir() or path.is_absolute():
        return path
    from huggingface_hub import snapshot_download  # noqa: PLC0415  the engine brings it; nothing else needs it

    return Path(snapshot_download(name, revision=revision, local_files_only=True))


class Checkpoint(NamedTuple):
    """Weights as an engine has loaded them, not read yet.

    :param head: what their content begins with: a name, or the seed of made-up weights.
    :param files: those that have to be read; () = `head` is the content.
    """

    head: str
    files: tuple[Path, ...] = ()

    def content(self, stop: threading.Event | None = None) -> str:
        """Digest of the weights, the same wherever they lie. Reads all of them, where no digest is known.

        :param stop: set by another thread, it ends this call.
        :raises ConfigError: a file cannot be read.
        """
        if not self.files:
            return self.head
        try:
            return self.head + weights_content(self.files, stop)
        except SpecError as error:
            raise ConfigError(f"the model's content cannot be told: {error}{NAME_IT}") from error


def checkpoint(
    path: str, load_format: str, *, revision: str | None = None, seed: int = 0, named: str = ""
) -> Checkpoint:
    """Which weights an engine has loaded.

    :param path: a folder, or a hub's name.
    :param load_format: the engine's; ``dummy`` = made up from `seed`.
    :param named: the operator's own name for the content.
    :raises ConfigError: the weights are not safetensors files that can be found here, and they have no name.
    """
    if named:
        return Checkpoint(renewed_content("", name_of(named)))
    if load_format == "dummy":
        return Checkpoint(f"dummy:{seed}")
    try:
        return Checkpoint("", tuple(weight_files(folder_of(path, revision), load_format)))
    except (LayerflowError, OSError, ValueError) as error:  # the hub's client has a ValueError for what is no name
        raise ConfigError(f"the model's content cannot be told from {path}: {error}{NAME_IT}") from error


def name_of(written: str) -> str:
    """The name that `model_content` gives to the weights: itself, or after an @ what that file holds now.

    :raises ConfigError: the file cannot be read, or is empty.
    """
    if not written.startswith("@"):
        return written
    try:
        name = Path(written[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model_content = {written!r}: the file cannot be read: {error}") from error
    if not name:
        raise ConfigError(f"model_content = {written!r}: the file is empty; write the weights' name into it")
    return name


class Weights:
    """The name in a file, read again in the first step after each reset.

    Engines reset when they pause: the new weights, and their name, come between that and the next step.

    :param written: ``model_content`` of the connector's options; only ``@FILE`` can name other weights.
    """

    def __init__(self, written: str) -> None:
        self._written = written
        self._last = ""
        self.unnamed = False

    def replaced(self, content: str) -> None:
        """The weights are being replaced; `content` is what the old ones are called in keys."""
        if not self._written.startswith("@"):
            return
        self.unnamed = True
        self._last = name_in(content)

    def name(self) -> str:
        """The present weights' name; "" where they have none of their own: the old one would bring back old KV."""
        self.unnamed = False
        try:
            name = name_of(self._written)
        except ConfigError as error:
            log.warning("weights_not_named", error=str(error))
            return ""
        if name == self._last:
            log.warning("weights_not_named", error=f"{self._written} still holds {name!r}, the name of the old ones")
            return ""
        return name
