"""Finding stop strings in text that arrives in pieces.

For: cutting a generation at its stop string without ever showing a part of it. Does not know: tokens, requests.
Invariant: the text let through, and where it ends, do not depend on how the text was cut into pieces. The stop string
that is completed first ends the text (of several completed by the same character, the longest). Held back is only the
longest suffix that is a proper prefix of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """One request's search. Owner: the request's OutputAssembler."""

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """`stop`: non-empty strings; may be empty, then all text passes at once."""
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text; nothing may be pushed afterwards."""

    def push(self, text: str) -> str:
        """The text that may be shown now. Sets `matched` when a stop string is complete."""
        if not self._stop or not text:
            return text
        buffer = self._held + text
        found = self._first_completed(buffer)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return buffer[: start + len(self.matched)] if self._include else buffer[:start]
        keep = self._held_length(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """What was held back, when the generation ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, buffer: str) -> tuple[int, str] | None:
        """(start, stop string) of the match with the earliest end, then the earliest start."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = buffer.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[2])

    def _held_length(self, buffer: str) -> int:
        """Length of the longest suffix of `buffer` that is a proper prefix of a stop string."""
        longest = min(len(buffer), max(len(stop) for stop in self._stop) - 1)
        for length in range(longest, 0, -1):
            suffix = buffer[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stop):
                return length
        return 0
