"""Host policies: the cores and the NUMA node to which an instance's threads and process are bound.

Used by the host, which reads them from --host-policy, and by fork servers, whose children bind themselves. Invariant:
`bind` also applies to everything that the calling thread starts later; a policy that cannot be applied raises OSError.
Source: Triton's --host-policy (`numa-node`, `cpu-cores`) and the thread settings of its core.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

NUMA_NODE: Final = "numa-node"
CPU_CORES: Final = "cpu-cores"
_NODES: Final = Path("/sys/devices/system/node")
_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
"""Number of the system call, for which the C library has no function."""
_MPOL_DEFAULT, _MPOL_BIND = 0, 2
_MASK_BITS: Final = 1024
_UNCHANGED: Final = -1
_ANY_NODE: Final = -2


class HostPolicy(NamedTuple):
    """The binding of a thread or process.

    cores      empty = unchanged
    numa_node  node for memory; _ANY_NODE = chosen by the kernel, _UNCHANGED = that of the starting thread
    """

    cores: tuple[int, ...] = ()
    numa_node: int = _UNCHANGED

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> HostPolicy:
        """Resources without a setting are unbound, even if the starting process is bound. Raises ValueError that names
        the setting, its value and what was expected."""
        for name in settings:
            if name not in (NUMA_NODE, CPU_CORES):
                raise ValueError(f"setting '{name}' is unknown, expected {NUMA_NODE} or {CPU_CORES}")
        cores = _cores(settings[CPU_CORES]) if CPU_CORES in settings else _host_cores()
        return cls(tuple(sorted(cores)), _node(settings[NUMA_NODE]) if NUMA_NODE in settings else _ANY_NODE)

    @classmethod
    def decode(cls, text: str) -> HostPolicy:
        cores, _, node = text.partition(";")
        return cls(tuple(map(int, cores.split(","))) if cores else (), int(node))

    def encode(self) -> str:
        return f"{','.join(map(str, self.cores))};{self.numa_node}"

    def bind(self) -> None:
        """Binds the calling thread and everything that it starts later. Raises OSError."""
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        if self.numa_node >= 0:
            _set_memory_policy(_MPOL_BIND, self.numa_node)
        elif self.numa_node == _ANY_NODE:
            with contextlib.suppress(OSError):  # if it cannot be set, it was never set
                _set_memory_policy(_MPOL_DEFAULT)

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Binds the calling thread for the duration of the context. Raises OSError."""
        before = os.sched_getaffinity(0)
        try:
            self.bind()
            yield
        finally:
            if self.cores:
                os.sched_setaffinity(0, before)
            if self.numa_node >= 0:
                _set_memory_policy(_MPOL_DEFAULT)


NO_POLICY: Final = HostPolicy()


def policy_of(policies: Mapping[str, HostPolicy], name: str) -> HostPolicy:
    """A name without a policy is unbound; if there are no policies, nothing is changed."""
    if not policies:
        return NO_POLICY
    return policies.get(name) or HostPolicy.of({})


def _host_cores() -> set[int]:
    """The cores of the main thread, which no policy binds."""
    return os.sched_getaffinity(os.getpid())


def _cores(text: str) -> set[int]:
    """Parses `0-3,8-11`. Raises ValueError."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not (dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last) < _MASK_BITS):
            lower_upper = "'<lower_cpu_core_id>-<upper_cpu_core_id>'"
            raise ValueError(f"host policy setting 'cpu-cores' format is {lower_upper}. Got {part!a}")
        cores.update(range(int(first), int(last) + 1))
    if cores - (usable := _host_cores()):
        raise ValueError(
            f"setting 'cpu-cores' is '{text}', expected cores that this process may use: {_ranges(usable)}"
        )
    return cores


def _node(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"setting 'numa-node' is {text!a}, expected the number of a node")
    if not (_NODES / f"node{int(text)}").is_dir():
        nodes = ", ".join(sorted(path.name.removeprefix("node") for path in _NODES.glob("node[0-9]*")))
        raise ValueError(f"setting 'numa-node' is {text}, expected a node of this machine: {nodes or 'it has none'}")
    return int(text)


def _ranges(numbers: Iterable[int]) -> str:
    """Formats as `cpu-cores`: `0-3,8-8`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" for first, last in runs)


def _set_memory_policy(mode: int, node: int = -1) -> None:
    """For the calling thread and the threads that it starts. Raises OSError."""
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None:
        raise OSError(f"setting 'numa-node' has no effect on processors of the kind {platform.machine()}")
    mask = (ctypes.c_uint64 * (_MASK_BITS // 64))()
    if node >= 0:
        mask[node // 64] = 1 << node % 64
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(call, mode, mask, _MASK_BITS + 1) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Unable to set NUMA memory policy: {os.strerror(number)}")
