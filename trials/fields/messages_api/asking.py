"""/v1/messages as used by the field checks: small deterministic requests, and their answers.

Used by the checks. Independent of fields. Invariant: every answer and event parses as a type of Anthropic's package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from pydantic import TypeAdapter

from ..asking import DEMO, JsonObject, refused, said

MESSAGES, COUNT_TOKENS = "messages", "messages/count_tokens"
MAX_TOKENS = 16
VERSION = {"anthropic-version": "2023-06-01"}
_EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@dataclass(frozen=True)
class Answer:
    """A message."""

    json: JsonObject

    def of(self, kind: str) -> list[JsonObject]:
        """Its content blocks of a type."""
        return [block for block in self.json["content"] if block["type"] == kind]

    @property
    def text(self) -> str:
        return "".join(block["text"] for block in self.of("text"))

    @property
    def calls(self) -> list[str]:
        return [block["name"] for block in self.of("tool_use")]

    @property
    def usage(self) -> JsonObject:
        usage: JsonObject = self.json["usage"]
        return usage

    @property
    def prompt_tokens(self) -> int:
        """With those that came from the cache."""
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        return sum(self.usage.get(name) or 0 for name in names)


class Messages:
    """Requests ask the demo model for a few tokens, greedily, unless a check says otherwise."""

    def __init__(self, client: httpx.Client, name: str = MESSAGES) -> None:
        self.client, self.name = client, name
        self.base: JsonObject = {"model": DEMO, "messages": said("What is a KV cache?")}
        if name == MESSAGES:
            self.base |= {"max_tokens": MAX_TOKENS, "temperature": 0}

    def ask(self, **fields: Any) -> Answer:
        document = self._answer(fields, {})
        Message.model_validate(document)
        return Answer(document)

    def count(self, **fields: Any) -> int:
        document = self._answer(fields, {})
        count: int = MessageTokensCount.model_validate(document).input_tokens
        return count

    def texts(self, **fields: Any) -> list[str]:
        if self.name == COUNT_TOKENS:
            return [str(self.count(**fields))]
        return [json.dumps(self.ask(**fields).json["content"])]

    def under_beta(self, **fields: Any) -> JsonObject:
        """The answer to a request with the header of a beta."""
        return self._answer(fields, {"anthropic-beta": "fields-2026-01-01"})

    def refusal(self, **fields: Any) -> JsonObject:
        """The `error` of a request that must be refused as the client's fault."""
        response = self._post(fields, {})
        error = refused(response)
        document = response.json()
        assert document["type"] == "error" and document["request_id"] == response.headers["request-id"], document
        assert error["type"] == "invalid_request_error", error
        return error

    def reason(self, field: str, value: Any) -> str:
        """Anthropic's errors have no field of their own for the parameter's name: their messages begin with it."""
        message: str = self.refusal(**{field: value})["message"]
        assert re.match(rf"{field}[.:\[]|'{field}'", message), message
        return message.partition(": ")[2]

    def events(self, **fields: Any) -> list[JsonObject]:
        body = self.base | fields | {"stream": True}
        with self.client.stream("POST", f"/v1/{self.name}", json=body, headers=VERSION) as response:
            assert response.status_code == 200, response.read().decode()
            return list(_events(response.iter_lines()))

    def _answer(self, fields: JsonObject, headers: dict[str, str]) -> JsonObject:
        response = self._post(fields, headers)
        assert response.status_code == 200, response.text
        document: JsonObject = response.json()
        return document

    def _post(self, fields: JsonObject, headers: dict[str, str]) -> httpx.Response:
        return self.client.post(f"/v1/{self.name}", json=self.base | fields, headers=VERSION | headers)


def _events(lines: Iterator[str]) -> Iterator[JsonObject]:
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if event["type"] != "ping":
                _EVENTS.validate_python(event)
            yield event
