"""SettingsPanel: a chat's settings: system prompt, sampling, tools.

Used by page.py. Independent of requests. Invariant: an empty field means the server's default; an invalid value is
marked, does not change the settings, and blocks sending.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from nicegui import ui

from .conversation import JSON_SETTINGS, ChatSettings, json_setting


@dataclass(frozen=True, slots=True)
class _Number:
    name: str
    label: str
    minimum: float
    maximum: float | None
    step: float
    hint: str = ""


_NUMBERS: Final = (
    _Number("temperature", "Temperature", 0, 2, 0.1, "0: always the most likely token"),
    _Number("top_p", "Top p", 0, 1, 0.05),
    _Number("top_k", "Top k", 0, None, 1),
    _Number("min_p", "Min p", 0, 1, 0.05),
    _Number("max_tokens", "Max tokens", 1, None, 1),
    _Number("seed", "Seed", 0, None, 1, "the same seed, the same answer"),
    _Number("presence_penalty", "Presence penalty", -2, 2, 0.1),
    _Number("frequency_penalty", "Frequency penalty", -2, 2, 0.1),
)
_WHOLE: Final = frozenset({"top_k", "max_tokens", "seed"})
_TOOLS_EXAMPLE: Final = """[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", \
"properties": {"city": {"type": "string"}}, "required": ["city"]}}}]"""
_SCHEMA_EXAMPLE: Final = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'


class SettingsPanel:
    """Calls `on_change` with the settings after each change by the viewer."""

    def __init__(self, on_change: Callable[[ChatSettings], Awaitable[None]]) -> None:
        self._on_change = on_change
        self._settings = ChatSettings()
        self._fields: dict[str, Any] = {}
        self._is_showing = False
        with (
            ui.right_drawer(value=False, bordered=True).classes("settings").props("width=320 breakpoint=1100") as drawer
        ):
            self.drawer = drawer
            with ui.element("div").classes("settings__head"):
                ui.label("Settings of this chat").classes("settings__title")
                ui.button(icon="close", color=None, on_click=drawer.hide).props(
                    'flat round dense aria-label="Close the settings"'
                ).classes("settings__close")
            self._fields["system"] = self._text("System prompt", "system", rows=4)
            ui.label("Sampling").classes("settings__section")
            with ui.element("div").classes("settings__numbers"):
                for number in _NUMBERS:
                    self._fields[number.name] = self._number(number)
            self._fields["stop"] = self._text("Stop strings, one per line", "stop", rows=2)
            self._fields["tools"] = self._json("Tools as JSON", "tools", 5, _TOOLS_EXAMPLE)
            self._fields["schema"] = self._json("JSON schema", "schema", 4, _SCHEMA_EXAMPLE)
            ui.label("Answers match this schema.").classes("muted")
            ui.label("Token probabilities").classes("settings__section")
            self._fields["with_probabilities"] = ui.switch(
                "Request token probabilities", on_change=lambda event: self._changed("with_probabilities", event.value)
            )
            ui.label("Shown below each answer, on its tokens.").classes("muted")

    @property
    def problem(self) -> str:
        """Error of the first invalid field; "" = all are valid."""
        problems = (_problem_of(name, self._fields[name].value) for name in JSON_SETTINGS)
        return next((problem for problem in problems if problem), "")

    def show(self, settings: ChatSettings) -> None:
        self._settings = settings
        self._is_showing = True
        for name, field in self._fields.items():
            field.set_value(getattr(settings, name))
        self._is_showing = False

    def _text(self, label: str, name: str, rows: int) -> ui.textarea:
        field = ui.textarea(label, on_change=lambda event: self._changed(name, event.value or ""))
        field.props(f"outlined dense debounce=400 rows={rows}").classes("full-width")
        return field

    def _json(self, title: str, name: str, rows: int, example: str) -> ui.textarea:
        """A field with its title above it, because a label inside it would cover scrolled text."""
        ui.label(title).classes("settings__section")
        field = self._text("", name, rows).classes("mono")
        field.props(f"aria-label='{title}' placeholder='{example}'")
        field.validation = lambda text: _problem_of(name, text)
        return field

    def _number(self, number: _Number) -> ui.number:
        field = ui.number(
            number.label,
            min=number.minimum,
            max=number.maximum,
            step=number.step,
            on_change=lambda event: self._changed(number.name, event.value),
        )
        field.props('outlined dense debounce=400 stack-label placeholder="default"')
        if number.hint:
            field.tooltip(number.hint)
        return field

    async def _changed(self, name: str, value: Any) -> None:
        if self._is_showing:
            return
        if name in _WHOLE and value is not None:
            value = int(value)
        if value == getattr(self._settings, name) or _problem_of(name, value):
            return
        self._settings = msgspec.structs.replace(self._settings, **{name: value})
        await self._on_change(self._settings)


def _problem_of(name: str, text: Any) -> str | None:
    """Error of a JSON field; None for valid JSON and for other fields."""
    if name not in JSON_SETTINGS or not text or not text.strip():
        return None
    try:
        json_setting(name, text)
    except ValueError as error:
        return str(error)
    return None
