"""The kinds of items, tools and additional output that a request may name: each is supported, or refused by name and
place.

Source: the types in OpenAI's Python package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx
from openai.types.responses import response_includable, response_input_item_param, tool_param

from llmbackend.frontends.generation.sealed_reasoning import FIXED_KEY

from ..api import Api
from ..asking import REASONER, JsonObject
from ..published import kinds, literals
from ..table import Refused, Row, promise
from .asking import Responses

Place = Callable[[Any], JsonObject]
"""The fields of a request with a kind of object in its place."""
_QUESTION: Final = {"role": "user", "content": "What is a KV cache?"}
_CALL: Final = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
_CUSTOM_CALL: Final = {"type": "custom_tool_call", "call_id": "call_1", "name": "patch", "input": "x"}


class InPlace:
    """A request's field that holds objects of some kind. place: makes the fields; param: where errors say it is."""

    def __init__(self, client: httpx.Client, name: str, place: Place, param: str) -> None:
        self.api, self.name = Responses(client), name
        self._place, self._param = place, param

    def texts(self, **fields: Any) -> list[str]:
        (value,) = fields.values() if fields else (None,)
        return self.api.texts(**({} if value is None else self._place(value)))

    def reason(self, field: str, value: Any) -> str:
        error = self.api.refusal(**self._place(value))
        assert error["param"].startswith(self._param), error
        message: str = error["message"]
        assert field in message and len(message) > len(field) + 20, f"{message!r} does not name {field}"
        return message.partition(": ")[2] or message


def _prompt_tokens(place: InPlace, *items: JsonObject, **fields: Any) -> int:
    count: int = place.api.ask(input=[_QUESTION, *items], **fields).usage["input_tokens"]
    return count


@promise("a message of each role, as text or as parts; with or without its type")
def _message(place: InPlace) -> None:
    for role, kind in (("user", "input_text"), ("assistant", "output_text"), ("system", "input_text")):
        counts = {
            _prompt_tokens(place, {"type": "message", "role": role, "content": content})
            for content in ("A seed.", [{"type": kind, "text": "A seed."}])
        }
        assert len(counts) == 1 and counts.pop() > _prompt_tokens(place)


@promise("a call of the assistant's turn")
def _function_call(place: InPlace) -> None:
    counts = [_prompt_tokens(place, _CALL | {"name": name}, _output("it is so")) for name in ("f", "long_name_of_f")]
    assert counts[0] < counts[1]


def _output(text: Any, kind: str = "function_call_output") -> JsonObject:
    return {"type": kind, "call_id": "call_1", "output": text}


@promise("the result of a call, as text or as parts")
def _function_call_output(place: InPlace) -> None:
    counts = [_prompt_tokens(place, _CALL, _output(text)) for text in ("yes", "yes, and much more than that")]
    assert counts[0] < counts[1]
    assert _prompt_tokens(place, _CALL, _output([{"type": "input_text", "text": "yes"}])) == counts[0]


@promise("a call of a custom tool")
def _custom_tool_call(place: InPlace) -> None:
    output = _output("done", "custom_tool_call_output")
    counts = [_prompt_tokens(place, _CUSTOM_CALL | {"input": text}, output) for text in ("x", "x and much more text")]
    assert counts[0] < counts[1]


@promise("the result of a call of a custom tool")
def _custom_tool_call_output(place: InPlace) -> None:
    counts = [
        _prompt_tokens(place, _CUSTOM_CALL, _output(text, "custom_tool_call_output"))
        for text in ("yes", "yes, and much more than that")
    ]
    assert counts[0] < counts[1]


@promise("reasoning of an earlier turn, as text or sealed; altered seals are refused")
def _reasoning(place: InPlace) -> None:
    thinking: JsonObject = {"model": REASONER, "ignore_eos": True, "max_output_tokens": 40}
    thinking["include"] = ["reasoning.encrypted_content"]
    (item,) = place.api.ask(**thinking).of("reasoning")
    sealed = item | {"content": None}
    assert _prompt_tokens(place, item) == _prompt_tokens(place, sealed)
    seal: str = item["encrypted_content"]
    altered = sealed | {"encrypted_content": seal[:8] + seal[8:][::-1]}
    error = place.api.refusal(input=[_QUESTION, altered])
    assert error["param"] == "input[1].encrypted_content", error


@promise("an item of a stored response")
def _item_reference(place: InPlace) -> None:
    answer = place.api.ask()
    reference = {"type": "item_reference", "id": answer.items[0]["id"]}
    spoken = {"role": "assistant", "content": answer.text}
    assert _prompt_tokens(place, reference, _QUESTION) == _prompt_tokens(place, spoken, _QUESTION)


_QUERY: Final = {"type": "object", "properties": {"query": {"enum": ["f"]}}, "required": ["query"]}
_LOOKED_UP: Final = {"type": "function", "name": "f", "description": "Found.", "parameters": _QUERY, "strict": True}
_SEARCH: Final = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": _QUERY}


@promise("a call of the client's tool search, and the tools that it found, which can be called")
def _tool_search(place: InPlace) -> None:
    call = {"type": "tool_search_call", "call_id": "call_1", "execution": "client", "arguments": {"query": "f"}}
    output = {"type": "tool_search_output", "call_id": "call_1", "execution": "client", "tools": [_LOOKED_UP]}
    asked: JsonObject = {"tools": [_SEARCH], "max_output_tokens": 60}
    assert _prompt_tokens(place, call, output, tools=[_SEARCH]) > _prompt_tokens(place, tools=[_SEARCH])
    choice = {"type": "function", "name": "f"}
    found = place.api.ask(input=[_QUESTION, call, output], **asked, tool_choice=choice)
    assert found.calls == ["f"]


@promise("tools that a later item adds")
def _additional_tools(place: InPlace) -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [_LOOKED_UP]}
    assert _prompt_tokens(place, item) > _prompt_tokens(place)


@promise("the sealed summary of what came before, as the assistant's; altered seals are refused")
def _compaction(place: InPlace) -> None:
    item = {"type": "compaction", "encrypted_content": FIXED_KEY.seal("A seed.")}
    assert _prompt_tokens(place, item) > _prompt_tokens(place)
    altered = item | {"encrypted_content": item["encrypted_content"][::-1]}
    error = place.api.refusal(input=[_QUESTION, altered])
    assert error["param"] == "input[1].encrypted_content", error


_ITEMS_DONE: Final[Mapping[str, Row]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "custom_tool_call": _custom_tool_call,
    "custom_tool_call_output": _custom_tool_call_output,
    "reasoning": _reasoning,
    "item_reference": _item_reference,
    "tool_search_call": _tool_search,
    "tool_search_output": _tool_search,
    "additional_tools": _additional_tools,
    "compaction": _compaction,
}


@promise("its functions can be called; the call names the namespace")
def _namespace(place: InPlace) -> None:
    tool = {"type": "namespace", "name": "files", "description": "Of files.", "tools": [_LOOKED_UP]}
    answer = place.api.ask(tools=[tool], tool_choice="required", max_output_tokens=60)
    (call,) = answer.of("function_call")
    assert (call["name"], call["namespace"]) == ("f", "files")


@promise("the client searches for tools: the answer may have a call of it")
def _search(place: InPlace) -> None:
    answer = place.api.ask(tools=[_SEARCH], tool_choice="required", max_output_tokens=100)
    assert answer.of("tool_search_call")


def _left_out(kind: str) -> Row:
    @promise("ignored, since agents always send it: the model does not see it, and the response's tools do not list it")
    def check(place: InPlace) -> None:
        answer = place.api.ask(tools=[{"type": kind}])
        assert answer.json["tools"] == [] and answer.text == place.api.ask().text

    return check


@promise("see `tools` and `tool_choice` above")
def _tool(place: InPlace) -> None:
    for tool in ({"type": "function", "name": "f", "parameters": {}}, {"type": "custom", "name": "f"}):
        assert _prompt_tokens(place, tools=[tool]) > _prompt_tokens(place)


@promise("see `include` above")
def _included(place: InPlace) -> None:
    assert place.texts() == place.api.texts(include=["message.output_text.logprobs", "reasoning.encrypted_content"])


def _no_such_items(kind: str) -> Row:
    @promise("accepted; no response has such items")
    def check(place: InPlace) -> None:
        assert place.texts() == place.texts(include=kind)

    return check


_INCLUDABLE: Final = literals(response_includable.ResponseIncludable)
_SEEN: Final[dict[str, Row]] = {"message.output_text.logprobs": _included, "reasoning.encrypted_content": _included}
_WEB_SEARCHES: Final = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")


def _api(title: str, published: frozenset[str], done: Mapping[str, Row], place: Place, param: str) -> Api:
    refused: dict[str, Row] = {kind: Refused([kind]) for kind in published - done.keys()}
    rows = {**refused, **done}
    name = f"responses {param.partition('[')[0]}"
    return Api(name, title, {"OpenAI": published}, rows, lambda client: InPlace(client, name, place, param))


ITEMS: Final = _api(
    "`/v1/responses`: items of `input`",
    kinds(response_input_item_param.ResponseInputItemParam),
    _ITEMS_DONE,
    lambda kind: {"input": [{"type": kind}]},
    "input[0]",
)
TOOLS: Final = _api(
    "`/v1/responses`: tools",
    kinds(tool_param.ToolParam),
    {"function": _tool, "custom": _tool, "namespace": _namespace, "tool_search": _search}
    | {kind: _left_out(kind) for kind in _WEB_SEARCHES},
    lambda kind: {"tools": [{"type": kind}]},
    "tools[0]",
)
INCLUDE: Final = _api(
    "`/v1/responses`: `include`",
    _INCLUDABLE,
    {kind: _no_such_items(kind) for kind in _INCLUDABLE} | _SEEN,
    lambda kind: {"include": [kind]},
    "include",
)
