"""The results as a table: one row per fault, one column per server.

For docs/reliability.md. Independent of how the results were obtained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .faults import FAULTS


def markdown(lines: Sequence[dict[str, Any]]) -> str:
    servers = list(dict.fromkeys(line["server"] for line in lines))
    rows = [["fault", *servers], ["---"] * (len(servers) + 1)]
    for fault in FAULTS:
        found = [[line for line in lines if (line["server"], line["fault"]) == (name, fault)] for name in servers]
        if any(found):
            rows.append([fault, *map(_cell, found)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(lines: Sequence[dict[str, Any]]) -> str:
    """Streams over all rounds, and the slowest round's time."""
    if not lines:
        return "–"
    if any(line.get("one_process") for line in lines):
        return "has one process"
    counts = {way: sum(line[way] for line in lines) for way in ("lost", "changed", "hung")}
    ways = ", ".join(f"{count} {way}" for way, count in counts.items() if count) or "0"
    return f"{ways} of {sum(line['streams'] for line in lines)}; {_served([line['served_s'] for line in lines])}"


def _served(times_s: Sequence[float | None]) -> str:
    known = [time_s for time_s in times_s if time_s is not None]
    return f"{max(known):.1f} s" if len(known) == len(times_s) else "never"
