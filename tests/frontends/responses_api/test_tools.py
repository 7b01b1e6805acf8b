"""Tools of a create-response request: what the template gets, what may be called, and what calls are called."""

from __future__ import annotations

from typing import Any

import pytest

from llmbackend.frontends.conversation.tools import InputGrammar, NamedTool, ToolUse
from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.openai.responses_api.parsing import History

from .parsed import chat, parsed

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "The weather.", "parameters": SCHEMA, "strict": True}
CLOCK = {"type": "function", "name": "clock"}
NOTE = {"type": "custom", "name": "note", "description": "Takes notes."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}
PATCH = {"type": "custom", "name": "patch", "description": "Patches.", "format": LARK}
AGENTS = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [CLOCK, NOTE]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": SCHEMA}
WEB = {"type": "web_search", "external_web_access": True}


def use(**body: Any) -> ToolUse:
    found = parsed(**body).generation.tool_use
    assert found
    return found


def refused(**body: Any) -> OpenAIError:
    with pytest.raises(OpenAIError) as caught:
        parsed(**body)
    return caught.value


def called(use: ToolUse) -> list[str]:
    return [function.name for function in use.functions]


def test_functions() -> None:
    request = parsed(tools=[WEATHER, CLOCK])
    assert chat(request)["tools"] == [
        {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}},
        {"type": "function",
         "function": {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}}},
    ]  # fmt: skip
    found = use(tools=[WEATHER, CLOCK])
    assert [(one.name, one.is_strict, one.param) for one in found.functions] == [
        ("weather", True, "tools[0].parameters"), ("clock", False, "tools[1].parameters"),
    ]  # fmt: skip
    assert not found.is_required and found.max_calls is None


def test_custom_tools_are_functions_with_one_text() -> None:
    request = parsed(tools=[NOTE, PATCH])
    note, patch = (tool["function"] for tool in chat(request)["tools"])
    assert note["description"] == "Takes notes." and note["parameters"]["required"] == ["input"]
    assert patch["description"].startswith("Patches.") and LARK["definition"] in patch["description"]
    found = use(tools=[NOTE, PATCH])
    assert [one.input_grammar for one in found.functions] == [None, InputGrammar("lark", LARK["definition"])]
    assert found.functions[1].param == "tools[1].format.definition" and found.needs_grammar
    assert {name for name, tool in request.tools.items() if tool.kind == "custom"} == {"note", "patch"}


def test_tools_of_a_namespace_are_called_by_both_names() -> None:
    request = parsed(tools=[CLOCK, AGENTS])
    assert called(use(tools=[CLOCK, AGENTS])) == ["clock", "agents__clock", "agents__note"]
    assert request.tools == {
        "clock": NamedTool("function", "clock"),
        "agents__clock": NamedTool("function", "clock", "agents"),
        "agents__note": NamedTool("custom", "note", "agents"),
    }
    assert chat(request)["tools"][1]["function"]["description"] == "Sub-agents."


def test_a_clients_search_brings_tools() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"city": "x"}},
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "status": "completed",
         "tools": [WEATHER | {"defer_loading": True}, CLOCK]},
    ]  # fmt: skip
    request = parsed(input=items, tools=[CLOCK, SEARCH])
    assert [*request.tools] == ["clock", "tool_search", "weather"]
    assert request.tools["tool_search"].kind == "tool_search"
    later = parsed(History(tuple(items)), previous_response_id="resp_1", tools=[SEARCH])
    assert [*later.tools] == ["tool_search", "weather", "clock"]


def test_tools_that_come_as_an_item() -> None:
    items = [{"type": "additional_tools", "role": "developer", "tools": [AGENTS]}, {"role": "user", "content": "q"}]
    assert [*parsed(input=items).tools] == ["agents__clock", "agents__note"]


def test_a_search_of_the_web_is_left_out_and_not_shown() -> None:
    request = parsed(tools=[WEB, CLOCK])
    assert [*request.tools] == ["clock"]
    assert [tool["type"] for tool in request.echo["tools"]] == ["function"]
    assert parsed(tools=[WEB]).generation.tool_use is None


def test_the_echo_shows_all_fields_of_a_tool() -> None:
    assert parsed(tools=[CLOCK, NOTE]).echo["tools"] == [
        {"type": "function", "name": "clock", "description": None, "parameters": None, "strict": False},
        {"type": "custom", "name": "note", "description": "Takes notes.", "format": {"type": "text"}},
    ]


@pytest.mark.parametrize(
    ("choice", "names", "is_required", "max_calls"),
    [
        ("auto", ["weather", "note", "agents__clock", "agents__note"], False, None),
        ("required", ["weather", "note", "agents__clock", "agents__note"], True, None),
        ({"type": "function", "name": "weather"}, ["weather"], True, 1),
        ({"type": "custom", "name": "note"}, ["note"], True, 1),
        ({"type": "function", "name": "clock"}, ["agents__clock"], True, 1),
        ({"type": "allowed_tools", "mode": "auto",
          "tools": [{"type": "function", "name": "weather"}, {"type": "custom", "name": "note"}]},
         ["weather", "note"], False, None),
    ],
)  # fmt: skip
def test_tool_choice(choice: Any, names: list[str], is_required: bool, max_calls: int | None) -> None:
    found = use(tools=[WEATHER, NOTE, AGENTS], tool_choice=choice)
    assert (called(found), found.is_required, found.max_calls) == (names, is_required, max_calls)


def test_no_tool_choice() -> None:
    request = parsed(tools=[WEATHER], tool_choice="none")
    assert request.generation.tool_use is None and "tools" not in chat(request)


def test_number_of_calls() -> None:
    assert use(tools=[WEATHER], parallel_tool_calls=False).max_calls == 1
    assert use(tools=[WEATHER], max_tool_calls=3).max_calls == 3
    assert use(tools=[WEATHER], max_tool_calls=3, parallel_tool_calls=False).max_calls == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "foo"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].name"),
        ({"tools": [CLOCK | {"foo": 1}]}, "tools[0].foo"),
        ({"tools": [CLOCK | {"async": True}]}, "tools[0].async"),
        ({"tools": [CLOCK | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [CLOCK | {"parameters": "x"}]}, "tools[0].parameters"),
        ({"tools": [PATCH | {"format": {"type": "grammar", "syntax": "ebnf", "definition": "x"}}]},
         "tools[0].format.syntax"),
        ({"tools": [AGENTS | {"tools": [WEB]}]}, "tools[0].tools[0].type"),
        ({"tools": [AGENTS | {"name": "a" * 125}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "tool_search"}]}, "tools[0].execution"),
        ({"tools": [AGENTS] * 2}, "tools[1].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [CLOCK | {"name": f"f{index}"}
                                                                 for index in range(100)]},
                    *(CLOCK | {"name": f"g{index}"} for index in range(29))]}, "tools[29].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "clock"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom", "name": "weather"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}},
         "tool_choice.tools[0].type"),
        ({"input": [{"type": "additional_tools", "role": "developer", "tools": [{"type": "mcp"}]}]},
         "input[0].tools[0].type"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    error = refused(**body)
    assert error.param == param and f"'{param}'" in error.message
