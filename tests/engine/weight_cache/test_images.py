"""Images: what was written is read, and nothing else; no start fails by the cache."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.packed_decoder import Memories, PackedModel
from llmbackend.engine.cpu.packed_parts import ArrayAt
from llmbackend.engine.weight_cache import cache, cache_folder, image_file
from llmbackend.engine.weight_cache.cache import CachedModel, Draft
from llmbackend.engine.weight_cache.cache_folder import CacheFolder, FolderRefusedError
from llmbackend.engine.weight_cache.image_file import (
    CHUNK_BYTES,
    PAGE_BYTES,
    RESIDENT_OFFSET_BYTES,
    huge_bytes,
    write_image,
)
from tests.helpers.packed_models import config_of, new_memory, packed_model, same, write_checkpoint

THREADS = 2


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return config_of(write_checkpoint(tmp_path / "model"), tmp_path / "cache")


def store(config: EngineConfig, packed: PackedModel) -> None:
    """As a first start does; read back before it is published, as its engine does."""
    with published(config) as draft:
        draft.write(packed, THREADS)
        assert same(draft.read(new_memory, THREADS), packed)


def read(config: EngineConfig) -> PackedModel | None:
    with cached(config) as place:
        return place.read(new_memory, THREADS)


@contextmanager
def cached(config: EngineConfig) -> Iterator[CachedModel]:
    place = CachedModel(config)
    try:
        yield place
    finally:
        place.close()


@contextmanager
def published(config: EngineConfig) -> Iterator[Draft]:
    """A draft, to be published at the end."""
    with cached(config) as place:
        draft = place.draft()
        yield draft
        draft.publish()
        draft.close()


def images(config: EngineConfig) -> list[Path]:
    return sorted(Path(config.weight_cache_dir).glob("*"))


def test_a_packed_model_is_read_as_it_was_written(config: EngineConfig) -> None:
    packed = packed_model()
    assert read(config) is None
    store(config, packed)
    found = read(config)
    assert same(found, packed)
    assert found is not None and not found.memories.mapped.flags.writeable
    (image,) = images(config)
    assert image.stat().st_mode & 0o777 == 0o600
    assert image.parent.stat().st_mode & 0o777 == 0o700


def pack_in_place(draft: Draft, packed: PackedModel) -> PackedModel:
    """As a model is packed: into the draft's own memory, with more room than is used in the end."""
    memory = draft.new_memory(len(packed.memories.resident) + 100_000)
    if memory is None:
        pytest.skip("this file system keeps no files on huge pages")
    resident = memory[: len(packed.memories.resident)]
    resident[:] = packed.memories.resident
    mapped = packed.memories.mapped
    tables = [(0, mapped[:1000]), (1024, mapped[1024:])]
    mapped[1000:1024] = 0  # alignment
    return PackedModel(
        packed.decoder,
        Memories(
            resident, found if (found := draft.write_tables(resident, tables, len(mapped))) is not None else mapped
        ),
    )


@pytest.mark.parametrize("expected_mib", [1, 64])
def test_memory_that_was_taken_beforehand_makes_no_difference(config: EngineConfig, expected_mib: int) -> None:
    """Less than is needed in the end, or more."""
    weights = Path(config.model) / "model.safetensors"
    os.truncate(weights, weights.stat().st_size + (expected_mib << 20))
    packed = packed_model()
    with cached(config) as place:
        draft = place.draft()
        draft.prefault()
        in_place = pack_in_place(draft, packed)
        draft.write(in_place, THREADS)
        assert same(draft.read(new_memory, THREADS), packed)
        draft.publish()
        draft.close()
    assert same(read(config), packed)
    assert images(config)[0].stat().st_size < 2 * RESIDENT_OFFSET_BYTES + 3 * len(packed.memories.resident)


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_model_that_is_packed_in_the_file_is_shared_on_huge_pages(config: EngineConfig, attempts: int) -> None:
    packed = packed_model()
    with cached(config) as place:
        draft = place.draft()
        for _ in range(attempts):  # the first ended before it had finished
            in_place = pack_in_place(draft, packed)
        assert not draft.is_written()
        draft.write(in_place, THREADS)
        found = draft.read(new_memory, THREADS)
        assert same(found, packed)
        draft.publish()
        draft.close()
    found = read(config)
    assert found is not None
    assert same(found, packed)
    assert not found.memories.resident.flags.writeable
    assert huge_bytes(found.memories.resident) >= len(packed.memories.resident) // CHUNK_BYTES * CHUNK_BYTES


def test_an_image_that_was_published_is_not_written_to_again(config: EngineConfig) -> None:
    packed, other = packed_model(), packed_model(seed=1)
    with cached(config) as place:
        draft = place.draft()
        draft.write(pack_in_place(draft, packed), THREADS)
        draft.publish()
        found = read(config)
        assert draft.new_memory(len(packed.memories.resident)) is None
        draft.write(other, THREADS)
        assert same(found, packed)
        draft.close()
    assert same(read(config), packed)


def test_a_disk_that_is_full_behind_the_packed_weights_leaves_them_in_memory(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    packed = packed_model()
    size_bytes = RESIDENT_OFFSET_BYTES + len(packed.memories.resident) + 200_000
    with cached(msgspec.structs.replace(config, weight_cache_size=size_bytes / 2**30)) as place:
        draft = place.draft()
        draft.write(pack_in_place(draft, packed), THREADS)
        assert "more than the cache may hold" in caplog.text
        assert same(draft.read(new_memory, THREADS), packed)
        draft.publish()
        draft.close()
    assert images(config) == []


def test_a_file_system_without_huge_pages_gives_memory_of_ones_own(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packed_model()
    store(config, packed)
    monkeypatch.setattr(image_file, "huge_bytes", lambda _: 0)
    found = read(config)
    assert same(found, packed)
    assert found is not None and found.memories.resident.flags.writeable
    with published(config) as draft:
        assert draft.new_memory(len(packed.memories.resident)) is None
        draft.write(packed, THREADS)
    assert same(read(config), packed)


def _parts(image: Path) -> dict[str, int]:
    """An offset in each part of the file."""
    size = image.stat().st_size
    packed = packed_model()
    resident_bytes = -(-len(packed.memories.resident) // PAGE_BYTES) * PAGE_BYTES
    return {
        "magic": 3, "header": 40,
        "resident": RESIDENT_OFFSET_BYTES + CHUNK_BYTES + 17,
        "end of resident": RESIDENT_OFFSET_BYTES + resident_bytes - 100,
        "mapped": RESIDENT_OFFSET_BYTES + resident_bytes + CHUNK_BYTES + 5, "description": size - 20,
        "checksums": size - len(msgspec.msgpack.encode(packed.decoder)) - 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    "part", ["magic", "header", "resident", "end of resident", "mapped", "description", "checksums"]
)
def test_one_flipped_bit_anywhere_is_found_and_the_image_removed(
    config: EngineConfig, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    packed = packed_model()
    store(config, packed)
    (image,) = images(config)
    data = bytearray(image.read_bytes())
    data[_parts(image)[part]] ^= 4
    image.write_bytes(data)
    assert read(config) is None
    assert str(image) in caplog.text
    assert images(config) == []
    store(config, packed)
    assert same(read(config), packed)


@pytest.mark.parametrize("what", ["mapped", "locked"])
def test_a_file_system_on_which_files_cannot_be_mapped_or_locked_leaves_the_weights_in_memory(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    packed = packed_model()
    store(config, packed)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENODEV, "cannot be had here")

    with monkeypatch.context() as patch:
        if what == "mapped":
            patch.setattr(image_file, "map_pages", refuse)
            assert read(config) is None
            assert "cannot be had here" in caplog.text
        else:
            patch.setattr(fcntl, "flock", refuse)
        with cached(msgspec.structs.replace(config, quantization="int8")) as place:
            draft = place.draft()
            assert draft.new_memory(len(packed.memories.resident)) is None
            draft.write(packed, THREADS)
            patch.undo()
            assert same(draft.read(new_memory, THREADS), packed)
            draft.close()
    assert len(images(config)) == 1


def test_exchanged_pages_are_found(config: EngineConfig) -> None:
    store(config, packed_model())
    (image,) = images(config)
    data = bytearray(image.read_bytes())
    first, second = (slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES) for page in (600, 601))
    data[first], data[second] = data[second], data[first]
    image.write_bytes(data)
    assert read(config) is None


@pytest.mark.parametrize("size", [0, 100, PAGE_BYTES, 3 * CHUNK_BYTES])
def test_a_truncated_image_is_not_used(config: EngineConfig, size: int) -> None:
    store(config, packed_model())
    os.truncate(images(config)[0], size)
    assert read(config) is None
    assert images(config) == []


def _hostile() -> Iterator[tuple[str, PackedModel]]:
    packed = packed_model()
    decoder, replace = packed.decoder, msgspec.structs.replace
    size = len(packed.memories.mapped)
    for name, offset, shape in (
        ("behind the end", size, decoder.embedding.shape),
        ("across the end", size - 64, decoder.embedding.shape),
        ("before the beginning", -64, decoder.embedding.shape),
        ("of negative sizes", 0, (-20_000, -64)),
        ("of huge sizes", 0, (2**62, 64)),
        ("between alignments", 1, decoder.embedding.shape),
    ):
        embedding = ArrayAt("mapped", offset, shape)
        yield f"an embedding {name}", PackedModel(replace(decoder, embedding=embedding), packed.memories)
    layer = decoder.layers[0]
    assert layer.mlp is not None and layer.attention is not None
    far = replace(layer.mlp.down.weight, offset_bytes=2**40)
    mlp = replace(layer.mlp, down=replace(layer.mlp.down, weight=far))
    yield "a matrix outside", PackedModel(replace(decoder, layers=(replace(layer, mlp=mlp),)), packed.memories)
    heads = replace(layer, attention=replace(layer.attention, num_kv_heads=7))
    yield "heads that do not fit", PackedModel(replace(decoder, layers=(heads,)), packed.memories)
    yield "no layers", PackedModel(replace(decoder, layers=()), packed.memories)


HOSTILE = dict(_hostile())


@pytest.mark.parametrize("what", list(HOSTILE))
def test_a_hostile_description_is_refused(config: EngineConfig, what: str) -> None:
    """With the right checksums: whoever can write to the folder can make these, too."""
    packed = HOSTILE[what]
    with published(config) as draft:
        draft.write(packed, THREADS)
        assert draft.read(new_memory, THREADS) is None
    assert read(config) is None
    assert images(config) == []


@pytest.mark.parametrize("description", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x91" * 100_000])
def test_a_description_that_is_none_is_refused(config: EngineConfig, description: bytes) -> None:
    packed = packed_model()
    store(config, packed)
    (image,) = images(config)
    with cached(config) as place, image.open("r+b") as file:
        write_image(file.fileno(), place.key, description, packed.memories.resident, packed.memories.mapped, 1)
    assert read(config) is None


def test_an_image_under_the_name_of_another_model_is_not_used(config: EngineConfig) -> None:
    store(config, packed_model())
    other = msgspec.structs.replace(config, quantization="int8")
    with cached(other) as place:
        assert place.key
        images(config)[0].rename(Path(config.weight_cache_dir) / f"model-{place.key}.image")
    assert read(other) is None


KILLED_WRITER = """
import os, signal, sys
from llmbackend.engine.weight_cache import image_file
from tests.helpers.packed_models import config_of, packed_model
from llmbackend.engine.weight_cache.cache import CachedModel, Draft
from llmbackend.engine.weight_cache.cache_folder import CacheFolder
from pathlib import Path
from typing import Any
write, count = image_file._write_all, 0
def counting(*arguments):
    global count
    count += 1
    if count == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    write(*arguments)
image_file._write_all = counting
draft = CachedModel(config_of(Path(sys.argv[1]), Path(sys.argv[2]))).draft()
draft.write(packed_model(), 1)
"""


@pytest.mark.parametrize("writes", [1, 9])
def test_a_writer_that_is_killed_leaves_no_image_and_its_file_goes(config: EngineConfig, writes: int) -> None:
    command = [sys.executable, "-c", KILLED_WRITER, config.model, config.weight_cache_dir, str(writes)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert [path.suffix for path in images(config)] == [".unfinished"]
    assert read(config) is None
    assert images(config) == []


def test_a_child_that_is_killed_while_it_writes_is_followed_by_another(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packed_model()
    with published(config) as draft:
        with monkeypatch.context() as patch:
            patch.setattr(cache, "write_image", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
            assert _status_of_child(lambda: draft.write(packed, 1)) == -signal.SIGKILL
        assert draft.read(new_memory, THREADS) is None
        assert _status_of_child(lambda: draft.write(packed, 1)) == 0
        assert same(draft.read(new_memory, THREADS), packed)
        assert _status_of_child(draft.publish) == 0
    assert same(read(config), packed)


def _status_of_child(work: object) -> int:
    assert callable(work)
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_file_that_is_still_being_written_stays(config: EngineConfig) -> None:
    with cached(config) as place:
        draft = place.draft()
        assert read(config) is None
        assert len(images(config)) == 1
        draft.close()
    assert images(config) == []


def test_two_that_pack_at_once_are_both_right(config: EngineConfig) -> None:
    packed = packed_model()
    with cached(config) as first, cached(config) as second:
        drafts = first.draft(), second.draft()
        for draft in drafts:
            draft.write(packed, THREADS)
        for draft in drafts:
            draft.publish()
            assert same(draft.read(new_memory, THREADS), packed)
            draft.close()
    assert same(read(config), packed)
    assert len(images(config)) == 1


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Beyond it the kernel refuses to write, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("reserves", [True, False])
def test_a_disk_that_is_full_leaves_the_weights_in_memory(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reserves: bool
) -> None:
    """Noticed when room is reserved, or in the middle of the file."""
    packed = packed_model()
    reserve, write = CacheFolder.reserve, image_file.write_image

    def reserve_on_a_full_disk(folder: CacheFolder, descriptor: int, size_bytes: int) -> None:
        with file_size_limit(CHUNK_BYTES):
            reserve(folder, descriptor, size_bytes)

    def write_on_a_full_disk(descriptor: int, key: str, *rest: Any, **options: Any) -> None:
        monkeypatch.setattr(os, "ftruncate", lambda *_: None)  # the limit refuses this as well
        with file_size_limit(CHUNK_BYTES if key == place.key else resource.RLIM_INFINITY):
            write(descriptor, key, *rest, **options)

    with cached(config) as place:
        draft = place.draft()
        with monkeypatch.context() as patch:
            if reserves:
                patch.setattr(CacheFolder, "reserve", reserve_on_a_full_disk)
            else:
                patch.setattr(cache, "write_image", write_on_a_full_disk)
            draft.write(packed, THREADS)
        monkeypatch.undo()
        assert caplog.text.count("packed weights are not cached") == 1
        assert same(draft.read(new_memory, THREADS), packed)
        draft.publish()
        draft.close()
    assert read(config) is None
    assert images(config) == []


def test_a_disk_that_is_full_from_the_beginning_is_warned_of_once(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    weights = Path(config.model) / "model.safetensors"
    os.truncate(weights, 64 << 20)
    packed = packed_model()
    with cached(config) as place:
        draft = place.draft()
        with file_size_limit(CHUNK_BYTES):
            draft.prefault()
            assert draft.new_memory(len(packed.memories.resident)) is None
        draft.write(packed, THREADS)
        assert caplog.text.count("packed weights are not cached") == 1
        assert same(draft.read(new_memory, THREADS), packed)
        assert images(config) == []
        draft.close()


def test_no_room_anywhere_is_an_error(config: EngineConfig) -> None:
    with cached(config) as place:
        draft = place.draft()
        with file_size_limit(CHUNK_BYTES), pytest.raises(OSError, match="File too large"):
            draft.write(packed_model(), THREADS)
        assert draft.read(new_memory, THREADS) is None
        draft.close()


def test_a_read_only_home_leaves_the_weights_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "home").write_text("a file, in which even root makes no folder")
    config = config_of(write_checkpoint(tmp_path / "model"), tmp_path / "home" / "cache")
    packed = packed_model()
    with cached(config) as place:
        assert "is not used" in place.why_not
        draft = place.draft()
        draft.write(packed, THREADS)
        assert same(draft.read(new_memory, THREADS), packed)
        draft.publish()
        draft.close()
    assert "is not used" in caplog.text


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(
    config: EngineConfig, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    store(config, packed_model())
    Path(config.weight_cache_dir).chmod(mode)
    assert read(config) is None
    assert "others can write" in caplog.text


def test_a_folder_or_an_image_of_another_user_is_refused(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store(config, packed_model())
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    assert read(config) is None
    assert f"belongs to user {stranger - 1}" in caplog.text


def test_an_image_that_is_a_link_is_not_followed(config: EngineConfig, tmp_path: Path) -> None:
    store(config, packed_model())
    (image,) = images(config)
    image.rename(tmp_path / "elsewhere")
    image.symlink_to(tmp_path / "elsewhere")
    assert read(config) is None


def test_the_least_recently_used_images_go_and_readers_keep_them(tmp_path: Path) -> None:
    packed = packed_model()
    cache_path = tmp_path / "cache"
    size_bytes = len(packed.memories.resident) + len(packed.memories.mapped)
    configs = [
        config_of(write_checkpoint(tmp_path / name), cache_path, 2.5 * size_bytes / 2**30) for name in ("a", "b", "c")
    ]
    for age, config in enumerate(configs[:2]):
        store(config, packed)
        os.utime(next(cache_path.glob(f"{Path(config.model).name}-*")), (age, age))
    kept = read(configs[0])  # now the last one to be used
    store(configs[2], packed)
    assert {path.name[0] for path in cache_path.iterdir()} == {"a", "c"}
    os.utime(next(cache_path.glob("a-*")), (0, 0))
    store(configs[1], packed)
    assert {path.name[0] for path in cache_path.iterdir()} == {"b", "c"}
    assert same(kept, packed)


def test_a_cache_that_is_too_small_keeps_nothing(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    packed = packed_model()
    small = msgspec.structs.replace(config, weight_cache_size=1e-4)
    store(small, packed)
    assert "more than the cache may hold" in caplog.text
    assert images(small) == []


def test_a_cache_that_is_off_makes_no_folder(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_folder.SIZE, "0")
    with cached(config) as place:
        assert place.why_not == "the weight cache is off"
    assert cache_folder.usable_directory(config) is None
    assert not Path(config.weight_cache_dir).exists()
    monkeypatch.setenv(cache_folder.SIZE, "many")
    with cached(config) as place:
        assert "expected a number of GiB" in place.why_not


def test_the_folder_is_that_of_the_argument_the_variable_or_the_home(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unnamed = msgspec.structs.replace(config, weight_cache_dir="")
    monkeypatch.delenv(cache_folder.DIRECTORY, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder.usable_directory(unnamed) == tmp_path / "xdg" / "llmbackend" / "weights"
    monkeypatch.setenv(cache_folder.DIRECTORY, str(tmp_path / "variable"))
    assert cache_folder.usable_directory(unnamed) == tmp_path / "variable"
    assert cache_folder.usable_directory(config) == tmp_path / "cache"


def test_a_folder_in_a_home_that_is_unknown_is_refused(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    named = msgspec.structs.replace(config, weight_cache_dir="~no-such-user/weights")
    monkeypatch.setenv(cache_folder.DIRECTORY, "~no-such-user/variable")
    for each, place in ((named, "weights"), (msgspec.structs.replace(config, weight_cache_dir=""), "variable")):
        with pytest.raises(FolderRefusedError, match=f"the home directory of '~no-such-user/{place}' is unknown"):
            cache_folder.directory_of(each)
        assert cache_folder.usable_directory(each) is None
        with cached(each) as model:
            assert "is unknown" in model.why_not


def test_a_quantisation_that_only_accelerators_have_is_left_to_the_loader(config: EngineConfig) -> None:
    with cached(msgspec.structs.replace(config, quantization="fp8")) as place:
        assert place.key
        assert place.read(new_memory, THREADS) is None


def test_memory_of_an_image_without_a_file_is_given_back(tmp_path: Path) -> None:
    config = config_of(write_checkpoint(tmp_path / "model"), tmp_path / "cache", 0.0)
    packed = packed_model()
    with cached(config) as place:
        draft = place.draft()
        draft.write(packed, THREADS)
        (memory,) = (
            int(name) for name in os.listdir("/proc/self/fd")
            if "llmbackend-weights" in _link(f"/proc/self/fd/{name}")
        )  # fmt: skip
        before = os.fstat(memory).st_blocks
        assert same(draft.read(new_memory, THREADS), packed)
        released = 512 * (before - os.fstat(memory).st_blocks)
        assert released >= len(packed.memories.resident)
        draft.close()


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def test_nothing_here_imports_torch() -> None:
    code = "import sys, llmbackend.engine.weight_cache.cache; print([name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules])"  # noqa: E501
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
