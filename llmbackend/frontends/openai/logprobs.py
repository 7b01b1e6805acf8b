"""Log probabilities in OpenAI's two forms.

For: the writers of responses and chunks. Does not know: where they go. Invariant: the form of a token depends on the
token (and, for completions, on the text before it), so that the pieces of a stream put together equal the whole.
"""

from __future__ import annotations

from typing import Any

from .fields import JsonObject
from .tensors import TokenEntries

_IMPOSSIBLE = -9999.0


def chat_logprobs(positions: list[TokenEntries], top: int) -> JsonObject:
    """`choices[].logprobs` of chat: the chosen token at each position and the `top` most likely ones, best first."""
    return {"content": [_chat_position(entries, top) for entries in positions], "refusal": None}


def _chat_position(entries: TokenEntries, top: int) -> JsonObject:
    chosen = _chat_token(next(iter(entries.values())))
    chosen["top_logprobs"] = [_chat_token(entry) for entry in _most_likely(entries, top)]
    return chosen


def _chat_token(entry: dict[str, Any]) -> JsonObject:
    token: str = entry["decoded_token"] or ""
    return {"token": token, "logprob": _logprob(entry), "bytes": list(token.encode())}


def _logprob(entry: dict[str, Any]) -> float:
    """JSON has no minus infinity: the interface sends null, OpenAI this number."""
    value: float | None = entry["logprob"]
    return _IMPOSSIBLE if value is None else value


def _most_likely(entries: TokenEntries, top: int) -> list[dict[str, Any]]:
    """The chosen token comes along even when it is not among the `top`: its rank tells."""
    ranked = sorted(entries.values(), key=lambda entry: int(entry["rank"]))
    return [entry for entry in ranked if entry["rank"] <= top][:top]


class CompletionLogprobs:
    """`choices[].logprobs` of completions for one choice; remembers where in the text the next token starts."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset_chars = 0

    def render(self, positions: list[TokenEntries]) -> JsonObject:
        """The form of the tokens that follow those of the last call."""
        result: JsonObject = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entries in positions:
            chosen = next(iter(entries.values()))
            token = chosen["decoded_token"] or ""
            result["tokens"].append(token)
            result["token_logprobs"].append(_logprob(chosen))
            best = [*_most_likely(entries, self._top), chosen]
            result["top_logprobs"].append({entry["decoded_token"] or "": _logprob(entry) for entry in best})
            result["text_offset"].append(self._offset_chars)
            self._offset_chars += len(token)
        return result
