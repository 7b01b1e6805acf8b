"""Operations on stored responses: retrieving one, and listing its input items.

Source: the types in OpenAI's Python package. Invariant: each check uses a response created for it.
"""

from __future__ import annotations

import json
from typing import Any, Final

import httpx
from openai.types.responses import input_item_list_params, response_retrieve_params

from ..api import Api
from ..asking import JsonObject, openai_reason, refused
from ..table import Refused, Row, promise
from .asking import Answer, Responses

_LOGPROBS: Final = ["message.output_text.logprobs"]
_INPUT: Final = [{"role": "user", "content": text} for text in ("one", "two", "three")]


class Stored:
    """GET of a response, or of what is below it."""

    def __init__(self, client: httpx.Client, below: str = "") -> None:
        self.api = Responses(client)
        self.name = f"responses/{{id}}{below}"
        self._below = below

    def made(self, **fields: Any) -> Answer:
        return self.api.ask(**{"input": _INPUT} | fields)

    def ask(self, answer: Answer, **query: Any) -> JsonObject:
        response = self.api.get(f"{answer.id}{self._below}", **query)
        assert response.status_code == 200, response.text
        document: JsonObject = response.json()
        return document

    def texts(self, **query: Any) -> list[str]:
        answer = self.made()
        return [str(self.ask(answer, **query).get("output") == answer.items)]

    def refusal(self, **query: Any) -> JsonObject:
        return refused(self.api.get(f"{self.made().id}{self._below}", **query))

    def reason(self, field: str, value: Any) -> str:
        return openai_reason(self.refusal(**{field: value, "stream": "true"}), field)

    def listed(self, answer: Answer, **query: Any) -> list[str]:
        """The texts of its input items."""
        return [item["content"][0]["text"] for item in self.ask(answer, **query)["data"]]


@promise("the events instead of the response")
def _stream(stored: Stored) -> None:
    answer = stored.api.ended(stored.made(background=True).id)
    assert stored.ask(answer, stream="false") == answer.json
    events = stored.api.replayed(answer.id)
    assert events[0]["type"] == "response.created" and events[-1]["response"] == answer.json


@promise("the events after this number")
def _starting_after(stored: Stored) -> None:
    answer = stored.api.ended(stored.made(background=True).id)
    events = stored.api.replayed(answer.id)
    for cursor in (0, 3):
        assert stored.api.replayed(answer.id, starting_after=cursor) == events[cursor + 1 :]
    assert stored.refusal(starting_after="x", stream="true")["param"] == "starting_after"


@promise("the request's values; other kinds are refused")
def _include(stored: Stored) -> None:
    answer = stored.made(include=_LOGPROBS)
    assert json.dumps(stored.ask(answer, include=_LOGPROBS)["output"]) == json.dumps(answer.items)
    assert stored.refusal(include=["no such kind"])["param"].startswith("include")


@promise("at most this many items, 1 to 100")
def _limit(stored: Stored) -> None:
    answer = stored.made()
    assert [len(stored.listed(answer, limit=most)) for most in (1, 2, 100)] == [1, 2, 3]
    for wrong in (0, 101, "x"):
        assert stored.refusal(limit=wrong)["param"] == "limit"


@promise("asc: as they were sent; desc (default): the last one first")
def _order(stored: Stored) -> None:
    answer = stored.made()
    texts = ["one", "two", "three"]
    assert stored.listed(answer, order="asc") == texts
    assert stored.listed(answer, order="desc") == stored.listed(answer) == texts[::-1]
    assert stored.refusal(order="x")["param"] == "order"


@promise("items after this id")
def _after(stored: Stored) -> None:
    answer = stored.made()
    page = stored.ask(answer, order="asc", limit=1)
    assert page["has_more"] and page["last_id"] == page["data"][0]["id"]
    assert stored.listed(answer, order="asc", after=page["last_id"]) == ["two", "three"]
    assert stored.refusal(after="no such item")["param"] == "after"


@promise("kinds that a response may include; other kinds are refused")
def _included_items(stored: Stored) -> None:
    answer = stored.made()
    assert stored.listed(answer, include=_LOGPROBS) == stored.listed(answer)
    assert stored.refusal(include=["no such kind"])["param"].startswith("include")


_RETRIEVED: Final[dict[str, Row]] = {
    "stream": _stream,
    "starting_after": _starting_after,
    "include": _include,
    "include_obfuscation": Refused(["true"], ["false"]),
}
_LISTED: Final[dict[str, Row]] = {
    "limit": _limit,
    "order": _order,
    "after": _after,
    "include": _included_items,
}
RETRIEVE: Final = Api(
    "responses/{id}",
    "`GET /v1/responses/{id}`",
    {"OpenAI": frozenset({*response_retrieve_params.ResponseRetrieveParamsBase.__annotations__, "stream"})},
    _RETRIEVED,
    Stored,
)
INPUT_ITEMS: Final = Api(
    "responses/{id}/input_items",
    "`GET /v1/responses/{id}/input_items`",
    {"OpenAI": frozenset(input_item_list_params.InputItemListParams.__annotations__)},
    _LISTED,
    lambda client: Stored(client, "/input_items"),
)
