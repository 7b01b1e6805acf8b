"""System shared memory in the host: regions, what may be registered, tensors in and out, and clients that misbehave."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbackend.core import shared_memory
from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceRequest
from llmbackend.core.shared_memory import DISABLED, MemoryKind, SharedMemoryManager
from llmbackend.core.tensors import SharedInput, SharedRange, Tensor
from tests.helpers.core_host import ECHO_BACKEND, KEEPING_BACKEND, STAGE, Client, Repository, send, serving
from tests.helpers.waiting import eventually

SYSTEM, CUDA = MemoryKind.SYSTEM, MemoryKind.CUDA
VALUES = np.array([1, 2, 3, 4], np.float32)
NUMBERS = itertools.count()
NewFile = Callable[..., Path]


@pytest.fixture
def new_file() -> Iterator[NewFile]:
    """Makes files in /dev/shm, as a client would."""
    made: list[Path] = []

    def make(content: bytes = bytes(16)) -> Path:
        path = Path(f"/dev/shm/llmbackend_test_{os.getpid()}_{next(NUMBERS)}")
        made.append(path)
        path.write_bytes(content)
        return path

    yield make
    for path in made:
        path.unlink(missing_ok=True)


@pytest.fixture
def memory() -> Iterator[SharedMemoryManager]:
    made = SharedMemoryManager(allowed=True)
    yield made
    made.close()


@pytest.fixture
def echo(repository: Repository) -> Iterator[InferenceServer]:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo")
    with serving(repository, "m", allow_client_shm=True) as server:
        yield server


@pytest.fixture
def keeping(repository: Repository) -> Iterator[InferenceServer]:
    """A model that keeps its requests until the test answers them."""
    repository.backend("keep", KEEPING_BACKEND)
    repository.model("m", "keep")
    with serving(repository, "m", allow_client_shm=True) as server:
        yield server


def register(memory: SharedMemoryManager, name: str, file: Path, byte_size: int = 16, offset: int = 0) -> None:
    memory.register_system(name, f"/{file.name}", offset, byte_size)


def open_files() -> list[str]:
    """What this process has open in /dev/shm, of this test's."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the descriptor of this listing
            continue
    return [name for name in found if "llmbackend_test_" in name]


def refusal(act: Callable[..., Any], *args: Any) -> tuple[ErrorCode, str]:
    with pytest.raises(TritonError) as caught:
        act(*args)
    return caught.value.code, caught.value.message


def infer(
    server: InferenceServer,
    place_in: SharedRange | None = None,
    place_out: SharedRange | None = None,
    client: Client | None = None,
    shape: tuple[int, ...] = (4,),
    **fields: Any,
) -> Client:
    client = client or Client()
    client.handle = server.infer_async(
        InferenceRequest(
            "m",
            inputs=() if place_in else (Tensor.of("X", VALUES),),
            shared_inputs=(SharedInput("X", "FP32", shape, place_in),) if place_in else (),
            shared_outputs={"Y": place_out} if place_out else {},
            **fields,
        ),
        client,
    )
    return client


def test_regions_are_listed_by_name_and_closed_when_they_are_unregistered(
    memory: SharedMemoryManager, new_file: NewFile
) -> None:
    file = new_file()
    register(memory, "b", file)
    register(memory, "a", file, 8, 4)
    listed = [(region.name, region.key, region.offset, region.byte_size) for region in memory.status(SYSTEM)]
    assert listed == [("a", f"/{file.name}", 4, 8), ("b", f"/{file.name}", 0, 16)]
    assert memory.status(SYSTEM, "a")[0].byte_size == 8 and memory.status(CUDA) == []
    assert len(open_files()) == 2
    memory.unregister(SYSTEM, "a")
    memory.unregister(SYSTEM, "nosuch")
    memory.unregister(CUDA)
    assert [region.name for region in memory.status(SYSTEM)] == ["b"] and len(open_files()) == 1
    memory.unregister(SYSTEM)
    assert memory.status(SYSTEM) == [] and open_files() == []


def test_regions_are_closed_when_the_server_stops(repository: Repository, new_file: NewFile) -> None:
    with serving(repository, allow_client_shm=True) as server:
        register(server.shared_memory, "r", new_file())
        assert len(open_files()) == 1
    assert open_files() == []
    late = refusal(register, server.shared_memory, "s", new_file())
    assert late == (ErrorCode.UNAVAILABLE, "Server is stopping")


def test_refusals_of_status_and_register_have_the_texts_of_triton(
    memory: SharedMemoryManager, new_file: NewFile
) -> None:
    file = new_file()
    register(memory, "in", file)
    key = f"/{file.name}"
    invalid_args = (ErrorCode.INVALID_ARG, "failed to register shared memory region 'x': invalid args")
    for expected, act in (
        ((ErrorCode.ALREADY_EXISTS, "shared memory region 'in' already in manager"), ("in", key, 0, 16)),
        ((ErrorCode.INTERNAL, "Unable to open shared memory region: '/nosuch'"), ("x", "/nosuch", 0, 16)),
        (invalid_args, ("x", key, 0, 17)),
        (invalid_args, ("x", key, 1, 16)),
        (
            (ErrorCode.INVALID_ARG, "failed to register shared memory region 'x': invalid args"),
            ("x", key, (1 << 64) - 1, (1 << 64) - 1),
        ),
        (invalid_args, ("x", key, 0, 0)),
    ):
        assert refusal(memory.register_system, *act) == expected
    assert refusal(memory.status, SYSTEM, "zz") == (
        ErrorCode.NOT_FOUND,
        "Unable to find system shared memory region: 'zz'",
    )
    assert refusal(memory.status, CUDA, "zz") == (ErrorCode.NOT_FOUND, "Unable to find cuda shared memory region: 'zz'")
    assert "registered as system shared memory, not CUDA" in refusal(memory.status, CUDA, "in")[1]
    assert len(open_files()) == 1  # a refusal leaves nothing open


@pytest.mark.parametrize("key", ["", "/", "///"])
def test_a_key_without_a_name_is_refused(memory: SharedMemoryManager, key: str) -> None:
    assert refusal(memory.register_system, "r", key, 0, 1) == (
        ErrorCode.INVALID_ARG,
        f"cannot register shared memory region 'r' - invalid shm key '{key}'",
    )


@pytest.mark.parametrize("key", [".", "..", "/..", "../etc/passwd", "/../etc/passwd", "a/b", "a\0b", "x" * 300])
def test_a_key_names_a_file_of_the_shared_memory_directory_and_nothing_else(
    memory: SharedMemoryManager, key: str
) -> None:
    assert refusal(memory.register_system, "r", key, 0, 1) == (
        ErrorCode.INTERNAL,
        f"Unable to open shared memory region: '{key}'",
    )


def test_links_pipes_and_directories_are_no_shared_memory(
    memory: SharedMemoryManager, new_file: NewFile, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(64))
    for make in (lambda path: path.symlink_to(secret), os.mkfifo, lambda path: path.mkdir()):
        path = new_file()
        path.unlink()
        make(path)
        try:
            assert "Unable to open" in refusal(register, memory, "r", path, 1)[1]
        finally:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_regions_of_python_models_are_reserved(memory: SharedMemoryManager) -> None:
    for key in ("triton_python_backend_shm_region_x", "/triton_python_backend_shm_region_x"):
        code, text = refusal(memory.register_system, "r", key, 0, 1)
        assert code is ErrorCode.INVALID_ARG and text == (
            f"cannot register shared memory region 'r' with key '{key}' as the key contains the reserved prefix "
            "'triton_python_backend_shm_region_'"
        )


def test_cuda_memory_is_refused_as_by_a_triton_without_gpus(memory: SharedMemoryManager) -> None:
    assert refusal(memory.register_cuda, "c", bytes(64), 16, 0) == (
        ErrorCode.INVALID_ARG,
        "failed to register CUDA shared memory region: 'c', GPUs not supported",
    )
    assert refusal(memory.register_cuda, "c", bytes(3), 16, 0)[1] == (
        "failed to register shared memory region: invalid args"
    )


def test_the_number_of_regions_is_bounded(
    memory: SharedMemoryManager, new_file: NewFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "MAX_REGIONS", 2)
    file = new_file()
    register(memory, "a", file)
    register(memory, "b", file)
    assert refusal(register, memory, "c", file)[0] is ErrorCode.UNAVAILABLE
    memory.unregister(SYSTEM, "a")
    register(memory, "c", file)


def test_a_server_that_does_not_allow_it_refuses_in_the_words_of_triton(
    repository: Repository, new_file: NewFile
) -> None:
    repository.backend("echo", ECHO_BACKEND)
    repository.model("m", "echo")
    with serving(repository, "m") as server:
        disabled = (ErrorCode.UNSUPPORTED, DISABLED)
        assert refusal(register, server.shared_memory, "r", new_file()) == disabled
        assert refusal(server.shared_memory.register_cuda, "r", bytes(64), 1, 0) == disabled
        assert refusal(server.shared_memory.unregister, SYSTEM) == disabled
        assert refusal(infer, server, SharedRange("r", 0, 16)) == disabled
        assert server.shared_memory.status(SYSTEM) == []


def test_inputs_are_read_from_and_outputs_written_to_regions(echo: InferenceServer, new_file: NewFile) -> None:
    source, target = new_file(bytes(8) + VALUES.tobytes()), new_file(b"\xff" * 32)
    register(echo.shared_memory, "in", source, 20, 4)
    register(echo.shared_memory, "out", target, 32)
    (response,) = infer(echo, SharedRange("in", 4, 16), SharedRange("out", 8, 20)).responses()
    assert response.error is None and response.outputs[0].shape == (4,)
    assert target.read_bytes() == b"\xff" * 8 + VALUES.tobytes() + b"\xff" * 8


def test_places_outside_of_a_region_are_refused(echo: InferenceServer, new_file: NewFile) -> None:
    register(echo.shared_memory, "in", new_file(bytes(32)))
    for place, code, text in (
        (SharedRange("zz", 0, 16), ErrorCode.NOT_FOUND, "Unable to find shared memory region: 'zz'"),
        (
            SharedRange("in", 0, 32),
            ErrorCode.INVALID_ARG,
            "Invalid offset + byte size for shared memory region: 'in'",
        ),
        (
            SharedRange("in", 1, 16),
            ErrorCode.INVALID_ARG,
            "Invalid offset + byte size for shared memory region: 'in'",
        ),
        (
            SharedRange("in", 0, -1),
            ErrorCode.INVALID_ARG,
            "Invalid offset + byte size for shared memory region: 'in'",
        ),
        (
            SharedRange("in", 8, (1 << 64) - 8),
            ErrorCode.INVALID_ARG,
            "Integer overflow detected: byte_size (18446744073709551608) + offset (8) exceeds maximum value "
            "(18446744073709551615) for region 'in'",
        ),
        (SharedRange("in", 16, 0), ErrorCode.INVALID_ARG, "Invalid offset for shared memory region: 'in'"),
        (SharedRange("in", -1, 8), ErrorCode.INVALID_ARG, "Invalid offset for shared memory region: 'in'"),
    ):
        assert refusal(infer, echo, place) == (code, text)
        assert refusal(infer, echo, None, place) == (code, text)
    assert (
        "input byte size mismatch for input 'X' for model 'm'. Expected 16, got 8"
        in (refusal(infer, echo, SharedRange("in", 0, 8), SharedRange("in", 0, 16))[1])
    )
    assert echo.check() == []  # what refused requests had borrowed was given back


def test_an_output_that_does_not_fit_is_an_error_and_nothing_is_written(
    echo: InferenceServer, new_file: NewFile
) -> None:
    target = new_file()
    register(echo.shared_memory, "out", target)
    error = infer(echo, None, SharedRange("out", 0, 8)).error()
    assert (error.code, error.message) == (
        ErrorCode.INTERNAL,
        "shared memory size specified with the request for output 'Y' (8 bytes) should be at least 16 bytes to hold "
        "the results",
    )
    assert target.read_bytes() == bytes(16)


def test_memory_that_its_client_truncates_costs_that_clients_requests_and_not_the_server(
    echo: InferenceServer, new_file: NewFile
) -> None:
    source, target = new_file(VALUES.tobytes() * 4096), new_file(bytes(1 << 16))
    register(echo.shared_memory, "in", source, 1 << 16)
    register(echo.shared_memory, "out", target, 1 << 16)
    for file in (source, target):
        os.truncate(file, 4)
    code, text = refusal(infer, echo, SharedRange("in", 0, 16))
    assert code is ErrorCode.INVALID_ARG and text.endswith("has shrunk since it was registered")
    assert infer(echo, None, SharedRange("out", 0, 16)).error().message.endswith("has shrunk since it was registered")
    assert target.stat().st_size == 4  # not made larger by writing
    assert send(echo, "m").responses()[0].error is None


def test_memory_stays_usable_after_its_name_is_gone(echo: InferenceServer, new_file: NewFile) -> None:
    source = new_file(VALUES.tobytes())
    register(echo.shared_memory, "in", source)
    source.unlink()
    (response,) = infer(echo, SharedRange("in", 0, 16)).responses()
    assert response.outputs[0].data.tolist() == VALUES.tolist()


def test_what_a_client_writes_after_its_request_was_accepted_does_not_reach_the_model(
    keeping: InferenceServer, new_file: NewFile
) -> None:
    source = new_file(VALUES.tobytes())
    register(keeping.shared_memory, "in", source)
    client = infer(keeping, SharedRange("in", 0, 16), id="1")
    STAGE.wait("executed 1")
    source.write_bytes(b"\xff" * 16)
    (_, request), *_ = STAGE.kept
    assert request.inputs["X"].data.tolist() == VALUES.tolist()
    finish(client)


def finish(*clients: Client) -> None:
    """Answers every kept request with what it was sent."""
    while STAGE.kept:
        _, request = STAGE.kept.pop(0)
        response = request.new_response()
        response.add_output(Tensor.of("Y", request.inputs["X"].data))
        response.send(ResponseFlag.FINAL)
        request.release()
        del response, request
    for client in clients:
        client.responses()


def test_a_region_that_a_request_writes_to_is_unregistered_when_the_request_has_ended(
    keeping: InferenceServer, new_file: NewFile
) -> None:
    memory, target = keeping.shared_memory, new_file()
    register(memory, "out", target)
    client = infer(keeping, None, SharedRange("out", 0, 16), id="1")
    STAGE.wait("executed 1")
    memory.unregister(SYSTEM, "out")
    assert [region.name for region in memory.status(SYSTEM)] == ["out"] and len(open_files()) == 1
    assert refusal(infer, keeping, None, SharedRange("out", 0, 16))[0] is ErrorCode.NOT_FOUND
    assert refusal(register, memory, "out", target)[0] is ErrorCode.ALREADY_EXISTS
    assert keeping.check()[0].endswith("1 in-flight inferences")
    finish(client)
    assert target.read_bytes() == VALUES.tobytes()
    assert memory.status(SYSTEM) == [] and open_files() == []
    register(memory, "out", target)


def test_a_request_that_fails_or_is_cut_off_gives_its_regions_back(keeping: InferenceServer, new_file: NewFile) -> None:
    memory = keeping.shared_memory
    register(memory, "out", new_file())
    clients = [infer(keeping, None, SharedRange("out", 0, 16), id=str(number)) for number in range(2)]
    for number in range(2):
        STAGE.wait(f"executed {number}")
    (_, first), (_, second) = STAGE.kept
    memory.unregister(SYSTEM)
    first.new_response().send(ResponseFlag.FINAL, TritonError("no"))
    first.release()
    assert len(open_files()) == 1
    assert second.channel.abort(TritonError("cut"))
    assert [client.error().message for client in clients] == ["no", "cut"]
    assert open_files() == []
    second.release()
    STAGE.kept.clear()
    del first, second
    eventually(lambda: keeping.check() == [])


def test_clients_that_register_use_truncate_and_unregister_at_once_leave_nothing_behind(
    echo: InferenceServer, new_file: NewFile
) -> None:
    files = [new_file(bytes(64)) for _ in range(4)]
    expected = ("already in manager", "Unable to find", "has shrunk", "invalid args")

    def client(seed: int) -> list[str]:
        choose, errors = random.Random(seed), []
        for _ in range(150):
            name = f"r{choose.randrange(4)}"
            act = choose.choice(["register", "unregister", "infer", "infer", "infer", "truncate", "grow"])
            file = files[choose.randrange(4)]
            try:
                if act == "register":
                    register(echo.shared_memory, name, file, 64)
                elif act == "unregister":
                    echo.shared_memory.unregister(SYSTEM, name)
                elif act == "infer":
                    answer = infer(
                        echo, SharedRange(name, 0, 16), SharedRange(f"r{choose.randrange(4)}", 16, 16)
                    ).responses()[0]
                    errors += [answer.error.message] if answer.error else []
                else:
                    os.truncate(file, 64 if act == "grow" else choose.randrange(64))
            except TritonError as error:
                errors.append(error.message)
        return errors

    with ThreadPoolExecutor(4) as pool:
        errors = [error for found in pool.map(client, range(4)) for error in found]
    assert errors and all(any(words in error for words in expected) for error in errors)
    assert echo.check() == []
    echo.shared_memory.unregister(SYSTEM)
    assert open_files() == []
