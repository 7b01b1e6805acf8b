"""Log probabilities of tokens in the forms of the two endpoints.

For: whole responses and streams. Does not know: where a stream is cut. Invariant: what the calls of one renderer
return, put together, is what one call with all positions returns.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import JsonObject
from .tensors import TokenEntries

_IMPOSSIBLE = -9999.0
_FIRST = 0
"""As a rank: the token was not predicted."""


@dataclass(frozen=True, slots=True)
class LogprobForm:
    """What a client asked to know of each token."""

    top: int
    """How many of the most likely tokens, besides the chosen one."""
    as_token_ids: bool = False
    """Tokens are written as `token_id:7` instead of their text."""
    token_ids: tuple[str, ...] = ()
    """These tokens, in place of the most likely ones."""

    def token(self, token_id: str, entry: dict[str, Any]) -> str:
        if self.as_token_ids:
            return f"token_id:{token_id}"
        return entry["decoded_token"] or ""

    def others(self, entries: TokenEntries) -> list[tuple[str, dict[str, Any]]]:
        """What is told of a position besides the chosen token. That one is in `entries` even when it is not among the
        most likely ones: its rank tells."""
        if self.token_ids:
            return [(token_id, entries[token_id]) for token_id in self.token_ids if token_id in entries]
        ranked = sorted(entries.items(), key=lambda item: int(item[1]["rank"]))
        return [item for item in ranked if item[1]["rank"] <= self.top][: self.top]


def first_position(token_id: int, text: str) -> TokenEntries:
    """The first token of a prompt, which has no logprob."""
    return {str(token_id): {"logprob": None, "rank": _FIRST, "decoded_token": text}}


Render = Callable[[list[TokenEntries]], JsonObject]
"""Positions that follow those of the last call → `choices[].logprobs`."""


def logprobs_renderer(form: LogprobForm, *, is_chat: bool) -> Render:
    """The renderer of one choice."""
    return ChatLogprobs(form).render if is_chat else CompletionLogprobs(form).render


class ChatLogprobs:
    """Chat's: the chosen token at each position and the most likely ones, best first."""

    def __init__(self, form: LogprobForm) -> None:
        self._form = form

    def render(self, positions: list[TokenEntries]) -> JsonObject:
        return {"content": [self._position(entries) for entries in positions], "refusal": None}

    def _position(self, entries: TokenEntries) -> JsonObject:
        chosen = self._token(*next(iter(entries.items())))
        chosen["top_logprobs"] = [self._token(*item) for item in self._form.others(entries)]
        return chosen

    def _token(self, token_id: str, entry: dict[str, Any]) -> JsonObject:
        return {"token": self._form.token(token_id, entry), "logprob": _logprob(entry), "bytes": list(_bytes(entry))}


class CompletionLogprobs:
    """Completions': four lists; remembers where in the text the next token starts. A token inside a character starts
    where its character does."""

    def __init__(self, form: LogprobForm) -> None:
        self._form = form
        self._offset_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def render(self, positions: list[TokenEntries]) -> JsonObject:
        result: JsonObject = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entries in positions:
            chosen = next(iter(entries.items()))
            is_first = chosen[1]["rank"] == _FIRST
            best = [*self._form.others(entries), chosen]
            result["tokens"].append(self._form.token(*chosen))
            result["token_logprobs"].append(None if is_first else _logprob(chosen[1]))
            named = {self._form.token(*item): _logprob(item[1]) for item in best}
            result["top_logprobs"].append(None if is_first else named)
            result["text_offset"].append(self._offset_chars)
            self._offset_chars += len(self._decoder.decode(_bytes(chosen[1])))
        return result


def _bytes(entry: dict[str, Any]) -> bytes:
    """Of a token that is part of a character, its own ones; else those of its text."""
    return bytes(entry["bytes"]) if "bytes" in entry else (entry["decoded_token"] or "").encode()


def _logprob(entry: dict[str, Any]) -> float:
    """JSON has no minus infinity: the interface sends null, OpenAI this number."""
    value: float | None = entry["logprob"]
    return _IMPOSSIBLE if value is None else value
