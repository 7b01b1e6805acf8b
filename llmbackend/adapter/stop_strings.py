"""Finding stop strings in text that arrives in pieces.

For: cutting a generation at its stop string without ever showing a part of it. Does not know: tokens, requests.
Invariant: the text let through, and where it ends, do not depend on how the text was cut into pieces. The stop string
that is completed first ends the text (of several completed by the same character, the longest). Held back is only the
longest suffix that is a proper prefix of a stop string. The cost per character does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Sequence

from .stop_automaton import StopAutomaton


class StopStrings:
    """One request's search. Owner: the request's OutputAssembler."""

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """`stop`: non-empty strings; may be empty, then all text passes at once."""
        self._automaton: StopAutomaton[str] | None = StopAutomaton(stop, "") if stop else None
        self._state = self._automaton.root if self._automaton is not None else None
        self._include = include_stop_str_in_output
        self.matched: str | None = None
        """The stop string that ended the text; nothing may be pushed afterwards."""

    def push(self, text: str) -> str:
        """The text that may be shown now. Sets `matched` when a stop string is complete."""
        automaton, state = self._automaton, self._state
        if automaton is None or state is None or not text:
            return text
        buffer = state.prefix + text
        held = len(state.prefix)
        for end, character in enumerate(text, held + 1):
            state = state.next.get(character) or automaton.step(state, character)
            if state.match is not None:
                self.matched = state.match
                self._state = automaton.root
                return buffer[: end if self._include else end - len(state.match)]
        self._state = state
        return buffer[: len(buffer) - len(state.prefix)]

    def flush(self) -> str:
        """What was held back, when the generation ended for another reason."""
        if self._automaton is None or self._state is None:
            return ""
        held, self._state = self._state.prefix, self._automaton.root
        return held
