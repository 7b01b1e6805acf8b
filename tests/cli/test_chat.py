"""`llmbackend chat` against a real server: plain answers and their exit codes, and conversations on a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmbackend.cli.terminal_text import harmless
from tests.helpers.fake_llm_server import FakeLlmServer
from tests.helpers.openai_live_server import serve_openai
from tests.helpers.terminal import Terminal

pytestmark = pytest.mark.slow
CTRL_C, CTRL_D, ALT_ENTER = "\x03", "\x04", "\x1b\r"


def chat(*arguments: str, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Without a terminal."""
    command = [sys.executable, "-m", "llmbackend.cli", "chat", *arguments]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, env=os.environ | environment, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def fake() -> Iterator[tuple[str, FakeLlmServer]]:
    host = FakeLlmServer()
    with serve_openai(host) as url:
        yield url, host


@pytest.mark.parametrize("arguments", [["SAY:Hello", "there."], ["-"], [], ["SAY:Hello", "-"]])
def test_a_question_gets_a_plain_answer(openai_url: str, arguments: list[str]) -> None:
    text = {0: "SAY:Hello there.\n", 1: "SAY:Hello there.\n"}.get(len(arguments), "there.")
    done = chat("--url", openai_url, *arguments, text=text)
    expected = "Hello\n\nthere.\n" if arguments == ["SAY:Hello", "-"] else "Hello there.\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_characters_that_the_output_cannot_encode_are_replaced(openai_url: str) -> None:
    done = chat("--url", openai_url, "SAY:na\u00efve \u6f22.", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "na?ve ?.\n")


def test_reasoning_is_no_part_of_a_plain_answer(openai_url: str) -> None:
    done = chat("--url", f"{openai_url}/v1", "SAY:<think>Well.</think>Yes.")
    assert (done.returncode, done.stdout.strip()) == (0, "Yes.")


def test_sampling_and_system_reach_the_server(fake: tuple[str, FakeLlmServer]) -> None:
    url, host = fake
    flags = ["--model", "fake", "--temperature", "0.5", "--top-p", "0.25", "--seed", "7", "--max-tokens", "9"]
    done = chat("--url", url, *flags, "--system", "Be brief.", "hi there")
    assert (done.returncode, done.stdout) == (0, "You said:\n")
    assert "cut" in done.stderr
    asked = host.inferences[-1]
    wanted = {"temperature": 0.5, "top_p": 0.25, "seed": 7, "max_tokens": 9}
    assert {name: asked["sampling"][name] for name in wanted} == wanted
    assert [message["content"] for message in asked["messages"]] == ["Be brief.", "hi there"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--url", "{url}", "hi"], "expected --model with one of: "),
        (["--url", "{url}", "--model", "nope", "hi"], "'nope'"),
        (["--url", "{url}", "--model", "fake", "overloaded"], "HTTP 503"),
        (["--url", "{url}", "--model", "fake", "fail late"], "the server ended the answer: "),
        (["--url", "{url}", "--model", "fake", "too long"], "HTTP 400"),
        (["--url", "{url}/v2", "hi"], "Is the path of --url right?"),
        (["--url", "{url}", "--model", "fake", "  "], "the question is empty"),
        (["--url", "http://127.0.0.1:1", "hi"], "no server at http://127.0.0.1:1/v1: connection refused.\nStart one"),
        (["--url", "http://no-such-host.invalid", "hi"], "the host name is unknown"),
        (["--url", "ftp://somewhere", "hi"], "the URL is 'ftp://somewhere"),
        (["--temperature", "warm", "hi"], 'Bad option: "--temperature"'),
    ],
)
def test_what_goes_wrong_is_said(fake: tuple[str, FakeLlmServer], arguments: list[str], expected: str) -> None:
    done = chat(*(each.format(url=fake[0]) for each in arguments))
    assert done.returncode == (2 if "Bad option" in expected else 1)
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_keys_come_from_the_environment(fake: tuple[str, FakeLlmServer]) -> None:
    done = chat("--model", "fake", "hello", OPENAI_BASE_URL=f"{fake[0]}/v1", OPENAI_API_KEY="secret")
    assert (done.returncode, done.stdout) == (0, "You said: hello\n")
    refused = chat("--model", "fake", "hello", OPENAI_BASE_URL=fake[0], OPENAI_API_KEY="new\nline")
    assert refused.returncode == 1 and "API key" in refused.stderr


def test_a_conversation_on_a_terminal(openai_url: str, tmp_path: Path) -> None:
    with Terminal("chat", "--url", openai_url, cwd=tmp_path) as terminal:
        terminal.answer_prompt("one SAY:<think>Well.</think>Yes.\n")
        answer = terminal.wait_for("first token after ")
        assert "Well.\n\nYes.\n" in answer and "tokens/s" in answer
        terminal.answer_prompt('"""two\nSAY:Line 1\nLine 2"""\n')
        assert "\nLine 1\nLine 2\n" in terminal.wait_for("first token")
        terminal.answer_prompt(f"three{ALT_ENTER}SAY:Third.\n")
        terminal.wait_for("Third.\n")
        terminal.answer_prompt("/retry\n")
        terminal.wait_for("Third.\n")
        terminal.answer_prompt("/system Be brief.\n/save talk.json\n/nope\n/stats\n/clear\n/load talk.json\n")
        terminal.wait_for("6 messages are loaded")
        terminal.answer_prompt(CTRL_D)
        assert terminal.end() == 0
        assert "Unknown command /nope" in terminal.shown
        assert "4 answers, " in terminal.shown
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["system"] == "Be brief."
    texts = [(each["role"], each["content"]) for each in saved["messages"]]
    assert texts[:2] == [("user", "one SAY:<think>Well.</think>Yes."), ("assistant", "Yes.")]
    assert texts[2][1] == "two\nSAY:Line 1\nLine 2"
    assert texts[-2:] == [("user", "three\nSAY:Third."), ("assistant", "Third.")]


def test_ctrl_c_stops_an_answer_and_not_the_chat(fake: tuple[str, FakeLlmServer]) -> None:
    url, host = fake
    with Terminal("chat", "--url", url) as terminal:
        terminal.wait_for("or its name): ")
        terminal.send("9\nfake\n")
        terminal.wait_for("'9' is none of them.")
        terminal.answer_prompt("forever\n")
        terminal.wait_for("aaaa")
        terminal.send(CTRL_C)
        terminal.wait_for("stopped")
        assert host.handles[-1].over.wait(20), "the server goes on with it"
        terminal.answer_prompt("hello\n")
        terminal.wait_for("You said: hello")
        terminal.answer_prompt("fail late\n")
        terminal.wait_for("the server ended the answer")
        terminal.wait_for(">>> ")
        terminal.press_until(CTRL_C, ">>> ")  # at the prompt it does nothing
        terminal.send("/quit\n")
        assert terminal.end() == 0


def test_a_reader_that_goes_away_ends_the_answer_quietly(fake: tuple[str, FakeLlmServer]) -> None:
    url, host = fake
    command = [sys.executable, "-m", "llmbackend.cli", "chat", "--url", url, "--model", "fake", "forever"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(3) == "aaa"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=30) == 1
    assert host.handles[-1].over.wait(20), "the server goes on with it"


def test_an_error_after_a_part_of_the_answer_has_its_own_line(fake: tuple[str, FakeLlmServer]) -> None:
    with Terminal("chat", "--url", fake[0], "--model", "fake", "fail late") as terminal:
        assert terminal.end() == 1
        assert "You\nchat: the server ended the answer: " in terminal.shown


def test_ctrl_c_ends_a_single_question(fake: tuple[str, FakeLlmServer]) -> None:
    with Terminal("chat", "--url", fake[0], "--model", "fake", "silent") as terminal:
        while not any(each["said"] == "silent" for each in fake[1].inferences):
            assert terminal.process.poll() is None
        terminal.send(CTRL_C)
        assert terminal.end() == 130


def test_escape_sequences_of_a_model_are_shown_not_obeyed(openai_url: str) -> None:
    with Terminal("chat", "--url", openai_url, "SAY:a\x1b]0;title\x07b\x1b[2Jc\u009bd") as terminal:
        assert terminal.end() == 0
        assert terminal.shown == "a␛]0;title␇b␛[2Jc�d\n"
        assert "\x1b]" not in terminal._raw and "\x1b[2J" not in terminal._raw


def test_only_newlines_and_tabs_pass() -> None:
    every = "".join(map(chr, range(0x3000)))
    passed = {character for character in harmless(every) if not character.isprintable() and character in every}
    codes = (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
    assert passed & set(map(chr, codes)) == {"\n", "\t"}
    assert harmless("naïve 漢字 🙂 \t\n") == "naïve 漢字 🙂 \t\n"
    assert harmless("\u202eevil") == "<U+202E>evil"
