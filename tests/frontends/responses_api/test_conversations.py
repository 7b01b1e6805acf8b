"""Conversations through the official client, over real sockets and a store in memory."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import httpx
import openai
import orjson
import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.journals.documents import Capacity
from llmbackend.frontends.journals.response_store import ResponseStore
from llmbackend.frontends.journals.sqlite_storage import SqliteStorage
from llmbackend.frontends.journals.store_settings import IN_MEMORY, StoreSettings
from llmbackend.frontends.openai.responses_api.conversations import Conversations
from tests.helpers.openai_live_server import serve_openai

T = TypeVar("T")
USER: Any = {"type": "message", "role": "user", "content": "Hi!"}
ANSWER: Any = {"role": "assistant", "content": "Hello."}
CALL: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = InferenceServer(ServerOptions(model_repositories=[Path(tmp_path_factory.mktemp("repository"))]))
    server.start()
    store = ResponseStore(SqliteStorage(None, Capacity(1 << 20, 1000)), 3600)
    with serve_openai(server, store=store, max_body_bytes=64 << 10) as base:
        yield f"{base}/v1"
    assert server.stop(timeout_s=20)


@pytest.fixture(scope="module")
def client(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        yield client


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


def test_a_conversation_from_its_creation_to_its_end(client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"topic": "a"}, items=[USER])
    assert made.id.startswith("conv_") and made.object == "conversation" and made.metadata == {"topic": "a"}
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"topic": "b"})
    assert changed.metadata == {"topic": "b"} and changed.created_at == made.created_at
    assert client.conversations.retrieve(made.id) == changed
    deleted = client.conversations.delete(made.id)
    assert deleted.deleted and deleted.id == made.id and deleted.object == "conversation.deleted"
    for call in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError, match=r"not found"):
            call(made.id)


def test_items(client: openai.OpenAI) -> None:
    id = client.conversations.create().id
    added = client.conversations.items.create(id, items=[USER, ANSWER, CALL])
    assert [item.type for item in added.data] == ["message", "message", "function_call"]
    assert [item.id.split("_")[0] for item in added.data if item.id] == ["msg", "msg", "fc"]
    user: Any = client.conversations.items.retrieve(added.data[0].id or "", conversation_id=id)
    assert (user.role, user.status, user.content[0].type, user.content[0].text) == (
        "user", "completed", "input_text", "Hi!",
    )  # fmt: skip
    assert client.conversations.items.delete(added.data[0].id or "", conversation_id=id).id == id
    assert [item.id for item in client.conversations.items.list(id, order="asc")] == [
        item.id for item in added.data[1:]
    ]
    with pytest.raises(openai.NotFoundError, match="Item with id"):
        client.conversations.items.retrieve(added.data[0].id or "", conversation_id=id)
    with pytest.raises(openai.NotFoundError, match="Item with id"):
        client.conversations.items.delete(added.data[0].id or "", conversation_id=id)


def test_pages(client: openai.OpenAI) -> None:
    id = client.conversations.create().id
    for begin in range(0, 45, 15):
        items = [{"role": "user", "content": f"{begin + number}"} for number in range(15)]
        client.conversations.items.create(id, items=items)  # type: ignore[arg-type]  # easy messages
    numbers = [str(number) for number in range(45)]
    assert texts(client.conversations.items.list(id, order="asc", limit=7)) == numbers
    assert texts(client.conversations.items.list(id)) == numbers[::-1]
    first = client.conversations.items.list(id, limit=2)
    assert texts(first.data) == ["44", "43"] and first.has_more
    assert (first.model_extra or {})["first_id"] == first.data[0].id and first.last_id == first.data[1].id


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "", {"items": [USER] * 21}, 400, "items"),
        ("POST", "", {"items": [{"role": "user"}]}, 400, "items[0].content"),
        ("POST", "", {"items": [USER | {"foo": 1}]}, 400, "items[0].foo"),
        ("POST", "", {"items": [{"type": "item_reference", "id": "msg_1"}]}, 400, "items[0].type"),
        ("POST", "", {"items": [{"type": "web_search_call"}]}, 400, "items[0].type"),
        ("POST", "", {"metadata": {"a": 1}}, 400, "metadata.a"),
        ("POST", "", {"foo": 1}, 400, "foo"),
        ("POST", "/{id}", {}, 400, "metadata"),
        ("POST", "/{id}/items", {}, 400, "items"),
        ("GET", "/{id}/items?limit=0", None, 400, "limit"),
        ("GET", "/{id}/items?limit=101", None, 400, "limit"),
        ("GET", "/{id}/items?order=up", None, 400, "order"),
        ("GET", "/{id}/items?after=msg_1", None, 400, "after"),
        ("GET", "/{id}/items?include=foo", None, 400, "include"),
        ("GET", "/{id}/items?before=foo", None, 400, "before"),
        ("GET", "/conv_1", None, 404, None),
        ("POST", "/conv_1/items", {"items": [USER]}, 404, None),
        ("POST", "/conv_1", {"metadata": {}}, 404, None),
        ("PATCH", "/{id}", {}, 405, None),
    ],
)
def test_what_is_wrong_is_named(base: str, method: str, path: str, body: Any, status: int, param: str | None) -> None:
    id = httpx.post(f"{base}/conversations", json={}).json()["id"]
    answer = httpx.request(method, f"{base}/conversations{path.format(id=id)}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error


def test_what_is_null_in_an_item_is_left_out(base: str) -> None:
    nulls = dict.fromkeys(("type", "id", "status", "phase"))
    made = httpx.post(f"{base}/conversations", json={"items": [{"role": "user", "content": "Hi!"} | nulls]}).json()
    (item,) = httpx.get(f"{base}/conversations/{made['id']}/items").json()["data"]
    assert item.pop("id")
    content = [{"type": "input_text", "text": "Hi!"}]
    assert item == {"type": "message", "role": "user", "content": content, "status": "completed"}


def test_a_conversation_is_bounded(base: str) -> None:
    id = httpx.post(f"{base}/conversations", json={}).json()["id"]
    large = {"items": [{"role": "user", "content": "x" * (48 << 10)}]}
    sizes = [httpx.post(f"{base}/conversations/{id}/items", json=large).status_code for _ in range(2)]
    assert sizes == [200, 400]
    listed = httpx.get(f"{base}/conversations/{id}/items").json()["data"]
    assert len(listed) == 1


def test_an_answer_is_added_once() -> None:
    async def twice() -> list[str]:
        store = IN_MEMORY.open()
        conversations = Conversations(store, InferenceGate(Mock(InferenceServer)), 1 << 20)
        id = (await conversations.create([], {})).id
        answer = orjson.dumps([{"type": "message", "id": "msg_1"}, {"type": "message", "id": "msg_2"}])
        for _ in range(2):
            await conversations.append_answer("", id, answer)
        assert not await conversations.append_answer("", "conv_deleted", answer)
        items = await conversations.items(id)
        await store.close()
        return [item["id"] for item in items]

    assert asyncio.run(twice()) == ["msg_1", "msg_2"]


def test_a_conversation_outlives_its_server_and_is_its_owners(tmp_path: Path) -> None:
    settings = StoreSettings(url=f"sqlite:{tmp_path / 'store'}")

    async def with_store(work: Callable[[Conversations], Awaitable[T]]) -> T:
        store = settings.open()
        try:
            return await work(Conversations(store, InferenceGate(Mock(InferenceServer)), 1 << 20))
        finally:
            await store.close()

    async def make(conversations: Conversations) -> str:
        id = (await conversations.create([{"type": "message", "text": "kept"}], {"a": "b"})).id
        await conversations.append_answer("another key", id, b'[{"type":"message","id":"msg_1"}]')
        return id

    id = asyncio.run(with_store(make))
    items = asyncio.run(with_store(lambda conversations: conversations.items(id)))
    assert [item.get("text") for item in items] == ["kept"]


def test_changes_at_once_are_all_kept(base: str) -> None:
    id = httpx.post(f"{base}/conversations", json={}).json()["id"]

    def add(number: int) -> int:
        body = {"items": [{"role": "user", "content": f"{number}"}]}
        return httpx.post(f"{base}/conversations/{id}/items", json=body).status_code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(add, range(24))) == {200}
    listed = httpx.get(f"{base}/conversations/{id}/items?limit=100").json()["data"]
    assert sorted(int(item["content"][0]["text"]) for item in listed) == list(range(24))
