"""Background and stored responses through the real `openai` client: read by cursor, cancelled, deleted, listed; and
continued by another server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from llmbackend.adapter.tasks.task_map import TaskMap
from llmbackend.core.inference_server import InferenceServer
from llmbackend.frontends.context import FrontendContext
from llmbackend.frontends.errors import LimitReachedError
from llmbackend.frontends.generation.models import ModelCatalog
from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.journals.documents import Document
from llmbackend.frontends.journals.response_store import LiveLog, ResponseStore, current_owner
from llmbackend.frontends.journals.store_settings import StoreSettings
from llmbackend.frontends.limits import InferenceLimits
from llmbackend.frontends.openai.responses_api import background
from llmbackend.frontends.openai.router import create_openai_router
from tests.helpers.openai_live_server import openai_client, with_presence
from tests.helpers.scripted_text import MODEL, SAY, host_of_scripts
from tests.helpers.waiting import eventually

from .event_reader import EventReader, events_of

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris é"}}\n</tool_call>'
SCRIPT = f"<think>hm, é</think>Here: {CALL}"
TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}]
LONG = "x" * 3000


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    with host_of_scripts(tmp_path_factory.mktemp("repository"), max_model_len=8192, mock_step_ms=1) as host:
        yield host


@pytest.fixture(scope="module")
def gate(host: InferenceServer) -> InferenceGate:
    return InferenceGate(host, InferenceLimits(max_concurrent_requests=2))


@pytest.fixture(scope="module", params=["memory", "sqlite"])
def client(
    host: InferenceServer,
    gate: InferenceGate,
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("store") / "store"
    store = StoreSettings(url="memory" if request.param == "memory" else f"sqlite:{path}").open()
    with openai_client(host, store=store, gate=gate) as client:
        yield client


@pytest.fixture(autouse=True)
def nothing_is_left(gate: InferenceGate) -> Iterator[None]:
    yield
    eventually(lambda: not gate.open_inferences)


def create(client: Any, script: str = SCRIPT, **fields: Any) -> Any:
    body: dict[str, Any] = {"model": MODEL, "input": SAY + script, "tools": TOOLS, "temperature": 0} | fields
    return client.responses.create(**body)


def wait(client: Any, id: str) -> Any:
    eventually(lambda: client.responses.retrieve(id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(id)


def read(client: Any, id: str, **query: Any) -> list[dict[str, Any]]:
    answer = client.get(f"/responses/{id}", cast_to=httpx.Response, options={"params": {"stream": "true"} | query})
    return list(events_of(answer.content))


def test_a_background_response_is_what_it_would_be_in_the_foreground(client: Any) -> None:
    queued = create(client, background=True)
    assert (queued.status, queued.output) == ("queued", [])
    made, whole = wait(client, queued.id), create(client)
    assert made.status == "completed" and made.id == queued.id and made.created_at == queued.created_at
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call"]
    for one, other in zip(made.output, whole.output, strict=True):
        named = {"id", "call_id"}
        assert one.model_dump(exclude=named) == other.model_dump(exclude=named)
    assert made.usage.output_tokens == whole.usage.output_tokens


def test_its_events_are_read_from_any_cursor(client: Any) -> None:
    id = create(client, background=True).id
    live = read(client, id)
    reader = EventReader()
    assert reader.read_all(iter(live)) == json.loads(client.responses.with_raw_response.retrieve(id).content)
    assert reader.kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [event["sequence_number"] for event in live] == list(range(len(live)))
    for after in range(0, len(live), 7):
        assert read(client, id, starting_after=str(after)) == live[after + 1 :]
    assert [event.sequence_number for event in client.responses.retrieve(id, stream=True, starting_after=3)] == list(
        range(4, len(live))
    )


def test_a_stream_that_is_cut_off_goes_on_by_cursor(client: Any) -> None:
    first: list[Any] = []
    with create(client, background=True, stream=True) as stream:
        for event in stream:
            first.append(event)
            if len(first) == 20:
                break
    id = first[0].response.id
    rest = list(client.responses.retrieve(id, stream=True, starting_after=first[-1].sequence_number))
    assert [event.sequence_number for event in first + rest] == list(range(len(first) + len(rest)))
    assert rest[-1].type == "response.completed" and rest[-1].response == client.responses.retrieve(id)


def test_cancel(client: Any, gate: InferenceGate) -> None:
    id = create(client, LONG, background=True).id
    assert gate.open_inferences == 1
    assert client.responses.retrieve(id).status == "in_progress"
    cancelled = client.responses.cancel(id)
    assert cancelled.status == "cancelled" and not gate.open_inferences
    assert client.responses.cancel(id) == cancelled == client.responses.retrieve(id)
    assert read(client, id)[-1]["type"] != "response.completed"
    done = create(client, background=True).id
    made = wait(client, done)
    assert client.responses.cancel(done) == made
    with pytest.raises(openai.BadRequestError, match="was not created with 'background': true"):
        client.responses.cancel(create(client).id)


def test_delete(client: Any, gate: InferenceGate) -> None:
    for fields in ({}, {"background": True}, {"background": True, "input": SAY + LONG}):
        id = create(client, **fields).id
        client.responses.delete(id)
        assert not gate.open_inferences or "input" not in fields
        for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="not found"):
                ask(id)


def test_background_responses_count_in_the_limits(client: Any) -> None:
    ids = [create(client, LONG, background=True).id for _ in range(2)]
    with pytest.raises(openai.RateLimitError):
        create(client, LONG, background=True)
    for id in ids:
        client.responses.cancel(id)


def test_a_response_that_fails_says_why(client: Any) -> None:
    made = wait(client, create(client, "x", background=True, input="y" * 9000, max_output_tokens=10).id)
    assert made.status == "failed" and made.error is not None
    kinds = [event["type"] for event in read(client, made.id)]
    assert kinds[-2:] == ["error", "response.failed"]


def test_input_items(client: Any) -> None:
    items: list[Any] = [{"role": "user", "content": f"part {index}"} for index in range(3)]
    id = create(client, input=[*items, {"role": "user", "content": SAY + "yes"}]).id
    texts = [item.content[0].text for item in client.responses.input_items.list(id, order="asc", limit=2)]
    assert texts == ["part 0", "part 1", "part 2", SAY + "yes"]
    page = client.responses.input_items.list(id, limit=1)
    assert (page.data[0].content[0].text, page.has_more) == (SAY + "yes", True)


def test_what_was_not_stored_is_not_there(client: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(create(client, store=False).id)
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, store=False, background=True)
    assert "store" in str(refused.value)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("starting_after=3", "stream=true"),
        ("stream=true&starting_after=x", "sequence_number"),
        ("stream=true&starting_after=99999", "the latest event"),
        ("stream=maybe", "true or false"),
        ("include=x", "expected one of"),
        ("include[]=x&include[]=message.output_text.logprobs", "expected one of"),
        ("include_obfuscation=true", "not supported"),
        ("verbose=1", "unknown query parameter 'verbose'"),
    ],
)
def test_queries_that_are_wrong(client: Any, query: str, message: str) -> None:
    id = create(client, "yes", background=True).id
    wait(client, id)
    answer = httpx.get(f"{client.base_url}responses/{id}?{query}")
    assert (answer.status_code, message in answer.text) == (400, True), answer.text


def test_events_of_the_foreground_are_not_kept(client: Any) -> None:
    id = create(client, "yes").id
    with pytest.raises(openai.BadRequestError, match="only background responses keep"):
        client.responses.retrieve(id, stream=True)


def test_sealed_reasoning_can_be_asked_for_later(client: Any) -> None:
    include: Any = ["reasoning.encrypted_content"]
    sealed = create(client, include=include).output[0].encrypted_content
    id = create(client).id
    assert client.responses.retrieve(id, include=include).output[0].encrypted_content == sealed
    two: Any = [*include, "message.output_text.logprobs"]
    assert client.responses.retrieve(id, include=two).output[0].encrypted_content == sealed
    assert client.responses.retrieve(id).output[0].encrypted_content is None


def test_a_response_that_can_not_begin_gives_back_its_place(
    client: Any, gate: InferenceGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: ResponseStore, document: Document) -> LiveLog:
        raise ValueError("a bug")

    monkeypatch.setattr(ResponseStore, "begin", fail)
    for _ in range(3):
        with pytest.raises(openai.InternalServerError):
            create(client, background=True)
    assert not gate.open_inferences


async def test_a_response_that_is_deleted_twice_at_once(host: InferenceServer, tmp_path: Path) -> None:
    async with serving(host, tmp_path / "store") as (client, _), asyncio.timeout(20):
        body = {"model": MODEL, "input": SAY + LONG, "background": True}
        id = (await client.post("/responses", json=body)).json()["id"]
        answers = await asyncio.gather(*(client.delete(f"/responses/{id}") for _ in range(2)))
        statuses = {answer.status_code for answer in answers}
        assert 200 in statuses and statuses <= {200, 404}, [answer.text for answer in answers]


# --- continued by another server --------------------------------------------------------------------------------------

WORDS = "The words of a long answer. " * 60
Refuse = Callable[[pytest.MonkeyPatch, float], list[str]]


@asynccontextmanager
async def serving(host: InferenceServer, path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, ResponseStore]]:
    """A server that continues the responses in the file, and leaves its own to the next one."""
    store = StoreSettings(url=f"sqlite:{path}").open()
    context = FrontendContext.of(host, store=store)
    router = create_openai_router(context)
    transport = httpx.ASGITransport(with_presence(Starlette(routes=list(router.routes))))
    await store.start()
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test/v1") as client:
            yield client, store
    finally:
        await store.suspend()
        await store.close()
        context.gate.close()


async def begun(host: InferenceServer, path: Path, count: int = 1, **fields: Any) -> list[str]:
    """The ids of responses that their server has left after some tokens."""
    body = {"model": MODEL, "input": SAY + WORDS, "background": True, "temperature": 0} | fields
    async with serving(host, path) as (client, store):
        ids: list[str] = []
        for _ in range(count):
            answer = await client.post("/responses", json=body)
            assert answer.status_code == 200 and answer.json()["status"] == "queued", answer.text
            ids.append(answer.json()["id"])
        for id in ids:
            journal = await store.journal(await store.get(current_owner(), "response", id))
            async with aclosing(journal.follow()) as following:
                async for events in following:
                    if events.first + len(events.parts) > 20:
                        break
            assert (await client.get(f"/responses/{id}")).json()["status"] == "in_progress"
    return ids


async def continued(host: InferenceServer, path: Path, id: str) -> dict[str, Any]:
    """The response at its end."""
    async with serving(host, path) as (client, _), asyncio.timeout(20):
        while True:
            found: dict[str, Any] = (await client.get(f"/responses/{id}")).json()
            if found["status"] not in ("queued", "in_progress"):
                break
            await asyncio.sleep(0.01)
        events = list(events_of((await client.get(f"/responses/{id}?stream=true")).content))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == found
    return found


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


@pytest.mark.parametrize("fields", [{}, {"model": None}, {"model": ""}, {"seed": -1, "temperature": 1}])
def test_the_next_server_continues_a_response(host: InferenceServer, tmp_path: Path, fields: dict[str, Any]) -> None:
    (id,) = asyncio.run(begun(host, tmp_path / "store", **fields))
    response = asyncio.run(continued(host, tmp_path / "store", id))
    assert (response["status"], response["error"], response["model"]) == ("completed", None, MODEL)
    assert text_of(response) == WORDS


def not_ready(monkeypatch: pytest.MonkeyPatch, most: float) -> list[str]:
    """The model is not ready for so many requests. Returns the refusals."""
    refused: list[str] = []
    require = ModelCatalog.require

    def require_later(catalog: ModelCatalog, model: str, prompt_input: str) -> Any:
        if len(refused) >= most:
            return require(catalog, model, prompt_input)
        refused.append("the model is not ready")
        raise OpenAIError(refused[-1], status=503, code="unavailable")

    monkeypatch.setattr(ModelCatalog, "require", require_later)
    return refused


def queue_is_full(monkeypatch: pytest.MonkeyPatch, most: float) -> list[str]:
    """The model's queue is full for so many requests. Returns the refusals."""
    refused: list[str] = []
    admit = TaskMap.admit

    def admit_later(tasks: TaskMap, *more: Any) -> str:
        if len(refused) >= most:
            return admit(tasks, *more)
        refused.append("the queue is full")
        return refused[-1]

    monkeypatch.setattr(TaskMap, "admit", admit_later)
    return refused


def at_limit(monkeypatch: pytest.MonkeyPatch, most: float) -> list[str]:
    """The server is at its limit for so many requests. Returns the refusals."""
    refused: list[str] = []
    admit = InferenceGate.admit

    def admit_later(gate: InferenceGate, count: int) -> None:
        if len(refused) >= most:
            return admit(gate, count)
        refused.append("the server is at its limit")
        raise LimitReachedError(refused[-1])

    monkeypatch.setattr(InferenceGate, "admit", admit_later)
    return refused


@pytest.mark.parametrize("refuse", [at_limit, not_ready, queue_is_full])
def test_a_response_goes_on_once_it_is_no_longer_refused(
    host: InferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    monkeypatch.setattr(background, "_RETRY_S", 0.001)
    (id,) = asyncio.run(begun(host, tmp_path / "store"))
    refused = refuse(monkeypatch, 3)
    response = asyncio.run(continued(host, tmp_path / "store", id))
    assert (response["status"], text_of(response), len(refused)) == ("completed", WORDS, 3)


@pytest.mark.parametrize("refuse", [not_ready, queue_is_full])
def test_a_model_that_refuses_for_too_long_fails_the_response(
    host: InferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    monkeypatch.setattr(background, "_MAX_UNAVAILABLE_S", -1.0)
    (id,) = asyncio.run(begun(host, tmp_path / "store"))
    refused = refuse(monkeypatch, float("inf"))
    response = asyncio.run(continued(host, tmp_path / "store", id))
    assert response["status"] == "failed" and refused[-1] in response["error"]["message"]


@pytest.mark.parametrize("refuse", [at_limit, not_ready, queue_is_full])
def test_a_response_that_waits_at_the_next_server_can_be_cancelled(
    host: InferenceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    cancelled, deleted = asyncio.run(begun(host, tmp_path / "store", 2))
    refused = refuse(monkeypatch, float("inf"))

    async def run() -> None:
        async with serving(host, tmp_path / "store") as (client, _), asyncio.timeout(20):
            while len(refused) < 2:
                await asyncio.sleep(0.001)
            answer = (await client.post(f"/responses/{cancelled}/cancel")).json()
            assert answer["status"] == "cancelled"
            assert answer == (await client.get(f"/responses/{cancelled}")).json()
            assert (await client.delete(f"/responses/{deleted}")).json()["deleted"]
            assert (await client.get(f"/responses/{deleted}")).status_code == 404

    asyncio.run(run())
