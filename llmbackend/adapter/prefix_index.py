"""Which engine has the KV of which beginnings of texts.

For: the choice of an engine (placement.py); engines' loops, which pass on what their engines say. Does not know: tasks,
loads, texts. Engines are bits of an int. A block is entered under its hash (memory/block_journal.py), which stands for
all of a text up to that block, and an engine that has a block has all before it: so the longest beginning that anyone
has is found by bisection. Invariants: after an engine's message the index has exactly the blocks that the engine then
had; apart from that it has what engines are computing for requests that they took, until their first tokens are there.

Any thread calls it. Writers hold the lock; readers need none, since each of their look-ups is atomic. A block costs
some 80 bytes, however many engines have it (`benchmarks.prefix_routing --simulate` measures it).
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence

from llmbackend.engine.memory.block_journal import numbers
from llmbackend.engine.messages import BlockChanges

_BLOCKS_AT_A_TIME = 4096
"""Changed under the lock: others wait for a millisecond at most."""


class PrefixIndex:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[int, int] = {}
        """By hash: the engines that have the block."""
        self._computing: dict[int, int] = {}
        """By hash: the engines that will have it soon."""
        self._computed_for: dict[str, tuple[int, Sequence[int]]] = {}
        """By request: its engine, and what that did not have."""
        self._num_blocks: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks, each counted once."""
        return len(self._holders)

    def num_blocks(self, engine: int) -> int:
        """That the engine said it has."""
        return self._num_blocks.get(engine, 0)

    # --- what engines say ---------------------------------------------------------------------------------------------

    def apply(self, engine: int, changes: BlockChanges) -> None:
        """A message of an engine (a bit)."""
        if changes.is_snapshot:
            self.forget(engine)
        removed, stored = numbers(changes.removed), numbers(changes.stored)
        self._change(_take_out, engine, removed)
        self._change(_enter, engine, stored)
        self._num_blocks[engine] = self.num_blocks(engine) + len(stored) - len(removed)

    def forget(self, engine: int) -> None:
        """The engine has ended, and its KV with it."""
        self._change(_take_out, engine, list(self.blocks_of(engine)))
        self._num_blocks.pop(engine, None)

    def blocks_of(self, engine: int) -> set[int]:
        """Hashes of all that the engine said it has."""
        return {block for block in list(self._holders) if self._holders.get(block, 0) & engine}

    def _change(
        self, change: Callable[[dict[int, int], int, Sequence[int]], None], engine: int, blocks: Sequence[int]
    ) -> None:
        for start in range(0, len(blocks), _BLOCKS_AT_A_TIME):
            with self._lock:
                change(self._holders, engine, blocks[start : start + _BLOCKS_AT_A_TIME])

    # --- what engines will have ---------------------------------------------------------------------------------------

    def expect(self, engine: int, request_id: str, hashes: Sequence[int]) -> None:
        """The engine has taken a request with these blocks, and computes those that it lacks."""
        missing = hashes[self.num_held(engine, hashes) :]
        if missing:
            with self._lock:
                self._computed_for[request_id] = engine, missing
                _enter(self._computing, engine, missing)

    def settle(self, request_id: str) -> None:
        """The engine has said what it has of that request's blocks, or will not compute them any more."""
        if request_id in self._computed_for:
            with self._lock:
                _take_out(self._computing, *self._computed_for.pop(request_id))

    # --- who has what -------------------------------------------------------------------------------------------------

    def longest(self, engines: int, hashes: Sequence[int]) -> tuple[int, int]:
        """How many of a text's first blocks one of `engines` has, and which of them have so many. No blocks: all."""
        count = self.num_held(engines, hashes)
        return count, self._engines(hashes[count - 1]) & engines if count else engines

    def num_held(self, engines: int, hashes: Sequence[int]) -> int:
        """How many of a text's first blocks one of `engines` has."""
        return bisect_left(hashes, True, key=lambda block: not self._engines(block) & engines)

    def _engines(self, block: int) -> int:
        return self._holders.get(block, 0) | self._computing.get(block, 0)


def _enter(index: dict[int, int], engine: int, blocks: Sequence[int]) -> None:
    for block in blocks:
        # One object of this number serves all blocks that no other engine has.
        index[block] = index[block] | engine if block in index else engine


def _take_out(index: dict[int, int], engine: int, blocks: Sequence[int]) -> None:
    for block in blocks:
        left = index.get(block, 0) & ~engine
        if left:
            index[block] = left
        else:
            index.pop(block, None)
