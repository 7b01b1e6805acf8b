"""Checks of the fields that determine the prompt, and of those that determine what is stored of a response."""

from __future__ import annotations

from typing import Any

from ..asking import BYTES, WORDS
from ..table import Row, promise
from .asking import Responses


def _said(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


@promise("another input gets another answer; a text is one message of the user")
def _input(api: Responses) -> None:
    text = api.ask().text
    assert api.ask(input=[_said("What is a KV cache?")]).text == text != api.ask(input="What is a seed?").text
    parts = [{"type": "input_text", "text": "What is a KV cache?"}]
    assert api.ask(input=[{"type": "message", "role": "user", "content": parts}]).text == text


@promise("the prompt begins with them; those of the previous response are not carried over")
def _instructions(api: Responses) -> None:
    plain, told = api.ask(), api.ask(instructions="Answer in one word.")
    assert told.usage["input_tokens"] > plain.usage["input_tokens"]
    assert (plain.json["instructions"], told.json["instructions"]) == (None, "Answer in one word.")
    as_message = api.ask(input=[_said("Answer in one word.", "system"), _said("What is a KV cache?")])
    assert as_message.text == told.text and as_message.usage == told.usage | {
        "input_tokens_details": as_message.usage["input_tokens_details"]
    }


@promise("the input follows that response's input and output")
def _previous_response_id(api: Responses) -> None:
    first = api.ask()
    second = api.ask(input="And what is a seed?", previous_response_id=first.id)
    whole = [_said("What is a KV cache?"), _said(first.text, "assistant"), _said("And what is a seed?")]
    counts = [api.ask(input=sent).usage["input_tokens"] for sent in (whole, "And what is a seed?")]
    assert second.usage["input_tokens"] == counts[0] > counts[1] and second.text == api.ask(input=whole).text
    assert second.json["previous_response_id"] == first.id
    missing = api.client.post("/v1/responses", json=api.base | {"previous_response_id": "resp_" + "0" * 32})
    assert missing.status_code in (400, 404) and missing.json()["error"]["param"] == "previous_response_id"


@promise("the input follows the conversation's items, to which the response's input and output are added")
def _conversation(api: Responses) -> None:
    made = api.client.post("/v1/conversations", json={"items": [_said("What is a KV cache?")]}).json()
    answer = api.ask(input="And what is a seed?", conversation=made["id"])
    assert answer.json["conversation"] == {"id": made["id"]}
    assert answer.text == api.ask(input=[_said("What is a KV cache?"), _said("And what is a seed?")]).text
    items = api.client.get(f"/v1/conversations/{made['id']}/items", params={"order": "asc"}).json()["data"]
    assert [item["role"] for item in items] == ["user", "user", "assistant"]
    assert items[2]["content"][0]["text"] == answer.text


@promise("auto: the end of a too long prompt is kept; disabled: it is refused")
def _truncation(api: Responses) -> None:
    asked: dict[str, Any] = {"model": WORDS, "input": [_said("word5 " * 300), _said("word6 " * 300)]}
    assert "context length" in api.refusal(**asked, truncation="disabled")["message"]
    assert 400 < api.ask(**asked, truncation="auto").usage["input_tokens"] < 512


@promise("the response can be fetched, or not")
def _store(api: Responses) -> None:
    kept, gone = (api.ask(store=value) for value in (True, False))
    assert api.get(kept.id).json() == kept.json and api.get(gone.id).status_code == 404
    assert (kept.json["store"], gone.json["store"]) == (True, False)


@promise("the answer is the queued response, which runs without the client; needs store")
def _background(api: Responses) -> None:
    queued = api.ask(background=True)
    assert queued.json["status"] in ("queued", "in_progress") and queued.json["background"] is True
    assert api.ended(queued.id).text == api.ask(background=False).text
    assert api.refusal(background=True, store=False)["param"] == "background"


@promise("returned with the response, also later")
def _metadata(api: Responses) -> None:
    for metadata in ({"run": "7"}, {}):
        answer = api.ask(metadata=metadata)
        assert answer.json["metadata"] == metadata == api.get(answer.id).json()["metadata"]


@promise("this many tokens of the prompt's end are kept")
def _truncate_prompt_tokens(api: Responses) -> None:
    for keep in (3, 5):
        assert api.ask(truncate_prompt_tokens=keep).usage["input_tokens"] == keep


@promise("which end of a too long prompt is cut")
def _truncation_side(api: Responses) -> None:
    cut = {side: api.ask(truncate_prompt_tokens=5, truncation_side=side) for side in ("left", "right")}
    assert cut["left"].text == api.ask(truncate_prompt_tokens=5).text != cut["right"].text
    assert all(answer.usage["input_tokens"] == 5 for answer in cut.values())


@promise("whether the prompt begins with the tokenizer's own token")
def _add_special_tokens(api: Responses) -> None:
    counts = [api.ask(model=WORDS, add_special_tokens=value).usage["input_tokens"] for value in (True, False)]
    assert counts[0] == counts[1] + 1


@promise("answers name their model; an unknown one is a 404")
def _model(api: Responses) -> None:
    assert (api.ask().json["model"], api.ask(model=BYTES).json["model"]) == ("demo", BYTES)
    assert api.client.post("/v1/responses", json=api.base | {"model": "no such model"}).status_code == 404


PROMPTS: dict[str, Row] = {
    "input": _input,
    "instructions": _instructions,
    "previous_response_id": _previous_response_id,
    "conversation": _conversation,
    "truncation": _truncation,
    "store": _store,
    "background": _background,
    "metadata": _metadata,
    "truncate_prompt_tokens": _truncate_prompt_tokens,
    "truncation_side": _truncation_side,
    "add_special_tokens": _add_special_tokens,
    "model": _model,
}
