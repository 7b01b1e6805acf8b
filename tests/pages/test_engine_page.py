"""The Engine page in a real browser, with a real server: lanes, time, blocks, a death, keys. Its JavaScript in node."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.helpers.server_process import ServerProcess, running_server, write_mock_model
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow

KEYS: Final = "root:sk-root role=operator\nalice:sk-alice\n"
NODE: Final = shutil.which("node")
DECODE: Final = [20, 147, 111]
"""The colours of the light theme (view/theme.js)."""
RECOVERING: Final = [143, 76, 192]

# The stretches of a colour in one column of a canvas: one for each lane that has it there.
STRETCHES = """([selector, fromRight, colour]) => {
  const canvas = document.querySelector(selector);
  const pixels = canvas.getContext("2d").getImageData(canvas.width - fromRight, 0, 1, canvas.height).data;
  let [count, inside] = [0, false];
  for (let at = 0; at < pixels.length; at += 4) {
    const same = colour.every((value, part) => Math.abs(value - pixels[at + part]) < 6);
    if (same && !inside) count++;
    inside = same;
  }
  return count;
}"""
# Whether a canvas has a column that is nearly all of one colour.
HAS_COLUMN = """([selector, colour]) => {
  const canvas = document.querySelector(selector);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let x = 0; x < canvas.width; x++) {
    let same = 0;
    for (let y = 0; y < canvas.height; y++) {
      if (colour.every((value, part) => Math.abs(value - data[4 * (y * canvas.width + x) + part]) < 6)) same++;
    }
    if (same > 0.5 * canvas.height) return true;
  }
  return false;
}"""


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_history_and_layout_in_node() -> None:
    assert NODE is not None
    folder = Path(__file__).parent / "engine_view"
    done = subprocess.run([NODE, "--test", str(folder)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^# pass [1-9]\d*$", done.stdout, re.MULTILINE), done.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("engine_page")
    write_mock_model(root / "repository", mock_step_ms=10, max_num_seqs=64)
    (root / "keys").write_text(KEYS)
    (root / "keys").chmod(0o600)
    with running_server(
        f"--model-repository={root / 'repository'}", f"--api-key-file={root / 'keys'}", "--allow-fault-injection=true"
    ) as server:
        yield server


@contextmanager
def generating(
    server: ServerProcess, count: int, max_tokens: int = 450, key: str = "sk-root"
) -> Iterator[Iterator[str]]:
    """`count` requests that run until the end of the block; yields the lines of their stream."""
    body = {
        "model": "mock",
        "prompt": [f"request {number} of the test" for number in range(count)],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"authorization": f"Bearer {key}"}
    url = f"http://{server.http}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        yield answer.iter_lines()


@pytest.fixture
def engine(page: Any, server: ServerProcess) -> Any:
    """The page of an operator, who has given his key before."""
    page.add_init_script(
        "localStorage.setItem('llmbackend.api_key', 'sk-root'); localStorage.setItem('llmbackend.theme', 'light')"
    )
    page.goto(f"http://{server.http}/engine")
    page.get_by_text("ready · pid").wait_for()
    return page


def figure(page: Any, name: str) -> str:
    return str(page.locator(".engine__figures div", has=page.get_by_text(name, exact=True)).locator("dd").inner_text())


def lanes_now(page: Any) -> int:
    """How many lanes decode a little left of the right edge."""
    return int(page.evaluate(STRETCHES, [".engine__lanes", 40, DECODE]))


def clock(page: Any) -> str:
    return str(page.get_by_test_id("clock").inner_text())


@pytest.mark.parametrize("count", [1, 64])
def test_each_request_has_a_lane(engine: Any, server: ServerProcess, count: int) -> None:
    assert lanes_now(engine) == 0
    with generating(server, count):
        eventually(lambda: lanes_now(engine) == count, timeout_s=20)
        assert figure(engine, "running") == str(count)
    eventually(lambda: figure(engine, "running") == "0", timeout_s=20)


def test_the_keyboard_pauses_scrubs_and_zooms(engine: Any, server: ServerProcess) -> None:
    with generating(server, 2):
        eventually(lambda: lanes_now(engine) == 2, timeout_s=20)
        engine.keyboard.press(" ")
        eventually(lambda: clock(engine).startswith("paused"))
        paused = clock(engine).split()[1]
        engine.keyboard.press("Shift+ArrowLeft")
        eventually(lambda: clock(engine).split()[1] < paused)
        engine.keyboard.press("ArrowRight")
        engine.keyboard.press("+")
        eventually(
            lambda: engine.get_by_label("Time shown", exact=True).and_(engine.locator("select")).input_value() == "5"
        )
        engine.keyboard.press("Home")
        eventually(lambda: clock(engine).startswith("paused"))
        engine.keyboard.press("End")
        eventually(lambda: clock(engine).startswith("live"))
        eventually(lambda: lanes_now(engine) == 2)


def test_a_selected_lane_shows_its_request_and_its_blocks(engine: Any, server: ServerProcess) -> None:
    with generating(server, 3):
        eventually(lambda: lanes_now(engine) == 3, timeout_s=20)
        box = engine.locator(".engine__lanes").bounding_box()
        engine.mouse.click(box["x"] + box["width"] - 40, box["y"] + 20 + 15)
        details = engine.get_by_test_id("selected")
        details.get_by_text("decoding").wait_for()
        number = details.locator("h2").inner_text().removeprefix("Request #")
        eventually(lambda: re.search(rf"[1-9]\d* of #{number}", engine.get_by_test_id("blocks").inner_text()))
        engine.locator(".engine__tip").get_by_text(re.compile("decode: .* tokens in .* steps")).wait_for()
        engine.get_by_test_id("table").locator("summary").click()
        row = engine.get_by_role("row", name=re.compile(rf"^{number} "))
        assert row.locator("td").nth(2).inner_text() == "decoding"
        details.get_by_role("button", name="Cancel request").click()
        details.get_by_text("ended: abort").wait_for()


def test_a_killed_engine_is_a_mark_while_a_stream_goes_on(engine: Any, server: ServerProcess) -> None:
    with generating(server, 1, max_tokens=300) as lines:
        eventually(lambda: lanes_now(engine) == 1, timeout_s=20)
        engine.get_by_test_id("kill").click()
        engine.get_by_test_id("confirm-kill").click()
        eventually(lambda: figure(engine, "restarts") == "1", timeout_s=20)
        eventually(lambda: engine.evaluate(HAS_COLUMN, [".engine__lanes", RECOVERING]))
        assert '"completion_tokens":300' in "".join(lines).replace(" ", "")
    assert "The engine recovered in" in engine.locator("[aria-live=polite]", has_text="recovered").inner_text()


def test_an_idle_page_offers_requests_and_shows_them(engine: Any) -> None:
    engine.get_by_test_id("empty").get_by_text("No requests in these").wait_for()
    engine.get_by_test_id("demo").click()
    engine.get_by_test_id("table").locator("summary").click()
    eventually(lambda: engine.get_by_role("cell", name="ended: length").count() == 16, timeout_s=30)
    assert engine.get_by_role("alert").count() == 0


def test_without_a_key_the_page_asks_and_a_user_sees_his_own_requests_alone(page: Any, server: ServerProcess) -> None:
    page.goto(f"http://{server.http}/engine")
    page.get_by_role("alert").get_by_text("401").wait_for()
    page.get_by_label("Key", exact=True).fill("sk-alice")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Only requests of your own key are shown.").wait_for()
    with generating(server, 3, key="sk-root"), generating(server, 1, key="sk-alice"):
        eventually(lambda: figure(page, "running") == "1", timeout_s=20)
    assert page.get_by_test_id("kill").count() == 0
    page.evaluate("llmbackend.setKey('')")
    page.get_by_role("alert").get_by_text("401").wait_for()
    assert page.evaluate(STRETCHES, [".engine__lanes", 40, DECODE]) == 0
    assert page.get_by_label("Engine", exact=True).locator("option").all_inner_texts() == ["no engine"]


def test_a_narrow_page_has_everything_within_its_width(engine: Any, server: ServerProcess) -> None:
    engine.set_viewport_size({"width": 390, "height": 844})
    with generating(server, 2):
        eventually(lambda: lanes_now(engine) == 2, timeout_s=20)
        assert engine.evaluate("document.documentElement.scrollWidth") <= 390
