"""Temporary folders: gone with their process, or with the next start where it was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from llmbackend.core.temporary_folders import OwnedFolder, remove_abandoned

PROGRAM = """
import sys
from llmbackend.core.temporary_folders import OwnedFolder
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


def start() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


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
