"""The latest lines of the log: what is kept, and what a follower gets."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmbackend.core.server_log import MAX_LINE_CHARACTERS, MAX_LINES, LogLine, LogSettings, ServerLog

log = logging.getLogger("llmbackend.tests.recent_log")


@pytest.fixture
def server_log(tmp_path: Path) -> Iterator[ServerLog]:
    """Installed as in a server process; the process's logging is restored after it."""
    root, package = logging.root, logging.getLogger("llmbackend")
    before = root.handlers[:], root.level, package.level
    installed = ServerLog(LogSettings(file=str(tmp_path / "log")))
    installed.install()
    yield installed
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    package.setLevel(before[2])


def remove_pytest_handlers() -> None:
    for handler in [each for each in logging.root.handlers if type(each).__module__.startswith("_pytest")]:
        logging.root.removeHandler(handler)


def test_a_follower_gets_what_is_logged_from_then_on(server_log: ServerLog) -> None:
    log.info("first %d", 1)
    lines: list[LogLine] = []
    server_log.recent.follow(lines.append)
    before = server_log.recent.lines()
    log.warning("second")
    try:
        raise ValueError("of the test")
    except ValueError:
        log.exception("third")
    assert server_log.recent.lines() == before + lines
    assert [(line.level, line.text) for line in before] == [("INFO", "first 1")]
    assert [line.level for line in lines] == ["WARNING", "ERROR"]
    assert lines[1].text.startswith("third\nTraceback") and lines[1].text.endswith("ValueError: of the test")
    assert before[0].time <= lines[0].time <= lines[1].time


def test_a_finalizer_logs_while_its_thread_logs(server_log: ServerLog) -> None:
    """As asyncio logs an exception that nobody retrieved, wherever the garbage collector runs: here in a follower, and
    while the errors of the same cause are looked up."""

    garbage = [True]

    class Cause:
        def __hash__(self) -> int:
            if garbage and garbage.pop():
                log.error("of a finalizer")
            return 1

    server_log.recent.follow(lambda line: log.info("of a follower") if line.text == "first" else None)
    for work in (lambda: log.warning("first"), lambda: log.error("last", extra={"cause": Cause()})):
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    assert [line.text for line in server_log.recent.lines()] == ["first", "of a follower", "of a finalizer", "last"]


def test_only_what_is_logged_is_kept_and_errors_are_not_repeated(server_log: ServerLog) -> None:
    server_log.update(info=False)
    log.info("not logged")
    log.debug("nor this")
    for _ in range(3):
        log.error("once a minute", extra={"cause": "the same"})
    assert [line.text for line in server_log.recent.lines()] == ["once a minute"]


def test_lines_and_their_lengths_are_bounded(server_log: ServerLog) -> None:
    remove_pytest_handlers()  # they could not pass such text on to pytest's other process
    for index in range(MAX_LINES + 7):
        log.info("%d %s", index, "\ud800" * MAX_LINE_CHARACTERS)
    lines = server_log.recent.lines()
    assert len(lines) == MAX_LINES and lines[0].text.startswith("7 ")
    assert {len(line.text) for line in lines} == {MAX_LINE_CHARACTERS}
    assert lines[0].text.encode().endswith(b"??")


def test_a_line_with_the_wrong_arguments_does_not_fail_its_caller(
    server_log: ServerLog, capsys: pytest.CaptureFixture[str]
) -> None:
    remove_pytest_handlers()  # they raise
    log.warning("no place for an argument", 1)
    log.warning("next")
    assert [line.text for line in server_log.recent.lines()] == ["next"]
    reason = "not all arguments converted during string formatting"
    assert capsys.readouterr().err.splitlines() == [f"a log line cannot be written: {reason}"]
