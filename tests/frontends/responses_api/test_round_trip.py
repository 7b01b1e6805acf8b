"""What an answer wrote as items is taken as input again, and is the prompt that a chat's history of it gives."""

from __future__ import annotations

from random import Random
from typing import Any

import orjson
import pytest

from llmbackend.frontends.generation.answer import Answer
from llmbackend.frontends.generation.sealed_reasoning import FIXED_KEY
from llmbackend.frontends.generation.tensors import Delta
from llmbackend.frontends.openai.messages import for_template
from llmbackend.frontends.openai.responses_api.response_state import ResponseState
from tests.frontends.parsers.laws import LENGTHS, changed
from tests.frontends.parsers.sample import cut, tokens
from tests.frontends.parsers.samples import SAMPLES

from .parsed import messages
from .test_event_writer import FORMATS, IDENTITY, deltas_of, plan_of, text_tokens

NUM_TEXTS = 30
"""For each format, over its samples and changed ones."""
Item = dict[str, Any]
QUESTION: Item = {"role": "user", "content": "?"}


def answered(name: str, random: Random, number: int) -> tuple[list[Item], Item]:
    """An answer as items, and as a chat's message."""
    samples = [sample for sample in SAMPLES if name == sample.tools and (sample.reasoning or name != "openai")]
    assert samples, "harmony's calls come with its reasoning, as detection finds them"
    sample = samples[number % len(samples)]
    text = sample.text if number < len(samples) else changed(sample.text, samples, random)
    plan = plan_of(sample)
    parts = list(cut(tokens(sample, text), random, random.choice(LENGTHS)))
    deltas: list[Delta] = deltas_of(text_tokens(sample, parts), "stop", random)
    state, answer = ResponseState(IDENTITY, plan, seal=FIXED_KEY.seal), Answer(plan, IDENTITY.id, 0)
    for delta in deltas:
        state.add(delta)
        answer.add(delta)
    state.end()
    items: list[Item] = orjson.loads(orjson.dumps(state.output()))
    return items, answer.message()


@pytest.mark.parametrize("form", ["open", "sealed"])
@pytest.mark.parametrize("name", FORMATS)
def test_items_are_the_prompt_of_a_chats_message(name: str, form: str) -> None:
    random = Random(f"{name} {form}")
    for number in range(NUM_TEXTS):
        items, message = answered(name, random, number)
        if form == "sealed":
            items = [{field: value for field, value in item.items() if field != "content"}
                     if item["type"] == "reasoning" else item for item in items]  # fmt: skip
        expected = [for_template(message, "messages[1]")] if items else []
        assert messages([QUESTION, *items])[1:] == expected
