"""From bodies of the Messages API to what chat templates read; what is refused, by which path."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from llmbackend.frontends.anthropic.content import BetaFields
from llmbackend.frontends.anthropic.requests import MessageRequest, parse_message, parse_prompt
from llmbackend.frontends.generation.request import GenerationRequest
from llmbackend.frontends.generation.sealed_reasoning import FIXED_KEY, SealingKey
from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.openai.requests import parse_chat

USER = {"role": "user", "content": "x"}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"city": "Zürich", "n": [1, 2.5]}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
THINKING = {"type": "thinking", "thinking": "Well.", "signature": FIXED_KEY.seal("Well.")}


def parsed(betas: str = "", **fields: Any) -> MessageRequest:
    return parse_message({"model": "m", "max_tokens": 9, "messages": [USER], **fields}, BetaFields(betas), FIXED_KEY)


def prompt(request: GenerationRequest) -> Any:
    return orjson.loads(request.prompts[0].data.item(0))


def messages(*sent: Any, **fields: Any) -> Any:
    found = prompt(parsed(messages=list(sent), **fields).generation)
    return found["messages"] if isinstance(found, dict) else found


@pytest.mark.parametrize("field", ["max_tokens", "model", "messages"])
def test_a_required_field_that_is_null_is_missing(field: str) -> None:
    with pytest.raises(OpenAIError, match=f"^missing required field '{field}'$"):
        parsed(**dict[str, Any]({field: None}))


def test_text_of_white_space_cannot_be_continued() -> None:
    with pytest.raises(OpenAIError, match="expected text for the answer to continue") as raised:
        parsed(messages=[USER, {"role": "assistant", "content": " \n"}])
    assert raised.value.param == "messages[1]"


def test_the_prompt_is_that_of_a_chat_that_says_the_same() -> None:
    ours = parsed(
        system=[
            {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief."},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [THINKING, {"type": "text", "text": "See: "}, CALL]},
            {"role": "user", "content": [RESULT, {"type": "text", "text": "And?"}]},
        ],
        tools=[{**TOOL, "description": "d"}],
        output_config={"effort": "high"},
    )
    call = {"name": "f", "arguments": orjson.dumps(CALL["input"]).decode()}
    chat = parse_chat(
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be\nbrief."},
                {"role": "user", "content": "a\nb"},
                {
                    "role": "assistant",
                    "reasoning_content": "Well.",
                    "content": "See: ",
                    "tool_calls": [{"id": "toolu_1", "type": "function", "function": call}],
                },
                {"role": "tool", "tool_call_id": "toolu_1", "name": "f", "content": "sunny"},
                {"role": "user", "content": "And?"},
            ],
            "tools": [
                {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
            ],
            "reasoning_effort": "high",
        }
    )
    assert prompt(ours.generation) == prompt(chat)
    assert ours.generation.tool_use is not None and chat.tool_use is not None
    assert ours.generation.tool_use.functions[0].parameters == chat.tool_use.functions[0].parameters


def test_sampling() -> None:
    request = parsed(temperature=0.5, top_k=3, top_p=0.9, seed=1, stop_sequences=["a"], stream=True).generation
    expected = {"max_tokens": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 1, "stop": ["a"]}
    assert request.sampling == expected and request.stream is not None and request.id_prefix == "msg_"
    assert not request.max_tokens_field  # an answer that the context has no room for is cut, not refused


def test_turns_of_one_role_are_one() -> None:
    assert messages(USER, {"role": "user", "content": "y"}) == [{"role": "user", "content": "x\ny"}]
    found = messages(USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"})
    assert found[-1] == {"role": "assistant", "content": "ab"}


def test_system_messages_stand_where_they_were_sent() -> None:
    sent = messages({"role": "system", "content": "b"}, USER, {"role": "system", "content": "c"}, system="a")
    assert [(one["role"], one["content"]) for one in sent] == [("system", "a\nb"), ("user", "x"), ("system", "c")]
    later = parsed(messages=[USER, {"role": "system", "content": "c"}, USER])
    assert prompt(later.generation)["system_is_anywhere"] is True


def test_the_line_for_billing_is_left_out() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=00000;"}
    assert messages(USER, system=[billing, {"type": "text", "text": "a"}])[0]["content"] == "a"
    assert messages(USER, system=[billing])[0]["role"] == "user"


def test_results_of_tools() -> None:
    error = {**RESULT, "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "wind"}], "is_error": True}
    found = messages(USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [error]})
    assert found[-1] == {"role": "tool", "tool_call_id": "toolu_1", "name": "f", "content": "Error: no\nwind"}
    empty = {"type": "tool_result", "tool_use_id": "toolu_1"}
    found = messages(USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [empty]})
    assert found[-1]["content"] == ""


def test_thinking_comes_back() -> None:
    for block in (
        THINKING,
        {**THINKING, "thinking": ""},
        {"type": "redacted_thinking", "data": FIXED_KEY.seal("Well.")},
    ):
        found = messages(USER, {"role": "assistant", "content": [block, {"type": "text", "text": "a"}]}, USER)
        assert found[1] == {"role": "assistant", "reasoning_content": "Well.", "content": "a"}


def test_an_assistants_last_message_is_gone_on_with() -> None:
    found = prompt(parsed(messages=[USER, {"role": "assistant", "content": "The "}]).generation)
    assert found["continue_final_message"] is True and found["add_generation_prompt"] is False


@pytest.mark.parametrize(
    ("thinking", "variables", "is_included", "budget_tokens"),
    [
        (None, None, True, None),
        ({"type": "adaptive"}, {"enable_thinking": True, "thinking": True}, True, None),
        ({"type": "enabled", "budget_tokens": 5}, {"enable_thinking": True, "thinking": True}, True, 5),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}, False, None),
    ],
)
def test_thinking(thinking: Any, variables: Any, is_included: bool, budget_tokens: int | None) -> None:
    request = parsed(thinking=thinking).generation
    found = prompt(request)
    assert (found["chat_template_kwargs"] if isinstance(found, dict) else None) == variables
    assert (request.reasoning.is_included, request.reasoning.budget_tokens) == (is_included, budget_tokens)


@pytest.mark.parametrize(
    ("choice", "is_required", "functions", "max_calls"),
    [
        (None, False, 2, None),
        ({"type": "auto", "disable_parallel_tool_use": True}, False, 2, 1),
        ({"type": "any"}, True, 2, None),
        ({"type": "tool", "name": "f"}, True, 1, 1),
    ],
)
def test_tool_choice(choice: Any, is_required: bool, functions: int, max_calls: int | None) -> None:
    use = parsed(tools=[TOOL, {**TOOL, "name": "g"}], tool_choice=choice).generation.tool_use
    assert use is not None and len(use.tools) == 2
    assert (use.is_required, len(use.functions), use.max_calls) == (is_required, functions, max_calls)


def test_no_tool_may_be_called() -> None:
    assert parsed(tools=[TOOL], tool_choice={"type": "none"}).generation.tool_use is None
    assert parsed(tools=[]).generation.tool_use is None


ASSISTANT: Any = {"role": "assistant", "content": [CALL]}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", '"tool"'),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "non-empty"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "missing"),
    ({"messages": [{**USER, "name": "n"}]}, "messages[0].name", "unknown field"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type",
        "read and write text only",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "web_search_tool_result"}]}]},
        "messages[0].content[0].type",
        "no tools of its own",
    ),
    ({"system": [{"type": "image"}]}, "system[0].type", "expected one of text"),
    ({"messages": [USER, ASSISTANT]}, "messages[1]", "without a tool_result"),
    ({"messages": [USER, ASSISTANT, {"role": "assistant", "content": "x"}, USER]}, "messages[2]", "tool_result"),
    (
        {"messages": [{"role": "user", "content": [RESULT]}]},
        "messages[0].content[0].tool_use_id",
        "the id of a tool_use",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": [CALL, CALL]}]},
        "messages[1].content[1].id",
        "unique within",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": [{**CALL, "input": "x"}]}]},
        "messages[1].content[0].input",
        "an object",
    ),
    ({"messages": [USER, {"role": "assistant", "content": [THINKING]}]}, "messages[1]", "answer to continue"),
    (
        {"messages": [USER, {"role": "assistant", "content": [{**THINKING, "thinking": "Other."}]}, USER]},
        "messages[1].content[0].thinking",
        "does not match",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": [{**THINKING, "signature": "abc"}]}, USER]},
        "messages[1].content[0].signature",
        "not a sealed text",
    ),
    (
        {"messages": [{"role": "user", "content": [{**RESULT, "cache_control": 1}]}]},
        "messages[0].content[0].cache_control",
        "an object",
    ),
    ({"cache_control": {"type": "forever"}}, "cache_control.type", "ephemeral"),
    ({"cache_control": {"type": "ephemeral", "ttl": "1d"}}, "cache_control.ttl", "5m"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "no tools of its own"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "letters"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "missing"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "unique among"),
    ({"tools": [TOOL] * 129}, "tools", "at most 128"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading", "not supported"),
    ({"tools": [{**TOOL, "shade": 1}]}, "tools[0].shade", "unknown field"),
    ({"tool_choice": {"type": "any"}}, "tools", "missing"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice", '"g"'),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "missing"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice", "an object"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "missing"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens", "enabled"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type", "adaptive"),
    ({"thinking": {"type": "disabled", "display": "omitted"}}, "thinking.display", "enabled"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "no tools of its own"),
    ({"thread": {"type": "create"}}, "thread", "stores no conversations"),
    ({"output_format": {"type": "json"}}, "output_format.type", "json_schema"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort", '"huge"'),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
]


@pytest.mark.parametrize(("fields", "param", "text"), REFUSED)
def test_refused_by_name(fields: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(OpenAIError) as raised:
        parsed(**fields)
    assert raised.value.param == param and text in raised.value.message, raised.value.message


def test_two_formats_exclude_each_other() -> None:
    form = {"type": "json_schema", "schema": {}}
    with pytest.raises(OpenAIError, match="mutually exclusive"):
        parsed(output_config={"format": form}, output_format=form)
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert parsed(**fields).generation.sampling["structured_outputs"] == {"json": {}}


def test_under_betas_fields_are_noted_but_content_is_not_passed_over() -> None:
    beta = BetaFields("some-beta-2026-01-01")
    body = {"model": "m", "max_tokens": 9, "messages": [{**USER, "id": 7}], "container": "c", "new": 1}
    body |= {"tools": [{**TOOL, "defer_loading": True}], "metadata": {"user_id": "u", "more": 1}, "empty": None}
    request = parse_message(body, beta, FIXED_KEY)
    assert set(beta.passed_over) == {"messages[0].id", "container", "new", "tools[0].defer_loading", "metadata.more"}
    assert request.generation.labels == {"user_id": "u"}
    for fields in ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {"tools": [{"type": "bash_1"}]}):
        with pytest.raises(OpenAIError):
            parsed("some-beta-2026-01-01", **fields)
    with pytest.raises(OpenAIError, match="stores no conversations"):
        parsed("message-threads-2026-08-12", thread={"type": "create"})


def test_the_prompt_whose_tokens_are_counted_is_the_prompt_that_is_answered() -> None:
    body = {"model": "m", "messages": [USER], "system": "s", "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted = parse_prompt(body, BetaFields(""), FIXED_KEY)
    assert prompt(counted) == prompt(parse_message(body | {"max_tokens": 1}, BetaFields(""), FIXED_KEY).generation)
    with pytest.raises(OpenAIError, match="unknown field 'max_tokens'"):
        parse_prompt(body | {"max_tokens": 1}, BetaFields(""), FIXED_KEY)


def test_a_signature_of_another_key_is_refused() -> None:
    other = SealingKey(b"another key of sixteen bytes or more")
    body = {"model": "m", "max_tokens": 9, "messages": [USER, {"role": "assistant", "content": [THINKING]}, USER]}
    with pytest.raises(OpenAIError, match="sealed with another key"):
        parse_message(body, BetaFields(""), other)
