"""The events of a response: their form and order, and that a stream tells what the whole response is, however the
answer's text is cut."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import orjson
import pytest

from llmbackend.frontends.conversation.tools import Function, NamedTool, ToolKind, ToolUse
from llmbackend.frontends.generation.answer import Identity
from llmbackend.frontends.generation.parsers import REASONING_FORMATS, TOOL_CALL_FORMATS
from llmbackend.frontends.generation.plan import TEXT, AnswerPlan
from llmbackend.frontends.generation.request import STRUCTURED_OUTPUTS, LogprobForm
from llmbackend.frontends.generation.sealed_reasoning import SealingKey
from llmbackend.frontends.generation.tensors import PROMPT_IN_REASONING, Delta, TextToken
from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.openai.responses_api.events import ResponseWriter
from llmbackend.frontends.openai.responses_api.response_state import ResponseState
from tests.frontends.parsers.laws import LENGTHS, changed
from tests.frontends.parsers.sample import Sample, Token, cut, tokens
from tests.frontends.parsers.samples import SAMPLES
from tests.helpers.machine_settings import tries

from .event_reader import EventReader, events_of

IDENTITY = Identity("resp_7", 1_700_000_000, "m", "")
ECHO: dict[str, Any] = {
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "metadata": {},
    "instructions": None,
}
KEY = SealingKey(b"0123456789abcdef")
NUM_CUTS = 12
"""For each format, of changed samples each night."""
FORMATS = ("hermes", "qwen3_coder", "mistral", "openai", "deepseek_v3", "kimi_k2", "llama3_json", "pythonic")


def plan_of(sample: Sample) -> AnswerPlan:
    format = TOOL_CALL_FORMATS.get(sample.tools)
    functions = tuple(Function(name, dict(schema), is_strict=False) for name, schema in sample.schemas.items())
    return AnswerPlan(
        tool_use=ToolUse([], functions, is_required=False, max_calls=None, is_legacy=False) if format else None,
        tool_format=format,
        reasoning_format=REASONING_FORMATS.get(sample.reasoning),
        includes_reasoning=True,
        shows_special_tokens=False,
        sampling={STRUCTURED_OUTPUTS: {}},  # the samples are what a model writes that is held to a grammar
    )


def text_tokens(sample: Sample, parts: list[Token]) -> list[TextToken]:
    begin = [(PROMPT_IN_REASONING, "", True)] if sample.reasoning_is_open else []
    return [*begin, *((number, text, is_special) for number, (text, is_special) in enumerate(parts))]


def deltas_of(all_tokens: list[TextToken], reason: str, random: Random) -> list[Delta]:
    """The tokens in steps of one to three, and their end."""
    deltas, begin = [], 0
    while begin < len(all_tokens):
        step = all_tokens[begin : begin + random.randint(1, 3)]
        begin += len(step)
        shown = "".join(text for _, text, is_special in step if not is_special)
        deltas.append(Delta(shown, None, [], 0, 0, False, text_tokens=step))
    return [*deltas, Delta("", reason, [], 0, 0, True, usage=(5, 7, 2))]


def state_of(plan: AnswerPlan, kind: ToolKind = "function", **options: Any) -> ResponseState:
    tools = {name: NamedTool(kind, name) for name in ("get_weather", "now", "f", "g")}
    return ResponseState(
        IDENTITY, plan, echo=orjson.dumps(ECHO), tools=tools, seal=KEY.seal, clock=lambda: 1_700_000_009.5, **options
    )


def streamed(state: ResponseState, deltas: list[Delta], *, cuts_at_tokens: bool = False) -> bytes:
    writer = ResponseWriter(state, cuts_at_tokens=cuts_at_tokens)
    return b"".join([writer.begin(), *(writer.delta(0, delta) for delta in deltas), writer.end()])


def whole(state: ResponseState, deltas: list[Delta]) -> dict[str, Any]:
    for delta in deltas:
        state.add(delta)
    state.end()
    response: dict[str, Any] = orjson.loads(state.json())
    return response


@pytest.mark.parametrize("kind", ["function", "custom", "tool_search"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_tells_the_whole_response_however_it_is_cut(name: str, kind: ToolKind) -> None:
    random = Random(f"{name} {kind}")
    samples = [sample for sample in SAMPLES if name == sample.tools]
    assert samples
    for number in range(len(samples) + tries(NUM_CUTS)):
        sample = samples[number % len(samples)]
        text = sample.text if number < len(samples) else changed(sample.text, samples, random)
        plan = plan_of(sample)
        reason = random.choice(("stop", "length"))
        parts = list(cut(tokens(sample, text), random, random.choice(LENGTHS)))
        expected = whole(state_of(plan, kind), deltas_of(text_tokens(sample, tokens(sample, text)), reason, random))
        deltas = deltas_of(text_tokens(sample, parts), reason, random)
        found = EventReader().read_all(events_of(streamed(state_of(plan, kind), deltas)))
        of_same_cuts = whole(state_of(plan, kind), deltas)["usage"].pop("output_tokens_details")
        assert found["usage"].pop("output_tokens_details") == of_same_cuts
        del expected["usage"]["output_tokens_details"]  # other cuts are other tokens
        assert found == expected


@pytest.mark.parametrize("sample", [one for one in SAMPLES if one.tools in FORMATS], ids=lambda one: one.text[:9])
def test_items_are_what_the_sample_says(sample: Sample) -> None:
    deltas = deltas_of(text_tokens(sample, tokens(sample)), sample.finish_reason, Random(0))
    output = whole(state_of(plan_of(sample)), deltas)["output"]
    content = "".join(part["text"] for one in output if one["type"] == "message" for part in one["content"])
    reasons = "".join(part["text"] for one in output if one["type"] == "reasoning" for part in one["content"])
    calls = [one for one in output if one["type"] == "function_call"]
    assert (content, reasons) == (sample.content, sample.reasons)
    assert [(one["name"], one["arguments"]) for one in calls] == [(one.name, one.arguments) for one in sample.calls]
    assert [one["status"] == "completed" for one in calls] == [one.is_complete for one in sample.calls]
    for one in output:
        if one["type"] == "reasoning":
            assert KEY.unseal(one["encrypted_content"]) == one["content"][0]["text"]


def plain(text: str) -> list[Delta]:
    pieces = [Delta(char, None, [], 0, 0, False) for char in text]
    return [*pieces, Delta("", "stop", [], 0, 0, True, usage=(5, len(text), 2))]


def test_the_order_of_a_text() -> None:
    reader = EventReader()
    response = reader.read_all(events_of(streamed(state_of(TEXT), plain("Hi"))))
    assert reader.kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }
    assert response["id"] == "resp_7" and response["completed_at"] == 1_700_000_009
    assert response.items() >= ECHO.items()


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    response = EventReader().read_all(events_of(streamed(state_of(TEXT), plain(""))))
    assert [(one["type"], one["content"][0]["text"]) for one in response["output"]] == [("message", "")]


def test_in_the_background_it_is_queued_first() -> None:
    events = events_of(streamed(state_of(TEXT, is_queued=True), plain("Hi")))
    EventReader().read_all(events)
    assert [one["type"] for one in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [one["response"]["status"] for one in events[:3]] == ["queued", "queued", "in_progress"]


def test_what_is_cut_off_is_incomplete() -> None:
    deltas = [*plain("Hi")[:-1], Delta("", "length", [], 0, 0, True)]
    response = EventReader().read_all(events_of(streamed(state_of(TEXT), deltas)))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete" and response["completed_at"] is None


def test_a_failure_is_the_last_event() -> None:
    writer = ResponseWriter(state_of(TEXT))
    begun = writer.begin() + writer.delta(0, Delta("Hi", None, [], 0, 0, False))
    reader = EventReader()
    response = reader.read_all(events_of(begun + writer.fail(OpenAIError("it broke", status=500, kind="server_error"))))
    assert reader.kinds[-2:] == ["error", "response.failed"]
    assert response["error"] == {"code": "server_error", "message": "it broke"}
    assert [(one["status"], one["content"][0]["text"]) for one in response["output"]] == [("incomplete", "Hi")]


def test_an_end_that_can_not_be_kept_is_a_failure_in_its_place() -> None:
    writer = ResponseWriter(state_of(TEXT))
    told = writer.begin() + b"".join(writer.delta(0, delta) for delta in plain("Hi"))
    writer.end()
    failure = writer.fail(OpenAIError("the store is full", status=503, kind="service_unavailable_error"))
    response = EventReader().read_all(events_of(told + failure))
    assert (response["status"], response["completed_at"]) == ("failed", None)


def entry(text: str, rank: int = 1) -> dict[str, dict[str, Any]]:
    return {str(ord(text[0])): {"logprob": -0.5, "rank": rank, "decoded_token": text}}


def test_log_probabilities_are_those_of_the_tokens_of_the_message() -> None:
    sample = Sample(text="", tools="hermes", reasoning="qwen3")
    parts = ("<think>", "Well", "</think>", "H", "i ", "<to", "ol>", "<tool_call>", '{"name": "f"}', "</tool_call>", "")
    markers = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    marked = [(number, text, text in markers) for number, text in enumerate(parts)]
    logprobs = [entry(text or "E") for text in parts]
    for step in (1, 2, 5, 12):
        deltas = [
            Delta("x", None, logprobs[at : at + step], 0, 0, False, text_tokens=marked[at : at + step])
            for at in range(0, len(marked), step)
        ]
        deltas.append(Delta("", "stop", [], 0, 0, True))
        state = state_of(plan_of(sample), logprobs=LogprobForm(1))
        response = EventReader().read_all(events_of(streamed(state, deltas)))
        assert [one["type"] for one in response["output"]] == ["reasoning", "message", "function_call"]
        part = response["output"][1]["content"][0]
        assert part["text"] == "Hi <tool>"
        assert [one["token"] for one in part["logprobs"]] == ["H", "i ", "<to", "ol>"]
        assert part["logprobs"][0]["top_logprobs"] == [{"token": "H", "logprob": -0.5, "bytes": [72]}]


def test_log_probabilities_of_a_plain_text() -> None:
    deltas = [Delta("Hi", None, [entry("H"), entry("i")], 0, 0, False), Delta("", "stop", [entry("E")], 0, 0, True)]
    response = EventReader().read_all(events_of(streamed(state_of(TEXT, logprobs=LogprobForm(0)), deltas)))
    part = response["output"][0]["content"][0]
    assert [one["token"] for one in part["logprobs"]] == ["H", "i", "E"]
    assert part["logprobs"][0]["top_logprobs"] == []


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_cut_at_tokens_events_do_not_depend_on_how_tokens_came_together(name: str) -> None:
    random = Random(name)
    for sample in (one for one in SAMPLES if one.tools == name):
        parts = text_tokens(sample, list(cut(tokens(sample), random, 3)))
        plan = plan_of(sample)
        first, second = (
            streamed(state_of(plan), deltas_of(parts, sample.finish_reason, random), cuts_at_tokens=True)
            for _ in range(2)
        )
        assert first == second


def test_calls_have_the_clients_names() -> None:
    sample = next(one for one in SAMPLES if one.tools == "hermes" and one.calls and one.calls[0].name == "f")
    deltas = deltas_of(text_tokens(sample, tokens(sample)), "stop", Random(0))
    tools = {"f": NamedTool("function", "read", "files")}
    state = ResponseState(IDENTITY, plan_of(sample), echo=orjson.dumps(ECHO), tools=tools)
    item = EventReader().read_all(events_of(streamed(state, deltas)))["output"][0]
    assert (item["name"], item["namespace"]) == ("read", "files")
    assert item["call_id"].startswith("call_") and item["id"].startswith("fc_")


def test_a_search_for_tools_is_told_as_an_object() -> None:
    sample = next(one for one in SAMPLES if one.tools == "hermes" and one.calls and one.calls[0].name == "f")
    deltas = deltas_of(text_tokens(sample, tokens(sample)), "stop", Random(0))
    state = state_of(plan_of(sample), "tool_search")
    item = EventReader().read_all(events_of(streamed(state, deltas)))["output"][0]
    assert (item["type"], item["execution"]) == ("tool_search_call", "client")
    assert item["arguments"] == json.loads(sample.calls[0].arguments)
