"""/v1/messages and /v1/messages/count_tokens: everything of which a body may contain many."""

from __future__ import annotations

import json
from collections.abc import Callable

from llmbackend.frontends.context import DEFAULT_MAX_BODY_BYTES

from ..served import AGENT, STEADY
from .attack import Attack, HttpSent, Sent, numbered, repeated

_MAX_BYTES = DEFAULT_MAX_BODY_BYTES - (64 << 10)
_HI = '"messages":[{"role":"user","content":"hi"}]'
_TURNS = (
    '{"role":"assistant","content":[{"type":"tool_use","id":"t%d","name":"f","input":{}}]},'
    '{"role":"user","content":[{"type":"tool_result","tool_use_id":"t%d","content":"ok"}]}'
)
_TEXT = '{"type":"text","text":"a"}'
_THINKING = '{"type":"thinking","thinking":"a","signature":"AAAA%d"}'
_TOOL = '{"name":"f%d","input_schema":{"type":"object"}}'
_STOP = '"s%dq"'
_PROPERTY = '"p%d":{"type":"string"}'
_FLOODED_TOKENS = 2000


def _body(members: Callable[[int], str], model: str = STEADY) -> Callable[[int], str]:
    return lambda size: f'{{"model":"{model}",{members(size - 1000)}'


def _turns(size: int) -> str:
    return ",".join(_TURNS % (number, number) for number in range(max(size // (len(_TURNS) + 8), 2)))


def _content(content: Callable[[int], str], role: str = "user") -> Callable[[int], str]:
    before = '{"role":"user","content":"hi"},' if role == "assistant" else ""
    after = ',{"role":"user","content":"and?"}' if role == "assistant" else ""
    return lambda size: f'"messages":[{before}{{"role":"{role}","content":{content(size)}}}{after}]'


def _beside(members: Callable[[int], str]) -> Callable[[int], str]:
    return lambda size: f"{_HI},{members(size)}"


_BODIES: tuple[tuple[str, Callable[[int], str], str], ...] = (
    ("many messages", lambda size: f'"messages":[{repeated(_HI[12:-1], size)}]', STEADY),
    ("many calls and results", lambda size: f'"messages":[{_turns(size)}]', AGENT),
    ("one long text", _content(lambda size: f'"{"word " * (size // 5)}"'), STEADY),
    ("many blocks", _content(lambda size: f"[{repeated(_TEXT, size)}]"), STEADY),
    ("many signatures", _content(lambda size: f"[{numbered(_THINKING, size)}]", "assistant"), AGENT),
    ("one long signature", _content(lambda size: f"[{_THINKING % 1}]".replace("AAAA", "A" * size), "assistant"), AGENT),
    ("deep input of a call", _content(lambda size: _deep_call(size), "assistant"), AGENT),
    ("blocks of system", _beside(lambda size: f'"system":[{repeated(_TEXT, size)}]'), STEADY),
    ("tools", _beside(lambda size: f'"tools":[{numbered(_TOOL, size)}]'), AGENT),
    ("one huge tool", _beside(lambda size: _huge_tool(size)), AGENT),
    (
        "stop_sequences",
        _beside(lambda size: f'"stop_sequences":[{numbered(_STOP, size)}]'),
        STEADY,
    ),
    ("huge metadata", _beside(lambda size: f'"metadata":{{"user_id":"{"u" * size}"}}'), STEADY),
    ("unknown members", _beside(lambda size: numbered('"k%d":1', size)), STEADY),
)


def _deep_call(size: int) -> str:
    return f'[{{"type":"tool_use","id":"t","name":"f","input":{{"a":{"[" * (size // 2)}{"]" * (size // 2)}}}}}]'


def _huge_tool(size: int) -> str:
    schema = f'{{"type":"object","properties":{{{numbered(_PROPERTY, size)}}}}}'
    return f'"tools":[{{"name":"f","input_schema":{schema}}}],"tool_choice":{{"type":"any"}}'


def _sent(path: str, tail: str, make: Callable[[int], str]) -> Callable[[int], list[Sent]]:
    return lambda size: [HttpSent(path, f"{make(size)}{tail}}}".encode(), {"anthropic-version": "2023-06-01"})]


def _flood(size: int) -> list[Sent]:
    tool = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}}
    body = {"model": AGENT, "messages": [{"role": "user", "content": "hi"}], "tools": [tool], "stream": True}
    body |= {"max_tokens": _FLOODED_TOKENS, "tool_choice": {"type": "any"}}
    return [HttpSent("/v1/messages", json.dumps(body).encode(), {"anthropic-version": "2023-06-01"})]


_COUNTED = ("many messages", "one long text", "many blocks", "tools")
MESSAGES_ATTACKS: tuple[Attack, ...] = (
    *(
        Attack(f"messages {name}", _sent("/v1/messages", ',"max_tokens":16', _body(members, model)), _MAX_BYTES)
        for name, members, model in _BODIES
    ),
    *(
        Attack(f"count_tokens {name}", _sent("/v1/messages/count_tokens", "", _body(members, model)), _MAX_BYTES)
        for name, members, model in _BODIES
        if name in _COUNTED
    ),
    Attack("messages flood of calls", _flood, expected='(?s)^200 .*"tool_use"'),
)
