"""Ending a generation at a sequence of token ids.

For: the assembler, for clients that send stop words as tokens. Does not know: text. Invariant: only generated tokens
count, and it does not matter in which pieces they come. The cost per token grows neither with the generation nor with
the number of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from .stop_automaton import StopAutomaton


class StopSequences:
    """One request's search. Owner: the request's OutputAssembler."""

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        """`sequences`: non-empty ones; may be none, then nothing ever matches."""
        self._automaton = StopAutomaton(sequences, ())
        self._state = self._automaton.root
        self._is_idle = not sequences

    def push(self, token_id: int) -> bool:
        """Whether a sequence ends with this token."""
        if self._is_idle:
            return False
        self._state = self._automaton.step(self._state, (token_id,))
        return self._state.match is not None
