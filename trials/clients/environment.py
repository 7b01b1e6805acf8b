"""The clients' environment, created if missing: Python packages, and Node packages if Node is available.

Used by the command. Independent of suites. Invariant: an environment is used only if it was created from the current
package files.
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
OPENAI3_DIRECTORY = DIRECTORY / "openai3"
OPENAI3_PYTHON = OPENAI3_DIRECTORY / "bin" / "python"
NODE_DIRECTORY = DIRECTORY / "node"
AGENTS_DIRECTORY = DIRECTORY / "agents"
"""Programs of npm: Codex and Claude Code."""
_NPM = ("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error")


def make_python() -> None:
    """Half a gigabyte, three minutes."""
    _make_python(DIRECTORY, "packages.txt", "constraints.txt")


def make_openai3() -> None:
    """Inside the first one, which is made anew when its packages change."""
    make_python()
    _make_python(OPENAI3_DIRECTORY, "packages_openai3.txt", "constraints_openai3.txt")


def _make_python(directory: Path, packages: str, constraints: str) -> None:
    files = (HERE / packages, HERE / constraints)
    if _is_made(directory / ".made", files):
        return
    print(f"installing {packages} into {directory.relative_to(ROOT)}: some minutes", flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(directory))
    pip = (str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet")
    _run(*pip, "--requirement", str(files[0]), "--constraint", str(files[1]))
    _note(directory / ".made", files)


def make_node() -> str:
    """Why there is no environment for Node; "" when there is one."""
    if why := _make_npm(NODE_DIRECTORY, HERE / "node" / "package.json"):
        return why
    for suite in (HERE / "node").glob("*.mjs"):  # an import is looked up beside the file that imports
        shutil.copy(suite, NODE_DIRECTORY)
    return ""


def make_agents() -> str:
    """Why there are no agents; "" when they are installed and run here. 0.6 GB."""
    if why := _make_npm(AGENTS_DIRECTORY, HERE / "agents" / "package.json"):
        return why
    for name in ("codex", "claude"):
        try:
            _run(str(AGENTS_DIRECTORY / "node_modules" / ".bin" / name), "--version", directory=AGENTS_DIRECTORY)
        except (OSError, subprocess.CalledProcessError) as error:
            return f"{name} does not run on this machine: {error}"
    return ""


def _make_npm(directory: Path, package: Path) -> str:
    """Why it cannot be made; "" when it is there."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "no node and npm on this machine"
    if _is_made(directory / ".made", (package,)):
        return ""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    shutil.copy(package, directory)
    try:
        _run(*_NPM, directory=directory)
    except subprocess.CalledProcessError:
        return f"npm cannot install what {package.relative_to(ROOT)} names"
    _note(directory / ".made", (package,))
    return ""


def _is_made(note: Path, files: tuple[Path, ...]) -> bool:
    return note.exists() and note.read_text() == _content(files)


def _note(note: Path, files: tuple[Path, ...]) -> None:
    note.write_text(_content(files))


def _content(files: tuple[Path, ...]) -> str:
    return "".join(file.read_text() for file in files)


def _run(*command: str, directory: Path = ROOT) -> None:
    subprocess.run(command, cwd=directory, check=True)
