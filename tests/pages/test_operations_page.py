"""The Operations page of a real server in a real browser: models, requests in flight, keys, log, and who may what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.server_process import ServerProcess, kill_server, running_server, start_server, write_mock_model
from tests.helpers.waiting import eventually

pytest.importorskip("nicegui")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.slow

KEYS = """
alice:sk-alice rpm=100
root:sk-root role=operator
"""
HOSTILE = '<img src=x onerror="document.title=1">'
# Loads when the file `go` is there.
GATED_BACKEND = """
import time

def TRITONBACKEND_ModelInitialize(model):
    deadline_s = time.monotonic() + 30
    while not (model.directory.parent.parent / "go").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)

def TRITONBACKEND_ModelInstanceExecute(instance, requests): pass
"""
IO = """
backend: "gated"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("operations_page")
    write_mock_model(root / "repository", "slow", mock_step_ms=40)
    (root / "repository" / "gated" / "1").mkdir(parents=True)
    (root / "repository" / "gated" / "config.pbtxt").write_text(IO)
    (root / "backends" / "gated").mkdir(parents=True)
    (root / "backends" / "gated" / "backend.py").write_text(GATED_BACKEND)
    (root / "keys").write_text(KEYS)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    with running_server(
        *(f"--model-repository={root / 'repository'}", f"--backend-directory={root / 'backends'}"),
        *("--model-control-mode=explicit", "--load-model=slow", f"--api-key-file={root / 'keys'}"),
    ) as started:
        yield started


@contextmanager
def opened(browser: Any, server: ServerProcess, key: str, width: int = 1280) -> Iterator[Any]:
    """The page in a browser that keeps `key`."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    context.set_default_timeout(20_000)
    if key:
        context.add_init_script(f"localStorage.setItem('llmbackend.api_key', '{key}')")
    page = context.new_page()
    page.goto(f"http://{server.http}/operations")
    try:
        yield page
    finally:
        context.close()


@pytest.fixture(scope="module")
def operator(browser: Any, server: ServerProcess) -> Iterator[Any]:
    with opened(browser, server, "sk-root") as page:
        yield page


@contextmanager
def streaming(server: ServerProcess, key: str, request_id: str) -> Iterator[list[str]]:
    """A request that takes long. The list gets what came of it, once it has ended."""
    ended: list[str] = []

    def run() -> None:
        body = {
            "text_input": "hello",
            "stream": True,
            "id": request_id,
            "parameters": {"max_tokens": 450, "ignore_eos": True},
        }
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(
            f"http://{server.http}/v2/models/slow/generate_stream", json=body, headers=headers, timeout=60
        )
        ended.append(answer.text)

    thread = threading.Thread(target=run)
    thread.start()
    yield ended
    thread.join(60)
    assert ended


def row(page: Any, table: str, text: str) -> Any:
    return page.get_by_role("table", name=table).get_by_role("row").filter(has_text=text)


def expect(locator: Any) -> Any:
    return playwright.expect(locator)


def test_a_model_is_loaded_and_unloaded(operator: Any, root: Path) -> None:
    gated = row(operator, "Models", "gated")
    expect(gated).to_contain_text("not loaded")
    gated.get_by_role("button", name="Load", exact=False).first.click()
    expect(gated).to_contain_text("loading")
    expect(gated.get_by_role("progressbar")).to_be_visible()
    expect(gated.get_by_role("button", name="Load gated", exact=True)).to_be_disabled()
    (root / "go").touch()
    expect(gated).to_contain_text("ready")
    gated.get_by_role("button", name="Unload gated").click()
    operator.get_by_role("alertdialog").get_by_role("button", name="Unload").click()
    expect(gated).to_contain_text("not loaded")


def test_a_request_in_flight_is_cancelled_and_its_id_is_text(server: ServerProcess, operator: Any) -> None:
    with streaming(server, "sk-alice", HOSTILE) as ended:
        found = row(operator, "Requests in flight", "alice")
        expect(found).to_contain_text(HOSTILE)
        expect(found).to_contain_text("running")
        found.get_by_role("button", name="Cancel").click()
        eventually(lambda: bool(ended))
    assert "cancelled" in ended[0].lower()
    expect(operator.get_by_text("No request is in flight.")).to_be_visible()
    assert operator.title() == "Operations · llmbackend"


def test_a_button_keeps_its_focus_while_rows_change(server: ServerProcess, operator: Any) -> None:
    with streaming(server, "sk-alice", "typed") as ended:
        found = row(operator, "Requests in flight", "typed")
        button = found.get_by_role("button", name="Cancel")
        button.focus()
        before = found.inner_text()
        eventually(lambda: found.inner_text() != before)
        expect(button).to_be_focused()
        operator.keyboard.press("Enter")
        eventually(lambda: bool(ended))


def test_a_hidden_page_watches_nothing(server: ServerProcess, operator: Any) -> None:
    hide = "hidden => {Object.defineProperty(document, 'hidden', {value: hidden, configurable: true}); "
    hide += "document.dispatchEvent(new Event('visibilitychange'))}"
    found = row(operator, "Requests in flight", "while hidden")
    operator.evaluate(hide, True)
    with streaming(server, "sk-alice", "while hidden") as ended:
        with opened(operator.context.browser, server, "sk-root") as other:
            expect(row(other, "Requests in flight", "while hidden")).to_contain_text("running")
            assert found.count() == 0
            operator.evaluate(hide, False)
            expect(found).to_contain_text("running")
        found.get_by_role("button", name="Cancel").click()
        eventually(lambda: bool(ended))


def test_the_log_is_filtered_by_level_and_text(operator: Any) -> None:
    log = operator.get_by_role("log", name="Server log")
    expect(log).to_contain_text("successfully loaded 'slow'")
    operator.get_by_label("Text in the line").fill("SUCCESSFULLY unloaded")
    expect(log).not_to_contain_text("successfully loaded 'slow'")
    expect(log).to_contain_text("successfully unloaded 'gated' version 1")
    operator.get_by_role("button", name="Errors").click()
    expect(log).to_have_text("")
    operator.get_by_label("Text in the line").fill("")
    operator.get_by_role("button", name="All", exact=True).click()
    expect(log).to_contain_text("successfully loaded 'slow'")


def test_keys_and_settings_are_shown_and_no_secret(operator: Any) -> None:
    alice = row(operator, "API keys", "alice")
    expect(alice).to_contain_text("of 100 per minute")
    expect(row(operator, "Settings", "--model-control-mode")).to_contain_text("explicit")
    assert "sk-alice" not in operator.content()


def test_a_key_without_rights_sees_its_own_and_is_told_so(browser: Any, server: ServerProcess) -> None:
    with (
        opened(browser, server, "sk-alice", width=390) as page,
        streaming(server, "sk-root", "of root"),
        streaming(server, "sk-alice", "of alice") as ended,
    ):
        needs = "This requires an API key with the role 'operator'; the key 'alice' has the role 'user'."
        expect(page.get_by_text(needs)).to_have_count(4)
        expect(page.get_by_role("button", name="Unload slow")).to_be_disabled()
        found = row(page, "Requests in flight", "of alice")
        expect(found).to_contain_text("running")
        assert row(page, "Requests in flight", "of root").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        found.get_by_role("button", name="Cancel").click()
        eventually(lambda: bool(ended))
        with opened(browser, server, "sk-root") as other:
            row(other, "Requests in flight", "of root").get_by_role("button", name="Cancel").click()
            expect(other.get_by_text("No request is in flight.")).to_be_visible()


def test_without_a_key_the_page_asks_for_one(browser: Any, server: ServerProcess) -> None:
    with opened(browser, server, "") as page:
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_contain_text("This server requires an API key")
        dialog.get_by_label("Key").first.fill("sk-root")
        dialog.get_by_role("button", name="Save").click()
        expect(row(page, "Models", "slow")).to_contain_text("ready")
        expect(page.get_by_role("status")).not_to_be_visible()


def test_no_model_is_shown_as_ready_while_the_server_is_down(browser: Any, tmp_path: Path) -> None:
    write_mock_model(tmp_path)
    server = start_server("--model-repository", str(tmp_path))
    with opened(browser, server, "") as page:
        state = row(page, "Models", "mock").locator(".ops-state")
        expect(state.get_by_text("ready")).to_be_visible()
        kill_server(server)
        expect(state.get_by_text("ready")).not_to_be_visible()
        assert "not known" in state.evaluate("(element) => getComputedStyle(element, '::after').content")
