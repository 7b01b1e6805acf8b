"""A conversation with a server: its messages, the next question, and token counts and times of answers.

Independent of terminals. Invariants: `messages` is always a list that the server accepts: a question whose answer
failed before its first character is removed, or replaced by what it should have repeated; a stopped answer is kept as
far as it arrived; reasoning is not sent back.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..api_client import ApiClient, ApiError, ServerEvent, error_text

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some characters of an answer."""

    text: str
    is_reasoning: bool = False


@dataclass(slots=True)
class Answer:
    output_tokens: int | None = None
    """The server's count; None = not sent."""
    num_pieces: int = 0
    ttft_s: float = 0.0
    duration_s: float = 0.0
    """Time from question to last token."""
    finish_reason: str = ""
    """"" = stopped by the user, or not ended."""
    text: str = field(default="", repr=False)

    @property
    def tokens_per_s(self) -> float:
        """The rate after the first token; 0 if there was no second one."""
        tokens = self.num_pieces if self.output_tokens is None else self.output_tokens
        after_first_s = self.duration_s - self.ttft_s
        return (tokens - 1) / after_first_s if tokens > 1 and after_first_s > 0 else 0.0


class Conversation:
    def __init__(self, client: ApiClient, model: str, system: str = "", sampling: Mapping[str, Any] = {}) -> None:
        """sampling: fields of the request, such as temperature."""
        self.client = client
        self.model = model
        self.system = system
        self.messages: list[Message] = []
        """The messages without the system message."""
        self.answers: list[Answer] = []
        """All answers of this session, including those that were cleared."""
        self._sampling = dict(sampling)
        self._failed_question = ""
        """The last question, if it was removed because its answer failed."""
        self._taken_back: list[Message] = []
        """The pair that the next question repeats."""

    def ask(self, question: str) -> Generator[Piece, None, None]:
        """The answer as it arrives; close the iterator to stop it. Raises ApiError."""
        self.messages.append({"role": "user", "content": question})
        answer = Answer()
        replaced, self._taken_back, self._failed_question = self._taken_back, [], ""
        try:
            yield from self._answer(answer)
        finally:
            if answer.text or answer.finish_reason:
                self.messages.append({"role": "assistant", "content": answer.text})
            else:
                self.messages[-1:] = replaced
                self._failed_question = "" if replaced else question
            if answer.num_pieces:
                self.answers.append(answer)

    def restart(self, messages: Sequence[Message] = ()) -> None:
        """Replaces all messages."""
        self.messages[:] = messages
        self._failed_question = ""

    def take_back(self) -> str:
        """Removes the last question and its answer; they come back if the next answer fails before it begins. A failed
        question is already removed. Returns the question, "" if there is none."""
        if self._failed_question:
            return self._failed_question
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                self._taken_back = self.messages[index:]
                del self.messages[index:]
                return self._taken_back[0]["content"]
        return ""

    def _answer(self, answer: Answer) -> Iterator[Piece]:
        start_s = time.monotonic()
        with self.client.events("/chat/completions", self._body()) as events:
            for event in events:
                if event.data == "[DONE]":
                    break
                for piece in _read_chunk(event, answer):
                    answer.duration_s = time.monotonic() - start_s
                    answer.ttft_s = answer.ttft_s or answer.duration_s
                    answer.num_pieces += 1
                    answer.text += "" if piece.is_reasoning else piece.text
                    yield piece
        if not answer.finish_reason:
            raise ApiError(f"{self.client.url}: the answer ended before it was complete")

    def _body(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.model,
            "messages": system + self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling,
        }


def model_names(client: ApiClient) -> list[str]:
    """The server's models. Raises ApiError."""
    listed = client.get("/models")
    rows = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(rows, list):
        raise ApiError(f"{client.url}/models lists no models: is this an OpenAI-compatible server?")
    return [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]


def _read_chunk(event: ServerEvent, answer: Answer) -> Iterator[Piece]:
    chunk = event.json()
    if not isinstance(chunk, dict):
        return
    if chunk.get("error"):
        raise ApiError(f"the server ended the answer: {error_text(chunk)}")
    usage = chunk.get("usage") or {}
    answer.output_tokens = usage.get("completion_tokens", answer.output_tokens)
    for choice in chunk.get("choices") or ():
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield Piece(str(reasoning), is_reasoning=True)
        if content := delta.get("content") or delta.get("refusal"):
            yield Piece(str(content))
