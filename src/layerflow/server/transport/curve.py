"""CurveZMQ (https://rfc.zeromq.org/spec/26/): a server's end of the handshake and of sealed messages, without I/O.

The boxes are libsodium's, by PyNaCl. A client shows its long-term key in the last step of the handshake, in a box that
only its secret key can have made, for this connection alone.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable

from nacl import bindings as sodium
from nacl.exceptions import CryptoError
from zmq.utils import z85

from layerflow.errors import ProtocolError
from layerflow.wire.zmtp import READY, Rejected, check_client, command, metadata

KEY_BYTES = 32
_HELLO_BYTES, _COOKIE_BYTES = 2 + 72 + KEY_BYTES + 8 + 80, 96
_LONG_NONCE, _SHORT_NONCE = struct.Struct("16s"), struct.Struct(">Q")
_MESSAGE = b"\x07MESSAGE"
_REFUSED = b"\x05ERROR\x03400"
"""As ZAP's status: libzmq does not try again."""


class CurveServer:
    """One connection's end.

    :param secret: the server's long-term secret key.
    :param allowed: may the client with this public key, in Z85, connect? Asked when the client has shown that it has
        the secret half.
    """

    name = b"CURVE"
    sealing = True

    def __init__(self, secret: bytes, allowed: Callable[[bytes], bool]) -> None:
        self.ready = False
        self.client_key = b""
        self._secret = secret
        self._allowed = allowed
        self._client_transient = b""
        self._own_secret = self._cookie_key = self._shared = b""
        self._heard = 0  # the client's last nonce: each is larger than the one before
        self._sent = 0

    def command(self, name: bytes, body: bytes) -> bytes:
        if name == b"HELLO" and not self._cookie_key:
            return self._welcome(body)
        if name == b"INITIATE" and self._cookie_key and not self._shared:
            return self._admit(body)
        raise ProtocolError(f"the command {name[:16]!r}, out of turn in CURVE's handshake")

    def open(self, payload: bytes) -> tuple[int, bytes]:
        if payload[:8] != _MESSAGE or len(payload) < 16 + 16 + 1:
            raise ProtocolError("no sealed message")
        content = self._opened(b"CurveZMQMESSAGEC", payload[8:16], payload[16:])
        return content[0], content[1:]

    def seal(self, flags: int, content: bytes) -> bytes:
        nonce = self._next_nonce()
        box = sodium.crypto_box_afternm(bytes((flags,)) + content, b"CurveZMQMESSAGES" + nonce, self._shared)
        return b"".join((_MESSAGE, nonce, box))

    def _welcome(self, hello: bytes) -> bytes:
        """HELLO proves that the client knows the server's key; WELCOME has a key for this connection."""
        if len(hello) != _HELLO_BYTES or hello[0] != 1:
            raise ProtocolError("a malformed HELLO of CURVE")
        client, nonce, box = hello[74:106], hello[106:114], hello[114:]
        self._heard = _SHORT_NONCE.unpack(nonce)[0]
        try:
            sodium.crypto_box_open(box, b"CurveZMQHELLO---" + nonce, client, self._secret)
            own_public, self._own_secret = sodium.crypto_box_keypair()
            self._client_transient = client
            self._cookie_key = secrets.token_bytes(KEY_BYTES)
            cookie_nonce, nonce16 = secrets.token_bytes(16), secrets.token_bytes(16)
            cookie = cookie_nonce + sodium.crypto_secretbox(
                client + self._own_secret, b"COOKIE--" + cookie_nonce, self._cookie_key
            )
            box = sodium.crypto_box(own_public + cookie, b"WELCOME-" + nonce16, client, self._secret)
        except (CryptoError, ValueError) as error:
            raise ProtocolError(f"CURVE: the client does not have this server's public key ({error})") from None
        return b"\x07WELCOME" + nonce16 + box

    def _admit(self, initiate: bytes) -> bytes:
        """INITIATE vouches that the client has the secret of its long-term key."""
        cookie, nonce, box = initiate[:_COOKIE_BYTES], initiate[96:104], initiate[104:]
        if len(box) < 16 + KEY_BYTES + 16 + 80:
            raise ProtocolError("a malformed INITIATE of CURVE")
        try:
            told = sodium.crypto_secretbox_open(cookie[16:], b"COOKIE--" + cookie[:16], self._cookie_key)
            if told != self._client_transient + self._own_secret:
                raise CryptoError("another connection's cookie")
            self._shared = sodium.crypto_box_beforenm(self._client_transient, self._own_secret)
            content = self._opened(b"CurveZMQINITIATE", nonce, box)
            key, vouch_nonce, vouch, properties = content[:32], content[32:48], content[48:128], content[128:]
            vouched = sodium.crypto_box_open(vouch, b"VOUCH---" + vouch_nonce, key, self._own_secret)
        except (CryptoError, ValueError) as error:
            raise ProtocolError(f"CURVE: a forged INITIATE ({error})") from None
        if vouched[:32] != self._client_transient or vouched[32:] != sodium.crypto_scalarmult_base(self._secret):
            raise ProtocolError("CURVE: the client's key is vouched for another connection")
        shown: bytes = z85.encode(key)
        if not self._allowed(shown):
            raise Rejected(f"the key {shown.decode()} is not on the allow-list", _REFUSED)
        check_client(properties)
        self.client_key, self.ready = shown, True
        nonce = self._next_nonce()
        return command(READY, nonce + sodium.crypto_box_afternm(metadata(), b"CurveZMQREADY---" + nonce, self._shared))

    def _opened(self, prefix: bytes, nonce: bytes, box: bytes) -> bytes:
        number = _SHORT_NONCE.unpack(nonce)[0]
        if number <= self._heard:
            raise ProtocolError("CURVE: a message comes a second time, or out of order")
        try:
            content = sodium.crypto_box_open_afternm(box, prefix + nonce, self._shared)
        except (CryptoError, ValueError) as error:
            raise ProtocolError(f"CURVE: a message that the client has not sealed ({error})") from None
        self._heard = number
        return bytes(content)

    def _next_nonce(self) -> bytes:
        self._sent += 1
        return _SHORT_NONCE.pack(self._sent)
