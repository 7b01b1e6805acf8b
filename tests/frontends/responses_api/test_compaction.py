"""Compaction through the real `openai` client: the model's summary is sealed, and later requests take it as input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai
import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.frontends.generation.sealed_reasoning import FIXED_KEY, SealingKey
from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.journals.store_settings import IN_MEMORY
from tests.helpers.openai_live_server import serve_openai
from tests.helpers.scripted_text import MODEL, SAY

from .parsed import messages

HISTORY: list[Any] = [
    {"role": "user", "content": "Read the file."},
    {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "42"},
    {"role": "assistant", "content": "It has 42."},
    {"role": "user", "content": f"{SAY}The file has 42."},
]


def seal(text: str) -> dict[str, str]:
    return {"type": "compaction", "encrypted_content": FIXED_KEY.seal(text)}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def texts(items: Sequence[Any]) -> list[str]:
    return [item.content[0].text for item in items]


def test_the_users_messages_stay_and_the_rest_is_a_summary_of_the_models(client: openai.OpenAI) -> None:
    """The scripted model repeats what stands behind SAY, and so what it was asked last."""
    compacted = client.responses.compact(model=MODEL, input=HISTORY, instructions="Be brief.")
    assert compacted.object == "response.compaction" and compacted.id.startswith("resp_")
    *asked, item = compacted.output
    assert texts(asked) == ["Read the file.", f"{SAY}The file has 42."]
    assert item.type == "compaction"
    summary = FIXED_KEY.unseal(item.encrypted_content)
    assert summary.startswith("The file has 42.\nuser: Write a summary of our conversation above")
    assert compacted.usage.output_tokens == len(summary.encode()) + 1
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(compacted.id)


def test_a_compacted_conversation_goes_on(client: openai.OpenAI) -> None:
    compacted = client.responses.compact(model=MODEL, input=HISTORY)
    output: list[Any] = [item.to_dict(warnings=False) for item in compacted.output]
    answer = client.responses.create(model=MODEL, input=[*output, user(f"{SAY}I know.")])
    assert answer.output_text == "I know."
    again = client.responses.compact(model=MODEL, previous_response_id=answer.id)
    assert texts(again.output[:-1]) == ["Read the file.", f"{SAY}The file has 42.", f"{SAY}I know."]
    stored = client.responses.input_items.list(answer.id, order="asc").data
    assert [item.type for item in stored] == ["message", "message", "compaction", "message"]


def test_a_summary_is_the_assistants_and_roles_alternate() -> None:
    kept = [user("one"), user("two"), seal("so far"), user("three")]
    assert messages(kept) == [
        user("one\ntwo"),
        {"role": "assistant", "content": "Summary of our conversation so far:\n\nso far"},
        user("three"),
    ]


@pytest.mark.parametrize("sealed", ["x", SealingKey(b"another server's key").seal("so far")])
def test_a_summary_of_another_server_is_refused(sealed: str) -> None:
    with pytest.raises(OpenAIError, match="text that this server sealed") as raised:
        messages([{"type": "compaction", "encrypted_content": sealed}])
    assert raised.value.param == "input[0].encrypted_content"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
        ({"input": "x", "model": None}, "model"),
        ({"input": "x", "stream": True}, "stream"),
        ({"input": "x", "tools": []}, "tools"),
        ({"input": "x", "previous_response_id": "resp_" + "0" * 32}, "previous_response_id"),
    ],
)
def test_a_body_that_asks_for_something_else_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.compact(model=MODEL, extra_body=fields)
    assert raised.value.param == param


def test_a_summary_that_has_no_end_is_an_error(scripted_host: InferenceServer) -> None:
    """Its text fills the context."""
    with (
        serve_openai(scripted_host, store=IN_MEMORY.open()) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.InternalServerError, match="did not complete a summary within its context"),
    ):
        client.responses.compact(model=MODEL, input=SAY + "x" * 2500)
