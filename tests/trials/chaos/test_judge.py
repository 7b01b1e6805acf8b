"""The judge can fail: lost, repeated and changed tokens are told apart, on every protocol's kind of outcome."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trials.chaos.judge import Verdict, judge, judge_prefix
from trials.chaos.outcome import Collector, Outcome, Piece

TOKENS = Outcome(text="abcdef", token_ids=(1, 2, 3, 4, 5, 6), finish_reason="length", usage=(4, 6))
TEXT = Outcome(text="abcdef", finish_reason="length", usage=(4, 6))
LOGPROBS = Outcome(
    text="abcdef", logprobs=tuple((char, -0.5) for char in "abcdef"), finish_reason="length", usage=(4, 6)
)


def cut(outcome: Outcome, keep: list[int]) -> Outcome:
    """The tokens at these positions, as a stream of the same kind."""
    ids = outcome.token_ids
    return replace(
        outcome,
        text="".join(outcome.text[i] for i in keep),
        token_ids=None if ids is None else tuple(ids[i] for i in keep),
        logprobs=tuple(outcome.logprobs[i] for i in keep) if outcome.logprobs else (),
    )


def numbers(verdict: Verdict) -> tuple[int, int, int]:
    return verdict.lost, verdict.repeated, verdict.changed


@pytest.mark.parametrize("whole", [TOKENS, TEXT, LOGPROBS])
class TestTokens:
    def test_equal_streams_are_clean(self, whole: Outcome) -> None:
        assert judge(whole, cut(whole, list(range(6)))).is_clean

    def test_a_gap_is_lost(self, whole: Outcome) -> None:
        assert numbers(judge(whole, cut(whole, [0, 1, 4, 5]))) == (2, 0, 0)

    def test_a_missing_end_is_lost(self, whole: Outcome) -> None:
        assert numbers(judge(whole, cut(whole, [0, 1, 2]))) == (3, 0, 0)

    def test_tokens_sent_twice_are_repeated(self, whole: Outcome) -> None:
        assert numbers(judge(whole, cut(whole, [0, 1, 2, 1, 2, 3, 4, 5]))) == (0, 2, 0)

    def test_an_error_loses_what_did_not_come(self, whole: Outcome) -> None:
        verdict = judge(whole, replace(cut(whole, [0, 1]), finish_reason=None, error="the engine died"))
        assert numbers(verdict) == (4, 0, 0) and "the engine died" in verdict.reason

    def test_an_error_after_the_last_token_loses_one(self, whole: Outcome) -> None:
        assert numbers(judge(whole, replace(whole, error="the connection broke"))) == (1, 0, 0)

    def test_a_beginning_is_a_prefix(self, whole: Outcome) -> None:
        assert judge_prefix(whole, replace(cut(whole, [0, 1, 2]), finish_reason=None, usage=None)).is_clean
        assert judge_prefix(whole, Outcome()).is_clean

    def test_a_gap_is_no_prefix(self, whole: Outcome) -> None:
        assert judge_prefix(whole, cut(whole, [0, 2])).total > 0


def test_a_token_of_another_run_is_changed() -> None:
    assert numbers(judge(TOKENS, replace(TOKENS, token_ids=(1, 2, 9, 4, 5, 6)))) == (0, 0, 1)
    assert numbers(judge(TEXT, replace(TEXT, text="abXdef"))) == (0, 0, 1)
    assert judge_prefix(TOKENS, replace(TOKENS, token_ids=(1, 9))).total > 0


@pytest.mark.parametrize(
    "different",
    [{"finish_reason": "stop"}, {"usage": (4, 7)}, {"usage": None}, {"text": "abcdeX"}, {"cumulative_logprob": -1.0}],
)
def test_everything_counts_although_the_tokens_are_equal(different: dict[str, object]) -> None:
    verdict = judge(TOKENS, replace(TOKENS, **different))  # type: ignore[arg-type]
    assert numbers(verdict) == (0, 0, 1) and next(iter(different)) in verdict.reason


def test_another_logprob_is_changed() -> None:
    logprobs = (("a", -0.25), *LOGPROBS.logprobs[1:])
    assert numbers(judge(LOGPROBS, replace(LOGPROBS, logprobs=logprobs))) == (0, 0, 1)
    assert judge_prefix(LOGPROBS, replace(LOGPROBS, logprobs=logprobs[:2], text="ab")).total > 0


def test_a_stream_without_any_token_ids_lost_them_all() -> None:
    assert numbers(judge(TOKENS, Outcome(error="no end"))) == (6, 0, 0)
    assert judge(TOKENS, replace(TOKENS, token_ids=None)).total > 0


def test_the_cut_of_a_stream_does_not_matter() -> None:
    pieces = [Piece("a", (1,)), Piece("", (2, 3)), Piece("bc", ()), Piece("", (), (), "stop", (1, 3))]
    whole = Collector()
    whole.add(Piece("abc", (1, 2, 3), (), "stop", (1, 3)))
    seen = Collector()
    for piece in pieces:
        seen.add(piece)
    assert seen.outcome() == whole.outcome()


def test_two_long_answers_that_differ_are_compared_at_once() -> None:
    """As characters, with log probabilities: an alignment of all would take hours."""
    numbers_shown = "".join(f'{{"logprob": -{place % 89}.25}}' for place in range(5000))
    whole = Outcome(parts=(("0 logprobs", numbers_shown),))
    verdict = judge(whole, Outcome(parts=(("0 logprobs", f"x{numbers_shown[7:-9]}y"),)))
    assert verdict.lost == 14 and verdict.changed > 0 and not verdict.repeated
