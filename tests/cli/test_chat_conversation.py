"""A conversation's messages when answers fail and questions are repeated."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from llmbackend.cli.api_client import ApiClient, ApiError, ServerEvent
from llmbackend.cli.chat.conversation import Conversation


class Server(ApiClient):
    """Answers "an answer" unless it fails."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.fails = False

    @contextlib.contextmanager
    def events(self, path: str, body: Any = None) -> Generator[Iterator[ServerEvent]]:
        if self.fails:
            raise ApiError("HTTP 503", 503)
        choice = {"delta": {"content": "an answer"}, "finish_reason": "stop"}
        yield iter([ServerEvent("", json.dumps({"choices": [choice]})), ServerEvent("", "[DONE]")])


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def conversation(server: Server) -> Conversation:
    conversation = Conversation(server, "model")
    list(conversation.ask("first"))
    return conversation


def fail(conversation: Conversation, server: Server, question: str) -> None:
    server.fails = True
    with pytest.raises(ApiError):
        list(conversation.ask(question))
    server.fails = False


def texts(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages]


def test_a_failed_question_is_repeated_and_its_predecessor_stays(conversation: Conversation, server: Server) -> None:
    fail(conversation, server, "second")
    for _ in range(2):
        assert conversation.take_back() == "second"
        fail(conversation, server, "second")
        assert texts(conversation) == ["first", "an answer"]
    list(conversation.ask(conversation.take_back()))
    assert texts(conversation) == ["first", "an answer", "second", "an answer"]


def test_a_failed_repetition_leaves_what_it_repeats(conversation: Conversation, server: Server) -> None:
    for _ in range(2):
        assert conversation.take_back() == "first"
        fail(conversation, server, "first")
        assert texts(conversation) == ["first", "an answer"]
    fail(conversation, server, "second")
    assert texts(conversation) == ["first", "an answer"]


def test_nothing_is_repeated_in_an_empty_conversation(conversation: Conversation, server: Server) -> None:
    fail(conversation, server, "second")
    conversation.restart()
    assert conversation.take_back() == ""
