"""Two results side by side, figure by figure: before a change and after it.

For part 4, and for reading returned results. Independent of which figure should be larger. Invariants: only lines about
the same measurement are compared; figures in only one result are named, not left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Line = dict[str, Any]
_NAMING = ("section", "shape", "label", "measure", "case", "configuration", "workload", "kernel", "kind", "batch",
           "prompt_tokens", "clients", "rows")  # fmt: skip
"""What a line is about; its other fields that are no whole numbers are figures."""
_LEFT_OUT = {"check_s", "seconds", "wall_s", "other_cores"}
MIN_CHANGE = 0.03
"""Smaller changes are noise between two runs."""


def comparison(before: list[Line], after: list[Line]) -> str:
    """A page with every figure that changed by more than MIN_CHANGE, and counts of the others."""
    rows, equal = [], 0
    old, new = _figures(before), _figures(after)
    for name in sorted(old.keys() & new.keys()):
        ratio = new[name] / old[name] if old[name] else float("nan")
        if abs(ratio - 1) <= MIN_CHANGE:
            equal += 1
        else:
            rows.append(f"| {name[0]} | {name[1]} | {old[name]:.6g} | {new[name]:.6g} | {ratio:.2f} |")
    head = ["## Before and after", "", f"{equal} figures changed by no more than {MIN_CHANGE:.0%}; the others:", ""]
    table = ["| of | figure | before | after | ratio |", "|---|---|---|---|---|", *rows]
    alone = [f"- only {when}: {name}" for when, name in _alone(before, after)]
    return "\n".join([*head, *table, *(["", *alone] if alone else [])]) + "\n"


def _alone(before: list[Line], after: list[Line]) -> Iterator[tuple[str, str]]:
    old, new = ({_name(line) for line in lines} for lines in (before, after))
    yield from (("before", name) for name in sorted(old - new))
    yield from (("after", name) for name in sorted(new - old))


def _figures(lines: list[Line]) -> dict[tuple[str, str], float]:
    """By what it is of and its name; the last one where a line comes twice."""
    return {
        (_name(line), name): value
        for line in lines
        for name, value in line.items()
        if isinstance(value, float) and name not in _LEFT_OUT
    }


def _name(line: Line) -> str:
    return " ".join(str(line[field]) for field in _NAMING if line.get(field, "") != "")
