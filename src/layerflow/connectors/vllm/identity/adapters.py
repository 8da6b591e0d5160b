"""What a request's LoRA adapter is called in its keys: by its files' content, never by its name or its slot.

vLLM reads an adapter's files once per id (``lora_int_id``) and computes with what it has read, whatever becomes of the
files. So where an id's files are others than at its first request, the weights behind it are not known: nothing of that
id is loaded or saved from then on. An adapter that is loaded anew gets a new id.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

from layerflow.connectors.common.weights import WeightsReading, folder_of
from layerflow.content import folder_content
from layerflow.errors import ConfigError, LayerflowError

SMALL_BYTES = 16 << 20
"""Adapters up to this size are read on the scheduler's thread, in some milliseconds; larger ones behind it."""

MOST_READ = 256
"""Folders whose digest is remembered."""

Stamps = tuple[tuple[str, int, int, int], ...]
"""Name, times and size of each file of a folder."""


class Adapters:
    """The adapters of one engine, as its scheduler's side meets them.

    :param keyed_by_path: vLLM's own prefix cache tells adapters apart by name and path; older ones do by name alone.
    """

    def __init__(self, *, keyed_by_path: bool = True) -> None:
        self._keyed_by_path = keyed_by_path
        self._contents: dict[int, str] = {}  #: by vLLM's id; "" = not known any more
        self._readings: dict[tuple[Path, Stamps], WeightsReading[str]] = {}
        self._unread: dict[int, Stamps] = {}  #: by vLLM's id: of files whose content is not known yet
        self._cached: dict[tuple[str, str], set[int]] = {}  #: ids that vLLM's own cache may hold, by how it calls them

    def content(self, lora: Any) -> str:
        """The adapter's identity in keys; "" = no adapter.

        :param lora: vLLM's LoRARequest, or None.
        :raises ConfigError: its files are not read yet or cannot be, or it is not known which of them vLLM computes
            with.
        """
        if lora is None:
            return ""
        if lora.load_inplace:
            self._contents[lora.lora_int_id] = ""
            raise ConfigError(f"adapter {lora.lora_name!r} is replaced in place: its content cannot be told")
        known = self._contents.get(lora.lora_int_id)
        if known and not _is_there(lora):
            return known
        content = self._read(lora)
        if self._contents.setdefault(lora.lora_int_id, content) != content:
            raise self._lose(lora)
        return content

    def starts(self, lora: Any) -> None:
        """A request begins to compute: from here on vLLM's own prefix cache may hold blocks of its adapter."""
        if lora is not None:
            self._cached.setdefault(self._name(lora), set()).add(lora.lora_int_id)

    def lost(self, lora: Any) -> bool:
        """Is it not known any more what vLLM computes with under this adapter's id?"""
        return lora is not None and self._contents.get(lora.lora_int_id) == ""

    def mixed(self, lora: Any) -> bool:
        """May blocks that vLLM's own prefix cache finds for this adapter be those of another?"""
        if lora is None:
            return False
        ids = {lora.lora_int_id, *self._cached.get(self._name(lora), ())}
        return len({self._contents.get(number) or number for number in ids}) > 1

    def close(self) -> None:
        """Give up what is being read."""
        for reading in self._readings.values():
            reading.close()

    def forget_cached(self) -> None:
        """VLLM's own prefix cache is empty, and no request has begun to compute since."""
        self._cached.clear()

    def _read(self, lora: Any) -> str:
        """Digest of what lies at an adapter's path now.

        :raises ConfigError: it is not known yet, or it is no adapter in safetensors files.
        """
        try:
            path = folder_of(lora.lora_path, None)
            stamps = _stamps(path)
            if sum(size for *_, size in stamps) <= SMALL_BYTES:
                content = _content(path, stamps)
            else:
                content = self._read_behind(lora, path, stamps)
        except (LayerflowError, OSError, ValueError) as error:  # the hub's client has a ValueError for what is no name
            raise ConfigError(f"adapter {lora.lora_name!r}: its content cannot be told: {error}") from error
        return f"{content}+3d" if getattr(lora, "is_3d_lora_weight", False) else content

    def _read_behind(self, lora: Any, path: Path, stamps: Stamps) -> str:
        """vLLM may read the files from the id's first request on, so they must be those of that time when read here."""
        if self._unread.setdefault(lora.lora_int_id, stamps) != stamps:
            raise self._lose(lora)
        reading = self._readings.get((path, stamps))
        if reading is None:
            if len(self._readings) >= MOST_READ:
                self._readings.pop(next(iter(self._readings))).close()
            reading = self._readings[path, stamps] = WeightsReading(functools.partial(_content, path, stamps))
        if not reading.wait(0):
            raise ConfigError("its files are being read; requests that come later are cached")
        return reading.found

    def _lose(self, lora: Any) -> ConfigError:
        self._contents[lora.lora_int_id] = ""
        return ConfigError(
            f"adapter {lora.lora_name!r}: {lora.lora_path} is not what the id {lora.lora_int_id} stood for before, "
            "and vLLM does not read it again: load the adapter under a new id"
        )

    def _name(self, lora: Any) -> tuple[str, str]:
        return lora.lora_name, lora.lora_path if self._keyed_by_path else ""


def _is_there(lora: Any) -> bool:
    """May vLLM still read the adapter from its path? A hub's name always has one."""
    path = Path(lora.lora_path).expanduser()
    return path.exists() or not path.is_absolute()


def _stamps(folder: Path) -> Stamps:
    found = [(file.name, file.stat()) for file in folder.iterdir() if file.is_file()]
    # Copies may keep the time of the original's last change; the inode's own change time tells them apart.
    return tuple(sorted((name, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size) for name, stat in found))


@functools.lru_cache(maxsize=MOST_READ)
def _content(folder: Path, stamps: Stamps, stop: threading.Event | None = None) -> str:
    try:
        content = folder_content(folder, "adapter_config.json", stop)
        changed = _stamps(folder) != stamps
    except (LayerflowError, OSError) as error:
        raise ConfigError(str(error)) from error
    if changed:
        raise ConfigError(f"{folder} was written to while it was read")
    return content
