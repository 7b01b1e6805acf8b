"""Intended differences, each expressed as a substitution in Triton's answer, with its reason.

Used by the comparison. Independent of how answers are produced. Invariant: a rule applies only to the cases and the
text it names; nothing else in the answer may differ.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rule:
    """`release`: the Triton release whose behaviour it is, "main", or "own".

    `cases`: a regular expression of case names. `triton`, a regular expression in Triton's answer, becomes `ours`;
    an empty `triton` stands for the whole answer. What `only_ours` matches is taken out of our answer."""

    name: str
    reason: str
    release: str
    cases: re.Pattern[str]
    triton: re.Pattern[str]
    ours: str
    only_ours: re.Pattern[str] | None

    def apply(self, theirs: str, ours: str) -> tuple[str, str]:
        """Both answers, as they should be equal."""
        if self.only_ours is not None:
            return theirs, self.only_ours.sub("", ours)
        return (self.triton.sub(self.ours, theirs) if self.triton.pattern else self.ours), ours


def read_rules(path: Path) -> list[Rule]:
    return [
        Rule(
            name=entry["name"],
            reason=entry["reason"],
            release=entry["release"],
            cases=re.compile(change["cases"]),
            triton=re.compile(change.get("triton", "")),
            ours=change.get("ours", ""),
            only_ours=re.compile(change["only_ours"]) if "only_ours" in change else None,
        )
        for entry in tomllib.loads(path.read_text()).get("difference", [])
        for change in entry["change"]
    ]
