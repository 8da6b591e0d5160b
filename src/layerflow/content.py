"""Digest of what a model computes: its configuration and its whole weights, never its path or file times.

Every byte of every weight file counts: new rows of an embedding or one trained expert change a fraction of a tensor
that samples would miss. A file's digest is its SHA-256, because that is the name that the Hugging Face cache gives to a
file of weights: there it is known without reading. Elsewhere a file is read once, and its digest kept in the user's
cache (``$XDG_CACHE_HOME/layerflow/digests``) under its inode, size and times.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from layerflow.errors import SpecError

if TYPE_CHECKING:
    import torch

_NAMED = "named:"
_EPOCH = "+epoch:"

VOLATILE_KEYS = frozenset({"_commit_hash", "_name_or_path", "name_or_path", "transformers_version"})
"""What a checkpoint's config.json says about its own history rather than about the model."""

PIECE_BYTES = 8 << 20
"""Read and hashed at a time; a digest that is given up ends after its present piece."""

READERS = 4
"""Threads that read files side by side: one hashes 1 to 2 GB/s."""

SETTLED_S = 2.0
"""How old a file's last change must be for its digest to be kept: times of file systems are coarse, and a change within
the same tick would not be seen."""

LOCK_S, LOCK_EVERY_S = 600.0, 0.1
"""How long a process waits for another one that reads the same file, and how often it looks, seconds."""

MOST_KEPT = 10_000
"""Digests in the user's cache; the oldest are removed beyond that."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def renewed_content(content: str, name: str = "") -> str:
    """What `content` becomes when the weights behind it are replaced: never equal to anything computed before.

    :param content: of the old weights, see :func:`model_content`.
    :param name: the new weights' own name, which no other weights ever have; engines that give the same one share
        what they store. "" = a new epoch of 128 random bits, which only those share who are told the result.
    """
    return _NAMED + name if name else content.partition(_EPOCH)[0] + _EPOCH + secrets.token_hex(16)


def name_in(content: str) -> str:
    """The weights' name that `content` was made from, also with an epoch behind it; "" = there is none."""
    base = content.partition(_EPOCH)[0]
    return base.removeprefix(_NAMED) if base.startswith(_NAMED) else ""


def model_content(path: Path) -> str:
    """Digest of a checkpoint folder: ``config.json`` and every ``.safetensors`` file in it.

    Where ``model.safetensors.index.json`` exists, only the files that it names count, as for the
    engine that loads them.

    :param path: the checkpoint's folder.
    :returns: 32 hex digits, equal for equal files on every host.
    :raises SpecError: there is no checkpoint of this form, or a file of it cannot be read.
    """
    return folder_content(path, "config.json")


def folder_content(path: Path, config_name: str, stop: threading.Event | None = None) -> str:
    """:func:`model_content` for folders whose configuration has another name (adapters).

    :param stop: set by another thread, it ends this call.
    :raises SpecError: as there, or `stop` was set.
    """
    config = read_json(path / config_name)
    facts = {key: value for key, value in config.items() if key not in VOLATILE_KEYS}
    return _combined(facts, [digest.encode() for digest in file_digests(weight_files(path), stop)])


def weights_content(files: Sequence[Path], stop: threading.Event | None = None) -> str:
    """Digest of a checkpoint's weights alone: neither the files' names nor their order count.

    :param stop: set by another thread, it ends this call.
    :returns: 32 hex digits.
    :raises SpecError: a file cannot be read, changes meanwhile, or `stop` was set.
    """
    return _combined({}, [digest.encode() for digest in file_digests(files, stop)])


def content_of_tensors(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | np.ndarray]) -> str:
    """Digest of a model that is in memory already; not the one that its files have.

    :param config: JSON-like facts that shape the computation: sizes, norms, rotary base.
    :param tensors: weights by name, torch (on any device; every byte is copied to the host) or numpy.
    :returns: 32 hex digits.
    :raises SpecError: `config` holds something that JSON cannot.
    """
    return _combined(config, [_tensor_digest(name, tensor) for name, tensor in tensors.items()])


def weight_files(path: Path, load_format: str = "") -> list[Path]:
    """The files that an engine loads a checkpoint from.

    :param load_format: vLLM's: "mistral" = the files called ``consolidated*``, "auto" = these where there are any.
    :raises SpecError: there is none.
    """
    files = sorted(path.glob("consolidated*.safetensors")) if load_format in ("mistral", "auto") else []
    if not files:
        index = path / "model.safetensors.index.json"
        if index.exists():
            names = read_json(index).get("weight_map", {}).values()
            files = [path / name for name in sorted(set(names))]
        else:
            files = sorted(path.glob("*.safetensors"))
    if not files:
        raise SpecError(
            f"{path} holds no .safetensors file; name the model's content yourself "
            "(any string that changes whenever the weights do)"
        )
    return files


def file_digests(files: Iterable[Path], stop: threading.Event | None = None) -> list[str]:
    """SHA-256 of each file, in hex, sorted; files are read side by side.

    :raises SpecError: as :func:`file_digest`.
    """
    # Workers of one engine read the same files: each begins with another one, and finds the rest in the cache.
    waiting = list(files)
    random.shuffle(waiting)
    found: list[str] = []
    failed: list[Exception] = []

    def read() -> None:
        with contextlib.suppress(IndexError):
            while not failed:
                file = waiting.pop()
                try:
                    found.append(file_digest(file, stop))
                except Exception as error:  # noqa: BLE001 - raised to the caller
                    failed.append(error)

    count = max(1, min(READERS, len(waiting), (os.cpu_count() or 1) // 2))
    readers = [threading.Thread(target=read, name="layerflow-digest", daemon=True) for _ in range(count)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if failed:
        raise failed[0]
    return sorted(found)


def file_digest(path: Path, stop: threading.Event | None = None) -> str:
    """SHA-256 of a file, in hex: from its name in the Hugging Face cache, from the user's cache, or by reading it.

    :param stop: set by another thread, it ends this call.
    :raises SpecError: the file cannot be read, changes meanwhile, or `stop` was set.
    """
    real = Path(os.path.realpath(path))
    if real.parent.name == "blobs" and _DIGEST.fullmatch(real.name) and real.is_file():
        return real.name
    try:
        with real.open("rb") as file:
            before = os.fstat(file.fileno())
            with _kept(before, stop) as kept:
                known = kept.read(65).decode("ascii", "replace") if kept is not None else ""
                if _DIGEST.fullmatch(known):
                    return known
                digest = _sha256(file, path, stop)
                if _stamp(os.fstat(file.fileno())) != _stamp(before):
                    raise SpecError(f"{path} was written to while it was read; its content cannot be told")
                if kept is not None and time.time() - max(before.st_mtime, before.st_ctime) > SETTLED_S:
                    kept.truncate(0)
                    os.pwrite(kept.fileno(), digest.encode(), 0)
                return digest
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    :raises SpecError: there is none.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}; is this a model's folder?") from error
    except ValueError as error:
        raise SpecError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SpecError(f"{path} holds {type(value).__name__} where an object was expected")
    return value


def _combined(config: Mapping[str, Any], parts: Iterable[bytes]) -> str:
    hasher = hashlib.blake2b(digest_size=16, person=b"layerflow-conten")
    try:
        facts = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise SpecError(f"the model's config is not plain JSON ({error}); pass numbers, strings and lists") from error
    for part in [facts, *sorted(parts)]:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def _sha256(file: BinaryIO, path: Path, stop: threading.Event | None) -> str:
    hasher, buffer = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        hasher.update(buffer[:count])
        if stop is not None and stop.is_set():
            raise SpecError(f"{path} was not read to its end: the engine is shutting down")
    return hasher.hexdigest()


def _stamp(stat: os.stat_result) -> tuple[int, ...]:
    # Copies may keep the time of the original's last change; the inode's own change time tells them apart.
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@contextlib.contextmanager
def _kept(stat: os.stat_result, stop: threading.Event | None) -> Iterator[BinaryIO | None]:
    """The file's entry in the user's cache, locked, so that of several processes one reads it; None = there is none.

    Whoever has the lock may be stopped or hang: after :data:`LOCK_S` seconds this process reads the file by itself.
    """
    name = hashlib.sha256(repr(_stamp(stat)).encode()).hexdigest()[:32]
    with contextlib.ExitStack() as stack:
        entry: BinaryIO | None = None
        with contextlib.suppress(OSError, RuntimeError):  # no home, or one that cannot be written to, or cannot lock
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "layerflow" / "digests"
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _prune(folder)
            opened = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            entry = stack.enter_context(os.fdopen(opened, "r+b", buffering=0))
            if not _locked(entry, stop or threading.Event()):
                entry = None
        yield entry


def _locked(entry: BinaryIO, stop: threading.Event) -> bool:
    """Lock it; False where `stop` was set, or another process has had the lock for too long."""
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(entry, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until or stop.wait(LOCK_EVERY_S):
                return False


def _prune(folder: Path) -> None:
    entries = list(os.scandir(folder))
    if len(entries) > MOST_KEPT:
        for entry in sorted(entries, key=lambda each: each.stat().st_mtime)[: len(entries) - MOST_KEPT // 2]:
            Path(entry.path).unlink(missing_ok=True)


def _tensor_digest(name: str, tensor: torch.Tensor | np.ndarray) -> bytes:
    head = f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\0"
    hasher = hashlib.sha256(head.encode())
    if isinstance(tensor, np.ndarray):
        hasher.update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    else:
        hasher.update(tensor_bytes(tensor))
    return hasher.digest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements in order, copied to the host."""
    import torch  # noqa: PLC0415  the ground floor does not load torch; a caller with a tensor has loaded it

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
