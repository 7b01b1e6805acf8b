"""A model that is not decoupled and answers after execute has returned, through its response senders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmbackend.core.backend_api import ErrorCode
from tests.helpers.python_host import ANSWER_TIMEOUT_S, Answers, Host
from tests.helpers.python_models import DECOUPLED_CONFIG, TEXT_CONFIG, body, text, values
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow

BATCHES = """
max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 3 ] max_queue_delay_microseconds: 5000000 }
"""
BATCH_CONFIG = TEXT_CONFIG.replace('backend: "python"', 'backend: "python"' + BATCHES)
# The file GATE holds late answers back until it is there.
REST = """
    def answer(self, text):
        return pb_utils.InferenceResponse([pb_utils.Tensor("R", np.array([text], dtype=object).reshape(SHAPE))])

    def later(self, senders, end=True):
        import os
        while not os.path.exists(GATE):
            time.sleep(0.005)
        for sender in senders:
            sender.send(self.answer("late"))
            if end:
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def code(execute: str, gate: Path, *, is_async: bool = False, batched: bool = False) -> str:
    rest = REST.replace("GATE", repr(str(gate))).replace("SHAPE", "(1, 1)" if batched else "(1,)")
    return body(execute, is_async=is_async, rest=rest)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    return tmp_path / "gate"


def wait_for_executions(host: Host, count: int) -> None:
    eventually(lambda: host.counts("m")[1] >= count, ANSWER_TIMEOUT_S)
    assert host.counts("m")[1] == count


def word(answers: Answers) -> Any:
    (found,) = values(answers.one())["R"]
    return found


START = """
senders = [r.get_response_sender() for r in requests]
threading.Thread(target=self.later, args=(senders,)).start()
"""
TASK = """
import asyncio
loop = asyncio.get_running_loop()
self.tasks = [loop.run_in_executor(None, self.later, [r.get_response_sender() for r in requests])]
"""


@pytest.mark.parametrize("returned", ["return None", "return [None]"])
@pytest.mark.parametrize("is_async", [False, True])
def test_response_that_is_sent_after_execute_returned_arrives(
    host: Host, gate: Path, is_async: bool, returned: str
) -> None:
    host.load("m", TEXT_CONFIG, code((TASK if is_async else START) + returned, gate, is_async=is_async))
    waiting = [host.infer("m", text("x")) for _ in range(2)]  # the second is executed while the first has no answer
    wait_for_executions(host, 2)
    assert not any(answers.is_answered for answers in waiting)
    gate.touch()
    assert [word(answers) for answers in waiting] == [b"late", b"late"]


def test_some_requests_of_a_batch_are_answered_at_once_and_others_later(host: Host, gate: Path) -> None:
    execute = """
words = [r.inputs()[0].as_numpy()[0][0] for r in requests]
senders = [r.get_response_sender() for r, w in zip(requests, words) if w == b"late"]
threading.Thread(target=self.later, args=(senders,)).start()
return [None if w == b"late" else self.answer(w) for w in words]
"""
    host.load("m", BATCH_CONFIG, code(execute, gate, batched=True))
    now, late, also_now = (host.infer("m", batch_text(word)) for word in ("a", "late", "b"))
    assert word(now) == [b"a"] and word(also_now) == [b"b"]
    assert not late.is_answered
    gate.touch()
    assert word(late) == [b"late"]
    assert host.counts("m") == (3, 1, 3, 0)


def batch_text(word: str) -> Any:
    (tensor,) = text(word)
    return [type(tensor)("T", tensor.datatype, (1, 1), tensor.data.reshape(1, 1))]


def test_a_process_that_dies_ends_the_requests_it_still_has(host: Host, gate: Path) -> None:
    execute = (
        "if b'die' in requests[0].inputs()[0].as_numpy():\n    import os\n    os._exit(3)\n" + START + "return None"
    )
    host.load("m", TEXT_CONFIG, code(execute, gate))
    late = host.infer("m", text("x"))
    wait_for_executions(host, 1)
    assert host.infer("m", text("die")).one().error is not None
    error = late.one().error
    assert error is not None and error.code is ErrorCode.INTERNAL
    assert str(error) == "Stub process 'm_0_0' is not healthy. It ended with exit code 3."


def test_an_unload_waits_for_late_answers(host: Host, gate: Path) -> None:
    host.load("m", TEXT_CONFIG, code(START + "return None", gate))
    late = host.infer("m", text("x"))
    wait_for_executions(host, 1)
    host.server.unload_model("m")
    gate.touch()
    assert word(late) == b"late"


SENT = "s = requests[0].get_response_sender()\ns.send(self.answer('a'), flags=%d)\n"
TWICE = [
    (SENT % 0 + "return [self.answer('b')]", "Non-decoupled model cannot send more than one response."),
    (SENT % 1 + "return [self.answer('b')]", "Response sender has been closed."),
    ("requests[0].get_response_sender().send(flags=1)", "Non-decoupled model cannot send complete final before"),
]


@pytest.mark.parametrize(("execute", "told"), TWICE)
def test_wrong_uses_of_the_sender_are_told_in_tritons_words(
    host: Host, gate: Path, caplog: pytest.LogCaptureFixture, execute: str, told: str
) -> None:
    host.load("m", TEXT_CONFIG, code(execute, gate))
    response = host.infer("m", text("x")).one()
    assert host.server.stop(10.0)
    seen = str(response.error) if response.error is not None else caplog.text
    assert f"Unable to send response. {told}" in seen


@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_after_the_last_response_is_logged(
    host: Host, gate: Path, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    path = host.load("m", DECOUPLED_CONFIG, code(SENT % 1 + "raise ValueError('too late')", gate, is_async=is_async))
    assert word(host.infer("m", text("x"))) == b"a"
    assert host.server.stop(10.0)
    (record,) = [record for record in caplog.records if "too late" in record.getMessage()]
    assert (record.levelname, record.pathname, record.lineno) == ("ERROR", str(path / "model.py"), 7)
    assert record.getMessage().startswith(
        "Failed to process the request(s) for model 'm_0_0', message: ValueError: too late"
    )
