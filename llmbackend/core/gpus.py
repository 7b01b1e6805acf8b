"""The NVIDIA GPUs that this process may use, from the driver's management library (NVML).

For: the host, which places instances, and the adapter, which gives engines their devices. Does not know: torch, whose
import takes seconds, and CUDA, whose initialisation takes memory on every GPU. Invariants: ids are CUDA's, counted from
0 over the visible GPUs; a host whose driver is missing or does not answer has no GPUs.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from .errors import invalid_argument

log = logging.getLogger(__name__)

STAND_IN = "LLMBACKEND_GPUS"
"""Environment variable, for tests: ids of this host's GPUs ("0,1"; "" = none), used instead of asking the driver."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
MIN_COMPUTE_CAPABILITY = 6.0
_LIBRARY = "libnvidia-ml.so.1"
_UUID_BYTES = 96


@dataclass(frozen=True, slots=True)
class HostGpus:
    """The GPUs that instances may be placed on."""

    ids: tuple[int, ...]
    """CUDA's ids of the visible GPUs with at least `min_compute_capability`, ascending."""
    min_compute_capability: float

    @classmethod
    def find(cls, settings: Mapping[str, Mapping[str, str]]) -> HostGpus:
        """settings: ServerOptions.backend_config. Raises TritonError INVALID_ARG for a compute capability that is not a
        number."""
        minimum = settings.get("", {}).get("min-compute-capability", str(MIN_COMPUTE_CAPABILITY))
        try:
            return cls(supported_gpus(float(minimum)), float(minimum))
        except ValueError as error:
            raise invalid_argument(f"the GPUs of this host cannot be told: {error}") from None


def supported_gpus(min_compute_capability: float = MIN_COMPUTE_CAPABILITY) -> tuple[int, ...]:
    """Ids of the visible GPUs that have at least this CUDA compute capability, ascending.

    Raises ValueError when the variable STAND_IN does not hold ids.
    """
    stand_in = os.environ.get(STAND_IN)
    if stand_in is not None:
        return _parse(stand_in)
    uuids, capabilities = zip(*_devices(), strict=True) if _devices() else ((), ())
    visible = visible_gpu_indexes(uuids, os.environ)
    return tuple(i for i, index in enumerate(visible) if capabilities[index] >= min_compute_capability)


def visible_gpu_indexes(uuids: Sequence[str], environment: Mapping[str, str]) -> list[int]:
    """Indexes of the driver's GPUs that CUDA shows, in CUDA's order. As in CUDA, the first name that matches no GPU, or
    one a second time, ends the list."""
    wanted = environment.get(VISIBLE_DEVICES)
    if wanted is None:
        return list(range(len(uuids)))
    indexes: list[int] = []
    for name in (part.strip() for part in wanted.split(",")):
        found = [i for i, uuid in enumerate(uuids) if name == str(i) or (not name.isdigit() and _names(name, uuid))]
        if len(found) != 1 or found[0] in indexes:
            break
        indexes += found
    return indexes


def _names(name: str, uuid: str) -> bool:
    return name.startswith("GPU-") and uuid.startswith(name)


def _parse(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise ValueError(f"environment variable {STAND_IN} is '{text}', expected GPU ids with commas") from None


@cache
def _devices() -> tuple[tuple[str, float], ...]:
    """UUID and compute capability of each GPU of the machine, in the driver's order."""
    try:
        nvml = ctypes.CDLL(_LIBRARY)
    except OSError:
        return ()
    if nvml.nvmlInit_v2():
        log.warning("the NVIDIA driver does not answer: this host is taken to have no GPU")
        return ()
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return tuple(_device(nvml, index) for index in range(count.value))
    finally:
        nvml.nvmlShutdown()


def _device(nvml: ctypes.CDLL, index: int) -> tuple[str, float]:
    """A GPU that does not answer has compute capability 0, so that the others keep their ids."""
    handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
    major, minor = ctypes.c_int(), ctypes.c_int()
    failed = (
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        or nvml.nvmlDeviceGetUUID(handle, uuid, _UUID_BYTES)
        or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    )
    return ("", 0.0) if failed else (uuid.value.decode("ascii", "replace"), major.value + minor.value / 10)
