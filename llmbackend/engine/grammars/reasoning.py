"""What part of an output is reasoning, as a function of its tokens.

For: row_constraint.py. Does not know: grammars, masks. Invariant: a progress is made from the one before it and one
token, so that the same tokens give the same progress in every batch, after a draft and after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from ..infer_request import Reasoning


class Phase(Enum):
    START = auto()
    """The output may still begin with the start sequence."""
    REASONING = auto()
    ANSWER = auto()


@dataclass(frozen=True, slots=True)
class Progress:
    """Where an output is.

    phase
    num_matched    tokens at the output's end that begin the start sequence (START) or the end sequence (REASONING)
    num_reasoning  tokens since the reasoning began, the start sequence not counted
    """

    phase: Phase
    num_matched: int = 0
    num_reasoning: int = 0


ANSWERING = Progress(Phase.ANSWER)


def begin(reasoning: Reasoning | None) -> Progress:
    """Before the first token of the output."""
    if reasoning is None:
        return ANSWERING
    if reasoning.is_open:
        return Progress(Phase.REASONING)
    return Progress(Phase.START) if reasoning.start_token_ids else ANSWERING


def advance(reasoning: Reasoning, progress: Progress, token_id: int) -> Progress:
    """Behind one more token of the output."""
    if progress.phase is Phase.ANSWER:
        return progress
    if progress.phase is Phase.START:
        if token_id != reasoning.start_token_ids[progress.num_matched]:
            return ANSWERING
        num_matched = progress.num_matched + 1
        is_whole = num_matched == len(reasoning.start_token_ids)
        return Progress(Phase.REASONING) if is_whole else Progress(Phase.START, num_matched)
    num_matched = _matched(reasoning.end_token_ids, progress.num_matched, token_id)
    if num_matched == len(reasoning.end_token_ids):
        return ANSWERING
    return Progress(Phase.REASONING, num_matched, progress.num_reasoning + 1)


def forced_token(reasoning: Reasoning, progress: Progress) -> int | None:
    """The next token of the end sequence, where the reasoning's limit is reached."""
    limit = reasoning.max_tokens
    if progress.phase is not Phase.REASONING or limit is None or progress.num_reasoning < limit:
        return None
    return reasoning.end_token_ids[progress.num_matched]


def _matched(sequence: tuple[int, ...], num_matched: int, token_id: int) -> int:
    """How many tokens at the end of (sequence[:num_matched], token_id) begin the sequence."""
    text = (*sequence[:num_matched], token_id)
    return next(n for n in range(len(text), -1, -1) if text[len(text) - n :] == sequence[:n])
