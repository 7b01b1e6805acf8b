"""The fields of /tokenize (both forms of a prompt) and of /detokenize.

Source: vLLM's protocol for these paths (autumn 2026).
"""

from __future__ import annotations

from typing import Any, Final

import httpx

from .api import Api
from .asking import BYTES, DEMO, REASONER, WORDS, Endpoint, JsonObject, openai_reason, refused, said
from .table import Refused, Row, promise

CHAT_FORM, TEXT_FORM, DETOKENIZE = "tokenize (chat)", "tokenize (text)", "detokenize"
_WEATHER: Final[JsonObject] = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
_BASES: Final[dict[str, JsonObject]] = {
    CHAT_FORM: {"model": DEMO, "messages": said("What is a KV cache?")},
    TEXT_FORM: {"model": DEMO, "prompt": "What is a KV cache?"},
    DETOKENIZE: {"model": DEMO, "tokens": [7, 8, 9]},
}


class Tokenizer:
    """One of the forms."""

    def __init__(self, client: httpx.Client, name: str) -> None:
        self.client, self.name = client, name
        self._path = f"/{name.partition(' ')[0]}"

    def ask(self, **fields: Any) -> JsonObject:
        response = self._post(fields)
        assert response.status_code == 200, response.text
        answer: JsonObject = response.json()
        if self.name != DETOKENIZE:
            assert len(answer["tokens"]) == answer["count"] and answer["max_model_len"] > 0
        return answer

    def count(self, **fields: Any) -> int:
        count: int = self.ask(**fields)["count"]
        return count

    def texts(self, **fields: Any) -> list[str]:
        return [str(self.ask(**fields))]

    def refusal(self, **fields: Any) -> JsonObject:
        return refused(self._post(fields))

    def reason(self, field: str, value: Any) -> str:
        return openai_reason(self.refusal(**{field: value}), field)

    def _post(self, fields: JsonObject) -> httpx.Response:
        return self.client.post(self._path, json=_BASES[self.name] | fields)


@promise("its tokenizer; an unknown one is a 404")
def _model(api: Tokenizer) -> None:
    assert api.ask() != api.ask(model=BYTES)
    assert api._post({"model": "no such model"}).status_code == 404


@promise("other tokens; those of a completion")
def _prompt(api: Tokenizer) -> None:
    text = "What is a seed?"
    answer = Endpoint(api.client, "completions").ask(prompt=text, return_token_ids=True).choices[0]
    assert api.ask(prompt=text)["tokens"] == answer["prompt_token_ids"] != api.ask()["tokens"]


@promise("other tokens; those of a chat")
def _messages(api: Tokenizer) -> None:
    answer = Endpoint(api.client, "chat/completions").ask(messages=said("What is a seed?"), return_token_ids=True)
    assert api.ask(messages=said("What is a seed?"))["tokens"] == answer.json["prompt_token_ids"]
    assert api.ask()["tokens"] != answer.json["prompt_token_ids"]


@promise("whether the prompt begins with the tokenizer's own token")
def _add_special_tokens(api: Tokenizer) -> None:
    counts = [api.count(model=WORDS, add_special_tokens=value) for value in (True, False)]
    assert counts[0] == counts[1] + 1


@promise("also returns the tokens' names in the vocabulary")
def _return_token_strs(api: Tokenizer) -> None:
    named = api.ask(return_token_strs=True)
    assert len(named["token_strs"]) == named["count"] and not api.ask(return_token_strs=False).get("token_strs")


@promise("without it the template does not open the assistant's turn")
def _add_generation_prompt(api: Tokenizer) -> None:
    assert api.count(add_generation_prompt=True) > api.count(add_generation_prompt=False)


@promise("the last message stays open")
def _continue_final_message(api: Tokenizer) -> None:
    messages = [*said("What is a KV cache?"), {"role": "assistant", "content": "It is"}]
    open_, closed = (
        api.ask(messages=messages, continue_final_message=value, add_generation_prompt=False)["tokens"]
        for value in (True, False)
    )
    assert len(open_) < len(closed) and closed[: len(open_)] == open_


@promise("replaces the model's; refused if the server does not allow that")
def _chat_template(api: Tokenizer) -> None:
    assert [api.count(model=BYTES, chat_template=template) for template in ("abc", "abcd")] == [3, 4]
    assert api.refusal(chat_template="abc")["param"] == "chat_template"


@promise("variables of the chat template")
def _chat_template_kwargs(api: Tokenizer) -> None:
    more = api.count(model=REASONER, chat_template_kwargs={"documents": [{"text": "three"}]})
    assert more == api.count(model=REASONER) + len("three")


@promise("they are in the prompt if the chat template reads them; otherwise they are refused")
def _documents(api: Tokenizer) -> None:
    assert api.count(model=REASONER, documents=[{"text": "one"}]) == api.count(model=REASONER) + len("one")
    assert api.refusal(documents=[{"text": "one"}])["param"] == "documents"


@promise("changes the prompt if the chat template reads it; otherwise no effect")
def _reasoning_effort(api: Tokenizer) -> None:
    low, medium = (api.count(model=REASONER, reasoning_effort=value) for value in ("low", "medium"))
    assert medium - low == len("medium") - len("low")
    assert api.count(reasoning_effort="low") == api.count()


@promise("they are in the prompt")
def _tools(api: Tokenizer) -> None:
    assert api.count(tools=[_WEATHER]) > api.count(tools=[]) == api.count()


@promise("none: the prompt has no tools")
def _tool_choice(api: Tokenizer) -> None:
    assert api.count(tools=[_WEATHER], tool_choice="auto") == api.count(tools=[_WEATHER])
    assert api.count(tools=[_WEATHER], tool_choice="none") == api.count()


@promise("as tools, in the older form")
def _functions(api: Tokenizer) -> None:
    assert api.count(functions=[_WEATHER["function"]]) == api.count(tools=[_WEATHER])


@promise("none: the prompt has no functions")
def _function_call(api: Tokenizer) -> None:
    assert api.count(functions=[_WEATHER["function"]], function_call="none") == api.count()


@promise("accepted as in a chat; does not change the prompt")
def _parallel_tool_calls(api: Tokenizer) -> None:
    assert api.count(tools=[_WEATHER], parallel_tool_calls=False) == api.count(tools=[_WEATHER])
    assert api.refusal(parallel_tool_calls="no")["param"] == "parallel_tool_calls"


@promise("their text")
def _tokens(api: Tokenizer) -> None:
    text = "A block of the KV cache, é and 名."
    tokens = Tokenizer(api.client, TEXT_FORM).ask(prompt=text)["tokens"]
    assert api.ask(tokens=tokens) == {"prompt": text} != api.ask()
    assert api.refusal(tokens=[10**6])["param"] == "tokens"


_BOTH: Final[dict[str, Row]] = {
    "model": _model,
    "add_special_tokens": _add_special_tokens,
    "return_token_strs": _return_token_strs,
}
_OF_CHAT: Final[dict[str, Row]] = {
    "messages": _messages,
    "add_generation_prompt": _add_generation_prompt,
    "continue_final_message": _continue_final_message,
    "chat_template": _chat_template,
    "chat_template_kwargs": _chat_template_kwargs,
    "documents": _documents,
    "reasoning_effort": _reasoning_effort,
    "tools": _tools,
    "tool_choice": _tool_choice,
    "functions": _functions,
    "function_call": _function_call,
    "parallel_tool_calls": _parallel_tool_calls,
    "media_io_kwargs": Refused([{"image": {}}], [{}]),
    "mm_processor_kwargs": Refused([{"num_crops": 4}], [{}]),
}
_OF_TEXT: Final[dict[str, Row]] = {"prompt": _prompt}
_OF_TOKENS: Final[dict[str, Row]] = {"model": _model, "tokens": _tokens}
_VLLM: Final = {
    CHAT_FORM: """model messages add_generation_prompt return_token_strs continue_final_message add_special_tokens
    chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs tools""",
    TEXT_FORM: "model prompt add_special_tokens return_token_strs",
    DETOKENIZE: "model tokens",
}


def _api(name: str, title: str, rows: dict[str, Row]) -> Api:
    published = {"vLLM": frozenset(_VLLM[name].split())}
    return Api(name, title, published, rows, lambda client: Tokenizer(client, name))


TOKENIZING: Final = (
    _api(CHAT_FORM, "`/tokenize` of a conversation", _BOTH | _OF_CHAT),
    _api(TEXT_FORM, "`/tokenize` of a text", _BOTH | _OF_TEXT),
    _api(DETOKENIZE, "`/detokenize`", _OF_TOKENS),
)
