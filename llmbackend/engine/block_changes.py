"""What an engine tells hosts of the KV blocks that its prefix cache has, on the device or in host memory.

For: the engine core, which makes these messages while a host asks for them, and hosts, which keep an index of them.
Does not know: how hashes are made (block_hashes.py). Invariants: a host that applies all messages of an engine, in
their order, knows exactly the blocks that the engine would find; no message holds a token.
"""

from __future__ import annotations

import msgspec


class BlockChanges(msgspec.Struct, frozen=True, array_like=True):
    """Since the message before. A block is in at most one of the two.

    stored       hashes of blocks that are found from now on, 8 bytes each
    removed      hashes of blocks that are not found any more
    is_snapshot  whether `stored` is all that is found, and what was known before is void
    """

    stored: bytes = b""
    removed: bytes = b""
    is_snapshot: bool = False
