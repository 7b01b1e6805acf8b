"""Takes all pictures of the web pages in docs/images: light and dark, with 1 and 64 requests, an engine killed, on a
phone.

Starts a server with the demo model and a real browser (Chromium, through Playwright).
Run: `python -m tools.screenshots`, with the names of parts (chat, engine, phone) to take only some of them.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

from llmbackend import Server

IMAGES = Path(__file__).parent.parent / "docs" / "images"
Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")
DESK: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
OUTPUT_TOKENS = 700
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a place",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    flags = ("--allow-fault-injection=true", "--model-control-mode=explicit", "--load-model=demo")
    with sync_playwright() as driver, Server(demo=True, arguments=flags) as server:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, (take, size) in PARTS.items():
            for theme in THEMES if name in (sys.argv[1:] or PARTS) else ():
                with _page(browser, theme, size) as page:
                    take(page, server.http_url, theme)
        browser.close()


@contextmanager
def _page(browser: Browser, theme: Theme, size: ViewportSize) -> Iterator[Page]:
    context = browser.new_context(viewport=size, color_scheme=theme)
    yield context.new_page()
    context.close()


def _chats(page: Page, url: str, theme: str) -> None:
    page.goto(f"{url}/")
    page.get_by_text("demo", exact=True).wait_for()
    _ask(page, "What is continuous batching?")
    _save(page, f"chat-{theme}")
    page.get_by_role("button", name="Settings of this chat").click()
    page.mouse.move(600, 600)  # away from the button, whose tip covers the settings
    page.get_by_role("textbox", name="Tools as JSON").fill(json.dumps([WEATHER]))
    page.wait_for_timeout(1000)  # the field waits for the end of the typing
    _ask(page, "What is the weather in Paris?")
    _save(page, f"chat-tools-{theme}")


def _ask(page: Page, text: str) -> None:
    ended = page.get_by_role("button", name="Generate again")
    count = ended.count()
    box = page.get_by_placeholder("Ask something")
    box.fill(text)
    box.press("Enter")
    ended.nth(count).wait_for()
    page.wait_for_timeout(1000)  # for scrolling, and the tips of buttons


def _engines(page: Page, url: str, theme: str) -> None:
    page.goto(f"{url}/engine")
    page.wait_for_timeout(2000)
    with _requests(url, 1):
        page.wait_for_timeout(1500)
        _save(page, f"engine-1-{theme}")
    with _requests(url, 8):
        page.wait_for_timeout(2000)
        page.locator("body").press("Space")
        for _ in range(4):
            page.locator("body").press("+")
        page.wait_for_timeout(500)
        _save(page, f"engine-steps-{theme}")
    page.goto(f"{url}/engine")
    with _requests(url, 64):
        page.wait_for_timeout(4000)
        _save(page, f"engine-64-{theme}")
        _kill_engine(url)
        page.wait_for_timeout(1500)
        _save(page, f"engine-recovery-{theme}")
        page.goto(f"{url}/operations")
        page.wait_for_timeout(2500)
        _save(page, f"operations-64-{theme}")


def _phone(page: Page, url: str, theme: str) -> None:
    page.goto(f"{url}/")
    page.get_by_text("demo", exact=True).wait_for()
    _ask(page, "What is paged attention?")
    _save(page, f"chat-phone-{theme}")
    page.goto(f"{url}/operations")
    page.wait_for_timeout(2500)
    _save(page, f"operations-phone-{theme}")


def _save(page: Page, name: str) -> None:
    page.screenshot(path=IMAGES / f"{name}.png")


@contextmanager
def _requests(url: str, count: int) -> Iterator[None]:
    """Meanwhile so many requests are answered, unless they have ended."""
    stopped = threading.Event()

    def ask(number: int) -> None:
        body = {"model": "demo", "prompt": f"Question {number}: what is a block table?", "max_tokens": OUTPUT_TOKENS}
        with _post(f"{url}/v1/completions", body | {"stream": True, "ignore_eos": True}) as response:
            for _ in response:
                if stopped.is_set():
                    return

    with ThreadPoolExecutor(count) as pool:
        answers = [pool.submit(ask, number) for number in range(count)]
        try:
            yield
        finally:
            stopped.set()
    for answer in answers:
        answer.result()


def _kill_engine(url: str) -> None:
    _post(f"{url}/v2/engine/instances/demo/1/demo_0_0/kill", {}).close()


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=120)


PARTS: dict[str, tuple[Callable[[Page, str, str], None], ViewportSize]] = {
    "chat": (_chats, DESK),
    "engine": (_engines, DESK),
    "phone": (_phone, PHONE),
}

if __name__ == "__main__":
    main()
