"""CURVE for clients on other hosts: an encrypted socket, and only keys on the allow-list get in (ZAP)."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import structlog
import zmq
from zmq.auth.thread import ThreadAuthenticator

from layerflow.config.settings import ServerSettings
from layerflow.errors import ConfigError, Unsupported
from layerflow.wire.rights import UNNAMED, Rights, parse_rights

Z85_KEY = 40
"""Characters of a CURVE key in Z85 (rfc.zeromq.org/spec/32)."""

NAME_ROLES = "write look, read, peer or act=ENGINE behind each key; a key without roles will have none in 0.3"

log = structlog.get_logger("layerflow.server.transport.security")


class _AllowList:
    """Accepts the keys it was made with; asked by the authenticator for every connection."""

    def __init__(self, keys: Collection[bytes]) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        allowed = key in self._keys
        if not allowed:
            log.warning("curve_key_refused", key=key.decode("ascii", "replace"))
        return allowed


class Curve:
    """The running authenticator of one context.

    :ivar allowed: what each key may do.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Mapping[bytes, Rights]) -> None:
        self.allowed = allowed
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=_AllowList(allowed))

    def close(self) -> None:
        """Stop the authenticator."""
        self._authenticator.stop()


def open_curve(context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], settings: ServerSettings) -> Curve:
    """Make `socket` a CURVE server; call before it binds.

    :raises ConfigError: a key file is missing or malformed.
    :raises Unsupported: libzmq was built without CURVE.
    """
    if not zmq.has("curve"):
        raise Unsupported("this libzmq has no CURVE; install pyzmq's own wheels or leave server.tcp_endpoint empty")
    assert settings.curve_secret_key_file is not None
    assert settings.curve_allowed_keys_file is not None
    secret = read_keys(settings.curve_secret_key_file)
    allowed = read_allowed(settings.curve_allowed_keys_file)
    if len(secret) != 1:
        raise ConfigError(f"{settings.curve_secret_key_file}: exactly one secret key belongs in it")
    curve = Curve(context, allowed)
    socket.curve_secretkey = secret[0]
    socket.curve_publickey = zmq.curve_public(secret[0])
    socket.curve_server = True
    return curve


def read_keys(path: Path) -> list[bytes]:
    """One Z85 key per line, with a comment behind it or not; empty lines and ``# comment`` lines are skipped.

    Z85 has ``#`` itself: a word of 40 characters is a key, whatever it begins with.

    :raises ConfigError: the file cannot be read or a line is no key.
    """
    keys = []
    for number, key, words in _lines(path):
        if words:
            raise ConfigError(f"{path}, line {number}: nothing but a comment belongs behind a key")
        keys.append(key)
    return keys


def read_allowed(path: Path) -> dict[bytes, Rights]:
    """What each key of an allow-list may do: one key a line, as of :func:`read_keys`, with its roles behind it.

    A key in several lines has the roles of all. One without any has those of a reading server, which is logged.

    :raises ConfigError: the file cannot be read, a line is no key, or a word behind it no role.
    """
    given: dict[bytes, list[str]] = {}
    for number, key, words in _lines(path):
        try:
            parse_rights(words, "")
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        given.setdefault(key, []).extend(words)
    if unnamed := [key.decode()[:8] for key, words in given.items() if not words]:
        log.warning("curve_keys_without_roles", file=str(path), keys=unnamed, roles=list(UNNAMED), advice=NAME_ROLES)
    return {key: parse_rights(words or UNNAMED, key.decode()) for key, words in given.items()}


def _lines(path: Path) -> Iterator[tuple[int, bytes, list[str]]]:
    """Number, key, and the words between it and a comment.

    :raises ConfigError: the file cannot be read or a line is no key.
    """
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read CURVE keys: {error}") from None
    for number, line in enumerate(lines, 1):
        word, *rest = line.split() or [""]
        if len(word) == Z85_KEY:
            words = list(itertools.takewhile(lambda word: not word.startswith("#"), rest))
            yield number, word.encode("ascii"), words
        elif word and not word.startswith("#"):
            raise ConfigError(f"{path}, line {number}: a CURVE key has {Z85_KEY} Z85 characters, and no blank")
