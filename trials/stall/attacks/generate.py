"""POST …/generate and …/generate_stream: flat JSON objects."""

from __future__ import annotations

import json
from collections.abc import Callable

from llmbackend.frontends.http.direct_body import MAX_CHUNKS

from .attack import MEMBER, Attack, HttpSent, Sent, numbered, repeated

_CONNECTIONS = 16
_EMPTY = '""'
_MESSAGE = '{"role":"user","content":"a"}'


def _generate(
    members: Callable[[int], str], path: str = "generate", model: str = "steady"
) -> Callable[[int], list[Sent]]:
    def make(size: int) -> list[Sent]:
        return [HttpSent(f"/v2/models/{model}/{path}", f"{{{members(size - 1000)}}}".encode())]

    return make


def _prompt(size: int) -> str:
    return f'"text_input":"{"word " * (size // 5)}"'


def _text_and(members: Callable[[int], str]) -> Callable[[int], str]:
    return lambda size: f'"text_input":"hi",{members(size)}'


def _in_json_text(name: str, text: Callable[[int], str]) -> Callable[[int], str]:
    """A string that holds JSON itself."""
    return lambda size: f'"{name}":{json.dumps(text(size * 2 // 3))}'


def _in_chunks(size: int) -> list[Sent]:
    body = json.dumps({"text_input": "a"}).encode()
    return [HttpSent("/v2/models/steady/generate", body + b" " * (size - len(body)), connections=_CONNECTIONS)]


def _without_a_key(size: int) -> list[Sent]:
    """Each is refused at once, so they come over and over."""
    return [HttpSent("/v2/models/steady/generate", b" " * size, has_key=False, connections=_CONNECTIONS)] * 30


GENERATE_ATTACKS = (
    Attack("generate in chunks of one byte", _in_chunks, most_bytes=MAX_CHUNKS, expected="200"),
    Attack("generate in chunks without a key", _without_a_key, MAX_CHUNKS, expected="401"),
    Attack("generate in too many chunks", _in_chunks, most_bytes=2 * MAX_CHUNKS, expected="[24]00"),
    Attack("generate long prompt", _generate(_prompt)),
    Attack("generate_stream long prompt", _generate(_prompt, "generate_stream")),
    Attack("generate many texts", _generate(lambda size: f'"text_input":[{repeated(_EMPTY, size)}]')),
    Attack("generate many numbers", _generate(lambda size: f'"IN":[{repeated("0.5", size)}]', model="echo_FP32")),
    Attack("generate many members", _generate(_text_and(lambda size: numbered(MEMBER, size)))),
    Attack(
        "generate many parameters",
        _generate(_text_and(lambda size: f'"parameters":{{{numbered(MEMBER, size)}}}')),
    ),
    Attack("generate huge id", _generate(_text_and(lambda size: f'"id":"{"i" * size}"'))),
    Attack("generate repeated name", _generate(lambda size: repeated('"text_input":"a"', size))),
    Attack("generate many token ids", _generate(lambda size: f'"input_ids":[{repeated("5", size)}]')),
    Attack(
        "generate many messages",
        _generate(_in_json_text("messages", lambda size: f"[{repeated(_MESSAGE, size)}]")),
    ),
    Attack(
        "generate many sampling members",
        _generate(_text_and(_in_json_text("sampling_parameters", lambda size: f"{{{numbered(MEMBER, size)}}}"))),
    ),
)
