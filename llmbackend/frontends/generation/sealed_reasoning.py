"""Sealed text that a client carries from one request to the next: `encrypted_content` of the Responses API, `signature`
of Anthropic's thinking blocks.

A seal is a function of text and key, so an answer has the same bytes after an engine failure. With a secret key,
clients can neither read, alter nor forge sealed text; they can replay it, and see that two texts are equal. With the
fixed key below, anyone can read and create it; a seal then only shows that a text is complete.

The construction is a synthetic IV, as in RFC 5297: the HMAC of the text is its tag and the seed of the keystream.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, field

_VERSION = b"\x01"
_TAG_BYTES = 32
MIN_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class SealingKey:
    secret: bytes = field(repr=False)

    def seal(self, text: str) -> str:
        content = text.encode()
        tag = self._tag(content)
        return urlsafe_b64encode(_VERSION + tag + self._masked(content, tag)).decode()

    def unseal(self, sealed: str) -> str:
        """Raises ValueError for text that was altered or not sealed with this key."""
        try:
            data = urlsafe_b64decode(sealed.encode("ascii"))
        except (UnicodeEncodeError, binascii.Error):
            raise ValueError("not a sealed text") from None
        tag = data[1 : 1 + _TAG_BYTES]
        if len(tag) < _TAG_BYTES:
            raise ValueError("not a sealed text")
        if data[:1] != _VERSION:
            raise ValueError(f"sealed in format {data[0]}, this server reads format {_VERSION[0]}, or altered")
        content = self._masked(data[1 + _TAG_BYTES :], tag)
        if not hmac.compare_digest(tag, self._tag(content)):
            raise ValueError("sealed with another key, or altered")
        return content.decode()

    def _tag(self, content: bytes) -> bytes:
        return hmac.digest(self._derived(b"tag"), content, hashlib.sha256)

    def _masked(self, content: bytes, tag: bytes) -> bytes:
        size = len(content)
        mask = hashlib.shake_256(self._derived(b"mask") + tag).digest(size)
        return (int.from_bytes(content, "big") ^ int.from_bytes(mask, "big")).to_bytes(size, "big")

    def _derived(self, use: bytes) -> bytes:
        return hmac.digest(self.secret, b"llmbackend sealed reasoning, " + use, hashlib.sha256)


FIXED_KEY = SealingKey(b"llmbackend: the key of servers that were given none")


def sealing_key(secret: bytes) -> SealingKey:
    """secret: b"" for none"""
    return SealingKey(secret) if secret else FIXED_KEY
