"""Who may say what: each message asks for a role, and each client has some, by the door and the key it came with."""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from layerflow.errors import ConfigError, ProtocolError
from layerflow.wire import messages as wire
from layerflow.wire.messages import Message


class Role(enum.StrEnum):
    """What a client is. One at another host has those that the allow-list gives its key."""

    LOOK = "look"  #: asks what is stored, and for the status; leases what it finds, under a name of its own
    READ = "read"  #: a server that reads what this one lends
    PEER = "peer"  #: a server that keeps hand-offs here, too, and releases them; reads
    ACT = "act"  #: speaks for engines that the list names: resets them, opens and ends their hand-offs; looks, and
    #: reads which prompts are stored
    LOCAL = "local"  #: a process of this machine and user


_INCLUDED = {Role.PEER: Role.READ, Role.ACT: Role.LOOK}

NEEDED: Mapping[type[Message], Role | None] = {
    wire.Hello: Role.LOOK,
    wire.Attach: Role.LOOK,
    wire.Lookup: Role.LOOK,
    wire.Missed: Role.LOOK,
    wire.DropLease: Role.LOOK,
    wire.StatusRequest: Role.LOOK,
    wire.Beat: None,
    wire.Bye: None,
    wire.OpenStep: Role.LOCAL,
    wire.Report: Role.LOCAL,
    wire.Abort: Role.LOCAL,
    wire.Purge: Role.LOCAL,
    wire.RecordRequest: Role.LOCAL,
    wire.TraceRequest: Role.LOCAL,
    wire.TrySettings: Role.LOCAL,
    wire.Spans: Role.LOCAL,
    wire.Reset: Role.ACT,
    wire.OpenHandoff: Role.ACT,
    wire.EndHandoff: Role.ACT,
    wire.ReleaseHandoff: Role.ACT,
    wire.WatchHandoff: Role.ACT,
    wire.DescribeChunks: Role.ACT,
    wire.ReadChunks: Role.ACT,
    wire.PeerHello: Role.READ,
    wire.PeerLookup: Role.READ,
    wire.PeerRelease: Role.READ,
    wire.PeerBeat: Role.READ,
    wire.PeerCompare: Role.READ,
    wire.PeerOpenHandoff: Role.PEER,
    wire.PeerEndHandoff: Role.PEER,
    wire.PeerReleaseHandoff: Role.PEER,
}
"""Which role each message asks for; None = every client that was let in."""


class NotAllowed(ProtocolError):
    """A client may not say this, and nothing has changed; `code` is the Problem's code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Rights:
    """What one client may do.

    :param engines: patterns of the names of engines that it acts for.
    :param key: its public key; empty = it is of this machine.
    :param process: of this machine, where the socket that it came by tells; 0 = it does not.
    """

    roles: frozenset[Role]
    engines: tuple[str, ...] = ()
    key: str = ""
    process: int = 0

    def acts_for(self, engine: str) -> bool:
        """May it change the state of this engine?"""
        return Role.ACT in self.roles and any(fnmatch.fnmatchcase(engine, pattern) for pattern in self.engines)

    def name_of(self, engine: str) -> str:
        """Under which name a client that calls itself `engine` is known: what it leases is no other engine's."""
        return engine if self.acts_for(engine) else f"{engine}@{self.key[:8]}"

    def check(self, message: Message, engine: str = "") -> None:
        """:param engine: for which the client speaks, as it is known here.

        :raises NotAllowed: it may not say this.
        """
        role = NEEDED[type(message)]
        if isinstance(message, wire.Lookup) and (message.handoff or message.servers):
            role = Role.ACT  # it claims the hand-off, and has this server attach to others
        if role is None or (role in self.roles and (role is not Role.ACT or self.acts_for(engine))):
            return
        what = type(message).__name__
        if role is Role.LOCAL:
            raise NotAllowed("local_only", f"{what} is for clients of this machine")
        wanted = f"act={engine.partition('@')[0]}" if role is Role.ACT else role.value
        raise NotAllowed(
            "not_allowed",
            f"{what} asks for the role {wanted}; give it to key {self.key[:8]}... in server.curve_allowed_keys_file",
        )


HERE = Rights(frozenset(Role), ("*",))
"""Of clients of this machine and user."""
UNNAMED = (Role.LOOK.value, Role.PEER.value)
"""Words of a key without any, for one release: what a reading server does."""


def parse_rights(words: Iterable[str], key: str) -> Rights:
    """What a line of the allow-list gives a key.

    :param words: ``look``, ``read``, ``peer``, ``act=NAME``; a name may have ``*`` and ``?``.
    :raises ConfigError: a word is none of these.
    """
    roles: set[Role] = set()
    engines: list[str] = []
    for word in words:
        name, given, engine = word.partition("=")
        if name not in (Role.LOOK, Role.READ, Role.PEER, Role.ACT) or (name == Role.ACT) != bool(given and engine):
            raise ConfigError(f"{word!r} is no role; there are look, read, peer and act=ENGINE")
        roles.add(Role(name))
        engines += [engine] if engine else []
    roles |= {_INCLUDED[role] for role in roles if role in _INCLUDED}
    return Rights(frozenset(roles), tuple(engines), key)
