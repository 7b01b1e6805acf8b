"""Which blocks the prefix cache would find, as hashes that other processes can compute, and what has changed of that.

For: the prefix cache, which tells it of each block that it registers or forgets while somebody asks for it, and the
engine core, which sends the changes. Does not know: blocks of memory, rows, requests. Invariant: it has exactly the
blocks that a look-up from the beginning of a text reaches. A block behind a forgotten one stays registered, but is not
reached any more: it is taken out together with that one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Protocol

from ..block_changes import BlockChanges
from ..block_hashes import joined, next_hash, root_hash

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
