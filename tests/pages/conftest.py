"""What tests of the pages share: a real server, and a real browser where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.helpers.echo_model import NAME, write_echo_model
from tests.helpers.server_process import ServerProcess, running_server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]


@dataclass
class Seen:
    """What a browser's page did besides showing itself."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def dialog(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def hosts(self) -> set[str]:
        return {urlsplit(url).netloc for url in self.requests if not url.startswith(("data:", "blob:"))}


@pytest.fixture(scope="module")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("repository")
    write_echo_model(repository)
    with running_server("--model-repository", str(repository)) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Playwright's; its event loop runs on this thread until the file's tests have ended."""
    pytest.importorskip("nicegui")
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def page(browser: Any, seen: Seen) -> Iterator[Any]:
    """An empty page of a browser that knows nothing yet. What goes wrong in it fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.on("request", lambda request: seen.requests.append(request.url))
    page = context.new_page()
    page.set_default_timeout(20_000)
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("dialog", seen.dialog)
    yield page
    context.close()
    assert seen.errors == [] and seen.dialogs == []


@pytest.fixture
def chat(page: Any, echo_server: ServerProcess) -> Any:
    """The chat page with the model that says what it is told."""
    page.goto(f"http://{echo_server.http}/chat")
    page.get_by_text(NAME, exact=True).wait_for()
    return page
