"""Every field of the APIs has a row, every row is seen at a running server, and docs/fields.md says the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from llmbackend.frontends.anthropic.schema import CountTokensRequest, MessagesRequest
from llmbackend.frontends.openai.prompt_endpoints import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from llmbackend.frontends.openai.responses_api.schema import ResponsesBody
from llmbackend.frontends.openai.schema import ChatCompletionRequest, CompletionRequest
from trials.fields.api import Api
from trials.fields.asking import CHAT, COMPLETIONS, Endpoint
from trials.fields.fields import APIS
from trials.fields.messages_api.asking import COUNT_TOKENS, MESSAGES
from trials.fields.page import PAGE, page
from trials.fields.responses_api.asking import RESPONSES
from trials.fields.run import IGNORED, FieldServer, Outcome, field_names, field_server, outcomes
from trials.fields.tokenizing import CHAT_FORM, DETOKENIZE, TEXT_FORM

SCHEMAS: dict[str, type[BaseModel]] = {
    CHAT: ChatCompletionRequest,
    COMPLETIONS: CompletionRequest,
    RESPONSES: ResponsesBody,
    MESSAGES: MessagesRequest,
    COUNT_TOKENS: CountTokensRequest,
    CHAT_FORM: TokenizeChatRequest,
    TEXT_FORM: TokenizeTextRequest,
    DETOKENIZE: DetokenizeRequest,
}


BY_NAME = {api.name: api for api in APIS}


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.title)
def test_every_published_field_has_a_row(api: Api) -> None:
    assert not api.missing


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_field_that_is_read_has_a_row(name: str) -> None:
    assert set(SCHEMAS[name].model_fields) == set(BY_NAME[name].rows)


@pytest.fixture(scope="module")
def server() -> Iterator[FieldServer]:
    with field_server() as running:
        yield running


@pytest.fixture(scope="module", params=[3, 1], ids=["every third field", "every field"])
def found(server: FieldServer, request: pytest.FixtureRequest) -> list[Outcome]:
    return outcomes(server, field_names()[:: request.param])


def test_no_field_is_ignored(found: list[Outcome]) -> None:
    assert [outcome for outcome in found if outcome.kind == IGNORED] == []


def test_the_page_of_fields_is_the_one_that_was_seen(found: list[Outcome]) -> None:
    text, seen = PAGE.read_text(), page(found)
    assert {outcome.field for outcome in found} != set(field_names()) or text == seen, "run `make fields`"
    assert not [line for line in seen.splitlines() if line not in text.splitlines()]


@pytest.mark.parametrize("name", [CHAT, COMPLETIONS])
def test_an_unknown_field_is_refused(server: FieldServer, name: str) -> None:
    error = Endpoint(server.client, name).refusal(no_such_field=1)
    assert (error["param"], error["code"]) == ("no_such_field", "unknown_parameter")
