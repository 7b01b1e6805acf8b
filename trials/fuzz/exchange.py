"""One HTTP request as bytes, one answer, and the rules for every answer, whatever the request.

Used by every HTTP target, in-process and over sockets. Independent of endpoints. Invariant: `complaint` is empty
exactly if this server may give that answer: no 5xx except 501, 503 and Triton's INTERNAL with one of its texts, and a
body in the form defined for its path.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

Headers = tuple[tuple[bytes, bytes], ...]
JSON_HEADERS: Headers = ((b"content-type", b"application/json"),)

_TRITON_INTERNAL = re.compile(
    r"failed to parse the request JSON buffer|attempt to (access|get)|Unable to parse|Expected JSON object for keyword"
    r"|unexpected error on creating Triton parameter"
    r"|failed to (load|unload) '|JSON bytes array|is not valid UTF-8 and can not be sent as JSON"
    r"|(Unable to open|Invalid) shared memory region|shared memory size specified with the request"
)
"""Texts of Triton's that it answers with code INTERNAL, so status 500, where the client is to blame."""
_ANTHROPIC_PATHS = ("/v1/messages",)
_OPENAI_PATHS = ("/v1", "/tokenize", "/detokenize")


@dataclass(frozen=True)
class HttpInput:
    """A request. `path` is the raw target of the request line."""

    path: str
    body: bytes
    headers: Headers = JSON_HEADERS
    method: str = "POST"


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def is_5xx(self) -> bool:
        return self.status >= 500 and self.status not in (501, 503)


def complaint(request: HttpInput, answer: HttpAnswer) -> str:
    """What is wrong with the answer; "" if nothing."""
    text = answer.body.decode("utf-8", "replace")
    if answer.is_5xx and not (request.path.startswith("/v2") and _TRITON_INTERNAL.search(text)):
        return f"status {answer.status}: {text[:300]}"
    if answer.status == 503 and "retry-after" not in answer.headers:
        return f"503 without Retry-After: {text[:300]}"
    if answer.status >= 400 and request.method != "HEAD":
        return _wrong_error(request, answer, text)
    return ""


def _wrong_error(request: HttpInput, answer: HttpAnswer, text: str) -> str:
    """KServe: {"error": text}; OpenAI: {"error": {message, type, param, code}}; Anthropic: {"type": "error", "error":
    {type, message}, "request_id"}; each may come as an event."""
    if not text:
        return "" if request.path.endswith(("/live", "/ready")) else f"status {answer.status} without a body"
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        text = text[text.find("data: ") + len("data: ") :]
    try:
        document = json.loads(text)
        error: Any = document["error"]
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status}, not an error body: {text[:300]}"
    if request.path.startswith(_ANTHROPIC_PATHS):
        return "" if _is_anthropic(document) else f"not Anthropic's error: {text[:300]}"
    if request.path.startswith(_OPENAI_PATHS) and (
        not isinstance(error, dict) or error.keys() != {"message", "type", "param", "code"}
    ):
        return f"not OpenAI's error: {text[:300]}"
    if request.path.startswith("/v2") and not isinstance(error, str):
        return f"not KServe's error: {text[:300]}"
    return ""


def _is_anthropic(document: Any) -> bool:
    error = document["error"]
    if not isinstance(error, dict) or not {"type", "message"} <= error.keys() <= {"type", "message", "details"}:
        return False
    return bool(document.keys() == {"type", "error", "request_id"})
