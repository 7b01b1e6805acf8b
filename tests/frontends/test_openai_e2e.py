"""The OpenAI API over the real host, the llm backend and the mock model (deterministic logits, one token per byte)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.limits import InferenceLimits
from tests.helpers.openai_live_server import openai_client, serve_openai
from tests.helpers.waiting import eventually

MODEL = "mock-llm"
MAX_MODEL_LEN = 256
SLOW_MODEL = "slow-llm"
"""A whole context of it takes 80 seconds: a request that ends earlier was cancelled."""
USER_HI: list[Any] = [{"role": "user", "content": "hi"}]


def add_model(repository: Path, name: str, **arguments: int) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text('backend: "llm"\ninstance_group [{ count: 1 kind: KIND_CPU }]\n')
    (version / "model.json").write_text(json.dumps({"model": "mock", "transport": "inline", **arguments}))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InferenceServer]:
    repository = tmp_path_factory.mktemp("repository")
    add_model(repository, MODEL, max_model_len=MAX_MODEL_LEN, num_kv_blocks=512)
    add_model(repository, SLOW_MODEL, mock_step_ms=20)
    server = InferenceServer(ServerOptions(model_repositories=[repository]))
    server.start()
    yield server
    assert server.stop(timeout_s=20)


@pytest.fixture(scope="module")
def url(host: InferenceServer) -> Iterator[str]:
    with serve_openai(host) as base:
        yield f"{base}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_the_usage_says_what_of_the_prompt_was_cached(client: openai.OpenAI) -> None:
    """Whole and in a stream, for chat and for completions; a salt of one's own starts anew."""

    def chat(**options: Any) -> Any:
        messages: list[Any] = [{"role": "user", "content": "one conversation " * 9}]
        return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, temperature=0, **options)

    def complete(**options: Any) -> Any:
        return client.completions.create(model=MODEL, prompt="one text " * 15, max_tokens=4, temperature=0, **options)

    for ask in (chat, complete):
        first, again, salted = ask(), ask(), ask(extra_body={"cache_salt": "mine"})
        chunks = list(ask(stream=True, stream_options={"include_usage": True}))
        num_full = (first.usage.prompt_tokens - 1) // 32 * 32
        cached = [one.usage.prompt_tokens_details.cached_tokens for one in (first, again, salted, chunks[-1])]
        assert cached == [0, num_full, 0, num_full] and num_full >= 128
        assert first.choices[0] == again.choices[0] == salted.choices[0]
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        chat(extra_body={"cache_salt": ""})


@pytest.mark.parametrize("options", [{}, {"logprobs": True}, {"extra_body": {"return_token_ids": True}}])
def test_the_last_token_of_a_stream_comes_with_the_finish_reason(client: openai.OpenAI, options: Any) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=USER_HI, max_tokens=3, stream=True, temperature=0, **options
        )
    )
    assert len(chunks) == 4  # the role, and one for each token
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "length"]
    assert all(chunk.choices[0].delta.content for chunk in chunks[1:])


def test_all_of_the_vocabulary_may_be_asked_for_where_the_server_allows_it(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    short: dict[str, Any] = {"model": MODEL, "max_tokens": 1}
    for most in (-1, 21):
        with pytest.raises(openai.BadRequestError, match="max_logprobs"):
            client.chat.completions.create(messages=USER_HI, logprobs=True, top_logprobs=most, **short)
    with pytest.raises(openai.BadRequestError, match="max_logprobs"):
        client.completions.create(prompt="hi", logprobs=21, **short)

    add_model(tmp_path, MODEL, max_logprobs=-1)
    host = InferenceServer(ServerOptions(model_repositories=[tmp_path]))
    host.start()
    with openai_client(host) as client:
        chat = client.chat.completions.create(messages=USER_HI, logprobs=True, top_logprobs=-1, **short)
        assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
        ranked = [one.logprob for one in chat.choices[0].logprobs.content[0].top_logprobs]
        assert len(ranked) == 259 and ranked == sorted(ranked, reverse=True)
        by_id = {"return_tokens_as_token_ids": True}
        completion = client.completions.create(prompt="hi", logprobs=100, extra_body=by_id, **short)
        assert completion.choices[0].logprobs is not None and completion.choices[0].logprobs.top_logprobs is not None
        assert len(completion.choices[0].logprobs.top_logprobs[0]) in (100, 101)
    assert host.stop(timeout_s=20)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions/batch", "/generative_scoring", "/v1/embeddings", "/v1/moderations"),
        *("/v1/audio/speech", "/v1/images/generations", "/v1/batches", "/v1/files"),
    ],
)
def test_what_others_serve_and_this_server_does_not_is_refused_by_name(url: str, path: str) -> None:
    answer = httpx.post(url.removesuffix("/v1") + path, json={})
    assert (answer.status_code, f"{path} is not supported: " in answer.text) == (404, True)


def ended_requests(host: InferenceServer, model: str) -> int:
    """How many requests of `model` ended, in any way."""
    statistics = host.model_statistics(model)[0].inference_stats
    return int(statistics.success.count + statistics.fail.count)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, SLOW_MODEL]
    model: Any = client.models.retrieve(MODEL)
    assert (model.object, model.root, model.parent, model.max_model_len) == ("model", MODEL, None, MAX_MODEL_LEN)


def test_the_fingerprint_is_the_models_and_the_same_in_every_response(client: openai.OpenAI) -> None:
    chat: dict[str, Any] = {"messages": USER_HI, "max_tokens": 2}
    first = client.chat.completions.create(model=MODEL, **chat).system_fingerprint
    assert first is not None and first.startswith("fp_")
    chunks = list(client.chat.completions.create(model=MODEL, stream=True, **chat))
    assert {chunk.system_fingerprint for chunk in chunks} == {first}
    assert client.completions.create(model=MODEL, prompt="hi", max_tokens=1).system_fingerprint == first
    assert client.chat.completions.create(model=SLOW_MODEL, **chat).system_fingerprint != first


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 7}, {"seed": 8, "top_p": 0.9, "presence_penalty": 1}])
def test_chat_stream_equals_whole(client: openai.OpenAI, options: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": USER_HI, "logprobs": True, "top_logprobs": 3} | options
    whole = client.chat.completions.create(**fields)
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    *chunks, usage = list(stream)
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    positions = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
    assert whole.choices[0].logprobs is not None
    assert positions == whole.choices[0].logprobs.content
    assert whole.usage is not None
    assert usage.usage == whole.usage
    assert len(positions) == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens == len("user: hi\nassistant: ")


def test_completion_stream_equals_whole(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": ["one", "two"], "seed": 3, "logprobs": 2, "max_tokens": 20}
    whole = client.completions.create(**fields)
    texts = ["", ""]
    tokens: list[list[str]] = [[], []]
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += (choice.logprobs and choice.logprobs.tokens) or []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs and choice.logprobs.tokens for choice in whole.choices]


def test_text_and_token_ids_are_the_same_prompt(client: openai.OpenAI) -> None:
    by_text = client.completions.create(model=MODEL, prompt="abc", seed=1)
    by_ids = client.completions.create(model=MODEL, prompt=list(b"abc"), seed=1)
    assert by_text.choices[0].text == by_ids.choices[0].text


def test_max_tokens(client: openai.OpenAI) -> None:
    ignore: dict[str, Any] = {"ignore_eos": True}
    sixteen = client.completions.create(model=MODEL, prompt="abc", extra_body=ignore)
    assert (sixteen.usage and sixteen.usage.completion_tokens, sixteen.choices[0].finish_reason) == (16, "length")
    rest = client.chat.completions.create(model=MODEL, messages=USER_HI, extra_body=ignore)
    assert (rest.usage and rest.usage.total_tokens, rest.choices[0].finish_reason) == (MAX_MODEL_LEN, "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_beyond_the_context_are_refused(client: openai.OpenAI, field: str, stream: bool) -> None:
    """As vLLM's server has it; what fits exactly is fine, and the default of completions is cut in silence."""
    prompt = "x" * (MAX_MODEL_LEN - 10)
    if field == "max_tokens":
        fits = client.completions.create(model=MODEL, prompt=prompt, max_tokens=10, extra_body={"ignore_eos": True})
        assert fits.usage is not None and fits.usage.total_tokens == MAX_MODEL_LEN
        client.completions.create(model=MODEL, prompt=prompt)
    sent: dict[str, Any] = {field: MAX_MODEL_LEN}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=USER_HI, stream=stream, **sent)
    error = caught.value
    assert (error.code, error.param) == ("context_length_exceeded", field)
    assert f"'{field}' is {MAX_MODEL_LEN}, expected at most" in str(error)
    assert f"this model's maximum context length is {MAX_MODEL_LEN} tokens" in str(error)


def test_stop_string(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "abc", "temperature": 0, "max_tokens": 20}
    fields["extra_body"] = {"ignore_eos": True}
    text = client.completions.create(**fields).choices[0].text
    stop = text[5:8]
    cut = client.completions.create(**fields, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, stop=stop, stream=True))
    assert streamed == cut.text


@pytest.mark.parametrize("is_chat", [True, False])
def test_the_answer_says_which_stop_string_or_token_ended_it(client: openai.OpenAI, is_chat: bool) -> None:
    """vLLM's `stop_reason`, whole and in the last chunk of a stream."""
    create: Any = client.chat.completions.create if is_chat else client.completions.create
    fields: dict[str, Any] = {"messages": USER_HI} if is_chat else {"prompt": "abc"}
    fields |= {"model": MODEL, "temperature": 0, "max_tokens": 20}

    def stop_reason(**more: Any) -> Any:
        stop, extra = more.pop("stop", None), {"ignore_eos": True, "return_token_ids": True, **more}
        whole = create(**fields, stop=stop, extra_body=extra).choices[0]
        *others, last = create(**fields, stop=stop, extra_body=extra, stream=True)
        assert not any("stop_reason" in (chunk.choices[0].model_extra or {}) for chunk in others)
        assert last.choices[0].stop_reason == whole.stop_reason
        return whole.stop_reason

    whole = create(**fields, extra_body={"ignore_eos": True, "return_token_ids": True}).choices[0]
    text, ids = whole.message.content if is_chat else whole.text, whole.token_ids
    assert stop_reason() is None
    assert stop_reason(stop=["never", text[5:8]]) == text[5:8]
    assert stop_reason(stop_token_ids=[ids[4]]) == ids[4]
    assert stop_reason(stop=["never"]) is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_load_balancer_gets_the_load_of_the_model(client: openai.OpenAI, stream: bool) -> None:
    """ORCA, as on KServe's endpoints."""
    create = client.completions.with_raw_response.create
    headers = {"endpoint-load-metrics-format": "json"}
    asked = create(model=MODEL, prompt="hi", max_tokens=1, stream=stream, extra_headers=headers)
    kind, _, load = asked.headers["endpoint-load-metrics"].partition(" ")
    assert kind == "JSON"
    assert set(json.loads(load)["named_metrics"]) == {"kv_cache_utilization", "max_token_capacity"}
    if stream:
        asked.http_response.close()
    assert "endpoint-load-metrics" not in create(model=MODEL, prompt="hi", max_tokens=1).headers


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_model(client: openai.OpenAI, stream: bool) -> None:
    too_long = "x" * MAX_MODEL_LEN
    for prompt in (too_long, list(too_long.encode())):
        with pytest.raises(openai.BadRequestError, match=str(MAX_MODEL_LEN)) as caught:
            client.completions.create(model=MODEL, prompt=prompt, stream=stream)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match=str(MAX_MODEL_LEN)) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": too_long}], stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="hi", stream=stream, top_p=-1)
    assert caught.value.param == "top_p"
    with pytest.raises(openai.BadRequestError, match="logit_bias"):
        client.completions.create(model=MODEL, prompt="hi", stream=stream, logit_bias={"999999": 1})


def test_32_concurrent_streams_give_the_tokens_of_one_at_a_time(url: str, client: openai.OpenAI) -> None:
    def fields(number: int) -> dict[str, Any]:
        return {"model": MODEL, "prompt": f"number {number}", "seed": number, "max_tokens": 5 + number}

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(**fields(number), stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    alone = [client.completions.create(**fields(number)).choices[0].text for number in range(32)]
    assert asyncio.run(all_of_them()) == alone


@pytest.mark.parametrize("tokens_before", [0, 3])
def test_disconnect_ends_a_stream(client: openai.OpenAI, host: InferenceServer, tokens_before: int) -> None:
    ended = ended_requests(host, SLOW_MODEL)
    extra: dict[str, Any] = {"ignore_eos": True}
    stream = client.chat.completions.create(model=SLOW_MODEL, messages=USER_HI, stream=True, extra_body=extra)
    for _ in range(tokens_before):
        next(stream)
    stream.close()
    wait_until_ended(host, ended + 1)


def test_disconnect_ends_a_whole_response(client: openai.OpenAI, host: InferenceServer) -> None:
    ended = ended_requests(host, SLOW_MODEL)
    extra: dict[str, Any] = {"ignore_eos": True}
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model=SLOW_MODEL, messages=USER_HI, extra_body=extra, timeout=0.3)
    wait_until_ended(host, ended + 1)


def wait_until_ended(host: InferenceServer, count: int) -> None:
    eventually(lambda: ended_requests(host, SLOW_MODEL) == count)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_along(client: openai.OpenAI, stream: bool) -> None:
    """The mock model's tokens are bytes."""
    more: dict[str, Any] = {"extra_body": {"return_token_ids": True, "ignore_eos": True}, "stream": stream}
    limits: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 6}
    for answer in (
        client.completions.create(prompt="hi", **limits, **more),
        client.chat.completions.create(messages=USER_HI, **limits, **more),
    ):
        choices: list[Any] = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
        ids = [token for choice in choices for token in getattr(choice, "token_ids", None) or []]
        assert len(ids) == 6
        assert all(0 <= token < 259 for token in ids)
        with_ids = [hasattr(choice, "token_ids") for choice in choices]
        assert any(with_ids) and (stream or all(with_ids))


def test_logprobs_name_tokens_by_id(client: openai.OpenAI) -> None:
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    whole: Any = client.completions.create(
        model=MODEL, prompt="hi", max_tokens=5, temperature=0, logprobs=20, extra_body=ids
    )
    choice = whole.choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert all(len(best) in (20, 21) for best in choice.logprobs.top_logprobs)
    plain: Any = client.completions.create(model=MODEL, prompt="hi", max_tokens=5, temperature=0, logprobs=20)
    assert plain.choices[0].logprobs.token_logprobs == choice.logprobs.token_logprobs
    assert plain.choices[0].logprobs.text_offset == choice.logprobs.text_offset
    chat: Any = client.chat.completions.create(
        model=MODEL, messages=USER_HI, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2, extra_body=ids
    )
    content = chat.choices[0].logprobs.content
    assert [entry.token for entry in content] == [f"token_id:{token}" for token in chat.choices[0].token_ids]
    assert all(other.token.startswith("token_id:") for entry in content for other in entry.top_logprobs)


def test_choices_of_several_prompts_come_in_order(client: openai.OpenAI) -> None:
    """Choices of the first prompt, then those of the second; whole and streamed, with the usage of each prompt once."""
    hot: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 4,
        "temperature": 1.5,
        "seed": 3,
        "extra_body": {"ignore_eos": True},
    }
    prompts = ["one", "other prompt"]
    answer = client.completions.create(prompt=prompts, n=2, **hot)
    alone = [
        client.completions.create(prompt=prompt, **(hot | {"seed": 3 + index})).choices[0].text
        for prompt in prompts
        for index in range(2)
    ]
    assert [choice.text for choice in answer.choices] == alone
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (15, 16)
    texts = [""] * 4
    for chunk in client.completions.create(
        prompt=prompts, n=2, stream=True, stream_options={"include_usage": True}, **hot
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == alone and chunk.usage == answer.usage


def chunks_of(stream: Any) -> list[Any]:
    return list(stream)


def test_the_usage_of_a_chunk_is_that_of_its_choice(client: openai.OpenAI) -> None:
    """From the first chunk on with the choice's own prompt; the last chunk has the sums."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    hot: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "n": 2, "temperature": 1.5, "seed": 3, "stream": True}
    hot |= {"stream_options": options, "extra_body": {"ignore_eos": True}}
    lengths = len("one"), len("other prompt")
    for fields in ({}, {"echo": True}, {"extra_body": {"ignore_eos": True, "return_token_ids": True}}):
        *others, last = chunks_of(client.completions.create(**(hot | {"prompt": ["one", "other prompt"]} | fields)))
        for index in range(4):
            usages = [chunk.usage for chunk in others if chunk.choices[0].index == index]
            assert {usage.prompt_tokens for usage in usages} == {lengths[index // 2]}
            assert usages[-1].completion_tokens == 4
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (15, 16)
    *others, last = chunks_of(client.chat.completions.create(messages=USER_HI, **hot))
    assert [chunk.choices[0].delta.role for chunk in others[:3]] == ["assistant", "assistant", None]
    counts = [(chunk.usage.prompt_tokens, chunk.usage.completion_tokens) for chunk in others]
    assert {prompt for prompt, _ in counts} == {last.usage.prompt_tokens} != {0}
    assert [completion for _, completion in counts[:2]] == [0, 0]
    assert max(completion for _, completion in counts) == 4 and last.usage.completion_tokens == 8


def test_cached_tokens_with_best_of_are_those_of_the_first_choice(client: openai.OpenAI) -> None:
    for seed in (9, 10, 11):
        prompt = f"{seed} is where this prompt differs from others, so that none of its blocks is cached"
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=5, temperature=1, seed=seed, best_of=4
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_the_echo_of_a_cut_prompt_is_what_was_kept(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "the end stays", "max_tokens": 3, "temperature": 0}
    asked |= {"echo": True, "logprobs": 0, "stream": stream}
    found = client.completions.create(**asked, extra_body={"truncate_prompt_tokens": 5, "ignore_eos": True})
    text, tokens, offsets = "", [], []
    for part in found if stream else [found]:
        text += part.choices[0].text
        tokens += part.choices[0].logprobs.tokens
        offsets += part.choices[0].logprobs.text_offset
    assert text.startswith("stays") and len(tokens) == 8
    assert [text[offset] for offset in offsets[:5]] == tokens[:5] == list("stays")


def test_as_many_prompts_and_choices_as_a_request_may_have(client: openai.OpenAI) -> None:
    prompts = [f"{number:04}" for number in range(1024)]
    body: dict[str, Any] = {"model": MODEL, "prompt": prompts, "max_tokens": 1, "temperature": 0, "echo": True}
    answer = client.completions.create(**body)
    assert [choice.text[:4] for choice in answer.choices] == prompts
    chunks = [choice for chunk in client.completions.create(**body, stream=True) for choice in chunk.choices]
    texts = [""] * len(prompts)
    for choice in chunks:
        texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]
    for many in (
        client.completions.create(**(body | {"prompt": prompts[:8]}), n=128),
        client.chat.completions.create(model=MODEL, messages=USER_HI, max_tokens=1, n=128),
    ):
        assert len(many.choices) == 128 * (8 if many.object == "text_completion" else 1)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"n": 129}, "'n' is 129, expected an integer from 1 to 128"),
        ({"n": 65, "prompt": ["a"] * 16}, "'n' is 65, expected at most 64 for 16 prompts: 1024 choices in one request"),
        ({"n": 3, "best_of": 2}, "'best_of' is 2, expected at least n (3)"),
        ({"best_of": 2, "stream": True}, "'best_of' is 2, expected n (1) in a stream"),
    ],
)
def test_numbers_of_choices_are_bounded(client: openai.OpenAI, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**({"model": MODEL, "prompt": "hi"} | fields))
    assert text in caught.value.message and caught.value.param == next(
        name for name in ("best_of", "n") if name in fields
    )


def test_each_choice_counts_as_a_request(host: InferenceServer) -> None:
    limits = InferenceLimits(max_concurrent_requests=4)
    with serve_openai(host, gate=InferenceGate(host, limits)) as base:
        ask = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
        for count, status in ((4, 200), (5, 429), (4, 200)):
            assert httpx.post(f"{base}/v1/completions", json=ask | {"n": count}).status_code == status
