"""From options to a Mooncake client that is set up. Checks first: the library explains little and waits long."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

from layerflow.backends import free_ports
from layerflow.hosts.backend import Unusable
from layerflow.hosts.mooncake.client import explain
from layerflow.hosts.mooncake.plugin import MooncakeSettings
from layerflow.hosts.shared.options import HostOptions
from layerflow.hosts.shared.service import Service

NEEDED = "0.3.13"
_PACKAGE = f"mooncake-transfer-engine-non-cuda>={NEEDED} (or mooncake-transfer-engine, built for CUDA)"
# The ranges need no staging memory: the arena is registered, and everything is copied from and to it.
_LOCAL_BUFFER_BYTES = 0
_MIN_TRANSFER_S = 5  # the library takes no smaller MC_TRANSFER_TIMEOUT


class MooncakeOptions(MooncakeSettings, HostOptions):
    """The section ``[pool.mooncake]``, in the host process."""


@dataclass(frozen=True, slots=True)
class MooncakeConnection:
    """A client that is set up.

    :param store: ``mooncake.store.MooncakeDistributedStore``.
    :param replicate: ``mooncake.store.ReplicateConfig`` for new objects.
    :param name: what other clients call this one's segment.
    :param version: of the package.
    """

    store: Any
    replicate: Any
    name: str
    version: str


def connect(options: MooncakeOptions, master: Service) -> MooncakeConnection:
    """Set up a client. Blocks, and holds the GIL for most of that time.

    :raises Unreachable: the master does not answer.
    :raises Unusable: the package is missing, too old or lacks a library; or it refuses the options.
    """
    master.reach()  # set-up waits up to 90 s for a master that is not there
    _limit_waits(options.timeout_ms)
    library, version = load()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if options.segment_size > memory:
        raise Unusable(
            f"pool.mooncake.segment_size = {options.segment_size}: this machine has {memory} bytes; choose less"
        )
    name = f"{options.hostname}:{options.port or free_ports(1)[0]}"  # without a port, set-up tries 20 of them
    store = library.MooncakeDistributedStore()
    code = store.setup(
        name,
        options.metadata_server,
        options.segment_size,
        _LOCAL_BUFFER_BYTES,
        options.protocol,
        options.devices,
        options.master,
    )
    if code != 0:
        master.reach()
        raise Unusable(
            f"Mooncake {version} refused to set up {name} with the master {options.master} ({explain(code)}); check "
            f"protocol = {options.protocol!r}, devices, metadata_server, segment_size and hostname in pool.mooncake, "
            "and the host's log"
        )
    replicate = library.ReplicateConfig()
    replicate.replica_num = options.replicas
    if options.preferred_segment:
        replicate.preferred_segment = options.preferred_segment
    if options.soft_pin:
        replicate.soft_pin_action = library.SoftPinAction.ENABLE
    return MooncakeConnection(store, replicate, name, version)


def load() -> tuple[Any, str]:
    """The module ``mooncake.store``, and the version of its package.

    :raises Unusable: it is missing, too old or lacks a library.
    """
    try:
        library = importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        if error.name not in ("mooncake", "mooncake.store"):
            raise Unusable(f"Mooncake's package cannot be loaded: {error}; install {error.name}") from error
        raise Unusable(f"Mooncake's package is not installed: pip install {_PACKAGE}") from error
    except ImportError as error:
        hint = "apt-get install libibverbs1, or rdma-core" if "libibverbs" in str(error) else "install what it names"
        raise Unusable(f"Mooncake's package cannot be loaded: {error}; {hint}") from error
    version = _version()
    if not hasattr(library.MooncakeDistributedStore, "batch_put_session_start"):
        raise Unusable(f"Mooncake {version} is too old: layers need its sessions; pip install {_PACKAGE}")
    return library, version


def _version() -> str:
    names = importlib.metadata.packages_distributions().get("mooncake", [])
    return importlib.metadata.version(names[0]) if names else "of unknown version"


def _limit_waits(timeout_ms: int) -> None:
    """The library reads these once, when it is loaded.

    What may hang has given up before the server kills the host, and its connection is dropped then, so that nothing
    lands late. Not so with MC_TRANSFER_TIMEOUT: what it gives up is still under way, so it must not come first.
    """
    seconds = max(1, timeout_ms * 3 // 5000)
    os.environ["MC_RPC_TIMEOUT_MS"] = str(max(1, timeout_ms * 2 // 5))
    os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] = str(seconds)
    os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] = str(seconds)
    os.environ["MC_TRANSFER_TIMEOUT"] = str(max(_MIN_TRANSFER_S, timeout_ms * 10 // 1000))
