"""The Ray node of this machine: found, or started as a cluster's head or member, and ended.

Used by the launcher. Independent of what runs on it. Invariants: each run folder has at most one node, and a record of
it; a start ends within START_TIMEOUT_S, and leaves no process if it fails; a loopback node listens nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from llmbackend.fork_server.client import wait_readable

from .secrets_folder import SecretsFolder
from .settings import AUTO, LOOPBACK, ClusterError, ClusterSettings

SECRETS_VARIABLE: Final = "LLMBACKEND_CLUSTER_SECRETS"
RUN_FOLDER_VARIABLE: Final = "LLMBACKEND_CLUSTER_RUN_FOLDER"
"""Environment variables of the node, inherited by engines' actors."""
THREADS_VARIABLE: Final = "OMP_NUM_THREADS"


def ray_environment(secrets: SecretsFolder, run_folder: Path, bind: str) -> dict[str, str]:
    """Writes this machine's certificate. Raises OSError or ValueError as `issue`."""
    from .node_certificate import issue

    certificate, key = run_folder / "node.pem", run_folder / "node.key"
    issue(secrets.authority, secrets.authority_key, bind, certificate, key)
    found = dict(os.environ)
    found.pop("RAY_AUTH_TOKEN", None)  # Ray would prefer this to the file
    found |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(secrets.token.resolve()),
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(certificate),
        "RAY_TLS_SERVER_KEY": str(key),
        "RAY_TLS_CA_CERT": str(secrets.authority.resolve()),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",  # engines need no drain: hosts move to other engines first
        THREADS_VARIABLE: os.environ.get(THREADS_VARIABLE, "1"),
        SECRETS_VARIABLE: str(secrets.path.resolve()),
        RUN_FOLDER_VARIABLE: str(run_folder),
    }
    if bind == LOOPBACK:
        # Only then does a node listen on loopback alone; otherwise Ray takes another address of the machine.
        found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return found


_CONNECT_TIMEOUT_S: Final = 5.0


def check_head(address: str, environment: Mapping[str, str]) -> None:
    """Raises ClusterError unless a Ray of this cluster listens at `address`. environment: from `ray_environment`."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S)
    except OSError as error:
        raise ClusterError(
            f"no Ray at {address}: {error.strerror or error}. Expected the address that the cluster's first machine "
            "shows (`llmbackend serve --cluster auto --cluster-bind ADDRESS`), and an open port between them"
        ) from error
    context = ssl.create_default_context(cafile=environment["RAY_TLS_CA_CERT"])
    context.load_cert_chain(environment["RAY_TLS_SERVER_CERT"], environment["RAY_TLS_SERVER_KEY"])
    context.set_alpn_protocols(["h2"])
    try:
        with connection, context.wrap_socket(connection, server_hostname=host):
            pass
    except ssl.SSLCertVerificationError as error:
        raise ClusterError(
            f"the Ray at {address} has a certificate of another cluster ({error.verify_message}): copy the secrets "
            f"folder of its first machine to '{environment[SECRETS_VARIABLE]}'"
        ) from error
    except OSError as error:
        raise ClusterError(
            f"the server at {address} is not a Ray with TLS: {error}. A cluster's nodes are started by "
            "`llmbackend serve --cluster`, or with the same RAY_TLS_… variables"
        ) from error


START_TIMEOUT_S: Final = 60.0
END_TIMEOUT_S: Final = 40.0
"""Ray's own drain of a node takes up to 30 s."""
OBJECT_STORE_BYTES: Final = 100 << 20
"""Small, because it holds no tensors or tokens."""
RAY_ADDRESS: Final = "RAY_ADDRESS"
_PROGRAM: Final = f"{__package__}.ray_program"
_LAST_BYTES: Final = 4000
_POLL_S: Final = 0.05


class NodeRecord(msgspec.Struct, frozen=True):
    """pid: the process that ends with the node. address: that of the cluster's head."""

    pid: int
    address: str


class RayNode:
    """Its process outlives a killed launcher; the next launcher finds it by the record."""

    def __init__(self, settings: ClusterSettings, secrets: SecretsFolder) -> None:
        """Raises ClusterError if the run folder cannot be written or belongs to another user."""
        self._settings = settings
        self._folder = settings.run_folder
        self._ray_folder = self._folder / "ray"  # Ray opens it for all users
        self._record = self._folder / "node.json"
        self._child: subprocess.Popen[bytes] | None = None
        self.pid = 0
        """0 = `llmbackend serve` did not start the node, and will end neither it nor its engines."""
        self.address = ""
        """Address of the cluster's head, host:port."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._folder.stat().st_uid != os.getuid():
                raise ClusterError(f"'{self._folder}' belongs to another user: choose another --cluster-run-folder")
            self.environment = self._environment(secrets)
        except (OSError, ValueError) as error:
            raise ClusterError(f"this machine's certificate cannot be created: {error}") from error

    def ensure(self) -> None:
        """Finds or starts the node; blocks until it runs. Raises ClusterError."""
        if given := self._given_address:
            self.address = given
            return
        found = self._find()
        if found is not None:
            if self._settings.address != AUTO and self._head != found.address:
                raise ClusterError(
                    f"this machine has a Ray node of the cluster at {found.address}, expected none or one of "
                    f"{self._settings.address}: stop the server that started it, or choose another --cluster-run-folder"
                )
            self.pid, self.address, self._child = found.pid, found.address, None
            return
        if self._settings.address != AUTO:
            check_head(self._head, self.environment)
        self._start()

    def end(self) -> None:
        """Ends the node if `llmbackend serve` started it."""
        if not self.pid:
            return
        if self.is_running():  # otherwise its process id may be another process's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            self._wait_for_end(END_TIMEOUT_S)
        self._record.unlink(missing_ok=True)
        self.pid = 0

    def is_running(self) -> bool:
        """True also for a node not started by `llmbackend serve`."""
        if self._child is not None:
            return self._child.poll() is None
        return not self.pid or _is_node(self.pid)

    @property
    def _head(self) -> str:
        """The head's numeric address, as named in its certificate. Raises ClusterError."""
        host, _, port = self._settings.address.rpartition(":")
        try:
            family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise ClusterError(f"no Ray at {self._settings.address}: {error.strerror}") from error
        return f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"

    @property
    def _given_address(self) -> str:
        return os.environ.get(RAY_ADDRESS, "") if self._settings.address == AUTO else ""

    def _environment(self, secrets: SecretsFolder) -> dict[str, str]:
        """A Ray that was started in another way has its own environment."""
        if self._given_address:
            return dict(os.environ) | {SECRETS_VARIABLE: str(secrets.path.resolve())}
        return ray_environment(secrets, self._folder, self._settings.bind)

    def _find(self) -> NodeRecord | None:
        try:
            record = msgspec.json.decode(self._record.read_bytes(), type=NodeRecord)
        except (OSError, msgspec.DecodeError):
            return None
        return record if _is_node(record.pid) else None

    def _start(self) -> None:
        address_file, output = self._ray_folder / "ray_current_cluster", self._folder / "node.log"
        address_file.unlink(missing_ok=True)
        with output.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM, "start", *self._arguments()],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # only the launcher gets the terminal's Ctrl+C
            )
        self.pid = self._child.pid
        try:
            self._wait_for_start(address_file, output)
        except ClusterError:
            self._child.kill()
            self._child.wait()
            if not self.address:  # otherwise there are engines of an earlier node
                self.pid = 0
            raise
        self.address = address_file.read_text().strip()
        self._record.write_bytes(msgspec.json.encode(NodeRecord(self.pid, self.address)))

    def _arguments(self) -> list[str]:
        settings = self._settings
        if settings.address == AUTO:
            port = self.address.rpartition(":")[2] or self._settings.port  # a restarted head keeps its port
            role = ["--head", "--no-monitor", f"--port={port}", "--include-dashboard=false"]
        else:
            role = [f"--address={self._head}"]
        given = {"num-cpus": settings.num_cpus, "num-gpus": settings.num_gpus}
        return [
            *role,
            f"--node-ip-address={settings.bind}",
            f"--temp-dir={self._ray_folder}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--include-log-monitor=false",
            "--disable-usage-stats",
            "--block",
            *(f"--{name}={value}" for name, value in given.items() if value is not None),
        ]

    def _wait_for_start(self, address_file: Path, output: Path) -> None:
        assert self._child is not None
        end_s = time.monotonic() + START_TIMEOUT_S
        while not (address_file.exists() and address_file.read_text().strip()):
            code = self._child.poll()  # before its output is read, which is complete if it has ended
            said = output.read_bytes()[-_LAST_BYTES:].decode(errors="replace")
            if "InvalidAuthToken" in said:
                raise ClusterError(
                    f"the Ray at {self._settings.address} has another token: copy the secrets folder of its first "
                    f"machine to '{self.environment[SECRETS_VARIABLE]}'"
                )
            if code is not None:
                raise ClusterError(f"Ray's node did not start (exit code {code}):\n{said.strip()}")
            if time.monotonic() > end_s:
                raise ClusterError(f"Ray's node did not start within {START_TIMEOUT_S:g} s:\n{said.strip()}")
            time.sleep(_POLL_S)

    def _wait_for_end(self, timeout_s: float) -> None:
        if self._child is not None:
            try:
                self._child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
            return
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            if not wait_readable(descriptor, timeout_s):
                os.kill(self.pid, signal.SIGKILL)
            os.close(descriptor)


def _is_node(pid: int) -> bool:
    try:
        return _PROGRAM.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def require_ray() -> None:
    """Raises ClusterError that names the command to install Ray."""
    if find_spec("ray") is None:
        raise ClusterError("--cluster needs Ray, which is not installed: pip install 'llmbackend[cluster]'")
