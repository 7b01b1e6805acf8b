"""The input `messages`: what is refused before a template sees it, and by which bound."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmbackend.adapter.text.chat import MAX_VALUES, PromptBounds, read_chat
from llmbackend.adapter.text.chat_template import ChatTemplate
from llmbackend.core.backend_api import ErrorCode, TritonError

BOUNDS = PromptBounds(
    below_tokens=10, max_chars=50, max_messages=10, why="this model's maximum context length is 10 tokens"
)
HI = {"role": "user", "content": "hi"}


def refusal(value: Any, bounds: PromptBounds = BOUNDS) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    with pytest.raises(TritonError) as caught:
        read_chat(text, bounds)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


def test_a_list_and_an_object_are_the_same_conversation() -> None:
    assert read_chat(json.dumps([HI]).encode(), BOUNDS).messages == [HI]
    chat = read_chat(
        json.dumps({"messages": [HI], "tools": [{}], "chat_template_kwargs": {"a": 1}, "documents": []}).encode(),
        BOUNDS,
    )
    assert (chat.messages, chat.tools, chat.options) == ([HI], [{}], {"a": 1, "documents": []})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([HI] * 11, "has 11 messages, expected at most 10: this model's maximum context length is 10 tokens"),
        ([{"role": "user", "content": [{"type": "text", "text": ""}] * 11}], "has 11 content parts, expected at most"),
        ([{"role": "user", "content": "x" * 26}] * 2, "the prompt has 52 characters and more, expected at most 50"),
        ([{"role": "user", "content": [{"type": "text", "text": "x" * 51}]}], "has 51 characters and more"),
        ({"messages": [HI], "tools": [{"x": "y" * 50}]}, "'tools' of input 'messages' has 61 characters of JSON"),
        ({"messages": [HI], "documents": ["y" * 50]}, "'documents' of input 'messages' has 54 characters of JSON"),
        (
            {"messages": [HI], "chat_template_kwargs": {"x": "y" * 65536}},
            "'chat_template_kwargs' of input 'messages' has 65545 bytes of JSON, expected at most 65536",
        ),
        (
            b'{"messages": [{}], "chat_template_kwargs": {"x":' + b"[" * 32 + b"]" * 32 + b"}}",
            "'chat_template_kwargs' of input 'messages' is nested deeper than 32 levels",
        ),
        (b"[" * 100_000, "has 100000 JSON values, expected at most 65536"),
        (b"[" * 5000, "is not JSON"),
        (b'["\xff"]', "is not UTF-8: invalid start byte at byte 2"),
        (b" " * (4 << 20) + b" ", "has 4194305 bytes, expected at most 4194304"),
    ],
)
def test_a_conversation_that_cannot_fit_is_refused_by_name(value: Any, expected: str) -> None:
    assert expected in refusal(value)


def test_brackets_in_a_text_are_text() -> None:
    content = '[{",\\' * 30_000 + '"' + "\\" * 3
    text = json.dumps([{"role": "user", "content": content}]).encode()
    assert read_chat(text, PromptBounds(10, 200_000, 10, "")).messages[0]["content"] == content


def test_the_text_is_bounded_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("parsed"))
    for value in (b"[" * (MAX_VALUES + 1), b" " * (BOUNDS.max_bytes + 1)):
        with pytest.raises(TritonError):
            read_chat(value, BOUNDS)


def rendered(template: str, *messages: dict[str, Any], **options: Any) -> str:
    tools = options.pop("tools", None)
    return ChatTemplate(template, {}).render(list(messages) or [HI], tools=tools, options=options)


_ROLES = "{% for one in messages %}{{ one.role }}:{{ one.content }};{% endfor %}"
_FIRST_ONLY = (
    "{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}{{ raise_exception('no') }}{% endif %}"
)
_LEAVES_OUT = (
    "{% for one in messages %}{% if loop.first or one.role != 'system' %}{{ one.role }}:{{ one.content }};{% endif %}"
    "{% endfor %}"
)
_LATER = [
    {"role": role, "content": text}
    for role, text in (
        ("system", "s"),
        ("user", "a"),
        ("system", "Mid."),
        ("user", "b"),
        ("assistant", "c"),
        ("system", "Now."),
    )
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (_ROLES, "system:s;user:a;system:Mid.;user:b;assistant:c;system:Now.;"),
        (_FIRST_ONLY + _ROLES, "system:s;user:a\nMid.\nb;assistant:c;user:Now.;"),
        (_LEAVES_OUT, "system:s;user:a\nMid.\nb;assistant:c;user:Now.;"),
    ],
)
def test_a_later_system_message_is_never_lost(template: str, expected: str) -> None:
    assert rendered(template, *_LATER, system_is_anywhere=True) == expected


def test_a_later_system_message_is_as_the_template_has_it_unless_asked() -> None:
    assert rendered(_LEAVES_OUT, *_LATER) == "system:s;user:a;user:b;assistant:c;"
    with pytest.raises(TritonError, match="refuses 'messages': no"):
        rendered(_FIRST_ONLY + _ROLES, *_LATER)


@pytest.mark.parametrize(
    ("template", "effort", "expected"),
    [
        ("{{ reasoning_effort }}", "low", "low"),
        ("{{ enable_thinking }}", "low", "True"),
        ("{{ thinking }}", "none", "False"),
        ("{{ reasoning_effort }}/{{ enable_thinking }}", "none", "none/False"),
        ("{{ reasoning_effort }}/{{ enable_thinking is defined }}", "high", "high/False"),
        ("plain", "none", "plain"),
        ("plain", "high", "plain"),
        ("<think>", "high", "<think>"),
    ],
)
def test_a_reasoning_effort_reaches_the_template_as_it_reads_it(template: str, effort: str, expected: str) -> None:
    assert rendered(template, reasoning_effort=effort) == expected


def test_reasoning_in_history_has_the_templates_name() -> None:
    message = {"role": "assistant", "content": "a", "reasoning_content": "hm"}
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert rendered("{{ messages[0]." + name + " }}", message) == "hm"
    assert rendered("{{ messages[0] | tojson }}", message) == json.dumps(message)


_CALLS = [{"id": f"c{n}", "type": "function", "function": {"name": f"f{n}", "arguments": "{}"}} for n in range(2)]
_SAID = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": _CALLS[:1]}
_RESULTS = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"r{n}"} for n in (1, 0)]
_SHOWN = (
    "{% for m in messages %}{{ m.role }}:{{ m.thinking }}|{{ m.content }}|"
    "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %};{% endfor %}"
)
_ONE_KIND = (
    "{% for m in messages if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endfor %}"
)
_ONE_CALL = "{% for m in messages if m.tool_calls and m.tool_calls[1:] %}{{ raise_exception('2') }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (_SHOWN, [_SAID], "assistant:Hm.|I look.|f0;"),
        (_ONE_KIND + _SHOWN, [_SAID], "assistant:Hm.\n\nI look.||f0;"),
        (_SHOWN, [_SAID | {"tool_calls": _CALLS}, *_RESULTS], "assistant:Hm.|I look.|f0f1;tool:|r1|;tool:|r0|;"),
        (
            _ONE_CALL + _SHOWN,
            [HI, {"role": "assistant", "content": None, "tool_calls": _CALLS}, *_RESULTS, HI],
            "user:|hi|;assistant:||f0;tool:|r0|;assistant:||f1;tool:|r1|;user:|hi|;",
        ),
    ],
)
def test_a_turn_with_calls_is_rendered_even_if_the_template_refuses_its_form(
    template: str, messages: list[dict[str, Any]], expected: str
) -> None:
    assert rendered(template, *messages) == expected


def test_the_error_of_a_template_is_that_of_the_messages_as_they_were_sent() -> None:
    template = "{{ raise_exception(messages | length ~ ' messages') }}"
    with pytest.raises(TritonError, match="refuses 'messages': 1 messages"):
        rendered(template, {"role": "assistant", "content": "", "tool_calls": _CALLS})


@pytest.mark.parametrize(
    ("template", "message", "expected"),
    [
        (_ROLES, HI | {"tool_calls": 5}, "'messages[0].tool_calls' is 5, expected a list of calls"),
        (_ROLES, HI | {"tool_calls": {"id": "x"}}, "'messages[0].tool_calls' is {'id': 'x'}, expected a list of calls"),
        ("{{ 1 // (messages | length - 1) }}", HI, "the model's chat template refuses 'messages': "),
        ("{% for _ in range(1000000) %}{% endfor %}", HI, "the model's chat template refuses 'messages': "),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_name(template: str, message: dict[str, Any], expected: str) -> None:
    with pytest.raises(TritonError) as caught:
        rendered(template, message)
    assert caught.value.code is ErrorCode.INVALID_ARG and caught.value.message.startswith(expected)


@pytest.mark.parametrize("read", ["messages[0].mood", "messages[0]['mood']", "'mood' in messages[0]"])
def test_a_further_field_reaches_a_template_that_reads_it(read: str) -> None:
    assert rendered("{{ " + read + " }}", HI | {"mood": True}) == "True"


@pytest.mark.parametrize(
    ("template", "messages", "options", "param"),
    [
        ("{{ messages }}", HI | {"mood": "glad"}, {}, "messages[0].mood"),
        ("{{ messages }}", HI, {"tools": [{"type": "function"}]}, "tools"),
        ("{{ messages }}", HI, {"documents": [{"text": "a"}]}, "documents"),
        ("<think>", HI, {"reasoning_effort": "none"}, "reasoning_effort"),
    ],
)
def test_what_a_template_does_not_read_is_refused(
    template: str, messages: dict[str, Any], options: dict[str, Any], param: str
) -> None:
    with pytest.raises(TritonError, match="the model's chat template does not use it") as caught:
        rendered(template, messages, **options)
    assert (caught.value.param, caught.value.code) == (param, ErrorCode.INVALID_ARG)


@pytest.mark.parametrize("arguments", ['{"city": "Zürich",  "days": 2}', {"city": "Zürich", "days": 2}, "", None])
def test_a_called_functions_arguments_are_an_object_and_its_text(arguments: Any) -> None:
    template = ChatTemplate(
        "{% for call in messages[0].tool_calls %}{% set arguments = call.function.arguments %}"
        "{{ '<' + arguments + '>' }}{{ arguments ~ '|' }}{{ arguments | string }}{{ arguments | tojson }}"
        "{% if arguments is mapping %}{% for name, value in arguments.items() %};{{ name }}={{ value }}{% endfor %}"
        "{% endif %}{% endfor %}",
        {},
    )
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    rendered = template.render([{"role": "assistant", "content": "", "tool_calls": [call]}])
    text = (
        arguments
        if isinstance(arguments, str) and arguments
        else '{"city": "Zürich", "days": 2}'
        if arguments
        else "{}"
    )
    items = ";city=Zürich;days=2" if arguments else ""
    assert rendered == f"<{text}>{text}|{text}" + ('{"city": "Zürich", "days": 2}' if arguments else "{}") + items


CUT_OFF = '{"city": "Par'
READINGS = [
    ("{{ arguments }}", CUT_OFF),
    ("{{ '<' + arguments + '>' }}", f"<{CUT_OFF}>"),
    ("{{ arguments | tojson }}", json.dumps(CUT_OFF)),
    ("{% if arguments is string %}{{ arguments }}{% else %}{{ arguments | tojson }}{% endif %}", CUT_OFF),
    ("{% for name, value in arguments.items() %}{{ name }}={{ value }}{% endfor %}", f"arguments={CUT_OFF}"),
    ("{% for name, value in arguments | items %}{{ name }}={{ value }}{% endfor %}", f"arguments={CUT_OFF}"),
    ("{% for name in arguments %}{{ name }}={{ arguments[name] }}{% endfor %}", f"arguments={CUT_OFF}"),
]


@pytest.mark.parametrize(("reading", "expected"), READINGS)
def test_arguments_that_are_no_object_reach_the_template_as_their_text(reading: str, expected: str) -> None:
    source = "{% set arguments = messages[0].tool_calls[0].function.arguments %}" + reading
    call = {"type": "function", "function": {"name": "weather", "arguments": CUT_OFF}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert ChatTemplate(source, {}).render([message]) == expected


@pytest.mark.parametrize("text", ["[1]", "3", "null", '"x"', "[" * 100_000])
def test_other_json_than_an_object_is_text(text: str) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": text}}
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments }}", {})
    assert template.render([{"role": "assistant", "content": "", "tool_calls": [call]}]) == text


def test_a_value_that_is_known_is_not_parsed_again_but_checked_alike() -> None:
    value = {"messages": [HI], "tools": [{}]}
    text = json.dumps(value).encode()
    assert read_chat(text, BOUNDS, value).messages is value["messages"]
    assert read_chat(text, BOUNDS, value) == read_chat(text, BOUNDS)
    with pytest.raises(TritonError, match="has 11 messages, expected at most 10"):
        read_chat(json.dumps([HI] * 11).encode(), BOUNDS, [HI] * 11)
