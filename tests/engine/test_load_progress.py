"""How far a load has come: from the loader over the transport to bars on a terminal; nothing where there is none."""

from __future__ import annotations

import io
import json
import logging
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from llmbackend.core.activity.messages import InstanceDescription
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.llm_manager import RUNNERS
from llmbackend.engine.load_progress import LoadProgress, counted, report, reporting_to, show
from llmbackend.engine.load_progress import logger as progress_log
from llmbackend.engine.process.transport import EngineForkServer, make_transport
from llmbackend.server.terminal import LoadLines, announce, handled_by, load_bars
from llmbackend.waiting.wakeup import Wakeup
from tests.helpers.fake_clock import FakeClock

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
    assert stages[-1] == "checking the model"
    whole = [one for one in shown.progress if one is not None and one.total and one.done == one.total]
    assert whole
    assert shown.progress[-1] is None
    assert "Loading weights" not in capfd.readouterr().err


def test_bars_show_each_engine_until_it_is_loaded() -> None:
    screen = io.StringIO()
    with load_bars(Console(file=screen, force_terminal=True, width=100)):
        show(1, "demo[/]", LoadProgress("packing weights", 3, 10))
        show(2, "other", LoadProgress("starting the engine"))
        logging.getLogger("llmbackend").debug("not a bar")
        show(2, "other", None)
    drawn = screen.getvalue()
    assert "demo[/]: packing weights" in drawn
    assert "3/10" in drawn
    assert not progress_log.handlers


def test_a_server_that_is_ready_says_what_computes_each_model(capfd: pytest.CaptureFixture[str]) -> None:
    """And why nothing faster does."""
    rows = [SimpleNamespace(name=name, version="1", state="READY", reason="") for name in ("a", "b")]
    paths = {"a": ("native", ""), "b": ("modules", "its layers have experts")}
    instances = [
        (
            SimpleNamespace(model=name, version="1"),
            InstanceDescription(state="ready", path=path, path_reason=reason),
        )
        for name, (path, reason) in paths.items()
    ]
    server: Any = SimpleNamespace(
        repository_index=lambda ready_only=False: [] if ready_only else rows, describe_instances=lambda: instances
    )
    announce(server, {}, 1.0)
    expected = (
        "model    a version 1  READY  native\nmodel    b version 1  READY  modules, because its layers have experts\n"
    )
    assert expected in capfd.readouterr().out


@pytest.mark.parametrize("template", ["", "{{ messages }}"])
def test_the_example_is_one_that_the_model_answers(template: str, capfd: pytest.CaptureFixture[str]) -> None:
    row = SimpleNamespace(name="a", version="1", state="READY", reason="")
    server: Any = SimpleNamespace(
        repository_index=lambda ready_only=False: [row],
        describe_instances=list,
        model_parameters=lambda name: {"chat_template": template} if template else {},
    )
    announce(server, {"http": "http://0.0.0.0:8000"}, 1.0)
    example = capfd.readouterr().out.partition("\nTry:\n")[2]
    assert ("llmbackend chat --url http://localhost:8000 --model a" in example) == bool(template)
    assert ("/v1/chat/completions -H" in example) == bool(template)
    assert ("/v1/completions -H" in example and '"prompt": ' in example) == (not template)


def test_the_example_is_quoted_for_a_shell(capfd: pytest.CaptureFixture[str]) -> None:
    name = "an operator's $MODEL"
    row = SimpleNamespace(name=name, version="1", state="READY", reason="")
    server: Any = SimpleNamespace(
        repository_index=lambda ready_only=False: [row], describe_instances=list, model_parameters=lambda _: {}
    )
    announce(server, {"http": "http://0.0.0.0:8000"}, 1.0)
    words = shlex.split(capfd.readouterr().out.partition("\nTry:\n")[2])
    assert json.loads(words[-1])["model"] == name


def test_nothing_is_drawn_where_standard_error_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with load_bars():
        show(1, "demo", LoadProgress("packing weights", 3, 10))
    assert capfd.readouterr().err == ""  # the log has no handler here
    assert not progress_log.handlers


def test_each_stage_of_a_load_is_logged_once_and_long_ones_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    caplog.set_level(logging.INFO)
    with handled_by(LoadLines(clock)):
        for done in range(100):
            show(1, "slow", LoadProgress("packing weights", done, 100))
            show(2, "fast", LoadProgress("reading weights", done, 100) if done < 5 else None)
            clock.now_s += 0.3
        show(1, "slow", LoadProgress("checking the model"))
    assert [record.getMessage() for record in caplog.records] == [
        "slow: loading: packing weights 0 of 100",
        "fast: loading: reading weights 0 of 100",
        "slow: loading: packing weights 34 of 100",
        "slow: loading: packing weights 68 of 100",
        "slow: loading: checking the model",
    ]


class Hub(BaseHTTPRequestHandler):
    """A hub with two shards of one model."""

    files: Mapping[str, bytes] = {
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
        ).encode(),
        "one.safetensors": bytes(12_000_000),
        "two.safetensors": bytes(8_000_000),
    }

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        name = self.path.rpartition("/")[2].partition("?")[0]
        if "/api/" in self.path:
            siblings = [{"rfilename": each, "size": len(data)} for each, data in self.files.items()]
            paths = [{"type": "file", "path": each, "size": len(data)} for each, data in self.files.items()]
            info = {"id": "org/model", "sha": "c" * 40, "siblings": siblings}
            body = json.dumps([{**each, "oid": "d" * 40} for each in paths] if "/tree/" in self.path else info).encode()
        else:
            body = self.files.get(name, b"")
        self.send_response(200 if body else 404)
        for header, value in (("ETag", f'"{name}"'), ("X-Repo-Commit", "c" * 40), ("Content-Length", str(len(body)))):
            self.send_header(header, value)
        if not body:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        return None


DOWNLOAD = """
import json
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.load_progress import reporting_to
from llmbackend.engine.model.located_files import hub_files
told = []
with reporting_to(told.append):
    files = hub_files(EngineConfig(model="org/model"))
print(json.dumps([[each.stage, each.done, each.total] for each in told]))
print(json.dumps([[file.name, file.stat().st_size] for file in files]))
"""


@pytest.mark.slow
def test_a_download_is_told_in_bytes(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        environment = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(tmp_path)}
        environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
        try:
            command = [sys.executable, "-c", DOWNLOAD]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        finally:
            hub.shutdown()
            thread.join()
    assert done.returncode == 0, done.stderr
    told, files = map(json.loads, done.stdout.splitlines())
    assert files == [["one.safetensors", 12_000_000], ["two.safetensors", 8_000_000]]
    assert {stage for stage, _, _ in told} == {"downloading weights (MB)"}
    amounts = [amount for _, amount, _ in told]
    assert amounts == sorted(amounts) and told[-1][1:] == [20, 20]
    assert "it/s" not in done.stderr and "B/s" not in done.stderr, "nothing is drawn"
