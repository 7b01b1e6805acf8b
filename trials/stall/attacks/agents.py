"""Agents' requests: schemas, grammars, tools, choices. Some as large as a body may be, some small and hard to compile.

The small ones are as hostile as possible within the bounds of a constraint, so that they are compiled rather than
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llmbackend.frontends.context import DEFAULT_MAX_BODY_BYTES
from llmbackend.frontends.conversation.tools import MAX_TOOLS

from ..served import AGENT, STEADY
from .attack import Attack, HttpSent, Sent, numbered, repeated

_MAX_BYTES = DEFAULT_MAX_BODY_BYTES - (64 << 10)
_HI = '"messages":[{"role":"user","content":"hi"}]'
_PROPERTY = '"p%d":{"type":"string","maxLength":9}'
_CHOICE = '"choice %d"'
_CALL = '{"id":"c%d","type":"function","function":{"name":"f","arguments":"{}"}}'
_TAG = '{"begin":"<f%d>","schema":{"type":"integer"},"end":"</f>"}'


def _post(path: str, members: Callable[[int], str], model: str = STEADY) -> Callable[[int], list[Sent]]:
    head = f'"model":"{model}","max_tokens":64'

    def make(size: int) -> list[Sent]:
        return [HttpSent(f"/v1/{path}", f"{{{head},{members(size - 1000)}}}".encode())]

    return make


def _chat(members: Callable[[int], str], model: str = STEADY) -> Callable[[int], list[Sent]]:
    return _post("chat/completions", lambda size: f"{_HI},{members(size)}", model)


def _small(value: Mapping[str, Any], times: int = 1, model: str = STEADY) -> Callable[[int], list[Sent]]:
    """`times`: one after the other, each with a grammar of its own, so that none is found compiled."""

    def make(size: int) -> list[Sent]:
        return [
            sent
            for number in range(times)
            for sent in _chat(_members({"seed": 1, **_numbered(value, number)}), model)(size)
        ]

    return make


def _members(value: Mapping[str, Any]) -> Callable[[int], str]:
    return lambda size: json.dumps(value)[1:-1]


def _numbered(value: Any, number: int) -> Any:
    """With each "@" in its texts replaced by `number`."""
    return json.loads(json.dumps(value).replace("@", str(number)))


def _schema(schema: Callable[[int], str]) -> Callable[[int], list[Sent]]:
    return _chat(
        lambda size: f'"response_format":{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema(size)}}}}}'
    )


def _small_schema(schema: Mapping[str, Any], times: int = 1) -> Callable[[int], list[Sent]]:
    form = {"type": "json_schema", "json_schema": {"name": "x@", "schema": {"$comment": "@", **schema}}}
    return _small({"response_format": form}, times)


def _constraint(times: int = 1, **structured_outputs: Any) -> Callable[[int], list[Sent]]:
    return _small({"structured_outputs": structured_outputs}, times)


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [{"type": "object", "properties": {"a": schema}, "required": ["a"]}, {"type": "null"}]}
    return schema


_RECURSIVE = {
    "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{j}"} for j in range(40) if j != i]} for i in range(40)},
    "$ref": "#/$defs/d0",
}
_SELF_REFERENCE = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
_WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}, "minProperties": 900}
_ALL_OF = {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": v}}} for v in range(8)]} for i in range(24)]}
_ITEMS = {"type": "array", "items": {"enum": [f"value {i}" for i in range(1000)]}, "minItems": 60, "maxItems": 900}
_AMBIGUOUS_LARK = 'start: e\ne: e e | e "+" e | "a" | "aa" | "aaa@" |'


def _tool(form: str) -> str:
    return f'{{"type":"function","function":{{"name":"f%d","parameters":{form}}}}}'


def _tools(count: int, form: str, choice: str) -> Callable[[int], list[Sent]]:
    listed = ",".join(_tool(form) % number for number in range(count))
    return _chat(lambda size: f'"tools":[{listed}],"tool_choice":"{choice}"', AGENT)


def _large_tools(size: int) -> str:
    """As many as the server takes, and as large as a body may be."""
    choices = numbered(_CHOICE, size // MAX_TOOLS - 200)
    form = _tool(f'{{"type":"object","properties":{{"a":{{"enum":[{choices}]}}}}}}')
    return f'"tools":[{",".join(form % number for number in range(MAX_TOOLS))}],"tool_choice":"required"'


def _flood(text: str) -> Callable[[int], list[Sent]]:
    """The model writes what looks like calls, in strings, and may call."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"type": "array", "items": {"const": text}, "minItems": 40, "maxItems": 500}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return _small({"tools": [tool], "response_format": form} | _FLOODED, model=AGENT)


def _required_flood(**properties: Any) -> Callable[[int], list[Sent]]:
    """Nothing but calls, one after the other."""
    form = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": form}}
    required = {"tools": [tool], "tool_choice": "required", "min_tokens": _FLOODED["max_tokens"]}
    return _small(required | _FLOODED, model=AGENT)


_FLOODED = {"max_tokens": 3000, "stream": True}
_FLOODED_CALL = '<tool_call>{"name": "f", "arguments": {"a": [[[1]]]}}</tool_call>'
_OBJECT = '{"type":"object"}'
_STRICT = '{"type":"object","properties":{"a":{"type":"string"}},"required":["a"],"additionalProperties":false}'

_LARGE: tuple[tuple[str, Callable[[int], list[Sent]]], ...] = (
    ("schema many properties", _schema(lambda size: f'{{"properties":{{{numbered(_PROPERTY, size)}}}}}')),
    ("schema huge enum", _schema(lambda size: f'{{"enum":[{numbered(_CHOICE, size)}]}}')),
    ("schema deep", _schema(lambda size: '{"items":' * (size // 10) + "{}" + "}" * (size // 10))),
    ("schema long pattern", _schema(lambda size: f'{{"pattern":"{"(a|b)*" * (size // 6)}"}}')),
    ("schema long description", _schema(lambda size: f'{{"type":"integer","description":"{"d" * size}"}}')),
    ("huge choice", _chat(lambda size: f'"structured_outputs":{{"choice":[{numbered(_CHOICE, size)}]}}')),
    ("long regex", _chat(lambda size: f'"structured_outputs":{{"regex":"{"(a|b)*" * (size // 6)}"}}')),
    ("long grammar", _chat(lambda size: '"structured_outputs":{"grammar":"start: ' + '\\"a\\" ' * (size // 6) + '"}')),
    (
        "many structural tags",
        _chat(
            lambda size: (
                f'"response_format":{{"type":"structural_tag","triggers":["<f"],"structures":[{numbered(_TAG, size)}]}}'
            )
        ),
    ),
    ("many calls in a turn", _post("chat/completions", lambda size: _history(numbered(_CALL, size)), AGENT)),
    ("long arguments of a call", _post("chat/completions", lambda size: _history(_long_call(size)), AGENT)),
    ("largest tools", _chat(_large_tools, AGENT)),
    ("bad_words", _chat(lambda size: f'"bad_words":[{numbered(_CHOICE, size)}]')),
    ("allowed_token_ids", _chat(lambda size: f'"allowed_token_ids":[{numbered("%d", size)}]')),
    ("logprob_token_ids", _chat(lambda size: f'"logprob_token_ids":[{numbered("%d", size)}]')),
    ("documents", _chat(lambda size: f'"documents":[{repeated(chr(123) + chr(125), size)}]')),
    ("metadata", _chat(lambda size: f'"metadata":{{{numbered(chr(34) + "k%d" + chr(34) + ":" + chr(34) * 2, size)}}}')),
    ("huge request_id", _chat(lambda size: f'"request_id":"{"r" * size}"')),
    ("long chat_template", _chat(lambda size: f'"chat_template":"{"{{ 1 }}" * (size // 7)}"')),
)
_HARD: tuple[tuple[str, Callable[[int], list[Sent]]], ...] = (
    ("schema that refers to itself", _small_schema(_SELF_REFERENCE)),
    ("schema of circular references", _small_schema(_RECURSIVE)),
    ("schema of nested unions", _small_schema(_nested(18), times=4)),
    ("schema of 1,000 properties, 900 needed", _small_schema(_WIDE)),
    ("schema of all of any of", _small_schema(_ALL_OF)),
    ("schema of 900 items of an enum", _small_schema(_ITEMS, times=4)),
    ("schema with large repeats", _small_schema({"type": "string", "pattern": "^((a{1,99}b?){1,99}c){1,99}$"})),
    ("regex that backtracks", _constraint(regex="(a+)+(a|aa)+(.*a){24}@", times=4)),
    ("regex with large repeats", _constraint(regex="((a|b|ab){0,40}c?){0,40}@", times=4)),
    ("regex of words", _constraint(regex=r"(\w{3,80} ?){1,80}@", times=4)),
    ("ambiguous grammar", _constraint(grammar=_AMBIGUOUS_LARK, times=4)),
    ("128 constraints of their own", _constraint(regex="(yes|no) @", times=128)),
    ("many choices", _small({"n": 64, "max_tokens": 500})),
    ("too many choices", _small({"n": 1_000_000_000})),
    ("many logprobs of many choices", _small({"n": 16, "logprobs": True, "top_logprobs": 20, "max_tokens": 200})),
)
"""Not much larger for a larger body."""
_CALLS = r'(?s)^200 .*"tool_calls":\[.*"arguments":'
_TOOLS: tuple[tuple[str, Callable[[int], list[Sent]], str], ...] = (
    (f"{MAX_TOOLS} tools, auto", _tools(MAX_TOOLS, _OBJECT, "auto"), "^200 "),
    (f"{MAX_TOOLS} tools, required", _tools(MAX_TOOLS, _STRICT, "required"), _CALLS),
    (f"{MAX_TOOLS + 1} tools", _tools(MAX_TOOLS + 1, _STRICT, "required"), f"^400 .*at most {MAX_TOOLS}"),
    ("1,000 tools", _tools(1000, _OBJECT, "auto"), f"^400 .*at most {MAX_TOOLS}"),
    ("tool-call flood", _required_flood(), _CALLS),
    ("flood of arguments", _required_flood(a={"type": "array", "items": {"type": "integer"}}), _CALLS),
    ("flood of strings in calls", _required_flood(a={"type": "string"}), _CALLS),
    ("flood of texts like calls", _flood(_FLOODED_CALL), "^200 "),
    ("flood of half markers", _flood("<tool_cal"), "^200 "),
)
"""With what their answers must have, so that no one is refused by mistake."""


def _history(calls: str) -> str:
    return f'"messages":[{{"role":"assistant","content":"","tool_calls":[{calls}]}},{{"role":"user","content":"hi"}}]'


def _long_call(size: int) -> str:
    arguments = json.dumps(f'{{"a":[{repeated("[]", size // 2)}]}}')
    return f'{{"id":"c","type":"function","function":{{"name":"f","arguments":{arguments}}}}}'


def _prompt_logprobs(size: int) -> list[Sent]:
    prompt = "word " * 780
    body = {"model": STEADY, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 20, "logprobs": 20, "echo": True}
    return [HttpSent("/v1/completions", json.dumps(body).encode())] * 4


AGENT_ATTACKS = (
    *(Attack(f"agent {name}", make, _MAX_BYTES) for name, make in _LARGE),
    *(Attack(f"agent {name}", make) for name, make in _HARD),
    *(Attack(f"agent {name}", make, expected=expected) for name, make, expected in _TOOLS),
    Attack("agent logprobs of long prompts", _prompt_logprobs),
)
