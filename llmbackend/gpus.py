"""Which NVIDIA GPUs this process may use, asked of the driver's management library (NVML).

For: the host, which turns instance groups into instances, and the adapter, which gives engines their devices. Does not
know: torch, models. Why NVML, through ctypes: importing torch costs the host seconds, and initialising CUDA costs it
hundreds of megabytes and a context on every GPU; NVML comes with every driver and does neither. Invariants: ids are
CUDA's, 0 up to one less than there are visible to this process (CUDA_VISIBLE_DEVICES); a host without a driver, or with
one that does not answer, has none, and nothing is raised.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping, Sequence
from functools import cache

log = logging.getLogger(__name__)

STAND_IN = "LLMBACKEND_GPUS"
"""Environment variable: ids to take for this host's GPUs ("0,1"; "" = none) without asking the driver. For tests."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
MIN_COMPUTE_CAPABILITY = 6.0
_LIBRARY = "libnvidia-ml.so.1"
_UUID_BYTES = 96


def supported_gpus(min_compute_capability: float = MIN_COMPUTE_CAPABILITY) -> tuple[int, ...]:
    """Ids of the visible GPUs that have at least this CUDA compute capability, ascending.

    Raises ValueError when STAND_IN holds anything but ids.
    """
    stand_in = os.environ.get(STAND_IN)
    if stand_in is not None:
        return _parse(stand_in)
    uuids, capabilities = zip(*_devices(), strict=True) if _devices() else ((), ())
    visible = visible_places(uuids, os.environ)
    return tuple(i for i, place in enumerate(visible) if capabilities[place] >= min_compute_capability)


def visible_places(uuids: Sequence[str], environment: Mapping[str, str]) -> list[int]:
    """Which of the driver's GPUs CUDA shows, in its order. As CUDA does, it stops at the first name that is none."""
    wanted = environment.get(VISIBLE_DEVICES)
    if wanted is None:
        return list(range(len(uuids)))
    places: list[int] = []
    for name in (part.strip() for part in wanted.split(",")):
        found = [i for i, uuid in enumerate(uuids) if name == str(i) or (not name.isdigit() and _names(name, uuid))]
        if len(found) != 1 or found[0] in places:
            break
        places += found
    return places


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
    """A GPU that gives no answer has capability 0, so that the others keep their ids."""
    handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
    major, minor = ctypes.c_int(), ctypes.c_int()
    failed = (
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        or nvml.nvmlDeviceGetUUID(handle, uuid, _UUID_BYTES)
        or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    )
    return ("", 0.0) if failed else (uuid.value.decode("ascii", "replace"), major.value + minor.value / 10)
