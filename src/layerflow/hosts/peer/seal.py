"""Tags of what crosses a link, from the bytes that the exporter has read to those that lie in the importer's memory.

AES-256-GMAC: where the processor has carry-less multiplication it is as quick as a checksum without a key.
"""

from __future__ import annotations

import hmac
import os
import struct

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from layerflow.wire.peer_link import TAG_NONCE_BYTES

_RANGE = struct.Struct("<16s24sQQ")
"""Token of the lease, the object's key, first byte within the object, bytes."""
MAX_RANGE_BYTES = (1 << 31) - 1
"""That one tag can cover."""


class RangeSeal:
    """Tags ranges of objects under the key of one lease. Any thread.

    A tag covers the lease, the object, the range and the bytes: a range that was altered, cut, or put in the place of
    another has no tag that fits. The same range again does fit: its bytes never change.

    :param lease_key: 32 bytes, which reached the reader over the control connection.
    """

    def __init__(self, lease_key: bytes, token: bytes) -> None:
        self._cipher, self._token = AESGCM(lease_key), token

    def tag(self, key: bytes, start: int, data: memoryview) -> bytes:
        """Nonce and code.

        :param key: of the object. :param start: where `data` begins within it.
        """
        nonce = os.urandom(TAG_NONCE_BYTES)
        return nonce + self._code(nonce, key, start, data)

    def fits(self, tag: bytes, key: bytes, start: int, data: memoryview) -> bool:
        """Are these the bytes for which the other end has made `tag`?"""
        return hmac.compare_digest(tag[TAG_NONCE_BYTES:], self._code(tag[:TAG_NONCE_BYTES], key, start, data))

    def _code(self, nonce: bytes, key: bytes, start: int, data: memoryview) -> bytes:
        # What is small is encrypted, so that what is large needs no copy to stand behind it: GCM's code covers both.
        covered = _RANGE.pack(self._token, key, start, data.nbytes)
        return bytes(self._cipher.encrypt(nonce, covered, data)[_RANGE.size :])
