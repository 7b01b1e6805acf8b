"""What a chat's requests say, and what is kept of turns that were written or generated again."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("nicegui")

from llmbackend.pages.chat.answer import Answer
from llmbackend.pages.chat.conversation import Chat, ChatSettings, Timing, ToolCall, Turn, UnfinishedAnswer

SCHEMA = '{"type": "object"}'


def a_chat(*texts: str, **settings: Any) -> Chat:
    chat = Chat.new(ChatSettings(model="m", **settings))
    for index, text in enumerate(texts):
        chat.turns.append(Turn(role="assistant" if index % 2 else "user", content=text))
    return chat


def contents(chat: Chat) -> list[str]:
    return [turn.content for turn in chat.turns]


def test_a_request_has_the_messages_and_only_the_settings_that_are_set() -> None:
    body = a_chat("q", system="s", schema=SCHEMA).request(Turn(role="assistant"))
    assert body["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}},
    }
    assert "temperature" not in body and "continue_final_message" not in body


def test_a_continued_answer_is_the_last_message() -> None:
    body = a_chat("q").request(Turn(role="assistant", content="half an"))
    assert body["messages"][-1] == {"role": "assistant", "content": "half an"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


def test_an_answer_without_text_is_no_message() -> None:
    chat = a_chat("q", "")
    chat.turns.append(Turn(role="assistant", error="refused"))
    assert len(chat.request(Turn(role="assistant"))["messages"]) == 1


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tools": "[1"}, "Tools is not JSON"),
        ({"tools": "{}"}, "Tools is a JSON object, expected a list"),
        ({"schema": "[]"}, "JSON schema is a JSON list, expected an object"),
    ],
)
def test_settings_that_are_not_json_are_named(settings: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        a_chat("q", **settings).request(Turn(role="assistant"))


def test_each_version_of_a_turn_comes_back_with_what_followed_it() -> None:
    chat = a_chat("first", "answer 1")
    for number in (2, 3):
        chat.add_user(f"version {number}", chat.cut(0))
        chat.turns.append(Turn(role="assistant", content=f"answer {number}"))
    assert contents(chat) == ["version 3", "answer 3"]
    for place, expected in ((0, ["first", "answer 1"]), (2, ["version 3", "answer 3"]), (1, ["version 2", "answer 2"])):
        chat.show_version(0, place)
        assert (contents(chat), chat.turns[0].place, len(chat.turns[0].others)) == (expected, place, 2)
    assert contents(Chat.of_json(chat.to_json())) == ["version 2", "answer 2"]


def test_only_ten_versions_are_kept_and_none_that_is_empty() -> None:
    chat = a_chat("0")
    for number in range(1, 20):
        chat.add_user(str(number), chat.cut(0))
    assert [tail[0].content for tail in chat.turns[0].others] == [str(number) for number in range(9, 19)]
    chat.turns.append(Turn(role="assistant", finish_reason="interrupted"))
    assert chat.cut(1).others == ()


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        (Turn(role="assistant", content="x", finish_reason="stopped by you"), True),
        (Turn(role="assistant", content="x", finish_reason="interrupted"), True),
        (Turn(role="assistant", content="x", finish_reason="length"), True),
        (Turn(role="assistant", content="x", error="broken"), True),
        (Turn(role="assistant", content="x", finish_reason="stop"), False),
        (Turn(role="assistant", finish_reason="length"), False),
        (Turn(role="assistant", content="x", tool_calls=(ToolCall("a", "b", "{"),), finish_reason="length"), False),
    ],
)
def test_an_answer_that_ended_early_can_be_continued(turn: Turn, expected: bool) -> None:
    assert turn.can_be_continued is expected


def test_a_continued_answer_keeps_what_it_had() -> None:
    base = Turn(role="assistant", content="one ", others=((Turn(role="assistant", content="other"),),), place=1)
    answer = Answer(base)
    answer.take({"choices": [{"delta": {"content": "two"}, "finish_reason": "stop"}]})
    turn = answer.turn()
    assert (turn.content, turn.finish_reason, turn.others, turn.place) == ("one two", "stop", base.others, 1)


def test_a_continued_answer_counts_the_tokens_of_both_parts() -> None:
    times_s = iter((10.0, 11.0, 12.0, 13.0))
    begun = Timing(first_token_ms=250.0, tokens_per_s=7.0, output_tokens=5, prompt_tokens=3, cached_tokens=1)
    answer = Answer(Turn(role="assistant", content="one ", timing=begun), lambda: next(times_s))
    assert answer.turn().timing == begun
    for text in ("two", "three"):
        usage = {"completion_tokens": 3, "prompt_tokens": 8}
        answer.take({"choices": [{"delta": {"content": text}}], "usage": usage})
    assert answer.turn().timing == Timing(250.0, 2.0, 8, 3, 1)
    unknown = Answer(Turn(role="assistant", content="one "))
    unknown.take({"choices": [{"delta": {"content": "two"}}], "usage": {"completion_tokens": 3}})
    assert unknown.turn().timing is None


def test_an_unfinished_answer_survives_the_storage() -> None:
    answer = UnfinishedAnswer.new(1, Turn(role="assistant", content="so far"))
    assert UnfinishedAnswer.of_json(answer.to_json()) == answer
    with pytest.raises(ValueError):
        UnfinishedAnswer.of_json('{"key": 1}')
