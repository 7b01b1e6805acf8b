"""Stored chat completions through the real `openai` client, over real sockets, in each kind of store."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.access.settings import AccessSettings
from llmbackend.frontends.journals import response_store
from llmbackend.frontends.journals.redis_storage import RedisStorage
from llmbackend.frontends.journals.store_settings import StoreSettings
from tests.helpers.fake_llm_server import MODEL, FakeLlmServer
from tests.helpers.openai_live_server import serve_openai
from tests.helpers.scripted_text import MODEL as SCRIPTED
from tests.helpers.scripted_text import SAY, host_of_scripts

HI: list[Any] = [{"role": "user", "content": "hi"}]
NUM_KEYS = 32
REDIS_DATABASES = itertools.count(1)
Connect = Callable[[], openai.OpenAI]
Serve = Callable[[StoreSettings], AbstractContextManager[Connect]]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts a server. Each client has a key of its own, and so completions of its own, until NUM_KEYS are used."""
    keys = tmp_path_factory.mktemp("access") / "keys"
    keys.write_text("".join(f"{number}:sk-{number}\n" for number in range(NUM_KEYS)))
    access = AccessControl(AccessSettings(api_key_file=keys))

    @contextmanager
    def start(settings: StoreSettings) -> Iterator[Connect]:
        store = settings.open()
        numbers = iter(range(NUM_KEYS))
        with ExitStack() as clients, serve_openai(FakeLlmServer(), store=store, access=access) as base:
            yield lambda: clients.enter_context(
                openai.OpenAI(base_url=f"{base}/v1", api_key=f"sk-{next(numbers)}", max_retries=0)
            )
        asyncio.run(store.close())

    return start


@pytest.fixture(scope="module", params=["memory", "sqlite", "redis"])
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreSettings]:
    if request.param == "redis":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RedisStorage, "timeout_s", 30.0)  # on a busy machine, a second is not enough
            yield StoreSettings(url=f"redis://127.0.0.1:{request.getfixturevalue('redis_port')}/0")
    else:
        folder = tmp_path_factory.mktemp("store")
        yield StoreSettings(url="memory" if request.param == "memory" else f"sqlite:{folder / 'store'}")


@pytest.fixture(scope="module")
def connect(settings: StoreSettings, serve: Serve) -> Iterator[Connect]:
    with serve(settings) as connect:
        yield connect


@pytest.fixture
def client(connect: Connect) -> openai.OpenAI:
    return connect()


def small(settings: StoreSettings, folder: Path, **limits: Any) -> StoreSettings:
    """Another store of the kind; of Redis another database."""
    url = settings.url
    if url.startswith("sqlite:"):
        url = f"sqlite:{folder / 'store'}"
    if url.startswith("redis:"):
        url = f"{url[:-1]}{next(REDIS_DATABASES)}"
    return replace(settings, url=url, **limits)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    asked: Any = {"model": MODEL, "messages": HI, "store": True} | fields
    return client.chat.completions.create(**asked)


def ids(client: openai.OpenAI, **query: Any) -> list[str]:
    """All pages, one after the other."""
    return [one.id for one in client.chat.completions.list(**query)]


def assert_kept(kept: ChatCompletion, answer: ChatCompletion) -> None:
    assert kept.to_dict() == kept.to_dict() | answer.to_dict()


def test_an_answer_is_retrieved_as_it_was_with_what_its_request_had(client: openai.OpenAI) -> None:
    answer = chat(client, seed=7, temperature=0.5, metadata={"a": "b"}, user="u")
    kept = client.chat.completions.retrieve(answer.id)
    assert_kept(kept, answer)
    expected = {"seed": 7, "temperature": 0.5, "top_p": 1.0, "metadata": {"a": "b"}, "input_user": "u", "tools": None}
    assert kept.to_dict() == kept.to_dict() | expected


def test_nothing_is_kept_unless_it_is_asked_for(client: openai.OpenAI) -> None:
    for store in (False, openai.omit):
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.chat.completions.retrieve(chat(client, store=store).id)
    assert ids(client) == []


@pytest.mark.parametrize("fields", [{}, {"stream_options": {"include_usage": True}}, {"logprobs": True}])
def test_a_stream_is_kept_as_the_whole_answer(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    whole_fields = {name: value for name, value in fields.items() if name != "stream_options"}
    whole = chat(client, **whole_fields)
    chunks = list(chat(client, stream=True, **fields))
    kept = client.chat.completions.retrieve(chunks[0].id)
    own = {"id": kept.id, "created": kept.created}
    assert_kept(kept, ChatCompletion.construct(**(whole.to_dict() | own)))
    assert kept.usage == whole.usage
    assert ids(client) == [whole.id, kept.id]


def test_a_stream_whose_client_has_left_is_not_kept(client: openai.OpenAI) -> None:
    """The answer is longer than what a socket holds."""
    long: list[Any] = [{"role": "user", "content": "x" * 100_000}]
    with chat(client, messages=long, stream=True) as stream:
        id = next(iter(stream)).id
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(id)


def test_the_server_chooses_the_ids(client: openai.OpenAI) -> None:
    named = {"X-Request-Id": "mine"}
    first, second = (chat(client, extra_headers=named) for _ in range(2))
    assert ids(client) == [first.id, second.id] and "mine" not in first.id
    with pytest.raises(openai.BadRequestError, match="'request_id' is not supported with 'store'"):
        chat(client, extra_body={"request_id": "mine"})


def test_pages_follow_one_another_in_both_orders(client: openai.OpenAI) -> None:
    made = [chat(client).id for _ in range(5)]
    assert ids(client) == ids(client, limit=2) == ids(client, order="asc", limit=1) == made
    assert ids(client, order="desc", limit=3) == made[::-1]
    page = client.chat.completions.list(after=made[1], limit=2)
    assert [one.id for one in page.data] == made[2:4] and page.has_more
    assert ids(client, after=made[3]) == made[4:] and ids(client, after=made[4]) == []
    client.chat.completions.delete(made[2])
    with pytest.raises(openai.BadRequestError, match="'after'"):
        ids(client, after=made[2])
    with pytest.raises(openai.BadRequestError, match="an integer from 1 to 100"):
        client.chat.completions.list(limit=101)
    with pytest.raises(openai.BadRequestError, match="unknown query parameter 'before'"):
        client.chat.completions.list(extra_query={"before": "x"})


def test_a_list_is_filtered_by_model_and_metadata(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "_LIST_BATCH", 2)
    made = [chat(client, metadata={"parity": "even" if i % 2 == 0 else "odd", "n": str(i)}).id for i in range(6)]
    assert ids(client, metadata={"parity": "odd"}, limit=2) == made[1::2]
    assert ids(client, metadata={"parity": "odd"}, order="desc") == made[1::2][::-1]
    assert ids(client, metadata={"parity": "even", "n": "4"}) == [made[4]]
    assert ids(client, metadata={"parity": "neither"}) == []
    assert ids(client, model=MODEL) == made and ids(client, model="another") == []


def test_a_page_ends_where_its_documents_are_too_large_together(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [chat(client).id for _ in range(3)]
    monkeypatch.setattr(response_store, "_MAX_PAGE_BYTES", 10)
    page = client.chat.completions.list()
    assert [one.id for one in page.data] == made[:1] and page.has_more
    assert ids(client) == made


def test_metadata_is_replaced_and_found(client: openai.OpenAI) -> None:
    first, second = (chat(client, metadata={"a": "1", "b": "2"}).id for _ in range(2))
    changed = client.chat.completions.update(first, metadata={"a": "3"})
    assert changed.to_dict()["metadata"] == {"a": "3"}
    assert client.chat.completions.retrieve(first) == changed
    assert ids(client, metadata={"a": "1"}) == [second] and ids(client, metadata={"a": "3"}) == [first]
    assert ids(client) == [first, second], "in order of creation"
    assert client.chat.completions.update(first, metadata=None).to_dict()["metadata"] == {}
    with pytest.raises(openai.BadRequestError, match=r"'metadata\.a'"):
        client.chat.completions.update(first, metadata={"a": 1})  # type: ignore[dict-item]
    with pytest.raises(openai.BadRequestError, match="unknown field 'model'"):
        client.chat.completions.update(first, metadata={}, extra_body={"model": "x"})


def test_a_deleted_completion_is_gone(client: openai.OpenAI) -> None:
    first, second = (chat(client).id for _ in range(2))
    gone = client.chat.completions.delete(first)
    assert (gone.id, gone.object, gone.deleted) == (first, "chat.completion.deleted", True)
    assert ids(client) == [second]
    for call in (
        client.chat.completions.retrieve,
        client.chat.completions.delete,
        client.chat.completions.messages.list,
        lambda id: client.chat.completions.update(id, metadata={}),
    ):
        with pytest.raises(openai.NotFoundError, match=f"Chat completion with id '{first}' not found"):
            call(first)


def test_messages_are_listed_as_they_were_sent(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    sent: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        *HI,
    ]
    id = chat(client, messages=sent).id
    messages = client.chat.completions.messages
    found = [one.to_dict() for one in messages.list(id, limit=2)]
    assert [one["id"] for one in found] == [f"{id}-{index}" for index in range(5)]
    assert found[0] == {"id": f"{id}-0", "role": "system", "content": "Be brief.", "content_parts": None, "name": None}
    assert (found[1]["content"], found[1]["content_parts"], found[1]["name"]) == (None, parts, "bob")
    assert found[2]["tool_calls"] == [call] and found[3]["tool_call_id"] == "c1"
    assert [one.id for one in messages.list(id, order="desc", limit=1)] == [one["id"] for one in found[::-1]]
    assert [one.id for one in messages.list(id, after=f"{id}-3")] == [f"{id}-4"]
    with pytest.raises(openai.BadRequestError, match="'after'"):
        messages.list(id, after="none")


def test_a_completion_is_its_keys_alone(connect: Connect) -> None:
    one, two = connect(), connect()
    id, other = chat(one).id, chat(two).id
    for call in (
        two.chat.completions.retrieve,
        two.chat.completions.delete,
        two.chat.completions.messages.list,
        lambda id: two.chat.completions.update(id, metadata={}),
        lambda id: two.responses.retrieve(id),
    ):
        with pytest.raises(openai.NotFoundError):
            call(id)
    with pytest.raises(openai.BadRequestError, match="'after'"):
        two.chat.completions.list(after=id)
    assert ids(two) == [other] and ids(one) == [id]


def test_a_response_is_no_chat_completion(client: openai.OpenAI) -> None:
    id = client.responses.create(model=MODEL, input="hi").id
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(id)
    assert ids(client) == []


def test_the_oldest_go_where_a_key_has_too_many(settings: StoreSettings, serve: Serve, tmp_path: Path) -> None:
    with serve(small(settings, tmp_path, max_responses_per_key=3)) as connect:
        client = connect()
        made = [chat(client).id for _ in range(5)]
        assert ids(client) == made[2:]


def test_the_oldest_go_where_there_are_too_many_bytes(settings: StoreSettings, serve: Serve, tmp_path: Path) -> None:
    with serve(small(settings, tmp_path, max_bytes=4096)) as connect:
        client = connect()
        made = [chat(client).id for _ in range(8)]
        assert 0 < len(kept := ids(client)) < 8 and kept == made[-len(kept) :]


def test_a_completion_expires(settings: StoreSettings, serve: Serve, tmp_path: Path) -> None:
    with serve(small(settings, tmp_path, ttl_s=1e-3)) as connect:
        client = connect()
        id = chat(client).id
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.retrieve(id)
        assert ids(client) == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_stored_fails(tmp_path: Path, serve: Serve, stream: bool) -> None:
    with serve(StoreSettings(url=f"sqlite:{tmp_path / 'store'}")) as connect:
        client = connect()
        (tmp_path / "store").unlink()
        with pytest.raises(openai.APIError, match="the response store is unavailable"):
            list(chat(client, stream=stream))


def test_completions_outlive_the_server(tmp_path: Path, serve: Serve) -> None:
    settings = StoreSettings(url=f"sqlite:{tmp_path / 'store'}")
    with serve(settings) as connect:
        answer = chat(connect())
    with serve(settings) as connect:
        client = connect()
        assert_kept(client.chat.completions.retrieve(answer.id), answer)
        assert ids(client) == [answer.id]


@pytest.mark.parametrize(
    "script", ["two choices", '<think>so</think><tool_call>{"name": "f", "arguments": {}}</tool_call>']
)
def test_a_stream_of_choices_and_calls_is_kept_whole(tmp_path: Path, script: str) -> None:
    tool: Any = {"type": "function", "function": {"name": "f"}}
    store = StoreSettings().open()
    with (
        host_of_scripts(tmp_path) as host,
        serve_openai(host, store=store) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0) as client,
    ):
        ask: Any = {"model": SCRIPTED, "messages": [{"role": "user", "content": SAY + script}], "n": 2, "tools": [tool]}
        whole = chat(client, **ask)
        (id,) = {chunk.id for chunk in chat(client, stream=True, **ask)}
        kept = client.chat.completions.retrieve(id)
        for found, expected in zip(kept.choices, whole.choices, strict=True):
            calls = [call.to_dict() | {"id": ""} for call in found.message.tool_calls or ()]
            assert calls == [call.to_dict() | {"id": ""} for call in expected.message.tool_calls or ()]
            assert (found.message.content, found.finish_reason) == (expected.message.content, expected.finish_reason)
        assert kept.usage is not None and kept.usage.completion_tokens == whole.usage.completion_tokens
        assert kept.to_dict()["tools"] == [tool]


def test_only_making_completions_counts_in_the_rate_limit_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("few:sk-few rpm=2\n")
    access = AccessControl(AccessSettings(api_key_file=tmp_path / "keys"))
    with (
        serve_openai(FakeLlmServer(), store=StoreSettings().open(), access=access) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key="sk-few", max_retries=0) as client,
    ):
        made = [chat(client).id for _ in range(2)]
        for _ in range(3):
            assert ids(client) == made
            assert client.chat.completions.retrieve(made[0]).id == made[0]
            client.chat.completions.update(made[0], metadata={"a": "b"})
        client.chat.completions.delete(made[0])
        with pytest.raises(openai.RateLimitError):
            chat(client)


def test_a_server_without_a_store_refuses_by_name() -> None:
    with serve_openai(FakeLlmServer()) as base, openai.OpenAI(base_url=f"{base}/v1", api_key="x") as client:
        with pytest.raises(openai.BadRequestError, match="'store' is not supported: this server stores no"):
            chat(client)
        with pytest.raises(openai.NotFoundError, match="this server stores no chat completions"):
            client.chat.completions.list()


def test_other_paths_and_methods_stay_what_they_were(connect: Connect) -> None:
    client = connect()
    with httpx.Client(base_url=str(client.base_url), headers=client.auth_headers) as http:
        batch = http.post("chat/completions/batch", json={})
        assert batch.status_code == 404 and "send one request per conversation" in batch.text
        rendered = http.post("chat/completions/render", json={"model": MODEL, "messages": HI})
        assert "token_ids" in rendered.text or "prompt" in rendered.text
        assert http.put("chat/completions", json={}).headers["allow"] == "GET, POST"
        refused = http.post("completions", json={"model": MODEL, "prompt": "x", "store": True})
        assert refused.status_code == 400 and "'store' is not supported" in json.loads(refused.text)["error"]["message"]
