"""One response while it comes about: its output, its usage, and the response object at any time.

For: event_writer.py, whole responses, and the store of responses. Does not know: HTTP, events' bytes. Invariant: a
function of the request, the identity and the deltas, but for the time of completion, which comes from a clock; the
object of a stream's last event is the whole response.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

import orjson

from ...conversation.tools import NamedTool
from ..answer_plan import AnswerPlan
from ..errors import JsonObject, OpenAIError
from ..logprobs import LogprobForm
from ..responses import Identity, Usage
from ..tensors import Delta
from .output_builder import LENGTH, Happening, OutputBuilder

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""By HTTP status; others are server errors."""


class ResponseState:
    """Owner: the writer of its stream, or of its whole body."""

    def __init__(
        self,
        identity: Identity,
        plan: AnswerPlan | None,
        *,
        echo: bytes = b"{}",
        tools: Mapping[str, NamedTool] | None = None,
        logprobs: LogprobForm | None = None,
        seal: Callable[[str], str] | None = None,
        is_queued: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """plan: how the answer is read; None: as text
        echo: JSON object of the fields that a response repeats of its request
        tools: those of the request, by the name that the model calls
        seal: makes the sealed form of reasoning; None: it is not asked for
        is_queued: whether it begins in the background
        """
        self.builder = OutputBuilder(plan, identity.id, tools=tools, logprobs=logprobs, seal=seal)
        self.id = identity.id
        self.status: Status = "queued" if is_queued else "in_progress"
        self._error: JsonObject | None = None
        self._usage = Usage(1)
        self._completed_at_s: int | None = None
        self._clock = clock
        head = {"id": identity.id, "object": "response", "created_at": identity.created_s, "model": identity.model}
        self._head = orjson.dumps(head)[:-1]
        self._echo = b"," + echo[1:-1] if echo != b"{}" else b""

    def add(self, delta: Delta) -> list[Happening]:
        happenings = self.builder.add(delta)
        self._usage.add(0, delta)
        if (num_reasoning_tokens := self.builder.num_reasoning_tokens) is not None:
            self._usage.set_reasoning(0, num_reasoning_tokens)
        return happenings

    def end(self) -> None:
        """The answer is complete, or as long as it may be."""
        self.status = "incomplete" if self.builder.finish_reason == LENGTH else "completed"
        if self.status == "completed":
            self._completed_at_s = int(self._clock())

    def fail(self, error: OpenAIError) -> None:
        self.builder.stop()
        self.status, self._completed_at_s = "failed", None
        self._error = {"code": _ERROR_CODES.get(error.status, "server_error"), "message": error.message}

    def cancel(self) -> None:
        self.builder.stop()
        self.status = "cancelled"

    def output(self) -> list[JsonObject]:
        """The items so far, for orjson."""
        return [item.as_json() for item in self.builder.items]

    def json(self) -> bytes:
        """The response object as it is now."""
        is_over = self.status not in ("queued", "in_progress")
        tail = {
            "status": self.status,
            "completed_at": self._completed_at_s,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "output": self.output() if is_over else [],
            "usage": self._usage_object() if is_over else None,
        }
        return self._head + self._echo + b"," + orjson.dumps(tail)[1:]

    def _usage_object(self) -> JsonObject | None:
        if (counted := self._usage.total()) is None:
            return None
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": counted.get("prompt_tokens_details", {}).get("cached_tokens", 0),
                "cache_write_tokens": 0,
            },
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": counted.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
            },
            "total_tokens": counted["total_tokens"],
        }
