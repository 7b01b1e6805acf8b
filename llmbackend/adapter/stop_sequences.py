"""Ending a generation at a sequence of token ids.

For: the assembler, for clients that send stop words as tokens. Does not know: text. Invariant: only generated tokens
count, and it does not matter in which pieces they come. Cost per token does not grow with the generation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopSequences:
    """One request's search. Owner: the request's OutputAssembler."""

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        """`sequences`: non-empty ones; may be none, then nothing ever matches."""
        self._sequences = sequences
        self._tail: deque[int] = deque(maxlen=max(map(len, sequences), default=0))

    def push(self, token_id: int) -> bool:
        """Whether a sequence ends with this token."""
        if not self._sequences:
            return False
        self._tail.append(token_id)
        tail = tuple(self._tail)
        return any(tail[-len(sequence) :] == sequence for sequence in self._sequences)
