"""/v1/responses: everything of which a body may contain many, and everything that is stored of responses.

Bodies are as large as the endpoint accepts; the store is filled to its limit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llmbackend.frontends.context import DEFAULT_MAX_BODY_BYTES
from llmbackend.frontends.conversation.tools import MAX_TOOLS

from ..served import AGENT, STEADY
from .attack import Attack, HttpSent, Post, PreparedAttack, Sent, numbered, repeated

_PATH = "/v1/responses"
_MAX_BYTES = DEFAULT_MAX_BODY_BYTES - (64 << 10)
_TURN = (
    '{"type":"function_call","call_id":"c%d","name":"f","arguments":"{}"},'
    '{"type":"function_call_output","call_id":"c%d","output":"ok"}'
)
_PART = '{"type":"input_text","text":"a"}'
_REASONING = '{"type":"reasoning","id":"r%d","summary":[],"encrypted_content":"AAAA"}'
_REFERENCE = '{"type":"item_reference","id":"msg_%d"}'
_MESSAGE = '{"role":"user","content":"a"}'
_FUNCTION = '{"type":"function","name":"f%d","parameters":{}}'
_NAMESPACE = '{"type":"namespace","name":"n%d","description":"d","tools":[' + '{"type":"function","name":"f%d"}' + "]}"
_LABEL = '"k%d":""'
_PROPERTY = '"p%d":{"type":"string"}'
_CHAIN = 60
"""Responses behind one another."""
_FOLLOWED = 24
_FLOODED_TOKENS = 2000
_LARGE_BYTES = 1 << 20
"""Of an attack that is not there for its form alone."""


def _body(members: Callable[[int], str], model: str = STEADY) -> Callable[[int], list[Sent]]:
    head = f'"model":"{model}","max_output_tokens":16'

    def make(size: int) -> list[Sent]:
        return [HttpSent(_PATH, f"{{{head},{members(size - 1000)}}}".encode())]

    return make


def _input(items: Callable[[int], str], model: str = STEADY) -> Callable[[int], list[Sent]]:
    return _body(lambda size: f'"input":[{items(size)}]', model)


def _beside(members: Callable[[int], str], model: str = STEADY) -> Callable[[int], list[Sent]]:
    return _body(lambda size: f'"input":"hi",{members(size)}', model)


def _turns(size: int) -> str:
    return ",".join(_TURN % (number, number) for number in range(max(size // (len(_TURN) + 8), 2)))


def _grammar(size: int, syntax: str) -> str:
    definition = json.dumps('start: "a"' + ' "b"' * (size // 6) if syntax == "lark" else "(a|b)*" * (size // 6))
    form = f'{{"type":"grammar","syntax":"{syntax}","definition":{definition}}}'
    return f'"tools":[{{"type":"custom","name":"c","format":{form}}}],"tool_choice":"required"'


def _schema(size: int) -> str:
    schema = f'{{"type":"object","properties":{{{numbered(_PROPERTY, size)}}}}}'
    return f'"text":{{"format":{{"type":"json_schema","name":"x","schema":{schema}}}}}'


_LARGE: tuple[tuple[str, Callable[[int], list[Sent]]], ...] = (
    ("many items", _input(lambda size: repeated(_MESSAGE, size))),
    ("many calls and outputs", _input(_turns, AGENT)),
    ("one long text", _body(lambda size: f'"input":"{"word " * (size // 5)}"')),
    ("many parts", _input(lambda size: f'{{"role":"user","content":[{repeated(_PART, size)}]}}')),
    ("many sealed items", _input(lambda size: numbered(_REASONING, size))),
    ("one long seal", _input(lambda size: _REASONING.replace("AAAA", "A" * size) % 1)),
    ("many references", _input(lambda size: numbered(_REFERENCE, size))),
    ("deep items", _input(lambda size: "[" * (size // 2) + "]" * (size // 2))),
    ("long output of a call", _input(lambda size: _long_output(size), AGENT)),
    ("long instructions", _beside(lambda size: f'"instructions":"{"word " * (size // 5)}"')),
    ("tools", _beside(lambda size: f'"tools":[{numbered(_FUNCTION, size)}]', AGENT)),
    ("namespaces", _beside(lambda size: f'"tools":[{_namespaces(size)}]', AGENT)),
    ("custom tool, long Lark", _beside(lambda size: _grammar(size, "lark"), AGENT)),
    ("custom tool, long regex", _beside(lambda size: _grammar(size, "regex"), AGENT)),
    ("text.format", _beside(_schema)),
    (
        "metadata",
        _beside(lambda size: f'"metadata":{{{numbered(_LABEL, size)}}}'),
    ),
    ("include", _beside(lambda size: f'"include":[{repeated(chr(34) + "x" + chr(34), size)}]')),
    ("huge previous_response_id", _beside(lambda size: f'"previous_response_id":"{"r" * size}"')),
    ("unknown members", _beside(lambda size: numbered('"k%d":1', size))),
    ("truncated", _body(lambda size: f'"truncation":"auto","input":[{repeated(_MESSAGE, size)}]')),
)


def _namespaces(size: int) -> str:
    return ",".join(_NAMESPACE % (number, number) for number in range(max(size // (len(_NAMESPACE) + 8), 2)))


def _long_output(size: int) -> str:
    call = '{"type":"function_call","call_id":"c","name":"f","arguments":"{}"}'
    return call + f',{{"type":"function_call_output","call_id":"c","output":"{"word " * (size // 5)}"}}'


def _required_flood(tool: dict[str, Any]) -> Callable[[int], list[Sent]]:
    """As many calls as there are tokens, since the end of the turn is not let through."""
    body = {"model": AGENT, "input": "hi", "tools": [tool], "tool_choice": "required", "stream": True, "seed": 1}
    flood = {"max_output_tokens": _FLOODED_TOKENS, "min_tokens": _FLOODED_TOKENS}
    return lambda size: [HttpSent(_PATH, json.dumps(body | flood).encode())]


def _chained(size: int, post: Post) -> list[Sent]:
    """Each response goes on behind the one before: the last request asks for the history of all of them."""
    answer: dict[str, Any] = {}
    words = "word " * min(size // 5, 100)
    for number in range(_CHAIN):
        body: dict[str, Any] = {"model": AGENT, "input": f"{words}{number}", "max_output_tokens": 16}
        answer = post(_PATH, body | ({"previous_response_id": answer["id"]} if answer else {}))
    last = {"model": AGENT, "input": "and?", "max_output_tokens": 16, "previous_response_id": answer["id"]}
    return [HttpSent(_PATH, json.dumps(last | {"truncation": "auto"}).encode())] * 4


def _listed(size: int, post: Post) -> list[Sent]:
    items = [{"role": "user", "content": "a"} for _ in range(min(size // 40, 1500))]
    made = post(_PATH, {"model": AGENT, "input": items, "max_output_tokens": 16})
    path = f"{_PATH}/{made['id']}"
    queries = ("input_items?limit=100", "input_items?limit=100&order=asc", "?include=reasoning.encrypted_content")
    asked: list[Sent] = [HttpSent(f"{path}/{query}".replace("/?", "?"), b"", method="GET") for query in queries]
    return asked * 4


def _followed(size: int, post: Post) -> list[Sent]:
    """Many live journals; each is then read from its beginning to its end."""
    most = 300 if size >= _LARGE_BYTES else 30
    body = {"model": STEADY, "input": "hi", "background": True, "ignore_eos": True, "max_output_tokens": most}
    made = [post(_PATH, body | {"seed": number}) for number in range(_FOLLOWED)]
    return [HttpSent(f"{_PATH}/{one['id']}?stream=true", b"", method="GET") for one in made]


def _until_full(size: int) -> list[Sent]:
    """As many responses as there is room for, and more: the oldest go."""
    body = {"model": AGENT, "input": "word " * min(size // 5, 9000), "max_output_tokens": 16}
    return [HttpSent(_PATH, json.dumps(body).encode())] * (60 if size >= _LARGE_BYTES else 4)


_CUSTOM = {"type": "custom", "name": "c"}
_TEXT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
_MANY_TOOLS = [{"type": "function", "name": f"f{number}", "parameters": _TEXT} for number in range(MAX_TOOLS)]
RESPONSES_ATTACKS: tuple[Attack, ...] = (
    *(Attack(f"responses {name}", make, _MAX_BYTES) for name, make in _LARGE),
    Attack("responses flood of calls", _required_flood({"type": "function", "name": "f", "parameters": _TEXT})),
    Attack("responses flood of custom input", _required_flood(_CUSTOM), expected="(?s)^200 .*custom_tool_call_input"),
    Attack(
        f"responses {MAX_TOOLS} tools",
        lambda size: [
            HttpSent(_PATH, json.dumps({"model": AGENT, "input": "hi", "tools": _MANY_TOOLS, "store": False}).encode())
        ],
        expected="^200 ",
    ),
    PreparedAttack(f"responses chain of {_CHAIN}", lambda size: [], _MAX_BYTES, "^200 ", _chained),
    PreparedAttack("responses lists of items", lambda size: [], _MAX_BYTES, "^200 ", _listed),
    PreparedAttack(f"responses {_FOLLOWED} journals followed", lambda size: [], _MAX_BYTES, "^200 ", _followed),
    Attack("responses store full", _until_full, _MAX_BYTES, "^200 "),
)
