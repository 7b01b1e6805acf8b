"""Which blocks the prefix cache would find, as hashes that other processes can compute, and their changes.

For: the prefix cache, which reports each block that it registers or forgets while somebody asks for it; the engine
core, which sends the changes; hosts, which hash a prompt to find the engine with its longest prefix. Does not know:
blocks of memory, rows, requests. Invariants: the journal has exactly the blocks that a look-up from the beginning of a
text reaches: a block behind a forgotten one stays registered, but is reported as removed with it; a block's hash
follows from the salt and from all tokens up to the block's last one. Hashes are 64 bits of BLAKE2b: two texts that
share one by chance cost a worse choice of an engine, never a wrong token, because engines look blocks up by their
tokens.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Final, Protocol

import msgspec

from ..messages import BlockChanges

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


Salt = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block that is found.

    hash    of it, and of all before it
    before  identity of the block before it, or the salt of its text
    salt    of its text
    """

    hash: bytes
    before: int | Salt
    salt: Salt


class BlockListener(Protocol):
    """Hears of each change as it happens."""

    def stored(self, block: FoundBlock, before: bytes | None, tokens: bytes) -> None:
        """before: the hash of the block before it; None for the first of a text. tokens: int32"""

    def removed(self, block_hash: bytes) -> None: ...


class BlockJournal:
    def __init__(self, listener: BlockListener | None = None) -> None:
        self._found: dict[int, FoundBlock] = {}
        """By identity."""
        self._num_behind: Counter[int] = Counter()
        """By identity: how many found blocks are directly behind it."""
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._is_snapshot_due = False
        self._listener = listener

    def stored(self, identity: int, before: int | Salt, tokens: bytes) -> None:
        """A block was registered under a new identity."""
        if isinstance(before, tuple):
            hash_before, salt = root_hash(before), before
        elif (block := self._found.get(before)) is not None:
            hash_before, salt = block.hash, block.salt
            self._num_behind[before] += 1
        else:
            return
        found = FoundBlock(next_hash(hash_before, tokens), before, salt)
        self._found[identity] = found
        if self._removed.pop(found.hash, found) is found:
            self._stored[found.hash] = None
        if self._listener is not None:
            self._listener.stored(found, None if isinstance(before, tuple) else hash_before, tokens)

    def removed(self, identity: int) -> None:
        """A block was forgotten."""
        if identity not in self._found:
            return
        behind = self._all_behind(identity) if self._num_behind[identity] else ()
        for one in (*behind, identity):
            self._remove(one)

    def ask_for_snapshot(self) -> None:
        """The next changes are all that is found."""
        self._is_snapshot_due = True

    @property
    def has_changes(self) -> bool:
        return self._is_snapshot_due or bool(self._stored or self._removed)

    def take(self) -> BlockChanges | None:
        """What has changed since the last call; None = nothing."""
        if not self.has_changes:
            return None
        if self._is_snapshot_due:
            changes = BlockChanges(joined(block.hash for block in self._found.values()), b"", True)
        else:
            changes = BlockChanges(joined(self._stored), joined(self._removed))
        self._stored, self._removed, self._is_snapshot_due = {}, {}, False
        return changes

    def _remove(self, identity: int) -> None:
        block = self._found.pop(identity)
        del self._num_behind[identity]
        if isinstance(block.before, int):
            self._num_behind[block.before] -= 1
        if self._stored.pop(block.hash, block) is block:
            self._removed[block.hash] = None
        if self._listener is not None:
            self._listener.removed(block.hash)

    def _all_behind(self, identity: int) -> list[int]:
        """All found blocks behind one, the farthest first. Rare: the end of a text is evicted before its beginning."""
        behind: defaultdict[int | Salt, list[int]] = defaultdict(list)
        for one, block in self._found.items():
            behind[block.before].append(one)
        reached = [*behind[identity]]
        for one in reached:
            reached += behind[one]
        return reached[::-1]
