"""What Triton needs from a machine at run time besides torch and the driver: what is missing, and what to do.

Used by code that starts an engine on a GPU; does not import Triton. Triton compiles a C module that launches kernels,
links it with the driver's library, and caches compiled modules in a folder. Invariant: missing parts are named in a
warning, and in the error if a start fails inside Triton; nothing is needed if everything is already compiled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_LDCONFIG = "/sbin/ldconfig"
_DRIVER = "libcuda.so.1"


@contextlib.contextmanager
def naming_what_triton_needs() -> Iterator[None]:
    """Makes an error of Triton inside name what is missing, if anything is. Raises ValueError."""
    missing = missing_needs()
    for need in missing:
        logger.warning("Triton may not work on this machine: %s", need)
    try:
        yield
    except Exception as error:
        if not missing or not _is_tritons(error):
            raise
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ValueError(f"the GPU's kernels cannot be compiled here ({text}): {'; '.join(missing)}") from error


def _is_tritons(error: Exception) -> bool:
    """Whether it was raised in Triton's code."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(module.partition(".")[0] == "triton" for module in modules)


def missing_needs() -> list[str]:
    return [need for need in (_compiler(), _headers(), _driver_library(), _cache()) if need]


def _compiler() -> str:
    """Triton uses CC, else gcc, else clang."""
    if chosen := os.environ.get("CC"):
        return "" if shutil.which(chosen) else f"the variable CC is '{chosen}', expected a C compiler"
    if shutil.which("gcc") or shutil.which("clang"):
        return ""
    return "there is no C compiler: install gcc (in Debian gcc and libc6-dev), or set the variable CC"


def _headers() -> str:
    scheme = sysconfig.get_default_scheme()
    folder = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
    if (folder / "Python.h").exists():
        return ""
    version = sysconfig.get_python_version()
    return f"{folder / 'Python.h'} does not exist: install python{version}-dev, or use a Python that has its headers"


def _driver_library() -> str:
    if folder := os.environ.get("TRITON_LIBCUDA_PATH"):
        exists = Path(folder, _DRIVER).exists()
        return "" if exists else f"the variable TRITON_LIBCUDA_PATH is '{folder}', expected the folder of {_DRIVER}"
    if not Path(_LDCONFIG).exists():
        return (
            f"there is no {_LDCONFIG}: install it, or set the variable TRITON_LIBCUDA_PATH to the folder of {_DRIVER}"
        )
    listed = subprocess.run([_LDCONFIG, "-p"], capture_output=True, text=True, errors="replace").stdout
    folders = [os.path.dirname(line.split()[-1]) for line in listed.splitlines() if _DRIVER in line]
    folders = folders or os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if any(Path(folder, _DRIVER).exists() for folder in folders if folder):
        return ""
    return (
        f"{_LDCONFIG} -p does not list {_DRIVER}: run {_LDCONFIG} as root, or name its folder in the variable "
        "TRITON_LIBCUDA_PATH"
    )


def _cache() -> str:
    """The folder from which compiled modules are loaded."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache"))
    advice = "set the variable TRITON_CACHE_DIR to another folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"Triton's cache '{folder}' cannot be written ({error.strerror}): {advice}"
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return f"Triton's cache '{folder}' is on a file system mounted noexec: {advice}"
    return ""
