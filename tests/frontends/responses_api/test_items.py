"""Items → chat messages: one assistant's message for each answer, as a chat's own history has it."""

from __future__ import annotations

from random import Random
from typing import Any

import orjson
import pytest

from llmbackend.frontends.generation.sealed_reasoning import FIXED_KEY
from llmbackend.frontends.openai.messages import for_template
from llmbackend.frontends.openai.responses_api.parsing import History

from .parsed import chat, messages, parsed

Item = dict[str, Any]


def user(text: str) -> Item:
    return {"role": "user", "content": text}


def said(text: str, **fields: Any) -> Item:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content} | fields


def thought(text: str) -> Item:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(name: str = "f", arguments: str = "{}", id: str = "call_1") -> Item:
    return {"type": "function_call", "id": "fc_1", "call_id": id, "name": name, "arguments": arguments,
            "status": "completed"}  # fmt: skip


def output(text: str, id: str = "call_1") -> Item:
    return {"type": "function_call_output", "call_id": id, "output": text}


def answered(content: str = "", reasoning: str = "", calls: list[Item] | None = None) -> Item:
    message: Item = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": one["call_id"], "type": "function",
             "function": {"name": one["name"], "arguments": one["arguments"]}}
            for one in calls
        ]  # fmt: skip
    return message


def result(text: str, id: str = "call_1") -> Item:
    return {"role": "tool", "tool_call_id": id, "content": text}


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([thought("r"), said("a"), call()], [answered("a", "r", [call()])]),
        ([call(id="1"), call(id="2")], [answered(calls=[call(id="1"), call(id="2")])]),
        ([said("a"), call(), said("b")], [answered("ab", calls=[call()])]),
        ([said("a"), said("b")], [answered("a"), answered("b")]),
        ([said("a"), thought("r"), call()], [answered("a", "r", [call()])]),
        ([said("a"), thought("r"), said("b")], [answered("ab", "r")]),
        ([said("a"), thought("r")], [answered("a", "r")]),
        ([thought("r"), call(), output("x"), thought("s"), said("b")],
         [answered("", "r", [call()]), result("x"), answered("b", "s")]),
        ([user("q"), said("a"), user("r")],
         [{"role": "user", "content": "q"}, answered("a"), {"role": "user", "content": "r"}]),
    ],
)  # fmt: skip
def test_answers(items: list[Item], expected: list[Item]) -> None:
    assert messages(items) == expected


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
         {"role": "user", "content": "a\nb"}),
        ({"type": "message", "role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a"}),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
         {"role": "assistant", "content": "no"}),
        ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
         {"role": "tool", "tool_call_id": "c", "content": "x"}),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": "x"},
         {"role": "tool", "tool_call_id": "c", "content": "x"}),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
         {"role": "assistant", "content": "", "reasoning_content": "s"}),
        ({"type": "reasoning", "summary": [], "encrypted_content": FIXED_KEY.seal("sealed thoughts")},
         {"role": "assistant", "content": "", "reasoning_content": "sealed thoughts"}),
        ({"type": "reasoning", "summary": [], "encrypted_content": "another server's",
          "content": [{"type": "reasoning_text", "text": "open"}]},
         {"role": "assistant", "content": "", "reasoning_content": "open"}),
    ],
)  # fmt: skip
def test_each_item(item: Item, message: Item) -> None:
    assert messages([item]) == [message]


def test_calls_of_custom_tools_and_of_namespaces() -> None:
    items: list[dict[str, Any]] = [
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'a "b"\n'},
        {"type": "function_call", "call_id": "d", "name": "f", "namespace": "n", "arguments": "{}"},
        {"type": "tool_search_call", "call_id": "e", "execution": "client", "arguments": {"query": "q"}},
    ]
    functions = [one["function"] for one in messages(items)[0]["tool_calls"]]
    assert functions == [
        {"name": "patch", "arguments": '{"input":"a \\"b\\"\\n"}'},
        {"name": "n__f", "arguments": "{}"},
        {"name": "tool_search", "arguments": '{"query":"q"}'},
    ]


def test_system_messages_at_the_start_become_one() -> None:
    items = [{"role": "developer", "content": "b"}, user("c"), {"role": "system", "content": "d"}]
    assert messages(items, instructions="a") == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "d"},
    ]


def test_a_later_system_message_is_one_that_templates_may_not_read() -> None:
    assert "system_is_anywhere" not in chat(parsed(input=[user("a")], instructions="i"))
    assert chat(parsed(input=[user("a"), {"role": "developer", "content": "b"}]))["system_is_anywhere"] is True


def test_history_comes_before_the_input() -> None:
    history = History((user("a"), said("b")))
    request = parsed(history, previous_response_id="resp_1", input="c", instructions="i")
    assert [one["content"] for one in chat(request)["messages"]] == ["i", "a", "b", "c"]
    assert len(request.input_items) == 1


def test_references_are_replaced() -> None:
    history = History(by_id={"msg_1": said("b")})
    request = parsed(history, input=[user("a"), {"type": "item_reference", "id": "msg_1"}, user("c")])
    assert [one["content"] for one in chat(request)["messages"]] == ["a", "b", "c"]
    assert request.input_items[1] == said("b")


def test_an_unfinished_answer_is_gone_on_with() -> None:
    cut = said("a", status="incomplete")
    assert chat(parsed(input=[user("q"), cut]))["continue_final_message"] is True
    assert "continue_final_message" not in chat(parsed(input=[user("q"), cut, user("r")]))
    assert "continue_final_message" not in chat(parsed(input=[user("q"), said("a")]))
    for text in ("", " \n"):  # cut off before its first character: the model begins anew
        assert "continue_final_message" not in chat(parsed(input=[user("q"), said(text, status="incomplete")]))
    history = History((user("q"), cut))
    assert chat(parsed(history, previous_response_id="resp_1", input=None))["continue_final_message"] is True


def test_an_answer_and_its_continuation_are_one_message() -> None:
    first, second = said("Once upon", status="incomplete"), said(" a time", status="incomplete")
    items = [user("q"), first, second, said(".")]
    told = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "Once upon a time."}]
    assert messages([*items, user("r")])[:2] == told
    for body in ({"previous_response_id": "resp_1"}, {"conversation": "conv_1"}):
        assert chat(parsed(History(tuple(items)), **body, input="r"))["messages"][:2] == told
    going_on = chat(parsed(History((user("q"), first, second)), previous_response_id="resp_1", input=None))
    assert going_on["continue_final_message"] is True
    assert [one["content"] for one in going_on["messages"]] == ["q", "Once upon a time"]
    for another in ([first, user("r"), said("b")], [said("", status="incomplete"), said("b")]):
        assert messages([user("q"), *another, user("s")])[-2] == {"role": "assistant", "content": "b"}


def test_reasoning_of_the_current_turn() -> None:
    items = [user("q"), thought("r"), said("a"), user("q"), thought("s"), call(), output("x")]
    shown = messages(items, reasoning={"context": "current_turn"})
    assert [one.get("reasoning_content") for one in shown] == [None, None, None, "s", None]


def _turn(random: Random, number: int) -> tuple[list[Item], Item]:
    """What an answer wrote as items, and as a chat's message: reasoning, text and calls in any order."""
    items: list[Item] = []
    pieces = [thought(f"r{number} "), *([said(f"t{number} ")] * random.randint(0, 1))]
    calls = [call(f"f{index}", '{"a": 1}', f"call_{number}_{index}") for index in range(random.randint(0, 3))]
    if random.random() < 0.5:
        pieces = pieces[::-1] if calls else pieces
    items += pieces[random.randint(0, 1) if calls or len(pieces) > 1 else 0 :] + calls
    if calls and random.random() < 0.5:
        items.append(said(f"u{number} "))
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    reasonings = [part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]]
    message: Item = {"role": "assistant", "content": "".join(texts)}
    if reasonings:
        message["reasoning_content"] = "".join(reasonings)
    if calls:
        message["tool_calls"] = [
            {"id": one["call_id"], "function": {"name": one["name"], "arguments": one["arguments"]}} for one in calls
        ]
    return items, message


def test_a_history_of_items_is_the_same_prompt_as_a_chats() -> None:
    random = Random(7)
    for _ in range(200):
        items: list[Item] = []
        expected: list[Item] = []
        for number in range(random.randint(1, 4)):
            items.append(user(f"q{number}"))
            expected.append({"role": "user", "content": f"q{number}"})
            answer, message = _turn(random, number)
            items += answer
            expected.append(message)
            for one in message.get("tool_calls", ()):
                items.append(output("x", one["id"]))
                expected.append({"role": "tool", "tool_call_id": one["id"], "content": "x"})
        templated = [for_template(message, "messages") for message in expected]
        assert messages(orjson.loads(orjson.dumps(items))) == templated
