"""The chat page in a real browser, with a real server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.echo_model import write_echo_model
from tests.helpers.server_process import ServerProcess, kill_server, post, start_server, stop_server, write_mock_model

pytestmark = pytest.mark.slow

SLOW = "one § two § three § four § five § six § seven § eight § nine § ten § " * 20


def say(chat: Any, text: str) -> None:
    field = chat.get_by_role("textbox", name="Message")
    field.fill(text)
    field.press("Enter")


def answers(chat: Any) -> Any:
    return chat.get_by_role("region", name="Answer")


def complete(chat: Any, count: int) -> Any:
    """The last of `count` answers, once it is complete."""
    last = answers(chat).nth(count - 1)
    last.get_by_role("button", name="Generate again").wait_for()
    return last


def stored(chat: Any) -> list[dict[str, Any]]:
    """All chats of the browser, the one that was changed last first."""
    texts = chat.evaluate("llmbackendChat.list().map((entry) => llmbackendChat.load(entry.id))")
    return [json.loads(text) for text in texts]


def test_an_answer_is_shown_as_markdown_with_its_timing(chat: Any) -> None:
    say(chat, "A **bold** word\n\n```python\nx = 1\n```")
    answer = complete(chat, 1)
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator("pre").inner_text().strip() == "x = 1"
    assert re.search(r"first token \d+ ms", answer.inner_text())


def test_formulas_are_laid_out_and_task_lists_and_long_lines_of_code_shown(chat: Any) -> None:
    long_line = "x" * 3000
    say(chat, f"Let \\(a_1\\) be\n\n$$\n\\frac{{1}}{{2}}\n$$\n\n- [x] done\n\n```\n{long_line}\n```\n\n$\\nonsense{{$")
    answer = complete(chat, 1)
    assert answer.locator(".math math msub").count() == 1
    assert answer.locator(".math--display math[display=block] mfrac").count() == 1
    assert answer.get_by_text("☑").count() == 1
    assert answer.locator(".math--refused").inner_text() == "\\nonsense{"
    assert (
        chat.evaluate("(({scrollWidth, clientWidth}) => scrollWidth - clientWidth)(document.querySelector('pre'))") <= 0
    )


def test_chats_are_kept_in_the_browser_and_shown_again(chat: Any) -> None:
    say(chat, "first question")
    complete(chat, 1)
    chat.keyboard.press("Control+k")
    chat.get_by_text("What would you like to know?").wait_for()
    say(chat, "second question")
    complete(chat, 1)
    assert [entry["title"] for entry in stored(chat)] == ["second question", "first question"]
    chat.reload()
    complete(chat, 1)
    assert answers(chat).inner_text().startswith("second question")
    chat.get_by_role("navigation", name="Chats").get_by_role("button", name="first question").click()
    chat.get_by_role("region", name="You").get_by_text("first question").wait_for()


def test_a_chat_is_renamed_and_deleted(chat: Any) -> None:
    say(chat, "a chat")
    complete(chat, 1)
    chat.get_by_role("button", name="Chat menu").click()
    chat.get_by_text("Rename", exact=True).click()
    chat.get_by_role("textbox", name="Title").fill("another name")
    chat.get_by_role("button", name="Rename").click()
    chat.get_by_role("navigation", name="Chats").get_by_text("another name").wait_for()
    chat.get_by_role("button", name="Chat menu").click()
    chat.get_by_text("Delete", exact=True).click()
    chat.get_by_text("What would you like to know?").wait_for()
    assert stored(chat) == []


def test_escape_stops_an_answer_and_keeps_what_has_arrived(chat: Any) -> None:
    say(chat, SLOW)
    answers(chat).get_by_text("one § two").wait_for()
    chat.keyboard.press("Escape")
    answer = complete(chat, 1)
    assert "stopped by you" in answer.inner_text()
    (kept,) = stored(chat)
    assert 0 < len(kept["turns"][1]["content"]) < len(SLOW)


def test_a_stopped_answer_is_continued(chat: Any) -> None:
    say(chat, SLOW)
    answers(chat).get_by_text("one § two").wait_for()
    chat.keyboard.press("Escape")
    complete(chat, 1)
    chat.evaluate("document.querySelector('.composer').scrollIntoView()")
    answers(chat).get_by_role("button", name="Continue").click()
    answers(chat).get_by_text("Continue").wait_for(state="hidden")
    chat.keyboard.press("Escape")
    complete(chat, 1)
    (kept,) = stored(chat)
    assert [turn["role"] for turn in kept["turns"]] == ["user", "assistant"]
    assert SLOW.startswith(kept["turns"][1]["content"])


def test_an_answer_goes_on_after_the_page_was_loaded_again(chat: Any) -> None:
    text = "one § two § three § four § " * 4
    say(chat, text)
    answers(chat).get_by_text("one § two").wait_for()
    chat.reload()
    assert complete(chat, 1).get_by_text("Continue").count() == 0
    (kept,) = stored(chat)
    assert [turn["content"] for turn in kept["turns"]] == [text, text]
    assert chat.evaluate("Object.keys(localStorage).filter((name) => name.startsWith('llmbackend.answer.'))") == []


def test_a_question_whose_page_was_left_before_its_answer_began_is_answered(chat: Any) -> None:
    say(chat, "§ § § § § § § § late")
    chat.wait_for_timeout(300)
    chat.reload()
    complete(chat, 1)
    assert [turn["content"] for turn in stored(chat)[0]["turns"]] == ["§ § § § § § § § late"] * 2


def test_what_had_arrived_stays_when_the_server_is_killed_and_is_continued(page: Any, tmp_path: Path) -> None:
    write_echo_model(tmp_path)
    text = "".join(f"§ {number:03} and so on, on and on to forty chars" for number in range(40))
    first = start_server("--model-repository", str(tmp_path))
    page.goto(f"http://{first.http}/chat")
    page.get_by_text("echo", exact=True).wait_for()
    say(page, text)
    kept = "localStorage[Object.keys(localStorage).find((name) => name.startsWith('llmbackend.answer.'))]"
    page.wait_for_function(f"({kept} || '').includes('003')")
    kill_server(first)
    second = start_server("--model-repository", str(tmp_path), http_port=int(first.http.rpartition(":")[2]))
    try:
        page.reload()
        answer = complete(page, 1)
        assert "000 and so on" in answer.inner_text() and "interrupted" in answer.inner_text()
        answer.get_by_role("button", name="Continue").click()
        page.wait_for_function("!document.body.textContent.includes('interrupted')")
        answers(page).get_by_text("039 and so on").wait_for()
        complete(page, 1)
        assert stored(page)[0]["turns"][1]["content"] == text
    finally:
        page.goto("about:blank")
        assert stop_server(second) == 0


def test_earlier_versions_of_an_edited_turn_can_be_seen(chat: Any) -> None:
    say(chat, "first")
    complete(chat, 1)
    you = chat.get_by_role("region", name="You")
    for text in ("second", "third"):
        you.hover()
        chat.get_by_role("button", name="Edit and send again").click()
        chat.get_by_role("textbox", name="Edit the message").fill(text)
        chat.keyboard.press("Enter")
        you.get_by_text(text).wait_for()
        complete(chat, 1)
    you.get_by_text("3 of 3").wait_for()
    you.get_by_role("button", name="Earlier version").click()
    you.get_by_text("2 of 3").wait_for()
    assert answers(chat).locator(".prose").inner_text() == "second"
    you.get_by_role("button", name="Earlier version").click()
    you.get_by_text("1 of 3").wait_for()
    chat.reload()
    you.get_by_text("1 of 3").wait_for()
    assert answers(chat).locator(".prose").inner_text() == "first"


def test_earlier_answers_can_be_seen_after_generating_again(chat: Any) -> None:
    say(chat, "again")
    complete(chat, 1)
    answers(chat).get_by_role("button", name="Generate again").click()
    answers(chat).get_by_text("2 of 2").wait_for()
    answers(chat).get_by_role("button", name="Earlier version").click()
    answers(chat).get_by_text("1 of 2").wait_for()


def test_a_turn_is_edited_and_answered_again(chat: Any) -> None:
    say(chat, "one")
    complete(chat, 1)
    say(chat, "two")
    complete(chat, 2)
    chat.get_by_role("region", name="You").first.hover()
    chat.get_by_role("button", name="Edit and send again").first.click()
    chat.get_by_role("textbox", name="Edit the message").fill("three")
    chat.get_by_role("region", name="You").get_by_role("button", name="Send", exact=True).click()
    chat.get_by_role("region", name="You").get_by_text("three").wait_for()
    complete(chat, 1)
    assert [turn["content"] for turn in stored(chat)[0]["turns"]] == ["three", "three"]


def test_an_answer_that_is_replaced_while_it_grows_leaves_nothing(chat: Any) -> None:
    say(chat, "short")
    complete(chat, 1)
    say(chat, SLOW)
    answers(chat).nth(1).get_by_text("one § two").wait_for()
    answers(chat).first.get_by_role("button", name="Generate again").click()
    complete(chat, 1)
    chat.wait_for_timeout(300)
    assert [turn["content"] for turn in stored(chat)[0]["turns"]] == ["short", "short"]


def test_an_error_of_the_api_is_shown_as_it_is(chat: Any) -> None:
    chat.evaluate("llmbackendChat.saveSettings(JSON.stringify({model: 'echo', tools: '[]', temperature: 0}))")
    chat.reload()
    chat.get_by_text("echo", exact=True).wait_for()
    chat.get_by_role("button", name="Settings of this chat").click()
    chat.get_by_role("textbox", name="Tools as JSON").fill('[{"type": "nonsense"}]')
    chat.wait_for_timeout(800)
    say(chat, "with a tool that is none")
    alert = chat.get_by_role("alert").first
    alert.wait_for()
    assert "tools" in alert.inner_text()


def test_json_that_is_none_stops_sending_and_is_said_beside_the_button(chat: Any) -> None:
    chat.get_by_role("button", name="Settings of this chat").click()
    tools = chat.get_by_role("textbox", name="Tools as JSON")
    tools.fill("[{")
    chat.wait_for_timeout(800)
    say(chat, "with broken tools")
    chat.locator(".composer").get_by_text("Tools is not JSON").wait_for()
    assert chat.get_by_role("textbox", name="Message").input_value() == "with broken tools"
    assert chat.get_by_role("region", name="You").count() == 0
    tools.fill("")
    chat.wait_for_timeout(800)
    chat.keyboard.press("Escape")
    tools.wait_for(state="hidden")
    chat.get_by_role("button", name="Send").click()
    complete(chat, 1)
    assert chat.locator(".composer").get_by_text("Tools is not JSON").count() == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_the_title_of_a_field_does_not_cover_its_placeholder(chat: Any, width: int) -> None:
    chat.set_viewport_size({"width": width, "height": 800})
    chat.get_by_role("button", name="Settings of this chat").click()
    for name in ("Tools as JSON", "JSON schema"):
        field = chat.get_by_role("textbox", name=name)
        field.wait_for()
        title = chat.locator(".settings").get_by_text(name, exact=True)
        assert title.bounding_box()["y"] + title.bounding_box()["height"] <= field.bounding_box()["y"]


def test_the_skip_link_is_the_first_stop_of_tab(chat: Any) -> None:
    chat.evaluate("document.body.tabIndex = -1; document.body.focus()")
    chat.keyboard.press("Tab")
    assert chat.evaluate("document.activeElement.textContent") == "Skip to content"
    chat.keyboard.press("Enter")
    assert chat.evaluate("document.activeElement.id") == "content"


def test_a_screen_reader_hears_how_the_answer_ended(chat: Any) -> None:
    said = chat.locator("[role=status].hidden-text")
    say(chat, "short")
    said.get_by_text("Answer complete.").wait_for(state="attached")
    say(chat, SLOW)
    answers(chat).nth(1).get_by_text("one § two").wait_for()
    chat.keyboard.press("Escape")
    said.get_by_text("Answer stopped by you.").wait_for(state="attached")


def test_chats_are_searched_exported_and_imported(chat: Any, tmp_path: Path) -> None:
    chat.get_by_role("button", name="Name three fruits").click()
    complete(chat, 1)
    chat.keyboard.press("Control+k")
    chat.get_by_text("What would you like to know?").wait_for()
    say(chat, "Zebras")
    complete(chat, 1)
    chats = chat.get_by_role("navigation", name="Chats")
    chat.get_by_role("textbox", name="Search in chats").fill("THREE fru")
    chats.get_by_text("Zebras").wait_for(state="hidden")
    chats.get_by_role("button", name="Chat menu").click()
    with chat.expect_download() as exported:
        chat.get_by_text("Export as JSON").click()
    exported.value.save_as(tmp_path / "chat.json")
    with chat.expect_file_chooser() as choosing:
        chat.get_by_role("button", name="Import").click()
    choosing.value.set_files(tmp_path / "chat.json")
    chats.get_by_text("Name three fruits").nth(1).wait_for()
    assert [entry["turns"][0]["content"] for entry in stored(chat)] == [
        "Name three fruits",
        "Zebras",
        "Name three fruits",
    ]
    (tmp_path / "none.json").write_text("{}")
    with chat.expect_file_chooser() as choosing:
        chat.get_by_role("button", name="Import").click()
    choosing.value.set_files(tmp_path / "none.json")
    chat.get_by_text("This file is not an exported chat").wait_for()


def test_a_page_of_the_chat_shows_the_theme_that_was_chosen(chat: Any) -> None:
    button = chat.get_by_role("button", name="Theme: auto")
    button.click()
    chat.get_by_role("button", name="Theme: light").click()
    assert chat.evaluate("document.body.classList.contains('body--dark')")
    chat.reload()
    chat.get_by_role("button", name="Theme: dark").wait_for()
    assert chat.evaluate("document.body.classList.contains('body--dark')")


def test_nothing_is_wider_than_a_narrow_screen(chat: Any, echo_server: ServerProcess) -> None:
    chat.set_viewport_size({"width": 390, "height": 700})
    say(chat, "| a | b |\n|---|---|\n| " + "x" * 300 + " | y |\n\n```\n" + "z" * 500 + "\n```\n\n" + "w" * 500)
    complete(chat, 1)
    assert chat.evaluate("document.documentElement.scrollWidth") <= 390


def test_an_answer_goes_on_after_its_engine_died_and_says_so(page: Any, tmp_path: Path) -> None:
    write_mock_model(tmp_path, "mock", mock_step_ms=20)
    server = start_server("--model-repository", str(tmp_path), "--allow-fault-injection=true")
    try:
        page.goto(f"http://{server.http}/")
        page.get_by_text("mock", exact=True).wait_for()
        page.evaluate("llmbackendChat.saveSettings(JSON.stringify({model: 'mock', max_tokens: 80, temperature: 0}))")
        page.reload()
        page.get_by_text("mock", exact=True).wait_for()
        say(page, "a question")
        page.wait_for_function("document.querySelector('.prose')?.textContent.length > 5")
        status, _ = post(server, "/v2/engine/instances/mock/1/mock_0/kill", {})
        assert status == 200
        assert "ms after its engine died" in complete(page, 1).inner_text()
        (first,) = stored(page)
        answers(page).get_by_role("button", name="Generate again").click()
        page.wait_for_function("!document.querySelector('.turn__foot')?.textContent.includes('engine died')")
        complete(page, 1)
        (second,) = stored(page)
        assert first["turns"][1]["content"] == second["turns"][1]["content"] != ""
    finally:
        page.goto("about:blank")
        assert stop_server(server) == 0


def test_stop_ends_the_request_in_the_server_before_the_grace(page: Any, tmp_path: Path) -> None:
    write_mock_model(tmp_path, "mock", mock_step_ms=100)
    server = start_server("--model-repository", str(tmp_path), "--resume-grace=600")
    try:
        page.goto(f"http://{server.http}/")
        page.get_by_text("mock", exact=True).wait_for()
        page.evaluate("llmbackendChat.saveSettings(JSON.stringify({model: 'mock', max_tokens: 450, temperature: 0}))")
        page.reload()
        page.get_by_text("mock", exact=True).wait_for()
        say(page, "a question")
        page.wait_for_function("document.querySelector('.prose')?.textContent.length > 5")
        page.keyboard.press("Escape")
        complete(page, 1)
        server.wait_until_idle("mock", 10)
        (kept,) = stored(page)
        assert kept["turns"][1]["finish_reason"] == "stopped by you"
    finally:
        page.goto("about:blank")
        assert stop_server(server) == 0


def test_where_keys_are_configured_the_page_asks_for_one(page: Any, tmp_path: Path) -> None:
    write_echo_model(tmp_path)
    server = start_server("--model-repository", str(tmp_path), "--api-key", "sk-secret")
    try:
        page.goto(f"http://{server.http}/")
        page.get_by_text("This server requires an API key").wait_for()
        page.get_by_role("textbox", name="Key").fill("sk-secret")
        page.get_by_role("button", name="Save").click()
        page.get_by_text("echo", exact=True).wait_for()
        say(page, "with a key")
        complete(page, 1)
        assert page.evaluate("localStorage.getItem('llmbackend.api_key')") == "sk-secret"
        page.get_by_text("This server requires an API key").wait_for(state="hidden")
        assert "sk-secret" not in page.content()
        page.evaluate("llmbackend.askForKey('another one, please')")
        page.get_by_text("another one, please", exact=True).wait_for()
    finally:
        page.goto("about:blank")
        assert stop_server(server) == 0
