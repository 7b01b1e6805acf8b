"""What Triton needs at run time: each thing that is missing is named, with what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from llmbackend.engine.gpu import triton_needs
from llmbackend.engine.gpu.triton_needs import missing_needs, naming_what_triton_needs


@pytest.fixture(autouse=True)
def sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has all."""
    for name in ("libcuda.so.1", "Python.h", "cc", "cache"):
        (tmp_path / name).mkdir() if name == "cache" else (tmp_path / name).touch(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert missing_needs() == []
    return tmp_path


def test_a_compiler_and_headers(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sound / "Python.h").unlink()
    monkeypatch.setenv("CC", "no-such-compiler")
    compiler, headers = missing_needs()
    assert compiler == "the variable CC is 'no-such-compiler', expected a C compiler"
    assert headers.startswith(f"{sound / 'Python.h'} does not exist: install python3.")
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert missing_needs()[0].startswith("there is no C compiler: install gcc")
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/clang" if name == "clang" else None)
    assert missing_needs() == [headers]


def test_the_drivers_library(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(sound / "cache"))
    assert "TRITON_LIBCUDA_PATH is" in missing_needs()[0]
    monkeypatch.delenv("TRITON_LIBCUDA_PATH")
    listed = f"\tlibcuda.so.1 (libc6,x86-64) => {sound}/libcuda.so.1\n"
    for output, needs in ((listed, 0), ("\tlibc.so.6 => /lib/libc.so.6\n", 1)):
        listing = subprocess.CompletedProcess([], 0, output)
        monkeypatch.setattr(subprocess, "run", lambda *_, listing=listing, **__: listing)
        monkeypatch.setattr(triton_needs, "_LDCONFIG", str(sound / "cc"))
        assert len(missing_needs()) == needs
    monkeypatch.setenv("LD_LIBRARY_PATH", str(sound))
    assert missing_needs() == []
    monkeypatch.setattr(triton_needs, "_LDCONFIG", str(sound / "no ldconfig"))
    assert missing_needs()[0].startswith("there is no ") and "no ldconfig: install it" in missing_needs()[0]


def test_a_folder_to_write_and_load_from(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(sound / "cc" / "below a file"))
    assert "cannot be written (Not a directory): set the variable" in missing_needs()[0]
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(sound))
    assert missing_needs() == [] and (sound / ".triton" / "cache").is_dir()
    flags = os.statvfs_result((0,) * 8 + (os.ST_NOEXEC, 0))
    monkeypatch.setattr(os, "statvfs", lambda folder: flags)
    assert "is on a file system mounted noexec" in missing_needs()[0]


def test_a_failed_start_names_what_is_missing(sound: Path) -> None:
    module: dict[str, Any] = {"__name__": "triton.runtime.build"}
    exec("def build(error): raise error", module)
    failure = subprocess.CalledProcessError(1, ["gcc"])
    with pytest.raises(subprocess.CalledProcessError), naming_what_triton_needs():
        module["build"](failure)
    (sound / "Python.h").unlink()
    text = r"kernels cannot be compiled here \(CalledProcessError: .*Python\.h does not"
    with pytest.raises(ValueError, match=text), naming_what_triton_needs():
        module["build"](failure)
    with pytest.raises(OSError, match="no such model"), naming_what_triton_needs():
        raise OSError("no such model")
    with naming_what_triton_needs():
        pass  # all was compiled before
