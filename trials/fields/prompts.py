"""Checks of the fields that determine the prompt."""

from __future__ import annotations

from .asking import BYTES, DEMO, WORDS, Endpoint, JsonObject, said
from .table import Row, promise


@promise("another conversation gets another answer")
def _messages(api: Endpoint) -> None:
    assert api.ask().text != api.ask(messages=said("What is a seed?")).text


@promise("another prompt gets another answer; text, token ids and lists of both")
def _prompt(api: Endpoint) -> None:
    assert api.ask().text != api.ask(prompt="The seed").text
    assert api.ask(prompt=[7, 8, 9]).usage["prompt_tokens"] == 3
    assert api.ask(prompt=["The seed", "A block of the"]).texts == [api.ask(prompt="The seed").text, api.ask().text]


@promise("without it the template does not open the assistant's turn")
def _add_generation_prompt(api: Endpoint) -> None:
    with_it, without = (api.ask(add_generation_prompt=value).usage["prompt_tokens"] for value in (True, False))
    assert with_it > without


@promise("the text begins with the prompt, logprobs with those of its tokens; also for token ids and max_tokens 0")
def _echo(api: Endpoint) -> None:
    plain, ids = api.ask(return_token_ids=True, logprobs=1), {"return_token_ids": True}
    prompt = "A block of the"
    assert api.ask(echo=True).text == prompt + api.ask(echo=False).text
    for of_ids in (False, True):
        source = {"prompt": plain.choices[0]["prompt_token_ids"]} if of_ids else {}
        for most in (0, 8):
            echoed = api.ask(echo=True, logprobs=1, max_tokens=most, **source, **ids)
            assert echoed.text == prompt + (plain.text if most else "")
            assert api.streamed(echo=True, logprobs=1, max_tokens=most, **source) == echoed.texts
            logprobs = echoed.choices[0]["logprobs"]
            assert "".join(logprobs["tokens"]) == echoed.text
            assert [logprobs[name][0] for name in ("token_logprobs", "top_logprobs")] == [None, None]
            own = plain.choices[0]["logprobs"]["token_logprobs"] if most else []
            assert logprobs["token_logprobs"][echoed.usage["prompt_tokens"] :] == own


@promise("the answer begins with the last message, if that is the assistant's")
def _echo_of_chat(api: Endpoint) -> None:
    messages = [*said("What is a KV cache?"), {"role": "assistant", "content": "It is"}]
    plain = api.ask(messages=messages)
    echoed = api.ask(messages=messages, echo=True)
    assert echoed.text == "It is" + plain.text
    assert api.streamed(messages=messages, echo=True) == echoed.texts
    assert api.ask(echo=True).text == api.ask().text


@promise("this many tokens of the prompt's end are kept")
def _truncate_prompt_tokens(api: Endpoint) -> None:
    whole = api.ask(return_token_ids=True)
    ids = (whole.json if api.is_chat else whole.choices[0])["prompt_token_ids"]
    for keep in (1, 3):
        cut = api.ask(truncate_prompt_tokens=keep, return_token_ids=True)
        assert (cut.json if api.is_chat else cut.choices[0])["prompt_token_ids"] == ids[-keep:]


@promise("which end of a too long prompt is cut")
def _truncation_side(api: Endpoint) -> None:
    whole = api.ask(return_token_ids=True)
    ids = (whole.json if api.is_chat else whole.choices[0])["prompt_token_ids"]
    for side, kept in (("left", ids[-3:]), ("right", ids[:3])):
        cut = api.ask(truncate_prompt_tokens=3, truncation_side=side, return_token_ids=True)
        assert (cut.json if api.is_chat else cut.choices[0])["prompt_token_ids"] == kept


@promise("the text between it and the prompt is generated; refused if the tokenizer has no tokens for that")
def _suffix(api: Endpoint) -> None:
    asked: JsonObject = {"model": WORDS, "prompt": "word5 word6", "return_token_ids": True}
    filled = api.ask(**asked, suffix="word7")
    assert filled.choices[0]["prompt_token_ids"] == [0, 256, 8, 9, 257, 10, 258]
    assert filled.text != api.ask(**asked, suffix="word8").text and api.streamed(**asked, suffix="word7") == [
        filled.text
    ]
    assert api.ask(**asked, suffix="").choices[0]["prompt_token_ids"] == [0, 8, 9]
    for other in ({"model": DEMO}, {"prompt": [7, 8]}, {"truncate_prompt_tokens": 2}, {"echo": True}):
        error = api.refusal(**asked | other, suffix="word7")
        assert error["param"] == "suffix" and "'suffix' is not supported" in error["message"]


@promise("whether the prompt begins with the tokenizer's own token")
def _add_special_tokens(api: Endpoint) -> None:
    tokens = [api.ask(model=WORDS, add_special_tokens=value).usage["prompt_tokens"] for value in (True, False)]
    assert tokens[0] == tokens[1] + 1


@promise("the model continues the last message instead of answering it")
def _continue_final_message(api: Endpoint) -> None:
    messages = [*said("What is a KV cache?"), {"role": "assistant", "content": "It is"}]
    ids = [
        api.ask(messages=messages, continue_final_message=value, return_token_ids=True).json["prompt_token_ids"]
        for value in (True, False)
    ]
    assert len(ids[0]) < len(ids[1]) and ids[1][: len(ids[0])] == ids[0]
    both = api.refusal(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert both["param"] == "continue_final_message"


@promise("replaces the model's; refused if the server does not allow that")
def _chat_template(api: Endpoint) -> None:
    for template, count in (("abc", 3), ("{{ messages[0].role }}", 4)):
        assert api.ask(model=BYTES, chat_template=template).usage["prompt_tokens"] == count
    assert api.refusal(chat_template="abc")["param"] == "chat_template"


@promise("the prompt rendered by the chat template, whole and streamed")
def _return_prompt_text(api: Endpoint) -> None:
    assert "prompt_text" not in api.ask(return_prompt_text=False).json
    rendered = api.ask(return_prompt_text=True).json["prompt_text"]
    assert rendered == "<|im_start|>user\nWhat is a KV cache?<|im_end|>\n<|im_start|>assistant\n"
    assert api.chunks(return_prompt_text=True)[0]["prompt_text"] == rendered


CHAT_PROMPTS: dict[str, Row] = {
    "messages": _messages,
    "add_generation_prompt": _add_generation_prompt,
    "echo": _echo_of_chat,
    "return_prompt_text": _return_prompt_text,
    "continue_final_message": _continue_final_message,
    "chat_template": _chat_template,
}
COMPLETION_PROMPTS: dict[str, Row] = {"prompt": _prompt, "echo": _echo, "suffix": _suffix}
PROMPTS: dict[str, Row] = {
    "truncate_prompt_tokens": _truncate_prompt_tokens,
    "truncation_side": _truncation_side,
    "add_special_tokens": _add_special_tokens,
}
