"""The demo model's training text and its exam: repeatable, right, and without anything in common."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))


def chats(side: str, count: int) -> Iterator[Any]:
    from demo_corpus import corpus
    from demo_corpus.dialogue import Dialogue
    from demo_corpus.source import Source

    source = Source("test", side)
    samples = (corpus.draw(source) for _ in range(count))
    return (sample for sample in samples if isinstance(sample, Dialogue))


def asked(messages: Any) -> str:
    return json.dumps([message["content"] for message in messages if message["role"] != "assistant"]).casefold()


def test_samples_depend_only_on_the_seed() -> None:
    from demo_corpus import corpus
    from demo_corpus.source import Source

    for name, (make, _) in corpus.SKILLS.items():
        assert make(Source("7")) == make(Source("7")), name


def test_no_question_of_the_exam_is_in_the_training_text() -> None:
    from demo_corpus.exam import questions

    trained = {asked(chat.messages[: at + 1]) for chat in chats("training", 4000) for at in range(len(chat.messages))}
    assert len(trained) > 4000
    assert not [each for each in questions() if asked(each.messages) in trained]


def test_a_pattern_stands_for_all_its_wordings() -> None:
    from demo_corpus.source import wordings_of

    assert wordings_of("(Say|Write)[ only] {}") == ("Say only {}", "Say {}", "Write only {}", "Write {}")
    assert wordings_of("Count to {b}.") == ("Count to {b}.",)


def test_a_wording_has_one_side() -> None:
    from demo_corpus.source import Source
    from demo_corpus.task_wordings import COUNT_DOWN

    trained, asked_in_exam = (
        {Source(str(seed), side).wording(COUNT_DOWN).casefold().strip(" .,!?") for seed in range(2000)}
        for side in ("training", "exam")
    )
    assert len(asked_in_exam) > 20
    assert not trained & asked_in_exam


def test_values_have_one_side() -> None:
    from demo_corpus.dialogue import pseudo_word
    from demo_corpus.source import Source, side_of
    from demo_corpus.tasks import calculation, code
    from demo_corpus.words import CITIES, NAMES

    for draw in (
        pseudo_word,
        code,
        calculation,
        lambda source: source.value(NAMES),
        lambda source: source.value(CITIES),
        lambda source: source.number(0, 999),
    ):
        sides = [{str(draw(Source(str(seed), side))) for seed in range(300)} for side in ("training", "exam")]
        assert {side_of(text) for text in sides[0]} == {"training"}
        assert {side_of(text) for text in sides[1]} == {"exam"}
        assert not sides[0] & sides[1]


def test_the_exam_has_twelve_kinds_and_is_the_same_each_time() -> None:
    from demo_corpus.exam import QUESTIONS_OF_A_KIND, questions

    first = questions()
    assert first == questions()
    kinds = [question.kind for question in first]
    assert len(set(kinds)) == 12
    assert {kinds.count(kind) for kind in kinds} == {QUESTIONS_OF_A_KIND}
    assert len({json.dumps(question.messages) for question in first}) == len(first)


def test_right_answers_are_right_and_others_wrong() -> None:
    from demo_corpus.corpus import segments
    from demo_corpus.dialogue import Dialogue
    from demo_corpus.exam import questions

    for question in questions():
        written = segments(Dialogue((*question.messages, question.expected), question.tools))[-1][0]
        answer = written.removesuffix("<|im_end|>")
        assert question.is_right(answer), question
        assert not question.is_right(answer[:-3]), question
        assert not question.is_right(answer + " and more"), question
        assert not question.is_right(""), question


def test_json_may_be_written_in_other_ways() -> None:
    from demo_corpus.exam import questions

    question = next(each for each in questions() if each.kind == "JSON by schema")
    values = json.loads(question.expected["content"])
    assert question.is_right(json.dumps(values, indent=2, sort_keys=True))
    name = next(iter(values))
    assert not question.is_right(json.dumps(values | {name: "another"}))
