"""CURVE for clients on other hosts: an encrypted socket, and only keys on the allow-list get in (ZAP)."""

from __future__ import annotations

from pathlib import Path

import structlog
import zmq
from zmq.auth.thread import ThreadAuthenticator

from layerflow.config.settings import ServerSettings
from layerflow.errors import ConfigError, Unsupported

Z85_KEY = 40
"""Characters of a CURVE key in Z85 (rfc.zeromq.org/spec/32)."""

log = structlog.get_logger("layerflow.server.transport.security")


class _AllowList:
    """Accepts the keys it was made with; asked by the authenticator for every connection."""

    def __init__(self, keys: frozenset[bytes]) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        allowed = key in self._keys
        if not allowed:
            log.warning("curve_key_refused", key=key.decode("ascii", "replace"))
        return allowed


class Curve:
    """The running authenticator of one context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: frozenset[bytes]) -> None:
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
    allowed = read_keys(settings.curve_allowed_keys_file)
    if len(secret) != 1:
        raise ConfigError(f"{settings.curve_secret_key_file}: exactly one secret key belongs in it")
    curve = Curve(context, frozenset(allowed))
    socket.curve_secretkey = secret[0]
    socket.curve_publickey = zmq.curve_public(secret[0])
    socket.curve_server = True
    return curve


def read_keys(path: Path) -> list[bytes]:
    """One Z85 key per line, with a comment behind it or not; empty lines and ``# comment`` lines are skipped.

    Z85 has ``#`` itself: a word of 40 characters is a key, whatever it begins with.

    :raises ConfigError: the file cannot be read or a line is no key.
    """
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read CURVE keys: {error}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        word, _, rest = line.strip().partition(" ")
        if len(word) == Z85_KEY and (not rest.strip() or rest.strip().startswith("#")):
            keys.append(word.encode("ascii"))
        elif word and not word.startswith("#"):
            raise ConfigError(f"{path}, line {number}: a CURVE key has {Z85_KEY} Z85 characters, and no blank")
    return keys
