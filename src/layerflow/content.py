"""Digest of what a model computes: its configuration and its weights, never its path or file times.

Weights are sampled: a 4 GiB tensor is told from another by :data:`SAMPLES` windows of
:data:`SAMPLE_BYTES` bytes, evenly spaced from its first byte to its last, so that a large model is
fingerprinted in well under a second. Fine-tuning and quantising change every window of the tensors
they touch. Entries are ordered by tensor name: how a checkpoint is cut into files does not matter.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from layerflow.errors import SpecError

if TYPE_CHECKING:
    import torch

SAMPLES = 16
SAMPLE_BYTES = 64
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself

# What a checkpoint's config.json says about its own history rather than about the model.
VOLATILE_KEYS = frozenset({"_commit_hash", "_name_or_path", "name_or_path", "transformers_version"})

# safetensors' names (safetensors/src/tensor.rs) to torch's.
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "F32": "float32",
    "I64": "int64",
    "F64": "float64",
}


_NAMED = "named:"
_EPOCH = "+epoch:"


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


class _Entry(NamedTuple):
    """One tensor: `sample` gives the bytes of its windows."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sample: Callable[[], bytes]


def model_content(path: Path) -> str:
    """Digest of a checkpoint folder: ``config.json`` and every ``.safetensors`` file in it.

    Where ``model.safetensors.index.json`` exists, only the files that it names count, as for the
    engine that loads them.

    :param path: the checkpoint's folder.
    :returns: 32 hex digits, equal for equal models on every host.
    :raises SpecError: there is no checkpoint of this form, or a file of it is broken.
    """
    return folder_content(path, "config.json")


def folder_content(path: Path, config_name: str) -> str:
    """:func:`model_content` for folders whose configuration has another name (adapters).

    :raises SpecError: as there.
    """
    config = _read_json(path / config_name)
    files = _weight_files(path)
    if not files:
        raise SpecError(
            f"{path} holds no .safetensors file; name the model's content yourself "
            "(any string that changes whenever the weights do)"
        )
    entries = [entry for file in files for entry in _file_entries(file)]
    return _digest(config, entries)


def content_of_tensors(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | np.ndarray]) -> str:
    """Digest of a model that is in memory already; equals :func:`model_content` of the same model's files.

    :param config: JSON-like facts that shape the computation: sizes, norms, rotary base.
    :param tensors: weights by name, torch (on any device; only the sampled bytes are copied) or numpy.
    :returns: 32 hex digits.
    :raises SpecError: `config` holds something that JSON cannot.
    """
    return _digest(config, [_memory_entry(name, tensor) for name, tensor in tensors.items()])


def _digest(config: Mapping[str, Any], entries: list[_Entry]) -> str:
    hasher = hashlib.blake2b(digest_size=16, person=b"layerflow-conten")
    facts = {key: value for key, value in config.items() if key not in VOLATILE_KEYS}
    try:
        _update(hasher, json.dumps(facts, sort_keys=True, separators=(",", ":")).encode())
    except (TypeError, ValueError) as error:
        raise SpecError(f"the model's config is not plain JSON ({error}); pass numbers, strings and lists") from error
    for entry in sorted(entries, key=lambda entry: entry.name):
        _update(hasher, f"{entry.name} {entry.dtype} {list(entry.shape)}".encode())
        _update(hasher, entry.sample())
    return hasher.hexdigest()


def _update(hasher: hashlib.blake2b, part: bytes) -> None:
    hasher.update(len(part).to_bytes(8, "little"))
    hasher.update(part)


def _windows(nbytes: int) -> list[tuple[int, int]]:
    """The sampled byte ranges of a tensor of `nbytes` bytes: all of it, where it is small."""
    if nbytes <= SAMPLES * SAMPLE_BYTES:
        return [(0, nbytes)]
    last = nbytes - SAMPLE_BYTES
    return [(at, at + SAMPLE_BYTES) for at in (index * last // (SAMPLES - 1) for index in range(SAMPLES))]


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.exists():
        names = _read_json(index).get("weight_map", {}).values()
        return [path / name for name in sorted(set(names))]
    return sorted(path.glob("*.safetensors"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}; is this a model's folder?") from error
    except ValueError as error:
        raise SpecError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise SpecError(f"{path} holds {type(value).__name__} where an object was expected")
    return value


def _file_entries(path: Path) -> Iterator[_Entry]:
    """Parse one safetensors header: 8-byte little-endian length, then JSON; tensor bytes follow."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            raw = file.read(size) if size <= MAX_HEADER_BYTES else b""
            total = file.seek(0, 2)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) != size or not size:
        raise SpecError(f"{path} is no safetensors file, or is cut off: its header claims {size} bytes")
    try:
        header = json.loads(raw)
        for name, facts in header.items():
            if name == "__metadata__":
                continue
            start, stop = (8 + size + int(offset) for offset in facts["data_offsets"])
            if not start <= stop <= total:
                raise SpecError(f"{path}: tensor {name!r} lies outside the file of {total} bytes; download it again")
            dtype = _DTYPES.get(facts["dtype"], facts["dtype"])
            yield _Entry(name, dtype, tuple(facts["shape"]), _file_sampler(path, start, stop))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{path}: unreadable safetensors header ({error!r}); download it again") from error


def _file_sampler(path: Path, start: int, stop: int) -> Callable[[], bytes]:
    def sample() -> bytes:
        with path.open("rb") as file:
            return b"".join(_read_at(file, start + lo, hi - lo) for lo, hi in _windows(stop - start))

    return sample


def _read_at(file: BinaryIO, at: int, nbytes: int) -> bytes:
    file.seek(at)
    return file.read(nbytes)


def _memory_entry(name: str, tensor: torch.Tensor | np.ndarray) -> _Entry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    nbytes = math.prod(shape) * tensor.dtype.itemsize

    def sample() -> bytes:
        where = np.concatenate([np.arange(lo, hi) for lo, hi in _windows(nbytes)])
        if isinstance(tensor, np.ndarray):
            flat = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
            return bytes(flat[where])
        return _sample_torch(tensor, where)

    return _Entry(name, dtype, shape, sample)


def _sample_torch(tensor: torch.Tensor, where: np.ndarray) -> bytes:
    import torch  # noqa: PLC0415  the ground floor does not load torch; whoever has a tensor already has

    flat = tensor.detach().reshape(-1).view(torch.uint8)
    sampled: np.ndarray = flat[torch.from_numpy(where).to(flat.device)].cpu().numpy()
    return sampled.tobytes()
