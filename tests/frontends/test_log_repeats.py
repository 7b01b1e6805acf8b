"""What fails every request is logged once per minute and cause, and a log that can not be written does not flood."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from llmbackend.core.server_log import REPEAT_INTERVAL_S, LogSettings, RepeatedErrors, ServerLog
from llmbackend.frontends.errors import log_bug

log = logging.getLogger("llmbackend.test_log_repeats")


pytestmark = pytest.mark.usefixtures("untouched_logging")


def failure(number: int) -> OSError:
    try:
        raise OSError(number, "failed")
    except OSError as error:
        return error


def test_a_cause_is_told_again_after_a_while_with_what_was_left_out() -> None:
    now_s = 0.0
    repeats = RepeatedErrors(lambda: now_s)
    assert [repeats.take("full") for _ in range(4)] == [0, None, None, None]
    assert repeats.take("other") == 0
    now_s = REPEAT_INTERVAL_S
    assert [repeats.take("full"), repeats.take("full"), repeats.take("other")] == [3, None, 0]
    for number in range(1000):
        repeats.take(number)
    assert len(repeats._seen) <= 256


def test_errors_of_one_cause_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    ServerLog(LogSettings(file=str(path))).install()
    for _ in range(50):
        for number in (28, 12):
            log.error("a request failed", exc_info=failure(number))
        log_bug("POST /v2 failed", failure(28))
        log.warning("each of these is news")
    text = path.read_text()
    assert text.count("a request failed") == 2 and text.count("POST /v2 failed") == 1
    assert text.count("each of these is news") == 50


def test_a_log_on_a_full_disk_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    ServerLog(LogSettings(file="/dev/full")).install()
    for number in range(50):
        log.warning("line %d", number)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["a log line cannot be written: [Errno 28] No space left on device"]
