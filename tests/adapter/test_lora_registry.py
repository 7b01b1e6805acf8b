"""LoraRegistry: what a name stands for while engines load, die and are asked to drop adapters."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmbackend.adapter import lora
from llmbackend.adapter.lora import WEIGHTS, AdapterCopies, LoraChange, LoraRegistry
from llmbackend.core.backend_api import ErrorCode, TritonError
from llmbackend.engine.messages import AdapterResult
from llmbackend.waiting.timer import Timer
from tests.helpers.thread_shortage import no_new_threads
from tests.helpers.waiting import eventually


def weights(tensors: dict[str, Any], header_bytes: int | None = None) -> bytes:
    """A file of safetensors without its tensors."""
    header = json.dumps(tensors).encode()
    return (len(header) if header_bytes is None else header_bytes).to_bytes(8, "little") + header


class Registry(LoraRegistry):
    """With two engines, and what they and clients were told."""

    def __init__(self, folder: Path, configured: dict[str, str] | None = None, load_timeout_s: float = 60) -> None:
        self.folder = folder
        self.answers: list[TritonError | None] = []
        self.names: set[str] = set()
        self.timer = Timer()
        configured = {} if configured is None else configured
        super().__init__(configured, self.timer, lambda: None, self._note, load_timeout_s)
        (folder / "cat").mkdir()
        (folder / "cat" / "adapter_config.json").write_text("{}")
        (folder / "cat" / WEIGHTS).write_bytes(weights({}))

    def _note(self, name: str, is_served: bool) -> None:
        (self.names.add if is_served else self.names.discard)(name)

    def begin(self, name: str, *, in_place: bool = False, engines: tuple[int, ...] = (0, 1)) -> None:
        change = LoraChange("load", name, str(self.folder), "cat", in_place)
        self.load(change, lambda: engines, self.answers.append)

    def ask(self, name: str, *, in_place: bool = False, engines: tuple[int, ...] = (0, 1)) -> str:
        """Its key, once its files are copied. Raises TritonError when they cannot be."""
        before, num_answers = set(self.wanted()), len(self.answers)
        self.begin(name, in_place=in_place, engines=engines)
        eventually(lambda: set(self.wanted()) - before or len(self.answers) > num_answers)
        if len(self.answers) > num_answers and (error := self.answers.pop()):
            raise error
        [key] = set(self.wanted()) - before
        return key

    def close(self) -> None:
        super().close()
        self.timer.stop()

    def serve(self, name: str, *, in_place: bool = False) -> str:
        key = self.ask(name, in_place=in_place)
        self.loaded(0, AdapterResult(key))
        self.loaded(1, AdapterResult(key))
        return key


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    registry = Registry(tmp_path)
    yield registry
    registry.close()


def refusal(registry: LoraRegistry, name: str) -> str:
    with pytest.raises(TritonError) as caught:
        registry.take(name)
    return caught.value.message


def test_an_adapter_is_served_when_every_engine_has_it(registry: Registry) -> None:
    key = registry.ask("a")
    registry.loaded(0, AdapterResult(key))
    assert registry.answers == [] and "LoRA a is not supported" in refusal(registry, "a")
    registry.loaded(1, AdapterResult(key))
    assert registry.answers == [None] and registry.take("a").key == key and registry.names == {"a"}
    registry.loaded(1, AdapterResult(key))  # a later engine, once more
    assert registry.answers == [None]


def test_one_engine_that_cannot_load_it_is_enough(registry: Registry) -> None:
    key = registry.ask("a")
    copy = Path(registry.wanted()[key])
    assert (copy / "adapter_config.json").is_file()
    registry.loaded(0, AdapterResult(key, f"LoRA '{key}' in '{copy}': no good"))
    registry.loaded(1, AdapterResult(key))
    [error] = registry.answers
    assert error is not None and error.message == "LoRA adapter 'a' in 'cat': no good"
    assert registry.wanted() == {} and registry.names == set()
    eventually(lambda: not copy.exists())


def test_a_load_ends_with_an_engine_that_ends_while_it_is_offered(registry: Registry) -> None:
    ending = threading.Thread(target=registry.engine_ended, args=(1,))

    def running() -> tuple[int, ...]:
        ending.start()
        ending.join(0.1)  # as far as it gets
        return 0, 1

    registry.load(LoraChange("load", "a", str(registry.folder), "cat"), running, registry.answers.append)
    eventually(lambda: registry.answers)
    ending.join()
    [error] = registry.answers
    assert error is not None and "has exited" in error.message


def test_what_an_engine_died_of_is_not_given_to_the_next_one(registry: Registry) -> None:
    old = registry.serve("a")
    registry.ask("b")
    registry.engine_ended(1)
    assert registry.answers[1] is not None and registry.answers[1].code is ErrorCode.INVALID_ARG
    assert set(registry.wanted()) == {old}, "those that are served stay"


def test_weights_stay_as_long_as_someone_has_them(registry: Registry) -> None:
    first = registry.serve("a")
    holder = registry.take("a")
    second = registry.serve("a", in_place=True)
    assert registry.take("a").key == second != first == holder.key
    assert set(registry.wanted()) == {first, second}
    registry.unload("a")
    assert set(registry.wanted()) == {first}, "its last holder is a request"
    del holder
    assert registry.wanted() == {} and registry.names == set()
    with pytest.raises(TritonError, match="cannot be found"):
        registry.unload("a")


def test_names_that_cannot_be_had(tmp_path: Path) -> None:
    registry = Registry(tmp_path, {"doll": "/doll"})
    registry.serve("a")
    registry.ask("b")
    for name, in_place, told in (
        ("a", False, "has already been loaded"),
        ("b", True, "is being loaded"),
        ("doll", True, "is part of the model's configuration"),
    ):
        with pytest.raises(TritonError, match=told):
            registry.ask(name, in_place=in_place)
    with pytest.raises(TritonError, match="it stays loaded"):
        registry.unload("doll")
    with pytest.raises(TritonError, match="no engine is running"):
        registry.ask("c", engines=())
    assert registry.take("").key == "" and registry.take("doll").key == "doll"
    registry.close()
    assert refusal(LoraRegistry(None, Timer(), lambda: None), "doll") == "LoRA feature is not enabled."


def test_a_closed_registry_leaves_no_file_and_no_question(registry: Registry) -> None:
    keys = [registry.serve("a"), registry.ask("b")]
    copies = [registry.wanted()[key] for key in keys]
    registry.close()
    assert [error and error.code for error in registry.answers] == [None, ErrorCode.UNAVAILABLE]
    assert not any(Path(copy).parent.exists() for copy in copies)
    assert registry.names == set() and registry.wanted() == {}


@pytest.mark.parametrize(
    ("head", "size_bytes", "told"),
    [
        (b"", 3 << 30, "its header has 0 bytes"),  # a sparse file
        (weights({}, 1 << 40), 3 << 30, "its header has 1099511627776 bytes"),
        (weights({}), 3 << 30, "its header describes 10 bytes, the file has 3221225472"),
        (weights({"a": {"dtype": "F32", "shape": [8, 100_000_000]}}), 3 << 30, "expected a LoRA matrix"),
        (weights({"a": {"dtype": "F32", "shape": [700, 700]}}), 3 << 30, "expected a LoRA matrix"),
        (weights({"a": {"dtype": "I8", "shape": [8, 8]}}), 3 << 30, "tensor 'a' is I8 of [8, 8]"),
        (weights({"a": {"dtype": "F32", "shape": [8, -8]}}), 3 << 30, "expected a LoRA matrix"),
        (weights({"a": 1}), 100, "tensor 'a' is no dtype of no shape, expected a LoRA matrix"),
        (weights({"a": {"shape": [8, 8]}}), 100, "tensor 'a' is no dtype of [8, 8], expected"),
        (b"\2\0\0\0\0\0\0\0[]", 10, "is not an adapter's file: its header is not a JSON object"),
        ((50_000).to_bytes(8, "little") + b"[" * 50_000, 50_008, "its header is nested too deeply"),
    ],
)
def test_weights_are_measured_by_their_header_before_they_are_read(
    registry: Registry, head: bytes, size_bytes: int, told: str
) -> None:
    with (registry.folder / "cat" / WEIGHTS).open("wb") as file:
        file.write(head)
        file.truncate(size_bytes)
    with pytest.raises(TritonError) as refused:
        registry.ask("a")
    assert told in refused.value.message and refused.value.code is ErrorCode.INVALID_ARG
    assert registry.wanted() == {}


def test_an_adapter_that_cannot_be_copied_now_can_be_loaded_later(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_new_threads("lora-copies"), pytest.raises(TritonError, match="can't start new thread"):
        registry.ask("cat")
    with monkeypatch.context() as patched:
        patched.setattr(lora, "_copy_file", lambda *_: _full_disk())
        with pytest.raises(TritonError, match="cannot be copied now: No space left") as caught:
            registry.ask("cat")
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert registry.ask("cat")


def _full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_files_of_an_adapter_are_removed_on_no_thread_that_serves(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one who has an adapter may be an engine's loop; it waits for no disk."""
    remove, gate, removers = shutil.rmtree, threading.Event(), []

    def slow(path: str, **options: Any) -> None:
        removers.append(threading.current_thread().name)
        assert gate.wait(20)
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", slow)
    key = registry.serve("a")
    copy, handle = Path(registry.wanted()[key]), registry.take("a")
    registry.unload("a")
    del handle
    assert registry.wanted() == {} and copy.exists()
    gate.set()
    eventually(lambda: not copy.exists())
    assert removers == ["lora-copies"]


class HangingDisk:
    """Reads of adapters wait for it while it hangs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on = threading.Event()
        self.copies: list[Path] = []
        copy = AdapterCopies.copy

        def slow(copies: AdapterCopies, folder: str, path: str) -> str:
            assert self.goes_on.wait(20)
            made = copy(copies, folder, path)
            self.copies.append(Path(made))
            return made

        monkeypatch.setattr(AdapterCopies, "copy", slow)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lora-read"]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDisk]:
    disk = HangingDisk(monkeypatch)
    yield disk
    disk.goes_on.set()
    eventually(lambda: not readers())


def test_a_load_whose_disk_hangs_is_refused_at_its_deadline_and_may_be_tried_again(
    tmp_path: Path, disk: HangingDisk
) -> None:
    registry = Registry(tmp_path, load_timeout_s=0.05)
    registry.begin("a")
    eventually(lambda: registry.answers)
    error = registry.answers[0]
    assert error is not None and error.code is ErrorCode.UNAVAILABLE
    assert error.message == "The lora adapter 'a' was not loaded: 'cat' was not read within 0.05 s."
    registry.begin("a")  # its name is free again
    eventually(lambda: len(registry.answers) == 2)
    disk.goes_on.set()
    eventually(lambda: len(disk.copies) == 2 and not readers())
    eventually(lambda: not any(copy.exists() for copy in disk.copies))
    assert (
        len(registry.answers) == 2 and registry.wanted() == {} and registry.names == set() and not len(registry.timer)
    )
    registry.close()


def test_a_load_that_engines_do_not_finish_is_refused_at_its_deadline(tmp_path: Path) -> None:
    registry = Registry(tmp_path, load_timeout_s=0.3)
    key = registry.ask("a")
    copy = Path(registry.wanted()[key])
    registry.loaded(0, AdapterResult(key))
    eventually(lambda: registry.answers)
    [error] = registry.answers
    assert error is not None and error.message.endswith("its engines did not load 'cat' within 0.3 s.")
    assert registry.wanted() == {}, "engines drop it"
    eventually(lambda: not copy.exists())
    registry.loaded(1, AdapterResult(key))  # late
    assert len(registry.answers) == 1 and registry.names == set() and "is not supported" in refusal(registry, "a")
    registry.close()


def test_a_disk_that_hangs_keeps_a_bounded_number_of_threads(
    registry: Registry, disk: HangingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "_MAX_READS", 2)
    registry.begin("a")
    registry.begin("b")
    with pytest.raises(TritonError, match="'c' cannot be loaded now: 2 others are being read") as refused:
        registry.begin("c")
    assert refused.value.code is ErrorCode.UNAVAILABLE and len(readers()) == 2
    disk.goes_on.set()
    eventually(lambda: not readers())
    registry.begin("c")


def test_a_load_that_outlives_its_model_leaves_no_file(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, reads, goes_on = tmp_path / "temporary", threading.Event(), threading.Event()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def slow(*arguments: Any) -> None:
        reads.set()
        assert goes_on.wait(20)

    monkeypatch.setattr(shutil, "copyfileobj", slow)
    registry.begin("a")
    assert reads.wait(20)
    registry.close()
    [error] = registry.answers
    assert error is not None and error.message == "the model was unloaded"
    goes_on.set()
    eventually(lambda: not readers())
    assert registry.wanted() == {} and list(temporary.iterdir()) == []
