"""Lost, repeated or changed tokens: compares one stream with the same request on an undisturbed server.

Used by every round. Independent of how the streams were produced. Invariant: a verdict is clean only if text, token
ids, logprobs, finish reason, usage, cumulative logprob and parts are all equal; each difference counts at least once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from .outcome import Outcome

_MOST_COMPARED = 1_000_000
"""Pairs of units that are aligned. An alignment takes the square of that and more: two answers with log probabilities,
as characters, would take hours."""


@dataclass(frozen=True)
class Verdict:
    """Tokens (characters, where a protocol tells no tokens) that are missing, doubled or different."""

    lost: int = 0
    repeated: int = 0
    changed: int = 0
    reason: str = ""

    @property
    def is_clean(self) -> bool:
        return self.total == 0

    @property
    def total(self) -> int:
        return self.lost + self.repeated + self.changed


def judge(expected: Outcome, seen: Outcome) -> Verdict:
    """A stream that had to be as undisturbed. One that ended with an error lost at least one token."""
    if seen == expected:
        return Verdict()
    lost, repeated, changed = _compare(*_units(expected, seen))
    if seen.error is not None:
        return Verdict(max(lost, 1), repeated, changed, f"error: {seen.error} {seen.code}".strip())
    names = [name for name in vars(expected) if getattr(expected, name) != getattr(seen, name)]
    if lost + repeated + changed == 0:
        changed = len(names)
    return Verdict(lost, repeated, changed, f"differs in {', '.join(names)}")


def judge_prefix(expected: Outcome, seen: Outcome) -> Verdict:
    """A stream that was given up, or had to fail: what came must be how the undisturbed one begins."""
    if expected.parts:
        return _judge_parts(dict(expected.parts), dict(seen.parts))
    whole, part = _units(expected, seen)
    beginning = Outcome(expected.text[: len(seen.text)], None, expected.logprobs[: len(seen.logprobs)])
    if part == whole[: len(part)] and (seen.text, seen.logprobs) == (beginning.text, beginning.logprobs):
        return Verdict()
    lost, repeated, changed = _compare(whole[: len(part)], part)
    return Verdict(lost, repeated, max(changed, 0 if lost + repeated else 1), "no prefix of the undisturbed stream")


def _judge_parts(expected: dict[str, str], seen: dict[str, str]) -> Verdict:
    """Each part must be how the undisturbed one begins."""
    wrong = sorted(name for name, text in seen.items() if not expected.get(name, "").startswith(text))
    return Verdict(
        changed=len(wrong), reason=f"no beginnings of the undisturbed parts: {', '.join(wrong)}" if wrong else ""
    )


def _units(expected: Outcome, seen: Outcome) -> tuple[Sequence[Any], Sequence[Any]]:
    """The finest thing that both tell: token ids, else log probabilities (one per token), else characters."""
    if expected.parts:
        return _shown(expected.parts), _shown(seen.parts)
    if expected.token_ids is not None and (seen.token_ids is not None or not seen.text):
        return expected.token_ids, seen.token_ids or ()
    if expected.logprobs:
        return [repr(entry) for entry in expected.logprobs], [repr(entry) for entry in seen.logprobs]
    return expected.text, seen.text


def _shown(parts: tuple[tuple[str, str], ...]) -> str:
    return "\n".join(f"{name}: {text}" for name, text in parts)


def _compare(expected: Sequence[Any], seen: Sequence[Any]) -> tuple[int, int, int]:
    """(lost, repeated, changed). What was added counts as repeated; a replaced run as changed, its rest as lost or
    repeated."""
    expected, seen = _without_common_ends(expected, seen)
    if len(expected) * len(seen) > _MOST_COMPARED:
        replaced = min(len(expected), len(seen))
        return len(expected) - replaced, len(seen) - replaced, replaced
    lost = repeated = changed = 0
    for _, begin, end, seen_begin, seen_end in SequenceMatcher(None, expected, seen, autojunk=False).get_opcodes():
        if list(expected[begin:end]) == list(seen[seen_begin:seen_end]):
            continue
        gone, come = end - begin, seen_end - seen_begin
        changed += min(gone, come)
        lost += max(gone - come, 0)
        repeated += max(come - gone, 0)
    return lost, repeated, changed


def _without_common_ends(expected: Sequence[Any], seen: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    shorter = min(len(expected), len(seen))
    begin = next((place for place in range(shorter) if expected[place] != seen[place]), shorter)
    most = shorter - begin
    end = next((place for place in range(most) if expected[-1 - place] != seen[-1 - place]), most)
    return expected[begin : len(expected) - end], seen[begin : len(seen) - end]
