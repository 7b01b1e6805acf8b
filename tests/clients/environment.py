"""The environment of the clients, made when it is missing: Python packages, and those of Node where there is one.

For: the command. Does not know: suites. Invariant: an environment is used only when it was made from the files of
packages as they are now.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.server_process import ROOT

HERE = Path(__file__).parent
DIRECTORY = ROOT / ".venv-clients"
PYTHON = DIRECTORY / "bin" / "python"
NODE_DIRECTORY = DIRECTORY / "node"
_PYTHON_FILES = (HERE / "packages.txt", HERE / "constraints.txt")
_NODE_FILES = (HERE / "node" / "package.json",)


def make_python() -> None:
    """Half a gigabyte, three minutes."""
    if _is_made(DIRECTORY / ".made", _PYTHON_FILES):
        return
    print(f"installing the clients into {DIRECTORY.name}: half a gigabyte, some minutes", flush=True)
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(DIRECTORY))
    packages, constraints = map(str, _PYTHON_FILES)
    _run(str(PYTHON), "-m", "pip", "install", "--quiet", "--requirement", packages, "--constraint", constraints)
    _note(DIRECTORY / ".made", _PYTHON_FILES)


def make_node() -> str:
    """Why there is no environment for Node; "" when there is one."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "no node and npm on this machine"
    if not _is_made(NODE_DIRECTORY / ".made", _NODE_FILES):
        shutil.rmtree(NODE_DIRECTORY, ignore_errors=True)
        NODE_DIRECTORY.mkdir(parents=True)
        shutil.copy(*_NODE_FILES, NODE_DIRECTORY)
        npm = ("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error")
        _run(*npm, directory=NODE_DIRECTORY)
        _note(NODE_DIRECTORY / ".made", _NODE_FILES)
    for suite in (HERE / "node").glob("*.mjs"):  # an import is looked up beside the file that imports
        shutil.copy(suite, NODE_DIRECTORY)
    return ""


def _is_made(note: Path, files: tuple[Path, ...]) -> bool:
    return note.exists() and note.read_text() == _content(files)


def _note(note: Path, files: tuple[Path, ...]) -> None:
    note.write_text(_content(files))


def _content(files: tuple[Path, ...]) -> str:
    return "".join(file.read_text() for file in files)


def _run(*command: str, directory: Path = ROOT) -> None:
    subprocess.run(command, cwd=directory, check=True)
