"""Pictures of the web pages for docs/images: light and dark, with 1 and 64 requests, and after an engine was killed.

Starts a server of the demo model and a real browser (Chromium, by Playwright). Run: `python -m tools.screenshots`.
"""

from __future__ import annotations

import json
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from llmbackend import Server

IMAGES = Path(__file__).parent.parent / "docs" / "images"
THEMES = ("light", "dark")
OUTPUT_TOKENS = 700


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    flags = ("--allow-fault-injection=true", "--model-control-mode=explicit", "--load-model=demo")
    with sync_playwright() as driver, Server(demo=True, arguments=flags) as server:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for theme in THEMES:
            context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=theme)
            _pictures(context.new_page(), server.http_url, theme)
            context.close()
        browser.close()


def _pictures(page: Page, url: str, theme: str) -> None:
    page.goto(f"{url}/")
    page.wait_for_timeout(2000)
    box = page.locator("textarea:visible").last
    box.fill("What is continuous batching?")
    box.press("Enter")
    page.wait_for_timeout(2500)
    _save(page, f"chat-{theme}")
    page.goto(f"{url}/engine")
    page.wait_for_timeout(2000)
    with _requests(url, 1):
        page.wait_for_timeout(1500)
        _save(page, f"engine-1-{theme}")
    with _requests(url, 64):
        page.wait_for_timeout(4000)
        _save(page, f"engine-64-{theme}")
        _kill_engine(url)
        page.wait_for_timeout(1500)
        _save(page, f"engine-recovery-{theme}")
        page.goto(f"{url}/operations")
        page.wait_for_timeout(2500)
        _save(page, f"operations-64-{theme}")


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


if __name__ == "__main__":
    main()
