"""The Operations page: reads the server's feed with the viewer's key, and executes the viewer's actions.

Used by routes.py. Independent of how sections show data. Invariants: the page shows what the viewer's key may see, and
says what it may not; when the server is unreachable, the page says so and retries at growing intervals; only visible
pages read a feed, so that engines create no reports for hidden or closed ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from nicegui import background_tasks, context, ui

from ..api import ApiError
from .log_section import LogLine, LogSection
from .sections import KeysSection, ModelsSection, RequestsSection, SettingsSection
from .state import ServerState

if TYPE_CHECKING:
    from ..shell import Viewer

_EVENTS: Final = "/v2/engine/events?interval_ms=500&kinds=requests,steps,engine,load,model"
_SHOWN: Final = "operations_shown"
"""Browser event: whether the page's tab is visible."""
_SHOW_EVERY_S: Final = 0.5
_ASK_KEYS_EVERY_S: Final = 3.0
_RETRY_S: Final = (1.0, 2.0, 5.0, 10.0)
_NO_KEY: Final = 401
_FORBIDDEN: Final = 403


def build(viewer: Viewer) -> None:
    ui.add_css(Path(__file__).with_name("operations.css"))
    page = _OperationsPage(viewer)
    viewer.on_key(page.arrive)
    ui.on(_SHOWN, lambda event: page.start() if event.args else page.stop())
    context.client.on_delete(page.stop)


class _OperationsPage:
    """One open page."""

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer
        self._client = context.client
        self._server = ServerState()
        self._settings: Mapping[str, Any] = {}
        self._refusal = ""
        """Why the key may not read the settings; "" = it may."""
        self._following: asyncio.Task[None] | None = None
        with ui.element("div").classes("page ops"):
            with ui.element("h1").classes("ops-title"):
                ui.label("Operations")
            self._banner = ui.label().classes("ops-banner").props("role=status")
            self._banner.bind_visibility_from(self._banner, "text", bool)
            self._models = ModelsSection(self._change_model)
            self._requests = RequestsSection(self._cancel)
            self._log = LogSection()
            self._keys = KeysSection()
            self._settings_section = SettingsSection()
        ui.timer(_SHOW_EVERY_S, self._show)
        ui.timer(_ASK_KEYS_EVERY_S, self._ask_keys)

    async def arrive(self) -> None:
        """Called when the viewer's key is known or has changed."""
        ui.run_javascript(f"document.onvisibilitychange = () => emitEvent('{_SHOWN}', !document.hidden)")
        self.start()

    def start(self) -> None:
        self.stop()
        self._following = background_tasks.create(self._follow(), name="operations feed")

    def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()

    # --- from the server ----------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Reads the feed until the page is closed or the key is refused."""
        failures = 0
        while True:
            try:
                await self._read_state()
                path = _EVENTS + ("" if self._refusal else ",log")
                async with contextlib.aclosing(self._viewer.api.stream("GET", path)) as events:
                    async for event in events:
                        failures = 0
                        self._say("")
                        await self._take(event.name, json.loads(event.data))
                why = "The server has closed the connection."
            except ApiError as error:
                if error.status == _NO_KEY:
                    self._say(str(error))
                    with self._client:
                        self._viewer.need_key()
                    return
                why = _sentence(str(error))
            pause_s = _RETRY_S[min(failures, len(_RETRY_S) - 1)]
            failures += 1
            self._server.lose()
            self._say(f"{why} Trying again in {pause_s:g} s.")
            await asyncio.sleep(pause_s)

    async def _read_state(self) -> None:
        """Reads what the feed does not contain. Raises ApiError, except for data that the key may not see."""
        self._server.take_index(await self._viewer.api.post("/v2/repository/index"))
        try:
            self._settings, self._refusal = await self._viewer.api.get("/v2/engine/settings"), ""
        except ApiError as error:
            if error.status != _FORBIDDEN:
                raise
            self._settings, self._refusal = {}, _sentence(str(error))
        with self._client:
            self._show_rights()
        await self._ask_keys()

    async def _take(self, name: str, data: Mapping[str, Any]) -> None:
        self._server.apply(name, data)
        if name == "snapshot":
            with self._client:
                self._log.clear()  # the retained lines follow
        elif name == "log":
            self._log.add(LogLine(data["time"], data["level"], data["text"]))
        elif name == "model":
            self._server.take_index(await self._viewer.api.post("/v2/repository/index"))

    async def _ask_keys(self) -> None:
        if self._refusal or not self._settings or self._following is None or self._following.done():
            return  # the page is hidden, or its key may not see the keys
        try:
            report = await self._viewer.api.get("/v2/engine/access")
        except ApiError:
            return  # reading the feed reports the error
        with self._client:
            self._keys.show(report)

    # --- to the browser -----------------------------------------------------------------------------------------------

    def _show(self) -> None:
        why_not = self._refusal
        if not why_not and self._settings and not self._settings["allows_load"]:
            why_not = "Loading and unloading models requires --model-control-mode=explicit."
        self._models.show(self._server, may_load=bool(self._settings) and not why_not, why_not=why_not)
        self._requests.show(self._server)
        self._log.show()

    def _show_rights(self) -> None:
        if self._refusal:
            for section in (self._log, self._keys, self._settings_section):
                section.refuse(self._refusal)
        else:
            self._log.allow()
            self._settings_section.show(self._settings)

    def _say(self, text: str) -> None:
        if self._banner.text != text:
            self._banner.text = text

    # --- the viewer's actions -----------------------------------------------------------------------------------------

    async def _change_model(self, row_id: str, verb: str) -> None:
        name = row_id.rpartition("/")[0]
        if verb == "unload" and not await _is_sure(f"Unload model '{name}'?", "Requests in flight are finished first."):
            return
        path = f"/v2/repository/models/{quote(name, safe='')}/{verb}"
        try:
            await self._viewer.api.post(path, timeout_s=None)
            ui.notify(f"Model '{name}' is loaded." if verb == "load" else f"Model '{name}' is being unloaded.")
        except ApiError as error:
            close = {"label": "Close", "color": "white"}
            ui.notify(str(error), type="negative", multi_line=True, timeout=0, actions=[close])
        with contextlib.suppress(ApiError):  # reading the feed reports the error
            self._server.take_index(await self._viewer.api.post("/v2/repository/index"))

    async def _cancel(self, row_id: str, verb: str) -> None:
        try:
            await self._viewer.api.post(f"/v2/engine/requests/{row_id}/cancel")
        except ApiError as error:
            ui.notify(str(error), type="warning")


async def _is_sure(question: str, consequence: str) -> bool:
    with ui.dialog() as dialog, ui.card().classes("dialog").props("role=alertdialog"):
        ui.label(question).classes("dialog__title")
        ui.label(consequence).classes("dialog__text")
        with ui.row().classes("dialog__actions"):
            ui.space()
            ui.button("Cancel", on_click=lambda: dialog.submit(False)).props("flat no-caps autofocus")
            ui.button("Unload", on_click=lambda: dialog.submit(True)).props("unelevated no-caps color=negative")
    answer = await dialog
    dialog.delete()
    return bool(answer)


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else f"{text}."
