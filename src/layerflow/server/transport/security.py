"""CURVE for clients on other hosts: an encrypted connection, and only keys on the allow-list get in."""

from __future__ import annotations

from pathlib import Path

from zmq.utils import z85

from layerflow.config.settings import ServerSettings
from layerflow.errors import ConfigError, Unsupported
from layerflow.wire.zmtp import Mechanism

Z85_KEY = 40
"""Characters of a CURVE key in Z85 (rfc.zeromq.org/spec/32)."""


class Curve:
    """The server's key, and who may connect with CURVE.

    :ivar allowed: public keys in Z85.
    """

    def __init__(self, secret: bytes, allowed: frozenset[bytes]) -> None:
        try:
            from layerflow.server.transport.curve import CurveServer  # noqa: PLC0415 - libsodium, which few servers need
        except ImportError as error:
            raise Unsupported(f"server.tcp_endpoint needs PyNaCl: pip install pynacl ({error})") from None
        self.allowed = allowed
        self._secret = z85.decode(secret)
        self._mechanism = CurveServer

    def mechanism(self) -> Mechanism:
        """One connection's end."""
        return self._mechanism(self._secret, self.allowed.__contains__)


def open_curve(settings: ServerSettings) -> Curve:
    """What the settings say.

    :raises ConfigError: a key file is missing or malformed.
    :raises Unsupported: PyNaCl is not installed.
    """
    assert settings.curve_secret_key_file is not None
    assert settings.curve_allowed_keys_file is not None
    secret = read_keys(settings.curve_secret_key_file)
    allowed = read_keys(settings.curve_allowed_keys_file)
    if len(secret) != 1:
        raise ConfigError(f"{settings.curve_secret_key_file}: exactly one secret key belongs in it")
    return Curve(secret[0], frozenset(allowed))


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
