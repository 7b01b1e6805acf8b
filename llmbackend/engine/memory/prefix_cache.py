"""Which KV block holds the keys and values of which full block of tokens, and of all tokens before it.

For: the pools of KV blocks, which ask for the blocks of a text's beginning. Does not know: rows, requests, which block
is used or reused. One idea: a registered block has an identity, a number that is never reused, and is found under the
key (identity of the block before it, its tokens); the first block of a text has the request's salt in place of an
identity. Invariant: what is found is exact. A dict finds a key by a fast hash (SipHash, keyed at random in each
process) and then compares all of it, so that a collision costs a comparison and never a wrong block; and an identity
stands for one salt and one text, so that equal keys mean equal texts from their first token on.

A block that is forgotten takes its identity with it: blocks registered after it are not found any more, and no more are
registered after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .block_journal import BlockJournal, Salt

Parent = int | Salt
"""What is before a block: the identity of another block, or the salt at the beginning of a text."""
Key = tuple[Parent, bytes]
NOT_REGISTERED = 0


@dataclass(frozen=True, slots=True)
class Prefix:
    """A cached beginning of a text.

    blocks   that hold it
    parent   the identity of the last of them, or the salt
    missing  the key of the next full block, which cannot be used; None = the text has no further full block
    """

    blocks: list[int]
    parent: Parent
    missing: Key | None


class PrefixCache:
    """Over blocks 0..num_blocks-1 of the device and the host."""

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[Key, int] = {}
        self._identity_of = [NOT_REGISTERED] * num_blocks
        self._key_of: list[Key | None] = [None] * num_blocks
        self._live_identities: set[int] = set()
        self._last_identity = NOT_REGISTERED
        self._journal: BlockJournal | None = None
        """None while nobody asks what is registered."""

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, block: int) -> bool:
        return self._identity_of[block] != NOT_REGISTERED

    def tell(self, journal: BlockJournal | None) -> None:
        """From now on `journal` hears of each change, and at once of all that is registered; None = nobody does."""
        self._journal = journal
        if journal is None:
            return
        # A block's identity is larger than that of the block before it.
        for identity, key in sorted(zip(self._identity_of, self._key_of, strict=True), key=lambda one: one[0]):
            if key is not None:
                journal.stored(identity, *key)

    def tokens_of(self, block: int) -> bytes | None:
        """The tokens of a registered block, None for another."""
        key = self._key_of[block]
        return None if key is None else key[1]

    def find(self, salt: Salt, token_bytes: bytes, bytes_per_block: int) -> Prefix:
        """The longest registered beginning of a text of full blocks."""
        blocks: list[int] = []
        parent: Parent = salt
        for start in range(0, len(token_bytes), bytes_per_block):
            key = (parent, token_bytes[start : start + bytes_per_block])
            block = self._block_of.get(key)
            if block is None:
                return Prefix(blocks, parent, key)
            blocks.append(block)
            parent = self._identity_of[block]
        return Prefix(blocks, parent, None)

    def shortened(self, prefix: Prefix, num_blocks: int) -> Prefix:
        """The first blocks of a prefix that was found."""
        if num_blocks == len(prefix.blocks):
            return prefix
        missing = self._key_of[prefix.blocks[num_blocks]]
        assert missing is not None
        return Prefix(prefix.blocks[:num_blocks], missing[0], missing)

    def block_of(self, parent: Parent, tokens: bytes) -> int | None:
        """The block that is found for these tokens after `parent`."""
        return self._block_of.get((parent, tokens))

    def register(self, parent: Parent, tokens: bytes, block: int) -> int:
        """The identity of the block that holds these tokens after `parent`: of one registered before, else of `block`.

        After a parent that is forgotten nothing is registered, and the result is the parent.
        """
        key = (parent, tokens)
        known = self._block_of.get(key)
        if known is not None:
            return self._identity_of[known]
        if isinstance(parent, int) and parent not in self._live_identities:
            return parent
        assert block not in self, f"block {block} is registered for another text"
        self._last_identity += 1
        self._block_of[key] = block
        self._key_of[block] = key
        self._identity_of[block] = self._last_identity
        self._live_identities.add(self._last_identity)
        if self._journal is not None:
            self._journal.stored(self._last_identity, parent, tokens)
        return self._last_identity

    def forget(self, block: int) -> None:
        """The block is not found any more. Does nothing for one that is not registered."""
        key = self._key_of[block]
        if key is not None:
            del self._block_of[key]
            self._key_of[block] = None
            self._live_identities.remove(self._identity_of[block])
            if self._journal is not None:
                self._journal.removed(self._identity_of[block])
            self._identity_of[block] = NOT_REGISTERED

    def forget_through(self, identity: int) -> list[int]:
        """Forgets a text: the block of this identity, if it is registered, and those before it. Returns them. Takes
        time for all blocks."""
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
        """Whether a block is registered and so is the one before it, without which it is not found."""
        key = self._key_of[block]
        return key is not None and (isinstance(key[0], tuple) or key[0] in self._live_identities)

    def move(self, block: int, target: int) -> None:
        """The text of `block` is found in `target` from now on; blocks registered after it stay registered."""
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
