"""Checks of the fields that determine how tokens are sampled, and when to stop."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from ..asking import BYTES, DEMO, QUEUE, REASONER, WORDS
from ..sampling import END_OF_TURN, HOT, as_greedy, changes_text
from ..table import Row, promise
from .asking import MAX_OUTPUT_TOKENS, Responses

_ENDS: dict[str, Any] = {"logit_bias": {str(END_OF_TURN): 100}}


@promise("a token with -100 is never generated, one with 100 always")
def _logit_bias(api: Responses) -> None:
    one, other = (api.ask(logit_bias={str(token): 100}).text for token in (300, 301))
    assert one != other and one == one[: len(one) // MAX_OUTPUT_TOKENS] * MAX_OUTPUT_TOKENS
    assert one not in api.ask(logit_bias={"300": -100, "301": 100}).text


@promise("the same seed gives the same text, another seed another text")
def _seed(api: Responses) -> None:
    texts = [api.ask(temperature=2, seed=seed).text for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


@promise("the text ends before the string, and the response is complete")
def _stop(api: Responses) -> None:
    text = api.ask().text
    stopped = api.ask(stop=[text[5:8]])
    assert stopped.text == text[: text.index(text[5:8])] and stopped.json["status"] == "completed"


@promise("the text includes the stop string")
def _include_stop_str_in_output(api: Responses) -> None:
    text = api.ask().text
    stop = text[5:8]
    assert not api.ask(stop=stop).text.endswith(stop)
    assert api.ask(stop=stop, include_stop_str_in_output=True).text == text[: text.index(stop)] + stop


@promise("the end of the turn does not end the generation")
def _ignore_eos(api: Responses) -> None:
    assert api.ask(**_ENDS).json["status"] == "completed"
    ignored = api.ask(**_ENDS, ignore_eos=True)
    assert (ignored.usage["output_tokens"], ignored.why_incomplete) == (MAX_OUTPUT_TOKENS, "max_output_tokens")


@promise("false: the text has special tokens, except markers of calls and reasoning and the token that ends it")
def _skip_special_tokens(api: Responses) -> None:
    special: dict[str, Any] = {"logit_bias": {"1": 100}}
    assert api.ask(**special).text == ""
    assert "<|im_start|>" in api.ask(**special, skip_special_tokens=False).text


@promise("at most this many tokens are generated, and the response is incomplete for that reason")
def _max_output_tokens(api: Responses) -> None:
    for most in (16, 20):
        answer = api.ask(max_output_tokens=most, ignore_eos=True)
        assert (answer.usage["output_tokens"], answer.why_incomplete) == (most, "max_output_tokens")


@promise("only requests with the same salt share cached prefixes")
def _cache_salt(api: Responses) -> None:
    long = "One prefix that is long enough for some blocks of the cache. " * 8
    one, other = uuid4().hex, uuid4().hex  # a server may be asked again
    cached = [
        api.ask(input=long, cache_salt=salt).usage["input_tokens_details"]["cached_tokens"]
        for salt in (one, one, other)
    ]
    assert cached[0] == cached[2] == 0 < cached[1]


@promise("a level of the model's queue; refused for a model without levels")
def _priority(api: Responses) -> None:
    assert api.ask(model=QUEUE, priority=1).text
    assert api.refusal(model=QUEUE, priority=3)["param"] == "priority"
    assert api.refusal(model=DEMO, priority=1)["param"] == "priority"


@promise("the answer follows the constraint")
def _structured_outputs(api: Responses) -> None:
    for texts in (["yes", "no"], ["left"]):
        assert api.ask(structured_outputs={"choice": texts}).text in texts


@promise("variables of the chat template")
def _chat_template_kwargs(api: Responses) -> None:
    count = api.ask(model=REASONER).usage["input_tokens"]
    more = api.ask(model=REASONER, chat_template_kwargs={"documents": [{"text": "three"}]}).usage["input_tokens"]
    assert more == count + len("three")


@promise("no other tokens are generated")
def _allowed_token_ids(api: Responses) -> None:
    one, other = (api.ask(allowed_token_ids=[token]).text for token in (300, 301))
    assert one != other and one == one[: len(one) // MAX_OUTPUT_TOKENS] * MAX_OUTPUT_TOKENS


@promise("the texts are not generated")
def _bad_words(api: Responses) -> None:
    text = api.ask(model=BYTES).text
    for word in (text[:1], text[2:4]):
        assert word in text and word not in api.ask(model=BYTES, bad_words=[word]).text


@promise("the turn does not end before this many tokens")
def _min_tokens(api: Responses) -> None:
    assert [api.ask(**_ENDS, min_tokens=least).usage["output_tokens"] for least in (0, 3)] == [1, 4]


@promise("the generation ends at the token")
def _stop_token_ids(api: Responses) -> None:
    forced: dict[str, Any] = {"logit_bias": {"300": 100}}
    assert api.ask(**forced).usage["output_tokens"] == MAX_OUTPUT_TOKENS
    stopped = api.ask(**forced, stop_token_ids=[300])
    assert (stopped.usage["output_tokens"], stopped.json["status"]) == (1, "completed")


@promise("false: no spaces between special tokens, if the tokenizer writes spaces")
def _spaces_between_special_tokens(api: Responses) -> None:
    special: dict[str, Any] = {"model": WORDS, "skip_special_tokens": False, "logit_bias": {"1": 100}}
    spaced, joined = (api.ask(**special, spaces_between_special_tokens=value).text for value in (True, False))
    assert spaced.strip() == " ".join(["<pad>"] * MAX_OUTPUT_TOKENS) and joined.strip() == "<pad>" * MAX_OUTPUT_TOKENS


@promise("log probabilities of the chosen token and of these, instead of the most likely ones")
def _logprob_token_ids(api: Responses) -> None:
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"]}
    for ids in ([300, 301], [400]):
        answer = api.ask(**asked, logprob_token_ids=ids)
        entries = answer.of("message")[0]["content"][0]["logprobs"]
        assert entries and all(len(entry["top_logprobs"]) == 1 + len(ids) for entry in entries)
        assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)


@promise("the reasoning ends after this many tokens, with its end marker")
def _thinking_token_budget(api: Responses) -> None:
    asked: dict[str, Any] = {"model": REASONER, "max_output_tokens": 40, "ignore_eos": True}
    for budget in (3, 5):
        usage = api.ask(**asked, thinking_token_budget=budget).usage
        assert usage["output_tokens_details"]["reasoning_tokens"] == budget + len("</think>")


SAMPLING: dict[str, Row] = {
    "temperature": changes_text("temperature", 0, 2, seed=7),
    "top_p": as_greedy("top_p", 0.001),
    "top_k": as_greedy("top_k", 1),
    "presence_penalty": changes_text("presence_penalty", -2, 2, **HOT, max_output_tokens=32),
    "frequency_penalty": changes_text("frequency_penalty", -2, 2, max_output_tokens=48, ignore_eos=True),
    "repetition_penalty": changes_text("repetition_penalty", 0.2, 5, max_output_tokens=24, ignore_eos=True),
    "min_p": as_greedy("min_p", 1),
    "allowed_token_ids": _allowed_token_ids,
    "bad_words": _bad_words,
    "min_tokens": _min_tokens,
    "stop_token_ids": _stop_token_ids,
    "spaces_between_special_tokens": _spaces_between_special_tokens,
    "logprob_token_ids": _logprob_token_ids,
    "thinking_token_budget": _thinking_token_budget,
    "logit_bias": _logit_bias,
    "seed": _seed,
    "stop": _stop,
    "include_stop_str_in_output": _include_stop_str_in_output,
    "ignore_eos": _ignore_eos,
    "skip_special_tokens": _skip_special_tokens,
    "max_output_tokens": _max_output_tokens,
    "cache_salt": _cache_salt,
    "priority": _priority,
    "structured_outputs": _structured_outputs,
    "chat_template_kwargs": _chat_template_kwargs,
}
