"""Checks of the fields that determine what an answer contains: streams, logprobs, token ids, response labels."""

from __future__ import annotations

from .asking import Endpoint
from .table import Row, promise


@promise("true: events, with the same text as the whole answer")
def _stream(api: Endpoint) -> None:
    assert api.streamed() == api.ask(stream=False).texts
    assert len(api.chunks()) > 2


@promise("`include_usage` adds a chunk with the usage, `continuous_usage_stats` the usage so far to each")
def _stream_options(api: Endpoint) -> None:
    assert not any("usage" in chunk for chunk in api.chunks())
    *others, last = api.chunks(stream_options={"include_usage": True})
    assert last["usage"] == api.ask().usage | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    assert {chunk["usage"] for chunk in others} == {None}
    every = api.chunks(stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert all(chunk["usage"] for chunk in every)


@promise("the logprob of each token")
def _logprobs_of_chat(api: Endpoint) -> None:
    assert api.ask(logprobs=False).choices[0]["logprobs"] is None
    entries = api.ask(logprobs=True, return_token_ids=True)
    content = entries.choices[0]["logprobs"]["content"]
    assert len(content) == len(entries.token_ids) and all(entry["logprob"] <= 0 for entry in content)


@promise("this many most likely tokens at each position")
def _top_logprobs(api: Endpoint) -> None:
    for top in (0, 3, 20):
        content = api.ask(logprobs=True, top_logprobs=top).choices[0]["logprobs"]["content"]
        assert {len(entry["top_logprobs"]) for entry in content} == {top}


@promise("the logprob of each token and of this many most likely ones")
def _logprobs_of_completions(api: Endpoint) -> None:
    assert api.ask().choices[0]["logprobs"] is None
    for top in (2, 20):
        logprobs = api.ask(logprobs=top).choices[0]["logprobs"]
        assert {len(best) for best in logprobs["top_logprobs"]} <= {top, top + 1}
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 8


@promise("the ids of the answer's tokens, whole and streamed")
def _return_token_ids(api: Endpoint) -> None:
    assert "token_ids" not in api.ask(return_token_ids=False).choices[0]
    ids = api.ask(return_token_ids=True).token_ids
    choices = [choice for chunk in api.chunks(return_token_ids=True) for choice in chunk["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids", ())] == ids and len(ids) == 8


@promise("logprobs name tokens `token_id:7`")
def _return_tokens_as_token_ids(api: Endpoint) -> None:
    asked = {"logprobs": True if api.is_chat else 1, "return_token_ids": True}
    for as_ids in (False, True):
        answer = api.ask(**asked, return_tokens_as_token_ids=as_ids)
        logprobs = answer.choices[0]["logprobs"]
        tokens = [entry["token"] for entry in logprobs["content"]] if api.is_chat else logprobs["tokens"]
        assert (tokens == [f"token_id:{token}" for token in answer.token_ids]) is as_ids


@promise("this many choices, each as a separate request with seed + its index, whole and streamed")
def _n(api: Endpoint) -> None:
    hot = {"temperature": 2, "seed": 7, "ignore_eos": True}
    assert len(api.ask(n=1).choices) == 1
    three = api.ask(**hot, n=3)
    alone = [api.ask(**hot | {"seed": 7 + index}).text for index in range(3)]
    assert three.texts == alone == api.streamed(**hot, n=3)
    assert len(set(alone)) > 1 and [one["index"] for one in three.choices] == [0, 1, 2]
    assert three.usage["completion_tokens"] == 24 and three.usage["prompt_tokens"] == api.ask().usage["prompt_tokens"]


@promise("generates this many choices and returns those with the largest logprob; at least n, and no stream")
def _best_of(api: Endpoint) -> None:
    hot = {"temperature": 2, "seed": 7, "logprobs": True if api.is_chat else 0, "ignore_eos": True}
    sums = []
    for answer in (api.ask(**hot, n=4), api.ask(**hot, n=2, best_of=4)):
        logprobs = [one["logprobs"] for one in answer.choices]
        of_tokens = [
            [entry["logprob"] for entry in one["content"]] if api.is_chat else one["token_logprobs"] for one in logprobs
        ]
        sums.append([round(sum(tokens), 4) for tokens in of_tokens])
    assert sums[1] == sorted(sums[0], reverse=True)[:2]
    assert api.refusal(n=3, best_of=2)["param"] == api.refusal(best_of=2, stream=True)["param"] == "best_of"


@promise("the most likely tokens at each position of the prompt, whole and streamed; more of them for a larger number")
def _prompt_logprobs(api: Endpoint) -> None:
    plain = api.ask()
    assert (plain.json if api.is_chat else plain.choices[0])["prompt_logprobs"] is None
    for top in (1, 3):
        answer = api.ask(prompt_logprobs=top, return_token_ids=True)
        of_prompt = answer.json if api.is_chat else answer.choices[0]
        first, *others = of_prompt["prompt_logprobs"]
        assert first is None and len(others) == answer.usage["prompt_tokens"] - 1
        assert [next(iter(entries)) for entries in others] == [
            str(token) for token in of_prompt["prompt_token_ids"][1:]
        ]
        assert {len(entries) for entries in others} <= {top, top + 1}
        chunk = api.chunks(prompt_logprobs=top, return_token_ids=True)[0]
        streamed = chunk if api.is_chat else chunk["choices"][0]
        assert streamed["prompt_logprobs"] == of_prompt["prompt_logprobs"]
        assert streamed["prompt_token_ids"] == of_prompt["prompt_token_ids"]
    assert api.refusal(prompt_logprobs=21)["param"] == "prompt_logprobs"


@promise("logprobs of the chosen token and of these, instead of the most likely ones")
def _logprob_token_ids(api: Endpoint) -> None:
    for ids in ([7, 8], [300]):
        asked = {"logprobs": True if api.is_chat else 0, "return_tokens_as_token_ids": True, "logprob_token_ids": ids}
        logprobs = api.ask(**asked).choices[0]["logprobs"]
        names = [f"token_id:{token}" for token in ids]
        if api.is_chat:
            for entry in logprobs["content"]:
                shown = [one["token"] for one in entry["top_logprobs"]]
                assert shown == list(dict.fromkeys([entry["token"], *names]))
        else:
            assert all(set(best) >= set(names) for best in logprobs["top_logprobs"])
    assert api.refusal(logprob_token_ids=[7])["param"] == "logprob_token_ids"


@promise("this many tokens are sent together; the text is the same; no effect without a stream")
def _stream_interval(api: Endpoint) -> None:
    numbers = [len(api.chunks(stream_interval=interval, ignore_eos=True)) for interval in (1, 3)]
    assert numbers[0] - numbers[1] == 4  # 1, 3, 3 and the last one, in place of eight
    assert api.streamed(stream_interval=3) == api.ask(stream_interval=3).texts == api.ask().texts


@promise("answers name their model; an unknown one is a 404")
def _model(api: Endpoint) -> None:
    assert (api.ask().json["model"], api.ask(model="bytes").json["model"]) == ("demo", "bytes")


ANSWERS: dict[str, Row] = {
    "model": _model,
    "n": _n,
    "best_of": _best_of,
    "prompt_logprobs": _prompt_logprobs,
    "logprob_token_ids": _logprob_token_ids,
    "stream_interval": _stream_interval,
    "stream": _stream,
    "stream_options": _stream_options,
    "return_token_ids": _return_token_ids,
    "return_tokens_as_token_ids": _return_tokens_as_token_ids,
}
CHAT_ANSWERS: dict[str, Row] = {"logprobs": _logprobs_of_chat, "top_logprobs": _top_logprobs}
COMPLETION_ANSWERS: dict[str, Row] = {"logprobs": _logprobs_of_completions}
