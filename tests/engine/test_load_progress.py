"""How far a load has come: from the loader over the transport to bars on a terminal; nothing where there is none."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.llm_manager import RUNNERS
from llmbackend.engine.load_progress import LoadProgress, counted, report, reporting_to, show
from llmbackend.engine.load_progress import logger as progress_log
from llmbackend.engine.process.supervisor import Wakeup
from llmbackend.engine.process.transport import EngineForkServer, make_transport
from llmbackend.server.terminal import load_bars

DEMO = str(Path(__file__).resolve().parents[2] / "model_repository" / "demo" / "1")


class Shown(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.progress: list[LoadProgress | None] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.progress.append(record.__dict__["progress"])


@pytest.fixture
def shown() -> Iterator[Shown]:
    handler, level = Shown(), progress_log.level
    progress_log.addHandler(handler)
    progress_log.setLevel(logging.DEBUG)
    yield handler
    progress_log.removeHandler(handler)
    progress_log.setLevel(level)


def test_reports_are_sparse_but_for_the_ends_of_a_stage() -> None:
    told: list[LoadProgress] = []
    report("no listener", 1, 1)
    with reporting_to(told.append):
        assert list(counted("a", range(10_000))) == list(range(10_000))
        report("b")
    assert told[0] == LoadProgress("a", 0, 10_000)
    assert told[-2:] == [LoadProgress("a", 10_000, 10_000), LoadProgress("b")]
    assert len(told) < 1000


@pytest.mark.slow
def test_a_real_load_is_told_over_the_transport(shown: Shown, capfd: pytest.CaptureFixture[str]) -> None:
    wakeup = Wakeup()
    transport = make_transport(EngineForkServer(EngineConfig(model=DEMO, transport="inline"), RUNNERS), wakeup.fileno())
    transport.launch()
    info = None
    while info is None:
        info = transport.receive_started(60.0)
    transport.close()
    wakeup.close()
    stages = [progress.stage for progress in shown.progress if progress is not None]
    assert stages[0] == "reading weights"
    assert stages[-1] == "trying the model"
    whole = [one for one in shown.progress if one is not None and one.total and one.done == one.total]
    assert whole
    assert shown.progress[-1] is None
    assert "Loading weights" not in capfd.readouterr().err


def test_bars_show_each_engine_until_it_is_loaded() -> None:
    screen = io.StringIO()
    with load_bars(Console(file=screen, force_terminal=True, width=100)):
        show(1, "demo", LoadProgress("packing weights", 3, 10))
        show(2, "other", LoadProgress("starting the engine"))
        logging.getLogger("llmbackend").debug("not a bar")
        show(2, "other", None)
    drawn = screen.getvalue()
    assert "demo: packing weights" in drawn
    assert "3/10" in drawn
    assert not progress_log.handlers


def test_nothing_is_drawn_where_standard_error_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with load_bars():
        assert not progress_log.handlers
        show(1, "demo", LoadProgress("packing weights", 3, 10))
    assert capfd.readouterr().err == ""
