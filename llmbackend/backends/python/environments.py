"""Where stub processes run: with the host's interpreter, or with one that a model brings.

For: model states; one object per backend. Does not know: models beyond their EXECUTION_ENV_PATH. Owner of the fork
servers of stubs, one per environment, and of the directories that archives were unpacked into. Invariants: an archive
is unpacked once, however many models and instances use it; fork servers end and what was unpacked is removed when the
backend is finalised; an archive writes nothing outside of its directory. Source: Triton python_backend documentation,
"Creating Custom Execution Environments" (conda-pack archives and unpacked directories); $$TRITON_MODEL_DIRECTORY stands
for the model's directory.
"""

from __future__ import annotations

import os
import sys
import tarfile
import threading
from pathlib import Path

from llmbackend.core.backend_api import internal, invalid_argument
from llmbackend.fork_server.client import ForkServer, Program
from llmbackend.fork_server.process_resources import OwnedFolder

from .stub_process import output_log

STUB_PACKAGE = ("triton_python_backend_stub", str(Path(__file__).parent / "stub"))
PARAMETER = "EXECUTION_ENV_PATH"
MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_NAMES = ("bin/python", "bin/python3")


class Environments:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unpacked: dict[tuple[str, int, int], OwnedFolder] = {}
        self._fork_servers: dict[str, ForkServer] = {}

    def fork_server(self, setting: str, model_directory: Path) -> ForkServer:
        """Starts stubs in the environment that EXECUTION_ENV_PATH (`setting`) names; "" = the host's own.

        Raises TritonError INVALID_ARG when the path does not exist, INTERNAL when nothing can run in it.
        """
        if not setting:
            return self._fork_server(sys.executable, dict(os.environ))
        path = self._path(setting, model_directory)
        root = path if path.is_dir() else self._unpack(path)
        for name in _NAMES:
            if os.access(root / name, os.X_OK):
                return self._fork_server(str(root / name), _activated(root))
        raise internal(f"{PARAMETER} '{path}' has no executable {' or '.join(_NAMES)}")

    def close(self) -> None:
        with self._lock:
            for fork_server in self._fork_servers.values():
                fork_server.close()
            self._fork_servers.clear()
            for folder in self._unpacked.values():
                folder.remove()
            self._unpacked.clear()

    def _fork_server(self, interpreter: str, variables: dict[str, str]) -> ForkServer:
        with self._lock:
            if interpreter not in self._fork_servers:
                program = Program(
                    "stubs",
                    f"{STUB_PACKAGE[0]}.main",
                    interpreter=interpreter,
                    environment=variables,
                    package=STUB_PACKAGE,
                    ends_children=True,
                )
                self._fork_servers[interpreter] = ForkServer(program, _log)
            return self._fork_servers[interpreter]

    def _path(self, setting: str, model_directory: Path) -> Path:
        path = Path(setting.replace(MODEL_DIRECTORY, str(model_directory)))
        if not path.exists():
            raise invalid_argument(f"{PARAMETER} '{path}' does not exist")
        escapes = not path.resolve().is_relative_to(model_directory.resolve())
        if setting.startswith(MODEL_DIRECTORY) and ".." in path.parts and escapes:
            raise invalid_argument(f"{PARAMETER} '{path}' must not escape from the model directory")
        return path

    def _unpack(self, archive: Path) -> Path:
        facts = archive.stat()
        key = (str(archive.resolve()), facts.st_mtime_ns, facts.st_size)
        with self._lock:
            if key not in self._unpacked:
                folder = OwnedFolder("python-env")
                try:
                    with tarfile.open(archive) as opened:
                        opened.extractall(folder.path, filter="tar")
                except (tarfile.TarError, OSError, EOFError) as error:
                    folder.remove()
                    raise internal(f"{PARAMETER} '{archive}' cannot be unpacked: {error}") from None
                self._unpacked[key] = folder
            return self._unpacked[key].path


def _log(line: str) -> None:
    output_log.info("python: %s", line.rstrip())


def _activated(root: Path) -> dict[str, str]:
    """The host's variables as the environment's activate script would change them."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    variables["PATH"] = _before(root / "bin", variables.get("PATH", ""))
    if (root / "pyvenv.cfg").exists():
        variables["VIRTUAL_ENV"] = str(root)
    else:
        variables["CONDA_PREFIX"] = str(root)
        variables["LD_LIBRARY_PATH"] = _before(root / "lib", variables.get("LD_LIBRARY_PATH", ""))
    return variables


def _before(directory: Path, others: str) -> str:
    return f"{directory}{os.pathsep}{others}" if others else str(directory)
