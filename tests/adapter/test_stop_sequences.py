"""Stop words as token ids: found wherever they are cut, and only in what was generated."""

from __future__ import annotations

import random

from llmbackend.adapter.output_assembler import OutputAssembler
from llmbackend.adapter.sampling import GenerationParams
from llmbackend.adapter.stop_sequences import StopSequences
from llmbackend.adapter.text import ByteText
from llmbackend.engine.infer_request import SamplingParams, StepOutput


def first_end(sequences: tuple[tuple[int, ...], ...], tokens: list[int]) -> int | None:
    """By looking at every beginning of the tokens: the length of the first one that ends with a sequence."""
    for length in range(1, len(tokens) + 1):
        if any(tuple(tokens[:length][-len(one) :]) == one for one in sequences):
            return length
    return None


def test_the_first_sequence_that_is_complete_ends_it() -> None:
    draw = random.Random(0)
    for _ in range(300):
        sequences = tuple(tuple(draw.choices(range(3), k=draw.randint(1, 4))) for _ in range(draw.randint(0, 3)))
        tokens = draw.choices(range(3), k=draw.randint(0, 20))
        search = StopSequences(sequences)
        found = next((index + 1 for index, token in enumerate(tokens) if search.push(token)), None)
        assert found == first_end(sequences, tokens)


def test_a_sequence_ends_a_generation_and_its_tokens_stay_however_the_steps_are_cut() -> None:
    params = GenerationParams(SamplingParams(), stop_sequences=(tuple(b"END"),))
    for step_size in (1, 2, 5, 20):
        one = OutputAssembler(params, ByteText().detokenizer([], skip_special_tokens=True))
        tokens = list(b"ab END cd")
        for start in range(0, len(tokens), step_size):
            one.push(StepOutput("r", tuple(tokens[start : start + step_size])))
            if one.finish_reason is not None:
                break
        chunk = one.take()
        assert (chunk.token_ids, "".join(chunk.text), chunk.finish_reason) == (list(b"ab END"), "ab END", "stop")
        assert not chunk.ends_with_stop_token
