"""The last line of a server that does not start: what is wrong and what to do, in plain words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmbackend.core.errors import StartupError, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.server.start_failure import MAX_MODELS_SHOWN, advice, failure_summary
from tests.helpers.command_lines import CommandLine
from tests.helpers.command_lines import last_line as last_line_of
from tests.helpers.server_process import write_mock_model

CHECKPOINT = "Give the directory of a Hugging Face checkpoint"


def last_line(*flags: str) -> str:
    """What the command writes last before it ends with exit code 1."""
    ports = [f"--{protocol}-port=0" for protocol in ("http", "grpc", "metrics")]
    command = [sys.executable, "-m", "llmbackend.cli", "serve", *ports, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr.rstrip().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "wrong", "remedy"),
    [
        (["--model", "/no/such/dir"], "is '/no/such/dir', which does not exist", CHECKPOINT),
        (["--model", "a/b/c"], "is 'a/b/c', which does not exist", CHECKPOINT),
        (["--model", __file__], "which is neither a directory nor a GGUF file", CHECKPOINT),
        (["--model", str(Path(__file__).parent)], "has no config.json", CHECKPOINT),
        (["--model-repository", "/no/such/repo"], "'/no/such/repo' does not exist", "give the directory that holds"),
        (["--model-repository", __file__], "is no directory", "give the directory that holds"),
        (["--http-port", "many"], "--http-port", "valid integer"),
    ],
)
def test_wrong_flags_end_before_anything_is_loaded(
    flags: list[str], wrong: str, remedy: str, command_line: CommandLine
) -> None:
    line = last_line_of(command_line.refusal_of_flags(*flags))
    assert wrong in line
    assert remedy in line


def start(repository: Path) -> StartupError:
    with pytest.raises(StartupError) as failure:
        InferenceServer(ServerOptions(model_repositories=(repository,))).start()
    assert str(failure.value) == "failed to load all models"
    return failure.value


def write_model(root: Path, name: str, config: str = 'backend: "llm"\n', **arguments: object) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(config)
    if arguments:
        (root / name / "1" / "model.json").write_text(json.dumps(arguments))


@pytest.mark.parametrize(
    ("config", "arguments", "wrong", "remedy"),
    [
        ('backend: "nosuch"', {}, "backend 'nosuch'", "Name an installed backend in config.pbtxt (llm, onnxruntime, "),
        (
            'platform: "tensorrt_plan"',
            {},
            "no backend for TensorRT plans",
            "put a compiled libtriton_tensorrt.so into ",
        ),
        ("backend: llm", {}, "config.pbtxt", "Correct that"),
        ('backend: "llm"', {}, "model.json", CHECKPOINT),
        (
            'backend: "llm"',
            {"model": "mock", "block_size": 0},
            "'block_size' is 0, expected at least 1",
            "Correct that",
        ),
        ('backend: "llm"', {"model": "/no/such"}, "is '/no/such', which does not exist", CHECKPOINT),
    ],
)
def test_models_that_do_not_load_say_why_and_what_to_do(
    tmp_path: Path, config: str, arguments: dict[str, object], wrong: str, remedy: str
) -> None:
    write_model(tmp_path, "bad", config, **arguments)
    words = failure_summary(start(tmp_path).reasons)
    assert words.startswith("Model 'bad' was not loaded: ")
    assert "\n" not in words
    assert wrong in words
    assert remedy in words


def test_a_refused_architecture_is_named_at_the_end(tmp_path: Path) -> None:
    write_model(tmp_path, "jamba")
    version = tmp_path / "jamba" / "1"
    for file in Path("model_repository/demo/1").iterdir():
        (version / file.name).write_bytes(file.read_bytes())
    config = json.loads((version / "config.json").read_text())
    (version / "config.json").write_text(
        json.dumps(config | {"architectures": ["JambaForCausalLM"], "model_type": "jamba"})
    )
    line = last_line("--model-repository", str(tmp_path))
    assert line.startswith("Model 'jamba' was not loaded: ")
    assert "'JambaForCausalLM' is not supported" in line
    assert line.endswith("docs/models.md lists the supported architectures.")


def test_a_repository_that_may_not_be_read_is_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)  # tests may run as root, for which mode bits do not count
    with pytest.raises(TritonError, match=r"failed to read model repository .*: Permission denied"):
        InferenceServer(ServerOptions(model_repositories=(tmp_path,))).start()


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("engine argument 'model' is '/x', which cannot be read: Permission denied", "Let the user that runs"),
        ("the engine of 'm_0' did not start: the engine process ended by signal SIGKILL", "too small"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes", "too small"),
        ("CUDA out of memory. Tried to allocate 2 GiB", "too small"),
        (
            "engine argument 'model' is 'a/b', which is not a local directory, and the hub did not return its files: x",
            "or give the path of a local checkpoint",
        ),
        ("the tokenizer of 'a/b' cannot be loaded: Got: ConnectError: … on the Hub", "Check the name and the network"),
        ("KeyError: 'x'", "See the log above."),
    ],
)
def test_advice_follows_the_reason(reason: str, remedy: str) -> None:
    assert remedy in advice(reason)


def test_many_failures_are_cut() -> None:
    lines = failure_summary({f"m{index}": "x " * 5000 for index in range(MAX_MODELS_SHOWN + 3)}).splitlines()
    assert lines[-1] == "and 3 more models; see the log above."
    assert max(map(len, lines)) < 800


READY_WITHOUT_A_THREAD = """
import sys
from llmbackend.cli import main
from llmbackend.server import serve

in_thread = serve.in_thread

def full(function, *arguments):
    if function is serve.give_back_freed_memory:
        raise RuntimeError("can't start new thread")
    return in_thread(function, *arguments)

serve.in_thread = full
main.main()
"""


def test_a_server_that_is_ready_stays_where_no_thread_can_be_started(tmp_path: Path) -> None:
    write_mock_model(tmp_path, "m")
    ports = [f"--{protocol}-port=0" for protocol in ("http", "grpc", "metrics")]
    flags = ["serve", "--model-repository", str(tmp_path), "--http-address=127.0.0.1", "--allow-pages=false", *ports]
    command = [sys.executable, "-c", READY_WITHOUT_A_THREAD, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("Try:"):
                process.terminate()
    assert process.returncode == 0 and "Traceback" not in "".join(said), said


LITTLE_ADDRESS_SPACE = """
import resource, sys
from pathlib import Path
from llmbackend.cli.main import main
from llmbackend.server.frontend_server import FrontendServer

start, room_bytes = FrontendServer.start, int(sys.argv.pop()) << 20

async def limited(self):
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit_bytes = used_bytes + room_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    await start(self)

FrontendServer.start = limited
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("room_mib", [8, 30])
def test_a_server_without_room_for_grpcs_threads_ends_with_one_line(tmp_path: Path, room_mib: int) -> None:
    """Where `ulimit -v` is just enough to load models, gRPC's core would abort the process, or end by SIGSEGV. Ten
    stacks take 80 MiB, of which the C library may have kept 40."""
    write_mock_model(tmp_path, "mock")
    flags = [f"--{protocol}-port=0" for protocol in ("http", "grpc", "metrics")]
    command = [sys.executable, "-c", LITTLE_ADDRESS_SPACE, "serve", "--model-repository", str(tmp_path), *flags]
    done = subprocess.run([*command, str(room_mib)], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "pthread_create" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if "cannot listen" in line]
    assert "gRPC needs" in line and "ulimit -v" in line and "--allow-grpc=false" in line


def test_a_server_whose_temporary_folder_has_too_long_a_path_ends_with_one_line(tmp_path: Path) -> None:
    write_mock_model(tmp_path, "mock", transport="inline")
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    flags = [f"--{protocol}-port=0" for protocol in ("http", "grpc", "metrics")]
    command = [sys.executable, "-m", "llmbackend.cli", "serve", "--model-repository", str(tmp_path), *flags]
    done = subprocess.run(
        command, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if "cannot serve" in line]
    assert str(folder) in line and "TMPDIR" in line
