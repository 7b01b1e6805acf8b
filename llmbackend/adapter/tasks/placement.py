"""Chooses one of several engines for a queued request, and how long the request waits for it.

Used by TaskMap for each request that an engine with free slots could take. Independent of queues, priorities and texts.
An engine's score is the number of prompt tokens in its prefix cache (PrefixIndex), plus REQUEST_TOKENS per free slot.
The request waits for the engine with the highest score as long as computing the difference in tokens would take at the
recent prefill speed; at least WAKE_S (within which the loop wakes up) if that engine has a free slot, and at most
MAX_WAIT_S after an engine with free slots first passed it over. After that, any engine takes it.
"""

from __future__ import annotations

import random
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from llmbackend.engine.memory.prefix_cache import numbers
from llmbackend.engine.messages import BlockChanges

REQUEST_TOKENS: Final = 128
"""The value of a free slot, in prompt tokens. A larger value spreads requests more evenly, but more prefixes are
computed more than once."""
WAKE_S: Final = 0.05
MAX_WAIT_S: Final = 1.0
SAMPLE: Final = 8
"""Engines compared per request, in addition to up to twice as many of those with the longest prefix."""
_WEIGHT: Final = 0.125
"""Weight of the latest prompt in the running mean."""
_FIRST_GUESS_S: Final = 50e-6
"""Seconds per prompt token, before any has been measured."""


@dataclass(slots=True)
class PlacementState:
    """The engine for which a queued request waits. Owner: TaskMap; changed while holding its lock.

    hashes     of its prompt's blocks; () = prefixes are not considered
    waits_for  the engine (a bit); 0 = none
    since_ns   when an engine with free slots first passed it over; 0 = never
    until_ns   when any engine may take it
    """

    hashes: Sequence[int] = ()
    waits_for: int = 0
    since_ns: int = 0
    until_ns: int = 0


class ReadyEngines:
    """The engines that are compared, the same from one request to the next.

    free_slots_of  by engine (a bit): returns how many requests it would take
    mask           all engines
    """

    def __init__(self, free_slots_of: Mapping[int, Callable[[], int]]) -> None:
        self.free_slots_of = free_slots_of
        self.mask = 0
        for engine in free_slots_of:
            self.mask |= engine
        self._engines = tuple(free_slots_of)
        self.are_few = len(free_slots_of) <= SAMPLE

    def some(self) -> Sequence[int]:
        """All engines, or a sample if there are many: this bounds the time, and hosts that share engines choose
        different ones."""
        return self._engines if self.are_few else random.sample(self._engines, SAMPLE)


class FreeSlots:
    """The number of free slots of each engine, queried on first use and then counted down."""

    def __init__(self, ready: ReadyEngines) -> None:
        self.ready = ready
        self._known: dict[int, int] = {}

    def __getitem__(self, engine: int) -> int:
        if engine not in self._known:
            self._known[engine] = max(self.ready.free_slots_of[engine](), 0)
        return self._known[engine]

    def take(self, engine: int) -> None:
        """Called when the engine gets a request."""
        self._known[engine] = self[engine] - 1


class Placement:
    """For one model. `block_size` is set when its engines begin to report their blocks."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.block_size = 0
        """Tokens per block; 0 = prompts are not hashed."""
        self._prompt_token_s = _FIRST_GUESS_S

    def prompt_computed(self, num_tokens: int, seconds: float) -> None:
        """Records that an engine computed `num_tokens` of a prompt within `seconds` of taking it."""
        if num_tokens > 0:
            self._prompt_token_s += _WEIGHT * (seconds / num_tokens - self._prompt_token_s)

    def takes(self, engine: int, state: PlacementState, free_slots: FreeSlots, now_ns: int) -> bool:
        """Whether this engine, which is ready and has free slots, takes the request now."""
        if state.waits_for == engine:
            return True
        if state.waits_for & free_slots.ready.mask and now_ns < state.until_ns:
            return False
        best, gain_tokens = self._best(engine, state.hashes, free_slots)
        if best == engine:
            return True
        state.since_ns = state.since_ns or now_ns
        state.until_ns = state.since_ns + int(self._wait_s(gain_tokens, free_slots[best]) * 1e9)
        state.waits_for = best
        return now_ns >= state.until_ns

    def _wait_s(self, gain_tokens: int, free_slots: int) -> float:
        return max(min(gain_tokens * self._prompt_token_s, MAX_WAIT_S), WAKE_S if free_slots > 0 else 0.0)

    def _best(self, asking: int, hashes: Sequence[int], free_slots: FreeSlots) -> tuple[int, int]:
        """The best engine, and by how many tokens it beats the asking one. Ties are won by the engine with the fewest
        blocks, so that all caches are used, then by the asking one."""
        index, ready = self.index, free_slots.ready
        num_blocks, holders = index.longest(ready.mask, hashes)

        def score(engine: int) -> tuple[int, int]:
            held = num_blocks if holders & engine else index.num_held(engine, hashes)
            return held * self.block_size + free_slots[engine] * REQUEST_TOKENS, -index.num_blocks(engine)

        engine, own = asking, score(asking)
        best = own
        for other in ready.some() if ready.are_few or not num_blocks else (*ready.some(), *_some_of(holders)):
            if (others := score(other)) > best:
                engine, best = other, others
        return engine, best[0] - own[0]


def _some_of(engines: int) -> Iterator[int]:
    """Some engines of a mask, starting with a random one."""
    first = random.randrange(engines.bit_length())
    for left in (engines >> first << first, engines & (1 << first) - 1):
        for _ in range(SAMPLE):
            if not left:
                break
            engine = left & -left
            left ^= engine
            yield engine


_BLOCKS_AT_A_TIME = 4096
"""Blocks changed per acquisition of the lock; takes about a millisecond."""


class PrefixIndex:
    """The prefixes whose KV each engine has.

    Engines are bits of an int. The key is a block's hash (memory/prefix_cache.py), which represents the text up to the
    end of the block. An engine that has a block has all blocks before it, so the longest prefix is found by bisection.
    Invariant: the index contains the blocks that each engine had at its latest message, and those that it is computing
    for its requests, until their first tokens.

    Thread-safe. Writers hold the lock; readers need none, because each of their look-ups is atomic. A block costs about
    80 bytes however many engines have it (measured by `benchmarks.prefix_routing --simulate`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: dict[int, int] = {}
        """By hash: the engines that have the block."""
        self._computing: dict[int, int] = {}
        """By hash: the engines that are computing it."""
        self._computed_for: dict[str, tuple[int, Sequence[int]]] = {}
        """By request: its engine, and the blocks that the engine did not have."""
        self._num_blocks: dict[int, int] = {}

    def __len__(self) -> int:
        """Blocks, each counted once."""
        return len(self._holders)

    def num_blocks(self, engine: int) -> int:
        """Blocks reported by the engine."""
        return self._num_blocks.get(engine, 0)

    # --- reported by engines ------------------------------------------------------------------------------------------

    def apply(self, engine: int, changes: BlockChanges) -> None:
        """Applies a message of an engine (a bit)."""
        if changes.is_snapshot:
            self.forget(engine)
        removed, stored = numbers(changes.removed), numbers(changes.stored)
        self._change(_take_out, engine, removed)
        self._change(_enter, engine, stored)
        self._num_blocks[engine] = self.num_blocks(engine) + len(stored) - len(removed)

    def forget(self, engine: int) -> None:
        """Called when the engine has ended, and its KV with it."""
        self._change(_take_out, engine, list(self.blocks_of(engine)))
        self._num_blocks.pop(engine, None)

    def blocks_of(self, engine: int) -> set[int]:
        """Hashes of the blocks that the engine has reported."""
        return {block for block in list(self._holders) if self._holders.get(block, 0) & engine}

    def _change(
        self, change: Callable[[dict[int, int], int, Sequence[int]], None], engine: int, blocks: Sequence[int]
    ) -> None:
        for start in range(0, len(blocks), _BLOCKS_AT_A_TIME):
            with self._lock:
                change(self._holders, engine, blocks[start : start + _BLOCKS_AT_A_TIME])

    # --- being computed -----------------------------------------------------------------------------------------------

    def expect(self, engine: int, request_id: str, hashes: Sequence[int]) -> None:
        """Called when the engine has taken a request with these blocks and will compute those that it lacks."""
        missing = hashes[self.num_held(engine, hashes) :]
        if missing:
            with self._lock:
                self._computed_for[request_id] = engine, missing
                _enter(self._computing, engine, missing)

    def settle(self, request_id: str) -> None:
        """Called when the engine has reported that request's blocks, or will not compute them."""
        if request_id in self._computed_for:
            with self._lock:
                _take_out(self._computing, *self._computed_for.pop(request_id))

    # --- look-ups -----------------------------------------------------------------------------------------------------

    def longest(self, engines: int, hashes: Sequence[int]) -> tuple[int, int]:
        """The largest number of a text's leading blocks that one of `engines` has, and which engines have that many."""
        count = self.num_held(engines, hashes)
        holders = self._engines(hashes[count - 1]) & engines if count else 0
        return (count, holders) if holders else (0, engines)  # the last of them may have dropped it meanwhile

    def num_held(self, engines: int, hashes: Sequence[int]) -> int:
        """The largest number of a text's leading blocks that one of `engines` has."""
        return bisect_left(hashes, True, key=lambda block: not self._engines(block) & engines)

    def _engines(self, block: int) -> int:
        return self._holders.get(block, 0) | self._computing.get(block, 0)


def _enter(index: dict[int, int], engine: int, blocks: Sequence[int]) -> None:
    for block in blocks:
        # Blocks that only this engine has share one int object.
        index[block] = index[block] | engine if block in index else engine


def _take_out(index: dict[int, int], engine: int, blocks: Sequence[int]) -> None:
    for block in blocks:
        left = index.get(block, 0) & ~engine
        if left:
            index[block] = left
        else:
            index.pop(block, None)
