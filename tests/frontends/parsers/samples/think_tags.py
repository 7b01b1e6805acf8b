"""Reasoning in `<think>` tags."""

from __future__ import annotations

from llmbackend.frontends.generation.parsers import REASONING_FORMATS

from ..sample import Sample

_TAGS = ("<think>", "</think>")
_NAMES = [name for name, table in REASONING_FORMATS.items() if (table.start, table.end) == _TAGS]

SAMPLES = tuple(
    Sample(reasoning=name, text=text, special=special, reasoning_is_open=is_open, reasons=reasons, content=content)
    for name in _NAMES
    for special in ((), _TAGS)
    for text, is_open, reasons, content in (
        ("<think>\nHm, 2 < 3 </b>.\n</think>\n\nYes.", False, "\nHm, 2 < 3 </b>.\n", "\n\nYes."),
        ("\n<think></think>Yes.", False, "", "Yes."),
        ("<think>never closed", False, "never closed", ""),
        ("Hm.\n</think>\n\nYes.", True, "Hm.\n", "\n\nYes."),
        ("<think>\nrepeated</think>Yes.", True, "\nrepeated", "Yes."),
        ("</think>Yes.", True, "", "Yes."),
        ("Ä 🌦 never closed <", True, "Ä 🌦 never closed <", ""),
        ("No <thinking> at all.", False, "", "No <thinking> at all."),
        ("", True, "", ""),
    )
)
