"""A machine's copies of models: received once, whole or not at all, damaged ones replaced, used ones kept."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llmbackend.cluster.model_cache import (
    DIRECTORY,
    SIZE,
    ModelCache,
    ModelFilesError,
    local_files,
    machine_cache,
    manifests,
)
from llmbackend.cluster.model_manifest import ManifestFile, ModelManifest, manifest
from llmbackend.engine.config import EngineConfig
from tests.helpers.waiting import eventually

WEIGHTS = "model.safetensors"
LIMIT_BYTES = 1 << 20


class Sender:
    """A machine that has the model, in a folder of this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_connections = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.num_waiting = 0

    @contextmanager
    def connect(self, model: ModelManifest) -> Iterator["Sender"]:
        self.num_connections += 1
        yield self

    def __call__(self, file: ManifestFile) -> Iterable[bytes]:
        data = (self.folder / file.name).read_bytes()
        yield data[:10]
        self.num_waiting += 1
        assert self.may_go_on.wait(60)
        yield data[10:]


def write_model(folder: Path, size_bytes: int = 1000, seed: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / WEIGHTS).write_bytes(bytes([seed]) * size_bytes)
    (folder / "notes.md").write_text("an engine does not read it")
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "models" / "llama")


@pytest.fixture
def sender(model: Path) -> Sender:
    return Sender(model)


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "cache", LIMIT_BYTES)


def folders(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_model_is_received_once_and_found_again(cache: ModelCache, model: Path, sender: Sender) -> None:
    for _ in range(2):
        held = cache.hold(manifest(model), sender.connect)
        assert (held.folder / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()
        assert {path.name for path in held.folder.iterdir()} == {"config.json", WEIGHTS, ".checksums"}
        held.close()
    assert sender.num_connections == 1


def test_those_who_want_it_at_once_wait_for_one_transfer(cache: ModelCache, model: Path, sender: Sender) -> None:
    sender.may_go_on.clear()
    texts: list[bytes] = []

    def hold() -> None:
        held = cache.hold(manifest(model), sender.connect)
        texts.append((held.folder / WEIGHTS).read_bytes())
        held.close()

    threads = [threading.Thread(target=hold) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: sender.num_waiting, 60)
    assert not texts
    sender.may_go_on.set()
    for thread in threads:
        thread.join(60)
    assert texts == [(model / WEIGHTS).read_bytes()] * 3
    assert sender.num_connections == 1


RECEIVES = """
import sys, threading
from contextlib import nullcontext
from pathlib import Path
from llmbackend.cluster.model_cache import ModelCache
from llmbackend.cluster.model_manifest import manifest

def fetch(file):
    yield b"{"
    print("receiving", flush=True)
    threading.Event().wait()

ModelCache(Path(sys.argv[1]), 1 << 20).hold(manifest(Path(sys.argv[2])), lambda model: nullcontext(fetch))
"""


def test_a_killed_receiver_leaves_nothing_that_looks_whole(
    cache: ModelCache, model: Path, sender: Sender, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RECEIVES, str(tmp_path / "cache"), str(model)], stdout=subprocess.PIPE
    ) as receiver:
        assert receiver.stdout is not None and receiver.stdout.readline() == b"receiving\n"
        receiver.kill()
    (left,) = folders(tmp_path)
    held = cache.hold(manifest(model), sender.connect)
    assert folders(tmp_path) == [held.folder] != [left]
    assert (held.folder / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()
    held.close()


@pytest.mark.parametrize("sent", [b"", b"1" * 999, b"1" * 1001, b"2" * 1000])
def test_a_transfer_that_gives_something_else_leaves_nothing(
    cache: ModelCache, model: Path, sender: Sender, tmp_path: Path, sent: bytes
) -> None:
    described = manifest(model)
    (model / WEIGHTS).write_bytes(sent)
    with pytest.raises(OSError):
        cache.hold(described, sender.connect)
    assert not folders(tmp_path)


def test_a_damaged_copy_is_received_again(cache: ModelCache, model: Path, sender: Sender) -> None:
    held = cache.hold(manifest(model), sender.connect)
    held.close()
    with (held.folder / WEIGHTS).open("r+b") as file:
        file.write(b"damage")
    again = cache.hold(manifest(model), sender.connect)
    assert (again.folder / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()
    again.close()


def test_a_full_disk_is_an_error_before_anything_is_sent(
    cache: ModelCache, model: Path, sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset_bytes: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        cache.hold(manifest(model), sender.connect)
    assert not folders(tmp_path) and not sender.num_connections


def test_the_least_recently_used_goes_and_one_in_use_stays(cache: ModelCache, tmp_path: Path) -> None:
    """Each is 400 of 1,024 KiB."""
    models = [write_model(tmp_path / f"model{i}", 400 << 10, i) for i in range(4)]
    first, second = (cache.hold(manifest(model), Sender(model).connect) for model in models[:2])
    second.close()
    third = cache.hold(manifest(models[2]), Sender(models[2]).connect)
    assert sorted(folders(tmp_path)) == sorted([first.folder, third.folder]), "the first is in use"
    with pytest.raises(OSError, match=f"does not fit: {SIZE} allows {LIMIT_BYTES} bytes"):
        cache.hold(manifest(models[3]), Sender(models[3]).connect)
    third.close()
    cache.hold(manifest(models[3]), Sender(models[3]).connect).close()
    assert first.folder in folders(tmp_path) and third.folder not in folders(tmp_path)
    first.close()


def test_a_copy_is_used_as_long_as_a_process_has_its_descriptor(cache: ModelCache, tmp_path: Path) -> None:
    model, other = (write_model(tmp_path / f"model{i}", 700 << 10, i) for i in range(2))
    held = cache.hold(manifest(model), Sender(model).connect)
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[held.descriptor])
    held.close()
    with pytest.raises(OSError, match="does not fit"):
        cache.hold(manifest(other), Sender(other).connect)
    child.communicate()
    cache.hold(manifest(other), Sender(other).connect).close()


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    with pytest.raises(OSError, match="mode 755; expected its user and 700"):
        ModelCache(tmp_path / "cache", LIMIT_BYTES)


@pytest.mark.parametrize("name", ["/etc/passwd", "../other", ""])
def test_a_name_outside_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected a path inside the model's folder"):
        ManifestFile(name, 1, 1, "")


class TestLocalFiles:
    """Which folder an engine loads."""

    @pytest.fixture(autouse=True)
    def _environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(DIRECTORY, str(tmp_path / "cache"))

    def test_the_same_files_are_used_where_they_are(self, model: Path, sender: Sender) -> None:
        models = manifests(EngineConfig(model=str(model)))
        os.utime(model / WEIGHTS)
        assert local_files(models, sender.connect).paths == {}

    def test_other_files_at_the_path_are_not_used(self, model: Path, tmp_path: Path) -> None:
        """The machine that asks has a large file that differs in its last byte."""
        models = manifests(EngineConfig(model=str(model)))
        theirs = write_model(tmp_path / "theirs", 8 << 20)
        with (theirs / WEIGHTS).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"2")
        (model / WEIGHTS).write_bytes(bytes([1]) * (8 << 20))
        models = (ModelManifest(str(model), manifest(theirs).files),)
        found = local_files(models, Sender(theirs).connect)
        assert (Path(found.paths[str(model)]) / WEIGHTS).read_bytes()[-1:] == b"2"
        for descriptor in found.descriptors:
            os.close(descriptor)

    def test_without_a_cache_the_path_is_named(
        self, model: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        models = manifests(EngineConfig(model=str(model)))
        (model / WEIGHTS).unlink()
        monkeypatch.setenv(SIZE, "0")
        with pytest.raises(ModelFilesError, match=rf"'{model}' cannot be used .*{WEIGHTS} differs.*set {SIZE} above 0"):
            local_files(models, sender.connect)

    def test_a_size_that_is_no_number_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SIZE, "much")
        with pytest.raises(ValueError, match=f"{SIZE} is 'much', expected a number of GiB"):
            machine_cache()

    def test_a_folder_that_is_missing_where_it_is_asked_for_is_named(self) -> None:
        config = EngineConfig(model="mock", enable_lora=True, lora_modules={"a": "/of/another/machine"})
        with pytest.raises(ModelFilesError, match="the LoRA adapter 'a' '/of/another/machine' cannot be read: No such"):
            manifests(config)
