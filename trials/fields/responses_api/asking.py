"""/v1/responses as used by the field checks: small deterministic requests, and their answers.

Used by the checks. Independent of fields. Invariant: every answer and event parses as a type of OpenAI's package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.helpers.waiting import eventually

from ..asking import DEMO, JsonObject, openai_reason, refused

RESPONSES = "responses"
MAX_OUTPUT_TOKENS = 16
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_LIVE = ("queued", "in_progress")


@dataclass(frozen=True)
class Answer:
    """A response object."""

    json: JsonObject

    @property
    def id(self) -> str:
        name: str = self.json["id"]
        return name

    @property
    def items(self) -> list[JsonObject]:
        items: list[JsonObject] = self.json["output"]
        return items

    def of(self, kind: str) -> list[JsonObject]:
        """Its output items of a type."""
        return [item for item in self.items if item["type"] == kind]

    @property
    def text(self) -> str:
        return "".join(part["text"] for item in self.of("message") for part in item["content"])

    @property
    def calls(self) -> list[str]:
        """Names of the functions that it calls."""
        return [item["name"] for item in self.of("function_call")]

    @property
    def usage(self) -> JsonObject:
        usage: JsonObject = self.json["usage"]
        return usage

    @property
    def why_incomplete(self) -> str | None:
        details = self.json["incomplete_details"]
        return details and str(details["reason"])


class Responses:
    """Requests ask the demo model for a few tokens, greedily, unless a check says otherwise."""

    name = RESPONSES

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.base: JsonObject = {"model": DEMO, "input": "What is a KV cache?", "temperature": 0}
        self.base["max_output_tokens"] = MAX_OUTPUT_TOKENS

    def ask(self, **fields: Any) -> Answer:
        response = self._post(fields)
        assert response.status_code == 200, response.text
        return read(response.json())

    def texts(self, **fields: Any) -> list[str]:
        answer = self.ask(**fields)
        return [answer.text, *(json.dumps(item.get("arguments")) for item in answer.of("function_call"))]

    def refusal(self, **fields: Any) -> JsonObject:
        """The `error` of a request that must be refused as the client's fault."""
        return refused(self._post(fields))

    def reason(self, field: str, value: Any) -> str:
        return openai_reason(self.refusal(**{field: value}), field)

    def events(self, **fields: Any) -> list[JsonObject]:
        body = self.base | fields | {"stream": True}
        with self.client.stream("POST", "/v1/responses", json=body) as response:
            assert response.status_code == 200, response.read().decode()
            return list(_events(response.iter_lines()))

    def get(self, path: str, **query: Any) -> httpx.Response:
        return self.client.get(f"/v1/responses/{path}", params=query)

    def replayed(self, name: str, **query: Any) -> list[JsonObject]:
        """The events of a stored response."""
        path = f"/v1/responses/{name}"
        with self.client.stream("GET", path, params={"stream": "true"} | query) as response:
            assert response.status_code == 200, response.read().decode()
            return list(_events(response.iter_lines()))

    def ended(self, name: str) -> Answer:
        """A background response, when it is over."""
        eventually(lambda: self.get(name).json()["status"] not in _LIVE)
        return read(self.get(name).json())

    def _post(self, fields: JsonObject) -> httpx.Response:
        return self.client.post("/v1/responses", json=self.base | fields)


def read(document: JsonObject) -> Answer:
    Response.model_validate(document)
    return Answer(document)


def _events(lines: Iterator[str]) -> Iterator[JsonObject]:
    for line in lines:
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            _EVENTS.validate_python(event)
            yield event
