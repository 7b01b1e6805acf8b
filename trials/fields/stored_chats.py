"""`store` for chats, and operations on stored chat completions: listing and changing them, and their messages.

Source: the types in OpenAI's Python package. Invariant: each check uses completions created for it.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

import httpx
from openai.types.chat import completion_list_params, completion_update_params
from openai.types.chat.completions import message_list_params

from .api import Api
from .asking import CHAT, Endpoint, JsonObject, openai_reason, refused, said
from .table import Row, promise

_PATH: Final = f"/v1/{CHAT}"


class StoredChats:
    """One of the calls; `ask` sends it. place: below the path, with {} for the completion's id."""

    def __init__(self, client: httpx.Client, name: str, method: str, place: str) -> None:
        self.client, self.name = client, name
        self.chats = Endpoint(client, CHAT)
        self._method, self._place = method, place

    def made(self, **fields: Any) -> str:
        """The id of a completion."""
        id: str = self.chats.ask(store=True, **fields).json["id"]
        return id

    def three(self) -> tuple[str, list[str]]:
        """Three completions and the query that lists them alone, as text."""
        run = uuid.uuid4().hex
        return run, [self.made(metadata={"run": run, "number": str(number)}) for number in range(3)]

    def ask(self, id: str | None = None, **fields: Any) -> JsonObject:
        response = self._sent(id, fields)
        assert response.status_code == 200, response.text
        answer: JsonObject = response.json()
        return answer

    def texts(self, **fields: Any) -> list[str]:
        return [str(self.ask(**fields).get("data"))]

    def refusal(self, **fields: Any) -> JsonObject:
        return refused(self._sent(None, fields))

    def reason(self, field: str, value: Any) -> str:
        return openai_reason(self.refusal(**{field: value}), field)

    def ids(self, run: str, **query: Any) -> list[str]:
        return [one["id"] for one in self.ask(**{"metadata[run]": run} | query)["data"]]

    def _sent(self, id: str | None, fields: JsonObject) -> httpx.Response:
        if "{}" in self._place and id is None:
            id = self.made()
        path = _PATH + self._place.format(id)
        return self.client.get(path, params=fields) if self._method == "GET" else self.client.post(path, json=fields)


@promise("the completion can be retrieved later; needs a server with a store")
def _store(api: Endpoint) -> None:
    kept, gone = (api.ask(store=value).json for value in (True, False))
    found = api.retrieved(kept["id"])
    assert found.json() == found.json() | kept
    assert api.retrieved(gone["id"]).status_code == 404


@promise("only completions with these pairs: `metadata[key]=value`")
def _filter(api: StoredChats) -> None:
    run, made = api.three()
    assert api.ids(run) == made and api.ids(run, **{"metadata[number]": "1"}) == made[1:2]
    assert api.refusal(metadata="x")["param"] == "metadata"


@promise("only completions of this model")
def _model(api: StoredChats) -> None:
    run, made = api.three()
    assert api.ids(run, model=api.chats.base["model"]) == made and api.ids(run, model="another") == []


@promise("at most this many completions, 1 to 100")
def _limit(api: StoredChats) -> None:
    run, made = api.three()
    assert [api.ids(run, limit=most) for most in (1, 2, 100)] == [made[:1], made[:2], made]
    for wrong in (0, 101, "x"):
        assert api.refusal(limit=wrong)["param"] == "limit"


@promise("asc (default): the oldest first; desc: the latest first")
def _order(api: StoredChats) -> None:
    run, made = api.three()
    assert api.ids(run, order="asc") == api.ids(run) == made and api.ids(run, order="desc") == made[::-1]
    assert api.refusal(order="x")["param"] == "order"


@promise("completions after this id")
def _after(api: StoredChats) -> None:
    run, made = api.three()
    assert api.ids(run, after=made[0]) == made[1:]
    assert api.refusal(after="no such item")["param"] == "after"


@promise("replaces the completion's metadata")
def _new_metadata(api: StoredChats) -> None:
    assert api.ask(api.made(metadata={"a": "1"}), metadata={"b": "2"})["metadata"] == {"b": "2"}
    assert api.refusal(metadata={"a": 1})["param"] == "metadata.a"


_SAID: Final = [*said("one"), *said("two"), *said("three")]


def _listed(api: StoredChats, id: str, **query: Any) -> list[str]:
    return [message["content"] for message in api.ask(id, **query)["data"]]


@promise("at most this many messages, 1 to 100")
def _messages_limit(api: StoredChats) -> None:
    id = api.made(messages=_SAID)
    assert [len(_listed(api, id, limit=most)) for most in (1, 2, 100)] == [1, 2, 3]
    assert api.refusal(limit=0)["param"] == "limit"


@promise("asc (default): as they were sent; desc: the last one first")
def _messages_order(api: StoredChats) -> None:
    id = api.made(messages=_SAID)
    assert _listed(api, id) == ["one", "two", "three"] and _listed(api, id, order="desc") == ["three", "two", "one"]
    assert api.refusal(order="x")["param"] == "order"


@promise("messages after this id")
def _messages_after(api: StoredChats) -> None:
    id = api.made(messages=_SAID)
    first = api.ask(id, limit=1)["last_id"]
    assert _listed(api, id, after=first) == ["two", "three"]
    assert api.refusal(after="no such item")["param"] == "after"


STORE: Final[dict[str, Row]] = {"store": _store}
_LIST: Final[dict[str, Row]] = {
    "metadata": _filter,
    "model": _model,
    "limit": _limit,
    "order": _order,
    "after": _after,
}
_UPDATE: Final[dict[str, Row]] = {"metadata": _new_metadata}
_MESSAGES: Final[dict[str, Row]] = {"limit": _messages_limit, "order": _messages_order, "after": _messages_after}


def _api(method: str, place: str, params: Any, rows: dict[str, Row]) -> Api:
    name = f"{method} {CHAT}{place.format('{id}')}"
    published = {"OpenAI": frozenset(params.__annotations__)}
    title = f"`{method} {_PATH}{place.format('{id}')}`"
    return Api(name, title, published, rows, lambda client: StoredChats(client, name, method, place))


STORED_CHATS: Final = (
    _api("GET", "", completion_list_params.CompletionListParams, _LIST),
    _api("POST", "/{}", completion_update_params.CompletionUpdateParams, _UPDATE),
    _api("GET", "/{}/messages", message_list_params.MessageListParams, _MESSAGES),
)
