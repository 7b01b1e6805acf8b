"""The two endpoints as used by the field checks: small deterministic requests, and their answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema_rs

JsonObject = dict[str, Any]
DEMO, BYTES, WORDS, QUEUE, REASONER = "demo", "bytes", "words", "queue", "reasoner"
"""The bundled model, and mock models: one whose tokens are bytes; one with a tokenizer of words, which begins texts
with a token of its own and writes spaces between words; a slow one, one request at a time; one that reasons, and whose
chat template reads documents and a reasoning effort."""
CHAT, COMPLETIONS = "chat/completions", "completions"
MAX_TOKENS = 8


@dataclass(frozen=True)
class Answer:
    """A whole response."""

    json: JsonObject

    @property
    def choices(self) -> list[JsonObject]:
        choices: list[JsonObject] = self.json["choices"]
        return choices

    @property
    def texts(self) -> list[str]:
        return [one["message"]["content"] if "message" in one else one["text"] for one in self.choices]

    @property
    def text(self) -> str:
        return self.texts[0]

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = self.choices[0]["token_ids"]
        return ids

    @property
    def finish_reason(self) -> str:
        reason: str = self.choices[0]["finish_reason"]
        return reason

    @property
    def usage(self) -> JsonObject:
        usage: JsonObject = self.json["usage"]
        return usage


class Endpoint:
    """One endpoint. Requests ask the demo model for a few tokens, greedily, unless a check says otherwise."""

    def __init__(self, client: httpx.Client, name: str) -> None:
        self._client = client
        self.name = name
        self.is_chat = name == CHAT
        document = client.get("/openapi.json").json()
        schema = "ChatCompletion" if self.is_chat else "Completion"
        self._answers = jsonschema_rs.validator_for({**document, "$ref": f"#/components/schemas/{schema}"})
        prompt: JsonObject = {"messages": said("What is a KV cache?")} if self.is_chat else {"prompt": "A block of the"}
        self.base: JsonObject = {"model": DEMO, "temperature": 0, "max_tokens": MAX_TOKENS, **prompt}

    def ask(self, **fields: Any) -> Answer:
        response = self._post(fields)
        assert response.status_code == 200, response.text
        answer = response.json()
        problems = [error.message for error in self._answers.iter_errors(answer)]
        assert not problems, f"an answer is not as /openapi.json says: {problems}"
        return Answer(answer)

    def refusal(self, **fields: Any) -> JsonObject:
        """The `error` of a request that must be refused as the client's fault."""
        return refused(self._post(fields))

    def texts(self, **fields: Any) -> list[str]:
        return self.ask(**fields).texts

    def reason(self, field: str, value: Any) -> str:
        return openai_reason(self.refusal(**{field: value}), field)

    def chunks(self, **fields: Any) -> list[JsonObject]:
        """A stream's chunks."""
        body = self.base | fields | {"stream": True}
        with self._client.stream("POST", f"/v1/{self.name}", json=body) as response:
            assert response.status_code == 200, response.read().decode()
            return list(_events(response.iter_lines()))

    def streamed(self, **fields: Any) -> list[str]:
        """The text of each choice of a stream."""
        texts: dict[int, str] = {}
        for chunk in self.chunks(**fields):
            for choice in chunk["choices"]:
                text = choice["delta"].get("content") if self.is_chat else choice["text"]
                texts[choice["index"]] = texts.get(choice["index"], "") + (text or "")
        return [texts[index] for index in sorted(texts)]

    def retrieved(self, id: str) -> httpx.Response:
        """A stored answer."""
        return self._client.get(f"/v1/{self.name}/{id}")

    def gauge(self, name: str, model: str) -> float:
        """A metric of vLLM's name, now."""
        found = re.search(
            rf'^vllm:{name}{{[^}}]*model="{model}"[^}}]*}} (\S+)$', self._client.get("/metrics").text, re.M
        )
        return float(found[1]) if found else 0.0

    def _post(self, fields: JsonObject) -> httpx.Response:
        body = {name: value for name, value in (self.base | fields).items() if value is not ...}
        return self._client.post(f"/v1/{self.name}", json=body)


def _events(lines: Iterator[str]) -> Iterator[JsonObject]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def refused(response: httpx.Response) -> JsonObject:
    """The `error` of a response that must refuse its request as the client's fault."""
    assert response.status_code == 400, f"expected a refusal, got {response.status_code}: {response.text[:300]}"
    error: JsonObject = response.json()["error"]
    return error


def openai_reason(error: JsonObject, field: str) -> str:
    """Why a field is refused, from an error of OpenAI's shape."""
    assert error["param"] == field and error["code"] == "unsupported_parameter", error
    assert re.match(rf"'{field}' is not supported: ['\w]", error["message"]), error
    reason: str = error["message"].partition(": ")[2]
    return reason


def said(text: str, **more: Any) -> list[JsonObject]:
    return [{"role": "user", "content": text, **more}]
