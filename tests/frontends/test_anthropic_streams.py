"""A stream of the Messages API says what the whole message says, however the model's tokens came together: read as the
`anthropic` package reads it, and with events of its types."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from llmbackend.frontends.anthropic.answers import MessageWriter, WholeMessage
from llmbackend.frontends.anthropic.content import BetaFields
from llmbackend.frontends.anthropic.requests import MessageRequest, parse_message
from llmbackend.frontends.generation.answer import Identity
from llmbackend.frontends.generation.parsers import REASONING_FORMATS, TOOL_CALL_FORMATS
from llmbackend.frontends.generation.plan import TEXT, AnswerPlan
from llmbackend.frontends.generation.sealed_reasoning import FIXED_KEY
from llmbackend.frontends.generation.tensors import Delta
from llmbackend.frontends.http.errors import OpenAIError
from tests.frontends.parsers.laws import changed
from tests.frontends.parsers.sample import Sample, Token, cut, tokens
from tests.frontends.parsers.samples import SAMPLES
from tests.helpers.machine_settings import tries

IDENTITY = Identity("msg_0", 0, "m", "")
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
NUM_CHANGED = 300


def request(**thinking: Any) -> MessageRequest:
    body = {"model": "m", "max_tokens": 10**6, "messages": [{"role": "user", "content": "x"}], "stream": True}
    return parse_message(body | ({"thinking": thinking} if thinking else {}), BetaFields(""), FIXED_KEY)


SHOWN, OMITTED = request(), request(type="adaptive", display="omitted")


def plan(sample: Sample) -> AnswerPlan:
    return AnswerPlan(
        tool_use=None,
        tool_format=TOOL_CALL_FORMATS.get(sample.tools),
        reasoning_format=REASONING_FORMATS.get(sample.reasoning),
        includes_reasoning=True,
        shows_special_tokens=False,
    )


def deltas(sample: Sample, parts: list[Token], random: Random) -> list[Delta]:
    """The tokens, one or several in a delta."""
    found: list[Delta] = []
    marker: list[Any] = [(-2, "", True)] if sample.reasoning_is_open else []
    while parts:
        taken = random.randint(1, 4)
        text_tokens = [*marker, *((0, text, special) for text, special in parts[:taken])]
        text = "".join(text for text, special in parts[:taken] if not special)
        found.append(Delta(text, None, [], 7, len(parts[:taken]), False, text_tokens=text_tokens))
        marker, parts = [], parts[taken:]
    return [*found, Delta("", sample.finish_reason, [], 7, 0, True, text_tokens=marker)]


def whole(asked: MessageRequest, sample: Sample, pieces: list[Delta]) -> dict[str, Any]:
    message = WholeMessage(asked, IDENTITY, plan(sample), FIXED_KEY)
    for delta in pieces:
        message.add(delta)
    body: dict[str, Any] = json.loads(message.body())
    anthropic.types.Message.model_validate(body)
    return body


def events(asked: MessageRequest, sample: Sample, pieces: list[Delta]) -> list[dict[str, Any]]:
    writer = MessageWriter(asked, IDENTITY, plan(sample), FIXED_KEY, "req_0")
    stream = b"".join([writer.begin(), *(writer.delta(0, delta) for delta in pieces), writer.end()])
    found: list[dict[str, Any]] = []
    for event in stream.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def as_clients_read_it(stream: list[dict[str, Any]]) -> Any:
    """None for a call whose input the model wrote wrong: clients raise an exception."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    try:
        for event in stream:
            if event["type"] != "ping":
                read = EVENT.validate_python(event)
                snapshot = accumulate_event(event=read, current_snapshot=snapshot, json_bufs=buffers)
    except ValueError:
        return None
    return json.loads(snapshot.to_json())


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that the package adds."""
    objects = {"usage": message["usage"], **{str(index): block for index, block in enumerate(message["content"])}}
    told = {key: {name: of for name, of in value.items() if of is not None} for key, value in objects.items()}
    return told | {name: message.get(name) for name in ("stop_reason", "stop_sequence")}


def check(asked: MessageRequest, sample: Sample, text: str, random: Random) -> bool:
    """Whether the stream could be read."""
    uncut = deltas(sample, tokens(sample, text), Random(0))
    pieces = deltas(sample, list(cut(tokens(sample, text), random, random.choice((1, 3, 10)))), random)
    message = whole(asked, sample, pieces)
    assert {**message, "usage": None} == {**whole(asked, sample, uncut), "usage": None}
    read = as_clients_read_it(events(asked, sample, pieces))
    if read is None or not _inputs_are_objects(read):
        return False
    assert shown(read) == shown(message)
    return True


def _inputs_are_objects(message: dict[str, Any]) -> bool:
    """A model that has no grammar may write a list; a whole message has {} for it."""
    return all(isinstance(block["input"], dict) for block in message["content"] if block["type"] == "tool_use")


@pytest.mark.parametrize("asked", [SHOWN, OMITTED], ids=["shown", "omitted"])
def test_a_stream_is_the_whole_message_for_any_cut(asked: MessageRequest) -> None:
    random = Random(15)
    samples = SAMPLES if asked is SHOWN else SAMPLES[::4]
    read = [check(asked, sample, sample.text, random) for sample in samples]
    for _ in range(tries(NUM_CHANGED)):
        sample = random.choice(SAMPLES)
        read.append(check(asked, sample, changed(sample.text, list(SAMPLES), random), random))
    assert sum(read) > 0.9 * len(read)


def test_the_input_of_a_call_that_is_cut_off_has_integers_of_any_size() -> None:
    sample = next(sample for sample in SAMPLES if sample.tools == "hermes" and not sample.reasoning_is_open)
    text = f'<tool_call>\n{{"name": "count", "arguments": {{"to": {10**30}'
    message = whole(SHOWN, sample, deltas(sample, tokens(sample, text), Random(0)))
    assert message["content"][-1]["input"] == {"to": 10**30}


def test_blocks_come_one_after_the_other() -> None:
    random = Random(16)
    for sample in SAMPLES:
        pieces = deltas(sample, list(cut(tokens(sample), random, 3)), random)
        opened: list[int] = []
        closed = 0
        kinds = [event["type"] for event in events(SHOWN, sample, pieces)]
        assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
        for event in events(SHOWN, sample, pieces)[2:-2]:
            if event["type"] == "content_block_start":
                assert event["index"] == len(opened) == closed
                opened.append(event["index"])
            else:
                assert event["index"] == opened[-1] and closed < len(opened)
                closed += event["type"] == "content_block_stop"
        assert closed == len(opened)


def test_a_stream_that_waits_sends_pings_and_one_that_fails_an_error() -> None:
    writer = MessageWriter(SHOWN, IDENTITY, TEXT, FIXED_KEY, "req_0")
    assert (
        writer.ping().startswith(b"event: message_start\n")
        and writer.ping() == b'event: ping\ndata: {"type":"ping"}\n\n'
    )
    name, data = writer.fail(OpenAIError("gone", status=503)).decode().strip().split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert error == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}, "request_id": "req_0"}


def test_the_prompts_tokens_are_in_the_first_event() -> None:
    writer = MessageWriter(SHOWN, IDENTITY, TEXT, FIXED_KEY, "req_0")
    first = msgspec.structs.replace(Delta("Hi", None, [], 100, 1, False), num_cached_tokens=64)
    start = json.loads(writer.delta(0, first).split(b"\n")[1].removeprefix(b"data: "))["message"]
    assert start["usage"]["input_tokens"] == 36 and start["usage"]["cache_read_input_tokens"] == 64
    assert start["content"] == [] and start["stop_reason"] is None
