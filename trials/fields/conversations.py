"""The fields of /v1/conversations and of a conversation's items.

Source: the types in OpenAI's Python package. Invariant: each check uses a conversation created for it.
"""

from __future__ import annotations

from typing import Any, Final

import httpx
from openai.types.conversations import (
    conversation_create_params,
    conversation_update_params,
    item_create_params,
    item_list_params,
)

from .api import Api
from .asking import JsonObject, openai_reason, refused
from .table import Row, promise

_ITEMS: Final = [{"role": "user", "content": text} for text in ("one", "two", "three")]
_PATH: Final = "/v1/conversations"
_LOGPROBS: Final = ["message.output_text.logprobs"]


class Conversations:
    """One of the calls; `ask` sends it. place: below the path, with {} for the conversation's id."""

    def __init__(self, client: httpx.Client, name: str, method: str, place: str) -> None:
        self.client, self.name = client, name
        self._method, self._place = method, place

    def made(self, **fields: Any) -> JsonObject:
        return self._json(self.client.post(_PATH, json=fields))

    def ask(self, conversation: JsonObject | None = None, **fields: Any) -> JsonObject:
        return self._json(self._sent(conversation, fields))

    def texts(self, **fields: Any) -> list[str]:
        return [str(self.ask(**fields).get("data"))]

    def refusal(self, **fields: Any) -> JsonObject:
        return refused(self._sent(None, fields))

    def reason(self, field: str, value: Any) -> str:
        return openai_reason(self.refusal(**{field: value}), field)

    def listed(self, conversation: JsonObject, **query: Any) -> list[str]:
        """The texts of its items."""
        path = f"{_PATH}/{conversation['id']}/items"
        data = self._json(self.client.get(path, params=query))["data"]
        return [item["content"][0]["text"] for item in data]

    def _sent(self, conversation: JsonObject | None, fields: JsonObject) -> httpx.Response:
        if "{}" in self._place and conversation is None:
            conversation = self.made(items=_ITEMS)
        path = _PATH + self._place.format((conversation or {}).get("id"))
        if self._method == "GET":
            return self.client.get(path, params=fields)
        return self.client.post(path, json=fields)

    @staticmethod
    def _json(response: httpx.Response) -> JsonObject:
        assert response.status_code == 200, response.text
        document: JsonObject = response.json()
        return document


@promise("the conversation begins with them")
def _first_items(api: Conversations) -> None:
    assert api.listed(api.ask(items=_ITEMS), order="asc") == ["one", "two", "three"]
    assert api.listed(api.ask(items=[])) == api.listed(api.ask()) == []


@promise("returned, also later")
def _metadata(api: Conversations) -> None:
    for metadata in ({"run": "7"}, {}):
        made = api.ask(metadata=metadata)
        assert made["metadata"] == metadata == api.client.get(f"{_PATH}/{made['id']}").json()["metadata"]


@promise("replaces the former")
def _new_metadata(api: Conversations) -> None:
    conversation = api.made(metadata={"run": "7"})
    assert api.ask(conversation, metadata={"other": "8"})["metadata"] == {"other": "8"}
    assert api.client.get(f"{_PATH}/{conversation['id']}").json()["metadata"] == {"other": "8"}


@promise("appended to the existing items")
def _more_items(api: Conversations) -> None:
    conversation = api.made(items=_ITEMS[:1])
    added = api.ask(conversation, items=_ITEMS[1:])["data"]
    assert [item["content"][0]["text"] for item in added] == ["two", "three"]
    assert api.listed(conversation, order="asc") == ["one", "two", "three"]


@promise("kinds that a response may include; other kinds are refused")
def _include(api: Conversations) -> None:
    fields: JsonObject = {} if api.name.startswith("GET") else {"items": _ITEMS}
    asked: Any = {"include": _LOGPROBS}
    if api.name.startswith("GET"):
        assert len(api.ask(**asked)["data"]) == 3
        assert api.refusal(include=["no such kind"])["param"].startswith("include")
        return
    conversation = api.made()
    path = f"{_PATH}/{conversation['id']}/items"
    assert api.client.post(path, params=asked, json=fields).status_code == 200
    refused = api.client.post(path, params={"include": ["no such kind"]}, json=fields)
    assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("include")


@promise("at most this many items, 1 to 100")
def _limit(api: Conversations) -> None:
    conversation = api.made(items=_ITEMS)
    assert [len(api.listed(conversation, limit=most)) for most in (1, 2, 100)] == [1, 2, 3]
    for wrong in (0, 101, "x"):
        assert api.refusal(limit=wrong)["param"] == "limit"


@promise("asc: as they were added; desc (default): the last one first")
def _order(api: Conversations) -> None:
    conversation = api.made(items=_ITEMS)
    assert api.listed(conversation, order="asc") == ["one", "two", "three"]
    assert api.listed(conversation, order="desc") == api.listed(conversation) == ["three", "two", "one"]
    assert api.refusal(order="x")["param"] == "order"


@promise("items after this id")
def _after(api: Conversations) -> None:
    conversation = api.made(items=_ITEMS)
    page = api.ask(conversation, order="asc", limit=1)
    assert page["has_more"] and page["last_id"] == page["data"][0]["id"]
    assert api.listed(conversation, order="asc", after=page["last_id"]) == ["two", "three"]
    assert api.refusal(after="no such item")["param"] == "after"


_CREATE: Final[dict[str, Row]] = {"items": _first_items, "metadata": _metadata}
_UPDATE: Final[dict[str, Row]] = {"metadata": _new_metadata}
_ADD: Final[dict[str, Row]] = {"items": _more_items, "include": _include}
_LIST: Final[dict[str, Row]] = {"limit": _limit, "order": _order, "after": _after, "include": _include}


def _api(method: str, place: str, params: Any, rows: dict[str, Row]) -> Api:
    name = f"{method} conversations{place.format('{id}')}"
    published = {"OpenAI": frozenset(params.__annotations__) - {"conversation_id"}}
    title = f"`{method} {_PATH}{place.format('{id}')}`"
    return Api(name, title, published, rows, lambda client: Conversations(client, name, method, place))


CONVERSATIONS: Final = (
    _api("POST", "", conversation_create_params.ConversationCreateParams, _CREATE),
    _api("POST", "/{}", conversation_update_params.ConversationUpdateParams, _UPDATE),
    _api("POST", "/{}/items", item_create_params.ItemCreateParams, _ADD),
    _api("GET", "/{}/items", item_list_params.ItemListParams, _LIST),
)
