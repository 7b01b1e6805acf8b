"""Views of turns: the viewer's text, a tool's result, a finished or growing answer.

Used by page.py. Independent of where turns come from. Invariants: a model's text reaches the page only through
markdown.py or as plain text; an update of a growing answer renders only its last block.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from html import escape
from math import exp
from typing import Final

from nicegui import ui

from .composer import ON_ENTER
from .conversation import Timing, TokenProbability, ToolCall, Turn
from .markdown import last_block, pieces
from .markdown_view import MarkdownView

_MAX_GROWING_CHARACTERS: Final = 32 << 10
"""A longer last block is shown as plain text until it is complete."""


@dataclass(frozen=True, slots=True)
class TurnActions:
    """A viewer's actions on the turn at an index."""

    edit: Callable[[int, str], Awaitable[None]]
    regenerate: Callable[[int], Awaitable[None]]
    continue_answer: Callable[[int], Awaitable[None]]
    show_version: Callable[[int, int], Awaitable[None]]
    """Shows the version with the given index."""
    answer_calls: Callable[[dict[str, str]], Awaitable[None]]
    """Takes results by call id."""


def show_user(turn: Turn, index: int, actions: TurnActions) -> None:
    with ui.element("section").classes("turn turn--user").props('aria-label="You"'):
        text = ui.label(turn.content).classes("turn__bubble").props("dir=auto")
        with ui.element("div").classes("turn__actions") as buttons:
            edit = _small_button("edit", "Edit and send again")
            _copy_button(turn.content)
            _offer_versions(turn, index, actions)
        edit.on("click", lambda: _edit(turn, index, actions, text, buttons))


def _edit(turn: Turn, index: int, actions: TurnActions, text: ui.label, buttons: ui.element) -> None:
    text.set_visibility(False)
    buttons.set_visibility(False)

    def close() -> None:
        editor.delete()
        text.set_visibility(True)
        buttons.set_visibility(True)

    with text.parent_slot.parent, ui.element("div").classes("turn__editor") as editor:  # type: ignore[union-attr]
        field = ui.textarea(value=turn.content).props('outlined autogrow autofocus aria-label="Edit the message"')
        field.classes("full-width")
        field.on("keydown", lambda event: actions.edit(index, str(event.args or "")), js_handler=ON_ENTER)
        with ui.element("div").classes("turn__editor-actions"):
            ui.button("Cancel", color=None, on_click=close).props("flat no-caps dense")
            send = ui.button("Send", on_click=lambda: actions.edit(index, str(field.value or "")))
            send.props("unelevated no-caps dense")


def show_tool_result(turn: Turn) -> None:
    section = ui.element("section").classes("turn").props('aria-label="Result of a tool"')
    with section, ui.element("details").classes("fold").props("open"):
        with ui.element("summary"):
            ui.label("Result of the tool")
        ui.label(turn.content).classes("fold__text mono").props("dir=auto")


class AnswerView:
    """Shows a model's answer. index: position of the turn in its chat"""

    def __init__(self, index: int, actions: TurnActions) -> None:
        self._index = index
        self._actions = actions
        self._rendered = 0
        """How many characters of the content are in finished blocks."""
        self._tail: MarkdownView | None = None
        self._call_labels: list[tuple[ui.label, ui.label]] = []
        """Name and arguments of each call."""
        with ui.element("section").classes("turn turn--answer").props('aria-label="Answer"') as self._section:
            with ui.element("details").classes("fold") as self._reasoning_fold:
                with ui.element("summary"):
                    self._reasoning_title = ui.label("Reasoning")
                self._reasoning = ui.label().classes("fold__text").props("dir=auto")
            self._reasoning_fold.set_visibility(False)
            self._blocks = ui.element("div").classes("prose")
            self._calls = ui.element("div").classes("calls")
            self._state = ui.label().classes("turn__state").props("role=status")
            self._foot = ui.element("div").classes("turn__foot")

    def show_state(self, text: str) -> None:
        """text: what the answer is waiting for; "" = nothing"""
        if self._state.text != text:
            self._state.set_text(text)
            self._state.set_visibility(bool(text))

    def grow(self, content: str, reasoning: str, calls: tuple[ToolCall, ...]) -> None:
        """Shows the answer so far."""
        self._show_reasoning(reasoning, "Reasoning …" if not content else "Reasoning")
        tail = content[self._rendered :]
        if len(tail) > _MAX_GROWING_CHARACTERS:
            self._show_tail(tail, is_plain=True)
        elif tail:
            begin = last_block(tail)
            if begin:
                self._show_tail(tail[:begin])
                self._tail = None
                self._rendered += begin
            self._show_tail(tail[begin:])
        if calls:
            self._show_calls(calls)

    def finish(self, turn: Turn, *, is_last: bool) -> None:
        """Shows the whole answer and its actions. is_last: whether it is its chat's last turn"""
        self.show_state("")
        self._show_reasoning(turn.reasoning, "Reasoning")
        self._blocks.clear()
        for piece in pieces(turn.content):
            self._tail = None
            self._show_tail(piece)
        self._show_calls(turn.tool_calls)
        with self._section:
            if turn.error:
                ui.label(turn.error).classes("turn__error").props("role=alert")
            if is_last and turn.tool_calls:
                self._ask_for_results(turn.tool_calls)
        self._foot.move(target_index=-1)
        with self._foot:
            if is_last and turn.can_be_continued:
                button = ui.button("Continue", icon="play_arrow", color=None).props("outline no-caps dense size=sm")
                button.on("click", lambda: self._actions.continue_answer(self._index))
            self._show_foot(turn)

    def _show_tail(self, text: str, *, is_plain: bool = False) -> None:
        if self._tail is None:
            with self._blocks:
                self._tail = MarkdownView()
        self._tail.show(text, is_plain=is_plain)

    def _show_reasoning(self, reasoning: str, title: str) -> None:
        if reasoning:
            self._reasoning_fold.set_visibility(True)
            self._reasoning_title.set_text(title)
            self._reasoning.set_text(reasoning)

    def _show_calls(self, calls: tuple[ToolCall, ...]) -> None:
        for _ in calls[len(self._call_labels) :]:
            with self._calls, ui.element("details").classes("fold"):
                with ui.element("summary"):
                    ui.label("Calls the tool")
                    name = ui.label().classes("mono fold__name")
                self._call_labels.append((name, ui.label().classes("fold__text mono").props("dir=ltr")))
        for (name, arguments), call in zip(self._call_labels, calls, strict=False):
            name.set_text(call.name)
            arguments.set_text(call.arguments)

    def _ask_for_results(self, calls: tuple[ToolCall, ...]) -> None:
        fields: dict[str, ui.textarea] = {}
        with ui.element("div").classes("results"):
            for call in calls:
                field = (
                    ui.textarea(f"Result of {call.name}").props("outlined dense autogrow").classes("full-width mono")
                )
                fields[call.id] = field
            send = ui.button("Send the results", icon="reply").props("unelevated no-caps dense")
        send.on(
            "click",
            lambda: self._actions.answer_calls({name: str(field.value or "") for name, field in fields.items()}),
        )

    def _show_foot(self, turn: Turn) -> None:
        _copy_button(turn.content)
        _small_button("refresh", "Generate again").on("click", lambda: self._actions.regenerate(self._index))
        if turn.probabilities:
            self._offer_probabilities(turn)
        _offer_versions(turn, self._index, self._actions)
        for text in _facts(turn):
            ui.label(text).classes("turn__fact")

    def _offer_probabilities(self, turn: Turn) -> None:
        tokens: ui.html | None = None

        def toggle() -> None:
            nonlocal tokens
            if tokens is None:
                with self._blocks.parent_slot.parent:  # type: ignore[union-attr]  # it has one
                    tokens = ui.html("".join(map(_token_html, turn.probabilities)), sanitize=True).classes("tokens")
                tokens.move(self._blocks.parent_slot.parent, 1)  # type: ignore[union-attr]
            else:
                tokens.delete()
                tokens = None
            self._blocks.set_visibility(tokens is None)
            button.props(f"aria-pressed={'false' if tokens is None else 'true'}")

        button = _small_button("percent", "Probabilities of the tokens").on("click", toggle)


def _facts(turn: Turn) -> list[str]:
    facts = _timing(turn.timing) if turn.timing is not None else []
    if turn.recovery_ms is not None:
        facts.append(f"continued {turn.recovery_ms:.0f} ms after its engine died")
    if turn.finish_reason and turn.finish_reason not in ("stop", "tool_calls"):
        facts.append({"length": "stopped at max tokens"}.get(turn.finish_reason, turn.finish_reason))
    return facts


def _timing(timing: Timing) -> list[str]:
    speed = (
        [f"{timing.tokens_per_s:.{0 if timing.tokens_per_s >= 100 else 1}f} tokens/s"] if timing.tokens_per_s else []
    )
    cached = f" ({timing.cached_tokens} cached)" if timing.cached_tokens else ""
    counts = f"prompt {timing.prompt_tokens}{cached}, answer {timing.output_tokens} tokens"
    return [*speed, f"first token {timing.first_token_ms:.0f} ms", counts]


def _token_html(entry: TokenProbability) -> str:
    """One token, with its probability as an underline in five steps and the most likely tokens as its title."""
    step = min(4, int(exp(min(0.0, entry.logprob)) * 5))
    lines = [f"{token!r} {exp(min(0.0, logprob)):.1%}" for token, logprob in entry.top]
    title = "\n".join([f"{entry.token!r} {exp(min(0.0, entry.logprob)):.1%}", *(["", *lines] if lines else [])])
    return f'<span class="token token--{step}" title="{escape(title)}">{escape(entry.token)}</span>'


def _small_button(icon: str, label: str) -> ui.button:
    button = (
        ui.button(icon=icon, color=None).props(f'flat round dense size=sm aria-label="{label}"').classes("small-button")
    )
    button.tooltip(label)
    return button


def _offer_versions(turn: Turn, index: int, actions: TurnActions) -> None:
    """Buttons for the previous and next version, if there are others."""
    if not turn.others:
        return
    count = len(turn.others) + 1
    with ui.element("div").classes("turn__versions").props('role=group aria-label="Versions"'):
        for icon, label, place in (
            ("chevron_left", "Earlier version", turn.place - 1),
            ("chevron_right", "Later version", turn.place + 1),
        ):
            button = _small_button(icon, label)
            button.set_enabled(0 <= place < count)
            button.on("click", lambda place=place: actions.show_version(index, place))
            if icon == "chevron_left":
                ui.label(f"{turn.place + 1} of {count}")


def _copy_button(text: str) -> None:
    _small_button("content_copy", "Copy").classes("copy-button").props["data-copy"] = text
