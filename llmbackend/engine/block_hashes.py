"""A number for each full block of a text, the same in every process: how engines and hosts speak of cached prefixes.

For: the engine's journal of cached blocks, and hosts that look for the engine with a text's longest prefix. Does not
know: where a block is held, or by whom. Invariant: a block's hash follows from the salt and from all tokens up to the
block's last one, so that equal hashes mean equal beginnings. They are 64 bits of BLAKE2b: two texts that share one by
chance cost a worse choice of an engine, never a wrong token, because engines look blocks up by their tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import msgspec

HASH_BYTES: Final = 8
_NUMBERS: Final = "Q"
_TOKENS: Final = "i"


@lru_cache(maxsize=1024)
def root_hash(salt: tuple[str, ...]) -> bytes:
    """What is before the first block of a text with this salt."""
    return blake2b(msgspec.msgpack.encode(salt), digest_size=HASH_BYTES).digest()


def next_hash(before: bytes, token_bytes: bytes) -> bytes:
    """Of the block with these tokens (int32, one after the other) behind the one whose hash is `before`."""
    return blake2b(before + token_bytes, digest_size=HASH_BYTES).digest()


def prefix_hashes(salt: tuple[str, ...], token_ids: Sequence[int], block_size: int) -> array[int]:
    """Of all blocks of a text that a prefix cache may have: the full ones, without its last token. uint64 [blocks]."""
    size, before = block_size * array(_TOKENS).itemsize, root_hash(salt)
    data = array(_TOKENS, token_ids).tobytes()
    hashes = bytearray()
    for end in range(size, (len(token_ids) - 1) // block_size * size + 1, size):
        before = blake2b(before + data[end - size : end], digest_size=HASH_BYTES).digest()
        hashes += before
    return numbers(bytes(hashes))


def numbers(hashes: bytes) -> array[int]:
    """The hashes, one after the other, as integers. uint64 [len(hashes) / 8]."""
    return array(_NUMBERS, hashes)


def joined(hashes: Iterable[bytes]) -> bytes:
    """What `numbers` takes apart."""
    return b"".join(hashes)
