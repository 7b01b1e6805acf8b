"""The ports of a server, bound before anything is loaded, to detect conflicts with other processes early.

Used by the server process and its frontends. Independent of protocols. Invariants: a claimed port is bound but does not
listen, so clients and other servers are refused; if one port cannot be claimed, none stays bound.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Final

UNIX: Final = "unix:"
"""Prefix of an address that is the path of a Unix socket."""


@dataclass(frozen=True)
class Endpoint:
    """Where one protocol listens."""

    address: str
    port: int
    """0: any free one."""
    enabled: bool = True
    reuse_port: bool = False
    """Whether other servers that also allow it may listen on the port."""

    @property
    def is_unix(self) -> bool:
        return self.enabled and self.address.startswith(UNIX)

    @property
    def address_or_none(self) -> str | None:
        return self.address if self.enabled else None


def in_url(address: str) -> str:
    """`address` as the host of a URL."""
    return f"[{address}]" if ":" in address and not address.startswith(UNIX) else address


def check_port_collision(endpoints: Mapping[str, Endpoint]) -> None:
    """Raises ValueError with Triton's text, naming the protocols. Port 0 never collides. Source: CheckPortCollision in
    Triton's command_line_parser."""
    used = [(name, endpoint) for name, endpoint in endpoints.items() if endpoint.enabled and endpoint.port]
    for (one, first), (other, second) in combinations(used, 2):
        if (first.address, first.port) == (second.address, second.port):
            raise ValueError(
                f"The server cannot listen to {one} requests and {other} requests at the same address and port "
                f"{first.address}:{first.port}"
            )


_LISTENS: Final = "0A"
_MAX_COMMAND_CHARACTERS: Final = 120


def holder_of(port: int) -> str:
    """`process 12 (its command)` of each process that listens on the port, on any address; "" = unknown."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    found = [_described(process) for process in Path("/proc").glob("[0-9]*") if sockets and _has(process, sockets)]
    return " and ".join(sorted(found))


def _inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for _, local, _, state, *rest in map(str.split, rows):
            if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                yield rest[5]


def _has(process: Path, sockets: set[str]) -> bool:
    try:
        return any(os.readlink(descriptor) in sockets for descriptor in (process / "fd").iterdir())
    except OSError:  # it has ended, or belongs to another user
        return False


def _described(process: Path) -> str:
    try:
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = ""
    return f"process {process.name} ({command[:_MAX_COMMAND_CHARACTERS]})" if command else f"process {process.name}"


class PortTakenError(OSError):
    """Names the process that has the port, if known. service: Triton's name for the endpoint that needs it."""

    def __init__(self, error: OSError, service: str, endpoint: Endpoint) -> None:
        holder = holder_of(endpoint.port)
        super().__init__(error.errno, f"{error.strerror}{f', held by {holder}' if holder else ''}")
        self.service = service
        self.socket = f"{endpoint.address}:{endpoint.port}"


@dataclass(frozen=True, slots=True)
class ClaimedPorts:
    """Bound sockets; None for disabled endpoints."""

    http: socket.socket | None
    metrics: socket.socket | None
    grpc: socket.socket | None
    """None also for a free port of a gRPC server in this process, which binds by itself."""

    @classmethod
    def claim(cls, *, http: Endpoint, metrics: Endpoint, grpc: Endpoint, for_processes: bool = False) -> ClaimedPorts:
        """for_processes: whether the server's frontend processes listen on the HTTP and gRPC ports.

        Raises PortTakenError for a port in use, OSError for other failures; then no port is kept."""
        claims: dict[str, socket.socket | None] = {}
        try:
            for service, endpoint in (("GRPC", grpc), ("HTTP", http), ("Metrics", metrics)):  # in Triton's order
                is_free_grpc = service == "GRPC" and not endpoint.port and not for_processes
                is_shared = for_processes and service != "Metrics"
                claims[service] = _claimed_as(endpoint, is_shared) if endpoint.enabled and not is_free_grpc else None
        except OSError as error:
            _close(claims.values())
            raise PortTakenError(error, service, endpoint) if error.errno == errno.EADDRINUSE else error from None
        return cls(claims["HTTP"], claims["Metrics"], claims["GRPC"])

    def close(self) -> None:
        """Releases the ports. Idempotent."""
        _close((self.http, self.metrics, self.grpc))


def port_of(claim: socket.socket | None) -> int | None:
    return None if claim is None else int(claim.getsockname()[1])


def _claimed_as(endpoint: Endpoint, for_processes: bool) -> socket.socket:
    """If frontend processes will listen, reserves the port for this server without taking their connections."""
    if not for_processes:
        return _claimed(endpoint.address, endpoint.port, endpoint.reuse_port)
    if endpoint.port and not endpoint.reuse_port:
        # A shared claim (SO_REUSEPORT) would succeed even if another server's processes listen.
        _claimed(endpoint.address, endpoint.port, False).close()
    return _claimed(endpoint.address, endpoint.port, True)


def _claimed(host: str, port: int, reuse_port: bool) -> socket.socket:
    if host.startswith(UNIX):
        return _claimed_path(Path(host.removeprefix(UNIX)))
    claim = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if claim.family == socket.AF_INET6:
            claim.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))  # ::, as in vLLM: IPv4 too
        claim.bind((host, port))
    except OSError as error:
        claim.close()
        raise OSError(error.errno, f"{error.strerror or error}: {host}:{port}") from None
    return claim


def _claimed_path(path: Path) -> socket.socket:
    """Replaces a socket file on which no server listens."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _is_listening(path):
            path.unlink()
        claim.bind(str(path))
    except OSError as error:
        claim.close()
        raise OSError(error.errno, f"{error.strerror or error}: {path}") from None
    return claim


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(str(path)) == 0


def _close(claims: Iterable[socket.socket | None]) -> None:
    for claim in claims:
        if claim is not None:
            claim.close()
