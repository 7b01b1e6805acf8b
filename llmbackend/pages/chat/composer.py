"""Composer: the message field, the model selector, and the button to send and stop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from nicegui import events, ui

ON_ENTER: Final = """(event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  emit(event.target.value);
}"""
"""Handler of a text field's `keydown`: emits the text when Enter is pressed."""


class Composer:
    def __init__(
        self,
        on_send: Callable[[str], Awaitable[None]],
        on_stop: Callable[[], None],
        on_model: Callable[[str], Awaitable[None]],
        may_send: Callable[[], bool],
    ) -> None:
        self._may_send = may_send
        self._on_send = on_send
        self._on_stop = on_stop
        self._is_busy = False
        with ui.element("form").classes("composer").props('aria-label="Message"').on("submit.prevent", lambda: None):
            self._field = ui.textarea(placeholder="Ask something").classes("composer__field")
            self._field.props('borderless autogrow autofocus dense aria-label="Message" maxlength=200000')
            self._field.on("keydown", self._on_enter, js_handler=ON_ENTER)
            with ui.element("div").classes("composer__bar"):
                self.model = ui.select([], on_change=lambda event: on_model(str(event.value or "")))
                self.model.classes("composer__model").props('dense borderless options-dense aria-label="Model"')
                ui.space()
                self._problem = ui.label().classes("composer__problem").props("role=alert")
                self._problem.bind_visibility_from(self._problem, "text", bool)
                ui.label("Enter to send, Shift+Enter for a new line").classes("composer__hint")
                self._button = ui.button(icon="arrow_upward", on_click=self._on_button)
                self._button.props('round unelevated dense aria-label="Send"')

    def show_models(self, names: Sequence[str], chosen: str) -> None:
        self.model.set_options(list(names), value=chosen if chosen in names else next(iter(names), None))

    def show_busy(self, is_busy: bool) -> None:
        self._is_busy = is_busy
        self._button.set_icon("stop" if is_busy else "arrow_upward")
        self._button.props(f'aria-label="{"Stop" if is_busy else "Send"}"')
        self._button.classes(**{"add" if is_busy else "remove": "composer__stop"})

    def show_problem(self, text: str) -> None:
        """text: why nothing can be sent; "" = nothing prevents it"""
        self._problem.set_text(text)

    async def _on_enter(self, event: events.GenericEventArguments) -> None:
        if not self._is_busy:
            await self._send(str(event.args or ""))

    async def _on_button(self) -> None:
        if self._is_busy:
            self._on_stop()
        else:
            await self._send(str(self._field.value or ""))

    async def _send(self, text: str) -> None:
        if text.strip() and self._may_send():
            self._field.set_value("")
            await self._on_send(text)
