"""NVIDIA's own server, installed from the package index and started on loopback.

Used by conformance-live and the comparative measurements. Independent of models and cases. Invariant: leaving
`running(...)` ends the server and its stubs. The package is NVIDIA's PyTriton, which includes tritonserver with the
python backend and the local cache; its stub needs numpy 1 in its environment.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.ports import free_port

PACKAGES = ("nvidia-pytriton==0.7.0", "numpy<2")
START_TIMEOUT_S = 90.0
EXIT_TIMEOUT_S = 40.0


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[bytes]
    http: str
    grpc: str
    metrics: str


@dataclass(frozen=True)
class RealTriton:
    """An installation. `root` holds the environment and what tritonserver expects around itself."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "venv" / "bin" / "python"

    @property
    def backends(self) -> Path:
        """Where python-based backends go: one directory each, with a model.py."""
        return self.root / "dist" / "backends"

    @property
    def is_installed(self) -> bool:
        return (self.root / "dist" / "bin" / "tritonserver").exists()

    def install(self) -> None:
        """Downloads some 370 MB. Nothing is done when it is there. Raises CalledProcessError."""
        if self.is_installed:
            return
        subprocess.run([sys.executable, "-m", "venv", self.root / "venv"], check=True)
        subprocess.run([self.python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        server = self._site_packages / "pytriton" / "tritonserver"
        dist = self.root / "dist"
        for folder in ("bin", "backends", "caches"):
            shutil.copytree(server / folder, dist / folder, dirs_exist_ok=True)
        stub = server / "python_backend_stubs" / f"3.{sys.version_info.minor}" / "triton_python_backend_stub"
        shutil.copy(stub, dist / "backends" / "python")

    @contextlib.contextmanager
    def running(self, repository: Path, *flags: str, log: Path) -> Iterator[Running]:
        """A server that answers. Raises RuntimeError when it does not come up."""
        http, grpc, metrics = (free_port() for _ in range(3))
        command = [str(self.root / "dist" / "bin" / "tritonserver"), f"--model-repository={repository}"]
        command += [f"--backend-directory={self.backends}", f"--cache-directory={self.root / 'dist' / 'caches'}"]
        command += [
            "--allow-gpu-metrics=false",
            f"--http-port={http}",
            f"--grpc-port={grpc}",
            f"--metrics-port={metrics}",
        ]
        command += [f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics")]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, *flags], stdout=file, stderr=file, env=self._environ(), start_new_session=True
            )
        try:
            _wait_until_live(process, http, log)
            yield Running(process, *(f"127.0.0.1:{port}" for port in (http, grpc, metrics)))
        finally:
            _end(process)

    @property
    def _site_packages(self) -> Path:
        (found,) = glob.glob(str(self.root / "venv" / "lib" / "python3*" / "site-packages"))
        return Path(found)

    @property
    def libraries(self) -> dict[str, str]:
        """What its libraries and its stub need in the environment."""
        folders = [str(self._site_packages / "nvidia_pytriton.libs"), str(sysconfig.get_config_var("LIBDIR"))]
        return {"LD_LIBRARY_PATH": ":".join(folders), "PATH": f"{self.python.parent}:{os.environ['PATH']}"}

    def _environ(self) -> dict[str, str]:
        return os.environ | self.libraries | {"PYTHONDONTWRITEBYTECODE": "1"}


def _wait_until_live(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/live", timeout=2).status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"tritonserver did not come up:\n{log.read_text(errors='replace')[-3000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # stubs outlive a server that was cut short
        process.wait()
