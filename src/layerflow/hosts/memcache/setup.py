"""From options to a memcache client that is connected. Checks first: the library says only -1."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from layerflow.hosts.backend import Unreachable, Unusable
from layerflow.hosts.memcache.client import explain
from layerflow.hosts.memcache.environment import missing_cann
from layerflow.hosts.memcache.metaservice import tcp_address
from layerflow.hosts.memcache.plugin import EMULATED, META_KEY, MemcacheSettings
from layerflow.hosts.shared.client import HostOptions
from layerflow.hosts.shared.service import Service

NEEDED = "1.3.0"
PACKAGES = f"memcache_hybrid=={NEEDED} memfabric_hybrid=={NEEDED}"
_SIGACTION_BYTES = 256
"""No Linux has a larger ``struct sigaction``."""
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_WORLD = "ock.mmc.local_service.world_size"
_DEFAULT_WORLD = 256

_REFUSED = (
    "memcache {version} refuses its options ({said}); check the sizes, addresses and the protocol {protocol!r} in "
    "pool.memcache, and the host's log"
)
_NOT_LET_IN = (
    "memcache {version} cannot join the pool ({said}); the reason is in the host's log above this. Often: an NPU "
    "driver that it does not know, libraries of CANN that are not found, a transport that this machine has not "
    "(protocol = {protocol!r}), an hcom_url that is taken, a config_store_url that does not answer, or a world_size "
    "other than that of the first client since the MetaService was started"
)


class MemcacheOptions(MemcacheSettings, HostOptions):
    """The section ``[pool.memcache]``, in the host process."""

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Self:
        """:raises Unusable: an option is unknown, or cannot be meant."""
        read = super().read(options)
        if read.cann_emulator and not read.config_file and read.protocol not in EMULATED:
            raise Unusable(
                f"pool.memcache.protocol = {read.protocol!r} does not work with cann_emulator; choose one of "
                f"{', '.join(EMULATED)}"
            )
        return read


@dataclass(frozen=True, slots=True)
class Shared:
    """What all clients of a pool have in common.

    :param meta_service_url: where the MetaService is.
    :param metrics_url: its HTTP; ``""`` = not known.
    :param world_size: most clients.
    """

    meta_service_url: str
    metrics_url: str
    world_size: int


def shared(options: MemcacheOptions) -> Shared:
    """From the options, or from the configuration file that replaces them.

    :raises Unusable: the file cannot be read, or says it wrongly.
    """
    if not options.config_file:
        return Shared(options.meta_service_url, options.metrics_url, options.world_size)
    try:
        said = options.file_keys()
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"pool.memcache.config_file cannot be read: {error}") from error
    try:
        tcp_address(said[META_KEY])
        return Shared(said[META_KEY], "", int(said.get(_WORLD, _DEFAULT_WORLD)))
    except (KeyError, ValueError) as error:
        raise Unusable(f"pool.memcache.config_file {options.config_file}: {META_KEY} or {_WORLD}: {error}") from None


@dataclass(frozen=True, slots=True)
class MemcacheConnection:
    """A client that is connected.

    :param store: ``memcache_hybrid.DistributedObjectStore``.
    :param number: its rank in the pool.
    :param version: of the package.
    """

    store: Any
    number: int
    version: str


def connect(options: MemcacheOptions, meta: Service) -> MemcacheConnection:
    """Connect a client. Blocks.

    :raises Unreachable: the MetaService does not answer, or does not let it in now.
    :raises Unusable: the package or what it needs is missing, or too old; or it refuses the options.
    """
    meta.check()
    if options.config_file:
        os.environ["MMC_LOCAL_CONFIG_PATH"] = options.config_file  # the library reads it when it is loaded
    library, version = load()
    _needs_cann(options)
    store = make_store(library)
    if not options.config_file and (code := store.setup(_local_config(library, options))) != 0:
        raise Unusable(_REFUSED.format(version=version, said=explain(code), protocol=options.protocol))
    code = join(store, options.device_id)
    if code != 0:
        meta.check()
        raise Unreachable(_NOT_LET_IN.format(version=version, said=explain(code), protocol=options.protocol))
    return MemcacheConnection(store, int(store.get_local_service_id()), version)


def load() -> tuple[Any, str]:
    """The module ``memcache_hybrid``, and the version of its package.

    :raises Unusable: it is missing, too old or lacks a library.
    """
    try:
        library = importlib.import_module("memcache_hybrid")
    except ModuleNotFoundError as error:
        raise Unusable(f"memcache's packages are not installed: pip install {PACKAGES}") from error
    except (ImportError, OSError) as error:
        raise Unusable(f"memcache's packages cannot be loaded: {error}; install what it names") from error
    version = importlib.metadata.version("memcache_hybrid")
    if not hasattr(library.DistributedObjectStore, "batch_write_finish"):
        raise Unusable(f"memcache {version} is too old: layers need {NEEDED}; pip install {PACKAGES}")
    return library, version


def make_store(library: Any) -> Any:
    """A client object. Its constructor takes over signals, in native code that hangs; they are given back here.

    As the kernel has them, not by Python's own means: those are for a process's main thread only.
    """
    libc = ctypes.CDLL(None)
    handlers = {number: ctypes.create_string_buffer(_SIGACTION_BYTES) for number in _SIGNALS}
    for number, handler in handlers.items():
        libc.sigaction(int(number), None, handler)
    store = library.DistributedObjectStore()
    for number, handler in handlers.items():
        libc.sigaction(int(number), handler, None)
    return store


def join(store: Any, device_id: int) -> int:
    """Let it join the pool; the library's code. An advantage that it gives the calling thread is taken back.

    It joins at nice -5, where it may, and stays there; so does every thread that is started later. A lane that copies
    would keep the server and the engine from their cores for milliseconds.
    """
    thread = threading.get_native_id()
    nice = os.getpriority(os.PRIO_PROCESS, thread)
    code = int(store.init(device_id))
    if os.getpriority(os.PRIO_PROCESS, thread) < nice:  # the other way back would need a privilege
        os.setpriority(os.PRIO_PROCESS, thread, nice)
    return code


def _local_config(library: Any, options: MemcacheOptions) -> Any:
    config = library.LocalConfig()
    config.meta_service_url = options.meta_service_url
    config.config_store_url = options.config_store_url
    config.hcom_url = options.hcom_url
    config.protocol = options.protocol
    config.dram_size = _megabytes(options.dram_size)
    config.max_dram_size = _megabytes(options.max_dram_size)
    config.hbm_size = "0"
    config.world_size = options.world_size
    config.client_timeout_seconds = max(1, options.timeout_ms // 1000)
    config.log_level = "error"
    return config


def _megabytes(nbytes: int) -> str:
    """As the library writes sizes; it rounds to 2 MB itself."""
    return f"{-(-nbytes // (1 << 20))}MB" if nbytes else "0"


def _needs_cann(options: MemcacheOptions) -> None:
    """:raises Unusable: the library would look for CANN in vain."""
    found = missing_cann()
    if not found:
        return
    advice = (
        "see the server's log for why the emulator is not active"
        if options.cann_emulator
        else "install CANN and source its set_env.sh before the server starts"
    )
    raise Unusable(f"memcache needs CANN, for every transport: {found}; {advice}")
