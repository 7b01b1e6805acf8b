"""Each python instance has a process of its own: its death ends its own requests alone, it is started again, and
nothing of it is left behind, whichever process dies first."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from llmbackend.backends.python import model_state
from llmbackend.backends.python.stub.packets import PacketReader
from llmbackend.backends.python.stub_process import Outbox
from llmbackend.backends.python.stub_supervisor import StubSupervisor
from llmbackend.core.backend_api import ErrorCode, TritonError
from llmbackend.core.metrics.model_metrics import FailureReason
from llmbackend.core.tensors import Tensor
from tests.helpers.core_host import version_of
from tests.helpers.processes import is_alive
from tests.helpers.python_host import Answers, Host, write_model
from tests.helpers.python_text_models import DECOUPLED, HEAD, answering, body, config, said, text
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow

# Streams "0", "1", … until it is cancelled; other words do what they say. Answers "pid" with its own.
STREAM = (
    HEAD
    + """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.run, args=(request,)).start()

    def run(self, request):
        sender, text = request.get_response_sender(), text_of(request)
        if text == "exit":
            os._exit(3)
        if text == "segfault":
            ctypes.string_at(0)
        if text == "abort":
            os.abort()
        if text == "pid":
            sender.send(response(os.getpid()), flags=1)
            return
        if text == "pid, then stream":
            sender.send(response(os.getpid()))
        count = 0
        while not request.is_cancelled():
            sender.send(response(count))
            count += 1
            time.sleep(0.01)
        sender.send(flags=1)
"""
)


def test_instances_run_in_processes_of_their_own(host: Host) -> None:
    host.load("m", config(count=2), body("time.sleep(0.05)\nreturn [response(os.getpid()) for r in requests]"))
    answers = [host.infer("m", text("x")) for _ in range(2)]
    pids = {int(said(answer.one())) for answer in answers}
    assert len(pids) == 2 and os.getpid() not in pids
    host.server.unload_model("m")
    eventually(lambda: not any(map(is_alive, pids)))


@pytest.mark.parametrize(
    ("word", "how"),
    [("exit", "exit code 3"), ("segfault", "signal SIGSEGV"), ("abort", "signal SIGABRT"), ("", "signal SIGKILL")],
)
def test_crash_ends_the_requests_of_its_instance_with_an_error_and_the_model_serves_on(
    host: Host, word: str, how: str
) -> None:
    host.load("m", config(DECOUPLED), STREAM)
    pid = int(said(host.infer("m", text("pid")).one()))
    stream = host.infer("m", text("stream"))
    first, _ = stream.next()
    assert first is not None and said(first) == "0"
    if word:
        killer = host.infer("m", text(word))
        assert killer.one().error is not None
    else:
        os.kill(pid, signal.SIGKILL)
    error = stream.all()[-1].error
    assert error is not None and error.code is ErrorCode.INTERNAL
    assert str(error) == f"Stub process 'm_0_0' is not healthy. It ended by {how}.".replace("by exit", "with exit")
    assert int(said(host.infer("m", text("pid")).one())) != pid
    assert host.server.model_is_ready("m")


def test_an_operator_kills_the_process_of_an_instance(host: Host) -> None:
    host.load("m", config(DECOUPLED, count=2), STREAM)
    streams = _one_stream_in_each_process(host)
    (pid,) = host.server.kill_instance("m", 1, "m_0_1")
    failed = [stream for stream in streams if _ends_with_error(stream)]
    assert len(failed) == 1
    eventually(lambda: not is_alive(pid))
    (well,) = [stream for stream in streams if stream not in failed]
    well.cancel()
    well.all()


def test_crash_leaves_other_instances_alone(host: Host) -> None:
    host.load("m", config(DECOUPLED, count=2), STREAM)
    streams = _one_stream_in_each_process(host)
    host.infer("m", text("exit")).one()
    failed = [stream for stream in streams if _ends_with_error(stream)]
    (well,) = [stream for stream in streams if stream not in failed]
    for _ in range(5):
        response, _ = well.next()
        assert response is not None and response.error is None
    well.cancel()
    assert all(response.error is None for response in well.all())


def _one_stream_in_each_process(host: Host) -> list[Answers]:
    """Of two. `execute` returns at once, so that either process may get any request."""
    streams: dict[int, Answers] = {}
    while len(streams) < 2:
        stream = host.infer("m", text("pid, then stream"))
        first, _ = stream.next()
        assert first is not None
        if streams.setdefault(int(said(first)), stream) is not stream:
            stream.cancel()
            stream.all()
    return list(streams.values())


def _ends_with_error(stream: Answers) -> bool:
    for _ in range(100):
        response, flags = stream.next()
        if flags:
            return response is not None and response.error is not None
    return False


def test_request_that_waits_for_a_new_process_is_served_by_it(host: Host, tmp_path: Path) -> None:
    rest = "    def initialize(self, args):\n        time.sleep(0.2)\n"
    code = body("if text_of(requests[0]) == 'exit':\n    os._exit(1)\nreturn [response('ok') for r in requests]", rest)
    host.load("m", config(), code)
    answers = [host.infer("m", text(word)) for word in ("exit", "x", "exit", "x")]
    errors = [answer.one().error for answer in answers]
    assert [error is None for error in errors] == [False, True, False, True]
    assert host.counts("m") == (2, 4, 2, 2)


def hanging_restart(host: Host, flag: Path) -> StubSupervisor[Any]:
    """A model whose process has died; while `flag` exists, its `initialize` does not return."""
    rest = (
        f"    def initialize(self, args):\n        while os.path.exists({str(flag)!r}):\n            time.sleep(0.01)\n"
    )
    code = body("if text_of(requests[0]) == 'exit':\n    os._exit(1)\nreturn [response('ok') for r in requests]", rest)
    host.load("m", config(), code)
    flag.touch()
    assert host.infer("m", text("exit")).one().error is not None
    (instance,) = version_of(host.server, "m").instances
    supervisor: StubSupervisor[Any] = instance.state.supervisor
    return supervisor


def test_request_that_waits_for_a_process_that_hangs_can_be_cancelled(host: Host, tmp_path: Path) -> None:
    hanging_restart(host, tmp_path / "flag")
    waiting = host.infer("m", text("x"))
    eventually(lambda: not version_of(host.server, "m").leaked_resources()["requests in its queue"])
    waiting.cancel()
    error = waiting.one().error
    assert error is not None and error.code is ErrorCode.CANCELLED
    assert version_of(host.server, "m").statistics.failures[FailureReason.CANCELED] == 1
    host.server.unload_model("m")
    eventually(lambda: host.server.check() == [])


def test_requests_do_not_wait_for_ever_for_a_process_that_hangs(host: Host, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    hanging_restart(host, flag)._patience_s = 0.0
    for _ in range(2):
        error = host.infer("m", text("x")).one().error
        assert error is not None and error.code is ErrorCode.UNAVAILABLE
        assert str(error) == "Stub process 'm_0_0' is not healthy. It is being started."
    flag.unlink()
    eventually(lambda: host.infer("m", text("x")).one().error is None)


def test_process_that_can_not_be_started_again_refuses_with_the_cause_and_recovers(host: Host, tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    rest = (
        f"    def initialize(self, args):\n        if os.path.exists({str(flag)!r}): raise RuntimeError('no weights')\n"
    )
    code = body("if text_of(requests[0]) == 'exit':\n    os._exit(1)\nreturn [response('ok') for r in requests]", rest)
    host.load("m", config(), code)
    flag.touch()
    host.infer("m", text("exit")).one()
    error = host.infer("m", text("x")).one().error
    assert error is not None and error.code is ErrorCode.UNAVAILABLE
    assert "Stub process 'm_0_0' is not healthy. RuntimeError: no weights" in str(error)
    assert not host.server.model_is_ready("m")
    flag.unlink()
    eventually(lambda: host.server.model_is_ready("m"))
    assert said(host.infer("m", text("x")).one()) == "ok"


def test_crash_while_loading_fails_the_load_with_the_last_words(host: Host) -> None:
    rest = "    def initialize(self, args):\n        print('my last words', flush=True)\n        os._exit(4)\n"
    with pytest.raises(TritonError) as caught:
        host.load("m", config(), answering("1", rest))
    assert "Stub process 'm_0_0' is not healthy. It ended with exit code 4.\nmy last words" in str(caught.value)


def test_model_that_hangs_in_finalize_is_killed_after_the_stub_timeout(tmp_path: Path) -> None:
    host = Host(tmp_path / "repo", settings={"stub-timeout-seconds": "3"})
    host.load("m", config(), answering("os.getpid()", "    def finalize(self):\n        time.sleep(600)\n"))
    pid = int(said(host.infer("m", text("x")).one()))
    assert host.server.stop(10.0)
    assert not is_alive(pid)


def test_process_is_started_again_as_soon_as_there_is_a_thread_for_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse_restarts(thread: threading.Thread) -> None:
        if thread.name.startswith("python-restart"):
            refuse_to_start(thread)
        start(thread)

    host.load("m", config(), body("if text_of(requests[0]) == 'exit':\n    os._exit(1)\nreturn [response('ok')]"))
    with monkeypatch.context() as without_threads:
        without_threads.setattr(threading.Thread, "start", refuse_restarts)
        host.infer("m", text("exit")).one()
        eventually(lambda: "can't start new thread" in str(host.infer("m", text("x")).one().error))
        assert not host.server.model_is_ready("m")
    eventually(lambda: host.server.model_is_ready("m"))  # which asks for it: no request comes to a model that is not
    assert host.infer("m", text("x")).one().error is None


@pytest.mark.parametrize("wrong", ["soon", "0", "-1", "nan", "inf"])
def test_a_stub_timeout_that_is_no_time_fails_the_load(tmp_path: Path, wrong: str) -> None:
    host = Host(tmp_path / "repo", settings={"stub-timeout-seconds": wrong})
    expected = f"'stub-timeout-seconds' must be a number of seconds above 0, got '{wrong}'"
    try:
        with pytest.raises(TritonError, match=expected):
            host.load("m", config(), answering("1"))
    finally:
        host.server.stop(10.0)


def test_messages_wait_while_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the socket holds, as when the answers of other models arrive faster than the model reads them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    outbox, count = Outbox(ours), 100
    with theirs, ours:
        with monkeypatch.context() as without_threads:
            without_threads.setattr(threading.Thread, "start", refuse_to_start)
            for number in range(count):
                outbox.post((number, bytes(30_000)))
        outbox.post((count, b""))
        reader = PacketReader(theirs)
        received = [reader.receive() for _ in range(count + 1)]
        outbox.close()
    assert [message[0][0] for message in received if message is not None] == [*range(count + 1)]


def refuse_to_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_process_that_starts_the_others_may_die_too(host: Host) -> None:
    host.load("m", config(), body("return [response(f'{os.getpid()} {os.getppid()}') for r in requests]"))
    pid, template = said(host.infer("m", text("x")).one()).split()
    assert int(template) != os.getpid()
    os.kill(int(template), signal.SIGKILL)
    eventually(lambda: not is_alive(int(pid)))
    eventually(lambda: host.infer("m", text("x")).one().error is None)
    new_pid, new_template = said(host.infer("m", text("x")).one()).split()
    assert new_pid != pid and new_template != template


def test_instances_draw_different_random_numbers(host: Host) -> None:
    code = body("time.sleep(0.05)\nreturn [response(f'{np.random.random()} {os.getpid()}') for r in requests]")
    host.load("m", config(count=2), code)
    answers = [said(answer.one()).split() for answer in [host.infer("m", text("x")) for _ in range(2)]]
    assert len({number for number, _ in answers}) == len({pid for _, pid in answers}) == 2


def test_what_a_model_started_ends_with_it(host: Host) -> None:
    rest = "    def initialize(self, args):\n        self.child = subprocess.Popen(['sleep', '600'])\n"
    host.load("m", config(), answering("self.child.pid", rest))
    child = int(said(host.infer("m", text("x")).one()))
    assert is_alive(child)
    host.server.unload_model("m")
    eventually(lambda: not is_alive(child))


def test_crash_is_seen_although_a_fork_of_the_model_lives_on(host: Host) -> None:
    execute = """
if text_of(requests[0]) == "exit":
    os._exit(3)
here, there = os.pipe()
pid = os.fork()
if pid == 0:
    os.setsid()
    os.write(there, b"x")
    time.sleep(600)
os.read(here, 1)
return [response(pid)]
"""
    host.load("m", config(), body(execute))
    fork = int(said(host.infer("m", text("x")).one()))
    try:
        error = host.infer("m", text("exit")).one().error
        assert error is not None and "exit code 3" in str(error) and is_alive(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_signals_for_the_host_do_not_end_a_model(host: Host) -> None:
    host.load("m", config(), answering("os.getpid()"))
    pid = int(said(host.infer("m", text("x")).one()))
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    assert int(said(host.infer("m", text("x")).one())) == pid


def test_output_of_a_model_is_in_the_log(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    code = body("print('hello'); print('oh', file=sys.stderr); os.write(1, b'raw\\n')\nreturn [response(1)]")
    host.load("m", config(), code)
    host.infer("m", text("x")).one()
    eventually(lambda: {"m_0_0: hello", "m_0_0: oh", "m_0_0: raw"} <= set(caplog.messages))


def test_requests_leave_no_descriptor_in_host_or_process(host: Host) -> None:
    execute = """
if text_of(requests[0]) == "count":
    return [response(len(os.listdir("/proc/self/fd")))]
return [pb_utils.InferenceResponse([pb_utils.Tensor("R", r.inputs()[0].as_numpy())]) for r in requests]
"""
    host.load("m", config(), body(execute))
    large = [Tensor.text("T", b"x" * 1_000_000)]
    host.infer("m", large).one()
    before = (len(os.listdir("/proc/self/fd")), said(host.infer("m", text("count")).one()))
    kept = [host.infer("m", large).one() for _ in range(50)]
    assert all(response.outputs[0].data[0] == b"x" * 1_000_000 for response in kept)
    assert (len(os.listdir("/proc/self/fd")), said(host.infer("m", text("count")).one())) == before


HOST_PROGRAM = """
import sys, time
from pathlib import Path
from random import Random
sys.path.insert(0, {root!r})
from tests.helpers.python_host import Host
host = Host(Path({repository!r}))
host.server.load_model("m")
time.sleep(600)
"""


@pytest.mark.parametrize("lock", ["", "import ctypes; ctypes.PyDLL(None).pause()"])
def test_no_process_outlives_its_host(tmp_path: Path, lock: str) -> None:
    """Also not one that can not run Python code at that time: `pause` of a PyDLL keeps the interpreter's lock."""
    told = tmp_path / "pid"
    rest = f"""
    def initialize(self, args):
        with open({str(told)!r} + "~", "w") as file:
            file.write(str(os.getpid()))
        os.rename({str(told)!r} + "~", {str(told)!r})
        {lock or "pass"}
"""
    write_model(tmp_path / "repo", "m", config(), answering("1", rest))
    program = HOST_PROGRAM.format(root=str(Path(__file__).parents[2]), repository=str(tmp_path / "repo"))
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        eventually(told.exists)
        pid = int(told.read_text())
        assert is_alive(pid)
        process.kill()
        process.wait()
    eventually(lambda: not is_alive(pid))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real one, without the host's packages but for numpy, which it takes from them."""
    root = tmp_path_factory.mktemp("environment") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    (packages,) = root.glob("lib/python*/site-packages")
    import numpy

    installed = Path(numpy.__file__).parent.parent
    for name in ("numpy", "numpy.libs"):
        if (installed / name).exists():
            (packages / name).symlink_to(installed / name)
    return root


ENVIRONMENT_MODEL = """
import os, sys, numpy as np
import triton_python_backend_utils as pb_utils

try:
    import torch
except ImportError:
    torch = None

class TritonPythonModel:
    def execute(self, requests):
        said = f"{sys.prefix} {torch} {os.environ['PATH'].split(os.pathsep)[0]}"
        return [pb_utils.InferenceResponse([pb_utils.Tensor("R", np.array([said], dtype=object))]) for r in requests]
"""


def environment_config(path: str) -> str:
    return config() + f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}\n'


def test_execution_env_path_names_a_directory(host: Host, environment: Path) -> None:
    host.load("m", environment_config(str(environment)), ENVIRONMENT_MODEL)
    assert said(host.infer("m", text("x")).one()) == f"{environment} None {environment / 'bin'}"


def test_execution_env_path_names_an_archive_that_models_share(host: Host, environment: Path, tmp_path: Path) -> None:
    (host.repository / "m").mkdir()
    (host.repository / "n").mkdir()
    with tarfile.open(host.repository / "m" / "env.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(environment, ".")
    (host.repository / "n" / "env.tar.gz").symlink_to(host.repository / "m" / "env.tar.gz")
    roots = set()
    for name in ("m", "n"):
        host.load(name, environment_config("$$TRITON_MODEL_DIRECTORY/env.tar.gz"), ENVIRONMENT_MODEL)
        root, found, _ = said(host.infer(name, text("x")).one()).split()
        assert found == "None"
        roots.add(Path(root))
    (unpacked,) = roots
    host.server.unload_model("m")
    eventually(lambda: host.server._versions.operations.wait_for_zero(0))
    assert unpacked.is_dir(), "n uses it"
    host.server.load_model("m")
    assert said(host.infer("m", text("x")).one()).split()[0] == str(unpacked)
    for name in ("m", "n"):
        host.server.unload_model(name)
    eventually(lambda: not unpacked.exists())


def test_an_archive_without_an_interpreter_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    tarfile.open(tmp_path / "env.tar", "w").close()
    environments = model_state.Environments()
    with pytest.raises(TritonError, match="has no executable bin/python"):
        environments.acquire(str(tmp_path / "env.tar"), tmp_path)
    assert not list((tmp_path / "tmp").iterdir())


ACTIVATED_MODEL = body(
    "child = subprocess.check_output(['sh', '-c', 'echo $LD_LIBRARY_PATH'], text=True).strip()\n"
    "return [response(json.dumps([child, *map(os.environ.get, ('FROM_SCRIPT', 'STARTED_WITH'))])) for r in requests]"
)


def environment_with_script(root: Path, environment: Path, script: str) -> str:
    """An environment that is no venv; `environment` has its packages. Returns a configuration that names it."""
    (root / "bin").mkdir(parents=True)
    python = root / "bin" / "python"
    python.write_text(f'#!/bin/sh\nSTARTED_WITH="$LD_LIBRARY_PATH" exec {environment}/bin/python "$@"\n')
    python.chmod(0o755)
    (root / "bin" / "activate").write_text(script)
    return environment_config(str(root))


def test_activate_script_of_an_environment_sets_variables(host: Host, environment: Path, tmp_path: Path) -> None:
    """The environment's libraries are for its interpreter: programs that a model starts have what the script sets."""
    script = "echo activated\nexport FROM_SCRIPT='a\nb' LD_LIBRARY_PATH=/of/script\n"
    host.load("m", environment_with_script(tmp_path / "env", environment, script), ACTIVATED_MODEL)
    found = json.loads(said(host.infer("m", text("x")).one()))
    assert found == ["/of/script", "a\nb", f"{tmp_path}/env/lib:/of/script"]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo no compiler >&2\nreturn 3\n", "exit status 3\nno compiler"),
        ("exec sleep 600\n", "it did not end within 0.5 s"),
    ],
)
def test_activate_script_that_fails_fails_the_load(
    host: Host, environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    monkeypatch.setattr(model_state, "ACTIVATE_TIMEOUT_S", 0.5 if "sleep" in script else 30.0)
    with pytest.raises(TritonError) as caught:
        host.load("m", environment_with_script(tmp_path / "env", environment, script), answering("1"))
    assert "activate' failed: " in str(caught.value) and told in str(caught.value)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/nowhere/env.tar.gz", "EXECUTION_ENV_PATH '/nowhere/env.tar.gz' does not exist"),
        ("$$TRITON_MODEL_DIRECTORY/1", "has no executable bin/python or bin/python3"),
        ("$$TRITON_MODEL_DIRECTORY/config.pbtxt", "cannot be unpacked"),
        ("$$TRITON_MODEL_DIRECTORY/../other", "must not escape from the model directory"),
    ],
)
def test_environment_that_can_not_be_used_fails_the_load(host: Host, path: str, told: str) -> None:
    (host.repository / "other").mkdir()
    with pytest.raises(TritonError) as caught:
        host.load("m", environment_config(path), answering("1"))
    assert told in str(caught.value)


def test_environment_whose_program_does_not_speak_fails_the_load(tmp_path: Path) -> None:
    host = Host(tmp_path / "repo", settings={"stub-timeout-seconds": "1"})
    for name, program, told in (
        (
            "m",
            "#!/bin/sh\necho no python here >&2\nexit 7\n",
            "which starts it, ended with exit code 7.\nno python here",
        ),
        ("n", "#!/bin/sh\nexec sleep 600\n", "Stub process 'n' did not start within 1 s"),
    ):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(program)
        python.chmod(0o755)
        with pytest.raises(TritonError) as caught:
            host.load(name, environment_config(str(tmp_path / name)), answering("1"))
        assert told in str(caught.value)
    assert host.server.stop(10.0)


def test_more_processes_than_the_machine_can_bear_are_refused(host: Host) -> None:
    with pytest.raises(TritonError, match="asks for 1000 instances, each in its own process, expected at most"):
        host.load("m", config(count=1000), answering("1"))


def test_every_request_ends_once_while_processes_are_killed(host: Host) -> None:
    """Streams, cancellations and kills at random; each request has exactly one last response."""
    random = Random(7)
    host.load("m", config(DECOUPLED, count=2), STREAM)
    pids = {int(said(host.infer("m", text("pid")).one())) for _ in range(6)}
    streams = []
    for _ in range(4):
        streams += [host.infer("m", text("stream")) for _ in range(random.randrange(1, 6))]
        streams += [host.infer("m", text("pid")) for _ in range(random.randrange(3))]
        for stream in random.sample(streams, 2):
            stream.cancel()
        for pid in random.sample(sorted(pids), min(1, len(pids))):
            os.kill(pid, signal.SIGKILL)
        streams.append(host.infer("m", text("exit")))
        answers = [host.infer("m", text("pid")).all()[-1] for _ in range(4)]
        pids |= {int(said(answer)) for answer in answers if answer.error is None}
        pids = {pid for pid in pids if is_alive(pid)}
    for stream in streams:
        stream.cancel()
        assert all(response.error is None for response in stream.all()[:-1])
    eventually(lambda: host.server.check() == [])


@pytest.mark.parametrize("delay_ms", [0, 3, 10, 30])
def test_unload_while_a_crashed_process_is_started_again(host: Host, delay_ms: int) -> None:
    host.load(
        "m", config(), body("os._exit(1)", f"    def initialize(self, args):\n        time.sleep({delay_ms} / 1000)\n")
    )
    for delay_s in (0.0, 0.002, 0.01, 0.05):
        answers = host.infer("m", text("x"))
        assert answers.one().error is not None
        time.sleep(delay_s)
        host.server.unload_model("m")
        eventually(lambda: host.server.check() == [])
        host.server.load_model("m")
