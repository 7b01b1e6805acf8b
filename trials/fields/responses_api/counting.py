"""The fields of /v1/responses/input_tokens, which counts the input tokens of a response.

Source: the types in OpenAI's Python package.
"""

from __future__ import annotations

from typing import Any, Final

import httpx
from openai.types.responses import input_token_count_params

from ..api import Api
from ..asking import DEMO, REASONER, JsonObject, openai_reason, refused
from ..table import Refused, Row, promise
from .asking import Responses

_NAME: Final = "responses/input_tokens"
_TOOL: Final = {"type": "function", "name": "get_weather", "description": "The weather of a city.", "parameters": {}}
_SCHEMA: Final = {"enum": ["yes", "no"]}


class Counting:
    name = _NAME

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.base: JsonObject = {"model": DEMO, "input": "What is a KV cache?"}

    def count(self, **fields: Any) -> int:
        response = self._post(fields)
        assert response.status_code == 200, response.text
        count: int = response.json()["input_tokens"]
        return count

    def texts(self, **fields: Any) -> list[str]:
        return [str(self.count(**fields))]

    def refusal(self, **fields: Any) -> JsonObject:
        return refused(self._post(fields))

    def reason(self, field: str, value: Any) -> str:
        return openai_reason(self.refusal(**{field: value}), field)

    def response(self, **fields: Any) -> Any:
        return Responses(self.client).ask(**fields)

    def _post(self, fields: JsonObject) -> httpx.Response:
        return self.client.post(f"/v1/{_NAME}", json=self.base | fields)


@promise("the count equals that in a response's usage")
def _input(api: Counting) -> None:
    assert api.count(input="Why? " * 20) > api.count() == api.response().usage["input_tokens"]


@promise("its tokenizer counts; an unknown one is a 404")
def _model(api: Counting) -> None:
    assert api.count(model="bytes") > api.count() and api._post({"model": "no such model"}).status_code == 404


@promise("they are counted")
def _instructions(api: Counting) -> None:
    assert api.count(instructions="Answer in one word.") > api.count()


@promise("they are counted")
def _tools(api: Counting) -> None:
    assert api.count(tools=[_TOOL]) > api.count()


@promise("none: tools are omitted, as from a response's prompt")
def _tool_choice(api: Counting) -> None:
    counts = [api.count(tools=[_TOOL], tool_choice=choice) for choice in ("auto", "none")]
    asked: dict[str, Any] = {"tools": [_TOOL], "tool_choice": "none"}
    assert counts[0] == api.count(tools=[_TOOL]) and counts[1] == api.response(**asked).usage["input_tokens"]


@promise("that response's input and output are counted")
def _previous_response_id(api: Counting) -> None:
    assert api.count(previous_response_id=api.response().id) > api.count()


@promise("its items are counted")
def _conversation(api: Counting) -> None:
    made = api.client.post("/v1/conversations", json={"items": [{"role": "user", "content": "one two three"}]})
    assert api.count(conversation=made.json()["id"]) > api.count()


@promise("an effort changes the prompt if the chat template reads it")
def _reasoning(api: Counting) -> None:
    low, medium = (api.count(model=REASONER, reasoning={"effort": effort}) for effort in ("low", "medium"))
    assert medium - low == len("medium") - len("low")


@promise("accepted as in a response; does not change the prompt")
def _text(api: Counting) -> None:
    form = {"type": "json_schema", "name": "one", "schema": _SCHEMA}
    assert api.count(text={"format": form}) == api.count()
    assert api.refusal(text={"format": {"type": "no such"}})["param"].startswith("text.format")


@promise("accepted as in a response; does not change the prompt")
def _parallel_tool_calls(api: Counting) -> None:
    assert api.count(tools=[_TOOL], parallel_tool_calls=False) == api.count(tools=[_TOOL])
    assert api.refusal(parallel_tool_calls="no")["param"] == "parallel_tool_calls"


@promise("accepted as in a response; the whole input is counted")
def _truncation(api: Counting) -> None:
    assert api.count(truncation="auto") == api.count(truncation="disabled") == api.count()
    assert api.refusal(truncation="no such")["param"] == "truncation"


@promise("variables of the chat template")
def _chat_template_kwargs(api: Counting) -> None:
    more = api.count(model=REASONER, chat_template_kwargs={"documents": [{"text": "three"}]})
    assert more == api.count(model=REASONER) + len("three")


_ROWS: Final[dict[str, Row]] = {
    "input": _input,
    "model": _model,
    "instructions": _instructions,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "previous_response_id": _previous_response_id,
    "conversation": _conversation,
    "reasoning": _reasoning,
    "text": _text,
    "parallel_tool_calls": _parallel_tool_calls,
    "truncation": _truncation,
    "chat_template_kwargs": _chat_template_kwargs,
    "personality": Refused(["friendly"]),
}
API: Final = Api(
    _NAME,
    f"`/v1/{_NAME}`",
    {"OpenAI": frozenset(input_token_count_params.InputTokenCountParams.__annotations__)},
    _ROWS,
    Counting,
)
