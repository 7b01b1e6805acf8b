"""Checksums of weights, chunk by chunk, as fast as memory is read.

For: image_file.py. Does not know: files, weights. Why not a CRC of the bytes: it takes three times as long as reading
them. Invariant: a chunk in which one word differs, or two pages are exchanged, has another checksum; against somebody
who wants a collision it is no protection (the folder's owner and mode are).
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint32]

CHUNK_BYTES: Final = 2 << 20
PAGE_BYTES: Final = 4096
"""Chunks are whole pages."""


def chunk_checksum(chunk: Bytes) -> int:
    """Of whole pages: a CRC of their sums, word by word over all pages and page by page over all words."""
    words = chunk.view(np.uint64).reshape(-1, PAGE_BYTES // 8)
    return zlib.crc32(words.sum(axis=1), zlib.crc32(words.sum(axis=0)))


def num_chunks(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
