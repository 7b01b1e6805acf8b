"""/v1/chat/completions, /v1/completions, /tokenize, /detokenize: everything of which a body may contain many."""

from __future__ import annotations

from collections.abc import Callable

from llmbackend.adapter.requests.prompts import MAX_DESCRIBED_TOKENS
from llmbackend.frontends.context import DEFAULT_MAX_BODY_BYTES

from .attack import Attack, HttpSent, Sent, numbered, repeated

_MAX_BYTES = DEFAULT_MAX_BODY_BYTES - (64 << 10)
_MODEL = '"model":"steady","max_tokens":2'
_MESSAGES = '"messages":[{"role":"user","content":"hi"}]'
_PART = '{"type":"text","text":"a"}'
_MESSAGE = '{"role":"user","content":"a"}'
_ONE = '"a"'
_ESCAPE = "\\u00e9"
_TOOL = '{"type":"function","function":{"name":"f%d","parameters":{}}}'


def _post(path: str, members: Callable[[int], str]) -> Callable[[int], list[Sent]]:
    def make(size: int) -> list[Sent]:
        return [HttpSent(f"/v1/{path}", f"{{{_MODEL},{members(size - 1000)}}}".encode())]

    return make


def _chat(members: Callable[[int], str]) -> Callable[[int], list[Sent]]:
    return _post("chat/completions", lambda size: f"{_MESSAGES},{members(size)}")


def _completions(members: Callable[[int], str], prompt: str = '"hi"') -> Callable[[int], list[Sent]]:
    return _post("completions", lambda size: f'"prompt":{prompt},{members(size)}')


def _member(key: str, form: str, brackets: str = "[]") -> Callable[[int], str]:
    return lambda size: f'"{key}":{brackets[0]}{numbered(form, size)}{brackets[1]}'


def _message(content: Callable[[int], str]) -> Callable[[int], list[Sent]]:
    return _post("chat/completions", lambda size: f'"messages":[{{"role":"user","content":{content(size)}}}]')


def _prompts(prompt: Callable[[int], str]) -> Callable[[int], list[Sent]]:
    return _post("completions", lambda size: f'"prompt":{prompt(size)}')


_CHAT: tuple[tuple[str, Callable[[int], list[Sent]]], ...] = (
    ("many messages", _post("chat/completions", lambda size: f'"messages":[{repeated(_MESSAGE, size)}]')),
    ("one long message", _message(lambda size: f'"{"word " * (size // 5)}"')),
    ("escaped message", _message(lambda size: f'"{_ESCAPE * (size // 6)}"')),
    ("content parts", _message(lambda size: f"[{repeated(chr(123) + _PART + chr(125), size)}]")),
    ("chat_template_kwargs", _chat(_member("chat_template_kwargs", '"k%d":[[],{}]', "{}"))),
    ("tools", _chat(_member("tools", _TOOL))),
    ("stop strings", _chat(_member("stop", '"s%dq"'))),
    ("stop_token_ids", _chat(_member("stop_token_ids", "%d"))),
    ("logit_bias", _chat(_member("logit_bias", '"%d":1', "{}"))),
    ("unknown members", _chat(lambda size: numbered('"k%d":1', size))),
    ("deep", _chat(lambda size: f'"tools":{"[" * (size // 2)}{"]" * (size // 2)}')),
    ("cut short", _chat(lambda size: f'"tools":[{repeated("[]", size)}')),
    ("huge user", _chat(lambda size: f'"user":"{"u" * size}"')),
)
_COMPLETIONS: tuple[tuple[str, Callable[[int], list[Sent]]], ...] = (
    ("many prompts", _prompts(lambda size: f"[{repeated(chr(34) + 'a' + chr(34), size)}]")),
    ("token ids", _prompts(lambda size: f"[{repeated('5', size)}]")),
    ("many lists of token ids", _prompts(lambda size: f"[{repeated('[5]', size)}]")),
    ("long prompt", _prompts(lambda size: f'"{"word " * (size // 5)}"')),
    ("stop strings", _completions(_member("stop", '"s%dq"'))),
)


def _body(path: str, members: Callable[[int], str]) -> Callable[[int], list[Sent]]:
    return lambda size: [HttpSent(path, f'{{"model":"steady",{members(size - 1000)}}}'.encode())]


_TOKENIZE: tuple[tuple[str, Callable[[int], list[Sent]]], ...] = (
    ("words", _body("/tokenize", lambda size: f'"prompt":"{"word " * (size // 5)}"')),
    ("token names", _body("/tokenize", lambda size: f'"return_token_strs":true,"prompt":"{"word " * (size // 5)}"')),
    ("one long word", _body("/tokenize", lambda size: f'"prompt":"{"x" * size}"')),
    ("messages", _body("/tokenize", lambda size: f'"messages":[{repeated(_MESSAGE, size)}]')),
    ("token ids", _body("/detokenize", lambda size: f'"tokens":[{repeated("5", size)}]')),
)
OPENAI_ATTACKS = (
    *(Attack(f"tokenize {name}", make, _MAX_BYTES) for name, make in _TOKENIZE),
    *(Attack(f"tokenize {name}, as many as are taken", make, MAX_DESCRIBED_TOKENS) for name, make in _TOKENIZE),
    *(Attack(f"chat {name}", make, _MAX_BYTES) for name, make in _CHAT),
    *(Attack(f"completions {name}", make, _MAX_BYTES) for name, make in _COMPLETIONS),
)
