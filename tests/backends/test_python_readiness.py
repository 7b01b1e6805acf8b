"""A python model's own `is_ready()`: its answer counts; a model that hangs and a storm of probes do no harm."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmbackend.backends.python import stub_services
from tests.helpers.python_host import ANSWER_TIMEOUT_S, Host
from tests.helpers.python_models import TEXT_CONFIG, answer_line, body, text, values
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow  # limits of time run out

# What stands in the file SAYS decides; each question adds a line to the file ASKED.
IS_READY = """
    PREFIXdef is_ready(self):
        with open(ASKED, "a") as f:
            f.write("x\\n")
        says = open(SAYS).read()
        if says == "hang":
            time.sleep(60)
        if says == "raise":
            raise RuntimeError("no disk")
        BODY
        return {"yes": True, "no": False, "text": "ready"}[says]
"""


class Model:
    def __init__(self, host: Host, folder: Path, *, is_async: bool = False) -> None:
        self.host = host
        self.says, self.asked = folder / "says", folder / "asked"
        self.says.write_text("yes")
        lines = IS_READY.replace("SAYS", repr(str(self.says))).replace("ASKED", repr(str(self.asked)))
        lines = lines.replace("PREFIX", "async " if is_async else "")
        lines = lines.replace("BODY", "import asyncio; await asyncio.sleep(0.01)" if is_async else "pass")
        execute = "if b'block' in requests[0].inputs()[0].as_numpy():\n    time.sleep(1)\n" + answer_line()
        host.load("m", TEXT_CONFIG, body(execute, rest=lines))

    @property
    def questions(self) -> int:
        return len(self.asked.read_text().splitlines()) if self.asked.exists() else 0

    def is_ready(self) -> bool:
        time.sleep(2 * stub_services.FRESH_S)  # until what it said before does not hold any more
        return self.host.server.model_is_ready("m")

    def reason(self) -> str:
        (row,) = self.host.server.repository_index()
        return row.reason


SAYS = [
    ("no", "is_ready() returned False"),
    ("raise", "is_ready() raised RuntimeError: no disk"),
    ("text", "is_ready() must return a bool, got <class 'str'>"),
]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_model_is_ready_when_it_says_so_and_executes_anyway(host: Host, tmp_path: Path, is_async: bool) -> None:
    model = Model(host, tmp_path, is_async=is_async)
    assert model.is_ready() and host.server.is_ready()
    for says, told in SAYS:
        model.says.write_text(says)
        assert not model.is_ready() and not host.server.is_ready()
        assert model.reason().startswith(f"instance 'm_0_0': {told}")
        assert values(host.infer("m", text("x")).one()) == {"R": [b"ok"]}
    model.says.write_text("yes")
    assert model.is_ready() and host.server.is_ready()


def test_a_model_that_hangs_is_asked_once_and_is_not_ready(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stub_services, "TIMEOUT_S", 0.2)
    model = Model(host, tmp_path)
    model.says.write_text("hang")
    for _ in range(2):
        assert not model.is_ready()
        assert "is_ready() has not returned within 0.2 s" in model.reason()
    assert model.questions == 1
    assert values(host.infer("m", text("x")).one()) == {"R": [b"ok"]}


def test_the_question_does_not_wait_for_execute(host: Host, tmp_path: Path) -> None:
    model = Model(host, tmp_path)
    busy = host.infer("m", text("block"))
    assert model.is_ready() and not busy.is_answered
    assert busy.one().error is None


def test_a_storm_of_probes_costs_the_model_little(host: Host, tmp_path: Path) -> None:
    model = Model(host, tmp_path)
    start_s = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda _: host.server.model_is_ready("m"), range(2000)))
    assert 1 <= model.questions <= 1 + (time.monotonic() - start_s) / stub_services.FRESH_S


def test_a_process_that_dies_ends_the_question(host: Host, tmp_path: Path) -> None:
    model = Model(host, tmp_path)
    model.says.write_text("hang")
    code = (tmp_path / "repo" / "m" / "1" / "model.py").read_text()
    assert "time.sleep(1)" in code
    host.load("dies", TEXT_CONFIG, code.replace("time.sleep(1)", "__import__('os')._exit(3)"))
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(host.server.model_is_ready("dies")))
    asking.start()
    eventually(lambda: model.questions, ANSWER_TIMEOUT_S)
    model.says.write_text("yes")
    assert host.infer("dies", text("block")).one().error is not None
    asking.join(stub_services.TIMEOUT_S - 1)
    assert answers == [False]
