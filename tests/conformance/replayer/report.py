"""Prints the outcome of a replay for a person.

For: the command line. Does not know: how outcomes came about.
"""

from __future__ import annotations

from .compare import TranscriptOutcome
from .run import Report


def print_report(report: Report, partial: bool) -> int:
    """Returns the exit code: 0 when every difference is by design and, in a full run, no rule is stale."""
    for transcript in report.transcripts:
        _print_transcript(transcript)
    stale = () if partial else report.stale_rules
    for rule in stale:
        print(f"stale rule '{rule.name}' ({rule.command or 'every command'}): nothing needs it")
    print(summary(report))
    return int(bool(stale) or any(transcript.differs for transcript in report.transcripts))


def summary(report: Report) -> str:
    count = len(report.transcripts)
    matching = sum(transcript.matches for transcript in report.transcripts)
    by_design = sum(transcript.by_design for transcript in report.transcripts)
    differing = count - matching - by_design
    text = f"conformance: {matching} of {count} transcripts match"
    return f"{text}; {by_design} match except by design (docs/conformance.md), {differing} differ"


def _print_transcript(transcript: TranscriptOutcome) -> None:
    differing = [outcome for outcome in transcript.commands if outcome.diff]
    total = len(transcript.commands)
    if transcript.matches:
        print(f"{transcript.name}: match ({total} commands)")
        return
    if transcript.by_design:
        names = sorted({rule.name for outcome in transcript.commands for rule in outcome.rules})
        print(f"{transcript.name}: match except by design: {', '.join(names)}")
        return
    print(f"{transcript.name}: {len(differing)} of {total} commands differ")
    for outcome in differing:
        print(f"  line {outcome.command.line}: $ {outcome.command.text[:150]}")
        print("".join(f"    {line}\n" for line in outcome.diff.splitlines()))
