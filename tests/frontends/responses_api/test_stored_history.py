"""What a request goes on from is read within bounds, and out of its owner's responses alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import orjson
import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.journals.documents import Document
from llmbackend.frontends.journals.response_store import ResponseStore
from llmbackend.frontends.journals.store_settings import IN_MEMORY
from llmbackend.frontends.openai.responses_api.conversations import Conversations
from llmbackend.frontends.openai.responses_api.output_items import item_id, response_of
from llmbackend.frontends.openai.responses_api.parsing import History, WantedHistory
from llmbackend.frontends.openai.responses_api.preparation import fetch_history
from tests.helpers.fake_llm_server import FakeLlmServer

MANY_BYTES = 1 << 20
Fetch = Callable[[WantedHistory, int], Awaitable[History]]


def response_id(number: int) -> str:
    return f"resp_{number:032x}"


def item(number: int, side: Any, text: str) -> dict[str, Any]:
    return {"id": item_id("message", response_id(number), side, 0), "type": "message", "content": text}


def document(store: ResponseStore, number: int, owner: str = "", more: str = "") -> Document:
    """more: other fields of the response, which is not one of an older server"""
    output = [item(number, "o", f"answer {number}")]
    return Document(
        owner=owner,
        kind="response",
        id=response_id(number),
        body=orjson.dumps({"instructions": more, "output": output}),
        created_s=store.clock_s(),
        expires_s=store.expires_s(store.clock_s()),
        items=orjson.dumps([item(number, "i", f"question {number}")]),
        parent=response_id(number - 1) if number > 1 else "",
        output=orjson.dumps(output) if more else b"",
    )


def with_three_responses(
    use: Callable[[Fetch], Awaitable[None]], owner: str = "", more: str = "", missing: int = 0
) -> None:
    async def run() -> None:
        gate = InferenceGate(cast(InferenceServer, FakeLlmServer()))
        store = IN_MEMORY.open()
        for number in {1, 2, 3} - {missing}:
            await store.put(document(store, number, owner, more))
        conversations = Conversations(store, gate, MANY_BYTES)
        await use(lambda wanted, max_bytes: fetch_history(store, conversations, wanted, gate, max_bytes))
        await store.close()
        gate.close()

    asyncio.run(run())


def test_a_chain_of_responses_the_oldest_first() -> None:
    async def use(fetch: Fetch) -> None:
        history = await fetch(WantedHistory(response_id(2)), MANY_BYTES)
        said = [one["content"] for one in history.items]
        assert said == ["question 1", "answer 1", "question 2", "answer 2"] and history.size_bytes > 200
        assert history.ancestors == (response_id(1), response_id(2))

    with_three_responses(use)
    with_three_responses(use, more="x")


def test_the_response_that_is_missing_is_named_with_the_one_that_was_sent() -> None:
    async def use(fetch: Fetch) -> None:
        sent, missing = response_id(3), response_id(1)
        with pytest.raises(OpenAIError, match=f"id '{sent}' not found: '{missing}', which it continues") as raised:
            await fetch(WantedHistory(sent), MANY_BYTES)
        assert (raised.value.param, raised.value.code) == ("previous_response_id", "previous_response_not_found")

    with_three_responses(use, missing=1)


def test_instructions_and_tools_of_earlier_responses_do_not_count() -> None:
    async def use(fetch: Fetch) -> None:
        references = tuple(item(number, "o", "")["id"] for number in (1, 2, 3))
        for wanted in (WantedHistory(response_id(3)), WantedHistory(item_ids=references)):
            assert 400 < (await fetch(wanted, 1000)).size_bytes < 1000

    with_three_responses(use, more="x" * 10_000)


def test_items_are_found_by_their_ids() -> None:
    async def use(fetch: Fetch) -> None:
        ids = tuple(item(number, side, "")["id"] for number, side in ((3, "o"), (1, "i"), (9, "o")))
        history = await fetch(WantedHistory(item_ids=(*ids, "msg_another")), MANY_BYTES)
        assert {id: one["content"] for id, one in history.by_id.items()} == {ids[0]: "answer 3", ids[1]: "question 1"}

    with_three_responses(use)
    assert response_of(item(3, "o", "")["id"]) == response_id(3)


def test_too_much_is_refused() -> None:
    async def use(fetch: Fetch) -> None:
        references = tuple(item(number, "o", "")["id"] for number in (1, 2, 3))
        for wanted, param in (
            (WantedHistory(response_id(3)), "previous_response_id"),
            (WantedHistory(item_ids=references), "input"),
            (WantedHistory(item_ids=references * 100), "input"),
        ):
            with pytest.raises(OpenAIError) as raised:
                await fetch(wanted, 300)
            assert (raised.value.status, raised.value.param) == (400, param)

    with_three_responses(use)


def test_the_responses_of_another_key_are_not_there() -> None:
    async def use(fetch: Fetch) -> None:
        with pytest.raises(OpenAIError, match="not found"):
            await fetch(WantedHistory(response_id(3)), MANY_BYTES)
        assert not (await fetch(WantedHistory(item_ids=(item(3, "o", "")["id"],)), MANY_BYTES)).by_id

    with_three_responses(use, owner="alice")
