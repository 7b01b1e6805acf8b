"""Temporary folders: gone with their process, or with the next start where it was killed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from llmbackend.fork_server import process_resources
from llmbackend.fork_server.process_resources import OwnedFolder, remove_abandoned

PROGRAM = """
import sys
from llmbackend.fork_server.process_resources import OwnedFolder
folder = OwnedFolder("host")
(folder.path / "content").mkdir()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


UPLOAD = """
from llmbackend.core.repository.model_repository import ModelRepository
repository = ModelRepository([], True)
kept = repository.poll("m", {"config": '{"backend": "b"}', "file:1/x": b"x"})["m"]
assert (kept.directory / "1" / "x").exists()
"""
AGENT = """
from llmbackend.core.repository.repository_agents import LoadedAgentModel
kept = LoadedAgentModel(None, {}, None, None)
assert not list(kept.acquire_location().iterdir())
"""
ENVIRONMENT = """
import tarfile
from pathlib import Path
from llmbackend.backends.python.model_state import Environments
archive = Path(sys.argv[1])
tarfile.open(archive, "w").close()
kept = Environments()
kept._unpack(archive)
"""
ADAPTER = """
from contextlib import suppress
from llmbackend.adapter.lora import AdapterCopies
from llmbackend.core.backend_api import TritonError
kept = AdapterCopies()
with suppress(TritonError):
    kept.copy("/", "none")
"""
ENGINE = """
from llmbackend.engine.process.transport import ProcessTransport
class NoForkServer:
    config = None
    def fork_engine(self, *arguments):
        raise OSError("none")
kept = ProcessTransport(NoForkServer(), 0)
try:
    kept.launch()
except Exception:
    pass
"""


def start(program: str = PROGRAM, *arguments: str) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize(
    "holder",
    [UPLOAD, AGENT, ENVIRONMENT, ADAPTER, ENGINE],
    ids=["upload", "agent", "environment", "adapter", "engine"],
)
def test_what_a_killed_server_had_in_temporary_folders_is_removed(
    holder: str, temporary_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    program = f"import sys\n{holder}\nprint(flush=True)\nsys.stdin.read()"
    killed, _ = start(program, str(tmp_path_factory.mktemp("archives") / "environment.tar"))
    with killed:
        assert list(temporary_folder.iterdir())
        killed.kill()
        killed.wait()
    remove_abandoned()
    assert not list(temporary_folder.iterdir())


@pytest.mark.parametrize("release", ["this", "earlier"])
@pytest.mark.parametrize("namespace", ["the same", "another"])
def test_a_folder_is_in_use_as_long_as_its_process_in_any_container(
    release: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, left = start()
    running, used = start()
    with killed, running:
        if release == "earlier":
            for process, folder in ((killed, left), (running, used)):
                (folder / ".owner").write_text(process_resources._identity(process.pid))
                (folder / ".locked").unlink()
        killed.kill()
        killed.wait()
        if namespace == "another":
            monkeypatch.setattr(process_resources, "_namespace", lambda: "pid:[1]")
        remove_abandoned()
        assert used.is_dir()
        assert left.exists() == (release == "earlier" and namespace == "another"), "its process cannot be seen"
        running.communicate("")


def test_a_folder_is_locked_against_removal_by_systemd() -> None:
    folder = OwnedFolder("pages")
    descriptor = os.open(folder.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    folder.remove()
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_the_folder_of_a_killed_process_is_removed_and_no_other() -> None:
    own = OwnedFolder("pages")
    strange = Path(tempfile.mkdtemp(prefix="llmbackend-host-"))
    (killed, left), (running, used) = start(), start()
    with killed, running:
        killed.kill()
        killed.wait()
        assert (left / "content").is_dir()
        remove_abandoned()
        assert not left.exists()
        assert used.is_dir() and own.path.is_dir() and strange.is_dir()
        running.communicate("")
        assert not used.exists()
    own.remove()
    assert not own.path.exists()
