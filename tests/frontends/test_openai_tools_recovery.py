"""Tool calls survive their engine: whatever a client sees of one is a function of its request and the tokens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from llmbackend.core.inference_server import InferenceServer
from tests.frontends.responses_api.event_reader import EventReader
from tests.helpers.fake_llm_server import MODEL as FAKE_MODEL
from tests.helpers.fake_llm_server import FakeLlmServer
from tests.helpers.mock_llm_host import MODEL, mock_llm_host
from tests.helpers.openai_live_server import openai_client, serve_openai

TEMPLATE = "{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}<think>"
NOTE: dict[str, Any] = {
    "name": "note",
    "parameters": {"type": "object", "properties": {"text": {"type": "string", "minLength": 30}}, "required": ["text"]},
}
ENGINE = {
    "transport": "process",
    "mock_step_ms": 4.0,
    "max_model_len": 1024,
    "chat_template": TEMPLATE,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
}


def engines(of: set[int]) -> set[int]:
    """The engine processes: children of the fork servers `of`."""
    return {int(pid) for one in of for pid in Path(f"/proc/{one}/task/{one}/children").read_text().split()}


def children() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


@pytest.fixture(scope="module")
def _client_has_been_used() -> None:
    """Its libraries open a pipe once and for all."""
    with openai_client(FakeLlmServer()) as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        assert list(client.chat.completions.create(model=FAKE_MODEL, messages=messages, stream=True))


@pytest.fixture
def host(_client_has_been_used: None, tmp_path: Path) -> Iterator[InferenceServer]:
    server = mock_llm_host(tmp_path, ENGINE)
    yield server
    assert server.stop(timeout_s=20)


@pytest.fixture
def client(host: InferenceServer) -> Iterator[openai.OpenAI]:
    with openai_client(host) as client:
        yield client


def test_an_engine_that_dies_in_mid_call_changes_nothing(host: InferenceServer, client: openai.OpenAI) -> None:
    """Reasoning with a budget, then calls that must be made, in two choices: all chunks together are the same."""
    fork_servers = children()

    def ask(kill_at_calls: tuple[int, ...]) -> tuple[str, dict[int, list[Any]]]:
        """The response's id, and for each choice its reasoning, its calls and its end. Kills the engine when the
        first choice has so many pieces of calls."""
        asked: dict[str, Any] = {
            "messages": [{"role": "user", "content": "note it"}],
            "tools": [{"type": "function", "function": NOTE}],
            "tool_choice": "required",
            "n": 2,
            "seed": 5,
            "max_tokens": 220,
            "extra_body": {"thinking_token_budget": 9},
            "extra_headers": {"X-Request-Id": "one"},
        }
        stream: Any = client.chat.completions.create(model=MODEL, stream=True, **asked)
        ids: set[str] = set()
        call_ids: set[str] = set()
        choices: dict[int, list[Any]] = {0: ["", {}, None], 1: ["", {}, None]}
        num_pieces = 0
        for chunk in stream:
            ids.add(chunk.id)
            for choice in chunk.choices:
                found = choices[choice.index]
                found[0] += (choice.delta.model_extra or {}).get("reasoning") or ""
                found[2] = choice.finish_reason or found[2]
                for part in choice.delta.tool_calls or []:
                    call_ids |= {part.id} if part.id else set()
                    call = found[1].setdefault(part.index, [part.function.name, ""])
                    call[1] += part.function.arguments
                    num_pieces += not choice.index
            if num_pieces in kill_at_calls:
                kill_at_calls = tuple(count for count in kill_at_calls if count > num_pieces)
                os.kill(min(engines(fork_servers)), signal.SIGKILL)
        assert not kill_at_calls, "the call was over before its engine died"
        assert len(call_ids) == sum(len(calls) for _, calls, _ in choices.values())
        [response_id] = ids
        return response_id, choices

    undisturbed = ask(())
    assert undisturbed[0] == "chatcmpl-one"
    for reasoning, calls, reason in undisturbed[1].values():
        assert reasoning and calls[0][0] == "note" and reason in ("tool_calls", "length")
    assert ask((5, 20)) == undisturbed
    restarts = host.metrics_registry.get_sample_value(
        "llmbackend:engine_restarts_total", {"model": MODEL, "version": "1", "cause": "killed"}
    )
    assert restarts == 2


def test_a_response_is_the_same_whatever_happens_to_the_engine(host: InferenceServer, client: openai.OpenAI) -> None:
    fork_servers = children()

    def ask(kill_at_events: tuple[int, ...]) -> list[dict[str, Any]]:
        """The items of the output, but for their ids, put together from the events. Kills the engine at these."""
        asked: dict[str, Any] = {
            "input": "note it",
            "tools": [{"type": "function", **NOTE, "strict": False}],
            "tool_choice": "required",
            "max_output_tokens": 220,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "extra_body": {"thinking_token_budget": 9, "seed": 5},
        }
        stream: Any = client.responses.create(model=MODEL, stream=True, **asked)

        def events() -> Iterator[dict[str, Any]]:
            for number, event in enumerate(stream):
                yield event.to_dict()
                if number in kill_at_events:
                    os.kill(min(engines(fork_servers)), signal.SIGKILL)

        reader = EventReader()
        response = reader.read_all(events())
        assert len(reader.kinds) > max(kill_at_events, default=0) + 20, "it was over before its engine died"
        return [{name: item[name] for name in item.keys() - {"id", "call_id"}} for item in response["output"]]

    undisturbed = ask(())
    assert [item["type"] for item in undisturbed][:2] == ["reasoning", "function_call"]
    assert ask((8, 40)) == undisturbed


def test_a_message_is_the_same_whatever_happens_to_the_engine(host: InferenceServer) -> None:
    """Of Anthropic's API, put together from its events as the official client does it."""
    fork_servers = children()
    tool = {"name": NOTE["name"], "input_schema": NOTE["parameters"]}
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "note it"}],
        "tools": [tool],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "max_tokens": 220,
        "extra_body": {"seed": 5},
    }

    def ask(client: anthropic.Anthropic, kill_at_events: tuple[int, ...]) -> dict[str, Any]:
        number = 0
        with client.messages.stream(model=MODEL, **asked) as stream:
            for number, _ in enumerate(stream):
                if number in kill_at_events:
                    os.kill(min(engines(fork_servers)), signal.SIGKILL)
            message = stream.get_final_message()
        assert number > max(kill_at_events, default=0) + 20, "it was over before its engine died"
        blocks = [{**block.to_dict(), "id": ""} for block in message.content]
        return {"blocks": blocks, "reason": message.stop_reason, "tokens": message.usage.output_tokens}

    with serve_openai(host) as base, anthropic.Anthropic(base_url=base, api_key="none", max_retries=0) as client:
        undisturbed = ask(client, ())
        assert [block["type"] for block in undisturbed["blocks"]][:2] == ["thinking", "tool_use"]
        assert ask(client, (8, 60)) == undisturbed
