"""Maps full blocks of tokens, together with all tokens before them, to the KV blocks that store their keys and values.

Used by the pools of KV blocks. Independent of rows, requests, and which blocks are in use. The idea: a registered block
has an identity, a number that is never reused, and is found under the key (identity of the preceding block, its
tokens); for the first block of a sequence, the request's salt takes the place of the identity. Invariant: lookups are
exact. A dict finds a key by a fast hash (SipHash, randomly keyed in each process) and then compares it in full, so a
collision costs a comparison and never yields a wrong block; and an identity stands for one salt and one sequence of
tokens, so equal keys mean equal sequences from the first token on.

When a block is forgotten, its identity is lost: blocks registered after it are no longer found, and none can be
registered after it.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np

from ..messages import BlockChanges

if TYPE_CHECKING:
    import numpy.typing as npt

HASH_BYTES: Final = 8
_NUMBERS: Final = "Q"
_TOKENS: Final = "i"


@lru_cache(maxsize=1024)
def root_hash(salt: tuple[str, ...]) -> bytes:
    """The hash that precedes the first block of a sequence with this salt."""
    return blake2b(msgspec.msgpack.encode(salt), digest_size=HASH_BYTES).digest()


def next_hash(before: bytes, token_bytes: bytes) -> bytes:
    """The hash of the block with these tokens (concatenated int32) that follows the block with the hash `before`."""
    return blake2b(before + token_bytes, digest_size=HASH_BYTES).digest()


def prefix_hashes(salt: tuple[str, ...], token_ids: Sequence[int], block_size: int) -> array[int]:
    """The hashes of all blocks of a sequence that a prefix cache may have: the full ones, excluding the last token.
    uint64 [blocks]."""
    size, before = block_size * array(_TOKENS).itemsize, root_hash(salt)
    data = array(_TOKENS, token_ids).tobytes()
    hashes = bytearray()
    for end in range(size, (len(token_ids) - 1) // block_size * size + 1, size):
        before = next_hash(before, data[end - size : end])
        hashes += before
    return numbers(bytes(hashes))


def numbers(hashes: bytes) -> array[int]:
    """Concatenated hashes as integers. uint64 [len(hashes) / 8]."""
    return array(_NUMBERS, hashes)


Salt = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FoundBlock:
    """A block that can be found.

    hash    of the block and all before it
    before  identity of the preceding block, or the salt of its sequence
    salt    of its sequence
    """

    hash: bytes
    before: int | Salt
    salt: Salt


class BlockListener(Protocol):
    """Notified of each change as it happens."""

    def stored(self, block: FoundBlock, before: bytes | None, tokens: bytes) -> None:
        """before: hash of the preceding block; None for the first of a sequence. tokens: int32"""

    def removed(self, block_hash: bytes) -> None: ...


class BlockJournal:
    """The blocks that the prefix cache would find, as hashes that other processes can compute, and their changes.
    Exists only while there is a receiver.

    It contains exactly the blocks that a lookup from the beginning of a sequence reaches: a block after a forgotten one
    stays registered, but is reported as removed. A block's hash depends on the salt and on all tokens up to the end of
    the block. Hashes are 64 bits of BLAKE2b. If two sequences collide, a worse engine may be chosen, but tokens are
    never wrong, because engines look blocks up by their tokens.
    """

    def __init__(self, listener: BlockListener | None = None) -> None:
        self._found: dict[int, FoundBlock] = {}
        """By identity."""
        self._num_behind: Counter[int] = Counter()
        """By identity: the number of found blocks directly after it."""
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
        if identity not in self._found:
            return
        behind = self._all_behind(identity) if self._num_behind[identity] else ()
        for one in (*behind, identity):
            self._remove(one)

    def ask_for_snapshot(self) -> None:
        """Makes the next changes a snapshot of all blocks that can be found."""
        self._is_snapshot_due = True

    @property
    def has_changes(self) -> bool:
        return self._is_snapshot_due or bool(self._stored or self._removed)

    def take(self) -> BlockChanges | None:
        """The changes since the last call; None = none."""
        if not self.has_changes:
            return None
        if self._is_snapshot_due:
            changes = BlockChanges(b"".join([block.hash for block in self._found.values()]), b"", True)
        else:
            changes = BlockChanges(b"".join(self._stored), b"".join(self._removed))
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
        """All found blocks after this one, farthest first. Rare: the end of a sequence is evicted before its
        beginning."""
        behind: defaultdict[int | Salt, list[int]] = defaultdict(list)
        for one, block in self._found.items():
            behind[block.before].append(one)
        reached = [*behind[identity]]
        for one in reached:
            reached += behind[one]
        return reached[::-1]


Parent = int | Salt
"""What precedes a block: the identity of another block, or the salt at the beginning of a sequence."""
Key = tuple[Parent, bytes]
NOT_REGISTERED = 0


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A cached prefix of a sequence.

    blocks      int32 [n]  its blocks
    identities  int64 [n]  their identities
    parent      the identity of the last block, or the salt
    missing     the key of the next full block, which is not usable; None = the sequence has no further full block
    """

    blocks: npt.NDArray[np.int32]
    identities: npt.NDArray[np.int64]
    parent: Parent
    missing: Key | None


class PrefixCache:
    """Covers blocks 0..num_blocks-1 of the device and the host."""

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[Key, int] = {}
        self._identity_of = array("q", [NOT_REGISTERED]) * num_blocks
        self._identities = np.frombuffer(self._identity_of, np.int64)
        """The same memory."""
        self._key_of: list[Key | None] = [None] * num_blocks
        self._live_identities: set[int] = set()
        self._last_identity = NOT_REGISTERED
        self._journal: BlockJournal | None = None
        """None = changes are not reported."""

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return self._identity_of[block] != NOT_REGISTERED

    def set_journal(self, journal: BlockJournal | None) -> None:
        """Sets who gets each change, starting with all that is registered; None = nobody."""
        self._journal = journal
        if journal is None:
            return
        # A block's identity is greater than that of the block before it.
        for identity, key in sorted(zip(self._identity_of, self._key_of, strict=True), key=lambda one: one[0]):
            if key is not None:
                journal.stored(identity, *key)

    def tokens_of(self, block: int) -> bytes | None:
        """The tokens of a registered block, otherwise None."""
        key = self._key_of[block]
        return None if key is None else key[1]

    def find(self, salt: Salt, token_bytes: bytes, bytes_per_block: int) -> Prefix:
        """The longest registered prefix of these tokens, in full blocks."""
        found: list[int] = []
        parent: Parent = salt
        missing: Key | None = None
        for start in range(0, len(token_bytes), bytes_per_block):
            key = (parent, token_bytes[start : start + bytes_per_block])
            block = self._block_of.get(key)
            if block is None:
                missing = key
                break
            found.append(block)
            parent = self._identity_of[block]
        blocks = np.array(found, np.int32)
        return Prefix(blocks, self._identities[blocks], parent, missing)

    def is_current(self, prefix: Prefix) -> bool:
        """Whether `find` would return this prefix, which it has returned before, again. Much faster than `find`."""
        is_same: bool = np.array_equal(self._identities[prefix.blocks], prefix.identities)
        return is_same and prefix.missing not in self._block_of

    def shortened(self, prefix: Prefix, num_blocks: int) -> Prefix:
        """The first blocks of a found prefix."""
        if num_blocks == len(prefix.blocks):
            return prefix
        missing = self._key_of[int(prefix.blocks[num_blocks])]
        assert missing is not None
        return Prefix(prefix.blocks[:num_blocks], prefix.identities[:num_blocks], missing[0], missing)

    def block_of(self, parent: Parent, tokens: bytes) -> int | None:
        """The block found for these tokens after `parent`."""
        return self._block_of.get((parent, tokens))

    def register(self, parent: Parent, tokens: bytes, block: int) -> int:
        """Registers `block` for these tokens after `parent`, unless another block is already registered for them.
        Returns the identity of the registered block.

        If the parent has been forgotten, registers nothing and returns the parent.
        """
        key = (parent, tokens)
        known = self._block_of.get(key)
        if known is not None:
            return self._identity_of[known]
        if isinstance(parent, int) and parent not in self._live_identities:
            return parent
        assert block not in self, f"block {block} is registered for other tokens"
        self._last_identity += 1
        self._block_of[key] = block
        self._key_of[block] = key
        self._identity_of[block] = self._last_identity
        self._live_identities.add(self._last_identity)
        if self._journal is not None:
            self._journal.stored(self._last_identity, parent, tokens)
        return self._last_identity

    def forget(self, block: int) -> None:
        """Removes a block from the cache. No effect if it is not registered."""
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
            self._live_identities.remove(self._identity_of[block])
            if self._journal is not None:
                self._journal.removed(self._identity_of[block])
            self._identity_of[block] = NOT_REGISTERED

    def forget_through(self, identity: int) -> list[int]:
        """Forgets the block with this identity, if registered, and all blocks before it. Returns them. Takes time
        proportional to the number of blocks."""
        block_of = {one: block for block, one in enumerate(self._identity_of)}
        forgotten: list[int] = []
        parent: Parent = identity
        while isinstance(parent, int) and parent in self._live_identities:
            block = block_of[parent]
            key = self._key_of[block]
            assert key is not None
            self.forget(block)
            forgotten.append(block)
            parent = key[0]
        return forgotten

    def is_found(self, block: int) -> bool:
        """Whether a block and the one before it, without which it cannot be found, are registered."""
        key = self._key_of[block]
        return key is not None and (isinstance(key[0], tuple) or key[0] in self._live_identities)

    def move(self, block: int, target: int) -> None:
        """Moves the registration of `block` to `target`; blocks registered after it stay registered."""
        key = self._key_of[block]
        assert key is not None and target not in self, f"block {block} cannot be moved to {target}"
        self._block_of[key] = target
        self._key_of[target], self._identity_of[target] = key, self._identity_of[block]
        self._key_of[block], self._identity_of[block] = None, NOT_REGISTERED

    def check(self) -> None:
        """Raises AssertionError unless keys and blocks agree."""
        known = {block: key for key, block in self._block_of.items()}
        said = {block: key for block, key in enumerate(self._key_of) if key is not None}
        identities = [identity for identity in self._identity_of if identity != NOT_REGISTERED]
        if known != said or sorted(self._live_identities) != sorted(identities) or len(identities) != len(known):
            raise AssertionError(f"the prefix cache contradicts itself: {len(known)} keys, {len(said)} blocks")
