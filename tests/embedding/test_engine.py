"""Engine: what a program gets is what a server's client gets; nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmbackend import Completion, Engine, SamplingParams, TritonError
from tests.helpers.waiting import eventually

MOCK: dict[str, Any] = {"transport": "inline", "max_model_len": 128, "block_size": 8, "num_kv_blocks": 64}
PROMPTS = ["one", "zażółć", "three " * 5]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("mock", **MOCK) as engine:
        yield engine


def is_idle(engine: Engine) -> bool:
    return engine._host.check() == []


def joined(parts: list[Completion]) -> tuple[str, tuple[int, ...], str | None]:
    tokens = tuple(token_id for part in parts for token_id in part.token_ids)
    return "".join(part.text for part in parts), tokens, parts[-1].finish_reason


def test_streams_have_what_whole_generations_have(engine: Engine) -> None:
    whole = engine.generate(PROMPTS, GREEDY)
    for prompt, generation in zip(PROMPTS, whole, strict=True):
        parts = list(engine.stream(prompt, GREEDY))
        assert joined(parts) == (generation.text, generation.token_ids, generation.finish_reason)
        assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
        usage = parts[-1].usage
        assert usage is not None and usage.prompt_tokens == len(prompt.encode())
        assert usage.completion_tokens == len(generation.token_ids) == 12


def test_an_event_loop_gets_the_same(engine: Engine) -> None:
    async def both() -> tuple[list[Any], list[Completion]]:
        parts = [part async for part in engine.stream_async(PROMPTS[0], GREEDY)]
        return await engine.generate_async(PROMPTS, GREEDY), parts

    generations, parts = asyncio.run(both())
    whole = engine.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in generations] == [one.token_ids for one in whole]
    assert joined(parts)[0] == whole[0].text


def test_a_step_wakes_an_event_loop_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wakes: list[object] = []

    async def read_all() -> int:
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe

        def counted(call: Callable[..., object], *args: object) -> asyncio.Handle:
            wakes.append(call)
            return wake(call, *args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        streams = [engine.stream_async(prompt, GREEDY) for prompt in ("a", "b", "c", "d", "e", "f", "g", "h")]

        async def read(stream: AsyncIterator[Completion]) -> int:
            return sum([len(part.token_ids) async for part in stream])

        return sum(await asyncio.gather(*map(read, streams)))

    assert asyncio.run(read_all()) == 8 * 12 > 2 * len(wakes)


def test_token_ids_are_a_prompt(engine: Engine) -> None:
    ids, text = engine.generate([list(b"one"), "one"], GREEDY)
    assert ids == text


def test_a_given_limit_replaces_that_of_the_model() -> None:
    with Engine("mock", **MOCK, override_generation_config={"max_new_tokens": 40}) as engine:
        for given, expected in (({}, 40), ({"max_tokens": None}, 40), ({"max_tokens": 16}, 16)):
            (generation,) = engine.generate(["one"], SamplingParams(**given, ignore_eos=True))
            assert len(generation.token_ids) == expected


def test_outputs_of_one_prompt_have_their_index_and_logprobs(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=4, n=3, seed=5, logprobs=2, prompt_logprobs=1, stop_token_ids=[1])
    (generation,) = engine.generate(["abc"], sampling)
    assert [one.index for one in generation.completions] == [0, 1, 2]
    for completion in generation.completions:
        assert [next(iter(position)) for position in completion.logprobs] == list(completion.token_ids)
        assert all(
            position[token].rank for position, token in zip(completion.logprobs, completion.token_ids, strict=True)
        )
    first, *others = generation.completions[0].prompt_logprobs
    assert first is None and [next(iter(position or {})) for position in others] == list(b"bc")
    parts = list(engine.stream("abc", sampling))
    for completion in generation.completions:
        assert joined([part for part in parts if part.index == completion.index])[1] == completion.token_ids


def test_more_prompts_than_the_queue_holds_wait_for_each_other() -> None:
    with Engine("mock", max_queue_size=2, max_num_seqs=1, **MOCK) as engine:
        generations = engine.generate(map(str, range(9)), GREEDY)
        alone = [engine.generate([str(number)], GREEDY)[0].token_ids for number in range(9)]
        assert [one.token_ids for one in generations] == alone
        assert [one.token_ids for one in asyncio.run(engine.generate_async(map(str, range(9)), GREEDY))] == alone


def test_outputs_count_towards_the_queue() -> None:
    with Engine("mock", max_queue_size=4, **MOCK) as engine:
        generations = engine.generate(["a"] * 5, SamplingParams(max_tokens=2, n=3))
        assert [len(one.completions) for one in generations] == [3] * 5


def test_a_stream_that_is_left_ends(engine: Engine) -> None:
    stream = engine.stream("x", LONG)
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    eventually(lambda: is_idle(engine))

    async def leave() -> None:
        task = asyncio.create_task(engine.generate_async(["x"] * 8, LONG))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    eventually(lambda: is_idle(engine))


def test_a_stream_has_ended_when_its_closing_returns() -> None:
    """Even if the event loop runs nothing else until then."""
    arguments = {**MOCK, "max_model_len": 1 << 20, "num_kv_blocks": 1 << 17, "max_num_seqs": 1}
    with Engine("mock", **arguments) as engine:

        async def leave() -> None:
            stream = engine.stream_async("x", LONG)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]  # it is a generator
            eventually(lambda: is_idle(engine))

        asyncio.run(leave())


@pytest.mark.parametrize(
    ("sampling", "param", "expected"),
    [
        (SamplingParams(temperature=-1), "temperature", "is -1, expected a number of at least 0"),
        (SamplingParams(logit_bias={999999: 1.0}), "logit_bias", "expected token ids from 0"),
        (SamplingParams(structured_outputs={"jsn": {}}), "structured_outputs", "jsn"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(
    engine: Engine, sampling: SamplingParams, param: str, expected: str
) -> None:
    with pytest.raises(TritonError, match=expected) as refusal:
        engine.generate(["x", "y"], sampling)
    assert refusal.value.param is not None and refusal.value.param.startswith(param)
    eventually(lambda: is_idle(engine))


@pytest.mark.parametrize("prompt", [3.5, [1.5], [-1], [1 << 40], None, {1, 2}])
def test_what_is_no_prompt_is_refused(engine: Engine, prompt: Any) -> None:
    with pytest.raises(TypeError, match="expected a text, token ids, or messages"):
        engine.generate([prompt], GREEDY)
    singles: list[Any] = ["one text", {"messages": [{"role": "user", "content": "one chat"}]}]
    for single in singles:
        with pytest.raises(TypeError, match="expected a list of prompts"):
            engine.generate(single, GREEDY)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"dtype": "f8"}, "'dtype' is 'f8', expected 'auto' or"),
        ({"dtyp": "auto"}, "unknown engine argument 'dtyp'"),
        ({"max_queue_size": 0}, "'max_queue_size' is '0', expected an integer of at least 1"),
        ({"max_num_seqs": 0}, "'max_num_seqs' is 0, expected at least 1"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(TritonError, match=expected):
        Engine("mock", **arguments)


def test_a_model_that_cannot_be_loaded_says_why() -> None:
    with pytest.raises(TritonError, match="did not start: MemoryError"):
        Engine("mock", **{**MOCK, "max_model_len": 10**9})


@pytest.mark.slow
def test_generations_survive_the_death_of_the_models_process(tmp_path: Path) -> None:
    arguments = {**MOCK, "transport": "process", "mock_step_ms": 3.0, "fault_directory": str(tmp_path)}
    with Engine("mock", **arguments) as engine:
        undisturbed = joined(list(engine.stream("x", LONG)))
        stream = engine.stream("x", LONG)
        parts = [next(stream) for _ in range(3)]
        (crash := tmp_path / "segfault").touch()
        assert joined([*parts, *stream]) == undisturbed
        assert not crash.exists()
