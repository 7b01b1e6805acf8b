"""What a client saw of one stream.

Used by the protocol clients, which yield pieces, and by the judge, which compares outcomes. Independent of protocols.
Invariant: equal streams give equal outcomes, however they are cut into pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class StreamFailed(Exception):  # noqa: N818  # the server's refusal or the end of a connection, in the server's words
    """A stream ended with an error. `code`: HTTP status or gRPC status name; "" for an error in band."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Piece:
    """One response or event. `token_ids` None: the protocol tells no ids. usage: (prompt tokens, output tokens). parts:
    what else there is, as names and texts; texts of one name are put together."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[Any, ...] = ()
    finish_reason: str | None = None
    usage: tuple[int, int] | None = None
    cumulative_logprob: float | None = None
    parts: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Outcome(Piece):
    """The whole of a stream, as one piece. error None = it ended as it should; code: as StreamFailed's."""

    error: str | None = None
    code: str = ""


@dataclass
class Collector:
    """Puts pieces together. Owner: the one task that reads the stream."""

    _texts: list[str] = field(default_factory=list)
    _token_ids: list[int] | None = None
    _logprobs: list[Any] = field(default_factory=list)
    _last: dict[str, Any] = field(default_factory=dict)
    _parts: dict[str, list[str]] = field(default_factory=dict)

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        self._logprobs.extend(piece.logprobs)
        if piece.token_ids is not None:
            self._token_ids = [*(self._token_ids or []), *piece.token_ids]
        for name, text in piece.parts:
            self._parts.setdefault(name, []).append(text)
        for name in ("finish_reason", "usage", "cumulative_logprob"):
            if (value := getattr(piece, name)) is not None:
                self._last[name] = value

    def outcome(self, error: str | None = None, code: str = "") -> Outcome:
        ids = None if self._token_ids is None else tuple(self._token_ids)
        parts = tuple((name, "".join(texts)) for name, texts in sorted(self._parts.items()))
        return Outcome(
            "".join(self._texts), ids, tuple(self._logprobs), parts=parts, error=error, code=code, **self._last
        )
