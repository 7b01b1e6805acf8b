"""Checks of the fields that determine how tokens are sampled, and when to stop."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

from tests.helpers.waiting import eventually

from .asking import BYTES, MAX_TOKENS, QUEUE, WORDS, Endpoint
from .table import Done, Row, promise

END_OF_TURN = 2
"""The demo model's `<|im_end|>`."""
HOT: Mapping[str, Any] = {"temperature": 2, "seed": 7}


def changes_text(field: str, one: Any, other: Any, **beside: Any) -> Done:
    """The text differs between two values, and each value gives the same text twice."""

    def check(api: Endpoint) -> None:
        first, second = (api.ask(**beside, **{field: value}).text for value in (one, other))
        assert first != second, f"{field} {one} and {other} both give {first!r}"
        assert api.ask(**beside, **{field: one}).text == first

    return Done(f"`{one}` and `{other}` give different texts", check)


def as_greedy(field: str, value: Any) -> Done:
    """A value that leaves one token to choose from."""

    def check(api: Endpoint) -> None:
        greedy = api.ask().text
        assert api.ask(**HOT).text != greedy
        assert api.ask(**HOT, **{field: value}).text == greedy

    return Done(f"`{value}` leaves only the most likely token", check)


@promise("a token with -100 is never generated, one with 100 always")
def _logit_bias(api: Endpoint) -> None:
    first = api.ask(return_token_ids=True).token_ids[0]
    assert first not in api.ask(return_token_ids=True, logit_bias={str(first): -100}).token_ids
    assert api.ask(return_token_ids=True, logit_bias={"100": 100}).token_ids == [100] * MAX_TOKENS


@promise("the same seed gives the same text, another seed another text")
def _seed(api: Endpoint) -> None:
    texts = [api.ask(temperature=2, seed=seed).text for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


@promise("the text ends before the string")
def _stop(api: Endpoint) -> None:
    text = api.ask().text
    stopped = api.ask(stop=text[5:8])
    assert stopped.text == text[: text.index(text[5:8])] and stopped.finish_reason == "stop"
    assert api.ask(stop=["no such text", text[5:8]]).text == stopped.text


@promise("the generation ends at the token")
def _stop_token_ids(api: Endpoint) -> None:
    ids = api.ask(return_token_ids=True).token_ids
    stopped = api.ask(return_token_ids=True, stop_token_ids=[ids[3]])
    assert stopped.token_ids == ids[: ids.index(ids[3]) + 1] and stopped.finish_reason == "stop"


@promise("the turn does not end before this many tokens")
def _min_tokens(api: Endpoint) -> None:
    ends: dict[str, Any] = {"logit_bias": {str(END_OF_TURN): 100}, "return_token_ids": True}
    assert api.ask(**ends).token_ids == [END_OF_TURN]
    ids = api.ask(**ends, min_tokens=3).token_ids
    assert len(ids) == 4 and ids.index(END_OF_TURN) == 3


@promise("the end of the turn does not end the generation")
def _ignore_eos(api: Endpoint) -> None:
    ends: dict[str, Any] = {"logit_bias": {str(END_OF_TURN): 100}, "return_token_ids": True}
    assert (api.ask(**ends).finish_reason, api.ask(**ends).token_ids) == ("stop", [END_OF_TURN])
    ignored = api.ask(**ends, ignore_eos=True)
    assert (ignored.finish_reason, len(ignored.token_ids)) == ("length", MAX_TOKENS)


@promise("the text includes the stop string")
def _include_stop_str_in_output(api: Endpoint) -> None:
    text = api.ask().text
    stop = text[5:8]
    assert not api.ask(stop=stop).text.endswith(stop)
    assert api.ask(stop=stop, include_stop_str_in_output=True).text == text[: text.index(stop)] + stop


@promise("false: the text has special tokens, except markers of calls and reasoning and the token that ends it")
def _skip_special_tokens(api: Endpoint) -> None:
    special: dict[str, Any] = {"logit_bias": {"1": 100}, "max_tokens": 2}
    assert api.ask(**special).text == ""
    assert "<|im_start|>" in api.ask(**special, skip_special_tokens=False).text


@promise("at most this many tokens are generated")
def _max_tokens(api: Endpoint) -> None:
    for most in (1, 5):
        answer = api.ask(max_tokens=most, ignore_eos=True)
        assert (answer.usage["completion_tokens"], answer.finish_reason) == (most, "length")


@promise("as max_tokens, and takes precedence")
def _max_completion_tokens(api: Endpoint) -> None:
    for most in (1, 5):
        assert api.ask(max_completion_tokens=most, ignore_eos=True).usage["completion_tokens"] == most


@promise("only requests with the same salt share cached prefixes")
def _cache_salt(api: Endpoint) -> None:
    long = "One prefix that is long enough for some blocks of the cache. " * 8
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": long}]} if api.is_chat else {"prompt": long}
    one, other = uuid4().hex, uuid4().hex  # a server may be asked again
    cached = [
        api.ask(**prompt, cache_salt=salt).usage["prompt_tokens_details"]["cached_tokens"] for salt in (one, one, other)
    ]
    assert cached[0] == cached[2] == 0 < cached[1]


@promise("no other tokens are generated")
def _allowed_token_ids(api: Endpoint) -> None:
    for allowed in ({300, 301}, {400}):
        ids = api.ask(allowed_token_ids=sorted(allowed), return_token_ids=True).token_ids
        assert set(ids) <= allowed and len(ids) == MAX_TOKENS


@promise("the texts are not generated")
def _bad_words(api: Endpoint) -> None:
    text = api.ask(model=BYTES).text
    for word in (text[:1], text[2:4]):
        assert word in text and word not in api.ask(model=BYTES, bad_words=[word]).text


@promise("false: no spaces between special tokens, if the tokenizer writes spaces")
def _spaces_between_special_tokens(api: Endpoint) -> None:
    special: dict[str, Any] = {"model": WORDS, "skip_special_tokens": False, "logit_bias": {"1": 100}, "max_tokens": 3}
    texts = [api.ask(**special, spaces_between_special_tokens=value).text for value in (True, False)]
    assert [text.strip() for text in texts] == ["<pad> <pad> <pad>", "<pad><pad><pad>"], texts


@promise("1 is the highest level; refused for a model without levels")
def _priority(api: Endpoint) -> None:
    assert api.refusal(priority=1)["param"] == "priority"
    order: list[int] = []
    one_at_a_time: dict[str, Any] = {"model": QUEUE, "ignore_eos": True}

    def ask(priority: int) -> None:
        api.ask(**one_at_a_time, priority=priority)
        order.append(priority)

    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(api.ask, **one_at_a_time, max_tokens=150)
        eventually(lambda: api.gauge("num_requests_running", QUEUE) == 1)
        low = threads.submit(ask, 2)
        eventually(lambda: api.gauge("num_requests_waiting", QUEUE) == 1)
        high = threads.submit(ask, 1)
        eventually(lambda: api.gauge("num_requests_waiting", QUEUE) == 2)
        assert not first.done()
        for one in (first, low, high):
            one.result()
    assert order == [1, 2]


SAMPLING: dict[str, Row] = {
    "temperature": changes_text("temperature", 0, 2, seed=7),
    "top_p": as_greedy("top_p", 0.001),
    "top_k": as_greedy("top_k", 1),
    "min_p": as_greedy("min_p", 1),
    "presence_penalty": changes_text("presence_penalty", -2, 2, **HOT, max_tokens=32),
    "frequency_penalty": changes_text("frequency_penalty", -2, 2, max_tokens=48, ignore_eos=True),
    "repetition_penalty": changes_text("repetition_penalty", 0.2, 5, max_tokens=24, ignore_eos=True),
    "logit_bias": _logit_bias,
    "seed": _seed,
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "min_tokens": _min_tokens,
    "ignore_eos": _ignore_eos,
    "include_stop_str_in_output": _include_stop_str_in_output,
    "skip_special_tokens": _skip_special_tokens,
    "max_tokens": _max_tokens,
    "max_completion_tokens": _max_completion_tokens,
    "cache_salt": _cache_salt,
    "allowed_token_ids": _allowed_token_ids,
    "bad_words": _bad_words,
    "spaces_between_special_tokens": _spaces_between_special_tokens,
    "priority": _priority,
}
