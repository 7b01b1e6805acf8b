"""What sections of the Operations page show, without a browser."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("nicegui")

from nicegui import Client, ui

from llmbackend.pages.operations.log_section import MAX_LINES_KEPT, MAX_LINES_SHOWN, LogLine, LogSection
from llmbackend.pages.operations.sections import SettingsSection


@pytest.fixture(autouse=True)
def client() -> Iterator[Client]:
    client = Client(ui.page("/operations"), request=None)
    with client:
        yield client
    client.delete()


def texts(client: Client) -> list[str]:
    return [each.text for each in client.elements.values() if isinstance(each, ui.label)]


def test_only_shown_lines_of_the_log_are_counted(client: Client) -> None:
    section = LogSection()
    for number in range(MAX_LINES_KEPT):
        section.add(LogLine(float(number), "INFO", f"line {number}"))
    section.show()
    assert f"{MAX_LINES_SHOWN} of {MAX_LINES_KEPT} lines" in texts(client)


def test_the_start_of_the_server_is_a_time(client: Client) -> None:
    """A duration would be that of the moment at which the page was opened."""
    started = time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1))
    report = {"name": "n", "version": "v", "pid": 1, "allows_load": True, "allows_kill": False, "flags": []}
    SettingsSection().show({**report, "started": started})
    assert "2026-01-02 03:04:05" in texts(client)
