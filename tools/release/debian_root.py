"""Folders that contain a small Debian, and commands that run inside them: other versions of Python, base images.

Used by tools/release/pythons.py and container.py. Needs root and debootstrap. Invariant: mounts end with the command.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / ".venv-release"
_PACKAGES: Final = ("python3", "python3-venv", "python-is-python3", "libstdc++6", "ca-certificates")
_SCRIPTS: Final = Path("/usr/share/debootstrap/scripts")
_FROM_THIS_MACHINE: Final = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")
"""How this machine reaches package indexes."""
_ENTER: Final = 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" /bin/sh -c "$1"'


def why_impossible() -> str:
    """ "" = roots can be made here."""
    if os.geteuid() != 0:
        return "making a Debian folder needs root"
    return "" if shutil.which("debootstrap") else "debootstrap is not installed"


def make_root(suite: str) -> Path:
    """The folder, made at the first call. Raises CalledProcessError."""
    root = FOLDER / f"debian-{suite}"
    if (root / "etc" / "complete").exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(exist_ok=True)
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", suite, str(root)]
    if not (_SCRIPTS / suite).exists():  # a suite that is newer than this debootstrap
        command += ["", str(_SCRIPTS / "sid")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for name in filter(os.path.exists, _FROM_THIS_MACHINE):
        shutil.copyfile(name, root / name.lstrip("/"))
    (root / "etc" / "complete").touch()
    return root


def run_inside(root: Path, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command with the folder as its root; its processes and mounts end with it."""
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", _ENTER, str(root)]
    given = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "REQUESTS_"))}
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8", "HOME": "/root"}
    return subprocess.run(
        [*isolated, shlex.join(map(str, words))],
        env=environment | given | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def copy_into(root: Path, files: Sequence[Path], folder: str) -> None:
    """folder: below the root, without a slash at its beginning."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    for path in files:
        shutil.copy(path, root / folder)
