"""CURVE for clients on other hosts: an encrypted connection, and only keys on the allow-list get in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import structlog
from zmq.utils import z85

from layerflow.config.settings import ServerSettings
from layerflow.errors import ConfigError, Unsupported
from layerflow.wire.rights import UNNAMED, Rights, parse_rights
from layerflow.wire.zmtp import Mechanism

Z85_KEY = 40
"""Characters of a CURVE key in Z85 (rfc.zeromq.org/spec/32)."""

NAME_ROLES = "write look, read, peer or act=ENGINE behind each key; a key without roles will have none in 0.3"

log = structlog.get_logger("layerflow.server.transport.security")


class Curve:
    """The server's key, and who may connect with CURVE.

    :ivar allowed: by public key in Z85, what its client may do.
    """

    def __init__(self, secret: bytes, allowed: Mapping[bytes, Rights]) -> None:
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
    allowed = read_allowed(settings.curve_allowed_keys_file)
    if len(secret) != 1:
        raise ConfigError(f"{settings.curve_secret_key_file}: exactly one secret key belongs in it")
    return Curve(secret[0], allowed)


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
